"""`direct`: from the page cache to the model with as few copies as can be, by threads.

On a processor, threads turn and decode boxes of the mapped files straight into batches that are used again and again.
On a GPU, threads copy stored values into pinned buffers, a stream of its own takes them to the device ahead of the
step, and they are turned and decoded there; data that fits is taken to the device once and never read again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from dlscale.data.loaders.base import Batch, Share, on_grids
from dlscale.data.loaders.direct_device import Resident, Streamed
from dlscale.data.loaders.direct_stored import Finish, Stored, Way
from dlscale.data.loaders.settings import DirectLoader as Settings
from dlscale.data.samples import BoxIndex, GridSamples, Samples

#: Of a device's free memory, what resident data may take; the rest is for activations, which come later.
RESIDENT_SHARE = 0.5


class DirectLoader:
    """See `dlscale.data.loaders.base.Loader`."""

    def __init__(self, samples: GridSamples, settings: Settings, share: Share, device: torch.device) -> None:
        self.samples = samples.size
        self._places, self._share = samples.boxes, share
        self._pool = ThreadPoolExecutor(settings.workers, "loader") if settings.workers else None
        # With the batch that the model works on. Without threads there is nobody who could work ahead.
        self._slots = 1 + (min(settings.prefetch, max(len(self) - 1, 0)) if settings.workers else 0)
        sides = [Stored(samples.input)]
        sides.append(sides[0] if samples.target is samples.input else Stored(samples.target))
        self._ahead: deque[_Work] = deque()
        batch = len(share.indices(0, samples.size))
        self._way: Way
        if becomes_resident(settings.resident, sides, device):
            self._way = Resident(sides, self._slots, device)
        elif device.type == "cpu":
            from dlscale.data.loaders.direct_host import OnHost  # compiled, which a GPU has no use for

            self._way = OnHost(sides, batch, self._slots)
        else:
            self._way = Streamed(sides, batch, self._slots, device)

    def __len__(self) -> int:
        return self._share.steps(self.samples)

    def epoch(self, epoch: int, start: int = 0) -> Generator[Batch]:
        """Yield the batches of an epoch from global step `start`; each is overwritten some time after the next one."""
        places = self._places(epoch)
        self._abandon()  # an epoch that was left unfinished: its buffers are these
        ahead = self._ahead
        following = start
        try:
            for _ in range(start, len(self)):
                while following < len(self) and len(ahead) < self._slots:
                    indices = self._share.indices(following, self.samples)
                    ahead.append(_Work(self._way, following % self._slots, places.take(indices), self._pool))
                    following += 1
                yield self._way.deliver(ahead.popleft().result())
        finally:
            if ahead is self._ahead:
                self._abandon()

    def _abandon(self) -> None:
        for work in self._ahead:
            work.abandon()
        self._ahead = deque()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


class _Work:
    """A batch that threads work on: one of them finds out what there is to do, all do it, one finishes it.

    Without threads it is done at once.
    """

    def __init__(self, way: Way, slot: int, places: BoxIndex, pool: ThreadPoolExecutor | None) -> None:
        self._way, self._slot, self._places, self._pool = way, slot, places, pool
        self._done: Future[Any] = Future()
        self._fills: list[Future[None]] = []
        self._begun = pool.submit(self._begin) if pool is not None else None
        if pool is None:
            fills, finish = way.begin(slot, places)
            for fill in fills:
                fill()
            self._done.set_result(finish())

    def _begin(self) -> None:
        try:
            assert self._pool is not None
            fills, finish = self._way.begin(self._slot, self._places)
            self._fills = [self._pool.submit(fill) for fill in fills]
            # Behind the fills in the threads' queue, so that they are done, or being done, when it waits for them.
            self._fills.append(self._pool.submit(self._finish, list(self._fills), finish))
        except BaseException as error:
            self._done.set_exception(error)

    def _finish(self, fills: list[Future[None]], finish: Finish) -> None:
        try:
            for fill in fills:
                fill.result()
            self._done.set_result(finish())
        except BaseException as error:
            self._done.set_exception(error)

    def result(self) -> Any:
        """Wait for the batch."""
        return self._done.result()

    def abandon(self) -> None:
        """Return when nobody writes into its buffers any more."""
        if self._begun is not None and not self._begun.cancel():
            self._begun.exception()
        for fill in self._fills:
            if not fill.cancel():
                fill.exception()


def becomes_resident(setting: str, sides: list[Stored], device: torch.device) -> bool:
    """Return whether the data is to be held on the device, by the setting or by what fits, and say so."""
    if setting != "auto":
        return setting == "always"
    if device.type != "cuda":
        return False  # the page cache is memory already
    needed = sum(stored.bytes for stored in dict.fromkeys(sides))
    free, _ = torch.cuda.mem_get_info(device)
    fits = needed <= RESIDENT_SHARE * free
    logging.info(
        "data of %.1f GB %s on the device (%.1f GB are free, at most %.0f %% for data)",
        needed / 1e9,
        "is held" if fits else "is not held",
        free / 1e9,
        100 * RESIDENT_SHARE,
    )
    return fits


def build(samples: Samples, settings: Settings, share: Share, device: torch.device) -> DirectLoader:
    """Make the loader."""
    return DirectLoader(on_grids(samples, "direct"), settings, share, device)
