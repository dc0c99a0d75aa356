"""`torch`: PyTorch's DataLoader, the published baseline: worker processes, pinned memory, prefetching.

Images are collated as the published program's fast collate does it: bytes, [B, C, H, W], a quarter of what numbers
would be; the model makes numbers of them and normalises these on its device.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterator

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from dlscale.data.loaders.base import AS_DECLARED, Batch, Delivery, Share
from dlscale.data.loaders.copying import Copier
from dlscale.data.loaders.processes import outlive_signals
from dlscale.data.loaders.settings import TorchLoader as Settings
from dlscale.data.samples import ArraySpec, Samples


class _Dataset(Dataset[Batch]):
    """Samples by (epoch, index): workers stay alive between epochs and need not be told of them."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __getitem__(self, key: tuple[int, int]) -> Batch:
        x, y = self.samples.read(*key)
        return torch.from_numpy(x), torch.from_numpy(y)


def _collate(specs: tuple[ArraySpec, ArraySpec], samples: list[Batch]) -> list[torch.Tensor]:
    """Stack samples; this rank's share of a small last batch may be none at all."""
    if samples:
        return default_collate(samples)
    return [torch.empty(0, *spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs]


class _Batches:
    """The batch sampler: the keys of each batch of the epoch that was set."""

    def __init__(self, size: int, share: Share) -> None:
        self.size, self.share = size, share
        self.epoch, self.start = 0, 0

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for step in range(self.start, self.share.steps(self.size)):
            yield [(self.epoch, index) for index in self.share.indices(step, self.size)]


def _begin_worker(worker: int) -> None:
    outlive_signals()


class TorchLoader:
    """See `dlscale.data.loaders.base.Loader`; the copy to the device does not block the host."""

    def __init__(
        self,
        samples: Samples,
        settings: Settings,
        share: Share,
        device: torch.device,
        delivery: Delivery = AS_DECLARED,
    ) -> None:
        self.samples = samples.size
        self._copy = Copier(device)
        self._batches = _Batches(samples.size, share)
        self._loader = DataLoader(
            _Dataset(samples),
            batch_sampler=self._batches,
            collate_fn=functools.partial(_collate, (samples.input_spec, samples.target_spec)),
            num_workers=settings.workers,
            prefetch_factor=settings.prefetch if settings.workers else None,
            persistent_workers=settings.workers > 0,
            worker_init_fn=_begin_worker,
            pin_memory=settings.pin_memory and device.type == "cuda",
            # Seeds for workers come from here and not from the random state that drop-out uses.
            generator=torch.Generator(),
        )

    def __len__(self) -> int:
        return self._batches.share.steps(self.samples)

    def epoch(self, epoch: int, start: int = 0) -> Generator[Batch]:
        """Yield the batches of an epoch from global step `start`."""
        self._batches.epoch, self._batches.start = epoch, start
        try:
            for x, y in self._loader:
                yield self._copy(x, y)
        except (EOFError, ConnectionError) as error:  # a batch is fetched from the process that made it
            raise RuntimeError("DataLoader worker (pid unknown) exited unexpectedly") from error

    def close(self) -> None:
        iterator, self._loader._iterator = self._loader._iterator, None
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()


build = TorchLoader
