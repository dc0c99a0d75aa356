"""Loader `torch`: PyTorch's DataLoader with worker processes and pinned memory, as in NERSC's tutorials."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from dlscale.core.ranges import mark
from dlscale.data.loaders import TorchLoader as Settings
from dlscale.data.loaders import outlive_signals
from dlscale.data.loaders.base import Batch, Loader, Share, read_batch
from dlscale.data.samples import Samples, tree_leaves, tree_map


class _Sent:
    """Batch that keeps its structure: DataLoader would turn the tuples in other batches into lists."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def pin_memory(self) -> _Sent:
        """Return the batch in page-locked memory; DataLoader calls this method."""
        return _Sent(tree_map(torch.Tensor.pin_memory, self.batch))


class _Dataset(Dataset[_Sent]):
    """Dataset of batches, with keys (epoch, range of samples), so that workers may stay alive between epochs."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __getitem__(self, key: tuple[int, range]) -> _Sent:
        return _Sent(read_batch(self.samples, *key))  # for a rank without samples, the range is empty


class TorchLoader(Loader):
    """Loader `torch`, which copies batches to a GPU on a separate stream, during the step."""

    def __init__(self, samples: Samples, settings: Settings, share: Share, device: torch.device) -> None:
        super().__init__(samples, share, device)
        self._keys: list[tuple[int, range]] = []  # keys of the epoch's batches, for `_Dataset`
        self._broken = False  # whether a worker died while it sent a batch
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._loader = DataLoader(
            _Dataset(samples),
            batch_size=None,
            sampler=self._keys,
            num_workers=settings.workers,
            prefetch_factor=settings.prefetch if settings.workers else None,
            persistent_workers=settings.workers > 0,
            worker_init_fn=outlive_signals,
            pin_memory=settings.pin_memory and device.type == "cuda",
            # Draws the workers' seeds. The default generator would change the random state that drop-out uses.
            generator=torch.Generator(),
        )

    def _batches(self, epoch: int, start: int) -> Generator[Batch]:
        self._keys[:] = [(epoch, self._share.indices(step, self.samples)) for step in range(start, len(self))]
        try:
            for sent in self._loader:
                with mark("copy"):
                    batch = self._copied(sent.batch)
                yield batch
        except (EOFError, ConnectionError) as error:  # the worker died before its batch was received
            self._broken = True
            raise RuntimeError("DataLoader worker (pid unknown) exited unexpectedly") from error

    def _copied(self, batch: Batch) -> Batch:
        if self._stream is None:
            return batch
        with torch.cuda.stream(self._stream):
            x, y = (tree_map(lambda values: values.to(self._device, non_blocking=True), part) for part in batch)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for values in tree_leaves((x, y)):
            values.record_stream(current)  # keeps the memory until the model's stream has used it
        return x, y

    def close(self) -> None:
        super().close()
        iterator: Any = self._loader._iterator
        self._loader._iterator = None
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            if self._broken or not all(worker.is_alive() for worker in iterator._workers):
                _kill_workers(iterator)
            iterator._shutdown_workers()


def _kill_workers(iterator: Any) -> None:
    """Kill the workers of a DataLoader's iterator, so that `_shutdown_workers` does not wait forever.

    If the system kills a worker while it holds the lock of an event or of a queue, nothing releases this lock.
    """
    if iterator._worker_pids_set:  # otherwise PyTorch's SIGCHLD handler raises during the following lines
        torch._C._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
    for worker in iterator._workers:
        worker.kill()
    iterator._workers_done_event = threading.Event()
    if hasattr(iterator, "_pin_memory_thread"):  # a daemon thread, not joined: it may wait for the lock
        iterator._pin_memory_thread_done_event.set()
        del iterator._pin_memory_thread


build = TorchLoader
