"""Time the steps of any training loop: `for batch in timed(loader): ...`, and `dlscale measure -- python train.py`.

One file for Python 3.8 and later, without dependencies: import it as `dlscale.timed`, or copy it. Where nobody measures
it passes batches on, and does nothing else.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

#: Variable that names the folder into which processes that are measured write their steps.
FOLDER = "DLSCALE_STEPS"

#: Lines, and seconds, after which they are written.
LINES, SECONDS = 4096, 1.0

#: Lines of a process after which not all are noted: by then each second of lines is followed by a gap of this share of
#: the time so far, so that a file grows with the logarithm of the time.
MOST, GAP = 100_000, 0.01


class Log:
    """What a process does, in the file `WAY.HOST.PID`: batches that it got, and steps that it ended.

    The first line relates the process's clock to that of the day, and has its rank. Times are seconds. In a long run
    there are gaps, each with a line of its own.
    """

    def __init__(self, way: str) -> None:
        self._way, self._process, self._count, self._on = way, 0, 0, FOLDER in os.environ
        self._lines: list[str] = []
        self._begin = self._written = self._until = 0.0

    def batch(self, iterator: int, wait: float, samples: int) -> None:
        """Note that an iterator delivered a batch of so many samples (0: not known) now, after a wait."""
        now = time.perf_counter()
        self._note(now, f"b {iterator} {now:.6f} {wait:.6f} {samples}\n")

    def loop(self) -> None:
        """Note that a loop begins now: what was before is no part of its first step."""
        now = time.perf_counter()
        self._note(now, f"l {now:.6f}\n")

    def step(self) -> None:
        """Note that a step has ended now."""
        now = time.perf_counter()
        self._note(now, f"s {now:.6f}\n")

    def _note(self, now: float, line: str) -> None:
        if not self._on:
            return
        if self._process != os.getpid():  # at first, and in a process that was forked
            self._open(now)
        if now < self._until:
            return
        if self._until:
            self._lines.append(f"g {self._written:.6f} {now:.6f}\n")
            self._until, self._written = 0.0, now
        self._lines.append(line)
        if len(self._lines) >= LINES or now - self._written >= SECONDS:
            self._count += len(self._lines)
            self._write()
            if self._count > MOST:
                self._written, self._until = now, now + GAP * (now - self._begin)

    def _open(self, now: float) -> None:
        self._process, self._begin, self._written = os.getpid(), now, now
        self._until, self._count = 0.0, 0
        place = Path(os.environ[FOLDER], f"{self._way}.{os.uname().nodename}.{self._process}")
        self._file = place.open("a")
        self._lines = [f"begin {time.time():.6f} {time.perf_counter():.6f} {rank()}\n"]
        atexit.register(self._write)

    def _write(self) -> None:
        if self._process == os.getpid():
            lines, self._lines, self._written = self._lines, [], time.perf_counter()
            self._file.write("".join(lines))
            self._file.flush()


def rank() -> int:
    """Return this process's number among those that train together, as torchrun, Slurm and MPI give it."""
    names = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    return int(next((os.environ[name] for name in names if os.environ.get(name)), "0"))


#: That of all loops of a process.
LOG = Log("timed")


def samples_of(batch: Any) -> int:
    """Return the number of samples of a batch: the first axis of the first array in it; 0 if there is none."""
    for _ in range(4):
        shape = getattr(batch, "shape", None)
        if shape is not None:
            return int(shape[0]) if len(shape) else 1
        if callable(getattr(batch, "values", None)):
            batch = next(iter(batch.values()), None)
        elif isinstance(batch, (list, tuple)) and batch:
            batch = batch[0]
        else:
            return 0
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
