"""Signals that ask training to save, or to save and end: Slurm's warning, preemption, `scancel`, Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

from dlscale.parallel.world import World
from dlscale.train.loop import Request

#: Request of each signal. A warning may come long before the limit: training goes on.
REQUESTS = {
    signal.SIGUSR1: Request.SAVE,
    signal.SIGUSR2: Request.SAVE,
    signal.SIGTERM: Request.END,
    signal.SIGINT: Request.END,
}

#: Greatest number of steps between two agreements: steps may become slow all at once.
MAX_STEPS = 16


class Interruption:
    """A context in which signals are requests, on which all ranks agree.

    A signal may reach them at different steps, and all must save at the same one: they exchange their requests about
    every `seconds`, on the host.
    """

    def __init__(self, world: World, seconds: float = 1.0) -> None:
        self._world, self._seconds = world, seconds
        self._received = Request.NONE
        self._interval = self._left = 1
        self._agreed = 0.0
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._receive) for number in REQUESTS}
        return self

    def __exit__(self, *details: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        request = REQUESTS[signal.Signals(number)]
        if number == signal.SIGINT:  # a second Ctrl-C ends the process without saving
            signal.signal(number, signal.default_int_handler)
        self._received = max(self._received, request)

    def poll(self) -> Request:
        """Return the most urgent request of any rank, once. Every rank calls it before each batch."""
        if self._world.size == 1:
            request, self._received = self._received, Request.NONE
            return request
        self._left -= 1
        if self._left > 0:
            return Request.NONE
        now = time.monotonic()
        urgency, elapsed = self._world.max(self._received, now - self._agreed)
        # All ranks compute the same next interval, from the slowest rank's time.
        ratio = self._seconds / max(elapsed, 1e-6) if self._agreed else 1.0  # the first says nothing of steps
        self._interval = self._left = min(max(1, int(self._interval * min(ratio, 4.0))), MAX_STEPS)
        self._agreed = time.monotonic()
        if self._received <= urgency:  # a more urgent signal that came meanwhile waits for the next time
            self._received = Request.NONE
        return Request(int(urgency))
