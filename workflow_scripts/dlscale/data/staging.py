"""A copy of a dataset near the processes that read it: in their node's memory, or on a disk of its own.

The copy is a dataset's folder like any other, a manifest beside its files: every loader reads it as it is. Its name is
the manifest's digest. The first process of a node that comes makes it, file by file, each whole or not at all; the
others wait for a lock. All who read it hold that lock, shared, and it dies with them: what nobody holds may be removed.
A copy in memory is removed by the last one who reads it; one on a disk stays for the next run, until another needs the
room.

What a copy lacks, or what is not as it was copied, is copied again. Small files are compared with the original's by
content, data files with the size and time of modification that they had when they were copied, which whatever writes to
them changes. To read their contents again, before each stage, may take as long as to copy them (a core makes a SHA-256
of 1.2 GB/s), and would find no more than a disk at fault.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import random
import re
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Literal

from dlscale.core.errors import UserError
from dlscale.core.files import explained, read_json, sha256, whole, write_json, write_text
from dlscale.core.machine import LOCAL_DISK, free_memory
from dlscale.core.text import size
from dlscale.data.manifest import File, Manifest

Staging = Literal["none", "memory", "local"]

#: What training and measuring read.
SPLITS = ("train", "valid")
#: A file system in memory, on every Linux.
MEMORY = "/dev/shm"
#: Of the free memory, what data may take: the run itself needs some.
MEMORY_SHARE = 0.8


@contextlib.contextmanager
def staged(manifest: str | Path, staging: Staging) -> Iterator[Path]:
    """Yield the path of a manifest whose files are near, as `loader.staging` asks; of `none` that of `manifest`."""
    if staging == "none":
        yield Path(manifest)
        return
    folder = _folder(staging) / f"dlscale-{os.getuid()}"
    copy = folder / hashlib.sha256(Path(manifest).read_bytes()).hexdigest()[:16]
    original = Manifest.read(manifest)
    original.check_files()
    with _told(folder, staging):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_ours(folder, staging)
        lock = _lock_of(copy)
    with lock:
        contents = _Contents(original, copy)
        while True:
            fcntl.flock(lock, fcntl.LOCK_SH)
            if contents.complete():
                break
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                # Not to be waited for: who has made the copy by then reads it, and may wait for us to train with.
                fcntl.flock(lock, fcntl.LOCK_UN)
                time.sleep(random.uniform(0.05, 0.15))  # two who try at once are not to go on so
                continue
            if not contents.complete():  # once it is ours, somebody else may have made the copy
                with _told(folder, staging):
                    contents.make(staging)
        os.utime(copy)
        try:
            yield copy / "manifest.json"
        finally:
            if staging == "memory":
                _remove(copy, lock)


def _folder(staging: Staging) -> Path:
    if staging == "memory":
        return Path(MEMORY)
    given = os.environ.get(LOCAL_DISK)
    if not given:
        raise UserError(
            f"loader.staging: local: nobody says where the node's own disk is; set site.local_disk, or the "
            f"variable {LOCAL_DISK}"
        )
    folder = Path(os.path.expandvars(given))
    if unset := re.search(r"\$\w+|\$\{\w+\}", str(folder)):
        raise UserError(f"site.local_disk: {given}: there is no variable {unset[0]} on this node")
    return folder


def _lock_of(copy: Path) -> IO[str]:
    return open(copy.with_suffix(".lock"), "a")


def _check_ours(folder: Path, staging: Staging) -> None:
    """Refuse a folder where others could change what is trained on, or have us write elsewhere by a link."""
    status = folder.lstat()
    owner, mode = status.st_uid, stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode):
        found = "a link" if stat.S_ISLNK(status.st_mode) else "no folder"
    elif owner != os.getuid():
        found = f"a folder of user {owner}"
    elif mode & 0o077:
        found = f"a folder with mode {mode:04o}"
    else:
        return
    raise UserError(
        f"{folder}: {found}, expected a folder of user {os.getuid()} with mode 0700: who can write there decides what "
        f"is trained on; remove it, or {_instead(staging)}"
    )


def _instead(staging: Staging) -> str:
    return "use loader.staging none" + ("" if staging == "memory" else ", or another site.local_disk")


@contextlib.contextmanager
def _told(folder: Path, staging: Staging) -> Iterator[None]:
    """Have failures to write say what to do about them: the folder is not `results`, of which others speak."""
    try:
        yield
    except (OSError, UserError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        number = getattr(cause, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"{folder}: full while data were copied to it; {_instead(staging)}") from error
        if number in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(f"{folder}: no permission to write here; {_instead(staging)}") from error
        if isinstance(error, OSError):
            raise explained(error, folder) from error
        raise


class _Contents:
    """What a copy holds: files of `original`, and a manifest of its own, which comes last."""

    def __init__(self, original: Manifest, copy: Path) -> None:
        self.copy = copy
        self._record = copy / "copied.json"  # of each data file size and time, ns, once it is there
        self._data: dict[str, Path] = {}  # originals by name in the copy
        splits: dict[str, list[File]] = {split: [] for split in original.splits}
        for split, files in original.splits.items():
            for number, file in enumerate(files):
                # Other parts stay where they are: nobody reads them here, but a dataset is known by all that it has.
                name = str(original.path(file).resolve())
                if split in SPLITS:
                    name = f"{split}/{number:04}-{Path(file.path).name}"
                    self._data[name] = original.path(file)
                splits[split].append(file.model_copy(update={"path": name}))
        stats = original.folder.glob("stats/*.npy")  # small, and named by manifests
        self._small = {f"stats/{path.name}": path for path in stats}
        self._manifest = original.model_copy(update={"splits": splits}).text()

    def _copied(self) -> dict[str, list[int]]:
        """Return what was recorded of data files that are still as they were then."""
        try:
            record = read_json(self._record)
        except (OSError, UserError):
            return {}
        return {name: record[name] for name in self._data if name in record and record[name] == _seen(self.copy / name)}

    def _missing(self) -> dict[str, Path]:
        copied = self._copied()
        data = {name: source for name, source in self._data.items() if name not in copied}
        return data | {name: source for name, source in self._small.items() if not _equal(source, self.copy / name)}

    def complete(self) -> bool:
        """Whether the copy has its manifest, and all files as they were copied."""
        try:
            written = (self.copy / "manifest.json").read_bytes() == self._manifest.encode()
        except OSError:
            return False
        return written and not self._missing()

    def make(self, staging: Staging) -> None:
        """Copy what is not there yet; the copy's lock is ours."""
        started, copied, todo = time.perf_counter(), self._copied(), self._missing()
        bytes_ = {name: source.stat().st_size for name, source in todo.items()}
        needed = sum(bytes_.values())
        _make_room(self.copy, needed, staging)
        for name, source in todo.items():
            with whole(self.copy / name) as temporary:
                shutil.copyfile(source, temporary)
                if temporary.stat().st_size != bytes_[name]:
                    raise UserError(f"{source}: it changed while it was copied; run it again")
            if name in self._data:
                copied[name] = _seen(self.copy / name)
                write_json(self._record, copied)
        write_text(self.copy / "manifest.json", self._manifest)
        if not self.complete():
            raise UserError(f"{self.copy}: files changed as soon as they were copied to it; {_instead(staging)}")
        seconds = time.perf_counter() - started
        rate = size(needed / seconds)
        logging.info("copied %s of data to %s in %.1f s (%s/s)", size(needed), self.copy, seconds, rate)


def _seen(path: Path) -> list[int]:
    """Return a file's size and time of modification; nothing of what is no file."""
    try:
        status = path.lstat()
    except OSError:
        return []
    return [status.st_size, status.st_mtime_ns] if stat.S_ISREG(status.st_mode) else []


def _equal(source: Path, target: Path) -> bool:
    return target.is_file() and sha256(source) == sha256(target)


def _make_room(copy: Path, needed: int, staging: Staging) -> None:
    """Remove other copies that nobody reads, those in memory in any case; too little room is a `UserError`."""
    folder = copy.parent
    for other in sorted(filter(Path.is_dir, folder.iterdir()), key=lambda path: path.stat().st_mtime):
        if other != copy and (staging == "memory" or shutil.disk_usage(folder).free < needed):
            with _lock_of(other) as lock:
                _remove(other, lock)
    free = shutil.disk_usage(folder).free
    if staging == "memory":
        free = min(free, int(MEMORY_SHARE * free_memory()))
    if needed > free:
        raise UserError(
            f"loader.staging: {staging}: the data take {size(needed, ' ')}, and {folder} has room for "
            f"{size(free, ' ')}; {_instead(staging)}"
        )


def _remove(copy: Path, lock: IO[str]) -> None:
    """Remove a copy unless somebody else reads it."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(copy, ignore_errors=True)
