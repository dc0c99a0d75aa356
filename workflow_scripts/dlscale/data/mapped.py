"""Stored values without the HDF5 library in between, where the file's layout allows.

HDF5's library copies hyperslabs run by run, one thread at a time. Uncompressed datasets lie in the file as
they are, though: whole (contiguous) or chunk by chunk at offsets that the library tells. So the file is
mapped into memory and boxes are copied from the page cache, by any number of threads. Datasets that are
compressed, of another byte order or oddly placed are read through the library.

Axes are in one order for all fields: channels, then the three others ([C, D, H, W] or [C, T, H, W]).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from dlscale.data.store import Reader, as_stored

Box = tuple[slice, ...]


@dataclass(frozen=True)
class Layout:
    """Where a dataset's values lie, for compiled loops. What is in one piece is one chunk.

    Attributes
    ----------
    bits
        Values as unsigned integers of their size, [n]: mapped, of the dataset or of the whole file.
    chunks
        Where in `bits` each chunk begins, int64, by its number along the three axes but the channels'.
    edges
        Of a chunk along these axes, int64 [3].
    strides
        Values from one to the next inside a chunk along [C, a, b, c], int64 [4].
    """

    bits: np.ndarray
    chunks: np.ndarray
    edges: np.ndarray
    strides: np.ndarray


class Raw:
    """The stored values of one dataset.

    Parameters
    ----------
    reader
        Of the dataset.
    channel_axis
        Of the field, channels first: 0 for [C, D, H, W], 1 for [T, C, H, W].

    Attributes
    ----------
    dtype
        As stored: any floating-point type; mapped ones are float16 or float32.
    order
        The axes (0 is that of channels) in the order in which they are stored, slowest first.
    whole
        The values, mapped, if they lie in one piece; else None.
    mapped
        Whether the values are read without the HDF5 library.
    """

    def __init__(self, reader: Reader, channel_axis: int) -> None:
        found = reader.dataset
        self._reader, self._channel_axis = reader, channel_axis
        self.dtype: np.dtype[Any] = found.dtype
        names = list(range(4))  # of the field's axes, which `canonical` orders
        names.insert(channel_axis, names.pop(0))
        self.order: tuple[int, ...] = as_stored(found, tuple(names))
        self.whole: np.ndarray | None = None
        self._chunks: dict[tuple[int, ...], np.ndarray] = {}
        if _mappable(found):
            if found.chunks is None:
                self.whole = self._canonical(_map(found, found.id.get_offset(), found.shape))
            else:
                file, chunks = _map_chunks(found)
                self._base = file.ctypes.data
                self._chunks = {
                    tuple(int(start[axis]) for axis in np.argsort(self.order)): self._canonical(values)
                    for start, values in chunks.items()
                }
                self._edge = tuple(found.chunks[axis] for axis in np.argsort(self.order))
        self.mapped = self.whole is not None or bool(self._chunks)

    def _canonical(self, stored: np.ndarray) -> np.ndarray:
        return stored.transpose(np.argsort(self.order))

    def copy(self, start: np.ndarray, out: np.ndarray) -> None:
        """Copy the box of `out`'s shape [C, a, b, c] at `start` [3] into `out`, in its type.

        Threads may do so side by side. What the HDF5 library cannot read is a `UserError`.
        """
        a, b, c = start.tolist()
        _, rows, columns, cells = out.shape
        if self.whole is not None:
            np.copyto(out, self.whole[:, a : a + rows, b : b + columns, c : c + cells])
            return
        box = (slice(a, a + rows), slice(b, b + columns), slice(c, c + cells))
        if self._chunks:
            self._copy_chunks(box, out)
        else:
            field = (*box[: self._channel_axis], slice(None), *box[self._channel_axis :])
            np.copyto(out, np.moveaxis(self._reader.stored(field), self._channel_axis, 0))

    def layout(self) -> Layout | None:
        """Return where the values lie, if they are mapped and chunks hold all channels."""
        item, path = self.dtype.itemsize, self._reader.path
        if self.whole is not None:
            bits: np.ndarray = np.memmap(path, f"u{item}", "r", self._reader.dataset.id.get_offset(), self.whole.size)
            edges, strides = np.array(self.whole.shape[1:]), np.array(self.whole.strides) // item
            return Layout(bits, np.zeros((1, 1, 1), np.int64), edges, strides)
        if not self._chunks or any(corner[0] for corner in self._chunks):
            return None
        file = np.memmap(path, np.uint8, "r")
        bits = file[: len(file) // item * item].view(f"u{item}")
        grid = np.array(list(self._chunks)).max(axis=0) // np.array(self._edge) + 1
        chunks = np.zeros(grid[1:], np.int64)
        for corner, values in self._chunks.items():
            place = tuple(first // edge for first, edge in zip(corner[1:], self._edge[1:], strict=True))
            chunks[place] = (values.ctypes.data - self._base) // item
        strides = np.array(next(iter(self._chunks.values())).strides) // item
        return Layout(bits, chunks, np.array(self._edge[1:]), strides)

    def box(self, start: np.ndarray, shape: tuple[int, ...]) -> Layout:
        """Return the box of `shape` [C, a, b, c] at `start` [3], copied, as a dataset of its own."""
        values = np.empty(shape, common_type([self]))
        self.copy(start, values)
        strides = np.array(values.strides) // values.itemsize
        bits = values.view(f"u{values.itemsize}").reshape(-1)
        return Layout(bits, np.zeros((1, 1, 1), np.int64), np.array(shape[1:]), strides)

    def _copy_chunks(self, box: Box, out: np.ndarray) -> None:
        box = (slice(0, len(out)), *box)
        spans = [range(s.start // edge * edge, s.stop, edge) for s, edge in zip(box, self._edge, strict=True)]
        for corner in itertools.product(*spans):
            cut, place = [], []
            for first, edge, s in zip(corner, self._edge, box, strict=True):
                low, high = max(first, s.start), min(first + edge, s.stop)
                cut.append(slice(low - first, high - first))
                place.append(slice(low - s.start, high - s.start))
            np.copyto(out[tuple(place)], self._chunks[corner][tuple(cut)])


def common_type(raws: Sequence[Raw]) -> np.dtype[Any]:
    """Return the type of buffers for values of all these datasets: float16 if all have it, else float32."""
    return np.dtype(np.float16 if all(raw.dtype == np.float16 for raw in raws) else np.float32)


def buffer(
    count: int,
    shape: tuple[int, ...],
    order: tuple[int, ...],
    pad: int,
    allocate: Callable[[tuple[int, ...]], np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Make a buffer for `count` boxes of `shape` [C, a, b, c] whose axes lie in `order`, slowest first.

    `pad` adds cells to all but the slowest of the grid's axes: at distances of a power of two, neighbours along a slow
    axis compete for the same few lines of the processor's cache.

    Returns
    -------
    tuple
        The whole buffer, contiguous, and the boxes in it with axes in the one order, [count, C, a, b, c].
    """
    sizes = [shape[axis] for axis in order]
    for place in [place for place, axis in enumerate(order) if axis != 0][1:]:
        sizes[place] += pad
    whole = allocate((count, *sizes))
    seen = whole.transpose(0, *(1 + np.argsort(order)))
    return whole, seen[:, :, : shape[1], : shape[2], : shape[3]]


def _mappable(found: h5py.Dataset) -> bool:
    """Whether the values lie in the file as this processor holds them."""
    plan = found.id.get_create_plist()
    return (
        found.ndim == 4
        and found.dtype in (np.dtype("<f2"), np.dtype("<f4"))
        and np.dtype("<f4").isnative
        and plan.get_nfilters() == 0
        and plan.get_external_count() == 0
        and not found.is_virtual
        and found.file.userblock_size == 0
        and found.size > 0
        and (found.chunks is not None or (found.id.get_offset() or 1) % found.dtype.itemsize == 0)
    )


def _map(found: h5py.Dataset, offset: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.memmap(found.file.filename, found.dtype, "r", offset, shape)


def _map_chunks(found: h5py.Dataset) -> tuple[np.ndarray, dict[tuple[int, ...], np.ndarray]]:
    """Return the mapped file and its chunks by their first cell: none if some were never written or lie oddly."""
    file = np.memmap(found.file.filename, np.uint8, "r")
    infos: list[Any] = []
    found.id.chunk_iter(infos.append)
    needed = int(np.prod([-(-size // edge) for size, edge in zip(found.shape, found.chunks, strict=True)]))
    if len(infos) != needed or any(info.byte_offset % found.dtype.itemsize for info in infos):
        return file, {}
    size = int(np.prod(found.chunks)) * found.dtype.itemsize
    return file, {
        info.chunk_offset: file[info.byte_offset : info.byte_offset + size].view(found.dtype).reshape(found.chunks)
        for info in infos
    }
