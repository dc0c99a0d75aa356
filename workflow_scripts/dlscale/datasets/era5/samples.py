"""Samples of time series: pairs of states `dt` stored steps apart, in the same file."""

from __future__ import annotations

import functools

import numpy as np

from dlscale.core.errors import UserError
from dlscale.data import sampling
from dlscale.data.manifest import Manifest
from dlscale.data.samples import GridSamples, Places, Side
from dlscale.data.store import Reader
from dlscale.datasets.era5.kind import PairSamples


class Pairs(GridSamples):
    """See `dlscale.data.samples.GridSamples`.

    A file of T times holds T - dt pairs and every one is used, whatever each file's length. A training
    epoch visits them in a random order, and of more than `settings.train` a new random choice each
    epoch; validation and test are fixed and evenly spread.
    """

    def __init__(self, manifest: Manifest, split: str, settings: PairSamples, seed: int) -> None:
        files = manifest.files(split)
        info = manifest.fields["fields"]
        readers = [Reader(manifest.path(file), "fields") for file in files]
        rows, columns = info.grid
        self.input = self.target = Side(readers, info, (1, rows, columns), channel_axis=1)
        pairs = np.array([max(file.rows - settings.dt, 0) for file in files])
        self._ends = np.cumsum(pairs)
        self.available = int(self._ends[-1])
        if not self.available:
            raise UserError(
                f"{manifest.folder}: {split}: no pair of states {settings.dt} steps apart (samples.dt) in files of "
                f"{', '.join(str(file.rows) for file in files)} times; choose a smaller dt or a longer period"
            )
        self._dt, self._seed, self._training = settings.dt, seed, split == "train"
        wanted = settings.train if self._training else settings.valid
        self.size = min(wanted or self.available, self.available)
        self._fixed = sampling.evenly(self.available, self.size)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - an epoch's order serves all its samples; two epochs overlap
    def order(self, epoch: int) -> np.ndarray:
        """Return the pair that each sample of a training epoch is, int64 [size]."""
        return sampling.order(self._seed, epoch, self.available)[: self.size]

    @functools.lru_cache(maxsize=2)  # noqa: B019 - as above
    def places(self, epoch: int) -> Places:
        """See `GridSamples`."""
        pair = self.order(epoch) if self._training else self._fixed
        file = np.searchsorted(self._ends, pair, side="right")
        row = pair - np.concatenate([[0], self._ends])[file]
        zero = np.zeros_like(row)
        x, y = (np.stack([time, zero, zero], axis=1) for time in (row, row + self._dt))
        return Places(file, x, y, zero)


def open_samples(manifest: Manifest, split: str, settings: PairSamples, seed: int) -> Pairs:
    """Return the samples of a split."""
    return Pairs(manifest, split, settings, seed)
