"""Time the steps of any training loop: `for batch in timed(loader): ...`, and `dlscale measure -- python train.py`.

One file for Python 3.8 and later, without dependencies: import it as `dlscale.timed`, or copy it. Where nobody measures
it passes batches on, and does nothing else.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

#: Variable that names the folder into which processes that are measured write their steps.
FOLDER = "DLSCALE_STEPS"

#: Lines, and seconds, after which they are written.
LINES, SECONDS = 4096, 0.1

#: Lines of a process after which not all are noted: by then so many seconds of lines are followed by a gap of this
#: share of the time so far, so that a file grows with the logarithm of the time.
MOST, NOTED, GAP = 100_000, 1.0, 0.01


class Log:
    """What a process does, in the file `WAY.HOST.PID`: batches that it got, and steps that it ended.

    The first line relates the process's clock to that of the day, and has its rank. Times are seconds. In a long run
    there are gaps, each with a line of its own.
    """

    def __init__(self, way: str) -> None:
        self._way, self._process, self._count, self._on = way, 0, 0, FOLDER in os.environ
        self._lines: list[str] = []
        self._begin = self._written = self._since = self._until = 0.0

    def batch(self, iterator: int, wait: float, samples: int) -> None:
        """Note that an iterator delivered a batch of so many samples (0: not known) now, after a wait."""
        now = time.perf_counter()
        self._note(now, f"b {iterator} {now:.6f} {wait:.6f} {samples}\n")

    def loop(self) -> None:
        """Note that a loop begins now: what was before is no part of its first step."""
        now = time.perf_counter()
        self._note(now, f"l {now:.6f}\n")

    def gradients(self, size: int) -> None:
        """Note the bytes of the gradients that an optimiser follows."""
        self._note(time.perf_counter(), f"p {size}\n")

    def step(self, part: int = 0) -> None:
        """Note that a step, or one optimiser's part of it, has ended now, and the time that the process computed."""
        now = time.perf_counter()
        self._note(now, f"s {now:.6f} {time.process_time():.3f} {part}\n")

    def _note(self, now: float, line: str) -> None:
        if not self._on:
            return
        if self._process != os.getpid():  # at first, and in a process that was forked
            self._open(now)
        if now < self._until:
            return
        if self._until:
            self._lines.append(f"g {self._written:.6f} {now:.6f}\n")
            self._until, self._written, self._since = 0.0, now, now
        self._lines.append(line)
        if len(self._lines) >= LINES or now - self._written >= SECONDS:
            self._count += len(self._lines)
            self._write()
            if self._count > MOST and now - self._since >= NOTED:
                self._written, self._until = now, now + GAP * (now - self._begin)

    def _open(self, now: float) -> None:
        self._process, self._begin, self._written, self._since = os.getpid(), now, now, now
        self._until, self._count = 0.0, 0
        self._file = Path(os.environ[FOLDER], f"{self._way}.{os.uname().nodename}.{self._process}")
        self._lines = [f"begin {time.time():.6f} {time.perf_counter():.6f} {rank()}\n"]
        atexit.register(self._write)
        if util := sys.modules.get("multiprocessing.util"):  # whose children, that are forked, end without `atexit`
            util.Finalize(None, self._write, exitpriority=0)

    def _write(self) -> None:
        if self._process == os.getpid():
            lines, self._lines, self._written = self._lines, [], time.perf_counter()
            # Opened each time: a program that becomes a daemon closes all files, and opens its own by their numbers.
            try:
                with self._file.open("a") as file:
                    file.write("".join(lines))
            except OSError:  # a full disk, or a folder that is gone: the program goes on
                self._until = math.inf


def rank() -> int:
    """Return this process's number among those that train together, as torchrun, Slurm and MPI give it."""
    names = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    return int(next((os.environ[name] for name in names if os.environ.get(name, "").isdecimal()), "0"))


#: That of all loops of a process.
LOG = Log("timed")


def samples_of(batch: Any) -> int:
    """Return the number of samples of a batch: the first axis of the first array in it; 0 if there is none."""
    parts = [batch]
    for _ in range(32):  # of a batch of many texts no more are looked at
        if not parts:
            return 0
        part = parts.pop(0)
        shape = getattr(part, "shape", None)
        if shape is not None and len(shape):
            return int(shape[0])
        if callable(getattr(part, "values", None)):
            part = list(part.values())
        if isinstance(part, (list, tuple)):
            parts = [*part[:32], *parts]
    return 0


_ended = 0.0


def begun(samples: int = 0) -> None:
    """Note that a step of so many samples begins, where a callback says so; its batch was waited for since `ended`."""
    now = time.perf_counter()
    LOG.batch(0, now - _ended if _ended else 0.0, samples)


def ended() -> None:
    """Note that a step has ended, where a callback says so."""
    global _ended
    _ended = time.perf_counter()
    LOG.step()


def timed(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of a loader; each step lasts until the next batch is asked for."""
    if FOLDER not in os.environ:
        yield from loader
        return
    LOG.loop()
    batches = iter(loader)
    while True:
        begin = time.perf_counter()
        try:
            batch = next(batches)
        except StopIteration:
            return
        LOG.batch(0, time.perf_counter() - begin, samples_of(batch))
        yield batch
        LOG.step()
