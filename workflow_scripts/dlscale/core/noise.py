"""Statistics of noisy measurements: intervals of means and ratios, and successive halving."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

#: Of intervals.
CONFIDENCE = 0.95

#: Share of the values that is cut off at each end, so that a burst of other programs does not decide.
TRIM = 0.2


def standard_errors(samples: float, looks: int = 1) -> float:
    """Return the half-width of a mean's interval in standard errors (Student's t); infinite for one sample.

    `looks` intervals together hold in 95 % (Bonferroni).
    """
    from scipy.special import stdtrit

    return float(stdtrit(samples - 1, 1 - (1 - CONFIDENCE) / (2 * looks))) if samples > 1 else math.inf


def reach(spread: float, samples: int, looks: int = 1) -> float:
    """Return the half-width of a mean's interval, from the samples' standard deviation."""
    return standard_errors(samples, looks) * spread / math.sqrt(samples) if samples > 1 else math.inf


def pooled(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Return the pooled standard deviation within groups, and its degrees of freedom."""
    freedom = sum(len(group) - 1 for group in groups)
    squares = sum((value - statistics.fmean(group)) ** 2 for group in groups for value in group)
    return (math.sqrt(squares / freedom) if freedom else 0.0), freedom


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the trimmed mean, and the half-width of its 95 % interval; infinite for one value.

    A fifth is cut off at each end, and the error is that of the Winsorized values (Tukey and McLaughlin 1963, Sankhya A
    25, 331): other programs distort a few measurements by much. Fewer than five values are not cut: Student's interval.
    """
    ordered, cut = sorted(values), int(TRIM * len(values))
    kept = ordered[cut : len(ordered) - cut]
    centre = statistics.fmean(kept)
    if len(kept) < 2:
        return centre, math.inf
    whole = [kept[0]] * cut + kept + [kept[-1]] * cut
    error = statistics.stdev(whole) * math.sqrt(len(whole)) / len(kept)
    # Equal values differ by how they are rounded.
    return centre, standard_errors(len(kept)) * error if error > 1e-12 * abs(centre) else 0.0


def ratio_interval(rounds: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return the ratio of two quantities, measured in turn, and its 95 % interval.

    It is `interval` of the ratios' logarithms.
    """
    centre, reach = interval([math.log(first / second) for first, second in rounds])
    return math.exp(centre), math.exp(centre - reach), math.exp(centre + reach)


def halved(count: int, factor: float) -> list[int]:
    """Return the sizes of the rounds of successive halving: `count`, a `factor`-th of it, and so on.

    Each round has the best of the one before, `factor` times as long (Jamieson and Talwalkar 2016, arXiv:1502.07943,
    algorithm 1).
    """
    sizes = [count]
    while sizes[-1] >= factor:
        sizes.append(int(sizes[-1] / factor))
    return sizes
