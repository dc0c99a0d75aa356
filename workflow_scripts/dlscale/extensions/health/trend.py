"""Decide whether memory grows steadily, despite noise and caches that fill."""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dlscale.extensions.health.records import START, TRAINING, Memory

#: Fraction of the steps that are warm-up; number of blocks of the other steps; minimum number of points in a block.
WARM_UP, BLOCKS, MIN_POINTS = 1 / 3, 6, 3

#: Minimum growth from block to block, as a fraction of the mean growth. A cache that is full stops growing.
MIN_STEADINESS = 0.25

#: Minimum growth of the second half of the blocks, as a fraction of the growth of the first half. While a program
#: starts, its memory approaches a limit, and grows more and more slowly.
MIN_LASTING = 0.7

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

    The medians of six blocks of equally many steps must rise, each by at least a quarter of the mean rise, and without
    slowing down. Random noise passes this test in less than 1 of 720 runs, and medians ignore single large points.
    """
    training = [place for place, phase in enumerate(memory.phases) if phase == TRAINING]
    first, last = (memory.steps[place] for place in (training[0], training[-1])) if training else (0, 0)
    edges = [first + (last - first) * (WARM_UP + (1 - WARM_UP) * number / BLOCKS) for number in range(BLOCKS + 1)]
    kept = [place for place in training if memory.steps[place] >= edges[0]]
    blocks = [list[int]() for _ in range(BLOCKS)]
    for place in kept:
        blocks[min(bisect.bisect_right(edges, memory.steps[place]), BLOCKS) - 1].append(place)
    if min(map(len, blocks)) < MIN_POINTS:
        return None
    used, steps = (
        [statistics.median(values[place] for place in block) for block in blocks]
        for values in (memory.used, memory.steps)
    )
    rises = [after - before for before, after in itertools.pairwise(used)]
    mean = statistics.fmean(rises)
    if mean * len(rises) < max(MIN_BYTES, MIN_GROWTH * used[0]) or steps[-1] <= steps[0]:
        return None
    middle = BLOCKS // 2
    before, after = used[middle - 1] - used[0], used[-1] - used[middle]
    if min(rises) < MIN_STEADINESS * mean or after < MIN_LASTING * before:
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
