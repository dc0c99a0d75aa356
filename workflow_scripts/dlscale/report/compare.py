"""`dlscale compare`: what got faster, slower, better.

`compare BEFORE AFTER` takes two results folders, or plans: speeds with the spread of their trials, and, of runs timed
in turns with first runs of the same work, how much faster they were: what the machine did cancels out of that.
`compare --profiles BEFORE AFTER` takes the profiles of two runs. `compare --gate FILE [PLAN …]` holds speeds against
earlier ones on this machine, which `--update` notes in the file: 1 if a run became slower.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlscale.config.places import results_of, run_folder
from dlscale.core.errors import UserError, unknown
from dlscale.core.files import write_text
from dlscale.core.text import NONE, many, number
from dlscale.report import gate, profiles
from dlscale.report.blocks import Cell, cell, show, table
from dlscale.report.diagnosis import disturbed
from dlscale.report.results import RunResult, changes, read_plan
from dlscale.report.speedup import SpeedUp, measured_apart, relative_to_first

if TYPE_CHECKING:
    from dlscale.config.resolve import Configuration

#: Settings that are named of a run.
MOST = 4


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Print what became of results, profiles, or speeds; return the exit status."""
    if args.gate:
        return held(args, configuration)
    if args.update or len(args.results) != 2:
        raise UserError("compare: expected two results, BEFORE AFTER; --update stands with --gate FILE")
    return (of_profiles if args.profiles else of_results)(args, configuration)


# ---- results -----------------------------------------------------------------------------------------


def of_results(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Print what became of the runs that both of `args.results` have."""
    before, after = (_runs(name, results_of(configuration)) for name in args.results)
    busy = disturbed(before) | disturbed(after)
    if before.keys().isdisjoint(after):
        before, after = ({key.partition(".")[2]: run for key, run in each.items()} for each in (before, after))
    if not (both := [key for key in before if key in after]):
        raise UserError(f"{' and '.join(args.results)}: no run of one is in the other; name plans with runs in common")
    found = [change(key, before[key], after[key], busy) for key in both]
    sides = ((args.results[0], before, after), (args.results[1], after, before))
    lone = {name: [key for key in one if key not in other] for name, one, other in sides}
    if args.json:
        print(json.dumps({"runs": found, "alone": lone}, indent=2))
        return 0
    columns = [
        ("", "run", [cell(each["run"]) for each in found]),
        ("", "samples/s before", [cell(each["samples_per_second"][0]) for each in found]),
        ("", "after", [cell(each["samples_per_second"][1]) for each in found]),
        ("", "speed", [cell(each["speed"] and each["speed"]["words"]) for each in found]),
        ("", "over the first run", [cell(each["over_first"] and each["over_first"]["words"]) for each in found]),
        ("", "other devices", [cell(each["devices"] and f"{each['devices']}: not compared") for each in found]),
        ("", "validation loss", [_pair(each["valid_loss"], number) for each in found]),
        (
            "",
            "settings",
            [cell("; ".join(each["settings"][:MOST]) + " …" * (len(each["settings"]) > MOST)) for each in found],
        ),
        ("", "on a busy machine, before and after", [_pair(each["busy"], str) for each in found]),
    ]
    show(table(columns))
    for name, runs in lone.items():
        if runs:
            print(f"only in {name}: {', '.join(runs)}")
    return 0


def change(key: str, before: RunResult, after: RunResult, busy: dict[Path, str]) -> dict[str, Any]:
    """Return what became of a run, as values of JSON; `busy` as `disturbed` returns it."""
    names = [run.device.name for run in (before, after)]
    elsewhere = all(names) and names[0] != names[1]
    losses = [run.last.valid_loss if run.last else math.nan for run in (before, after)]
    differ = changes(before.settings, after.settings)
    shown = {name: [NONE if value is None else str(value) for value in pair] for name, pair in differ.items()}
    return {
        "run": key,
        "samples_per_second": [before.speed, after.speed],
        "speed": None if elsewhere else _plain(measured_apart(after, before)),
        "over_first": None if elsewhere else _plain(relative_to_first(after, before)),
        "valid_loss": [loss if math.isfinite(loss) else None for loss in losses],
        "settings": [f"{name} {old} -> {new}" for name, (old, new) in shown.items()],
        "devices": f"{names[0]} and {names[1]}" if elsewhere else None,
        "busy": [busy.get(run.folder) for run in (before, after)],
    }


def _plain(found: SpeedUp | None) -> dict[str, Any] | None:
    if found is None:
        return None
    ends = [found.low, found.high] if math.isfinite(found.error) else None
    return {"ratio": found.ratio, "interval": ends, "noise": found.noise, "words": found.words}


def _pair(values: list[Any], shown: Callable[[Any], str]) -> Cell:
    """Return what was before, and after; nothing where neither is known."""
    words = [NONE if value is None else shown(value) for value in values]
    return Cell() if values == [None, None] else cell(" -> ".join(words))


def _runs(name: str, results: Path) -> dict[str, RunResult]:
    """Return runs by `PLAN.RUN`: of a results folder, of a plan's folder, or of a plan by its name.

    Runs that are not finished are left out, and named on the standard error.
    """
    path = Path(name) if Path(name).exists() else results / "plans" / name
    plans = [path / "plan.yaml"] if (path / "plan.yaml").exists() else sorted(path.glob("plans/*/plan.yaml"))
    if not plans:
        known = [file.parent.name for file in results.glob("plans/*/plan.yaml")]
        raise UserError(f"{name}: neither a folder of results nor of a plan; {unknown('plan', name, known)}")
    lacking = list[str]()
    found = {f"{file.parent.name}.{run.name}": run for file in plans for run in read_plan(file, lacking=lacking).runs}
    if not found:
        raise UserError(f"{name}: no run is finished; {lacking[0]}")
    for each in lacking:
        print(f"left out: {each}", file=sys.stderr)
    return found


# ---- profiles ----------------------------------------------------------------------------------------


def of_profiles(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Print what changed from the profile of the first run to that of the second."""
    named = [name if Path(name).exists() else run_folder(name, configuration) for name in args.results]
    before, after = map(profiles.read, named)
    used, now = ({row.tool for row in summary.rows} for summary in (before, after))
    if not used & now:
        said = f"{', '.join(sorted(used))} and {', '.join(sorted(now))}"
        raise UserError(f"the profiles have no profiler in common ({said}); profile both with the same tools")
    found, per = profiles.compare(before, after), profiles.unit(before, after)
    parts = {"faster and slower": profiles.extremes(found), "in one of the two alone": profiles.unmatched(found)}
    if args.json:
        lists = {name: json.loads(part.to_json(orient="records")) for name, part in parts.items()}
        print(json.dumps({"per": per, "batches": [before.batch, after.batch], **lists}, indent=2))
        return 0
    if per == "sample":
        print(f"a process has batches of {before.batch:g} before and {after.batch:g} after: all times are per sample")
    for name, part in parts.items():
        if len(part):
            show(profiles.changes_table(part, name))
    return 0


# ---- gate --------------------------------------------------------------------------------------------


def held(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Hold the plans in `args.results`, or the targets, against the file `args.gate`; 1 if a run became slower."""
    results, path = results_of(configuration), Path(args.gate)
    names = args.results or (configuration.workflow.targets if configuration else [])
    runs = {
        f"{name}.{run.name}": run
        for name in names
        for run in read_plan(_plan(results, name, configuration), stages=["throughput"]).runs
        if run.throughput and run.speed
    }
    if not runs:
        raise UserError(f"{results}: no run of {', '.join(names) or 'any plan'} has throughput; run the workflow first")
    reference = gate.read(path, args.update)
    looks = list(gate.held(reference, runs))
    if args.json:
        print(json.dumps([look.plain() for look in looks], indent=2))
    else:
        print("".join(f"{look.line()}\n" for look in looks), end="")
    if args.update:
        write_text(path.resolve(), gate.updated(reference, runs).text() + "\n")
        if not args.json:
            print(f"{path}: {many(len(runs), 'run')} noted: {', '.join(runs)}")
        return 0
    if not looks:
        raise UserError(f"{path}: it has none of these runs on this machine, doing the same work; add them by --update")
    return 1 if any(look.lost for look in looks) else 0


def _plan(results: Path, name: str, configuration: Configuration | None) -> Path:
    plan = results / "plans" / name / "plan.yaml"
    if plan.exists():
        return plan
    known = sorted(each.parent.name for each in results.glob("plans/*/plan.yaml"))
    if configuration and name in configuration.plans:
        raise UserError(f"plan {name} has no results yet; name those that have: {', '.join(known) or 'none'}")
    raise UserError(f"{plan}: no such file; {unknown('plan', name, known)}")
