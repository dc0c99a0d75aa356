"""Ctrl-C in a process that has nothing to clean up yet; the standard library's smallest modules alone are imported."""

from __future__ import annotations

import os
import signal


def end_at_once(name: str) -> None:
    """Have Ctrl-C end this process with one line, instead of a traceback of imports, until `raise_again`.

    (A `KeyboardInterrupt` in a callback of compiled code, as while pydantic compiles a pattern, would be ignored.)
    Without a name the line is left out. A process that ignores Ctrl-C, as under nohup, still does; an earlier name
    stays.
    """

    def end(number: int, frame: object) -> None:
        os.write(2, f"{name}: interrupted\n".encode() if name else b"")
        os._exit(128 + number)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # `preflight.status.shown` blocks it


def raise_again() -> None:
    """Have Ctrl-C raise `KeyboardInterrupt` again, so that what was begun is cleaned up."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
