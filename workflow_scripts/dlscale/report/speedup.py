"""Speed-ups between runs of a plan, and scaling over devices, each with its 95 % interval.

Runs of one process were timed in turn with their plan's first run (`dlscale.measure.turns`): the spread of these ratios
is taken from all runs of the plan together. Runs measured apart have the spread of their trials. Added to either is the
difference of two measurements of the same work.
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
from dlscale.core.text import number
from dlscale.measure.records import Beside, Trials
from dlscale.report.results import PlanResult, RunResult

#: Least difference of two speeds measured apart that counts: logarithm of a ratio of 1.05.
APART = math.log1p(0.05)

#: Least difference in turns that counts, logarithm of a ratio: where both runs did the same, in 15 measurements, the
#: ratio had a standard deviation of 0.7 %, and was 1.8 % at most.
FLOOR = 0.015


@dataclass(frozen=True)
class SpeedUp:
    """The ratio of two speeds."""

    log: float  #: Natural logarithm, which makes `twice` and `half` alike.
    error: float  #: Half of its 95 % interval; infinite where no spread is known.

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
        """Whether the two may be equally fast."""
        return abs(self.log) <= self.error

    @property
    def around(self) -> str:
        if not math.isfinite(self.error):
            return "of single trials, which may differ by anything"
        if self.high - self.ratio > 2 * (self.ratio - self.low):  # "±" would have it reach below what it excludes
            return f"({number(self.low)} to {number(self.high)})" + ", within noise" * self.noise
        return f"± {number((self.high - self.low) / 2, 2)}" + ", within noise" * self.noise

    @property
    def words(self) -> str:
        return f"{number(self.ratio)}× {self.around}"

    @classmethod
    def mean(cls, found: Sequence[SpeedUp]) -> SpeedUp:
        """Return the geometric mean, as uncertain as one of them: they may share a disturbance."""
        return cls(*(statistics.fmean(getattr(each, key) for each in found) for key in ("log", "error")))


# ---- apart -------------------------------------------------------------------------------------------


def spread(trials: Trials, looks: int = 1) -> float:
    """Return half of the interval of a mean rate, relative to it, by the spread of its trials."""
    return reach(trials.std / trials.mean, len(trials.trial_time), looks) if trials.mean else math.inf


def spread_of(run: RunResult, looks: int = 1) -> float:
    """Return the same of a run's speed: FULL, or its training epochs."""
    if trials := run.trials("FULL"):
        return spread(trials, looks)
    speeds = [epoch.samples_per_second for epoch in run.timed[1:]]
    return reach(statistics.stdev(speeds) / statistics.fmean(speeds), len(speeds), looks) if speeds[1:] else math.inf


def between(before: Trials, after: Trials, floor: float = APART) -> SpeedUp:
    """Return the ratio of two rates measured apart; equal ones may differ by `floor`, a logarithm."""
    return SpeedUp(math.log(after.mean / before.mean), math.hypot(spread(before), spread(after), floor))


def measured_apart(run: RunResult, other: RunResult, floor: float = APART, looks: int = 1) -> SpeedUp | None:
    """Return the ratio of two runs' speeds, measured apart; None where either is unknown."""
    if not (run.speed and other.speed):
        return None
    errors = (spread_of(each, looks) for each in (run, other))
    return SpeedUp(math.log(run.speed / other.speed), math.hypot(*errors, floor))


# ---- in turns ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Turns:
    """The turns of two runs with a third; None for the third itself."""

    own: Beside | None
    its: Beside | None = None

    @property
    def log(self) -> float:
        own, its = (statistics.fmean(each.ratios) if each else 0.0 for each in (self.own, self.its))
        return own - its

    def error(self, opening: float, freedom: int, looks: int = 1) -> float:
        """Return half of the interval, given the standard deviation of an opening's ratio over all runs.

        A run that varies more than the others has its own.
        """
        if not freedom:
            return math.inf
        known = [each.ratios for each in (self.own, self.its) if each]
        variance = sum(max(opening, pooled([ratios])[0]) ** 2 / len(ratios) for ratios in known)
        return standard_errors(freedom + 1, looks) * math.sqrt(variance)


def relative_to_first(run: RunResult, other: RunResult, looks: int = 1) -> SpeedUp | None:
    """Return the ratio of two runs' speed-ups over their plans' first runs, if these did the same work.

    None for the first runs themselves and for those that do their work.
    """
    own, its = (each.throughput.beside if each.throughput else None for each in (run, other))
    if not (own and its and own.compute == its.compute) or own.compute in (run.compute, other.compute):
        return None
    turns = _Turns(own, its)
    return SpeedUp(turns.log, math.hypot(turns.error(*pooled([own.ratios, its.ratios]), looks), FLOOR))


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that do the same work (`dlscale.config.compute`)."""

    runs: list[RunResult]
    speed: float  #: Mean samples/s.
    gain: SpeedUp | None  #: Speed-up over the plan's first run; None for that run and its like.


class SpeedUps:
    """The speed-ups between a plan's runs."""

    def __init__(self, runs: Sequence[RunResult]) -> None:
        self.runs = [run for run in runs if run.speed]
        self.first = runs[0]

    def over(self, run: RunResult, other: RunResult, looks: int = 1) -> SpeedUp | None:
        """Return how much faster a run is than another; None where either speed is unknown.

        With several `looks` the wider intervals hold together.
        """
        if not (run.speed and other.speed):
            return None
        if run is other:
            return SpeedUp(0.0, 0.0)
        if (turns := self._in_turns(run, other)) is not None:
            return SpeedUp(turns.log, math.hypot(turns.error(*self._opening, looks), self.floor))
        return measured_apart(run, other, self.apart, looks)

    @cached_property
    def _opening(self) -> tuple[float, int]:
        """Standard deviation of an opening's ratio over all runs, and its degrees of freedom."""
        return pooled([run.throughput.beside.ratios for run in self.runs if run.throughput and run.throughput.beside])

    @cached_property
    def floor(self) -> float:
        """Logarithm of the ratio, in turns, that the same work has beyond the spread of openings."""
        same = [found for one, other in self._alike(itself=True) if (found := self._in_turns(one, other))]
        return max([FLOOR, *(abs(turns.log) for turns in same if abs(turns.log) > turns.error(*self._opening))])

    @cached_property
    def apart(self) -> float:
        """Logarithm of the ratio that the same work has, measured apart."""
        same = [abs(math.log((run.speed or 1) / (other.speed or 1))) for run, other in self._alike()]
        return max([APART, *same])

    def _in_turns(self, run: RunResult, other: RunResult) -> _Turns | None:
        """Return the turns of a run with another, or of both with a third; None where there were none.

        For the first run and itself they are the run's with its copy.
        """
        own, its = (each.throughput.beside if each.throughput else None for each in (run, other))
        with_other = _Turns(own) if own and own.compute == other.compute else None
        with_run = _Turns(None, its) if its and its.compute == run.compute else None
        if other is self.first and with_other:
            return with_other
        if run is self.first and with_run:
            return with_run
        both = _Turns(own, its) if own and its and own.compute == its.compute else None
        return both or with_other or with_run

    def _alike(self, itself: bool = False) -> Iterator[tuple[RunResult, RunResult]]:
        combine = itertools.combinations_with_replacement if itself else itertools.combinations
        return ((run, other) for run, other in combine(self.runs, 2) if run.compute == other.compute)

    @cached_property
    def groups(self) -> list[Group]:
        alike: dict[str, list[RunResult]] = {}
        for run in self.runs:
            alike.setdefault(run.compute, []).append(run)
        return [self._group(runs) for runs in alike.values()]

    def _group(self, runs: list[RunResult]) -> Group:
        over = [] if self.first in runs else [gain for run in runs if (gain := self.over(run, self.first))]
        speed = statistics.fmean(run.speed or 0.0 for run in runs)
        return Group(runs, speed, SpeedUp.mean(over) if over else None)

    def fastest(self, groups: Sequence[Group]) -> tuple[Group, list[Group]]:
        """Return the fastest of some groups, and those equal to it within noise.

        It is the first run's where no other is faster beyond noise, by intervals that hold of all groups together.
        """
        looks = max(len(groups) - 1, 1)
        ranked = sorted(groups, key=lambda group: -(group.gain.log if group.gain else 0.0))
        if not self.first.speed:
            ranked = sorted(groups, key=lambda group: -group.speed)
        own = next((group for group in groups if self.first in group.runs), None)
        best = ranked[0]
        if own and best is not own and self._noise(best.runs, [self.first], looks):
            best = own
        like = [group for group in ranked if group is not best and self._noise(best.runs, group.runs, looks)]
        return best, like

    def _noise(self, runs: Sequence[RunResult], others: Sequence[RunResult], looks: int) -> bool:
        return SpeedUp.mean([gain for a in runs for b in others if (gain := self.over(a, b, looks))]).noise


# ---- over devices ------------------------------------------------------------------------------------

#: The kinds of plans that ask how runs scale.
SCALING = ("weak_scaling", "strong_scaling")

#: Settings in which the runs of a series may differ: geometry, batch, and those that a step's time does not depend on.
_OWN = ("batch_size", "label", "seed", "optimizer.lr", "geometry.nodes", "geometry.gpus_per_node", "parallel.sync")
_LATER = ("training", "schedule", "throughput", "profile", "tune")


@dataclass(frozen=True)
class Ratio:
    """A ratio of two measured rates, or 1 minus it, with its noise to either side."""

    value: float
    noise: float


@dataclass(frozen=True)
class Point:
    """A run at one number of devices."""

    run: RunResult
    base: RunResult  #: The run of the series with the fewest devices.
    twin: RunResult | None  #: The same computation without averaged gradients.

    @property
    def devices(self) -> int:
        return self.run.devices

    @property
    def batch(self) -> int:
        return int(self.run.setting("batch_size", 0))

    def rate(self, mode: str) -> float | None:
        trials = self.run.trials(mode)
        return trials.mean if trials else None

    def ideal(self, mode: str) -> float | None:
        """Return the samples/s of as many devices as fast as those of the base."""
        base = self.base.trials(mode)
        return base.mean * self.devices / self.base.devices if base else None

    def efficiency(self, mode: str) -> Ratio | None:
        """Return samples/s relative to the ideal, in weak and strong scaling."""
        own, base, ideal = self.run.trials(mode), self.base.trials(mode), self.ideal(mode)
        if not (own and base and ideal):
            return None
        value = own.mean / ideal
        return Ratio(value, value * between(base, own).error if self.run is not self.base else 0.0)

    def communication(self, mode: str) -> Ratio | None:
        """Return the share of a step's time that is communication: 1 - time of the twin / time."""
        return _share(self.run.trials(mode), self.twin.trials(mode) if self.twin else None, APART)

    @property
    def alone(self) -> Ratio | None:
        """The same of SYNTHETIC, from one process: without sums over ranks against with them."""
        return _share(self.run.trials("SYNTHETIC"), self.run.trials("alone"), 0.0)


@dataclass(frozen=True)
class Series:
    """Runs that differ in their number of devices alone, from few to many."""

    label: str
    batch: int  #: Samples a step: in weak scaling of each device (or those that share a model), else of all.
    points: list[Point]


def series(plan: PlanResult) -> list[Series]:
    """Return the plan's measured runs that average gradients, by batch and settings.

    A run's twin has the same devices, batch and settings but those of `parallel`, which do nothing there.
    """
    weak = plan.record.kind == "weak_scaling"
    shared: dict[str, dict[str, Any]] = {}
    found: dict[str, dict[int, RunResult]] = {}
    twins: dict[tuple[str, int], RunResult] = {}
    for run in (run for run in plan.runs if run.throughput):
        every = flat(run.settings).items()
        settings = {key: value for key, value in every if key not in _OWN and key.partition(".")[0] not in _LATER}
        if run.averages:
            key = _key(settings, _batch(run, weak))
            shared[key] = settings
            found.setdefault(key, {}).setdefault(run.devices, run)
        else:
            twins.setdefault((_twin_key(settings, _batch(run, weak)), run.devices), run)
    made = []
    for key, runs in found.items():
        base, settings = runs[min(runs)], shared[key]
        batch = _batch(base, weak)
        # What FSDP sends is no sum of gradients alone, and has no twin.
        alike = _twin_key(settings, batch) if settings.get("parallel.kind", "ddp") == "ddp" else ""
        points = [Point(run, base, twins.get((alike, devices))) for devices, run in sorted(runs.items())]
        others = [shared[other] for other, theirs in found.items() if _batch(theirs[min(theirs)], weak) == batch]
        made.append(Series(_label(batch, weak, settings, others), batch, points))
    return made


def _key(settings: dict[str, Any], batch: int) -> str:
    return json.dumps([batch, settings], sort_keys=True, default=str)


def _twin_key(settings: dict[str, Any], batch: int) -> str:
    return _key({key: value for key, value in settings.items() if not key.startswith("parallel.")}, batch)


def _batch(run: RunResult, weak: bool) -> int:
    """Return the samples a step that the plan keeps the same."""
    batch, sharing = int(run.setting("batch_size", 0)), run.setting("geometry.tp", 1) * run.setting("geometry.cp", 1)
    return int(batch * sharing // run.devices) if weak else batch


def _label(batch: int, weak: bool, settings: dict[str, Any], alike: Sequence[dict[str, Any]]) -> str:
    """Return a series' batch, and its settings that differ among those of that batch."""
    keys = [key for key in settings if len({str(other.get(key)) for other in alike}) > 1]
    said = [f"{key.rpartition('.')[2]} {'none' if settings[key] is None else settings[key]}" for key in keys]
    return "; ".join([f"{batch} samples {'a device' if weak else 'a step'}", *said])


def _share(together: Trials | None, apart: Trials | None, floor: float) -> Ratio | None:
    """Return 1 - time apart / time together, from rates of as many samples."""
    if not (together and apart and apart.mean):
        return None
    ratio = together.mean / apart.mean
    return Ratio(1 - ratio, ratio * between(apart, together, floor).error)
