"""Optimisers by their settings."""

from __future__ import annotations

from collections.abc import Iterable

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
    """Return the optimiser; `capture` is the device on which a CUDA graph will record its update."""
    options = settings.model_dump(exclude={"kind", "lr", "fused", "clip_norm"})  # their names are PyTorch's
    options["lr"] = settings.lr if capture is None else torch.tensor(settings.lr, device=capture)
    if settings.fused:  # False would also switch off `foreach`, PyTorch's default on a GPU
        options["fused"] = True
    if capture is not None and settings.kind != "sgd":
        options["capturable"] = True
    return CLASSES[settings.kind](parameters, **options)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of the next update."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimiser's state, where it has none, as it is before the first step; a weight -0 may become 0."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step()
    # A counter is 1 now, and a moment may have the decay of weights; a momentum of 0 has none.
    for value in (each for state in optimizer.state.values() for each in state.values() if each is not None):
        value.zero_()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for p, gradient in zip((p for group in optimizer.param_groups for p in group["params"]), gradients, strict=True):
        p.grad = gradient
