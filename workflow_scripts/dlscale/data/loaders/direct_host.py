"""The `direct` loader on a processor: boxes of mapped files are decoded straight into batches that are used again.

The loop over cells is compiled by Numba: numpy and PyTorch would pass over the data several times, and memory is what
it costs. Channels stored last lie side by side, so one word of 64 bits fetches four float16 of a cell; a row of such
words is gathered in the order of the result and then taken apart channel by channel, which the compiler turns into
vector instructions.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from dlscale.data.loaders.base import Batch
from dlscale.data.loaders.decode import DecodePlan, StoredField
from dlscale.data.mapped import MappedArray
from dlscale.data.samples import BoxIndex

#: Cells added to the two faster axes of a thread's buffer: at distances of a power of two, neighbours along a slow axis
#: compete for the same few lines of the processor's cache.
PAD = 4
#: Values that are written together past the processor's cache: a line of it.
LINE = 16
#: Words that are fetched together and then decoded: they fit into the fastest cache.
BLOCK = 1024
#: Bytes of batches beyond which they are taken not to stay in a processor's cache.
CACHE = 2**25


@intrinsic
def _widened(typing, bits):  # type: ignore[no-untyped-def]
    """Float32 of a float16 given by its bits, as LLVM has it: one instruction for many values."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@numba.njit(inline="always")
def _half_of_hardware(bits):  # type: ignore[no-untyped-def]
    return _widened(bits)  # type: ignore[call-arg]


@numba.njit(inline="always")
def _half_of_bits(bits):  # type: ignore[no-untyped-def]
    """The same where the processor has no such instruction. Shifted into place only the bias is wrong: times 2^112."""
    bits = np.uint32(bits)
    sign = (bits & np.uint32(0x8000)) << np.uint32(16)
    moved = (bits & np.uint32(0x7FFF)) << np.uint32(13)
    value = np.uint32(moved | sign).view(np.float32) * np.float32(2.0**112)
    if moved >= np.uint32(0x0F800000):  # infinite, or not a number
        value = np.uint32(moved | sign | np.uint32(0x7F800000)).view(np.float32)
    return value


#: LLVM has no code for float16 on an x86 processor without F16C (before 2012).
_half = _half_of_hardware if binding.get_host_cpu_features().get("f16c") else _half_of_bits


@intrinsic
def _stream(typing, target, source):  # type: ignore[no-untyped-def]
    """Write `source` into `target`, float32 [n], past the cache: no line is read only to be overwritten.

    n is a multiple of `LINE`, and `target` begins with a line of the cache (at 64 bytes).
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        line = ir.VectorType(ir.FloatType(), LINE).as_pointer()
        arrays = [
            context.make_array(kind)(context, builder, each)
            for kind, each in zip(signature.args, arguments, strict=True)
        ]
        to, origin = (builder.bitcast(array.data, line) for array in arrays)
        mark = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        count = builder.udiv(cgutils.unpack_tuple(builder, arrays[1].shape)[0], ir.Constant(ir.IntType(64), LINE))
        with cgutils.for_range(builder, count) as loop:
            value = builder.load(builder.gep(origin, [loop.index]), align=4)
            builder.store(value, builder.gep(to, [loop.index]), align=64).set_metadata("nontemporal", mark)
        return context.get_dummy_value()

    return types.void(target, source), generate


@intrinsic
def _settle(typing):  # type: ignore[no-untyped-def]
    """Wait until what was streamed can be seen by other threads."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def _compiled(half, wide):  # type: ignore[no-untyped-def]
    # Numba finds its compiled code again by what is closed over: plain values, since functions are new in each process.
    @numba.njit(nogil=True, cache=True)
    def decode(words, base, groups, group, lane, step, shift, factor, offset, stream, out):  # type: ignore[no-untyped-def]
        """Write a box [C, n0, n1, n2], float32, into `out`; nothing checks that it lies within `words`.

        Of `words` [n] that at `base` + `groups`[g] + i `step`[0] + j `step`[1] + k `step`[2] holds, of cell (i, j, k),
        the channels c of `group`[c] = g: the value in float32, its bits in float16, or four of those, each from bit
        `lane`[c] on. `stream` says to write past the cache: rows of `out` are whole lines of it then.
        """
        n0, n1, n2 = out.shape[1:]
        s0, s1, s2 = step[0], step[1], step[2]
        block = max(1, BLOCK // n2)  # rows at a time: neighbours along any axis find their line of the cache again
        rows, values = np.empty((block, n2), words.dtype), np.empty(n2, np.float32)
        for g in range(len(groups)):
            for begin in range(0, n1, block):
                count = min(block, n1 - begin)
                for i in range(n0):
                    # Unsigned: nothing is counted from the end, as numpy would with negative positions.
                    for j in range(count):
                        first, row = base + groups[g] + i * s0 + (begin + j) * s1, rows[j]
                        if s2 == 1:
                            for k in range(n2):
                                row[k] = words[np.uintp(first + k)]
                        else:
                            for k in range(n2):
                                row[k] = words[np.uintp(first + k * s2)]
                    for c in range(out.shape[0]):
                        if group[c] == g:
                            bits, a, b, d = lane[c], shift[c], factor[c], offset[c]
                            for j in range(count):
                                row = rows[j]
                                target = values if stream else out[c, i, begin + j]
                                for k in range(n2):
                                    if wide:
                                        value = _half(np.uint16(row[k] >> bits))
                                    elif half:
                                        value = _half(row[k])
                                    else:
                                        value = row[k]
                                    target[k] = (value - a) * b + d
                                if stream:
                                    _stream(out[c, i, begin + j], values)  # type: ignore[call-arg]
        if stream:
            _settle()  # type: ignore[call-arg]

    return decode


decode_wide = _compiled(True, True)
decode_half = _compiled(True, False)
decode_single = _compiled(False, False)


class HostField:
    """Decodes boxes of one field on the processor; `held` is how many samples there are in all batches together."""

    def __init__(self, field: StoredField, held: int = 1) -> None:
        self._field, self._local = field, threading.local()
        self._channels = field.shape[0]
        together = field.order[-1] == 0  # a cell's channels lie side by side
        self._wide = together and self._channels >= 4 and field.dtype == np.float16
        half = decode_wide if self._wide else decode_half
        self._kernel = half if field.dtype == np.float16 else decode_single
        #: Whether batches are written past the cache: what does not stay there need not pass through it.
        self._stream = field.extent[2] % LINE == 0 and 4 * held * math.prod(field.shape) > CACHE
        #: Words and strides of the files whose boxes can be decoded where they lie.
        self._mapped: list[tuple[np.ndarray, np.ndarray] | None] = []
        for file in field.files:
            if file.whole is None or (file.dtype, file.order) != (field.dtype, field.order):
                self._mapped.append(None)
            else:
                values = file.whole.transpose(file.order).reshape(-1)
                self._mapped.append((self._words(values), field.strides(file.whole)))
        self._strides = field.strides(self._buffer()[0])

    def _words(self, stored: np.ndarray) -> np.ndarray:
        """Return stored values [n], contiguous, as the words that the kernel reads; word i begins with value i."""
        if not self._wide:
            return stored.view(np.uint16) if stored.dtype == np.float16 else stored
        wide = np.frombuffer(stored, np.uint64, 1)
        return np.lib.stride_tricks.as_strided(wide, (len(stored) - 3,), (2,), writeable=False)

    def _buffer(self) -> tuple[np.ndarray, np.ndarray]:
        """Return this thread's own buffer for a box, and its words."""
        if not hasattr(self._local, "buffer"):
            channels, a, b, c = self._field.shape
            padded = channels, a, b + PAD, c + PAD
            whole = np.zeros([padded[axis] for axis in self._field.order], self._field.dtype)
            self._local.buffer = self._field.canonical(whole)[:, :, :b, :c], self._words(whole.reshape(-1))
        box: tuple[np.ndarray, np.ndarray] = self._local.buffer
        return box

    def tasks(self, boxes: BoxIndex, starts: np.ndarray, out: np.ndarray) -> Iterator[Callable[[], None]]:
        """Return what writes each box that begins at `starts` [n, 3] into `out`, float32 [n, C, ...]."""
        # Boxes are decoded where they lie, if they lie in one piece and keep their axes; others are copied first.
        mapped = [
            None if symmetry else self._mapped[file] for file, symmetry in zip(boxes.file, boxes.symmetry, strict=True)
        ]
        strides = np.array([self._strides if each is None else each[1] for each in mapped]).reshape(-1, 4)
        bases = np.array([each is not None for each in mapped], np.int64) * (starts * strides[:, 1:]).sum(axis=1)
        plan = self._field.plan(boxes.file, boxes.symmetry, bases, strides)
        for index, each in enumerate(mapped):
            file, words = self._field.files[boxes.file[index]], None if each is None else each[0]
            yield functools.partial(self._decode, file, starts[index], words, plan, index, out[index])

    def _decode(
        self,
        file: MappedArray,
        start: np.ndarray,
        words: np.ndarray | None,
        plan: DecodePlan,
        index: int,
        out: np.ndarray,
    ) -> None:
        """Write one box into `out`, out of the file's `words` or by way of a buffer."""
        if words is None:
            box, words = self._buffer()
            file.copy(start, box)
        channel = plan.channel[index]
        if self._wide:
            # As few words as hold all channels; the last is moved back, so that none reaches beyond its cell.
            groups = np.minimum(np.arange(0, self._channels, 4), self._channels - 4)
            group = np.searchsorted(groups, channel, side="right") - 1
            lane = (16 * (channel - groups[group])).astype(np.uint64)
        else:
            groups, group, lane = channel, np.arange(len(channel)), np.zeros(len(channel), np.uint64)
        numbers = plan.shift[index], plan.factor[index], plan.offset[index]
        box = out.reshape(self._field.shape)
        self._kernel(words, plan.base[index], groups, group, lane, plan.step[index], *numbers, self._stream, box)


class OnHost:
    """Decodes into the batches of a ring, on the processor. See `dlscale.data.loaders.direct_loader.Backend`."""

    def __init__(self, fields: list[StoredField], batch: int, slots: int) -> None:
        self._fields = [HostField(field, batch * slots) for field in fields]
        self._ring = [[torch.empty(batch, *field.spec.shape) for field in fields] for _ in range(slots)]

    def begin(self, slot: int, boxes: BoxIndex) -> tuple[list[Callable[[], None]], Callable[[], Any]]:
        """See `Backend`: one task for each box."""
        x, y = (values[: len(boxes)] for values in self._ring[slot])
        tasks = [
            task
            for field, starts, out in zip(self._fields, (boxes.input, boxes.target), (x, y), strict=True)
            for task in field.tasks(boxes, starts, out.numpy())
        ]
        return tasks, lambda: (x, y)

    def deliver(self, result: Batch) -> Batch:
        return result
