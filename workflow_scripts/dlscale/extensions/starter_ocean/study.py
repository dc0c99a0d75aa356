"""The study `starter_ocean`: the smallest study whose batches are dicts, with two inputs and a mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from dlscale.core.metrics import LossInfo, Metric
from dlscale.core.schema import Extent, Few, Strict
from dlscale.studies.base import Metrics, SampleLoss, Study

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure
    from torch import nn

    from dlscale.data.manifest import Manifest


class OceanSettings(Strict):
    """The network."""

    kind: Literal["starter_ocean"]
    hidden: Extent = Field(16, description="Number of channels between the layers.")
    layers: Few = Field(5, ge=2, description="Number of convolutions.")


class OceanLoss(Strict):
    """The mean squared error over the sea."""

    kind: Literal["sea_mse"]


class OceanMetrics(Metrics):
    """RMSE over the sea, and RMSE of the unchanged temperature."""

    @property
    def described(self) -> list[Metric]:
        naive, answer = "rmse_of_unchanged", "the temperature before mixing"
        meaning = "root mean squared error over the sea of all validation samples"
        return [
            Metric(name="rmse", title="RMSE", meaning=meaning, unit="K", naive=naive, answer=answer),
            Metric(name=naive, title="RMSE of the unchanged temperature", meaning=f"RMSE of {answer}", unit="K"),
        ]

    def per_sample(self, x: Any, y: Any, prediction: Any) -> dict[str, torch.Tensor]:
        from dlscale.extensions.starter_ocean.model import sea_mse

        return {"rmse": sea_mse(prediction, y), "rmse_of_unchanged": sea_mse(x["before"], y)}

    def summarise(self, means: dict[str, torch.Tensor]) -> dict[str, float]:
        return {name: float(mean) ** 0.5 for name, mean in means.items()}


class OceanStudy(Study):
    """The study `starter_ocean`."""

    dataset = "basin"
    Model, Loss = OceanSettings, OceanLoss
    loss_info = LossInfo(title="mean squared error over the sea", unit="K^2")
    operations = frozenset({"conv2d"})

    def model(self, run: Any, manifest: Manifest) -> nn.Module:
        from dlscale.extensions.starter_ocean.model import OceanCNN

        return OceanCNN(run.model.hidden, run.model.layers)

    def flops(self, run: Any, manifest: Manifest) -> float:
        """Return a sample's forward FLOPs: 2 x 3^2 C_in C_out per cell and convolution."""
        rows, columns = manifest.fields[run.samples.input["before"]].grid
        hidden, inner = run.model.hidden, run.model.layers - 2
        return 2.0 * 9 * rows * columns * (3 * hidden + inner * hidden**2 + hidden)

    def loss(self, run: Any) -> SampleLoss:
        from dlscale.extensions.starter_ocean.model import sea_mse

        return sea_mse

    def metrics(self, run: Any, manifest: Manifest, device: torch.device) -> OceanMetrics:
        return OceanMetrics()

    def figure(self, run: Any, manifest: Manifest, x: Any, y: Any, prediction: Any) -> Figure:
        """Draw the temperature before and after mixing, and the prediction, zero on land."""
        from dlscale.studies.figures import comparison

        pictures = [image[0] * x["sea"] for image in (x["before"], y["after"], prediction)]
        return comparison(
            [("temperature", "K", pictures)], ["before", "truth", "prediction"], ("x (cells)", "y (cells)")
        )


STUDY = OceanStudy()
