"""waves: the frequency of a noisy wave, told by a small network. A study outside of dlscale."""

from __future__ import annotations

from typing import Any, Literal

from waves_data import KINDS as KINDS

from dlscale import SampleLoss, Strict, Study


class NetSettings(Strict):
    """The model."""

    kind: Literal["net"]
    hidden: int = 64


class SquareSettings(Strict):
    """The loss."""

    kind: Literal["square"]


class WavesStudy(Study):
    """See the module."""

    dataset, Model, Loss = "waves", NetSettings, SquareSettings

    def model(self, run: Any, manifest: Any) -> Any:
        """See `Study`. PyTorch is imported here: the file is read with every call of Snakemake."""
        from torch import nn

        return nn.Sequential(nn.Linear(32, run.model.hidden), nn.ReLU(), nn.Linear(run.model.hidden, 1), nn.Flatten(0))

    def loss(self, run: Any) -> SampleLoss:
        """See `Study`."""
        return lambda prediction_B, target_B: (prediction_B - target_B) ** 2


STUDY = WavesStudy()
