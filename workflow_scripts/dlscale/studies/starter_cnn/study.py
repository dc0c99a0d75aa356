"""Study `starter_cnn`: a small convolutional network from images to images; the smallest complete study."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from dlscale.core.errors import UserError
from dlscale.core.metrics import LossInfo, Metric
from dlscale.core.schema import Extent, Few, Strict
from dlscale.studies.base import Metrics, SampleLoss, Study

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure
    from torch import nn

    from dlscale.data.manifest import FieldInfo, Manifest


class StarterCNNSettings(Strict):
    """The network; the data determine its input and output channels."""

    kind: Literal["starter_cnn"]
    hidden: Extent = Field(64, description="Number of channels between the layers.")
    layers: Few = Field(5, ge=2, description="Number of convolutions.")


class StarterCNNLoss(Strict):
    """The mean squared error."""

    kind: Literal["mse"]


class StarterCNNMetrics(Metrics):
    """RMSE, and RMSE of the better baseline without learning: the training targets' mean, or the input.

    The input counts only if it has the shape of the target.
    """

    def __init__(self, target: FieldInfo, device: torch.device) -> None:
        import torch

        self.unit = target.units[0] if len(set(target.units)) == 1 else "1"
        self.mean = torch.tensor(target.mean, dtype=torch.float32, device=device).reshape(1, -1, 1, 1)

    @property
    def described(self) -> list[Metric]:
        naive, answer = "rmse_of_naive", "the better of the training mean and the input"
        error = "root mean squared error over all validation samples and pixels"
        return [
            Metric(name="rmse", title="RMSE", meaning=error, unit=self.unit, naive=naive, answer=answer),
            Metric(
                name=naive, title="RMSE of the best baseline without learning", meaning=f"of {answer}", unit=self.unit
            ),
        ]

    def per_sample(self, x: torch.Tensor, y: torch.Tensor, prediction: torch.Tensor) -> dict[str, torch.Tensor]:
        answers = {"prediction": prediction, "mean": self.mean.expand_as(y)}
        answers |= (
            {"input": x.float()} if x.shape == y.shape else {}
        )  # float, because differences of uint8 would overflow
        return {name: (answer - y).square().flatten(1).mean(dim=1) for name, answer in answers.items()}

    def summarise(self, means: dict[str, torch.Tensor]) -> dict[str, float]:
        errors = {name: float(mean) ** 0.5 for name, mean in means.items()}
        return {"rmse": errors.pop("prediction"), "rmse_of_naive": min(errors.values())}


class StarterCNNStudy(Study):
    """The study `starter_cnn`."""

    dataset = "starter"
    Model, Loss = StarterCNNSettings, StarterCNNLoss
    loss_info = LossInfo(title="mean squared error")
    operations = frozenset({"conv2d"})

    def model(self, run: Any, manifest: Manifest) -> nn.Module:
        from dlscale.studies.starter_cnn.model import StarterCNN

        inputs, targets = self._images(run, manifest)
        return StarterCNN(len(inputs.channels), len(targets.channels), run.model.hidden, run.model.layers)

    def flops(self, run: Any, manifest: Manifest) -> float:
        """Return 2 x 3^2 C_in C_out per pixel, summed over all convolutions."""
        inputs, targets = self._images(run, manifest)
        widths = [len(inputs.channels), *[run.model.hidden] * (run.model.layers - 1), len(targets.channels)]
        rows, columns = inputs.grid
        return 2.0 * 9 * rows * columns * sum(below * above for below, above in pairwise(widths))

    @staticmethod
    def _images(run: Any, manifest: Manifest) -> tuple[FieldInfo, FieldInfo]:
        """Return the fields of inputs and targets; raise `UserError` unless both are images of equal size."""
        inputs, targets = (manifest.fields[name] for name in (run.samples.input, run.samples.target))
        shapes = [info.row_shape for info in (inputs, targets)]
        if (
            [len(shape) for shape in shapes] != [3, 3]
            or inputs.grid != targets.grid
            or inputs.dtype not in ("float32", "uint8")  # other integers are indices
        ):
            raise UserError(
                f"dataset {run.dataset}: input {shapes[0]} {inputs.dtype}, target {shapes[1]}. Study {run.study} "
                "expects two images [C, H, W] of the same height and width, and input of type float32 or uint8. Save "
                "the data in this form, or write your own model"
            )
        return inputs, targets

    def loss(self, run: Any) -> SampleLoss:
        from dlscale.studies.starter_cnn.model import mse

        return mse

    def metrics(self, run: Any, manifest: Manifest, device: torch.device) -> StarterCNNMetrics:
        return StarterCNNMetrics(manifest.fields[run.samples.target], device)

    def figure(self, run: Any, manifest: Manifest, x: Any, y: Any, prediction: Any) -> Figure:
        """Draw input, target and prediction side by side, one row for each channel of the target."""
        from dlscale.studies.figures import comparison

        targets = manifest.fields[run.samples.target]
        rows = [
            (name, unit, [x[min(channel, len(x) - 1)], y[channel], prediction[channel]])
            for channel, (name, unit) in enumerate(zip(targets.channels, targets.units, strict=True))
        ]
        return comparison(rows, ["input", "truth", "prediction"], ("x (pixels)", "y (pixels)"), own_scale=True)


STUDY = StarterCNNStudy()
