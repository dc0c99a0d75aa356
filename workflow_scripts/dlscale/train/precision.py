"""Number formats of computation and weights, and the weights on a device (`Weights`).

The formats, with their names in Apex (https://nvidia.github.io/apex/amp.html):

==============================  ====  =============================================================================
`fp32`, `tf32`                  O0    all in float32, matrix products without or with TensorFloat-32
`fp16`, `bf16`                  O1    autocast: float32 weights, 16 bits in operations that tolerate them
`fp16_master`, `bf16_master`    O2    16-bit weights and computation, updates on float32 copies (master weights)
`fp16_pure`, `bf16_pure`        O3    weights, computation and optimiser state in 16 bits
`fp8`, `fp8_rowwise`            –     as `bf16`, with linear layers in 8 bits (extension `fp8`)
==============================  ====  =============================================================================

`fp16` and `fp16_master` scale the loss, because small gradients would become zero in float16. Normalisation stays in
float32; in O3 only with `keep_norms_fp32`. The loss is always in float32, because it is a long sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from dlscale.core.errors import UserError
from dlscale.parallel.shards import Cut, Shard, cut, local

#: Precisions that scale the loss.
SCALED = ("fp16", "fp16_master")

#: Class of a convolution layer → PyTorch's function for the same convolution.
CONVOLUTIONS: dict[type, Any] = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}

#: Relative error above which a convolution in bf16 counts as wrong; rounding alone causes a few thousandths.
WRONG = 0.05

#: Minimum input channels with which oneDNN 3.12 computes strided 1×1 convolutions in channels-last memory correctly.
CHANNELS = 16

#: Environment variable that stops oneDNN from using AMX.
WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"

#: Format of operations under autocast.
FLOAT16 = {
    "fp16": torch.float16,
    **dict.fromkeys(("bf16", "fp8", "fp8_rowwise"), torch.bfloat16),
}


def compute_dtype(precision: str) -> torch.dtype:
    """Return the format of matrix products and convolutions, except 8-bit products."""
    return FLOAT16.get(precision.split("_")[0], torch.float32)


def weight_dtype(precision: str) -> torch.dtype:
    """Return the format of the model's weights and input."""
    return compute_dtype(precision) if precision.endswith(("_master", "_pure")) else torch.float32


def set_matmul_precision(precision: str) -> None:
    """Switch TensorFloat-32 off for `fp32`, and on for all other precisions, in this process."""
    allow = precision != "fp32"
    torch.set_float32_matmul_precision("high" if allow else "highest")
    torch.backends.cudnn.allow_tf32 = allow


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of the forward pass, which is autocast for precisions of `FLOAT16`."""
    return torch.autocast(device.type, FLOAT16[precision]) if precision in FLOAT16 else nullcontext()


def check_convolutions(model: nn.Module) -> None:
    """Raise a `UserError` for a convolution that this processor computes wrong in bf16.

    On Intel's AMX, oneDNN 3.12 (PyTorch 2.13) returns wrong results without an error if the stride equals the kernel
    size and there are few channels. Layers with such strides are compared with float32, on fixed values, which leave
    the random state unchanged.
    """
    for name, layer in model.named_modules():
        suspect = type(layer) in CONVOLUTIONS and layer.stride == layer.kernel_size and layer.padding_mode == "zeros"
        if not suspect or set(layer.kernel_size) == {1}:
            continue
        apply = CONVOLUTIONS[type(layer)]
        shape = (2, layer.in_channels, *(8 * edge for edge in layer.kernel_size))
        values = torch.arange(math.prod(shape), dtype=torch.float32).sin().reshape(shape)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            x, weight = values.bfloat16(), layer.weight.detach().bfloat16()
            wide, narrow = (
                apply(x.to(kind), weight.to(kind), None, layer.stride, layer.padding, layer.dilation, layer.groups)
                for kind in (torch.float32, torch.bfloat16)
            )
        if (narrow.float() - wide).norm() > WRONG * wide.norm():
            raise UserError(
                f"precision: in bf16, PyTorch computes the layer {name} wrong on this processor (a convolution with "
                f"stride equal to its kernel size, by oneDNN on AMX). Export {WITHOUT_AMX}, or use another precision"
            )


def check_channels_last(model: nn.Module) -> None:
    """Raise a `UserError` for a convolution whose gradient CPUs compute wrong in channels-last memory.

    For a strided 1×1 convolution with fewer than 8 (AVX2) or 16 (AVX-512) input channels, oneDNN writes beyond the
    buffer of the weights' gradient. The gradient is wrong, or the program hangs or crashes
    (https://github.com/uxlfoundation/oneDNN/issues/6035).
    """
    for name, layer in model.named_modules():
        if type(layer) not in CONVOLUTIONS or set(layer.kernel_size) != {1} or max(layer.stride) == 1:
            continue
        if layer.in_channels // layer.groups < CHANNELS:
            raise UserError(
                f"memory_format: channels_last: on a CPU, PyTorch computes the gradient of the layer {name} wrong or "
                f"crashes (a 1×1 convolution with stride {max(layer.stride)} and fewer than {CHANNELS} input "
                "channels). Use memory_format: contiguous, or more channels"
            )


def convert(model: nn.Module, precision: str, keep_norms: bool = False) -> dict[str, torch.Tensor]:
    """Convert a model to the format of `precision`, in place, and return its master weights by name.

    Master weights are the exact values of all rounded parameters. Precisions without master weights return an empty
    dictionary.
    """
    dtype, master = weight_dtype(precision), precision.endswith("_master")
    exact = {name: p.detach().clone() for name, p in model.named_parameters()} if master else {}
    for module in model.modules() if dtype != torch.float32 else ():
        if (master or keep_norms) and isinstance(module, nn.LayerNorm | nn.GroupNorm | _BatchNorm):
            module.register_forward_pre_hook(lambda module, inputs: tuple(x.float() for x in inputs))
            module.register_forward_hook(lambda module, inputs, output: output.to(dtype))
        else:
            for value in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                value.data = value.data.to(dtype) if value.is_floating_point() else value.data
    named = dict(model.named_parameters())
    return {name: value for name, value in exact.items() if named[name].dtype == dtype}


class Weights:
    """Weights of a model on this device, and the tensors that an optimiser updates for these weights (`updated`).

    An updated tensor is the parameter itself, the float32 master weight of a 16-bit parameter (`exact`, from
    `convert`), or this device's FSDP shard, without a copy. `cuts`: name of a parameter → its cuts over devices.
    """

    def __init__(
        self,
        model: nn.Module,
        exact: Mapping[str, torch.Tensor],
        cuts: Mapping[str, tuple[Cut, ...]] | None = None,
    ) -> None:
        named = dict(model.named_parameters())
        self.model, self.parameters, self.named = model, list(named.values()), named
        self._cuts = {name: (*(cuts or {}).get(name, ()), *cut(p)) for name, p in named.items()}
        self._masters = {name: nn.Parameter(value, named[name].requires_grad) for name, value in exact.items()}
        trained = [name for name, p in self._masters.items() if p.requires_grad]
        self._rounded: list[torch.Tensor] = [named[name] for name in trained]
        self._exact: list[torch.Tensor] = [self._masters[name] for name in trained]
        self._parts = {
            name: nn.Parameter(p.to_local().detach(), p.requires_grad)
            for name, p in named.items()
            if isinstance(p, DTensor)
        }
        self.updated = [self._masters.get(name, self._parts.get(name, p)) for name, p in named.items()]
        self._gradients = [torch.zeros_like(p) for p in self._exact]
        for p, gradient in zip(self._exact, self._gradients, strict=True):
            p.grad = gradient

    def clear_gradients(self) -> None:
        """Clear the model's gradients, as `zero_grad` does, but without searching for parameters."""
        for p in (*self.parameters, *self._parts.values()):
            p.grad = None

    def collect_gradients(self) -> None:
        """Pass the model's gradients to the updated tensors; master weights get copies."""
        for name, part in self._parts.items():
            part.grad = None if (gradient := self.named[name].grad) is None else local(gradient)
        for exact, own, p in zip(self._exact, self._gradients, self._rounded, strict=True):
            exact.grad = None if p.grad is None else own  # None if the loss does not depend on the weight
        known = [(own, p.grad) for own, p in zip(self._gradients, self._rounded, strict=True) if p.grad is not None]
        if known:
            torch._foreach_copy_([own for own, _ in known], [gradient for _, gradient in known])

    @torch.no_grad()
    def distribute(self, frozen: bool = False) -> None:
        """Round the updated master weights into the model; with `frozen`, also untrained master weights."""
        if self._rounded:
            torch._foreach_copy_(self._rounded, self._exact)
        for name, p in self._masters.items() if frozen else ():
            self.named[name].copy_(p)

    def shard(self, name: str, tensor: torch.Tensor) -> Shard:
        """Return this device's shard of a tensor that is divided like parameter `name`, or of a buffer."""
        return Shard(local(tensor).detach(), self._cuts.get(name, ()))

    def names(self) -> dict[str, list[str]]:
        """Map the first name of each tensor of the model's state to all its names; tied weights have several names."""
        firsts: dict[int, str] = {}
        names: dict[str, list[str]] = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            names.setdefault(firsts.setdefault(id(value), name), []).append(name)
        return names

    def shards(self) -> dict[str, Shard]:
        """Return this device's shards of the model's state, without copies; tied weights appear once."""
        state: dict[str, torch.Tensor] = self.model.state_dict(keep_vars=True) | self._masters
        return {name: self.shard(name, state[name]) for name in self.names()}

    def state_dict(self, keep: bool = True) -> dict[str, Any]:
        """Return the model's state in float32, with master weights; empty on devices that do not `keep` it.

        Devices that share a model gather its tensors one after the other, so all these devices must call this method.
        """
        return self.gathered(self.shards(), keep)

    def gathered(self, shards: Mapping[str, Shard], keep: bool = True) -> dict[str, torch.Tensor]:
        """Gather the model's state from the shards of all devices; tied weights appear under all their names."""
        state = gathered(shards, keep)
        first = {name: first for first, names in self.names().items() for name in names}
        return {name: state[first[name]] for name in self.model.state_dict()} if keep else {}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`; each device copies its part."""
        for name, each in self.shards().items():
            each.tensor.copy_(each.slice_like(state[name]))
        self.distribute(frozen=True)


def gathered(shards: Mapping[str, Shard], keep: bool = True) -> dict[str, torch.Tensor]:
    """Gather complete tensors, floats as float32; return them if `keep`. All devices must call this."""
    state: dict[str, torch.Tensor] = {}
    for name, each in shards.items():
        value = each.gathered()
        if keep:
            value = value.float() if value.is_floating_point() else value
            state[name] = value.cpu() if each.cuts else value  # the gathered state may not fit on a device
    return state
