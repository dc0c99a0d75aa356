"""How a computation scales over devices, as the page shows it."""

from __future__ import annotations

from collections.abc import Sequence

from dlscale.core.records import MODES, Published
from dlscale.core.text import count, number, percent
from dlscale.report import figures, published
from dlscale.report.drawing import MARKERS, MODE_COLOURS, RUN_COLOURS
from dlscale.report.glance import View
from dlscale.report.results import PlanResult, RunResult
from dlscale.report.series import KINDS, Point, Ratio, Series, series
from dlscale.report.tables import Cell, RunsTable, table

#: How many series the figures show; the table has all.
LINES = 4


def glance(plan: PlanResult) -> str | None:
    """Return in a sentence how far the plan scales: FULL of the most devices, the best of several series."""
    if plan.record.kind not in KINDS:
        return None
    last = [(each.label, points[-1]) for each, points in series(plan) if len(points) > 1]
    known = [(label, point, found) for label, point in last if (found := point.efficiency("FULL"))]
    if not known:
        return None
    label, point, efficiency = max(known, key=lambda one: (one[1].devices, one[2].value))
    said = f"{percent(efficiency.value)} of the ideal on {point.devices} devices ({label})"
    share = point.communication("SYNTHETIC") or point.alone
    return f"{said}; communication takes {percent(max(share.value, 0.0))} of a step" if share else said


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
            *((each.label, f"s{style}", MARKERS[style][1]) for style, (each, _) in enumerate(shown)),
            *((mode, mode.lower(), MARKERS[style][1]) for style, mode in enumerate(MODES)),
        ],
        "solid": "measured",
        "dashed": "ideal, or without communication",
        "plots": _plots(plan.name, shown),
        "table": _table(plan, found),
        "caption": "By number of devices. Small: the ideal; ±; published figures at full size.",
        "note": f"{len(shown)} of {len(found)} series are drawn: the table has all." if len(shown) < len(found) else "",
    }


def _plots(plan: str, shown: Sequence[tuple[Series, list[Point]]]) -> list[tuple[str, str]]:
    plots = []
    for style, (each, points) in enumerate(shown):
        lines = []
        for number_, mode in enumerate(MODES):
            colour, marker = MODE_COLOURS[mode], MARKERS[number_][0]
            lines.append(figures.Line(_rates(points, mode), colour, marker))
            lines.append(figures.Line([(p.devices, p.ideal(mode)) for p in points], colour, dashed=True))
        drawing = figures.over_devices(f"{plan}-scaling-{style}", lines, "throughput (samples/s)")
        plots.append((drawing, f"{each.label}: throughput, solid, and ideal, dashed: loading (IO), computing "
                               "(SYNTHETIC), both (FULL)."))  # fmt: skip
    if any(point.twin for _, points in shown for point in points):
        lines = []
        for style, (_, points) in enumerate(shown):
            lines.append(_line(_rates(points, "SYNTHETIC"), style))
            twins = [(p.devices, _mean(p.twin, "SYNTHETIC")) for p in points]
            lines.append(_line([(p.devices, _mean(p.run, "SYNTHETIC")) for p in points[:1]] + twins, style, True))
        drawing = figures.over_devices(f"{plan}-overhead", lines, "SYNTHETIC (samples/s)")
        plots.append((drawing, "Overhead of communication: computing with (solid) and without (dashed) averaged "
                               "gradients."))  # fmt: skip
    lines = []
    for style, (_, points) in enumerate(shown):
        lines.append(_line([(p.devices, _milliseconds(p.seconds("FULL"))) for p in points], style))
        lines.append(_line([(p.devices, _milliseconds(_ideal_seconds(p))) for p in points], style, True))
    drawing = figures.over_devices(f"{plan}-step", lines, "time of a step (ms)", doubling=True)
    plots.append((drawing, "Time of a step of FULL, solid, and ideal, dashed."))
    lines = [figures.Line([(shown[0][1][0].devices, 100.0), (max(p.devices for _, ps in shown for p in ps), 100.0)],
                          RUN_COLOURS[-1], dashed=True)]  # fmt: skip
    for style, (_, points) in enumerate(shown):
        known = [(p.devices, ratio) for p in points if (ratio := p.efficiency("FULL"))]
        line = [(devices, 100 * ratio.value) for devices, ratio in known]
        lines.append(figures.Line(line, RUN_COLOURS[style], MARKERS[style][0], [100 * r.noise for _, r in known]))
    drawing = figures.over_devices(f"{plan}-efficiency-of-scaling", lines, "efficiency of FULL (%)", doubling=True)
    plots.append((drawing, "Efficiency: the share of the ideal that FULL reaches; whiskers are what noise leaves."))
    return plots


def _line(points: Sequence[tuple[int, float | None]], style: int, dashed: bool = False) -> figures.Line:
    return figures.Line(points, RUN_COLOURS[style], "" if dashed else MARKERS[style][0], dashed=dashed)


def _rates(points: Sequence[Point], mode: str) -> list[tuple[int, float | None]]:
    return [(point.devices, _mean(point.run, mode)) for point in points]


def _mean(run: RunResult | None, mode: str) -> float | None:
    trials = run.trials(mode) if run else None
    return trials.mean if trials else None


def _ideal_seconds(point: Point) -> float | None:
    rate, batch = point.ideal("FULL"), point.run.settings.get("batch_size")
    return batch / rate if rate and batch else None


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _table(plan: PlanResult, found: Sequence[tuple[Series, list[Point]]]) -> RunsTable:
    rows = [(each, point) for each, points in found for point in points]
    columns: list[tuple[str, str, list[Cell]]] = [
        ("Run", "run", [Cell(p.run.label, n, link=plan.anchor(p.run)) for n, (_, p) in enumerate(rows)]),
        ("Run", "devices", [Cell(str(p.devices), p.devices, _nodes(p.run)) for _, p in rows]),
        ("Run", "samples a step", [_whole(p.run.settings.get("batch_size")) for _, p in rows]),
    ]
    for mode in MODES:
        columns += [
            (mode, "samples/s", [_rate(p, mode) for _, p in rows]),
            (mode, "efficiency", [_ratio(p.efficiency(mode), _published(plan, p, mode, "FULL")) for _, p in rows]),
            (mode, "communication", [
                _ratio(p.communication(mode), _published(plan, p, mode, "SYNTHETIC", "communication")) for _, p in rows
            ]),
        ]  # fmt: skip
    columns += [
        ("One process", "communication", [_ratio(p.alone) for _, p in rows]),
        ("Step of FULL", "time (ms)", [_cell(_milliseconds(p.seconds("FULL"))) for _, p in rows]),
    ]
    return table(columns)


def _nodes(run: RunResult) -> str:
    nodes = int((run.settings.get("geometry") or {}).get("nodes", 1))
    return f"{nodes} nodes" if nodes > 1 else ""


def _cell(value: float | None) -> Cell:
    return Cell() if value is None else Cell(number(value), value)


def _whole(value: int | None) -> Cell:
    return Cell() if value is None else Cell(count(value), value)


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


def _published(
    plan: PlanResult, point: Point, mode: str, of: str, metric: str = "scaling_efficiency"
) -> Published | None:
    """Return the published figure of a run, which is of one mode."""
    return published.final(plan.record.published, plan.name, point.run.name, metric) if mode == of else None
