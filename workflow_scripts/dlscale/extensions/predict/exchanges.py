"""Predict the bytes that ranks exchange in one step of a model, counted as in nccl-tests.

The size of an all-reduce is that of its tensor. The size of an all-gather or a reduce-scatter is that of its output or
its input, whichever is larger. In a ring of n ranks, each rank sends 2 (n - 1) / n times this size for an all-reduce,
and (n - 1) / n times this size for the other two (Thakur et al. 2005, doi:10.1177/1094342005051521).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from dlscale.config.run import DDP, FSDP, RunCore
from dlscale.parallel.model import cut_layers, named
from dlscale.parallel.sharding import Sharding


def _local_shapes(run: RunCore, model: nn.Module, sharding: Sharding) -> dict[str, list[int]]:
    """Return the shapes of the trained weights on the first tensor-parallel device."""
    shapes = {name: list(p.shape) or [1] for name, p in model.named_parameters() if p.requires_grad}
    for layer_name, layer, dim in cut_layers(model, sharding) if run.geometry.tp > 1 else ():
        for own, p in layer.named_parameters(recurse=False):
            name = f"{layer_name}.{own}"
            if p.dim() > dim and name in shapes:
                shapes[name][dim] = -(-shapes[name][dim] // run.geometry.tp)
    return shapes


@dataclass(frozen=True)
class Averaged:
    """Bytes that data- and context-parallel devices exchange in one step for one weight."""

    forward: int  #: Bytes of the weight, gathered before the forward pass (FSDP; else zero).
    backward: int  #: Bytes of the weight, gathered again before the backward pass (FSDP; else zero).
    gradient: int  #: Bytes of the averaged gradient.


def averaged(run: RunCore, model: nn.Module, sharding: Sharding) -> dict[str, Averaged]:
    """Return the exchanged bytes of each trained weight by name, in the model's order.

    The model may be on the `meta` device.
    """
    own = {name: p.element_size() for name, p in model.named_parameters()}
    local, parallel = _local_shapes(run, model, sharding), run.parallel
    if isinstance(parallel, DDP):
        width = {"none": None, "bf16": 2, "fp16": 2}[parallel.compression]
        return {name: Averaged(0, 0, math.prod(shape) * (width or own[name])) for name, shape in local.items()}
    if not isinstance(parallel, FSDP):
        return {}  # DataParallel exchanges nothing between ranks, because one process has all copies
    shard = (parallel.shard or run.geometry.dp * run.geometry.cp) if run.averages else 1
    formats, found = {"fp32": 4, "bf16": 2}, dict[str, Averaged]()
    units = list(named(model, sharding.units))
    for name, shape in local.items():
        # FSDP pads the first dimension to a multiple of the number of shards.
        numbers = shard * -(-shape[0] // shard) * math.prod(shape[1:])
        again = parallel.reshard and any(name.startswith(f"{unit}.") for unit in units)
        width = own[name] if parallel.param_dtype == "fp32" else formats[parallel.param_dtype]
        gathered = numbers * width * run.accumulation_steps
        found[name] = Averaged(gathered, gathered if again else 0, numbers * formats[parallel.reduce_dtype])
    return found
