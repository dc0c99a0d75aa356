"""What training and measuring both begin with: data, loaders, and the step of a run."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from dlscale.config.run import RunCore
from dlscale.core import registry
from dlscale.core.errors import UserError
from dlscale.core.fingerprint import DEFAULTS
from dlscale.core.records import Device
from dlscale.data.loaders.base import Loader, Share
from dlscale.data.manifest import Manifest
from dlscale.data.samples import Samples
from dlscale.parallel.world import World
from dlscale.studies.base import Study
from dlscale.train.build import build_step
from dlscale.train.precision import compute_dtype
from dlscale.train.selfcheck import check_operations
from dlscale.train.step import Step


@dataclass(frozen=True)
class Session:
    """What a stage of a run works with."""

    run: RunCore
    manifest: Manifest
    world: World
    study: Study
    step: Step

    def share(self) -> Share:
        """Return what this rank loads of each batch."""
        return Share(self.run.batch_size, self.world.data_rank, self.world.data_size)

    def loader(self, split: str) -> Loader:
        """Return the loader of a split; validation goes through the same loader as training."""
        samples = self.samples(split)
        if split == "train" and samples.size < self.run.batch_size:
            logging.warning("an epoch of %d samples is less than one batch (%d)", samples.size, self.run.batch_size)
        module = registry.load(registry.loader(self.run.loader.kind))
        loader: Loader = module.build(samples, self.run.loader, self.share(), self.world.device)
        return loader

    def samples(self, split: str) -> Samples:
        """Return the samples of a split."""
        module = registry.part(self.study.dataset, "samples") or DEFAULTS["samples"]
        samples: Samples = registry.load(module).open_samples(self.manifest, split, self.run.samples, self.run.seed)
        return samples

    @property
    def parameters(self) -> int:
        """Trainable parameters of the model."""
        return sum(p.numel() for p in self.step.model.parameters() if p.requires_grad)


def open_session(run: RunCore, manifest: str | Path, world: World, threads: int | None = None) -> Session:
    """Set up everything but the loaders.

    Parameters
    ----------
    world
        The ranks of the run.
    threads
        CPU threads of a node; results on a CPU are bitwise repeatable for the same number.
    """
    if threads:
        # The ranks of a node share its threads.
        torch.set_num_threads(max(1, threads // run.geometry.gpus_per_node))
    data = Manifest.read(manifest)
    data.check_files()
    study: Study = registry.study(run.study)
    for grid in {tuple(info.grid) for info in data.fields.values() if info.grid}:
        try:
            study.check_grid(run, grid)
        except ValueError as error:
            raise UserError(str(error)) from None
    step = build_step(run, partial(study.model, run, data), study.loss(run), world)
    dtype = compute_dtype(run.precision)
    if dtype != torch.float32:
        width = getattr(step.model, "attention_shape", (0, 0, 32))[2]
        check_operations(dtype, world.device, run.memory_format == "channels_last", step.attention, width)
    if world.data_rank:  # the same weights everywhere, but each its own drop-out
        sequence = np.random.SeedSequence([run.seed, world.data_rank])
        torch.manual_seed(int(sequence.generate_state(1, np.uint64)[0]))
    return Session(run, data, world, study, step)


def describe_device(device: torch.device) -> Device:
    """Return what a process computes on, for the record."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return Device(kind=device.type, name=name, threads=torch.get_num_threads())


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        import platform

        return platform.processor() or platform.machine()
