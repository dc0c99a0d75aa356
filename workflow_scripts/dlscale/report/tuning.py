"""What the stage `tune` tried of a run, as the page shows it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from dlscale.core.text import NONE, duration, number, size
from dlscale.measure.tuning import Tried, Tuning
from dlscale.report.glance import View
from dlscale.report.results import PlanResult


def tunings(plan: PlanResult) -> list[View]:
    """Return a view of each run of a plan that was tuned."""
    return [{"run": run.label, "id": plan.anchor(run), **view(run.tuning)} for run in plan.runs if run.tuning]


def view(tuning: Tuning) -> View:
    """Return the verdict, and a row for each setting, in the order in which they did best.

    A setting's speed is relative to the run's own in the last rung that it came to: rungs differ by the machine's
    drift.
    """
    own, others = tuning.candidates[0], list(enumerate(tuning.candidates))[1:]
    winner = tuning.duel.challenger if tuning.duel else None
    # The finalist first; then those that came furthest, and did best there; last what was dropped.
    others.sort(
        key=lambda each: (each[0] != winner, bool(each[1].problem), -len(each[1].rates), -_relative(each[1], own))
    )
    return {
        "verdict": tuning.verdict(),
        "command": tuning.command,
        "plan": tuning.plan,
        "duel": tuning.duel and len(tuning.duel.rates),
        "batch": "batch_size" in tuning.changes,
        "tried": len(tuning.candidates),
        "time": duration(tuning.seconds),
        "rows": [_row("the run's own", own, own), *(_row(_words(each), each, own) for _, each in others)],
    }


def _row(name: str, tried: Tried, own: Tried) -> View:
    measured = bool(tried.rates and tried.rates[-1])
    return {
        "setting": name,
        "speed": number(_mean(tried.rates[-1])) if measured else NONE,
        "relative": f"{number(_relative(tried, own))}×" if measured else NONE,
        "rungs": len(tried.rates),
        "memory": size(tried.peak_memory_bytes),
        "problem": tried.problem or "",
    }


def _words(tried: Tried) -> str:
    return ", ".join(f"{key}: {value}" for key, value in tried.changes.items())


def _mean(rates: Sequence[float]) -> float:
    return statistics.geometric_mean(rates)


def _relative(tried: Tried, own: Tried) -> float:
    if not (tried.rates and tried.rates[-1]):
        return 0.0
    return _mean(tried.rates[-1]) / _mean(own.rates[len(tried.rates) - 1])
