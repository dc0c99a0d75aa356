"""Manifests of packed images."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dlscale.config.dataset import SPLITS
from dlscale.core.errors import UserError
from dlscale.core.files import reading
from dlscale.core.progress import tracked
from dlscale.data import parts, store
from dlscale.data.describe import describe_field, new_manifest
from dlscale.data.manifest import File, Manifest
from dlscale.data.store import Field, Moments
from dlscale.datasets.imagenet.kind import ImagenetDataset
from dlscale.datasets.imagenet.pack import Pack

#: Training images whose colours are looked at: to decode all would take as long as an epoch.
LOOKED_AT = 200


def describe_prepared(dataset: ImagenetDataset, sources: list[Path], folder: Path) -> Manifest:
    """Describe packs; the statistics of colours are those of some training images, evenly spread."""
    splits: dict[str, list[File]] = {split: [] for split in SPLITS}
    labels: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
    edges: list[np.ndarray] = []  # height and width of each training image
    training: list[Pack] = []
    names: list[str] = []
    for part, path in zip(parts.parts(dataset), sources, strict=True):
        pack = Pack(path)
        store.enter(path)
        with reading(path), store.open_file(path) as file:
            digest, classes = str(file.attrs.get("sha256")), [name.decode() for name in file["classes"][()]]
        if classes != (names := names or classes):
            raise UserError(f"{path}: other classes than in {sources[0]}; delete them and run the workflow again")
        labels[part.split].append(pack.labels)
        splits[part.split].append(File.of(path, folder, len(pack.labels), digest))
        if part.split == "train":
            training.append(pack)
            edges.append(pack.index[:, 2:])
    edges_N2 = np.concatenate(edges)
    colours = Moments.empty(3)
    step = -(-len(edges_N2) // LOOKED_AT)
    looked_at = [(pack, row) for pack in training for row in range(0, len(pack.labels), step)]
    for pack, row in tracked(looked_at, "looking", len(looked_at), "images"):
        colours = colours.merged(Moments.of(np.asarray(pack.image(row)).reshape(-1, 3), 1))
    height, width = np.median(edges_N2, axis=0).astype(int).tolist()
    shape = (len(edges_N2), 3, height, width)  # what is usual: images differ in size
    of_training = np.concatenate(labels["train"])
    fields = {
        "images": describe_field(Field("images", ("red", "green", "blue"), ("1",) * 3, shape, 1, (), "uint8"), colours),
        "labels": describe_field(
            Field("labels", ("class",), ("1",), of_training.shape, None, (), "int64"), Moments.of(of_training, None)
        ).model_copy(update={"classes": len(names)}),
    }
    manifest = new_manifest(dataset, fields, splits, folder)
    return manifest.model_copy(update={"extra": {"classes": names}, "facts": _facts(names, edges_N2, dataset)})


def _facts(names: list[str], edges_N2: np.ndarray, dataset: ImagenetDataset) -> list[str]:
    (least, greatest), stored = np.percentile(edges_N2.min(axis=1), [0, 100]).astype(int), dataset.form
    return [f"{len(names)} classes", f"shorter edges of {least} to {greatest} pixels, stored {stored}"]


def complete(dataset: ImagenetDataset, manifest: Manifest, stats: Path, name: str) -> Manifest:
    """Return the manifest as it is: normalisation is the model's."""
    return manifest
