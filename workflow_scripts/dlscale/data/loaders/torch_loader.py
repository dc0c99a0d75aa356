"""`torch`: PyTorch's DataLoader, the published baseline: worker processes, pinned memory, prefetching.

Images are collated as the published program's fast collate does it: bytes, [B, C, H, W], a quarter of what numbers
would be; the model makes numbers of them and normalises these on its device.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from dlscale.core.ranges import mark
from dlscale.data.loaders import outlive_signals
from dlscale.data.loaders.base import AS_DECLARED, Batch, Delivery, Share
from dlscale.data.loaders.settings import TorchLoader as Settings
from dlscale.data.samples import Samples


class _Dataset(Dataset[list[torch.Tensor]]):
    """Batches by (epoch, samples): workers stay alive between epochs and need not be told of them."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __getitem__(self, key: tuple[int, range]) -> list[torch.Tensor]:
        epoch, indices = key
        if not indices:  # this rank's share of a small last batch
            specs = self.samples.input_spec, self.samples.target_spec
            return [torch.empty(0, *spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs]
        batch = []
        for index in indices:
            x, y = self.samples.read(epoch, index)
            batch.append((torch.from_numpy(x), torch.from_numpy(y)))
        stacked: list[torch.Tensor] = default_collate(batch)
        return stacked


class _Batches:
    """The sampler: the keys of the batches of the epoch that was set."""

    def __init__(self, size: int, share: Share) -> None:
        self.size, self.share = size, share
        self.epoch, self.start = 0, 0

    def __iter__(self) -> Iterator[tuple[int, range]]:
        for step in range(self.start, self.share.steps(self.size)):
            yield self.epoch, self.share.indices(step, self.size)


def _begin_worker(worker: int) -> None:
    outlive_signals()


class TorchLoader:
    """See `dlscale.data.loaders.base.Loader`; the copy to the device does not block the host.

    It goes on beside the step that the device is busy with, on a stream of its own, as in the published programs'
    prefetcher: in the model's stream it would wait for that step.
    """

    def __init__(
        self,
        samples: Samples,
        settings: Settings,
        share: Share,
        device: torch.device,
        delivery: Delivery = AS_DECLARED,
    ) -> None:
        self.samples = samples.size
        self._device, self._batches = device, _Batches(samples.size, share)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._loader = DataLoader(
            _Dataset(samples),
            batch_size=None,
            sampler=self._batches,
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
                with mark("copy"):
                    batch = self._copied(x, y)
                yield batch
        except (EOFError, ConnectionError) as error:  # a batch is fetched from the process that made it
            raise RuntimeError("DataLoader worker (pid unknown) exited unexpectedly") from error

    def _copied(self, x: torch.Tensor, y: torch.Tensor) -> Batch:
        """Return a batch on the device, ready for the current stream there."""
        if self._stream is None:
            return x, y
        with torch.cuda.stream(self._stream):
            batch = x.to(self._device, non_blocking=True), y.to(self._device, non_blocking=True)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for values in batch:
            values.record_stream(current)  # their memory is the model's until its stream has come past them
        return batch

    def close(self) -> None:
        iterator, self._loader._iterator = self._loader._iterator, None
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()


build = TorchLoader
