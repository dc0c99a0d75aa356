"""What the ways of the `direct` loader have in common: the stored values, and what a way has to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from dlscale.data.loaders.base import Batch
from dlscale.data.loaders.decode import Recipes
from dlscale.data.mapped import Raw, common_type
from dlscale.data.samples import BoxField, BoxIndex

Fill = Callable[[], None]
Finish = Callable[[], Any]


class Stored:
    """One side's values as they lie in the files, and how to decode them.

    Attributes
    ----------
    dtype, order
        Of buffers: those of the files; see `Raw`.
    box
        Shape of a box: channels and the three other axes.
    """

    def __init__(self, side: BoxField) -> None:
        self.side = side
        self.raws = [Raw(reader, side.channel_axis) for reader in side.readers]
        self.recipes = Recipes(side)
        self.dtype = common_type(self.raws)
        self.order = self.raws[0].order
        self.box = (side.shape[0], *side.extent)

    @property
    def bytes(self) -> int:
        """Of all files in memory."""
        return sum(int(np.prod(reader.shape)) for reader in self.side.readers) * self.dtype.itemsize

    def strides(self, boxes: np.ndarray) -> np.ndarray:
        """Values from one cell to the next in an array with axes [C, a, b, c], int64 [4]."""
        return np.array(boxes.strides[-4:]) // self.dtype.itemsize


class Way(Protocol):
    """How the boxes of a batch reach the model."""

    def begin(self, slot: int, places: BoxIndex) -> tuple[list[Fill], Finish]:
        """Return what threads are to do, in any order, for the batch of a slot, and what then gives its result."""
        ...

    def deliver(self, result: Any) -> Batch:
        """Return the batch, in the thread of the model."""
        ...
