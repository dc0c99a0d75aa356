"""What bounds a run, why a rung is faster than the one before, and whether the machine was quiet meanwhile."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlscale.config.compute import compute_settings
from dlscale.core.text import number, percent
from dlscale.measure.records import MODES, Throughput
from dlscale.report.results import RunResult, crowd, crowded
from dlscale.report.speedup import SpeedUp, between, spread

#: Bound of a run that was disturbed.
UNKNOWN = "not known"

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

    FULL cannot be faster than the slower of loading alone (IO) and computing alone (SYNTHETIC). What it reaches of that
    says how well the two overlap.
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
    share = full / slower.mean
    serial = 1 / (1 / io + 1 / synthetic)  # one after the other: nothing overlaps
    loading = None
    reaches = f"{percent(share)} of the slower one" if share <= 1 else "the slower one, within the noise"
    if full - slower.mean > max(ABOVE * slower.mean, *(spread(each) * each.mean for each in (slower, modes[2]))):
        what, key, reaches = UNKNOWN, "both", f"{number(full)}, beyond noise"
        advice = (
            "It cannot be faster than its slower part: the machine was disturbed, so none of these rates hold. "
            "Measure again."
        )
    elif share < 0.8 and full < 0.9 * serial:
        advice = "That is less than one after the other would give: they compete for the same cores or memory."
    elif share < 0.9 and 0.9 * serial <= full <= 1.1 * serial < 0.99 * slower.mean:
        loading = serial / io
        advice = "That is what one after the other gives: they do not overlap."
    elif share < 0.8:
        advice = "They overlap only in part."
    why = (
        f"The loader alone delivers {number(io)} samples/s, the model alone takes {number(synthetic)}. "
        f"FULL reaches {reaches}. {advice}"
    )
    return Bound(what, key, why, share, loading)


# ---- a rung and the one before -----------------------------------------------------------------------


def gain(before: RunResult, run: RunResult, speed_up: SpeedUp | None) -> str | None:
    """Return how much faster a ladder's rung is than the one before, and why: what bound that one, and what changed.

    None unless all three modes of both were measured.
    """
    was, now = bound(before.throughput), bound(run.throughput)
    if not (was and now and speed_up):
        return None
    if UNKNOWN in (was.what, now.what):
        return f"{speed_up.words} as fast as {before.label}; one of the two was disturbed, so that means little."
    parts = []
    for mode, what in (("IO", "loading"), ("SYNTHETIC", "computing")):
        old, new = before.trials(mode), run.trials(mode)
        assert old and new  # `bound` has seen them
        part = between(old, new)
        parts.append(f"{what} alone is {number(part.ratio)}× as fast{', within the noise' * part.noise}")
    if abs(min(now.share, 1.0) - min(was.share, 1.0)) > 0.1:
        parts.append(f"FULL reaches {percent(min(now.share, 1.0))} of the slower one, not {percent(was.share)}")
    held = "loading and computation in turn" if was.loading else "both alike" if was.key == "both" else was.what
    said = f"As fast as {before.label}, within the noise ({number(speed_up.ratio)}×)."
    said = said if speed_up.noise else f"{speed_up.words} as fast as {before.label}."
    return f"{said} That one is bound by {held}. Here {'; '.join(parts)}."


# ---- a quiet machine ---------------------------------------------------------------------------------


def disturbance(runs: Sequence[RunResult], call: str = "snakemake") -> str | None:
    """Return a warning if other programs were seen at work, or if speeds contradict each other; else None.

    It ends with the command that measures again: `call`, words of a shell that call the workflow, and what to make.
    """
    seen = list(filter(None, (next(_contradictions(runs), None), _neighbours(runs))))
    if not seen:
        return None
    said = " ".join(what for what, _ in seen)
    timed = [run for _, which in seen for run in which if run.throughput]
    files = dict.fromkeys(str(run.folder / "throughput.json") for run in timed)
    again = f": {call} --force {shlex.join(files)}" if files else "."
    return (
        f"The machine was not quiet. {said} Times and rates of these runs mean little, and speed-ups what their "
        f"intervals say: measure again with nothing else running{again}"
    )


def disturbed(runs: Mapping[str, RunResult]) -> dict[Path, str]:
    """Return what speaks against a quiet machine, of runs by `PLAN.RUN`: by the folder of each that it concerns."""
    plans: dict[str, list[RunResult]] = {}
    for name, run in runs.items():
        plans.setdefault(name.rpartition(".")[0], []).append(run)
    found = {run.folder: said for plan in plans.values() for said, which in _contradictions(plan) for run in which}
    return found | {run.folder: said for run in runs.values() if (said := crowded(run.crowd))}


def _neighbours(runs: Sequence[RunResult]) -> tuple[str, list[RunResult]] | None:
    """Say beside which runs other programs were at work; to measure again are those of them that were timed."""
    shares = {run: run.crowd for run in runs if run.crowd}
    if not shares:
        return None
    least, most = percent(min(shares.values())), percent(max(shares.values()))
    of = least if least == most else f"{least} to {most}"
    many = "all" if len(shares) == len(runs) else f"{len(shares)} of"
    which = "; ".join(run.label for run in shares) if len(shares) <= 3 else f"{many} {len(runs)} runs"
    were = "was" if len(shares) == 1 else "were"
    said = f"Other programs kept {of} of the cores busy while {which} {were} measured."
    return said, [run for run in shares if crowd(run.throughput, [])]


def _contradictions(runs: Sequence[RunResult]) -> Iterator[tuple[str, list[RunResult]]]:
    """Find the same computation at two speeds, and FULL that is faster than its parts."""
    alike: dict[str, list[tuple[float, RunResult]]] = {}
    for run in runs:
        if trials := run.trials("SYNTHETIC"):
            step = {**compute_settings(run.settings), "loader": None}  # how data come is nothing to it
            alike.setdefault(json.dumps(step, sort_keys=True), []).append((trials.mean, run))
    for speeds in alike.values():
        (least, slow), (most, quick) = (pick(speeds, key=lambda each: each[0]) for pick in (min, max))
        if most > 1.25 * least:
            said = (
                f"SYNTHETIC is the same computation in {slow.label} and in {quick.label}, and yet {number(least)} and "
                f"{number(most)} samples/s were measured."
            )
            yield said, [slow, quick]
    for run in runs:
        if (found := bound(run.throughput)) and found.what == UNKNOWN:
            yield f"FULL of {run.label} was faster than loading or computing alone, which cannot be.", [run]
