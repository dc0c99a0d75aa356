"""What a sweep found, as the page shows it: its trials by rank, its metric over each setting, the best settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import yaml

from dlscale.config.records import SweepRecord
from dlscale.core.settings import nested
from dlscale.core.text import count, number
from dlscale.report import figures
from dlscale.report.glance import View
from dlscale.report.results import PlanResult, RunResult
from dlscale.report.tables import Cell

#: What keeps the page of a large sweep readable: how many trials the table shows, and settings have a figure.
ROWS = 40
PLOTS = 8


def view(plan: PlanResult) -> View | None:
    """Return what the page shows of a sweep; None of another plan, and of one whose trials do not train."""
    sweep, ranked = plan.record.sweep, plan.ranked
    if sweep is None or not ranked:
        return None
    keys = list(dict.fromkeys(key for values in sweep.trials.values() for key in values))
    best = ranked[0]
    return {
        "metric": title(plan),
        "better": plan.score(best)[1],
        "method": _method(sweep),
        "best": best.label,
        "best_id": plan.anchor(best),
        "score": number(plan.score(best)[0]),
        "name": best.name,
        "settings": yaml.safe_dump(nested(sweep.trials[best.name]), sort_keys=False),
        "keys": keys,
        "rows": [_row(plan, rank, run, sweep.trials[run.name], keys) for rank, run in enumerate(ranked[:ROWS])],
        "of": len(ranked),
        "plots": [_plot(plan, ranked, key) for key in keys[:PLOTS]],
    }


def title(plan: PlanResult) -> str:
    """Return what readers call the metric of a sweep."""
    assert plan.record.sweep is not None
    name = plan.record.sweep.metric
    known = {"valid_loss": "validation loss", "samples_per_second": "samples/s"}
    return known.get(name) or plan.metrics[name].title


def _method(sweep: SweepRecord) -> str:
    if sweep.method != "halving":
        return {"grid": "all combinations", "random": "drawn at random"}[sweep.method]
    rungs = [f"{size} for {until} epoch{'s' * (until != 1)}" for until, size in sweep.rungs]
    return f"successive halving: {', '.join(rungs)}, the best of each rung training on"


def _row(plan: PlanResult, rank: int, run: RunResult, values: dict[str, Any], keys: Sequence[str]) -> list[Cell]:
    """Return a trial's cells: its name, its value of each setting, its epochs, its score."""
    score, epochs = plan.score(run)[0], run.epochs[-1].epoch
    return [
        Cell(run.label, rank, link=plan.anchor(run)),
        *(_setting(values.get(key)) for key in keys),
        Cell(count(epochs), epochs),
        Cell(number(score), score) if math.isfinite(score) else Cell("diverged"),
    ]


def _setting(value: Any) -> Cell:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return Cell(str(value), str(value))
    return Cell(f"{value:g}", value)


def _plot(plan: PlanResult, ranked: Sequence[RunResult], key: str) -> tuple[str, str]:
    """Return the figure of the metric over a setting, and what it shows."""
    assert plan.record.sweep is not None
    last = max(run.epochs[-1].epoch for run in ranked)
    points = [
        figures.Trial(
            plan.record.sweep.trials[run.name].get(key), value, run.epochs[-1].epoch == last, run is ranked[0]
        )
        for run in ranked
        if math.isfinite(value := plan.score(run)[0])
    ]
    drawing = figures.sweep(f"{plan.name}-{key.replace('.', '-')}", points, key, title(plan))
    parts = "; hollow: ended in an earlier rung" if any(not point.whole for point in points) else ""
    return drawing, f"Each trial by {key}; the diamond is the best{parts}."
