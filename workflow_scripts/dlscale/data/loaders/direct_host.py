"""Decoding on a processor: boxes of mapped files are written straight into batches that are used again.

Numba compiles the loop over cells: numpy and PyTorch would pass over the data several times.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dlscale.data.samples import BoxField, BoxIndex, GridSamples, WritingSamples

#: Cells added to the two faster axes of a thread's buffer: at distances of a power of two, neighbours along a slow axis
#: compete for the same few lines of the processor's cache.
PAD = 4


@intrinsic
def _widened(typing, bits):  # type: ignore[no-untyped-def]
    """Return the float32 of a float16 given by its bits: one instruction for many values."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


def _compiled(half):  # type: ignore[no-untyped-def]
    # Numba finds its compiled code again by what is closed over: plain values, since functions are new in each process.
    @numba.njit(nogil=True, cache=True)
    def decode(words, places, numbers, out):  # type: ignore[no-untyped-def]
        """Write a box, float32 [C, n0, n1, n2], into `out`; nothing checks that it lies within `words`.

        `places` [4 + C] and `numbers` [3, C] are a row of a `DecodePlan`; `words` [n] are the stored values, float32 or
        the bits of float16.
        """
        channels, n0, n1, n2 = out.shape
        for i in range(n0):
            for j in range(n1):
                row = places[0] + i * places[1] + j * places[2]
                for c in range(channels):  # all of a row: where channels lie side by side, the cache has them
                    first, step, target = row + places[4 + c], places[3], out[c, i, j]
                    shift, factor, offset = numbers[0, c], numbers[1, c], numbers[2, c]
                    for k in range(n2):
                        word = words[np.uintp(first + k * step)]  # unsigned: nothing is counted from the end
                        value = _widened(word) if half else word  # type: ignore[call-arg]
                        target[k] = (value - shift) * factor + offset

    return decode


decode_half = _compiled(True)
decode_single = _compiled(False)


class HostField:
    """Decodes boxes of one field on the processor."""

    def __init__(self, field: BoxField) -> None:
        self._field, self._local = field, threading.local()
        self._decode = decode_half if field.dtype == np.float16 else decode_single
        self._mapped = [self._in_place(file) for file in range(len(field.readers))]
        self._strides = field.strides(self._buffer())

    def _in_place(self, file: int) -> np.ndarray | None:
        """Return the mapped values of a file, [C, a, b, c], if boxes can be decoded there."""
        field, whole = self._field, self._field.whole(file)
        alike = whole is not None and (whole.dtype, field.order_of(file)) == (field.dtype, field.order)
        return whole if alike else None

    def _words(self, boxes: np.ndarray) -> np.ndarray:
        values = boxes.transpose(self._field.order).reshape(-1)
        return values.view(np.uint16) if values.dtype == np.float16 else values

    def _buffer(self) -> np.ndarray:
        """Return this thread's own padded buffer for a box, [C, a, b + PAD, c + PAD]."""
        if not hasattr(self._local, "buffer"):
            channels, a, b, c = self._field.shape
            padded = channels, a, b + PAD, c + PAD
            whole = np.zeros([padded[axis] for axis in self._field.order], self._field.dtype)
            self._local.buffer = self._field.canonical(whole)
        buffer: np.ndarray = self._local.buffer
        return buffer

    def writers(self, boxes: BoxIndex, starts: np.ndarray, out: np.ndarray) -> Iterator[Callable[[], None]]:
        """Yield a task for each box that begins at `starts` [n, 3]: it writes `out`, float32 [n, C, ...]."""
        # A box that lies in one piece and keeps its axes is decoded where it lies; others are copied first.
        mapped = [
            None if symmetry else self._mapped[file] for file, symmetry in zip(boxes.file, boxes.symmetry, strict=True)
        ]
        strides = np.array([self._strides if each is None else self._field.strides(each) for each in mapped])
        strides = strides.reshape(-1, 4)
        bases = np.array([each is not None for each in mapped], np.int64) * (starts * strides[:, 1:]).sum(axis=1)
        plan = self._field.plan(boxes.file, boxes.symmetry, bases, strides)
        for index, stored in enumerate(mapped):
            where = boxes.file[index], starts[index]
            yield functools.partial(self._write, where, stored, plan.places[index], plan.numbers[index], out[index])

    def _write(
        self,
        where: tuple[int, np.ndarray],
        stored: np.ndarray | None,
        places: np.ndarray,
        numbers: np.ndarray,
        out: np.ndarray,
    ) -> None:
        """Write the box at `where`, file and start, into `out`, by way of a buffer unless `stored` has it."""
        if stored is None:
            stored = self._buffer()
            _, a, b, c = self._field.shape
            self._field.copy(*where, stored[:, :a, :b, :c])
        self._decode(self._words(stored), places, numbers, out.reshape(self._field.shape))


class HostBoxes(WritingSamples):
    """Boxes that write themselves into batches, decoded."""

    def __init__(self, samples: GridSamples) -> None:
        self.size, self.input_spec, self.target_spec = samples.size, samples.input_spec, samples.target_spec
        self._samples, self._fields = samples, [HostField(field) for field in (samples.input, samples.target)]

    def writers(self, epoch: int, indices: range, x: np.ndarray, y: np.ndarray) -> list[Callable[[], None]]:
        boxes = self._samples.boxes(epoch).take(indices)
        sides = zip(self._fields, (boxes.input, boxes.target), (x, y), strict=True)
        return [task for field, starts, out in sides for task in field.writers(boxes, starts, out)]
