"""Telemetry of a run: a small process beside the stage that notes once a second what the node does.

`python -m dlscale.measure.telemetry --pid PID` writes `dlscale.core.telemetry`'s rows to its standard output until its
standard input ends or gets a byte, or its parent is gone. The stage knows nothing of it but its begin and its end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

import psutil

from dlscale.core import telemetry
from dlscale.core.telemetry import Sample
from dlscale.measure import processes
from dlscale.measure.gpus import Gpus

SECONDS = 1.0  #: Between two samples.
LEAST = 0.1  #: Of the last one: Linux counts processor time in steps of 0.01 s.


class Node:
    """What has been used on this node since the last look."""

    def __init__(self, root: int, ranks: int, gpus: int) -> None:
        self._root, self._ranks, self._cores = root, ranks, psutil.cpu_count() or 1
        self._gpus, self._rapl = Gpus(gpus), Rapl()
        self._time = time.monotonic()
        self._machine, self._network, self._run = psutil.cpu_times(), _network(), self._used()

    @property
    def gpus(self) -> int:
        """Number of GPUs that are looked at."""
        return len(self._gpus)

    def sample(self) -> Sample:
        """Return what happened since the last call, or the making of this."""
        now, machine, network, run = time.monotonic(), psutil.cpu_times(), _network(), self._used()
        seconds = max(now - self._time, 1e-6)
        capacity = seconds * self._cores
        spent = {name: getattr(machine, name) - getattr(self._machine, name) for name in machine._fields}
        # A guest's time is the user's already.
        cpu = sum(spent[name] for name in ("user", "nice", "system", "irq", "softirq")) / capacity
        # What a daemon took over is gone from the tree with all that it used before; so growth may be negative.
        grown = [max(0.0, after - before) for after, before in zip(run, self._run, strict=True)]
        used = processes.Used(*grown)  # type: ignore[arg-type]
        cpu_run = used.cpu_seconds / capacity
        seen = self._ranks == 1 or processes.ranks_seen(self._root, os.getppid()) >= self._ranks
        received, sent = (after - before for after, before in zip(network, self._network, strict=True))
        self._time, self._machine, self._network, self._run = now, machine, network, run
        return Sample(
            time=time.time(),
            seconds=seconds,
            cores=self._cores,
            cpu=cpu,
            cpu_run=cpu_run,
            cpu_others=max(0.0, cpu - cpu_run) if seen else None,
            cpu_stolen=spent.get("steal", 0.0) / capacity,
            rss_bytes=run.rss,
            swap_bytes=run.swap,
            read_bytes_per_second=used.read_chars / seconds,
            reads_per_second=used.reads / seconds,
            disk_read_bytes_per_second=used.read_bytes / seconds,
            write_bytes_per_second=used.write_chars / seconds,
            disk_write_bytes_per_second=used.write_bytes / seconds,
            received_bytes_per_second=max(0, received) / seconds,
            sent_bytes_per_second=max(0, sent) / seconds,
            cpu_joules=self._rapl.joules(),
            gpus=self._gpus.sample(),
        )

    def _used(self) -> processes.Used:
        return processes.used(self._root, without=(os.getpid(),))


def _network() -> tuple[int, int]:
    """Return the bytes that the machine's network devices received and sent, loopback left out."""
    counters = [counter for name, counter in psutil.net_io_counters(pernic=True).items() if name != "lo"]
    return sum(counter.bytes_recv for counter in counters), sum(counter.bytes_sent for counter in counters)


class Rapl:
    """The energy of the machine's processors, from their own counters (Running Average Power Limit), which wrap.

    Linux names them `intel-rapl` for AMD's as well, and since 2020 lets root alone read them (CVE-2020-8694).
    """

    def __init__(self, folder: Path = Path("/sys/class/powercap")) -> None:
        self._zones: dict[Path, int] = {}
        self._last: dict[Path, int] = {}
        self._microjoules = 0
        with contextlib.suppress(OSError, ValueError):
            for zone in sorted(folder.glob("intel-rapl:*")):
                # Others are a part of a package, or, as `psys`, more than it.
                if (zone / "name").read_text().startswith("package"):
                    self._last[zone] = int((zone / "energy_uj").read_text())
                    self._zones[zone] = int((zone / "max_energy_range_uj").read_text())

    def joules(self) -> float | None:
        """Return what was used since the making of this, J; None where it cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            for zone, limit in self._zones.items():
                now = int((zone / "energy_uj").read_text())
                self._microjoules += (now - self._last[zone]) % (limit + 1)
                self._last[zone] = now
        return self._microjoules / 1e6 if self._zones else None


def main() -> None:
    """Write rows until the stage ends. Signals to all processes of a job are the stage's: it has yet to end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pid", type=int, required=True, help="the process that with its descendants is the run")
    parser.add_argument("--ranks", type=int, default=1, help="processes of the run on this node")
    parser.add_argument("--gpus", type=int, default=0, help="CUDA devices to look at")
    args = parser.parse_args()
    try:
        _watch(args.pid, args.ranks, args.gpus)
    except Exception as error:  # a stage goes on without it
        print(f"telemetry ended: {type(error).__name__}: {error}", file=sys.stderr)


def _watch(root: int, ranks: int, gpus: int) -> None:
    parent, start = os.getppid(), time.monotonic()
    node = Node(root, ranks, gpus)
    _write(telemetry.header(node.gpus))
    ended = False
    while not ended:
        wait = SECONDS - (time.monotonic() - start) % SECONDS
        if ended := bool(select.select([0], [], [], wait)[0]):
            time.sleep(max(0.0, LEAST - (time.monotonic() - start) % SECONDS))
        if os.getppid() != parent:  # killed, and its own children may hold the other end of the pipe
            return
        _write(telemetry.line(node.sample()))


def _write(text: str) -> None:
    """Write a line in one go: whatever ends this process leaves whole lines."""
    os.write(1, text.encode())


if __name__ == "__main__":
    main()
