"""What folders of classes hold, DIR/CLASS/*.jpg, as torchvision's ImageFolder sees it; and a digest that tells changes.

The digest is asked for with every call of the workflow: of a million files it looks at names, sizes and times, not at
what is in them.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dlscale.core.errors import UserError

SUFFIXES = (".jpg", ".jpeg", ".png")

#: Threads that look at folders: on a file system of a network each look is a wait.
LOOKING = 8
#: Bytes of the digest of one file.
SIZE = 16


def class_names(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, sorted; hidden ones are left out."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != ".")
    except OSError as error:
        raise UserError(f"{folder}: cannot read this folder ({error.strerror})") from None
    if not names:
        raise UserError(f"{folder}: no folders in it; expected one for each class, with its images")
    return names


def images(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the images of a class, sorted by name."""
    yield from sorted((e for e in os.scandir(folder) if e.name.lower().endswith(SUFFIXES)), key=lambda e: e.name)


def shard(count: int, number: int, shards: int) -> range:
    """Return which of `count` images are in shard `number`."""
    return range(count * number // shards, count * (number + 1) // shards)


@functools.lru_cache
def digests(folder: str, shards: int) -> list[str]:
    """Return a SHA-256 for each shard of a split: of the classes, and of names, sizes and times of its images.

    They are looked at once in a process. What cannot be looked at is a `UserError`.
    """
    names = class_names(Path(folder))
    with ThreadPoolExecutor(LOOKING) as pool:
        looked_at = b"".join(pool.map(_look, [Path(folder, name) for name in names]))
    shares = (shard(len(looked_at) // SIZE, number, shards) for number in range(shards))
    return [_digest(names, looked_at[SIZE * s.start : SIZE * s.stop]) for s in shares]


def digest(names: Sequence[str], paths: Iterable[Path]) -> str:
    """Return what `digests` tells of the shard of a split, of these classes, that holds the images at `paths`."""
    return _digest(names, b"".join(_seen(path.parent.name, path.name, path.stat()) for path in paths))


def packed(pack: Path) -> str | None:
    """Return the digest of the files that a pack was made of; None if it does not tell, or is not there."""
    import h5py

    try:
        with h5py.File(pack) as file:
            return file.attrs.get("files")
    except OSError:
        return None


def _digest(names: Sequence[str], looked_at: bytes) -> str:
    return hashlib.sha256("\0".join(names).encode() + looked_at).hexdigest()


def _seen(folder: str, name: str, stat: os.stat_result) -> bytes:
    line = f"{folder}/{name}\0{stat.st_size}\0{stat.st_mtime_ns}"
    return hashlib.blake2b(os.fsencode(line), digest_size=SIZE).digest()


def _look(folder: Path) -> bytes:
    """Return the digests of a class's images, one after the other."""
    try:
        found = [(entry.name, entry.stat()) for entry in images(folder)]
    except OSError as error:
        raise UserError(f"{folder}: cannot read this folder ({error.strerror})") from None
    return b"".join(_seen(folder.name, name, stat) for name, stat in found)
