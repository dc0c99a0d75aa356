"""Simulate basins: heat diffuses through the sea, and does not cross coasts.

Shape suffixes: N samples, H W the grid.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dlscale.config.dataset import SPLITS
from dlscale.data.kind import Part
from dlscale.data.source import ArraySource

#: Number of time steps of the diffusion.
STEPS = 12
#: Largest exchange between neighbouring cells per time step, as a fraction; above 0.25, the scheme is unstable.
MAX_MIXING = 0.24


def open_source(dataset: Any, part: Part, paths: list[Path]) -> ArraySource:
    """Return all arrays of a part, one sample per row.

    `before` and `after` are temperatures [N, 1, H, W] in K, zero on land. `sea` is a mask, uint8 [N, H, W]. `mixing` is
    the exchange between neighbouring cells, a fraction per time step [N].
    """
    source = dataset.source
    rng = np.random.default_rng([source.seed, SPLITS.index(part.split)])
    count, size = getattr(source, part.split), source.size
    sea = smooth(rng.normal(size=(count, size, size)), 2) > -0.6  # about three quarters of the cells
    before = sea * smooth(rng.normal(size=(count, size, size)), 1)
    mixing = rng.uniform(0.02, MAX_MIXING, count)
    after = diffused(before, sea, mixing)
    return ArraySource(
        {"before": before[:, None], "after": after[:, None], "sea": sea, "mixing": mixing},
        channels={"before": ["temperature"], "after": ["temperature"]},
        units={"before": "K", "after": "K"},
    )


def smooth(noise_NHW: np.ndarray, passes: int) -> np.ndarray:
    """Return periodic fields of variance 1: noise, averaged `passes` times over a cell and its eight neighbours."""
    for _ in range(passes):
        for axis in (1, 2):
            noise_NHW = noise_NHW + np.roll(noise_NHW, 1, axis) + np.roll(noise_NHW, -1, axis)
    return np.asarray(noise_NHW / noise_NHW.std())


def diffused(heat_NHW: np.ndarray, sea_NHW: np.ndarray, mixing_N: np.ndarray) -> np.ndarray:
    """Return the temperatures after `STEPS` steps of diffusion; the edges of the grid are coasts, too."""
    for _ in range(STEPS):
        gain_NHW = np.zeros_like(heat_NHW)
        for axis in (1, 2):
            open_NHW = np.delete(sea_NHW, 0, axis) & np.delete(sea_NHW, -1, axis)  # between two neighbouring cells
            flow_NHW = mixing_N[:, None, None] * np.diff(heat_NHW, axis=axis) * open_NHW
            pad = [(0, 0)] * 3
            pad[axis] = (1, 1)
            gain_NHW += np.diff(np.pad(flow_NHW, pad), axis=axis)
        heat_NHW = heat_NHW + gain_NHW
    return heat_NHW
