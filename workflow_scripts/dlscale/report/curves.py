"""Build the curves of trainings: loss, metrics, learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, Literal

from dlscale.core.metrics import Epoch, Metric, Untrained
from dlscale.report import published
from dlscale.report.figures import Chart, Section, View, lines, time_unit
from dlscale.results import PlanResult, RunResult, by_settings

#: Axes of curves. Time is the time of training and validation, without the time between tries.
Over = Literal["epoch", "step", "samples", "time"]
AXES: dict[Over, str] = {
    "epoch": "epoch",
    "step": "optimiser steps",
    "samples": "training samples",
    "time": "time, validation included",
}

#: Function that returns a value of an epoch, or of the untrained model.
Value = Callable[[Epoch | Untrained], float | None]


def drawn(plan: PlanResult) -> list[RunResult]:
    """Return the trained runs; in a convergence plan, runs that differ only in their seed become one run."""
    if plan.record.kind != "convergence":
        return plan.trained
    groups = by_settings(plan.trained)
    return [
        replace(runs[0], name=label, label=label, repeats=[each.epochs for each in runs[1:]]) for label, runs in groups
    ]


def curve(run: RunResult, what: str, value: Value) -> list[View]:
    """Return rows with a value after each epoch, and before the first epoch if known.

    Epochs with a value that is not finite have no row. With several seeds, a row has the mean, the least and the
    greatest value. Rows have no time if the geometry, the loader or another setting that affects times changed during
    the run.
    """
    seeds = [[epochs[0].untrained, *epochs] for epochs in (run.epochs, *run.repeats)]
    rows = []
    for place, epochs in zip(places(run), zip(*seeds, strict=False), strict=False):
        values = [y for epoch in epochs if epoch and (y := value(epoch)) is not None]
        if values and all(map(math.isfinite, values)):
            ends = {"low": min(values), "high": max(values)} if run.repeats else {}
            rows.append({"run": run.called, "what": what, **place, "value": sum(values) / len(values), **ends})
    return rows


def places(run: RunResult) -> list[View]:
    """Return the positions of a run's start and epochs on each axis."""
    times = accumulate((epoch.epoch_seconds + epoch.valid_seconds for epoch in run.epochs), initial=0.0)
    begin: View = {"epoch": 0, "step": 0, "samples": 0 if run.last and run.last.samples is not None else None}
    found = [begin, *({over: getattr(epoch, over) for over in begin} for epoch in run.epochs)]
    known = run.training_seconds is not None
    return [{**place, "time": time if known else None} for place, time in zip(found, times, strict=True)]


def over(rows: Sequence[View], first: Over) -> tuple[list[View], dict[str, str]]:
    """Return rows with times in a suitable unit, and the axes (name → title) that have values; `first` comes first."""
    seconds, unit = time_unit(max((row["time"] for row in rows if row.get("time") is not None), default=0.0))
    rows = [{**row, "time": row["time"] / seconds} if row.get("time") is not None else row for row in rows]
    there = [axis for axis in (first, *AXES) if any(row.get(axis) is not None for row in rows)]
    return rows, {axis: AXES[axis] + f" ({unit})" * (axis == "time") for axis in there}


def training(plan: PlanResult) -> Section | None:
    """Return the curves of loss, followed metrics and learning rate; None without trained runs."""
    runs = drawn(plan)
    if not runs:
        return None
    first: Over = "step" if plan.record.kind == "convergence" else "epoch"
    losses = [row for run in runs for row in curve(run, "validation", lambda epoch: epoch.valid_loss)]
    alone = [replace(run, repeats=[]) for run in runs]
    losses += [row for run in alone for row in curve(run, "training", lambda epoch: getattr(epoch, "train_loss", None))]
    both = ["validation", "training"]
    charts = charts_of(
        plan, "loss", "Loss: validation is solid, training is dashed.", losses, first, plan.loss.label, both
    )
    for number, metric in enumerate(followed_metrics(plan)):
        tested, learnt = partial(_validated, name=metric.name), partial(_trained, name=metric.name)
        rows = [row for run in runs for row in curve(run, "validation", tested)]
        trained = [row for run in alone for row in curve(run, "training", learnt)]
        about = f"{metric.full_title}{'; training is dashed' * bool(trained)}; {metric.better} is better."
        called = "metric" if number == 0 else f"metric{number + 1}"
        dashes = both if trained else ()
        levels = _levels(plan, metric)
        charts += charts_of(plan, called, about, [*rows, *trained], first, metric.label, dashes, levels=levels)
    rates = [row for run in alone for row in curve(run, "", lambda epoch: getattr(epoch, "learning_rate", None))]
    about = "Learning rate at the end of each epoch."
    charts += charts_of(plan, "rate", about, rates, first, "learning rate", zero=True, logarithmic=False)
    seeds = (
        "Trainings are repeated with other seeds. Solid lines are means over the seeds. Vertical lines reach from the "
        "least to the greatest value of the seeds. Dashed lines show only the first seed. Tables have the standard "
        "deviation over the seeds."
    )
    return Section("Training", charts=charts, notes=[seeds] * any(run.repeats for run in runs))


def charts_of(
    plan: PlanResult,
    name: str,
    about: str,
    rows: Sequence[View],
    first: Over,
    label: str,
    dashes: Sequence[str] = (),
    **more: Any,
) -> list[Chart]:
    """Return a list with one chart; an empty list if `rows` is empty."""
    rows, axes = over(rows, first)
    if not rows:
        return []
    return [lines(f"{plan.name}-{name}", about, rows, axes, {"value": label}, dashes=dashes, facts=plan.facts, **more)]


def _levels(plan: PlanResult, metric: Metric) -> list[tuple[float, str]]:
    """Return the published values of a metric for the plan's runs as (value, text)."""
    mine = {f"{plan.name}.{run.name}" for run in plan.runs}
    known = {
        figure.value: f"published: {published.shown(figure)}"
        for figure in plan.record.published
        if figure.metric == metric.name and figure.value is not None and mine.intersection(figure.runs)
    }
    return list(known.items())


def _validated(epoch: Epoch | Untrained, name: str) -> float | None:
    return epoch.metrics.get(name)


def _trained(epoch: Epoch | Untrained, name: str) -> float | None:
    """Return a metric on the epoch's training samples; None before training or if the metric was not computed."""
    return epoch.train_metrics.get(name) if isinstance(epoch, Epoch) else None


def followed_metrics(plan: PlanResult) -> list[Metric]:
    """Return the metrics to draw: the metric of `followed`, and all metrics of training samples."""
    names = {name: None for run in plan.trained for epoch in run.epochs for name in epoch.train_metrics}
    found = [*filter(None, [followed(plan)]), *(plan.metrics[name] for name in names if name in plan.metrics)]
    return list({metric.name: metric for metric in found}.values())


def followed(plan: PlanResult) -> Metric | None:
    """Return a published metric of the plan, or else the leading metric; None if missing, or equal to the loss."""
    wanted = [figure.metric for figure in plan.record.published if figure.metric in plan.metrics]
    metric = plan.metrics[wanted[0]] if wanted else plan.lead
    if metric is None or not plan.trained:
        return None
    values = [(metric.of(epoch), epoch.valid_loss) for run in plan.trained for epoch in run.epochs]
    return None if all(math.isclose(*both, rel_tol=1e-5) for both in values) else metric
