"""Downloads that resume where they stopped and are checked before they count."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import requests
import tenacity
import urllib3

from dlscale.core import files, urls
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


def download(
    url: str,
    destination: Path,
    *,
    sha256: str | None = None,
    attempts: int = 5,
    timeout_s: float = 30.0,
    backoff_s: float = 1.0,
    progress: Callable[[int, int | None], None] = lambda done, total: None,
) -> str:
    """Fetch `url` into `destination`, which appears whole and checked or not at all.

    What has arrived is kept beside the destination, in `.NAME.download`, so that a further attempt,
    or a further call after this process was killed, asks only for the rest. A remote file that has
    changed meanwhile is fetched afresh. A second process with the same destination waits for the first.

    Parameters
    ----------
    url
        An http or https address; credentials and the query in it show up in no message and no log.
    destination
        The file to write; its folder is made. A file already there with the digest `sha256` is
        left as it is, without a request; any other is replaced once the new content was checked.
    sha256
        The expected SHA-256 in 64 hexadecimal digits. Without it only the length is checked,
        and only where the server tells one.
    attempts, timeout_s
        Requests made at most, and the seconds without a byte after which one counts as stalled. A wrong digest earns
        one more round from the first byte on.
    backoff_s
        Seconds to wait after the first failed attempt; doubled each time, plus up to as many seconds
        at random. A longer `Retry-After` of the server is honoured. No wait is longer than one minute.
    progress
        Called with the bytes that are there and those of the whole file (None: unknown), as they arrive.

    Returns
    -------
    str
        The SHA-256 of the content.

    Raises
    ------
    UserError
        The address or digest is malformed, the server refuses or keeps failing, the content has
        another digest, or the destination cannot be written.
    """
    if sha256 is not None and not re.fullmatch("[0-9a-fA-F]{64}", sha256):
        raise UserError(f"{urls.hidden(url)}: its sha256 is '{sha256}', expected 64 hexadecimal digits; correct it")
    expected = sha256.lower() if sha256 else None
    transfer = _Transfer(url, destination, expected is not None, timeout_s, progress)
    try:
        if destination.is_dir():
            raise UserError(f"{destination}: is a folder, expected the name of the file to write")
        # Before the lock too: a good file in a folder that only others may write to is fine.
        if expected and _has(destination, expected):
            return expected
        destination.parent.mkdir(parents=True, exist_ok=True)
        with _alone(destination), _unlogged():
            if expected and _has(destination, expected):
                return expected
            actual = transfer.run(attempts, backoff_s)
            if expected not in (None, actual):
                _log.warning("%s: has SHA-256 %s, expected %s; once more from its start", transfer, actual, expected)
                transfer.discard()
                actual = transfer.run(attempts, backoff_s)
            if expected not in (None, actual):
                transfer.discard()
                raise UserError(
                    f"{transfer}: the content has SHA-256 {actual}, expected {expected}, twice in a row; "
                    "the remote file has changed or the expected digest is wrong: correct one of them"
                )
            transfer.finish()
            return actual
    except OSError as error:
        known = files.explained(error, destination)
        if isinstance(known, UserError):
            raise known from error
        raise UserError(
            f"{destination}: the download cannot be stored here ({error.strerror or error}); "
            "choose another place or clear this one"
        ) from error


def _has(path: Path, digest: str) -> bool:
    return path.is_file() and files.sha256(path) == digest


@contextlib.contextmanager
def _alone(destination: Path) -> Iterator[None]:
    """Keep other processes and threads waiting meanwhile; the lock dies with its owner."""
    path = destination.with_name(f".{destination.name}.download.lock")
    while True:
        with open(path, "ab", opener=files.no_link) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _log.warning("%s: another process is downloading it; waiting for that one", destination)
                fcntl.flock(file, fcntl.LOCK_EX)
            # An owner removes its lock file as it leaves: only a lock on the file now at this path counts.
            if _is_at(file.fileno(), path):
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Mute the loggers of urllib3 that quote whole addresses, secrets included."""
    loggers = [logging.getLogger(f"urllib3.{name}") for name in ("connectionpool", "util.retry")]
    mute = logging.Filter("dlscale")  # lets no other name pass
    for logger in loggers:
        logger.addFilter(mute)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(mute)


class _TransientError(Exception):
    """A failure that another attempt may overcome; `after` is the server's Retry-After in seconds."""

    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


@dataclass(frozen=True)
class _Version:
    """What tells one state of a remote file from another; None where the server does not say."""

    address: str  # a digest, since the query may be secret
    etag: str | None
    modified: str | None
    length: int | None  # bytes

    @property
    def validator(self) -> str | None:
        """The value of If-Range, which takes no weak ETag."""
        return self.etag if self.etag and not self.etag.startswith("W/") else self.modified

    def differs(self, other: _Version) -> bool:
        both = zip(astuple(self), astuple(other), strict=True)
        return any(one != two for one, two in both if one is not None and two is not None)


@dataclass
class _Transfer:
    """One address on its way into one partial file; as text, the address without secrets.

    Beside the bytes that have arrived there is a note on the remote version that they belong to.
    """

    url: str
    destination: Path
    verified: bool  # whether a digest will tell that the content is right
    timeout_s: float
    progress: Callable[[int, int | None], None]

    def __post_init__(self) -> None:
        parts = urls.split(self.url)
        if parts is None or parts.scheme not in ("http", "https"):
            raise UserError(f"{self}: not an address to download from, expected http(s)://HOST/PATH")
        self._address = hashlib.sha256(urls.anonymous(parts).geturl().encode()).hexdigest()
        self._partial = self.destination.with_name(f".{self.destination.name}.download")
        self._note = self.destination.with_name(f".{self.destination.name}.download.json")

    def __str__(self) -> str:
        return urls.hidden(self.url)

    def size(self) -> int:
        """Return how many bytes have arrived."""
        return self._partial.stat().st_size if self._partial.exists() else 0

    def discard(self) -> None:
        self._partial.unlink(missing_ok=True)
        self._note.unlink(missing_ok=True)

    def finish(self) -> None:
        """Put the complete file into its place."""
        with open(self._partial, "rb", opener=files.no_link) as file:
            os.fsync(file.fileno())
        self._partial.replace(self.destination)
        self._note.unlink(missing_ok=True)

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
            size = self.size()
            kept = f", which goes on from the {size} bytes in {self._partial}" if size else ""
            raise UserError(
                f"{self}: not downloaded, attempt {attempts} of {attempts} ended with: {error}; "
                f"check the network and run it again later{kept}"
            ) from None
        return files.sha256(self._partial)

    def _attempt(self) -> None:
        """Ask for what is missing and append it, or overwrite what is there where it does not fit."""
        kept: _Version | None = None
        offset = self.size()
        with contextlib.suppress(UserError, TypeError):  # no note, or not one of ours: nothing can be continued
            kept = _Version(**files.read_json(self._note))
        # Without a validator only the digest can tell whether two halves belong together.
        if kept is None or kept.address != self._address or not (kept.validator or self.verified):
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
                # In this order, a process killed in between leaves no old bytes under a new note.
                with open(self._partial, "wb", opener=files.no_link):
                    files.write_json(self._note, asdict(self._version(response, length)))
                self._append(response, 0, length)
            elif response.status_code in (206, 416) and kept and offset:
                self._resume(response, kept, offset)
            else:
                self._refuse(response)

    def _get(self, headers: dict[str, str]) -> requests.Response:
        # The texts of these exceptions quote the whole address, so neither they nor a chain of them are shown.
        try:
            return requests.get(self.url, headers=headers, stream=True, timeout=self.timeout_s)
        except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as error:
            raise _TransientError(self._cause(error)) from None
        except (OSError, ValueError, urllib3.exceptions.HTTPError) as error:  # other ones of requests included
            raise UserError(
                f"{self}: cannot be requested ({type(error).__name__}); check the address, where it redirects to, "
                "and the settings of proxy and certificates"
            ) from None

    def _version(self, response: requests.Response, length: int | None) -> _Version:
        return _Version(self._address, response.headers.get("ETag"), response.headers.get("Last-Modified"), length)

    def _resume(self, response: requests.Response, kept: _Version, offset: int) -> None:
        """Append a partial answer if it is the next piece of the same version, else start afresh."""
        span = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        start, total = (int(n) if n else None for n in span.group("start", "total")) if span else (None, None)
        length = kept.length if total is None else total
        same = length is not None and not kept.differs(self._version(response, total))
        if same and response.status_code == 206 and start == offset:
            self._append(response, offset, length)
        elif not (same and response.status_code == 416 and length == offset):  # nothing lies beyond it: it is complete
            self.discard()
            raise _TransientError("what the server has does not continue what was kept, which is now discarded")

    def _append(self, response: requests.Response, done: int, length: int | None) -> None:
        with open(self._partial, "ab", opener=files.no_link) as file:
            self.progress(done, length)
            for chunk in self._body(response):
                file.write(chunk)
                done += len(chunk)
                self.progress(done, length)
        if length is not None and done < length:
            raise _TransientError(f"only {done} of {length} bytes arrived")
        if length is not None and done > length:
            self.discard()
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
            return f"no data for {self.timeout_s:g} s"
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
