"""How a computation scales over devices, as the page shows it."""

from __future__ import annotations

from collections.abc import Sequence

from dlscale.core.records import MODES, Published
from dlscale.core.text import count, number, percent
from dlscale.report import figures, published
from dlscale.report.drawing import MARKERS, MODE_COLOURS, MUTED, RUN_COLOURS
from dlscale.report.glance import View
from dlscale.report.results import PlanResult, RunResult
from dlscale.report.series import KINDS, Point, Ratio, Series, series
from dlscale.report.tables import Cell, RunsTable, table

#: How many series the figures show; the table has all.
LINES = 4

#: How many times as fast loading may be as computing where both are drawn from zero.
WIDE = 8


def glance(plan: PlanResult) -> str | None:
    """Return in a sentence how far the plan scales: FULL of the most devices, the best of several series."""
    if plan.record.kind not in KINDS:
        return None
    last = [(each, each.points[-1]) for each in series(plan) if len(each.points) > 1]
    known = [(each, point, found) for each, point in last if (found := point.efficiency("FULL"))]
    if not known:
        return None
    of, point, efficiency = max(known, key=lambda one: (one[1].devices, one[2].value))
    said = f"FULL has {percent(efficiency.value)} of the ideal on {point.devices} devices ({of.label})"
    share = point.communication("FULL")
    if share is None:
        return said
    if share.value <= share.noise:
        return f"{said}; communication is within the noise of {percent(share.noise)}"
    return f"{said}; communication takes {percent(share.value)} of a step"


def view(plan: PlanResult) -> View | None:
    """Return figures and table; None where nothing was measured."""
    found = series(plan)
    if not found:
        return None
    shown = found[:LINES]
    weak = plan.record.kind == "weak_scaling"
    batch = "the batch of each device" if weak else "the batch of all devices together"
    rule = f"{'Weak' if weak else 'Strong'} scaling: {batch} stays the same."
    return {
        "title": "Scaling",
        "about": f"{rule} Ideal is the rate of the fewest devices, times as many; efficiency is the share of it that "
        "is reached. Communication is the share of a step's time that is gone where gradients are not averaged, 1 − "
        "time without / time with. ± is what noise leaves: two standard errors over the trials, and 5 % at least "
        "between two processes.",
        "legend": [
            *((each.label, f"s{style}", MARKERS[style][1]) for style, each in enumerate(shown)),
            *((mode, mode.lower(), MARKERS[style][1]) for style, mode in enumerate(MODES)),
        ],
        "solid": "measured",
        "dashed": "ideal, or without communication",
        "plots": [
            *(_throughput(plan.name, number_, each) for number_, each in enumerate(shown)),
            *([_overhead(plan.name, shown)] if any(point.twin for each in shown for point in each.points) else []),
            _time(plan.name, shown),
            _efficiency(plan.name, shown),
        ],
        "table": _table(plan, found),
        "caption": "By number of devices. Small: the ideal; ±; published figures at full size.",
        "note": f"{len(shown)} of {len(found)} series are drawn: the table has all." if len(shown) < len(found) else "",
    }


# ---- figures: what they draw, and what they show -----------------------------------------------------


def _throughput(plan: str, number_: int, of: Series) -> tuple[str, str]:
    lines = []
    for (marker, _), mode in zip(MARKERS, MODES, strict=False):
        measured = [(point.devices, _mean(point.run, mode)) for point in of.points]
        ideal = [(point.devices, point.ideal(mode)) for point in of.points]
        lines.append(figures.Line(measured, MODE_COLOURS[mode], marker))
        lines.append(figures.Line(ideal, MODE_COLOURS[mode], dashed=True))
    first = [rate for mode in MODES if (rate := _mean(of.points[0].run, mode))]
    wide = max(first, default=1.0) > WIDE * min(first, default=1.0)  # the least would lie on the axis
    drawing = figures.over_devices(f"{plan}-scaling-{number_}", lines, "throughput (samples/s)", wide=wide)
    return drawing, (
        f"{of.label}: throughput, solid, and ideal, dashed: loading (IO), computing (SYNTHETIC), both (FULL)."
    )


def _overhead(plan: str, shown: Sequence[Series]) -> tuple[str, str]:
    def apart(point: Point) -> RunResult | None:
        return point.run if point.devices == 1 else point.twin  # one device has nobody to wait for

    lines = []
    for style, each in enumerate(shown):
        lines.append(_line([(p.devices, _mean(p.run, "SYNTHETIC")) for p in each.points], style))
        lines.append(_line([(p.devices, _mean(apart(p), "SYNTHETIC")) for p in each.points], style, dashed=True))
    drawing = figures.over_devices(f"{plan}-overhead", lines, "SYNTHETIC (samples/s)")
    return drawing, "Overhead of communication: computing with (solid) and without (dashed) averaged gradients."


def _time(plan: str, shown: Sequence[Series]) -> tuple[str, str]:
    lines = []
    for style, each in enumerate(shown):
        lines.append(_line([(p.devices, _milliseconds(p.seconds("FULL"))) for p in each.points], style))
        ideal = [(p.devices, _milliseconds(p.ideal_seconds("FULL"))) for p in each.points]
        lines.append(_line(ideal, style, dashed=True))
    drawing = figures.over_devices(f"{plan}-step", lines, "time of a step (ms)", doubling=True)
    return drawing, "Time of a step of FULL, solid, and ideal, dashed."


def _efficiency(plan: str, shown: Sequence[Series]) -> tuple[str, str]:
    counts = [point.devices for each in shown for point in each.points]
    lines = [figures.Line([(min(counts), 100.0), (max(counts), 100.0)], MUTED, dashed=True)]
    for style, each in enumerate(shown):
        known = [(p.devices, ratio) for p in each.points if (ratio := p.efficiency("FULL"))]
        points = [(devices, 100 * ratio.value) for devices, ratio in known]
        noise = [100 * ratio.noise for _, ratio in known]
        lines.append(figures.Line(points, RUN_COLOURS[style], MARKERS[style][0], noise))
    drawing = figures.over_devices(f"{plan}-scaled", lines, "efficiency of FULL (%)", doubling=True)
    return drawing, "Efficiency: the share of the ideal that FULL reaches; whiskers are what noise leaves."


def _line(points: Sequence[tuple[int, float | None]], style: int, dashed: bool = False) -> figures.Line:
    return figures.Line(points, RUN_COLOURS[style], "" if dashed else MARKERS[style][0], dashed=dashed)


def _mean(run: RunResult | None, mode: str) -> float | None:
    trials = run.trials(mode) if run else None
    return trials.mean if trials else None


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


# ---- table -----------------------------------------------------------------------------------------


def _table(plan: PlanResult, found: Sequence[Series]) -> RunsTable:
    rows = [point for each in found for point in each.points]
    columns: list[tuple[str, str, list[Cell]]] = [
        ("Run", "run", [Cell(point.run.label, n, link=plan.anchor(point.run)) for n, point in enumerate(rows)]),
        ("Run", "devices", [Cell(str(point.devices), point.devices, _nodes(point.run)) for point in rows]),
        ("Run", "samples a step", [Cell(count(point.batch), point.batch) for point in rows]),
    ]
    for mode in MODES:
        # Published are the efficiency of real training and the communication of computing alone.
        reached = [_figure(plan, point, "scaling_efficiency") if mode == "FULL" else None for point in rows]
        shares = [_figure(plan, point, "communication") if mode == "SYNTHETIC" else None for point in rows]
        columns += [
            (mode, "samples/s", [_rate(p, mode) for p in rows]),
            (mode, "efficiency", [_ratio(p.efficiency(mode), known) for p, known in zip(rows, reached, strict=True)]),
            (mode, "communication", [_ratio(p.communication(mode), k) for p, k in zip(rows, shares, strict=True)]),
        ]
    columns += [
        ("One process", "communication", [_ratio(point.alone) for point in rows]),
        ("Step of FULL", "time (ms)", [_cell(_milliseconds(point.seconds("FULL"))) for point in rows]),
    ]
    return table(columns)


def _nodes(run: RunResult) -> str:
    nodes = int((run.settings.get("geometry") or {}).get("nodes", 1))
    return f"{nodes} nodes" if nodes > 1 else ""


def _cell(value: float | None) -> Cell:
    return Cell() if value is None else Cell(number(value), value)


def _rate(point: Point, mode: str) -> Cell:
    trials, ideal = point.run.trials(mode), point.ideal(mode)
    if trials is None:
        return Cell()
    return Cell(f"{number(trials.mean)} ± {number(trials.std, 2)}", trials.mean, f"ideal {number(ideal)}")


def _ratio(ratio: Ratio | None, figure: Published | None = None) -> Cell:
    if ratio is None:
        return Cell()
    notes = [f"± {percent(ratio.noise)}"] if ratio.noise else []
    notes += [f"published: {published.shown(figure)}, {figure.source}"] if figure else []
    return Cell(percent(ratio.value), ratio.value, "; ".join(notes))


def _figure(plan: PlanResult, point: Point, metric: str) -> Published | None:
    """Return what was published of a run."""
    return published.final(plan.record.published, plan.name, point.run.name, metric)
