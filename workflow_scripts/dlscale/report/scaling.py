"""Build the page's sections on scaling, convergence and parallelism."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dlscale.config.records import Published
from dlscale.core.metrics import VALID_LOSS, Metric
from dlscale.core.text import count, duration, many, number, percent, size
from dlscale.measure.records import MODE_NAMES, MODES, SAMPLE_RATE, STEP_RATE
from dlscale.report import published
from dlscale.report.figures import (
    MODE_COLOURS,
    SHAPES,
    Cell,
    Chart,
    Section,
    Table,
    View,
    cell,
    grams,
    heading,
    joules,
    lines,
    table,
)
from dlscale.report.speedup import SCALING, Point, Ratio, Series, series
from dlscale.results import (
    MIN_FRACTION,
    UNKNOWN,
    PlanResult,
    Reached,
    RunResult,
    by_settings,
    cost_to_reach,
    target_of,
)

#: Order of the modes in the section on scaling.
ORDER = tuple(reversed(MODES))

#: Ratio of the lowest rate of loading to the highest other rate above which a chart leaves out loading.
MAX_LOADING_RATIO = 10.0


# ---- scaling -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Headline:
    """Efficiency of training (FULL) on the most devices; if several series reach this number, the highest."""

    series: Series
    point: Point
    efficiency: Ratio

    @property
    def is_known(self) -> bool:
        """Whether run and base were undisturbed, and the noise is less than half of the efficiency."""
        quiet = not (self.point.run.foreign_cpu_fraction or self.point.base.foreign_cpu_fraction)
        return quiet and self.efficiency.noise < self.efficiency.value / 2

    @property
    def ratio(self) -> str:
        """Efficiency as text, or "not known"."""
        return percent(self.efficiency.value) if self.is_known else UNKNOWN

    @property
    def interval_text(self) -> str:
        """Noise of the efficiency, or the reason why the efficiency is not known."""
        if self.is_known:
            same = abs(1 - self.efficiency.value) <= self.efficiency.noise
            return self.efficiency.interval_text + ", equal to the ideal within noise" * same
        return (
            "busy machine"
            if self.point.run.foreign_cpu_fraction or self.point.base.foreign_cpu_fraction
            else "too few or too noisy trials"
        )

    @property
    def place(self) -> str:
        """Number of devices, and label of the series."""
        return f"{self.point.devices} devices ({self.series.label})"

    @property
    def communication(self) -> Ratio | None:
        """Fraction of a FULL step that communication costs; None if unknown, within noise, or below `MIN_FRACTION`."""
        found = self.point.communication("FULL") if self.is_known else None
        return found if found and found.value >= MIN_FRACTION and found.value > found.noise else None


def headline(plan: PlanResult) -> Headline | None:
    """Return the efficiency of a scaling plan; None for other plans, or if no series has a known efficiency."""
    last = [(each, each.points[-1]) for each in series(plan) if len(each.points) > 1]
    known = [Headline(each, point, found) for each, point in last if (found := point.efficiency("FULL"))]
    if plan.record.kind not in SCALING or not known:
        return None
    return max(known, key=lambda each: (each.point.devices, each.efficiency.value))


def glance(plan: PlanResult) -> str | None:
    """Return the efficiency and the communication of a scaling plan as text; None if `headline` is None."""
    if (found := headline(plan)) is None:
        return None
    if not found.is_known:
        return f"the efficiency on {found.place} is not known: {found.interval_text}"
    words = f"efficiency {found.ratio} {found.interval_text} on {found.place}"
    if share := found.communication:
        return f"{words}; communication costs {percent(share.value)} {share.interval_text} of a step"
    return f"{words}; communication is within noise" if found.point.communication("FULL") else words


def section(plan: PlanResult) -> Section | None:
    """Return the charts and the table of scaling; None for other plans or without measurements."""
    scaled = plan.record.kind in SCALING
    found = series(plan) if scaled else []
    left_out = [run.called for run in plan.runs if run.unit == STEP_RATE] if scaled else []
    if not (found or left_out):
        return None
    several = [each for each in found if len(each.points) > 1]
    weak = plan.record.kind == "weak_scaling"
    batch = "the batch of each device" if weak else "the batch of all devices together"
    alone = [f"{each.label} ({many(each.points[0].devices, 'device')})" for each in found if each not in several]
    notes = [f"These series have only one number of devices and show no scaling: {'; '.join(alone)}."] * bool(alone)
    if left_out:
        notes.append(
            f"Runs without a known batch size are left out, because their rates are in steps/s: {', '.join(left_out)}. "
            "Put {batch_size} into program.command."
        )
    return Section(
        "Scaling",
        f"{'Weak' if weak else 'Strong'} scaling: {batch} stays the same. The ideal is the rate on the fewest devices, "
        "scaled in proportion to the number of devices. Efficiency is the measured rate divided by the ideal. "
        "Communication is the fraction by which a step is shorter without averaging gradients. ± is a 95 % interval "
        "over the trials. For a ratio of two runs, ± is at least 5 % of the ratio.",
        [*_charts(plan.name, several), *_energies(plan, several)] if several else [],
        [_table(plan, [point for each in found for point in each.points])] if found else [],
        notes,
    )


def _charts(plan: str, several: Sequence[Series]) -> list[Chart]:
    axis = {"devices": "devices"}
    charts = [
        lines(
            f"{plan}-scaling{'-' * bool(place)}{place or ''}",
            f"{each.label}: rates, or times of a million samples, of training, of computing alone and of loading "
            "alone. Dashed lines are the ideal."
            + " Loading is not drawn, because its rate is far above the other two rates."
            * (ORDER[-1] not in (modes := _drawn(each))),
            [row for mode in modes for row in _rates(each, mode)],
            axis,
            {"value": "throughput (samples/s)", "time": "time (s per million samples)"},
            by="mode",
            looks={MODE_NAMES[mode]: (MODE_COLOURS[mode], shape) for mode, shape in zip(modes, SHAPES, strict=False)},
            dashes=["measured", "ideal"],
            doubling=True,
        )
        for place, each in enumerate(several)
    ]
    apart = [
        {"series": each.label, "what": what, "devices": point.devices, "value": rate}
        for each in several
        for point in each.points
        for what, rate in (("with", point.rate("SYNTHETIC")), ("without", _apart(point)))
    ]
    if any(point.twin for each in several for point in each.points):
        about = "Overhead of communication: rate of computing with (solid) and without (dashed) gradient averaging."
        y = {"value": "computing (samples/s)"}
        looks: View = {"by": "series", "dashes": ["with", "without"], "doubling": True, "logarithmic": True}
        charts.append(lines(f"{plan}-overhead", about, apart, axis, y, **looks))
    reached = [
        {"series": each.label, "devices": point.devices, "value": 100 * found.value}
        | {"low": 100 * (found.value - found.noise), "high": 100 * (found.value + found.noise)}
        for each in several
        for point in each.points
        if (found := point.efficiency("FULL"))
    ]
    about = "Efficiency: rate of training divided by the ideal. Vertical lines are 95 % intervals."
    y = {"value": "efficiency of training (%)"}
    more: View = {"by": "series", "doubling": True, "zero": True, "logarithmic": False, "levels": [(100.0, "ideal")]}
    return [*charts, lines(f"{plan}-scaled", about, reached, axis, y, **more)]


def _drawn(each: Series) -> list[str]:
    """Return the modes in the chart of a series, without loading (IO) if its line would flatten the other lines."""
    least = {mode: min((rate for point in each.points if (rate := point.rate(mode))), default=0.0) for mode in ORDER}
    *others, loading = ORDER
    most = max((rate for mode in others for point in each.points if (rate := point.rate(mode))), default=math.inf)
    return others if least[loading] > MAX_LOADING_RATIO * most else list(ORDER)


def _energies(plan: PlanResult, several: Sequence[Series]) -> list[Chart]:
    factor = plan.record.grams_per_kwh
    rows = [
        {"series": each.label, "devices": point.devices, "value": used}
        | ({} if factor is None else {"grams": 1e6 * used / 3.6e6 * factor})
        for each in several
        for point in each.points
        if (used := point.run.energy_of("FULL"))
    ]
    if not rows:
        return []
    y = {"value": "energy (J per sample)"}
    if factor is not None:
        y["grams"] = "CO₂ (g per million samples)"
    about = "Energy per sample in training: energy of the GPUs, or of nodes without GPUs."
    more: View = {"by": "series", "doubling": True, "zero": True, "logarithmic": False}
    return [lines(f"{plan.name}-energy", about, rows, {"devices": "devices"}, y, **more)]


def _rates(each: Series, mode: str) -> list[View]:
    return [
        {"mode": MODE_NAMES[mode], "what": what, "devices": point.devices, "value": rate, "time": rate and 1e6 / rate}
        for point in each.points
        for what, rate in (("measured", point.rate(mode)), ("ideal", point.ideal(mode)))
    ]


def _apart(point: Point) -> float | None:
    run = point.run if point.devices == 1 else point.twin  # a single device has no communication
    trials = run.trials("SYNTHETIC") if run else None
    return trials.mean if trials else None


#: (Mode, heading of a column) → metric of the published figures in this column.
_PUBLISHED = {("FULL", "efficiency"): "scaling_efficiency", ("SYNTHETIC", "communication"): "communication"}


def _table(plan: PlanResult, rows: Sequence[Point]) -> Table:
    def ratios(mode: str, heading: str, found: Sequence[Ratio | None]) -> tuple[str, str, list[Cell]]:
        metric = _PUBLISHED.get((mode, heading))
        figures = [published.values(plan.record.published, plan.name, point.run.name, metric) for point in rows]
        return mode, heading, [_ratio(*each) for each in zip(found, figures, strict=True)]

    nodes = [int(point.run.setting("geometry.nodes", 1)) for point in rows]
    columns: list[tuple[str, str, list[Cell]]] = [
        ("Run", "run", [heading(plan, point.run, n) for n, point in enumerate(rows)]),
        ("Run", "devices", [cell(p.devices, str, f"{n} nodes" * (n > 1)) for p, n in zip(rows, nodes, strict=True)]),
        ("Run", "samples per step", [cell(point.batch or None, count) for point in rows]),
    ]
    for mode in ORDER:
        columns += [
            (mode, "samples/s", [_rate(point, mode) for point in rows]),
            ratios(mode, "efficiency", [point.efficiency(mode) for point in rows]),
            ratios(mode, "communication", [point.communication(mode) for point in rows]),
        ]
        if mode == "FULL":
            times = [1e3 * point.batch / rate if point.batch and (rate := point.rate(mode)) else None for point in rows]
            columns.append(("Training step", "time (ms)", [cell(time) for time in times]))
            used, factor = [point.run.energy_of("FULL") for point in rows], plan.record.grams_per_kwh
            if any(used):
                columns.append(("Energy of training", "per sample", [cell(each, joules) for each in used]))
            if any(used) and factor is not None:
                million = [each and 1e6 * each for each in used]
                words = partial(grams, per_kwh=factor)
                columns.append(
                    ("Energy of training", "CO₂ per million samples", [cell(each, words) for each in million])
                )
        if mode == "SYNTHETIC":
            columns.append(("One process", "communication", [_ratio(point.alone) for point in rows]))
    caption = (
        "One row per series and number of devices. In small print: the ideal rate, the 95 % interval (±), and "
        "published figures for the full-size model and data."
    )
    return table(columns, caption, f"Scaling of {plan.title}")


def _rate(point: Point, mode: str) -> Cell:
    trials = point.run.trials(mode)
    note = f"ideal {number(point.ideal(mode))}"
    return (
        cell(trials.mean, lambda mean: f"{number(mean)} (standard deviation {number(trials.std, 2)})", note)
        if trials
        else Cell()
    )


def _ratio(ratio: Ratio | None, figures: Sequence[Published] = ()) -> Cell:
    notes = [ratio.interval_text] if ratio and ratio.noise else []
    notes += [f"published: {published.shown(figure)}, {figure.source}" for figure in figures[-1:]]
    return cell(ratio and ratio.value, percent, "; ".join(notes))


# ---- convergence -------------------------------------------------------------------------------------


def aim(plan: PlanResult) -> tuple[Metric, float] | None:
    """Return the goal to compare trainings by: their common target, or the lowest validation loss that all reach.

    Trainings without a finite loss do not count. Return None if no training has a finite loss or a common target.
    """
    wanted = [target_of(run) for run in plan.trained]
    if wanted and wanted[0] and wanted.count(wanted[0]) == len(wanted):
        return wanted[0]
    finite = [loss for run in plan.trained if (loss := run.best_valid_loss) is not None]
    return (VALID_LOSS, max(finite)) if finite else None


def convergence(plan: PlanResult) -> Section | None:
    """Return the convergence of trainings with growing batches; None for other plans or without trainings."""
    compared = aim(plan) if plan.record.kind == "convergence" else None
    if compared is None:
        return None
    (metric, value), found = compared, by_settings(plan.trained)
    firsts, several = [runs[0] for _, runs in found], [runs for _, runs in found]
    reached = [[each for run in runs if (each := cost_to_reach(run, metric, value)).epoch] for runs in several]
    target = metric.aim(value)

    def spent(of: Callable[[Reached], float | None], shown: Callable[[float], str] = number) -> list[Cell]:
        return [_mean([known for each in group if (known := of(each)) is not None], shown) for group in reached]

    columns = [
        ("Training", "run", [Cell(label, n, link=plan.anchor(runs[0])) for n, (label, runs) in enumerate(found)]),
        ("Training", "seeds", [cell(len(runs), count) for runs in several]),
        ("Training", "batch size", [cell(run.batch_size, count) for run in firsts]),
        ("Training", "devices", [cell(run.devices, count) for run in firsts]),
        ("Training", "learning rate", [_learning_rate(run) for run in firsts]),
        ("Training", "steps", [_mean([run.epochs[-1].step for run in runs], _whole) for runs in several]),
        ("Training", "validation loss", [_losses([run.final_loss for run in runs]) for runs in several]),
        (
            f"To {target}",
            "reached by",
            [
                cell(len(a) / len(b), f"{len(a)} of {many(len(b), 'run')}".format)
                for a, b in zip(reached, several, strict=True)
            ],
        ),
        (f"To {target}", "steps", spent(lambda each: each.epoch.step if each.epoch else None, _whole)),
        (f"To {target}", "samples", spent(lambda each: each.epoch.samples if each.epoch else None, _whole)),
        (f"To {target}", "time", spent(lambda each: each.seconds, duration)),
        (f"To {target}", plan.runs[0].hours, spent(lambda each: each.gpu_hours)),
        (f"To {target}", "energy", spent(lambda each: each.joules, joules)),
    ]
    if plan.record.grams_per_kwh is not None:
        words = partial(grams, per_kwh=plan.record.grams_per_kwh)
        columns.append((f"To {target}", "CO₂", spent(lambda each: each.joules, words)))
    which = "the target" if compared == target_of(plan.trained[0]) else "the lowest value that all trainings reach"
    return Section(
        "Convergence",
        f"The same training with larger and larger batches. The goal is {target}, {which}. The cost to reach the goal "
        "is counted from the first step to the end of the validation that reached the goal.",
        tables=[
            table(
                columns,
                "Means over the seeds. In small print: the least and the greatest value.",
                f"Convergence of {plan.title}",
            )
        ],
    )


def _learning_rate(run: RunResult) -> Cell:
    """Return the learning rate after warm-up; a note names the rule that scales the rate with the batch size."""
    rate, rule, base = (run.setting(key) for key in ("optimizer.lr", "schedule.scaling", "schedule.base_batch_size"))
    ratio = run.setting("batch_size", 0) / base if base else 1.0
    scale = {"sqrt": math.sqrt(ratio), "linear": ratio}.get(rule, 1.0)
    return cell(None if rate is None else rate * scale, note="" if rule in (None, "none") else rule)


def _whole(value: float) -> str:
    return count(round(value))


def _mean(values: Sequence[float], text: Callable[[float], str] = number) -> Cell:
    """Return the cell of a mean, with a note of the least and the greatest value if they differ."""
    if not values:
        return Cell()
    ends = min(values), max(values)
    return cell(sum(values) / len(values), text, " to ".join(map(text, ends)) if ends[0] != ends[1] else "")


def _losses(values: Sequence[float]) -> Cell:
    finite = [value for value in values if math.isfinite(value)]
    lost, mean = len(values) - len(finite), _mean(finite)
    if not finite:
        return Cell("diverged")
    return replace(mean, note="; ".join(filter(None, [mean.note, f"{lost} of {len(values)} diverged" * bool(lost)])))


# ---- parallelism -------------------------------------------------------------------------------------


def parallelism(plan: PlanResult) -> Section | None:
    """Return memory and speed for each way of dividing a model among devices; None for other plans or without rates."""
    runs = [run for run in plan.runs if run.throughput and run.unit == SAMPLE_RATE]
    runs = runs if plan.record.kind == "parallelism" else []
    if not runs:
        return None

    def column(group: str, heading: str, value: Callable[[RunResult], Any], shown: Callable[[Any], str]) -> Any:
        return group, heading, [cell(value(run), shown) for run in runs]

    axes = {axis: [int(run.setting(f"geometry.{axis}", 1)) for run in runs] for axis in ("tp", "cp")}
    dp = [run.devices // (tp * cp) for run, tp, cp in zip(runs, *axes.values(), strict=True)]
    full, speeds = [run.trials("FULL") for run in runs], plan.record.published
    memories = [published.values(speeds, plan.name, run.name, "memory") for run in runs]
    columns = [
        ("Run", "run", [heading(plan, run, n) for n, run in enumerate(runs)]),
        column("Devices", "in all", lambda run: run.devices, count),
        *(("Devices", axis, [cell(value, count) for value in values]) for axis, values in {**axes, "dp": dp}.items()),
        ("Devices", "weights", [_weights(run, tp) for run, tp in zip(runs, axes["tp"], strict=True)]),
        column("Devices", "batch size", lambda run: run.batch_size, count),
        column("Memory of a device", "predicted", _predicted, size),
        column("Memory of a device", "measured", lambda run: run.throughput and run.throughput.peak_memory_bytes, size),
        (
            "Memory of a device",
            "published",
            list(map(_published, memories)),
        ),
        (
            "FULL",
            "samples/s",
            [cell(t.mean, note=f"standard deviation {number(t.std, 2)}") if t else Cell() for t in full],
        ),
        column("FULL", "per device", lambda run: run.speed and run.speed / run.devices, number),
        column("FULL", "MFU", lambda run: run.throughput and run.throughput.mfu(), percent),
        ("FULL", "published", [_published(published.speeds_of(speeds, plan.name, run.name)) for run in runs]),
    ]
    caption = "Standard deviations are over the trials. Published figures are for the full-size model and data."
    return Section(
        "Parallelism",
        "tp is the number of devices over which each layer is sharded, cp the number of devices over which the tokens "
        "of a sample are split, and dp the number of groups of devices with different samples. With fsdp, the weights "
        "are also sharded over these groups. Memory is per device: the prediction before the first step (a rough "
        "estimate if devices share a model), and the measured peak. On a CPU, the peak is the memory of the entire "
        "process, including Python and its libraries.",
        tables=[table(columns, caption, f"Parallelism of {plan.title}")],
    )


def _predicted(run: RunResult) -> int | None:
    """Return the predicted peak memory of a step, bytes, from the stage `throughput` or else from `profile`."""
    profiled = run.profile.memory.predicted if run.profile and run.profile.memory else None
    use = (run.throughput and run.throughput.predicted) or profiled
    return (use.peak or use.total) if use else None


def _weights(run: RunResult, tp: int) -> Cell:
    kind = str(run.setting("parallel.kind", "ddp"))
    words = {"ddp": "copied", "fsdp": "sharded", "dp": "copied at each step"}[kind]
    return cell(kind, note=f"divided by tp {tp}{', and sharded' * (kind == 'fsdp')}" if tp > 1 else words)


def _published(known: list[Published]) -> Cell:
    """Return the first published figure, with a note of the other figures."""
    if not known:
        return Cell()
    first, *others = known
    notes = [f"{first.devices}, {first.source}", *(f"{published.shown(each)}, {each.source}" for each in others)]
    return cell(first.samples_per_second or first.value or 0.0, lambda _: published.shown(first), "; ".join(notes))
