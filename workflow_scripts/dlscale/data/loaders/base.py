"""The interface that all loaders share."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

import torch

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Share:
    """What one rank delivers of each global batch.

    Global step s takes samples [s B, (s + 1) B) of the epoch (the last batch may be smaller); rank r of
    R takes the r-th of R contiguous runs of it, as equal as can be.
    """

    batch_size: int
    rank: int = 0
    world_size: int = 1

    def steps(self, size: int) -> int:
        """Global steps in an epoch of `size` samples, the last, smaller one included."""
        return -(-size // self.batch_size)

    def indices(self, step: int, size: int) -> range:
        """Samples of this rank in global step `step` of an epoch of `size` samples."""
        first = step * self.batch_size
        count = min(self.batch_size, size - first)
        return range(first + count * self.rank // self.world_size, first + count * (self.rank + 1) // self.world_size)


class Loader(Protocol):
    """Delivers the batches of one split.

    Attributes
    ----------
    samples
        Samples in an epoch, over all ranks.
    """

    samples: int

    def __len__(self) -> int:
        """Batches in an epoch."""
        ...

    def epoch(self, epoch: int, start: int = 0) -> Generator[Batch]:
        """Yield (x, y) of global steps `start` and on of an epoch, float32, on the loader's device.

        A loader may use a batch's memory again once the next is asked for: what is to stay must be copied. To begin an
        epoch ends the one before: one is open at a time. On a GPU the batch is ready for the current stream.
        """
        ...

    def close(self) -> None:
        """Stop workers and close files."""
        ...
