"""How trainings with larger and larger batches converge: over steps, samples and time, and what a target took."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from dlscale.core.metrics import VALID_LOSS, Metric
from dlscale.core.text import count, duration, many, number
from dlscale.report import figures, target
from dlscale.report.drawing import MARKERS
from dlscale.report.glance import View
from dlscale.report.results import PlanResult, RunResult, by_settings
from dlscale.report.tables import Cell, RunsTable, table
from dlscale.report.target import Reached

#: How many trainings the figures show, the first ones; the table has all.
LINES = len(MARKERS)

#: What a curve is drawn over.
Over = Literal["step", "samples", "time"]

AXES: dict[Over, tuple[str, str]] = {
    "step": ("optimiser step", "what each update teaches"),
    "samples": ("training samples", "what each sample teaches"),
    "time": ("time, validation included", "what waiting buys"),
}


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seed."""

    label: str
    runs: list[RunResult]

    @property
    def first(self) -> RunResult:
        return self.runs[0]

    def band(self, over: Over) -> list[figures.Band]:
        """Return place, mean, least and greatest validation loss after each epoch that all runs have.

        Places in time are means over the runs: training and validation from the first step on, without pauses. There
        are none where the geometry or the loader of a run changed on the way.
        """
        if over == "time" and any(run.training_seconds is None for run in self.runs):
            return []
        times = [list(accumulate(e.epoch_seconds + e.valid_seconds for e in run.epochs)) for run in self.runs]
        found = []
        for number_, epochs in enumerate(zip(*(run.epochs for run in self.runs), strict=False)):
            place = statistics.fmean(t[number_] for t in times) if over == "time" else getattr(epochs[0], over)
            losses = [epoch.valid_loss for epoch in epochs]
            if all(map(math.isfinite, losses)):
                found.append(figures.Band(place, statistics.fmean(losses), min(losses), max(losses)))
        return found


def groups(plan: PlanResult) -> list[Group]:
    """Return the trained runs by their settings, seed and label apart, in the plan's order."""
    return [Group(label, runs) for label, runs in by_settings(plan.trained)]


def aim(plan: PlanResult) -> tuple[Metric, float] | None:
    """Return what all trainings are compared at: their target, or else the least validation loss that all reach."""
    asked = [target.asked(run) for run in plan.trained]
    if asked and asked[0] and asked.count(asked[0]) == len(asked):
        return asked[0]
    best = [run.best_valid_loss for run in plan.trained]
    finite = [loss for loss in best if loss is not None]
    return (VALID_LOSS, max(finite)) if finite else None


def view(plan: PlanResult) -> View | None:
    """Return figures and table; None where nothing was trained."""
    found, compared = groups(plan), aim(plan)
    if not found or compared is None:
        return None
    shown, several = found[:LINES], any(len(group.runs) > 1 for group in found)
    metric, value = compared
    given = all(target.asked(run) for run in plan.trained)
    which = "the target" if given else "the least that all of them reach"
    return {
        "title": "Convergence",
        "about": "The same training with larger and larger batches"
        + (": lines are means over the seeds, bands reach from the least to the greatest of them." * several or ".")
        + f" What it took to reach {metric.aim(value)}, {which}, is counted from the first step to the end "
        "of the validation that showed it.",
        "legend": [(group.label, f"s{style}", MARKERS[style][1]) for style, group in enumerate(shown)],
        "strokes": [],
        "plots": [_plot(plan, shown, over) for over in AXES],
        "table": _table(plan, found, compared),
        "caption": "Means over the seeds, with the least and the greatest.",
        "note": " ".join(filter(None, [_drawn(found, shown), _less(found)])),
    }


def _drawn(found: Sequence[Group], shown: Sequence[Group]) -> str:
    return f"{len(shown)} of {len(found)} are drawn: the table has all." if len(shown) < len(found) else ""


def _less(found: Sequence[Group]) -> str:
    """Say which batches are larger than the training samples, which no step had more of."""
    first = [(group, group.first.epochs[0]) for group in found]
    said = [
        f"{group.label} ({many(epoch.samples, 'sample')})"
        for group, epoch in first
        if epoch.step == 1 and epoch.samples < group.first.settings.get("batch_size", 0)
    ]
    return f"An epoch had fewer samples than one batch, and each step no more than these: {'; '.join(said)}." * bool(
        said
    )


def _plot(plan: PlanResult, shown: Sequence[Group], over: Over) -> tuple[str, str]:
    axis, what = AXES[over]
    bands = [group.band(over) for group in shown]
    drawing = figures.bands(f"{plan.name}-convergence-{over}", bands, axis, plan.loss.label, time=over == "time")
    return drawing, f"Validation loss over {axis}: {what}."


def _table(plan: PlanResult, found: Sequence[Group], compared: tuple[Metric, float]) -> RunsTable:
    metric, value = compared
    reached = [[target.took(run, metric, value) for run in group.runs] for group in found]
    there = [[each for each in of if each.epoch] for of in reached]
    hours = next(iter(dict.fromkeys(map(target.hours_of, plan.runs))))

    def took(of: Callable[[Reached], float | None], shown: Callable[[float], str] = number) -> list[Cell]:
        return [_spread([known for each in group if (known := of(each)) is not None], shown) for group in there]

    return table(
        [
            ("Training", "run", [Cell(g.label, n, link=plan.anchor(g.first)) for n, g in enumerate(found)]),
            ("Training", "seeds", [Cell(count(len(group.runs)), len(group.runs)) for group in found]),
            ("Training", "batch size", [_spread([g.first.settings.get("batch_size", 0)], _whole) for g in found]),
            ("Training", "devices", [Cell(count(g.first.devices), g.first.devices) for g in found]),
            ("Training", "learning rate", [_rate(group.first) for group in found]),
            ("Training", "steps", [_spread([run.epochs[-1].step for run in g.runs], _whole) for g in found]),
            ("Training", "validation loss", [_losses([run.final_loss for run in g.runs]) for g in found]),
            (f"To {metric.aim(value)}", "reached by", [_by(of, group) for of, group in zip(there, found, strict=True)]),
            (f"To {metric.aim(value)}", "steps", took(lambda each: each.epoch.step if each.epoch else None, _whole)),
            (
                f"To {metric.aim(value)}",
                "samples",
                took(lambda each: each.epoch.samples if each.epoch else None, _whole),
            ),
            (f"To {metric.aim(value)}", "time", took(lambda each: each.seconds, duration)),
            (f"To {metric.aim(value)}", hours, took(lambda each: each.gpu_hours)),
            (f"To {metric.aim(value)}", "energy", took(lambda each: each.joules, target.joules)),
        ]
    )


def _by(there: Sequence[Reached], group: Group) -> Cell:
    return Cell(f"{len(there)} of {many(len(group.runs), 'run')}", len(there) / len(group.runs))


def _rate(run: RunResult) -> Cell:
    """Return the learning rate after warm-up; below, by which rule it follows from that of the base batch size."""
    schedule, rate = run.settings.get("schedule") or {}, (run.settings.get("optimizer") or {}).get("lr")
    if rate is None:
        return Cell()
    rule, base = schedule.get("scaling", "none"), schedule.get("base_batch_size")
    ratio = run.settings.get("batch_size", 0) / base if base else 1.0
    peak = rate * {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[rule]
    return Cell(number(peak), peak, rule if rule != "none" else "")


def _whole(value: float) -> str:
    return count(round(value))


def _losses(values: Sequence[float]) -> Cell:
    """Return the mean of those that are numbers, and how many runs diverged."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return Cell("diverged")
    cell, lost = _spread(finite), len(values) - len(finite)
    return replace(cell, note=f"{lost} of {len(values)} diverged") if lost else cell


def _spread(values: Sequence[float], shown: Callable[[float], str] = number) -> Cell:
    """Return the mean, and below the least and the greatest if they differ."""
    if not values:
        return Cell()
    mean, ends = statistics.fmean(values), (min(values), max(values))
    return Cell(shown(mean), mean, " to ".join(map(shown, ends)) if ends[0] != ends[1] else "")
