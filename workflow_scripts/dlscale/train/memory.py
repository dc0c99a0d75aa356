"""Memory of a device, and of a run's step on it: predicted with fake tensors, and measured.

Fake tensors have shapes, types and a device, but no memory. A step on fake tensors calls the same operators as in
training without computing anything, so that the memory and the work of a step can be counted in advance.
"""

from __future__ import annotations

import contextlib
import re
import resource
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlscale.config.run import DDP, FSDP, RunCore
from dlscale.core import registry
from dlscale.core.machine import job_limits, text_of
from dlscale.core.ranges import Marker, mark, marking
from dlscale.data.loaders.base import Batch, open_samples
from dlscale.data.manifest import Manifest
from dlscale.parallel.model import ModelParallel, named
from dlscale.parallel.records import MemoryUse
from dlscale.parallel.sharding import Sharding
from dlscale.parallel.world import Pretended, World
from dlscale.studies.base import SampleLoss, Study
from dlscale.train.attention import Context, only
from dlscale.train.build import assemble, memory_format

#: Unit of PyTorch's allocator of CUDA memory (c10/cuda/CUDACachingAllocator: kMinBlockSize).
CUDA_BLOCK = 512

# ---- the device --------------------------------------------------------------------------------------


def peak(device: torch.device) -> int:
    """Return the peak memory in use since `reset_peak`, bytes, on a GPU, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # `ru_maxrss` is used only without VmHWM, because a process inherits `ru_maxrss` from its parent.
    if own := re.search(r"^VmHWM:\s*(\d+) kB", text_of(Path("/proc/self/status")), re.MULTILINE):
        return 1024 * int(own[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def total(device: torch.device, processes: int = 1) -> int:
    """Return the memory of a GPU, bytes, or on a CPU the memory that one of `processes` processes may use."""
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

    The step is not compiled, and its optimiser already has its state. If devices share the model, the step has the part
    of the first device. Weights that FSDP would shard are complete.

    Parameters
    ----------
    make, loss, sharding, scores
        As `build_step` takes them.
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
        made: dict[int, torch.Tensor] = {}  # keeps shared tensors shared
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = made.setdefault(id(tensor), self.like(tensor))  # type: ignore[assignment]
        divided, plan = None, sharding(model)
        with self._mode:
            if run.geometry.model_size > 1:
                divided = ModelParallel(model, plan, Pretended(run.geometry), device)
            alone = run.model_copy(update={"parallel": DDP(), "precision": run.arithmetic})  # on one rank
            self.step = assemble(alone, model, loss, World(device=device), attention, plan, divided, scores=scores)
        self._begin()

    def train(self, x: torch.Tensor, y: torch.Tensor, marker: Marker, mode: AbstractContextManager[object]) -> None:
        """Make one step on a batch from `like`; `marker` opens the step's ranges, and `mode` receives its operators."""
        step = self.step
        with marking(marker):
            with self._mode, mode:
                step.gradients(x, y)
            with mode, mark("optimizer"):
                step.weights.collect_gradients()
                if step.scaler.is_enabled() and not step.optimizer.defaults.get("fused"):
                    step.scaler.unscale_(step.optimizer)
                    step.optimizer.step()  # `scaler.step` would read values of gradients
                else:
                    step.scaler.step(step.optimizer)
                step.weights.distribute()

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor with the shape and memory order of a tensor, which may be on `meta`."""
        with self._mode:
            fake = torch.empty_like(tensor, device=self._device, requires_grad=False)
        return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake

    def _begin(self) -> None:
        """Make the optimiser's state, as the first step of a training does; the counters in it are real tensors."""
        step = self.step
        if self._device.type == "cuda" and not step.optimizer.defaults.get("fused"):
            for group in step.optimizer.param_groups:  # PyTorch's default on CUDA, but not for fake tensors
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


def fake_batch(run: RunCore, manifest: Manifest) -> Batch:
    """Return a batch of the local size on `meta`, with the shapes and types of the dataset's samples."""
    samples: Any = open_samples(run, manifest, "train")
    x, y = (
        torch.empty((run.local_batch_size, *spec.shape), dtype=getattr(torch, spec.dtype), device="meta")
        for spec in (samples.input_spec, samples.target_spec)
    )
    return x, y


# ---- prediction --------------------------------------------------------------------------------------


def predict(
    run: RunCore,
    manifest: Manifest,
    device: torch.device,
    batch: Batch | None = None,
    attention: Context | None = None,
) -> MemoryUse:
    """Return the memory that a step of the run needs on each device; only the shapes of `batch` count.

    The prediction does not include libraries' own memory (contexts, workspaces, NCCL's buffers), memory pools of CUDA
    graphs, loaders, fragmentation, or savings by a compiler's fusion.
    """
    return of_run(run, fake_step(run, manifest, device, attention), batch or fake_batch(run, manifest))


def of_run(run: RunCore, fake: FakeStep, batch: Batch) -> MemoryUse:
    """Return the memory of a fake step of the run, as `predict` does; the fake step cannot be used again."""
    copies, shard = run.geometry.dp * run.geometry.cp, 1  # `copies`: number of devices that average their gradients
    if isinstance(run.parallel, FSDP):
        shard = run.parallel.shard or copies
    use = of_step(
        fake,
        *batch,
        ranks=copies if isinstance(run.parallel, DDP) and run.averages else 1,
        shard=shard if run.accumulation_steps == 1 else 1,  # FSDP accumulates complete gradients
        view=not isinstance(run.parallel, DDP) or run.parallel.bucket_view,
    )
    if shard == 1:
        return use
    # With FSDP, a device has its shards, and for some time also gathered weights.
    assert isinstance(run.parallel, FSDP)
    units = named(fake.step.model, registry.study(run.study).sharding(fake.step.model).units).values()
    sizes = [sum(p.numel() for p in unit.parameters()) for unit in units]
    numbers = sum(p.numel() for p in fake.step.model.parameters())
    width = 2 if run.parallel.param_dtype == "bf16" else use.parameters / numbers
    reduced = 2 if run.parallel.reduce_dtype == "bf16" else 4
    largest, rest = max(sizes, default=0), numbers - sum(sizes)
    # Gathered at the same time: weights outside of units, the unit that computes, and the next unit.
    together = width * (min(rest + 2 * largest, numbers) if run.parallel.reshard else numbers)
    leaving = reduced * (largest or rest)  # gradients of a unit, until they are sent
    wide = 1 if run.arithmetic == run.precision else 2  # float32 weights are cast for the step
    kept = {name: wide * getattr(use, name) // shard for name in ("parameters", "optimizer")}
    kept["gradients"] = wide * use.gradients
    freed = use.parameters + use.optimizer + use.gradients - sum(kept.values())
    most = None if use.peak is None else int(use.peak - freed + together + leaving)
    return use.model_copy(update={**kept, "peak": most})


def of_step(
    fake: FakeStep, x: torch.Tensor, y: torch.Tensor, ranks: int = 1, shard: int = 1, view: bool = True
) -> MemoryUse:
    """Return the memory of one step on a batch of these shapes; the fake step cannot be used again.

    Each of `shard` devices keeps its part of the gradients; weights and optimiser state count completely. If there are
    several `ranks`, DistributedDataParallel has buckets; without `view`, gradients take memory in addition to buckets.
    """
    step, weights = fake.step, fake.step.weights
    allocations = Allocations(CUDA_BLOCK if step.device.type == "cuda" else 1)
    held: list[torch.Tensor] = []
    trained = [p for p in weights.parameters if p.requires_grad]
    if shard == 1 and ranks > 1:  # DistributedDataParallel holds all gradients in its buckets
        held = [fake.like(p) for p in trained]

    def reduce(p: torch.Tensor) -> None:
        if shard > 1:  # FSDP keeps this device's part
            held.append(torch.empty_like(p.detach().flatten()[: -(-p.numel() // shard)]))
        p.grad = None

    for p in trained if shard > 1 or (ranks > 1 and view) else ():
        p.register_post_accumulate_grad_hook(reduce)
    state = tree_leaves([list(step.optimizer.state.values())])
    masters = [p for p in weights.updated if all(p is not own for own in weights.parameters)]
    parameters = allocations.add([*weights.parameters, *step.model.buffers()])
    optimizer = allocations.add([*state, *masters])
    gradients = allocations.add([p.grad for p in masters] + held)
    x, y = fake.like(x), fake.like(y)
    inputs = allocations.add([x, y])
    before, kept, grown = allocations.live, 0, 0

    @contextlib.contextmanager
    def marker(name: str) -> Iterator[None]:
        nonlocal kept, grown
        yield
        own = allocations.bytes_of(p.grad for p in weights.parameters)
        if name == "forward":
            kept = max(kept, allocations.live - before - own)
        grown = max(grown, own)

    fake.train(x, y, marker, allocations)
    if shard > 1:
        grown = allocations.bytes_of(held)
    return MemoryUse(
        parameters=parameters,
        gradients=gradients + grown,
        optimizer=optimizer,
        activations=inputs + kept,
        peak=allocations.peak,
    )


class Allocations(TorchDispatchMode):
    """Counter of the bytes of live tensors that operators made, in multiples of `block`."""

    def __init__(self, block: int = 1) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._block, self._known = block, dict[int, Any]()

    def add(self, values: Iterable[Any]) -> int:
        """Count the tensors among these values; return the bytes of tensors that were not counted before."""
        before = self.live
        for value in values:
            if isinstance(value, torch.Tensor):
                self._add(value.untyped_storage())  # a storage counts once for all its views
        return self.live - before

    def bytes_of(self, values: Iterable[Any]) -> int:
        """Return the bytes of the tensors among these values; shared memory counts once."""
        storages = [value.untyped_storage() for value in values if isinstance(value, torch.Tensor)]
        return sum({storage._cdata: self._size(storage) for storage in storages}.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add(tree_leaves(result))
        return result

    def _size(self, storage: torch.UntypedStorage) -> int:
        return -(-storage.nbytes() // self._block) * self._block

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, self._size(storage)
        if key not in self._known:
            self._known[key] = weakref.finalize(storage, self._drop, key, size)
            self.live += size
            self.peak = max(self.peak, self.live)

    def _drop(self, key: int, size: int) -> None:
        del self._known[key]
        self.live -= size
