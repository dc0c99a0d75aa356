"""What the figures of the page show: loss, learning rate and skill over epochs, and throughput.

The figures of a plan draw its runs in the same order, in which each has its colour and marker. `name` is unique in the
page: the SVG's identifiers begin with it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, Literal

from dlscale.core.metrics import Epoch
from dlscale.core.text import number, shorten
from dlscale.measure.records import MODES
from dlscale.report.drawing import GRID, INK, MARKERS, MODE_COLOURS, MUTED, PART_COLOURS, RUN_COLOURS, svg
from dlscale.report.results import RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def loss(name: str, runs: Sequence[RunResult], over: Literal["epoch", "time"], label: str) -> str:
    """Draw training (dashed) and validation loss over epochs, or training time without validation; `label` the axis."""

    def draw(axes: Axes) -> None:
        seconds, time_unit = _time_unit(max(run.training_seconds or 0.0 for run in runs))
        values = []
        for style, run in enumerate(runs):
            if over == "time" and run.training_seconds is None:
                continue
            times = [t / seconds for t in accumulate(epoch.epoch_seconds for epoch in run.epochs)]
            x = [epoch.epoch for epoch in run.epochs] if over == "epoch" else times
            trained = [epoch.train_loss for epoch in run.epochs]
            valid = run.over_seeds(lambda epoch: epoch.valid_loss)
            values += trained + list(chain.from_iterable(valid))
            _plot_seeds(axes, style, x, valid)
            marker = "_" if len(x) == 1 else None
            axes.plot(x, trained, color=RUN_COLOURS[style], linewidth=1.1, dashes=(3, 2), marker=marker)
        axes.set_ylabel(label)
        if over == "epoch":
            _epochs(axes)
        else:
            axes.set_xlim(left=0)
            axes.set_xlabel(f"training time without validation ({time_unit})")
        _logarithmic_if_wide(axes, values)

    return svg(name, draw, (3.9, 3.0))


def by_epoch(
    name: str,
    runs: Sequence[RunResult],
    value: Callable[[Epoch], float | None],
    label: str,
    finish: Callable[[Axes], None] = lambda axes: None,
) -> str:
    """Draw a value after each epoch; `finish` is called with the axes at the end."""

    def draw(axes: Axes) -> None:
        for style, run in enumerate(runs):
            points = [(epoch.epoch, y) for epoch in run.epochs if (y := value(epoch)) is not None]
            _plot(axes, style, [x for x, _ in points], [y for _, y in points])
        axes.set_ylabel(label)
        _epochs(axes)
        finish(axes)

    return svg(name, draw, (3.9, 1.5))


def metric(
    name: str,
    runs: Sequence[RunResult],
    value: Callable[[Epoch], float | None],
    over: Literal["step", "epoch", "time"],
    label: str,
    levels: Sequence[tuple[float, str]] = (),
) -> str:
    """Draw a value after each epoch over steps, epochs, or training time without validation.

    `levels` are values to compare with, and what they are called.
    """

    def draw(axes: Axes) -> None:
        seconds, time_unit = _time_unit(max(run.training_seconds or 0.0 for run in runs))
        values = [level for level, _ in levels]
        for style, run in enumerate(runs):
            if over == "time" and run.training_seconds is None:
                continue
            times = accumulate(epoch.epoch_seconds / seconds for epoch in run.epochs)
            axis = times if over == "time" else [getattr(epoch, over) for epoch in run.epochs]
            points = [(x, each) for x, each in zip(axis, run.over_seeds(value), strict=False) if each]
            values += list(chain.from_iterable(each for _, each in points))
            _plot_seeds(axes, style, [x for x, _ in points], [each for _, each in points])
        for level, words in levels:
            axes.axhline(level, color=MUTED, linewidth=1)
            text = axes.text(0.01, level, words, transform=axes.get_yaxis_transform(), ha="left", va="bottom")
            text.set(fontsize=8, color=MUTED)
        axes.set_ylabel(label)
        if over == "epoch":
            _epochs(axes)
        else:
            axes.set_xlim(left=0)
            axes.set_xlabel("optimiser step" if over == "step" else f"training time without validation ({time_unit})")
        _logarithmic_if_wide(axes, values)

    return svg(name, draw, (3.9, 2.2))


#: How the lines of references are dashed, in points.
DASHES = ((1, 1.5), (5, 2), (5, 1.5, 1, 1.5), (9, 2))


def reference_style(number: int) -> tuple[tuple[float, ...], str, float]:
    """Return dashes, colour and width of a reference's lines: sixteen that differ, then again from the first on."""
    return DASHES[number % 4], (INK, MUTED)[number // 4 % 2], (1.4, 3.0)[number // 8 % 2]


#: A curve's points, and which run or reference it is of.
Curve = tuple[Sequence[tuple[float, float]], int]


def beside(
    name: str, ours: Sequence[Curve], references: Sequence[Curve], axis: str, label: str, time: bool = False
) -> str:
    """Draw runs beside references, which are dashed, over `axis` (seconds, if it is a `time`).

    Where one is twenty times as long as another, or more, that axis is logarithmic.
    """

    def draw(axes: Axes) -> None:
        drawn = [points for points, _ in (*ours, *references) if points]
        lengths = [points[-1][0] for points in drawn]
        wide = max(lengths) > 20 * min(lengths)
        seconds, time_unit = _time_unit(max(lengths)) if time and not wide else (1, "s")
        values = []
        for kind, curves in enumerate((ours, references)):
            for points, style in curves:
                shown = [(x / seconds, y) for x, y in points if x > 0 or not wide]
                x, y = [x for x, _ in shown], [y for _, y in shown]
                values += y
                if kind == 0:
                    _plot(axes, style, x, y)
                else:
                    dashes, color, width = reference_style(style)
                    marker = "_" if len(x) == 1 else None
                    axes.plot(x, y, color=color, linewidth=width, dashes=dashes, marker=marker)
        axes.set_ylabel(label)
        axes.set_xlabel(f"{axis}{f' ({time_unit})' * time}")
        if wide:
            _logarithmic(axes, "x")
        else:
            axes.set_xlim(left=0)
        _logarithmic_if_wide(axes, values)

    return svg(name, draw, (3.9, 2.6))


def learning_rate(name: str, runs: Sequence[RunResult]) -> str:
    """Draw the learning rate at the end of each epoch."""

    def from_zero(axes: Axes) -> None:
        axes.set_ylim(bottom=0.0)

    return by_epoch(name, runs, lambda epoch: epoch.learning_rate, "learning rate", from_zero)


def skill(name: str, runs: Sequence[RunResult], value: Callable[[Epoch], float | None]) -> str:
    """Draw the skill after each epoch; what lies below -1 is cut off."""

    def naive(axes: Axes) -> None:
        axes.axhline(0, color=MUTED, linewidth=1)
        values = [y for run in runs for epoch in run.epochs if (y := value(epoch)) is not None]
        axes.set_ylim(max(min([*values, -0.05]) * 1.1, -1.0), max([*values, 0.1]) * 1.1)
        text = axes.text(0.99, 0, "naive answer", transform=axes.get_yaxis_transform(), ha="right", va="bottom")
        text.set(fontsize=8, color=MUTED)

    return by_epoch(name, runs, value, "skill", naive)


def throughput(name: str, runs: Sequence[RunResult]) -> str:
    """Draw IO, SYNTHETIC and FULL of each run as bars, with the standard deviation over the trials."""

    def draw(axes: Axes) -> None:
        measured = [trials for run in runs for mode in MODES if (trials := run.trials(mode))]
        means = [trials.mean for trials in measured if trials.mean > 0]
        logarithmic = bool(means) and max(means) > 30 * min(means)
        if logarithmic:
            _logarithmic(axes, "x")
            axes.set_xlim(min(means) / 3, max(means) * 6)
        else:
            axes.set_xlim(0, 1.3 * max((t.mean + t.std for t in measured), default=1.0) or 1.0)
        positions, names = [], []
        for index, run in enumerate(runs):
            top = 4.5 * index
            left = axes.get_yaxis_transform()
            axes.text(0, top, shorten(run.label, 40), transform=left, va="center", fontweight="bold")
            for y, mode in enumerate(MODES, 1):
                positions.append(top + y)
                names.append(mode)
                if (trials := run.trials(mode)) is None:
                    continue
                axes.barh(top + y, trials.mean, height=0.78, color=MODE_COLOURS[mode])
                axes.errorbar(trials.mean, top + y, xerr=trials.std, color=INK, linewidth=1, capsize=2)
                end = (trials.mean + trials.std, top + y)
                axes.annotate(number(trials.mean), end, (4, 0), textcoords="offset points", va="center", fontsize=8)
        axes.set_yticks(positions, names, fontsize=8)
        axes.set_ylim(4.5 * len(runs) - 0.6, -0.8)
        axes.tick_params(axis="y", length=0)
        axes.grid(False, axis="y")
        axes.set_xlabel("throughput (samples/s" + (", logarithmic)" if logarithmic else ")"))

    return svg(name, draw, (4.6, 0.55 + 0.8 * len(runs)))


#: Parts of a step in the order in which they come; `other` is what no range covers, `unexplained` what nothing shows.
PARTS = tuple(PART_COLOURS)


@dataclass(frozen=True)
class Bar:
    """A bar of the timeline."""

    label: str
    parts: dict[str, float]  #: Seconds a step, by part (of `PARTS`).
    full: float | None  #: Seconds of a step of FULL, which a profile's steps are not; None if it was not measured.
    samples: int | None  #: Of a step, over all processes.


def timeline(name: str, bars: Sequence[Bar], sample: bool = False) -> str:
    """Draw where the milliseconds of a step go, or those of a `sample`."""

    def draw(axes: Axes) -> None:
        greatest = 0.0
        for row, bar in enumerate(bars):
            top, left = 2.0 * row, 0.0
            scale = 1e3 / ((bar.samples or 1) if sample else 1)
            axes.text(
                0, top, shorten(bar.label, 40), transform=axes.get_yaxis_transform(), va="center", fontweight="bold"
            )
            for part in PARTS:
                width = scale * bar.parts.get(part, 0.0)
                axes.barh(top + 0.85, width, left=left, height=0.8, color=PART_COLOURS[part])
                left += width
            full = left if bar.full is None else scale * bar.full
            if bar.full is not None:
                axes.plot([full] * 2, [top + 0.35, top + 1.35], color=INK, linewidth=1.6)
            end = (max(left, full), top + 0.85)
            axes.annotate(f"{number(full)} ms", end, (4, 0), textcoords="offset points", va="center", fontsize=8)
            greatest = max(greatest, end[0])
        axes.set_xlim(0, 1.2 * greatest or 1.0)
        axes.set_ylim(2.0 * len(bars) - 0.4, -0.6)
        axes.set_yticks([])
        axes.set_xlabel(f"time of a {'sample' if sample else 'step'} (ms)")

    return svg(name, draw, (4.6, 0.6 + 0.45 * len(bars)))


#: A point of the roofline: label, FLOPs a byte that a step's operators move, FLOP/s reached by each device, and whether
#: the step was compiled: the bytes are then those of one that is not.
Point = tuple[str, float, float, bool]


def roofline(name: str, runs: Sequence[Point], roofs: Sequence[tuple[str, float, float]]) -> str:
    """Draw runs under the roofs of their device (Williams et al. 2009, doi:10.1145/1498765.1498785).

    Parameters
    ----------
    runs
        Points, drawn hollow where the step was compiled.
    roofs
        Name, FLOP/s of a matrix product, and bytes/s of the memory.
    """

    def draw(axes: Axes) -> None:
        intensities = [x for _, x, _, _ in runs]
        ridges = [flops / memory for _, flops, memory in roofs]
        least, most = min(*intensities, *ridges) / 4, max(*intensities, *ridges) * 8
        lowest = min(min(flops for _, _, flops, _ in runs), min(memory * least for _, _, memory in roofs)) / 1e9 / 2
        highest = max(max(flops for _, flops, _ in roofs), max(flops for _, _, flops, _ in runs)) / 1e9 * 4
        for _, flops, memory in roofs:
            bend = [memory * least / 1e9, flops / 1e9, flops / 1e9]
            axes.plot([least, flops / memory, most], bend, color=MUTED, linewidth=1.4)
        # Names of the roofs from the lowest on: each above its line and all that are near, where no point can be, and a
        # line of text above the name before.
        line = (highest / lowest) ** (11 / 165)  # 11 of the about 165 points that the axis is high
        floor = 0.0
        ranked = sorted((flops / 1e9, title) for title, flops, _ in roofs)
        for index, (flops, title) in enumerate(ranked):
            y = max(flops, floor)
            for other, _ in ranked[index + 1 :]:
                y = max(y, other) if other < y * line * 1.1 else y
            floor = y * line
            place = axes.annotate(
                f"{title}: {number(flops)} GFLOP/s", (most, y), (-3, 2), textcoords="offset points", fontsize=8
            )
            place.set(color=MUTED, ha="right", va="bottom")
        for memory in dict.fromkeys(memory for _, _, memory in roofs):
            words = f"copy: {number(memory / 1e9)} GB/s"
            place = axes.annotate(words, (least, memory * least / 1e9), (8, 0), textcoords="offset points", fontsize=8)
            place.set(color=MUTED, ha="left", va="top")
        for style, (_, intensity, flops, compiled) in enumerate(runs):
            marker, colour = MARKERS[style][0], RUN_COLOURS[style]
            (drawn,) = axes.plot([intensity], [flops / 1e9], linestyle="", marker=marker, color=colour, markersize=8)
            if compiled:
                drawn.set(markerfacecolor="none", markeredgewidth=1.6)
        _logarithmic(axes, "x")
        _logarithmic(axes, "y")
        axes.set_xlim(least, most)
        axes.set_ylim(lowest, max(highest, floor))
        axes.set_xlabel("FLOPs a byte that the operators read or write")
        axes.set_ylabel("GFLOP/s of a device")

    return svg(name, draw, (3.9, 3.0))


def efficiency(name: str, jobs: Sequence[tuple[str, float, float, int]]) -> str:
    """Draw the wall-clock time of jobs as bars, filled as far as their cores were busy.

    A job is its label, seconds, CPU efficiency (0 to 1) and cores.
    """

    def draw(axes: Axes) -> None:
        for row, (label, seconds, share, cores) in enumerate(jobs):
            left = axes.get_yaxis_transform()
            axes.text(0, 2.0 * row, shorten(label, 40), transform=left, va="center", fontweight="bold")
            axes.barh(2.0 * row + 0.85, seconds, height=0.8, color=GRID)
            axes.barh(2.0 * row + 0.85, seconds * min(share, 1.0), height=0.8, color=MODE_COLOURS["SYNTHETIC"])
            words = f"{number(seconds)} s, CPU {100 * share:.0f} % of {cores}"
            end = (seconds, 2.0 * row + 0.85)
            axes.annotate(words, end, (4, 0), textcoords="offset points", va="center", fontsize=8)
        axes.set_xlim(0, 1.45 * max((seconds for _, seconds, _, _ in jobs), default=1.0))
        axes.set_ylim(2.0 * len(jobs) - 0.4, -0.6)
        axes.set_yticks([])
        axes.set_xlabel("wall-clock time of the job (s)")

    return svg(name, draw, (4.6, 0.6 + 0.45 * len(jobs)))


#: A quantity over time: name with unit, seconds from the begin, values, the end of its axis (None: the greatest value).
Strip = tuple[str, Sequence[float], Sequence[float], float | None]
#: Seconds beyond which times are told in minutes.
LONG = 600.0


def strips(name: str, series: Sequence[Strip]) -> str:
    """Draw what the machine did while a run trained, one strip a quantity."""

    def draw(axes: Axes) -> None:
        last = max(max(x, default=0.0) for _, x, _, _ in series)
        unit, name_of_unit = (60.0, "min") if last > LONG else (1.0, "s")
        for row, (label, seconds, values, top) in enumerate(series):
            x = [moment / unit for moment in seconds]
            greatest = top or max(values, default=0.0) or 1.0
            base = -1.5 * row
            heights = [base + min(value / greatest, 1.0) for value in values]
            axes.fill_between(x, base, heights, color=RUN_COLOURS[row % len(RUN_COLOURS)], alpha=0.25, linewidth=0)
            axes.plot(x, heights, color=RUN_COLOURS[row % len(RUN_COLOURS)], linewidth=1.2)
            axes.axhline(base, color=GRID, linewidth=0.7)
            axes.text(0, base + 1.02, label, transform=axes.get_yaxis_transform(), fontsize=8, va="bottom")
            end = axes.get_yaxis_transform()
            axes.text(1, base + 1.02, f"0 to {number(greatest)}", transform=end, fontsize=8, va="bottom", ha="right")
        axes.set_xlim(0, last / unit or 1.0)
        axes.set_ylim(-1.5 * (len(series) - 1) - 0.05, 1.3)
        axes.set_yticks([])
        axes.set_xlabel(f"time ({name_of_unit})")

    return svg(name, draw, (4.6, 0.5 + 0.45 * len(series)))


@dataclass(frozen=True)
class Trial:
    """A point of `sweep`."""

    setting: Any
    score: float
    whole: bool  #: Whether it trained as long as any.
    best: bool


def sweep(name: str, trials: Sequence[Trial], key: str, metric: str) -> str:
    """Draw the score of each trial over the value of a setting; what is no number stands in the order it comes in."""
    numeric = all(isinstance(trial.setting, int | float) and not isinstance(trial.setting, bool) for trial in trials)
    words = list(dict.fromkeys(str(trial.setting) for trial in reversed(trials)))

    def draw(axes: Axes) -> None:
        x = [trial.setting if numeric else words.index(str(trial.setting)) for trial in trials]
        y = [trial.score for trial in trials]
        for place, score, trial in reversed(list(zip(x, y, trials, strict=True))):  # the best on top
            colour = RUN_COLOURS[0] if trial.best else MUTED
            (point,) = axes.plot([place], [score], linestyle="", color=colour, marker="D" if trial.best else "o")
            point.set(markersize=8 if trial.best else 5, markerfacecolor=colour if trial.whole else "none")
        if not numeric:
            axes.set_xticks(range(len(words)), [shorten(word, 16) for word in words])
            axes.set_xlim(-0.5, len(words) - 0.5)
        elif x and min(x) > 0 and max(x) >= 8 * min(x):
            _logarithmic(axes, "x")
        if y and min(y) > 0 and max(y) > 30 * min(y):
            _logarithmic(axes, "y")
        axes.set_xlabel(key)
        axes.set_ylabel(metric)

    return svg(name, draw, (3.9, 2.6))


#: What stands side by side for one run: its label, and a value and a colour for each bar; None is not known.
Bars = tuple[str, Sequence[tuple[float | None, str]]]


def bars(name: str, rows: Sequence[Bars], label: str) -> str:
    """Draw bars by run, with their values; `label` is the axis."""

    def draw(axes: Axes) -> None:
        top = 0.0
        for label_, values in rows:
            left = axes.get_yaxis_transform()
            axes.text(0, top, shorten(label_, 40), transform=left, va="center", fontweight="bold")
            for value, colour in values:
                top += 0.85
                if value is not None:
                    axes.barh(top, value, height=0.75, color=colour)
                    axes.annotate(
                        number(value), (value, top), (4, 0), textcoords="offset points", va="center", fontsize=8
                    )
            top += 1.15
        axes.set_xlim(0, 1.2 * max((v or 0.0 for _, values in rows for v, _ in values), default=0.0) or 1.0)
        axes.set_ylim(top - 0.5, -0.6)
        axes.set_yticks([])
        axes.set_xlabel(label)

    return svg(name, draw, (3.9, 0.6 + 0.22 * sum(1 + len(values) for _, values in rows)))


@dataclass(frozen=True)
class Band:
    """A point of `bands`."""

    place: float
    mean: float
    least: float
    greatest: float


def bands(name: str, curves: Sequence[Sequence[Band]], axis: str, label: str, time: bool = False) -> str:
    """Draw means over `axis` (seconds, if it is a `time`), and bands from the least to the greatest."""

    def draw(axes: Axes) -> None:
        seconds, time_unit = _time_unit(max((c[-1].place for c in curves if c), default=0.0)) if time else (1, "")
        values = []
        for style, curve in enumerate(curves):
            x = [point.place / seconds for point in curve]
            low, high = [point.least for point in curve], [point.greatest for point in curve]
            values += [*low, *high]
            if low != high:
                axes.fill_between(x, low, high, color=RUN_COLOURS[style], alpha=0.2, linewidth=0)
            _plot(axes, style, x, [point.mean for point in curve])
        axes.set_xlim(left=0)
        axes.set_xlabel(f"{axis}{f' ({time_unit})' * time}")
        axes.set_ylabel(label)
        _logarithmic_if_wide(axes, values)

    return svg(name, draw, (3.9, 2.8))


@dataclass(frozen=True)
class Line:
    """A line of `over_devices`; values that are not known are left out."""

    points: Sequence[tuple[int, float | None]]
    colour: str
    marker: str = ""
    noise: Sequence[float] = ()  #: Half of each point's whisker.
    dashes: str = ""  #: `DASHED` or `DOTTED`, whose markers are hollow; else solid.


def over_devices(name: str, lines: Sequence[Line], label: str, doubling: bool = False, wide: bool = False) -> str:
    """Draw lines over numbers of devices from zero.

    `doubling`: twice as many devices are a step further. `wide`: both axes are logarithmic, for lines far apart.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    def draw(axes: Axes) -> None:
        counts = sorted({x for line in lines for x, y in line.points if y is not None})
        greatest = 0.0
        for line in lines:
            known = [(x, y) for x, y in line.points if y is not None]
            x, y = [x for x, _ in known], [y for _, y in known]
            greatest = max([greatest, *y])
            (drawn,) = axes.plot(x, y, color=line.colour, linewidth=1.8, marker=line.marker, markersize=5)
            if line.dashes:
                drawn.set(linewidth=1.2, dashes=[float(length) for length in line.dashes.split()])
                drawn.set_markerfacecolor("none")
            if line.noise:
                axes.errorbar(x, y, yerr=line.noise, fmt="none", ecolor=line.colour, elinewidth=1, capsize=2)
        if doubling or wide:
            axes.set_xscale("log", base=2)
            axes.set_xlim(min(counts, default=1) / 1.15, max(counts, default=1) * 1.15)
        else:
            axes.set_xlim(0, 1.05 * max(counts, default=1))
            room = max(counts, default=1) / 14  # what a number needs
            counts = [count for count, more in zip(counts, [*counts[1:], math.inf], strict=True) if more - count > room]
        axes.xaxis.set_major_locator(FixedLocator(counts))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
        axes.set_ylim(0, 1.1 * greatest or 1.0)
        if wide:
            axes.set_ylim(auto=True)
            _logarithmic(axes, "y")
        axes.set_xlabel("devices")
        axes.set_ylabel(label)

    return svg(name, draw, (3.9, 2.8))


def _plot(axes: Axes, style: int, x: Sequence[float], y: Sequence[float]) -> None:
    marker, colour = MARKERS[style][0], RUN_COLOURS[style]
    axes.plot(x, y, color=colour, linewidth=1.8, marker=marker, markersize=5, markevery=max(1, len(x) // 12))


def _plot_seeds(axes: Axes, style: int, x: Sequence[float], values: Sequence[Sequence[float]]) -> None:
    """Draw the mean over the seeds of a training, and a band from the least to the greatest if there are several."""
    x = x[: len(values)]
    if any(len(each) > 1 for each in values):
        low, high = [min(each) for each in values], [max(each) for each in values]
        axes.fill_between(x, low, high, color=RUN_COLOURS[style], alpha=0.2, linewidth=0)
    _plot(axes, style, x, [statistics.fmean(each) for each in values])


def _epochs(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(left=0)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))


def _time_unit(greatest: float) -> tuple[int, str]:
    """Return the seconds and the name of the unit in which times up to `greatest` seconds read well."""
    return next(((s, u) for s, u in ((3600, "h"), (60, "min")) if greatest >= 2 * s), (1, "s"))


def _logarithmic_if_wide(axes: Axes, values: Sequence[float]) -> None:
    """Set a logarithmic axis for values that are all positive, and of which one is ten times another."""
    positive = [value for value in values if value > 0]
    if positive and len(positive) == len(values) and max(positive) > 10 * min(positive):
        _logarithmic(axes, "y")


def _logarithmic(axes: Axes, which: Literal["x", "y"]) -> None:
    """Set a logarithmic axis with plain numbers; matplotlib's own ones are mathematical text."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    low, high = axis.get_data_interval()
    room = which == "y" or 0 < low <= high < 100 * low  # along x the numbers stand beside each other
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if room else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
