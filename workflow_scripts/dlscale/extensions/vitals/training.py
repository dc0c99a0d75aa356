"""Watch memory and compilations of dlscale's own training: the first rank writes `vitals.json`."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from dlscale.extensions.vitals import noted
from dlscale.extensions.vitals.causes import describe, repeated
from dlscale.extensions.vitals.records import (
    BETWEEN,
    FILE,
    MAX_POINTS,
    START,
    TRAINING,
    VALIDATION,
    Compilation,
    Memory,
    Peak,
    ProcessVitals,
    Vitals,
)
from dlscale.parallel.world import World
from dlscale.train import around
from dlscale.train.loop import Batch, Hook
from dlscale.train.memory import total
from dlscale.train.trainer import Trainer

#: Functions of the trainer, by the phase in which they run, for the message of an exhausted memory.
FUNCTIONS = {
    "Trainer.validate": VALIDATION,
    "Trainer._save": "a checkpoint",
    "Trainer._epoch": TRAINING,
}

#: File with the state of PyTorch's allocator after a GPU ran out of memory, for https://pytorch.org/memory_viz.
SNAPSHOT = "memory_snapshot.pickle"

#: Function that the trainer calls with a record.
Then = TypeVar("Then", bound=Callable[[Any], object])

_current: Watch | None = None


@contextlib.contextmanager
def watch_training(trainer: Trainer, folder: Path | None) -> Iterator[tuple[list[Hook], Callable[[Then], Then]]]:
    """Yield hooks for the training's steps, and a wrapper of a function that the trainer calls after a validation.

    At the end, write `vitals.json` into the run's `folder`, unless this is None.
    """
    global _current
    watch = _current = Watch(trainer.world, folder)
    steps = len(trainer.train_loader)

    def after_step(number: int, batch: Batch, result: Any) -> None:
        watch(TRAINING, number + 1, last=not (number + 1) % steps or number + 1 == trainer.last_step)

    hook = Hook(before_step=lambda number: watch(BETWEEN, number), after_step=after_step)

    def validated(then: Then) -> Then:
        def both(record: Any) -> object:
            watch(VALIDATION, watch.step)
            return then(record)

        return both  # type: ignore[return-value]

    try:
        yield [hook], validated
    finally:
        watch.write()
    _current = None  # after an error, `place_of_exhaustion` needs the object


class Watch:
    """Points of memory, at most one per MAX_FRACTION of the time, and compilations of this process."""

    def __init__(self, world: World, folder: Path | None) -> None:
        self._world, self._folder, self.step = world, folder, 0
        self._compilations, self._breaks = noted.Compilations(), dict[str, int]()
        self._compiled, self._warned = list[Compilation](), False
        self._phase, self._before, self._due, self._gap = "", 0, 0.0, 0.0
        self._first: tuple[float, int] | None = None
        self._start = self._end = time.perf_counter()
        self._memory = {kind: _Points() for kind in dict.fromkeys(("cpu", world.device.type))}
        if folder:
            (folder / FILE).unlink(missing_ok=True)

    def __call__(self, phase: str, step: int, last: bool = False) -> None:
        """Note that a phase has ended.

        Parameters
        ----------
        phase
            `training` after each step; `validation`; `between` before each step, which counts only for the first step
            after a validation.
        step
            Number of steps of the training so far.
        last
            Whether the step is the last step before a validation, after which memory is always noted.
        """
        self.step = step
        now = time.perf_counter()
        if phase == TRAINING:
            self._first = self._first or (now, step)
            self._end = now
            if now < self._due and self._phase == TRAINING and not last:
                return
        elif phase == BETWEEN and self._phase == TRAINING:
            return
        shown = phase if self._first or phase == VALIDATION else START
        try:
            self._look(shown, step)
        except (OSError, RuntimeError) as error:  # the training continues
            logging.info("memory cannot be watched: %s", error)
            self._gap = float("inf")
        self._phase, self._before = phase, step
        used = time.perf_counter() - now
        self._due = now + max(used / noted.MAX_FRACTION, self._gap)
        if phase == VALIDATION and not self._warned and (found := repeated(self._compiled)):
            self._warned = True
            logging.warning("compilation continues after the warm-up: %s", describe(found))

    def _look(self, phase: str, step: int) -> None:
        if host := noted.host_memory():
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM, so that each phase has its own peak
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
        process = ProcessVitals(
            steps=max(self.step - first, 0),
            seconds=max(self._end - since, 0.0),
            memory=[points.record(kind, limits[kind]) for kind, points in self._memory.items()],
            compilations=self._compiled,
            breaks=self._breaks,
        )
        Vitals(processes=[process]).write(self._folder / FILE)

    def write_snapshot(self) -> str:
        """Write the state of PyTorch's allocator; return the file's name, or an empty text without a GPU."""
        if self._folder is None or self._world.device.type != "cuda":
            return ""
        file = self._folder / (SNAPSHOT if self._world.main else f"rank{self._world.rank}_{SNAPSHOT}")
        with contextlib.suppress(OSError, RuntimeError):
            torch.cuda.memory._dump_snapshot(str(file))
            return str(file)
        return ""


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
        step = f"in step {_current.step + 1}" if phase == TRAINING else f"after step {_current.step}"
        place += f" ({phase}, {step})"
    snapshot = _current.write_snapshot() if isinstance(error, torch.OutOfMemoryError) else ""
    return place + (f" (state of the allocator: {snapshot})" if snapshot else "")


def _functions(error: BaseException) -> Iterator[str]:
    trace = error.__traceback__
    while trace:
        yield trace.tb_frame.f_code.co_qualname
        trace = trace.tb_next
