"""Compute speed-ups between runs, and scaling over devices, each with its 95 % interval.

Single-process runs are timed alternately with the first run of their plan (paired timing, `dlscale.measure.turns`). The
interval of such a ratio comes from its spread over restarts of both runs, pooled over the plan's runs. For separately
measured runs, the interval comes from the spread of their trials. Both intervals are widened by the difference that two
measurements of the same work may have.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dlscale.core.noise import pooled, reach, standard_errors
from dlscale.core.settings import flat
from dlscale.core.text import number, percent
from dlscale.measure.records import SAMPLE_RATE, PairedTiming, Trials
from dlscale.results import PlanResult, RunResult

#: Separately measured speeds that differ by at most 5 % are equal within noise: |log ratio| up to this value.
MIN_LOG_DIFFERENCE = math.log1p(0.05)

#: A ratio is not shown if its 95 % interval includes 1 and reaches from below half to above twice the ratio.
MAX_LOG_ERROR, VAGUE = math.log(2.0), "not known: the trials differ too much"

#: Text for the ratio of two separately measured speeds if other programs disturbed a measurement.
DISTURBED = "not known: other programs disturbed the measurement"

#: Speeds by paired timing are equal within noise if |log ratio| is at most this value. In 15 measurements of equal
#: runs, the ratio had a standard deviation of 0.7 %, and differed from 1 by at most 1.8 %.
MIN_PAIRED_LOG_DIFFERENCE = 0.015


@dataclass(frozen=True)
class SpeedUp:
    """The ratio of two speeds."""

    log: float  #: Natural logarithm of the ratio; twice and half the speed differ only in sign.
    error: float  #: Half-width of the 95 % interval of `log`; infinite if unknown or disturbed.
    disturbed: bool = False  #: Whether other programs disturbed a separately measured speed.

    @property
    def ratio(self) -> float:
        return math.exp(self.log)

    @property
    def low(self) -> float:
        return math.exp(self.log - self.error)

    @property
    def high(self) -> float:
        return math.exp(self.log + self.error) if math.isfinite(self.error) else math.inf

    @property
    def noise(self) -> bool:
        """Whether the interval includes equal speeds."""
        return abs(self.log) <= self.error

    @property
    def unknown(self) -> str:
        """Reason why the ratio is not known; empty if the ratio is known."""
        return DISTURBED if self.disturbed else VAGUE * (self.noise and MAX_LOG_ERROR < self.error < math.inf)

    @property
    def interval_text(self) -> str:
        if not math.isfinite(self.error):
            return "(single trials, no interval)"
        if self.high - self.ratio > 2 * (self.ratio - self.low):  # too asymmetric for "±"
            return f"({number(self.low)} to {number(self.high)})" + ", within noise" * self.noise
        return f"± {number((self.high - self.low) / 2, 2)}" + ", within noise" * self.noise

    @property
    def words(self) -> str:
        return self.unknown or f"{number(self.ratio)}× {self.interval_text}"

    @classmethod
    def mean(cls, found: Sequence[SpeedUp]) -> SpeedUp:
        """Return the geometric mean of ratios; errors are averaged, because they may have a common cause."""
        return cls(
            statistics.fmean(each.log for each in found),
            statistics.fmean(each.error for each in found),
            any(each.disturbed for each in found),
        )


# ---- measured separately -----------------------------------------------------------------------------


def spread(trials: Trials, looks: int = 1) -> float:
    """Return the half-width of a mean rate's 95 % interval, as a fraction of the rate, from its trials."""
    return reach(trials.std / trials.mean, len(trials.trial_time), looks) if trials.mean else math.inf


def spread_of(run: RunResult, looks: int = 1) -> float:
    """Return the half-width of a speed's 95 % interval, as a fraction of the speed, from FULL trials or else epochs."""
    if trials := run.trials("FULL"):
        return spread(trials, looks)
    speeds = [epoch.samples_per_second for epoch in run.timed[1:] if epoch.samples_per_second is not None]
    return reach(statistics.stdev(speeds) / statistics.fmean(speeds), len(speeds), looks) if speeds[1:] else math.inf


def between(before: Trials, after: Trials, floor: float = MIN_LOG_DIFFERENCE) -> SpeedUp:
    """Return the ratio after / before of two separately measured rates, with an error of at least `floor`."""
    return SpeedUp(math.log(after.mean / before.mean), math.hypot(spread(before), spread(after), floor))


def _is_comparable(run: RunResult, other: RunResult) -> bool:
    """Return whether both speeds have the same unit, and both come from FULL or both from trainings."""
    return (run.throughput is None) == (other.throughput is None) and run.unit == other.unit


def measured_apart(
    run: RunResult, other: RunResult, floor: float = MIN_LOG_DIFFERENCE, looks: int = 1
) -> SpeedUp | None:
    """Return the ratio of two separately measured speeds; None if unknown or not comparable.

    If other programs slowed one of the runs, the ratio has an infinite error.
    """
    if not (run.speed and other.speed and _is_comparable(run, other)):
        return None
    disturbed = bool(run.foreign_cpu_fraction or other.foreign_cpu_fraction)
    error = math.inf if disturbed else math.hypot(spread_of(run, looks), spread_of(other, looks), floor)
    return SpeedUp(math.log(run.speed / other.speed), error, disturbed)


# ---- paired timing -----------------------------------------------------------------------------------


def paired_ratio(
    own: PairedTiming | None, its: PairedTiming | None, opening: tuple[float, int], floor: float = 0.0, looks: int = 1
) -> SpeedUp:
    """Return the ratio of two runs' speeds by paired timing.

    `own` and `its` are the paired timings of the two runs with a common third run; None stands for the third run
    itself. An opening starts both runs anew. `opening` is (standard deviation of the log ratio between openings,
    pooled over all runs; its degrees of freedom). A run whose ratio varies more uses its own standard deviation.
    The error is at least `floor`.
    """
    log = (statistics.fmean(own.ratios) if own else 0.0) - (statistics.fmean(its.ratios) if its else 0.0)
    spread, freedom = opening
    known = [each.ratios for each in (own, its) if each]
    variance = sum(max(spread, pooled([ratios])[0]) ** 2 / len(ratios) for ratios in known)
    error = standard_errors(freedom + 1, looks) * math.sqrt(variance) if freedom else math.inf
    return SpeedUp(log, math.hypot(error, floor))


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that do the same work (`dlscale.config.compute`)."""

    runs: list[RunResult]
    speed: float  #: Mean rate, in the unit of the runs.
    gain: SpeedUp | None  #: Speed-up over the plan's first run; None for the group of that run.


class SpeedUps:
    """The speed-ups between a plan's runs."""

    def __init__(self, runs: Sequence[RunResult]) -> None:
        timed = [run for run in runs if run.throughput]  # the rate of a training is not comparable with FULL
        known = [run for run in timed or runs if run.speed]
        self.first = (known or runs)[0]
        self.runs = [run for run in known if run.unit == self.first.unit]  # other units are not comparable

    def over(self, run: RunResult, other: RunResult, looks: int = 1) -> SpeedUp | None:
        """Return the speed-up of a run over another; None if a speed is unknown or the speeds are not comparable.

        For several comparisons (`looks`), intervals are wider, so that all are right with 95 % probability.
        """
        if run is other:
            return SpeedUp(0.0, 0.0) if run.speed else None
        apart = measured_apart(run, other, self.separate_floor, looks)
        # Other programs slow both runs of a paired timing alike.
        return apart and (self._in_turns(run, other, self.floor, looks) or apart)

    @cached_property
    def _opening(self) -> tuple[float, int]:
        """(Standard deviation of the log ratio between openings, pooled over all runs; its degrees of freedom)."""
        return pooled([run.throughput.beside.ratios for run in self.runs if run.throughput and run.throughput.beside])

    @cached_property
    def floor(self) -> float:
        """Greatest significant log ratio of equal runs in paired timing; at least `MIN_PAIRED_LOG_DIFFERENCE`."""
        same = [found for one, other in self._alike() if (found := self._in_turns(one, other))]
        return max([MIN_PAIRED_LOG_DIFFERENCE, *(abs(found.log) for found in same if not found.noise)])

    @cached_property
    def separate_floor(self) -> float:
        """Greatest log ratio of separate measurements of runs with equal work; at least `MIN_LOG_DIFFERENCE`."""
        return max([MIN_LOG_DIFFERENCE, *(abs(math.log((a.speed or 1) / (b.speed or 1))) for a, b in self._alike())])

    def _in_turns(self, run: RunResult, other: RunResult, floor: float = 0.0, looks: int = 1) -> SpeedUp | None:
        """Return the ratio of two runs by paired timing; None without paired timing.

        Two runs have paired timing if they were timed with each other or with a common third run. If both runs are the
        first run, the ratio compares this run with its copy.
        """
        own, its = (each.throughput.beside if each.throughput else None for each in (run, other))
        straight = [(own, None)] if own and own.compute == other.compute else []
        back = [(None, its)] if its and its.compute == run.compute else []
        third = [(own, its)] if own and its and own.compute == its.compute else []
        found: list[tuple[PairedTiming | None, PairedTiming | None]] = [*third, *straight, *back]
        if other is self.first:
            found = [*straight, *third, *back]
        elif run is self.first:
            found = [*back, *third, *straight]
        return paired_ratio(*found[0], self._opening, floor, looks) if found else None

    def _alike(self) -> Iterator[tuple[RunResult, RunResult]]:
        every = itertools.combinations_with_replacement(self.runs, 2)
        return ((run, other) for run, other in every if run.compute == other.compute)

    @cached_property
    def groups(self) -> list[Group]:
        alike: dict[str, list[RunResult]] = {}
        for run in self.runs:
            alike.setdefault(run.compute, []).append(run)
        return [self._group(runs) for runs in alike.values()]

    def _group(self, runs: list[RunResult]) -> Group:
        over = [] if self.first in runs else [gain for run in runs if (gain := self.over(run, self.first))]
        return Group(runs, statistics.fmean(run.speed or 0.0 for run in runs), SpeedUp.mean(over) if over else None)

    def fastest(self, groups: Sequence[Group]) -> tuple[Group, list[Group]]:
        """Return the fastest group, and the groups that are equally fast within noise.

        The group of the first run is the fastest unless another group is significantly faster. All these
        comparisons together are right with 95 % probability.
        """
        looks = max(len(groups) - 1, 1)
        ranked = sorted(groups, key=lambda group: -(group.gain.log if group.gain else 0.0))
        if not self.first.speed:
            ranked = sorted(groups, key=lambda group: -group.speed)
        own = next((group for group in groups if self.first in group.runs), None)
        best = own if own and self._noise(ranked[0].runs, [self.first], looks) else ranked[0]
        like = [group for group in ranked if group is not best and self._noise(best.runs, group.runs, looks)]
        return best, like

    def _noise(self, runs: Sequence[RunResult], others: Sequence[RunResult], looks: int) -> bool:
        return SpeedUp.mean([gain for a in runs for b in others if (gain := self.over(a, b, looks))]).noise


# ---- over devices ------------------------------------------------------------------------------------

#: Kinds of plans that measure scaling.
SCALING = ("weak_scaling", "strong_scaling")

#: Settings that may differ within a series: geometry, batch, averaging, and settings without effect on the step time.
_OWN = ("batch_size", "label", "seed", "optimizer.lr", "geometry.nodes", "geometry.gpus_per_node", "parallel.sync")
_LATER = ("training", "schedule", "throughput", "profile", "tune")


@dataclass(frozen=True)
class Ratio:
    """A ratio of two measured rates, or 1 minus this ratio, with the half-width of its 95 % interval."""

    value: float
    noise: float

    @property
    def interval_text(self) -> str:
        return f"± {percent(self.noise)}" if math.isfinite(self.noise) else "(single trials, no interval)"


@dataclass(frozen=True)
class Point:
    """The run of a series on one number of devices."""

    run: RunResult
    base: RunResult  #: The run of the series with the fewest devices.
    twin: RunResult | None  #: Run of the same computation without gradient averaging.

    @property
    def devices(self) -> int:
        return self.run.devices

    @property
    def batch(self) -> int:
        """Global batch size; 0 if unknown."""
        return self.run.batch_size or 0

    def rate(self, mode: str) -> float | None:
        trials = self.run.trials(mode)
        return trials.mean if trials else None

    def ideal(self, mode: str) -> float | None:
        """Return the samples/s of `base`, scaled in proportion to the devices."""
        base = self.base.trials(mode)
        return base.mean * self.devices / self.base.devices if base else None

    def efficiency(self, mode: str) -> Ratio | None:
        """Return samples/s relative to the ideal, in weak and strong scaling."""
        own, base, ideal = self.run.trials(mode), self.base.trials(mode), self.ideal(mode)
        if not (own and base and ideal) or {self.run.unit, self.base.unit} != {SAMPLE_RATE}:
            return None
        value = own.mean / ideal
        return Ratio(value, value * between(base, own).error if self.run is not self.base else 0.0)

    def communication(self, mode: str) -> Ratio | None:
        """Return the fraction of a step that communication costs: 1 - step time of `twin` / step time of `run`."""
        twin = self.twin if self.twin and self.twin.unit == self.run.unit else None
        return _share(self.run.trials(mode), twin.trials(mode) if twin else None, MIN_LOG_DIFFERENCE)

    @property
    def alone(self) -> Ratio | None:
        """Fraction of a SYNTHETIC step that communication costs, from steps with and without gradient averaging."""
        return _share(self.run.trials("SYNTHETIC"), self.run.trials("alone"), 0.0)


@dataclass(frozen=True)
class Series:
    """Runs on increasing numbers of devices, with equal settings except `_OWN` and `_LATER`."""

    label: str
    batch: int  #: Samples per step: in weak scaling per device (or per group that shares a model), else in total.
    points: list[Point]


def series(plan: PlanResult) -> list[Series]:
    """Group the runs that average gradients by batch and settings; skip runs without samples/s.

    The twin, a run without averaging, has the same devices, batch and settings, except for the settings `parallel`,
    which have no effect without averaging.
    """
    weak = plan.record.kind == "weak_scaling"
    batch = {run: _batch(run, weak) for run in plan.runs if run.throughput and run.unit == SAMPLE_RATE}
    shared = {run: _shared(run) for run in batch}
    found: dict[str, dict[int, RunResult]] = {}
    twins: dict[str, RunResult] = {}
    for run, settings in shared.items():
        if run.averages:
            found.setdefault(_key(batch[run], settings), {}).setdefault(run.devices, run)
        else:
            twins.setdefault(_key(batch[run], run.devices, _apart(settings)), run)
    bases = [runs[min(runs)] for runs in found.values()]
    made = []
    for base, runs in zip(bases, found.values(), strict=True):
        settings = shared[base]
        # FSDP exchanges more than gradients, so runs with FSDP have no twin.
        apart = _apart(settings) if settings.get("parallel.kind", "ddp") == "ddp" else None
        points = [Point(runs[n], base, twins.get(_key(batch[base], n, apart))) for n in sorted(runs)]
        alike = [shared[other] for other in bases if batch[other] == batch[base]]
        made.append(Series(_label(batch[base], weak, settings, alike), batch[base], points))
    return made


def _shared(run: RunResult) -> dict[str, Any]:
    every = flat(run.settings).items()
    return {key: value for key, value in every if key not in _OWN and key.partition(".")[0] not in _LATER}


def _apart(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if not key.startswith("parallel.")}


def _key(*parts: Any) -> str:
    return json.dumps(parts, sort_keys=True, default=str)


def _batch(run: RunResult, weak: bool) -> int:
    batch, sharing = run.batch_size or 0, run.setting("geometry.tp", 1) * run.setting("geometry.cp", 1)
    return int(batch * sharing // run.devices) if weak else batch


def _label(batch: int, weak: bool, settings: dict[str, Any], alike: Sequence[dict[str, Any]]) -> str:
    """Return the label of a series: its batch, and the settings that differ between series with the same batch."""
    keys = [key for key in settings if len({str(other.get(key)) for other in alike}) > 1]
    words = [f"{key.rpartition('.')[2]} {'default' if settings[key] is None else settings[key]}" for key in keys]
    return "; ".join([f"{batch or 'unknown'} samples {'per device' if weak else 'per step'}", *words])


def _share(together: Trials | None, apart: Trials | None, floor: float) -> Ratio | None:
    """Return 1 - step time of `apart` / step time of `together`, for equal batches."""
    if not (together and apart and apart.mean):
        return None
    ratio = together.mean / apart.mean
    return Ratio(1 - ratio, ratio * between(apart, together, floor).error)
