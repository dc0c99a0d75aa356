"""What folders of classes hold, DIR/CLASS/*.jpg, as torchvision's ImageFolder sees it; and a digest that tells changes.

The digest is asked for with every call of the workflow: of a million files it looks at names, sizes and times, not at
their content.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dlscale.core.errors import UserError
from dlscale.core.files import stamp

SUFFIXES = (".jpg", ".jpeg", ".png")

#: Threads that look at folders: on a file system of a network each look is a wait.
LOOKING = 8


def class_names(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, and of links, sorted; hidden ones are left out."""
    entries = [entry for entry in _entries(folder) if entry.name[0] != "."]
    names = sorted(entry.name for entry in entries if entry.is_dir() or entry.is_symlink())
    if not names:
        raise UserError(f"{folder}: no folders in it; expected one for each class, with its images")
    return names


def images(folder: Path) -> list[Path]:
    """Return the images of a class, sorted by name."""
    return sorted(folder / entry.name for entry in _entries(folder) if entry.name.lower().endswith(SUFFIXES))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(folder))
    except OSError as error:
        raise UserError(f"{folder}: cannot read this folder ({error.strerror})") from None


def shard(count: int, number: int, shards: int) -> range:
    """Return which of `count` images are in shard `number`; it is a `UserError` if there are none."""
    images = range(count * number // shards, count * (number + 1) // shards)
    if not images:
        raise UserError(f"{count} images do not fill {shards} packs; lower the dataset's `shards`")
    return images


@functools.lru_cache
def looks(folder: str, shards: int) -> list[str]:
    """Return a digest for each shard of a split: of the classes, and of names, sizes and times of its images.

    They are looked at once in a process. A link that leads nowhere is a `UserError`.
    """
    names = class_names(Path(folder))
    with ThreadPoolExecutor(LOOKING) as pool:
        lines = [
            line for of_class in pool.map(lambda name: _lines(images(Path(folder, name))), names) for line in of_class
        ]
    shares = (shard(len(lines), number, shards) for number in range(shards))
    return [_digest(names, lines[share.start : share.stop]) for share in shares]


def look(names: Sequence[str], paths: Iterable[Path]) -> str:
    """Return what `looks` tells of the shard of a split, of these classes, that holds the images at `paths`."""
    return _digest(names, _lines(paths))


def packed(pack: Path) -> str | None:
    """Return the digest of the files that a pack was made of; None if it does not tell, or is not there."""
    import h5py

    with contextlib.suppress(OSError), h5py.File(pack) as file:
        return file.attrs.get("files")
    return None


def _digest(names: Sequence[str], lines: Sequence[str]) -> str:
    return hashlib.sha256(os.fsencode("\0".join([*names, *lines]))).hexdigest()


def _lines(paths: Iterable[Path]) -> list[str]:
    try:
        return ["/".join((path.parent.name, path.name, *map(str, stamp(path)))) for path in paths]
    except OSError as error:
        raise UserError(f"{error.filename}: cannot look at this file ({error.strerror}); mend or remove it") from None
