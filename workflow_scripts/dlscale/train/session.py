"""From a run's settings to objects: device, data, model, step. Training and measuring both begin here."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dlscale.config.run import RunCore
from dlscale.core import registry
from dlscale.core.fingerprint import DEFAULTS
from dlscale.data.loaders.base import Loader, Share
from dlscale.data.manifest import Manifest
from dlscale.data.samples import Samples
from dlscale.parallel.world import World
from dlscale.studies.base import Study
from dlscale.train.precision import compute_dtype
from dlscale.train.selfcheck import check_operations
from dlscale.train.step import Loss, Step


@dataclass(frozen=True)
class Session:
    """What a stage works with."""

    run: RunCore
    manifest: Manifest
    world: World
    study: Study
    step: Step
    loss: Loss

    def loader(self, split: str) -> Loader:
        """Return the loader of a split; validation goes through the same loader as training."""
        samples = self.samples(split)
        if split == "train" and samples.size < self.run.batch_size:
            logging.warning("an epoch of %d samples is less than one batch (%d)", samples.size, self.run.batch_size)
        module = registry.load(registry.loader(self.run.loader.kind))
        share = Share(self.run.batch_size, self.world.rank, self.world.size)
        loader: Loader = module.build(samples, self.run.loader, share, self.world.device)
        return loader

    def samples(self, split: str) -> Samples:
        """Return the samples of a split."""
        module = registry.part(self.study.dataset, "samples") or DEFAULTS["samples"]
        samples: Samples = registry.load(module).open_samples(self.manifest, split, self.run.samples, self.run.seed)
        return samples

    @property
    def device(self) -> torch.device:
        """What this process computes on."""
        return self.world.device

    @property
    def parameters(self) -> int:
        """Trainable parameters of the model."""
        return sum(p.numel() for p in self.step.model.parameters() if p.requires_grad)


def open_session(run: RunCore, manifest: str | Path, world: World, threads: int | None = None) -> Session:
    """Set up everything but the loaders.

    Parameters
    ----------
    world
        The processes of the run.
    threads
        CPU threads of PyTorch; results on a CPU are bitwise repeatable for the same number.
    """
    if threads:
        # Those of a machine are shared by the processes on it.
        torch.set_num_threads(max(1, threads // run.geometry.gpus_per_node))
    found = Manifest.read(manifest)
    found.check_files()
    study: Study = registry.study(run.study)
    torch.manual_seed(run.seed)
    model = study.model(run, found).to(world.device)
    loss = study.loss(run)
    step = Step(model, loss, run, world.device, world.size)
    if compute_dtype(run.precision) != torch.float32:
        width = getattr(model, "attention_shape", (0, 0, 32))[2]
        check_operations(
            compute_dtype(run.precision), step.device, run.memory_format == "channels_last", step.attention, width
        )
    if world.rank:  # the same weights everywhere, but each its own drop-out
        torch.manual_seed(int(np.random.SeedSequence([run.seed, world.rank]).generate_state(1, np.uint64)[0]))
    return Session(run, found, world, study, step, loss)


def device_facts(device: torch.device) -> dict[str, str | int]:
    """Return kind, name and CPU threads of the device, for the record."""
    if device.type == "cuda":
        return {"kind": "cuda", "name": torch.cuda.get_device_name(device), "threads": torch.get_num_threads()}
    return {"kind": device.type, "name": _processor(), "threads": torch.get_num_threads()}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        import platform

        return platform.processor() or platform.machine()
