"""Batch normalisation over the samples of all ranks, as one process with the whole batch computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm


class OnCPU(_BatchNorm):
    """PyTorch's `SyncBatchNorm`, for CPUs. Ranks may have unequal shares of a batch, or none."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        pass

    @torch.compiler.disable  # compiled code would not wait for the other ranks in the order in which they come
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise [B, C, ...] by mean and variance of each channel over all ranks; a rank's gradient counts all."""
        if not self.training:
            known = self.running_mean, self.running_var
            return F.batch_norm(input, *known, self.weight, self.bias, self.running_mean is None, eps=self.eps)
        axes, shape = (0, *range(2, input.dim())), (1, -1, *(1,) * (input.dim() - 2))
        x = input.float()
        here = torch.full((1,), float(x.numel() // x.shape[1]))
        count, total = all_reduce(torch.cat([here, x.sum(axes)])).split([1, x.shape[1]])
        mean = total / count
        centred = x - mean.view(shape)
        variance = all_reduce(centred.square().sum(axes)) / count
        self._follow(mean.detach(), variance.detach() * count / (count - 1).clamp(min=1))
        y = centred * (variance + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y.to(input.dtype)

    @torch.no_grad()
    def _follow(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


class OnGPU(nn.SyncBatchNorm):
    """PyTorch's `SyncBatchNorm`, for a rank that may have no sample of a small last batch."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise; without samples PyTorch would exchange 16 bits where other ranks exchange float32."""
        return super().forward(input) if len(input) else super().forward(input.float()).to(input.dtype)


def synchronised(model: nn.Module, device: torch.device) -> nn.Module:
    """Return the model with synchronised batch normalisation; parameters and names stay."""
    kind: Callable[..., Any] = OnGPU if device.type == "cuda" else OnCPU
    for name, module in model.named_children():
        model.add_module(name, synchronised(module, device))
    if not isinstance(model, _BatchNorm) or isinstance(model, OnCPU | OnGPU):
        return model
    new = kind(model.num_features, model.eps, model.momentum, model.affine, model.track_running_stats)
    new.train(model.training)
    new._parameters, new._buffers = model._parameters, model._buffers
    return new
