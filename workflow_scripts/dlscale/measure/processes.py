"""What a process and all its descendants use; imports little, for the process that samples is to be small."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import NamedTuple

import psutil


class Used(NamedTuple):
    """What a tree of processes has used since it began, and what it holds."""

    cpu_seconds: float
    #: Bytes that system calls asked to read, be it of files in memory or of pipes; not of mapped files.
    read_chars: int
    reads: int  #: System calls that read.
    read_bytes: int  #: Fetched from disks, be it by a read or by touching a mapped file.
    write_chars: int
    rss: int  #: Bytes in memory now; what processes share counts in each.


def used(root: int, without: Collection[int] = (), tries: int = 5) -> Used:
    """Return what the tree of `root` has used; `psutil.NoSuchProcess` if there is no such process.

    What ended and was waited for is in its parent's counters. A child that ends meanwhile is counted in neither, and
    all is read again. Where some end all the time, the last try leaves them out.
    """
    parent = psutil.Process(root)
    found = []
    for process in [parent, *parent.children(recursive=True)]:
        if process.pid not in without:
            try:
                found.append(_used(process))
            except psutil.NoSuchProcess:
                if tries > 1:
                    return used(root, without, tries - 1)
    return Used(*map(sum, zip(*found, strict=True)))


def _used(process: psutil.Process) -> Used:
    times, rss = process.cpu_times(), process.memory_info().rss
    seconds = times.user + times.system + times.children_user + times.children_system
    try:
        io = process.io_counters()
    except psutil.AccessDenied:  # another user's, such as Slurm's process above the ranks
        return Used(seconds, 0, 0, 0, 0, rss)
    return Used(seconds, io.read_chars, io.read_count, io.read_bytes, io.write_chars, rss)


def ranks_seen(root: int) -> int:
    """Return how many children of `root` run the command of this process's parent: those in other containers do not."""
    command = psutil.Process(os.getppid()).cmdline()
    return sum(child.cmdline() == command for child in psutil.Process(root).children() if child.is_running())
