"""A model becomes a step that trains: every part of building has its place in `build_step`, in a fixed order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlscale.config.run import RunCore
from dlscale.core.errors import UserError
from dlscale.parallel.world import World
from dlscale.studies.base import SampleLoss
from dlscale.train.attention import Context, attention_context
from dlscale.train.optimizer import build_optimizer
from dlscale.train.precision import Weights, compute_dtype, set_matmul_precision
from dlscale.train.step import Step


def build_step(run: RunCore, make: Callable[[], nn.Module], loss: SampleLoss, world: World | None = None) -> Step:
    """Build the step of a run.

    Parameters
    ----------
    make
        Makes the model and draws its weights from torch's random state.
    loss
        Loss of each sample [B].
    world
        The ranks that train together; this process alone by default.
    """
    world = world or World()
    device = world.device
    if run.cuda_graph and device.type != "cuda":
        raise UserError(f"cuda_graph: the device is a {device.type}, and only CUDA has graphs; set it to false")
    set_matmul_precision(run.precision)

    # 1. Made, its weights drawn from the seed on the host: they are the same on every device and number of ranks.
    #    (A model too large for one host would be made on `meta`, and its weights drawn after 2.)
    torch.manual_seed(run.seed)
    model = make()
    # 2. Sharded: the place of a plan that splits layers over ranks. All ranks hold the whole model so far.
    # 3. Placed: device, layout, number format.
    layout = memory_format(model, run.memory_format)
    model.to(device).to(memory_format=layout)  # type: ignore[call-overload]
    weights = Weights(model, run.precision)
    # 4. Wrapped: gradients are averaged over the data-parallel ranks.
    network = model
    if world.data_size > 1:
        network = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    # 5. The optimiser, of the weights as they are placed.
    optimizer = build_optimizer(weights.updated, run.optimizer, device if run.cuda_graph else None)
    attention = _attention(model, run, device)
    step = Step(weights, network, loss, optimizer, run.precision, layout, attention, run.accumulation_steps)
    # 6. Compiled, or recorded: what the parts above have become.
    step.compile(run.compile.mode)
    if run.cuda_graph:
        step.capture()
    return step


def memory_format(model: nn.Module, kind: str) -> torch.memory_format:
    """Return PyTorch's name of a run's `memory_format`, by the dimensions of the model's convolutions."""
    if kind == "contiguous":
        return torch.preserve_format
    volumes = any(p.dim() == 5 for p in model.parameters())
    return torch.channels_last_3d if volumes else torch.channels_last


def _attention(model: Any, run: RunCore, device: torch.device) -> Context:
    """Return the context of the model's attention, if it has any."""
    if run.attention == "default":
        return nullcontext
    heads, tokens, width = model.attention_shape
    shape = (-(-run.local_batch_size // run.accumulation_steps), heads, tokens, width)
    return attention_context(run.attention, shape, model.attention_dropout, compute_dtype(run.precision), device)
