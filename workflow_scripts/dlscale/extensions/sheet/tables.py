"""Parts of the sheet with tables: scaling, and trainings to the target."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from dlscale.core.text import NONE, count, duration, listed, number, percent
from dlscale.extensions.predict import predict
from dlscale.extensions.sheet.evidence import Evidence, named, nodes_of
from dlscale.extensions.sheet.parts import OPEN, Curve, Fact, Grid, Row, fact
from dlscale.report.figures import joules
from dlscale.report.speedup import Point, spread
from dlscale.results import UNKNOWN, reached

#: Kinds of scaling, in the order of the sheet.
KINDS = {"strong_scaling": "Strong scaling", "weak_scaling": "Weak scaling"}

#: Maximum numbers of series of a kind, measured rows of a series, and trainings, so that two pages suffice.
SERIES, ROWS, TRAININGS = 2, 8, 5

#: Multiples of the largest measured number of devices for which the sheet predicts.
MULTIPLES = 2, 4, 8

#: Columns of the tables.
SCALING = (
    *("devices", "nodes", "batch", "samples/s", "efficiency", "communication", "step (ms)", "energy per sample"),
    "origin",
)
TRAINED = "training", "devices", "nodes", "samples", "time", "node-hours", "device-hours", "energy", "origin"


def grid(title: str, columns: Sequence[str], rows: Sequence[Row], note: str = "") -> Grid:
    """Return a table without the columns that are empty in all rows."""
    kept = [place for place in range(len(columns)) if any(row.cells[place] != NONE for row in rows)]
    shown_rows = [Row(tuple(row.cells[place] for place in kept), row.basis) for row in rows]
    return Grid(title, tuple(columns[place] for place in kept), shown_rows, note)


# ---- scaling -----------------------------------------------------------------------------------------


def unscaled(evidence: Evidence) -> Iterator[Fact]:
    """Yield open facts: kinds of scaling that were not measured, unknown efficiencies, and runs without results."""
    there, run = {plan.record.kind for plan, _ in evidence.scaled}, evidence.shown
    for kind, title in KINDS.items():
        if kind not in there:
            name = kind.partition("_")[0]
            devices = f"devices: [1, 2, 4], batch_sizes: [{run.batch_size or 1}]"
            new = f"{{study: {run.study}, kind: {kind}, from: {named(run)}, scaling: {{{devices}}}}}"
            note = f"add the plan `{name}: {new}` to a file; dlscale run {name} --configfile FILE; then name both plans"
            yield Fact(title, OPEN, "open", note)
    for plan, each in evidence.scaled:
        if plan.record.kind in KINDS and not is_known(each.points[-1]):
            note = "other programs disturbed the runs, or their trials are few or noisy; measure on an idle machine"
            yield Fact(f"Efficiency, plan {plan.name}", OPEN, "open", note)
    if evidence.lacking:
        yield Fact(
            "Runs without results",
            OPEN,
            "open",
            f"{listed(evidence.lacking)}; dlscale run {evidence.names}{evidence.options}",
        )


def scaling(evidence: Evidence) -> tuple[list[Grid], list[Curve]]:
    """Return a table and a chart for each measured series, strong scaling first, with predicted rows."""
    grids, curves = list[Grid](), list[Curve]()
    for kind, title in KINDS.items():
        found = [(*both, forecast) for both, forecast in zip(evidence.scaled, evidence.forecasts, strict=True)]
        for plan, each, forecast in [one for one in found if one[0].record.kind == kind][:SERIES]:
            base, there = each.points[0], [point.devices for point in each.points]
            asked = evidence.args.devices or [factor * there[-1] for factor in MULTIPLES]
            rows = forecast.rows(asked, None if kind == "weak_scaling" else each.batch)
            rows = [row for row in rows if row.job.devices not in there]
            note = (
                f"Predictions: {predict.head(forecast.runs)[0]}."
                if forecast.runs
                else f"No prediction: {forecast.reason}"
            )
            note += " The fitted runs were disturbed by other programs: measure again." * forecast.disturbed
            both = [*(_measured(point) for point in each.points[-ROWS:]), *(_predicted(row, base) for row in rows)]
            grids.append(grid(f"{title}: plan {plan.name}, {each.label}", SCALING, both, note))
            known = [(point.devices, *_span(point)) for point in each.points if is_known(point)]
            ahead_of = [(row.job.devices, *_relative(row, base)) for row in rows if is_known(base)]
            curves += [Curve(f"{title}, {each.label}", known, ahead_of)] if known else []
    return grids, curves


def is_known(point: Point) -> bool:
    """Return whether an efficiency is reliable: its interval is narrow, and its run and base run were undisturbed."""
    found = point.efficiency("FULL")
    quiet = not (point.run.foreign_cpu_fraction or point.base.foreign_cpu_fraction)
    return quiet and found is not None and found.noise < found.value / 2


def _span(point: Point) -> tuple[float, float, float]:
    found = point.efficiency("FULL")
    assert found
    return found.value, found.value - found.noise, found.value + found.noise


def _measured(point: Point) -> Row:
    trials, found, lost = point.run.trials("FULL"), point.efficiency("FULL"), point.communication("FULL")
    ratio = (
        f"{percent(found.value)} {found.interval_text * bool(found.noise)}" if found and is_known(point) else UNKNOWN
    )
    cells = (
        count(point.devices),
        count(nodes_of(point.run)),
        count(point.batch),
        f"{number(trials.mean)} ± {number(spread(trials) * trials.mean, 2)}" if trials else NONE,
        ratio,
        f"{percent(lost.value)} {lost.interval_text}" if lost and is_known(point) else NONE,
        number(1e3 * point.batch / trials.mean) if trials and trials.mean else NONE,
        joules(point.run.energy_of("FULL")),
        f"measured{', busy machine' * bool(point.run.foreign_cpu_fraction)}",
    )
    return Row(cells, "measured")


def _predicted(row: predict.Row, base: Point) -> Row:
    middle, low, high = map(percent, _relative(row, base)) if is_known(base) else (UNKNOWN,) * 3
    parts = row.parts
    cells = (
        count(row.job.devices),
        count(row.nodes),
        count(round(row.job.samples)),
        f"{number(row.rate.value)} ({number(row.rate.low)} to {number(row.rate.high)})",
        middle if middle == UNKNOWN else f"{middle} ({low} to {high})",
        percent((parts.exposed + parts.slowed) / parts.seconds),
        number(1e3 * parts.seconds),
        NONE,
        "predicted, 90 % band",
    )
    return Row(cells, "predicted")


def _relative(row: predict.Row, base: Point) -> tuple[float, float, float]:
    """Return a predicted efficiency, and its band, relative to the measured base of the series."""
    one = (base.rate("FULL") or math.nan) / base.devices * row.job.devices
    return row.rate.value / one, row.rate.low / one, row.rate.high / one


# ---- target ------------------------------------------------------------------------------------------


def goal(evidence: Evidence) -> Iterator[Fact]:
    """Yield the target, and whether it was reached."""
    found = reached(evidence.trained) if evidence.trained else None
    missed = f"not reached; nearest {number(found.nearest)}" if found and not found.epoch else ""
    todo = f"set training.target in {evidence.plans[0].name} (docs/training.md); {evidence.remedy('train')}"
    yield fact("Target", found and found.aim, todo, note=missed, basis="setting")


def trainings(evidence: Evidence) -> Iterator[Grid]:
    """Yield the table of trainings, with the predicted training in production."""
    rows, runs = list[Row](), [run for run in evidence.runs if run.epochs]
    for run in runs[:TRAININGS]:
        found, nodes = reached(run), nodes_of(run)
        last = found.epoch if found else run.last
        seconds = found.seconds if found else run.training_seconds
        cells = (
            *(named(run), count(run.devices), count(nodes), count(last.samples) if last else "target not reached"),
            *(duration(seconds), number(seconds and seconds * nodes / 3600)),
            *(number(seconds and seconds * run.devices / 3600), joules(found.joules if found else run.energy)),
            f"measured{', busy machine' * bool(run.foreign_cpu_fraction)}",
        )
        rows.append(Row(cells, "measured"))
    row, origin = evidence.predicted, "predicted, without validations"
    if row and row.seconds and evidence.samples and evidence.production not in {run.devices for run in runs}:
        hours = number(row.node_hours), number(row.seconds * row.job.devices / 3600)
        size = count(row.job.devices), count(row.nodes), count(evidence.samples)
        rows.append(Row(("production", *size, duration(row.seconds), *hours, NONE, origin), "predicted"))
    if rows:
        what = "to the target" if reached(runs[0]) else "without a target"
        yield grid(f"Trainings {what}", TRAINED, rows, "Time: from the first step, with validations.")
