"""Crops of decoded images, resized as Pillow does it, bit for bit, straight into a batch.

Bytes are resized in two passes, along rows and then along columns (see `geometry.resized`). Each pass weighs pixels by
integers, in units of 2^-22, and rounds to bytes. The loop here is compiled, and threads run it side by side.
"""

from __future__ import annotations

import math

import numba
import numpy as np

BITS = 22  # of a weight's fraction, as Pillow's
HALF = 1 << (BITS - 1)


@numba.njit(nogil=True, cache=True)
def _weights(source, target, first, count):  # type: ignore[no-untyped-def]
    """Return where the pixels begin that `count` outputs from `first` on are made of, how many, and their weights.

    An edge of `source` pixels becomes one of `target`, by a triangle that is as wide as an output pixel, or at least
    two pixels: bilinear, with antialiasing.
    """
    scale = source / target
    reach = max(scale, 1.0)
    begin, length = np.empty(count, np.int64), np.empty(count, np.int64)
    share = np.empty(2 * math.ceil(reach) + 1)
    weight = np.empty((count, len(share)), np.int32)
    for i in range(count):
        middle = (first + i + 0.5) * scale
        low = max(int(middle - reach + 0.5), 0)
        high = min(int(middle + reach + 0.5), source)
        total = 0.0
        for k in range(high - low):
            distance = abs((k + low - middle + 0.5) * (1.0 / reach))
            share[k] = 1.0 - distance if distance < 1.0 else 0.0
            total += share[k]
        for k in range(high - low):
            weight[i, k] = int(0.5 + share[k] / total * (1 << BITS))
        begin[i], length[i] = low, high - low
    return begin, length, weight


@numba.njit(nogil=True, cache=True)
def resample(pixels, width, crop, edges, corner, flip, out):  # type: ignore[no-untyped-def]
    """Write a part of a resized crop into `out`, uint8 [3, size, size]; nothing checks that it lies within `pixels`.

    Parameters
    ----------
    pixels
        Of the whole image, uint8 [H `width` 3].
    crop
        Top, left, height and width of what is resized.
    edges
        Height and width of the whole result.
    corner
        Its row and column with which `out` begins.
    flip
        Whether `out` is mirrored, left to right.
    """
    top, left, height, columns = crop
    size = out.shape[1]
    x_begin, x_length, x_weight = _weights(columns, edges[1], corner[1], size)
    y_begin, y_length, y_weight = _weights(height, edges[0], corner[0], size)
    low, high = y_begin[0], y_begin[size - 1] + y_length[size - 1]
    rows = np.empty((3, high - low, size), np.uint8)  # after the first pass
    # The weights are positive, and their sum is 1 but for rounding: no sum exceeds a byte.
    for row in range(high - low):
        start = ((top + low + row) * width + left) * 3
        for i in range(size):
            red, green, blue = HALF, HALF, HALF
            at = start + 3 * x_begin[i]
            for k in range(x_length[i]):
                weight = x_weight[i, k]
                red += pixels[np.uintp(at)] * weight
                green += pixels[np.uintp(at + 1)] * weight
                blue += pixels[np.uintp(at + 2)] * weight
                at += 3
            place = size - 1 - i if flip else i
            rows[0, row, place] = red >> BITS
            rows[1, row, place] = green >> BITS
            rows[2, row, place] = blue >> BITS
    sums = np.empty(size, np.int32)
    for c in range(3):
        for j in range(size):
            sums[:] = HALF
            for k in range(y_length[j]):
                weight, source = y_weight[j, k], rows[c, y_begin[j] - low + k]
                for i in range(size):
                    sums[i] += np.int32(source[i]) * weight
            target = out[c, j]
            for i in range(size):
                target[i] = sums[i] >> BITS
