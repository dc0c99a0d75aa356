"""Folders of classes, DIR/CLASS/*.jpg, as torchvision's ImageFolder reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlscale.core.errors import UserError
from dlscale.datasets.imagenet.listing import SUFFIXES, class_names, images, look, shard
from dlscale.datasets.imagenet.packing import Picture, write_pack


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
    files = look(classes, [Path(picture.name) for picture in chosen]) if source.watch else None
    write_pack(out, chosen, classes, dataset.edge if dataset.form == "decoded" else None, progress, files)


def pictures(folder: Path, classes: list[str]) -> list[Picture]:
    """Return all images of a split, class by class, sorted by name."""
    found = []
    for label, name in enumerate(classes):
        if not (of_class := images(folder / name)):
            raise UserError(f"{folder / name}: no images in it ({', '.join(SUFFIXES)})")
        found += [Picture(str(path), label, path.read_bytes) for path in of_class]
    return found
