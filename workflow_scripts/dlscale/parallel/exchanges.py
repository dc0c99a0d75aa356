"""Bytes that the ranks of a run exchange in a step: counted as it happens, and by formula.

Bytes are those of a message, as nccl-tests count them: of a sum the tensor, else the greater of what goes in and what
comes out. Each rank of n sends 2 (n - 1) / n of it for a sum, (n - 1) / n for the others, if they pass it on in a ring
(Thakur, Rabenseifner and Gropp 2005, doi:10.1177/1094342005051521).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlscale.config.run import DDP, FSDP, RunCore
from dlscale.parallel.model import named
from dlscale.parallel.sharding import Sharding

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")


class Counting(TorchDispatchMode):
    """Counts what this rank exchanges within it. What a compiler put into its own code, it does not see.

    Attributes
    ----------
    bytes
        By kind, one of `KINDS`.
    calls
        As many exchanges, by kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.calls = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it comes again, as what it is made of
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.replace("_", "")
            if kind := next((kind for kind in KINDS if kind.replace("_", "") in name), None):
                self.calls[kind] += 1
                self.bytes[kind] += max(map(_size, [*args, result]))
        return result


def _size(values: Any) -> int:
    """Return the bytes of all tensors in a value."""
    return sum(each.nbytes for each in tree_leaves(values) if isinstance(each, torch.Tensor))


def formula(run: RunCore, model: nn.Module, sharding: Sharding, samples: int, width: int) -> dict[str, int]:
    """Return the bytes that the first rank exchanges in a step, by kind; those without any are left out.

    Others have less where weights do not divide.
    Left out are single numbers (the norm of gradients, whether one overflowed) and what is measured on the way.

    Parameters
    ----------
    model
        As one device has it, in the number format of its weights; it may be on `meta`.
    samples
        Of this rank, in a step.
    width
        Bytes of a number that layers compute with.
    """
    bytes_ = Counter[str]()
    local = _local_shapes(run, model, sharding)
    if run.geometry.model_size > 1:
        bytes_.update(_of_tokens(run, model, sharding, samples * width))
    if run.averages and run.geometry.dp * run.geometry.cp > 1:
        bytes_.update(_of_weights(run, model, sharding))
    if run.geometry.tp > 1:  # of weights that tensor-parallel devices have in common, in float32
        cut, shard = _cut(model, sharding), _shard(run)
        common = [shape for name, shape in local.items() if name not in cut]
        bytes_["all_reduce"] += sum(4 * -(-shape[0] // shard) * math.prod(shape[1:]) for shape in common)
    return {kind: size for kind, size in bytes_.items() if size}


def _shard(run: RunCore) -> int:
    """Return how many devices share one copy of the weights by FSDP."""
    if not isinstance(run.parallel, FSDP) or not run.averages:
        return 1
    return run.parallel.shard or run.geometry.dp * run.geometry.cp


def _cut(model: nn.Module, sharding: Sharding) -> dict[str, int]:
    """Return the dimension in which tensor-parallel devices cut a weight, by name."""
    layers = [(name, module, 0) for name, module in named(model, sharding.columns).items()]
    layers += [(name, module, 1) for name, module in named(model, sharding.rows).items()]
    return {
        f"{name}.{own}": dim
        for name, module, dim in layers
        for own, p in module.named_parameters(recurse=False)
        if p.dim() > dim
    }


def _local_shapes(run: RunCore, model: nn.Module, sharding: Sharding) -> dict[str, list[int]]:
    """Return the shapes of trained weights that the first tensor-parallel device has."""
    cut = _cut(model, sharding) if run.geometry.tp > 1 else {}
    shapes = {name: list(p.shape) or [1] for name, p in model.named_parameters() if p.requires_grad}
    for name, dim in cut.items():
        if name in shapes:
            shapes[name][dim] = -(-shapes[name][dim] // run.geometry.tp)
    return shapes


@dataclass(frozen=True)
class Averaged:
    """Bytes of a weight that those exchange in a step that see different samples, or tokens."""

    forward: int  #: FSDP: gathered before the forward pass,
    backward: int  #: and again before the backward pass.
    gradient: int


def averaged(run: RunCore, model: nn.Module, sharding: Sharding) -> dict[str, Averaged]:
    """Return the bytes of each trained weight by name, in the order of the model; arguments as of `formula`."""
    own = {name: p.element_size() for name, p in model.named_parameters()}
    local, parallel = _local_shapes(run, model, sharding), run.parallel
    if isinstance(parallel, DDP):
        width = {"none": None, "bf16": 2, "fp16": 2}[parallel.compression]
        return {name: Averaged(0, 0, math.prod(shape) * (width or own[name])) for name, shape in local.items()}
    if not isinstance(parallel, FSDP):
        return {}  # one process has all copies
    shard, formats, found = _shard(run), {"fp32": 4, "bf16": 2}, dict[str, Averaged]()
    units = list(named(model, sharding.units))
    for name, shape in local.items():
        numbers = shard * -(-shape[0] // shard) * math.prod(shape[1:])  # filled up so that it divides
        again = parallel.reshard and any(name.startswith(f"{unit}.") for unit in units)
        width = own[name] if parallel.param_dtype == "fp32" else formats[parallel.param_dtype]
        gathered = numbers * width * run.accumulation_steps
        found[name] = Averaged(gathered, gathered if again else 0, numbers * formats[parallel.reduce_dtype])
    return found


def _of_weights(run: RunCore, model: nn.Module, sharding: Sharding) -> dict[str, int]:
    """Return the bytes of weights and gradients, between devices of different samples or tokens."""
    each = averaged(run, model, sharding).values()
    gradients = sum(one.gradient for one in each)
    if isinstance(run.parallel, DDP):
        buffers = sum(one.nbytes for one in model.buffers()) if run.parallel.broadcast_buffers else 0
        return {"all_reduce": gradients, "broadcast": buffers}
    shard = _shard(run)
    return {
        "all_gather": sum(one.forward + one.backward for one in each),
        "reduce_scatter": gradients,
        "all_reduce": gradients // shard if run.geometry.dp * run.geometry.cp > shard else 0,
    }


def _of_tokens(run: RunCore, model: nn.Module, sharding: Sharding, width: int) -> dict[str, int]:
    """Return the bytes of tokens, between devices that share a sample, `width` for each number of a token.

    What is put together on the way forward is divided, and summed, on the way back, and the other way round.
    """
    tp, cp = run.geometry.tp, run.geometry.cp
    each = -(-sharding.tokens // (tp * cp))  # tokens of a device
    gathered = reduced = 0
    last = model.get_submodule(sharding.last)
    assert isinstance(last, nn.Linear)
    for parts in {tp, tp * cp} - {1}:  # along one axis, then along the other
        gathered += each * parts * last.out_features
    columns, rows = named(model, sharding.columns), named(model, sharding.rows)
    units = named(model, sharding.units)
    if tp > 1:
        inputs = sum(_first(columns, module).in_features for module in named(model, sharding.gather))
        outputs = sum(_linear(layer).out_features for layer in rows.values())
        gathered += each * tp * (inputs + outputs)
        reduced += each * tp * (inputs + outputs)
        if run.activation_checkpointing:  # the way forward again, up to what a unit computes last
            lasts = ([layer for n, layer in rows.items() if n.startswith(f"{u}.")][-1] for u in units)
            gathered += each * tp * inputs
            reduced += each * tp * (outputs - sum(_linear(layer).out_features for layer in lasts))
    if cp > 1:  # keys and values, of the heads of this device
        attending = (name.rpartition(".")[0] for name in named(model, sharding.attend))
        both = sum(2 * _first(columns, module).out_features // tp for module in attending)
        gathered += each * tp * cp * both * (2 if run.activation_checkpointing else 1)
        reduced += each * tp * cp * both
    return {"all_gather": gathered * width, "reduce_scatter": reduced * width}


def _first(layers: dict[str, nn.Module], module: str) -> nn.Linear:
    """Return the first of these layers in a module."""
    return next(_linear(layer) for name, layer in layers.items() if name.startswith(f"{module}."))


def _linear(layer: nn.Module) -> nn.Linear:
    assert isinstance(layer, nn.Linear)
    return layer
