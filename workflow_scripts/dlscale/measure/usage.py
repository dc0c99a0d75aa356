"""What a measurement uses of the machine: processor time of its own processes and of others, bytes from disks."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

from dlscale.measure import processes
from dlscale.measure.records import Usage
from dlscale.parallel.world import World


class Meter:
    """Counts from its making on what this process, its descendants, and all programs on their cores use."""

    def __init__(self) -> None:
        self._cores, self._own, self._start = core_seconds(), processes.used(os.getpid()), time.perf_counter()

    def usage(self, world: World) -> Usage:
        """Return what all ranks of the first one's node have used since; all ranks call it."""
        seconds = time.perf_counter() - self._start
        now, cores = processes.used(os.getpid()), core_seconds()
        # What a daemon took over is gone from the tree with all that it used before.
        cpu = max(0.0, now.cpu_seconds - self._own.cpu_seconds)
        read = max(0, now.read_bytes - self._own.read_bytes)
        machine = Path("/proc/sys/kernel/random/boot_id").read_text()  # which containers on it share
        ranks = world.gather((machine, os.sched_getaffinity(0), cpu, read))
        here = [rank for rank in ranks if rank[0] == ranks[0][0]]
        allowed = set().union(*(rank[1] for rank in here))
        return Usage(
            seconds=seconds,
            cores=len(allowed),
            cpu_seconds=sum(rank[2] for rank in here),
            cores_cpu_seconds=sum(max(0.0, cores[core] - self._cores[core]) for core in allowed if core < len(cores)),
            read_bytes=sum(rank[3] for rank in here),
        )


def core_seconds() -> list[float]:
    """Return the processor time that all programs have used of each core of the machine since it started, s."""
    times = psutil.cpu_times(percpu=True)
    return [each.user + each.nice + each.system + each.irq + each.softirq for each in times]
