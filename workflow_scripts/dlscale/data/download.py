"""Downloads that resume where they stopped and are checked before they count."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from dlscale.core import files
from dlscale.core.errors import UserError
from dlscale.data.transfer import Partial, Transfer, redacted

_log = logging.getLogger(__name__)


def download(
    url: str,
    destination: Path,
    *,
    sha256: str | None = None,
    attempts: int = 5,
    timeout_s: float = 30.0,
    backoff_s: float = 1.0,
    progress: Callable[[int, int | None], None] | None = None,
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
    attempts
        Requests made at most. A wrong digest earns one more round from the first byte on.
    timeout_s
        Seconds without a byte after which an attempt counts as stalled.
    backoff_s
        Seconds to wait after the first failed attempt; doubled each time, plus up to as many seconds
        at random. A longer `Retry-After` of the server is honoured. No wait is longer than one minute.
    progress
        Called with the bytes that are there and those of the whole file (None: unknown), as they arrive.

    Returns
    -------
    str
        The SHA-256 of the content, in 64 hexadecimal digits.

    Raises
    ------
    UserError
        The address or digest is malformed, the server refuses or keeps failing, the content has
        another digest, or the destination cannot be written.
    """
    if sha256 is not None and not re.fullmatch("[0-9a-fA-F]{64}", sha256):
        raise UserError(f"{redacted(url)}: its sha256 is '{sha256}', expected 64 hexadecimal digits; correct it")
    expected = sha256.lower() if sha256 else None
    transfer = Transfer(url, Partial(destination), expected is not None, timeout_s, progress)
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
                transfer.partial.discard()
                actual = transfer.run(attempts, backoff_s)
            if expected not in (None, actual):
                transfer.partial.discard()
                raise UserError(
                    f"{transfer}: the content has SHA-256 {actual}, expected {expected}, twice in a row; "
                    "the remote file has changed or the expected digest is wrong: correct one of them"
                )
            transfer.partial.become(destination)
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
        with path.open("ab") as file:
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

    def mute(record: logging.LogRecord) -> bool:
        return False

    for logger in loggers:
        logger.addFilter(mute)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(mute)
