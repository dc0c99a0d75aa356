"""Is the model of scaling right? Published series, fitted on few devices and predicted on many, beside simpler laws."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls

from dlscale.core.records import Published, Series
from dlscale.measure.scaling.fit import Fit, Point, Prediction, fit
from dlscale.measure.scaling.machine import named
from dlscale.measure.scaling.model import Costs, Job, Measure, Tokens, Workload, buckets, rate

#: Of a figure that is no throughput: what is predicted.
KINDS = {
    "time": "time",
    "validation_time": "time of a validation",
    "validation_speed": "validation",
    "scaling_efficiency": "efficiency",
    "communication": "rest without communication",
}


@dataclass(frozen=True)
class Check:
    """A published figure that the model did not see, and what is predicted of it; throughputs are samples/s."""

    series: str
    figure: Published
    fitted: tuple[int, ...]  #: Devices of the points that the model saw.
    what: str
    published: float
    ours: Prediction
    amdahl: float | None  #: None: the law says nothing of it.
    line: float | None

    def error(self, value: float | None) -> float | None:
        """Return the relative error of a prediction."""
        return None if value is None else value / self.published - 1

    @property
    def errors(self) -> tuple[float | None, float | None, float | None]:
        """Ours, Amdahl's law's, the straight line's."""
        return self.error(self.ours.value), self.error(self.amdahl), self.error(self.line)

    @property
    def inside(self) -> bool:
        """Whether the figure is within our band."""
        return self.ours.low <= self.published <= self.ours.high


def check(series: Series, name: str, figures: Iterable[Published]) -> list[Check]:
    """Fit the model to a series' figures on few devices; return how it predicts the others."""
    own = [figure for figure in figures if name in figure.series]
    seen = [figure for figure in own if figure.gpus <= series.fit]
    fitted = fit(named(series.machine).machine, workload(series), [_point(series, figure) for figure in seen])
    return [_checked(series, fitted, seen, figure) for figure in own if figure.gpus > series.fit]


def workload(series: Series) -> Workload:
    """Return what a series' program sends."""
    size = float(series.parameters * series.gradient_bytes)
    count = series.collectives
    parts = (1 / count,) * count if count else buckets(size)
    tokens = Tokens(*series.tokens) if series.tokens else None
    return Workload(size, parts, tokens, workers=series.workers, loaded=series.loaded)


def _job(figure: Published) -> Job:
    assert figure.batch_size is not None, f"{figure.label}: a point of a series needs its batch_size"
    return Job(figure.gpus, figure.batch_size * figure.tp * figure.cp / figure.gpus, figure.tp, figure.cp)


def _measure(series: Series, figure: Published) -> Measure:
    samples = float(figure.samples or 0)
    if figure.metric == "time":
        return Measure("BOTH", samples, float(series.valid_samples or 0))
    if figure.metric.startswith("validation"):
        return Measure("VALIDATION", samples)
    if figure.kind in ("IO", "SYNTHETIC"):
        return Measure(figure.kind)  # type: ignore[arg-type]
    return Measure("EPOCH", samples) if samples else Measure("FULL")


def _point(series: Series, figure: Published) -> Point:
    return Point(_job(figure), _rate(figure), _measure(series, figure))


def _rate(figure: Published) -> float:
    """Return a figure as samples/s, whatever it was."""
    if figure.samples_per_second:
        return figure.samples_per_second
    value, samples = figure.value or math.nan, figure.samples or 0
    return value if figure.metric == "validation_speed" else samples * (figure.epochs or 1) / value


def _checked(series: Series, fitted: Fit, seen: Sequence[Published], figure: Published) -> Check:
    job, devices = _job(figure), tuple(sorted({each.gpus for each in seen}))
    if figure.metric in ("scaling_efficiency", "communication"):
        published = (figure.value or math.nan) / 100
        quantity: Callable[[Costs], float]
        if figure.metric == "communication":
            published, quantity = 1 - published, lambda costs: _shared(fitted, costs, job, "SYNTHETIC", "ALONE")
            ours = fitted.predict(quantity)
            return Check(series.title, figure, devices, KINDS[figure.metric], published, ours, None, None)
        one = replace(job, devices=1)
        ours = fitted.predict(
            lambda costs: (
                rate(fitted.machine, fitted.work, costs, job)
                / (job.devices * rate(fitted.machine, fitted.work, costs, one))
            )
        )
        # The simpler laws know one device of that batch alone: they say that nothing is lost.
        return Check(series.title, figure, devices, KINDS[figure.metric], published, ours, 1.0, 1.0)
    of, published = _measure(series, figure), _rate(figure)
    alike = [
        each
        for each in seen
        if (each.metric, _job(each).batch) == (figure.metric, job.batch)
        or (figure.tp * figure.cp > 1 and each.metric == figure.metric)
    ]
    known: dict[int, list[float]] = defaultdict(list)
    for each in alike:
        if _measure(series, each).mode == of.mode:
            known[each.gpus].append(_rate(each))
    points = {gpus: statistics.fmean(rates) for gpus, rates in sorted(known.items())}
    what = KINDS.get(figure.metric, "throughput")
    ours = fitted.rate(job, of)
    return Check(
        series.title, figure, devices, what, published, ours, amdahl(points, figure.gpus), line(points, figure.gpus)
    )


def _shared(fitted: Fit, costs: Costs, job: Job, mode: str, other: str) -> float:
    first, second = (Measure(name) for name in (mode, other))  # type: ignore[arg-type]
    return rate(fitted.machine, fitted.work, costs, job, first) / rate(fitted.machine, fitted.work, costs, job, second)


def amdahl(points: dict[int, float], devices: int) -> float | None:
    """Return samples/s by Amdahl's law (1967): seconds a sample = serial + parallel / devices, neither negative.

    The least squares of relative errors; from one point nothing is serial. None without points.
    """
    if len(points) < 2:
        return line(points, devices)
    n, rates = np.array(list(points), float), np.array(list(points.values()))
    (serial, parallel), _ = nnls(np.column_stack([rates, rates / n]), np.ones(len(n)))
    return float(1 / (serial + parallel / devices))


def line(points: dict[int, float], devices: int) -> float | None:
    """Return samples/s on the straight line through the first and the last point; from one, through zero."""
    if not points:
        return None
    last = max(points)
    first = min(points)
    low = points[first] if first != last else 0.0
    low_at = first if first != last else 0
    return low + (points[last] - low) * (devices - low_at) / (last - low_at)


def medians(checks: Sequence[Check]) -> tuple[float, float, float]:
    """Return the medians of the absolute relative errors: ours, Amdahl's, the line's; where all three say something."""
    known = [each.errors for each in checks if None not in each.errors]
    ours, amdahl_, line_ = (
        statistics.median(abs(error or 0.0) for error in column) for column in zip(*known, strict=True)
    )
    return ours, amdahl_, line_
