"""Samples of time series: pairs of states `dt` stored steps apart, in the same file."""

from __future__ import annotations

import functools

import numpy as np

from dlscale.core.errors import UserError
from dlscale.data import sampling
from dlscale.data.manifest import Manifest
from dlscale.data.samples import BoxField, BoxIndex, GridSamples
from dlscale.datasets.era5.kind import PairSamples


class Pairs(GridSamples):
    """A file of T times holds T - dt pairs and every one is used, whatever each file's length. A training
    epoch visits them in a random order, and of more than `settings.train` a new random choice each
    epoch; validation and test are fixed and evenly spread. With `subset: first` there are none but the first.
    """

    def __init__(self, manifest: Manifest, split: str, settings: PairSamples, seed: int) -> None:
        files = manifest.files(split)
        rows, columns = manifest.fields["fields"].grid
        states = BoxField(manifest, split, "fields", (1, rows, columns))
        super().__init__(states, states)
        self._pairs = np.array([max(file.rows - settings.dt, 0) for file in files])
        self.available = int(self._pairs.sum())
        if not self.available:
            raise UserError(
                f"{manifest.folder}: {split}: no pair of states {settings.dt} steps apart (samples.dt) in files of "
                f"{', '.join(str(file.rows) for file in files)} times; choose a smaller dt or a longer period"
            )
        self._dt, self._seed, self._training = settings.dt, seed, split == "train"
        wanted = settings.train if self._training else settings.valid
        self.size = min(wanted or self.available, self.available)
        self._among = self.size if settings.subset == "first" else self.available

    @functools.lru_cache(maxsize=2)  # noqa: B019 - an epoch's index serves all its samples; two epochs overlap
    def boxes(self, epoch: int) -> BoxIndex:
        pair = sampling.visits(self._seed, epoch, self._among, self.size, self._training)
        file, row = sampling.locate(self._pairs, pair)
        zero = np.zeros_like(row)
        x, y = (np.stack([time, zero, zero], axis=1) for time in (row, row + self._dt))
        return BoxIndex(file, x, y, zero)


open_samples = Pairs
