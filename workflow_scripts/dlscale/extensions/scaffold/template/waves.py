"""waves: a small network that predicts the frequency of a noisy curve."""

from __future__ import annotations

from typing import Any, Literal

from waves_data import KINDS as KINDS

from dlscale import SampleLoss, Strict, Study


class NetSettings(Strict):
    """Settings of the model: the key `model` of a run."""

    kind: Literal["net"]
    hidden: int = 64


class SquareSettings(Strict):
    """Settings of the loss: the key `loss` of a run."""

    kind: Literal["square"]


class WavesStudy(Study):
    """Model and loss of the study."""

    dataset, Model, Loss = "waves", NetSettings, SquareSettings

    def model(self, run: Any, manifest: Any) -> Any:
        """Return the network. PyTorch is imported here because every command imports this file."""
        from torch import nn

        return nn.Sequential(nn.Linear(32, run.model.hidden), nn.ReLU(), nn.Linear(run.model.hidden, 1), nn.Flatten(0))

    def loss(self, run: Any) -> SampleLoss:
        """Return a function from predictions and targets, tensors [B, ...] or dicts, to the loss of each sample [B]."""
        return lambda prediction_B, target_B: (prediction_B - target_B) ** 2


STUDY = WavesStudy()
