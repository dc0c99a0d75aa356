"""Resizing of images with Pillow's bilinear filter, in a quarter of Pillow's time.

Numba compiles the filter for vector instructions, which compute many values at once. The horizontal pass works on
strips of rows, which are transposed before and after the pass; the vertical pass works on rows. As in Pillow's
`Resample.c`, the weights are integers. As in Pillow before version 13, the horizontal pass is always the first. Pillow
13 begins with the vertical pass for some shapes, which changes values by at most 1 of 255.
"""

from __future__ import annotations

import numpy as np

from dlscale.data.loaders.direct_host import compiled

#: Top, left, height and width of a part of an image, in pixels.
Box = tuple[int, int, int, int]
#: Number of bits after the binary point of the weights; Pillow's constant.
BITS = 22
#: Rows of a strip; as bytes, they fill a vector register.
STRIP = 32


@compiled
def _weights(extent, size, first, count):  # type: ignore[no-untyped-def]
    """Return the filter of pixels `first` to `first + count` of an edge of `extent` pixels, resized to `size` pixels.

    The result is the first source pixel of each pixel, int64 [count], the number of source pixels, int64 [count], and
    their weights, int32 [count, taps].
    """
    scale = extent / size
    reach = max(scale, 1.0)
    begin, number = np.empty(count, np.int64), np.empty(count, np.int64)
    weights = np.zeros((count, int(np.ceil(reach)) * 2 + 1), np.int32)
    for i in range(count):
        centre = (first + i + 0.5) * scale
        begin[i] = max(int(centre - reach + 0.5), 0)
        number[i] = min(int(centre + reach + 0.5), extent) - begin[i]
        total = 0.0
        for turn in range(2):  # the sum of the weights, then the weights
            for tap in range(number[i]):
                weight = max(1.0 - abs((tap + begin[i] - centre + 0.5) * (1.0 / reach)), 0.0)
                if turn:
                    weights[i, tap] = int(0.5 + weight / total * (1 << BITS))
                else:
                    total += weight
    return begin, number, weights


@compiled
def _load_strip(flat, start, stride, rows, strip):  # type: ignore[no-untyped-def]
    """Copy `rows` rows of an image, uint8 [values], into `strip` [values of a row, height], transposed."""
    for r in range(rows):
        source = flat[start + r * stride :]
        for i in range(strip.shape[0]):
            strip[i, r] = source[i]


@compiled
def _filter_rows(strip, origin, filters, sums, narrow):  # type: ignore[no-untyped-def]
    """Filter a strip, whose first pixel is pixel `origin` of a row, into `narrow` [3, columns, height]."""
    begin, number, weights = filters
    height = strip.shape[1]
    for x in range(begin.shape[0]):
        for c in range(3):
            place = 3 * (begin[x] - origin) + c
            for r in range(height):
                sums[r] = 1 << (BITS - 1)
            for tap in range(number[x]):
                weight, source = weights[x, tap], place + 3 * tap
                for r in range(height):
                    sums[r] += weight * strip[source, r]
            for r in range(height):
                narrow[c, x, r] = sums[r] >> BITS


@compiled
def _store_strip(narrow, flip, wide, row):  # type: ignore[no-untyped-def]
    """Transpose `narrow` [3, columns, height] into `wide` [3, rows, columns] at `row`; `flip` reverses the columns."""
    columns, height = narrow.shape[1:]
    for c in range(3):
        for r in range(height):
            if flip:
                for x in range(columns):
                    wide[c, row + r, x] = narrow[c, columns - 1 - x, r]
            else:
                for x in range(columns):
                    wide[c, row + r, x] = narrow[c, x, r]


@compiled
def _filter_columns(wide, filters, sums, out):  # type: ignore[no-untyped-def]
    """Filter the columns of `wide` [3, rows, columns] into `out` [3, filtered rows, columns]."""
    begin, number, weights = filters
    columns = out.shape[2]
    for c in range(3):
        for y in range(out.shape[1]):
            for x in range(columns):
                sums[x] = 1 << (BITS - 1)
            for tap in range(number[y]):
                weight, source = weights[y, tap], begin[y] - begin[0] + tap
                for x in range(columns):
                    sums[x] += weight * wide[c, source, x]
            for x in range(columns):
                out[c, y, x] = sums[x] >> BITS


@compiled
def _resize(flat, stride, box, shape, corner, flip, out, rows_at_once):  # type: ignore[no-untyped-def]
    """Resize as `resize`, in strips of `rows_at_once` rows.

    `flat` are the image's values, uint8 [H * stride]; a row has `stride` values. `rows_at_once` is an argument, because
    the compiler unrolls loops with a constant length instead of vectorizing them.
    """
    top, left, height, width = box
    rows, columns = out.shape[1:]
    vertical, horizontal = _weights(height, shape[0], corner[0], rows), _weights(width, shape[1], corner[1], columns)
    first, last = vertical[0][0], vertical[0][-1] + vertical[1][-1]
    origin, end = horizontal[0][0], horizontal[0][-1] + horizontal[1][-1]
    strip, sums = np.zeros((3 * (end - origin), rows_at_once), np.uint8), np.empty(max(rows_at_once, columns), np.int32)
    narrow = np.empty((3, columns, rows_at_once), np.uint8)
    wide = np.empty((3, last - first + rows_at_once, columns), np.uint8)
    for row in range(first, last, rows_at_once):
        _load_strip(flat, (top + row) * stride + 3 * (left + origin), stride, min(rows_at_once, last - row), strip)
        _filter_rows(strip, origin, horizontal, sums, narrow)
        _store_strip(narrow, flip, wide, row - first)
    _filter_columns(wide, vertical, sums, out)


def resize(
    pixels: np.ndarray,
    box: Box,
    shape: tuple[int, int],
    corner: tuple[int, int],
    flip: bool,
    out: np.ndarray,
) -> None:
    """Cut a box out of an image, resize the box, and write a window of the resized box into `out`.

    Parameters
    ----------
    pixels
        Image, uint8 [H, W, 3], contiguous.
    box
        The box; it must lie within the image, because compiled code does not check its reads.
    shape, corner
        Height and width of the resized box; top and left of the window in it.
    flip
        Whether to mirror the window.
    out
        Window, uint8 [3, rows, columns].
    """
    _resize(pixels.reshape(-1), 3 * pixels.shape[1], box, shape, corner, flip, out, STRIP)
