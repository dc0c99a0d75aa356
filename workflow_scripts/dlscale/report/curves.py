"""Build the curves of trainings (loss, metrics, learning rate) and of logs from `dlscale import`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, Literal

from pydantic import Field

from dlscale.core.metrics import Epoch, Metric, Untrained
from dlscale.core.record import Number, Record
from dlscale.core.schema import Name
from dlscale.report import published
from dlscale.report.charts import Chart, View, lines, time_unit
from dlscale.report.figures import Section
from dlscale.report.results import PlanResult, RunResult, by_settings

#: Axes of curves. Time is the time of training and validation without pauses.
Over = Literal["epoch", "step", "samples", "time"]
AXES: dict[Over, str] = {
    "epoch": "epoch",
    "step": "optimiser steps",
    "samples": "training samples",
    "time": "time, validation included",
}

#: Function that returns a value of an epoch, or of the untrained model.
Value = Callable[[Epoch | Untrained], float | None]


class Reference(Record):
    """`references/NAME/reference.json`: the log of an external program's run."""

    name: Name
    label: str
    study: Name
    plans: list[str] = []  #: Plans that show the log; empty for all plans of the study.
    files: dict[str, str]  #: Name of an event file → SHA-256.
    counts: Literal["step", "epoch"] = "step"  #: Unit of the steps in the files.
    batch_size: int | None = Field(None, ge=1)
    epoch_samples: int | None = Field(None, ge=1)  #: Training samples of an epoch.
    #: Quantity by its name in dlscale (`loss/valid`) → points (step, or epoch from 1; seconds since the start; value).
    curves: dict[str, list[tuple[int, float, Number]]]

    def scale(self, over: Over) -> float | None:
        """Return the factor that converts the files' steps to an axis; None if unknown."""
        if over == "samples":
            return self.batch_size if self.counts == "step" else self.epoch_samples
        steps = self.epoch_samples / self.batch_size if self.epoch_samples and self.batch_size else None
        return 1.0 if self.counts == "step" else steps

    def rows(self, quantity: str) -> list[View]:
        """Return the points of a curve; axes with an unknown scale are left out."""
        scales = {over: scale for over in ("step", "samples") if (scale := self.scale(over)) is not None}
        return [
            {"run": self.label, "what": "other program", "value": value, "time": seconds}
            | {over: scale * step for over, scale in scales.items()}
            for step, seconds, value in self.curves.get(quantity, [])
        ]


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

    With several seeds, a row has the mean, the least and the greatest value. Rows have no time if geometry or loader
    changed during the run.
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
    """Return rows with times in a suitable unit, and the axes that have values in these rows; `first` comes first."""
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
    charts = _charts(
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
        charts += _charts(plan, called, about, [*rows, *trained], first, metric.label, dashes, levels=levels)
    rates = [row for run in alone for row in curve(run, "", lambda epoch: getattr(epoch, "learning_rate", None))]
    about = "Learning rate at the end of each epoch."
    charts += _charts(plan, "rate", about, rates, first, "learning rate", zero=True, logarithmic=False)
    seeds = (
        "Trainings are repeated with other seeds. Solid lines are means over the seeds. Vertical lines reach from the "
        "least to the greatest value of the seeds. Dashed lines show only the first seed. Tables have the standard "
        "deviation over the seeds."
    )
    return Section("Training", charts=charts, notes=[seeds] * any(run.repeats for run in runs))


def _charts(
    plan: PlanResult,
    name: str,
    about: str,
    rows: Sequence[View],
    first: Over,
    label: str,
    dashes: Sequence[str] = (),
    **more: Any,
) -> list[Chart]:
    """Return a chart in a list; an empty list without finite values."""
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
    """Return a validation metric."""
    return epoch.metrics.get(name)


def _trained(epoch: Epoch | Untrained, name: str) -> float | None:
    """Return a metric on the epoch's training samples; None before training, and if the metric was not computed."""
    return epoch.train_metrics.get(name) if isinstance(epoch, Epoch) else None


def followed_metrics(plan: PlanResult) -> list[Metric]:
    """Return the metrics to draw: the metric of `followed`, and all metrics that are known for training samples."""
    names = {name: None for run in plan.trained for epoch in run.epochs for name in epoch.train_metrics}
    found = [*filter(None, [followed(plan)]), *(plan.metrics[name] for name in names if name in plan.metrics)]
    return list({metric.name: metric for metric in found}.values())


def followed(plan: PlanResult) -> Metric | None:
    """Return the metric to draw: a published metric, or else the leading metric; None if it equals the loss."""
    wanted = [figure.metric for figure in plan.record.published if figure.metric in plan.metrics]
    metric = plan.metrics[wanted[0]] if wanted else plan.lead
    if metric is None or not plan.trained:
        return None
    values = [(metric.of(epoch), epoch.valid_loss) for run in plan.trained for epoch in run.epochs]
    return None if all(math.isclose(*both, rel_tol=1e-5) for both in values) else metric


def with_references(plan: PlanResult, references: Sequence[Reference]) -> Section | None:
    """Return curves of loss and followed metric, with the plan's references; None without references."""
    runs, metric, study = drawn(plan), followed(plan), plan.record.study
    mine = [each for each in references if each.study == study and (not each.plans or plan.name in each.plans)]
    quantities: list[tuple[str, str, str, Value]] = [
        ("loss/valid", "Validation loss", plan.loss.label, lambda epoch: epoch.valid_loss)
    ]
    if metric:
        name = metric.name
        quantities.append((f"valid/{name}", metric.full_title, metric.label, lambda epoch: epoch.metrics.get(name)))
    charts = []
    for quantity, title, label, value in quantities if runs else []:
        theirs = [row for each in mine for row in each.rows(quantity)]
        ours = [row for run in runs for row in curve(replace(run, repeats=[]), "dlscale", value)]
        if theirs:
            about = f"{title}: dlscale is solid, other programs are dashed."
            shared = [axis for axis in AXES if any(axis in row for row in theirs)]
            rows = [
                {key: each for key, each in row.items() if key not in AXES or key in shared} for row in (*ours, *theirs)
            ]
            name = f"beside-{quantity.partition('/')[0]}"  # a metric's name may contain any character
            charts += _charts(plan, name, about, rows, shared[0], label, ["dlscale", "other program"])
    files = "; ".join(f"{each.label}: {', '.join(each.files)}" for each in mine)
    note = (
        "Dashed lines are logs of other programs from dlscale import. These programs have other data, hardware and "
        f"settings. The time of a log is clock time since training began. {files}"
    )
    return Section("Compared with other programs", charts=charts, notes=[note]) if charts else None
