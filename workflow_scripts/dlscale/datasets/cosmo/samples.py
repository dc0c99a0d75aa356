"""Samples of volumes: cubic crops, turned at random for training, fixed for validation."""

from __future__ import annotations

import functools

import numpy as np

from dlscale.core.errors import UserError
from dlscale.data import sampling
from dlscale.data.manifest import Manifest
from dlscale.data.samples import BoxField, BoxIndex, GridSamples
from dlscale.datasets.cosmo.kind import CropSamples
from dlscale.datasets.cosmo.symmetries import COUNT, CubeSymmetries


class Crops(GridSamples):
    """See `dlscale.data.samples.GridSamples`.

    Training sample i is a crop at random: every offset that fits is equally likely, the last one too,
    and larger volumes are chosen as much more often as they hold more offsets. Validation and test are
    fixed: disjoint crops on a grid, evenly spread, not turned.
    """

    def __init__(self, manifest: Manifest, split: str, settings: CropSamples, seed: int) -> None:
        files = manifest.files(split)
        self.crop, self._seed, self._training = settings.crop, seed, split == "train"
        super().__init__(
            *(
                BoxField(manifest, split, name, (self.crop,) * 3, CubeSymmetries(manifest.fields[name].channels))
                for name in ("Nbody", "Hydro")
            )
        )
        self._symmetries = COUNT[settings.symmetry] if self._training else 1
        edges = np.array([reader.shape[1:] for reader in self.input.readers])
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

    @functools.lru_cache(maxsize=2)  # noqa: B019 - an epoch's table serves all its samples; two epochs overlap
    def table(self, epoch: int) -> np.ndarray:
        """Return volume, three offsets and symmetry of every training sample of an epoch, int64 [size, 5]."""
        w = sampling.words(self._seed, epoch, "crops", self.size)
        share = (w[:, 0] >> np.uint64(11)) * 2.0**-53 * self._shares[-1]
        volume = np.searchsorted(self._shares, share, side="right").clip(max=len(self._shares) - 1)
        low = w << np.uint64(32)  # the other half of each word
        offsets = self._offsets[volume]
        starts = [sampling.below(each, offsets[:, axis]) for axis, each in enumerate((w[:, 1], low[:, 1], w[:, 2]))]
        return np.stack([volume, *starts, sampling.below(w[:, 3], self._symmetries)], axis=1)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - as above
    def boxes(self, epoch: int) -> BoxIndex:
        """See `GridSamples`."""
        if self._training:
            table = self.table(epoch)
            return BoxIndex(table[:, 0], table[:, 1:4], table[:, 1:4], table[:, 4])
        volume, cell = sampling.locate(self._grid.prod(axis=1), self._fixed)
        grid_N3 = self._grid[volume]
        z, cell = np.divmod(cell, grid_N3[:, 1] * grid_N3[:, 2])
        y, x = np.divmod(cell, grid_N3[:, 2])
        start = np.stack([z, y, x], axis=1) * self.crop
        return BoxIndex(volume, start, start, np.zeros_like(volume))


open_samples = Crops
