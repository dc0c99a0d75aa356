"""How much of a difference may be chance."""

from __future__ import annotations

import math

#: Of intervals.
CONFIDENCE = 0.95


def standard_errors(samples: float) -> float:
    """Return how many standard errors the interval of a mean of so many samples reaches to each side (Student's t).

    Infinite for one sample, of which no spread is known.
    """
    from scipy.special import stdtrit

    return float(stdtrit(samples - 1, (1 + CONFIDENCE) / 2)) if samples > 1 else math.inf
