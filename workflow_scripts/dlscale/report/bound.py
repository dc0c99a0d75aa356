"""The limit of a run's training speed: loading, computing, or missing overlap."""

from __future__ import annotations

from dataclasses import dataclass

from dlscale.core.text import number, percent
from dlscale.measure.records import MODES, Outside, Throughput
from dlscale.report.speedup import spread
from dlscale.results import UNKNOWN

#: Fraction by which FULL may exceed the slower of IO and SYNTHETIC by chance, because the three modes are timed at
#: different times. A larger spread of the trials raises this limit.
MAX_EXCESS_FRACTION = 0.1


@dataclass(frozen=True)
class Bound:
    """The limit of training speed (FULL)."""

    what: str  #: Name of the limit, in a few words.
    key: str  #: Kind of the limit, and its CSS class on the page: `io`, `synthetic` or `both`.
    why: str  #: Reason, in sentences.
    share: float  #: Rate of FULL / lower rate of IO and SYNTHETIC; 1 for an external program.
    loading: float | None  #: Fraction of the time spent loading; None unless loading and computing take turns.


def bound(throughput: Throughput | None) -> Bound | None:
    """Return the limit of a run's speed; None if the limit was not measured.

    A run of a study is judged by its three rates, which must all be known. FULL cannot exceed the slower of loading
    alone (IO) and computing alone (SYNTHETIC). FULL divided by the slower rate shows how well loading and computing
    overlap. An external program is judged by its wait for batches instead.
    """
    if throughput and throughput.outside:
        return _bound_program(throughput.outside)
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
        what, key, advice = "loading and computing", "both", "Only making both faster would help."
    share = full / slower.mean
    serial = 1 / (1 / io + 1 / synthetic)  # the rate if loading and computing take turns
    loading = None
    reaches = f"{percent(share)} of the slower rate"
    if full - slower.mean > max(
        MAX_EXCESS_FRACTION * slower.mean, *(spread(each) * each.mean for each in (slower, modes[2]))
    ):
        what, key, reaches = (
            UNKNOWN,
            "both",
            f"{number(full)} samples/s, which exceeds the slower rate by more than noise",
        )
        advice = (
            "Training cannot be faster than the slower of loading and computing, so all three rates are unreliable. "
            "Measure again on an idle machine."
        )
    elif share > 1:
        reaches = (
            f"{number(full)} samples/s, the rate of {'loading' if slower is modes[0] else 'computing'} within noise"
        )
    elif share < 0.8 and full < 0.9 * serial:
        advice = "Loading and computing compete for the same cores or memory. Taking turns would be faster."
    elif share < 0.9 and 0.9 * serial <= full <= 1.1 * serial < 0.99 * slower.mean:
        loading = serial / io
        what, key = "missing overlap", "both"
        advice = "Loading and computing take turns instead of overlapping."
    elif share < 0.8:
        advice = "Loading and computing overlap only partly."
    alone = f"Loading alone reaches {number(io)} samples/s, computing alone {number(synthetic)}."
    return Bound(what, key, f"{alone} Training reaches {reaches}. {advice}", share, loading)


def _bound_program(program: Outside) -> Bound | None:
    """Return the limit of an external program, from its wait for batches; None if this wait is unknown."""
    if program.waiting is None:
        return None
    share, rest = percent(program.waiting), percent(1 - program.waiting)
    what, key = "loading and computing", "both"
    if program.waiting >= 0.5:
        what, key = "data loading", "io"
    elif program.waiting <= 0.2:
        what, key = "computation", "synthetic"
    why = f"Waiting for data: {share} of each step. Computing and everything else: {rest}."
    return Bound(what, key, why, 1.0, None)
