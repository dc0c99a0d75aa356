"""What bounds a run, read from what was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dlscale.core.noise import standard_errors
from dlscale.core.text import number, percent
from dlscale.measure.records import MODES, Throughput, Trials

#: What bounds a run that was disturbed.
UNKNOWN = "not known"

#: A ratio of speeds nearer to 1 is noise, however quiet the trials were: two processes differ by as much.
NOISE = 0.05

#: FULL may seem faster than its slower part by this share, however quiet the trials were: they were timed apart.
ABOVE = 0.1


@dataclass(frozen=True)
class Bound:
    """What holds FULL back: `what` in two words, `key` for its colour, `why` in a sentence."""

    what: str
    key: str
    why: str
    share: float  #: What FULL reaches of the slower of loading alone and computing alone.
    loading: float | None  #: Share of the time that goes into loading, where it and computing take turns.


def bound(throughput: Throughput | None) -> Bound | None:
    """Read a throughput triplet; None unless all three are there.

    FULL cannot be faster than the slower of loading alone (IO) and computing alone (SYNTHETIC). What
    it reaches of that says how well the two overlap.
    """
    modes = [trials for mode in MODES if throughput and (trials := throughput.mode(mode))]
    if len(modes) < len(MODES) or not all(trials.mean for trials in modes):
        return None
    io, synthetic, full = (trials.mean for trials in modes)
    slower = min(modes[:2], key=lambda trials: trials.mean)
    if io < 0.8 * synthetic:
        what, key, advice = "data loading", "io", "A faster loader would help."
    elif synthetic < 0.8 * io:
        what, key, advice = "computation", "synthetic", "A faster loader would not help."
    else:
        what, key, advice = "both alike", "both", "Both would have to be faster."
    share = full / min(io, synthetic)
    serial = 1 / (1 / io + 1 / synthetic)  # one after the other: nothing overlaps
    loading = None
    reaches = f"{percent(share)} of the slower one" if share <= 1 else "the slower one, within the noise"
    if full - slower.mean > max(ABOVE * slower.mean, math.hypot(_error(slower), _error(modes[2]))):
        what, key, reaches = UNKNOWN, "both", f"{number(full)}, beyond noise"
        advice = (
            "It cannot be faster than its slower part: the machine was disturbed, so none of these rates hold. "
            "Measure again."
        )
    elif share < 0.8 and full < 0.9 * serial:
        advice = "That is less than one after the other would give: they compete for the same cores or memory."
    elif share < 0.9 and 0.9 * serial <= full <= 1.1 * serial < 0.99 * min(io, synthetic):
        loading = serial / io
        advice = "That is what one after the other gives: they do not overlap."
    elif share < 0.8:
        advice = "They overlap only in part."
    why = (
        f"The loader alone delivers {number(io)} samples/s, the model alone takes {number(synthetic)}. "
        f"FULL reaches {reaches}. {advice}"
    )
    return Bound(what, key, why, share, loading)


def _error(trials: Trials) -> float:
    """Return how far the 95 % interval of a mean rate reaches to each side; 0 where no spread is known."""
    count = len(trials.trial_time)
    return standard_errors(count) * trials.std / math.sqrt(count) if count > 1 else 0.0


def uncertainty(before: Trials, after: Trials, within: bool = False) -> float:
    """Return how far noise may move the ratio of two speeds, relative to it.

    Two standard errors of the ratio, from the spread of the trials, but not less than `NOISE`, unless both were
    measured `within` one process.
    """
    errors = [trials.std / trials.mean / math.sqrt(max(len(trials.trial_time), 1)) for trials in (before, after)]
    return max(0.0 if within else NOISE, 2 * math.hypot(*errors))


def faster(before: Trials, after: Trials) -> float:
    """Return the ratio of two speeds; exactly 1 where they differ by less than noise (`uncertainty`)."""
    ratio = after.mean / before.mean
    return ratio if abs(ratio - 1) > uncertainty(before, after) else 1.0
