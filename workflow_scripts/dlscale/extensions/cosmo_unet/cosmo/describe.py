"""Manifests of cosmological volumes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dlscale.config.dataset import SPLITS
from dlscale.core.errors import UserError
from dlscale.core.files import reading
from dlscale.core.progress import tracked
from dlscale.data import parts, store
from dlscale.data.describe import describe_field, new_manifest
from dlscale.data.manifest import IDENTITY, File, Manifest
from dlscale.data.store import Field, Moments, Reader
from dlscale.extensions.cosmo_unet.cosmo.channels import CHANNELS, DENSITY, open_volumes
from dlscale.extensions.cosmo_unet.cosmo.kind import CosmoDataset


def describe_prepared(dataset: CosmoDataset, sources: list[Path], folder: Path) -> Manifest:
    """Describe files in the published layout; read the training files once for statistics."""
    splits: dict[str, list[File]] = {split: [] for split in SPLITS}
    moments = {name: Moments.empty(len(spec[0])) for name, spec in CHANNELS.items()}
    shapes: dict[str, tuple[int, ...]] = {}  # shapes in the first file
    for part, path in zip(parts.parts(dataset), sources, strict=True):
        with reading(path), store.open_file(path) as file:
            there = {name: values.shape for name, values in open_volumes(file).items()}
        for name, shape in there.items():
            channels, units, transforms = CHANNELS[name]
            shapes.setdefault(name, shape)
            if part.split == "train":
                field = Field(name, channels, units, shape, 0, transforms)
                moments[name] = moments[name].merged(_measure(field, path))
        splits[part.split].append(File.of(path, folder, there["Nbody"][1]))
    fields = {}
    for name, (channels, units, transforms) in CHANNELS.items():
        # In published files only the transform of densities, ln(x)/14, is known. Other channels stay in model units.
        transforms = tuple(t if t == DENSITY else IDENTITY for t in transforms)
        units = tuple(u if t == DENSITY else "model units" for u, t in zip(units, transforms, strict=True))
        fields[name] = describe_field(Field(name, channels, units, shapes[name], 0, transforms), moments[name])
    return new_manifest(dataset, fields, splits, folder)


def complete(dataset: CosmoDataset, manifest: Manifest, stats: Path, name: str) -> Manifest:
    """Raise `UserError` for a channel that never varies, or for physical instead of transformed values."""
    for field, info in manifest.fields.items():
        where = f"{manifest.folder}: {field}"
        info.check_varies(where)
        for channel, transform, highest in zip(info.channels, info.transforms, info.maximum, strict=True):
            # Densities and temperatures are stored as logarithms; inverting the logarithm of physical values overflows.
            if transform.kind == "log" and highest * transform.scale + transform.offset > np.log(1e30):
                raise UserError(
                    f"{where}: channel '{channel}' reaches {highest:g}, but prepared files contain transformed values, "
                    "mostly in (-1, 1); for physical values use source kind files"
                )
    return manifest


def _measure(field: Field, path: Path) -> Moments:
    """Return the statistics of a volume, read in blocks of planes."""
    block = max(1, store.MEMORY // (12 * int(np.prod(field.shape)) // field.rows))
    reader = Reader(path, field.name)
    moments = Moments.empty(len(field.channels))
    starts = range(0, field.rows, block)
    for first in tracked(starts, f"reading {path.name}: {field.name}", len(starts), "blocks"):
        read = reader[field.select(first, first + block)]
        store.check_finite(read, field, str(path), first)
        moments = moments.merged(Moments.of(read, 0))
    return moments
