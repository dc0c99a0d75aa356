"""Statistics of noisy measurements: intervals of means and ratios, and successive halving."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

#: Confidence level of intervals.
CONFIDENCE = 0.95

#: Fraction of the values that is cut off at each end, to limit the effect of a short foreign load.
TRIM = 0.2


def standard_errors(samples: float, looks: int = 1) -> float:
    """Return the half-width of a mean's interval in standard errors (Student's t).

    It is infinite for one sample.

    With `looks` intervals, all of them together are correct with a probability of 95 % (Bonferroni).
    """
    from scipy.special import stdtrit

    return float(stdtrit(samples - 1, 1 - (1 - CONFIDENCE) / (2 * looks))) if samples > 1 else math.inf


def reach(spread: float, samples: int, looks: int = 1) -> float:
    """Return the half-width of a mean's interval from the standard deviation of the samples."""
    return standard_errors(samples, looks) * spread / math.sqrt(samples) if samples > 1 else math.inf


def pooled(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Return the pooled standard deviation within groups, and its degrees of freedom."""
    freedom = sum(len(group) - 1 for group in groups)
    squares = sum((value - statistics.fmean(group)) ** 2 for group in groups for value in group)
    return (math.sqrt(squares / freedom) if freedom else 0.0), freedom


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the trimmed mean and the half-width of its 95 % interval.

    The half-width is infinite for one value.

    A fifth of the values is cut off at each end, since other programs distort a few measurements by much. The error is
    that of the Winsorized values (Tukey and McLaughlin 1963, Sankhya A 25, 331). Fewer than five values are not cut,
    which gives Student's interval.
    """
    ordered, cut = sorted(values), int(TRIM * len(values))
    kept = ordered[cut : len(ordered) - cut]
    centre = statistics.fmean(kept)
    if len(kept) < 2:
        return centre, math.inf
    whole = [kept[0]] * cut + kept + [kept[-1]] * cut
    error = statistics.stdev(whole) * math.sqrt(len(whole)) / len(kept)
    # Equal values may differ by rounding.
    return centre, standard_errors(len(kept)) * error if error > 1e-12 * abs(centre) else 0.0


def ratio_interval(rounds: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return the ratio of two quantities and the ends of its 95 % interval.

    The quantities were measured alternately (paired timing). The interval is computed by `interval` from the logarithms
    of the ratios of all rounds.
    """
    centre, reach = interval([math.log(first / second) for first, second in rounds])
    return math.exp(centre), math.exp(centre - reach), math.exp(centre + reach)


def halved(count: int, factor: float) -> list[int]:
    """Return the sizes of the rungs of successive halving.

    They are `count`, `count / factor`, and so on. Each rung has the best trials of the previous rung and is `factor`
    times as long (Jamieson and Talwalkar 2016, arXiv:1502.07943, algorithm 1).
    """
    sizes = [count]
    while sizes[-1] >= factor:
        sizes.append(int(sizes[-1] / factor))
    return sizes
