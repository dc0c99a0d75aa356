"""The `direct` loader for samples that write themselves: threads have them do so in batches that are used again.

For a GPU these are page-locked, so that the copy to the device does not block the host. Rows of a table may be held on
the device, all of them, where each batch is gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dlscale.core.errors import UserError
from dlscale.data.loaders.base import Batch
from dlscale.data.loaders.copying import Copier
from dlscale.data.samples import TableSamples, WritingSamples

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
        self._copied = [torch.cuda.Event(blocking=True) if gpu else None for _ in range(slots)]

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


class ResidentTable:
    """Holds all rows on the device; a batch is gathered there, in the stream of the model.

    See `dlscale.data.loaders.direct_loader.Backend`; there is nothing for threads to do.
    """

    def __init__(self, samples: TableSamples, device: torch.device) -> None:
        self._samples, self._device = samples, device
        try:
            self._x, self._y = (torch.from_numpy(values).to(device) for values in samples.table())
        except (torch.OutOfMemoryError, MemoryError):
            raise UserError(
                f"loader.resident: data of {samples.bytes / 1e9:.1f} GB do not fit on the device; use never"
            ) from None
        self._order: tuple[int, torch.Tensor] | None = None

    def begin(self, slot: int, chosen: Chosen) -> tuple[list[Callable[[], None]], Callable[[], Any]]:
        """See `Backend`: nothing to read."""
        epoch, indices = chosen
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, torch.from_numpy(self._samples.order(epoch)).to(self._device)
        return [], functools.partial(self._gather, self._order[1][indices.start : indices.stop])

    def _gather(self, rows: torch.Tensor) -> Batch:
        return self._x.index_select(0, rows), self._y.index_select(0, rows)

    def deliver(self, result: Batch) -> Batch:
        """See `Backend`."""
        return result
