"""Searches, as the page shows them: the trials of a sweep by rank, and the settings that `tune` tried."""

from __future__ import annotations

import math
import statistics
from typing import Any

import yaml

from dlscale.config.records import SweepRecord
from dlscale.core.settings import nested
from dlscale.core.text import NONE, count, duration, number
from dlscale.measure.tuning import Tried, Tuning
from dlscale.report.blocks import Cell, Section, Table, View, cell, some, table
from dlscale.report.results import PlanResult

#: How many trials the table of a sweep shows.
ROWS = 40


def best(plan: PlanResult) -> View | None:
    """Return a sweep's best trial; None of other plans, and of trials that do not train."""
    if plan.record.sweep is None or plan.best is None:
        return None
    score, better = plan.score(plan.best)
    return {
        "metric": title(plan),
        "better": better,
        "best": plan.best.label,
        "score": number(score),
        "of": len(plan.trained),
        "method": _method(plan.record.sweep),
        "id": plan.anchor(plan.best),
        "from": f"{plan.name}.{plan.best.name}",
        "settings": yaml.safe_dump(nested(plan.record.sweep.trials[plan.best.name]), sort_keys=False),
    }


def sweep(plan: PlanResult) -> Section | None:
    """Return a sweep's trials by rank, and the best settings; None of other plans."""
    if (found := best(plan)) is None or plan.record.sweep is None:
        return None
    ranked, values = plan.ranked, plan.record.sweep.trials
    keys, shown = list(dict.fromkeys(key for each in values.values() for key in each)), ranked[:ROWS]
    scores = [plan.score(run)[0] for run in shown]
    columns = [
        ("", "trial", [Cell(run.label, rank, link=plan.anchor(run)) for rank, run in enumerate(shown)]),
        *(("", key, [_setting(values[run.name].get(key)) for run in shown]) for key in keys),
        ("", "epochs", [cell(run.epochs[-1].epoch, count) for run in shown]),
        ("", title(plan), [cell(score) if math.isfinite(score) else Cell("diverged") for score in scores]),
    ]
    caption = "Trials, the best first. A trial that diverged is the worst."
    note = "".join(some(len(shown), len(ranked), "trials", "the best. The CSV file has all."))
    trials = table(columns, caption, f"Trials of {plan.title}", note=note)
    return Section("Sweep", tables=[trials], form="sweep", own=found)


def title(plan: PlanResult) -> str:
    """Return the readers' name of a sweep's metric."""
    assert plan.record.sweep is not None
    name = plan.record.sweep.metric
    known = {"valid_loss": "validation loss", "samples_per_second": "samples/s"}
    return known.get(name) or plan.metrics[name].title


def _method(record: SweepRecord) -> str:
    if record.method != "halving":
        return {"grid": "all combinations", "random": "drawn at random"}[record.method]
    rungs = [f"{trials} for {until} epoch{'s' * (until != 1)}" for until, trials in record.rungs]
    return f"successive halving: {', '.join(rungs)}, the best of each rung training on"


def _setting(value: Any) -> Cell:
    number_ = isinstance(value, int | float) and not isinstance(value, bool)
    return Cell(f"{value:g}", value) if number_ else cell(str(value))


# ---- tune --------------------------------------------------------------------------------------------


def verdicts(plan: PlanResult) -> list[View]:
    """Return the verdict of each tuned run."""
    return [{"run": r.label, "id": plan.anchor(r), "verdict": r.tuning.verdict()} for r in plan.runs if r.tuning]


def tunings(plan: PlanResult) -> Section | None:
    """Return the settings that were tried of each tuned run; None if none was tuned."""
    own = [
        {
            "run": run.label,
            "id": plan.anchor(run),
            "verdict": run.tuning.verdict(),
            "command": run.tuning.command,
            "plan": run.tuning.plan,
            "duel": run.tuning.duel and len(run.tuning.duel.rates),
            "batch": "batch_size" in run.tuning.changes,
            "tried": len(run.tuning.candidates),
            "time": duration(run.tuning.seconds),
            "table": tried(run.tuning, run.label),
        }
        for run in plan.runs
        if run.tuning
    ]
    return Section("Tuning", form="tuning", own=own) if own else None


def tried(tuning: Tuning, run: str = "") -> Table:
    """Return a row for each setting, the best first.

    A speed is relative to the run's own in the last rung that the setting reached: rungs differ by the machine's drift.
    """
    own, *others = tuning.candidates
    winner = tuning.candidates[tuning.duel.challenger] if tuning.duel else None
    # The finalist; then by the rung reached, and by speed there; last those that were dropped.
    others.sort(
        key=lambda each: (each is not winner, bool(each.problem), -len(each.rates), -(_relative(each, own) or 0))
    )
    rows = [own, *others]
    words = [", ".join(f"{key}: {value}" for key, value in each.changes.items()) for each in others]
    columns = [
        ("", "setting", [Cell(name, n) for n, name in enumerate(["the run's own", *words])]),
        ("", "samples/s", [cell(_rate(each, -1)) for each in rows]),
        ("", "relative", [cell(_relative(each, own), lambda ratio: f"{number(ratio)}×") for each in rows]),
        ("", "rungs", [cell(len(each.rates), count) for each in rows]),
        ("", "dropped because", [cell(each.problem or NONE) for each in rows]),
    ]
    caption = (
        "Speeds are those of the last rung that a setting came to, relative to the run's own in the same rung. They "
        "rank settings; the verdict is the duel's."
    )
    return table(columns, caption, f"Settings that were tried, {run}", sortable=False)


def _rate(each: Tried, rung: int) -> float | None:
    return statistics.geometric_mean(each.rates[rung]) if each.rates and each.rates[rung] else None


def _relative(each: Tried, own: Tried) -> float | None:
    rate, base = _rate(each, -1), _rate(own, len(each.rates) - 1)
    return rate / base if rate and base else None
