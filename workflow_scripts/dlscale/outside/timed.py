"""Time the steps of any training loop: `for batch in timed(loader): ...`, and `dlscale measure -- python train.py`.

One file for Python 3.8 and later, without dependencies: import it as `dlscale.timed`, or copy it. Where nobody measures
it passes batches on, and does nothing else.
"""

from __future__ import annotations

import atexit
import math
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

clock = time.perf_counter

#: Variable that names the folder into which processes that are measured write their steps.
FOLDER = "DLSCALE_STEPS"

#: Seconds after which what was noted is written.
SECONDS = 1.0

#: Notes of a process after which not all are kept: by then each second of notes is followed by a gap of this share of
#: the time so far, so that a file grows with the logarithm of the time.
MOST, GAP = 100_000, 0.01


class Log:
    """What a process does, in the file `WAY.HOST.PID`: batches that it got, and steps that it ended.

    The first line relates the process's clock to that of the day, and has its rank. Times are seconds. In a long run
    there are gaps, each with a line of its own. Within a step all is cold, so as little as possible is done there.
    """

    def __init__(self, way: str) -> None:
        self._way, self._begin, self._count = way, 0.0, 0
        self._file: Any = None
        self._notes: list[Any] = []
        self._due, self._until = 0.0, 0.0 if FOLDER in os.environ else math.inf

    def batch(self, iterator: int, wait: float, samples: int) -> None:
        """Note that an iterator delivered a batch of so many samples (0: not known) now, after a wait."""
        now = clock()
        if now >= self._until:
            self._notes.append((now, iterator, wait, samples))
            if now >= self._due:
                self._write(now)

    def loop(self) -> None:
        """Note that a loop begins now: what was before is no part of its first step."""
        if self._until != math.inf:
            self._notes.append(f"l {clock():.6f}\n")

    def step(self) -> None:
        """Note that a step has ended now."""
        now = clock()
        if now >= self._until:
            self._notes.append(now)
            if now >= self._due:
                self._write(now)

    def _write(self, now: float) -> None:
        if self._file is None:
            self._open(now)
        notes, self._notes = self._notes, []
        self._count += len(notes)
        self._due = now + SECONDS
        if self._count > MOST:
            self._until = now + GAP * (now - self._begin)
            self._due = self._until + SECONDS
            notes.append(f"g {now:.6f} {self._until:.6f}\n")
        self._file.write("".join(map(_line, notes)))
        self._file.flush()

    def _open(self, now: float) -> None:
        place = Path(os.environ[FOLDER], f"{self._way}.{os.uname().nodename}.{os.getpid()}")
        self._begin, self._file = now, place.open("a")
        self._file.write(f"begin {time.time():.6f} {clock():.6f} {rank()}\n")
        atexit.register(self._end)
        os.register_at_fork(after_in_child=self._forget)

    def _end(self) -> None:
        if self._file is not None:
            self._write(clock())

    def _forget(self) -> None:
        self._file, self._notes, self._count, self._due, self._until = None, [], 0, 0.0, 0.0


def _line(note: Any) -> str:
    if isinstance(note, float):
        return f"s {note:.6f}\n"
    return note if isinstance(note, str) else "b {1} {0:.6f} {2:.6f} {3}\n".format(*note)


def rank() -> int:
    """Return this process's number among those that train together, as torchrun, Slurm and MPI give it."""
    names = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    return int(next((os.environ[name] for name in names if os.environ.get(name)), "0"))


#: That of all loops of a process.
LOG = Log("timed")


def samples_of(batch: Any) -> int:
    """Return the number of samples of a batch: the first axis of the first array in it; 0 if there is none."""
    if batch.__class__ is list and batch:  # as PyTorch's are: at once
        shape = getattr(batch[0], "shape", None)
        if shape:
            return int(shape[0])
    for _ in range(4):
        if isinstance(batch, (list, tuple)):
            batch = batch[0] if batch else None
            continue
        shape = getattr(batch, "shape", None)
        if shape is not None:
            return int(shape[0]) if len(shape) else 1
        if not callable(getattr(batch, "values", None)):
            return 0
        batch = next(iter(batch.values()), None)
    return 0


_ended = 0.0


def begun(samples: int = 0) -> None:
    """Note that a step of so many samples begins, where a callback says so; its batch was waited for since `ended`."""
    now = clock()
    LOG.batch(0, now - _ended if _ended else 0.0, samples)


def ended() -> None:
    """Note that a step has ended, where a callback says so."""
    global _ended
    _ended = clock()
    LOG.step()


def timed(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of a loader; each step lasts until the next batch is asked for."""
    if FOLDER not in os.environ:
        yield from loader
        return
    LOG.loop()
    batches = iter(loader)
    while True:
        begin = clock()
        try:
            batch = next(batches)
        except StopIteration:
            return
        LOG.batch(0, clock() - begin, samples_of(batch))
        yield batch
        LOG.step()
