"""`plant`: a study in which bottlenecks can be planted, to check whether the verdict names each bottleneck."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dlscale.config.dataset import DatasetSettings
from dlscale.core.schema import Strict
from dlscale.data.kind import DatasetKind, Part
from dlscale.data.source import ArraySource
from dlscale.studies.base import SampleLoss, Study

#: Bytes per read of the slow disk: complete pages, as reads that bypass the page cache (O_DIRECT) require.
BLOCK = 2**16


class PlantDataset(DatasetSettings):
    """Rows of random numbers."""

    kind: Literal["plant"]
    rows: int = 512
    width: int = 1024


class PlantSamples(Strict):
    """Settings of rows whose reading can be slowed."""

    kind: Literal["rows"]
    wait: float = 0.0  #: Seconds that reading a sample waits for the simulated slow disk.
    work: float = 0.0  #: Processor seconds that reading a sample takes.


class Plant(DatasetKind):
    """Rows made in memory, one part per split."""

    name, Settings, Samples = "plant", PlantDataset, PlantSamples

    def parts(self, dataset: PlantDataset) -> list[Part]:
        """See `DatasetKind`."""
        return [Part("train", "rows"), Part("valid", "rows")]


def open_source(dataset: PlantDataset, part: Part, paths: list[Path]) -> ArraySource:
    """Make the rows: float32 [N, width], with a target [N]."""
    rng = np.random.default_rng(part.split == "valid")
    x = rng.normal(size=(dataset.rows, dataset.width)).astype(np.float32)
    return ArraySource({"x": x, "y": x.mean(axis=1)})


class Rows:
    """Rows that wait for a slow disk or take processor time."""

    def __init__(self, manifest: Any, split: str, settings: PlantSamples, seed: int) -> None:
        from dlscale.data.kind import RowSamples
        from dlscale.data.samples import Rows as Plain

        self._plain = Plain(manifest, split, RowSamples(kind="rows", input="x", target="y"), seed)
        self._file, self._settings = manifest.path(manifest.files(split)[0]), settings
        self.size, self.input_spec, self.target_spec = (
            self._plain.size,
            self._plain.input_spec,
            self._plain.target_spec,
        )

    def read(self, epoch: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """See `dlscale.data.samples.Samples`."""
        if self._settings.wait:
            self._from_disk(index)
        if self._settings.work:
            end = time.thread_time() + self._settings.work
            while time.thread_time() < end:
                sum(range(1000))
        return self._plain.read(epoch, index)

    def _from_disk(self, index: int) -> None:
        """Simulate a slow disk: read a block that bypasses the page cache, then sleep."""
        with mmap.mmap(-1, BLOCK) as memory:  # direct reads need aligned memory
            file = os.open(self._file, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
            try:
                blocks = max(os.fstat(file).st_size // BLOCK, 1)
                os.preadv(file, [memory], index % blocks * BLOCK)
            finally:
                os.close(file)
        time.sleep(self._settings.wait)


def open_samples(manifest: Any, split: str, settings: PlantSamples, seed: int) -> Rows:
    """Return the samples of a split."""
    return Rows(manifest, split, settings, seed)


KINDS = [Plant()]


class PlantModel(Strict):
    """A model with one dominant cost."""

    #: Kind of model. dense: large matrix products; tiny: many small layers; wide: passes over large tensors with little
    #: arithmetic; heavy: many weights with little arithmetic.
    kind: Literal["dense", "tiny", "wide", "heavy"]
    depth: int = 4
    size: int = 1024
    item: bool = False  #: Whether to read a number from the device after every layer.
    slow_rank: int | None = None  #: Rank whose steps take about twice as long.


class PlantLoss(Strict):
    """Settings of the squared error."""

    kind: Literal["square"]


def make(settings: PlantModel, width: int) -> Any:
    """Return the model. Import torch only in this function, because every call of Snakemake reads this file."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            size = settings.size
            self.first = nn.Linear(width, size)
            wide = settings.kind == "wide"
            self.layers = nn.ModuleList(nn.Identity() if wide else nn.Linear(size, size) for _ in range(settings.depth))
            self.last = nn.Linear(size, 1)

        def forward(self, x: Any) -> Any:
            h = self.first(x)
            if settings.kind == "wide":  # [B, size] to [B, 128, size] and back
                h = h[:, None] * torch.linspace(0, 1, 128, device=h.device)[:, None]
                for _ in range(settings.depth):
                    h = 0.5 * h + h.abs()
                h = h.mean(dim=1)
            for layer in self.layers:
                h = torch.relu(layer(h))
                if settings.item and float(h.detach().mean()) > 1e9:
                    raise RuntimeError("never")
            if settings.slow_rank is not None and int(os.environ.get("RANK", "0")) == settings.slow_rank:
                for layer in self.layers:
                    for _ in range(4):
                        with torch.no_grad():
                            layer(h)
            return self.last(h).flatten()

    return Net()


class PlantStudy(Study):
    """Study of planted bottlenecks."""

    dataset, Model, Loss = "plant", PlantModel, PlantLoss

    def model(self, run: Any, manifest: Any) -> Any:
        """See `Study`."""
        return make(run.model, manifest.fields["x"].row_shape[0])

    def loss(self, run: Any) -> SampleLoss:
        """See `Study`."""
        return lambda prediction_B, target_B: (prediction_B - target_B) ** 2


STUDY = PlantStudy()
