"""Handling of Ctrl-C.

This module only imports small standard modules, since it must work before any slow import.
"""

from __future__ import annotations

import os
import signal

#: Whether a signal has raised `KeyboardInterrupt`.
seen = False


def end_at_once(name: str) -> None:
    """Let Ctrl-C end this process with one line and no traceback, until `raise_again` is called.

    Imports need this, because compiled code may ignore a `KeyboardInterrupt` in a callback, for example while pydantic
    compiles a pattern. If the name is empty, the line is not printed. A process that ignores Ctrl-C, such as a script's
    background process, continues to ignore it. A second call does not change the name.
    """

    def end(number: int, frame: object) -> None:
        os.write(2, f"{name}: interrupted\n".encode() if name else b"")
        os._exit(128 + number)

    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _interrupt):
        signal.signal(signal.SIGINT, end)


def raise_again(*further: int) -> None:
    """Let Ctrl-C and the signals `further` raise `KeyboardInterrupt` again.

    The exception lets a stage clean up its work in progress. Ignored signals, such as SIGHUP under nohup, stay ignored.
    """
    for number in (signal.SIGINT, *further):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: object) -> None:
    global seen
    seen = True
    raise KeyboardInterrupt
