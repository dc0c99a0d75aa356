"""Build optimisers from settings."""

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
    options = settings.model_dump(exclude={"kind", "lr", "fused", "clip_norm"})  # the other keys have PyTorch's names
    options["lr"] = settings.lr if capture is None else torch.tensor(settings.lr, device=capture)
    if settings.fused:  # False would also switch off `foreach`, PyTorch's default on a GPU
        options["fused"] = True
    if capture is not None and settings.kind != "sgd":
        options["capturable"] = True
    return CLASSES[settings.kind](parameters, **options)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next update."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def update_unless(left_out: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Update the weights, or leave them and the optimiser's state if `left_out` is 1 instead of 0, float32 [].

    A fused optimiser decides this on the device, with the attributes that `GradScaler` sets; else the host waits.
    """
    fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    optimizer.grad_scale, optimizer.found_inf = None, left_out if fused else None  # type: ignore[attr-defined]
    if fused or not left_out.item():
        optimizer.step()


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimiser's state before the first step, unless the state exists; a weight of -0 may become 0."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step()
    # Reset counters, which are 1 now, and moments, which may contain weight decay or be None (momentum 0).
    for value in (each for state in optimizer.state.values() for each in state.values() if each is not None):
        value.zero_()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for p, gradient in zip((p for group in optimizer.param_groups for p in group["params"]), gradients, strict=True):
        p.grad = gradient
