"""What a search found, as the page shows it: the trials of a sweep by rank, and the settings that `tune` tried."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import yaml

from dlscale.config.records import SweepRecord
from dlscale.core.settings import nested
from dlscale.core.text import NONE, count, duration, number, size
from dlscale.measure.tuning import Tried, Tuning
from dlscale.report.blocks import Cell, Section, Table, View, cell, some, table
from dlscale.report.figures import MUTED, RUN_COLOURS, Line, lines
from dlscale.report.results import PlanResult, RunResult

#: How many trials the table of a sweep shows, and settings have a figure: what keeps a large one readable.
ROWS = 40
PLOTS = 8

# ---- sweep -------------------------------------------------------------------------------------------


def best(plan: PlanResult) -> View | None:
    """Return a sweep's best trial; None of another plan, and of one whose trials do not train."""
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
    """Return a sweep's trials by rank, its metric over each setting, and the best settings; None of another plan."""
    if (found := best(plan)) is None or plan.record.sweep is None:
        return None
    ranked, values = plan.ranked, plan.record.sweep.trials
    keys, shown = list(dict.fromkeys(key for each in values.values() for key in each)), ranked[:ROWS]
    columns = [
        ("", "trial", [Cell(run.label, rank, link=plan.anchor(run)) for rank, run in enumerate(shown)]),
        *(("", key, [_setting(values[run.name].get(key)) for run in shown]) for key in keys),
        ("", "epochs", [cell(run.epochs[-1].epoch, count) for run in shown]),
        ("", title(plan), [_score(plan.score(run)[0]) for run in shown]),
    ]
    caption = "Trials, the best first. A trial that diverged is the worst."
    note = "".join(some(len(shown), len(ranked), "trials", "the best. The CSV file has all."))
    trials = table(columns, caption, f"Trials of {plan.title}", note=note)
    plots = [_plot(plan, ranked, key) for key in keys[:PLOTS]]
    return Section("Sweep", plots=plots, tables=[trials], form="sweep", own=found)


def title(plan: PlanResult) -> str:
    """Return what readers call the metric of a sweep."""
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


def _score(value: float) -> Cell:
    return cell(value) if math.isfinite(value) else Cell("diverged")


def _plot(plan: PlanResult, ranked: Sequence[RunResult], key: str) -> tuple[str, str]:
    """Return the figure of the metric over a setting, and what it shows; words stand in the order they come in."""
    assert plan.record.sweep is not None
    last = max(run.epochs[-1].epoch for run in ranked)
    known = [run for run in ranked if math.isfinite(plan.score(run)[0])]
    settings: dict[RunResult, Any] = {run: plan.record.sweep.trials[run.name].get(key) for run in known}
    numeric = all(isinstance(each, int | float) and not isinstance(each, bool) for each in settings.values())
    words = [] if numeric else list(dict.fromkeys(str(each) for each in reversed(settings.values())))
    places: dict[RunResult, Any] = {run: each if numeric else words.index(str(each)) for run, each in settings.items()}
    drawn = []
    for run in reversed(known):  # the best on top
        first, hollow = run is ranked[0], run.epochs[-1].epoch < last
        look = {
            "colour": RUN_COLOURS[0] if first else MUTED,
            "marker": "D" if first else "o",
            "size": 8.0 if first else 5.0,
        }
        drawn.append(Line([(places[run], plan.score(run)[0])], dashes="none", hollow=hollow, **look))  # type: ignore[arg-type]
    wide = numeric and bool(places) and min(places.values()) > 0 and max(places.values()) >= 8 * min(places.values())
    name = f"{plan.name}-{key.replace('.', '-')}"
    drawing = lines(name, drawn, key, title(plan), x="log" if wide else "as it is", ticks=words, height=2.6)
    parts = "; hollow: ended in an earlier rung" if any(line.hollow for line in drawn) else ""
    return drawing, f"Each trial by {key}; the diamond is the best{parts}."


# ---- tune --------------------------------------------------------------------------------------------


def verdicts(plan: PlanResult) -> list[View]:
    """Return what was found best for each run that was tuned."""
    return [{"run": r.label, "id": plan.anchor(r), "verdict": r.tuning.verdict()} for r in plan.runs if r.tuning]


def tunings(plan: PlanResult) -> Section | None:
    """Return what was tried of each run of a plan that was tuned; None if none was."""
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
    """Return a row for each setting, in the order in which they did best.

    A setting's speed is relative to the run's own in the last rung that it came to: rungs differ by the machine's
    drift.
    """
    own, *others = tuning.candidates
    winner = tuning.candidates[tuning.duel.challenger] if tuning.duel else None
    # The finalist first; then those that came furthest, and did best there; last what was dropped.
    others.sort(key=lambda each: (each is not winner, bool(each.problem), -len(each.rates), -_relative(each, own)))
    rows = [own, *others]
    measured = [each if each.rates and each.rates[-1] else None for each in rows]
    words = [", ".join(f"{key}: {value}" for key, value in each.changes.items()) for each in others]
    columns = [
        ("", "setting", [Cell(name, n) for n, name in enumerate(["the run's own", *words])]),
        ("", "samples/s", [cell(each and statistics.geometric_mean(each.rates[-1])) for each in measured]),
        ("", "relative", [cell(each and _relative(each, own), lambda ratio: f"{number(ratio)}×") for each in measured]),
        ("", "rungs", [cell(len(each.rates), count) for each in rows]),
        ("", "memory", [cell(each.peak_memory_bytes, size) for each in rows]),
        ("", "dropped because", [cell(each.problem or NONE) for each in rows]),
    ]
    caption = (
        "Speeds are those of the last rung that a setting came to, relative to the run's own in the same rung. They "
        "rank settings; the verdict is the duel's."
    )
    return table(columns, caption, f"Settings that were tried, {run}", sortable=False)


def _relative(each: Tried, own: Tried) -> float:
    if not (each.rates and each.rates[-1]):
        return 0.0
    return statistics.geometric_mean(each.rates[-1]) / statistics.geometric_mean(own.rates[len(each.rates) - 1])
