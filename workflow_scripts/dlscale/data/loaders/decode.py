"""From stored values to the model's: transform a box, decode it, put channels first, as `BoxField.read` does.

A transformed box is the same memory walked in another order. So all that a sample needs is one formula,

    out[c, i, j, k] = (stored[base + channel[c] + i step[0] + j step[1] + k step[2]] - shift[c]) factor[c] + offset[c]

whose numbers a `DecodePlan` holds for the samples of a batch, wherever the stored values are: in the mapped file, in a
buffer, or on a device. `direct_host` evaluates it on a processor, `direct_device` on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dlscale.data.mapped import MappedArray
from dlscale.data.samples import BoxField, GridSamples


@dataclass(frozen=True)
class DecodePlan:
    """The formula's numbers for B samples of C channels; positions are counted in values."""

    base: np.ndarray  #: int64 [B]
    step: np.ndarray  #: int64 [B, 3]
    channel: np.ndarray  #: int64 [B, C]
    shift: np.ndarray  #: float32 [B, C], as factor and offset are
    factor: np.ndarray
    offset: np.ndarray


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
        source, sign = self._source[symmetry], self._sign[symmetry]
        shift, factor, offset = (np.take_along_axis(self._decoding[file, row], source, axis=1) for row in range(3))
        return DecodePlan(
            base, np.where(flips, -step, step), source * stride[:, :1], shift, factor * sign, offset * sign
        )


def stored_fields(samples: GridSamples) -> list[StoredField]:
    """Return input and target of samples; one object twice if both are boxes of the same field."""
    x = StoredField(samples.input)
    return [x, x if samples.target is samples.input else StoredField(samples.target)]
