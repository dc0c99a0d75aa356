"""The `direct` loader for samples that write themselves: threads have them do so in batches that are used again.

For a GPU these are page-locked, so that the copy to the device does not block the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dlscale.data.loaders.base import Batch
from dlscale.data.loaders.copying import Copier
from dlscale.data.samples import WritingSamples

#: Epoch and samples of a batch.
Chosen = tuple[int, range]


def written(epoch: int) -> Callable[[range], Chosen]:
    """Return what chooses samples of an epoch."""
    return lambda indices: (epoch, indices)


class Written:
    """See `dlscale.data.loaders.direct_loader.Backend`."""

    def __init__(self, samples: WritingSamples, batch: int, slots: int, device: torch.device) -> None:
        self._samples, self._copy = samples, Copier(device)
        gpu = device.type == "cuda"
        self._ring = [
            [
                torch.empty(batch, *spec.shape, dtype=getattr(torch, spec.dtype), pin_memory=gpu)
                for spec in (samples.input_spec, samples.target_spec)
            ]
            for _ in range(slots)
        ]
        self._copied = [torch.cuda.Event() if gpu else None for _ in range(slots)]

    def begin(self, slot: int, chosen: Chosen) -> tuple[list[Callable[[], None]], Callable[[], Any]]:
        """See `Backend`: one task for each sample."""
        if (event := self._copied[slot]) is not None:
            event.synchronize()  # the copy out of this memory, some batches ago
        epoch, indices = chosen
        x, y = (values[: len(indices)] for values in self._ring[slot])
        tasks = self._samples.writers(epoch, indices, x.numpy(), y.numpy())
        return tasks, functools.partial(tuple, (slot, x, y))

    def deliver(self, result: tuple[int, torch.Tensor, torch.Tensor]) -> Batch:
        """See `Backend`."""
        slot, x, y = result
        if (event := self._copied[slot]) is None:
            return x, y
        batch = self._copy(x, y)
        event.record(self._copy.stream)
        return batch
