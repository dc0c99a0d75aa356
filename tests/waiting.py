"""Waiting for what must come, by its own clock and not the machine's: other load may make anything slow."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class NotInTime(AssertionError):
    """What was waited for did not come."""


#: Seconds after which what has not come is taken to be lost: many times what it takes, even on a busy machine.
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
        What is waited for, in words.
    process
        It must not end before.
    said
        What to show where the wait is in vain.
    """
    end = time.monotonic() + seconds
    while True:
        # Asked before the condition: what a process did last counts.
        ended = process is not None and process.poll() is not None
        if answer := ready():
            return answer
        if ended:
            raise AssertionError(f"it ended before {what}:\n{said()}")
        if time.monotonic() > end:
            raise NotInTime(f"not within {seconds:.0f} s: {what}\n{said()}")
        time.sleep(0.05)
