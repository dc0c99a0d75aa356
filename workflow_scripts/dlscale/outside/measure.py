"""`dlscale measure -- COMMAND`: run any program as it is, and say how fast it trains, and what bounds it."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlscale.config.places import results_of
from dlscale.config.records import PlanRecord, RunReference
from dlscale.core import machine, telemetry
from dlscale.core.errors import UserError
from dlscale.core.files import whole, write_text
from dlscale.core.noise import interval
from dlscale.core.settings import write_yaml
from dlscale.core.text import duration, many, number
from dlscale.measure.records import Throughput
from dlscale.outside import logs
from dlscale.outside import steps as seen
from dlscale.outside.running import WAYS, Reading, measured, run_command, warn_of_lost_hook
from dlscale.outside.window import PROFILED
from dlscale.report import report
from dlscale.report.results import PlanResult, RunResult, read_plan, read_run
from dlscale.report.verdict import Verdict, of
from dlscale.report.verdict import told as explained

#: The plan of all programs that were measured, and its study.
PLAN, STUDY = "measured", "program"


def main(args: argparse.Namespace, configuration: object = None) -> int:
    """Run `args.command` to its end, and return its own exit status."""
    pattern = seen.pattern(args.rate) if args.rate else None
    if args.batch_size is not None and args.batch_size < 1:
        raise UserError(f"--batch-size: {args.batch_size}: expected a whole number from 1")
    plan = results_of(None) / "plans" / PLAN
    log = Path(args.steps) if args.steps else None
    reading = Reading(args.batch_size, args.rate, log, logs.start_of(log) if log else None, log_first=True)
    place, run = _reserved(args.name or _called(args.command), plan), None
    try:
        with whole(place) as folder:
            steps, rows = folder / "steps", folder / "telemetry/throughput.csv"
            steps.mkdir(parents=True)
            profilers = None
            if args.profile:
                from dlscale.outside import profile as module  # with PyTorch, for which no other program waits

                profilers = module.Profilers(folder)
            # Kineto, PyTorch's profiler, would print what it does among what the program prints.
            more = {"KINETO_LOG_LEVEL": "99", PROFILED: str(os.getpid())} if profilers else {}
            warn_of_lost_hook(args.command, reading)
            with telemetry.sampled(rows, os.getpid(), 1, machine.gpus()):
                run = run_command(
                    *(args.command, steps, pattern),
                    environment=more,
                    beside=profilers.beside if profilers else None,
                    warn=not args.steps,
                )
            throughput, processes = measured(
                args.command, steps, rows, run, reading, profilers.apart if profilers else []
            )
            profile = profilers.told(processes, throughput) if profilers else None
            shutil.rmtree(steps)
            throughput.write(folder / "throughput.json")
            own = {"command": args.command, "folder": str(Path.cwd())}
            settings: dict[str, Any] = {"study": STUDY, "program": own}
            settings |= {"batch_size": throughput.batch_size, "geometry": {"gpus_per_node": throughput.nranks}}
            write_yaml(folder / "config.yaml", settings)
    except UserError as error:
        if run is None:
            raise
        print(f"dlscale measure: {error}", file=sys.stderr)
        return run.status
    finally:
        with contextlib.suppress(OSError):  # only an empty one goes
            place.rmdir()
    said = lines(place, throughput, of(read_run(place)))
    print("\n".join([*said, *(module.lines(profile) if profile else [])]), file=sys.stderr)
    try:
        page = _page(plan)
    except UserError as error:
        print(f"dlscale measure: no page: {error}", file=sys.stderr)
        return run.status
    print(f"Page: {page}", file=sys.stderr, flush=True)
    return run.status


def _script(command: Sequence[str]) -> str:
    """Return what a command trains: its script, or else its module or program."""
    scripts = [word for word in command if word.endswith(".py")]
    module = [after for word, after in itertools.pairwise(command) if word == "-m"]
    return [*scripts, *module[-1:], command[0]][0]


def _called(command: Sequence[str]) -> str:
    """Return a name for a command: that of its script, or else of its program."""
    stem = Path(_script(command)).stem.lower()
    return re.sub(r"[^a-z0-9]+", "_", stem).lstrip("_0123456789")[:40].strip("_") or "program"


def _reserved(name: str, plan: Path) -> Path:
    """Make a folder of that name, with a number where it is taken: what was measured before stays."""
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name):
        raise UserError(f"--name: {name}: expected up to 40 lower-case letters, digits and underscores")
    for count in itertools.count(1):
        place = plan / (name if count == 1 else f"{name}_{count}")
        with contextlib.suppress(FileExistsError):
            place.mkdir(parents=True)
            break
    return place


# ---- telling it --------------------------------------------------------------------------------------


def lines(folder: Path, throughput: Throughput, verdict: Verdict) -> list[str]:
    """Return what was measured, and the verdict, in lines for a terminal."""
    full, outside = throughput.full, throughput.outside
    assert full and outside
    centre, reach = interval(full.trial_throughput)
    unit = "samples/s" if outside.samples else "steps/s"
    said = f"{number(centre)} {unit}"
    said += f" ± {number(reach, 2)}" if reach < centre else " (too few steps to know how certain)"
    batch = f" of {many(throughput.batch_size, 'sample')}" if throughput.batch_size else ""
    ranks = f", {throughput.nranks} processes" if throughput.nranks > 1 else ""
    count = many(outside.steps, "rate" if outside.way == "rate" else "step")
    text = [f"{folder.name}: {said} ({count}{batch}{ranks}; {WAYS[outside.way]})"]
    ended = f", and ended with status {outside.status}" if outside.status else ""
    first = f"  first step after {duration(outside.first_step_seconds)}; all took {duration(outside.seconds)}{ended}"
    text.append(first)
    if outside.trainings > 1:
        text.append(f"  its log has {outside.trainings} trainings, one after the other: the longest counts")
    if outside.profiled:
        text.append("  the run is so short that profilers were at work in these steps: without --profile it is faster")
    return [*text, *explained(verdict)]


def _page(plan: Path) -> Path:
    """Write the page of all programs that were measured, with its plan; return its place."""
    found = set(plan.glob("*/throughput.json"))
    runs = sorted((path.parent for path in found), key=lambda path: path.stat().st_mtime)
    record = PlanRecord(
        plan=PLAN,
        title="Programs, as they are",
        study=STUDY,
        kind="set",
        measure=_measured(*runs),
        runs=[RunReference(name=run.name, plan=PLAN, run=run.name, measure=_measured(run)) for run in runs],
    )
    write_yaml(plan / "plan.yaml", record.model_dump(mode="json"))
    page = plan / "report.html"
    write_text(page, report.page(record.title or PLAN, _programs(plan), [], plan, call="dlscale measure"))
    # Another call that ended meanwhile may have written its page before.
    return page if set(plan.glob("*/throughput.json")) == found else _page(plan)


def _programs(plan: Path) -> list[PlanResult]:
    """Return a plan for each program, of its runs: the speeds of two programs say nothing of each other."""
    whole = read_plan(plan / "plan.yaml")
    of = defaultdict[str, list[RunResult]](list)
    for run in whole.runs:
        own = run.settings.get("program", run.settings)
        of[str(Path(own["folder"], _script(own["command"])))].append(run)
    found = list[PlanResult]()
    for script, runs in of.items():
        named = {run.name for run in runs}
        references = [each for each in whole.record.runs if each.name in named]
        own = {"plan": runs[0].name, "title": Path(script).name, "runs": references}
        found.append(PlanResult(whole.record.model_copy(update=own), runs))
    return found


def _measured(*runs: Path) -> list[Any]:
    """Return the stages that runs have records of."""
    return ["throughput", *(["profile"] if any((run / "profile/profile.json").exists() for run in runs) else [])]
