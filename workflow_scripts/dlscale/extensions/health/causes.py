"""Find memory that grows steadily, peaks of memory outside of training, recompilations and graph breaks.

Steady growth is distinguished from noise, and from caches that have become full.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dlscale.core.text import duration, listed, many, number, size
from dlscale.extensions.health.records import (
    BETWEEN,
    START,
    TRAINING,
    UNKNOWN,
    VALIDATION,
    Compilation,
    Memory,
    ProcessHealth,
    read_record,
)
from dlscale.report.evidence import Evidence, Finding
from dlscale.results import MIN_FRACTION

#: A peak outside of training is reported if it exceeds the peak in training by this fraction, and by these bytes.
MIN_EXCESS, MIN_EXCESS_BYTES = 0.1, 32e6

#: Steps after which a compilation is no longer warm-up. A function that is compiled again at least MIN_AGAIN times
#: after these steps keeps recompiling; fewer times are usual for a short last batch, and for validation.
WARM_STEPS, MIN_AGAIN = 2, 4

#: Beginning of the name of a function that continues after a graph break.
RESUMED = "torch_dynamo_resume_in_"

#: Parts of the paths of libraries, whose functions a user cannot change.
PACKAGES = ("/site-packages/", "/dist-packages/", "/torch/")

DEVICES = {"cpu": "main memory", "cuda": "GPU memory"}
PHASES = {
    START: "before the first step has ended",
    TRAINING: "in the training steps",
    VALIDATION: "in validation",
    BETWEEN: "in a pause of the training, in which no batch was read",
    UNKNOWN: "in a phase that was not watched",
}
#: Phase → remedy for a peak in the phase.
REMEDIES = {
    START: "Load data in pieces or as a memory-mapped file, and delete copies.",
    VALIDATION: "Validate in smaller batches, under `torch.no_grad()`, and keep sums instead of all predictions.",
    BETWEEN: "If the pause is a checkpoint, write it from the tensors themselves instead of copies, and delete copies.",
}


def leak(evidence: Evidence) -> Finding | None:
    """Find memory that grows steadily from step to step."""
    grown = [(process, memory, found) for process, memory in _memory(evidence) if (found := growth(memory))]
    if not grown:
        return None
    process, memory, found = max(grown, key=lambda each: each[2].per_step)
    return Finding(
        "leak",
        "memory grows at every step",
        f"The {DEVICES[memory.device]} of rank {process.rank} grows {PHASES[found.phase]}, by "
        f"{size(found.per_step)} per step: from {size(found.before)} at step {found.first:,} to {size(found.after)} at "
        f"step {found.last:,}.{_end(process, memory, found)} A cache that still fills looks the same.",
        "Look for lists that keep tensors or losses: append `loss.item()`, or `loss.detach()`, instead of a loss with "
        "its graph. Limit the size of caches.",
        None,
    )


def _end(process: ProcessHealth, memory: Memory, found: Growth) -> str:
    """Return a sentence with the time until memory is full at this growth; empty if unknown."""
    left = (memory.limit or 0) - found.after
    if left <= 0:
        return ""
    steps = left / found.per_step
    each = process.seconds / process.steps if process.steps else 0.0
    time = f" ({duration(steps * each)})" if each else ""
    return f" At this rate, the {size(memory.limit)} for this process are full after {number(steps, 2)} steps{time}."


def peak_outside(evidence: Evidence) -> Finding | None:
    """Find a peak of memory outside of the training steps, which limits the batch size although training needs less."""
    worst: tuple[float, Finding] | None = None
    for process, memory in _memory(evidence):
        training = memory.peaks.get(TRAINING)
        others = {phase: peak for phase, peak in memory.peaks.items() if phase in REMEDIES}
        if not training or not others:
            continue
        phase, peak = max(others.items(), key=lambda item: item[1].bytes)
        excess = peak.bytes - training.bytes
        if excess < max(MIN_EXCESS * training.bytes, MIN_EXCESS_BYTES) or (worst and worst[0] >= excess):
            continue
        when = f", between steps {peak.first:,} and {peak.last:,}" if peak.last > peak.first else ""
        when = when or f", after step {peak.last:,}" * (phase != START)
        # Steps and batches of a program show where a validation begins, but not where it ends.
        after = " or right after it" * (phase == VALIDATION and evidence.outside is not None)
        before = f" up to step {training.last:,}" * (evidence.outside is not None)
        found = Finding(
            "peak",
            "peak of memory outside of training",
            f"The {DEVICES[memory.device]} of rank {process.rank} peaks {PHASES[phase]}{after}{when}: "
            f"{size(peak.bytes)}. The training steps{before} need at most {size(training.bytes)}.",
            REMEDIES[phase],
            None,
        )
        worst = excess, found
    return worst and worst[1]


def recompilation(evidence: Evidence) -> Finding | None:
    """Find functions that are compiled again and again after the warm-up."""
    for process in read_record(evidence.folder).processes:
        if found := repeated(process.compilations):
            late = [each for own in found for each in own if each.step >= WARM_STEPS]
            share = sum(each.seconds for each in late) / process.seconds if process.seconds else 0.0
            return Finding(
                "recompilation",
                "functions are compiled again and again",
                f"{describe(found)} (rank {process.rank})",
                "If sizes change, use `dynamic=True`, or pad the batches to one size. If a Python number changes, pass "
                "the number as a tensor. TORCH_LOGS=recompiles lists all reasons.",
                share if share >= MIN_FRACTION else None,
            )
    return None


def repeated(compilations: Sequence[Compilation]) -> list[list[Compilation]]:
    """Return the recompilations of each function that keeps recompiling, the most frequent function first."""
    frames = defaultdict[str, list[Compilation]](list)
    for each in compilations:
        if each.forward:
            frames[each.frame].append(each)
    again = [[each for each in own if each.again] for own in frames.values()]
    # A refused compilation does not name its function: the frame's first compilation does.
    named = [
        [each.model_copy(update=_place(frames[each.frame])) for each in own]
        for own in again
        if any(each.refused for each in own) or sum(each.step >= WARM_STEPS for each in own) >= MIN_AGAIN
    ]
    return sorted(named, key=len, reverse=True)


def _place(own: Sequence[Compilation]) -> dict[str, object]:
    first = next((each for each in own if each.function), own[0])
    return {name: getattr(first, name) for name in ("function", "file", "line", "caller")}


def describe(found: Sequence[Sequence[Compilation]]) -> str:
    """Return sentences about functions that keep recompiling: function, line, number, time and reason."""
    first = found[0]
    made = [each for each in first if not each.refused]
    seconds = sum(each.seconds for each in made)
    steps = f"from step {first[0].step + 1:,} to step {first[-1].step + 1:,}"
    text = (
        f"`{_function(first[0])}` ({_line(first[0])}) was compiled again {many(len(made), 'time')}, "
        f"{steps}, in {duration(seconds)}. Last reason: {first[-1].reason or 'unknown'}."
    )
    if any(each.refused for each in first):
        text += " PyTorch then reached its limit (`recompile_limit`): other inputs run uncompiled."
    others = dict.fromkeys(f"{_function(own[0])} ({_line(own[0])})" for own in found[1:])
    return text + (f" Also: {listed(list(others))}." if others else "")


def _line(compilation: Compilation) -> str:
    """Return the line of a function; for a function of a library, the line of the program that calls it."""
    caller, library = compilation.caller, any(part in compilation.file for part in PACKAGES)
    return f"of a library, called at {caller}" if caller and library else f"{compilation.file}:{compilation.line}"


def _function(compilation: Compilation) -> str:
    """Return the name of a compiled function; for its part after a graph break, the name of the full function."""
    return compilation.function.removeprefix(RESUMED).rpartition("_at_")[0] or compilation.function


def breaks(evidence: Evidence) -> Finding | None:
    """Find graph breaks, which divide a compiled function into parts."""
    for process in read_record(evidence.folder).processes:
        if not process.breaks:
            continue
        resumed = [each for each in process.compilations if each.function.startswith(RESUMED)]
        places = list(dict.fromkeys(map(_line, resumed)))
        reasons = sorted(process.breaks, key=lambda reason: -process.breaks[reason])
        where = f", after which the code continues at {listed(places)}" if places else ""
        return Finding(
            "breaks",
            "graph breaks",
            f"In {many(len(process.compilations), 'compilation')}, torch.compile divided functions of rank "
            f"{process.rank} at {many(sum(process.breaks.values()), 'graph break')}{where}. Reasons: "
            f"{listed(reasons)}.",
            "Move printing, logging and `.item()` out of the compiled function. `fullgraph=True` turns a graph break "
            "into an error that names its line.",
            None,
        )
    return None


def _memory(evidence: Evidence) -> Iterator[tuple[ProcessHealth, Memory]]:
    for process in read_record(evidence.folder).processes:
        for memory in process.memory:
            yield process, memory


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
    first: int  #: Median step of the first block.
    last: int  #: Median step of the last block.
    phase: str  #: Phase in which memory grew most.


def growth(memory: Memory) -> Growth | None:
    """Return the steady growth of a process's memory over its steps; None without such growth.

    The medians of six blocks of equally many steps must rise, each by at least a quarter of the mean rise, and hardly
    slow down (`MIN_LASTING`). Growth below `MIN_BYTES` or `MIN_GROWTH` does not count. Random noise passes this test in
    less than 1 of 720 runs, and medians ignore single large points.
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
    """Return the phase in which memory grew most; the phase of a point is the phase that ended there."""
    grown = Counter[str]({START: 0})
    for phase, (before, after) in zip(phases[1:], itertools.pairwise(used), strict=True):
        grown[phase] += after - before
    return grown.most_common(1)[0][0]
