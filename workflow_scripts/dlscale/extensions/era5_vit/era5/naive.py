"""Baselines without learning; skill is measured against the best baseline.

With the time t of the input x(t), the lead d and the mean state m(hour) of each hour of day over the training period:

- persistence: x(t)
- climatology: m(t + d)
- the mean diurnal change: x(t) + m(t + d) - m(t)
- the damped anomaly: m(t + d) + a (x(t) - m(t)); the training pairs of each channel determine a
- yesterday's change: x(t) + x(t - 24 h + d) - x(t - 24 h); for leads above 24 h, two or more days earlier
- a linear regression on x(t), x(t - 24 h + d), x(t - 24 h), on the state one step before t, and on a constant, fitted
  to the training pairs of each channel

If the mean states of each hour are missing, the mean state over all training times replaces m, and the mean diurnal
change is left out. Without any mean state, all baselines that contain m are left out. Yesterday's change and the
regression are left out if the step does not divide a day. For samples whose data do not reach back to yesterday,
yesterday's change is zero, and the damped anomaly (or persistence, without means) replaces the regression.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from dlscale.data import sampling
from dlscale.data.manifest import Manifest
from dlscale.data.store import Field, Reader, check_finite
from dlscale.extensions.era5_vit.era5.extra import Extra
from dlscale.extensions.era5_vit.era5.samples import Pairs, file_before

if TYPE_CHECKING:
    from dlscale.extensions.era5_vit.era5.kind import PairSamples

#: Names of the baselines, in the order of the report.
ANSWERS = {
    "persistence": "persistence",
    "climatology": "climatology",
    "diurnal": "persistence and the mean diurnal change",
    "damped": "the damped anomaly",
    "yesterday": "yesterday's change",
    "regression": "a linear regression on now and yesterday",
}
#: Number of training values in a fit, and minimum number of pairs. For large fields a few evenly spaced pairs are
#: enough.
FITTED, PAIRS = 2**25, 64


class NaiveAnswers:
    """Predict the samples of a run with the baselines, in model units on a device."""

    def __init__(
        self, manifest: Manifest, samples: PairSamples, weights_H1: torch.Tensor, device: torch.device
    ) -> None:
        self._manifest, self._samples, self._weights, self._device = manifest, samples, weights_H1, device
        self._info, self._extra = manifest.fields["fields"], Extra.of(manifest)
        self._files = {file.digest: file for files in manifest.splits.values() for file in files}
        self._readers = {key: Reader(manifest.path(file), "fields") for key, file in self._files.items()}
        kinds: tuple[Literal["hour_means", "climatology"], ...] = ("hour_means", "climatology")
        self._means = next((kind for kind in kinds if getattr(self._extra, kind)), None)
        known = {"persistence"} | ({"climatology", "damped"} if self._means else set())
        known |= {"diurnal"} if self._means == "hour_means" else set()
        self._back: list[int] = []  # steps from each state of the regression to the input
        if day := self._extra.day:
            known |= {"yesterday", "regression"}
            #: Number of steps in the fewest full days that are at least as long as `dt`. The change over `dt` from the
            #: state this many steps ago is already known.
            self._yesterday = day * -(-samples.dt // day)
            self._back = sorted({0, 1, self._yesterday - samples.dt, self._yesterday})
        self.names = [name for name in ANSWERS if name in known]
        # Consecutive samples have states in common, so read states are cached.
        self._stored = functools.lru_cache(max(self._back, default=0) + samples.dt + 2)(self._read)

    def __call__(self, index: int, split: str = "valid") -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return the predictions for a sample of a split, by baseline, and the true state; all are [C, H, W]."""
        file, row = self._places(split)[index]
        x, y = self._pair(file, row)
        answers = {"persistence": x}
        if self._means:
            now, then = self._mean(file, row), self._mean(file, row + self._samples.dt)
            answers |= {"climatology": then, "diurnal": x + then - now, "damped": then + self._damping * (x - now)}
        if self._back:
            answers |= {"yesterday": x, "regression": answers.get("damped", x)}
            terms = self._terms(file, row)
            if terms is not None:
                begin, end = (terms[self._back.index(self._yesterday - ahead)] for ahead in (0, self._samples.dt))
                answers |= {"yesterday": x + end - begin, "regression": (self._coefficients * terms).sum(dim=0)}
        return {name: answers[name] for name in self.names}, y

    @functools.cache  # noqa: B019 - the cache has one entry per split, but keeps the object alive
    def _places(self, split: str, plain: bool = False) -> list[tuple[str, int]]:
        """Return file digest and row of each input of a split.

        If `plain`, the inputs include pairs with an incomplete history, and all training pairs.
        """
        samples = self._samples
        if plain:
            samples = samples.model_copy(update={"history": [], "clock": [], "train": None})
        files, rows = Pairs(self._manifest, split, samples, seed=0).places(0)
        digests = [file.digest for file in self._manifest.files(split)]
        return [(digests[file], row) for file, row in zip(files.tolist(), rows.tolist(), strict=True)]

    def _model_units(self, values: np.ndarray) -> torch.Tensor:
        """Return physical values [C, H, W] in model units, float32."""
        normal = [t.forward(channel) for t, channel in zip(self._info.transforms, values, strict=True)]
        return torch.from_numpy(np.stack(normal).astype(np.float32))

    def _read(self, file: str, row: int) -> torch.Tensor:
        height, width = self._info.grid
        values = self._readers[file][row : row + 1, :, :height, :width]
        field = Field("fields", tuple(self._info.channels), tuple(self._info.units), values.shape, 1)
        check_finite(values, field, self._readers[file].path, row)
        return self._model_units(values[0])

    def _state(self, file: str, row: int) -> torch.Tensor | None:
        """Return a state, [C, H, W]; a negative row is in the preceding file. Return None without such a file."""
        if row >= 0:
            return self._stored(file, row).to(self._device)
        before = file_before(self._manifest, self._files[file])
        return self._state(before.digest, row + before.rows) if before else None

    def _pair(self, file: str, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = (self._stored(file, row + ahead).to(self._device) for ahead in (0, self._samples.dt))
        return x, y

    def _mean(self, file: str, row: int) -> torch.Tensor:
        """Return the mean state at the time of a row, [C, H, W]."""
        slot = int(self._extra.slots(self._files[file], np.array(row))) if self._means == "hour_means" else 0
        height, width = self._info.grid
        return self._model_units(self._mean_states[slot, :, :height, :width]).to(self._device)

    @functools.cached_property
    def _mean_states(self) -> np.ndarray:
        """Mean states of each hour of day, or over all times, [24 h / step or 1, C, H, W]."""
        assert self._means
        return self._extra.means(self._manifest, self._means)

    def _terms(self, file: str, row: int) -> torch.Tensor | None:
        """Return the terms of the regression, [P, C, H, W]; None if the data do not reach back far enough."""
        found = (self._state(file, row - back) for back in self._back)
        states = [state for state in found if state is not None]
        return torch.stack([*states, torch.ones_like(states[0])]) if len(states) == len(self._back) else None

    @functools.cached_property
    def _damping(self) -> torch.Tensor:
        """Factor of the damped anomaly, [1, C, 1, 1]."""

        def anomalies(file: str, row: int) -> tuple[torch.Tensor, torch.Tensor]:
            x, y = self._pair(file, row)
            return (x - self._mean(file, row))[None], y - self._mean(file, row + self._samples.dt)

        return self._fit(1, anomalies)[0]

    @functools.cached_property
    def _coefficients(self) -> torch.Tensor:
        """Factors of the regression's terms, [P, C, 1, 1]."""
        return self._fit(len(self._back) + 1, lambda file, row: (self._terms(file, row), self._pair(file, row)[1]))

    def _fit(self, count: int, known: Callable[[str, int], tuple[torch.Tensor | None, torch.Tensor]]) -> torch.Tensor:
        """Fit factors [P, C, 1, 1] to training pairs by the normal equations; `known` returns terms and target."""
        channels, places = len(self._info.channels), self._places("train", plain=True)
        gram = torch.zeros(channels, count, count, dtype=torch.float64)
        moment = torch.zeros(channels, count, 1, dtype=torch.float64)
        for index in sampling.evenly(len(places), max(PAIRS, FITTED // (channels * math.prod(self._info.grid)))):
            terms, target = known(*places[index])
            if terms is None:
                continue
            a_CPN, y_CN1 = terms.double().flatten(2).transpose(0, 1), target.double().flatten(1).unsqueeze(2)
            weighted = a_CPN * self._weights.double().expand(target.shape[-2:]).flatten()
            gram += (weighted @ a_CPN.transpose(1, 2)).cpu()
            moment += (weighted @ y_CN1).cpu()
        # A constant channel has many solutions; the pseudo-inverse returns the smallest solution.
        solved = torch.linalg.pinv(gram, hermitian=True) @ moment
        return solved.float().squeeze(2).T[..., None, None].to(self._device)
