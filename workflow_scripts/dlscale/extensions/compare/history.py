"""`dlscale history`: show all measurements of any number of results folders in chronological order.

Each measurement is compared, as in `compare`, with the previous measurement of the same run, device and compute
settings.
"""

from __future__ import annotations

import argparse
import datetime as dt
import math
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlscale.config.places import results_of
from dlscale.core import text
from dlscale.core.errors import UserError
from dlscale.core.files import save_png
from dlscale.extensions.compare.compare import finished
from dlscale.extensions.compare.terminal import show
from dlscale.measure.records import SAMPLE_RATE, STEP_RATE
from dlscale.report.figures import Cell, cell, table
from dlscale.report.speedup import measured_apart, spread_of
from dlscale.results import RunResult, environment_changes

if TYPE_CHECKING:
    import pandas as pd

    from dlscale.config.resolve import Configuration


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Print the history of `args.results`; draw the file `args.out`, if set; return the exit status 0."""
    results = results_of(configuration)
    found = history(args.results or [str(results)], configuration, _day(args.since))
    if found.empty:
        older = ", or choose an earlier day" if args.since else ""
        raise UserError(
            f"history: no measurements{f' since {args.since}' * bool(args.since)}. Measure a plan first{older}"
        )
    if args.out:
        draw(found, Path(args.out))
    if args.json:
        print(found.to_json(orient="records", indent=2))
        return 0
    rows: list[Any] = list(found.astype(object).where(found.notna(), None).itertuples())
    show(
        table(
            [
                ("", "run", [cell(row.run) for row in rows]),
                ("", "measured", [cell(row.time[:16].replace("T", " ")) for row in rows]),
                ("", "results", [cell(row.results) for row in rows]),
                ("", "device", [cell(row.device) for row in rows]),
                ("", "speed", [_speed(row) for row in rows]),
                ("", "relative to the previous", [cell(row.over_before) for row in rows]),
                ("", "environment changes since the previous", [cell(row.differs) for row in rows]),
            ]
        )
    )
    return 0


def history(names: list[str], configuration: Configuration | None, since: str = "") -> pd.DataFrame:
    """Return a table with a row for each measurement since the day `since`, sorted by run and time.

    Columns: run, time (ISO 8601), results, device, samples_per_second and steps_per_second (one of them is NaN),
    interval (half-width of the 95 % interval, in the unit of the speed; NaN if unknown), over_before (speed relative to
    the previous measurement, in words), ratio (the same, as a number), differs (changes of the environment since the
    previous measurement, in words).
    """
    import pandas as pd

    runs = [
        (_time(run), run.owner.replace("/", "."), name, run)
        for name in names
        for run in finished(name, configuration).values()
        if run.speed
    ]
    by_work = dict[tuple[str, str, str], list[tuple[str, str, str, RunResult]]]()
    for each in sorted(runs, key=lambda each: each[:3]):
        same = by_work.setdefault((each[1], each[3].compute, each[3].device.name), [])
        if not any((each[0], each[3].speed) == (other[0], other[3].speed) for other in same):
            same.append(each)  # copies of a run, and a run of several plans, count once
    rows = list[dict[str, Any]]()
    for same in by_work.values():
        for before, after in pairwise([None, *same]):
            assert after
            rows.append(_row(after, before[3] if before else None))
    kept = [row for row in rows if row["time"] >= since]
    return pd.DataFrame(kept).sort_values(["run", "time"], kind="stable") if kept else pd.DataFrame()


def _row(measured: tuple[str, str, str, RunResult], before: RunResult | None) -> dict[str, Any]:
    time, key, name, run = measured
    speed, error = run.speed or math.nan, spread_of(run)
    over = measured_apart(run, before) if before else None
    return {
        "run": key,
        "time": time,
        "results": name,
        "device": run.device.name,
        "samples_per_second": speed if run.unit == SAMPLE_RATE else math.nan,
        "steps_per_second": speed if run.unit == STEP_RATE else math.nan,
        "interval": speed * error if math.isfinite(error) else math.nan,
        "over_before": over.words if over else None,
        "ratio": over.ratio if over and not over.unknown else math.nan,
        "differs": ", ".join(environment_changes(before, run)) if before else None,
    }


def _time(run: RunResult) -> str:
    """Return the time of a run's measurement in ISO 8601; empty if the time is unknown."""
    if run.environment:
        return run.environment.time
    return (run.provenance.finished or "") if run.provenance else ""


def _day(since: str | None) -> str:
    try:
        return dt.date.fromisoformat(since).isoformat() if since else ""
    except ValueError:
        raise UserError(f"--since: {since}: expected a day such as 2026-11-26") from None


def _speed(row: Any) -> Cell:
    speed, unit = (row.samples_per_second, SAMPLE_RATE) if row.samples_per_second else (row.steps_per_second, STEP_RATE)
    return cell(speed, lambda number: f"{text.number(number)} {unit}", _around(row.interval))


def _around(interval: float | None) -> str:
    return "" if interval is None else f"± {text.number(interval, 2)}"


def draw(found: pd.DataFrame, path: Path) -> None:
    """Draw each run's speed over time into a PNG file.

    A speed is relative to the first measurement in `found` of the same run, device and unit. Measurements without a
    known time are left out.
    """
    import matplotlib
    from matplotlib.dates import date2num
    from matplotlib.figure import Figure

    every = found.assign(speed=found.samples_per_second.fillna(found.steps_per_second))
    every["unit"] = found.samples_per_second.isna()
    with matplotlib.rc_context({"text.parse_math": False}):  # draw `$` in the name of a run or device as text
        figure = Figure(figsize=(9, 5), layout="constrained")
        axes = figure.add_subplot()
        for (run, device, _), rows in every[found.time != ""].groupby(["run", "device", "unit"], sort=False):
            first, days = rows.speed.iloc[0], date2num([dt.datetime.fromisoformat(time) for time in rows.time])
            errors = (rows.interval / first).fillna(0.0)
            axes.errorbar(days, rows.speed / first, errors, marker="o", capsize=3, label=f"{run}, {device}")
        axes.xaxis_date()
        axes.axhline(1.0, color="0.6", linewidth=1)
        axes.set(xlabel="measured (UTC)", ylabel="speed, relative to the first measurement")
        axes.tick_params(axis="x", rotation=30)
        axes.legend(fontsize="small")
        save_png(figure, path, dpi=100)
