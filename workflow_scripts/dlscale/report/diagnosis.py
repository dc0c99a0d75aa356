"""What bounds a run, read from what was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dlscale.core.records import MODES, Throughput, Trials
from dlscale.core.text import number, percent
from dlscale.report.results import RunResult

#: What bounds a run that was disturbed.
UNKNOWN = "not known"

#: A ratio of speeds nearer to 1 is noise, however quiet the trials were: two processes differ by as much.
NOISE = 0.05


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
    means = [trials.mean for mode in MODES if throughput and (trials := throughput.mode(mode))]
    if len(means) < len(MODES) or not all(means):
        return None
    io, synthetic, full = means
    if io < 0.8 * synthetic:
        what, key, advice = "data loading", "io", "A faster loader would help."
    elif synthetic < 0.8 * io:
        what, key, advice = "computation", "synthetic", "A faster loader would not help."
    else:
        what, key, advice = "both alike", "both", "Both would have to be faster."
    share = full / min(io, synthetic)
    serial = 1 / (1 / io + 1 / synthetic)  # one after the other: nothing overlaps
    loading = None
    if share > 1.1:
        what, key = UNKNOWN, "both"
        advice = "It cannot be faster than either: something else kept the machine busy meanwhile. Measure again."
    elif share < 0.8 and full < 0.9 * serial:
        advice = "That is less than one after the other would give: they compete for the same cores or memory."
    elif share < 0.9 and 0.9 * serial <= full <= 1.1 * serial < 0.99 * min(io, synthetic):
        loading = serial / io
        advice = "That is what one after the other gives: they do not overlap."
    elif share < 0.8:
        advice = "They overlap only in part."
    reaches = f"{percent(share)} of the slower one" if share <= 1 else "the slower one, within the noise"
    why = (
        f"The loader alone delivers {number(io)} samples/s, the model alone takes {number(synthetic)}. "
        f"FULL reaches {reaches}. {advice}"
    )
    return Bound(what, key, why, share, loading)


def gain(before: RunResult, run: RunResult) -> str | None:
    """Return how much faster a ladder's rung is than the one before, and why: what bound that one, and what changed.

    None unless all three modes of both were measured.
    """
    was, now = bound(before.throughput), bound(run.throughput)
    if not (was and now and before.throughput and run.throughput):
        return None
    ratios = {mode: faster(_trials(before.throughput, mode), _trials(run.throughput, mode)) for mode in MODES}
    full = number(_ratio(before, run, "FULL"))
    if UNKNOWN in (was.what, now.what):
        return f"{full}× as fast as {before.label}; one of the two was disturbed, so that means little."
    alike = f"As fast as {before.label}, within the noise ({full}×)."
    speed_up = alike if ratios["FULL"] == 1 else f"{full}× as fast as {before.label}."
    if was.loading:
        held = f"That one loads and computes as if in turn, and {percent(was.loading)} of its time is loading"
    else:
        held = f"That one is bound by {'loading and computation alike' if was.key == 'both' else was.what}"
    changed = []
    for mode, what in (("IO", "loading"), ("SYNTHETIC", "computing")):
        noise = ", within the noise," if ratios[mode] == 1 else ""
        if not noise or was.loading or was.key in (mode.lower(), "both"):
            changed.append(f"{what} alone is {number(_ratio(before, run, mode))}× as fast{noise}")
    overlap, overlap_now = min(was.share, 1.0), min(now.share, 1.0)
    overlaps = abs(overlap_now - overlap) > 0.1
    if overlaps:
        changed.append(f"FULL reaches {percent(overlap_now)} of the slower one instead of {percent(overlap)}")
    here = "; ".join(each.rstrip(",") for each in changed)
    holding = ("IO", "SYNTHETIC") if was.loading or was.key == "both" else (was.key.upper(),)
    moved = overlaps or any((ratios[mode] - 1) * (ratios["FULL"] - 1) > 0 for mode in holding)
    doubt = "" if moved or ratios["FULL"] == 1 else " That does not explain it: measure again on a quiet machine."
    return f"{speed_up} {held}. Here {here}.{doubt}"


def _ratio(before: RunResult, run: RunResult, mode: str) -> float:
    assert before.throughput and run.throughput
    return _trials(run.throughput, mode).mean / _trials(before.throughput, mode).mean


def _trials(throughput: Throughput, mode: str) -> Trials:
    trials = throughput.mode(mode)
    assert trials is not None  # `bound` has seen it
    return trials


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
