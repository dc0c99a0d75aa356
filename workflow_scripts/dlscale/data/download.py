"""Downloads that resume where they stopped and are checked before they count."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

import requests
import tenacity
import urllib3

from dlscale.core import files, urls
from dlscale.core.errors import UserError
from dlscale.core.process import only_writer

_BUFFER = 2**20  # bytes in memory at a time
_LONGEST_WAIT_S = 60.0  # between two attempts
_ADVICE = {
    401: "it wants a login; put the credentials into ~/.netrc",
    403: "access is forbidden; check the credentials and that its terms of use were accepted",
}

_log = logging.getLogger(__name__)


class _TransientError(Exception):
    """A failure that another attempt may overcome."""


def download(
    url: str,
    destination: Path,
    *,
    sha256: str | None = None,
    attempts: int = 8,
    timeout_s: float = 30.0,
    backoff_s: float = 1.0,
    progress: Callable[[int, int | None], None] = lambda done, total: None,
) -> str:
    """Fetch `url` into `destination`, which appears whole and checked or not at all; return its SHA-256.

    The bytes that have arrived are kept beside the destination, in `.NAME.download`, so that a further attempt, or a
    further call after this process was killed, asks only for the rest, while the remote file stays the same.

    Parameters
    ----------
    url
        An http or https address; no message and no log shows the credentials and the query in it.
    sha256
        The expected SHA-256. A file that is there with this digest stays, without a request. Without one only the
        length is checked, and only where the server tells one.
    attempts, timeout_s, backoff_s
        Requests made at most; seconds without a byte after which one counts as stalled; seconds to wait at most after
        the first failure, doubled each time up to one minute.
    progress
        Called with the bytes that are there and those of the whole file (None: unknown), as they arrive.

    Raises
    ------
    UserError
        The address is none, the server refuses or keeps failing, the content has another digest, or another process
        is at work on the same destination.
    """
    parts, expected = urls.split(url), sha256 and sha256.lower()
    if parts is None or parts.scheme not in ("http", "https"):
        raise UserError(f"{urls.hidden(url)}: not an address to download from, expected http(s)://HOST/PATH")
    if expected and destination.is_file() and files.sha256(destination) == expected:
        return expected
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # its other words quote whole addresses, secrets included
    transfer = _Transfer(url, destination, expected, timeout_s, progress)
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(_TransientError),
        stop=tenacity.stop_after_attempt(attempts),
        wait=tenacity.wait_random_exponential(multiplier=backoff_s, max=_LONGEST_WAIT_S),
        before_sleep=tenacity.before_sleep_log(_log, logging.WARNING),
        reraise=True,
    )
    with only_writer(destination.parent, f".{destination.name}.lock"):
        try:
            return retrying(transfer.attempt)
        except _TransientError as error:
            raise UserError(
                f"{transfer}: not downloaded, attempt {attempts} of {attempts} ended with: {error}; check the network "
                "and run it again later: it goes on from what has arrived"
            ) from None


class _Transfer:
    """One address on its way into one partial file; as text, the address without secrets.

    A note beside the partial file names the remote version (ETag or Last-Modified) and the address of its bytes. Bytes
    without a note, or of another version, are fetched anew.
    """

    def __init__(
        self,
        url: str,
        destination: Path,
        expected: str | None,
        timeout_s: float,
        progress: Callable[[int, int | None], None],
    ) -> None:
        self._url, self._destination, self._expected = url, destination, expected
        self._timeout_s, self._progress = timeout_s, progress
        self._partial = destination.with_name(f".{destination.name}.download")
        self._note = destination.with_name(f".{destination.name}.download.json")

    def __str__(self) -> str:
        return urls.hidden(self._url)

    def attempt(self) -> str:
        """Ask for what is missing; put the file into its place once it is complete and right."""
        offset, version = self._kept()
        # Lengths and ranges count the file's own bytes, so no compression on the way.
        headers = {"Accept-Encoding": "identity"}
        if offset:
            headers |= {"Range": f"bytes={offset}-", "If-Range": version}
        with self._get(headers) as response:
            status, span = response.status_code, response.headers.get("Content-Range", "")
            if status == 200:
                offset = 0
                self._discard()
                files.write_json(self._note, {"address": str(self), "version": _version(response)})
                self._append(response, 0)
            elif status == 206 and span.startswith(f"bytes {offset}-") and _version(response) == version:
                self._append(response, offset)
            elif status in (206, 416) and offset and span != f"bytes */{offset}":  # which says: complete already
                self._discard()
                raise _TransientError("the answer does not continue the bytes kept, which are now discarded")
            elif status != 416 or not offset:
                self._refuse(response)
        found = files.sha256(self._partial)
        if self._expected not in (None, found):
            self._discard()
            differs = f"the content has SHA-256 {found}, expected {self._expected}"
            if offset:
                raise _TransientError(f"{differs}; it came in pieces, and once more from its start")
            raise UserError(f"{self}: {differs}; the file or the expected digest changed: correct one of them")
        self._partial.replace(self._destination)
        self._note.unlink(missing_ok=True)
        return found

    def _kept(self) -> tuple[int, str]:
        """Return how many bytes are there that can be continued, and of which version they are."""
        with contextlib.suppress(UserError, OSError, KeyError, TypeError):  # no note, or none of ours
            note = files.read_json(self._note)
            if note["address"] == str(self) and note["version"]:
                return self._partial.stat().st_size, note["version"]
        return 0, ""

    def _discard(self) -> None:
        self._note.unlink(missing_ok=True)
        self._partial.unlink(missing_ok=True)

    def _get(self, headers: dict[str, str]) -> requests.Response:
        # The texts of these exceptions quote the whole address, so neither they nor a chain of them are shown.
        try:
            return requests.get(self._url, headers=headers, stream=True, timeout=self._timeout_s)
        except (requests.ConnectionError, requests.Timeout) as error:
            raise self._broken(error) from None
        except (OSError, ValueError, urllib3.exceptions.HTTPError) as error:  # other ones of requests included
            raise UserError(
                f"{self}: cannot be requested ({type(error).__name__}); check the address, where it redirects to, "
                "and the settings of proxy and certificates"
            ) from None

    def _append(self, response: requests.Response, done: int) -> None:
        left = response.raw.length_remaining
        length = None if left is None else done + left
        with open(self._partial, "ab", opener=files.no_link) as file:
            self._progress(done, length)
            # As the bytes come, not by the full buffer: what arrived before a stall is kept. And never decoded.
            try:
                while chunk := response.raw.read1(_BUFFER, decode_content=False):
                    file.write(chunk)
                    done += len(chunk)
                    self._progress(done, length)
            except urllib3.exceptions.HTTPError as error:
                raise self._broken(error) from None
        span = response.headers.get("Content-Range", "/*")
        if not span.endswith((f"/{done}", "/*")):  # of the whole file's bytes; urllib3 counts those of an answer
            raise _TransientError(f"only {done} bytes have arrived")

    def _broken(self, error: Exception) -> _TransientError:
        if isinstance(error, requests.Timeout | urllib3.exceptions.TimeoutError):
            return _TransientError(f"no data for {self._timeout_s:g} s")
        return _TransientError(f"the connection failed or broke ({type(error).__name__})")

    def _refuse(self, response: requests.Response) -> None:
        status = response.status_code
        if status == 429 or status >= 500:
            raise _TransientError(f"HTTP status {status}")
        advice = _ADVICE.get(status, "check the address")
        raise UserError(f"{self}: the server answers with HTTP status {status}, expected the file; {advice}")


def _version(response: requests.Response) -> str:
    """Return the value of If-Range, which takes no weak ETag; nothing where the server tells none."""
    etag = response.headers.get("ETag", "")
    return etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified", "")
