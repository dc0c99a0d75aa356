"""The `direct` loader with a GPU: stored values go to the device as they are, and are turned and decoded there."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dlscale.core.errors import UserError
from dlscale.data import mapped as raw
from dlscale.data.loaders.base import Batch
from dlscale.data.loaders.decode import Recipe
from dlscale.data.loaders.direct_stored import Fill, Finish, Stored
from dlscale.data.mapped import Raw
from dlscale.data.samples import BoxIndex

#: Bytes that are taken to the device at a time while data becomes resident.
SLAB = 2**26


def on_device(stored: torch.Tensor, recipe: Recipe, extent: tuple[int, int, int]) -> torch.Tensor:
    """Evaluate the formula where `stored` [values] is.

    Returns
    -------
    torch.Tensor
        Float32 of shape [B, C, *extent]. Beside it, memory for the places of one channel is needed.
    """
    device = stored.device

    def moved(values: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)

    whole = torch.int32 if stored.numel() < 2**31 else torch.int64
    base, step = moved(recipe.base).to(whole), moved(recipe.step).to(whole)
    channel = moved(recipe.channel).to(whole)
    shift, factor, offset = (moved(part)[:, :, None] for part in (recipe.shift, recipe.factor, recipe.offset))
    place = base[:, None, None, None]
    for axis, size in enumerate(extent):
        shape = [1, 1, 1, 1]
        shape[1 + axis] = size
        place = place + torch.arange(size, dtype=whole, device=device).reshape(shape) * step[:, axis, None, None, None]
    place = place.flatten(1)
    count, channels = recipe.channel.shape
    out = torch.empty(count, channels, place.shape[1], device=device)
    for c in range(channels):
        found = stored.index_select(0, (place + channel[:, c, None]).flatten()).reshape(place.shape)
        out[:, c] = (found.float() - shift[:, c]) * factor[:, c] + offset[:, c]
    return out.reshape(count, channels, *extent)


class _OnDevice:
    """What streamed and resident data share: decoding on a device, on a stream of its own."""

    def __init__(self, sides: list[Stored], slots: int, device: torch.device) -> None:
        self._sides, self._slots, self._device = sides, slots, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._used: deque[torch.cuda.Event] = deque()

    def _keep_pace(self) -> None:
        """Wait, in a thread of the loader, until the model has done with batches given out long ago.

        The model's thread never waits for the device, so without this it could run ahead by an epoch's memory.
        """
        while len(self._used) > self._slots:
            self._used.popleft().synchronize()

    def deliver(self, result: Any) -> Batch:
        """See `Way`."""
        (x, y), event = result
        if event is not None:
            current = torch.cuda.current_stream(self._device)
            self._used.append(current.record_event())  # the work on the batches before this one
            current.wait_event(event)
            for tensor in (x, y):
                tensor.record_stream(current)  # its memory is not to be used again before this stream is done with it
        return x, y

    def _decoded(self, stored: list[torch.Tensor], recipes: list[Recipe]) -> list[torch.Tensor]:
        extents = [side.side.extent for side in self._sides]
        found = [on_device(*each) for each in zip(stored, recipes, extents, strict=True)]
        return [values.reshape(-1, *side.side.spec.shape) for values, side in zip(found, self._sides, strict=True)]


class Streamed(_OnDevice):
    """Copies stored values into pinned buffers and from there to the device, where they are decoded.

    Boxes that input and target share, as consecutive pairs of a series do, are copied once.
    """

    def __init__(self, sides: list[Stored], batch: int, slots: int, device: torch.device) -> None:
        super().__init__(sides, slots, device)
        self._shared = sides[0] is sides[1]
        self._buffers = [
            [self._allocate(stored, batch * (1 + self._shared)) for stored in sides[: 1 if self._shared else 2]]
            for _ in range(slots)
        ]
        self._copied = [torch.cuda.Event() if self._stream else None for _ in range(slots)]

    def _allocate(self, stored: Stored, count: int) -> tuple[torch.Tensor, np.ndarray]:
        dtype = torch.float16 if stored.dtype.itemsize == 2 else torch.float32
        made: list[torch.Tensor] = []

        def pinned(shape: tuple[int, ...]) -> np.ndarray:
            made.append(torch.empty(shape, dtype=dtype, pin_memory=self._stream is not None))
            found: np.ndarray = made[0].numpy()
            return found

        _, boxes = raw.buffer(count, stored.box, stored.order, 0, pinned)
        return made[0], boxes

    def begin(self, slot: int, places: BoxIndex) -> tuple[list[Fill], Finish]:
        """See `Way`: one task a box."""
        self._keep_pace()
        if (event := self._copied[slot]) is not None:
            event.synchronize()  # the copy out of this buffer, some batches ago
        sides = [np.column_stack([places.file, start]) for start in (places.input, places.target)]
        if self._shared:
            boxes, where = np.unique(np.concatenate(sides), axis=0, return_inverse=True)
            needed, place = [boxes], np.split(where.reshape(-1), 2)
        else:
            needed, place = sides, [np.arange(len(places.file))] * 2
        tasks: list[Fill] = []
        for stored, (_, buffer), boxes in zip(self._sides, self._buffers[slot], needed, strict=False):
            for target, box in zip(buffer, boxes, strict=False):
                tasks.append(_Copy(stored.raws[box[0]], box[1:], target))
        recipes = []
        for number, stored in enumerate(self._sides):
            boxes = self._buffers[slot][0 if self._shared else number][1]
            stride = np.tile(stored.strides(boxes), (len(places.file), 1))
            base = place[number] * (boxes.strides[0] // stored.dtype.itemsize)
            recipes.append(stored.recipes.make(places.file, places.symmetry, base, stride))

        def finish() -> Any:
            if self._stream is None:
                return self._finish(slot, [len(each) for each in needed], recipes), None
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                batch = self._finish(slot, [len(each) for each in needed], recipes)
                return batch, self._stream.record_event()

        return tasks, finish

    def _finish(self, slot: int, counts: list[int], recipes: list[Recipe]) -> list[torch.Tensor]:
        copies = [
            whole[:count].to(self._device, non_blocking=True).reshape(-1)
            for (whole, _), count in zip(self._buffers[slot], counts, strict=True)
        ]
        if (event := self._copied[slot]) is not None:
            event.record(self._stream)
        return self._decoded([copies[0], copies[-1]], recipes)


@dataclass(frozen=True)
class _Copy:
    """One box to copy into a buffer."""

    file: Raw
    start: np.ndarray
    target: np.ndarray

    def __call__(self) -> None:
        self.file.copy(self.start, self.target)


class Resident(_OnDevice):
    """Holds all stored values on the device; a batch is decoded from there."""

    def __init__(self, sides: list[Stored], slots: int, device: torch.device) -> None:
        super().__init__(sides, slots, device)
        try:
            first = self._load(sides[0])
            held = [first, first if sides[1] is sides[0] else self._load(sides[1])]
        except torch.OutOfMemoryError:
            needed = sum(stored.bytes for stored in dict.fromkeys(sides))
            raise UserError(
                f"loader.resident: data of {needed / 1e9:.1f} GB do not fit on the device; use auto or never, or store "
                "them in float16"
            ) from None
        if self._stream is not None:  # which reads what was just written on another
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._values = [values for values, _, _ in held]
        self._bases = [bases for _, bases, _ in held]
        self._strides = [strides for _, _, strides in held]

    def _load(self, stored: Stored) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
        """Take all files of a side to the device, a slab at a time; return values, first value and strides by file."""
        shapes = [_canonical(reader.shape, stored.side.channel_axis) for reader in stored.side.readers]
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
        dtype = torch.float16 if stored.dtype.itemsize == 2 else torch.float32
        values = torch.empty(int(ends[-1]), dtype=dtype, device=self._device)
        strides = []
        for file, shape, end in zip(stored.raws, shapes, ends, strict=True):
            size = int(np.prod(shape))
            sizes = [shape[axis] for axis in stored.order]
            target = values[end - size : end].view(sizes).permute(*np.argsort(stored.order).tolist())
            strides.append(np.array(target.stride()))
            rows = max(1, SLAB // (size // shape[1] * stored.dtype.itemsize))
            for first in range(0, shape[1], rows):
                count = min(rows, shape[1] - first)
                part = (shape[0], count, *shape[2:])
                whole, boxes = raw.buffer(1, part, stored.order, 0, lambda shape: np.empty(shape, stored.dtype))
                file.copy(np.array([first, 0, 0]), boxes[0])
                found = torch.from_numpy(whole[0]).permute(*np.argsort(stored.order).tolist())
                target[:, first : first + count] = found.to(self._device)
        return values, ends - [int(np.prod(shape)) for shape in shapes], np.stack(strides)

    def begin(self, slot: int, places: BoxIndex) -> tuple[list[Fill], Finish]:
        """See `Way`: nothing to read."""
        self._keep_pace()

        def finish() -> Any:
            recipes = []
            for number, starts in enumerate((places.input, places.target)):
                stride = self._strides[number][places.file]
                base = self._bases[number][places.file] + (starts * stride[:, 1:]).sum(axis=1)
                recipes.append(self._sides[number].recipes.make(places.file, places.symmetry, base, stride))
            if self._stream is None:
                return self._decoded(self._values, recipes), None
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                return self._decoded(self._values, recipes), self._stream.record_event()

        return [], finish


def _canonical(shape: tuple[int, ...], channel_axis: int) -> tuple[int, ...]:
    others = [size for axis, size in enumerate(shape) if axis != channel_axis]
    return (shape[channel_axis], *others)
