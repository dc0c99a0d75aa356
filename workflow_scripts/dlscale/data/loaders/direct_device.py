"""The way of the `direct` loader's batches to a GPU: through page-locked buffers, or from data that are held there.

Boxes go to the device as they are stored, and are decoded there. Each way has a `begin`, which returns the work for
samples of an epoch in the memory of a slot.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch

from dlscale.core.errors import UserError
from dlscale.core.ranges import mark
from dlscale.data.loaders.base import AS_DECLARED, Batch, Delivery
from dlscale.data.loaders.decode import DecodePlan, StoredField, on_device
from dlscale.data.samples import GridSamples, TableSamples, WritingSamples

#: Bytes that are taken to the device at a time while data becomes resident.
SLAB = 2**26

#: A batch and the event after which it is ready, on a GPU.
Made = tuple[Batch, torch.cuda.Event | None]
#: Tasks of threads, in any order, and what then makes the batch.
Work = tuple[list[Callable[[], None]], Callable[[], Made]]


class Ring:
    """Host buffers of `slots` batches, used again and again, and their way to the device on a stream of its own.

    `kinds` are shapes and types of the buffers of one slot. For a GPU they are page-locked: the copy does not block the
    host. On a processor the buffers are the batch.
    """

    def __init__(self, kinds: list[tuple[tuple[int, ...], torch.dtype]], slots: int, device: torch.device) -> None:
        gpu = device.type == "cuda"
        self.device, self.stream = device, torch.cuda.Stream(device) if gpu else None
        self._buffers = [
            [torch.empty(shape, dtype=dtype, pin_memory=gpu) for shape, dtype in kinds] for _ in range(slots)
        ]
        self._copied = [torch.cuda.Event(blocking=True) if gpu else None for _ in range(slots)]

    def free(self, slot: int) -> list[torch.Tensor]:
        """Return the buffers of a slot, once what was copied out of them some batches ago has left them."""
        if (event := self._copied[slot]) is not None:
            event.synchronize()
        return self._buffers[slot]

    def to_device(self, slot: int, counts: list[int]) -> list[torch.Tensor]:
        """Return the first values of each buffer of a slot on the device, ready for the stream."""
        first = [buffer[:count] for buffer, count in zip(self._buffers[slot], counts, strict=True)]
        if (event := self._copied[slot]) is None:
            return first
        with torch.cuda.stream(self.stream), mark("copy"):
            moved = [values.to(self.device, non_blocking=True) for values in first]
            event.record(self.stream)
        return moved

    def ready(self) -> torch.cuda.Event | None:
        """Return the event after all that was given to the stream."""
        return self.stream.record_event() if self.stream else None


class Written:
    """Samples that write themselves into the buffers of a ring."""

    def __init__(self, samples: WritingSamples, batch: int, slots: int, device: torch.device) -> None:
        self._samples = samples
        specs = samples.input_spec, samples.target_spec
        self.ring = Ring([((batch, *spec.shape), getattr(torch, spec.dtype)) for spec in specs], slots, device)

    def begin(self, slot: int, epoch: int, indices: range) -> Work:
        x, y = (buffer[: len(indices)].numpy() for buffer in self.ring.free(slot))
        return self._samples.writers(epoch, indices, x, y), functools.partial(self._finish, slot, len(indices))

    def _finish(self, slot: int, count: int) -> Made:
        x, y = self.ring.to_device(slot, [count, count])
        return (x, y), self.ring.ready()


class ResidentTable:
    """Rows that are all held on the device; a batch is gathered there, in the stream of the model."""

    def __init__(self, samples: TableSamples, device: torch.device) -> None:
        self._samples, self._device = samples, device
        try:
            self._x, self._y = (torch.from_numpy(values).to(device) for values in samples.table())
        except (torch.OutOfMemoryError, MemoryError):
            raise _too_large(samples.bytes, "use never") from None
        self._order: tuple[int, torch.Tensor] | None = None

    def begin(self, slot: int, epoch: int, indices: range) -> Work:
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, torch.from_numpy(self._samples.order(epoch)).to(self._device)
        return [], functools.partial(self._gather, self._order[1][indices.start : indices.stop])

    def _gather(self, rows: torch.Tensor) -> Made:
        return (self._x.index_select(0, rows), self._y.index_select(0, rows)), None


class _Decoding:
    """Decodes boxes of input and target (`fields`) on the device, in the stream of a ring."""

    def __init__(self, samples: GridSamples, fields: list[StoredField], ring: Ring, delivery: Delivery) -> None:
        self.ring, self._samples, self._fields, self._delivery = ring, samples, fields, delivery

    def _decoded(self, stored: list[torch.Tensor], plans: list[DecodePlan]) -> Made:
        dtypes = self._delivery.dtype, torch.float32
        with torch.cuda.stream(self.ring.stream):
            x, y = (
                on_device(values, plan, field, dtype, self._delivery)
                for values, plan, field, dtype in zip(stored, plans, self._fields, dtypes, strict=True)
            )
        return (x, y), self.ring.ready()


class Streamed(_Decoding):
    """Copies stored values into the buffers of a ring and from there to the device.

    Boxes that input and target share, as consecutive states of a series do, are copied once.
    """

    def __init__(
        self,
        samples: GridSamples,
        fields: list[StoredField],
        batch: int,
        slots: int,
        device: torch.device,
        delivery: Delivery = AS_DECLARED,
    ) -> None:
        self._shared = fields[0] is fields[1]
        count, copied = (2 * batch, fields[:1]) if self._shared else (batch, fields)
        kinds = [((count, *(field.shape[axis] for axis in field.order)), field.torch_dtype) for field in copied]
        super().__init__(samples, fields, Ring(kinds, slots, device), delivery)

    def begin(self, slot: int, epoch: int, indices: range) -> Work:
        boxes = self._samples.boxes(epoch).take(indices)
        needed = [np.column_stack([boxes.file, start]) for start in (boxes.input, boxes.target)]  # each [B, 4]
        position = [np.arange(len(boxes))] * 2  # of each sample's boxes in the buffers
        if self._shared:
            distinct, where = np.unique(np.concatenate(needed), axis=0, return_inverse=True)
            needed, position = [distinct], np.split(where.reshape(-1), 2)
        outs = [
            field.canonical(buffer.numpy()) for field, buffer in zip(self._fields, self.ring.free(slot), strict=False)
        ]
        tasks: list[Callable[[], None]] = [
            functools.partial(field.files[box[0]].copy, box[1:], target)
            for field, out, wanted in zip(self._fields, outs, needed, strict=False)
            for box, target in zip(wanted, out, strict=False)
        ]
        plans = []
        for field, out, places in zip(self._fields, [outs[0], outs[-1]], position, strict=True):
            base = places * (out.strides[0] // field.dtype.itemsize)
            plans.append(field.plan(boxes.file, boxes.symmetry, base, field.strides(out)[None]))
        return tasks, functools.partial(self._finish, slot, [len(wanted) for wanted in needed], plans)

    def _finish(self, slot: int, counts: list[int], plans: list[DecodePlan]) -> Made:
        copies = self.ring.to_device(slot, counts)
        return self._decoded([copies[0].reshape(-1), copies[-1].reshape(-1)], plans)


class Resident(_Decoding):
    """Holds all stored values on the device; a batch is decoded from there."""

    def __init__(
        self, samples: GridSamples, fields: list[StoredField], device: torch.device, delivery: Delivery = AS_DECLARED
    ) -> None:
        super().__init__(samples, fields, Ring([], 0, device), delivery)
        try:
            held = {field: self._load(field) for field in dict.fromkeys(fields)}
        except torch.OutOfMemoryError:
            needed = sum(field.bytes for field in set(fields))
            raise _too_large(needed, "use never, or store them in float16") from None
        self._held = [held[field] for field in fields]
        if self.ring.stream is not None:  # which reads what was just written on another
            self.ring.stream.wait_stream(torch.cuda.current_stream(device))

    def _load(self, field: StoredField) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
        """Take all files of a field to the device, a slab at a time.

        Return all values [n], and of each file its first value, int64 [files], and its strides, int64 [files, 4].
        """
        sizes = [int(np.prod(file.shape)) for file in field.files]
        canonical = np.argsort(field.order).tolist()
        values = torch.empty(sum(sizes), dtype=field.torch_dtype, device=self.ring.device)
        strides = []
        for file, size, one in zip(field.files, sizes, values.split(sizes), strict=True):
            target = one.view([file.shape[axis] for axis in field.order]).permute(canonical)
            strides.append(np.array(target.stride()))
            rows = file.shape[1]
            step = max(1, SLAB // (size // rows * field.dtype.itemsize))
            for part, first in zip(target.split(step, dim=1), range(0, rows, step), strict=True):
                slab = torch.empty_like(part, device="cpu")  # in the order of the file
                file.copy(np.array([first, 0, 0]), slab.numpy())
                part.copy_(slab)
        return values, np.cumsum(sizes) - sizes, np.stack(strides)

    def begin(self, slot: int, epoch: int, indices: range) -> Work:
        boxes = self._samples.boxes(epoch).take(indices)
        plans = []
        for field, (_, firsts, strides), starts in zip(
            self._fields, self._held, (boxes.input, boxes.target), strict=True
        ):
            stride = strides[boxes.file]
            base = firsts[boxes.file] + (starts * stride[:, 1:]).sum(axis=1)
            plans.append(field.plan(boxes.file, boxes.symmetry, base, stride))
        return [], functools.partial(self._decoded, [values for values, _, _ in self._held], plans)


def _too_large(needed: int, remedy: str) -> UserError:
    return UserError(f"loader.resident: data of {needed / 1e9:.1f} GB do not fit on the device; {remedy}")
