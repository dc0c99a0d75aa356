"""How a computation scales over devices, as the page shows it."""

from __future__ import annotations

from collections.abc import Sequence

from dlscale.config.records import Published
from dlscale.core.text import count, many, number, percent
from dlscale.measure.records import MODES
from dlscale.report import figures, published
from dlscale.report.drawing import DASHED, DOTTED, MARKERS, MODE_COLOURS, MUTED, RUN_COLOURS
from dlscale.report.glance import View
from dlscale.report.results import PlanResult, RunResult
from dlscale.report.series import KINDS, WIDE_NOISE, Point, Ratio, Series, series
from dlscale.report.tables import Cell, RunsTable, table

#: How many series the figures show; the table has all.
LINES = 4

#: How many doubtful ratios its note names.
NAMED = 3

#: The modes as this section has them, and their markers, which no series has.
ORDER = tuple(reversed(MODES))
MODE_MARKERS = dict(zip(ORDER, MARKERS[LINES:], strict=False))

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
    if efficiency.doubtful:
        return f"{said}, ± {percent(efficiency.noise)}: that is noise rather than scaling"
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
    several = [each for each in found if len(each.points) > 1]
    shown, twins = several[:LINES], any(point.twin for each in several[:LINES] for point in each.points)
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
            *((mode, mode.lower(), MODE_MARKERS[mode][1]) for mode in ORDER),
            *((each.label, f"s{style}", MARKERS[style][1]) for style, each in enumerate(shown)),
        ]
        if shown
        else [],
        "strokes": [
            ("measured", ""),
            ("ideal", DASHED),
            *([("without averaged gradients, hollow markers", DOTTED)] if twins else []),
        ],
        "plots": [
            *(_throughput(plan.name, number_, each) for number_, each in enumerate(shown)),
            *([_overhead(plan.name, shown)] if twins else []),
            _time(plan.name, shown),
            _efficiency(plan.name, shown),
        ]
        if shown
        else [],
        "table": _table(plan, found),
        "caption": "Each row is a number of devices. Small figures are the ideal, what noise leaves (±), and what was "
        "published at full size.",
        "note": " ".join(filter(None, [_few(found, several, shown), _doubts(found)])),
    }


def _few(found: Sequence[Series], several: Sequence[Series], shown: Sequence[Series]) -> str:
    """Say which series are not drawn."""
    said = f"{len(shown)} of {len(several)} series are drawn: the table has all." if len(shown) < len(several) else ""
    alone = [f"{each.label} ({many(each.points[0].devices, 'device')})" for each in found if each not in several]
    if not alone:
        return said
    return f"{said} Measured on one number of devices only, which shows no scaling: {'; '.join(alone)}.".lstrip()


def _doubts(found: Sequence[Series]) -> str:
    """Say which ratios noise, and not scaling, decides on."""
    points = [point for each in found for point in each.points]
    words = [
        f"{what} of {mode}, {point.run.label}: {percent(ratio.value)} ± {percent(ratio.noise)}"
        for mode in ORDER
        for what in ("efficiency", "communication")
        for point in points
        if (ratio := getattr(point, what)(mode)) and ratio.doubtful
    ]
    if not words:
        return ""
    more = f"; and {len(words) - NAMED} more" if len(words) > NAMED else ""
    return (
        f"Read little from these, which are uncertain by more than {percent(WIDE_NOISE)}, or which no scaling gives: "
        f"{'; '.join(words[:NAMED])}{more}. Trials differed, a cache held what another run had to read, or the machine "
        "was not quiet: measure again, with more batches."
    )


# ---- figures: what they draw, and what they show -----------------------------------------------------


def _throughput(plan: str, number_: int, of: Series) -> tuple[str, str]:
    lines = []
    for mode in ORDER:
        measured = [(point.devices, _mean(point.run, mode)) for point in of.points]
        ideal = [(point.devices, point.ideal(mode)) for point in of.points]
        lines.append(figures.Line(measured, MODE_COLOURS[mode], MODE_MARKERS[mode][0]))
        lines.append(figures.Line(ideal, MODE_COLOURS[mode], dashes=DASHED))
    first = [rate for mode in MODES if (rate := _mean(of.points[0].run, mode))]
    wide = max(first, default=1.0) > WIDE * min(first, default=1.0)  # the least would lie on the axis
    drawing = figures.over_devices(f"{plan}-scaling-{number_}", lines, "throughput (samples/s)", wide=wide)
    return drawing, (
        f"{of.label}: throughput, solid, and ideal, dashed, of both (FULL), computing (SYNTHETIC) and loading (IO)."
    )


def _overhead(plan: str, shown: Sequence[Series]) -> tuple[str, str]:
    def apart(point: Point) -> RunResult | None:
        return point.run if point.devices == 1 else point.twin  # one device has nobody to wait for

    lines = []
    for style, each in enumerate(shown):
        lines.append(_line([(p.devices, _mean(p.run, "SYNTHETIC")) for p in each.points], style))
        lines.append(_line([(p.devices, _mean(apart(p), "SYNTHETIC")) for p in each.points], style, DOTTED))
    drawing = figures.over_devices(f"{plan}-overhead", lines, "SYNTHETIC (samples/s)")
    return drawing, "Overhead of communication: computing with (solid) and without (dotted) averaged gradients."


def _time(plan: str, shown: Sequence[Series]) -> tuple[str, str]:
    lines = []
    for style, each in enumerate(shown):
        lines.append(_line([(p.devices, _milliseconds(p.seconds("FULL"))) for p in each.points], style))
        ideal = [(p.devices, _milliseconds(p.ideal_seconds("FULL"))) for p in each.points]
        lines.append(_line(ideal, style, DASHED))
    drawing = figures.over_devices(f"{plan}-step", lines, "time of a step (ms)", doubling=True)
    return drawing, "Time of a step of FULL, solid, and ideal, dashed."


def _efficiency(plan: str, shown: Sequence[Series]) -> tuple[str, str]:
    counts = [point.devices for each in shown for point in each.points]
    lines = [figures.Line([(min(counts), 100.0), (max(counts), 100.0)], MUTED, dashes=DASHED)]
    for style, each in enumerate(shown):
        known = [(p.devices, ratio) for p in each.points if (ratio := p.efficiency("FULL"))]
        points = [(devices, 100 * ratio.value) for devices, ratio in known]
        noise = [100 * ratio.noise for _, ratio in known]
        lines.append(figures.Line(points, RUN_COLOURS[style], MARKERS[style][0], noise))
    drawing = figures.over_devices(f"{plan}-scaled", lines, "efficiency of FULL (%)", doubling=True)
    return drawing, "Efficiency: the share of the ideal that FULL reaches; whiskers are what noise leaves."


def _line(points: Sequence[tuple[int, float | None]], style: int, dashes: str = "") -> figures.Line:
    """Return the line of a series; the ideal was not measured anywhere, and has no markers."""
    return figures.Line(points, RUN_COLOURS[style], "" if dashes == DASHED else MARKERS[style][0], dashes=dashes)


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
    further: dict[str, list[tuple[str, str, list[Cell]]]] = {
        "FULL": [("Step of FULL", "time (ms)", [_cell(_milliseconds(point.seconds("FULL"))) for point in rows])],
        "SYNTHETIC": [("One process", "communication", [_ratio(point.alone) for point in rows])],
    }
    for mode in ORDER:
        # Published are the efficiency of real training and the communication of computing alone.
        reached = [_figure(plan, point, "scaling_efficiency") if mode == "FULL" else None for point in rows]
        shares = [_figure(plan, point, "communication") if mode == "SYNTHETIC" else None for point in rows]
        columns += [
            (mode, "samples/s", [_rate(p, mode) for p in rows]),
            (mode, "efficiency", [_ratio(p.efficiency(mode), known) for p, known in zip(rows, reached, strict=True)]),
            (mode, "communication", [_ratio(p.communication(mode), k) for p, k in zip(rows, shares, strict=True)]),
            *further.get(mode, []),
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
