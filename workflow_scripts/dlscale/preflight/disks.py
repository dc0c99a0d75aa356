"""The disks: space, quota, and files about to be removed."""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from dlscale.core.text import size
from dlscale.preflight.probe import Finding, said

#: Bytes free, below which nothing can run, and below which it is worth a word.
LEAST, LITTLE = 0.5e9, 20e9
#: Days before a file is removed from scratch that are worth a word.
PURGE_SOON = 7
#: Files looked at for their age: of a folder with more, these stand for all.
MANY = 20_000


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest above it that is there."""
    return next(path for path in [folder.absolute(), *folder.absolute().parents] if path.is_dir())


def probe_space(folder: Path) -> Finding:
    """Ask how much room there is where a folder is, or will be."""
    folder = _existing(folder)
    usage = shutil.disk_usage(folder)
    return space(folder, usage.total, usage.free)


def space(folder: Path, total: int, free: int) -> Finding:
    """Judge the bytes of a file system."""
    text = f"{size(free, ' ')} of {size(total, ' ')} free at {folder}"
    remedy = "free some, or choose a larger place for `results`"
    if free < LEAST:
        return Finding("space", "FAIL", text, remedy)
    return Finding("space", "warn" if free < LITTLE or free < total / 10 else "ok", text, remedy)


def probe_quota() -> Finding:
    """Ask NERSC's `showquota` for the user's shares in use."""
    return quota(said(["showquota"]))


def quota(text: str) -> Finding:
    """Judge a table of percentages in use: a row each file system, in cells between bars."""
    greatest = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip(" |").split("|")]
        shares = [float(cell.rstrip("%")) for cell in cells[1:] if re.fullmatch(r"[\d.]+ ?%", cell)]
        if shares:
            greatest[cells[0]] = max(shares)
    told = ", ".join(f"{name} {share:.0f} %" for name, share in greatest.items())
    full = max(greatest.values(), default=0.0)
    return Finding("quota", "FAIL" if full >= 100 else "warn" if full >= 90 else "ok", told, "remove files there")


def probe_purge(paths: Iterable[str], days: int) -> Finding:
    """Look for the file among these files and folders that was used least recently."""
    used = []
    for file in itertools.islice(_files(paths), MANY):
        with contextlib.suppress(OSError):
            status = Path(file).stat()
            # File systems that do not keep the time of the last reading have an old one there.
            used.append((max(status.st_atime, status.st_mtime), file))
    if not used:
        return Finding("purge", "skip", "no data yet")
    oldest, first = min(used)
    end = oldest + 86_400 * days
    text = f"{dt.date.fromtimestamp(end)}: {first} is the first to be removed, {days} days after it was last used"
    soon = end < time.time() + 86_400 * PURGE_SOON
    return Finding("purge", "warn" if soon else "ok", text, "copy what cannot be fetched or made again to a safe place")


def _files(paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        if Path(path).is_file():
            yield path
        for folder, _, names in os.walk(path):
            yield from (os.path.join(folder, name) for name in names)  # noqa: PTH118 - there may be many
