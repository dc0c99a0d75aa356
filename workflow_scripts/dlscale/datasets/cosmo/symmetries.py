"""The 48 rotations and reflections of a cube, applied to grids and to the vectors on them.

A symmetry takes grid axis `axes[i]` to axis i and then reverses the axes in `flips`. A vector field
must turn with its grid: component i of the result is component `axes[i]` of the original, with its sign
changed where axis i was reversed. Turning the grid alone makes samples that no physics has.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Symmetry:
    """One of the 48: `axes`, a permutation of (0, 1, 2), then `flips`, whether each axis is reversed."""

    axes: tuple[int, int, int]
    flips: tuple[bool, bool, bool]

    @property
    def determinant(self) -> int:
        """+1 for a rotation, -1 for a reflection."""
        parity = sum(a > b for a, b in itertools.combinations(self.axes, 2))
        return (-1) ** (parity + sum(self.flips))


_ALL = [
    Symmetry((a, b, c), (f, g, h))
    for a, b, c in itertools.permutations((0, 1, 2))
    for f, g, h in itertools.product((False, True), repeat=3)
]
#: Identity first, then the other 23 rotations, then the 24 reflections.
SYMMETRIES: tuple[Symmetry, ...] = tuple(sorted(_ALL, key=lambda s: (-s.determinant, s.axes, s.flips)))
COUNT = {"none": 1, "rotations": 24, "full": 48}


def vectors(channels: list[str]) -> list[tuple[int, int, int]]:
    """Return the channel indices of each vector: names that end in `_x`, `_y` and `_z` and begin alike."""
    stems = [name[:-2] for name in channels if name.endswith("_x")]
    return [
        (channels.index(f"{stem}_x"), channels.index(f"{stem}_y"), channels.index(f"{stem}_z"))
        for stem in stems
        if f"{stem}_y" in channels and f"{stem}_z" in channels
    ]


def apply(symmetry: Symmetry, x_CDHW: np.ndarray, vectors_: list[tuple[int, int, int]]) -> np.ndarray:
    """Return the transformed cube (D = H = W), contiguous and of the same type; `vectors_` as `vectors` gives them."""
    turned = x_CDHW.transpose(0, *(1 + axis for axis in symmetry.axes))
    steps = tuple(slice(None, None, -1) if flip else slice(None) for flip in symmetry.flips)
    turned = turned[(slice(None), *steps)]
    result = np.ascontiguousarray(turned)
    for components in vectors_:
        for axis, channel in enumerate(components):
            values = turned[components[symmetry.axes[axis]]]
            result[channel] = -values if symmetry.flips[axis] else values
    return result


class CubeSymmetries:
    """All 48, for boxes of the channels given. See `dlscale.data.samples.Symmetries`."""

    def __init__(self, channels: list[str]) -> None:
        self._vectors = vectors(channels)
        self.axes = np.array([symmetry.axes for symmetry in SYMMETRIES])
        self.flips = np.array([symmetry.flips for symmetry in SYMMETRIES])
        self.source = np.tile(np.arange(len(channels)), (len(SYMMETRIES), 1))
        self.sign = np.ones(self.source.shape, np.float32)
        for vector in self._vectors:
            for axis, channel in enumerate(vector):
                self.source[:, channel] = np.array(vector)[self.axes[:, axis]]
                self.sign[:, channel] = np.where(self.flips[:, axis], -1, 1)

    def apply(self, number: int, x: np.ndarray) -> np.ndarray:
        """See `dlscale.data.samples.Symmetries`; the result is contiguous."""
        return apply(SYMMETRIES[number], x, self._vectors)
