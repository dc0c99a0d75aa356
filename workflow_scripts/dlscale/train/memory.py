"""Memory of a device, and steps on fake tensors.

Fake tensors have shapes, types and a device, but no memory. A step on fake tensors calls the same operators as in
training without computing anything, so memory and work can be counted in advance.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dlscale.config.run import DDP, RunCore
from dlscale.core import registry
from dlscale.core.machine import job_limits, text_of
from dlscale.core.ranges import Marker, mark, marking
from dlscale.data.manifest import Manifest
from dlscale.parallel.model import ModelParallel
from dlscale.parallel.sharding import Sharding
from dlscale.parallel.world import Pretended, World
from dlscale.studies.base import SampleLoss, Study
from dlscale.train.attention import Context, only
from dlscale.train.build import assemble, memory_format

# ---- the device --------------------------------------------------------------------------------------


def peak(device: torch.device) -> int:
    """Return the peak memory of tensors on a GPU, or of this process on a CPU, since the last reset, bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # `ru_maxrss` is used only without VmHWM, because a process inherits `ru_maxrss` from its parent.
    if own := re.search(r"^VmHWM:\s*(\d+) kB", text_of(Path("/proc/self/status")), re.MULTILINE):
        return 1024 * int(own[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def total(device: torch.device, processes: int = 1) -> int:
    """Return the memory of a GPU, or, on a CPU, the memory that one of `processes` processes may use, bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    own = [limit for limit, _ in _own_limits()]
    return int(min([psutil.virtual_memory().total // processes, *(n // processes for n, _ in job_limits()), *own]))


def available(device: torch.device) -> int:
    """Return the memory that this process may still allocate on the device, bytes."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    rests = [limit - used for limit, used in (*_own_limits(), *job_limits())]
    return int(max(min([psutil.virtual_memory().available, *rests]), 0))


def _own_limits() -> list[tuple[int, int]]:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return [] if limit == resource.RLIM_INFINITY else [(limit, int(psutil.Process().memory_info().vms))]


# ---- a step on fake tensors --------------------------------------------------------------------------


class FakeStep:
    """Step of a run on fake tensors, for one call of `train`.

    The step is not compiled, and its optimiser already has its state. If devices share the model, the step has the
    first device's part of the model. Weights that FSDP would shard are complete.

    Parameters
    ----------
    make, loss, sharding, scores
        As in `build_step`.
    device
        Device of the fake tensors.
    attention
        Context of the attention kernel (default: the run's kernel, or PyTorch's choice if a trial would decide).
    """

    def __init__(
        self,
        run: RunCore,
        make: Callable[[], nn.Module],
        loss: SampleLoss,
        device: torch.device,
        attention: Context | None = None,
        sharding: Callable[[nn.Module], Sharding] = lambda model: Sharding(),
        scores: SampleLoss | None = None,
    ) -> None:
        self._mode, self._device = FakeTensorMode(allow_non_fake_inputs=True), device
        if attention is None:
            attention = nullcontext if run.attention in ("default", "auto") else partial(only, run.attention)
        with torch.device("meta"):
            model = make()
        model.to(memory_format=memory_format(model, run.memory_format))  # type: ignore[call-overload]
        made: dict[int, torch.Tensor] = {}  # a tensor with two names gets one fake tensor
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = made.setdefault(id(tensor), self.like(tensor))  # type: ignore[assignment]
        divided, plan = None, sharding(model)
        with self._mode:
            if run.geometry.model_size > 1:
                divided = ModelParallel(model, plan, Pretended(run.geometry), device)
            self.step = assemble(
                run.model_copy(update={"parallel": DDP(), "precision": run.arithmetic}),  # as on one rank
                *(model, loss, World(device=device), attention, plan, divided),
                scores=scores,
            )
        self._begin()

    def train(self, x: Any, y: Any, marker: Marker, mode: AbstractContextManager[object]) -> None:
        """Make one step on a batch from `like`; `marker` opens the step's ranges, `mode` intercepts all operators."""
        step = self.step
        with marking(marker):
            with self._mode, mode:
                step.gradients(x, y)
            with mode, mark("optimizer"):
                step.weights.collect_gradients()
                if step.scaler.is_enabled() and not step.optimizer.defaults.get("fused"):
                    step.scaler.unscale_(step.optimizer)
                    step.optimizer.step()  # `scaler.step` would read values, which gradients lack here
                else:
                    step.scaler.step(step.optimizer)
                step.weights.distribute()

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor with the shape and memory order of a tensor, which may be on `meta`."""
        with self._mode:
            fake = torch.empty_like(tensor, device=self._device, requires_grad=False)
        return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake

    def _begin(self) -> None:
        """Make the optimiser's state, as the first step of a training does; its step counters are real tensors."""
        step = self.step
        if self._device.type == "cuda" and not step.optimizer.defaults.get("fused"):
            for group in step.optimizer.param_groups:  # the default for real tensors on CUDA, not for fake tensors
                group["foreach"] = True
        for p in step.weights.updated:
            if p.grad is None and p.requires_grad:
                p.grad = torch.empty_like(p)
        step.optimizer.step()
        step.weights.clear_gradients()


def fake_step(run: RunCore, manifest: Manifest, device: torch.device, attention: Context | None = None) -> FakeStep:
    """Return the fake step of a run on a dataset."""
    study: Study = registry.study(run.study)
    make, scores = partial(study.model, run, manifest), study.train_scores if study.train_metrics else None
    return FakeStep(run, make, study.loss(run), device, attention, study.sharding, scores)
