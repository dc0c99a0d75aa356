"""What chance makes of measurements: intervals of means and of ratios, and successive halving."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

#: Of intervals.
CONFIDENCE = 0.95

#: Share of the values that is cut off at each end, so that a burst of other programs does not decide.
TRIM = 0.2


def standard_errors(samples: float, looks: int = 1) -> float:
    """Return how many standard errors the interval of a mean of so many samples reaches to each side (Student's t).

    Infinite for one sample, of which no spread is known. Of so many `looks` all intervals together hold what they
    should in 95 % (Bonferroni).
    """
    from scipy.special import stdtrit

    return float(stdtrit(samples - 1, 1 - (1 - CONFIDENCE) / (2 * looks))) if samples > 1 else math.inf


def reach(spread: float, samples: int, looks: int = 1) -> float:
    """Return how far the interval of a mean of so many samples reaches to each side, given their standard deviation."""
    return standard_errors(samples, looks) * spread / math.sqrt(samples) if samples > 1 else math.inf


def pooled(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Return the standard deviation within groups, of all of them together, and its degrees of freedom."""
    freedom = sum(len(group) - 1 for group in groups)
    squares = sum((value - statistics.fmean(group)) ** 2 for group in groups for value in group)
    return (math.sqrt(squares / freedom) if freedom else 0.0), freedom


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the trimmed mean of values, and how far its 95 % interval reaches to each side.

    A fifth of the values is cut off at each end, and the error is that of the Winsorized values (Tukey and McLaughlin
    1963, Sankhya A 25, 331): other programs make a few of many measurements wrong by much. Of fewer than five values
    none is cut, and the interval is Student's. One value has an infinite one.
    """
    ordered, cut = sorted(values), int(TRIM * len(values))
    kept = ordered[cut : len(ordered) - cut]
    centre = statistics.fmean(kept)
    if len(kept) < 2:
        return centre, math.inf
    whole = [kept[0]] * cut + kept + [kept[-1]] * cut
    error = statistics.stdev(whole) * math.sqrt(len(whole)) / len(kept)
    return centre, standard_errors(len(kept)) * error


def ratio_interval(rounds: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return how many times as great the first of two numbers is, from measurements of both in turn, and its interval.

    The logarithms of the ratios are what `interval` is of: two that are alike have one above 1 in one of forty cases.
    """
    centre, reach = interval([math.log(first / second) for first, second in rounds])
    return math.exp(centre), math.exp(centre - reach), math.exp(centre + reach)


def halved(count: int, factor: float) -> list[int]:
    """Return how many of so many each rung of successive halving has: all, one in `factor`, one in that of these, …

    Each rung is of the best of the one before, and measures them `factor` times as long (Jamieson and Talwalkar 2016,
    arXiv:1502.07943, algorithm 1).
    """
    sizes = [count]
    while sizes[-1] >= factor:
        sizes.append(int(sizes[-1] / factor))
    return sizes
