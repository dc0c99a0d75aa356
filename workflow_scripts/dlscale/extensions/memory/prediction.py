"""Predict the memory of a step with fake tensors, and find settings that need less memory."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from pydantic import ValidationError
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlscale.config.run import DDP, FSDP, RunCore
from dlscale.core import registry
from dlscale.core.text import size
from dlscale.data.loaders.base import Batch, open_samples, read_batch
from dlscale.data.manifest import Manifest
from dlscale.data.samples import tree_map
from dlscale.parallel.model import named
from dlscale.parallel.records import MemoryUse
from dlscale.parallel.world import World
from dlscale.train.attention import Context
from dlscale.train.memory import FakeStep, fake_step

#: Block size of PyTorch's CUDA allocator, bytes (c10/cuda/CUDACachingAllocator: kMinBlockSize).
CUDA_BLOCK = 512


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


def fake_batch(run: RunCore, manifest: Manifest) -> Batch:
    """Return one rank's batch on `meta`, with the shapes of the samples' specs or of the first collated batch."""
    samples, size = open_samples(run, manifest, "train"), run.local_batch_size
    if samples.collate:
        return tree_map(lambda values: values.to("meta"), read_batch(samples, 0, range(min(size, samples.size))))
    return tree_map(
        lambda spec: torch.empty((size, *spec.shape), dtype=getattr(torch, spec.dtype), device="meta"),
        (samples.input_spec, samples.target_spec),
    )


def of_run(run: RunCore, fake: FakeStep, batch: Batch) -> MemoryUse:
    """Return the memory of a fake step of the run, as `predict` does; the fake step cannot be used again."""
    copies, shard = run.geometry.dp * run.geometry.cp, 1  # `copies`: number of devices that average their gradients
    if isinstance(run.parallel, FSDP):
        shard = run.parallel.shard or copies
    use = of_step(
        fake,
        *batch,
        ranks=copies if isinstance(run.parallel, DDP) and run.averages else 1,
        shard=shard if run.accumulation_steps == 1 else 1,  # while FSDP accumulates, gradients are not sharded
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
    wide = 1 if run.arithmetic == run.precision else 2  # 2: the shards are float32, but the fake step has bfloat16
    kept = {name: wide * getattr(use, name) // shard for name in ("parameters", "optimizer")}
    kept["gradients"] = wide * use.gradients
    freed = use.parameters + use.optimizer + use.gradients - sum(kept.values())
    most = None if use.peak is None else int(use.peak - freed + together + leaving)
    return use.model_copy(update={**kept, "peak": most})


def of_step(fake: FakeStep, x: Any, y: Any, ranks: int = 1, shard: int = 1, view: bool = True) -> MemoryUse:
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
    x, y = tree_map(fake.like, (x, y))
    inputs = allocations.add(tree_leaves((x, y)))
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


def advice(run: RunCore, manifest: Manifest, world: World, limit: float, share: float) -> str:
    """Return the predicted memory of a step that failed, and the settings that would fit, as the end of a message.

    `limit`: bytes that a step may use. Fitting settings also use at most the fraction `share` of the failed step's
    predicted memory.
    """
    needed = predict(run, manifest, world.device).peak or 0
    fitting = alternatives(run, manifest, world, min(limit, share * needed))
    each = " on each device" if world.size > 1 else ""
    text = f"; a step of {run.batch_size} samples is predicted to take {size(needed)}{each}"
    if not fitting:
        return f"{text}; no smaller batch fits either; choose a smaller model, or a device with more memory"
    return f"{text}; predicted to fit: " + ", or ".join(f"{shown(over)} ({size(bytes_)})" for over, bytes_ in fitting)


def alternatives(run: RunCore, manifest: Manifest, world: World, limit: float) -> list[tuple[dict[str, Any], int]]:
    """Return settings with which a step is predicted to take at most `limit` bytes, each with its predicted bytes.

    The cheapest setting comes first: micro-batches, then recomputation, then a smaller batch, which changes the
    training.
    """
    halvings = range(1, run.local_batch_size.bit_length())
    parts = [{"accumulation_steps": 2**n * run.accumulation_steps} for n in halvings]
    again = [{"activation_checkpointing": True, **more} for more in ({}, *parts)]
    if "activation_checkpointing" not in registry.study(run.study).supports or run.activation_checkpointing:
        again = []
    batches = [{"batch_size": (run.local_batch_size >> n) * run.geometry.dp} for n in halvings]
    found = []
    for candidates in (parts, again, batches):
        for over in candidates:
            with contextlib.suppress(ValidationError):  # candidates may contradict the run's other settings
                other = type(run).model_validate({**run.model_dump(mode="json"), **over})
                bytes_ = predict(other, manifest, world.device).peak or 0
                if bytes_ <= limit:
                    found.append((over, bytes_))
                    break
    return found


def shown(over: dict[str, Any]) -> str:
    """Return settings as text, in the form in which a user writes them."""
    return ", ".join(f"{key}: {str(value).lower()}" for key, value in over.items())
