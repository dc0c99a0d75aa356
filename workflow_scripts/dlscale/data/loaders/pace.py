"""How far the host may run ahead of a device: memory is held until the device has done the work that reads it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Event(Protocol):
    """What of `torch.cuda.Event` is used."""

    def query(self) -> bool:
        """Return whether the work before the event is done."""

    def synchronize(self) -> None:
        """Wait until it is."""


class _Done:
    """The event of a processor, whose work is done when it is given."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class Pace:
    """Holds what batches are made of while the device may read it, of at most `ahead` batches before the present one.

    The host waits only where it is further ahead than that. `record` returns an event that comes after all work given
    to the device so far.
    """

    def __init__(self, ahead: int, record: Callable[[], Event]) -> None:
        self._ahead, self._record = ahead, record
        self._present: Any = None
        self._past: deque[tuple[Event, Any]] = deque()

    @staticmethod
    def of(device: torch.device, ahead: int) -> Pace:
        """Return the pace of work on the device's current stream."""
        if device.type != "cuda":
            return Pace(ahead, _Done)
        return Pace(ahead, lambda: torch.cuda.current_stream(device).record_event())

    def hold(self, what: Any) -> None:
        """Hold what the work reads that is given to the device from now until the next call."""
        if self._present is not None:
            self._past.append((self._record(), self._present))
        self._present = what
        while self._past and (len(self._past) > self._ahead or self._past[0][0].query()):
            self._past[0][0].synchronize()
            self._past.popleft()  # only now: what it holds may go

    def close(self) -> None:
        """Wait until the device has done all work, and hold nothing any more."""
        self.hold(None)
        while self._past:
            self._past[0][0].synchronize()
            self._past.popleft()
