"""Packs folders of classes, DIR/CLASS/*.jpg, as torchvision's ImageFolder reads them, and sees their changes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py

from dlscale.core.errors import UserError
from dlscale.core.files import stamp
from dlscale.datasets.imagenet.pack import Picture, shard, write_pack

SUFFIXES = (".jpg", ".jpeg", ".png")


def acquire(dataset: Any, raw: Any, out: Path, progress: Callable[[int, int | None], None]) -> None:
    """Pack one shard of a split."""
    source, split = dataset.source, raw.name.partition("-")[0]
    classes, other = class_names(Path(source.train)), class_names(Path(source.valid))
    if classes != other:
        missing = {source.valid: set(classes) - set(other), source.train: set(other) - set(classes)}
        lacks = [f"{folder} has no {', '.join(sorted(names)[:5])}" for folder, names in missing.items() if names]
        raise UserError(f"{source.train} and {source.valid} differ in their classes: {'; '.join(lacks)}")
    found = pictures(Path(getattr(source, split)), classes)
    part = shard(len(found), raw.index, getattr(dataset.shards, split))
    chosen = found[part.start : part.stop]
    files = _digest(classes, [_line(Path(picture.name)) for picture in chosen])  # of this pack alone
    write_pack(out, chosen, classes, dataset.form, progress, files)


def class_names(folder: Path) -> list[str]:
    """Return the names of the folders, and links, in a folder, sorted; hidden ones are left out."""

    def is_class(entry: os.DirEntry[str]) -> bool:
        return entry.name[0] != "." and (entry.is_dir() or entry.is_symlink())

    return _names(folder, is_class, "folders in it; expected one for each class, with its images")


def images(folder: Path) -> list[Path]:
    """Return the images of a class, sorted by name."""
    found = _names(folder, lambda entry: entry.name.lower().endswith(SUFFIXES), f"images in it ({', '.join(SUFFIXES)})")
    return [folder / name for name in found]


def pictures(folder: Path, classes: list[str]) -> list[Picture]:
    """Return all images of a split, class by class, sorted by name."""
    every = [(path, label) for label, name in enumerate(classes) for path in images(folder / name)]
    return [Picture(str(path), label, path.read_bytes) for path, label in every]


@functools.lru_cache
def looks(folder: str, shards: int) -> list[str]:
    """Return a digest for each shard of a split, of classes and of names, sizes and times of images."""
    names = class_names(Path(folder))
    with ThreadPoolExecutor(8) as pool:  # on a network's file system each look is a wait
        found = pool.map(lambda name: [_line(path) for path in images(Path(folder, name))], names)
        lines = [line for of_class in found for line in of_class]
    if len(lines) < shards:  # the stage refuses it; a dry run needs no images
        return [_digest(names, lines)] * shards
    shares = (shard(len(lines), number, shards) for number in range(shards))
    return [_digest(names, lines[share.start : share.stop]) for share in shares]


def packed(pack: Path) -> str | None:
    """Return the digest of the files that a pack was made of, if it has one."""
    with contextlib.suppress(OSError), h5py.File(pack) as file:
        return file.attrs.get("files")
    return None


def _digest(names: list[str], lines: list[str]) -> str:
    return hashlib.sha256(os.fsencode("\0".join([*names, *lines]))).hexdigest()


def _line(path: Path) -> str:
    try:
        return "/".join((path.parent.name, path.name, *map(str, stamp(path))))
    except OSError as error:
        raise UserError(f"{error.filename}: cannot look at this file ({error.strerror}); mend or remove it") from None


def _names(folder: Path, wanted: Callable[[os.DirEntry[str]], bool], what: str) -> list[str]:
    """Return the names of the wanted entries of a folder, sorted; a folder without any is refused."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if wanted(entry))
    except OSError as error:
        raise UserError(f"{folder}: cannot read this folder ({error.strerror})") from None
    if not names:
        raise UserError(f"{folder}: no {what}")
    return names
