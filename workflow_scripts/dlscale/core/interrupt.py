"""Ctrl-C, before and after there is something to clean up. It imports the smallest modules of Python alone."""

from __future__ import annotations

import os
import signal

#: Whether a signal has raised `KeyboardInterrupt`.
seen = False


def end_at_once(name: str) -> None:
    """Have Ctrl-C end this process with one line, instead of a traceback of imports, until `raise_again`.

    (A `KeyboardInterrupt` in a callback of compiled code, as while pydantic compiles a pattern, would be ignored.)
    Without a name the line is left out. A process that ignores Ctrl-C, as under nohup, still does; an earlier name
    stays.
    """

    def end(number: int, frame: object) -> None:
        os.write(2, f"{name}: interrupted\n".encode() if name else b"")
        os._exit(128 + number)

    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _interrupt):
        signal.signal(signal.SIGINT, end)


def raise_again(*further: int) -> None:
    """Have Ctrl-C, and `further` signals, raise `KeyboardInterrupt` again, so that what was begun is cleaned up.

    Ignored signals, as SIGHUP under nohup, still are.
    """
    for number in (signal.SIGINT, *further):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: object) -> None:
    global seen
    seen = True
    raise KeyboardInterrupt
