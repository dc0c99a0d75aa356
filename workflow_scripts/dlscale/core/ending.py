"""The last word of a process: said where its user reads, also by a thread that ends it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

#: Status of a process that ends since another one of its run ended, hangs, or sends wrong values.
LOST = 76


def _print(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


#: Says it; the command line knows where.
say: Callable[[str], object] = _print


def end(message: str, status: int) -> None:
    """End this process at once, whatever its other threads wait for."""
    try:
        say(message)
    finally:
        os._exit(status)
