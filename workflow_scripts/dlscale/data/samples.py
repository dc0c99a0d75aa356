"""What a loader asks of a dataset: how many samples there are, and sample (epoch, index)."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Samples(Protocol):
    """The samples of one split.

    Attributes
    ----------
    size
        Samples in an epoch.
    input_shape, target_shape
        Of one sample, channels first.
    """

    size: int
    input_shape: tuple[int, ...]
    target_shape: tuple[int, ...]

    def read(self, epoch: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return input and target of sample `index` (0 ... size - 1) of `epoch`, float32, in model units.

        The same arguments give the same arrays in any process.
        """
        ...
