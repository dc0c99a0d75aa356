"""Optimisers by their settings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from dlscale.config.run import Optimizer

CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adadelta": torch.optim.Adadelta,
}


def build_optimizer(
    parameters: Iterable[torch.nn.Parameter], settings: Optimizer, capture: torch.device | None = None
) -> torch.optim.Optimizer:
    """Return the optimiser; its learning rate is set at every step by `set_learning_rate`.

    `capture` is the device on which a CUDA graph will record the update: learning rate and step counters live there.
    """
    options = settings.model_dump(exclude={"kind", "lr", "fused", "clip_norm"})  # their names are PyTorch's
    options["lr"] = settings.lr if capture is None else torch.tensor(settings.lr, device=capture)
    if settings.fused:  # False would also switch off `foreach`, PyTorch's default on a GPU
        options["fused"] = True
    if capture is not None and settings.kind != "sgd":
        options["capturable"] = True
    return CLASSES[settings.kind](parameters, **options)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of the next update; on the device, without a wait, where it is a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Take over a saved state, in the parameters' order in memory: a fused kernel walks through all side by side."""
    optimizer.load_state_dict(saved)
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):  # read from a file, it is on the host
            group["lr"] = group["lr"].to(group["params"][0].device)
        for p in group["params"]:
            for name, value in optimizer.state[p].items():
                if isinstance(value, torch.Tensor) and value.shape == p.shape and value.stride() != p.stride():
                    optimizer.state[p][name] = torch.empty_like(p, dtype=value.dtype, requires_grad=False).copy_(value)
