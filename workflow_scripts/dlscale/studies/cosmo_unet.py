"""`cosmo_unet`: gas from dark matter with a 3D U-Net."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from dlscale.core.records import LossInfo, Metric
from dlscale.core.schema import Strict
from dlscale.studies.base import Metrics, SampleLoss, Study

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure
    from torch import nn

    from dlscale.data.manifest import Manifest


class UNet3DSettings(Strict):
    """The 3D U-Net; its channels come from the data."""

    kind: Literal["unet3d"]
    widths: list[PositiveInt] = Field(
        [64, 128, 256, 512, 512, 512], min_length=1, description="Channels after each stride-2 level, top to bottom."
    )
    init_std: PositiveFloat = Field(0.02, description="Standard deviation of the initial weights.")


class UNet3DLoss(Strict):
    """The mean absolute error."""

    kind: Literal["l1"]
    density_weight: NonNegativeFloat = Field(
        0.0, description="Weight (lambda_rho) of the L1 of exp(14 x) of channel 0, added to l1; 0 leaves it out."
    )


class CosmoMetrics(Metrics):
    """Mean absolute errors: `l1` in model units, `mae` of each channel in physical ones.

    `l1_of_mean` and `mae_of_mean` are the errors of always answering the training data's mean (in model units), and
    `skill` is 1 - l1 / l1_of_mean.
    """

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        import torch

        self.hydro = manifest.fields["Hydro"]
        mean, _ = self.hydro.model_mean_std()
        self.mean = torch.tensor(mean, dtype=torch.float32, device=device).reshape(1, -1, 1, 1, 1)

    @property
    def described(self) -> list[Metric]:
        """See `Metrics`."""
        answer, mean = "the training mean", "of always answering the mean of the training data"
        error = "mean absolute error over all validation samples and points, in physical units"
        found = [
            Metric(
                name="l1", title="L1", meaning="mean absolute error in model units", naive="l1_of_mean", answer=answer
            ),
            Metric(name="l1_of_mean", title="L1 of the mean", meaning=mean),
            Metric(
                name="skill",
                title="skill",
                meaning="1 - L1 / L1 of the mean; 1 is perfect",
                better="higher",
                derived=True,
            ),
        ]
        for name, unit in zip(self.hydro.channels, self.hydro.units, strict=True):
            naive = f"mae_of_mean/{name}"
            found += [
                Metric(name=f"mae/{name}", title="MAE", meaning=error, unit=unit, naive=naive, answer=answer),
                Metric(name=naive, title="MAE of the mean", meaning=mean, unit=unit),
            ]
        return found

    def per_sample(self, x: torch.Tensor, y: torch.Tensor, prediction: torch.Tensor) -> dict[str, torch.Tensor]:
        """See `Metrics`."""
        import torch

        values = {}
        for suffix, answer in (("", prediction), ("_of_mean", self.mean.expand_as(y))):
            values["l1" + suffix] = (answer - y).abs().flatten(1).mean(dim=1)
            physical = [
                (t.inverse(answer[:, channel]) - t.inverse(y[:, channel])).abs().flatten(1).mean(dim=1)
                for channel, t in enumerate(self.hydro.transforms)
            ]
            values["mae" + suffix] = torch.stack(physical, dim=1)
        return values

    def summarise(self, means: dict[str, torch.Tensor]) -> dict[str, float]:
        """See `Metrics`."""
        l1, of_mean = float(means["l1"]), float(means["l1_of_mean"])
        values = {"l1": l1, "l1_of_mean": of_mean, "skill": 1 - l1 / of_mean}
        for key in ("mae", "mae_of_mean"):
            values |= {f"{key}/{name}": float(v) for name, v in zip(self.hydro.channels, means[key], strict=True)}
        return values


class CosmoUNet(Study):
    """See the module."""

    dataset = "cosmo"
    Model, Loss = UNet3DSettings, UNet3DLoss
    operations = frozenset({"conv3d"})
    supports = frozenset({"pad_channels", "activation_checkpointing"})

    def check(self, run: Any) -> None:
        """See `Study`."""
        factor, levels = 2 ** len(run.model.widths), len(run.model.widths)
        if run.samples.crop % factor:
            raise ValueError(
                f"samples.crop {run.samples.crop} does not divide by {factor}: {levels} levels of model.widths each "
                "halve it"
            )

    def check_grid(self, run: Any, grid: tuple[int, ...]) -> None:
        """See `Study`."""
        if run.samples.crop > min(grid):
            raise ValueError(
                f"samples.crop {run.samples.crop} is larger than the boxes of dataset {run.dataset} ({min(grid)} cells)"
            )

    def model(self, run: Any, manifest: Manifest) -> nn.Module:
        """See `Study`."""
        from dlscale.models.unet3d import UNet3D

        inputs, outputs = (len(manifest.fields[name].channels) for name in ("Nbody", "Hydro"))
        return UNet3D(
            inputs,
            outputs,
            widths=run.model.widths,
            init_std=run.model.init_std,
            pad_channels=run.pad_channels,
            checkpointing=run.activation_checkpointing,
        )

    def loss(self, run: Any) -> SampleLoss:
        """See `Study`."""
        from dlscale.models.losses import l1

        return partial(l1, density_weight=run.loss.density_weight)

    def loss_info(self, run: Any) -> LossInfo:
        """See `Study`."""
        return LossInfo(title="L1", unit="model units")

    def metrics(self, run: Any, manifest: Manifest, device: torch.device) -> CosmoMetrics:
        """See `Study`."""
        return CosmoMetrics(manifest, device)

    def figure(self, run: Any, manifest: Manifest, x: Any, y: Any, prediction: Any) -> Figure:
        """Draw the middle slice of each output beside the dark matter's density or velocity."""
        import numpy as np

        from dlscale.studies.figures import comparison

        nbody, hydro = manifest.fields["Nbody"], manifest.fields["Hydro"]
        middle = y.shape[1] // 2
        rows = []
        for channel, (name, unit, transform) in enumerate(
            zip(hydro.channels, hydro.units, hydro.transforms, strict=True)
        ):
            cause = channel if channel < len(nbody.channels) else 0  # the temperature stands beside the density
            pictures = []
            for t, picture in (
                (nbody.transforms[cause], x[cause, middle]),
                (transform, y[channel, middle]),
                (transform, prediction[channel, middle]),
            ):
                physical = t.inverse(picture)
                pictures.append(np.log10(physical) if t.kind == "log" else physical)
            rows.append((name, f"log10({unit})" if transform.kind == "log" else unit, pictures))
        return comparison(rows, ["dark matter", "truth", "prediction"], ("z (cells)", "y (cells)"), own_scale=True)


STUDY = CosmoUNet()
