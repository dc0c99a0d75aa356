"""The log of a stage: what this process and its children print. A training goes on in that of an earlier try."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TextIO

from dlscale.core.files import explained

#: The log, if it was kept open behind what an earlier process wrote, and how many bytes that was.
_kept: tuple[Path, int] | None = None


def redirect(log: Path, keep: bool) -> TextIO:
    """Send everything this process and its children print to `log`; return the terminal for a last word.

    `keep`: behind what is there, until `begin_anew` is called; else what is there goes.
    """
    global _kept
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        # Appending, so that what is written after `begin_anew` has no hole before it.
        file = open(log, "a" if keep else "w", buffering=1, encoding="utf-8")  # noqa: SIM115 - it stays open
    except OSError as error:
        raise explained(error, log) from error
    _kept = (log, log.stat().st_size) if keep else None
    terminal = os.fdopen(os.dup(2), "w", buffering=1)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    return terminal


def begin_anew() -> None:
    """Drop what an earlier process wrote to the log: this one does not go on from there."""
    global _kept
    if _kept:
        path, earlier = _kept
        written = path.read_bytes()[earlier:]
        os.truncate(path, 0)
        with path.open("ab") as file:
            file.write(written)
    _kept = None
