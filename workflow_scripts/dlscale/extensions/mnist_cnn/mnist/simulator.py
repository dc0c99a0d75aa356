"""Digits of seven strokes, as on a pocket calculator: shifted, slanted, blurred and noisy."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dlscale.core.files import atomic_write

SIZE = 28
#: Ends (x0, y0, x1, y1) of the strokes a to g, in units of a digit's width and height.
STROKES = np.array(
    [(0, 0, 1, 0), (1, 0, 1, 0.5), (1, 0.5, 1, 1), (0, 1, 1, 1), (0, 0.5, 0, 1), (0, 0, 0, 0.5), (0, 0.5, 1, 0.5)]
)
#: Strokes of the digits 0 to 9.
DIGITS = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcfgd")


def labels(count: int, seed: int, split: int) -> np.ndarray:
    """Return the digits of a split, uint8 [count]."""
    return np.random.default_rng([seed, split, 0]).integers(0, 10, count, dtype=np.uint8)


def images(count: int, seed: int, split: int, progress: Callable[[int, int | None], None]) -> np.ndarray:
    """Return the images of a split's digits, uint8 [count, 28, 28]; 0 is black."""
    rng = np.random.default_rng([seed, split, 1])
    y, x = np.mgrid[:SIZE, :SIZE].astype(np.float32)
    drawn = np.empty((count, SIZE, SIZE), np.uint8)
    for number, digit in enumerate(labels(count, seed, split)):
        width, height = rng.uniform(7, 11), rng.uniform(14, 18)
        left, top = rng.uniform(5, 22 - width), rng.uniform(4, 24 - height)
        slant, thickness = rng.uniform(-0.2, 0.2), rng.uniform(1.0, 1.8)
        distance = np.full((SIZE, SIZE), np.inf, np.float32)
        for stroke in DIGITS[digit]:
            x0, y0, x1, y1 = STROKES["abcdefg".index(stroke)] * (width, height, width, height) + (left, top, left, top)
            ends = [(px + slant * (14 - py), py) for px, py in ((x0, y0), (x1, y1))]
            distance = np.minimum(distance, _distance(x, y, *ends))
        ink = 1 / (1 + np.exp(3 * (distance - thickness))) + rng.normal(0, 0.05, (SIZE, SIZE))
        drawn[number] = (255 * ink.clip(0, 1)).astype(np.uint8)
        progress(number + 1, count)
    return drawn


def _distance(x: np.ndarray, y: np.ndarray, a: tuple[float, float], b: tuple[float, float]) -> np.ndarray:
    """Return the distance of each cell from the segment between two points."""
    dx, dy = b[0] - a[0], b[1] - a[1]
    along = np.clip(((x - a[0]) * dx + (y - a[1]) * dy) / (dx * dx + dy * dy), 0, 1)
    return np.hypot(x - a[0] - along * dx, y - a[1] - along * dy)


def acquire(dataset: Any, raw: Any, out: Path, progress: Callable[[int, int | None], None]) -> None:
    """Write a split's images or labels as an IDX file."""
    source = dataset.source
    count = getattr(source, ("train", "valid", "test")[raw.index])
    if "images" in raw.name:
        values = images(count, source.seed, raw.index, progress)
    else:
        values = labels(count, source.seed, raw.index)
    with atomic_write(out) as temporary, open(temporary, "wb") as file:
        file.write(struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape))
        file.write(values.tobytes())
