"""The study `mnist_cnn`: classify images of digits with a small convolutional network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from dlscale.core.metrics import LossInfo, Metric
from dlscale.core.schema import Extent, Strict
from dlscale.studies.base import Metrics, SampleLoss, Study

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure
    from torch import nn

    from dlscale.data.manifest import Manifest

CLASSES = 10


class MnistCNNSettings(Strict):
    """The network; the images' size comes from the data."""

    kind: Literal["mnist_cnn"]
    widths: tuple[Extent, Extent] = Field((32, 64), description="Channels after each convolution.")
    hidden: Extent = Field(128, description="Width of the first linear layer.")


class MnistLoss(Strict):
    """The negative log-likelihood."""

    kind: Literal["nll"]


class MnistMetrics(Metrics):
    """Accuracy of the model, and of a baseline that always answers the most frequent digit of the training data."""

    def __init__(self, manifest: Manifest, field: str) -> None:
        import numpy as np

        from dlscale.data.store import Reader

        counts = np.zeros(CLASSES, np.int64)
        for file in manifest.files("train"):
            counts += np.bincount(Reader(manifest.path(file), field)[(slice(None),)], minlength=CLASSES)
        self.frequent = int(counts.argmax())

    @property
    def described(self) -> list[Metric]:
        naive = "accuracy_of_most_frequent"
        answer, better = "the most frequent digit", "higher"
        share = "fraction of validation images that are classified correctly"
        return [
            Metric(name="accuracy", title="accuracy", meaning=share, better=better, naive=naive, answer=answer),
            Metric(name=naive, title="accuracy of the most frequent digit", meaning=share, better=better),
        ]

    def per_sample(self, x: torch.Tensor, y: torch.Tensor, prediction: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"right": (prediction.argmax(dim=1) == y).float(), "frequent": (y == self.frequent).float()}

    def summarise(self, means: dict[str, torch.Tensor]) -> dict[str, float]:
        return {"accuracy": float(means["right"]), "accuracy_of_most_frequent": float(means["frequent"])}


class MnistCNNStudy(Study):
    """The study `mnist_cnn`."""

    dataset = "mnist"
    Model, Loss = MnistCNNSettings, MnistLoss
    loss_info = LossInfo(title="negative log-likelihood", unit="nats")
    operations = frozenset({"conv2d"})

    def model(self, run: Any, manifest: Manifest) -> nn.Module:
        from dlscale.extensions.mnist_cnn.model import MnistCNN

        m, images = run.model, manifest.fields[run.samples.input]
        rows, columns = images.grid
        return MnistCNN((rows, columns), len(images.channels), CLASSES, m.widths, m.hidden)

    def flops(self, run: Any, manifest: Manifest) -> float:
        """Return the forward FLOPs of an image.

        A convolution takes 2 x 3^2 C_in C_out FLOPs per output pixel, a linear layer 2 C_in C_out FLOPs.
        """
        m, images = run.model, manifest.fields[run.samples.input]
        rows, columns = images.grid
        first, second = m.widths
        convolutions = 9 * len(images.channels) * first * (rows - 2) * (columns - 2)
        convolutions += 9 * first * second * (rows - 4) * (columns - 4)
        pooled = ((rows - 4) // 2) * ((columns - 4) // 2)
        return 2.0 * (convolutions + second * pooled * m.hidden + m.hidden * CLASSES)

    def loss(self, run: Any) -> SampleLoss:
        from dlscale.extensions.mnist_cnn.model import nll

        return nll

    def metrics(self, run: Any, manifest: Manifest, device: torch.device) -> MnistMetrics:
        return MnistMetrics(manifest, run.samples.target)

    def figure(self, run: Any, manifest: Manifest, x: Any, y: Any, prediction: Any) -> Figure:
        """Draw the image next to the digits' probabilities."""
        import numpy as np

        from dlscale.studies.figures import beside_bars

        digits = [str(digit) for digit in range(CLASSES)]
        title, shown = f"first validation image: {int(y)}", {"cmap": "gray", "vmin": 0, "vmax": 255}
        return beside_bars(x[0], title, ("digit", digits), np.exp(prediction), str(int(y)), **shown)


STUDY = MnistCNNStudy()
