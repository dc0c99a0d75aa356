"""Which of several settings is the fastest, where every measurement is noisy: successive halving, then a duel.

Successive halving (Jamieson and Talwalkar 2016, arXiv:1502.07943, algorithm 1) measures all settings for a short time,
keeps the best share of them, and measures these for longer, so that every rung takes the same time in all. What it
finds is the luckiest of many as much as the best; hence the duel, in which that setting and the run's own are measured
anew.

A machine drifts, by more than many settings differ. So settings are measured in turns, and every second turn goes
backwards: whatever is the same for neighbours, and whatever grows steadily, cancels out of their ratios.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

#: From a setting's number and the seconds to measure for, to its samples/s; None where it cannot be measured.
Measure = Callable[[int, float], float | None]

#: Samples/s of settings, turn by turn.
Rates = dict[int, list[float]]

#: Of each rung; even, so that what grows steadily cancels out.
TURNS = 2

#: Of the duel's interval.
CONFIDENCE = 0.95


def in_turns(numbers: Sequence[int], measure: Measure, turns: int, seconds: float) -> Rates:
    """Measure settings so many times, each second time in the opposite order; one that fails drops out."""
    rates: Rates = {number: [] for number in numbers}
    for turn in range(turns):
        for number in list(rates) if turn % 2 == 0 else reversed(list(rates)):
            rate = measure(number, seconds)
            if rate is None:
                del rates[number]
            else:
                rates[number].append(rate)
    return rates


def rungs(others: int, keep: float) -> list[int]:
    """Return how many settings beside the run's own each rung measures; one that is alone is not measured."""
    counts = []
    while others > 1:
        counts.append(others)
        others = max(1, int(others * keep))
    return counts


def halve(count: int, measure: Measure, seconds: float, keep: float) -> list[Rates]:
    """Return what each rung measured of settings 0 … `count` - 1, in about so many seconds in all.

    Setting 0, the run's own, goes through all rungs; of the others the best share `keep` of each goes on. The last
    rung's ranking ends the search: `finalist`. Within a turn they come in the order of their numbers.
    """
    others, found = list(range(1, count)), list[Rates]()
    planned = rungs(len(others), keep)
    for most in planned:
        if len(others) > 1:  # some may have failed
            shared = seconds / len(planned) / TURNS / (most + 1)
            found.append(in_turns([0, *sorted(others[:most])], measure, TURNS, shared))
            others = ranked(found[-1])
    return found


def ranked(rates: Rates) -> list[int]:
    """Return the settings but the run's own, the fastest first, by the geometric mean of their samples/s."""
    return sorted((number for number in rates if number), key=lambda number: -statistics.geometric_mean(rates[number]))


def finalist(count: int, found: Sequence[Rates]) -> int | None:
    """Return the setting that meets the run's own in the duel; None if no other is left."""
    if not found:
        return 1 if count == 2 else None
    return next(iter(ranked(found[-1])), None)


def duel(challenger: int, measure: Measure, seconds: float, rounds: int) -> list[tuple[float, float]] | None:
    """Return samples/s of the challenger and of setting 0 in each round; None if the challenger fails."""
    rates = in_turns([challenger, 0], measure, rounds, seconds / rounds / 2)
    return list(zip(rates[challenger], rates[0], strict=True)) if challenger in rates else None


def interval(rounds: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return the geometric mean of the ratios in at least two rounds, and the ends of its 95 % interval.

    The logarithms of the ratios are taken as normal (Student 1908). Two settings alike then have an interval above 1 in
    one of forty duels.
    """
    from scipy.special import stdtrit

    logs = [math.log(first / second) for first, second in rounds]
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    half = float(stdtrit(len(logs) - 1, (1 + CONFIDENCE) / 2)) * error
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)
