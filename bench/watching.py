"""Overhead of telemetry: the same training steps on all cores, with the telemetry process running and stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import torch

from bench.cases import Case
from bench.measure import Options, Row, in_turns
from bench.training import CPU, UNET, VIT, counts, label, rate
from dlscale.core.telemetry import sampled


def watching(options: Options) -> list[Row]:
    """Measure U-Net and ViT in turns of 1.5 s, which exceed telemetry's sampling interval of 1 s."""
    return [_row(options, case) for case in (UNET, VIT)]


def _row(options: Options, case: Case) -> Row:
    step, batch, file = case.step(CPU), case.batch(CPU), options.folder / "telemetry.csv"
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    steps = partial(rate, step, batch)
    count = max(1, round((0.3 if options.quick else 1.5) * max(steps(3) for _ in range(3)) / case.batch_size))
    found, cost = watched_and_alone(partial(steps, count), 4 * options.repetitions, file)
    counted = {**counts(case, step.model, count), **cost}
    name = f"telemetry, {label(case)}"
    return Row(name, "samples/s", found["watched"], "without telemetry", found["alone"], counted, target=0.99)


def watched_and_alone(
    steps: Callable[[], float], turns: int, file: Path, gpus: int = 0
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Call `steps` alternately with telemetry running and stopped.

    Returns
    -------
    dict
        Values that `steps` returned, one per turn: `watched` and `alone`.
    dict
        Processor time and memory that telemetry used.
    """
    worked: list[tuple[float, float]] = []
    with sampled(file, os.getpid(), 1, gpus):
        sampler = sampling(file)

        def watched() -> float:
            sampler.send_signal(signal.SIGCONT)
            before, start = cpu_seconds(sampler.pid), time.monotonic()
            found = steps()
            worked.append((cpu_seconds(sampler.pid) - before, time.monotonic() - start))
            return found

        def alone() -> float:
            sampler.send_signal(signal.SIGSTOP)
            return steps()

        found = in_turns(turns, {"watched": watched, "alone": alone})
        sampler.send_signal(signal.SIGCONT)
        memory = sampler.memory_info()
    cost, seconds = map(sum, zip(*worked, strict=True))
    return found, {"CPU s per second": cost / seconds, "MB of its own": (memory.rss - memory.shared) / 1e6}


def cpu_seconds(pid: int) -> float:
    """Return a process's processor time, seconds.

    The resolution is 0.01 s without `schedstat`, which some containers lack.
    """
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except OSError:
        times = psutil.Process(pid).cpu_times()
        return times.user + times.system


def sampling(file: Path) -> psutil.Process:
    """Wait until `file` has content; return the process that writes the file."""
    while not file.stat().st_size:
        time.sleep(0.01)
    return next(p for p in psutil.Process().children() if "dlscale.measure.telemetry" in p.cmdline())
