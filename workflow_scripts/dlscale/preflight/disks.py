"""The disks: space, quotas, files about to be removed, and the file server's clock."""

from __future__ import annotations

import contextlib
import datetime as dt
import getpass
import itertools
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from dlscale.core.text import size
from dlscale.preflight.probe import AbsentError, Finding, NoAnswerError, said

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
    nodes = os.statvfs(folder)
    return space(folder, *shutil.disk_usage(folder)[::2], nodes.f_favail, nodes.f_files)


def space(folder: Path, total: int, free: int, inodes_free: int = 0, inodes: int = 0) -> Finding:
    """Judge bytes and inodes of a file system; one without a fixed number of inodes has 0 of them."""
    text = f"{size(free, ' ')} of {size(total, ' ')} free at {folder}"
    remedy = "free some, or choose a larger place for `results`"
    if free < LEAST:
        return Finding("space", "FAIL", text, remedy)
    if inodes and inodes_free < inodes / 100:
        return Finding("space", "warn", f"{text}, but {inodes_free} of {inodes} inodes", "remove small files")
    return Finding("space", "warn" if free < LITTLE or free < total / 10 else "ok", text, remedy)


def probe_quota(results: Path) -> Finding:
    """Ask what the site allows the user: by `showquota` where it is, or else Lustre."""
    if shutil.which("showquota"):
        return quota(showquota(said(["showquota"])))
    folder = _existing(results)
    try:
        return quota(lustre(said(["lfs", "quota", "-q", "-u", getpass.getuser(), str(folder)])))
    except AbsentError:
        return Finding("quota", "skip", "neither showquota nor lfs is here")
    except NoAnswerError:
        return Finding("quota", "skip", f"{folder} is on no Lustre file system")


def showquota(text: str) -> dict[str, float]:
    """Return the greatest percentage in use by file system, from NERSC's table: a row each, in cells between bars."""
    greatest = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip(" |").split("|")]
        shares = [float(cell.rstrip("%")) for cell in cells[1:] if re.fullmatch(r"[\d.]+ ?%", cell)]
        if shares:
            greatest[cells[0]] = max(shares)
    return greatest


def lustre(text: str) -> dict[str, float]:
    """Return the greater percentage in use, of bytes and files, from `lfs quota -q`; a long path has its own line.

    Columns: file system, kB used (a star: over it), quota, limit, grace, files used, quota, limit, grace.
    """
    words = text.replace("*", "").split()
    shares = []
    for used, soft, hard in ((1, 2, 3), (5, 6, 7)):
        allowed = float(words[soft]) or float(words[hard])
        if allowed:
            shares.append(100 * float(words[used]) / allowed)
    return {words[0]: max(shares)} if shares else {}


def quota(shares: Mapping[str, float]) -> Finding:
    """Judge percentages in use by file system."""
    if not shares:
        return Finding("quota", "skip", "there is none")
    text = ", ".join(f"{name} {share:.0f} %" for name, share in shares.items())
    full = max(shares.values())
    return Finding("quota", "FAIL" if full >= 100 else "warn" if full >= 90 else "ok", text, "remove files there")


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


def probe_clock(folder: Path) -> Finding:
    """Compare this machine's clock with the file server's, which sets the times that the workflow compares."""
    folder = _existing(folder)
    before = time.time()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"dlscale")
            file.flush()
            written, after = os.fstat(file.fileno()).st_mtime, time.time()
    except OSError as error:
        # A container's working folder need not be for writing.
        remedy = "choose another place for `results`, or change its mode"
        return Finding("clock", "warn", f"{folder}: cannot write here ({error.strerror})", remedy)
    return clock(written - after if written > after else min(written - before, 0.0))


def clock(seconds: float) -> Finding:
    """Judge by how many seconds the file server is ahead."""
    text = f"the file server's is {abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'} this machine's"
    remedy = "times of files decide what runs again: have the machine's clock set (NTP)"
    return Finding("clock", "warn" if abs(seconds) > 5 else "ok", text, remedy)
