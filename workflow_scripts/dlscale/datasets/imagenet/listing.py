"""What folders of classes hold, DIR/CLASS/*.jpg, as torchvision's ImageFolder sees it; and a digest that tells changes.

The digest is asked for with every call of the workflow: of a million files it looks at names, sizes and times, not at
what is in them.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dlscale.core.errors import UserError
from dlscale.core.files import reading

SUFFIXES = (".jpg", ".jpeg", ".png")

#: Threads that look at folders: on a file system of a network each look is a wait.
LOOKING = 8
#: Bytes of the digest of one file.
SIZE = 16


def class_names(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, sorted; hidden ones are left out."""
    try:
        entries = [entry for entry in os.scandir(folder) if entry.name[0] != "."]
    except OSError as error:
        raise UserError(f"{folder}: cannot read this folder ({error.strerror})") from None
    _follow(entries)
    names = sorted(entry.name for entry in entries if entry.is_dir())
    if not names:
        raise UserError(f"{folder}: no folders in it; expected one for each class, with its images")
    for name in names:
        if os.fsencode(name) != name.encode(errors="replace"):  # it could not be stored as text
            raise UserError(f"{folder}: the name of class {os.fsencode(name)!r} is not UTF-8; rename its folder")
    return names


def is_gone(folder: Path) -> bool:
    """Return whether a folder is not there, or is empty, as where a disk is not mounted."""
    try:
        return not any(os.scandir(folder))
    except FileNotFoundError:
        return True
    except OSError:  # there is one, which cannot be read
        return False


def images(folder: Path) -> list[os.DirEntry[str]]:
    """Return the images of a class, sorted by name: files and links to files."""
    try:
        entries = [entry for entry in os.scandir(folder) if entry.name.lower().endswith(SUFFIXES)]
    except OSError as error:
        raise UserError(f"{folder}: cannot read this folder ({error.strerror})") from None
    _follow(entries)
    return sorted((entry for entry in entries if entry.is_file()), key=lambda entry: entry.name)


def _follow(entries: Iterable[os.DirEntry[str]]) -> None:
    """Refuse a link that leads nowhere: to leave it out would be to train on less, and not to know it."""
    for entry in entries:
        try:
            if entry.is_symlink():  # on a file system of a network to look at the others, too, takes minutes
                entry.stat()
        except OSError as error:
            raise UserError(f"{entry.path}: this link leads nowhere ({error.strerror}); mend or remove it") from None


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
        with reading(pack), h5py.File(pack) as file:
            return file.attrs.get("files")
    except UserError:
        return None


def _digest(names: Sequence[str], looked_at: bytes) -> str:
    return hashlib.sha256("\0".join(names).encode() + looked_at).hexdigest()


def _seen(folder: str, name: str, stat: os.stat_result) -> bytes:
    line = f"{folder}/{name}\0{stat.st_size}\0{stat.st_mtime_ns}"
    return hashlib.blake2b(os.fsencode(line), digest_size=SIZE).digest()


def _look(folder: Path) -> bytes:
    """Return the digests of a class's images, one after the other."""
    try:
        return b"".join(_seen(folder.name, entry.name, entry.stat()) for entry in images(folder))
    except OSError as error:
        raise UserError(f"{error.filename}: cannot look at this file ({error.strerror})") from None
