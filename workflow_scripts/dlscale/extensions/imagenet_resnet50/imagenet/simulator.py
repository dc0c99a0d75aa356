"""Simulate JPEGs of ten textures: a disc or square with a pattern, on a noisy ground.

Position, size and colours of the figure are random; the pattern is the class.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dlscale.extensions.imagenet_resnet50.imagenet.pack import Picture, shard, write_pack

#: Patterns by class: functions of x and y (pixels from the figure's middle) and of the period (pixels); positive values
#: are bright.
PATTERNS: dict[str, Callable[[np.ndarray, np.ndarray, float], np.ndarray]] = {
    "checks": lambda x, y, p: np.sin(2 * np.pi * x / p) * np.sin(2 * np.pi * y / p),
    "diagonals": lambda x, y, p: np.sin(2 * np.pi * (x + y) / (1.4 * p)),
    "dots": lambda x, y, p: np.cos(2 * np.pi * x / p) + np.cos(2 * np.pi * y / p) - 0.9,
    "horizontals": lambda x, y, p: np.sin(2 * np.pi * y / p),
    "lattice": lambda x, y, p: np.maximum(np.cos(2 * np.pi * x / p), np.cos(2 * np.pi * y / p)) - 0.8,
    "plain": lambda x, y, p: np.ones_like(x),
    "rings": lambda x, y, p: np.sin(2 * np.pi * np.hypot(x, y) / p),
    "spokes": lambda x, y, p: np.sin(9 * np.arctan2(y, x)),
    "verticals": lambda x, y, p: np.sin(2 * np.pi * x / p),
    "waves": lambda x, y, p: np.sin(2 * np.pi * (y / p + 0.35 * np.sin(2 * np.pi * x / (2 * p)))),
}
CLASSES = list(PATTERNS)


def acquire(dataset: Any, raw: Any, out: Path, progress: Callable[[int, int | None], None]) -> None:
    """Pack a shard of a split: the raw file's index is the number of the shard."""
    source, split = dataset.source, raw.name.partition("-")[0]
    chosen = shard(getattr(source, split), raw.index, getattr(dataset.shards, split))
    seeds = [[source.seed, split == "valid", number] for number in chosen]
    pictures = [
        Picture(f"image {seed[2]} of {split}", label(seed), partial(jpeg, seed, *source.edges)) for seed in seeds
    ]
    write_pack(out, pictures, CLASSES, dataset.form, progress)


def label(seed: list[int]) -> int:
    """Return the class of an image."""
    return int(np.random.default_rng(seed).integers(len(CLASSES)))


def draw(seed: list[int], least: int, greatest: int) -> np.ndarray:
    """Return an image, uint8 [H, W, 3], whose edges have `least` to `greatest` pixels."""
    rng = np.random.default_rng(seed)
    pattern = PATTERNS[CLASSES[rng.integers(len(CLASSES))]]
    height, width = rng.integers(least, greatest + 1, 2)
    radius = min(height, width) * rng.uniform(0.3, 0.48)
    row, column = (rng.uniform(0.9 * radius, edge - 0.9 * radius) for edge in (height, width))
    y, x = np.mgrid[:height, :width].astype(np.float32) - np.array([row, column], np.float32)[:, None, None]
    shade = 0.5 + 0.5 * np.tanh(3 * pattern(x, y, radius * rng.uniform(0.3, 0.5)))
    distance = np.hypot(x, y) if rng.random() < 0.5 else np.maximum(np.abs(x), np.abs(y))
    inside = (1 / (1 + np.exp(distance - radius)))[:, :, None]
    ground, dark, bright = rng.uniform(0, 255, 3), rng.uniform(0, 90, 3), rng.uniform(165, 255, 3)
    image = ground + inside * (dark + shade[:, :, None] * (bright - dark) - ground)
    return np.clip(image + rng.normal(0, 8, image.shape), 0, 255).astype(np.uint8)


def jpeg(seed: list[int], least: int, greatest: int) -> bytes:
    """Return the image as a JPEG file."""
    file = io.BytesIO()
    Image.fromarray(draw(seed, least, greatest)).save(file, "JPEG", quality=90)
    return file.getvalue()
