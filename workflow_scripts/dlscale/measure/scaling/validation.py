"""Is the model of scaling right? Published series, fitted on few devices and predicted on many, beside simpler laws."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import minimize_scalar, nnls

from dlscale.config.records import PUBLISHED_KINDS, Published, Series
from dlscale.core.text import NONE
from dlscale.measure.scaling.fit import BAND, NOISE, Fit, Point, Prediction, fit
from dlscale.measure.scaling.machine import named
from dlscale.measure.scaling.model import STEPS, Costs, Job, Measure, Mode, Tokens, Workload, buckets, evenly, rate


@dataclass(frozen=True)
class Check:
    """A published figure that the model did not see, and what is predicted of it.

    Times are samples/s, too; a share of communication is the rest of the time without it.
    """

    series: str
    figure: Published
    fitted: tuple[int, ...]  #: Devices of the points that the model saw.
    published: float
    ours: Prediction  #: Its band without the model's own misfit.
    doublings: float
    amdahl: float | None  #: None: the law says nothing of it.
    line: float | None
    known: int = 1  #: Numbers of devices that the simpler laws stand on.

    @property
    def what(self) -> str:
        """What is predicted."""
        return PUBLISHED_KINDS.get(self.figure.metric, "throughput")

    @property
    def errors(self) -> tuple[float | None, float | None, float | None]:
        """Relative errors: ours, Amdahl's law's, the straight line's."""
        ours, *others = (
            None if value is None else value / self.published - 1 for value in (self.ours.value, self.amdahl, self.line)
        )
        return ours, others[0], others[1]

    def widened(self, misfit: float) -> Prediction:
        """Return our prediction with a misfit of the model (as `dlscale.measure.scaling.fit.MISFIT`)."""
        return self.ours.widened(misfit * math.sqrt(self.doublings))


def check(name: str, series: Series, figures: Iterable[Published]) -> list[Check]:
    """Fit the model to a series' figures on few devices; return how it predicts the others."""
    own = [figure for figure in figures if name in figure.series]
    seen = [figure for figure in own if figure.gpus <= series.fit]
    points = [Point(_job(figure), _rate(figure), _measure(series, figure)) for figure in seen]
    fitted = fit(named(series.machine).machine, workload(series), points)
    return [_checked(series, fitted, seen, figure) for figure in own if figure.gpus > series.fit]


def workload(series: Series) -> Workload:
    """Return what a series' program sends."""
    size, count = float(series.parameters * series.gradient_bytes), series.collectives
    parts = (1 / count,) * count if count else buckets(evenly(size))
    tokens = Tokens(*series.tokens) if series.tokens else None
    return Workload(size, parts, tokens, workers=series.workers, loaded=series.loaded)


def _job(figure: Published) -> Job:
    samples = figure.batch_size or math.nan
    return Job(figure.gpus, samples * figure.tp * figure.cp / figure.gpus, figure.tp, figure.cp)


def _measure(series: Series, figure: Published) -> Measure:
    samples = float(figure.samples or 0)
    modes: dict[str, Mode] = {"IO": "IO", "SYNTHETIC": "SYNTHETIC", "FULL": "EPOCH" if samples else "FULL"}
    if figure.metric == "time":
        return Measure("BOTH", samples, float(series.valid_samples or 0))
    return Measure("VALIDATION" if figure.metric.startswith("validation") else modes[figure.kind], samples)


def _rate(figure: Published) -> float:
    """Return a figure as samples/s, whatever it was."""
    value = figure.samples_per_second or figure.value or math.nan
    return (figure.samples or 0) * (figure.epochs or 1) / value if figure.unit == "s" else value


def _checked(series: Series, fitted: Fit, seen: Sequence[Published], figure: Published) -> Check:
    job, devices = _job(figure), tuple(sorted({each.gpus for each in seen}))

    def speed(costs: Costs, at: Job = job, of: Measure = STEPS) -> float:
        return rate(fitted.machine, fitted.work, costs, at, of)

    def found(published: float, ours: Prediction, amdahl: float | None, line: float | None, known: int = 1) -> Check:
        return Check(series.title, figure, devices, published, ours, fitted.doublings(job), amdahl, line, known)

    if figure.metric in ("scaling_efficiency", "communication"):
        share, one = (figure.value or math.nan) / 100, replace(job, devices=1)
        if figure.metric == "communication":
            alone, together = Measure("ALONE"), Measure("SYNTHETIC")
            ours = fitted.predict(lambda costs: speed(costs, of=together) / speed(costs, of=alone))
            return found(1 - share, ours.widened(NOISE), None, None)
        ours = fitted.predict(lambda costs: speed(costs) / speed(costs, one) / job.devices)
        return found(share, ours.widened(NOISE), 1.0, 1.0)  # the simpler laws know one device: nothing is lost
    of = _measure(series, figure)
    known: dict[int, list[float]] = defaultdict(list)
    for each in seen:
        # They know nothing of devices that share a model: to them these are so many more.
        if _measure(series, each).mode == of.mode and (_job(each).batch == job.batch or job.shared > 1):
            known[each.gpus].append(_rate(each))
    points = {gpus: statistics.fmean(rates) for gpus, rates in sorted(known.items())}
    laws = [law(points, figure.gpus) if points else None for law in (amdahl, line)]
    return found(_rate(figure), fitted.rate(job, of, misfit=0), laws[0], laws[1], len(points))


def amdahl(points: Mapping[int, float], devices: int) -> float:
    """Return samples/s by Amdahl's law (1967): seconds a sample = serial + parallel / devices, neither negative.

    The least squares of relative errors; from one point nothing is serial.
    """
    n, rates = np.array(list(points), float), np.array(list(points.values()))
    if len(n) < 2:
        return line(points, devices)
    (serial, parallel), _ = nnls(np.column_stack([rates, rates / n]), np.ones(len(n)))
    return float(1 / (serial + parallel / devices))


def line(points: Mapping[int, float], devices: int) -> float:
    """Return samples/s on the straight line through the first point and the last; from one point, through zero."""
    first, last = min(points), max(points)
    start, begin = (points[first], first) if first != last else (0.0, 0)
    return start + (points[last] - start) * (devices - begin) / (last - begin)


def medians(checks: Iterable[Check]) -> tuple[float, float, float]:
    """Return the medians of absolute relative errors, ours first, over what all three predict."""
    known = [[abs(error) for error in each.errors if error is not None] for each in checks]
    ours, law, straight = zip(*(errors for errors in known if len(errors) == 3), strict=True)
    return statistics.median(ours), statistics.median(law), statistics.median(straight)


def misfit(checks: Sequence[Check]) -> float:
    """Return what the model itself is wrong by, relative, a doubling: the most probable value, given the errors."""

    def unlikely(found: float) -> float:
        total = 0.0
        for each in checks:
            ours = each.widened(found)
            deviation = math.log(ours.high / ours.low) / 2 / BAND
            total += math.log(deviation) + (math.log(ours.value / each.published) / deviation) ** 2 / 2
        return total

    return float(minimize_scalar(unlikely, bounds=(0, 1), method="bounded", options={"xatol": 1e-4}).x)


def table(checks: Sequence[Check]) -> list[tuple[str, ...]]:
    """Return the rows of the table, the first one its heads; bands take the misfit of the other series."""
    rows: list[tuple[str, ...]] = [
        ("series", "fitted on", "predicted", "published", "the model", "90 % band", "error", "Amdahl", "line")
    ]
    for each in checks:
        ours = _banded(each, checks)
        predicted = f"{each.figure.gpus} GPUs, {_short(each)}"
        fitted_on = "1 GPU" if each.fitted == (1,) else f"{', '.join(map(str, each.fitted))} GPUs"
        values = [_value(value) for value in (each.published, ours.value)]
        band = f"{_value(ours.low)} to {_value(ours.high)}"
        rows.append((each.series, fitted_on, predicted, *values, band, *map(_percent, each.errors)))
    return rows


def _banded(check: Check, checks: Sequence[Check]) -> Prediction:
    """Return our prediction with the misfit of the other series."""
    return check.widened(misfit([other for other in checks if other.series != check.series]))


def _medians(found: Sequence[float]) -> str:
    return "model {:.1f} %, Amdahl {:.1f} %, line {:.1f} %".format(*(100 * each for each in found))


def summary(checks: Sequence[Check]) -> list[str]:
    """Return in words how the model and the simpler laws did."""
    by_series: dict[str, list[Check]] = defaultdict(list)
    for each in checks:
        by_series[each.series].append(each)
    each_series = [medians(own) for own in by_series.values()]
    over = [statistics.median(column) for column in zip(*each_series, strict=True)]
    several = [each for each in checks if each.known > 1]
    bands = [(each, _banded(each, checks)) for each in checks]
    inside = sum(band.low <= each.published <= band.high for each, band in bands)
    return [
        f"median error: {_medians(medians(checks))}",
        f"of the {len(several)} figures for which the laws have two points or more: {_medians(medians(several))}",
        f"median of the series' medians: {_medians(over)}",
        f"published figures within the 90 % band: {inside} of {len(checks)}",
    ]


def _short(each: Check) -> str:
    figure, rest = each.figure, []
    rest += [f"tp {figure.tp}"] if figure.tp > 1 else []
    rest += [f"cp {figure.cp}"] if figure.cp > 1 else []
    words = {"scaling_efficiency": "efficiency", "communication": "without communication", "time": "training"}
    what = words.get(figure.metric, "validation" if figure.metric.startswith("validation") else "")
    return ", ".join([*rest, *([what] if what else []), f"{_job(figure).batch:g} a {'model' if rest else 'GPU'}"])


def _value(value: float) -> str:
    return f"{value:.2f}" if value < 2 else f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:+.0f} %".replace("-", "−")
