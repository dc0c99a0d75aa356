"""Stage `acquire`: make one raw file in a dataset's `source/` folder.

The file is simulated, downloaded, or read from a store. Downloads resume where they stopped, if the server allows this.
A downloaded file gets its final name only when it is complete and has the expected digest, if any.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

import requests
import tenacity
import urllib3

from dlscale.core import files, urls
from dlscale.core.errors import UserError, nearest
from dlscale.core.process import only_writer
from dlscale.core.progress import Progress
from dlscale.data import parts, reads
from dlscale.data.kind import file_name, is_url

_log = logging.getLogger(__name__)


def main(args: argparse.Namespace) -> None:
    """Make `args.out`, the raw file `args.file` of the dataset in `args.config`."""
    dataset = reads.load_dataset(args.config)
    raws = parts.raws(dataset)
    if args.file not in raws:
        raise UserError(f"--file {args.file}: no such raw file{nearest(args.file, raws)}; there are: {', '.join(raws)}")
    raw, out, acquirer = raws[args.file], Path(args.out), parts.kind_of(dataset).acquirer(dataset)
    fetched = acquirer is None and is_url(raw.origin)
    with Progress(f"acquiring {raw.name}", None, "bytes" if fetched else "steps") as progress:
        if fetched:
            sha256 = getattr(dataset.source, "sha256", {}).get(file_name(raw.origin))
            digest = download(urls.full_url(raw.origin), out, sha256=sha256, progress=progress.update)
            logging.info("%s: SHA-256 %s, expected %s, from %s", out, digest, sha256, urls.hidden(raw.origin))
        else:
            acquire = parts.needed(dataset, acquirer or "", "acquire")
            with reads.only_named(dataset.kind, [raw.origin, out.parent]):
                acquire(dataset, raw, out, progress.update)


class _TransientError(Exception):
    """A failure after which another attempt may succeed."""


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
    """Download `url` to the file `destination`, which appears atomically; return the file's SHA-256.

    If `sha256` is given, refuse a file with another digest.

    Received bytes stay in `.NAME.download`, so that a later attempt or call requests only the rest. The download begins
    anew if the remote file has changed, or if the server sends neither ETag nor Last-Modified. Messages and logs redact
    the secrets of `url`.

    Parameters
    ----------
    attempts
        Largest number of requests.
    timeout_s
        Time without data after which a request counts as stalled, seconds.
    backoff_s
        Longest wait after the first failure, seconds; doubled after each further failure, up to one minute.
    progress
        Called with the number of bytes received and the size of the file (None: unknown).

    Raises
    ------
    UserError
        The server refuses or keeps failing, the digest differs, or another process is fetching the file.
    """
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # urllib3's warnings quote addresses with secrets
    partial = _Partial(url, destination, timeout_s, progress)
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(_TransientError),
        stop=tenacity.stop_after_attempt(attempts),
        wait=tenacity.wait_random_exponential(multiplier=backoff_s, max=60.0),
        before_sleep=tenacity.before_sleep_log(_log, logging.WARNING),
        reraise=True,
    )
    with only_writer(destination.parent, f".{destination.name}.lock"):
        try:
            retrying(partial.fetch)
        except _TransientError as error:
            raise UserError(
                f"{urls.hidden(url)}: not downloaded, attempt {attempts} of {attempts} failed: {error}; check the "
                "network and run the workflow again later; the download then resumes"
            ) from None
        found = files.sha256(partial.path)
        if sha256 not in (None, found):
            partial.discard()
            raise UserError(
                f"{urls.hidden(url)}: the content has SHA-256 {found}, expected {sha256}; the remote file "
                "has changed, or the expected digest is wrong; correct the address or the digest"
            )
        partial.path.replace(destination)
        partial.discard()
    return found


class _Partial:
    """Received bytes of a file, and a note with the file's address and version (ETag or Last-Modified)."""

    def __init__(
        self, url: str, destination: Path, timeout_s: float, progress: Callable[[int, int | None], None]
    ) -> None:
        self._url, self._timeout_s, self._progress = url, timeout_s, progress
        self.path = destination.with_name(f".{destination.name}.download")
        self._note = destination.with_name(f".{destination.name}.download.json")

    def discard(self) -> None:
        self._note.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def fetch(self) -> None:
        offset, version = self._kept()
        # Lengths and ranges must count the file's bytes, so the server must not compress the response.
        headers = {"Accept-Encoding": "identity"}
        if offset:
            headers |= {"Range": f"bytes={offset}-", "If-Range": version}
        # Exceptions of `requests` quote the full address with its secrets, so their texts are not shown or chained.
        try:
            with requests.get(self._url, headers=headers, stream=True, timeout=self._timeout_s) as response:
                self._take(response, offset, version)
        except (requests.ConnectionError, requests.Timeout, urllib3.exceptions.HTTPError) as error:
            stalled = isinstance(error, requests.Timeout | urllib3.exceptions.TimeoutError)
            what = f"no data for {self._timeout_s:g} s" if stalled else "the connection failed or broke"
            raise _TransientError(f"{what} ({type(error).__name__})") from None
        except (requests.RequestException, ValueError) as error:
            raise UserError(
                f"{urls.hidden(self._url)}: cannot be requested ({type(error).__name__}); check the address, its "
                "redirects, and the settings of proxy and certificates"
            ) from None

    def _kept(self) -> tuple[int, str]:
        with contextlib.suppress(UserError, OSError, KeyError, TypeError):  # the note is missing or invalid
            note = files.read_json(self._note)
            if note["address"] == urls.hidden(self._url) and note["version"]:
                return self.path.stat().st_size, str(note["version"])
        return 0, ""

    def _take(self, response: requests.Response, offset: int, version: str) -> None:
        status, span = response.status_code, response.headers.get("Content-Range", "")
        if status == 200:
            self.discard()
            files.write_json(self._note, {"address": urls.hidden(self._url), "version": _version(response)})
            self._append(response, 0)
        elif status == 206 and span.startswith(f"bytes {offset}-") and _version(response) == version:
            self._append(response, offset)
        elif status == 416 and offset and span == f"bytes */{offset}":
            return  # the file is already complete
        elif status in (206, 416) and offset:
            self.discard()
            raise _TransientError("the response does not continue the bytes received so far, which are now discarded")
        elif status == 429 or status >= 500:
            raise _TransientError(f"HTTP status {status}")
        else:
            raise UserError(
                f"{urls.hidden(self._url)}: the server returned HTTP status {status} instead of the file; check the "
                "address; if the server needs a login, add it to ~/.netrc, and accept the server's terms of use"
            )

    def _append(self, response: requests.Response, done: int) -> None:
        left = response.raw.length_remaining
        length = None if left is None else done + left
        with open(self.path, "ab", opener=files.open_regular) as file:
            self._progress(done, length)
            # read1 returns bytes as they arrive, so bytes before a stall are kept. They are written without decoding.
            while chunk := response.raw.read1(2**20, decode_content=False):
                file.write(chunk)
                done += len(chunk)
                self._progress(done, length)
        span = response.headers.get("Content-Range", "/*")
        if not span.endswith((f"/{done}", "/*")):  # urllib3 checks the response's length, not the file's
            raise _TransientError(f"only {done} bytes have arrived")


def _version(response: requests.Response) -> str:
    """Return the file's version for If-Range: a strong ETag, or else Last-Modified; "" without both."""
    etag = response.headers.get("ETag", "")
    return etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified", "")
