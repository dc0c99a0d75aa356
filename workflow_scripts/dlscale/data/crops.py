"""Samples of volumes: cubic crops, turned at random for training, fixed for validation."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from dlscale.data import sampling
from dlscale.data.augmentation import COUNT, SYMMETRIES, apply, vectors
from dlscale.data.manifest import Manifest
from dlscale.data.store import Reader
from dlscale.runtime.errors import UserError
from dlscale.runtime.schema.run import CropSamples


@dataclass(frozen=True)
class Crop:
    """Where a sample lies: volume, first cell along D, H, W, and its symmetry's number."""

    volume: int
    offset: tuple[int, int, int]
    symmetry: int


class Crops:
    """See `dlscale.data.samples.Samples`.

    Training sample i is a crop at random: every offset that fits is equally likely, the last one too,
    and larger volumes are chosen as much more often as they hold more offsets. Validation and test are
    fixed: disjoint crops on a grid, evenly spread, not turned.
    """

    def __init__(self, manifest: Manifest, split: str, settings: CropSamples, seed: int) -> None:
        files = manifest.files(split)
        self._inputs = [Reader(manifest.path(file), "Nbody") for file in files]
        self._targets = [Reader(manifest.path(file), "Hydro") for file in files]
        self._vectors = [vectors(manifest.fields[name].channels) for name in ("Nbody", "Hydro")]
        self.crop, self._seed, self._training = settings.crop, seed, split == "train"
        self._symmetries = COUNT[settings.symmetry] if self._training else 1
        edges = np.array([reader.shape[1:] for reader in self._inputs])
        for file, edge in zip(files, edges, strict=True):
            if min(edge) < self.crop:
                raise UserError(
                    f"samples.crop {self.crop} is larger than the volume {tuple(map(int, edge))} of "
                    f"{manifest.path(file)}; choose at most {min(edge)}"
                )
        self._offsets = edges - self.crop + 1  # [V, 3]: how many there are, the last included
        self._shares = np.cumsum(self._offsets.prod(axis=1, dtype=np.float64))
        self._grid = edges // self.crop
        available = int(self._grid.prod(axis=1).sum())
        self.size: int = settings.train if self._training else min(settings.valid, available)
        self._fixed = sampling.evenly(available, self.size)
        edge3 = (self.crop,) * 3
        self.input_shape: tuple[int, ...] = (len(manifest.fields["Nbody"].channels), *edge3)
        self.target_shape: tuple[int, ...] = (len(manifest.fields["Hydro"].channels), *edge3)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - an epoch's table serves all its samples; two epochs overlap
    def table(self, epoch: int) -> np.ndarray:
        """Return volume, three offsets and symmetry of every training sample of an epoch, int64 [size, 5]."""
        w = sampling.words(self._seed, epoch, "crops", self.size)
        share = (w[:, 0] >> np.uint64(11)) * 2.0**-53 * self._shares[-1]
        volume = np.searchsorted(self._shares, share, side="right").clip(max=len(self._shares) - 1)
        low = w << np.uint64(32)  # the other half of each word
        offsets = self._offsets[volume]
        return np.stack(
            [
                volume,
                sampling.below(w[:, 1], offsets[:, 0]),
                sampling.below(low[:, 1], offsets[:, 1]),
                sampling.below(w[:, 2], offsets[:, 2]),
                sampling.below(w[:, 3], self._symmetries),
            ],
            axis=1,
        )

    def locate(self, epoch: int, index: int) -> Crop:
        """Return where sample `index` of `epoch` lies."""
        if self._training:
            volume, z, y, x, symmetry = (int(value) for value in self.table(epoch)[index])
            return Crop(volume, (z, y, x), symmetry)
        cell, volume = int(self._fixed[index]), 0
        while cell >= self._grid[volume].prod():
            cell -= int(self._grid[volume].prod())
            volume += 1
        z, y, x = (int(place) * self.crop for place in np.unravel_index(cell, self._grid[volume]))
        return Crop(volume, (z, y, x), 0)

    def read(self, epoch: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return x [4, S, S, S] and y [5, S, S, S], float32."""
        where = self.locate(epoch, index)
        box = (slice(None), *(slice(start, start + self.crop) for start in where.offset))
        x, y = self._inputs[where.volume][box], self._targets[where.volume][box]
        symmetry = SYMMETRIES[where.symmetry]
        return apply(symmetry, x, self._vectors[0]), apply(symmetry, y, self._vectors[1])
