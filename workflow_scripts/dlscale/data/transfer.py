"""One address on its way into one partial file, resumed where it stopped."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import requests
import tenacity
import urllib3

from dlscale.core import files
from dlscale.core.errors import UserError

_BUFFER = 2**20  # bytes in memory at a time
_LONGEST_WAIT_S = 60.0  # between two attempts, whatever Retry-After asks for
_CONTENT_RANGE = re.compile(r"bytes (?:(?P<start>\d{1,18})-\d{1,18}|\*)/(?:(?P<total>\d{1,18})|\*)")
_ADVICE = {
    401: "it wants a login; put the credentials into ~/.netrc",
    403: "access is forbidden; check the credentials and that its terms of use were accepted",
    404: "there is no such file; check the address",
    410: "the file was removed; look for its new address",
}

_log = logging.getLogger(__name__)


def redacted(url: str) -> str:
    """Return `url` without what may be secret: credentials, the query's content and the fragment.

    Parameters
    ----------
    url
        Any text. One that is not a well-formed address and holds any of `@`, `?`, `#` becomes `***` altogether.
    """
    parts = _split(url)
    if parts is None:
        return "***" if set(url) & set("@?#") else url
    return _anonymous(parts)._replace(query="***" if parts.query else "").geturl()


def _split(url: str) -> SplitResult | None:
    """Return the parts of a well-formed address with a host, else None."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises for what is not a port, such as the start of a password with a slash in it
    except ValueError:
        return None
    return parts if parts.hostname else None


def _anonymous(parts: SplitResult) -> SplitResult:
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment="")


class _TransientError(Exception):
    """A failure that another attempt may overcome; `after` is the server's Retry-After in seconds."""

    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


@dataclass(frozen=True)
class Version:
    """What tells one state of a remote file from another; None where the server does not say."""

    address: str  # a digest, since the query may be secret
    etag: str | None
    modified: str | None
    length: int | None  # bytes

    @property
    def validator(self) -> str | None:
        """The value of If-Range, which takes no weak ETag."""
        return self.etag if self.etag and not self.etag.startswith("W/") else self.modified

    def differs(self, other: Version) -> bool:
        both = zip(astuple(self), astuple(other), strict=True)
        return any(one != two for one, two in both if one is not None and two is not None)


class Partial:
    """The bytes that have arrived, with a note beside them on the remote version that they belong to."""

    def __init__(self, destination: Path) -> None:
        self.path = destination.with_name(f".{destination.name}.download")
        self._note = destination.with_name(f".{destination.name}.download.json")

    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def version(self) -> Version | None:
        try:
            return Version(**files.read_json(self._note))
        except (UserError, TypeError):  # none, or not one of ours: whatever is there cannot be continued
            return None

    def restart(self, version: Version) -> None:
        # In this order, a process killed in between leaves no old bytes under a new note.
        with self.path.open("wb"):
            files.write_json(self._note, asdict(version))

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)
        self._note.unlink(missing_ok=True)

    def become(self, destination: Path) -> None:
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
        self.path.replace(destination)
        self._note.unlink(missing_ok=True)


class Transfer:
    """One address on its way into one partial file; as text, the address without secrets."""

    def __init__(
        self,
        url: str,
        partial: Partial,
        verified: bool,
        timeout_s: float,
        progress: Callable[[int, int | None], None] | None,
    ) -> None:
        parts = _split(url)
        if parts is None or parts.scheme not in ("http", "https"):
            raise UserError(f"{redacted(url)}: not an address to download from, expected http(s)://HOST/PATH")
        self.partial = partial
        self._url = url
        self._address = hashlib.sha256(_anonymous(parts).geturl().encode()).hexdigest()
        self._verified = verified
        self._timeout_s = timeout_s
        self._progress = progress or (lambda done, total: None)

    def __str__(self) -> str:
        return redacted(self._url)

    def run(self, attempts: int, backoff_s: float) -> str:
        """Complete the partial file and return its SHA-256."""
        backoff = tenacity.wait_exponential(multiplier=backoff_s) + tenacity.wait_random(0, backoff_s)

        def wait(state: tenacity.RetryCallState) -> float:
            error = state.outcome and state.outcome.exception()
            asked = error.after if isinstance(error, _TransientError) else 0.0
            return min(max(backoff(state), asked), _LONGEST_WAIT_S)

        def announce(state: tenacity.RetryCallState) -> None:
            error = state.outcome and state.outcome.exception()
            _log.warning("%s: %s; attempt %d of %d follows", self, error, state.attempt_number + 1, attempts)

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_TransientError),
            stop=tenacity.stop_after_attempt(attempts),
            wait=wait,
            before_sleep=announce,
            reraise=True,
        )
        try:
            retrying(self._attempt)
        except _TransientError as error:
            size = self.partial.size()
            kept = f", which goes on from the {size} bytes in {self.partial.path}" if size else ""
            raise UserError(
                f"{self}: not downloaded, attempt {attempts} of {attempts} ended with: {error}; "
                f"check the network and run it again later{kept}"
            ) from None
        return files.sha256(self.partial.path)

    def _attempt(self) -> None:
        """Ask for what is missing and append it, or overwrite what is there where it does not fit."""
        kept, offset = self.partial.version(), self.partial.size()
        # Without a validator only the digest can tell whether two halves belong together.
        if kept is None or kept.address != self._address or not (kept.validator or self._verified):
            kept, offset = None, 0
        # Lengths and ranges count the file's own bytes, so no compression on the way.
        headers = {"Accept-Encoding": "identity"}
        if kept and offset:
            headers["Range"] = f"bytes={offset}-"
            if kept.validator:
                headers["If-Range"] = kept.validator
        with self._get(headers) as response:
            if response.status_code == 200:
                length = response.raw.length_remaining
                self.partial.restart(self._version(response, length))
                self._append(response, 0, length)
            elif response.status_code in (206, 416) and kept and offset:
                self._resume(response, kept, offset)
            else:
                self._refuse(response)

    def _get(self, headers: dict[str, str]) -> requests.Response:
        # The texts of these exceptions quote the whole address, so neither they nor a chain of them are shown.
        try:
            return requests.get(self._url, headers=headers, stream=True, timeout=self._timeout_s)
        except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as error:
            raise _TransientError(self._cause(error)) from None
        except (OSError, ValueError, urllib3.exceptions.HTTPError) as error:  # other ones of requests included
            raise UserError(
                f"{self}: cannot be requested ({type(error).__name__}); check the address, where it redirects to, "
                "and the settings of proxy and certificates"
            ) from None

    def _version(self, response: requests.Response, length: int | None) -> Version:
        return Version(self._address, response.headers.get("ETag"), response.headers.get("Last-Modified"), length)

    def _resume(self, response: requests.Response, kept: Version, offset: int) -> None:
        """Append a partial answer if it is the next piece of the same version, else start afresh."""
        span = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        start, total = (int(n) if n else None for n in span.group("start", "total")) if span else (None, None)
        length = kept.length if total is None else total
        same = length is not None and not kept.differs(self._version(response, total))
        if same and response.status_code == 206 and start == offset:
            self._append(response, offset, length)
        elif not (same and response.status_code == 416 and length == offset):  # nothing lies beyond it: it is complete
            self.partial.discard()
            raise _TransientError("what the server has does not continue what was kept, which is now discarded")

    def _append(self, response: requests.Response, done: int, length: int | None) -> None:
        with self.partial.path.open("ab") as file:
            self._progress(done, length)
            for chunk in self._body(response):
                file.write(chunk)
                done += len(chunk)
                self._progress(done, length)
        if length is not None and done < length:
            raise _TransientError(f"only {done} of {length} bytes arrived")
        if length is not None and done > length:
            self.partial.discard()
            raise _TransientError(f"{done} bytes arrived instead of {length}; they are discarded")

    def _body(self, response: requests.Response) -> Iterator[bytes]:
        # As the bytes come, not by the full buffer: what arrived before a stall is kept. And never decoded.
        try:
            while chunk := response.raw.read1(_BUFFER, decode_content=False):
                yield chunk
        except urllib3.exceptions.HTTPError as error:
            raise _TransientError(self._cause(error)) from None

    def _cause(self, error: Exception) -> str:
        if isinstance(error, (requests.Timeout, urllib3.exceptions.TimeoutError)):
            return f"no data for {self._timeout_s:g} s"
        link: BaseException | None = error
        while link:
            if isinstance(link, OSError) and link.strerror:
                return link.strerror
            link = link.__cause__ or link.__context__
        return "the connection broke"

    def _refuse(self, response: requests.Response) -> None:
        status = response.status_code
        if status == 429 or status >= 500:
            after = 0.0
            with contextlib.suppress(urllib3.exceptions.HTTPError, ValueError, OverflowError):
                after = urllib3.Retry().get_retry_after(response.raw) or 0.0
            raise _TransientError(f"HTTP status {status}", after)
        advice = _ADVICE.get(status, "check the address")
        raise UserError(f"{self}: the server answers with HTTP status {status}, expected the file; {advice}")
