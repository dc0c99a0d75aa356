"""Imported logs of other programs: their record, and their section of the page."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field

from dlscale.core.record import Number, Record
from dlscale.core.schema import Name
from dlscale.report.curves import AXES, Over, Value, charts_of, curve, drawn, followed
from dlscale.report.figures import Section, View
from dlscale.report.sections import Page
from dlscale.results import PlanResult


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
        """Return the factor from the files' steps to an axis's unit; None if unknown."""
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


def section(plan: PlanResult, page: Page) -> Section | None:
    """Return a section with curves of a plan's runs and its imported logs; None without runs or logs."""
    runs, metric, study = drawn(plan), followed(plan), plan.record.study
    references = map(Reference.read, page.references)
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
            name = f"beside-{quantity.partition('/')[0]}"  # without the metric's name, which may contain any character
            charts += charts_of(plan, name, about, rows, shared[0], label, ["dlscale", "other program"])
    files = "; ".join(f"{each.label}: {', '.join(each.files)}" for each in mine)
    note = (
        "Dashed lines are logs of other programs, imported by dlscale import. Their data, hardware and settings may "
        f"differ from dlscale's. The time of a log is clock time since training began. {files}"
    )
    return Section("Compared with other programs", charts=charts, notes=[note]) if charts else None
