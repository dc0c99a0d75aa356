"""`dlscale measure -- COMMAND`: run any program as it is, and say how fast it trains, and what bounds it."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import sys
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
from dlscale.outside import steps as seen
from dlscale.outside.running import measured, run_command
from dlscale.report import report
from dlscale.report.results import read_plan, read_run
from dlscale.report.verdict import Verdict, of
from dlscale.report.verdict import told as explained

#: The plan of all programs that were measured, and its study.
PLAN, STUDY = "measured", "program"

#: Status of a shell for a command that is not there.
NOT_FOUND = 127


def main(args: argparse.Namespace, configuration: object = None) -> int:
    """Run `args.command` to its end, and return its own exit status."""
    pattern = seen.pattern(args.rate) if args.rate else None
    if not shutil.which(args.command[0]):
        print(f"dlscale measure: {args.command[0]}: no such command", file=sys.stderr)
        return NOT_FOUND
    plan = results_of(None) / "plans" / PLAN
    name, run = _name(args.name or _called(args.command), plan), None
    try:
        with whole(plan / name) as folder:
            steps, rows = folder / "steps", folder / "telemetry/throughput.csv"
            steps.mkdir(parents=True)
            with telemetry.sampled(rows, os.getpid(), 1, machine.gpus()):
                run = run_command(args.command, steps, pattern)
            log = Path(args.steps) if args.steps else None
            throughput = measured(
                args.command, steps, rows, run, args.batch_size, pattern is not None, log, log_first=True
            )
            shutil.rmtree(steps)
            throughput.write(folder / "throughput.json")
            settings: dict[str, Any] = {"study": STUDY, "command": args.command, "folder": str(Path.cwd())}
            settings |= {"batch_size": throughput.batch_size, "geometry": {"gpus_per_node": throughput.nranks}}
            write_yaml(folder / "config.yaml", settings)
    except UserError as error:
        if run is None:
            raise
        print(f"dlscale measure: {error}", file=sys.stderr)
        return run.status
    page = _page(plan)
    print("\n".join(lines(plan / name, throughput, of(read_run(plan / name)))), file=sys.stderr)
    print(f"Page: {page}", file=sys.stderr, flush=True)
    return run.status


def _called(command: Sequence[str]) -> str:
    """Return a name for a command: that of its script, or else of its program."""
    scripts = [word for word in command if word.endswith(".py")]
    module = [after for word, after in itertools.pairwise(command) if word == "-m"]
    word = [*scripts, *module[-1:], command[0]][0]
    return re.sub(r"[^a-z0-9_]+", "_", Path(word).stem.lower()).strip("_") or "program"


def _name(name: str, plan: Path) -> str:
    """Return the name, with a number where it is taken: what was measured before stays."""
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name):
        raise UserError(f"--name: {name}: expected up to 40 lower-case letters, digits and underscores")
    taken, count = {path.name for path in plan.glob("*")} if plan.exists() else set(), 1
    while (name if count == 1 else f"{name}_{count}") in taken:
        count += 1
    return name if count == 1 else f"{name}_{count}"


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
    text = [f"{folder.name}: {said} ({many(outside.steps, 'step')}{batch}{ranks}; {WAYS[outside.way]})"]
    text.append(f"  first step after {duration(outside.first_step_seconds)}; all took {duration(outside.seconds)}")
    return [*text, *explained(verdict)]


#: How steps were seen, in words.
WAYS = {
    "timed": "timed by the program",
    "seen": "seen in PyTorch",
    "log": "from its log",
    "rate": "as it prints them",
}


def _page(plan: Path) -> Path:
    """Write the page of all programs that were measured, with its plan; return its place."""
    runs = sorted((path.parent for path in plan.glob("*/throughput.json")), key=lambda path: path.stat().st_mtime)
    record = PlanRecord(
        plan=PLAN,
        title="Programs, as they are",
        study=STUDY,
        kind="set",
        measure=["throughput"],
        runs=[RunReference(name=run.name, plan=PLAN, run=run.name, measure=["throughput"]) for run in runs],
    )
    write_yaml(plan / "plan.yaml", record.model_dump(mode="json"))
    page = plan / "report.html"
    title = record.title or PLAN
    write_text(page, report.page(title, [read_plan(plan / "plan.yaml")], [], plan, call="dlscale measure"))
    return page
