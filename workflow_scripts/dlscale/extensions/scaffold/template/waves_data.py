"""Data of the study in waves.py.

The data are made again if this file changes, but not if waves.py changes. To read files, name them as
`RawFile` in `parts`, and open `paths`; opening other files is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from dlscale import ArraySource, DatasetKind, DatasetSettings, Part, RowSamples


class WavesDataset(DatasetSettings):
    """Number of samples of each split, and noise of the samples."""

    kind: Literal["waves"]
    train: int = 512
    valid: int = 128
    noise: float = 0.1


class Waves(DatasetKind):
    """Kind of dataset whose arrays are made in memory; each split is stored in one file."""

    name, Settings, Samples = "waves", WavesDataset, RowSamples

    def parts(self, dataset: WavesDataset) -> list[Part]:
        """Return one part for each split."""
        return [Part("train", "waves"), Part("valid", "waves")]


def open_source(dataset: WavesDataset, part: Part, paths: list[Path]) -> ArraySource:
    """Return the arrays of a split, one sample per row: curves [N, 32], and their frequencies [N] in Hz.

    Samples may have any shape, and there may be more arrays; `samples` in waves.yaml selects inputs and targets.
    """
    rng = np.random.default_rng([0, part.split == "valid"])
    count = dataset.train if part.split == "train" else dataset.valid
    frequency = rng.uniform(1, 4, count)
    curve = np.sin(2 * np.pi * (frequency[:, None] * np.linspace(0, 1, 32) + rng.uniform(0, 1, (count, 1))))
    curve += dataset.noise * rng.normal(size=curve.shape)
    return ArraySource({"curve": curve, "frequency": frequency}, units={"frequency": "Hz"})


KINDS = [Waves()]
