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


def with_last_word(
    work: Callable[..., object], ended: Callable[[], int], failed: Callable[[Exception], bool]
) -> Callable[..., None]:
    """Return a function that does `work` and ends the process as `ended` says then, by its status; 0: go on.

    Where `work` raises and `failed` says all that there is to say of it, and so is true, the status is 1. (Of what is
    raised by functions of the Snakefile, Snakemake tells where that was.)
    """

    def done(*args: object, **named: object) -> None:
        try:
            work(*args, **named)
        except Exception as error:
            if not failed(error):
                raise
            sys.exit(1)
        if status := ended():
            sys.exit(status)

    return done


def end(message: str, status: int) -> None:
    """End this process at once, whatever its other threads wait for."""
    try:
        say(message)
    finally:
        os._exit(status)
