"""What bounds a run, read from what was measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from dlscale.core.records import MODES, Throughput
from dlscale.core.text import number, percent
from dlscale.report.results import RunResult

#: What bounds a run that was disturbed.
UNKNOWN = "not known"


@dataclass(frozen=True)
class Bound:
    """What holds FULL back: `what` in two words, `key` for its colour, `why` in a sentence."""

    what: str
    key: str
    why: str


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
    if share > 1.1:
        what, key = UNKNOWN, "both"
        advice = "It cannot be faster than either: something else kept the machine busy meanwhile. Measure again."
    elif share < 0.8 and full < 0.9 * serial:
        advice = "That is less than one after the other would give: they compete for the same cores or memory."
    elif share < 0.8 and full < 1.1 * serial:
        advice = "That is what one after the other gives: they do not overlap."
    elif share < 0.8:
        advice = "They overlap only in part."
    why = (
        f"The loader alone delivers {number(io)} samples/s, the model alone takes {number(synthetic)}. "
        f"FULL reaches {percent(share)} of the slower one. {advice}"
    )
    return Bound(what, key, why)


def disturbance(runs: Sequence[RunResult]) -> str | None:
    """Return a warning if speeds contradict each other: something else kept the machine busy.

    Runs that differ in nothing but how data are loaded have the same SYNTHETIC; FULL is not faster than its parts.
    """
    alike: dict[str, list[tuple[float, str]]] = {}
    for run in runs:
        if trials := run.trials("SYNTHETIC"):
            other = ("loader", "label", "training", "schedule")
            rest = {key: value for key, value in run.settings.items() if key not in other}
            alike.setdefault(json.dumps(rest, sort_keys=True, default=str), []).append((trials.mean, run.label))
    for speeds in alike.values():
        (least, slow), (most, quick) = min(speeds), max(speeds)
        if most > 1.25 * least:
            return (
                f"The machine was not quiet. SYNTHETIC is the same computation in {slow} and in {quick}, and yet "
                f"{number(least)} and {number(most)} samples/s were measured: speed-ups of these runs mean little. "
                "Measure again with nothing else running."
            )
    for run in runs:
        if (found := bound(run.throughput)) and found.what == UNKNOWN:
            return (
                f"The machine was not quiet. FULL of {run.label} was faster than loading or computing alone, which "
                "cannot be: speed-ups of these runs mean little. Measure again with nothing else running."
            )
    return None
