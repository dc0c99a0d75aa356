"""Wait for a condition, with a timeout that is long enough for a busy machine."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class NotInTime(AssertionError):
    """Raised if a condition does not become true in time."""


#: Timeout, seconds: many times the usual wait on a busy machine.
PATIENCE = 300.0


def until(
    what: str,
    ready: Callable[[], T],
    process: subprocess.Popen[str] | None = None,
    said: Callable[[], object] = str,
    seconds: float = PATIENCE,
) -> T:
    """Wait until `ready` returns a true value, and return this value.

    Parameters
    ----------
    what
        Description of the condition.
    process
        Process that must not end before the condition is true.
    said
        Function that returns additional text for the error message.
    """
    end = time.monotonic() + seconds
    while True:
        # Check the process before the condition, so that the last action of the process counts.
        ended = process is not None and process.poll() is not None
        if answer := ready():
            return answer
        if ended:
            raise AssertionError(f"the process ended before {what}:\n{said()}")
        if time.monotonic() > end:
            raise NotInTime(f"not within {seconds:.0f} s: {what}\n{said()}")
        time.sleep(0.05)
