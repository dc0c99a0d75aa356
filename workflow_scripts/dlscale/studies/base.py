"""Base classes of a study: a model for a kind of dataset, with loss, metrics, figure and checks of a run's settings.

Reading a configuration imports the study's module. To keep this quick, only the study's methods import PyTorch and the
model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dlscale.core.metrics import LossInfo, Metric
from dlscale.core.schema import Strict
from dlscale.parallel.sharding import Sharding

if TYPE_CHECKING:
    import numpy as np
    import torch
    from matplotlib.figure import Figure
    from torch import nn

    from dlscale.data.manifest import Manifest


@dataclass(frozen=True)
class PublishedLog:
    """TensorBoard tags of the published program; dlscale writes these tags in addition to its own tags."""

    tags: Mapping[str, str] = field(default_factory=dict)  #: Program's tag → dlscale's tag (see `dlscale.train.logs`).
    over: Literal["step", "epoch"] = "step"  #: Unit of the log's step numbers; 0 is before training.
    percent: frozenset[str] = frozenset()  #: Tags of the program with values in per cent.


#: Function from predictions and targets to the loss of each sample [B]. Both are tensors [B, ...], or trees of tensors
#: (tuples, dicts); predictions are float32.
SampleLoss = Callable[[Any, Any], "torch.Tensor"]


class Metrics:
    """Validation metrics of a study on one dataset; empty by default."""

    channels: Sequence[str] = ()  #: channel names, for metrics with a value for each channel

    @property
    def described(self) -> list[Metric]:
        """Descriptions of the numbers that `summarise` returns, in the order of tables."""
        return []

    def per_sample(self, x: Any, y: Any, prediction: Any) -> dict[str, torch.Tensor]:
        """Return name → values [B, ...] of each sample of a batch; the arguments are in the model's units."""
        return {}

    def naive(self, indices: range, split: str = "valid") -> dict[str, torch.Tensor]:
        """Return name → errors [B, ...] of baselines without learning, on samples `indices` of a split.

        `summarise` also gets the means of these errors.
        """
        return {}

    def summarise(self, means: dict[str, torch.Tensor]) -> dict[str, float]:
        """Turn means over all samples into numbers: a scalar into `NAME`, [C] into `NAME/CHANNEL` for each channel."""
        numbers: dict[str, float] = {}
        for name, mean in means.items():
            names = [f"{name}/{channel}" for channel in self.channels] if mean.dim() else [name]
            numbers.update(zip(names, mean.reshape(-1).tolist(), strict=True))
        return numbers


class Study(ABC):
    """A study; its YAML file has its default settings, datasets, plans and published figures."""

    dataset: ClassVar[str]  #: Kind of dataset that the study needs.
    Model: ClassVar[Any]  #: Settings of the model (key `model`): a class, or a union of classes with different `kind`.
    Loss: ClassVar[type[Strict]]  #: Settings of the loss (key `loss`).
    loss_info: ClassVar[LossInfo] = LossInfo()  #: Title and unit of the loss.
    #: Operations whose known defects in libraries `dlscale doctor` checks; any of `conv2d`, `conv3d`, `attention`.
    operations: ClassVar[frozenset[str]] = frozenset()
    #: Optional abilities of the model; any of `attention`, `activation_checkpointing`, `tp`, `cp`.
    supports: ClassVar[frozenset[str]] = frozenset()
    #: Function that makes a batch (inputs, targets), trees of tensors [B, ...], from a list of samples (input, target)
    #: whose tensors may differ in shape, for example by padding. None: the tensors of all samples are stacked.
    collate: Callable[[list[Any]], tuple[Any, Any]] | None = None
    published_log: ClassVar[PublishedLog] = PublishedLog()
    train_metrics: ClassVar[tuple[str, ...]] = ()  #: Metrics that `train_scores` computes on training batches.
    programs: ClassVar[bool] = False  #: Whether all runs of the study are external programs.

    def check(self, run: Any) -> None:  # noqa: B027 - most studies refuse nothing
        """Raise `Refused`, whose message begins with the key, for settings of a run that do not fit together."""

    def check_grid(self, run: Any, grid: tuple[int, ...]) -> None:  # noqa: B027
        """Raise `Refused`, as in `check`, for a model or samples that do not fit fields on this grid."""

    @abstractmethod
    def model(self, run: Any, manifest: Manifest) -> nn.Module:
        """Return the model, initialised from torch's random state, on torch's default device."""

    def sharding(self, model: nn.Module) -> Sharding:
        """Return the names of the modules by which FSDP, tp and cp divide the model over devices."""
        return Sharding()

    def draws(self, run: Any) -> bool:
        """Return whether the model draws random numbers while it trains, as drop-out does."""
        return False

    def flops(self, run: Any, manifest: Manifest) -> float | None:
        """Return the FLOPs of the forward pass of one sample, computed by a formula; None without a formula.

        Each multiplication and each addition in matrix products and convolutions counts as one FLOP. A backward pass
        counts twice as much as a forward pass (Kaplan et al. 2020, arXiv:2001.08361, section 2.1).
        """
        return None

    @abstractmethod
    def loss(self, run: Any) -> SampleLoss:
        """Return the function that computes the loss of each sample."""

    def train_scores(self, prediction: Any, target: Any) -> torch.Tensor:
        """Return the `train_metrics` of each training sample [B, n], from its prediction in training mode."""
        raise NotImplementedError

    def metrics(self, run: Any, manifest: Manifest, device: torch.device) -> Metrics:
        """Return the validation metrics."""
        return Metrics()

    def figure(self, run: Any, manifest: Manifest, x: Any, y: Any, prediction: Any) -> Figure | None:
        """Draw the first validation sample with its prediction, from numpy arrays; return None for no figure."""
        return None

    def picture(self, run: Any, manifest: Manifest, y: Any, prediction: Any) -> tuple[str, np.ndarray] | None:
        """Return name and pixels [H, W, 3] of a picture of the first validation sample; None for no picture.

        TensorBoard shows such pictures of some epochs.
        """
        return None
