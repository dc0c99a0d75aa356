"""Stage `profile`: measure time and memory of some steps with one profiler after the other.

Each profiler gets separate steps. Plain steps just before and after these steps show the profiler's overhead.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import statistics
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from dlscale.config.run import Profile as Settings
from dlscale.config.run import load_run
from dlscale.core import registry
from dlscale.core.errors import UserError, brief
from dlscale.core.files import atomic_write, write_text
from dlscale.core.text import escape_formula, many
from dlscale.extensions.profile.lines import LineProfiler
from dlscale.extensions.profile.memory import measure as measure_memory
from dlscale.extensions.profile.operators import operator_work
from dlscale.extensions.profile.torch_profiler import TorchProfiler
from dlscale.extensions.profile.window import Window
from dlscale.measure.profilers import Found, Profile, ProfiledTool, TopEntry, Unavailable, overhead
from dlscale.measure.roofline import attempt
from dlscale.parallel.records import Memory
from dlscale.parallel.rendezvous import describe_device
from dlscale.parallel.world import World
from dlscale.train.around import is_exhaustion, run_context
from dlscale.train.build import Session, open_session
from dlscale.train.loop import Batch

#: Number of rows per profiler and kind in the record. The CSV file has all rows.
TOP = 10


def main(args: argparse.Namespace) -> None:
    """Profile the run in `args.config` on the data of `args.manifest`; fill the folder `args.out`."""
    run = load_run(args.config, "profile")
    settings: Settings = run.profile
    ranks = run.processes.world_size
    if wrong := [rank for rank in settings.ranks if rank >= ranks]:
        raise UserError(
            f"profile.ranks: {wrong[0]}: this run has {many(ranks, 'process')}, numbered from 0; choose existing ranks"
        )
    with (
        run_context(run, args.manifest, args.device) as (world, _),
        _folder(Path(args.out), world) as folder,
    ):
        found = dict[str, Found]()
        # Profilers with their own processes run before the model is opened, because they need the device's memory.
        for name in settings.tools:
            if start := getattr(registry.load(registry.table("PROFILERS")[name]), "profile_apart", None):
                found[name] = start(run.model_dump_json(), args.manifest, world, args.threads, args.device, folder)
        record, rows = measure(settings, open_session(run, args.manifest, world, args.threads), folder, found)
        if world.main:
            write(record, rows, folder)


def write(record: Profile, rows: list[TopEntry], folder: Path) -> None:
    """Write the record of a profile, and the CSV file with all rows of its summary."""
    record.write(folder / "profile.json")
    table = pd.DataFrame([row.model_dump() for row in rows], columns=list(TopEntry.model_fields))
    text = table.map(escape_formula).to_csv(index=False, float_format="%.6g")
    write_text(folder / "profile_summary.csv", text)


def measure(
    settings: Settings, session: Session, folder: Path, found: dict[str, Found] | None = None
) -> tuple[Profile, list[TopEntry]]:
    """Profile steps of a session; call on all ranks.

    Parameters
    ----------
    folder
        Folder for the profilers' reports.
    found
        Results of profilers that started their own processes.

    Returns
    -------
    Profile
        The record. Memory and the times of plain steps are those of this rank.
    list of TopEntry
        All rows of the summary.
    """
    world, found = session.world, dict(found or {})
    tools: dict[str, LineProfiler | TorchProfiler | None] = {name: None for name in settings.tools if name not in found}
    if world.rank in settings.ranks:
        if "lines" in tools:
            tools["lines"] = LineProfiler(folder, world.rank, session, settings.functions)
        if "torch" in tools:
            tools["torch"] = TorchProfiler(folder, world.rank, world.device)
    with contextlib.closing(Window(settings, session)) as window:
        batch = window.batch()
        used = _memory(session, batch)  # before any other step, so that only the set-up is in memory
        window.run(settings.skip)
        seconds = list[float]()
        for name, tool in tools.items():
            world.barrier()
            found[name], plain = _profile(name, tool, window)
            seconds += plain
        seconds = seconds or window.run()
        work = attempt("operators cannot be timed", lambda: operator_work(session, batch))
        logging.info("without a profiler: %.2f ms per step", 1e3 * statistics.median(seconds))
    seen, rows = _joined(settings, world.gather(found))
    record = Profile(
        device=describe_device(world),
        nranks=session.devices,
        batch_size=session.run.batch_size,
        settings=settings.model_dump(),
        seconds_per_step=seconds,
        tools=seen,
        memory=used,
        top=first_rows(rows, min(settings.ranks)),
        work=work or [],
    )
    return record, rows


def _memory(session: Session, batch: Batch) -> Memory | None:
    """Return the memory of a step; if fake tensors cannot run the model, log the reason and return None."""
    try:
        return measure_memory(session, batch)
    except Exception as error:
        if is_exhaustion(error) or isinstance(error, UserError):  # end the stage: other ranks may wait in this step
            raise
        logging.info("memory cannot be predicted: %s: %s", type(error).__name__, brief(error))
        return None


def _joined(settings: Settings, every: list[dict[str, Found]]) -> tuple[list[ProfiledTool], list[TopEntry]]:
    """Return the tools with the figures of the first profiled rank, and the rows of all profiled ranks.

    The tools also have the files of all profiled ranks, and the first problem of any profiled rank. Raise `UserError`
    if all profilers have a problem.
    """
    tools, rows = list[ProfiledTool](), list[TopEntry]()
    for name in settings.tools:
        each = [every[rank][name] for rank in sorted(set(settings.ranks))]
        files = {title: file for tool, _ in each for title, file in tool.files.items()}
        problem = next((tool.problem for tool, _ in each if tool.problem), None)
        tool = each[0][0].model_copy(update={"files": files, "problem": problem})
        tools.append(tool)
        rows += [row for _, told in each for row in told]
        if problem:
            logging.warning("%s: no profile: %s", name, problem)
        elif tool.seconds_per_step and tool.overhead:
            logging.info("%s: %.2f ms per step; %s", name, 1e3 * tool.seconds_per_step, tool.overhead.words)
    if all(tool.problem for tool in tools):
        problems = "; ".join(f"{tool.name}: {tool.problem}" for tool in tools)
        raise UserError(f"profile.tools: no profiler works here: {problems}")
    return tools, rows


@contextlib.contextmanager
def _folder(out: Path, world: World) -> Iterator[Path]:
    """Yield a temporary folder for the files of all ranks; rename the folder to `out` when all ranks have finished."""
    with contextlib.ExitStack() as stack:
        mine = stack.enter_context(atomic_write(out)) if world.main else None
        if mine is not None:
            mine.mkdir()
        folder = world.gather(mine)[0]
        assert folder is not None
        yield folder
        world.barrier()


def _profile(name: str, tool: LineProfiler | TorchProfiler | None, window: Window) -> tuple[Found, list[float]]:
    """Profile a window of steps; return the profiler's results, and the seconds of the plain steps before and after.

    All ranks make all steps, even if the profiler fails on some ranks.
    """
    problems, seconds, before = list[str](), list[float](), window.run()
    with _noted(problems), tool.attached() if tool else contextlib.nullcontext():
        seconds = window.run()
    seconds = seconds or window.run()
    after = window.run()  # before the slow reading of results, during which the machine's speed may drift
    if tool and not problems:
        with _noted(problems):
            told, rows = tool.found(seconds)
            cost = overhead(before, seconds, after)
            return (told.model_copy(update={"overhead": cost}), rows), before + after
    return (ProfiledTool(name=name, problem=problems[0] if problems else None), []), before + after


@contextlib.contextmanager
def _noted(problems: list[str]) -> Iterator[None]:
    """Append the error's message to `problems` if a profiler does not work."""
    try:
        yield
    except (Unavailable, OSError) as error:
        problems.append(str(error))


def first_rows(rows: list[TopEntry], rank: int) -> list[TopEntry]:
    """Return the `TOP` rows with the longest time of each profiler and kind, for one rank."""
    mine = sorted((row for row in rows if row.rank == rank), key=lambda row: (row.tool, row.kind, -row.seconds))
    groups = itertools.groupby(mine, key=lambda row: (row.tool, row.kind))
    return [row for _, group in groups for row in itertools.islice(group, TOP)]
