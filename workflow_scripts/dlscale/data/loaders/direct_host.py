"""Decoding on a CPU: write boxes of mapped files straight into reused batches.

Numba compiles the loop over cells, because numpy and PyTorch would pass over the data several times. If channels are
adjacent in memory, one word of 64 bits fetches four float16 values of a cell. Rows of words are gathered in the order
of the result, then split by channel.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from dlscale.data.samples import BoxField, BoxIndex, GridSamples, WritingSamples

#: Cells added to the two faster axes of a thread's buffer. Without padding, strides may be powers of two; neighbours
#: along a slow axis would then compete for the same few lines of the processor's cache.
PAD = 4
#: Number of words that are fetched together and then decoded; they fit into the processor's L1 cache.
BLOCK = 1024
#: Values in a line of the processor's cache; the values of a line are written together and bypass the cache.
LINE = 16


@intrinsic
def _stream(typing, target, source):  # type: ignore[no-untyped-def]
    """Copy `source` to `target` (both float32 [n]) with non-temporal stores.

    Normal stores would first read each cache line of `target` from memory. n is a multiple of `LINE`, and `target` is
    aligned to a cache line (64 bytes). Other threads see the values after this thread has released a lock, for example
    Python's global lock at the end of a task.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        line = ir.VectorType(ir.FloatType(), LINE).as_pointer()
        to, origin = (
            context.make_array(kind)(context, builder, each)
            for kind, each in zip(signature.args, arguments, strict=True)
        )
        count = builder.udiv(cgutils.unpack_tuple(builder, origin.shape)[0], ir.Constant(ir.IntType(64), LINE))
        once = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        with cgutils.for_range(builder, count) as loop:
            value = builder.load(builder.gep(builder.bitcast(origin.data, line), [loop.index]), align=4)
            place = builder.gep(builder.bitcast(to.data, line), [loop.index])
            builder.store(value, place, align=64).set_metadata("nontemporal", once)
        return context.get_dummy_value()

    return types.void(target, source), generate


@intrinsic
def _widened(typing, bits):  # type: ignore[no-untyped-def]
    """Convert a float16, given by its bits, to float32; one instruction converts many values."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


def compiled(function):  # type: ignore[no-untyped-def]
    """Compile a function with Numba; cache the result if a folder is writable."""
    found = numba.njit(nogil=True)(function)
    with contextlib.suppress(RuntimeError):  # neither the package's folder nor the user's is writable
        found.enable_caching()
    return found


def _decoder(half, wide):  # type: ignore[no-untyped-def]
    # The closure's values are keys of Numba's cache on disk. They are booleans, because functions would give other keys
    # in each process.
    @compiled
    def decode(words, places, numbers, out):  # type: ignore[no-untyped-def]
        """Decode a box into `out`, float32 [C, n0, n1, n2]; the bounds of `words` are not checked.

        `places` [4 + C] and `numbers` [3, C] are a sample's rows of a `DecodePlan`. `words` [n] are the stored values:
        float32, or the bits of float16. If `wide`, channels are adjacent in memory, and word i has the bits of the four
        float16 values from value i on.
        """
        channels, n0, n1, n2 = out.shape
        s0, s1, s2 = places[1], places[2], places[3]
        block = max(1, BLOCK // n2)  # rows per pass: neighbours along any axis then share cache lines
        rows, values = np.empty((block, n2), words.dtype), np.empty(n2, np.float32)
        stream = n2 % LINE == 0 and out.ctypes.data % 64 == 0
        for group in range(0, channels, 4 if wide else 1):
            # The last group of four channels begins earlier if necessary, so that no word reaches beyond its cell.
            begin = min(group, channels - 4) if wide else places[4 + group]
            for top in range(0, n1, block):
                count = min(block, n1 - top)
                for i in range(n0):
                    for j in range(count):
                        first, row = places[0] + begin + i * s0 + (top + j) * s1, rows[j]
                        # Unsigned, so that Numba does not test for negative positions, which count from the end.
                        if s2 == 1:
                            for k in range(n2):
                                row[k] = words[np.uintp(first + k)]
                        else:
                            for k in range(n2):
                                row[k] = words[np.uintp(first + k * s2)]
                    for c in range(channels):
                        if (places[4 + c] // 4 * 4 if wide else c) == group:
                            bits = np.uint64(16 * (places[4 + c] - begin))
                            shift, factor, offset = numbers[0, c], numbers[1, c], numbers[2, c]
                            for j in range(count):
                                row = rows[j]
                                for k in range(n2):
                                    if not half:
                                        value = row[k]
                                    elif wide:
                                        value = _widened(np.uint16(row[k] >> bits))  # type: ignore[call-arg]
                                    else:
                                        value = _widened(row[k])  # type: ignore[call-arg]
                                    values[k] = (value - shift) * factor + offset
                                if stream:
                                    _stream(out[c, i, top + j], values)  # type: ignore[call-arg]
                                else:
                                    out[c, i, top + j] = values

    return decode


decode_wide, decode_half, decode_single = _decoder(True, True), _decoder(True, False), _decoder(False, False)


class HostField:
    """Decoder of one field's boxes on the CPU."""

    def __init__(self, field: BoxField) -> None:
        self._field, self._local = field, threading.local()
        field.map()
        half = field.dtype == np.float16
        self._wide = half and field.order[-1] == 0 and field.shape[0] >= 4
        self._decode = decode_wide if self._wide else decode_half if half else decode_single
        self._mapped = [self._in_place(file) for file in range(len(field.readers))]
        self._strides = field.strides(self._buffer())

    def _in_place(self, file: int) -> np.ndarray | None:
        """Return the mapped values of a file, [C, a, b, c], if boxes can be decoded without a copy, else None."""
        field, whole = self._field, self._field.mapped(file)
        alike = whole is not None and (whole.dtype, field.order_of(file)) == (field.dtype, field.order)
        return whole if alike else None

    def _words(self, boxes: np.ndarray) -> np.ndarray:
        """Return stored values as contiguous words, which `decode` reads; word i begins with value i."""
        values = boxes.transpose(self._field.order).reshape(-1)
        if not self._wide:
            return values.view(np.uint16) if values.dtype == np.float16 else values
        return np.lib.stride_tricks.as_strided(
            np.frombuffer(values, np.uint64, 1), (len(values) - 3,), (2,), writeable=False
        )

    def _buffer(self) -> np.ndarray:
        """Return this thread's own padded buffer for a box, [C, a, b + PAD, c + PAD]."""
        if not hasattr(self._local, "buffer"):
            channels, a, b, c = self._field.shape
            padded = np.array([channels, a, b + PAD, c + PAD])[list(self._field.order)]
            self._local.buffer = self._field.canonical(np.zeros(padded, self._field.dtype))
        return np.asarray(self._local.buffer)

    def writers(self, boxes: BoxIndex, starts: np.ndarray, out: np.ndarray) -> Iterator[Callable[[], None]]:
        """Yield a task for each of n boxes, which begin at `starts` [n, 3]; tasks write `out`, float32 [n, C, ...]."""
        # A box without symmetry is decoded from the mapped file if `_in_place` allows it; other boxes are copied first.
        mapped = [
            None if symmetry else self._mapped[file] for file, symmetry in zip(boxes.file, boxes.symmetry, strict=True)
        ]
        strides = np.reshape([self._strides if m is None else self._field.strides(m) for m in mapped], (-1, 4))
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
        """Decode the box at `where` (file and start) into `out`.

        Without `stored`, the mapped values of the file, read the box into a buffer first.
        """
        if stored is None:
            stored = self._buffer()
            _, a, b, c = self._field.shape
            self._field.copy(*where, stored[:, :a, :b, :c])
        self._decode(self._words(stored), places, numbers, out.reshape(self._field.shape))


class HostBoxes(WritingSamples):
    """Samples decoded on the CPU straight into batches."""

    def __init__(self, samples: GridSamples) -> None:
        self.size, self.input_spec, self.target_spec = samples.size, samples.input_spec, samples.target_spec
        self._samples, self._fields = samples, [HostField(field) for field in (samples.input, samples.target)]

    def writers(self, epoch: int, indices: range, x: np.ndarray, y: np.ndarray) -> list[Callable[[], None]]:
        boxes = self._samples.boxes(epoch).take(indices)
        return [
            task
            for field, starts, out in zip(self._fields, (boxes.input, boxes.target), (x, y), strict=True)
            for task in field.writers(boxes, starts, out)
        ]
