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
LINES, SECONDS = 4096, 0.1


class Log:
    """What a process does, in the file `WAY.HOST.PID`: batches that it got, and steps that it ended.

    The first line relates the process's clock to that of the day, and has its rank. Times are seconds.
    """

    def __init__(self, way: str) -> None:
        self._way, self._process = way, 0

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
        self._note(time.perf_counter(), f"g {size}\n")

    def step(self) -> None:
        """Note that a step has ended now."""
        now = time.perf_counter()
        self._note(now, f"s {now:.6f}\n")

    def _note(self, now: float, line: str) -> None:
        if self._process != os.getpid():  # at first, and in a process that was forked
            self._open(now)
        self._lines.append(line)
        if len(self._lines) >= LINES or now - self._written >= SECONDS:
            self._write()

    def _open(self, now: float) -> None:
        self._process, self._written = os.getpid(), now
        place = Path(os.environ[FOLDER], f"{self._way}.{os.uname().nodename}.{self._process}")
        self._file = place.open("a")
        rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
        self._lines = [f"begin {time.time():.6f} {time.perf_counter():.6f} {rank}\n"]
        atexit.register(self._write)

    def _write(self) -> None:
        if self._process == os.getpid():
            lines, self._lines, self._written = self._lines, [], time.perf_counter()
            self._file.write("".join(lines))
            self._file.flush()


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
