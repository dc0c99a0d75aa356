"""`lines`: time each line of model, loss, loader and `profile.functions` with line_profiler, without editing them.

Only Python lines in the thread that makes the steps are timed. Of a compiled model and its loss, no lines are timed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import pkgutil
import statistics
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import FunctionType
from typing import Any

import line_profiler

from dlscale.core import registry
from dlscale.core.errors import UserError, brief
from dlscale.data import samples as reading
from dlscale.data.loaders.base import read_batch
from dlscale.measure.profilers import Found, ProfiledTool, TopEntry
from dlscale.train import step as step_module
from dlscale.train.build import Session

ELSEWHERE = "read by this process after the steps; during the steps, worker processes read the data"
#: Top-level modules that do not belong to a study.
LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy"}


class LineProfiler:
    """line_profiler for a session's functions. Create it before the loader, because it replaces the functions' code."""

    name = "lines"

    def __init__(self, folder: Path, rank: int, session: Session, functions: list[str]) -> None:
        self._path, self._rank, self._session = folder / f"lines.rank{rank}.txt", rank, session
        self._samples = session.samples("train")
        loader: Any = session.run.loader
        self._steps = line_profiler.LineProfiler(*map(resolve, functions))
        #: Profiler of the code that reads samples. It is separate from `_steps` if the loader's processes read: since
        #: their lines cannot be timed here, this process itself reads one batch after the steps.
        self._reads = line_profiler.LineProfiler() if loader.kind == "torch" and loader.workers else self._steps
        _add(self._steps, registry.load(registry.loader(loader.kind)), read_batch)
        if session.run.compile.mode == "none":
            loss: Any = session.study.loss(session.run)
            while isinstance(loss, functools.partial):
                loss = loss.func
            _add(self._steps, step_module, loss, *session.step.model.modules())
        else:  # the compiler identifies functions by their code, which must not change; Python runs no compiled line
            self._steps.add_class(step_module.Step, scoping_policy="children")
        _add(self._reads, reading, self._samples, getattr(self._samples, "boxes", None))

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Time the lines of this thread."""
        with self._steps:
            yield

    def found(self, seconds: list[float]) -> Found:
        """Write the times of all lines, and return the summary.

        If workers read the samples, this process reads one batch, so that the lines that read are timed.
        """
        step, rank = statistics.fmean(seconds), self._rank
        rows = line_rows(self._steps.get_stats(), len(seconds), step, rank)
        with self._path.open("w") as file:
            print("Times in milliseconds.\n", file=file)
            self._steps.print_stats(file, output_unit=1e-3, stripzeros=True)
            if self._reads is not self._steps:
                with self._reads:
                    for index in self._session.share().indices(0, self._samples.size):
                        self._samples.read(0, index)
                print(f"\nOne batch, {ELSEWHERE}:\n", file=file)
                self._reads.print_stats(file, output_unit=1e-3, stripzeros=True)
                rows += line_rows(self._reads.get_stats(), 1, step, rank, ELSEWHERE)
        tool = ProfiledTool(
            name=self.name,
            version=metadata.version("line_profiler"),
            steps=len(seconds),
            seconds_per_step=statistics.median(seconds),
            files={f"lines of rank {rank}": self._path.name},
        )
        return tool, sorted(rows, key=lambda row: -row.seconds)


def line_rows(stats: Any, steps: int, step_seconds: float, rank: int, note: str = "") -> list[TopEntry]:
    """Return a row for each executed line in line_profiler's `LineStats`."""
    rows = []
    for (file, _, _), lines in stats.timings.items():
        for number, hits, time in lines if Path(file).exists() else ():  # generated code has no file
            seconds = time * stats.unit / steps
            text = linecache.getline(file, number).strip()
            name = f"{short(file)}:{number}: {text}"
            share = seconds / step_seconds
            row = {"calls": hits / steps, "seconds": seconds, "share": share, "note": note}
            rows.append(TopEntry(tool="lines", rank=rank, kind="line", name=name, **row))
    return rows


def short(file: str) -> str:
    """Return a file's path relative to the folder in `sys.path` that contains it."""
    roots = [root for root in map(Path, sys.path) if root != Path() and Path(file).is_relative_to(root)]
    return str(Path(file).relative_to(max(roots, key=lambda root: len(root.parts)))) if roots else file


def _add(profiler: line_profiler.LineProfiler, module: Any, *things: Any) -> None:
    """Time all functions of a module, and of the modules that define `things` or their classes."""
    kinds = [kind for thing in things for kind in ([thing] if inspect.isfunction(thing) else type(thing).__mro__)]
    names = {kind.__module__ for kind in kinds if kind.__module__.partition(".")[0] not in LIBRARIES}
    with warnings.catch_warnings(action="ignore"):  # of decorated functions, only wrappers are timed
        for each in {module, *(sys.modules[name] for name in names)}:
            profiler.add_module(each, scoping_policy="children")


def resolve(name: str) -> FunctionType:
    """Return the function for `MODULE:NAME` or `MODULE:CLASS.NAME` in `profile.functions`."""
    where = f"profile.functions: {name}"
    try:
        function = inspect.unwrap(pkgutil.resolve_name(name))
    except (Exception, SystemExit) as error:  # a module may raise anything when it is imported
        raise UserError(f"{where}: {brief(error) or type(error).__name__}; expected an importable name") from None
    if not isinstance(function, FunctionType):
        raise UserError(f"{where}: expected MODULE:NAME or MODULE:CLASS.NAME of a Python function")
    return function
