"""Copies of a dataset's files in a node's memory or on its local disk, and verification of files.

A copy is a folder, whose name is the beginning of the manifest's digest. The first process of a node makes the copy
while the node's other processes wait. Each reader holds a shared lock on the copy. The last reader removes a copy in
memory; a copy on a disk stays until another copy needs the space. A file is copied again if the copy's size or
modification time differs from the original's.

A damaged file may keep its size and time. Therefore, if the manifest has the SHA-256 of a file's bytes, a stage reads
the file once and compares the digests. A record next to the manifest has the digest, size and times of each verified
file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from dlscale.core.errors import UserError
from dlscale.core.files import read_json, sha256, stamp, write_json
from dlscale.core.machine import LOCAL_DISK, free_memory
from dlscale.core.process import turn
from dlscale.core.progress import tracked
from dlscale.core.text import size
from dlscale.data.manifest import File, Manifest

#: Folder that Linux keeps in memory.
MEMORY = "/dev/shm"
#: Name of the record of verified files, next to the manifest.
RECORD = "verified.json"
#: Remedy in messages about data that cannot be copied.
INSTEAD = "set loader.staging to none, or (for `local`) site.local_disk to another folder"


@contextlib.contextmanager
def staged(manifest: str | Path, staging: str) -> Iterator[Path]:
    """Copy a dataset to the node's memory or local disk, and yield the path of the manifest in the copy.

    `staging` is `memory` or `local` (the run's `loader.staging`).
    """
    original = Manifest.read(manifest)
    original.check_files()
    folder = _place(staging) / _owner()
    copy = folder / hashlib.sha256(Path(manifest).read_bytes()).hexdigest()[:16]
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_ours(folder)
            lock = held.enter_context(open(copy.with_suffix(".lock"), "a"))
            with turn(folder / "lock"):
                fcntl.flock(lock, fcntl.LOCK_SH)
                _complete(original, copy, staging)
        except OSError as error:
            raise UserError(
                f"{folder}: data cannot be copied into this folder ({error.strerror}); {INSTEAD}"
            ) from error
        try:
            yield copy / "manifest.json"
        finally:
            if staging == "memory":
                with turn(folder / "lock"):
                    _remove(copy, lock)


def _place(staging: str) -> Path:
    if staging == "memory":
        return Path(MEMORY)
    given = os.environ.get(LOCAL_DISK, "")
    found = os.path.expandvars(given)
    if not given or "$" in found:
        raise UserError(
            f"loader.staging: local: the node's local disk is '{given}'; expected a path in which all variables are "
            f"set on this node; set site.local_disk, or the environment variable {LOCAL_DISK}"
        )
    return Path(found)


def _check_ours(folder: Path) -> None:
    """Refuse a folder in which other users could change the data or redirect writes by a link."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise UserError(
            f"{folder}: expected a folder, not a link, that belongs to user {os.getuid()} and has mode 0700, because "
            f"otherwise other users could change the training data; remove this path, or {INSTEAD}"
        )


def _complete(original: Manifest, copy: Path, staging: str) -> None:
    sources = {copy / "stats" / path.name: path for path in original.folder.glob("stats/*.npy")}
    splits = {}
    for split, files in original.splits.items():
        # Files of other splits are not copied, because no process reads them from a copy. The copy's manifest has
        # the paths of the original files instead.
        names = [str(original.path(file).resolve()) for file in files]
        if split in ("train", "valid"):
            names = [f"{split}/{number:04}-{Path(file.path).name}" for number, file in enumerate(files)]
            sources |= {copy / name: original.path(file) for name, file in zip(names, files, strict=True)}
        splits[split] = [file.model_copy(update={"path": name}) for name, file in zip(names, files, strict=True)]
    stale = {
        target: source for target, source in sources.items() if not target.is_file() or stamp(target) != stamp(source)
    }
    if stale:
        needed = sum(source.stat().st_size for source in stale.values())
        _make_room(copy, needed, staging)
        for target, source in stale.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)  # not overwritten, because processes may still read the old file
            shutil.copy2(source, target)  # sets the modification time last: a partial copy stays stale
        logging.info("copied %s of data to %s", size(needed), copy)
    original.model_copy(update={"splits": splits}).write(copy / "manifest.json")


def _make_room(copy: Path, needed: int, staging: str) -> None:
    """Remove unused copies of other data, and raise a `UserError` if `needed` bytes are still not free.

    On a disk, copies are removed only until `needed` bytes are free.
    """
    folder = copy.parent
    for other in folder.iterdir():
        if other.is_dir() and other != copy and (staging == "memory" or shutil.disk_usage(folder).free < needed):
            with open(other.with_suffix(".lock"), "a") as lock:
                _remove(other, lock)
    free = free_bytes(folder)
    if needed > free:
        raise UserError(
            f"loader.staging: {staging}: the data take {size(needed, ' ')}, but {folder} has only "
            f"{size(free, ' ')} free; {INSTEAD}"
        )


def free_bytes(folder: Path) -> int:
    """Return the space that a copy in a folder may take, bytes.

    In memory, a copy may take four fifths of the free memory; the rest is for the run.
    """
    free = shutil.disk_usage(folder).free
    return min(free, int(0.8 * free_memory())) if folder.is_relative_to(MEMORY) else free


def _remove(copy: Path, lock: IO[str]) -> None:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(copy, ignore_errors=True)


def is_copy(manifest: Manifest) -> bool:
    """Return whether a manifest belongs to a node's copy of the data."""
    return manifest.folder.parent.name == _owner()


def _owner() -> str:
    return f"dlscale-{os.getuid()}"


# ---- verification of files


def unverified(manifest: Manifest, splits: Sequence[str]) -> list[File]:
    """Return the files of `splits` that no stage has verified since their last change."""
    files = [file for split in splits for file in manifest.splits.get(split, []) if file.verifiable]
    record = read_record(manifest.folder / RECORD)
    return [file for file in files if record.get(file.path) != _seen(manifest, file)]


def damaged(manifest: Manifest, files: Sequence[File]) -> list[str]:
    """Read `files`, and return a message for each file whose SHA-256 differs from the manifest's."""
    messages = []
    for file in tracked(files, "verifying data", len(files), "files"):
        path = manifest.path(file)
        if (found := sha256(path)) != file.digest:
            messages.append(
                f"{path}: damaged: the content changed after the manifest was written (SHA-256 {found[:16]}..., "
                f"expected {file.digest[:16]}...); put the original file back, or delete this file and run the "
                "workflow again to make a new file"
            )
    return messages


def remember(manifest: Manifest, files: Sequence[File]) -> None:
    """Record `files` as verified; if the record cannot be written, later stages read the files again."""
    if files:
        with contextlib.suppress(UserError):
            seen = {file.path: _seen(manifest, file) for file in files}
            write_json(manifest.folder / RECORD, read_record(manifest.folder / RECORD) | seen)


def read_record(record: Path) -> dict[str, Any]:
    """Return path → `file_state` of each verified file; an unreadable record counts as empty."""
    with contextlib.suppress(UserError, AttributeError):
        return {path: state for path, state in read_json(record).items() if isinstance(state, list) and len(state) == 4}
    return {}


def _seen(manifest: Manifest, file: File) -> list[Any]:
    return file_state(manifest.path(file), file.digest)


def file_state(path: Path, digest: str) -> list[Any]:
    """Return digest, size, modification time and status-change time (ctime) of a file, times in ns.

    If a program changes a file and then restores its modification time, the ctime reveals the change.
    """
    status = path.stat()
    return [digest, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
