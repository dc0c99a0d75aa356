"""From stored values to the model's: turn a box, decode it, put channels first, as `BoxField.read` does.

A turned box is the same memory walked in another order. So all that a sample needs is one formula,

    out[c, i, j, k] = (stored[base + channel[c] + i step[0] + j step[1] + k step[2]] - shift[c]) factor[c] + offset[c]

whose numbers a `Recipe` holds for the samples of a batch, wherever the stored values are: in the mapped file, in a
buffer, or on a device. `direct_host` evaluates it on a processor and `direct_device` with PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dlscale.data.samples import BoxField


@dataclass(frozen=True)
class Recipe:
    """The formula's numbers for B samples of C channels; places are counted in values.

    Attributes
    ----------
    base
        int64 [B].
    step
        int64 [B, 3].
    channel
        int64 [B, C].
    shift, factor, offset
        float32 [B, C].
    """

    base: np.ndarray
    step: np.ndarray
    channel: np.ndarray
    shift: np.ndarray
    factor: np.ndarray
    offset: np.ndarray


class Recipes:
    """Makes the recipes of one side."""

    def __init__(self, side: BoxField) -> None:
        self._side = side
        turning, channels = side.symmetries, side.shape[0]
        self._axes = turning.axes if turning else np.arange(3)[None]
        self._flips = turning.flips if turning else np.zeros((1, 3), bool)
        self._source = turning.source if turning else np.arange(channels)[None]
        self._sign = turning.sign if turning else np.ones((1, channels), np.float32)
        self._decoding = np.stack([side.decoding(file) for file in range(len(side.readers))])  # [files, 3, C]

    def make(self, file: np.ndarray, symmetry: np.ndarray, base: np.ndarray, stride: np.ndarray) -> Recipe:
        """Return the recipe of B samples.

        Parameters
        ----------
        file, symmetry
            As `BoxIndex` has them, int64 [B].
        base
            Where each box begins, in values, int64 [B].
        stride
            Values from one cell to the next along the axes (C, and the box's three), int64 [B, 4].
        """
        axes, flips = self._axes[symmetry], self._flips[symmetry]
        turned, last = np.take_along_axis(stride[:, 1:], axes, axis=1), np.array(self._side.extent)[axes] - 1
        base = base + (flips * last * turned).sum(axis=1)
        source, sign = self._source[symmetry], self._sign[symmetry]
        numbers = self._decoding[file]
        shift, factor, offset = (np.take_along_axis(numbers[:, row], source, axis=1) for row in range(3))
        step = np.where(flips, -turned, turned)
        return Recipe(base, step, source * stride[:, :1], shift, factor * sign, offset * sign)
