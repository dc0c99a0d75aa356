"""Decide whether memory grows steadily, despite noise and caches that fill."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dlscale.extensions.health.records import START, TRAINING, Memory

#: Fraction of the points that are warm-up; number of blocks of the other points; minimum number of points in a block.
WARM_UP, BLOCKS, MIN_POINTS = 1 / 3, 6, 3

#: Minimum growth from block to block, as a fraction of the mean growth. A cache that is full stops growing.
MIN_STEADINESS = 0.25

#: Minimum growth after the warm-up that is reported: bytes, and fraction of the memory in use.
MIN_BYTES, MIN_GROWTH = 8e6, 0.02


@dataclass(frozen=True)
class Growth:
    """Steady growth of memory."""

    per_step: float  #: Bytes per step.
    before: int  #: Median of the first block, bytes.
    after: int  #: Median of the last block, bytes.
    first: int  #: Step of the first block.
    last: int  #: Step of the last block.
    phase: str  #: Phase in which memory grew most.


def growth(memory: Memory) -> Growth | None:
    """Return the steady growth of a process's memory over its steps; None without such growth.

    The medians of six consecutive blocks of points must rise, each by at least a quarter of the mean rise. Random noise
    passes this test in less than 1 of 720 runs, and medians ignore single large points.
    """
    training = [place for place, phase in enumerate(memory.phases) if phase == TRAINING]
    kept = training[int(WARM_UP * len(training)) :]
    if len(kept) < BLOCKS * MIN_POINTS:
        return None
    edges = [round(len(kept) * number / BLOCKS) for number in range(BLOCKS + 1)]
    blocks = [kept[begin:end] for begin, end in itertools.pairwise(edges)]
    used, steps = (
        [statistics.median(values[place] for place in block) for block in blocks]
        for values in (memory.used, memory.steps)
    )
    rises = [after - before for before, after in itertools.pairwise(used)]
    mean = statistics.fmean(rises)
    if mean * len(rises) < max(MIN_BYTES, MIN_GROWTH * used[0]) or steps[-1] <= steps[0]:
        return None
    if min(rises) < MIN_STEADINESS * mean:
        return None
    per_step = (used[-1] - used[0]) / (steps[-1] - steps[0])
    phase = _growing_phase(memory.phases[kept[0] :], memory.used[kept[0] :])
    return Growth(per_step, int(used[0]), int(used[-1]), int(steps[0]), int(steps[-1]), phase)


def _growing_phase(phases: Sequence[str], used: Sequence[int]) -> str:
    """Return the phase in which memory grew most; a point has the phase that ended there."""
    grown = Counter[str]({START: 0})
    for phase, (before, after) in zip(phases[1:], itertools.pairwise(used), strict=True):
        grown[phase] += after - before
    return grown.most_common(1)[0][0]
