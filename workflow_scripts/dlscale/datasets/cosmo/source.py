"""Raw cosmology volumes: HDF5 with `Nbody` [4, D, H, W] and `Hydro` [5, D, H, W] in physical units."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from dlscale.core.errors import UserError
from dlscale.data import store
from dlscale.data.kind import Part
from dlscale.data.source import Source
from dlscale.data.store import Field
from dlscale.datasets.cosmo.channels import CHANNELS, open_volumes, read_planes
from dlscale.datasets.cosmo.kind import CosmoDataset, gap


def open_source(dataset: CosmoDataset, part: Part, paths: list[Path]) -> CosmoSource:
    """Open the volume of one part."""
    return CosmoSource(dataset, part, paths[0])


class CosmoSource(Source):
    """A volume streamed in slabs along its first axis; see `dlscale.data.source.Source`."""

    def __init__(self, dataset: CosmoDataset, part: Part, path: Path) -> None:
        self._file = store.open_file(path)
        self._volumes = open_volumes(self._file)
        self._factor = dataset.downsample
        edge = self._volumes["Nbody"].shape[1:]
        depth, height, width = (size // self._factor for size in edge)
        if min(depth, height, width) < 1:
            raise UserError(f"{path}: downsample {self._factor} is larger than the volume {edge}; choose a smaller one")
        low, high = part.fraction
        dropped = gap(dataset)
        self._first = math.ceil(low * depth - 1e-9) + (dropped if low > 0 else 0)
        rows = math.floor(high * depth + 1e-9) - self._first
        if rows < 1:
            raise UserError(
                f"{path}: split '{part.split}' is empty: {depth} rows, fractions {low:g} to {high:g}, gap {dropped}; "
                "choose a larger share or a smaller gap"
            )
        published = dataset.transform == "published"
        self.fields = tuple(
            Field(
                name,
                channels,
                units if published else ("1",) * len(channels),
                (len(channels), rows, height, width),
                0,
                transforms if published else (),
            )
            for name, (channels, units, transforms) in CHANNELS.items()
        )
        raw_row = 4 * 9 * self._factor * edge[1] * edge[2]
        # The raw slab, its averages axis by axis (half at most, then less), a finite-check mask, the result.
        self.bytes_per_row = int(raw_row * (2.0 if self._factor > 1 else 1.25)) + 4 * 9 * height * width * 2
        self.attributes = {"raw_file": path.name, **_plain(dict(self._file.attrs))}
        self._path = path

    def read(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Return rows [start, stop) of both fields, block-averaged, then transformed to model units."""
        slabs = {}
        for field in self.fields:
            rows = slice((self._first + start) * self._factor, (self._first + stop) * self._factor)
            values = read_planes(self._volumes[field.name], rows, self._path)
            # The check comes before the logarithm, which would turn a NaN into the range's lower end.
            store.check_finite(values, field, str(self._path), rows.start)
            values = store.block_average(values, self._factor, (1, 2, 3))
            slabs[field.name] = np.stack(
                [transform.forward(channel) for transform, channel in zip(field.transforms, values, strict=True)]
            )
        return slabs

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _plain(attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.item() if hasattr(value, "item") and np.ndim(value) == 0 else str(value)
        for key, value in attributes.items()
    }
