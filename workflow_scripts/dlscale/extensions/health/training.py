"""Watch memory and compilations of dlscale's own training: the first rank writes `health.json`."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from dlscale.extensions.health import noted
from dlscale.extensions.health.causes import describe, repeated
from dlscale.extensions.health.records import (
    BETWEEN,
    FILE,
    MAX_POINTS,
    START,
    TRAINING,
    VALIDATION,
    Compilation,
    Health,
    Memory,
    Peak,
    ProcessHealth,
)
from dlscale.parallel.world import World
from dlscale.train import around
from dlscale.train.loop import Batch, Hook
from dlscale.train.memory import total
from dlscale.train.trainer import Trainer

#: Function of the trainer → phase that a message about exhausted memory names.
FUNCTIONS = {
    "Trainer.validate": VALIDATION,
    "Trainer._save": "a checkpoint",
    "Trainer._epoch": TRAINING,
}

#: Function that the trainer calls with a record.
Then = TypeVar("Then", bound=Callable[[Any], object])

_current: HealthRecorder | None = None


@contextlib.contextmanager
def watch_training(trainer: Trainer, folder: Path | None) -> Iterator[tuple[list[Hook], Callable[[Then], Then]]]:
    """Yield hooks for the training's steps, and a wrapper of a function that the trainer calls after a validation.

    At the end, the first rank writes `health.json` into the run's `folder`, unless `folder` is None.
    """
    global _current
    watch = _current = HealthRecorder(trainer.world, folder, len(trainer.train_loader), trainer.last_step)

    def before_step(number: int) -> None:
        if watch.phase != TRAINING:
            watch(BETWEEN, number)

    def after_step(number: int, batch: Batch, result: Any) -> None:
        watch.step = number + 1
        if watch.step >= watch.next:
            watch(TRAINING, watch.step)

    def validated(then: Then) -> Then:
        def both(record: Any) -> object:
            watch(VALIDATION, watch.step)
            return then(record)

        return both  # type: ignore[return-value]

    try:
        yield [Hook(before_step, after_step)], validated
    finally:
        watch.write()
    _current = None  # after an error, `place_of_exhaustion` needs the object


class HealthRecorder:
    """Recorder of this process's memory and compilations; reading takes about MAX_FRACTION of the time or less."""

    def __init__(self, world: World, folder: Path | None, epoch: int, last: int) -> None:
        self._world, self._folder, self._epoch, self._last = world, folder, epoch, last
        self.step = 0  #: Number of steps of the training so far.
        self.next = 0  #: Number of steps after which the next point is due.
        self.phase = ""  #: Phase of the last point.
        self._before, self._gap = 0, 0.0  # step of the previous point; minimum seconds between points
        self._compilations, self._breaks = noted.Compilations(), dict[str, int]()
        self._compiled, self._warned = list[Compilation](), False
        self._start = self._end = self._time = time.perf_counter()
        self._first: tuple[float, int] | None = None
        self._memory = {kind: _Points() for kind in dict.fromkeys(("cpu", world.device.type))}
        if folder:
            (folder / FILE).unlink(missing_ok=True)

    def __call__(self, phase: str, step: int) -> None:
        """Record the memory and the new compilations of a phase that has ended after `step` steps.

        Before the first step of an epoch, the phase `between` is the time since the last validation. Until the first
        step has ended, the phase `start` replaces all phases except validations.
        """
        now = time.perf_counter()
        started = self._first is not None or phase == VALIDATION
        if phase == TRAINING:
            self._first, self._end = self._first or (now, step), now
        try:
            self._look(phase if started else START, step)
        except (OSError, RuntimeError) as error:  # the training continues
            logging.info("memory cannot be watched: %s", error)
            self._gap = math.inf
        # The next point is due after `wait` steps at the present pace, or earlier, after the epoch's last step.
        pace = (now - self._time) / max(step - self._before, 1)
        self.phase, self._before, self._time = phase, step, now
        wait = max((time.perf_counter() - now) / noted.MAX_FRACTION, self._gap) / max(pace, 1e-9)
        ends = min((step // self._epoch + 1) * self._epoch, self._last)
        self.next = int(min(step + 1 + wait, ends)) if phase == TRAINING else step + 1
        if phase == VALIDATION and not self._warned and (found := repeated(self._compiled)):
            self._warned = True
            logging.warning("compilation continues after the warm-up: %s", describe(found))

    def _look(self, phase: str, step: int) -> None:
        if host := noted.host_memory():
            _reset_peak()
            self._memory["cpu"].add(phase, self._before, step, *host)
        if "cuda" in self._memory and (gpu := noted.gpu_memory()):
            torch.cuda.reset_peak_memory_stats(self._world.device)
            self._memory["cuda"].add(phase, self._before, step, *gpu[:4])
        if any([points.halve() for points in self._memory.values()]):
            self._gap = (time.perf_counter() - self._start) / (MAX_POINTS / 2)
        began = step - (phase in (START, TRAINING)) if step else 0  # steps that had ended when a compilation began
        self._compiled += [Compilation(step=began, **each) for each in self._compilations.new()]
        self._breaks = self._compilations.breaks() or self._breaks

    def write(self) -> None:
        """Write the record on the first rank."""
        if not (self._folder and self._world.main):
            return
        since, first = self._first or (0.0, 0)
        limits = {"cpu": total(torch.device("cpu"), self._world.size), "cuda": None}
        if "cuda" in self._memory:
            limits["cuda"] = total(self._world.device)
        process = ProcessHealth(
            steps=max(self.step - first, 0),
            seconds=max(self._end - since, 0.0),
            memory=[points.record(kind, limits[kind]) for kind, points in self._memory.items()],
            compilations=self._compiled,
            breaks=self._breaks,
        )
        Health(processes=[process]).write(self._folder / FILE)

    def write_snapshot(self) -> str:
        """Write the state of PyTorch's allocator; return the file's path, or an empty text if no file was written."""
        if self._folder is None or self._world.device.type != "cuda":
            return ""
        file = self._folder / f"{f'rank{self._world.rank}_' * (not self._world.main)}{noted.SNAPSHOT}"
        with contextlib.suppress(OSError, RuntimeError):
            torch.cuda.memory._dump_snapshot(str(file))
            return str(file)
        return ""


def _reset_peak() -> None:
    """Reset the peak of the resident memory, so that each point has the peak since the last point (proc(5))."""
    place = os.open("/proc/self/clear_refs", os.O_WRONLY)
    try:
        os.write(place, b"5")
    finally:
        os.close(place)


class _Points:
    """Points of memory of one device, and the peak of each phase."""

    def __init__(self) -> None:
        self._rows = list[tuple[int, str, int, int, int]]()
        self._peaks = dict[str, Peak]()

    def add(
        self, phase: str, before: int, step: int, used: int, peak: int, reserved: int = 0, inactive: int = 0
    ) -> None:
        self._rows.append((step, phase, used, reserved, inactive))
        if phase not in self._peaks or peak > self._peaks[phase].bytes:
            self._peaks[phase] = Peak(bytes=peak, first=before, last=step)

    def halve(self) -> bool:
        """Drop every second point if there are too many; return whether points were dropped."""
        if len(self._rows) <= MAX_POINTS:
            return False
        self._rows = self._rows[::2]
        return True

    def record(self, device: str, limit: int | None) -> Memory:
        columns: Any = list(zip(*self._rows, strict=True)) or [()] * 5
        steps, phases, used, reserved, inactive = map(list, columns)
        gpu = {"reserved": reserved, "inactive": inactive} if device == "cuda" else {}
        return Memory(device=device, steps=steps, phases=phases, used=used, peaks=self._peaks, limit=limit, **gpu)


def place_of_exhaustion(error: BaseException) -> str:
    """Return where memory ran out: part of the step, phase and step; write a snapshot of a GPU's allocator."""
    place = around.place(error)
    if _current is None:
        return place
    frames = {code for each in around.chain(error) for code in _functions(each)}
    phase = next((phase for name, phase in FUNCTIONS.items() if name in frames), "")
    if phase:
        step = f"step {_current.step + 1}" if phase == TRAINING else f"after step {_current.step}"
        place += f" ({phase}, {step})"
    snapshot = _current.write_snapshot() if isinstance(error, torch.OutOfMemoryError) else ""
    return place + (f" (state of the allocator: {snapshot})" if snapshot else "")


def _functions(error: BaseException) -> Iterator[str]:
    trace = error.__traceback__
    while trace:
        yield trace.tb_frame.f_code.co_qualname
        trace = trace.tb_next
