"""Loader of pairs with history and clock, whose inputs are computed on the model's device."""

from __future__ import annotations

from collections.abc import Generator

import torch

from dlscale.data.loaders.base import Batch, Loader, Share
from dlscale.extensions.era5_vit.era5.samples import InformedPairs


class InformedLoader(Loader):
    """Loader that computes the inputs of `InformedPairs` from the boxes of another loader, in new memory."""

    def __init__(self, loader: Loader, samples: InformedPairs, share: Share, device: torch.device) -> None:
        super().__init__(samples, share, device)
        self._loader, self._informed = loader, samples

    def _batches(self, epoch: int, start: int) -> Generator[Batch]:
        numbers = torch.from_numpy(self._informed.numbers(epoch)).to(self._device)  # once per epoch
        for step, (x, y) in enumerate(self._loader.epoch(epoch, start), start):
            indices = self._share.indices(step, self.samples)
            yield self._informed.arrange(x, numbers[indices.start : indices.stop]), y

    def close(self) -> None:
        super().close()
        self._loader.close()
