"""Data files as stages find them: near the processes that read them, and whole.

A copy, in a node's memory or on its own disk, is a dataset's folder, named by the manifest's digest. The first process
of a node makes it, others wait, and all who read it hold its lock, shared. The last reader removes a copy in memory;
one on a disk stays until another needs the room. A file without the size and time of its original is copied again.

A damaged file may keep its size and time: a stage reads a file that no stage has verified, and compares its SHA-256
with the manifest's. Records beside the manifest and beside the twins have size and times of sound files.
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
from dlscale.core.files import explained, read_json, remove, sha256, stamp, whole, write_json
from dlscale.core.machine import LOCAL_DISK, free_memory
from dlscale.core.process import turn
from dlscale.core.progress import tracked
from dlscale.core.text import size
from dlscale.data import twins
from dlscale.data.manifest import File, Manifest
from dlscale.data.samples import BoxField

#: A file system in memory, on every Linux.
MEMORY = "/dev/shm"
#: Verified files, beside the manifest.
RECORD = "verified.json"
#: What to do where data cannot be copied.
INSTEAD = "use loader.staging none, or for `local` another site.local_disk"


@contextlib.contextmanager
def staged(manifest: str | Path, staging: str) -> Iterator[Path]:
    """Yield the path of a manifest whose files are near, as `loader.staging` asks: in `memory`, or `local`."""
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
            raise UserError(f"{folder}: data cannot be copied here ({error.strerror}); {INSTEAD}") from error
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
            f"loader.staging: local: the node's own disk is '{given}'; expected a folder, of variables that this node "
            f"has; set site.local_disk, or the variable {LOCAL_DISK}"
        )
    return Path(found)


def _check_ours(folder: Path) -> None:
    """Refuse a folder where others could change the data, or have us write elsewhere by a link."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise UserError(
            f"{folder}: expected a folder, and no link, of user {os.getuid()} with mode 0700: who can write there "
            f"decides what is trained on; remove it, or {INSTEAD}"
        )


def _complete(original: Manifest, copy: Path, staging: str) -> None:
    sources = {copy / "stats" / path.name: path for path in original.folder.glob("stats/*.npy")}
    splits = {}
    for split, files in original.splits.items():
        # Other parts stay where they are: nobody reads them here, but a dataset is known by all that it has.
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
            target.unlink(missing_ok=True)  # and is not written over: who has it open reads on
            shutil.copy2(source, target)  # the time comes last
        logging.info("copied %s of data to %s", size(needed), copy)
    original.model_copy(update={"splits": splits}).write(copy / "manifest.json")


def _make_room(copy: Path, needed: int, staging: str) -> None:
    """Remove other copies that nobody reads, those in memory in any case; too little room is a `UserError`."""
    folder = copy.parent
    for other in folder.iterdir():
        if other.is_dir() and other != copy and (staging == "memory" or shutil.disk_usage(folder).free < needed):
            with open(other.with_suffix(".lock"), "a") as lock:
                _remove(other, lock)
    free = _free(folder)
    if needed > free:
        raise UserError(
            f"loader.staging: {staging}: the data take {size(needed, ' ')}, and {folder} has room for "
            f"{size(free, ' ')}; {INSTEAD}"
        )


def _free(folder: Path) -> int:
    free = shutil.disk_usage(folder).free
    return min(free, int(0.8 * free_memory())) if folder.is_relative_to(MEMORY) else free  # the run itself needs some


def _remove(copy: Path, lock: IO[str]) -> None:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(copy, ignore_errors=True)


def is_copy(manifest: Manifest) -> bool:
    """Return whether a manifest is that of a copy, of which each node has its own."""
    return manifest.folder.parent.name == _owner()


def _owner() -> str:
    return f"dlscale-{os.getuid()}"


# ---- twins, for a loader that does not read HDF5


def make_twins(manifest: str | Path) -> None:
    """Make the twins of all volumes of a dataset that have none yet; the first process makes them, others wait."""
    found = Manifest.read(manifest)
    for split in (split for split, files in found.splits.items() if files):
        for name, info in found.fields.items():
            if info.channel_axis == 0:
                make_twin(BoxField(found, split, name, (1, 1, 1)))


def make_twin(field: BoxField) -> None:
    """Make the twin of a field, whole or not at all, if there is none; verify one that changed since it was verified.

    A damaged twin is made again. One beside its file, which somebody else made, is compared with that file.
    """
    made, record = twins.place(field), field.stem.parent / RECORD
    if _is_known(made.path, record):
        return
    try:
        record.parent.mkdir(exist_ok=True)
        with turn(record.parent / "lock"):
            if _is_known(made.path, record):
                return
            digest = ""
            if made.own:
                digest, *_ = _entries(record).get(str(made.path), [""])
                if not made.path.is_file() or sha256(made.path) != digest:
                    _write_twin(made, field)
                    digest = sha256(made.path)
            elif what := twins.differs(made, field):
                raise UserError(
                    f"{made.path}: damaged: {what} than {field.readers[0].path}; remove it, and one is made, or "
                    f"{twins.INSTEAD}"
                )
            with contextlib.suppress(UserError):
                write_json(record, _entries(record) | {str(made.path): _state(made.path, digest)})
    except OSError as error:
        raise explained(error, made.path) from error


def _is_known(path: Path, record: Path) -> bool:
    """Return whether a twin is as it was when it was verified."""
    known = _entries(record).get(str(path))
    return known is not None and path.is_file() and known == _state(path, known[0])


def _write_twin(made: twins.Twin, field: BoxField) -> None:
    for former in made.path.parent.glob(f"{field.stem.name}-*.npy"):  # of other content
        remove(former)
    needed, free = twins.bytes_of(made, field), _free(made.path.parent)
    if needed > free:
        raise UserError(
            f"loader.reader: numpy: the twin {made.path} takes {size(needed, ' ')}, and there is room for "
            f"{size(free, ' ')}; {twins.INSTEAD}"
        )
    parts = twins.slabs(made, field)
    with whole(made.path) as temporary, open(temporary, "wb") as out:
        twins.write(made, field, tracked(parts, f"making {made.path.name}", len(parts), "slabs"), out)
    logging.info("made %s (%s)", made.path, size(needed))


# ---- files that are whole


def unverified(manifest: Manifest, splits: Sequence[str]) -> list[File]:
    """Return the files of `splits` that no stage has read as they are now."""
    files = [file for split in splits for file in manifest.splits.get(split, []) if file.verifiable]
    record = _entries(manifest.folder / RECORD)
    return [file for file in files if record.get(file.path) != _seen(manifest, file)]


def damaged(manifest: Manifest, files: Sequence[File]) -> list[str]:
    """Read `files` and return a message for each with other content than when it was described."""
    messages = []
    for file in tracked(files, "verifying data", len(files), "files"):
        path = manifest.path(file)
        if (found := sha256(path)) != file.digest:
            messages.append(
                f"{path}: damaged: its content changed since it was described (SHA-256 {found[:16]}..., expected "
                f"{file.digest[:16]}...); put it back, or delete it and run the workflow again to make it anew"
            )
    return messages


def remember(manifest: Manifest, files: Sequence[File]) -> None:
    """Record that `files` hold what the manifest says; where nothing can be written they are read again."""
    if files:
        with contextlib.suppress(UserError):
            seen = {file.path: _seen(manifest, file) for file in files}
            write_json(manifest.folder / RECORD, _entries(manifest.folder / RECORD) | seen)


def _entries(record: Path) -> dict[str, Any]:
    found = {}
    with contextlib.suppress(UserError):
        found = read_json(record)
    return found if isinstance(found, dict) else {}


def _seen(manifest: Manifest, file: File) -> list[Any]:
    return _state(manifest.path(file), file.digest)


def _state(path: Path, digest: str) -> list[Any]:
    """Return digest, size and both times of a file: who sets one back changes the other."""
    status = path.stat()
    return [digest, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
