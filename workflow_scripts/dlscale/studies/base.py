"""What a study gives the trainer: its samples, model, loss, metrics and figure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dlscale.data.manifest import Manifest
from dlscale.data.samples import Samples
from dlscale.runtime.schema.run import RunCore

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Metrics(ABC):
    """Validation metrics of a study on one dataset."""

    #: Unit of each metric that `summarise` returns.
    units: dict[str, str]

    @abstractmethod
    def per_sample(self, x: torch.Tensor, y: torch.Tensor, prediction: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return per-sample values [B, ...] from input, target and prediction in model units, all float32."""

    @abstractmethod
    def summarise(self, means: dict[str, torch.Tensor]) -> dict[str, float]:
        """Turn the means over all samples into named numbers."""


class Study(ABC):
    """What is particular to a study. Its settings and published plans lie beside it, in its YAML file."""

    @abstractmethod
    def samples(self, run: RunCore, manifest: Manifest, split: str) -> Samples:
        """Return the samples of a split."""

    @abstractmethod
    def model(self, run: RunCore, manifest: Manifest) -> nn.Module:
        """Return the model, initialised from torch's current random state."""

    @abstractmethod
    def loss(self, run: RunCore) -> Loss:
        """Return the loss: (prediction, target) to a scalar."""

    @abstractmethod
    def metrics(self, manifest: Manifest, device: torch.device) -> Metrics:
        """Return the validation metrics."""

    @abstractmethod
    def figure(self, run: RunCore, manifest: Manifest, x: Any, y: Any, prediction: Any) -> Figure:
        """Draw one sample's input, target and prediction (numpy, [C, ...], model units) in physical units."""
