"""Passes over float32 blocks that preprocessing makes, compiled by Numba: each reads the values once.

numpy makes temporary arrays for the same results, several times as much traffic to memory as the values themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np

from dlscale.data.store import Moments

#: Sums may be taken in any order, in vectors; NaN and infinity stay what they are.
_FAST = {"reassoc", "nsz", "contract"}


@numba.njit(nogil=True, cache=True, fastmath=_FAST)
def _average(x, factors, out):  # type: ignore[no-untyped-def]
    """Write into `out` [N, a, b, c] the averages of blocks of `x` [N, A, B, C]."""
    f0, f1, f2 = factors
    n, d, h, w = out.shape
    share = np.float32(1.0 / (f0 * f1 * f2))
    line, plane = np.empty((2, w * f2), np.float32)
    for number in range(n):
        for i in range(d):
            for j in range(h):
                line[:] = 0
                for p in range(f0):  # axis by axis: rounding grows with the terms of each sum, not with all cells
                    plane[:] = 0
                    for q in range(f1):
                        row = x[number, i * f0 + p, j * f1 + q]
                        for k in range(w * f2):
                            plane[k] += row[k]
                    for k in range(w * f2):
                        line[k] += plane[k]
                result = out[number, i, j]
                if f2 == 2:  # a constant distance, which becomes vector instructions
                    for k in range(w):
                        result[k] = (line[2 * k] + line[2 * k + 1]) * share
                else:
                    for k in range(w):
                        total = np.float32(0)
                        for m in range(f2):
                            total += line[k * f2 + m]
                        result[k] = total * share


def block_average(values: np.ndarray, factor: int, axes: Sequence[int], out: np.ndarray | None = None) -> np.ndarray:
    """Average blocks of `factor` cells along `axes`, of the last three of four; cells beyond the last whole block drop.

    Sums are in float32, axis by axis: error below factor * 2e-7 of the mean magnitude. `out`, float32, gets the result,
    if given; without it, and with factor 1, the result is `values` themselves.
    """
    if factor == 1 and out is None:
        return values
    factors = tuple(factor if axis in axes else 1 for axis in (1, 2, 3))
    shape = (len(values), *(size // f for size, f in zip(values.shape[1:], factors, strict=True)))
    out = np.empty(shape, np.float32) if out is None else out
    _average(np.ascontiguousarray(values, np.float32), factors, out)
    return out


@numba.njit(inline="always")
def _ordered(bits):  # type: ignore[no-untyped-def]
    """Map the bits of a float32 to an integer of the same order, and back: only integers are compared in vectors."""
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@numba.njit(nogil=True, cache=True, fastmath=_FAST)
def _moments(x, found):  # type: ignore[no-untyped-def]
    """Write mean, sum of squared deviations, minimum and maximum of each channel of `x` [N, C, n] into `found` [4, C].

    Values are taken by the thousand, so that the second look at them is at the processor's cache; the update is that
    of `Moments`.
    """
    extremes = np.empty(2, np.int32)
    for c in range(x.shape[1]):
        count, mean, m2 = 0, 0.0, 0.0
        low, high = np.int32(2**31 - 1), np.int32(-(2**31))
        for a in range(x.shape[0]):
            for first in range(0, x.shape[2], 4096):
                some = x[a, c, first : first + 4096]
                bits = some.view(np.int32)
                total, squares = 0.0, 0.0
                for i in range(len(some)):
                    total += some[i]
                own = total / len(some)
                for i in range(len(some)):
                    apart = some[i] - own
                    squares += apart * apart
                for i in range(len(bits)):
                    low, high = min(low, _ordered(bits[i])), max(high, _ordered(bits[i]))
                delta, both = own - mean, count + len(some)
                m2 += squares + delta * delta * (count * len(some) / both)
                mean += delta * (len(some) / both)
                count = both
        extremes[0], extremes[1] = _ordered(low), _ordered(high)
        found[0, c], found[1, c] = mean, m2
        found[2, c], found[3, c] = extremes.view(np.float32)


def moments(values: np.ndarray, channel_axis: int | None) -> Moments:
    """Return the moments of an array; what is not float32 takes the plain way, through float64."""
    if values.dtype != np.float32 or channel_axis not in (None, 0, 1) or not values.size:
        return Moments.of(values, channel_axis)
    shape = {None: (1, 1, -1), 0: (1, len(values), -1), 1: (*values.shape[:2], -1)}[channel_axis]
    x = np.ascontiguousarray(values).reshape(shape)
    found = np.empty((4, x.shape[1]))
    _moments(x, found)
    return Moments(x.shape[0] * x.shape[2], *found)
