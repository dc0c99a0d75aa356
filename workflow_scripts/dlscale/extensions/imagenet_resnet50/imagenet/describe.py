"""Manifests of packed images."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dlscale.config.dataset import SPLITS
from dlscale.core.errors import UserError
from dlscale.core.progress import tracked
from dlscale.core.text import many
from dlscale.data import parts
from dlscale.data.describe import describe_field, new_manifest
from dlscale.data.manifest import File, Manifest
from dlscale.data.store import Field, Moments
from dlscale.extensions.imagenet_resnet50.imagenet.kind import ImagenetDataset
from dlscale.extensions.imagenet_resnet50.imagenet.pack import Pack, counted


def describe_prepared(dataset: ImagenetDataset, sources: list[Path], folder: Path) -> Manifest:
    """Describe packs; the statistics of colours are from about 200 evenly spaced training images."""
    splits: dict[str, list[File]] = {split: [] for split in SPLITS}
    training: list[Pack] = []
    facts: list[str] = []
    for part, path in zip(parts.parts(dataset), sources, strict=True):
        pack = Pack(path)
        splits[part.split].append(File.of(path, folder, len(pack.labels), pack.digest))
        training += [pack] if part.split == "train" else []
        if (
            pack.skipped and part.raws[0].index == 0
        ):  # each pack contains the counts of the split, so one pack is enough
            facts.append(f"{part.split}: {many(sum(pack.skipped.values()), 'file')} skipped ({counted(pack.skipped)})")
        if pack.classes != training[0].classes:
            raise UserError(f"{path}: classes differ from {sources[0]}; delete both packs and run the workflow again")
    edges_N2 = np.concatenate([pack.index[:, 2:] for pack in training])
    labels = np.concatenate([pack.labels for pack in training])
    step = -(-len(labels) // 200)  # decoding all images would take as long as an epoch
    looked_at = [(pack, row) for pack in training for row in range(0, len(pack.labels), step)]
    colours = Moments.empty(3)
    for pack, row in tracked(looked_at, "sampling colours", len(looked_at), "images"):
        colours = colours.merged(Moments.of(np.asarray(pack.image(row)).reshape(-1, 3), 1))
    shape = (
        len(labels),
        3,
        *np.median(edges_N2, axis=0).astype(int).tolist(),
    )  # the median size, since images differ in size
    images = Field("images", ("red", "green", "blue"), ("1",) * 3, shape, 1, (), "uint8")
    classes = Field("labels", ("class",), ("1",), labels.shape, None, (), "int64")
    names, shorter = training[0].classes, edges_N2.min(axis=1)
    fields = {
        "images": describe_field(images, colours),
        "labels": describe_field(classes, Moments.of(labels, None)).model_copy(update={"classes": len(names)}),
    }
    edges = f"shorter edges of {shorter.min()} to {shorter.max()} pixels, stored {dataset.form}"
    facts = [f"{len(names)} classes", edges, *facts]
    manifest = new_manifest(dataset, fields, splits, folder)
    return manifest.model_copy(update={"extra": {"classes": names}, "facts": facts})
