"""One optimiser step: what training repeats and what throughput is measured of."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from dlscale.runtime.errors import UserError
from dlscale.runtime.schema.run import RunCore
from dlscale.train.attention import Context, attention_context
from dlscale.train.compile import compiled
from dlscale.train.graph import CudaBackend, Graphed
from dlscale.train.optimizer import build_optimizer, load_optimizer, set_learning_rate
from dlscale.train.precision import Weights, autocast, compute_dtype, grad_scaler, set_matmul_precision, weight_dtype

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Step:
    """Forward, loss, backward, update.

    Nothing in it waits for the device, with one exception that is PyTorch's: where the loss is scaled (`fp16`,
    `fp16_master`) an optimiser that is not `fused` asks the device in every step whether the gradients overflowed.
    Nothing of a batch is kept after the step: its memory may be overwritten.

    Attributes
    ----------
    model
        The module with the parameters, in the format of the run's `precision`.
    weights
        Its parameters and what the optimiser updates for them.
    optimizer, scaler
        As PyTorch has them.
    attention
        Context that chooses the kernel of attention.
    """

    def __init__(self, model: nn.Module, loss: Loss, run: RunCore, device: torch.device) -> None:
        if run.cuda_graph and device.type != "cuda":
            raise UserError(f"cuda_graph: the device is a {device.type}, and only CUDA has graphs; set it to false")
        set_matmul_precision(run.precision)
        self.model, self._loss, self._precision, self.device = model, loss, run.precision, device
        self._input_dtype = weight_dtype(run.precision)
        self._layout = memory_format(model, run.memory_format)
        model.to(memory_format=self._layout)  # type: ignore[call-overload]
        self.weights = Weights(model, run.precision)
        self.optimizer = build_optimizer(self.weights.updated, run.optimizer, device if run.cuda_graph else None)
        self.scaler = grad_scaler(run.precision, device)
        self._parts = run.accumulation_steps
        self.attention = _attention(model, run, device)
        self._loss_of = compiled(self._eager_loss, run.compile.mode, device)
        self._predict = compiled(self._eager_predict, run.compile.mode, device)
        self._train: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = self._train_eagerly
        if run.cuda_graph:
            self._train = Graphed(self._train_eagerly, CudaBackend(device))

    def set_learning_rate(self, rate: float) -> None:
        """Set the rate of the next update."""
        set_learning_rate(self.optimizer, rate)

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Train on one batch and return its loss, a scalar on the device, detached."""
        return self._train(x, y)

    def _train_eagerly(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = self.gradients(x, y)
        self.weights.collect_gradients()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.weights.distribute()
        return loss

    def gradients(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss of one batch, and leave its gradients (times the loss scale) in the model's parameters."""
        if not self.model.training:  # to say it at every step would walk through all modules
            self.model.train()
        self.weights.clear_gradients()
        if self._parts == 1:
            return self._backward(x, y, 1.0)
        parts = zip(x.tensor_split(self._parts), y.tensor_split(self._parts), strict=True)
        # Each part counts as many times as it has samples; a small last batch may leave some parts none.
        losses = [self._backward(a, b, len(a) / len(x)) for a, b in parts if len(a)]
        return torch.stack(losses).sum()

    def _backward(self, x: torch.Tensor, y: torch.Tensor, share: float) -> torch.Tensor:
        """Add the gradients of `share` times the loss; return that product."""
        with self.attention():
            loss = self._loss_of(x, y)
            if share != 1.0:
                loss = loss * share
            self.scaler.scale(loss).backward()
        return loss.detach()

    @torch.no_grad()
    def predict(self, x: torch.Tensor, once: bool = False) -> torch.Tensor:
        """Return the prediction in evaluation mode, float32; one that is made only `once` is not compiled for."""
        if self.model.training:
            self.model.eval()
        with self.attention():
            return self._eager_predict(x) if once else self._predict(x)

    def _eager_predict(self, x: torch.Tensor) -> torch.Tensor:
        with autocast(self._precision, self.device):
            return self.model(x.to(self._input_dtype, memory_format=self._layout)).float()

    def _eager_loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        # The loss is a long sum: in float32 whatever the model computes in.
        return self._loss(self._eager_predict(x), y.to(memory_format=self._layout))

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds: weights in float32 and the states of optimiser and loss scaler."""
        return {
            "model": self.weights.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.weights.load_state_dict(state["model"])
        load_optimizer(self.optimizer, state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if isinstance(self._train, Graphed):
            self._train.reset()


def memory_format(model: nn.Module, kind: str) -> torch.memory_format:
    """Return PyTorch's name of a run's `memory_format`, by the dimensions of the model's convolutions."""
    if kind == "contiguous":
        return torch.preserve_format
    volumes = any(p.dim() == 5 for p in model.parameters())
    return torch.channels_last_3d if volumes else torch.channels_last


def _attention(model: nn.Module, run: RunCore, device: torch.device) -> Context:
    """Return the context of the model's attention, if it has any."""
    if run.attention == "default":
        return nullcontext
    known: Any = model
    heads, tokens, width = known.attention_shape
    shape = (-(-run.local_batch_size // run.accumulation_steps), heads, tokens, width)
    return attention_context(run.attention, shape, known.attention_dropout, compute_dtype(run.precision), device)
