"""Count the bytes that ranks exchange in a step, and compute them by a formula that tests compare with the count."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlscale.config.run import DDP, FSDP, RunCore
from dlscale.extensions.predict import exchanges
from dlscale.parallel.model import cut_layers, named
from dlscale.parallel.sharding import Sharding

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")


class Counting(TorchDispatchMode):
    """Count the bytes and calls of this rank's exchanges by kind (`KINDS`), without exchanges in compiled code."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.calls = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # PyTorch repeats the call with plain tensors
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.replace("_", "")
            if kind := next((kind for kind in KINDS if kind.replace("_", "") in name), None):
                self.calls[kind] += 1
                self.bytes[kind] += max(map(_size, [*args, result]))
        return result


def _size(values: Any) -> int:
    return sum(each.nbytes for each in tree_leaves(values) if isinstance(each, torch.Tensor))


def formula(run: RunCore, model: nn.Module, sharding: Sharding, samples: int, width: int) -> dict[str, int]:
    """Return the bytes that the first rank exchanges in a step, by kind, without exchanges of single numbers.

    Parameters
    ----------
    model
        The undivided model on any device, including `meta`; its weights have the training's dtype.
    samples
        Number of this rank's samples in a step.
    width
        Bytes per number in the layers' computations.
    """
    bytes_ = Counter[str]()
    local = exchanges._local_shapes(run, model, sharding)
    if run.geometry.model_size > 1:
        bytes_.update(_of_tokens(run, model, sharding, samples * width))
    if run.averages and run.geometry.dp * run.geometry.cp > 1:
        bytes_.update(_of_weights(run, model, sharding))
    if run.geometry.tp > 1:  # gradients, in float32, of weights that are not split
        shard, layers = _shard(run), cut_layers(model, sharding)
        cut = {f"{name}.{own}" for name, layer, dim in layers for own, p in layer.named_parameters() if p.dim() > dim}
        common = [shape for name, shape in local.items() if name not in cut]
        bytes_["all_reduce"] += sum(4 * -(-shape[0] // shard) * math.prod(shape[1:]) for shape in common)
    return {kind: size for kind, size in bytes_.items() if size}


def _shard(run: RunCore) -> int:
    if not isinstance(run.parallel, FSDP) or not run.averages:
        return 1
    return run.parallel.shard or run.geometry.dp * run.geometry.cp


def _of_weights(run: RunCore, model: nn.Module, sharding: Sharding) -> dict[str, int]:
    """Return the bytes of weights and gradients."""
    each = exchanges.averaged(run, model, sharding).values()
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
    """Return the bytes of exchanged tokens by kind; `width` is the bytes per number times the number of samples.

    The backward pass scatters the tokens that the forward pass gathers.
    """
    tp, cp = run.geometry.tp, run.geometry.cp
    each = -(-sharding.tokens // (tp * cp))  # tokens per device
    reduced = 0
    last = model.get_submodule(sharding.last)
    assert isinstance(last, nn.Linear)
    gathered = each * tp * cp * last.out_features  # gathered along both axes at once
    columns, rows = named(model, sharding.columns), named(model, sharding.rows)
    units = named(model, sharding.units)
    if tp > 1:
        inputs = sum(_first(columns, module).in_features for module in named(model, sharding.gather))
        outputs = sum(_linear(layer).out_features for layer in rows.values())
        gathered += each * tp * (inputs + outputs)
        reduced += each * tp * (inputs + outputs)
        if run.activation_checkpointing:  # the repeated forward pass, without the last layer of each unit
            lasts = ([layer for n, layer in rows.items() if n.startswith(f"{u}.")][-1] for u in units)
            gathered += each * tp * inputs
            reduced += each * tp * (outputs - sum(_linear(layer).out_features for layer in lasts))
    if cp > 1:  # keys and values of this device's heads
        attending = (name.rpartition(".")[0] for name in named(model, sharding.attend))
        both = sum(2 * _first(columns, module).out_features // tp for module in attending)
        gathered += each * tp * cp * both * (2 if run.activation_checkpointing else 1)
        reduced += each * tp * cp * both
    return {"all_gather": gathered * width, "reduce_scatter": reduced * width}


def _first(layers: dict[str, nn.Module], module: str) -> nn.Linear:
    """Return the first linear layer, among the given layers, that belongs to a module."""
    return next(_linear(layer) for name, layer in layers.items() if name.startswith(f"{module}."))


def _linear(layer: nn.Module) -> nn.Linear:
    assert isinstance(layer, nn.Linear)
    return layer
