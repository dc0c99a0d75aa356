"""Logs of other programs' runs, which `dlscale import-log` brought in, and how they stand beside ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Literal

from pydantic import Field

from dlscale.core.metrics import Epoch, Metric, Untrained
from dlscale.core.record import Number, Record
from dlscale.core.schema import Name
from dlscale.report import figures
from dlscale.report.drawing import MARKERS, PAINT
from dlscale.report.glance import View
from dlscale.report.results import PlanResult, RunResult

#: What a curve is drawn over: optimiser steps, training samples, or seconds since training began, by the clock.
Over = Literal["step", "samples", "time"]

#: The axes, and what the figures over them show.
AXES: dict[Over, tuple[str, str]] = {
    "step": ("optimiser step", "what each update teaches"),
    "samples": ("training samples", "what each sample teaches"),
    "time": ("time, validation included", "what waiting buys"),
}


class Reference(Record):
    """`references/NAME/reference.json`: the log of another program's run."""

    name: Name
    label: str
    study: Name
    plans: list[str] = []  #: That show it; none: all of the study.
    files: dict[str, str]  #: The event files that it was read from: their SHA-256 by name.
    counts: Literal["step", "epoch"] = "step"  #: What the steps in the files are.
    batch_size: int | None = Field(None, ge=1)
    epoch_samples: int | None = Field(None, ge=1)  #: Training samples of an epoch.
    #: By our name of a quantity (`loss/valid`): step as in the files, seconds since training began, value.
    curves: dict[str, list[tuple[int, float, Number]]]

    def scale(self, over: Over) -> float | None:
        """Return by what to multiply a step of the files; None where that is not known."""
        samples = self.batch_size if self.counts == "step" else self.epoch_samples
        if over == "samples":
            return samples
        if self.counts == "step":
            return 1.0
        return self.epoch_samples / self.batch_size if self.epoch_samples and self.batch_size else None

    def points(self, quantity: str, over: Over) -> list[tuple[float, float]]:
        """Return a curve; no points where the quantity is not in the files, or the scale is not known."""
        curve = self.curves.get(quantity, [])
        if over == "time":
            return [(seconds, value) for _, seconds, value in curve]
        scale = self.scale(over)
        return [(scale * step, value) for step, _, value in curve] if scale else []


def read_references(paths: Iterable[str | Path]) -> list[Reference]:
    """Read `reference.json` files."""
    return [Reference.read(path) for path in paths]


def view(plan: PlanResult, runs: Sequence[RunResult], metric: Metric | None, all_: Sequence[Reference]) -> View | None:
    """Return the loss and a `metric` of `runs` beside the references of a plan; None if it has none."""
    mine = [each for each in all_ if each.study == plan.record.study and (not each.plans or plan.name in each.plans)]
    if not (mine and runs):
        return None
    quantities = [("loss/valid", "Validation loss", plan.loss.label)]
    if metric:
        quantities.append((f"valid/{metric.name}", metric.full_title, metric.label))
    plots = []
    for number, (quantity, title, label) in enumerate(quantities):
        for over, (axis, what) in AXES.items():
            theirs = [(each.points(quantity, over), dash) for dash, each in enumerate(mine)]
            ours = [(own_points(run, quantity, over), style) for style, run in enumerate(runs)]
            if any(points for points, _ in theirs):
                name = f"{plan.name}-beside-{number}-{over}"
                drawing = figures.beside(name, ours, theirs, axis, label, time=over == "time")
                plots.append((drawing, f"{title} over {axis}: {what}."))
    if not plots:
        return None
    return {
        "plots": plots,
        "legend": [(run.label, style, MARKERS[style][1]) for style, run in enumerate(runs)],
        "references": [
            (each.label, " ".join(map(str, dashes)), PAINT[colour], width, ", ".join(each.files))
            for each, (dashes, colour, width) in zip(mine, map(figures.reference_style, range(len(mine))), strict=True)
        ],
    }


def own_points(run: RunResult, quantity: str, over: Over) -> list[tuple[float, float]]:
    """Return a quantity of a run, also before its first step where that is known."""

    def value(record: Epoch | Untrained | None) -> float | None:
        if record is None:
            return None
        return record.valid_loss if quantity == "loss/valid" else record.metrics.get(quantity.removeprefix("valid/"))

    axes = {
        "step": [0.0, *(epoch.step for epoch in run.epochs)],
        "samples": [0.0, *(epoch.samples for epoch in run.epochs)],
        # Without the pauses between tries, of which a log knows nothing.
        "time": [0.0, *accumulate(epoch.epoch_seconds + epoch.valid_seconds for epoch in run.epochs)],
    }
    records = [run.epochs[0].untrained, *run.epochs]
    return [(x, y) for x, record in zip(axes[over], records, strict=True) if (y := value(record)) is not None]
