"""From stored values to the model's: transform a box, decode it, put channels first, as `BoxField.read` does.

A transformed box is the same memory walked in another order. So all that a sample needs is one formula,

    out[c, i, j, k] = (stored[base + channel[c] + i step[0] + j step[1] + k step[2]] - shift[c]) factor[c] + offset[c]

whose numbers a `DecodePlan` holds for the samples of a batch, wherever the stored values are: in the mapped file, in a
buffer, or on a device. `direct_host` evaluates it on a processor, `on_device` on a GPU.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from dlscale.data.loaders.base import Delivery
from dlscale.data.mapped import MappedArray
from dlscale.data.samples import BoxField, GridSamples


class DecodePlan(NamedTuple):
    """The formula's numbers for B samples of C channels, in numpy or on a device; positions are counted in values."""

    places: Any  #: base, step [3], channel [C], int64 [B, 4 + C]
    numbers: Any  #: shift, factor, offset, float32 [B, 3, C]


class StoredField:
    """A field's values as they lie in the files, and how to decode boxes of them.

    Attributes
    ----------
    files
        The stored values of each file.
    dtype, torch_dtype, order
        Of buffers for boxes: float16 if all files have it, else float32; axes lie as in the first file.
    shape, extent, spec
        See `BoxField`.
    """

    def __init__(self, field: BoxField) -> None:
        self.files = [MappedArray(reader, field.channel_axis) for reader in field.readers]
        self.dtype = np.result_type(*(file.buffer_dtype for file in self.files))
        self.torch_dtype = torch.float16 if self.dtype == np.float16 else torch.float32
        self.order = self.files[0].order
        self.shape, self.extent, self.spec = field.shape, field.extent, field.spec
        symmetries, channels = field.symmetries, field.shape[0]
        self._axes = symmetries.axes if symmetries else np.arange(3)[None]
        self._flips = symmetries.flips if symmetries else np.zeros((1, 3), bool)
        self._source = symmetries.source if symmetries else np.arange(channels)[None]
        self._sign = symmetries.sign if symmetries else np.ones((1, channels), np.float32)
        self._decoding = np.stack([field.decoding(file) for file in range(len(self.files))])  # [files, 3, C]

    def canonical(self, stored: np.ndarray) -> np.ndarray:
        """Return an array whose last four axes lie in `order` as boxes, [..., C, a, b, c]."""
        return np.moveaxis(stored, [axis - 4 for axis in range(4)], [axis - 4 for axis in self.order])

    @property
    def bytes(self) -> int:
        """Of all files in memory."""
        return sum(int(np.prod(file.shape)) for file in self.files) * self.dtype.itemsize

    def strides(self, boxes: np.ndarray) -> np.ndarray:
        """Return the values from one cell to the next in an array with axes [..., C, a, b, c], int64 [4]."""
        return np.array(boxes.strides[-4:]) // self.dtype.itemsize

    def plan(self, file: np.ndarray, symmetry: np.ndarray, base: np.ndarray, stride: np.ndarray) -> DecodePlan:
        """Return how to decode the boxes of B samples; `file` and `symmetry` [B] are as `BoxIndex` has them.

        `base`, int64 [B], is where each box begins, and `stride`, int64 [B, 4] or [1, 4], the distance from one cell to
        the next along the axes (C, and the box's three), in values.
        """
        axes, flips = self._axes[symmetry], self._flips[symmetry]
        stride = np.broadcast_to(stride, (len(file), 4))
        step, last = np.take_along_axis(stride[:, 1:], axes, axis=1), np.array(self.extent)[axes] - 1
        base = base + (flips * last * step).sum(axis=1)
        source = self._source[symmetry]
        numbers = np.ascontiguousarray(np.take_along_axis(self._decoding[file], source[:, None], axis=2))
        numbers[:, 1:] *= self._sign[symmetry][:, None]
        return DecodePlan(np.column_stack([base, np.where(flips, -step, step), source * stride[:, :1]]), numbers)


def stored_fields(samples: GridSamples) -> list[StoredField]:
    """Return input and target of samples; one object twice if both are boxes of the same field."""
    x = StoredField(samples.input)
    return [x, x if samples.target is samples.input else StoredField(samples.target)]


def on_device(
    stored: torch.Tensor, plan: DecodePlan, field: StoredField, dtype: torch.dtype, delivery: Delivery
) -> torch.Tensor:
    """Evaluate the formula where `stored` [values] is: by one kernel, or by PyTorch's operations.

    The values, of `dtype` [B, *spec.shape] in the delivery's layout, are boxes [C, *extent], perhaps without an axis of
    one cell. With PyTorch's operations memory is needed beside them for the positions of one channel.
    """
    device, shape = stored.device, (len(plan.places), *field.spec.shape)
    numbers = [torch.from_numpy(each) for each in plan]
    if device.type == "cuda":  # PyTorch gives pinned memory out again once the copies from it are done
        numbers = [each.pin_memory().to(device, non_blocking=True) for each in numbers]
    plan = DecodePlan(*numbers)
    if (decode := kernel(device)) is None:
        values = _by_operations(stored, plan, field.extent).reshape(shape)
        return values.to(dtype, memory_format=delivery.layout_of(values.dim()))
    out = delivery.empty(shape, dtype, device)
    decode(stored, *plan, field.extent, out)
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


def _by_operations(stored: torch.Tensor, plan: DecodePlan, extent: tuple[int, int, int]) -> torch.Tensor:
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
