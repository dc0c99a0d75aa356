"""`direct`: from the page cache to the model with as few copies as can be, by threads.

On a processor, threads decode boxes of the mapped files straight into batches that are used again and again; samples
that are no boxes write themselves there.
On a GPU, threads copy stored values into pinned buffers, a stream of its own takes them to the device ahead of the
step, and they are decoded there; data that fits is taken to the device once and never read again, rows of images among
them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from dlscale.core.errors import UserError
from dlscale.data.loaders.base import AS_DECLARED, Batch, Delivery, Share, on_grids
from dlscale.data.loaders.decode import stored_fields
from dlscale.data.loaders.direct_device import Made, Resident, ResidentTable, Streamed, Written
from dlscale.data.loaders.settings import DirectLoader as Settings
from dlscale.data.samples import Samples, TableSamples, WritingSamples

#: What resident data may take of a device's memory, but for what this process holds already: two runs that are timed
#: in turn both have theirs. The rest is for activations, which come later.
RESIDENT_SHARE = 0.4
#: Parts of a batch that each thread gets, so that none waits long for another.
SHARES = 4


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
        self._share, self._device, self._workers = share, device, settings.workers
        # With the batch that the model works on. Without threads there is nobody who could work ahead.
        self._slots = 1 + (min(settings.prefetch, max(len(self) - 1, 0)) if settings.workers else 0)
        self._backend = self._choose(samples, settings, delivery)
        if isinstance(self._backend, ResidentTable):
            self._slots, self._workers = 1, 0
        # Some threads do the tasks of batches; of two others one lists those of the next, while the first one waits.
        self._pools = [threads(count, device) for count in (2, self._workers)] if self._workers else []
        self._ahead: deque[Future[Made]] = deque()
        self._used: deque[torch.cuda.Event] = deque()

    def _choose(
        self, samples: Samples, settings: Settings, delivery: Delivery
    ) -> Written | ResidentTable | Streamed | Resident:
        device, slots, batch = self._device, self._slots, len(self._share.indices(0, samples.size))
        if isinstance(samples, TableSamples) and becomes_resident(settings.resident, samples.bytes, device):
            return ResidentTable(samples, device)
        if isinstance(samples, WritingSamples):
            if settings.resident == "always":
                raise UserError("loader.resident: these samples are made on the host; use auto or never")
            return Written(samples, batch, slots, device)
        grids = on_grids(samples, settings.kind)
        fields = stored_fields(grids)
        if becomes_resident(settings.resident, sum(field.bytes for field in set(fields)), device):
            return Resident(grids, fields, device, delivery)
        if device.type != "cpu":
            return Streamed(grids, fields, batch, slots, device, delivery)
        from dlscale.data.loaders.direct_host import HostBoxes  # compiled, which a GPU has no use for

        return Written(HostBoxes(grids, fields), batch, slots, device)

    def __len__(self) -> int:
        return self._share.steps(self.samples)

    def epoch(self, epoch: int, start: int = 0) -> Generator[Batch]:
        """Yield the batches of an epoch from global step `start`; each is overwritten some time after the next one."""
        self._abandon()  # an epoch that was left unfinished: its buffers are these
        ahead, following = self._ahead, start
        try:
            for _ in range(start, len(self)):
                while following < len(self) and len(ahead) < self._slots:
                    ahead.append(self._begin(epoch, following))
                    following += 1
                yield self._deliver(*ahead.popleft().result())
        finally:
            if ahead is self._ahead:
                self._abandon()

    def _begin(self, epoch: int, step: int) -> Future[Made]:
        """Let threads make a batch; without them make it."""
        arguments = step % self._slots, epoch, self._share.indices(step, self.samples)
        if self._pools:
            return self._pools[0].submit(self._make, *arguments)
        made: Future[Made] = Future()
        made.set_result(self._make(*arguments))
        return made

    def _make(self, slot: int, epoch: int, indices: range) -> Made:
        # The model's thread never waits for the device: without this it could run ahead by an epoch's memory.
        while len(self._used) > self._slots:
            self._used.popleft().synchronize()
        tasks, finish = self._backend.begin(slot, epoch, indices)
        if self._pools:
            shares = SHARES * self._workers
            list(self._pools[1].map(_do, [tasks[first::shares] for first in range(min(shares, len(tasks)))]))
        else:
            _do(tasks)
        return finish()

    def _deliver(self, batch: Batch, ready: torch.cuda.Event | None) -> Batch:
        """Return a batch for the model's stream."""
        if ready is not None:
            current = torch.cuda.current_stream(self._device)
            # After the work on the batches before this one.
            self._used.append(current.record_event(torch.cuda.Event(blocking=True)))
            current.wait_event(ready)
            for values in batch:
                values.record_stream(current)  # its memory is not to be used again before this stream is done with it
        return batch

    def _abandon(self) -> None:
        """Return when nobody writes into buffers any more."""
        for made in self._ahead:
            if not made.cancel():
                made.exception()
        self._ahead = deque()

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)


def _do(tasks: list[Callable[[], None]]) -> None:
    for task in tasks:
        task()


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
