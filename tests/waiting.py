"""Waits with their own timeout, since other programs may slow the machine."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class NotInTime(AssertionError):
    """The awaited condition was not true in time."""


#: Timeout in seconds, many times the usual time on a busy machine.
PATIENCE = 300.0


def until(
    what: str,
    ready: Callable[[], T],
    process: subprocess.Popen[str] | None = None,
    said: Callable[[], object] = str,
    seconds: float = PATIENCE,
) -> T:
    """Wait until `ready` returns something true, and return that.

    Parameters
    ----------
    what
        Description of the condition.
    process
        Process that must not end before.
    said
        Function that returns more text for the error message.
    """
    end = time.monotonic() + seconds
    while True:
        # Asked before the condition, so that the last action of a process counts.
        ended = process is not None and process.poll() is not None
        if answer := ready():
            return answer
        if ended:
            raise AssertionError(f"the process ended before {what}:\n{said()}")
        if time.monotonic() > end:
            raise NotInTime(f"not within {seconds:.0f} s: {what}\n{said()}")
        time.sleep(0.05)
