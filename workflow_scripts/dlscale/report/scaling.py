"""How a computation scales over devices, as the page shows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dlscale.config.records import Published
from dlscale.core.text import count, many, number, percent
from dlscale.measure.records import MODES
from dlscale.report import published
from dlscale.report.blocks import Cell, Entry, Section, Table, cell, entry, some, table
from dlscale.report.figures import DASHED, DOTTED, MARKERS, MODE_COLOURS, MUTED, RUN_COLOURS, Line, lines
from dlscale.report.results import PlanResult
from dlscale.report.speedup import SCALING, Point, Ratio, Series, series

#: How many series the figures show; the table has all.
LINES = 4

#: The modes as this section has them, and their markers, which no series has.
ORDER = tuple(reversed(MODES))
MODE_MARKERS = dict(zip(ORDER, MARKERS[LINES:], strict=False))

#: How many times as fast loading may be as computing where both are drawn from zero.
WIDE = 8


def glance(plan: PlanResult) -> str | None:
    """Return in a sentence how far the plan scales: FULL of the most devices, the best of several series."""
    last = [(each, each.points[-1]) for each in series(plan) if len(each.points) > 1]
    known = [(each, point, found) for each, point in last if (found := point.efficiency("FULL"))]
    if plan.record.kind not in SCALING or not known:
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


def section(plan: PlanResult) -> Section | None:
    """Return figures and table; None of other plans, and where nothing was measured."""
    found = series(plan) if plan.record.kind in SCALING else []
    if not found:
        return None
    several = [each for each in found if len(each.points) > 1]
    shown, twins = several[:LINES], any(point.twin for each in several[:LINES] for point in each.points)
    weak = plan.record.kind == "weak_scaling"
    batch = "the batch of each device" if weak else "the batch of all devices together"
    strokes = [Entry("measured"), Entry("ideal", dashes=DASHED)]
    strokes += [Entry("without averaged gradients, hollow markers", dashes=DOTTED)] * twins
    alone = [f"{each.label} ({many(each.points[0].devices, 'device')})" for each in found if each not in several]
    lone = f"Measured on one number of devices only, which shows no scaling: {'; '.join(alone)}."
    return Section(
        "Scaling",
        f"{'Weak' if weak else 'Strong'} scaling: {batch} stays the same. Ideal is the rate of the fewest devices, "
        "times as many; efficiency is the share of it that is reached. Communication is the share of a step's time "
        "that is gone where gradients are not averaged, 1 − time without / time with. ± is what noise leaves: the 95 % "
        "interval over the trials, and 5 % at least between two processes.",
        [
            *(Entry(mode, MODE_COLOURS[mode], MODE_MARKERS[mode][1]) for mode in ORDER),
            *(entry(style, each.label) for style, each in enumerate(shown)),
            *strokes,
        ]
        if shown
        else [],
        _plots(plan.name, shown, twins) if shown else [],
        [_table(plan, [point for each in found for point in each.points])],
        [
            *some(len(shown), len(several), "series are drawn", "the table has all."),
            *([lone] if alone else []),
        ],
    )


# ---- figures -----------------------------------------------------------------------------------------


def _plots(plan: str, shown: Sequence[Series], twins: bool) -> list[tuple[str, str]]:
    def drawn(value: Callable[[Point], float | None], dashes: str = "") -> list[Line]:
        """Return a line of each series; the ideal was not measured anywhere, and has no markers."""
        return [
            Line(
                [(point.devices, value(point)) for point in each.points],
                RUN_COLOURS[style],
                "" if dashes == DASHED else MARKERS[style][0],
                dashes,
                hollow=dashes == DOTTED,
            )
            for style, each in enumerate(shown)
        ]

    def apart(point: Point) -> float | None:
        run = point.run if point.devices == 1 else point.twin  # one device has nobody to wait for
        trials = run.trials("SYNTHETIC") if run else None
        return trials.mean if trials else None

    words = "throughput, solid, and ideal, dashed, of both (FULL), computing (SYNTHETIC) and loading (IO)."
    plots = [(rates(f"{plan}-scaling-{place}", each), f"{each.label}: {words}") for place, each in enumerate(shown)]
    if twins:
        overhead = drawn(lambda point: point.rate("SYNTHETIC")) + drawn(apart, DOTTED)
        words = "Overhead of communication: computing with (solid) and without (dotted) averaged gradients."
        plots.append((over_devices(f"{plan}-overhead", overhead, "SYNTHETIC (samples/s)"), words))
    times = drawn(lambda point: _ms(point.seconds(point.rate("FULL"))))
    times += drawn(lambda point: _ms(point.seconds(point.ideal("FULL"))), DASHED)
    words = "Time of a step of FULL, solid, and ideal, dashed."
    plots.append((over_devices(f"{plan}-step", times, "time of a step (ms)", x="doubling"), words))
    words = "Efficiency: the share of the ideal that FULL reaches; whiskers are what noise leaves."
    plots.append((over_devices(f"{plan}-scaled", _reached(shown), "efficiency of FULL (%)", x="doubling"), words))
    return plots


def rates(name: str, each: Series) -> str:
    """Draw the rates of a series by mode, and their ideals; over logarithmic axes where they are far apart."""
    drawn = []
    for mode in ORDER:
        measured = [(point.devices, point.rate(mode)) for point in each.points]
        ideal = [(point.devices, point.ideal(mode)) for point in each.points]
        drawn.append(Line(measured, MODE_COLOURS[mode], MODE_MARKERS[mode][0]))
        drawn.append(Line(ideal, MODE_COLOURS[mode], dashes=DASHED, width=1.2))
    first = [rate for mode in MODES if (rate := each.points[0].rate(mode))]
    if max(first, default=1.0) > WIDE * min(first, default=1.0):  # the least would lie on the axis
        return over_devices(name, drawn, "throughput (samples/s)", x="doubling", y="log")
    return over_devices(name, drawn, "throughput (samples/s)")


def _reached(shown: Sequence[Series]) -> list[Line]:
    counts = [point.devices for each in shown for point in each.points]
    drawn = [Line([(min(counts), 100.0), (max(counts), 100.0)], MUTED, dashes=DASHED)]
    for style, each in enumerate(shown):
        known = [(point.devices, ratio) for point in each.points if (ratio := point.efficiency("FULL"))]
        points = [(devices, 100 * ratio.value) for devices, ratio in known]
        noise = [100 * ratio.noise for _, ratio in known]
        drawn.append(Line(points, RUN_COLOURS[style], MARKERS[style][0], whiskers=noise))
    return drawn


def over_devices(name: str, drawn: Sequence[Line], label: str, **more: str) -> str:
    """Draw lines over numbers of devices, from zero or by doublings."""
    counts = sorted({int(place) for line in drawn for place, value in line.points if value is not None})
    room = max(counts, default=1) / 14 if "x" not in more else 0  # what a number needs
    ticks = [now for now, then in zip(counts, [*counts[1:], 1e9], strict=False) if then - now > room]
    return lines(name, drawn, "devices", label, ticks=ticks, **{"y": "zero", **more})  # type: ignore[arg-type]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


# ---- table -------------------------------------------------------------------------------------------


def _table(plan: PlanResult, rows: Sequence[Point]) -> Table:
    several = [int(point.run.setting("geometry.nodes", 1)) for point in rows]
    nodes = [f"{count_} nodes" if count_ > 1 else "" for count_ in several]
    columns: list[tuple[str, str, list[Cell]]] = [
        ("Run", "run", [Cell(point.run.label, n, link=plan.anchor(point.run)) for n, point in enumerate(rows)]),
        ("Run", "devices", [cell(point.devices, str, nodes[n]) for n, point in enumerate(rows)]),
        ("Run", "samples a step", [cell(point.batch, count) for point in rows]),
    ]
    for mode in ORDER:
        # Published are the efficiency of real training and the communication of computing alone.
        columns += [
            (mode, "samples/s", [_rate(point, mode) for point in rows]),
            (
                mode,
                "efficiency",
                [_ratio(p.efficiency(mode), _known(plan, p, "scaling_efficiency", mode)) for p in rows],
            ),
            (
                mode,
                "communication",
                [_ratio(p.communication(mode), _known(plan, p, "communication", mode)) for p in rows],
            ),
        ]
        if mode == "FULL":
            times = [cell(_ms(point.seconds(point.rate(mode)))) for point in rows]
            columns.append(("Step of FULL", "time (ms)", times))
        if mode == "SYNTHETIC":
            columns.append(("One process", "communication", [_ratio(point.alone) for point in rows]))
    caption = (
        "Each row is a number of devices. Small figures are the ideal, what noise leaves (±), and what was published "
        "at full size."
    )
    return table(columns, caption, f"Scaling of {plan.title}")


def _rate(point: Point, mode: str) -> Cell:
    trials = point.run.trials(mode)
    note = f"ideal {number(point.ideal(mode))}"
    return cell(trials.mean, lambda mean: f"{number(mean)} ± {number(trials.std, 2)}", note) if trials else Cell()


def _known(plan: PlanResult, point: Point, metric: str, mode: str) -> Published | None:
    of = {"scaling_efficiency": "FULL", "communication": "SYNTHETIC"}[metric]
    return published.final(plan.record.published, plan.name, point.run.name, metric) if mode == of else None


def _ratio(ratio: Ratio | None, figure: Published | None = None) -> Cell:
    if ratio is None:
        return Cell()
    notes = [f"± {percent(ratio.noise)}"] if ratio.noise else []
    notes += [f"published: {published.shown(figure)}, {figure.source}"] if figure else []
    return cell(ratio.value, percent, "; ".join(notes))
