"""Samples that are rows of two fields, of any shape and dtype: for kinds without a `samples` module.

Contiguous fields are mapped: all processes of a machine share one copy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from dlscale.core.errors import UserError, nearest
from dlscale.data.manifest import Manifest
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
        self._numbers: dict[int, np.ndarray | None] = {}

    def fill(self, file: int, rows: np.ndarray, out: np.ndarray) -> None:
        """Write rows [n] of one file into `out` [n, ...], as `spec` declares them."""
        reader = self._readers[file]
        if file not in self._numbers:
            self._numbers[file] = self._decoding(reader)
        mapped, numbers = reader.mapped, self._numbers[file]
        if mapped is not None and numbers is None and mapped.dtype == out.dtype:
            np.take(mapped, rows, axis=0, out=out.reshape(len(rows), *mapped.shape[1:]), mode="clip")  # else it copies
            return
        if mapped is None:
            stored = np.concatenate([reader.stored((slice(row, row + 1),)) for row in rows.tolist()])
        else:
            stored = mapped[rows]
        values = stored.astype(self.spec.dtype).reshape(out.shape)
        out[...] = values if numbers is None else (values - numbers[0]) * numbers[1] + numbers[2]

    def _decoding(self, reader: Reader) -> np.ndarray | None:
        """Return shift, factor and offset, [3, C, 1, ...], if a file's rows must be decoded."""
        info, scaling = self._info, reader.scaling
        if scaling is None and info.stored == "model":
            return None
        channels = [] if info.channel_axis is None else [len(info.channels)]
        return decoding(info, scaling).reshape(3, *channels, *[1] * len(info.grid))


class Rows(TableSamples):
    """Rows of all files in the order of `Visits`. See `Samples`."""

    def __init__(self, manifest: Manifest, split: str, settings: RowSamples, seed: int) -> None:
        self._fields = [RowField(manifest, split, key, getattr(settings, key)) for key in ("input", "target")]
        self.input_spec, self.target_spec = (field.spec for field in self._fields)
        self._counts = [file.rows for file in manifest.files(split)]
        training = split == "train"
        self._visits = Visits(self._counts, settings.train if training else settings.valid, seed, training)
        self.size = self._visits.size
        row = sum(math.prod(field.spec.shape) * np.dtype(field.spec.dtype).itemsize for field in self._fields)
        self.bytes = sum(self._counts) * row

    def writers(self, epoch: int, indices: range, x: np.ndarray, y: np.ndarray) -> list[Callable[[], None]]:
        files, rows = (each[indices.start : indices.stop] for each in self._visits.rows(epoch))
        return [functools.partial(self._fill, file, files, rows, (x, y)) for file in np.unique(files).tolist()]

    def _fill(self, file: int, files: np.ndarray, rows: np.ndarray, batch: tuple[np.ndarray, np.ndarray]) -> None:
        here = np.flatnonzero(files == file)
        for field, out in zip(self._fields, batch, strict=True):
            if len(here) == len(files):
                field.fill(file, rows, out)
            else:
                part = np.empty((len(here), *out.shape[1:]), out.dtype)
                field.fill(file, rows[here], part)
                out[here] = part

    def table(self) -> tuple[np.ndarray, np.ndarray]:
        x, y = (np.empty((sum(self._counts), *field.spec.shape), field.spec.dtype) for field in self._fields)
        first = 0
        for file, count in enumerate(self._counts):
            for field, out in zip(self._fields, (x, y), strict=True):
                field.fill(file, np.arange(count), out[first : first + count])
            first += count
        return x, y

    def order(self, epoch: int) -> np.ndarray:
        return self._visits.order(epoch)


open_samples = Rows
