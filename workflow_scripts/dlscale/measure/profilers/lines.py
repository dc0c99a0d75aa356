"""`lines`: the time of each line of the hot functions, by line_profiler; their source is not touched.

Only Python's own lines are seen, in the thread of the steps: what a GPU does meanwhile, a loader's threads and compiled
code are not.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import pkgutil
import statistics
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import FunctionType
from typing import Any

import line_profiler

from dlscale.core import registry
from dlscale.core.errors import UserError, brief, nearest
from dlscale.data.samples import ArrangedSamples, BoxField, GridSamples, Samples
from dlscale.measure.profilers.records import ProfiledTool, TopEntry
from dlscale.measure.profilers.tool import Found, report
from dlscale.train.build import Session
from dlscale.train.step import Network, Step

ELSEWHERE = "read by this process, alone: while the steps run the loader's processes do it"


class LineProfiler:
    """See `dlscale.measure.profilers.tool.Tool`. Make it before the loader is: functions get a copy of their code."""

    name = "lines"

    def __init__(self, folder: Path, rank: int, session: Session, functions: list[str]) -> None:
        self._path, self._rank, self._session = report(folder, self.name, rank, "txt"), rank, session
        self._samples = session.samples("train")
        #: Where a loader's processes read, this process has to read for itself.
        loader: Any = session.run.loader
        self._elsewhere = loader.kind == "torch" and loader.workers > 0
        hot = {*_step_functions(session), *map(resolve, functions)}
        reading = _reading_functions(self._samples)
        self._steps = line_profiler.LineProfiler(*(hot - reading if self._elsewhere else hot | reading))
        self._reads = line_profiler.LineProfiler(*reading) if self._elsewhere else self._steps

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Time the lines of this thread."""
        with self._steps:
            yield

    def found(self, seconds: list[float]) -> Found:
        """Write all lines with their times; if nobody has read samples here, read a batch."""
        step, rank = statistics.fmean(seconds), self._rank
        rows = line_rows(self._steps.get_stats(), len(seconds), step, rank)
        with self._path.open("w") as file:
            print("In milliseconds.\n", file=file)
            self._steps.print_stats(file, output_unit=1e-3, stripzeros=True)
            if self._elsewhere:
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
            complete=True,
            files={f"lines of rank {rank}": self._path.name},
        )
        return tool, sorted(rows, key=lambda row: -row.seconds)


def line_rows(stats: Any, steps: int, step_seconds: float, rank: int, note: str = "") -> list[TopEntry]:
    """Return a row for each line that ran: calls and seconds a step. `stats` is line_profiler's `LineStats`."""
    rows = []
    for (file, _, _), lines in stats.timings.items():
        for number, hits, time in lines:
            seconds = time * stats.unit / steps
            text = linecache.getline(file, number).strip()
            name = f"{short(file)}:{number}: {text}"
            share = seconds / step_seconds
            row = {"calls": hits / steps, "seconds": seconds, "share": share, "note": note}
            rows.append(TopEntry(tool="lines", rank=rank, kind="line", name=name, **row))
    return rows


def short(file: str) -> str:
    """Return a file's path from the folder that Python imports it from."""
    roots = [root for root in map(Path, sys.path) if root != Path() and Path(file).is_relative_to(root)]
    return str(Path(file).relative_to(max(roots, key=lambda root: len(root.parts)))) if roots else file


def _step_functions(session: Session) -> set[FunctionType]:
    """Return the functions of the step, of the run's loader and, unless they are compiled, of its model and loss.

    A function that is compiled must keep its code, by which the compiler knows it; none of its lines run, either.
    """
    found = _functions(Step, registry.load(registry.loader(session.run.loader.kind)))
    if session.run.compile.mode == "none":
        loss: Any = session.study.loss(session.run)
        while isinstance(loss, functools.partial):
            loss = loss.func
        models = {type(module) for module in (*session.step.model.modules(), loss)}
        calls = [loss, *(getattr(kind, "forward", None) for kind in models)]
        own = [call for call in calls if isinstance(call, FunctionType) and not call.__module__.startswith("torch.")]
        found |= _functions(Network, *(inspect.getmodule(call) for call in own if call is loss)) | set(own)
    return found


def _reading_functions(samples: Samples) -> set[FunctionType]:
    """Return the functions that read and decode a sample."""
    parts = (samples, samples.boxes) if isinstance(samples, ArrangedSamples) else (samples,)
    return _functions(*map(type, parts), GridSamples, BoxField)


def _functions(*spaces: Any) -> set[FunctionType]:
    """Return the functions of Python that are written in modules, those of their classes included, or in classes."""
    found = set[FunctionType]()
    for space in spaces:
        home = space.__module__ if isinstance(space, type) else space.__name__
        for value in vars(space).values():
            if isinstance(value, type) and value.__module__ == home and not isinstance(space, type):
                found |= _functions(value)
            inner = inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", value)))
            if isinstance(inner, FunctionType) and inner.__module__ == home:
                found.add(inner)
    # What `dataclass` and the like have made has no source.
    return {function for function in found if Path(function.__code__.co_filename).exists()}


def resolve(name: str) -> FunctionType:
    """Return the function that `profile.functions` calls `MODULE:NAME` or `MODULE:CLASS.NAME`.

    A name of nothing, or of what is no Python function, is a `UserError`.
    """
    where, (module, colon, words) = f"profile.functions: {name}", name.partition(":")
    if not (module and colon and words):
        raise UserError(f"{where}: expected MODULE:NAME or MODULE:CLASS.NAME, as dlscale.train.step:Step.gradients")
    outer, _, last = words.rpartition(".")
    try:
        parent = pkgutil.resolve_name(f"{module}:{outer}")
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        raise UserError(f"{where}: {brief(error) or type(error).__name__}; expected what Python can import") from None
    function = inspect.unwrap(getattr(parent, last, None))  # type: ignore[arg-type]
    if not isinstance(function, FunctionType):
        near = nearest(last, {*dir(parent)} - {last}) or "; expected a function that is written in Python"
        raise UserError(f"{where}: there is no function '{last}' in it{near}")
    return function
