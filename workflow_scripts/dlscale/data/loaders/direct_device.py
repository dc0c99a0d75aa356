"""The `direct` loader with a GPU: stored values go to the device as they are, and are decoded there."""

from __future__ import annotations

import functools
import logging
import os
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from dlscale.core.errors import UserError
from dlscale.core.ranges import mark
from dlscale.data.loaders.base import AS_DECLARED, Batch, Delivery
from dlscale.data.loaders.decode import DecodePlan, StoredField
from dlscale.data.samples import BoxIndex

#: Bytes that are taken to the device at a time while data becomes resident.
SLAB = 2**26


class Placed(NamedTuple):
    """The formula's numbers for B samples of C channels (see `DecodePlan`), on a device."""

    places: torch.Tensor  #: base, step [3], channel [C], int64 [B, 4 + C]
    numbers: torch.Tensor  #: shift, factor, offset, float32 [B, 3, C]


def placed(plans: list[DecodePlan], device: torch.device) -> list[Placed]:
    """Take plans to a device, all in one copy, which does not wait for it."""
    arrays = [
        array
        for plan in plans
        for array in (
            np.column_stack([plan.base, plan.step, plan.channel]),
            np.stack([plan.shift, plan.factor, plan.offset], axis=1),
        )
    ]
    ends = np.cumsum([-(-array.nbytes // 16) * 16 for array in arrays]).tolist()  # as kernels like addresses
    starts = [0, *ends[:-1]]
    # PyTorch gives pinned memory out again once the copies from it are done.
    packed = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for array, start in zip(arrays, starts, strict=True):
        packed.numpy()[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
    moved = packed.to(device, non_blocking=True)
    tensors = [
        moved[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]
    return [Placed(*pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)]


def on_device(
    stored: torch.Tensor,
    plan: Placed,
    extent: tuple[int, int, int],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    delivery: Delivery,
) -> torch.Tensor:
    """Evaluate the formula where `stored` [values] is: by one kernel, or by PyTorch's operations.

    The values, of `dtype` [B, *shape] in the delivery's layout, are boxes [C, *extent], perhaps without an axis of one
    cell. With PyTorch's operations memory is needed beside them for the positions of one channel.
    """
    count = len(plan.places)
    if (decode := kernel(stored.device)) is None:
        values = _by_operations(stored, plan, extent).reshape(count, *shape)
        return values.to(dtype, memory_format=delivery.layout_of(values.dim()))
    out = delivery.empty((count, *shape), dtype, stored.device)
    decode(stored, *plan, extent, out)
    return out


@functools.cache
def kernel(device: torch.device) -> Callable[..., None] | None:
    """Return the fused kernel, if Triton is there and serves the device (a processor it only interprets)."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    try:
        from dlscale.data.loaders.decode_kernel import decode
    except ImportError as error:
        logging.info(f"no Triton ({error}): samples are decoded by PyTorch's operations, which takes longer")
        return None
    return decode


def _by_operations(stored: torch.Tensor, plan: Placed, extent: tuple[int, int, int]) -> torch.Tensor:
    """Return the values, float32 [B, C, cells]."""
    integer = torch.int32 if stored.numel() < 2**31 else torch.int64
    base, step, channel = plan.places.to(integer).tensor_split([1, 4], dim=1)
    shift, factor, offset = plan.numbers[..., None].unbind(1)
    position = base  # of each cell in `stored`, [B, cells], axis by axis
    for axis, size in enumerate(extent):
        cells = torch.arange(size, dtype=integer, device=stored.device) * step[:, axis, None]
        position = (position[:, :, None] + cells[:, None]).flatten(1)
    count, channels = channel.shape
    out = torch.empty(count, channels, position.shape[1], device=stored.device)
    for c in range(channels):
        values = stored.index_select(0, (position + channel[:, c, None]).flatten()).reshape(position.shape)
        out[:, c] = (values.float() - shift[:, c]) * factor[:, c] + offset[:, c]
    return out


class _OnDevice:
    """What streamed and resident data share: decoding on a device, on a stream of its own."""

    def __init__(
        self, fields: list[StoredField], slots: int, device: torch.device, delivery: Delivery = AS_DECLARED
    ) -> None:
        self._fields, self._slots, self._device, self._delivery = fields, slots, device, delivery
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._used: deque[torch.cuda.Event] = deque()

    def _keep_pace(self) -> None:
        """Wait, in a thread of the loader, until the model has done with batches given out long ago.

        The model's thread never waits for the device, so without this it could run ahead by an epoch's memory.
        """
        while len(self._used) > self._slots:
            self._used.popleft().synchronize()

    def _decoded(self, stored: list[torch.Tensor], plans: list[DecodePlan]) -> tuple[list[torch.Tensor], Any]:
        """Return the batch, and the event after which it is ready."""
        dtypes = self._delivery.dtype, torch.float32
        batch = [
            on_device(values, plan, field.extent, field.spec.shape, dtype, self._delivery)
            for values, plan, field, dtype in zip(
                stored, placed(plans, self._device), self._fields, dtypes, strict=True
            )
        ]
        return batch, self._stream.record_event() if self._stream else None

    def deliver(self, result: Any) -> Batch:
        (x, y), event = result
        if event is not None:
            current = torch.cuda.current_stream(self._device)
            before = current.record_event(torch.cuda.Event(blocking=True))  # the work on the batches before this one
            self._used.append(before)
            current.wait_event(event)
            for tensor in (x, y):
                tensor.record_stream(current)  # its memory is not to be used again before this stream is done with it
        return x, y


class Streamed(_OnDevice):
    """Copies stored values into pinned buffers and from there to the device, where they are decoded.

    Boxes that input and target share, as consecutive states of a series do, are copied once.
    """

    def __init__(
        self, fields: list[StoredField], batch: int, slots: int, device: torch.device, delivery: Delivery = AS_DECLARED
    ) -> None:
        super().__init__(fields, slots, device, delivery)
        self._shared = fields[0] is fields[1]
        fields, batch = (fields[:1], 2 * batch) if self._shared else (fields, batch)
        self._buffers = [[self._allocate(field, batch) for field in fields] for _ in range(slots)]
        self._copied = [torch.cuda.Event(blocking=True) if self._stream else None for _ in range(slots)]

    def _allocate(self, field: StoredField, count: int) -> tuple[torch.Tensor, np.ndarray]:
        """Return a pinned buffer for `count` boxes, and the boxes in it [count, C, a, b, c]."""
        shape = [count, *(field.shape[axis] for axis in field.order)]
        whole = torch.empty(shape, dtype=field.torch_dtype, pin_memory=self._stream is not None)
        return whole, field.canonical(whole.numpy())

    def begin(self, slot: int, boxes: BoxIndex) -> tuple[list[Callable[[], None]], Callable[[], Any]]:
        """See `Backend`: one task for each box."""
        self._keep_pace()
        if (event := self._copied[slot]) is not None:
            event.synchronize()  # the copy out of this buffer, some batches ago
        needed = [np.column_stack([boxes.file, start]) for start in (boxes.input, boxes.target)]  # each [B, 4]
        position = [np.arange(len(boxes))] * 2  # of each sample's boxes in the buffers
        if self._shared:
            distinct, where = np.unique(np.concatenate(needed), axis=0, return_inverse=True)
            needed, position = [distinct], np.split(where.reshape(-1), 2)
        buffers = self._buffers[slot]
        tasks: list[Callable[[], None]] = [
            functools.partial(field.files[box[0]].copy, box[1:], out)
            for field, (_, outs), wanted in zip(self._fields, buffers, needed, strict=False)
            for box, out in zip(wanted, outs, strict=False)
        ]
        plans = []
        for number, field in enumerate(self._fields):
            out = buffers[0 if self._shared else number][1]
            base = position[number] * (out.strides[0] // field.dtype.itemsize)
            plans.append(field.plan(boxes.file, boxes.symmetry, base, field.strides(out)[None]))
        counts = [len(wanted) for wanted in needed]
        return tasks, functools.partial(self._copy, slot, counts, plans)

    def _copy(self, slot: int, counts: list[int], plans: list[DecodePlan]) -> tuple[list[torch.Tensor], Any]:
        """Take the first boxes of each buffer to the device, and decode them."""
        with torch.cuda.stream(self._stream):
            with mark("copy"):
                copies = [
                    whole[:count].to(self._device, non_blocking=True).reshape(-1)
                    for (whole, _), count in zip(self._buffers[slot], counts, strict=True)
                ]
            if (event := self._copied[slot]) is not None:
                event.record(self._stream)
            return self._decoded([copies[0], copies[-1]], plans)


class Resident(_OnDevice):
    """Holds all stored values on the device; a batch is decoded from there."""

    def __init__(
        self, fields: list[StoredField], slots: int, device: torch.device, delivery: Delivery = AS_DECLARED
    ) -> None:
        super().__init__(fields, slots, device, delivery)
        try:
            x = self._load(fields[0])
            self._held = [x, x if fields[1] is fields[0] else self._load(fields[1])]
        except torch.OutOfMemoryError:
            needed = sum(field.bytes for field in dict.fromkeys(fields))
            raise UserError(
                f"loader.resident: data of {needed / 1e9:.1f} GB do not fit on the device; use never, or store "
                "them in float16"
            ) from None
        if self._stream is not None:  # which reads what was just written on another
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def _load(self, field: StoredField) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
        """Take all files of a field to the device, a slab at a time.

        Return all values [n], and of each file its first value, int64 [files], and its strides, int64 [files, 4].
        """
        sizes = [int(np.prod(file.shape)) for file in field.files]
        canonical = np.argsort(field.order).tolist()
        values = torch.empty(sum(sizes), dtype=field.torch_dtype, device=self._device)
        strides = []
        for file, size, one in zip(field.files, sizes, values.split(sizes), strict=True):
            target = one.view([file.shape[axis] for axis in field.order]).permute(canonical)
            strides.append(np.array(target.stride()))
            channels, rows, *grid = file.shape
            step = max(1, SLAB // (size // rows * field.dtype.itemsize))
            for first in range(0, rows, step):
                shape = (channels, min(step, rows - first), *grid)
                slab = torch.empty([shape[axis] for axis in field.order], dtype=values.dtype).permute(canonical)
                file.copy(np.array([first, 0, 0]), slab.numpy())
                target[:, first : first + step] = slab.to(self._device)
        return values, np.cumsum(sizes) - sizes, np.stack(strides)

    def begin(self, slot: int, boxes: BoxIndex) -> tuple[list[Callable[[], None]], Callable[[], Any]]:
        """See `Backend`: nothing to read."""
        self._keep_pace()
        return [], functools.partial(self._decode, boxes)

    def _decode(self, boxes: BoxIndex) -> tuple[list[torch.Tensor], Any]:
        plans = []
        for field, (_, firsts, strides), starts in zip(
            self._fields, self._held, (boxes.input, boxes.target), strict=True
        ):
            stride = strides[boxes.file]
            base = firsts[boxes.file] + (starts * stride[:, 1:]).sum(axis=1)
            plans.append(field.plan(boxes.file, boxes.symmetry, base, stride))
        with torch.cuda.stream(self._stream):
            return self._decoded([values for values, _, _ in self._held], plans)
