"""Any loader of boxes as a loader of what is made of them: see `dlscale.data.samples.ArrangedSamples`."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

import torch

from dlscale.data.loaders.base import Batch, Delivery, Loader, Share
from dlscale.data.samples import ArrangedSamples, Samples


class ArrangedLoader:
    """See `dlscale.data.loaders.base.Loader`. A batch is memory of its own."""

    def __init__(self, loader: Loader, samples: ArrangedSamples, share: Share, device: torch.device) -> None:
        self.samples = samples.size
        self._loader, self._samples, self._share, self._device = loader, samples, share, device

    def __len__(self) -> int:
        return len(self._loader)

    def epoch(self, epoch: int, start: int = 0) -> Generator[Batch]:
        """Yield the batches of an epoch from global step `start`."""
        numbers = torch.from_numpy(self._samples.numbers(epoch)).to(self._device)  # once: no step waits for them
        with closing(self._loader.epoch(epoch, start)) as batches:
            for step, (x, y) in enumerate(batches, start):
                indices = self._share.indices(step, self.samples)
                yield self._samples.arrange(x, numbers[indices.start : indices.stop]), y

    def close(self) -> None:
        self._loader.close()


def open_loader(
    build: Callable[..., Loader],
    samples: Samples | ArrangedSamples,
    settings: Any,
    share: Share,
    device: torch.device,
    delivery: Delivery,
) -> Loader:
    """Return the loader of these samples that `build` makes; the one that reads nothing arranges nothing."""
    if not isinstance(samples, ArrangedSamples) or settings.kind == "synthetic":
        return build(samples, settings, share, device, delivery)
    loader = build(samples.boxes, settings, share, device, delivery)
    return ArrangedLoader(loader, samples, share, device)
