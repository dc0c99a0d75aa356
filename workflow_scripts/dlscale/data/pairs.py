"""Samples of time series: pairs of states `dt` stored steps apart, in the same file."""

from __future__ import annotations

import functools

import numpy as np

from dlscale.data import sampling
from dlscale.data.manifest import Manifest
from dlscale.data.store import Reader
from dlscale.runtime.errors import UserError
from dlscale.runtime.schema.run import PairSamples


class Pairs:
    """See `dlscale.data.samples.Samples`.

    A file of T times holds T - dt pairs and every one is used, whatever each file's length. A training
    epoch visits them in a random order, and of more than `settings.train` a new random choice each
    epoch; validation and test are fixed and evenly spread.
    """

    def __init__(self, manifest: Manifest, split: str, settings: PairSamples, seed: int) -> None:
        files = manifest.files(split)
        info = manifest.fields["fields"]
        self._readers = [Reader(manifest.path(file), "fields") for file in files]
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
        self._grid = tuple(info.grid)
        mean, scale = (
            np.array([getattr(t, key) for t in info.transforms], dtype=np.float32) for key in ("offset", "scale")
        )
        self._mean, self._scale = mean.reshape(-1, 1, 1), scale.reshape(-1, 1, 1)
        self.input_shape = self.target_shape = (len(info.channels), *self._grid)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - an epoch's order serves all its samples; two epochs overlap
    def order(self, epoch: int) -> np.ndarray:
        """Return the pair that each sample of a training epoch is, int64 [size]."""
        return sampling.order(self._seed, epoch, self.available)[: self.size]

    def locate(self, epoch: int, index: int) -> tuple[int, int]:
        """Return the file and the input's row in it."""
        pair = int(self.order(epoch)[index] if self._training else self._fixed[index])
        file = int(np.searchsorted(self._ends, pair, side="right"))
        return file, pair - int(self._ends[file - 1] if file else 0)

    def read(self, epoch: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return states x and y [C, H, W], float32, standardised."""
        file, row = self.locate(epoch, index)
        return self._state(file, row), self._state(file, row + self._dt)

    def _state(self, file: int, row: int) -> np.ndarray:
        values = self._readers[file][row : row + 1, :, : self._grid[0], : self._grid[1]][0]
        return (values - self._mean) / self._scale
