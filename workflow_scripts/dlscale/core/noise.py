"""Statistics of noisy measurements: intervals of means and ratios, and successive halving."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

#: Confidence level of intervals.
CONFIDENCE = 0.95

#: Fraction of the sorted values that is cut off at each end, to limit the effect of short loads by other programs.
TRIM = 0.2


def standard_errors(samples: float, looks: int = 1) -> float:
    """Return the half-width of a mean's 95 % interval in standard errors (Student's t).

    The half-width is infinite for one sample. `looks` is the number of comparisons. With several comparisons, each
    interval is wider, so that all intervals are correct with a probability of at least 95 % (Bonferroni).
    """
    from scipy.special import stdtrit

    return float(stdtrit(samples - 1, 1 - (1 - CONFIDENCE) / (2 * looks))) if samples > 1 else math.inf


def reach(spread: float, samples: int, looks: int = 1) -> float:
    """Return the half-width of a mean's 95 % interval; `spread` is the standard deviation of the samples."""
    return standard_errors(samples, looks) * spread / math.sqrt(samples) if samples > 1 else math.inf


def pooled(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Return the pooled standard deviation within groups, and the number of degrees of freedom."""
    freedom = sum(len(group) - 1 for group in groups)
    squares = sum((value - statistics.fmean(group)) ** 2 for group in groups for value in group)
    return (math.sqrt(squares / freedom) if freedom else 0.0), freedom


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the trimmed mean and the half-width of its 95 % interval.

    The half-width is infinite for one value.

    A fifth of the values is cut off at each end, because other programs strongly distort a few measurements. The
    standard error is computed from the Winsorized values (Tukey and McLaughlin 1963, Sankhya A 25, 331). With fewer
    than five values, nothing is cut off and the interval is Student's.
    """
    ordered, cut = sorted(values), int(TRIM * len(values))
    kept = ordered[cut : len(ordered) - cut]
    centre = statistics.fmean(kept)
    if len(kept) < 2:
        return centre, math.inf
    whole = [kept[0]] * cut + kept + [kept[-1]] * cut
    error = statistics.stdev(whole) * math.sqrt(len(whole)) / len(kept)
    # A tiny error counts as zero, because rounding makes equal values differ.
    return centre, standard_errors(len(kept)) * error if error > 1e-12 * abs(centre) else 0.0


def halved(count: int, factor: float) -> list[int]:
    """Return the sizes of the rungs of successive halving.

    The sizes are `count`, `count / factor`, and so on, rounded down. Each rung has the best trials of the previous rung
    and trains `factor` times as long (Jamieson and Talwalkar 2016, arXiv:1502.07943, algorithm 1).
    """
    sizes = [count]
    while sizes[-1] >= factor:
        sizes.append(int(sizes[-1] / factor))
    return sizes
