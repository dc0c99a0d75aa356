"""Stage `profile`: where the time and the memory of some steps go, by one profiler after the other.

Each profiler has steps of its own, and plain ones just before and after: what a profiler costs is told against these. A
profiler that does not work here says why, and the stage goes on without it.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import logging
import statistics
from collections.abc import Iterator
from pathlib import Path

from dlscale.config.run import Profile as Settings
from dlscale.config.run import load_run
from dlscale.core import board, files
from dlscale.core.errors import UserError, brief
from dlscale.core.files import whole
from dlscale.data.loaders.base import Batch
from dlscale.measure.flops import sample_work
from dlscale.measure.profilers.records import Exchanged, Profile, ProfiledTool, TopEntry
from dlscale.measure.profilers.tool import Found, Tool, Unavailable, overhead
from dlscale.measure.window import Window
from dlscale.parallel import exchanges
from dlscale.parallel.records import Memory
from dlscale.parallel.rendezvous import describe_device
from dlscale.parallel.world import World
from dlscale.train import memory
from dlscale.train.around import entered
from dlscale.train.build import Session, open_session
from dlscale.train.exhaustion import is_exhaustion

#: Rows of each profiler and kind that the record holds; the CSV file has all.
TOP = 10


def main(args: argparse.Namespace) -> None:
    """Profile the run in `args.config` on the data of `args.manifest`; fill the folder `args.out`."""
    run = load_run(args.config, "profile")
    settings: Settings = run.profile
    ranks = run.processes.world_size
    if wrong := [rank for rank in settings.ranks if rank >= ranks]:
        raise UserError(f"profile.ranks: {wrong[0]}: this run has {ranks} processes, numbered from 0; name others")
    if "lines" in settings.tools:
        from dlscale.measure.profilers.lines import resolve

        for name in settings.functions:
            resolve(name)
    with (
        entered(run, args.manifest, args.device) as (world, _),
        _folder(Path(args.out), world) as folder,
    ):
        found = dict[str, Found]()
        if "nsys" in settings.tools:  # its processes need the device's memory, and ours have no model yet
            from dlscale.measure.profilers import nsys

            found["nsys"] = nsys.profile(run.model_dump_json(), args.manifest, world, args.threads, args.device, folder)
        record, rows = measure(settings, open_session(run, args.manifest, world, args.threads), folder, found)
        if world.main:
            record.write(folder / "profile.json")
            board.write(Path(args.out).parent / "tensorboard" / "profile", scalars(record))
            write_table(folder / "profile_summary.csv", rows)


def scalars(profile: Profile) -> dict[str, float]:
    """Return what each profiler saw of the ranges of a step, ms a step on the host and of the device's work."""
    found = {}
    for tool in profile.tools:
        for name, time in tool.ranges.items():
            found[f"profile_{tool.name}_ms/{name}"] = 1e3 * time.seconds
            if time.device_seconds is not None:
                found[f"profile_{tool.name}_device_ms/{name}"] = 1e3 * time.device_seconds
    return found


def measure(
    settings: Settings, session: Session, folder: Path, found: dict[str, Found] | None = None
) -> tuple[Profile, list[TopEntry]]:
    """Profile steps of a session; all ranks call it.

    Parameters
    ----------
    folder
        For reports.
    found
        What profilers have found that look at processes of their own (nsys).

    Returns
    -------
    Profile
        The record; what no profiler tells is known to the first rank alone.
    list of TopEntry
        All rows of the summary, of all profiled ranks.
    """
    world, found = session.world, dict(found or {})
    names: list[str] = [name for name in settings.tools if name != "nsys"]
    tools = {name: _tool(name, settings, session, folder) if world.rank in settings.ranks else None for name in names}
    with contextlib.closing(Window(settings, session)) as window:
        batch = window.batch()
        used = _memory(session, batch)  # before any other step: what is set up is then all that there is
        window.run(settings.skip)
        exchanged = _exchanged(session, window)
        seconds = list[float]()
        for name, tool in tools.items():
            world.barrier()
            found[name], plain = _profile(name, tool, window)
            seconds += plain
        seconds = seconds or window.run()
        logging.info("without a profiler: %.2f ms a step", 1e3 * statistics.median(seconds))
        if world.device.type == "cuda" and "torch" in found:
            found["torch"] = _with_memory_history(found["torch"], window, folder)
        counted, formula = sample_work(session, batch) if world.main else (None, None)
    seen, rows = _joined(settings, world.gather(found))
    record = Profile(
        device=describe_device(world.device),
        nranks=session.devices,
        batch_size=session.run.batch_size,
        settings=settings.model_dump(),
        seconds_per_step=seconds,
        tools=seen,
        memory=used,
        exchanged=exchanged,
        counted=counted,
        formula=formula,
        top=first_rows(rows, min(settings.ranks)),
    )
    return record, rows


def _joined(settings: Settings, every: list[dict[str, Found]]) -> tuple[list[ProfiledTool], list[TopEntry]]:
    """Return what was found on all profiled ranks, of all ranks: the tools as the first of them saw them."""
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
            logging.info("%s: %.2f ms a step; %s", name, 1e3 * tool.seconds_per_step, tool.overhead.words)
    if all(tool.problem for tool in tools):
        problems = "; ".join(f"{tool.name}: {tool.problem}" for tool in tools)
        raise UserError(f"profile.tools: no profiler works here: {problems}")
    return tools, rows


@contextlib.contextmanager
def _folder(out: Path, world: World) -> Iterator[Path]:
    """Yield the folder in which all ranks write; it becomes `out`, in place of a former one, when all are done."""
    with contextlib.ExitStack() as stack:
        mine = stack.enter_context(whole(out)) if world.main else None
        if mine is not None:
            mine.mkdir()
        folder = world.gather(mine)[0]
        assert folder is not None
        yield folder
        world.barrier()


def _memory(session: Session, batch: Batch) -> Memory | None:
    """Return the memory that a step takes, predicted and measured; None, with a line in the log, if it is not told."""
    try:
        return memory.measure(session, batch)
    except Exception as error:  # a model may do anything; what is left out here is no reason to lose a profile
        if is_exhaustion(error) or isinstance(error, UserError):
            raise
        logging.info("memory cannot be predicted: %s: %s", type(error).__name__, brief(error))
        return None


def _exchanged(session: Session, window: Window) -> Exchanged | None:
    """Return what a rank exchanges in a step, counted in one; None if there is but one, or compiled code hides it."""
    run = session.run
    if session.world.size == 1 or run.cuda_graph or run.compile.mode != "none":
        return None
    window.run(1)  # DDP arranges its buckets after its first step
    with exchanges.Counting() as counting:
        window.run(1)
    return Exchanged(counted=dict(counting.bytes))


def _tool(name: str, settings: Settings, session: Session, folder: Path) -> Tool:
    """Return a profiler; what it needs is imported only now."""
    rank = session.world.rank
    if name == "torch":
        from dlscale.measure.profilers.torch_profiler import TorchProfiler

        return TorchProfiler(folder, rank, session.world.device)
    if name == "lines":
        from dlscale.measure.profilers.lines import LineProfiler

        return LineProfiler(folder, rank, session, settings.functions)
    from dlscale.measure.profilers.stacks import StackSampler

    return StackSampler(folder, rank)


def _profile(name: str, tool: Tool | None, window: Window) -> tuple[Found, list[float]]:
    """Return what a profiler, if any, found of a window of steps, and the seconds of the plain steps before and after.

    All ranks make the steps, whatever fails.
    """
    problem = None
    before, seconds = window.run(), list[float]()
    try:
        with tool.attached() if tool else contextlib.nullcontext():
            seconds = window.run()
    except (Unavailable, OSError) as error:
        problem = str(files.explained(error, "") if isinstance(error, OSError) else error)
    seconds = seconds or window.run()
    after = window.run()  # at once: to read what a profiler found takes its time, in which a machine drifts
    if tool and not problem:
        try:
            told, rows = tool.found(seconds)
            cost = overhead(before, seconds, after)
            return (told.model_copy(update={"overhead": cost}), rows), before + after
        except (Unavailable, OSError) as error:
            problem = str(files.explained(error, "") if isinstance(error, OSError) else error)
    return (ProfiledTool(name=name, problem=problem), []), before + after


def _with_memory_history(found: Found, window: Window, folder: Path) -> Found:
    """Add the history of the GPU's memory in two further steps."""
    from dlscale.measure.profilers.tool import report
    from dlscale.measure.profilers.torch_profiler import memory_history

    rank = window.session.world.rank
    path = report(folder, "memory", rank, "pickle")
    with memory_history(path) if rank in window.settings.ranks else contextlib.nullcontext():
        window.run(2)
    files = {**found[0].files, f"memory of rank {rank}, for pytorch.org/memory_viz": path.name}
    return found[0].model_copy(update={"files": files}), found[1]


def write_table(path: Path, rows: list[TopEntry]) -> None:
    """Write all rows as CSV, numbers with six digits."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(TopEntry.model_fields), lineterminator="\n")
        table.writeheader()
        for row in rows:
            cells = row.model_dump().items()
            table.writerow({key: f"{cell:.6g}" if isinstance(cell, float) else cell for key, cell in cells})


def first_rows(rows: list[TopEntry], rank: int) -> list[TopEntry]:
    """Return the first rows of each profiler and kind, of one rank."""
    counts: dict[tuple[str, str], int] = {}
    top = []
    for row in sorted((row for row in rows if row.rank == rank), key=lambda row: -row.seconds):
        key = row.tool, row.kind
        counts[key] = counts.get(key, 0) + 1
        if counts[key] <= TOP:
            top.append(row)
    return sorted(top, key=lambda row: (row.tool, row.kind))
