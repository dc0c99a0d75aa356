"""The operators that DALI runs for each sample: plain functions, which DALI compiles with Numba.

Their inputs are those of `DaliField.inputs`: the file's bits, the chunks' positions, where (edges [3], strides [4],
start [3], pitch [4], size [4]), steps (base, step [3], channel [C]) and numbers (shift, factor, offset) [3, C].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from dlscale.data.loaders.direct_host import decode_half, decode_single, decode_wide

Operator = tuple[Callable[..., None], Callable[..., None]]


@numba.njit(nogil=True, cache=True)
def fetch(bits, chunks, where, out):  # type: ignore[no-untyped-def]
    """Copy a box row by row, and each row chunk by chunk, into `out` [n] with its own pitch; nothing checks bounds."""
    edges, strides, start, pitch, size = where[:3], where[3:7], where[7:10], where[10:14], where[14:18]
    # A row is in one piece where cells follow each other on both sides, with all their channels or with one.
    together = strides[0] == 1 and pitch[0] == 1 and strides[3] == size[0] and pitch[3] == size[0]
    apart = strides[3] == 1 and pitch[3] == 1
    width = size[0] if together else 1
    for c in range(1 if together else size[0]):
        for i in range(size[1]):
            a = (start[0] + i) // edges[0]
            for j in range(size[2]):
                b = (start[1] + j) // edges[1]
                inside = (
                    c * strides[0]
                    + (start[0] + i - a * edges[0]) * strides[1]
                    + (start[1] + j - b * edges[1]) * strides[2]
                )
                k = 0
                while k < size[3]:
                    d = (start[2] + k) // edges[2]
                    first = start[2] + k - d * edges[2]
                    count = min(edges[2] - first, size[3] - k)
                    source = chunks[a, b, d] + inside + first * strides[3]
                    target = c * pitch[0] + i * pitch[1] + j * pitch[2] + k * pitch[3]
                    if together or apart:
                        out[target : target + count * width] = bits[source : source + count * width]
                    else:
                        for cell in range(count):
                            out[target + cell * pitch[3]] = bits[source + cell * strides[3]]
                    k += count


def decode_operator(itemsize: int, size: tuple[int, ...], together: bool) -> Operator:
    """Return the operator that reads and decodes a box, and the one that tells its `size` [C, a, b, c].

    `together` says that a cell's channels lie side by side: one word then fetches four float16, as in `direct_host`.
    """
    c0, c1, c2, c3 = size
    half = itemsize == 2
    decode = decode_half if half else decode_single
    stored, values = (np.uint16, np.uint16) if half else (np.uint32, np.float32)

    def run(out: Any, bits: Any, chunks: Any, where: Any, steps: Any, numbers: Any) -> None:
        pitch = where[10:14]
        box = np.empty(max(pitch[0] * c0, pitch[1] * c1), stored)
        fetch(bits, chunks, where, box)
        group, lane = np.arange(c0), np.zeros(c0, np.uint64)
        words, a, b, d = box.view(values), numbers[0], numbers[1], numbers[2]
        decode(words, steps[0], steps[4:], group, lane, steps[1:4], a, b, d, False, out)

    def run_wide(out: Any, bits: Any, chunks: Any, where: Any, steps: Any, numbers: Any) -> None:
        channel = steps[4:]
        box = np.empty(-(-where[11] * c1 // 4) * 4, np.uint16)  # whole words
        fetch(bits, chunks, where, box)
        # A word at every float16: as `direct_host` does, it relies on a processor that reads unaligned words.
        words = np.lib.stride_tricks.as_strided(box.view(np.uint64), (len(box) - 3,), (2,))
        groups = np.minimum(np.arange(0, c0, 4), c0 - 4)  # the last is moved back, so that none reaches beyond its cell
        group = np.searchsorted(groups, channel, side="right") - 1
        lane = (16 * (channel - groups[group])).astype(np.uint64)
        a, b, d = numbers[0], numbers[1], numbers[2]
        decode_wide(words, steps[0], groups, group, lane, steps[1:4], a, b, d, False, out)

    def setup(outs: Any, ins: Any) -> None:
        for out in outs[0]:
            out[0] = c0
            out[1] = c1
            out[2] = c2
            out[3] = c3

    return (run_wide if together and half and c0 >= 4 else run), setup


def read_operator(values: int) -> Operator:
    """Return the operator that reads a box as it is stored, and the one that tells its size."""

    def run(out: Any, bits: Any, chunks: Any, where: Any, steps: Any, numbers: Any) -> None:
        fetch(bits, chunks, where, out)

    def setup(outs: Any, ins: Any) -> None:
        for out in outs[0]:
            out[0] = values

    return run, setup
