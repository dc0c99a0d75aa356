"""What a measurement uses of the machine: processor time of its own processes and of others, bytes from disks."""

from __future__ import annotations

import os
import time
from pathlib import Path

from dlscale.measure import processes
from dlscale.measure.records import Usage
from dlscale.parallel.world import World

_TICKS = os.sysconf("SC_CLK_TCK")


class Meter:
    """Counts from its making on what this process, its descendants, and all programs on their cores use."""

    def __init__(self) -> None:
        self._cores, self._own, self._start = core_seconds(), processes.used(os.getpid()), time.perf_counter()

    def usage(self, world: World) -> Usage:
        """Return what all ranks of the first one's node have used since; all ranks call it."""
        seconds = time.perf_counter() - self._start
        now, cores = processes.used(os.getpid()), core_seconds()
        own = (
            _node(),
            os.sched_getaffinity(0),
            # What a daemon took over is gone from the tree with all that it used before.
            max(0.0, now.cpu_seconds - self._own.cpu_seconds),
            max(0, now.read_bytes - self._own.read_bytes),
        )
        ranks = world.gather(own)
        _, allowed, cpu, read = zip(*(rank for rank in ranks if rank[0] == ranks[0][0]), strict=True)
        theirs = set().union(*allowed)
        return Usage(
            seconds=seconds,
            cores=len(theirs),
            cpu_seconds=sum(cpu),
            cores_cpu_seconds=sum(max(0.0, cores[core] - self._cores.get(core, 0.0)) for core in theirs & cores.keys()),
            read_bytes=sum(read),
        )


def core_seconds(path: Path = Path("/proc/stat")) -> dict[int, float]:
    """Return the processor time that all programs have used of each core of the machine since it started, s.

    What a hypervisor gave to others (steal) is none of it; a guest's time is the user's already. Cores that are
    switched off are missing, which is why the lines' own numbers are read.
    """
    found = {}
    for line in path.read_text().splitlines():
        name, *ticks = line.split()
        if name.startswith("cpu") and name != "cpu":
            user, nice, system, _idle, _iowait, irq, softirq = map(int, ticks[:7])
            found[int(name.removeprefix("cpu"))] = (user + nice + system + irq + softirq) / _TICKS
    return found


def _node() -> str:
    """Return what tells this machine from others, and containers on it do not."""
    return Path("/proc/sys/kernel/random/boot_id").read_text()
