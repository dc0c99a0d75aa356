"""Atomic writes, temporary folders, safe reads, and messages for file errors."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import io
import json
import math
import os
import secrets
import shutil
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dlscale.core.errors import UserError, brief
from dlscale.core.urls import hidden_in

#: Name of this machine.
HOST = socket.gethostname().split(".")[0]
#: Default advice for a file that cannot be read.
TORN = "the file may be incomplete or damaged; fetch or make it again"
#: Seconds by which a new file's modification time may precede `time.time()`, because the kernel's file clock is coarse.
COARSE = 0.02


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` when the block succeeds.

    `path` may be a file or a folder. If the block raises an error, the temporary file or folder is removed and `path`
    stays unchanged. An error with a known cause, such as a full disk, becomes a `UserError` (`translate_error`).
    """
    path = Path(path)
    # The token is needed because processes in different containers may have the same process id.
    stem, owner = f".{path.name[:150]}.{HOST}", f"{os.getpid()}.{secrets.token_hex(4)}"
    temporary, former = (path.with_name(f"{stem}.{owner}.{end}") for end in (f"part{path.suffix}", "old"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_left(path.parent, stem, f".part{path.suffix}")
        if path.is_dir():  # if the folder is missing, its `.old` is the only copy
            remove_left(path.parent, stem, ".old")
        yield temporary
        if path.is_dir() and temporary.is_dir():  # a folder cannot be replaced in one step: rename the old one first
            os.replace(path, former)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # h5py reports a failed write as either class
        raise translate_error(error, path) from error
    finally:
        with contextlib.suppress(OSError):  # restore the old folder after an error or interrupt between the renames
            remove(former) if path.exists() else os.replace(former, path)
        remove(temporary)


def remove_left(parent: Path, stem: str, suffix: str = "") -> None:
    """Remove files and folders `STEM.PID.*SUFFIX` that killed processes on this machine left behind."""
    for left in parent.glob(f"{glob.escape(stem)}.*{glob.escape(suffix)}"):
        with contextlib.suppress(OSError):
            dead = not Path(f"/proc/{left.name[len(stem) + 1 :].split('.')[0]}").exists()
            if dead and left.lstat().st_uid == os.getuid():
                remove(left)


#: Parts of error messages about a full disk, for libraries that give no error number. "unexpected pos" is in PyTorch's
#: message about an incomplete write.
FULL = ("no space left", "quota exceeded", "file too large", "unexpected pos")

#: Messages with problem and remedy, by error number.
PROBLEMS = {
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
        "no space left for this file; free some space, or choose a larger disk for `results`",
    ),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS),
        "no permission to read or write; change the permissions, or choose another folder for `results`",
    ),
    **dict.fromkeys(
        (errno.EEXIST, errno.ENOTDIR, errno.EISDIR),
        "a file exists in place of a folder, or a folder in place of a file; move it away",
    ),
    errno.ENOENT: "no such file or directory",
    errno.ELOOP: "a link; expected a file or folder. Remove the link",
    errno.ENAMETOOLONG: "a name is too long for this file system",
}


def translate_error(error: Exception, path: str | os.PathLike[str]) -> Exception:
    """Return a `UserError` for an error with a known cause (`PROBLEMS`), such as a full disk or a missing file.

    Return other errors unchanged.
    """
    number, named = getattr(error, "errno", None), getattr(error, "filename", None)
    if any(words in str(error).lower() for words in FULL):
        number = errno.ENOSPC
    if number not in PROBLEMS:
        return error
    if link := _dangling(named or path):
        return UserError(f"{link}: a link to {link.readlink()}, which does not exist; create it, or remove the link")
    place = named or path if number in (errno.ENOENT, errno.ELOOP) else path or named
    return UserError(f"{place or ''}: {PROBLEMS[number]}")


def _dangling(path: Any) -> Path | None:
    if not isinstance(path, (str, os.PathLike)):
        return None
    try:
        parts = (Path(path), *Path(path).parents)
        return next((each for each in parts if each.is_symlink() and not each.exists()), None)
    except OSError:  # a parent folder may be unreadable
        return None


def save_png(figure: Any, path: Path, dpi: int) -> None:
    """Write a matplotlib figure atomically as PNG; its palette of 256 colours halves the file size."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=dpi, format="png")
    picture = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    with atomic_write(path) as temporary:
        picture.save(temporary, format="PNG", optimize=True)


def remove(path: Path) -> None:
    """Remove a file or folder if it exists, and ignore errors."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):  # a file that stays must not fail the caller, or hide its error
            path.unlink()


def read_text(path: str | os.PathLike[str], errors: str = "strict", linked: bool = False) -> str:
    """Read a text file (UTF-8) from a folder that other users may write to.

    Refuse links, pipes and devices, unless `linked`.
    """
    with open(path, encoding="utf-8", errors=errors, opener=None if linked else open_regular) as file:
        return file.read()


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` (UTF-8) to `path` atomically."""
    with atomic_write(path) as temporary:
        # File names that are not valid UTF-8 contain surrogates, which are written as escapes such as \udcff.
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` as indented JSON, atomically; NaN and infinities are refused."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file.

    Raise a `UserError` if the file is missing or invalid, or has NaN, infinities or numbers of more than 60 characters.
    """

    def finite(number: str) -> Any:
        # A longer number is damaged; as a Python int, it would overflow in arithmetic with floats.
        if len(number) > 60 or not math.isfinite(found := float(number)):
            raise ValueError(f"{number[:60]} is not a valid JSON number")
        return int(number) if number.lstrip("-").isdecimal() else found

    try:
        return json.loads(read_text(path), parse_constant=finite, parse_float=finite, parse_int=finite)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; run the stage that writes it first") from None
    except (OSError, ValueError, RecursionError) as error:
        what = "cannot be read" if isinstance(error, OSError) else "not valid JSON"
        raise UserError(f"{path}: {what} ({error}); delete the file and run its stage again") from None


def open_regular(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file and return its descriptor; for use as the `opener` of `open`.

    Refuse links, pipes and devices, because another user may have created them as a trap.
    """
    try:
        file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link; a pipe without a reader
            raise
        raise irregular(path) from None
    mode = os.fstat(file).st_mode
    if stat.S_ISREG(mode):
        return file
    os.close(file)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise irregular(path)


def make_folder(path: Path) -> None:
    """Make a missing folder and its missing parents; refuse a link."""
    if path.is_symlink():
        raise irregular(path, "a folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise translate_error(error, path) from error


def irregular(path: str | os.PathLike[str], expected: str = "a file") -> UserError:
    """Return the error for a link, pipe or device."""
    return UserError(f"{path}: a link, pipe or device; expected {expected}. Remove it or use another path")


def no_pipe(path: str | os.PathLike[str], expected: str = "a file") -> Path:
    """Return the path; raise a `UserError` for a pipe or device, because reading it may never end."""
    if (place := Path(path)).exists() and not (place.is_file() or place.is_dir()):
        raise UserError(f"{path}: a pipe or a device; expected {expected}")
    return place


def unreadable(path: str | os.PathLike[str], error: Exception, advice: str = TORN) -> UserError:
    """Return the error for a user's file that a library failed to read."""
    if isinstance(error, FileNotFoundError) and not Path(path).exists():
        return UserError(f"{path}: no such file")
    return UserError(f"{path}: cannot be read ({hidden_in(brief(error)) or type(error).__name__}); {advice}")


@contextlib.contextmanager
def reading(path: str | os.PathLike[str], advice: str = TORN) -> Iterator[None]:
    """Turn any exception of a library that reads a user's file into a `UserError`.

    Before the block, refuse a pipe or device. The block should only contain the library call, because the message
    blames the file for every error in the block, also for a defect of dlscale.
    """
    no_pipe(path)
    try:
        yield
    except UserError:
        raise
    except MemoryError as error:
        raise unreadable(path, error, f"the memory may be too small for this file; if it is not: {advice}") from error
    except Exception as error:
        raise unreadable(path, error, advice) from error


def written_since(path: Path, moment: float) -> bool:
    """Return whether a file exists and was written at `moment` (seconds since 1970-01-01 UTC) or later."""
    return path.exists() and path.stat().st_mtime >= moment - COARSE


def stamp(path: Path) -> tuple[int, int]:
    """Return the size (bytes) and the modification time (ns) of a file.

    For a folder, such as a Zarr store, return the number of files and a digest of their names, sizes and times.
    """
    if path.is_dir():
        files = sorted(Path(root, name) for root, _, names in os.walk(path) for name in names)
        return len(files), int(hashlib.sha256(repr([(f, *stamp(f)) for f in files]).encode()).hexdigest()[:12], 16)
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def sha256(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file's content as 64 hexadecimal digits."""
    with open(no_pipe(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
