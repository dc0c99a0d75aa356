"""Forecasts that need no learning: what a model has to beat is the strongest of them.

Each is made of what is known when the forecast is issued, and of means over the training period. With the time t of the
input x(t), the lead d and the mean state m(hour) of each hour of day, they are

- persistence: x(t)
- climatology: m(t + d)
- the mean diurnal change: x(t) + m(t + d) - m(t)
- the damped anomaly: m(t + d) + a (x(t) - m(t)), where a, of each channel, has the least squared error in training
- yesterday's change: x(t) + x(t - 24 h + d) - x(t - 24 h), and for longer leads that of the last day that was over
- a linear regression: the combination of these three states, the one a step before t and a constant that has, of each
  channel, the least squared error in training, the same at all points

Where nobody knows the times, m is the mean over all training times, and the mean diurnal change is nothing of its own;
without means, or where a day is no whole number of steps, the answers that need them are left out. Where the data do
not reach back to yesterday, its change is taken to be zero, and the damped anomaly stands for the regression.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from dlscale.data import sampling
from dlscale.data.manifest import Manifest
from dlscale.data.samples import BoxField
from dlscale.data.store import Reader
from dlscale.datasets.era5.extra import Extra
from dlscale.datasets.era5.samples import Pairs, file_before

if TYPE_CHECKING:
    from dlscale.datasets.era5.kind import PairSamples

#: What the answers are called, in the order in which they are told.
ANSWERS = {
    "persistence": "persistence",
    "climatology": "climatology",
    "diurnal": "persistence and the mean diurnal change",
    "damped": "the damped anomaly",
    "yesterday": "yesterday's change",
    "regression": "a linear regression on now and yesterday",
}
#: Values of training states that a few numbers of each channel are fitted to, and pairs at least: of large fields some
#: pairs, evenly spread, are enough.
FITTED, PAIRS = 2**25, 64


class NaiveAnswers:
    """The naive answers to the samples of a run, in model units on a device."""

    def __init__(
        self, manifest: Manifest, samples: PairSamples, weights_H1: torch.Tensor, device: torch.device
    ) -> None:
        self._manifest, self._samples, self._weights, self._device = manifest, samples, weights_H1, device
        self._opened: dict[str, _States] = {}  # by split
        self._extra = extra = Extra.of(manifest)
        day = extra.day
        #: Steps back to the beginning of the last period of a day's length that ends, `dt` later, by now.
        self._yesterday = day and day * -(-samples.dt // day)
        self._by_hour = bool(extra.hour_means and extra.starts)
        known = {"persistence": True, "climatology": bool(self._means), "diurnal": self._by_hour}
        known |= {"damped": bool(self._means), "yesterday": bool(day), "regression": bool(day)}
        self.names = [name for name in ANSWERS if known[name]]

    @property
    def _means(self) -> Literal["climatology", "hour_means"] | None:
        return "hour_means" if self._by_hour else "climatology" if self._extra.climatology else None

    def _states(self, split: str) -> _States:
        if split not in self._opened:
            kept = (self._yesterday or 0) + self._samples.dt + 2
            self._opened[split] = _States(self._manifest, split, self._samples, kept)
        return self._opened[split]

    @functools.cached_property
    def _mean_states(self) -> np.ndarray:
        """The mean of each hour of day [24 h / step, C, H, W], or of all times [1, C, H, W], in physical units."""
        assert self._means
        return self._extra.means(self._manifest, self._means)

    def _mean(self, states: _States, file: int, row: int) -> torch.Tensor:
        """Return the mean state at the time of a row, [C, H, W]."""
        slot = int(self._extra.slots(self._extra.hours(states.files[file], np.array(row)))) if self._by_hour else 0
        info = self._manifest.fields["fields"]
        height, width = info.grid
        mean = self._mean_states[slot, :, :height, :width]
        mean = np.stack([t.forward(channel) for t, channel in zip(info.transforms, mean, strict=True)])
        return torch.from_numpy(mean.astype(np.float32)).to(self._device)

    @functools.cached_property
    def _fitted(self) -> _States:
        """Training states, of which those of `_fitted_to` are enough to fit to."""
        plain = self._samples.model_copy(update={"history": [], "clock": [], "train": None})
        return _States(self._manifest, "train", plain)

    @property
    def _fitted_to(self) -> list[int]:
        info = self._manifest.fields["fields"]
        wanted = max(PAIRS, FITTED // (len(info.channels) * math.prod(info.grid)))
        return [int(index) for index in sampling.evenly(len(self._fitted.row), wanted)]

    @functools.cached_property
    def _damping(self) -> torch.Tensor:
        """The factor of the anomaly, [C, 1, 1]."""
        states = self._fitted
        cross = square = torch.zeros((), dtype=torch.float64)
        for index in self._fitted_to:
            (x, y), (now, then) = self._pair(states, index), self._means_of(states, index)
            x, y = x - now, y - then
            cross = cross + (x * y * self._weights).sum(dim=(-2, -1)).double().cpu()
            square = square + (x * x * self._weights).sum(dim=(-2, -1)).double().cpu()
        return (cross / square).float()[:, None, None].to(self._device)

    @functools.cached_property
    def _coefficients(self) -> torch.Tensor:
        """What the regression multiplies its terms by, [P, C, 1, 1]: the solution of the normal equations."""
        states, channels = self._fitted, len(self._manifest.fields["fields"].channels)
        count = len(self._back) + 1
        gram = torch.zeros(channels, count, count, dtype=torch.float64)
        moment = torch.zeros(channels, count, 1, dtype=torch.float64)
        for index in self._fitted_to:
            terms = self._terms(states, int(states.file[index]), int(states.row[index]))
            if terms is None:
                continue
            a_CPN = terms.double().flatten(2).transpose(0, 1)
            y_CN1 = self._pair(states, index)[1].double().flatten(1).unsqueeze(2)
            weighted = a_CPN * self._weights.double().expand(terms.shape[-2:]).flatten()
            gram += (weighted @ a_CPN.transpose(1, 2)).cpu()
            moment += (weighted @ y_CN1).cpu()
        # A channel that never changes has many solutions: the least of them.
        solved = torch.linalg.pinv(gram, hermitian=True) @ moment
        return solved.float().squeeze(2).T[..., None, None].to(self._device)

    @property
    def _back(self) -> list[int]:
        """How many steps before now the states lie that the regression combines."""
        assert self._yesterday
        return sorted({0, 1, self._yesterday - self._samples.dt, self._yesterday})

    def _terms(self, states: _States, file: int, row: int) -> torch.Tensor | None:
        """Return what the regression combines, states and a constant, [P, C, H, W]; None if there are no such data."""
        if not states.reaches(file, row - self._back[-1]):
            return None
        terms = [self._state(states, file, row - back) for back in self._back]
        return torch.stack([*terms, torch.ones_like(terms[0])])

    def _pair(self, states: _States, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        file, row = int(states.file[index]), int(states.row[index])
        return self._state(states, file, row), self._state(states, file, row + self._samples.dt)

    def _means_of(self, states: _States, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        file, row = int(states.file[index]), int(states.row[index])
        return self._mean(states, file, row), self._mean(states, file, row + self._samples.dt)

    def _state(self, states: _States, file: int, row: int) -> torch.Tensor:
        return torch.from_numpy(states.read(file, row)).to(self._device)

    def __call__(self, index: int, split: str = "valid") -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return the answers to a sample of a split by name, and the truth, [C, H, W]."""
        states = self._states(split)
        x, y = self._pair(states, index)
        answers = {"persistence": x}
        if self._means:
            now, then = self._means_of(states, index)
            answers |= {"climatology": then, "diurnal": x + then - now, "damped": then + self._damping * (x - now)}
        if self._yesterday:
            file, row = int(states.file[index]), int(states.row[index]) - self._yesterday
            answers |= {"yesterday": x, "regression": answers.get("damped", x)}
            if states.reaches(file, row):
                begin, end = (self._state(states, file, at) for at in (row, row + self._samples.dt))
                answers["yesterday"] = x + end - begin
            terms = self._terms(states, file, int(states.row[index]))
            if terms is not None:
                answers["regression"] = (self._coefficients * terms).sum(dim=0)
        return {name: answers[name] for name in self.names}, y


class _States:
    """Single states of a split, by file and row; a row below zero is one of the file before.

    Parameters
    ----------
    kept
        States that are kept for further samples: consecutive ones share them.

    Attributes
    ----------
    file, row
        Of the input of each sample of the first epoch.
    """

    def __init__(self, manifest: Manifest, split: str, samples: PairSamples, kept: int = 2) -> None:
        self.files = manifest.files(split)
        self.file, self.row = Pairs(manifest, split, samples, seed=0).places(0)
        rows, columns = manifest.fields["fields"].grid
        self._field = BoxField(manifest, split, "fields", (1, rows, columns))
        self._before: list[tuple[int, int] | None] = []  # reader and rows of the file before
        for before in [file_before(manifest, file) for file in self.files]:
            self._before.append((len(self._field.readers), before.rows) if before else None)
            if before:
                self._field.readers.append(Reader(manifest.path(before), "fields"))
        self.read: Any = functools.lru_cache(kept)(self._read)

    def reaches(self, file: int, row: int) -> bool:
        """Whether there is such a row."""
        before = self._before[file]
        return row >= 0 or (before is not None and row + before[1] >= 0)

    def _read(self, file: int, row: int) -> np.ndarray:
        """Return a state [C, H, W], in model units."""
        if row < 0:
            before = self._before[file]
            assert before is not None
            file, row = before[0], row + before[1]
        return self._field.read(file, np.array([row, 0, 0]), 0)
