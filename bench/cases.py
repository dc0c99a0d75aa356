"""The studies `cosmo_unet` and `era5_vit` at any size, without a configuration file: settings, model, step, data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from bench import loading
from dlscale.config.run import Run, run_class
from dlscale.core import registry
from dlscale.data.manifest import Manifest
from dlscale.data.samples import GridSamples
from dlscale.data.store import Field
from dlscale.extensions.cosmo_unet.cosmo.kind import CropSamples
from dlscale.extensions.cosmo_unet.cosmo.samples import Crops
from dlscale.extensions.era5_vit.era5.kind import PairSamples
from dlscale.extensions.era5_vit.era5.samples import Pairs
from dlscale.parallel.world import World
from dlscale.studies.base import SampleLoss, Study
from dlscale.train.build import build_step
from dlscale.train.step import Step

#: Settings of each study from its tutorial (SC22, SC23), except sizes.
PUBLISHED: dict[str, dict[str, Any]] = {
    "cosmo_unet": {"loss": {"kind": "l1"}, "optimizer": {"lr": 2e-4}},
    "era5_vit": {"loss": {"kind": "relative_l2"}, "optimizer": {"lr": 5e-4, "betas": (0.9, 0.95)}},
}
KINDS = {"cosmo_unet": ("unet3d", "crops"), "era5_vit": ("vit", "pairs")}


def sizes(small: bool) -> tuple[Case, Case, Case]:
    """Return the tutorials' U-Net and ViT, and a large ViT, each with the batch of one GPU; or `small` versions."""
    if small:
        vit: dict[str, Any] = {"depth": 2, "heads": 2}
        return (
            Case("cosmo_unet", {"widths": [4, 8]}, (16, 16, 16), batch_size=2),
            Case("era5_vit", {**vit, "embed_dim": 32}, (32, 64), batch_size=2, channels=3),
            Case("era5_vit", {**vit, "embed_dim": 64}, (32, 64), batch_size=2, channels=3),
        )
    return (
        Case("cosmo_unet", {}, (64, 64, 64), batch_size=64),
        Case("era5_vit", {}, (360, 720), batch_size=16),
        Case("era5_vit", {"embed_dim": 1024}, (360, 720), batch_size=16),
    )


@dataclass(frozen=True)
class Case:
    """A study at one size.

    Attributes
    ----------
    study
        Name of the study.
    model
        Settings of the model.
    grid
        Grid points of a sample: [D, H, W] with three equal edges, or [H, W].
    batch_size
        Samples per step.
    channels
        Channels of input and target of `era5_vit`; unused for `cosmo_unet`.
    """

    study: str
    model: dict[str, Any]
    grid: tuple[int, ...]
    batch_size: int
    channels: int = 20

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of one input and one target."""
        counts = (4, 5) if self.study == "cosmo_unet" else (self.channels, self.channels)
        return (counts[0], *self.grid), (counts[1], *self.grid)

    def run(self, **over: Any) -> Run:
        """Return the run; `over` overrides its settings.

        Mappings are merged key by key. A mapping with a `kind` replaces the default mapping.
        """
        model, samples = KINDS[self.study]
        raw: dict[str, Any] = {
            "study": self.study,
            "dataset": "bench",
            "precision": "fp32",
            "batch_size": self.batch_size,
            "model": {"kind": model, **self.model},
            "samples": {"kind": samples} | ({"crop": self.grid[0]} if samples == "crops" else {}),
            "training": {"epochs": 1},
            **PUBLISHED[self.study],
        }
        for key, value in over.items():
            merged = isinstance(value, dict) and "kind" not in value
            raw[key] = {**raw.get(key, {}), **value} if merged else value
        return run_class(self.study).model_validate(raw)

    @property
    def manifest(self) -> Any:
        """Stand-in for a manifest, with the fields from which a study builds its model."""
        (inputs, *_), (outputs, *_) = self.shapes
        named = {"Nbody": inputs, "Hydro": outputs, "fields": inputs}
        return SimpleNamespace(
            fields={name: SimpleNamespace(channels=range(count), grid=self.grid) for name, count in named.items()}
        )

    def network(self, run: Run) -> nn.Module:
        """Return the model, built by the study."""
        return self._study.model(run, self.manifest)

    def loss(self) -> SampleLoss:
        """Return the study's loss."""
        return self._study.loss(self.run())

    def step(self, device: torch.device, spread: float = 0.0, world: World | None = None, **over: Any) -> Step:
        """Return the step of a run, always with the same weights; `spread` is the standard deviation of added noise."""
        run = self.run(**over)

        def make() -> nn.Module:
            with device, torch.no_grad():  # draw noise on the device, because large models have many weights
                model = self.network(run)
                for p in model.parameters() if spread else ():
                    p.add_(spread * torch.randn(p.shape))
            return model

        return build_step(run, make, self.loss(), world or World(device=device))

    def batch(self, device: torch.device, size: int | None = None, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch of normal deviates; the target's standard deviation is 0.3."""
        generator = torch.Generator().manual_seed(seed)
        size = size or self.batch_size
        x, y = (torch.randn(size, *shape, generator=generator) for shape in self.shapes)
        return x.to(device), 0.3 * y.to(device)

    def delivered(self, step: Step, size: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch on the step's device."""
        return self.batch(step.device, size)

    def flops(self) -> float:
        """Return the FLOPs of a sample by the study's formula, forward and backward."""
        forward = self._study.flops(self.run(), self.manifest)
        assert forward is not None
        return 3 * forward

    def write(self, path: Path, rows: int) -> None:
        """Write data as the assemble stage does: a volume of `rows`^3 cells, or a series of `rows` times."""
        loading.write(path, self._fields(rows), "float16", channels_last=self.study == "cosmo_unet")

    def samples(self, path: Path, rows: int, count: int) -> GridSamples:
        """Return the samples of a file from `write`, `count` per epoch."""
        manifest = self.described(path, rows, count)
        if self.study == "cosmo_unet":
            settings = CropSamples(kind="crops", crop=self.grid[0], train=count)
            return Crops(manifest, "train", settings, seed=0)
        return Pairs(manifest, "train", PairSamples(kind="pairs", train=count), seed=0)

    def described(self, path: Path, rows: int, count: int) -> Manifest:
        """Return the manifest of a file from `write`, with at least `count` samples.

        The manifest lists the file of a series as often as needed for long epochs. The page cache still holds the file
        only once.
        """
        if self.study == "cosmo_unet":
            return loading.manifest(path, "cosmo", self._fields(rows))
        manifest = loading.manifest(path, "era5", self._fields(rows))
        manifest.splits["train"] *= -(-count // (rows - 1))
        return manifest

    def _fields(self, rows: int) -> list[Field]:
        if self.study == "cosmo_unet":
            return loading.cosmo_fields(rows)
        return [loading.series_field(rows, self.channels, *self.grid)]

    @property
    def _study(self) -> Study:
        study: Study = registry.study(self.study)
        return study
