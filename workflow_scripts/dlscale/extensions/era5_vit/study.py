"""The study `era5_vit`: predict the next state of the atmosphere with a vision transformer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from dlscale.core.errors import Refused, UserError
from dlscale.core.metrics import LossInfo, Metric
from dlscale.core.schema import Extent, Few, Strict
from dlscale.parallel.sharding import Sharding
from dlscale.studies.base import Metrics, PublishedLog, SampleLoss, Study

if TYPE_CHECKING:
    import numpy as np
    import torch
    from matplotlib.figure import Figure
    from torch import nn

    from dlscale.data.manifest import Manifest


class ViTSettings(Strict):
    """The vision transformer; its image size and channels come from the data."""

    kind: Literal["vit"]
    patch: Extent | tuple[Extent, Extent] = Field(8, description="Edge of a patch, or its rows and columns, cells.")
    embed_dim: Extent = Field(384, description="Dimension of a token.")
    depth: Few = Field(12, description="Number of transformer blocks.")
    heads: Few = Field(8, description="Number of attention heads.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Drop-out probability of tokens, projections and MLPs.")
    residual: bool | Literal["linear"] = Field(
        False,
        description="true: predict the change from the input state instead of the state itself. linear: predict the "
        "change from a learnt linear combination of all inputs, which initially equals the input state.",
    )
    static: list[Literal["latitude", "longitude", "mean"]] = Field(
        [],
        description="Constant inputs, each standardised. latitude, longitude: coordinates in degrees. mean: the mean "
        "state over the training times, which distinguishes land from sea.",
    )

    @model_validator(mode="after")
    def _heads(self) -> ViTSettings:
        if self.embed_dim % self.heads:
            raise Refused(f"embed_dim {self.embed_dim} is not a multiple of heads {self.heads}")
        return self

    @property
    def patch_size(self) -> tuple[int, int]:
        """Rows and columns of a patch."""
        return self.patch if isinstance(self.patch, tuple) else (self.patch, self.patch)


class ViTLoss(Strict):
    """The relative L2 error."""

    kind: Literal["relative_l2"]


class Era5Metrics(Metrics):
    """Latitude-weighted scores by channel, of the model and of baselines without learning.

    The score `acc` is computed only if the dataset has a climatology.
    """

    def __init__(self, run: Any, manifest: Manifest, device: torch.device) -> None:
        import numpy as np
        import torch

        from dlscale.extensions.era5_vit.era5.extra import Extra
        from dlscale.extensions.era5_vit.era5.naive import ANSWERS, NaiveAnswers
        from dlscale.extensions.era5_vit.scores import latitude_weights

        extra = Extra.of(manifest)
        self.info = info = manifest.fields["fields"]
        self.channels = info.channels
        tensor: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.weights = latitude_weights(torch.tensor(extra.latitude[: info.grid[0]], **tensor))
        self.scale = torch.tensor([t.scale for t in info.transforms])
        self.answers = NaiveAnswers(manifest, run.samples, self.weights, device)
        self.called = {name: ANSWERS[name] for name in self.answers.names}
        self.climatology: torch.Tensor | None = None
        if extra.climatology:
            mean = extra.means(manifest, "climatology")[0, :, : info.grid[0], : info.grid[1]]
            mean = np.stack([t.forward(channel) for t, channel in zip(info.transforms, mean, strict=True)])
            self.climatology = torch.tensor(mean, **tensor)

    @property
    def described(self) -> list[Metric]:
        answer = "the best baseline without learning"
        kinds = {
            "rmse": ("RMSE", "latitude-weighted root-mean-square error over all validation samples, in physical units"),
            "rmse_normalised": (
                "RMSE, normalised",
                "RMSE of standardised fields, averaged over samples, as published",
            ),
            "naive_rmse": (
                "RMSE of the best baseline without learning",
                f"the smallest validation RMSE among these baselines: {', '.join(self.called.values())}",
            ),
            **{
                f"{name}_rmse": (f"RMSE of {called}", "a baseline without learning")
                for name, called in self.called.items()
            },
            "skill": ("skill", f"1 - RMSE / RMSE of {answer}; 1 is perfect"),
            "acc": ("ACC", "anomaly correlation coefficient against the training climatology; 1 is perfect"),
        }
        if self.climatology is None:
            del kinds["acc"]
        return [
            Metric(
                name=f"{kind}/{name}",
                title=title,
                meaning=meaning,
                unit=unit if kind == "rmse" or kind.endswith("_rmse") else "1",
                better="higher" if kind in ("skill", "acc") else "lower",
                naive=f"naive_rmse/{name}" if kind == "rmse" else None,
                answer=answer if kind == "rmse" else "",
                derived=kind == "skill",
                rival=self.called.get(kind.removesuffix("_rmse"), ""),
            )
            for kind, (title, meaning) in kinds.items()
            for name, unit in zip(self.channels, self.info.units, strict=True)
        ]

    def per_sample(self, x: torch.Tensor, y: torch.Tensor, prediction: torch.Tensor) -> dict[str, torch.Tensor]:
        from dlscale.extensions.era5_vit.scores import anomaly_correlation, mean_square

        square = mean_square(prediction - y, self.weights)
        values = {"square": square, "root": square.sqrt()}
        if self.climatology is not None:
            values["acc"] = anomaly_correlation(prediction, y, self.climatology, self.weights)
        return values

    def naive(self, indices: range, split: str = "valid") -> dict[str, torch.Tensor]:
        import torch

        from dlscale.extensions.era5_vit.scores import mean_square

        squares: dict[str, list[torch.Tensor]] = {name: [] for name in self.called}
        for index in indices:
            answers, y = self.answers(index, split)
            for name, answer in answers.items():
                squares[name].append(mean_square(answer - y, self.weights))
        none = torch.zeros(0, len(self.channels), device=self.weights.device)
        return {f"{name}_square": torch.stack(each) if each else none for name, each in squares.items()}

    def summarise(self, means: dict[str, torch.Tensor]) -> dict[str, float]:
        import torch

        from dlscale.studies.scores import skill

        rmse = means["square"].sqrt() * self.scale
        errors = {name: means[f"{name}_square"].sqrt() * self.scale for name in self.called}
        naive = torch.stack(list(errors.values())).amin(dim=0)
        scores = {"rmse": rmse, "rmse_normalised": means["root"], "naive_rmse": naive}
        scores |= {f"{name}_rmse": error for name, error in errors.items()}
        scores["skill"] = skill(rmse, naive)
        return super().summarise(scores | {name: mean for name, mean in means.items() if name == "acc"})


class Era5ViT(Study):
    """The study `era5_vit`."""

    dataset = "era5"
    Model, Loss = ViTSettings, ViTLoss
    loss_info = LossInfo(title="relative L2", unit="no unit")
    operations = frozenset({"conv2d", "attention"})
    supports = frozenset({"attention", "activation_checkpointing", "tp", "cp"})
    published_log = PublishedLog(
        {
            "Loss/train": "loss/train",
            "Loss/valid": "loss/valid",
            "Learning Rate": "learning_rate",
            "Avg iters per sec": "steps_per_second",
            "Avg samples per sec": "samples_per_second",
            "RMSE(u10m)/valid": "valid/rmse_normalised/u10",
        }
    )

    def check(self, run: Any) -> None:
        if run.model.heads % run.geometry.tp:
            raise Refused(
                f"geometry.tp {run.geometry.tp} does not divide model.heads = {run.model.heads}. Choose a divisor, "
                "since the heads are divided among the devices"
            )
        if run.cuda_graph and run.activation_checkpointing and self.draws(run):
            raise Refused(
                "cuda_graph and activation_checkpointing: a graph cannot record the random state that drop-out keeps "
                "for the recomputation. Switch off cuda_graph, activation_checkpointing or model.dropout"
            )

    def check_grid(self, run: Any, grid: tuple[int, ...]) -> None:
        patch = run.model.patch_size
        if any(edge % size for edge, size in zip(grid, patch, strict=True)):
            raise Refused(
                f"model.patch {patch[0]} x {patch[1]} does not divide the fields of dataset {run.dataset} "
                f"({grid[0]} x {grid[1]} points); choose divisors, or crop the dataset"
            )

    def model(self, run: Any, manifest: Manifest) -> nn.Module:
        from dlscale.extensions.era5_vit.model import ViT

        info = manifest.fields["fields"]
        height, width = info.grid
        channels = len(info.channels)
        options = run.model.model_dump(exclude={"kind", "patch", "static"})  # named like the model's arguments
        options |= {"checkpointing": run.activation_checkpointing, "static": _static(run.model.static, manifest)}
        inputs = run.samples.channels(channels)
        return ViT((height, width), run.model.patch_size, inputs, channels, **options)

    def sharding(self, model: Any) -> Sharding:
        """Return the sharding of Megatron-LM with sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198)."""
        attention, mlp = "blocks.*.attention", "blocks.*.mlp"
        return Sharding(
            units=["blocks.*"],
            tokens=model.grid[0] * model.grid[1],
            first="dropout",
            last="head",
            gather=[attention, mlp],
            columns=[*(f"{attention}.{name}" for name in ("q", "k", "v")), f"{mlp}.0"],
            rows=[f"{attention}.projection", f"{mlp}.3"],
            attend=[f"{attention}.attend"],
        )

    def draws(self, run: Any) -> bool:
        return bool(run.model.dropout)

    def flops(self, run: Any, manifest: Manifest) -> float:
        """Return the forward FLOPs of a sample.

        For N tokens of width E, each attention takes 4 N^2 E FLOPs, and each output of a linear layer with E inputs
        takes 2 N E FLOPs. The sum is a third of the training FLOPs in Chowdhery et al. 2022 (arXiv:2204.02311),
        appendix B.
        """
        m, info = run.model, manifest.fields["fields"]
        rows, columns = m.patch_size
        tokens = info.grid[0] // rows * (info.grid[1] // columns)
        linear = (4 + 2 * 4) * m.embed_dim  # outputs of width E: q, k, v, projection; MLP
        block = 2 * tokens * m.embed_dim * linear + 4 * tokens**2 * m.embed_dim
        states = len(info.channels)
        inputs = run.samples.channels(states) + sum(states if field == "mean" else 1 for field in m.static)
        ends = 2 * tokens * m.embed_dim * rows * columns * (inputs + states)
        if m.residual == "linear":
            ends += 2 * info.grid[0] * info.grid[1] * inputs * states
        return float(m.depth * block + ends)

    def loss(self, run: Any) -> SampleLoss:
        from dlscale.extensions.era5_vit.scores import relative_l2

        return relative_l2

    def metrics(self, run: Any, manifest: Manifest, device: torch.device) -> Era5Metrics:
        return Era5Metrics(run, manifest, device)

    def figure(self, run: Any, manifest: Manifest, x: Any, y: Any, prediction: Any) -> Figure:
        """Draw input, truth and prediction of the first four channels as maps."""
        from dlscale.extensions.era5_vit.era5.extra import Extra
        from dlscale.studies.figures import comparison

        info, extra = manifest.fields["fields"], Extra.of(manifest)
        rows = [
            (name, unit, [transform.inverse(state[channel]) for state in (x, y, prediction)])
            for channel, (name, unit, transform) in enumerate(
                zip(info.channels, info.units, info.transforms, strict=True)
            )
        ][:4]
        labels = ("longitude (degrees)", "latitude (degrees)")
        extent = (extra.longitude[0], extra.longitude[-1], extra.latitude[-1], extra.latitude[0])
        figure = comparison(rows, ["input", "truth", "prediction"], labels, extent)
        figure.suptitle(f"first validation pair: {run.samples.dt * extra.step_hours:g} h ahead", fontsize=9)
        return figure

    def picture(self, run: Any, manifest: Manifest, y: Any, prediction: Any) -> tuple[str, np.ndarray]:
        """Return a picture of t2m, as in NERSC's tutorials, or of the first channel if t2m is missing."""
        from dlscale.studies.figures import side_by_side

        names = manifest.fields["fields"].channels
        name = "t2m" if "t2m" in names else names[0]
        channel = names.index(name)
        return name, side_by_side(y[channel], prediction[channel])


def _static(fields: Sequence[str], manifest: Manifest) -> torch.Tensor | None:
    """Return the standardised static fields [S, H, W]; None if `fields` is empty."""
    import numpy as np
    import torch

    from dlscale.extensions.era5_vit.era5.extra import Extra

    if not fields:
        return None
    info, extra = manifest.fields["fields"], Extra.of(manifest)
    rows, columns = info.grid
    latitude, longitude = np.meshgrid(extra.latitude[:rows], extra.longitude[:columns], indexing="ij")
    known: dict[str, Any] = {"latitude": latitude[None], "longitude": longitude[None]}
    if extra.climatology:
        known["mean"] = extra.means(manifest, "climatology")[0, :, :rows, :columns]
    if missing := [field for field in fields if field not in known]:
        raise UserError(
            f"{manifest.folder}: model.static: {missing[0]} is unknown for this dataset. Remove it from the list"
        )
    maps = np.concatenate([known[field] for field in fields]).astype(np.float64)
    mean, std = (f(maps, axis=(1, 2), keepdims=True) for f in (np.mean, np.std))
    return torch.tensor((maps - mean) / np.maximum(std, 1e-12), dtype=torch.float32, device="cpu")


STUDY = Era5ViT()
