"""What a profiler costs, told from steps of one process: plain ones, profiled ones, plain ones."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from dlscale.core.noise import standard_errors
from dlscale.measure.profilers.records import Overhead

#: Standard errors of a median over those of a mean, of normal values.
OF_MEDIAN = math.sqrt(math.pi / 2)


def overhead(before: Sequence[float], profiled: Sequence[float], after: Sequence[float]) -> Overhead:
    """Return how many times as long a step takes with a profiler, from the seconds of steps.

    The ratio is that of medians, one of which is the mean of those before and after: what drifts evenly falls out. The
    noise is that of the steps' scatter, and half of what the plain steps before and after differ by. Other programs
    that are at work while the profiler is, and only then, are not in it.
    """
    plain = [statistics.median(before), statistics.median(after)]
    usual = statistics.fmean(plain)
    ratio = statistics.median(profiled) / usual
    fewest = min(map(len, (before, profiled, after)))
    if fewest < 2:
        return Overhead(ratio=ratio)
    errors = [OF_MEDIAN * statistics.stdev(each) / math.sqrt(len(each)) for each in (before, profiled, after)]
    scatter = math.hypot(errors[1], ratio * errors[0] / 2, ratio * errors[2] / 2) / usual
    drift = ratio * abs(plain[0] - plain[1]) / 2 / usual
    # No profiler makes a step faster: where it seems so, that much at least is noise.
    return Overhead(ratio=ratio, noise=max(standard_errors(fewest) * scatter + drift, 1 - ratio))
