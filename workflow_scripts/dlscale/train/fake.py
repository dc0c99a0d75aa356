"""A run's step on fake tensors: they have shapes, types and a device, but no memory, and cost no computation.

Every operator of a step is called as in training, but computes nothing: its work and its memory can be counted before
anything is done.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dlscale.config.run import DDP, RunCore
from dlscale.core import registry
from dlscale.core.ranges import Marker, mark, marking
from dlscale.data.loaders.base import Batch
from dlscale.data.manifest import Manifest
from dlscale.parallel.mesh import Pretended
from dlscale.parallel.model import ModelParallel
from dlscale.parallel.sharding import Sharding
from dlscale.parallel.world import World
from dlscale.studies.base import SampleLoss, Study
from dlscale.train.attention import Context, only
from dlscale.train.build import assemble, memory_format, open_samples


class FakeStep:
    """The step of a run, not compiled, for a single call of `train`; its optimiser has its state.

    Of a model that devices share, the part of the first of them; weights that FSDP shares are whole.

    Parameters
    ----------
    make, loss, sharding
        As `build_step` takes them.
    device
        That the tensors pretend to lie on.
    attention
        The context of attention's kernel. Default: as the run names it; PyTorch's choice where a trial would decide.
    """

    def __init__(
        self,
        run: RunCore,
        make: Callable[[], nn.Module],
        loss: SampleLoss,
        device: torch.device,
        attention: Context | None = None,
        sharding: Callable[[nn.Module], Sharding] = lambda model: Sharding(),
    ) -> None:
        self._mode, self._device = FakeTensorMode(allow_non_fake_inputs=True), device
        if attention is None:
            attention = nullcontext if run.attention in ("default", "auto") else partial(only, run.attention)
        with torch.device("meta"):
            model = make()
        model.to(memory_format=memory_format(model, run.memory_format))  # type: ignore[call-overload]
        made: dict[int, torch.Tensor] = {}  # a tensor that two modules share is shared again
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = made.setdefault(id(tensor), self.like(tensor))  # type: ignore[assignment]
        divided, plan = None, sharding(model)
        with self._mode:
            if run.geometry.model_size > 1:
                divided = ModelParallel(model, plan, Pretended(run.geometry), device)
            # The rest as on one rank: nothing.
            alone = run.model_copy(update={"parallel": DDP()})
            self.step = assemble(alone, model, loss, World(device=device), attention, plan, divided)
        self._begin()

    def train(self, x: torch.Tensor, y: torch.Tensor, marker: Marker, mode: AbstractContextManager[object]) -> None:
        """Make one step on a batch of `like`; `marker` opens its ranges, and `mode` sees its operators."""
        with marking(marker):
            with self._mode, mode:
                self.step.gradients(x, y)
            with mode, mark("optimizer"):
                self._update()

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor on the device of the shape and order in memory of any tensor, of `meta` too."""
        with self._mode:
            fake = torch.empty_like(tensor, device=self._device, requires_grad=False)
        return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake

    def _begin(self) -> None:
        """Have the optimiser make its state, as it does in a training's first step."""
        step = self.step
        if self._device.type == "cuda" and not step.optimizer.defaults.get("fused"):
            for group in step.optimizer.param_groups:  # PyTorch's choice there, which does not know fake tensors
                group["foreach"] = True
        for p in step.weights.updated:
            if p.grad is None and p.requires_grad:
                p.grad = torch.empty_like(p)
        step.optimizer.step()
        step.weights.clear_gradients()

    def _update(self) -> None:
        """Do what `Step` does for the update; the optimiser's counters are real, since it reads their values."""
        step = self.step
        step.weights.collect_gradients()
        if step.scaler.is_enabled() and not step.optimizer.defaults.get("fused"):
            step.scaler.unscale_(step.optimizer)
            step.optimizer.step()  # the scaler would ask whether a gradient overflowed, and there are none
        else:
            step.scaler.step(step.optimizer)
        step.weights.distribute()


def fake_step(run: RunCore, manifest: Manifest, device: torch.device, attention: Context | None = None) -> FakeStep:
    """Return the fake step of a run on a dataset."""
    study: Study = registry.study(run.study)
    return FakeStep(run, partial(study.model, run, manifest), study.loss(run), device, attention, study.sharding)


def fake_batch(run: RunCore, manifest: Manifest) -> Batch:
    """Return a batch of the local size, without memory, as the dataset's samples declare it."""
    samples: Any = open_samples(run, manifest, "train")
    x, y = (
        torch.empty((run.local_batch_size, *spec.shape), dtype=getattr(torch, spec.dtype), device="meta")
        for spec in (samples.input_spec, samples.target_spec)
    )
    return x, y
