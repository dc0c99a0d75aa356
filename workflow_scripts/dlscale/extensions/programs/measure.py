"""`dlscale measure -- COMMAND`: run any program unchanged, and report its speed and its bottleneck."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import shutil
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlscale.config.places import MEASURED, results_of
from dlscale.config.records import PlanRecord, RunReference
from dlscale.core import machine, registry, telemetry
from dlscale.core.errors import UserError, cut
from dlscale.core.files import HOST, remove, remove_left, translate_error, write_text
from dlscale.core.noise import interval
from dlscale.core.paths import Results
from dlscale.core.redact import redact
from dlscale.core.settings import write_yaml
from dlscale.core.text import duration, many, number, readable
from dlscale.extensions.hangs.supervisor import HUNG, MAX_SECONDS, MIN_SECONDS, HangSupervisor
from dlscale.extensions.programs import live, logs
from dlscale.extensions.programs import steps as seen
from dlscale.extensions.programs.running import (
    UNSEEN_SECONDS,
    WAYS,
    Reading,
    Unseen,
    measured,
    run_command,
    say,
    warn_of_lost_hook,
)
from dlscale.extensions.programs.window import PROFILED
from dlscale.measure.records import Throughput
from dlscale.report import report
from dlscale.report.verdict import Verdict, format_findings, judge_run
from dlscale.results import PlanResult, RunResult, read_alone

#: Function from a program's process id to a context that is open while the program runs.
ProgramContext = Callable[[int], contextlib.AbstractContextManager[None]]

#: Names of the plan of all measured programs, and of its study.
PLAN, STUDY = MEASURED, "program"

#: Files with the state of PyTorch's allocator, which the extensions `health` and `hangs` write in a run's folder.
SNAPSHOTS = "*memory_snapshot.pickle"

#: Largest accepted number of samples per step.
MAX_BATCH_SIZE = 1_000_000_000


def main(args: argparse.Namespace, configuration: object = None) -> int:
    """Run `args.command` to its end; return the program's exit status, even if its steps cannot be read."""
    pattern = seen.pattern(args.rate) if args.rate else None
    if args.batch_size is not None and not 1 <= args.batch_size <= MAX_BATCH_SIZE:
        raise UserError(
            f"--batch-size: {cut(str(args.batch_size), 40)}: expected a whole number from 1 to {MAX_BATCH_SIZE:,}"
        )
    if args.hang_after is not None and not MIN_SECONDS <= args.hang_after <= MAX_SECONDS:
        raise UserError(f"--hang-after: {args.hang_after}: expected {MIN_SECONDS:.0f} to {MAX_SECONDS:,.0f} seconds")
    remove_left(Path(tempfile.gettempdir()), f"dlscale-replay.{HOST}")  # left by a call that was killed with its keeper
    plan = Path(Results(results_of(None)).plan(PLAN)).parent
    log = Path(args.steps) if args.steps else None
    reading = Reading(args.batch_size, False, args.rate, log, logs.start_of(log) if log else None, log_first=True)
    watch = registry.provided("LoaderWatch", refuse_loader_option)() if args.loader else None
    # A missing results folder is made only after the program's end, because the program may make the folder itself.
    first = plan if os.path.lexists(results_of(None)) else Path(f".dlscale-{uuid.uuid4().hex[:8]}")
    folder, profilers, hang = _reserved(args.name or _called(args.command), first), None, None
    steps, rows = folder / "steps", folder / "telemetry/throughput.csv"
    own = {"command": redact([readable(word) for word in args.command]), "folder": readable(str(Path.cwd()))}
    try:
        steps.mkdir()
        _write_settings(folder, own)
        if args.replay is not None:
            _replay(args, folder, plan)
        if args.profile:
            from dlscale.extensions.programs import profile as module  # here, because it imports PyTorch, which is slow

            profilers = module.Profilers(folder)
        # Without KINETO_LOG_LEVEL, a part of PyTorch's profiler (Kineto) prints messages into the program's output.
        more = {"KINETO_LOG_LEVEL": "99", PROFILED: str(os.getpid())} if profilers else {}
        more |= watch.environment if watch else {}
        beside: list[ProgramContext] = [profilers.sample_stacks] if profilers else []
        if args.hang_after is not None:
            before = not (args.rate or args.steps)
            hang = HangSupervisor(steps, folder, args.hang_after, say, before_first_step=before)
            more = {**more, **hang.environment}
            beside.append(hang.watch)
        if args.live:
            beside.append(lambda pid: live.showing(steps, rows))
        warn_of_lost_hook(args.command, reading)
        with telemetry.sampled(rows, os.getpid(), 1, machine.gpus()):
            run = run_command(
                *(args.command, steps, pattern),
                environment=more,
                beside=_together(beside),
                warn=not args.steps,
            )
    except BaseException:
        if not (steps.is_dir() and any(steps.iterdir())):  # the program did not start
            remove(folder)
        with contextlib.suppress(OSError):
            _move(folder, plan)
        raise
    if hang and hang.finding:  # printed again, after the messages of processes that dlscale ended
        run = replace(run, status=HUNG)
        kept = plan / folder.name / hang.folder.name
        say(f"dlscale measure: ended the program: {hang.finding}. Stacks of all processes: {kept}")
    # From this line on an error does not change the exit status. Written records are kept, unless the run is short and
    # has no steps.
    try:
        _write_settings(folder, {**own, "status": run.status, "seconds": run.seconds})
        if watch:
            say("\n".join(watch.finish(steps, folder)))
        apart = profilers.excluded_spans if profilers else []
        throughput, processes = measured(own["command"], steps, rows, run, reading, apart)
        folder = _move(folder, plan)
        steps = folder / "steps"
        if profilers:
            profilers.use(folder)
        throughput.write(folder / "throughput.json")
        geometry = {"gpus_per_node": throughput.nranks}
        _write_settings(folder, own, batch_size=throughput.batch_size, geometry=geometry)
        profile = None
        try:
            profile = profilers.write_profile(processes, throughput) if profilers else None
        finally:  # the verdict reads the profile
            say("\n".join(lines(folder, throughput, judge_run(read_alone(folder)))))
        if profile:
            say("\n".join(module.lines(profile)))
        remove(steps)
    except Exception as error:
        # The record of a long run is kept even if the run has no steps.
        nothing = isinstance(error, Unseen) and not seen.processes(steps) and run.seconds < UNSEEN_SECONDS
        nothing = nothing and not (hang and hang.finding) and not [*folder.glob(SNAPSHOTS)]
        if nothing:
            remove(folder)
        with contextlib.suppress(OSError):
            folder = _move(folder, plan)
        _complain(error, "" if nothing or not folder.exists() else f"; the run's record is kept in {folder}")
    for file in sorted(folder.glob(SNAPSHOTS)):
        say(f"State of the GPU's memory, for https://pytorch.org/memory_viz: {file}")
    if (folder / "throughput.json").is_file() and folder.parent == plan:
        try:
            say(f"Page: {_page(plan)}")
        except Exception as error:
            _complain(error, "; the page was not written")
    return run.status


def _replay(args: argparse.Namespace, folder: Path, plan: Path) -> None:
    """Measure a copy of the program with a loader that costs nothing; raise `UserError` if no copy can be made."""
    measure = registry.provided("headroom", None)
    if measure is None:
        raise UserError("--replay: the extension `headroom` is not installed. Measure without --replay")
    if args.replay < 1:
        raise UserError(f"--replay: {args.replay}: expected the number of batches to keep, at least 1")
    say("dlscale measure: a scratch copy runs first, with and without replayed batches; its losses are meaningless")
    found, log = None, folder / "headroom.log"
    try:
        found = measure(args.command, args.replay, log)
    except UserError:
        raise
    except Exception as error:
        said = str(error) if type(error).__name__ == "NoHeadroom" else redact(f"a defect of dlscale: {error!r:.300}")
        _say_where(folder, plan)(f"dlscale measure: --replay: {said} (output of the copy: {log})")
    if found:
        found.write(folder / "headroom.json")
        say(f"dlscale measure: --replay: {found.text}")


def _say_where(folder: Path, plan: Path) -> Callable[[str], None]:
    """Return a function that prints a line with the final paths of files in a run's folder."""
    return lambda line: say(line.replace(str(folder), str(plan / folder.name)))


def _move(folder: Path, plan: Path) -> Path:
    """Move a run's folder into `plan`, unless it is missing or already there; return its new path."""
    if folder.parent == plan:
        return folder
    moved = folder
    if folder.is_dir():
        moved = _reserved(folder.name, plan)
        try:
            folder.rename(moved)
        except OSError:  # the program made the results folder on another file system
            shutil.copytree(folder, moved, dirs_exist_ok=True)
            remove(folder)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()
    return moved


def _together(several: Sequence[ProgramContext]) -> ProgramContext:
    """Return a function that opens the contexts of all functions in `several`."""

    @contextlib.contextmanager
    def opened(program: int) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for each in several:
                stack.enter_context(each(program))
            yield

    return opened


def refuse_loader_option() -> None:
    """Raise a `UserError`, because the extension of `--loader` is missing."""
    raise UserError("--loader: the extension `loading` is not installed. Measure without --loader")


def _complain(error: Exception, known: str = "") -> None:
    """Print the message of an error, followed by `known`, which names results that are kept or missing."""
    mistake = translate_error(error, "") if isinstance(error, OSError) else error
    said = str(mistake) if isinstance(mistake, UserError) else redact(f"a defect of dlscale: {error!r:.300}")
    say(f"dlscale measure: {said}{known}")


def _write_settings(folder: Path, own: dict[str, Any], **more: Any) -> None:
    write_yaml(folder / "config.yaml", {"study": STUDY, "program": own, **more})


def _script(command: Sequence[str]) -> str:
    """Return the script of a command; without a script, its module or program."""
    scripts = [word for word in command if word.endswith(".py")]
    module = [after for word, after in itertools.pairwise(command) if word == "-m"]
    return [*scripts, *module[-1:], command[0]][0]


def _called(command: Sequence[str]) -> str:
    """Make a name for the result of a command from the name of its script, module or program."""
    stem = Path(_script(command)).stem.lower()
    return re.sub(r"[^a-z0-9]+", "_", stem).lstrip("_0123456789")[:40].strip("_") or "program"


def _reserved(name: str, plan: Path) -> Path:
    """Make a new folder `name` in `plan`; if the name is taken, add a number, so that earlier results are kept."""
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name):
        raise UserError(
            f"--name: {name}: expected 1 to 40 lower-case letters, digits and underscores, beginning with a letter"
        )
    plan.mkdir(parents=True, exist_ok=True)  # raises if the path is a file or a broken link
    for count in itertools.count(1):
        folder = plan / (name if count == 1 else f"{name}_{count}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            break
    return folder


# ---- output ------------------------------------------------------------------------------------------


def lines(folder: Path, throughput: Throughput, verdict: Verdict) -> list[str]:
    """Return the result and the verdict as lines for a terminal."""
    full, outside = throughput.full, throughput.outside
    assert full and outside
    centre, reach = interval(full.trial_throughput)
    said = f"{number(centre)} {throughput.unit}"
    said += f" ± {number(reach, 2)}" if reach < centre else " (too few or too noisy values for a 95 % interval)"
    batch = f" of {many(throughput.batch_size, 'sample')}" if throughput.batch_size else ""
    ranks = f", {throughput.nranks} processes" if throughput.nranks > 1 else ""
    count = many(outside.steps, "rate" if outside.way == "rate" else "step")
    text = [f"{folder.name}: {said} ({count}{batch}{ranks}; {WAYS[outside.way]})"]
    ended = f"; the program ended with status {outside.status}" if outside.status else ""
    # After a clock was set back, the time of the first step is unknown.
    first = f"first step after {duration(outside.first_step_seconds)}; " if outside.first_step_seconds else ""
    text.append(f"  {first}total {duration(outside.seconds)}{ended}")
    if not outside.samples:
        text.append("  the number of samples per step is uncertain; state it with --batch-size N")
    if outside.waiting is None and outside.way == "seen":
        text.append(
            "  the wait for data is unknown, because the thread that trains gets no batches from PyTorch's DataLoader; "
            "dlscale.timed(loader) measures the wait"
        )
    if outside.trainings > 1:
        text.append(f"  {outside.trainings} trainings ran one after the other; the rate is the longest training's")
    if outside.profiled:
        text.append(
            "  the run is too short: the rate includes steps that profilers slowed down. Measure again without "
            "--profile, or let the program run longer"
        )
    return [*text, *format_findings(verdict)]


def _page(plan: Path) -> Path:
    """Write the page and the plan of all measured programs; return the page's path."""
    found, known = _runs(plan), list[tuple[str, RunResult]]()
    for folder in sorted(found, key=lambda folder: (folder / "throughput.json").stat().st_mtime):
        try:
            run = read_alone(folder)
            own = run.settings.get("program", run.settings)
            known.append((str(Path(own["folder"], _script(own["command"]))), run))
        except Exception as error:  # a damaged run, or a run of another user: the page shows the other runs
            _complain(error, f"; the page leaves out {folder.name}")
    if not known:
        raise UserError(f"{plan}: no run can be read")
    record = PlanRecord(
        plan=PLAN,
        title="Measured programs",
        study=STUDY,
        kind="set",
        measure=_measured(*(run.folder for _, run in known)),
        runs=[RunReference(name=run.name, plan=PLAN, run=run.name, measure=_measured(run.folder)) for _, run in known],
    )
    write_yaml(plan / "plan.yaml", record.model_dump(mode="json"))
    page = plan / "report.html"
    write_text(page, report.page(record.title or PLAN, _programs(record, known), [], plan, call="dlscale measure"))
    # If a parallel call has added a run meanwhile, write the page again.
    return page if _runs(plan) == found else _page(plan)


def _runs(plan: Path) -> set[Path]:
    """Return the folders of measured runs; skip hidden folders, which are temporary."""
    return {path.parent for path in plan.glob("[!.]*/throughput.json")}


def _programs(record: PlanRecord, known: Sequence[tuple[str, RunResult]]) -> list[PlanResult]:
    """Return a plan for each program, because speeds of different programs are not comparable."""
    of = defaultdict[str, list[RunResult]](list)
    for script, run in known:
        of[script].append(run)
    found = list[PlanResult]()
    for script, runs in of.items():
        named = {run.name for run in runs}
        references = [each for each in record.runs if each.name in named]
        own = {"plan": runs[0].name, "title": Path(script).name, "runs": references}
        found.append(PlanResult(record.model_copy(update=own), runs))
    return found


def _measured(*runs: Path) -> list[Any]:
    """Return the stages with a record in at least one run."""
    files = {"headroom": "headroom.json", "profile": "profile/profile.json"}
    return ["throughput", *(stage for stage, file in files.items() if any((run / file).exists() for run in runs))]
