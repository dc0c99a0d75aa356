"""Curves of trainings: loss, metric, learning rate; and beside them logs that `dlscale import` brought in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal

from pydantic import Field

from dlscale.core.metrics import Epoch, Metric, Untrained
from dlscale.core.record import Number, Record
from dlscale.core.schema import Name
from dlscale.report import published
from dlscale.report.figures import (
    DASHED,
    DASHES,
    INK,
    MARKERS,
    MUTED,
    RUN_COLOURS,
    Entry,
    Line,
    Section,
    entry,
    lines,
    run_line,
    some,
)
from dlscale.report.results import PlanResult, RunResult, by_settings, first_and_least

#: Most runs that are drawn.
LINES = len(MARKERS)

#: Axes of curves: label and meaning. Time is that of training and validation, without pauses.
Over = Literal["epoch", "step", "samples", "time"]
AXES: dict[Over, tuple[str, str]] = {
    "epoch": ("epoch", "what each pass teaches"),
    "step": ("optimiser step", "what each update teaches"),
    "samples": ("training samples", "what each sample teaches"),
    "time": ("time, validation included", "what waiting buys"),
}

#: A value of an epoch, or of a model before its first step.
Value = Callable[[Epoch | Untrained], float | None]

#: A figure and its caption.
Plot = tuple[str, str]


class Reference(Record):
    """`references/NAME/reference.json`: the log of another program's run."""

    name: Name
    label: str
    study: Name
    plans: list[str] = []  #: Plans that show it; none for all of the study.
    files: dict[str, str]  #: SHA-256 of its event files, by name.
    counts: Literal["step", "epoch"] = "step"  #: Unit of the steps in the files.
    batch_size: int | None = Field(None, ge=1)
    epoch_samples: int | None = Field(None, ge=1)  #: Training samples of an epoch.
    #: Points by our name of a quantity (`loss/valid`): step as in the files, seconds since training began, value.
    curves: dict[str, list[tuple[int, float, Number]]]

    def scale(self, over: Over) -> float | None:
        """Return the factor of the files' steps; None where it is not known."""
        if over == "samples":
            return self.batch_size if self.counts == "step" else self.epoch_samples
        steps = self.epoch_samples / self.batch_size if self.epoch_samples and self.batch_size else None
        return 1.0 if self.counts == "step" else steps

    def points(self, quantity: str, over: Over) -> list[tuple[float, float]]:
        """Return a curve, empty where the quantity or the scale is not known."""
        curve, scale = self.curves.get(quantity, []), self.scale(over)
        if over == "time":
            return [(seconds, value) for _, seconds, value in curve]
        return [(scale * step, value) for step, _, value in curve] if scale else []


def shown(plan: PlanResult) -> list[RunResult]:
    """Return the trained runs that are drawn; of a convergence one for all seeds."""
    if plan.record.kind != "convergence":
        return first_and_least(plan.trained, LINES, lambda run: run.final_loss)
    groups = by_settings(plan.trained)[:LINES]
    return [replace(runs[0], label=label, repeats=[each.epochs for each in runs[1:]]) for label, runs in groups]


def curve(style: int, run: RunResult, over: Over, value: Value) -> Line:
    """Return the line of a value after each epoch, and before the first if it is known; of several seeds mean and ends.

    It has no points in time where geometry or loader changed on the way.
    """
    seeds = [[epochs[0].untrained, *epochs] for epochs in (run.epochs, *run.repeats)]
    known = []
    for place, epochs in zip(places(run, over), zip(*seeds, strict=False), strict=False):
        values = [y for epoch in epochs if epoch and (y := value(epoch)) is not None]
        if values and all(map(math.isfinite, values)):
            known.append((place, values))
    points = [(place, sum(values) / len(values)) for place, values in known]
    return run_line(style, points, band=[(min(values), max(values)) for _, values in known] if run.repeats else ())


def places(run: RunResult, over: Over) -> list[float]:
    """Return 0, and the places of a run's epochs on an axis."""
    if over != "time":
        return [0.0, *(getattr(epoch, over) for epoch in run.epochs)]
    times = accumulate((epoch.epoch_seconds + epoch.valid_seconds for epoch in run.epochs), initial=0.0)
    return list(times) if run.training_seconds is not None else []


def draw(name: str, drawn: Sequence[Line], over: Over, label: str, **more: Any) -> str:
    """Draw lines over one of `AXES`."""
    return lines(name, drawn, AXES[over][0], label, time=over == "time", whole=over == "epoch", **more)


def training(plan: PlanResult) -> Section | None:
    """Return the curves of loss, learning rate, and the metric that is followed."""
    runs = shown(plan)
    if not runs:
        return None
    axes: tuple[Over, ...] = ("step", "samples", "time") if plan.record.kind == "convergence" else ("epoch", "time")
    plots = [loss(plan, runs, over) for over in axes]
    rates = [run_line(n, [(each.epoch, each.learning_rate) for each in run.epochs]) for n, run in enumerate(runs)]
    drawing = draw(f"{plan.name}-rate", rates, "epoch", "learning rate", y="zero", height=1.5)
    plots.append((drawing, "Learning rate at the end of each epoch."))
    if metric := followed(plan):
        plots += metric_curves(plan, runs, metric)
    seeds = (
        "Trainings are repeated with other seeds: lines are means, bands reach from the least to the greatest. Dashed: "
        "the first one. In the table ± is the standard deviation."
    )
    notes = [seeds] * any(run.repeats for run in runs)
    every = len(by_settings(plan.trained)) if plan.record.kind == "convergence" else len(plan.trained)
    notes += some(len(runs), every, "runs", "the table has all.")
    legend = [*(entry(style, run.called) for style, run in enumerate(runs)), Entry("validation")]
    return Section("Training", legend=[*legend, Entry("training", dashes=DASHED)], plots=plots, notes=notes)


def loss(plan: PlanResult, runs: Sequence[RunResult], over: Over) -> Plot:
    """Return the figure of training (dashed) and validation loss."""
    drawn = []
    for style, run in enumerate(runs):
        drawn.append(curve(style, run, over, lambda epoch: epoch.valid_loss))
        trained = list(zip(places(run, over)[1:], [epoch.train_loss for epoch in run.epochs], strict=False))
        drawn.append(Line(trained, RUN_COLOURS[style], dashes=DASHED, width=1.1))
    axis, what = AXES[over]
    return draw(f"{plan.name}-{over}", drawn, over, plan.loss.label, height=3.0), f"Loss over {axis}: {what}."


def followed(plan: PlanResult) -> Metric | None:
    """Return the metric that is drawn: a published one, else the leading one; None if it is the loss itself."""
    wanted = [figure.metric for figure in plan.record.published if figure.metric in plan.metrics]
    metric = plan.metrics[wanted[0]] if wanted else plan.lead
    if metric is None or not plan.trained:
        return None
    values = [(metric.of(epoch), epoch.valid_loss) for run in plan.trained for epoch in run.epochs]
    return None if all(math.isclose(*both, rel_tol=1e-5) for both in values) else metric


def metric_curves(plan: PlanResult, runs: Sequence[RunResult], metric: Metric) -> list[Plot]:
    """Return the figures of a metric over epochs, steps and time, with the values published for the plan's runs."""
    mine = {f"{plan.name}.{run.name}" for run in plan.runs}
    levels = {
        figure.value: f"published: {published.shown(figure)}"
        for figure in plan.record.published
        if figure.metric == metric.name and figure.value is not None and mine.intersection(figure.runs)
    }
    captions: dict[Over, str] = {
        "epoch": f"{metric.full_title} on the validation data; {metric.better} is better.",
        "step": "The same over optimiser steps.",
        "time": "The same over time.",
    }
    plots = []
    for over, words in captions.items():
        drawn = [curve(n, run, over, lambda epoch: epoch.metrics.get(metric.name)) for n, run in enumerate(runs)]
        more = {"levels": list(levels.items()), "height": 2.2}
        plots.append((draw(f"{plan.name}-metric-{over}", drawn, over, metric.label, **more), words))
    return plots


def with_references(plan: PlanResult, references: Sequence[Reference]) -> Section | None:
    """Return loss and followed metric beside the references of a plan; None if it has none."""
    runs, metric, study = shown(plan), followed(plan), plan.record.study
    mine = [each for each in references if each.study == study and (not each.plans or plan.name in each.plans)]
    quantities: list[tuple[str, str, str, Value]] = [
        ("loss/valid", "Validation loss", plan.loss.label, lambda epoch: epoch.valid_loss)
    ]
    if metric:
        name = metric.name
        quantities.append((f"valid/{name}", metric.full_title, metric.label, lambda epoch: epoch.metrics.get(name)))
    plots = []
    for quantity, title, label, value in quantities if runs else []:
        for over in ("step", "samples", "time"):
            theirs = [_line(style, each.points(quantity, over)) for style, each in enumerate(mine)]
            ours = [replace(curve(style, run, over, value), band=()) for style, run in enumerate(runs)]
            if any(line.points for line in theirs):
                name, (axis, what) = f"{plan.name}-beside-{quantity.replace('/', '-')}-{over}", AXES[over]
                drawing = draw(name, [*ours, *theirs], over, label, x="wide", height=2.6)
                plots.append((drawing, f"{title} over {axis}: {what}."))
    note = (
        "The dashed lines are logs that dlscale import brought in: of other programs, on their own data and hardware, "
        "with their own settings. Time is that since training began, by the clock."
    )
    looks = [(each, _line(style, [])) for style, each in enumerate(mine)]
    legend = [entry(style, run.called) for style, run in enumerate(runs)]
    legend += [Entry(e.label, look.colour, "", look.dashes, look.width, ", ".join(e.files)) for e, look in looks]
    return Section("Beside other programs' runs", legend=legend, plots=plots, notes=[note]) if plots else None


def _line(style: int, points: Sequence[tuple[float, float]]) -> Line:
    colour, width = (INK, MUTED)[style // 4 % 2], (1.4, 3.0)[style // 8 % 2]
    return Line(points, colour, dashes=DASHES[style % 4], width=width)
