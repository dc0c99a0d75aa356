"""Independent tasks: a failed or skipped task does not stop the other tasks, and each result is saved at once."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.clocks import Sampler
from bench.measure import figures

#: Named values of a row. A value that is a list of dicts with the same keys is a table.
Values = dict[str, Any]


class Skip(Exception):
    """Reason why a task cannot run here."""


@dataclass(frozen=True)
class Task:
    """One check or measurement.

    Attributes
    ----------
    seconds
        Approximate duration on an H200. The task does not start if less time is left.
    do
        Function that returns named values. A check raises if it fails.
    targets
        Minimum values to reach, by name.
    """

    group: str
    name: str
    seconds: float
    do: Callable[[], Values]
    targets: dict[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Name of the task's row."""
        return f"{self.group}: {self.name}"


def chosen(tasks: list[Task], only: list[str], skip: list[str]) -> list[Task]:
    """Return the tasks whose label contains a text of `only` and no text of `skip`; an empty `only` selects all tasks.

    Case is ignored.
    """

    def holds(task: Task, texts: list[str]) -> bool:
        return any(text.lower() in task.label.lower() for text in texts)

    return [task for task in tasks if (not only or holds(task, only)) and not holds(task, skip)]


@dataclass
class Result:
    """Result of a task.

    Attributes
    ----------
    status
        ok (no target), pass or SHORT (target reached or missed), FAILED, skipped (cannot run here), or not run (too
        little time left).
    why
        Reason of the states FAILED, skipped and not run.
    gpu
        Clocks, power and temperature during the task; see `bench.clocks`.
    """

    group: str
    name: str
    status: str
    seconds: float
    values: Values
    targets: dict[str, float]
    why: str = ""
    trace: str = ""
    gpu: Values = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Name of the row."""
        return f"{self.group}: {self.name}"

    @property
    def figures(self) -> dict[str, str]:
        """Values as text, without tables."""
        shown = {key: value for key, value in self.values.items() if not isinstance(value, list)}
        return {key: figures(v) if isinstance(v, int | float) else str(v) for key, v in shown.items()}

    @property
    def tables(self) -> dict[str, list[dict[str, str]]]:
        """Tables by name, all cells as text."""
        return {
            key: [{k: figures(v) if isinstance(v, int | float) else str(v) for k, v in row.items()} for row in value]
            for key, value in self.values.items()
            if isinstance(value, list) and value
        }

    def lines(self, width: int) -> str:
        """Return the row and its tables; the row's name is padded to `width`."""
        shown = [" ".join(item) for item in self.figures.items()]
        shown += [f"[{key} ≥ {figures(least)}]" for key, least in self.targets.items() if key in self.values]
        text = f"{self.status:8}{self.label:{width}}  {self.seconds:5.1f} s  {self.why or ', '.join(shown)}".rstrip()
        for rows in self.tables.values():
            cells = [list(rows[0]), *(list(row.values()) for row in rows)]
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            for line in cells:
                cut = (cell.ljust(size) for cell, size in zip(line, widths, strict=True))
                text += "\n" + ("        " + "  ".join(cut)).rstrip()
        return text


def perform(task: Task, left: float, sampler: Sampler | None = None) -> Result:
    """Do a task if `left` seconds suffice; skip a task whose package is missing."""
    if left < task.seconds:
        why = f"needs about {task.seconds:.0f} s, but only {max(left, 0):.0f} s are left"
        return Result(task.group, task.name, "not run", 0.0, {}, task.targets, why)
    start, values, why, trace = time.monotonic(), Values(), "", ""
    try:
        values = task.do()
        reached = [values[key] >= least for key, least in task.targets.items() if key in values]
        status = "ok" if not reached else "pass" if all(reached) else "SHORT"
    except Skip as reason:
        status, why = "skipped", str(reason)
    except ModuleNotFoundError as missing:
        status, why = "skipped", f"package {missing.name} is missing; install it"
    except Exception as error:
        status, why = "FAILED", f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        trace = traceback.format_exc()
    end = time.monotonic()
    gpu = sampler.between(start, end) if sampler else {}
    return Result(task.group, task.name, status, end - start, values, task.targets, why, trace, gpu)


def perform_all(
    tasks: list[Task],
    seconds: float,
    heading: Values,
    out: Path | None,
    clean: Callable[[], None],
    earlier: Iterable[Result] = (),
    sampler: Sampler | None = None,
    found: dict[str, Values] | None = None,
) -> list[Result]:
    """Do the tasks in order and print a row for each new result; `out` always holds all results and the current task.

    Parameters
    ----------
    seconds
        Time limit for all tasks.
    clean
        Function called after each task.
    earlier
        Results of tasks that are not repeated; they are sorted into the order of the tasks.
    found
        Mapping that receives the values of each task, by label.
    """
    start, results = time.monotonic(), list[Result]()
    rest, found = {result.label: result for result in earlier}, {} if found is None else found
    width = max(len(task.label) for task in tasks)

    def write(doing: str | None) -> None:
        if out is not None:
            spent = round(time.monotonic() - start, 1)
            state = {**heading, "finished": doing is None, "doing": doing, "spent": spent}
            partial = out.with_name(f".{out.name}.partial")
            text = json.dumps(
                {**state, "results": [asdict(r) for r in [*results, *rest.values()]]}, indent=2, default=str
            )
            partial.write_text(text + "\n")
            os.replace(partial, out)

    for task in tasks:
        write(task.label)
        if (result := rest.pop(task.label, None)) is None:
            result = perform(task, seconds - (time.monotonic() - start), sampler)
            clean()
            print(result.lines(width), flush=True)
        found[task.label] = result.values
        results.append(result)
    write(None)
    return [*results, *rest.values()]


def read(path: Path) -> list[Result]:
    """Return the results in a file of `perform_all`, except results of status `not run`."""
    return [r for r in (Result(**each) for each in json.loads(path.read_text())["results"]) if r.status != "not run"]


def closing_words(results: list[Result]) -> str:
    """Return one line that counts results by status and names the rows that are SHORT, FAILED or not run."""
    parts = [f"{len(results)} rows"]
    for status in ("ok", "pass", "SHORT", "FAILED", "skipped", "not run"):
        names = [result.label for result in results if result.status == status]
        if names:
            named = status in ("SHORT", "FAILED", "not run")
            parts.append(f"{len(names)} {status}" + (f" ({'; '.join(names)})" if named else ""))
    return ", ".join(parts)


def markdown(results: list[Result], heading: Values) -> str:
    """Return all results as tables: one table per group with a column per value, then the tables of its rows."""
    text = [", ".join(f"{key} {value}" for key, value in heading.items())]
    groups = dict.fromkeys(result.group for result in results)
    for group in groups:
        rows = [result for result in results if result.group == group]
        columns = list(dict.fromkeys(key for row in rows for key in row.figures))
        cells = [["", *columns, "target", "clocks and power"]]
        for row in rows:
            targets = [f"{row.status}: {key} ≥ {figures(least)}" for key, least in row.targets.items()]
            gpu = ", ".join(f"{key} {figures(v) if isinstance(v, int | float) else v}" for key, v in row.gpu.items())
            note = row.why and f"{row.status}: {row.why}"
            values = [note or row.figures.get(columns[0], "")] if columns else [note]
            values += [row.figures.get(key, "") for key in columns[1:]]
            cells.append([row.name, *values, "; ".join(targets) if row.values else "", gpu])
        if not columns:
            cells[0].insert(1, "")
        text += ["", f"### {group}", "", *_pipes(cells)]
        for row in rows:
            for name, table in row.tables.items():
                text += [
                    "",
                    f"**{row.name}**, {name}",
                    "",
                    *_pipes([list(table[0]), *(list(r.values()) for r in table)]),
                ]
    return "\n".join(text) + "\n"


def _pipes(cells: list[list[str]]) -> list[str]:
    """Return the lines of a Markdown table without empty columns."""
    keep = [n for n in range(len(cells[0])) if n == 0 or any(line[n] for line in cells[1:])]
    lines = ["| " + " | ".join(line[n].replace("|", "\\|") for n in keep) + " |" for line in cells]
    return [lines[0], "|" + "---|" * len(keep), *lines[1:]]


@dataclass
class Bench:
    """Context that tasks share.

    Attributes
    ----------
    folder
        Folder for files.
    found
        Values of the rows so far, by label.
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
        """Skip the task if the device is not a GPU."""
        if not self.cuda:
            raise Skip("needs CUDA")

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, action: Callable[[], object], count: int) -> float:
        """Return the seconds per call over `count` calls: the minimum of three tries, after a warm-up call."""
        action()
        return min(self.seconds_of(action, count) for _ in range(3))

    def seconds_of(self, action: Callable[[], object], count: int) -> float:
        """Return the seconds per call over `count` calls."""
        self.wait()
        start = time.perf_counter()
        for _ in range(count):
            action()
        self.wait()
        return (time.perf_counter() - start) / count
