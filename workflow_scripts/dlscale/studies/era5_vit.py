"""`era5_vit`: the next state of the atmosphere with a vision transformer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from dlscale.data.manifest import Manifest
from dlscale.data.pairs import Pairs
from dlscale.models.losses import l1, relative_l2
from dlscale.models.metrics import anomaly_correlation, latitude_weights, mean_square
from dlscale.models.vit import ViT
from dlscale.runtime.errors import UserError
from dlscale.runtime.schema.run import PairSamples, RunCore, ViTModel
from dlscale.studies.base import Loss, Metrics, Study
from dlscale.studies.figures import comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Era5Metrics(Metrics):
    """Latitude-weighted scores of each channel.

    rmse
        In physical units: the root of the mean over all samples and points.
    rmse_normalised
        The published form: of normalised fields, the root taken for each sample, then the mean over samples.
    acc
        Anomaly correlation against the training climatology, where there is one.
    persistence_rmse, skill
        The same error of answering the input itself, and 1 - rmse / persistence_rmse.
    """

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        self.info = info = manifest.fields["fields"]
        tensor: dict[str, Any] = {"dtype": torch.float32, "device": device}
        latitude = manifest.latitude[: info.grid[0]] or [0.0] * info.grid[0]
        self.weights = latitude_weights(torch.tensor(latitude, **tensor))
        self.scale = torch.tensor([t.scale for t in info.transforms])
        self.climatology: torch.Tensor | None = None
        if manifest.climatology:
            mean = np.load(manifest.path(manifest.climatology), allow_pickle=False)[
                0, :, : info.grid[0], : info.grid[1]
            ]
            mean = np.stack([t.forward(channel) for t, channel in zip(info.transforms, mean, strict=True)])
            self.climatology = torch.tensor(mean, **tensor)
        self.units = {}
        for name, unit in zip(info.channels, info.units, strict=True):
            self.units |= {f"rmse/{name}": unit, f"persistence_rmse/{name}": unit, f"rmse_normalised/{name}": "1"}
            self.units |= {f"skill/{name}": "1", f"acc/{name}": "1"}

    def per_sample(self, x: torch.Tensor, y: torch.Tensor, prediction: torch.Tensor) -> dict[str, torch.Tensor]:
        """See `Metrics`."""
        square = mean_square(prediction - y, self.weights)
        found = {
            "square": square,
            "root": square.sqrt(),
            "persistence": mean_square(x[:, : y.shape[1]] - y, self.weights),
        }
        if self.climatology is not None:
            found["acc"] = anomaly_correlation(prediction, y, self.climatology, self.weights)
        return found

    def summarise(self, means: dict[str, torch.Tensor]) -> dict[str, float]:
        """See `Metrics`."""
        rmse, persistence = (means[key].sqrt() * self.scale for key in ("square", "persistence"))
        values = {
            "rmse": rmse,
            "rmse_normalised": means["root"],
            "persistence_rmse": persistence,
            "skill": 1 - rmse / persistence,
        }
        if "acc" in means:
            values["acc"] = means["acc"]
        return {
            f"{key}/{name}": float(v)
            for key, each in values.items()
            for name, v in zip(self.info.channels, each, strict=True)
        }


class Era5ViT(Study):
    """See the module."""

    def samples(self, run: RunCore, manifest: Manifest, split: str) -> Pairs:
        """See `Study`."""
        if not isinstance(run.samples, PairSamples):
            raise UserError(f"samples.kind: study {run.study} needs pairs, got {run.samples.kind}")
        return Pairs(manifest, split, run.samples, run.seed)

    def model(self, run: RunCore, manifest: Manifest) -> nn.Module:
        """See `Study`."""
        m = run.model
        if not isinstance(m, ViTModel):
            raise UserError(f"model.kind: study {run.study} needs vit, got {m.kind}")
        info = manifest.fields["fields"]
        rows, columns = m.patch if isinstance(m.patch, tuple) else (m.patch, m.patch)
        height, width = info.grid
        if height % rows or width % columns:
            raise UserError(
                f"model.patch {rows} x {columns} does not divide the fields of dataset {run.dataset} "
                f"({height} x {width} points); choose divisors, or crop the dataset"
            )
        channels = len(info.channels)
        return ViT(
            (height, width),
            (rows, columns),
            channels,
            channels,
            embed_dim=m.embed_dim,
            depth=m.depth,
            heads=m.heads,
            mlp_ratio=m.mlp_ratio,
            dropout=m.dropout,
            attention_dropout=m.attention_dropout,
            drop_path=m.drop_path,
            residual=m.residual,
            checkpointing=run.activation_checkpointing,
        )

    def loss(self, run: RunCore) -> Loss:
        """See `Study`."""
        return relative_l2 if run.loss.kind == "relative_l2" else l1

    def metrics(self, manifest: Manifest, device: torch.device) -> Era5Metrics:
        """See `Study`."""
        return Era5Metrics(manifest, device)

    def figure(self, run: RunCore, manifest: Manifest, x: Any, y: Any, prediction: Any) -> Figure:
        """Draw at most four channels on the map."""
        info = manifest.fields["fields"]
        rows = [
            (name, unit, [transform.inverse(state[channel]) for state in (x, y, prediction)])
            for channel, (name, unit, transform) in enumerate(
                zip(info.channels, info.units, info.transforms, strict=True)
            )
        ][:4]
        steps = run.samples.dt if isinstance(run.samples, PairSamples) else 1
        lead = f"{steps * manifest.step_hours:g} h" if manifest.step_hours else f"{steps} stored steps"
        extent = None
        labels = ("column", "row")
        if manifest.latitude and manifest.longitude:
            extent = (manifest.longitude[0], manifest.longitude[-1], manifest.latitude[-1], manifest.latitude[0])
            labels = ("longitude (degrees)", "latitude (degrees)")
        figure = comparison(rows, ["input", "truth", "prediction"], labels, extent)
        figure.suptitle(f"first validation pair: {lead} ahead", fontsize=9)
        return figure


STUDY = Era5ViT()
