"""`cosmo_unet`: gas from dark matter with a 3D U-Net."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from dlscale.data.crops import Crops
from dlscale.data.manifest import Manifest
from dlscale.models.losses import l1
from dlscale.models.unet3d import UNet3D
from dlscale.runtime.errors import UserError
from dlscale.runtime.schema.run import CropSamples, RunCore, UNet3DModel
from dlscale.studies.base import Loss, Metrics, Study
from dlscale.studies.figures import comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class CosmoMetrics(Metrics):
    """Mean absolute errors: `l1` in model units, `mae` of each channel in physical ones.

    `l1_of_mean` and `mae_of_mean` are those of always answering the training data's mean (in model units), and
    `skill` is 1 - l1 / l1_of_mean.
    """

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        self.hydro = manifest.fields["Hydro"]
        mean, _ = self.hydro.model_mean_std()
        self.mean = torch.tensor(mean, dtype=torch.float32, device=device).reshape(1, -1, 1, 1, 1)
        self.units = {"l1": "1", "l1_of_mean": "1", "skill": "1"}
        for name, unit in zip(self.hydro.channels, self.hydro.units, strict=True):
            self.units |= {f"mae/{name}": unit, f"mae_of_mean/{name}": unit}

    def per_sample(self, x: torch.Tensor, y: torch.Tensor, prediction: torch.Tensor) -> dict[str, torch.Tensor]:
        """See `Metrics`."""
        found = {}
        for suffix, answer in (("", prediction), ("_of_mean", self.mean.expand_as(y))):
            found["l1" + suffix] = (answer - y).abs().flatten(1).mean(dim=1)
            physical = [
                (t.inverse(answer[:, channel]) - t.inverse(y[:, channel])).abs().flatten(1).mean(dim=1)
                for channel, t in enumerate(self.hydro.transforms)
            ]
            found["mae" + suffix] = torch.stack(physical, dim=1)
        return found

    def summarise(self, means: dict[str, torch.Tensor]) -> dict[str, float]:
        """See `Metrics`."""
        l1_, of_mean = float(means["l1"]), float(means["l1_of_mean"])
        found = {"l1": l1_, "l1_of_mean": of_mean, "skill": 1 - l1_ / of_mean}
        for key in ("mae", "mae_of_mean"):
            found |= {f"{key}/{name}": float(v) for name, v in zip(self.hydro.channels, means[key], strict=True)}
        return found


class CosmoUNet(Study):
    """See the module."""

    def samples(self, run: RunCore, manifest: Manifest, split: str) -> Crops:
        """See `Study`."""
        if not isinstance(run.samples, CropSamples):
            raise UserError(f"samples.kind: study {run.study} needs crops, got {run.samples.kind}")
        return Crops(manifest, split, run.samples, run.seed)

    def model(self, run: RunCore, manifest: Manifest) -> nn.Module:
        """See `Study`."""
        if not isinstance(run.model, UNet3DModel):
            raise UserError(f"model.kind: study {run.study} needs unet3d, got {run.model.kind}")
        inputs, outputs = (len(manifest.fields[name].channels) for name in ("Nbody", "Hydro"))
        return UNet3D(
            inputs,
            outputs,
            widths=run.model.widths,
            init_std=run.model.init_std,
            pad_channels=run.pad_channels,
            checkpointing=run.activation_checkpointing,
        )

    def loss(self, run: RunCore) -> Loss:
        """See `Study`."""
        if run.loss.kind != "l1":
            raise UserError(f"loss.kind: study {run.study} knows l1, got {run.loss.kind}")
        return partial(l1, density_weight=run.loss.density_weight)

    def metrics(self, manifest: Manifest, device: torch.device) -> CosmoMetrics:
        """See `Study`."""
        return CosmoMetrics(manifest, device)

    def figure(self, run: RunCore, manifest: Manifest, x: Any, y: Any, prediction: Any) -> Figure:
        """Draw the middle slice of each output beside the dark matter's density or velocity."""
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
