"""Samples that are rows of the files, in two fields of any shape and dtype: for kinds without a `samples` module.

Fields that lie in one piece in their files, as `dlscale.data.store` writes them, are mapped into memory: all processes
of a machine share one copy of them, and no row is read twice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from dlscale.core.errors import UserError, nearest
from dlscale.data.manifest import Manifest
from dlscale.data.mapped import map_chunks
from dlscale.data.samples import ArraySpec, TableSamples, decoding
from dlscale.data.sampling import Visits
from dlscale.data.store import Reader

if TYPE_CHECKING:
    from dlscale.data.kind import RowSamples


class RowField:
    """Rows [n, ...] of one field of every file, in model units; labels are int64, whatever they are stored as."""

    def __init__(self, manifest: Manifest, split: str, key: str, name: str) -> None:
        fields = manifest.fields
        if name not in fields:
            raise UserError(
                f"samples.{key}: the dataset has no field '{name}'{nearest(name, fields)}; it has: {', '.join(fields)}"
            )
        self._info = info = fields[name]
        if info.channel_axis == 0:
            raise UserError(f"samples.{key}: field '{name}' holds volumes [C, D, H, W], of which no row is a sample")
        stored = "float32" if info.stored == "physical" else info.dtype
        self.spec = ArraySpec(info.row_shape, "int64" if info.classes else stored, info.classes)
        self._readers = [Reader(manifest.path(file), name) for file in manifest.files(split)]
        self._opened: dict[int, tuple[np.ndarray | None, np.ndarray | None]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": {}}  # a mapping would be copied

    def fill(self, file: int, rows: np.ndarray, out: np.ndarray) -> None:
        """Write rows [n] of one file into `out` [n, ...], as `spec` declares them."""
        if file not in self._opened:
            self._opened[file] = self._open(file)
        mapped, numbers = self._opened[file]
        if mapped is not None and numbers is None and mapped.dtype == out.dtype:
            np.take(mapped, rows, axis=0, out=out.reshape(len(rows), *mapped.shape[1:]), mode="clip")  # else it copies
            return
        if mapped is None:
            reader = self._readers[file]
            stored = np.concatenate([reader.stored((slice(row, row + 1),)) for row in rows.tolist()])
        else:
            stored = mapped[rows]
        values = stored.astype(self.spec.dtype).reshape(out.shape)
        out[...] = values if numbers is None else (values - numbers[0]) * numbers[1] + numbers[2]

    def _open(self, file: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return a file's rows, if they can be mapped, and shift, factor and offset, if they must be decoded."""
        reader, info = self._readers[file], self._info
        chunks = map_chunks(reader.dataset)
        mapped = next(iter(chunks.values())) if chunks and reader.dataset.chunks is None else None
        if reader.scaling is None and info.stored == "model":
            return mapped, None
        channels = [] if info.channel_axis is None else [len(info.channels)]
        return mapped, decoding(info, reader.scaling).reshape(3, *channels, *[1] * len(info.grid))


class Rows(TableSamples):
    """See `dlscale.data.samples.Samples`.

    A training epoch visits all rows in a random order, and of more than `settings.train` a new random choice each
    epoch; validation and test are fixed, in order and evenly spread.
    """

    def __init__(self, manifest: Manifest, split: str, settings: RowSamples, seed: int) -> None:
        self._input = RowField(manifest, split, "input", settings.input)
        self._target = RowField(manifest, split, "target", settings.target)
        self.input_spec, self.target_spec = self._input.spec, self._target.spec
        counts = [file.rows for file in manifest.files(split)]
        training = split == "train"
        self._visits = Visits(counts, settings.train if training else settings.valid, seed, training)
        self._counts, self.size = counts, self._visits.size
        specs = (self.input_spec, self.target_spec)
        self.bytes = sum(counts) * sum(math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in specs)

    def read(self, epoch: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """See `dlscale.data.samples.Samples`."""
        x, y = self._empty(1)
        for write in self.writers(epoch, range(index, index + 1), x, y):
            write()
        return np.asarray(x[0]), np.asarray(y[0])

    def writers(self, epoch: int, indices: range, x: np.ndarray, y: np.ndarray) -> list[Callable[[], None]]:
        """See `WritingSamples`: one task for each file."""
        files, rows = (each[indices.start : indices.stop] for each in self._visits.rows(epoch))
        return [functools.partial(self._fill, file, files, rows, x, y) for file in np.unique(files).tolist()]

    def _fill(self, file: int, files: np.ndarray, rows: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
        """Write the samples that are of `file` to their places in `x` and `y`."""
        here = np.flatnonzero(files == file)
        for field, out in ((self._input, x), (self._target, y)):
            if len(here) == len(files):
                field.fill(file, rows, out)
            else:
                part = np.empty((len(here), *out.shape[1:]), out.dtype)
                field.fill(file, rows[here], part)
                out[here] = part

    def table(self) -> tuple[np.ndarray, np.ndarray]:
        """See `TableSamples`."""
        x, y = self._empty(sum(self._counts))
        first = 0
        for file, count in enumerate(self._counts):
            self._input.fill(file, np.arange(count), x[first : first + count])
            self._target.fill(file, np.arange(count), y[first : first + count])
            first += count
        return x, y

    def _empty(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = (np.empty((count, *spec.shape), spec.dtype) for spec in (self.input_spec, self.target_spec))
        return x, y

    def order(self, epoch: int) -> np.ndarray:
        """See `TableSamples`."""
        return self._visits.order(epoch)


open_samples = Rows
