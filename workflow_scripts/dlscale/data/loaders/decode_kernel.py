"""The formula of `decode` as one kernel, in Triton: each value is read once, and written once as the model takes it.

Of a crop of 64^3 cells and 9 channels in float16 it reads 4.7 MB and writes 9.4 MB of float32 (inputs of a model with
16-bit weights take half); PyTorch's operations on the same crop move about 130 MB.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Of a tile: rows, and values of each. Rows are neighbours in what is stored: 8 float32 are one sector of memory.
ROWS, VALUES = 8, 512


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    stored, places, numbers, out, n0, n1, n2, width, C: tl.constexpr, LAST: tl.constexpr, ROWS: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """Write a tile of `ROWS` rows along one axis of a box and `VALUES` values along its last.

    What is written lies side by side along a row: cell after cell, with all channels of each if they come last
    (`LAST`). What is read lies side by side along any axis, since boxes are turned. If that is the last one, rows are
    read as they are written. Else the tile's rows follow the axis along which neighbours are nearest in what is stored:
    the sectors of memory that one row touches serve the others, out of the first cache. So whole sectors move on both
    sides, as in a transpose by tiles.

    Positions are 64-bit integers: one addition for each value, as to a pointer of a GPU in any case.
    """
    sample = tl.program_id(1).to(tl.int64)
    places += sample * (4 + C)
    numbers += sample * (3 * C)
    base, s0, s1, s2 = tl.load(places), tl.load(places + 1), tl.load(places + 2), tl.load(places + 3)
    swap = (n0 > 1) & ((n1 == 1) | (tl.abs(s0) < tl.abs(s1)))  # rows along the first axis, not along the second
    count, others = tl.where(swap, n0, n1), tl.where(swap, n1, n0)
    row_step, other_step = tl.where(swap, s0, s1), tl.where(swap, s1, s0)
    row_pitch, other_pitch = tl.where(swap, n1, 1), tl.where(swap, 1, n1)

    tile = tl.program_id(0)
    across = (width + VALUES - 1) // VALUES
    m = tile % across * VALUES + tl.arange(0, VALUES)
    tile = tile // across
    line = 0  # of the result, [n0, n1] of them, or [C, n0, n1]
    if LAST:
        k, c = m // C, m % C
    else:
        k, c = m, tile % C + 0 * m
        line += tile % C * n0 * n1
        tile = tile // C
    down = (count + ROWS - 1) // ROWS
    row = tile % down * ROWS + tl.arange(0, ROWS)
    other = tile // down

    inside = m < width
    channel = tl.load(places + 4 + c, inside, 0)
    shift = tl.load(numbers + c, inside, 0.0)
    factor = tl.load(numbers + C + c, inside, 0.0)
    offset = tl.load(numbers + 2 * C + c, inside, 0.0)
    # No condition is a number of its own: the interpreter of Triton 3.9 would make it one of many integers.
    mask = (row < tl.where(other < others, count, 0))[:, None] & inside[None]
    source = stored + base + other * other_step + (k * s2 + channel)[None] + (row * row_step)[:, None]
    value = (tl.load(source, mask, 0.0).to(tl.float32) - shift[None]) * factor[None] + offset[None]
    line += other * other_pitch
    target = out + sample * (n0 * n1 * n2 * C) + (line + row * row_pitch)[:, None] * width + m[None]
    tl.store(target, value.to(out.dtype.element_ty), mask)


def decode(
    stored: torch.Tensor, places: torch.Tensor, numbers: torch.Tensor, extent: tuple[int, int, int], out: torch.Tensor
) -> None:
    """Write into `out` [B, C, *extent], contiguous or with channels last, what the formula makes of `stored` [values].

    `places` and `numbers` are those of a `DecodePlan`, and all on one device.
    """
    count, channels = len(places), numbers.shape[2]
    n0, n1, n2 = extent
    last = not out.is_contiguous()
    width = n2 * channels if last else n2
    lines = max(triton.cdiv(n0, ROWS) * n1, triton.cdiv(n1, ROWS) * n0)
    tiles = triton.cdiv(width, VALUES) * lines * (1 if last else channels)
    if not count:
        return
    # Not fused into multiply-add: the digits are those of a processor.
    _decode[tiles, count](
        stored, places, numbers, out, n0, n1, n2, width, channels, last, ROWS, VALUES, enable_fp_fusion=False
    )  # fmt: skip
