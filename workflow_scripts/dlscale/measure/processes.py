"""Use of the machine by a tree of processes; it imports little, for the telemetry's process is to be small."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from dlscale.core.machine import SNAKEMAKES

if TYPE_CHECKING:
    from dlscale.measure.records import Usage
    from dlscale.parallel.world import World


class Used(NamedTuple):
    """Use of a tree of processes since it began."""

    cpu_seconds: float
    #: Bytes that system calls asked to read, be it of files in memory or of pipes; not of mapped files.
    read_chars: int
    reads: int  #: System calls that read.
    read_bytes: int  #: Fetched from disks, be it by a read or by touching a mapped file.
    write_chars: int
    rss: int  #: Bytes in memory now; what processes share counts in each.


def used(root: int, without: Collection[int] = (), tries: int = 5) -> Used:
    """Return the use of the tree of `root`; `psutil.NoSuchProcess` if there is no such process.

    A child that ended is in its parent's counters, once it was waited for; while one ends, all is read again.
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


def find_snakemake(process: int) -> int | None:
    """Return the outermost Snakemake process above `process` that read the rules; None if there is none."""
    named = os.environ.get(SNAKEMAKES, "").split()
    above = [parent.pid for parent in psutil.Process(process).parents() if str(parent.pid) in named]
    return above[-1] if above else None


def ranks_seen(root: int) -> int:
    """Return the number of `root`'s children that run the command of this process's parent: ranks in this container."""
    command = psutil.Process(os.getppid()).cmdline()
    return sum(
        child.cmdline() == command
        for child in psutil.Process(root).children()
        if child.status() != psutil.STATUS_ZOMBIE  # which has no command any more
    )


class Meter:
    """Counter of the use of this process, its descendants, and all programs on their cores."""

    def __init__(self) -> None:
        self._cores, self._own = core_seconds(), used(os.getpid())
        self._begin, self._start = time.time(), time.perf_counter()

    def usage(self, world: World) -> Usage:
        """Return the use since the start by all ranks of the first one's node; all ranks call it."""
        from dlscale.measure.records import Usage

        seconds = time.perf_counter() - self._start
        now, cores = used(os.getpid()), core_seconds()
        # What a daemon took over is gone from the tree with all that it used before.
        cpu = max(0.0, now.cpu_seconds - self._own.cpu_seconds)
        read = max(0, now.read_bytes - self._own.read_bytes)
        machine = Path("/proc/sys/kernel/random/boot_id").read_text()  # which containers on it share
        ranks = world.gather((machine, os.sched_getaffinity(0), cpu, read))
        here = [rank for rank in ranks if rank[0] == ranks[0][0]]
        allowed = set().union(*(rank[1] for rank in here))
        return Usage(
            begin=self._begin,
            seconds=seconds,
            cores=len(allowed),
            cpu_seconds=sum(rank[2] for rank in here),
            cores_cpu_seconds=sum(max(0.0, cores[core] - self._cores[core]) for core in allowed if core < len(cores)),
            read_bytes=sum(rank[3] for rank in here),
        )


def core_seconds() -> list[float]:
    """Return the processor time that all programs have used of each core since the machine started, s."""
    times = psutil.cpu_times(percpu=True)
    return [each.user + each.nice + each.system + each.irq + each.softirq for each in times]
