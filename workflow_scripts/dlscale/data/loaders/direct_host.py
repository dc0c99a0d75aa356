"""The `direct` loader on a processor: boxes of mapped files are decoded straight into batches that are used again.

The loop over cells is compiled by Numba: numpy and PyTorch would pass over the data several times, and memory is what
it costs. Channels stored last lie side by side, so one word of 64 bits fetches four float16 of a cell; a row of such
words is gathered in the order of the result and then taken apart channel by channel, which the compiler turns into
vector instructions.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch

from dlscale.data import mapped as raw
from dlscale.data.loaders.base import Batch
from dlscale.data.loaders.decode import Recipe
from dlscale.data.loaders.direct_stored import Fill, Finish, Stored
from dlscale.data.mapped import Raw
from dlscale.data.samples import BoxField, BoxIndex

#: Cells added to the rows of a thread's buffer; see `raw.buffer`.
PAD = 4


@numba.njit(inline="always")
def _half(bits):  # type: ignore[no-untyped-def]
    """Float32 of a float16 given by its bits. Shifted into place only the exponent's bias is wrong: times 2^112."""
    sign = (bits & np.uint32(0x8000)) << np.uint32(16)
    moved = (bits & np.uint32(0x7FFF)) << np.uint32(13)
    value = np.uint32(moved | sign).view(np.float32) * np.float32(2.0**112)
    if moved >= np.uint32(0x0F800000):  # infinite, or not a number
        value = np.uint32(moved | sign | np.uint32(0x7F800000)).view(np.float32)
    return value


@numba.njit(inline="always")
def _single(bits):  # type: ignore[no-untyped-def]
    return np.uint32(bits).view(np.float32)


def _compiled(value, mask):  # type: ignore[no-untyped-def]
    @numba.njit(nogil=True, cache=True)
    def decode(words, base, groups, group, lane, step, shift, factor, offset, out):  # type: ignore[no-untyped-def]
        """Write a box [C, n0, n1, n2], float32, into `out`; nothing checks that it lies within `words`.

        `words` [n] are unsigned integers; word `base` + `groups`[g] + i `step`[0] + j `step`[1] + k `step`[2] holds, of
        cell (i, j, k), the channels c of `group`[c] = g, each from bit `lane`[c] on.
        """
        n0, n1, n2 = out.shape[1:]
        s0, s1, s2 = step[0], step[1], step[2]
        row = np.empty(n2, words.dtype)
        for g in range(len(groups)):
            for i in range(n0):
                for j in range(n1):
                    first = base + groups[g] + i * s0 + j * s1
                    for k in range(n2):
                        row[k] = words[first + k * s2]
                    for c in range(out.shape[0]):
                        if group[c] == g:
                            bits, a, b, d = lane[c], shift[c], factor[c], offset[c]
                            for k in range(n2):
                                out[c, i, j, k] = (value(np.uint32(row[k] >> bits) & mask) - a) * b + d

    return decode


#: Compiled loops by the bytes of a stored value.
KERNELS = {2: _compiled(_half, np.uint32(0xFFFF)), 4: _compiled(_single, np.uint32(0xFFFFFFFF))}


class HostDecoder:
    """Decodes boxes of one side into arrays of the model's.

    Parameters
    ----------
    side
        What the boxes are.
    together
        Whether a cell's channels lie side by side in memory (channels stored last).
    """

    def __init__(self, side: BoxField, together: bool) -> None:
        self._side = side
        self._channels = side.shape[0]
        self._lanes = 4 if together and self._channels >= 4 else 1

    def words(self, stored: np.ndarray) -> np.ndarray:
        """Return stored values [n], contiguous, as the words that the kernel reads; word i begins with value i."""
        bits = stored.view(f"u{stored.itemsize}")
        if self._lanes == 1 or stored.itemsize != 2:
            return bits
        wide = np.frombuffer(bits, np.uint64, 1)
        return np.lib.stride_tricks.as_strided(wide, (len(bits) - 3,), (2,), writeable=False)

    def decode(self, words: np.ndarray, recipe: Recipe, index: int, out: np.ndarray) -> None:
        """Write sample `index` of a recipe into `out`, float32 of the side's shape. Threads may do so side by side."""
        channel = recipe.channel[index]
        if words.dtype == np.uint64:
            # As few words as hold all channels; the last is moved back, so that none reaches beyond its cell.
            groups = np.minimum(np.arange(0, self._channels, 4), self._channels - 4)
            group = np.searchsorted(groups, channel, side="right") - 1
            lane = (16 * (channel - groups[group])).astype(np.uint64)
        else:
            groups, group, lane = channel, np.arange(len(channel)), np.zeros(len(channel), words.dtype)
        kernel = KERNELS[4 if words.dtype == np.uint32 else 2]
        step, base = recipe.step[index], recipe.base[index]
        numbers = recipe.shift[index], recipe.factor[index], recipe.offset[index]
        kernel(words, base, groups, group, lane, step, *numbers, out.reshape(self._channels, *self._side.extent))


class OnHost:
    """Decodes into the batches of a ring, on the processor."""

    def __init__(self, sides: list[Stored], batch: int, slots: int) -> None:
        self._sides, self._local = sides, threading.local()
        self._decoders = [HostDecoder(stored.side, stored.order[-1] == 0) for stored in sides]
        self._ring = [[torch.empty(batch, *stored.side.spec.shape) for stored in sides] for _ in range(slots)]
        self._maps: list[list[tuple[np.ndarray, np.ndarray] | None]] = []
        for stored, decoder in zip(sides, self._decoders, strict=True):
            found: list[tuple[np.ndarray, np.ndarray] | None] = []
            for file in stored.raws:
                if file.whole is None or (file.dtype, file.order) != (stored.dtype, stored.order):
                    found.append(None)
                else:
                    flat = file.whole.transpose(file.order).reshape(-1)
                    found.append((decoder.words(flat), stored.strides(file.whole)))
            self._maps.append(found)
        self._strides = [stored.strides(self._buffer(number)[0]) for number, stored in enumerate(sides)]

    def _buffer(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return this thread's own buffer for a box of a side: the box, and its words."""
        buffers = self._local.__dict__.setdefault("buffers", {})
        if number not in buffers:
            stored = self._sides[number]
            whole, boxes = raw.buffer(1, stored.box, stored.order, PAD, lambda shape: np.zeros(shape, stored.dtype))
            buffers[number] = boxes[0], self._decoders[number].words(whole.reshape(-1))
        found: tuple[np.ndarray, np.ndarray] = buffers[number]
        return found

    def begin(self, slot: int, places: BoxIndex) -> tuple[list[Fill], Finish]:
        """See `Way`: one task a sample and side."""
        count = len(places.file)
        batch = [side[:count] for side in self._ring[slot]]
        tasks: list[Fill] = []
        for number, (stored, starts) in enumerate(zip(self._sides, (places.input, places.target), strict=True)):
            # Boxes that are not turned are decoded where they lie, if they lie in one piece; others are copied first.
            maps = [
                None if turn else self._maps[number][file]
                for file, turn in zip(places.file, places.symmetry, strict=True)
            ]
            strides = np.array([self._strides[number] if found is None else found[1] for found in maps]).reshape(-1, 4)
            bases = [
                0 if found is None else int(start @ found[1][1:]) for found, start in zip(maps, starts, strict=True)
            ]
            recipe = stored.recipes.make(places.file, places.symmetry, np.array(bases, dtype=np.int64), strides)
            out = batch[number].numpy()
            for index, found in enumerate(maps):
                file = stored.raws[places.file[index]]
                words = None if found is None else found[0]
                tasks.append(_Task(self, number, file, starts[index], words, recipe, index, out[index]))
        return tasks, lambda: batch

    def deliver(self, result: Any) -> Batch:
        """See `Way`."""
        x, y = result
        return x, y

    def decode(self, task: _Task) -> None:
        """Do one task."""
        words = task.words
        if words is None:
            box, words = self._buffer(task.number)
            task.file.copy(task.start, box)
        self._decoders[task.number].decode(words, task.recipe, task.index, task.out)


@dataclass(frozen=True)
class _Task:
    """One box to decode on the host."""

    way: OnHost
    number: int
    file: Raw
    start: np.ndarray
    words: np.ndarray | None
    recipe: Recipe
    index: int
    out: np.ndarray

    def __call__(self) -> None:
        self.way.decode(self)
