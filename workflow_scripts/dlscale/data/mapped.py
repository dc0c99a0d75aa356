"""Stored values without the HDF5 library in between, where the file's layout allows.

HDF5's library copies hyperslabs run by run, one thread at a time. Uncompressed datasets lie in the file as
they are, though: whole (contiguous) or chunk by chunk at offsets that the library tells. So the file is
mapped into memory and values are copied from the page cache, by any number of threads. Datasets that are
compressed, of another byte order or oddly placed are read through the library.

Boxes have their axes in one order for all fields: channels, then the three others ([C, D, H, W] or [C, T, H, W]).
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import h5py
import numpy as np

from dlscale.core.errors import UserError
from dlscale.core.files import TORN, reading
from dlscale.data.store import Reader, as_stored


class MappedArray:
    """The values of one dataset with four axes, mapped where its layout allows.

    Parameters
    ----------
    channel_axis
        Of the field, channels first: 0 for [C, D, H, W], 1 for [T, C, H, W].

    Attributes
    ----------
    dtype, buffer_dtype
        As stored, any floating-point type; and of buffers for the values: float16 for float16, else float32.
    order
        The axes (0 is that of channels) in the order in which they are stored, slowest first.
    shape
        Of all values, channels first.
    whole
        The values, if they are mapped in one piece; else None.
    mapped
        Whether the values are read without the HDF5 library.
    """

    def __init__(self, reader: Reader, channel_axis: int) -> None:
        self._reader, self._channel_axis = reader, channel_axis
        dataset = reader.dataset
        self.dtype: np.dtype[Any] = dataset.dtype
        self.buffer_dtype = np.dtype(np.float16 if self.dtype == np.float16 else np.float32)
        axes = list(range(4))  # of boxes, in the order of the field's
        axes.insert(channel_axis, axes.pop(0))
        self.order: tuple[int, ...] = as_stored(dataset, tuple(axes))
        stored = np.argsort(self.order)  # the stored axis of each axis of boxes
        self.shape = tuple(dataset.shape[axis] for axis in stored)
        self._edge = tuple((dataset.chunks or dataset.shape)[axis] for axis in stored)
        chunks = map_chunks(dataset) if self.dtype == self.buffer_dtype else {}
        self._chunks = {
            tuple(int(corner[axis]) for axis in stored): values.transpose(stored) for corner, values in chunks.items()
        }
        self.mapped = bool(self._chunks)
        self.whole = self._chunks.get((0, 0, 0, 0)) if dataset.chunks is None else None

    def copy(self, start: np.ndarray, out: np.ndarray) -> None:
        """Copy the box of `out`'s shape [C, a, b, c] at `start` [3] into `out`, in its type.

        Threads may do so side by side. What the HDF5 library cannot read is a `UserError`.
        """
        box = [slice(first, first + size) for first, size in zip(start.tolist(), out.shape[1:], strict=True)]
        if self._chunks:
            self._copy_chunks([slice(0, len(out)), *box], out)
        else:
            box.insert(self._channel_axis, slice(None))
            np.copyto(out, np.moveaxis(self._reader.stored(tuple(box)), self._channel_axis, 0))

    def _copy_chunks(self, box: list[slice], out: np.ndarray) -> None:
        spans = [range(s.start // edge * edge, s.stop, edge) for s, edge in zip(box, self._edge, strict=True)]
        for corner in itertools.product(*spans):
            source, target = [], []
            for first, edge, s in zip(corner, self._edge, box, strict=True):
                low, high = max(first, s.start), min(first + edge, s.stop)
                source.append(slice(low - first, high - first))
                target.append(slice(low - s.start, high - s.start))
            np.copyto(out[tuple(target)], self._chunks[corner][tuple(source)])


def map_chunks(dataset: h5py.Dataset) -> dict[tuple[int, ...], np.ndarray]:
    """Return the values of each chunk of a dataset by its first cell, in its mapped file.

    What is in one piece is one chunk. There are none if values are compressed, of another byte order, oddly placed, in
    another file, in memory, or in part never written.
    """
    with reading(dataset.file.filename):
        plan = dataset.id.get_create_plist()
        foreign = (
            dataset.file.driver == "core"  # in memory already
            or not dataset.dtype.isnative
            or plan.get_nfilters()
            or plan.get_external_count()
            or dataset.is_virtual
            or dataset.file.userblock_size
            or not dataset.size
        )
        if foreign:
            return {}
        if dataset.chunks is None:
            offsets = {(0,) * dataset.ndim: dataset.id.get_offset()}
        else:
            infos: list[Any] = []
            dataset.id.chunk_iter(infos.append)
            offsets = {info.chunk_offset: info.byte_offset for info in infos}
        whole, shape, dtype = dataset.shape, dataset.chunks or dataset.shape, dataset.dtype
        file = np.asarray(np.memmap(dataset.file.filename, np.uint8, "r"))
    needed = math.prod(-(-size // edge) for size, edge in zip(whole, shape, strict=True))
    if len(offsets) != needed or any(offset is None or offset % dtype.itemsize for offset in offsets.values()):
        return {}
    size = math.prod(shape) * dtype.itemsize
    if max(offsets.values()) + size > file.size:
        raise UserError(f"{dataset.file.filename}: values of '{dataset.name}' are beyond its end; {TORN}")
    return {corner: file[first : first + size].view(dtype).reshape(shape) for corner, first in offsets.items()}
