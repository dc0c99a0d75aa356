"""Loader `direct`: threads bring data from the page cache to the model with few copies.

On a CPU, threads decode boxes of the mapped files straight into reused batches (`direct_host`); other samples write
themselves into the batches. On a GPU, threads copy stored values into page-locked buffers, and a separate stream copies
the values to the device ahead of the step and decodes them. If data are `resident`, they are copied to the device only
once, and stay there.
"""

from __future__ import annotations

import functools
import logging
import os
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch.utils._pytree import tree_flatten

from dlscale.core.errors import UserError
from dlscale.core.ranges import mark
from dlscale.data.loaders import DirectLoader as Settings
from dlscale.data.loaders.base import Batch, Loader, Share, on_grids
from dlscale.data.samples import (
    BoxField,
    DecodePlan,
    GridSamples,
    Samples,
    TableSamples,
    WritingSamples,
    tree_leaves,
    tree_map,
)

#: Largest fraction that resident data may take of the device memory that this process does not use. Both runs of a
#: paired timing keep their data on the device; the rest of the memory is for activations, which are allocated later.
RESIDENT_SHARE = 0.4
#: Number of parts of a batch per thread; with several parts per thread, all threads finish at about the same time.
SHARES = 4
#: Number of bytes per copy to the device while data become resident.
SLAB = 2**26

#: Batch, and the CUDA event after which the batch is ready; None instead of the event if the batch is ready at once.
Made = tuple[Batch, torch.cuda.Event | None]
#: Tasks that threads may run in any order, and the function that returns the batch when all tasks are done.
Work = tuple[list[Callable[[], None]], Callable[[], Made]]


class Ring:
    """Reused host buffers of `slots` batches, and a separate stream that copies the buffers to the device.

    A slot has the buffers of one batch, of shapes and types `kinds`. For a GPU, the buffers are page-locked. On a CPU,
    the buffers are the batch itself.
    """

    def __init__(self, kinds: list[tuple[tuple[int, ...], torch.dtype]], slots: int, device: torch.device) -> None:
        gpu = device.type == "cuda"
        self.device, self.stream = device, torch.cuda.Stream(device) if gpu else None
        self._buffers = [
            [torch.empty(shape, dtype=dtype, pin_memory=gpu) for shape, dtype in kinds] for _ in range(slots)
        ]
        self._copied = [torch.cuda.Event(blocking=True) if gpu else None for _ in range(slots)]

    def free(self, slot: int) -> list[torch.Tensor]:
        """Wait until the last copy of a slot's buffers to the device has finished; return the buffers."""
        if (event := self._copied[slot]) is not None:
            event.synchronize()
        return self._buffers[slot]

    def to_device(self, slot: int, count: int) -> list[torch.Tensor]:
        """Return the first `count` samples of each buffer of a slot on the device, copied on the ring's stream."""
        first = [buffer[:count] for buffer in self._buffers[slot]]
        if (event := self._copied[slot]) is None:
            return first
        with torch.cuda.stream(self.stream), mark("copy"):
            moved = [values.to(self.device, non_blocking=True) for values in first]
            event.record(self.stream)
        return moved

    def ready(self) -> torch.cuda.Event | None:
        return self.stream.record_event() if self.stream else None


class Written:
    """Batches of `WritingSamples`, which write themselves into the buffers of a ring."""

    def __init__(self, samples: WritingSamples, batch: int, slots: int, device: torch.device) -> None:
        self._samples = samples
        specs, self._tree = tree_flatten((samples.input_spec, samples.target_spec))
        self.ring = Ring([((batch, *spec.shape), getattr(torch, spec.dtype)) for spec in specs], slots, device)

    def begin(self, slot: int, epoch: int, indices: range) -> Work:
        """Return the work that makes a batch of samples `indices` of an epoch in the buffers of a slot."""
        x, y = self._tree.unflatten(buffer[: len(indices)].numpy() for buffer in self.ring.free(slot))
        return self._samples.writers(epoch, indices, x, y), functools.partial(self._finish, slot, len(indices))

    def _finish(self, slot: int, count: int) -> Made:
        return self._tree.unflatten(self.ring.to_device(slot, count)), self.ring.ready()


class ResidentTable:
    """Table whose rows are all kept on the device; the model's stream gathers the batches from the table."""

    def __init__(self, samples: TableSamples, device: torch.device) -> None:
        self._samples, self._device = samples, device
        self._table = tree_map(lambda values: torch.from_numpy(values).to(device), samples.table())
        self._order: tuple[int, torch.Tensor] | None = None

    def begin(self, slot: int, epoch: int, indices: range) -> Work:
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, torch.from_numpy(self._samples.order(epoch)).to(self._device)
        return [], functools.partial(self._gather, self._order[1][indices.start : indices.stop])

    def _gather(self, rows: torch.Tensor) -> Made:
        x, y = (tree_map(lambda values: values.index_select(0, rows), part) for part in self._table)
        return (x, y), None


class Streamed:
    """Stored values that are copied to the device through a ring's buffers and decoded on the ring's stream."""

    def __init__(self, samples: GridSamples, batch: int, slots: int, device: torch.device) -> None:
        self._samples = samples
        fields = samples.input, samples.target
        shapes = [(batch, *(field.shape[axis] for axis in field.order)) for field in fields]
        kinds = [(shape, getattr(torch, field.dtype.name)) for shape, field in zip(shapes, fields, strict=True)]
        self.ring = Ring(kinds, slots, device)
        for field in fields:
            field.map()

    def begin(self, slot: int, epoch: int, indices: range) -> Work:
        boxes = self._samples.boxes(epoch).take(indices)
        tasks: list[Callable[[], None]] = []
        plans = []
        for field, starts, buffer in zip(
            (self._samples.input, self._samples.target), (boxes.input, boxes.target), self.ring.free(slot), strict=True
        ):
            out = field.canonical(buffer.numpy())
            places = zip(boxes.file, starts, out, strict=False)
            tasks += [functools.partial(field.copy, file, start, target) for file, start, target in places]
            base = np.arange(len(boxes)) * (out.strides[0] // field.dtype.itemsize)
            plans.append(field.plan(boxes.file, boxes.symmetry, base, field.strides(out)[None]))
        return tasks, functools.partial(self._finish, slot, len(boxes), plans)

    def _finish(self, slot: int, count: int, plans: list[DecodePlan]) -> Made:
        return decoded(self._samples, self.ring.to_device(slot, count), plans, self.ring)


class Resident:
    """Stored values that are all kept on the device; a separate stream decodes batches from these values."""

    def __init__(self, samples: GridSamples, device: torch.device) -> None:
        self._samples = samples
        self.ring = Ring([], 0, device)
        held = {field: self._load(field) for field in {samples.input, samples.target}}
        self._held = held[samples.input], held[samples.target]
        if self.ring.stream is not None:  # the ring's stream reads values that the current stream has just written
            self.ring.stream.wait_stream(torch.cuda.current_stream(device))

    def _load(self, field: BoxField) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
        """Copy all files of a field to the device, a slab at a time.

        Return all values [n], the position of each file's first value, int64 [files], and the strides of each file,
        int64 [files, 4].
        """
        shapes = [field.shape_of(file) for file in range(len(field.readers))]
        sizes = [int(np.prod(shape)) for shape in shapes]
        values = torch.empty(sum(sizes), dtype=getattr(torch, field.dtype.name), device=self.ring.device)
        strides = []
        for file, (shape, one) in enumerate(zip(shapes, values.split(sizes), strict=True)):
            target = one.view([shape[axis] for axis in field.order]).permute(np.argsort(field.order).tolist())
            strides.append(np.array(target.stride()))
            step = max(1, SLAB * shape[1] // (one.numel() * field.dtype.itemsize))
            for part, first in zip(target.split(step, dim=1), range(0, shape[1], step), strict=True):
                slab = torch.empty_like(part, device="cpu")  # in the file's memory order
                field.copy(file, np.array([first, 0, 0]), slab.numpy())
                part.copy_(slab)
        return values, np.cumsum(sizes) - sizes, np.stack(strides)

    def begin(self, slot: int, epoch: int, indices: range) -> Work:
        boxes = self._samples.boxes(epoch).take(indices)
        fields, plans = (self._samples.input, self._samples.target), []
        for field, held, starts in zip(fields, self._held, (boxes.input, boxes.target), strict=True):
            stride = held[2][boxes.file]
            base = held[1][boxes.file] + (starts * stride[:, 1:]).sum(axis=1)
            plans.append(field.plan(boxes.file, boxes.symmetry, base, stride))
        return [], functools.partial(decoded, self._samples, [held[0] for held in self._held], plans, self.ring)


def decoded(samples: GridSamples, stored: list[torch.Tensor], plans: list[DecodePlan], ring: Ring) -> Made:
    """Decode input and target of a batch on the device, on the stream of a ring."""
    with torch.cuda.stream(ring.stream):
        x, y = (
            on_device(values.reshape(-1), plan, field)
            for values, plan, field in zip(stored, plans, (samples.input, samples.target), strict=True)
        )
    return (x, y), ring.ready()


def on_device(stored: torch.Tensor, plan: DecodePlan, field: BoxField) -> torch.Tensor:
    """Decode `stored` [values] on the device of `stored`, by the formula of `DecodePlan`; float32 [B, *spec.shape]."""
    device, shape = stored.device, (len(plan.places), *field.spec.shape)
    numbers = [torch.from_numpy(each) for each in plan]
    if device.type == "cuda":  # PyTorch reuses pinned memory only after its copies have finished
        numbers = [each.pin_memory().to(device, non_blocking=True) for each in numbers]
    plan = DecodePlan(*numbers)
    if (decode := kernel(device)) is None:
        return _by_operations(stored, plan, field.extent).reshape(shape)
    out = torch.empty(shape, device=device)
    decode(stored, *plan, field.extent, out)
    return out


@functools.cache
def kernel(device: torch.device) -> Callable[..., None] | None:
    """Return the Triton kernel for a GPU; on a CPU, return None unless TRITON_INTERPRET=1 lets Triton interpret it.

    PyTorch for CUDA includes Triton.
    """
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    from dlscale.data.loaders.decode_kernel import decode

    return decode


def _by_operations(stored: torch.Tensor, plan: DecodePlan, extent: tuple[int, int, int]) -> torch.Tensor:
    """Decode with PyTorch's operations; return the values, float32 [B, C, cells]."""
    integer = torch.int32 if stored.numel() < 2**31 else torch.int64
    base, step, channel = plan.places.to(integer).tensor_split([1, 4], dim=1)
    shift, factor, offset = plan.numbers[..., None].unbind(1)
    position = base  # position of each cell in `stored`, [B, cells so far]
    for axis, size in enumerate(extent):
        cells = torch.arange(size, dtype=integer, device=stored.device) * step[:, axis, None]
        position = (position[:, :, None] + cells[:, None]).flatten(1)
    count, channels = channel.shape
    out = torch.empty(count, channels, position.shape[1], device=stored.device)
    for c in range(channels):
        values = stored.index_select(0, (position + channel[:, c, None]).flatten()).reshape(position.shape)
        out[:, c] = (values.float() - shift[:, c]) * factor[:, c] + offset[:, c]
    return out


class DirectLoader(Loader):
    """Loader `direct`."""

    def __init__(self, samples: Samples, settings: Settings, share: Share, device: torch.device) -> None:
        super().__init__(samples, share, device)
        self._workers = settings.workers
        # One slot is for the batch that the model uses, further slots are for batches that threads make ahead.
        self._slots = 1 + (min(settings.prefetch, max(len(self) - 1, 0)) if settings.workers else 0)
        self._backend = self._choose(samples, settings)
        if isinstance(self._backend, ResidentTable):
            self._slots, self._workers = 1, 0
        # The second pool runs the tasks of batches. The first pool has two threads: while one waits for the tasks of a
        # batch, the other lists the tasks of the next batch.
        self._pools = [threads(count, device) for count in (2, self._workers)] if self._workers else []
        self._used: deque[torch.cuda.Event] = deque()

    def _choose(self, samples: Samples, settings: Settings) -> Written | ResidentTable | Streamed | Resident:
        device, slots, batch = self._device, self._slots, len(self._share.indices(0, samples.size))
        if isinstance(samples, WritingSamples) and not isinstance(samples, TableSamples):
            if settings.resident == "always":
                raise UserError("loader.resident: these samples are made on the host; set this key to auto or never")
            return Written(samples, batch, slots, device)
        held: TableSamples | GridSamples
        held = samples if isinstance(samples, TableSamples) else on_grids(samples, settings.kind)
        needed = held.bytes if isinstance(held, TableSamples) else sum(each.bytes for each in {held.input, held.target})
        if becomes_resident(settings.resident, needed, device):
            try:
                return ResidentTable(held, device) if isinstance(held, TableSamples) else Resident(held, device)
            except (torch.OutOfMemoryError, MemoryError):
                raise UserError(
                    f"loader.resident: data of {needed / 1e9:.1f} GB do not fit on the device; set this key to never"
                ) from None
        if isinstance(held, TableSamples):
            return Written(held, batch, slots, device)
        if device.type != "cpu":
            return Streamed(held, batch, slots, device)
        from dlscale.data.loaders.direct_host import HostBoxes  # compiles code that only CPUs need

        return Written(HostBoxes(held), batch, slots, device)

    def _batches(self, epoch: int, start: int) -> Generator[Batch]:
        ahead: deque[Future[Made]] = deque()
        following = start
        try:
            for _ in range(start, len(self)):
                while following < len(self) and len(ahead) < self._slots:
                    ahead.append(self._begin(epoch, following))
                    following += 1
                yield self._deliver(*ahead.popleft().result())
        finally:
            for made in ahead:  # cancels batches, or waits until they are written
                if not made.cancel():
                    made.exception()

    def _begin(self, epoch: int, step: int) -> Future[Made]:
        arguments = step % self._slots, epoch, self._share.indices(step, self.samples)
        if self._pools:
            return self._pools[0].submit(self._make, *arguments)
        made: Future[Made] = Future()
        made.set_result(self._make(*arguments))
        return made

    def _make(self, slot: int, epoch: int, indices: range) -> Made:
        # Wait until the model has used earlier batches. Otherwise batches that are made ahead could fill the device's
        # memory, because the model's thread does not wait for the device.
        while len(self._used) > self._slots:
            self._used.popleft().synchronize()
        tasks, finish = self._backend.begin(slot, epoch, indices)
        if self._pools:
            shares = SHARES * self._workers
            list(self._pools[1].map(_do, [tasks[first::shares] for first in range(min(shares, len(tasks)))]))
        else:
            _do(tasks)
        return finish()

    def _deliver(self, batch: Batch, ready: torch.cuda.Event | None) -> Batch:
        if ready is not None:
            current = torch.cuda.current_stream(self._device)
            # This event marks the end of the work on all earlier batches.
            self._used.append(current.record_event(torch.cuda.Event(blocking=True)))
            current.wait_event(ready)
            for values in tree_leaves(batch):
                values.record_stream(current)  # keeps the memory until this stream has used it
        return batch

    def close(self) -> None:
        super().close()
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)


def _do(tasks: list[Callable[[], None]]) -> None:
    for task in tasks:
        task()


def threads(count: int, device: torch.device) -> ThreadPoolExecutor:
    """Return a pool of threads that use the loader's GPU instead of the machine's first GPU."""
    if device.type != "cuda":
        return ThreadPoolExecutor(count, "loader")
    index = torch.cuda.current_device() if device.index is None else device.index
    return ThreadPoolExecutor(count, "loader", torch.cuda.set_device, (index,))


def becomes_resident(setting: str, needed: int, device: torch.device) -> bool:
    """Return whether data of `needed` bytes are kept on the device.

    On a GPU, `auto` decides by size and logs the decision; on a CPU, `auto` means never.

    Memory that other processes use counts as free. Otherwise only one run of a paired timing might have resident data.
    """
    if setting != "auto" or device.type != "cuda":  # a CPU has the data in memory already, in the page cache
        return setting == "always"
    room = torch.cuda.mem_get_info(device)[1] - torch.cuda.memory_reserved(device)
    fits = needed <= RESIDENT_SHARE * room
    logging.info(
        f"data of {needed / 1e9:.1f} GB are {'' if fits else 'not '}kept on the device "
        f"(data may take {100 * RESIDENT_SHARE:.0f} % of {room / 1e9:.1f} GB that this process does not use)"
    )
    return fits


build = DirectLoader
