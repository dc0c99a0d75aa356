"""Why a rung of a ladder is faster than the one before: what held that one, and what changed."""

from __future__ import annotations

from dlscale.core.text import number, percent
from dlscale.measure.records import MODES, Throughput, Trials
from dlscale.report.diagnosis import UNKNOWN, bound, faster
from dlscale.report.results import RunResult
from dlscale.report.speedup import SpeedUp


def gain(before: RunResult, run: RunResult, speed_up: SpeedUp | None) -> str | None:
    """Return how much faster a ladder's rung is than the one before, and why: what bound that one, and what changed.

    None unless all three modes of both were measured.
    """
    was, now = bound(before.throughput), bound(run.throughput)
    if not (was and now and before.throughput and run.throughput and speed_up):
        return None
    ratios = {mode: faster(_trials(before.throughput, mode), _trials(run.throughput, mode)) for mode in MODES}
    full = 1.0 if speed_up.noise else speed_up.ratio
    if UNKNOWN in (was.what, now.what):
        return f"{speed_up.words} as fast as {before.label}; one of the two was disturbed, so that means little."
    alike = f"As fast as {before.label}, within the noise ({number(speed_up.ratio)}×)."
    said = alike if full == 1 else f"{speed_up.words} as fast as {before.label}."
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
    moved = overlaps or any((ratios[mode] - 1) * (full - 1) > 0 for mode in holding)
    doubt = "" if moved or full == 1 else " That does not explain it: measure again on a quiet machine."
    return f"{said} {held}. Here {here}.{doubt}"


def _ratio(before: RunResult, run: RunResult, mode: str) -> float:
    assert before.throughput and run.throughput
    return _trials(run.throughput, mode).mean / _trials(before.throughput, mode).mean


def _trials(throughput: Throughput, mode: str) -> Trials:
    trials = throughput.mode(mode)
    assert trials is not None  # `bound` has seen it
    return trials
