"""Published series, fitted on few devices and predicted on many, beside Amdahl's law."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from dlscale.config.records import Published, Series
from dlscale.core.text import NONE
from dlscale.measure.scaling.fit import MISFIT, NOISE, Fit, Point, Prediction, fit
from dlscale.measure.scaling.machine import named
from dlscale.measure.scaling.model import STEPS, Costs, Job, Measure, Mode, Tokens, Workload, buckets, evenly, rate


@dataclass(frozen=True)
class Check:
    """A published figure that the fit did not see, and its prediction: samples/s, an efficiency, or a share of time."""

    series: str
    figure: Published
    fitted: tuple[int, ...]  #: Devices of the points that the model saw.
    published: float
    ours: Prediction  #: Its band without the model's own misfit.
    doublings: float
    amdahl: float | None  #: None: the law says nothing of it.

    @property
    def band(self) -> Prediction:
        """Our prediction, with the model's own misfit in its band."""
        return self.ours.widened(MISFIT * math.sqrt(self.doublings))

    @property
    def errors(self) -> tuple[float, float | None]:
        """Relative errors: ours, and that of Amdahl's law."""
        return self.ours.value / self.published - 1, None if self.amdahl is None else self.amdahl / self.published - 1


def check(name: str, series: Series, figures: Iterable[Published]) -> list[Check]:
    """Fit the model to a series' figures on few devices; return how it predicts the others."""
    own = [figure for figure in figures if name in figure.series]
    seen = [figure for figure in own if figure.gpus <= series.fit]
    points = [Point(_job(figure), _rate(figure), _measure(series, figure)) for figure in seen]
    fitted = fit(named(series.machine).machine, workload(series), points)
    return [_checked(series, fitted, seen, figure) for figure in own if figure.gpus > series.fit]


def workload(series: Series) -> Workload:
    """Return the workload of a series' program."""
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
    """Return a figure as samples/s."""
    value = figure.samples_per_second or figure.value or math.nan
    return (figure.samples or 0) * (figure.epochs or 1) / value if figure.unit == "s" else value


def _checked(series: Series, fitted: Fit, seen: Sequence[Published], figure: Published) -> Check:
    job, of, devices = _job(figure), _measure(series, figure), tuple(sorted({each.gpus for each in seen}))

    def speed(costs: Costs, at: Job = job, of: Measure = STEPS) -> float:
        return rate(fitted.machine, fitted.work, costs, at, of)

    published, law = (figure.value or math.nan) / 100, None
    if figure.metric == "communication":
        alone, together = Measure("ALONE"), Measure("SYNTHETIC")
        published = 1 - published
        ours = fitted.predict(lambda costs: speed(costs, of=together) / speed(costs, of=alone)).widened(NOISE)
    elif figure.metric == "scaling_efficiency":
        one, law = replace(job, devices=1), 1.0  # the law knows one device: nothing is lost
        ours = fitted.predict(lambda costs: speed(costs) / speed(costs, one) / job.devices).widened(NOISE)
    else:
        published, ours = _rate(figure), fitted.rate(job, of, misfit=0)
        known: dict[int, list[float]] = defaultdict(list)
        for each in seen:
            # It knows nothing of devices that share a model: to it these are so many more.
            if _measure(series, each).mode == of.mode and (_job(each).batch == job.batch or job.shared > 1):
                known[each.gpus].append(_rate(each))
        points = {gpus: statistics.fmean(rates) for gpus, rates in known.items()}
        law = amdahl(points, figure.gpus) if points else None
    return Check(series.title, figure, devices, published, ours, fitted.doublings(job), law)


def amdahl(points: Mapping[int, float], devices: int) -> float:
    """Return samples/s by Amdahl's law (1967): seconds a sample = serial + parallel / devices, neither negative.

    The least squares of relative errors; from one point nothing is serial.
    """
    n, rates = np.array(list(points), float), np.array(list(points.values()))
    if len(n) < 2:
        return float(rates[0] * devices / n[0])
    (serial, parallel), _ = nnls(np.column_stack([rates, rates / n]), np.ones(len(n)))
    return float(1 / (serial + parallel / devices))


def table(checks: Sequence[Check]) -> list[tuple[str, ...]]:
    """Return the rows of the table, the first one its heads."""
    rows: list[tuple[str, ...]] = [
        ("series", "fitted on", "predicted", "published", "the model", "90 % band", "error", "Amdahl")
    ]
    for each in checks:
        ours = each.band
        predicted = f"{each.figure.gpus} GPUs, {_short(each)}"
        fitted_on = "1 GPU" if each.fitted == (1,) else f"{', '.join(map(str, each.fitted))} GPUs"
        values = [_value(value) for value in (each.published, ours.value)]
        band = f"{_value(ours.low)} to {_value(ours.high)}"
        rows.append((each.series, fitted_on, predicted, *values, band, *map(_percent, each.errors)))
    return rows


def summary(checks: Sequence[Check]) -> list[str]:
    """Return in words how the model and Amdahl's law did, over what both predict."""
    errors = pd.DataFrame([(each.series, *each.errors) for each in checks], columns=["series", "model", "Amdahl"])
    known = errors.dropna().set_index("series").astype(float).abs()
    means = {"error": known, "of the series' medians": known.groupby("series").median()}
    inside = sum(each.band.low <= each.published <= each.band.high for each in checks)
    return [
        *(
            f"median {what}: model {100 * each.model.median():.1f} %, Amdahl {100 * each.Amdahl.median():.1f} %"
            for what, each in means.items()
        ),
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
