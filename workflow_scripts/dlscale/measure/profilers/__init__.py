"""Profilers, each a module: it starts one around some steps of a run, and reads its report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from dlscale.core.noise import standard_errors
from dlscale.measure.profiling import Overhead, ProfiledTool, TopEntry

#: Standard errors of a median over those of a mean, of normal values.
OF_MEDIAN = math.sqrt(math.pi / 2)

#: A profiler's record, and its rows of the summary.
Found = tuple[ProfiledTool, list[TopEntry]]


class Unavailable(Exception):
    """A profiler does not work here; the message says why, and what to do."""


class Tool(Protocol):
    """A profiler of steps that this process makes. Neither method makes a step: all ranks make the same ones."""

    name: str

    def attached(self) -> AbstractContextManager[object]:
        """Return the context in which steps are profiled; it may raise `Unavailable`."""

    def found(self, seconds: list[float]) -> Found:
        """Return the findings in steps that took so long, and write reports into the folder."""


def report(folder: Path, name: str, rank: int, suffix: str) -> Path:
    """Return the path of a report of this rank."""
    return folder / f"{name}.rank{rank}.{suffix}"


def overhead(before: Sequence[float], profiled: Sequence[float], after: Sequence[float]) -> Overhead:
    """Return the ratio of step times with a profiler and without, from the seconds of steps.

    It is a ratio of medians, one of which is the mean of those before and after, by which even drift cancels. The noise
    is that of the steps' scatter, and half of the difference of the plain steps.
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
