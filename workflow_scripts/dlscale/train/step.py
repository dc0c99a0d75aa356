"""One optimiser step: what training repeats and what throughput is measured of."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from dlscale.runtime.schema.run import RunCore
from dlscale.train.optimizer import build_optimizer
from dlscale.train.precision import autocast, grad_scaler, set_matmul_precision

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Step:
    """Forward, loss, backward, update.

    Nothing in it waits for the device, with one exception that is PyTorch's: under `fp16` an optimiser that is not
    `fused` asks the device in every step whether the gradients overflowed.

    Attributes
    ----------
    model
        The module with the parameters.
    optimizer, scaler
        Their state belongs into a checkpoint.
    """

    def __init__(self, model: nn.Module, loss: Loss, run: RunCore, device: torch.device) -> None:
        set_matmul_precision(run.precision)
        self.model, self._loss, self._precision, self.device = model, loss, run.precision, device
        self._forward: Callable[[torch.Tensor], torch.Tensor] = model
        if run.compile.mode != "none":
            self._forward = torch.compile(model, mode=run.compile.mode)
        self.optimizer = build_optimizer(model, run.optimizer)
        self.scaler = grad_scaler(run.precision, device)

    def set_learning_rate(self, rate: float) -> None:
        """Set the rate of the next update."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Train on one batch and return its loss, a scalar on the device, detached."""
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        with autocast(self._precision, self.device):
            prediction = self._forward(x)
        # The loss is a long sum: in float32 whatever the model computes in.
        loss = self._loss(prediction.float(), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    @torch.no_grad()
    def predict(self, x: torch.Tensor) -> torch.Tensor:
        """Return the prediction in evaluation mode, float32."""
        self.model.eval()
        with autocast(self._precision, self.device):
            return self._forward(x).float()
