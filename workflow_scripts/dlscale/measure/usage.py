"""What a measurement uses of the machine: processor time of its own processes and of all, bytes from disks."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

from dlscale.core.records import Usage
from dlscale.measure import processes
from dlscale.parallel.world import World


class Meter:
    """Counts from its making on what this process, its descendants, and the whole machine use."""

    def __init__(self) -> None:
        self._waits = processes.waits(os.getpid())
        self._machine, self._own, self._start = machine_cpu_seconds(), processes.used(os.getpid()), time.perf_counter()

    def usage(self, world: World) -> Usage:
        """Return what all ranks of the first one's node have used since; all ranks call it."""
        seconds = time.perf_counter() - self._start
        now, machine = processes.used(os.getpid()), machine_cpu_seconds()
        waits, before = processes.waits(os.getpid()), self._waits or {}
        own = (
            _node(),
            os.sched_getaffinity(0),
            # What a daemon took over is gone from the tree with all that it used before.
            max(0.0, now.cpu_seconds - self._own.cpu_seconds),
            max(0, now.read_bytes - self._own.read_bytes),
            None if waits is None else sum(waited - before.get(thread, 0.0) for thread, waited in waits.items()),
        )
        ranks = world.gather(own)
        _, cores, cpu, read, waited = zip(*(rank for rank in ranks if rank[0] == ranks[0][0]), strict=True)
        return Usage(
            seconds=seconds,
            cores=len(set().union(*cores)),
            cpu_seconds=sum(cpu),
            machine_cpu_seconds=max(0.0, machine - self._machine),
            wait_seconds=None if None in waited else sum(waited),
            read_bytes=sum(read),
        )


def machine_cpu_seconds() -> float:
    """Return the processor time that all processes of the machine have used since it started, s.

    What a hypervisor gave to others (steal) is none of it; a guest's time is the user's already.
    """
    times = psutil.cpu_times()
    return sum(getattr(times, name) for name in ("user", "nice", "system", "irq", "softirq"))


def _node() -> str:
    """Return what tells this machine from others, and containers on it do not."""
    return Path("/proc/sys/kernel/random/boot_id").read_text()
