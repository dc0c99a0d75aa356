"""Memory of a run on one device: predicted by a step on fake tensors, and measured at the stages of a step."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlscale.config.run import DDP, FSDP, RunCore
from dlscale.core import registry
from dlscale.core.ranges import marking
from dlscale.data.loaders.base import Batch
from dlscale.data.manifest import Manifest
from dlscale.parallel.model import named
from dlscale.parallel.sharding import Sharding
from dlscale.parallel.world import synchronize
from dlscale.train.attention import Context
from dlscale.train.build import Session
from dlscale.train.fake import FakeStep, fake_batch, fake_step
from dlscale.train.memory import in_use, peak, reset_peak, total
from dlscale.train.records import Memory, MemoryUse

#: PyTorch's allocator of CUDA memory hands out multiples of this (c10/cuda/CUDACachingAllocator: kMinBlockSize).
CUDA_BLOCK = 512

#: Names in `Memory.measured` of the ends of ranges.
STAGES = {"forward": "forward", "backward": "backward", "optimizer": "step"}


def predict(
    run: RunCore,
    manifest: Manifest,
    device: torch.device,
    batch: Batch | None = None,
    attention: Context | None = None,
) -> MemoryUse:
    """Return the memory that a step of the run needs on each of its devices, without any of it.

    Not predicted are what libraries take for themselves (a CUDA context, cuDNN's and oneDNN's workspaces, NCCL's
    buffers), what a compiler fuses away, graphs' own pools, loaders, and what lies unused between blocks.

    Parameters
    ----------
    batch
        One of the run's, of which only shapes matter. Default: of the local size, as the samples are declared.
    attention
        As `fake_step` takes it.
    """
    return of_run(run, fake_step(run, manifest, device, attention), batch or fake_batch(run, manifest))


def of_run(run: RunCore, fake: FakeStep, batch: Batch) -> MemoryUse:
    """Return the memory of a fake step of the run, as `predict` does; the step is used up."""
    copies, shard = run.geometry.dp * run.geometry.cp, 1  # devices that average their gradients
    if isinstance(run.parallel, FSDP):
        shard = run.parallel.shard or copies
    use = of_step(fake, *batch, ranks=copies if isinstance(run.parallel, DDP) and run.averages else 1, shard=shard)
    return use if shard == 1 else _gathering(use, run, registry.study(run.study).sharding(fake.step.model), fake, shard)


def _gathering(use: MemoryUse, run: RunCore, sharding: Sharding, fake: FakeStep, shard: int) -> MemoryUse:
    """Return the memory of a device that shares the weights, with those that are put together for a while."""
    assert isinstance(run.parallel, FSDP)
    units = named(fake.step.model, sharding.units).values()
    sizes = [sum(p.numel() for p in unit.parameters()) for unit in units]
    numbers = sum(p.numel() for p in fake.step.model.parameters())
    width = 2 if run.parallel.param_dtype == "bf16" else use.parameters / numbers
    reduced = 2 if run.parallel.reduce_dtype == "bf16" else 4
    largest, rest = max(sizes, default=0), numbers - sum(sizes)
    # Whole at a time: what is in no unit; the unit that computes, and the next one.
    together = width * (min(rest + 2 * largest, numbers) if run.parallel.reshard else numbers)
    leaving = reduced * (largest or rest)  # gradients of a unit, until they are sent
    kept = {name: getattr(use, name) // shard for name in ("parameters", "optimizer")}
    freed = use.parameters + use.optimizer - sum(kept.values())
    peak = None if use.peak is None else int(use.peak - freed + together + leaving)
    return use.model_copy(update={**kept, "peak": peak})


def of_step(fake: FakeStep, x: torch.Tensor, y: torch.Tensor, ranks: int = 1, shard: int = 1) -> MemoryUse:
    """Return the memory that one step takes on a batch of these shapes; the fake step is used up.

    Of gradients that `shard` devices share each keeps its part; weights and optimiser are taken whole.
    """
    step, weights = fake.step, fake.step.weights
    allocations = Allocations(CUDA_BLOCK if step.device.type == "cuda" else 1)
    held: list[torch.Tensor] = []
    trained = [p for p in weights.parameters if p.requires_grad]
    if shard > 1:  # FSDP keeps this device's part

        def reduce(p: torch.Tensor) -> None:
            held.append(torch.empty_like(p.detach().flatten()[: -(-p.numel() // shard)]))
            p.grad = None

        for p in trained:
            p.register_post_accumulate_grad_hook(reduce)
    elif ranks > 1:  # DistributedDataParallel holds all gradients in its buckets, from one step to the next
        held = [fake.like(p) for p in trained]
        for p in trained:
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
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
    """Bytes of the tensors that operators make within it, as long as they live, in multiples of `block`."""

    def __init__(self, block: int = 1) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._block, self._known = block, dict[int, Any]()

    def add(self, values: Iterable[Any]) -> int:
        """Count the tensors among these values, too; return the bytes of those that are new."""
        before = self.live
        for value in values:
            if isinstance(value, torch.Tensor):
                self._add(value)
        return self.live - before

    def bytes_of(self, values: Iterable[Any]) -> int:
        """Return the bytes of the tensors among these values; of several that share their memory, once."""
        storages = [value.untyped_storage() for value in values if isinstance(value, torch.Tensor)]
        return sum({storage._cdata: self._size(storage) for storage in storages}.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add(tree_leaves(result))
        return result

    def _size(self, storage: torch.UntypedStorage) -> int:
        return -(-storage.nbytes() // self._block) * self._block

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()  # of all views of it
        key, size = storage._cdata, self._size(storage)
        if key not in self._known:
            self._known[key] = weakref.finalize(storage, self._drop, key, size)
            self.live += size
            self.peak = max(self.peak, self.live)

    def _drop(self, key: int, size: int) -> None:
        del self._known[key]
        self.live -= size


def measure(session: Session, batch: Batch) -> Memory:
    """Make a step on `batch`, which lies on the device, and return the memory that it takes, beside the prediction."""
    device = session.world.device
    measured = {"set-up": in_use(device)}

    @contextlib.contextmanager
    def marker(name: str) -> Iterator[None]:
        yield
        if stage := STAGES.get(name):
            synchronize(device)
            measured[stage] = max(in_use(device), measured.get(stage, 0))  # of the parts of a batch, the greatest

    predicted = predict(session.run, session.manifest, device, batch, session.step.attention)
    reset_peak(device)
    with marking(marker):
        session.step(*batch)
    most = max(peak(device), *measured.values())  # Linux keeps the two by different counters
    return Memory(predicted=predicted, measured=measured, peak=most, device=total(device))
