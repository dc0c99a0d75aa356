"""Samples/s of the trainer, against a loop by hand with the same model, optimiser and batch."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from dlscale.data.loaders.base import Share
from dlscale.data.loaders.synthetic_loader import SyntheticLoader
from dlscale.models.losses import l1, relative_l2
from dlscale.models.unet3d import UNet3D
from dlscale.models.vit import ViT
from dlscale.runtime import config
from dlscale.runtime.schema.run import Run
from dlscale.train.checkpoint import Checkpoints
from dlscale.train.step import Step
from dlscale.train.trainer import Trainer
from tests.bench.measure import Options, Row, in_turns

CPU = torch.device("cpu")
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def resolved(study: str, **settings: Any) -> Run:
    """Return a study's run as the configuration resolves it; its data are never read."""
    run = {"precision": "fp32", "loader": {"kind": "synthetic"}, "training": {"epochs": 1}, **settings}
    plan = {"study": study, "runs": {"run": run}}
    return config.load({"targets": ["bench"], "plans": {"bench": plan}}).plans["bench"]["run"].run


def synthetic(shapes: tuple[tuple[int, ...], tuple[int, ...]], size: int, batch_size: int) -> SyntheticLoader:
    """Return the loader that needs no data."""
    samples = SimpleNamespace(size=size, input_shape=shapes[0], target_shape=shapes[1])
    return SyntheticLoader(samples, Share(batch_size), CPU)  # type: ignore[arg-type]


def compare(
    options: Options, name: str, run: Run, model: nn.Module, loss: Loss, shapes: tuple[tuple[int, ...], tuple[int, ...]]
) -> Row:
    """Measure both over one epoch of the same steps."""
    steps = 2 if options.quick else 5
    batch_size = run.batch_size
    loader = synthetic(shapes, steps * batch_size, batch_size)
    valid = synthetic(shapes, 1, 1)
    metrics = SimpleNamespace(per_sample=lambda x, y, p: {}, summarise=lambda means: {}, units={})
    turns = itertools.count()
    bare = copy.deepcopy(model)
    settings = run.optimizer
    adam = torch.optim.Adam(bare.parameters(), lr=settings.lr, betas=settings.betas, eps=settings.eps)
    step = Step(model, loss, run, CPU)

    def trainer() -> float:
        checkpoints = Checkpoints(options.folder / name / str(next(turns)), keep=1)  # nothing to resume from
        fit = Trainer(run, step, loss, loader, valid, metrics, checkpoints, lambda record: None)  # type: ignore[arg-type]
        return float(fit.fit()[0]["samples_per_second"])

    def by_hand() -> float:
        x, y = next(loader.epoch(0))
        bare.train()
        start = time.perf_counter()
        for _ in range(steps):
            adam.zero_grad(set_to_none=True)
            value = loss(bare(x), y)
            value.backward()
            adam.step()
        value.item()
        return steps * batch_size / (time.perf_counter() - start)

    # Short turns and many of them, on one thread: steadier on a busy machine.
    found = in_turns(3 * options.repetitions, {"trainer": trainer, "by hand": by_hand})
    parameters = sum(p.numel() for p in model.parameters())
    counted = {"threads": torch.get_num_threads(), "steps": steps, "batch": batch_size, "parameters": parameters}
    return Row(name, "samples/s", found["trainer"], "a bare loop", found["by hand"], counted)


def steps(options: Options) -> list[Row]:
    """Both studies, small: what the trainer itself costs shows best where a step is short."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    unet = resolved("cosmo_unet", batch_size=2, model={"widths": [16, 32]}, samples={"crop": 32})
    shape = (16, 64, 128)
    vit = resolved("era5_vit", batch_size=4, model={"patch": 8, "embed_dim": 96, "depth": 4, "heads": 4})
    rows = [
        compare(options, "step, U-Net 32^3", unet, UNet3D(4, 5, (16, 32)), l1, ((4, 32, 32, 32), (5, 32, 32, 32))),
        compare(
            options,
            "step, ViT 16 x 64 x 128",
            vit,
            ViT(shape[1:], (8, 8), 16, 16, embed_dim=96, depth=4, heads=4),
            relative_l2,
            (shape, shape),
        ),
    ]
    torch.set_num_threads(threads)
    return rows
