"""Optimisers by their configuration."""

from __future__ import annotations

import torch
from torch import nn

from dlscale.runtime.schema.run import Optimizer


def build_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """Return Adam over all parameters of `model`; its learning rate is set at every step by the trainer."""
    return torch.optim.Adam(
        model.parameters(),
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=settings.fused,
    )
