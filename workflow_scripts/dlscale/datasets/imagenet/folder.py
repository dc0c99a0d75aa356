"""Folders of classes, DIR/CLASS/*.jpg, as torchvision's ImageFolder reads them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

from dlscale.core.errors import UserError
from dlscale.datasets.imagenet.listing import SUFFIXES, class_names, digest, images
from dlscale.datasets.imagenet.packing import Picture, filled, write_pack


def acquire(dataset: Any, raw: Any, out: Path, progress: Callable[[int, int | None], None]) -> None:
    """Pack one shard of a split."""
    source, split = dataset.source, raw.name.partition("-")[0]
    classes, other = class_names(Path(source.train)), class_names(Path(source.valid))
    if classes != other:
        missing = {source.valid: set(classes) - set(other), source.train: set(other) - set(classes)}
        lacks = [f"{folder} has no {', '.join(sorted(names)[:5])}" for folder, names in missing.items() if names]
        raise UserError(f"{source.train} and {source.valid} differ in their classes: {'; '.join(lacks)}")
    chosen = pictures(Path(getattr(source, split)), classes)
    part = filled(len(chosen), raw.index, getattr(dataset.shards, split), str(raw.origin))
    edge = dataset.edge if dataset.form == "decoded" else None
    packed = chosen[part.start : part.stop]
    files = digest(classes, (Path(picture.name) for picture in packed)) if source.watch else None
    write_pack(out, packed, classes, edge, progress, files)


def pictures(folder: Path, classes: list[str]) -> list[Picture]:
    """Return all images of a split, class by class, sorted by name."""
    found = []
    for label, name in enumerate(classes):
        paths = [folder / name / entry.name for entry in images(folder / name)]
        if not paths:
            raise UserError(f"{folder / name}: no images in it ({', '.join(SUFFIXES)})")
        found += [Picture(str(path), label, partial(_open, path)) for path in paths]
    return found


def _open(path: Path) -> IO[bytes]:
    return path.open("rb")
