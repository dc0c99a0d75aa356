"""One optimiser step: what training repeats and what throughput is measured of."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlscale.config.run import RunCore
from dlscale.core.errors import UserError
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

    With several processes each computes its share of the batch; gradients are averaged while they are computed, and
    all processes make the same update.

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

    def __init__(self, model: nn.Module, loss: Loss, run: RunCore, device: torch.device, ranks: int = 1) -> None:
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
        self._network = model if ranks == 1 else _distributed(model, device)
        self._parts = run.accumulation_steps
        self.attention = _attention(model, run, device)
        self._loss_of = compiled(self._eager_loss, run.compile.mode, device)
        self._predict = compiled(self._eager_predict, run.compile.mode, device)
        self._train: Callable[..., torch.Tensor] = self._train_eagerly
        if run.cuda_graph:
            self._train = Graphed(self._train_eagerly, CudaBackend(device))

    def set_learning_rate(self, rate: float) -> None:
        """Set the rate of the next update."""
        set_learning_rate(self.optimizer, rate)

    def __call__(self, x: torch.Tensor, y: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
        """Train on one batch and return its loss, a scalar on the device, detached.

        Parameters
        ----------
        weight
            What this process's mean loss counts beside those of others: its samples over the mean of all processes'.
        """
        return self._train(x, y) if weight == 1.0 else self._train_eagerly(x, y, weight)

    def _train_eagerly(self, x: torch.Tensor, y: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
        loss = self.gradients(x, y, weight)
        self.weights.collect_gradients()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.weights.distribute()
        return loss

    def gradients(self, x: torch.Tensor, y: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
        """Return the loss of one batch, and leave its gradients (times the loss scale) in the model's parameters."""
        if not self.model.training:  # to say it at every step would walk through all modules
            self.model.train()
        self.weights.clear_gradients()
        parts = min(self._parts, len(x))  # a small last batch may not fill them all
        if parts <= 1:
            return self._backward(x, y, 1.0, weight)
        # Each part counts as many times as it has samples; the last one waits for the other processes.
        losses = [
            self._backward(a, b, len(a) / len(x), weight, last=number == parts)
            for number, (a, b) in enumerate(zip(x.tensor_split(parts), y.tensor_split(parts), strict=True), 1)
        ]
        return torch.stack(losses).sum()

    def _backward(
        self, x: torch.Tensor, y: torch.Tensor, share: float, weight: float, last: bool = True
    ) -> torch.Tensor:
        """Add the gradients of `share` times `weight` times the loss; return `share` times the loss."""
        network = self._network
        apart: AbstractContextManager[object] = nullcontext()
        if not last and isinstance(network, DistributedDataParallel):
            apart = network.no_sync()
        with self.attention(), apart:
            # Of a small last batch a process may have no sample: the others wait for its gradients all the same.
            loss = self._loss_of(x, y) if len(x) else 0.0 * self._eager_predict(x, network).sum()
            if share != 1.0:
                loss = loss * share
            self.scaler.scale(loss * weight if weight != 1.0 else loss).backward()
        return loss.detach()

    @torch.no_grad()
    def predict(self, x: torch.Tensor, once: bool = False) -> torch.Tensor:
        """Return the prediction in evaluation mode, float32; one that is made only `once` is not compiled for."""
        if self.model.training:
            self.model.eval()
        with self.attention():
            return self._eager_predict(x) if once else self._predict(x)

    def _eager_predict(self, x: torch.Tensor, network: nn.Module | None = None) -> torch.Tensor:
        with autocast(self._precision, self.device):
            prediction: torch.Tensor = (network or self.model)(x.to(self._input_dtype, memory_format=self._layout))
        return prediction.float()

    def _eager_loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        # The loss is a long sum: in float32 whatever the model computes in.
        return self._loss(self._eager_predict(x, self._network), y.to(memory_format=self._layout)).mean()

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


def _distributed(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    """Return the model whose gradients are averaged over all processes."""
    return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)


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
