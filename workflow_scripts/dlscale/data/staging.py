"""A copy of a dataset near the processes that read it: in their node's memory, or on a disk of its own.

The copy is a dataset's folder like any other, a manifest beside its files: every loader reads it as it is. Its name is
the manifest's digest. The first process of a node that comes makes it, file by file, each whole or not at all; the
others wait for a lock. All who read it hold that lock, shared, and it dies with them: what nobody holds may be removed.
A copy in memory is removed by the last one who reads it; one on a disk stays for the next run, until another needs the
room.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Literal

from dlscale.core.errors import UserError
from dlscale.core.files import explained, whole, write_text
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
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = _lock_of(copy)
    except OSError as error:
        raise explained(error, folder) from error
    with lock:
        while True:
            fcntl.flock(lock, fcntl.LOCK_SH)
            if _complete(copy):
                break
            fcntl.flock(lock, fcntl.LOCK_EX)  # once it is ours, somebody else may have made the copy
            if not _complete(copy):
                _make(original, copy, staging)
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


def _complete(copy: Path) -> bool:
    """Whether the copy has its manifest, which comes last, and all files, as large as it says."""
    try:
        Manifest.read(copy / "manifest.json").check_files()
    except UserError:
        return False
    return True


def _make(original: Manifest, copy: Path, staging: Staging) -> None:
    """Copy what is not there yet of a dataset; its lock is ours."""
    started, splits = time.perf_counter(), dict[str, list[File]]()
    todo: list[tuple[Path, Path, int]] = []
    for split in SPLITS:
        for number, file in enumerate(original.splits.get(split, [])):
            name = f"{split}/{number:04}-{Path(file.path).name}"
            splits.setdefault(split, []).append(file.model_copy(update={"path": name}))
            if not ((copy / name).is_file() and (copy / name).stat().st_size == file.bytes):
                todo.append((original.path(file), copy / name, file.bytes))
    # Other parts stay where they are: nobody reads them here, but a dataset is known by all that it has.
    for split in set(original.splits) - set(SPLITS):
        apart = [
            file.model_copy(update={"path": str(original.path(file).resolve())}) for file in original.splits[split]
        ]
        splits[split] = apart
    for path in original.folder.glob("stats/*.npy"):  # small, and named by manifests
        todo.append((path, copy / "stats" / path.name, path.stat().st_size))
    needed = sum(bytes_ for _, _, bytes_ in todo)
    _make_room(copy, needed, staging)
    for source, target, bytes_ in todo:
        with whole(target) as temporary:
            try:
                shutil.copyfile(source, temporary)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise UserError(f"{copy.parent}: full while data were copied to it; use loader.staging none") from None
            if temporary.stat().st_size != bytes_:
                raise UserError(f"{source}: it changed while it was copied; run it again")
    write_text(copy / "manifest.json", original.model_copy(update={"splits": splits}).text())
    seconds = time.perf_counter() - started
    logging.info("copied %s of data to %s in %.1f s (%s/s)", size(needed), copy, seconds, size(needed / seconds))


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
        instead = "" if staging == "memory" else ", or a larger site.local_disk"
        raise UserError(
            f"loader.staging: {staging}: the data take {size(needed, ' ')}, and {folder} has room for "
            f"{size(free, ' ')}; use staging none{instead}"
        )


def _remove(copy: Path, lock: IO[str]) -> None:
    """Remove a copy unless somebody else reads it."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(copy, ignore_errors=True)
