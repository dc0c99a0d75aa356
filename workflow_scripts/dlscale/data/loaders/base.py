"""The interface that all loaders share."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

import torch

from dlscale.core.errors import UserError
from dlscale.data.samples import GridSamples, Samples

#: Input and target of B samples, as the samples declare them: [B, *input_spec.shape], [B, *target_spec.shape].
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Share:
    """What one data-parallel rank delivers of each global batch.

    Global step s takes samples [s B, (s + 1) B) of the epoch (the last batch may be smaller); rank r of
    R takes the r-th of R contiguous runs of it, as equal as can be. Processes that share a model replica have the same
    data-parallel rank: it is not the rank in the world.
    """

    batch_size: int  #: B, over all ranks
    rank: int = 0  #: r
    size: int = 1  #: R

    def steps(self, samples: int) -> int:
        """Global steps in an epoch of `samples` samples, the last, smaller one included."""
        return -(-samples // self.batch_size)

    def count(self, step: int, samples: int) -> int:
        """Samples of all ranks together in global step `step`."""
        return min(self.batch_size, samples - step * self.batch_size)

    def indices(self, step: int, samples: int) -> range:
        """Samples of this rank in global step `step`."""
        first, count = step * self.batch_size, self.count(step, samples)
        return range(first + count * self.rank // self.size, first + count * (self.rank + 1) // self.size)

    def weight(self, step: int, samples: int) -> float:
        """Weight of this rank's mean in global step `step`: the mean over ranks is then that over the samples."""
        return len(self.indices(step, samples)) * self.size / self.count(step, samples)


class Loader(Protocol):
    """Delivers the batches of one split."""

    samples: int  #: in an epoch, over all ranks

    def __len__(self) -> int:
        """Batches in an epoch."""

    def epoch(self, epoch: int, start: int = 0) -> Generator[Batch]:
        """Yield (x, y) of global steps `start` and on of an epoch, on the loader's device.

        Shapes and dtypes are those that the samples declare; a rank's share of a small last batch may be empty.
        A loader may use a batch's memory again once the next is asked for: what is to stay must be copied. To begin an
        epoch ends the one before: one is open at a time. On a GPU the batch is ready for the current stream.
        """

    def close(self) -> None:
        """Stop workers and close files."""


def on_grids(samples: Samples, loader: str) -> GridSamples:
    """Return the samples if they are on grids; for others the loader called `loader` has no decoder: a `UserError`."""
    if not isinstance(samples, GridSamples):
        raise UserError(
            f"loader.kind: {loader} reads arrays on grids, and these samples are none ({type(samples).__name__}); "
            "use torch"
        )
    return samples
