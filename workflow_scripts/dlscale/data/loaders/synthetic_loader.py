"""`synthetic`: no data at all. One batch of normal deviates on the device, again and again.

It shows what the rest of a step costs: the ceiling of every loader.
"""

from __future__ import annotations

from collections.abc import Generator

import torch

from dlscale.data.loaders.base import Batch, Share
from dlscale.data.loaders.settings import SyntheticLoader as Settings
from dlscale.data.samples import Samples


class SyntheticLoader:
    """See `dlscale.data.loaders.base.Loader`."""

    def __init__(self, samples: Samples, share: Share, device: torch.device) -> None:
        self.samples = samples.size
        self._share = share
        generator = torch.Generator().manual_seed(0)
        count = len(share.indices(0, samples.size))
        self._x = torch.randn((count, *samples.input_shape), generator=generator).to(device)
        self._y = torch.randn((count, *samples.target_shape), generator=generator).clamp(-1, 1).to(device)

    def __len__(self) -> int:
        return self._share.steps(self.samples)

    def epoch(self, epoch: int, start: int = 0) -> Generator[Batch]:
        """Yield the same batch for every step; a smaller last one is a part of it."""
        for step in range(start, len(self)):
            count = len(self._share.indices(step, self.samples))
            yield self._x[:count], self._y[:count]

    def close(self) -> None:
        """Nothing to stop."""


def build(samples: Samples, settings: Settings, share: Share, device: torch.device) -> SyntheticLoader:
    """Make the loader."""
    return SyntheticLoader(samples, share, device)
