"""Number formats of the computation and of the weights.

The names in Apex's terms (https://nvidia.github.io/apex/amp.html):

==============================  ====  =============================================================================
`fp32`, `tf32`                  O0    all in float32, matrix products without or with TensorFloat-32
`fp16`, `bf16`                  O1    autocast: float32 weights, 16 bits where an operation bears it
`fp16_master`, `bf16_master`    O2    16-bit weights and computation, updates on float32 copies (master weights)
`fp16_pure`, `bf16_pure`        O3    weights, computation and optimiser state in 16 bits
==============================  ====  =============================================================================

`fp16` and `fp16_master` scale the loss, since small gradients are zero in float16. Except in O3, normalisation stays in
float32: batch normalisation as in Apex, and layer normalisation as in autocast. The loss is a long sum and always in
float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

FLOAT16 = {"fp16": torch.float16, "bf16": torch.bfloat16}


def compute_dtype(precision: str) -> torch.dtype:
    """Return the format of matrix products and convolutions."""
    return FLOAT16.get(precision.split("_")[0], torch.float32)


def weight_dtype(precision: str) -> torch.dtype:
    """Return the format of the model's weights, and so of its input."""
    return compute_dtype(precision) if "_" in precision else torch.float32


def set_matmul_precision(precision: str) -> None:
    """Switch TensorFloat-32 off for `fp32`, on for all others (process-wide)."""
    allow = precision != "fp32"
    torch.set_float32_matmul_precision("high" if allow else "highest")
    torch.backends.cudnn.allow_tf32 = allow


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which to run the model."""
    if precision not in FLOAT16:
        return nullcontext()
    return torch.autocast(device.type, FLOAT16[precision])


def grad_scaler(precision: str, device: torch.device) -> torch.amp.GradScaler:
    """Return the loss scaler; it is active for fp16 and fp16_master only."""
    return torch.amp.GradScaler(device.type, enabled=precision in ("fp16", "fp16_master"))


class Weights:
    """A model's weights, converted to the format of `precision`, and what an optimiser updates for them (`updated`).

    That is the parameters themselves, or with master weights float32 copies of those in 16 bits.
    """

    def __init__(self, model: nn.Module, precision: str) -> None:
        dtype, master = weight_dtype(precision), precision.endswith("_master")
        exact = {name: p.detach().clone() for name, p in model.named_parameters()} if master else {}
        if dtype != torch.float32:
            _convert(model, dtype, keep_norms=master)
        named = dict(model.named_parameters())
        self.model, self.parameters = model, list(named.values())
        self._masters = {name: nn.Parameter(value) for name, value in exact.items() if named[name].dtype == dtype}
        self._rounded: list[torch.Tensor] = [named[name] for name in self._masters]
        self._exact: list[torch.Tensor] = list(self._masters.values())
        self.updated = [self._masters.get(name, p) for name, p in named.items()]
        self._gradients = [torch.zeros_like(p) for p in self._exact]
        for p, gradient in zip(self._exact, self._gradients, strict=True):
            p.grad = gradient

    def clear_gradients(self) -> None:
        """Clear the model's gradients, as `zero_grad` does, without its hooks and its search for parameters."""
        for p in self.parameters:
            p.grad = None

    def collect_gradients(self) -> None:
        """Copy the model's gradients to the master weights, if there are any."""
        if self._masters:
            torch._foreach_copy_(self._gradients, [p.grad for p in self._rounded if p.grad is not None])

    @torch.no_grad()
    def distribute(self) -> None:
        """Round the updated master weights, if there are any, into the model."""
        if self._masters:
            torch._foreach_copy_(self._rounded, self._exact)

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state in float32: master weights in the place of rounded ones."""
        state = self.model.state_dict() | {name: p.detach() for name, p in self._masters.items()}
        return {name: value.float() if value.is_floating_point() else value for name, value in state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.model.load_state_dict(state)
        for name, p in self._masters.items():
            p.detach().copy_(state[name])


def _convert(model: nn.Module, dtype: torch.dtype, keep_norms: bool) -> None:
    """Convert a model in place; `keep_norms` leaves normalisation layers in float32, input and output converted."""
    for module in model.modules():
        if keep_norms and isinstance(module, nn.LayerNorm | nn.GroupNorm | _BatchNorm):
            module.register_forward_pre_hook(lambda module, inputs: tuple(x.float() for x in inputs))
            module.register_forward_hook(lambda module, inputs, output: output.to(dtype))
        else:
            for value in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                value.data = value.data.to(dtype) if value.is_floating_point() else value.data
