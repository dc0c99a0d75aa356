"""Samples of volumes: cubic crops, turned at random for training, fixed for validation.

A symmetry moves grid axis `axes[i]` to axis i, then reverses the axes in `flips`. Vectors turn with the grid: component
i of the result is component `axes[i]`, negated if axis i was reversed. SC22's programs do not turn vectors.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dlscale.core.errors import UserError
from dlscale.data import sampling
from dlscale.data.manifest import Manifest
from dlscale.data.samples import BoxField, BoxIndex, GridSamples
from dlscale.data.store import Field, Reader, check_finite

if TYPE_CHECKING:
    from dlscale.extensions.cosmo_unet.cosmo.kind import CropSamples


@dataclass(frozen=True)
class Symmetry:
    """Symmetry of the cube: a permutation `axes` of (0, 1, 2), then the reversal of axes marked in `flips`."""

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


def _published(symmetry: Symmetry) -> bool:
    """Return whether a symmetry is one of the 24 «rotations» of SC22's PyTorch loader, of which 8 are reflections.

    If no axis moves, zero or two axes are reversed. If two axes are swapped, one of them is reversed, and the third may
    be reversed. If all axes move, at least two are reversed.
    """
    reversed_ = [flip for axis, flip in enumerate(symmetry.flips) if symmetry.axes[axis] != axis]
    if not reversed_:
        return symmetry.determinant == 1
    return sum(reversed_) == 1 if len(reversed_) == 2 else sum(reversed_) >= 2


#: Symmetries by value of `samples.symmetry`, beginning with the identity; all symmetries of a value are equally likely.
CHOICES: dict[str, tuple[Symmetry, ...]] = {
    "none": SYMMETRIES[:1],
    "rotations": SYMMETRIES[:24],
    "full": SYMMETRIES,
    "published": tuple(filter(_published, SYMMETRIES)),
    # SC22's DALI loader reverses axes of a box, but never swaps axes. The loader does not name the layout of boxes, so
    # DALI takes the first axis for the frames of a video, and never reverses this axis.
    "published_dali": tuple(s for s in SYMMETRIES if s.axes == (0, 1, 2) and not s.flips[0]),
}
#: Number of blocks of training volumes for the linear fit, and edge of a block, cells; together two million points.
BLOCKS, EDGE = 64, 32


def apply(symmetry: Symmetry, x_CDHW: np.ndarray, vectors_: list[tuple[int, int, int]]) -> np.ndarray:
    """Return a transformed copy of the cube (D = H = W); `vectors_` are the channels of each vector.

    Each channel is copied once, directly into the result, which has the axis order of the turned view in memory.
    """
    turned = x_CDHW.transpose(0, *(1 + axis for axis in symmetry.axes))
    steps = tuple(slice(None, None, -1) if flip else slice(None) for flip in symmetry.flips)
    turned = turned[(slice(None), *steps)]
    source, negative = list(range(len(turned))), [False] * len(turned)
    for components in vectors_:
        for axis, channel in enumerate(components):
            source[channel], negative[channel] = components[symmetry.axes[axis]], symmetry.flips[axis]
    result = np.empty_like(turned)
    for channel, (which, minus) in enumerate(zip(source, negative, strict=True)):
        if minus:
            np.negative(turned[which], out=result[channel])
        else:
            np.copyto(result[channel], turned[which])
    return result


class CubeSymmetries:
    """Symmetries that `samples.symmetry` allows, for boxes with the given channels.

    Channels `NAME_x`, `NAME_y` and `NAME_z` are a vector. The class implements `dlscale.data.samples.Symmetries`.
    """

    def __init__(self, channels: list[str], choice: str) -> None:
        turning = [] if choice.startswith("published") else channels
        vectors = [[name[:-1] + axis for axis in "xyz"] for name in turning if name.endswith("_x")]
        self._vectors = [(channels.index(x), channels.index(y), channels.index(z)) for x, y, z in vectors]
        self._chosen = CHOICES[choice]
        self.axes = np.array([symmetry.axes for symmetry in self._chosen])
        self.flips = np.array([symmetry.flips for symmetry in self._chosen])
        self.source = np.tile(np.arange(len(channels)), (len(self._chosen), 1))
        self.sign = np.ones(self.source.shape, np.float32)
        for vector in self._vectors:
            for axis, channel in enumerate(vector):
                self.source[:, channel] = np.array(vector)[self.axes[:, axis]]
                self.sign[:, channel] = np.where(self.flips[:, axis], -1, 1)

    def apply(self, number: int, x: np.ndarray) -> np.ndarray:
        return apply(self._chosen[number], x, self._vectors)


class Crops(GridSamples):
    """Crops of the volumes of a split.

    Training crops are random: every offset of every volume is equally likely. Validation and test crops are fixed:
    disjoint, evenly spread, not turned.
    """

    def __init__(self, manifest: Manifest, split: str, settings: CropSamples, seed: int) -> None:
        files = manifest.files(split)
        self.crop, self._seed, self._training = settings.crop, seed, split == "train"
        choice = settings.symmetry if self._training else "none"
        super().__init__(
            *(
                BoxField(
                    manifest, split, name, (self.crop,) * 3, CubeSymmetries(manifest.fields[name].channels, choice)
                )
                for name in ("Nbody", "Hydro")
            )
        )
        self._symmetries = len(CHOICES[choice])
        edges = np.array([reader.shape[1:] for reader in self.input.readers])
        for file, edge in zip(files, edges, strict=True):
            if min(edge) < self.crop:
                raise UserError(
                    f"samples.crop {self.crop} is larger than the volume {tuple(map(int, edge))} of "
                    f"{manifest.path(file)}; choose at most {min(edge)}"
                )
        self._offsets = edges - self.crop + 1  # [V, 3]: number of possible offsets along each axis
        self._shares = np.cumsum(self._offsets.prod(axis=1, dtype=np.float64))
        self._grid = edges // self.crop
        available = int(self._grid.prod(axis=1).sum())
        self.size: int = settings.train if self._training else min(settings.valid, available)
        self._fixed = sampling.evenly(available, self.size)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - an epoch's table serves all its samples; two epochs overlap
    def table(self, epoch: int) -> np.ndarray:
        """Return volume, three offsets and symmetry of every training sample of an epoch, int64 [size, 5]."""
        w = sampling.words(self._seed, epoch, "crops", self.size)
        share = (w[:, 0] >> np.uint64(11)) * 2.0**-53 * self._shares[-1]
        volume = np.searchsorted(self._shares, share, side="right").clip(max=len(self._shares) - 1)
        low = w << np.uint64(32)  # the lower half of each random word
        offsets = self._offsets[volume]
        starts = [sampling.below(each, offsets[:, axis]) for axis, each in enumerate((w[:, 1], low[:, 1], w[:, 2]))]
        return np.stack([volume, *starts, sampling.below(w[:, 3], self._symmetries)], axis=1)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - as above
    def boxes(self, epoch: int) -> BoxIndex:
        if self._training:
            table = self.table(epoch)
            return BoxIndex(table[:, 0], table[:, 1:4], table[:, 1:4], table[:, 4])
        volume, cell = sampling.locate(self._grid.prod(axis=1), self._fixed)
        grid_N3 = self._grid[volume]
        z, cell = np.divmod(cell, grid_N3[:, 1] * grid_N3[:, 2])
        y, x = np.divmod(cell, grid_N3[:, 2])
        start = np.stack([z, y, x], axis=1) * self.crop
        return BoxIndex(volume, start, start, np.zeros_like(volume))


def line(manifest: Manifest) -> np.ndarray:
    """Fit each output linearly to the inputs at the same point; return the coefficients.

    The coefficients are float32 [outputs, inputs + 1], in model units; the last column is the constant. The fit is a
    baseline without learning.
    """
    grids = np.array([Reader(manifest.path(file), "Nbody").shape[1:] for file in manifest.files("train")])
    a, b, c = np.minimum(EDGE, grids.min(axis=0)).tolist()
    extent = a, b, c
    x, y = (BoxField(manifest, "train", name, extent) for name in ("Nbody", "Hydro"))
    rng = np.random.default_rng(0)
    inputs, outputs = x.shape[0] + 1, y.shape[0]
    gram, moment = np.zeros((inputs, inputs)), np.zeros((inputs, outputs))
    for block in range(BLOCKS):
        file = block % len(x.readers)
        start = np.array([rng.integers(edge - size + 1) for edge, size in zip(grids[file], extent, strict=True)])
        given, wanted = (box.read(file, start, 0) for box in (x, y))
        for name, box, values in (("Nbody", x, given), ("Hydro", y, wanted)):
            info = manifest.fields[name]
            field = Field(name, tuple(info.channels), tuple(info.units), values.shape, 0)
            check_finite(values, field, box.readers[file].path, int(start[0]))
        values = given.reshape(inputs - 1, -1).astype(np.float64)
        terms = np.concatenate([values, np.ones((1, values.shape[1]))])
        gram += terms @ terms.T
        moment += terms @ wanted.reshape(outputs, -1).T.astype(np.float64)
    return (np.linalg.pinv(gram, hermitian=True) @ moment).T.astype(np.float32)


open_samples = Crops
