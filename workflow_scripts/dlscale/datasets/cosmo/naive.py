"""What a straight line knows of the gas: the naive answer that sees the dark matter at the same point, and no more."""

from __future__ import annotations

import numpy as np

from dlscale.data.manifest import Manifest
from dlscale.data.samples import BoxField

#: Blocks of the training volumes that the line is fitted to, and their edge: two million points for ten numbers or so.
BLOCKS, EDGE = 64, 32


def line(manifest: Manifest) -> np.ndarray:
    """Return what each output is of the inputs at its point and of 1, float32 [outputs, inputs + 1], in model units.

    The squared error over blocks of the training volumes is least; where they lie is drawn once and for all.
    """
    grid = manifest.fields["Nbody"].grid
    extent = (min(EDGE, grid[0]), min(EDGE, grid[1]), min(EDGE, grid[2]))
    x, y = (BoxField(manifest, "train", name, extent) for name in ("Nbody", "Hydro"))
    rng = np.random.default_rng(0)
    inputs, outputs = x.shape[0] + 1, y.shape[0]
    gram, moment = np.zeros((inputs, inputs)), np.zeros((inputs, outputs))
    for block in range(BLOCKS):
        file = block % len(x.readers)
        start = np.array([rng.integers(edge - size + 1) for edge, size in zip(grid, extent, strict=True)])
        values = x.read(file, start, 0).reshape(inputs - 1, -1).astype(np.float64)
        terms = np.concatenate([values, np.ones((1, values.shape[1]))])
        gram += terms @ terms.T
        moment += terms @ y.read(file, start, 0).reshape(outputs, -1).T.astype(np.float64)
    return (np.linalg.pinv(gram, hermitian=True) @ moment).T.astype(np.float32)
