"""Being asked to save, or to save and end, by a signal: Slurm's warning, preemption, `scancel`, Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any, Literal

from dlscale.parallel.world import World

Request = Literal["save", "end"]

#: What each signal asks for. A warning may come long before the limit: what time is left is used.
MEANING: dict[signal.Signals, Request] = {
    signal.SIGUSR1: "save",
    signal.SIGUSR2: "save",
    signal.SIGTERM: "end",
    signal.SIGINT: "end",
}
_WEIGHT: dict[Request | None, int] = {None: 0, "save": 1, "end": 2}

#: Steps between two agreements at most: should they become slow all at once, it is not noticed too late.
MOST_STEPS = 16


class Interruption:
    """Whether this training was asked to save or to end; a context in which signals ask.

    A signal reaches the processes of a run one by one, at different steps, or one of them alone. All must save at
    the same step, so they agree, about once a second: by a number each on the host, for which no device waits.

    Parameters
    ----------
    seconds
        Between agreements, about.
    """

    def __init__(self, world: World, seconds: float = 1.0) -> None:
        self._world, self._seconds = world, seconds
        self._heard: Request | None = None
        self._every = self._left = 1
        self._agreed = 0.0
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._hear) for number in MEANING}
        return self

    def __exit__(self, *details: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        request = MEANING[signal.Signals(number)]
        if number == signal.SIGINT:  # who asks again will not wait for it to be saved
            signal.signal(number, signal.default_int_handler)
        if _WEIGHT[request] > _WEIGHT[self._heard]:
            self._heard = request

    def asked(self) -> Request | None:
        """Return what is asked for now, if anything. Every process calls it equally often, before each batch."""
        if self._world.size == 1:
            found, self._heard = self._heard, None
            return found
        self._left -= 1
        if self._left > 0:
            return None
        now = time.monotonic()
        request, elapsed = self._world.most_on_host([_WEIGHT[self._heard], now - self._agreed])
        # Of the slowest process's time all make the same next interval.
        ratio = self._seconds / max(elapsed, 1e-6) if self._agreed else 1.0  # the first says nothing of steps
        self._every = self._left = min(max(1, int(self._every * min(ratio, 4.0))), MOST_STEPS)
        self._agreed = time.monotonic()
        found = next(name for name, weight in _WEIGHT.items() if weight == request)
        if _WEIGHT[self._heard] <= request:  # a signal that came meanwhile waits for the next time
            self._heard = None
        return found
