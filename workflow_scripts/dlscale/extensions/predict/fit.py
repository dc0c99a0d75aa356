"""Fit the costs of the scaling model to a few measurements and to log-normal priors.

The fitted costs maximise the posterior probability. Near this maximum the logarithms of costs and predictions are
assumed to be normally distributed (Laplace's approximation). A band contains 90 % of the distribution.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import pandas as pd
from scipy.optimize import least_squares, nnls

from dlscale.config.records import Published
from dlscale.core.errors import UserError
from dlscale.core.text import NONE
from dlscale.extensions.predict.model import (
    STEPS,
    Costs,
    Job,
    Machine,
    Measure,
    Mode,
    Tokens,
    Workload,
    buckets,
    evenly,
    named,
    rate,
)
from dlscale.extensions.predict.series import Series

NAMES = tuple(field.name for field in fields(Costs))


@dataclass(frozen=True)
class Prior:
    """Log-normal prior of a cost."""

    middle: float  #: Median.
    factor: float  #: Factor by which the cost changes for one standard deviation of its logarithm.
    source: str


#: Priors by cost. Three medians are multiples of measured times: of the step time on the fewest devices (`fixed`), of
#: this step's time per sample (`sample`, a weak prior), and of the loader's time per sample (`load`; if it is unknown,
#: as for `sample`).
PRIORS = {
    "fixed": Prior(
        0.05, 3, "judgement: an optimiser step reads and writes 28 bytes per parameter; launching kernels takes time"
    ),
    "sample": Prior(1.0, 10, "none: the measurements determine this cost"),
    "load": Prior(0.5, 2, "judgement: a loader that waits for training could load twice as fast"),
    "blend": Prior(1.5, 2.5, "fits to the SC22 tutorial's rates of a U-Net on one A100 (benchy): 0.2 to 3.5"),
    "start": Prior(
        0.1, 4, "starts of validations on at most 8 GPUs: SC22 0.05 s, SC23 0.4 s, HAL's log 2.5 s with 20 workers"
    ),
    "spread": Prior(
        0.015, 2, "Sinha et al. 2022 (arXiv:2208.11035): equal GPUs of a cluster differ in speed by 8 % (box whiskers)"
    ),
    "host": Prior(0.01, 2.7, "judgement: loading slows down by a few per cent if all devices of a node are used"),
    "near": Prior(1.0, 1.5, "judgement: NCCL reaches 60 to 90 % of a link's bandwidth, as in Calculon's systems"),
    "far": Prior(1.0, 2, "judgement: other jobs share the network, and NCCL may lack the network's driver"),
    "slowdown": Prior(0.19, 1.8, "Lee et al. 2025 (arXiv:2507.03114): collectives slow computing by 18.9 % on average"),
    "split": Prior(0.083, 2.7, "Shoeybi et al. 2019 (arXiv:1909.08053), figure 5: efficiency 77 % on 8 devices"),
}
#: Priors, by cost, that replace priors of `PRIORS` if the devices are processes on a node's processors.
PROCESSES = {
    "host": Prior(0.3, 3, "judgement: processes share the memory, and the cores if there are fewer cores than threads"),
    "near": Prior(1.0, 4, "judgement: processes copy messages with the cores that compute"),
}
#: Relative error of a throughput. Two tables of one tutorial differ by 1.4 to 4.3 % (ResNet-50 on 4, 8 and 16 GPUs).
NOISE = 0.03
#: Relative error of the rate of a validation. A validation is short: six of them took 2.60 to 4.26 s on 4 GPUs (SC22,
#: logs).
VALIDATION_NOISE = 0.2
#: Error of the scaling model itself: relative standard deviation of a prediction for one doubling of the devices, or of
#: the devices that share a model. The deviation grows with the square root of the number of doublings. Source: the
#: published series (`tests/test_scaling_model.py`).
MISFIT = 0.053
#: Change of a cost's logarithm in finite differences.
STEP = 1e-4
#: Half-width of the interval that contains 90 % of a normal distribution, standard deviations.
BAND = 1.645


@dataclass(frozen=True)
class Point:
    """Measured rate of a job, samples/s over all devices."""

    job: Job
    rate: float
    of: Measure = STEPS

    @property
    def noise(self) -> float:
        """Relative error of the rate."""
        return VALIDATION_NOISE if self.of.mode == "VALIDATION" else NOISE


@dataclass(frozen=True)
class Prediction:
    """Predicted quantity: median, 5 % quantile and 95 % quantile."""

    value: float
    low: float
    high: float

    def widened(self, deviation: float) -> Prediction:
        """Return the prediction with a further relative error of standard deviation `deviation`."""
        down, up = (math.hypot(math.log(end / self.value), BAND * deviation) for end in (self.low, self.high))
        return Prediction(self.value, self.value * math.exp(-down), self.value * math.exp(up))


@dataclass(frozen=True)
class Fit:
    """Most probable costs of a workload on a machine, and the uncertainty of the costs."""

    machine: Machine
    work: Workload
    costs: Costs
    covariance: np.ndarray  #: Covariance of the costs' logarithms, in the order of `NAMES`.
    points: tuple[Point, ...]

    def doublings(self, job: Job) -> float:
        """Return how many doublings of devices lead from the largest measured points to a job.

        Doublings of all devices and doublings of the devices that share a model are added. A job with fewer devices
        than the measured points has 0 doublings.
        """
        devices, shared = (
            max(sizes) for sizes in zip((1, 1), *((p.job.devices, p.job.shared) for p in self.points), strict=True)
        )
        return max(0.0, math.log2(job.devices / devices)) + max(0.0, math.log2(job.shared / shared))

    def predict(self, quantity: Callable[[Costs], float]) -> Prediction:
        """Predict a positive quantity that depends on the costs."""
        logs = np.log([getattr(self.costs, name) for name in NAMES])
        moved = STEP * np.eye(len(logs))
        ups, downs = (np.log([quantity(_costs(each)) for each in logs + sign * moved]) for sign in (1, -1))
        slopes = (ups - downs) / (2 * STEP)
        value = quantity(self.costs)
        return Prediction(value, value, value).widened(math.sqrt(slopes @ self.covariance @ slopes))

    def rate(self, job: Job, of: Measure = STEPS, misfit: float = MISFIT) -> Prediction:
        """Predict the samples/s over all devices; the band includes errors of the measurement and of the model."""
        found = self.predict(lambda costs: rate(self.machine, self.work, costs, job, of))
        return found.widened(math.hypot(Point(job, found.value, of).noise, misfit * math.sqrt(self.doublings(job))))


def fit(machine: Machine, work: Workload, points: Sequence[Point]) -> Fit:
    """Return the most probable costs, given the points and the priors.

    Raise `UserError` if no point measures training or computing.
    """
    computing = [point for point in points if point.of.mode not in ("IO", "VALIDATION")]
    if not computing:
        raise UserError("predict: a throughput is missing. Expected at least one measurement of training or computing")
    first = min(computing, key=lambda point: (point.job.devices, point.of.mode != "SYNTHETIC"))
    own = first.job.devices * first.job.batch / first.job.shared / first.rate  # seconds per step
    unit = {"fixed": own, "sample": own * first.job.shared / first.job.batch}
    unit["load"] = 1 / work.loaded if work.loaded else unit["sample"]
    priors = PRIORS | (PROCESSES if work.processes else {})
    middles = np.log([priors[name].middle * unit.get(name, 1.0) for name in NAMES])
    factors = np.log([priors[name].factor for name in NAMES])

    def residuals(logs: np.ndarray) -> np.ndarray:
        """Return the deviations from points and priors, in standard deviations."""
        costs = _costs(logs)
        errors = [math.log(rate(machine, work, costs, each.job, each.of) / each.rate) / each.noise for each in points]
        return np.concatenate([errors, (logs - middles) / factors])

    found = least_squares(residuals, middles, "3-point", method="trf", x_scale=factors)
    return Fit(machine, work, _costs(found.x), np.linalg.inv(found.jac.T @ found.jac), tuple(points))


def _costs(logs: np.ndarray) -> Costs:
    return Costs(*np.exp(logs).tolist())


# ---- published series: fitted on few devices, predicted on many, compared with Amdahl's law ------------


@dataclass(frozen=True)
class Check:
    """Published figure that the fit did not use, and the prediction of the figure.

    The figure is a rate (samples/s), an efficiency, or a fraction of time.
    """

    series: str
    figure: Published
    fitted: tuple[int, ...]  #: Numbers of devices of the fitted points.
    published: float
    ours: Prediction  #: Prediction of the scaling model; its band does not include `MISFIT`.
    doublings: float  #: Number of doublings from the fitted points to the figure.
    amdahl: float | None  #: Prediction by Amdahl's law; None if the law does not apply.

    @property
    def band(self) -> Prediction:
        """Prediction of the scaling model; its band includes `MISFIT`."""
        return self.ours.widened(MISFIT * math.sqrt(self.doublings))

    @property
    def errors(self) -> tuple[float, float | None]:
        """Relative errors of the model and of Amdahl's law."""
        return self.ours.value / self.published - 1, None if self.amdahl is None else self.amdahl / self.published - 1


def check(name: str, series: Series, figures: Iterable[Published]) -> list[Check]:
    """Fit the model to a series' figures on few devices; return the predictions of figures on more devices."""
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
    """Return a figure as samples/s; a figure in seconds is the time of an epoch, a validation or a training."""
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
        one, law = replace(job, devices=1), 1.0  # Amdahl's law fitted on one device predicts an efficiency of 1
        ours = fitted.predict(lambda costs: speed(costs) / speed(costs, one) / job.devices).widened(NOISE)
    else:
        published, ours = _rate(figure), fitted.rate(job, of, misfit=0)
        known: dict[int, list[float]] = defaultdict(list)
        for each in seen:
            # Amdahl's law cannot describe devices that share a model, so each of them counts as a separate device.
            if _measure(series, each).mode == of.mode and (_job(each).batch == job.batch or job.shared > 1):
                known[each.gpus].append(_rate(each))
        points = {gpus: statistics.fmean(rates) for gpus, rates in known.items()}
        law = amdahl(points, figure.gpus) if points else None
    return Check(series.title, figure, devices, published, ours, fitted.doublings(job), law)


def amdahl(points: Mapping[int, float], devices: int) -> float:
    """Return samples/s by Amdahl's law (1967): seconds per sample = serial + parallel / devices.

    The serial and the parallel part are at least 0, and minimise the squares of relative errors. With a single point
    the serial part is 0.
    """
    n, rates = np.array(list(points), float), np.array(list(points.values()))
    if len(n) < 2:
        return float(rates[0] * devices / n[0])
    (serial, parallel), _ = nnls(np.column_stack([rates, rates / n]), np.ones(len(n)))
    return float(1 / (serial + parallel / devices))


def table(checks: Sequence[Check]) -> list[tuple[str, ...]]:
    """Return the rows of the table of checks; the first row has the column heads."""
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
    """Return lines with the errors of the scaling model and of Amdahl's law.

    Medians are over the figures that both predict; the last line counts all figures.
    """
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
    return ", ".join([*rest, *([what] if what else []), f"{_job(figure).batch:g} per {'model' if rest else 'GPU'}"])


def _value(value: float) -> str:
    return f"{value:.2f}" if value < 2 else f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:+.0f} %".replace("-", "−")
