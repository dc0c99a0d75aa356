"""The log of a stage: what this process and its children print. A training goes on in that of an earlier try."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import TextIO

from dlscale.core.files import explained

#: Where this process logs to.
_log: Path | None = None


def redirect(log: Path) -> TextIO:
    """Send everything this process and its children print to a new file `log`; return the terminal for a last word."""
    global _log
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.is_file():  # no pipe or terminal
            log.unlink()  # and is not emptied: its content may be what `go_on` keeps
        # Appending, so that what is written after `go_on` has no hole before it.
        file = open(log, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - it stays open
    except OSError as error:
        raise explained(error, log) from error
    _log = log
    terminal = os.fdopen(os.dup(2), "w", buffering=1)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    return terminal


def go_on(kept: Path, resumed: bool) -> None:
    """Keep the log of this process under a second name, `kept`, too: Snakemake removes a job's log before each try.

    `resumed`: what an earlier process kept there comes first. Where that cannot be, as without hard links, the log says
    so.
    """
    if not (_log and _log.is_file()):
        return
    try:
        if not resumed:
            kept.unlink(missing_ok=True)  # of another training
        elif kept.exists():
            _put_first(kept, _log)
        name = kept.with_name(f".{kept.name}.part")
        name.unlink(missing_ok=True)  # of a process that was killed here
        os.link(_log, name)
        name.replace(kept)
    except OSError as error:
        logging.info("this log is not kept for a later try: %s", error)


def _put_first(earlier: Path, log: Path) -> None:
    """Put the content of one file before that of another, which stays the same file: others write to it."""
    own = log.read_bytes()
    with log.open("r+b") as file, earlier.open("rb") as before:
        file.truncate()
        shutil.copyfileobj(before, file)
        file.write(own)
