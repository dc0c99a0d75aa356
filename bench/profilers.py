"""Overhead of profiling: steps with unused `mark` calls, NVTX ranges or a profiler, compared with plain steps."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import nvtx
import torch

from bench.cases import Case
from bench.measure import Options, Row, in_turns
from bench.training import CPU, FULL_UNET, FULL_VIT, UNET, VIT, counts, label, one_thread
from dlscale.core.ranges import marking
from dlscale.data.loaders.base import Batch
from dlscale.extensions.profile import torch_profiler
from dlscale.train import loop
from dlscale.train import step as step_module
from dlscale.train.step import Step

#: Minimum ratio of speed to steps without marks: for unused marks (0.5 % is noise), and for marks as NVTX ranges.
FREE, NVTX = 0.995, 0.99


class _Unmarked(ast.NodeTransformer):
    """Replace each `with mark(...):` by its body."""

    def visit_With(self, node: ast.With) -> Any:
        self.generic_visit(node)
        call = node.items[0].context_expr
        marked = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "mark"
        return node.body if marked else node


def unmarked(thing: Any, module: Any) -> Any:
    """Return a module's function or class without its marks."""
    tree = _Unmarked().visit(ast.parse(textwrap.dedent(inspect.getsource(thing))))
    assert "mark(" not in ast.unparse(tree)
    space = dict(vars(module))
    exec(compile(ast.fix_missing_locations(tree), module.__file__, "exec"), space)
    return space[thing.__name__]


Context = Callable[[], AbstractContextManager[Any]]


def rate(run: Callable[..., None], step: Step, batch: Batch, count: int, context: Context = nullcontext) -> float:
    """Return samples/s of steps within a context; the time to enter and exit the context does not count."""
    with context():
        start = time.perf_counter()
        run(step, itertools.repeat(batch), range(count))
        seconds = time.perf_counter() - start
    return count * len(batch[0]) / seconds


def profilers(options: Options) -> list[Row]:
    """Measure marks on short steps, where their overhead is largest, and profilers on long steps, as in use."""
    count, turns = (2, 2) if options.quick else (3, 24 * options.repetitions)
    rows = []
    with one_thread():
        for case in (UNET, VIT):
            batch, step, bare = case.batch(CPU), case.step(CPU), case.step(CPU)
            bare.__class__ = unmarked(Step, step_module)
            contests = {
                "plain": partial(rate, unmarked(loop.run_steps, loop), bare, batch, count),
                "off": partial(rate, loop.run_steps, step, batch, count),
                "on": partial(rate, loop.run_steps, step, batch, count, partial(marking, nvtx.annotate)),
            }
            found = in_turns(turns, contests)
            counted = counts(case, step.model, count)
            for name, target, text in (("off", FREE, "marks, unused"), ("on", NVTX, "marks, NVTX ranges")):
                title = f"{text}: {label(case)}"
                rows.append(Row(title, "samples/s", found[name], "without marks", found["plain"], counted, target))
        rows += [row for case in (FULL_UNET, FULL_VIT) for row in overheads(options, case)]
    return rows


def overheads(options: Options, case: Case) -> list[Row]:
    """Measure steps with and without each profiler; the ratio is the remaining fraction of speed."""
    count, turns = (2, 2) if options.quick else (10, options.repetitions)
    batch, step = case.batch(CPU), case.step(CPU)
    functions = [each for each in (*vars(Step).values(), type(step.model).forward) if inspect.isfunction(each)]
    import line_profiler

    codes = {function: function.__code__ for function in functions}
    timed = line_profiler.LineProfiler(*functions)
    own: dict[str, Context] = {
        "none": nullcontext,
        "torch": lambda: torch_profiler.TorchProfiler(options.folder, 0, torch.device("cpu")).attached(),
        "lines": lambda: timed,
    }
    contests = {name: partial(rate, loop.run_steps, step, batch, count, context) for name, context in own.items()}
    found = in_turns(turns, contests)
    for function, code in codes.items():
        function.__code__ = code
    counted = counts(case, step.model, count)
    return [
        Row(f"profiler {name}: {label(case)}", "samples/s", found[name], "without", found["none"], counted)
        for name in list(own)[1:]
    ]
