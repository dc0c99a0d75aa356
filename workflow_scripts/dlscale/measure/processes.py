"""Resource use of a tree of processes. This module imports little, so that the telemetry process stays small."""

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
    """Resource use of a tree of processes since its start."""

    cpu_seconds: float
    #: Bytes read by system calls, also from the page cache and pipes, but not from mapped files.
    read_chars: int
    reads: int  #: Number of read system calls.
    read_bytes: int  #: Bytes fetched from disks, by system calls or by access to mapped files.
    write_chars: int
    rss: int  #: Bytes in memory now, not since the start; shared memory counts once per process.


def used(root: int, without: Collection[int] = (), tries: int = 5) -> Used:
    """Return the resource use of `root` and its descendants; raise `psutil.NoSuchProcess` if `root` does not exist.

    Processes in `without` do not count. If a process ends while counters are read, Linux adds its counters to its
    parent's. All counters are then read again, up to `tries` times in total.
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
    except psutil.AccessDenied:  # another user's process, such as Slurm's, which starts the ranks
        return Used(seconds, 0, 0, 0, 0, rss)
    return Used(seconds, io.read_chars, io.read_count, io.read_bytes, io.write_chars, rss)


def find_snakemake(process: int) -> int | None:
    """Return the outermost Snakemake process among the ancestors of `process`; None without Snakemake."""
    named = os.environ.get(SNAKEMAKES, "").split()
    above = [parent.pid for parent in psutil.Process(process).parents() if str(parent.pid) in named]
    return above[-1] if above else None


def ranks_seen(root: int) -> int:
    """Count this container's ranks: `root`'s children with the command line of this process's parent."""
    command = psutil.Process(os.getppid()).cmdline()
    return sum(
        child.cmdline() == command
        for child in psutil.Process(root).children()
        if child.status() != psutil.STATUS_ZOMBIE  # a zombie has no command line
    )


class Meter:
    """Counter of the resource use of this process and its descendants, and of all programs on the same logical CPUs."""

    def __init__(self) -> None:
        self._cores, self._own = core_seconds(), used(os.getpid())
        self._begin, self._start = time.time(), time.perf_counter()

    def usage(self, world: World) -> Usage:
        """Return the resource use on rank 0's node since the counter's creation; call on all ranks."""
        from dlscale.measure.records import Usage

        seconds = time.perf_counter() - self._start
        now, cores = used(os.getpid()), core_seconds()
        # If a daemon adopts a process, the adopted process's past use leaves the tree, so the sums may shrink.
        cpu = max(0.0, now.cpu_seconds - self._own.cpu_seconds)
        read = max(0, now.read_bytes - self._own.read_bytes)
        machine = Path("/proc/sys/kernel/random/boot_id").read_text()  # equal in all containers of a machine
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
    """Return the processor time of all programs on each logical CPU since the machine started, seconds."""
    return [each.user + each.nice + each.system + each.irq + each.softirq for each in psutil.cpu_times(percpu=True)]
