"""How much faster one run of a plan is than another, and how sure that is.

Runs of one process were timed in turn with their plan's first run (`dlscale.measure.turns`), several times: how much
these ratios vary from one opening of both to the next is the machine's, and is taken from all runs of the plan
together. What was measured apart has the spread of its trials, and whatever the machine did between the two. To either
comes how much two measurements of the same work were found to differ: where it is timed for long enough, the first run
is timed beside a copy of itself, and other runs may do the same work, too.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from dlscale.core.noise import standard_errors
from dlscale.core.text import number
from dlscale.measure.records import Beside
from dlscale.report.diagnosis import NOISE
from dlscale.report.results import RunResult

#: Nothing less is told apart, however alike a plan's openings were: a logarithm of a ratio. All openings of a run are
#: copies of one process: where both runs did the same, in 15 measurements, the ratio varied by 0.7 % (one standard
#: deviation), of which 0.5 % is what openings vary by, and it was 1.8 % at most.
FLOOR = 0.015


@dataclass(frozen=True)
class SpeedUp:
    """The ratio of two speeds as its natural logarithm, which makes `twice` and `half` alike."""

    log: float
    error: float  #: How far its 95 % interval reaches to each side; infinite where no spread is known.

    @property
    def ratio(self) -> float:
        return math.exp(self.log)

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        return math.exp(self.log - self.error)

    @property
    def high(self) -> float:
        """The upper end; infinite where no spread is known."""
        return math.exp(self.log + self.error) if math.isfinite(self.error) else math.inf

    @property
    def noise(self) -> bool:
        """Whether the two may be equally fast."""
        return abs(self.log) <= self.error

    @property
    def around(self) -> str:
        """How sure it is, in words."""
        if not math.isfinite(self.error):
            return "of single trials, which may differ by anything"
        if self.high - self.ratio > 2 * (self.ratio - self.low):  # "±" would have it reach below what it excludes
            return f"({number(self.low)} to {number(self.high)})" + ", within noise" * self.noise
        return f"± {number((self.high - self.low) / 2, 2)}" + ", within noise" * self.noise

    @property
    def words(self) -> str:
        """The ratio, and how sure it is."""
        return f"{number(self.ratio)}× {self.around}"

    @classmethod
    def mean(cls, found: Sequence[SpeedUp]) -> SpeedUp:
        """Return the geometric mean of several, as uncertain as one of them: they may share what disturbed them."""
        return cls(*(statistics.fmean(getattr(each, key) for each in found) for key in ("log", "error")))


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that do the same work (`dlscale.config.compute`), and so are equally fast."""

    runs: list[RunResult]
    speed: float  #: Mean samples/s.
    gain: SpeedUp | None  #: Over the plan's first run; None for that run and its like.


class SpeedUps:
    """The speeds of a plan's runs beside each other."""

    def __init__(self, runs: Sequence[RunResult]) -> None:
        self.runs = [run for run in runs if run.speed]
        self.first = runs[0]

    def over_first(self, run: RunResult) -> SpeedUp | None:
        """Return how much faster a run is than the plan's first one; None where either speed is unknown."""
        return self.over(run, self.first)

    def over(self, run: RunResult, other: RunResult, looks: int = 1) -> SpeedUp | None:
        """Return how much faster a run is than another; None where either speed is unknown.

        Whoever picks among so many `looks` needs wider intervals, which hold together.
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
        """Standard deviation of one opening's ratio, and its degrees of freedom: of all runs of the plan together."""
        return pooled([run.throughput.beside.ratios for run in self.runs if run.throughput and run.throughput.beside])

    @cached_property
    def floor(self) -> float:
        """Logarithm of the ratio, in turns, that two measurements of the same work may have beyond that."""
        same = [found for one, other in self._alike(itself=True) if (found := self._in_turns(one, other))]
        return max([FLOOR, *(abs(turns.log) for turns in same if abs(turns.log) > turns.error(*self._opening))])

    def _in_turns(self, run: RunResult, other: RunResult) -> _Turns | None:
        """Return how much faster a run is than another by turns with it, or with a third; None where there were none.

        Of the first run and itself it is that of the run and its copy.
        """
        own, its = (each.throughput.beside if each.throughput else None for each in (run, other))
        with_other = _Turns(own) if own and own.compute == other.compute else None
        with_run = _Turns(None, its) if its and its.compute == run.compute else None
        if other is self.first and with_other:
            return with_other
        if run is self.first and with_run:
            return with_run
        if own and its and own.compute == its.compute:
            return _Turns(own, its)
        return with_other or with_run

    @cached_property
    def apart(self) -> float:
        """The same of two measurements that were made one after the other."""
        same = [abs(math.log((run.speed or 1) / (other.speed or 1))) for run, other in self._alike()]
        return max([math.log1p(NOISE), *same])

    def _alike(self, itself: bool = False) -> Iterator[tuple[RunResult, RunResult]]:
        combine = itertools.combinations_with_replacement if itself else itertools.combinations
        for run, other in combine(self.runs, 2):
            if run.compute == other.compute:
                yield run, other

    @cached_property
    def groups(self) -> list[Group]:
        """The runs by the work that they do, in the plan's order."""
        alike: dict[str, list[RunResult]] = {}
        for run in self.runs:
            alike.setdefault(run.compute, []).append(run)
        return [self._group(runs) for runs in alike.values()]

    def _group(self, runs: list[RunResult]) -> Group:
        over = [] if self.first in runs else [gain for run in runs if (gain := self.over_first(run))]
        speed = statistics.fmean(run.speed or 0.0 for run in runs)
        return Group(runs, speed, SpeedUp.mean(over) if over else None)

    def fastest(self, groups: Sequence[Group]) -> tuple[Group, list[Group]]:
        """Return the fastest of some groups, and those that noise does not tell from it.

        The fastest is the first run's where no other is faster beyond noise: the more are looked at, the faster one
        seems by chance, so that intervals here are those that hold of all groups together.
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


def pooled(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Return the standard deviation within groups, of all of them together, and its degrees of freedom."""
    freedom = sum(len(group) - 1 for group in groups)
    squares = sum((value - statistics.fmean(group)) ** 2 for group in groups for value in group)
    return (math.sqrt(squares / freedom) if freedom else 0.0), freedom


@dataclass(frozen=True)
class _Turns:
    """The turns of two runs with a third; None of these is the third itself."""

    own: Beside | None
    its: Beside | None = None

    @property
    def log(self) -> float:
        """Logarithm of their ratio."""
        own, its = (statistics.fmean(each.ratios) if each else 0.0 for each in (self.own, self.its))
        return own - its

    def error(self, spread: float, freedom: int, looks: int = 1) -> float:
        """Return how far the interval of that reaches, given the standard deviation of an opening's ratio.

        That of all runs is known better than one run's own; a run that was disturbed more than the others has its own.
        """
        if not freedom:
            return math.inf
        known = [each.ratios for each in (self.own, self.its) if each]
        variance = sum(max(spread, pooled([ratios])[0]) ** 2 / len(ratios) for ratios in known)
        return standard_errors(freedom + 1, looks) * math.sqrt(variance)


def measured_apart(
    run: RunResult, other: RunResult, floor: float = math.log1p(NOISE), looks: int = 1
) -> SpeedUp | None:
    """Return the ratio of two speeds that were measured one after the other; None where either is unknown.

    To the spread of the trials comes `floor`, what two measurements of the same work may differ by, as a logarithm.
    """
    if not (run.speed and other.speed):
        return None
    errors = (trials_error(each, looks) for each in (run, other))
    return SpeedUp(math.log(run.speed / other.speed), math.hypot(*errors, floor))


def relative_to_first(run: RunResult, other: RunResult) -> SpeedUp | None:
    """Return the ratio of how much faster two runs were than their plans' first ones, if these did the same work.

    None of the first runs themselves, and of those that do their work: these were timed with a copy.
    """
    own, its = (each.throughput.beside if each.throughput else None for each in (run, other))
    if not (own and its and own.compute == its.compute) or own.compute in (run.compute, other.compute):
        return None
    turns = _Turns(own, its)
    return SpeedUp(turns.log, math.hypot(turns.error(*pooled([own.ratios, its.ratios])), FLOOR))


def trials_error(run: RunResult, looks: int = 1) -> float:
    """Return how far the 95 % interval of a run's mean speed reaches, relative to it, by the spread of its trials.

    As wide as so many `looks` need it to hold together.
    """
    trials = run.trials("FULL")
    if trials:
        count, spread = len(trials.trial_time), trials.std / trials.mean
    else:
        speeds = [epoch.samples_per_second for epoch in run.timed[1:]]
        count, spread = len(speeds), statistics.stdev(speeds) / statistics.fmean(speeds) if len(speeds) > 1 else 0.0
    return standard_errors(count, looks) * spread / math.sqrt(count) if count > 1 else math.inf
