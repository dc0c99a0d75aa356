"""Measured resource use equals the processes' own figures; the use of other programs is not counted."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from dlscale.measure import processes
from dlscale.measure.processes import Meter
from dlscale.parallel.world import World

#: Program that uses the given seconds of processor time and prints its own processor time.
BURN = (
    "import sys, time\nwhile time.process_time() < float(sys.argv[1]): pass\nprint(time.process_time(), flush=True)\n"
)
#: Program that first runs BURN in a child, then does the same itself; it prints the sum of both times.
BURN_TWICE = (
    "import subprocess, sys, time\n"
    f"child = subprocess.run([sys.executable, '-c', {BURN!r}, sys.argv[1]], capture_output=True, text=True)\n"
    "while time.process_time() < float(sys.argv[1]): pass\n"
    "print(time.process_time() + float(child.stdout), flush=True)\n"
)
#: Tolerance, s. Linux counts processor time in steps of 0.01 s, rounded down per process. The start of Python is not
#: measured.
TOLERANCE = 0.08


def python(code: str, *words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-S", "-c", code, *map(str, words)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str]) -> float:
    return float(process.stdout.readline())


def end(process: subprocess.Popen[str]) -> None:
    process.communicate()


def test_processor_time_includes_live_and_ended_children() -> None:
    meter, own = Meter(), time.process_time()
    alive = python(BURN + "sys.stdin.read()", 0.2)
    ended = python(BURN_TWICE, 0.15)
    expected = answer(alive) + answer(ended)
    end(ended)
    found = meter.usage(World())
    assert found.cpu_seconds == pytest.approx(expected + time.process_time() - own, abs=TOLERANCE)
    assert found.cores_cpu_seconds >= found.cpu_seconds - TOLERANCE
    assert found.cores == len(os.sched_getaffinity(0))
    before = Meter()
    end(alive)
    assert before.usage(World()).cpu_seconds < TOLERANCE, "earlier use must not count again when a child ends"


def test_a_neighbours_load_is_not_counted_for_the_run() -> None:
    meter, own, machine = Meter(), time.process_time(), psutil.cpu_times()
    # The shell ends at once, so BURN, its child, does not descend from this process.
    shell = ["sh", "-c", '"$0" -S -c "$1" 0.3 & exec true', sys.executable, BURN]
    with subprocess.Popen(shell, stdout=subprocess.PIPE, text=True) as child:
        burnt = answer(child)
    found = meter.usage(World())
    assert found.cpu_seconds < time.process_time() - own + TOLERANCE
    assert found.cores_cpu_seconds > burnt - TOLERANCE
    now = psutil.cpu_times()
    assert found.cores_cpu_seconds <= sum(now) - sum(machine) - (now.idle - machine.idle) + TOLERANCE


def on_disk(folder: Path) -> bool:
    """Return whether reading a file in the folder reads from a disk, once the file was dropped from the cache."""
    path = folder / "probe"
    path.write_bytes(os.urandom(1 << 16))
    drop(path)
    before = processes.used(os.getpid()).read_bytes
    path.read_bytes()
    return processes.used(os.getpid()).read_bytes > before


def drop(path: Path) -> None:
    with path.open("r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


READ = "import sys\nfile = open(sys.argv[1], 'rb')\nwhile file.read(1 << 20): pass\nprint(1)\n"


def test_bytes_from_disks_and_from_memory_are_distinguished(tmp_path: Path) -> None:
    if not on_disk(tmp_path):
        pytest.skip("Linux counts no reads of the disk with the tests' folder")
    size = 6 << 20
    path = tmp_path / "file"
    path.write_bytes(os.urandom(size))
    drop(path)
    before, meter = processes.used(os.getpid()), Meter()
    end(python(READ, path))  # this child has ended before the measurement ends
    cold = meter.usage(World()).read_bytes
    assert cold is not None and size <= cold < 1.5 * size + (1 << 20)
    meter = Meter()
    end(python(READ, path))
    assert meter.usage(World()).read_bytes < size / 4  # type: ignore[operator]
    after = processes.used(os.getpid())
    assert 2 * size <= after.read_chars - before.read_chars < 2.2 * size + (2 << 20)
    assert after.reads - before.reads >= 12  # the meter itself reads, too
    drop(path)
    meter = Meter()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) >= 0  # page faults instead of read calls
    assert (meter.usage(World()).read_bytes or 0) >= size


def test_memory_is_the_sum_over_all_processes() -> None:
    child = python("block = bytearray(b'x') * (64 << 20)\nprint(1, flush=True)\n__import__('sys').stdin.read()")
    answer(child)
    own = processes.used(os.getpid(), without=[child.pid]).rss
    assert processes.used(os.getpid()).rss > own + (60 << 20)
    end(child)
    with pytest.raises(psutil.NoSuchProcess):
        processes.used(child.pid)


class Ranks(World):
    """A world with simulated other ranks, whose values are derived from this rank's values."""

    def gather(self, value: Any) -> Any:
        node, _, cpu, read = value
        return [value, (node, {1000}, cpu + 1, read + 10), ("another node", {5}, 100.0, 1000)]


def test_ranks_of_one_node_are_added_up() -> None:
    meter = Meter()
    alone, three = meter.usage(World()), meter.usage(Ranks())
    assert three.cores == alone.cores + 1, "a core that two ranks may use must count once"
    assert three.cpu_seconds == pytest.approx(2 * alone.cpu_seconds + 1, abs=TOLERANCE)
    assert three.read_bytes == pytest.approx(2 * (alone.read_bytes or 0) + 10, abs=1 << 16)
