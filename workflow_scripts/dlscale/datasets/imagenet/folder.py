"""Folders of classes, DIR/CLASS/*.jpg, as torchvision's ImageFolder reads them."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

from dlscale.core.errors import UserError
from dlscale.datasets.imagenet.packing import Picture, shard, write_pack

SUFFIXES = (".jpg", ".jpeg", ".png")


def acquire(dataset: Any, raw: Any, out: Path, progress: Callable[[int, int | None], None]) -> None:
    """Pack one shard of a split."""
    source, split = dataset.source, raw.name.partition("-")[0]
    classes, other = class_names(Path(source.train)), class_names(Path(source.valid))
    if classes != other:
        missing = {source.valid: set(classes) - set(other), source.train: set(other) - set(classes)}
        lacks = [f"{folder} has no {', '.join(sorted(names)[:5])}" for folder, names in missing.items() if names]
        raise UserError(f"{source.train} and {source.valid} differ in their classes: {'; '.join(lacks)}")
    pictures = images(Path(getattr(source, split)), classes)
    chosen = shard(len(pictures), raw.index, getattr(dataset.shards, split), str(raw.origin))
    edge = dataset.edge if dataset.form == "decoded" else None
    write_pack(out, pictures[chosen.start : chosen.stop], classes, edge, progress)


def class_names(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, sorted; hidden ones are left out."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != ".")
    except OSError as error:
        raise UserError(f"{folder}: cannot read this folder ({error.strerror})") from None
    if not names:
        raise UserError(f"{folder}: no folders in it; expected one for each class, with its images")
    return names


def images(folder: Path, classes: list[str]) -> list[Picture]:
    """Return all images of a split, class by class, sorted by name."""
    pictures = []
    for label, name in enumerate(classes):
        files = sorted(entry.name for entry in os.scandir(folder / name) if entry.name.lower().endswith(SUFFIXES))
        if not files:
            raise UserError(f"{folder / name}: no images in it ({', '.join(SUFFIXES)})")
        paths = (folder / name / file for file in files)
        pictures += [Picture(str(path), label, partial(_open, path)) for path in paths]
    return pictures


def _open(path: Path) -> IO[bytes]:
    return path.open("rb")
