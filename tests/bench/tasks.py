"""A list of tasks that stand alone: one that fails or is left out loses no other, and what is done is on disk."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.bench.measure import figures

Values = dict[str, Any]


class Skip(Exception):
    """What cannot be done here, and why."""


@dataclass(frozen=True)
class Task:
    """One check or measurement.

    Attributes
    ----------
    seconds
        What it takes on an H200, about: it is not begun with less left.
    do
        Returns named values; a check that fails raises.
    targets
        Of values by name, what each is to be at least.
    """

    group: str
    name: str
    seconds: float
    do: Callable[[], Values]
    targets: dict[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What its row is called."""
        return f"{self.group}: {self.name}"


def chosen(tasks: list[Task], only: list[str], skip: list[str]) -> list[Task]:
    """Return the tasks whose labels hold one of `only`, if there are any, and none of `skip`; case does not count."""

    def holds(task: Task, texts: list[str]) -> bool:
        return any(text.lower() in task.label.lower() for text in texts)

    return [task for task in tasks if (not only or holds(task, only)) and not holds(task, skip)]


@dataclass
class Result:
    """What became of a task: `status` is ok, pass or SHORT (of a target), or FAILED or skipped, with `why`."""

    group: str
    name: str
    status: str
    seconds: float
    values: Values
    targets: dict[str, float]
    why: str = ""
    trace: str = ""

    def line(self, width: int) -> str:
        """Return the row of the table, after a name of `width`."""
        shown = [f"{key} {figures(v) if isinstance(v, int | float) else v}" for key, v in self.values.items()]
        shown += [f"[{key} ≥ {figures(least)}]" for key, least in self.targets.items() if key in self.values]
        name = f"{self.group}: {self.name}"
        return f"{self.status:8}{name:{width}}  {self.seconds:5.1f} s  {self.why or ', '.join(shown)}".rstrip()


def perform(task: Task, left: float) -> Result:
    """Do a task, if `left` seconds are enough for it, and report."""
    if left < task.seconds:
        why = f"it takes some {task.seconds:.0f} s, and {max(left, 0):.0f} s are left"
        return Result(task.group, task.name, "skipped", 0.0, {}, task.targets, why)
    start, values, why, trace = time.perf_counter(), Values(), "", ""
    try:
        values = task.do()
        reached = [values[key] >= least for key, least in task.targets.items() if key in values]
        status = "ok" if not reached else "pass" if all(reached) else "SHORT"
    except Skip as reason:
        status, why = "skipped", str(reason)
    except Exception as error:
        status, why = "FAILED", f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        trace = traceback.format_exc()
    return Result(task.group, task.name, status, time.perf_counter() - start, values, task.targets, why, trace)


def perform_all(
    tasks: list[Task], limit: float, heading: Values, out: Path | None, clean: Callable[[], None]
) -> list[Result]:
    """Do the tasks in their order and print a row for each; `out` always holds what there is.

    Parameters
    ----------
    limit
        Seconds for all.
    clean
        Called after each.
    """
    start, results = time.perf_counter(), list[Result]()
    width = max(len(task.label) for task in tasks)

    def write(finished: bool) -> None:
        if out is not None:
            seconds = round(time.perf_counter() - start, 1)
            state = {**heading, "finished": finished, "seconds": seconds, "results": [vars(r) for r in results]}
            partial = out.with_name(f".{out.name}.partial")
            partial.write_text(json.dumps(state, indent=2) + "\n")
            os.replace(partial, out)

    write(finished=False)
    for task in tasks:
        results.append(perform(task, limit - (time.perf_counter() - start)))
        clean()
        print(results[-1].line(width), flush=True)
        write(finished=False)
    write(finished=True)
    return results


def closing_words(results: list[Result]) -> str:
    """Say in one line what failed, fell short or was left out."""
    parts = [f"{len(results)} rows"]
    for status in ("ok", "pass", "SHORT", "FAILED", "skipped"):
        names = [f"{result.group}: {result.name}" for result in results if result.status == status]
        if names:
            parts.append(f"{len(names)} {status}" + (f" ({'; '.join(names)})" if status in ("SHORT", "FAILED") else ""))
    return ", ".join(parts)


@dataclass
class Bench:
    """What tasks share.

    Attributes
    ----------
    folder
        For files.
    found
        Values that later tasks refer to.
    """

    device: torch.device
    quick: bool
    folder: Path
    found: dict[str, Values] = field(default_factory=dict)

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def need_cuda(self) -> None:
        """Skip the task where there is no GPU."""
        if not self.cuda:
            raise Skip("needs CUDA")

    def keep(self, name: str, do: Callable[[], Values]) -> Callable[[], Values]:
        """Return `do`, whose values are then found by `name`."""

        def kept() -> Values:
            self.found[name] = do()
            return self.found[name]

        return kept

    def wait(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, action: Callable[[], object], count: int) -> float:
        """Return the seconds that one of `count` calls takes: the least of three tries, after one."""
        action()
        best = float("inf")
        for _ in range(3):
            self.wait()
            start = time.perf_counter()
            for _ in range(count):
                action()
            self.wait()
            best = min(best, time.perf_counter() - start)
        return best / count
