"""Write the table of a plan's runs, `summary.csv` (stage `collect`); docs/measuring.md describes its columns."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from typing import Any

from dlscale.core.files import write_text
from dlscale.core.metrics import Epoch
from dlscale.core.text import escape_formula
from dlscale.measure.records import MODES
from dlscale.report import published
from dlscale.report.speedup import SCALING, SpeedUp, SpeedUps, series
from dlscale.results import PlanResult, RunResult, reached, read_plan

#: A row of the table: column → value; None for an unknown value.
Row = dict[str, Any]


def main(args: argparse.Namespace) -> None:
    """Write `args.out` (CSV) from the runs of `args.plan`."""
    write_text(args.out, summary_csv(read_plan(args.plan)))


def summary_csv(plan: PlanResult) -> str:
    """Return the plan's table as CSV; numbers have all digits, and cells without a value are empty."""
    import pandas as pd

    rows = rows_of(plan)
    columns = dict.fromkeys(key for row in rows for key in row)
    # Cells are text, because pandas would write NaN as a missing value.
    cells = [[None if row.get(key) is None else escape_formula(str(row[key])) for key in columns] for row in rows]
    table = pd.DataFrame(cells, columns=[escape_formula(key) for key in columns], dtype=object)
    return table.to_csv(index=False, lineterminator="\n")


def rows_of(plan: PlanResult) -> list[Row]:
    """Return the rows of a plan's table; a row has a key for a metric only if the run has this metric."""
    figures = published.series(plan.record.published, plan.name, [run.name for run in plan.runs])
    scaled, speeds = plan.record.kind in SCALING, SpeedUps(plan.runs)
    points = {point.run: point for each in series(plan) for point in each.points} if scaled else {}
    rows = []
    for run, before in zip(plan.runs, [None, *plan.runs], strict=False):
        made, target, figure = run.provenance, reached(run), figures.get(run.name)
        unit = run.unit.partition("/")[0]
        row: Row = {
            "run": run.name,
            "label": run.label,
            "plan": plan.name,
            "study": plan.record.study,
            "dataset": run.settings.get("dataset"),
            "source": run.owner,
            **(plan.record.sweep.trials[run.name] if plan.record.sweep else {}),
            **_of(made, parameters="parameters"),
            **({"seeds": 1 + len(run.repeats)} if plan.repeats else {}),
            **_of(run.last, epochs="epoch", steps="step", samples="samples"),
            **_mean(plan, run, "train_loss", lambda epoch: epoch.train_loss),
            **_mean(plan, run, "valid_loss", lambda epoch: epoch.valid_loss),
            "best_valid_loss": run.best_valid_loss,
            **_of(made and made.best, best_metric="metric", best_epoch="epoch", best_value="value"),
            **_of(target, target="aim"),
            "target_reached": target and ("yes" if target.epoch else "no"),
            **_of(target and target.epoch, target_epoch="epoch", target_samples="samples"),
            **_of(target, target_seconds="seconds", target_gpu_hours="gpu_hours", target_energy_joules="joules"),
            f"train_{unit}_per_second": run.training_speed,
            **_of(run.goodput, goodput="training"),
            "energy_joules": run.energy,
            "energy_per_sample": run.energy_per_sample,
        }
        for mode in MODES:
            rate = f"{mode.lower()}_{unit}_per_second"
            row |= _of(run.trials(mode), **{rate: "mean", f"{rate}_std": "std"})
        row |= _speed_up("speed_up", speeds.over(run, speeds.first))
        if plan.record.kind == "ladder":
            row |= _speed_up("step_speed_up", speeds.over(run, before) if before else None)
        row |= {
            "devices": run.devices,
            "mfu": run.throughput and run.throughput.mfu(),
            "mbu": run.throughput and run.throughput.mbu(),
            **_of(figure, published_samples_per_second="speed"),
            "published_speed_up": published.ratio(figures, run.name),
            **_of(figure, published_as="label", published_hardware="devices", published_source="source"),
        }
        for name in run.last.metrics if run.last else ():
            key = f"metric {name}" if name in row else name
            row |= _mean(plan, run, key, lambda epoch, name=name: epoch.metrics.get(name))  # type: ignore[misc]
        for mode in MODES if scaled else ():
            point = points.get(run)  # None for a run outside of all series, such as a run without gradient averaging
            row |= _of(point and point.efficiency(mode), **{f"{mode.lower()}_efficiency": "value"})
            row |= _of(point and point.communication(mode), **{f"{mode.lower()}_communication": "value"})
        rows.append(row)
    return rows


def _of(record: object | None, **columns: str) -> Row:
    """Return column → attribute of a record; without a record all values are None."""
    return {column: getattr(record, name) if record else None for column, name in columns.items()}


def _speed_up(name: str, found: SpeedUp | None) -> Row:
    known = found if found and math.isfinite(found.error) else None
    return {
        **_of(found, **{name: "ratio"}),
        **_of(known, **{f"{name}_low": "low", f"{name}_high": "high"}),
        f"{name}_noise": found and ("yes" if found.noise else "no"),
    }


def _mean(plan: PlanResult, run: RunResult, key: str, value: Callable[[Epoch], float | None]) -> Row:
    """Return a value after the last epoch; with several seeds, its mean and standard deviation."""
    if not plan.repeats:
        return {key: value(run.last) if run.last else None}
    last = [epochs[-1] for epochs in (run.epochs, *run.repeats) if epochs]
    values = [found for epoch in last if (found := value(epoch)) is not None]
    return {
        key: statistics.fmean(values) if values else None,
        f"{key}_std": statistics.stdev(values) if values[1:] and all(map(math.isfinite, values)) else None,
    }
