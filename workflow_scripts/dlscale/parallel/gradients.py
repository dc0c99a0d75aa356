"""Gradients that several devices share: their sums, their norm, their overflow. Nothing waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dlscale.parallel.model import ModelParallel
from dlscale.parallel.world import World


class Gradients:
    """The gradients of named parameters; `clip_norm` is the norm to which greater ones are scaled down."""

    def __init__(
        self,
        parameters: dict[str, torch.nn.Parameter],
        world: World,
        model: ModelParallel | None = None,
        clip_norm: float | None = None,
    ) -> None:
        self._parameters, self._world, self._model, self._clip_norm = parameters, world, model, clip_norm
        self.clips = clip_norm is not None
        self.share = model.share if model else 1.0  #: weight of this device's loss
        #: Groups whose devices have different shards: of the weights of columns and rows, or of all.
        self._groups: dict[str, Any] = {"tp": model.tp_group} if model and model.tp_group else {}
        for p in parameters.values():
            if isinstance(p, DTensor):
                self._groups["fsdp"] = p.device_mesh.get_group("shard")

    def complete(self) -> None:
        """Sum over tensor-parallel devices."""
        if self._model:
            self._model.sum_gradients(self._parameters)

    def clip(self, updated: Sequence[torch.Tensor]) -> torch.Tensor:
        """Scale the gradients of the updated parameters, in the order of names, down to the norm; return the old norm.

        It is that of all gradients together, float32, as `torch.nn.utils.clip_grad_norm_` has it.
        """
        assert self._clip_norm is not None
        cuts = self._model.cuts if self._model else {}
        whole: list[torch.Tensor] = []
        cut: list[torch.Tensor] = []  # other tensor-parallel devices have other parts
        for name, p in zip(self._parameters, updated, strict=True):
            if p.grad is not None:
                (cut if name in cuts else whole).append(p.grad)
        squares = torch.stack([_square_sum(each, self._world.device) for each in (whole, cut)])
        for kind, group in self._groups.items():
            dist.all_reduce(squares if kind == "fsdp" else squares[1:], group=group)
        norm = squares.sum().sqrt()
        gradients = [*whole, *cut]
        if gradients:
            torch._foreach_mul_(gradients, (self._clip_norm / (norm + 1e-6)).clamp(max=1.0).to(gradients[0].device))
        return norm

    def scaler(self, enabled: bool) -> torch.amp.GradScaler:
        """Return the scaler of the loss, for which a gradient that overflows on one device of a model does on all."""
        return _Scaler(self._world.device.type, [*self._groups.values()], enabled)


def _square_sum(gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    if not gradients:
        return torch.zeros((), device=device)
    return torch.stack(torch._foreach_norm(gradients, 2.0, torch.float32)).square().sum().to(device)


class _Scaler(torch.amp.GradScaler):
    """PyTorch's scaler, agreed on by groups of devices."""

    def __init__(self, device: str, groups: Sequence[Any], enabled: bool) -> None:
        super().__init__(device, enabled=enabled)
        self._groups = groups

    def _unscale_grads_(self, *arguments: Any, **options: Any) -> dict[torch.device, torch.Tensor]:
        # PyTorch's own ShardedGradScaler takes this place, too.
        found: dict[torch.device, torch.Tensor] = super()._unscale_grads_(*arguments, **options)
        for group in self._groups:
            for overflow in found.values():
                dist.all_reduce(overflow, dist.ReduceOp.MAX, group=group)
        return found
