"""Overhead of `dlscale measure`: steps of 5 ms of a program, timed alternately with and without the hook."""

from __future__ import annotations

import importlib
import itertools
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, dataloader

from bench.measure import Options, Row, in_turns
from bench.training import one_thread
from bench.watching import cpu_seconds, sampling
from dlscale.core.telemetry import sampled
from dlscale.extensions.programs.hook import sitecustomize
from dlscale.extensions.programs.hook.sitecustomize import Watcher
from dlscale.extensions.programs.running import watched
from dlscale.extensions.programs.timed import FOLDER

#: Minimum speed relative to steps without the hook, also with telemetry.
MEASURED = 0.99

#: Samples per step; warm-up steps per turn, needed after the hook is added or removed; timed steps per turn.
BATCH, WARM, STEPS = 160, 4, 4

#: Options of `dlscale measure` with a cost to measure.
FEATURES = ("--loader", "--hang-after=300", "--live")

#: Program with the same steps, which prints its speed, samples per second of processor time of all its threads.
PROGRAM = f"""
import itertools, sys, time, torch
from torch import nn
torch.set_num_threads(1)
sizes = [256, 512, 512, 8]
layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
model = nn.Sequential(*layers[:-1])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
steps = int(sys.argv[1])
samples = torch.utils.data.TensorDataset(torch.randn((steps + 10) * {BATCH}, 256))
for step, (x,) in enumerate(torch.utils.data.DataLoader(samples, batch_size={BATCH})):
    if step == 10:
        start = time.process_time()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
print("speed", steps * {BATCH} / (time.process_time() - start))
"""

#: Module `torch.optim.optimizer`, imported by name because PyTorch hides it behind an object of the same name.
OPTIMIZER = importlib.import_module("torch.optim.optimizer")
ITERATOR: Any = dataloader._BaseDataLoaderIter


def outside(options: Options) -> list[Row]:
    """Time turns of a few steps with and without the hook.

    The median over the turns ignores turns that other programs disturb, and turns in which the hook writes its line,
    once a second. The measured time of the hook's own code includes this writing. All times are processor times of the
    program's thread, which also runs the hook. The second row also subtracts telemetry's processor time, as if
    program and telemetry shared one core.
    """
    repetitions, turns = (2, 2) if options.quick else (options.repetitions, 300)
    file = options.folder / "telemetry.csv"
    rates: dict[bool, list[float]] = {True: [], False: []}
    extensions = mock.patch.object(sitecustomize, "HOOKS", watched(options.folder)["DLSCALE_HOOKS"])
    environment = mock.patch.dict(os.environ, {FOLDER: str(options.folder)})
    folder = mock.patch.object(sitecustomize, "STEPS", str(options.folder))
    with one_thread(), environment, folder, extensions, sampled(file, os.getpid(), 1, 0):
        program, process = Program(), sampling(file)
        before, start = cpu_seconds(process.pid), time.monotonic()
        for _ in range(repetitions):
            seconds: dict[bool, list[float]] = {True: [], False: []}
            for turn in range(turns):
                for hooked in (turn % 2 == 0, turn % 2 == 1):
                    seconds[hooked].append(program.run(hooked))
            for hooked, each in rates.items():
                each.append(STEPS * BATCH / statistics.median(seconds[hooked]))
        share = (cpu_seconds(process.pid) - before) / (time.monotonic() - start)
        own = program.own()
    counted = {"ms per step": 1e3 * BATCH / rates[False][0], "µs in the hook's own lines": 1e6 * own}
    counted |= {"telemetry's CPU s per second": share}
    reduced = [rate * (1 - share) for rate in rates[True]]
    return [
        Row("dlscale measure: the hook", "samples/s", rates[True], "without", rates[False], counted, MEASURED),
        Row("dlscale measure: hook and telemetry", "samples/s", reduced, "without", rates[False], counted, MEASURED),
        *features(options),
    ]


def features(options: Options) -> list[Row]:
    """Time a measured program with each of `FEATURES` and without, in turns."""
    script = options.folder / "program.py"
    script.write_text(PROGRAM)
    steps, turns = (20, 1) if options.quick else (1000, 2 * options.repetitions)
    calls = {option: partial(_measured, script, steps, option) for option in ("", *FEATURES)}
    used: dict[str, list[float]] = {option: [] for option in calls}

    def turn(option: str) -> float:
        speed, seconds = calls[option]()
        used[option].append(seconds)
        return speed

    found = in_turns(turns, {option: partial(turn, option) for option in calls})
    return [
        Row(
            f"dlscale measure {option}",
            "samples/s",
            found[option],
            "without the option",
            found[""],
            {
                "steps": steps,
                "more CPU s of all processes": statistics.median(used[option]) - statistics.median(used[""]),
            },
        )
        for option in FEATURES
    ]


def _measured(script: Path, steps: int, option: str) -> tuple[float, float]:
    """Measure the program; return its speed, and the processor seconds of dlscale, the program and their children."""
    words = [sys.executable, "-P", "-m", "dlscale", "measure", *filter(None, [option]), "--", sys.executable]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [*words, script.name, str(steps)], cwd=script.parent, check=True, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return float(re.findall(r"^speed (\S+)$", done.stdout, re.MULTILINE)[-1]), spent


class Program:
    """A training of small steps that can run with or without the hook."""

    def __init__(self) -> None:
        sizes = [256, 512, 512, 8]
        layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
        self._model = nn.Sequential(*layers[:-1])
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._batches, self._watcher = self._endless(), Watcher()
        self._plain = ITERATOR.__next__, ITERATOR._next_index
        self.run(False)
        self.run(True)

    def _endless(self) -> Iterator[list[torch.Tensor]]:
        samples = TensorDataset(torch.randn(1000 * BATCH, 256), torch.randn(1000 * BATCH, 8))
        while True:
            yield from DataLoader(samples, batch_size=BATCH)

    def own(self, count: int = 10_000) -> float:
        """Return the seconds that the hook takes to record and write a step, without the calls of its wrappers."""
        log, batch = self._watcher._log, next(self._batches)
        start = time.thread_time()
        for _ in range(count):
            log.batch(0, 0.0, self._watcher._timed.samples_of(batch, BATCH))
            log.step()
        return (time.thread_time() - start) / count

    def run(self, hooked: bool) -> float:
        """Return the processor seconds of `STEPS` steps with or without the hook."""
        if hooked:
            self._watcher._optimizers(OPTIMIZER)
            self._watcher._loaders(dataloader)
        start = 0.0
        for step, (x, y) in enumerate(itertools.islice(self._batches, WARM + STEPS)):
            self._optimizer.zero_grad()
            nn.functional.mse_loss(self._model(x), y).backward()
            self._optimizer.step()
            if step == WARM - 1:
                start = time.thread_time()
        seconds = time.thread_time() - start
        OPTIMIZER._global_optimizer_post_hooks.clear()
        ITERATOR.__next__, ITERATOR._next_index = self._plain
        return seconds
