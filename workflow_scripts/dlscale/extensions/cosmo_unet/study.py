"""The study `cosmo_unet`: predict gas from dark matter with a 3D U-Net."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from dlscale.core.errors import Refused
from dlscale.core.metrics import LossInfo, Metric
from dlscale.core.schema import Extent, NonNegativeFloat, PositiveFloat, Strict
from dlscale.parallel.sharding import Sharding
from dlscale.studies.base import Metrics, PublishedLog, SampleLoss, Study

if TYPE_CHECKING:
    import numpy as np
    import torch
    from matplotlib.figure import Figure
    from torch import nn

    from dlscale.data.manifest import Manifest, Transform


class UNet3DSettings(Strict):
    """The 3D U-Net; its channels come from the data."""

    kind: Literal["unet3d"]
    widths: list[Extent] = Field(
        [64, 128, 256, 512, 512, 512], min_length=1, description="Numbers of channels after each level (stride 2)."
    )
    init_std: PositiveFloat = Field(0.02, description="Standard deviation of the initial weights.")
    space_to_depth: bool = Field(
        False,
        description="Compute the first and the last layer, which have few channels, on blocks of 2^3 cells. Function "
        "and parameters do not change, but the shapes suit tensor cores.",
    )


class UNet3DLoss(Strict):
    """The mean absolute error."""

    kind: Literal["l1"]
    density_weight: NonNegativeFloat = Field(
        0.0,
        description="Weight (lambda_rho) of a further term of the loss, the mean absolute error of exp(14 x) for "
        "channel 0. 0: the loss lacks this term.",
    )


class CosmoMetrics(Metrics):
    """Mean absolute errors of the model and of two baselines: the training mean and a linear fit."""

    #: Names of the baselines without learning.
    ANSWERS = {"mean": "the training mean", "line": "a linear fit to the dark matter at each point"}

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        import torch

        from dlscale.extensions.cosmo_unet.cosmo.samples import line

        self.hydro = manifest.fields["Hydro"]
        self.channels = self.hydro.channels
        self.mean = torch.tensor(self.hydro.mean, dtype=torch.float32, device=device).reshape(1, -1, 1, 1, 1)
        self.line = torch.from_numpy(line(manifest)).to(device)

    @property
    def described(self) -> list[Metric]:
        error = "mean absolute error over all validation samples and points, in physical units"
        l1, strongest = "mean absolute error in model units", "the best baseline without learning"
        skill = f"1 - L1 / L1 of {strongest}; 1 is perfect"
        least = f"the smaller of two errors on the validation data: the error of {' or '.join(self.ANSWERS.values())}"
        metrics = [Metric(name="l1", title="L1", meaning=l1, naive="naive_l1", answer=strongest)]
        metrics.append(Metric(name="naive_l1", title=f"L1 of {strongest}", meaning=least))
        metrics += [
            Metric(name=f"l1_of_{name}", title=f"L1 of {called}", meaning="a baseline without learning", rival=called)
            for name, called in self.ANSWERS.items()
        ]
        metrics.append(Metric(name="skill", title="skill", meaning=skill, better="higher", derived=True))
        for channel, unit in zip(self.channels, self.hydro.units, strict=True):
            naive = f"naive_mae/{channel}"
            mae = Metric(name=f"mae/{channel}", title="MAE", meaning=error, unit=unit, naive=naive, answer=strongest)
            metrics += [mae, Metric(name=naive, title=f"MAE of {strongest}", meaning=least, unit=unit)]
            metrics += [
                Metric(
                    name=f"mae_of_{name}/{channel}",
                    title=f"MAE of {called}",
                    meaning="a baseline without learning",
                    unit=unit,
                    rival=called,
                )
                for name, called in self.ANSWERS.items()
            ]
        return metrics

    def per_sample(self, x: torch.Tensor, y: torch.Tensor, prediction: torch.Tensor) -> dict[str, torch.Tensor]:
        import torch

        slope, offset = self.line[:, :-1], self.line[:, -1].reshape(1, -1, 1, 1, 1)
        line = torch.einsum("oc,bcdhw->bodhw", slope, x.float()) + offset
        values = {}
        for suffix, answer in (("", prediction), ("_of_mean", self.mean.expand_as(y)), ("_of_line", line)):
            values["l1" + suffix] = (answer - y).abs().flatten(1).mean(dim=1)
            physical = [
                (t.inverse(answer[:, channel]) - t.inverse(y[:, channel])).abs().flatten(1).mean(dim=1)
                for channel, t in enumerate(self.hydro.transforms)
            ]
            values["mae" + suffix] = torch.stack(physical, dim=1)
        return values

    def summarise(self, means: dict[str, torch.Tensor]) -> dict[str, float]:
        import torch

        from dlscale.studies.scores import skill

        least = {
            f"naive_{kind}": torch.stack([means[f"{kind}_of_{name}"] for name in self.ANSWERS]).amin(dim=0)
            for kind in ("l1", "mae")
        }
        return super().summarise(means | least | {"skill": skill(means["l1"], least["naive_l1"])})


class CosmoUNet(Study):
    """The study `cosmo_unet`."""

    dataset = "cosmo"
    Model, Loss = UNet3DSettings, UNet3DLoss
    loss_info = LossInfo(title="L1", unit="model units")
    operations = frozenset({"conv3d"})
    supports = frozenset({"activation_checkpointing"})
    published_log = PublishedLog(
        {
            "Loss/train": "loss/train",
            "Loss/valid": "loss/valid",
            "Learning Rate": "learning_rate",
            "Avg iters per sec": "steps_per_second",
        }
    )

    def check(self, run: Any) -> None:
        if run.activation_checkpointing == "selective":
            raise Refused(
                "activation_checkpointing selective: a level of the U-Net is one convolution, whose output would be "
                "kept, so this saves no memory. Set activation_checkpointing to true"
            )
        levels = len(run.model.widths)
        if run.samples.crop % 2**levels:
            raise Refused(
                f"samples.crop {run.samples.crop} is not a multiple of {2**levels}: each of the {levels} levels of "
                "model.widths halves the crop"
            )

    def check_grid(self, run: Any, grid: tuple[int, ...]) -> None:
        if run.samples.crop > min(grid):
            raise Refused(
                f"samples.crop {run.samples.crop} is larger than the boxes of dataset {run.dataset} ({min(grid)} cells)"
            )

    def model(self, run: Any, manifest: Manifest) -> nn.Module:
        from dlscale.extensions.cosmo_unet.model import UNet3D

        inputs, outputs = (len(manifest.fields[name].channels) for name in ("Nbody", "Hydro"))
        options = run.model.model_dump(exclude={"kind"})  # named like the model's arguments
        return UNet3D(inputs, outputs, **options, checkpointing=bool(run.activation_checkpointing))

    def sharding(self, model: nn.Module) -> Sharding:
        return Sharding(units=["down.*", "up.*"])

    def flops(self, run: Any, manifest: Manifest) -> float:
        """Return the forward FLOPs of a crop (Harrington et al. 2021).

        A convolution takes 2 x 4^3 C_in C_out FLOPs per cell of the coarser grid. A transposed convolution of a single
        cell computes only the 2^3 values inside the grid.
        """
        inputs, outputs = (len(manifest.fields[name].channels) for name in ("Nbody", "Hydro"))
        widths, total = run.model.widths, 0
        for level, width in enumerate(widths):
            above = widths[level - 1] if level else 0
            joined = width * (1 if level == len(widths) - 1 else 2)  # with the skip, except at the bottom
            cells = (run.samples.crop // 2 ** (level + 1)) ** 3
            spread = 2**3 if cells == 1 and above else 4**3
            total += 2 * cells * (4**3 * width * (above or inputs) + spread * joined * (above or outputs))
        return float(total)

    def loss(self, run: Any) -> SampleLoss:
        from dlscale.extensions.cosmo_unet.scores import l1

        return partial(l1, density_weight=run.loss.density_weight)

    def metrics(self, run: Any, manifest: Manifest, device: torch.device) -> CosmoMetrics:
        return CosmoMetrics(manifest, device)

    def figure(self, run: Any, manifest: Manifest, x: Any, y: Any, prediction: Any) -> Figure:
        """Draw the middle slice of each output next to the density or velocity of dark matter."""
        import numpy as np

        from dlscale.studies.figures import comparison

        nbody, hydro = manifest.fields["Nbody"], manifest.fields["Hydro"]

        def physical(transform: Transform, volume: Any) -> Any:
            picture = transform.inverse(volume[len(volume) // 2])
            return np.log10(picture) if transform.kind == "log" else picture

        rows = []
        for channel, (name, unit, transform) in enumerate(
            zip(hydro.channels, hydro.units, hydro.transforms, strict=True)
        ):
            cause = channel if channel < len(nbody.channels) else 0  # temperature is drawn next to the density
            pictures = [physical(nbody.transforms[cause], x[cause])]
            pictures += [physical(transform, volumes[channel]) for volumes in (y, prediction)]
            rows.append((name, f"log10({unit})" if transform.kind == "log" else unit, pictures))
        return comparison(rows, ["dark matter", "truth", "prediction"], ("z (cells)", "y (cells)"), own_scale=True)

    def picture(self, run: Any, manifest: Manifest, y: Any, prediction: Any) -> tuple[str, np.ndarray]:
        """Return the middle slice of the first output, in model units."""
        from dlscale.studies.figures import side_by_side

        middle = y.shape[1] // 2
        return manifest.fields["Hydro"].channels[0], side_by_side(y[0, middle], prediction[0, middle])


STUDY = CosmoUNet()
