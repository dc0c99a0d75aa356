"""`dlscale compare BEFORE AFTER`: two results folders, or two plans, run by run: what got faster, slower, better.

Speeds of two times have the spread of their trials and what a machine does between them. Where both runs were timed in
turns with their plan's first run, and that did the same work, how much faster they were than it is compared, too: what
the machine did cancels out of that.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlscale.config.places import results_of
from dlscale.core.errors import UserError, unknown
from dlscale.core.settings import flat
from dlscale.core.text import NONE, number
from dlscale.report.disturbance import disturbed
from dlscale.report.results import RunResult, read_finished
from dlscale.report.speedup import SpeedUp, measured_apart, relative_to_first

if TYPE_CHECKING:
    from dlscale.config.resolve import Configuration

#: Settings that are named of a run; more are counted.
MOST = 4


@dataclass(frozen=True)
class Change:
    """What became of one run; None where one of the two was not measured."""

    run: str
    before: float | None  #: Samples/s.
    after: float | None
    speed: SpeedUp | None  #: Of the two speeds.
    over_first: SpeedUp | None  #: Of how much faster each was than its plan's first run.
    loss: tuple[float | None, float | None]  #: Last validation losses.
    settings: list[str]  #: That differ.
    devices: str  #: Where they were measured, if that differs.
    busy: tuple[str | None, str | None]  #: What speaks against a quiet machine.

    def words(self) -> str:
        """Return the change of speed in words."""
        if self.devices:
            return f"measured on {self.devices}: not compared"
        if self.speed is None:
            return "not measured in both"
        said = self.speed.words
        return said if self.over_first is None else f"{said}; over the first run {self.over_first.words}"


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Print what became of the runs that both of `args.results` have; return the exit status."""
    results = results_of(configuration)
    before, after = (read(name, results) for name in args.results)
    busy = disturbed(before) | disturbed(after)
    if before.keys().isdisjoint(after):
        before, after = ({key.partition(".")[2]: run for key, run in each.items()} for each in (before, after))
    if not (both := [key for key in before if key in after]):
        raise UserError(f"{' and '.join(args.results)}: no run of one is in the other; name plans with runs in common")
    changes = [change(key, before[key], after[key], busy) for key in both]
    lone = {name: [key for key in one if key not in other] for name, one, other in _sides(args.results, before, after)}
    if args.json:
        print(json.dumps({"runs": [_plain(each) for each in changes], "alone": lone}, indent=2))
        return 0
    for each in changes:
        losses = " -> ".join(number(loss) for loss in each.loss)
        rates = f"{number(each.before)} -> {number(each.after)} samples/s"
        print(f"{each.run}: {rates}, {each.words()}")
        if any(each.busy):
            told = [f"{when}, {said}" for when, said in zip(("before", "after"), each.busy, strict=True) if said]
            print(f"  measured on a busy machine: {'; '.join(told)}")
        if each.loss != (None, None):
            print(f"  validation loss {losses}")
        if each.settings:
            more = len(each.settings) - MOST
            print(f"  settings: {'; '.join(each.settings[:MOST])}" + (f"; {more} more" if more > 0 else ""))
    for name, runs in lone.items():
        if runs:
            print(f"only in {name}: {', '.join(runs)}")
    return 0


def _sides(names: list[str], *both: dict[str, RunResult]) -> Iterator[tuple[str, dict[str, RunResult], Any]]:
    yield names[0], both[0], both[1]
    yield names[1], both[1], both[0]


def read(name: str, results: Path) -> dict[str, RunResult]:
    """Return runs by `PLAN.RUN`: of a results folder, of a plan's folder, or of a plan by its name.

    Runs that are not finished are left out, and named on the standard error.
    """
    path = Path(name) if Path(name).exists() else results / "plans" / name
    if (path / "plan.yaml").exists():
        plans = [path]
    elif (path / "plans").is_dir():
        plans = [file.parent for file in sorted(path.glob("plans/*/plan.yaml"))]
    else:
        known = [file.parent.name for file in results.glob("plans/*/plan.yaml")]
        raise UserError(f"{name}: neither a folder of results nor of a plan; {unknown('plan', name, known)}")
    found, lacking = dict[str, RunResult](), list[str]()
    for plan in plans:
        runs, unfinished = read_finished(plan / "plan.yaml")
        found |= {f"{plan.name}.{run.name}": run for run in runs}
        lacking += unfinished
    if lacking and not found:
        raise UserError(f"{name}: no run is finished; {lacking[0]}")
    for each in lacking:
        print(f"left out: {each}", file=sys.stderr)
    if not found:
        raise UserError(f"{path}: there is no plan in it; expected plans/PLAN/plan.yaml: run the workflow first")
    return found


def change(key: str, before: RunResult, after: RunResult, busy: Mapping[Path, str]) -> Change:
    """Return what became of a run; `busy` as `disturbed` returns it."""
    names = [run.device.name for run in (before, after)]
    elsewhere = f"{names[0]} and {names[1]}" if all(names) and names[0] != names[1] else ""
    old, new = (flat({**run.settings, "label": None}) for run in (before, after))
    differ = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
    return Change(
        key,
        before.speed,
        after.speed,
        None if elsewhere else measured_apart(after, before),
        None if elsewhere else relative_to_first(after, before),
        (before.last.valid_loss if before.last else None, after.last.valid_loss if after.last else None),
        [f"{name} {_value(old.get(name))} -> {_value(new.get(name))}" for name in differ],
        elsewhere,
        (busy.get(before.folder), busy.get(after.folder)),
    )


def _value(value: Any) -> str:
    return NONE if value is None else str(value)


def _plain(each: Change) -> dict[str, Any]:
    def ratio(found: SpeedUp | None) -> dict[str, Any] | None:
        if found is None:
            return None
        known = math.isfinite(found.error)
        ends = [found.low, found.high] if known else None
        return {"ratio": found.ratio, "interval": ends, "noise": found.noise}

    return {
        "run": each.run,
        "samples_per_second": [each.before, each.after],
        "speed": ratio(each.speed),
        "over_first": ratio(each.over_first),
        "valid_loss": [loss if loss is not None and math.isfinite(loss) else None for loss in each.loss],
        "settings": each.settings,
        "devices": each.devices or None,
        "busy": each.busy,
    }
