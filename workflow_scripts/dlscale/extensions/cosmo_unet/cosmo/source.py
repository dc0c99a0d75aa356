"""Read raw cosmology volumes: HDF5 with `Nbody` [4, D, H, W] and `Hydro` [5, D, H, W] in physical units."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dlscale.core.errors import UserError
from dlscale.core.files import reading
from dlscale.core.text import percent
from dlscale.data import store
from dlscale.data.kind import Part, share
from dlscale.data.source import Source, block_average
from dlscale.data.store import Field, Reader
from dlscale.extensions.cosmo_unet.cosmo.channels import CHANNELS, open_volumes
from dlscale.extensions.cosmo_unet.cosmo.kind import CosmoDataset, gap


class CosmoSource(Source):
    """Volume of a part of a dataset, read in slabs along the first axis."""

    def __init__(self, dataset: CosmoDataset, part: Part, paths: list[Path]) -> None:
        [path] = paths
        self._path, self._factor = path, dataset.downsample
        with reading(path), store.open_file(path) as file:
            edge = open_volumes(file)["Nbody"].shape[1:]
            said = {k: v.item() if hasattr(v, "item") and np.ndim(v) == 0 else str(v) for k, v in file.attrs.items()}
        self.attributes = {"raw_file": path.name, **said}
        self._readers = {name: Reader(path, name) for name in CHANNELS}
        depth, height, width = (size // self._factor for size in edge)
        if min(depth, height, width) < 1:
            raise UserError(f"{path}: downsample {self._factor} exceeds the volume {edge}. Use at most {min(edge)}")
        self._first, rows = share(depth, part, path, gap(dataset))
        self.fields = ()
        for name, (channels, units, transforms) in CHANNELS.items():
            self.fields += (Field(name, channels, units, (len(channels), rows, height, width), 0, transforms),)
        # Memory of a row: the results of both fields, and the raw values of the field with more channels.
        counts = [len(names) for names, _, _ in CHANNELS.values()]
        raw_row = 4 * max(counts) * self._factor * edge[1] * edge[2]
        self.bytes_per_row = 4 * sum(counts) * height * width + raw_row

    def read(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Return rows [start, stop) of both fields, block-averaged, then transformed to model units."""
        return {field.name: self._field(field, start, stop) for field in self.fields}

    def _field(self, field: Field, start: int, stop: int) -> np.ndarray:
        channels, _, height, width = field.shape
        values = np.empty((channels, stop - start, height, width), np.float32)
        # Read about 2 MB of rows at a time, at least one row, so that they are still in the CPU's cache when averaged.
        reader = self._readers[field.name]
        _, _, raw_height, raw_width = reader.shape
        step = max(1, 2_000_000 // (4 * channels * self._factor * raw_height * raw_width))
        for first in range(start, stop, step):
            last = min(first + step, stop)
            rows = slice((self._first + first) * self._factor, (self._first + last) * self._factor)
            raw = reader[:, rows]
            for one, averaged in zip(raw, values[:, first - start : last - start], strict=True):
                block_average(one[None], self._factor, (1, 2, 3), out=averaged[None])
            # The check precedes the logarithm, because the logarithm would replace a NaN with the floor.
            if not np.isfinite(values[:, first - start : last - start].sum()):
                store.check_finite(raw, field, str(self._path), rows.start)
        described = zip(field.channels, field.units, field.transforms, values, strict=True)
        for name, unit, transform, channel in described:
            # The logarithm would silently replace negative values with the floor.
            if transform.kind == "log" and channel.min() < 0:
                hint = "; add 1 to an overdensity (x / mean - 1)" if "density" in name else ""
                raise UserError(
                    f"{self._path}: {field.name}: channel '{name}': {percent((channel < 0).mean())} of the cells in "
                    f"this block of rows are negative (down to {channel.min():g}). Expected at least 0, in {unit}{hint}"
                )
            transform.forward(channel, out=channel)
        return values


open_source = CosmoSource
