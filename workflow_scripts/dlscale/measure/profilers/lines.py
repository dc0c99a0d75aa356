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
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from dlscale.core import registry
from dlscale.core.errors import UserError, brief, nearest
from dlscale.data.samples import ArrangedSamples, BoxField, GridSamples, Samples
from dlscale.measure.profilers.records import ProfiledTool, TopEntry
from dlscale.measure.profilers.tool import Found, report
from dlscale.train.build import Session
from dlscale.train.step import Network, Step

ELSEWHERE = "read by this process, alone: while the steps run the loader's processes do it"


class LineProfiler:
    """See `dlscale.measure.profilers.tool.Tool`. Make it before the loader is, and `close` it."""

    name = "lines"

    def __init__(self, folder: Path, rank: int, session: Session, functions: list[str]) -> None:
        import line_profiler

        self._path, self._rank, self._session = report(folder, self.name, rank, "txt"), rank, session
        self._samples = session.samples("train")
        hot, reading = hot_functions(session), reading_functions(self._samples)
        #: Where a loader's processes read, this process has to read for itself.
        loader: Any = session.run.loader
        self._elsewhere = loader.kind == "torch" and loader.workers > 0
        if not self._elsewhere:
            hot, reading = hot | reading, set()
        hot |= {resolve(name) for name in functions} - reading
        # line_profiler gives each function a copy of its code, by which it knows it: before loaders call them.
        self._codes = {function: function.__code__ for function in hot | reading}
        self._steps, self._reads = line_profiler.LineProfiler(*hot), line_profiler.LineProfiler(*reading)

    def close(self) -> None:
        """Give all functions back the code that they had."""
        for function, code in self._codes.items():
            function.__code__ = code

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Time the lines of this thread."""
        with self._steps:
            yield

    def found(self, seconds: list[float]) -> Found:
        """Write all lines with their times; if nobody has read samples here, read a batch."""
        if self._elsewhere:
            with self._reads:
                for index in self._session.share().indices(0, self._samples.size):
                    self._samples.read(0, index)
        with self._path.open("w") as file:
            print("In milliseconds.\n", file=file)
            self._steps.print_stats(file, output_unit=1e-3, stripzeros=True)
            if self._elsewhere:
                print(f"\nOne batch, {ELSEWHERE}:\n", file=file)
                self._reads.print_stats(file, output_unit=1e-3, stripzeros=True)
        step = statistics.fmean(seconds)
        rows = line_rows(self._steps.get_stats(), len(seconds), step, self._rank)
        rows += line_rows(self._reads.get_stats(), 1, step, self._rank, ELSEWHERE)
        tool = ProfiledTool(
            name=self.name,
            version=metadata.version("line_profiler"),
            steps=len(seconds),
            seconds_per_step=statistics.median(seconds),
            complete=True,
            files={f"lines of rank {self._rank}": self._path.name},
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


def hot_functions(session: Session) -> set[FunctionType]:
    """Return the functions of the step, of the run's loader and, unless they are compiled, of its model and loss.

    A function that is compiled must keep its code, by which the compiler knows it; none of its lines run, either.
    """
    found = set(_of_class(Step)) | set(_of_module(registry.load(registry.loader(session.run.loader.kind))))
    if session.run.compile.mode == "none":
        modules = {type(module) for module in session.step.model.modules()}
        forwards = [kind.forward for kind in modules if not kind.__module__.startswith("torch.")]
        found |= set(_of_class(Network)) | set(_plain(forwards)) | set(_behind(session.step.network.loss))
    return found


def reading_functions(samples: Samples) -> set[FunctionType]:
    """Return the functions that read and decode a sample."""
    if isinstance(samples, ArrangedSamples):
        return set(_of_class(type(samples))) | reading_functions(samples.boxes)
    kinds = [type(samples), *([GridSamples, BoxField] if isinstance(samples, GridSamples) else [])]
    return {function for kind in kinds for function in _of_class(kind)}


def resolve(name: str) -> FunctionType:
    """Return the function that `profile.functions` calls `MODULE:NAME` or `MODULE:CLASS.NAME`.

    A name of nothing, or of what is no Python function, is a `UserError`.
    """
    where, (module, colon, words) = f"profile.functions: {name}", name.partition(":")
    if not (module and colon and words):
        raise UserError(f"{where}: expected MODULE:NAME or MODULE:CLASS.NAME, as dlscale.train.step:Step.gradients")
    try:
        parent = pkgutil.resolve_name(f"{module}:{words.rpartition('.')[0]}")
    except AttributeError as error:
        raise UserError(f"{where}: {error}; expected MODULE:CLASS.NAME") from None
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        raise UserError(
            f"{where}: {brief(error) or type(error).__name__}; expected a module that Python can import"
        ) from None
    last = words.rpartition(".")[2]
    functions = {key: plain for key in dir(parent) for plain in _plain([inspect.getattr_static(parent, key)])}
    if last not in functions:
        near = nearest(last, functions) or "; expected a function that is written in Python"
        raise UserError(f"{where}: there is no function '{last}' in it{near}")
    return functions[last]


def _of_class(kind: type) -> list[FunctionType]:
    return _plain(vars(kind).values())


def _of_module(module: ModuleType) -> list[FunctionType]:
    """Return all functions that are written in a module, those of its classes included."""
    mine = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    return _plain(mine) + [function for kind in mine if isinstance(kind, type) for function in _of_class(kind)]


def _plain(values: Iterable[Any]) -> list[FunctionType]:
    """Return the values that are functions of Python, and those behind methods, properties and what wraps them."""
    found = []
    for value in values:
        if isinstance(value, staticmethod | classmethod | MethodType):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, functools.cached_property):
            value = value.func
        value = inspect.unwrap(value) if callable(value) else value
        # What `dataclass` and the like have made has no source.
        if isinstance(value, FunctionType) and Path(value.__code__.co_filename).is_file():
            found.append(value)
    return found


def _behind(call: Callable[..., Any]) -> list[FunctionType]:
    """Return the functions that a callable ends in: those that it wraps, binds or closes over, too."""
    if isinstance(call, functools.partial):
        return _behind(call.func)
    if isinstance(call, nn.Module):
        return _plain([type(call).forward])
    functions = _plain([call]) or _plain([vars(type(call)).get("__call__")])
    cells = [cell.cell_contents for function in functions for cell in function.__closure__ or ()]
    inner = [found for value in cells if callable(value) for found in _behind(value)]
    return [function for function in functions + inner if not function.__module__.startswith("torch.")]
