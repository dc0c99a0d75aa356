"""`direct`: from the page cache to the model with as few copies as can be, by threads.

On a processor, threads decode boxes of the mapped files straight into batches that are used again and again; samples
that are no boxes write themselves there.
On a GPU, threads copy stored values into pinned buffers, a stream of its own takes them to the device ahead of the
step, and they are decoded there; data that fits is taken to the device once and never read again, rows of images among
them.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

from dlscale.core.errors import UserError
from dlscale.data.loaders.base import AS_DECLARED, Batch, Delivery, Share, on_grids
from dlscale.data.loaders.decode import stored_fields
from dlscale.data.loaders.direct_device import Resident, Streamed
from dlscale.data.loaders.direct_written import ResidentTable, Written, written
from dlscale.data.loaders.settings import DirectLoader as Settings
from dlscale.data.samples import Samples, TableSamples, WritingSamples

#: What resident data may take of a device's memory, but for what this process holds already: two runs that are timed
#: in turn both have theirs. The rest is for activations, which come later.
RESIDENT_SHARE = 0.4


#: Parts of a batch that each thread gets, so that none waits long for another: to give out every box by itself takes
#: the trainer's thread time.
SHARES = 4


class Backend(Protocol):
    """How the samples of a batch, boxes or others, reach the model."""

    def begin(self, slot: int, chosen: Any) -> tuple[list[Callable[[], None]], Callable[[], Any]]:
        """Return the tasks of threads, in any order, for the batch of a slot, and what then returns its result."""

    def deliver(self, result: Any) -> Batch:
        """Return the batch, in the thread of the model."""


class DirectLoader:
    """See `dlscale.data.loaders.base.Loader`."""

    def __init__(
        self,
        samples: Samples,
        settings: Settings,
        share: Share,
        device: torch.device,
        delivery: Delivery = AS_DECLARED,
    ) -> None:
        self.samples = samples.size
        self._share = share
        self._pool = threads(settings.workers, device) if settings.workers else None
        self._workers = settings.workers
        # With the batch that the model works on. Without threads there is nobody who could work ahead.
        self._slots = 1 + (min(settings.prefetch, max(len(self) - 1, 0)) if settings.workers else 0)
        self._ahead: deque[_PendingBatch] = deque()
        batch = len(share.indices(0, samples.size))
        self._backend: Backend
        self._choose: Callable[[int], Callable[[range], Any]]
        if isinstance(samples, TableSamples) and becomes_resident(settings.resident, samples.bytes, device):
            self._choose, self._backend, self._slots = written, ResidentTable(samples, device), 1
            self.close()
            self._pool = None
            return
        if isinstance(samples, WritingSamples):
            if settings.resident == "always":
                raise UserError("loader.resident: these samples are made on the host; use auto or never")
            self._choose = written
            self._backend = Written(samples, batch, self._slots, device)
            return
        grids = on_grids(samples, settings.kind)
        fields = stored_fields(grids)
        self._choose = lambda epoch: grids.boxes(epoch).take
        if becomes_resident(settings.resident, sum(field.bytes for field in dict.fromkeys(fields)), device):
            self._backend = Resident(fields, self._slots, device, delivery)
        elif device.type == "cpu":
            from dlscale.data.loaders.direct_host import OnHost  # compiled, which a GPU has no use for

            self._backend = OnHost(fields, batch, self._slots)
        else:
            self._backend = Streamed(fields, batch, self._slots, device, delivery)

    def __len__(self) -> int:
        return self._share.steps(self.samples)

    def epoch(self, epoch: int, start: int = 0) -> Generator[Batch]:
        """Yield the batches of an epoch from global step `start`; each is overwritten some time after the next one."""
        choose = self._choose(epoch)
        self._abandon()  # an epoch that was left unfinished: its buffers are these
        ahead = self._ahead
        following = start
        try:
            for _ in range(start, len(self)):
                while following < len(self) and len(ahead) < self._slots:
                    indices = self._share.indices(following, self.samples)
                    slot, chosen = following % self._slots, choose(indices)
                    ahead.append(_PendingBatch(self._backend, slot, chosen, self._pool, SHARES * self._workers))
                    following += 1
                yield self._backend.deliver(ahead.popleft().result())
        finally:
            if ahead is self._ahead:
                self._abandon()

    def _abandon(self) -> None:
        for batch in self._ahead:
            batch.abandon()
        self._ahead = deque()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


class _PendingBatch:
    """A batch that threads work on: one lists the tasks, all do them, and one makes the batch of what they did.

    Without threads it is made when it is asked for.
    """

    def __init__(self, backend: Backend, slot: int, chosen: Any, pool: ThreadPoolExecutor | None, shares: int) -> None:
        self._shares = shares  #: that the tasks are given out in
        self._begin = functools.partial(backend.begin, slot, chosen)
        self._tasks: list[Future[Any]] = []
        self._begun = pool.submit(self._share_out, pool) if pool is not None else None

    def _share_out(self, pool: ThreadPoolExecutor) -> Future[Any]:
        """Give the tasks to the threads; return what makes the batch."""
        tasks, finalize = self._begin()
        shares = [tasks[first :: self._shares] for first in range(min(self._shares, len(tasks)))]
        self._tasks = [pool.submit(_do, share) for share in shares]
        # Behind the tasks in the threads' queue, so that they are done, or being done, when it waits for them.
        self._tasks.append(pool.submit(_finalize, list(self._tasks), finalize))
        return self._tasks[-1]

    def result(self) -> Any:
        if self._begun is not None:
            return self._begun.result().result()
        tasks, finalize = self._begin()
        for task in tasks:
            task()
        return finalize()

    def abandon(self) -> None:
        """Return when nobody writes into its buffers any more."""
        if self._begun is not None and not self._begun.cancel():
            self._begun.exception()
        for task in self._tasks:
            if not task.cancel():
                task.exception()


def _do(tasks: list[Callable[[], None]]) -> None:
    for task in tasks:
        task()


def _finalize(tasks: list[Future[None]], finalize: Callable[[], Any]) -> Any:
    for task in tasks:
        task.result()
    return finalize()


def threads(count: int, device: torch.device) -> ThreadPoolExecutor:
    """Return threads that work on the loader's GPU: the current one of a new thread is the first of the machine."""
    if device.type != "cuda":
        return ThreadPoolExecutor(count, "loader")
    index = torch.cuda.current_device() if device.index is None else device.index
    return ThreadPoolExecutor(count, "loader", torch.cuda.set_device, (index,))


def becomes_resident(setting: str, needed: int, device: torch.device) -> bool:
    """Return whether data of so many bytes is to be held on the device, by the setting or by what fits; and say so.

    What other processes hold does not count: of two runs that are timed in turn the second one would load in another
    way. Where there is no room in the end, as beside other programs, the loader ends with a message.
    """
    if setting != "auto":
        return setting == "always"
    if device.type != "cuda":
        return False  # the page cache is memory already
    room = torch.cuda.mem_get_info(device)[1] - torch.cuda.memory_reserved(device)
    fits = needed <= RESIDENT_SHARE * room
    logging.info(
        f"data of {needed / 1e9:.1f} GB is {'' if fits else 'not '}held on the device "
        f"(of the {room / 1e9:.1f} GB that it has, at most {100 * RESIDENT_SHARE:.0f} %)"
    )
    return fits


build = DirectLoader
