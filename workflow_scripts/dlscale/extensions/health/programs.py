"""Read the memory and the compilations that processes of an external program recorded, and write `health.json`."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil

from dlscale.core import files, machine
from dlscale.extensions.health.noted import NAME
from dlscale.extensions.health.records import (
    BETWEEN,
    FILE,
    START,
    TRAINING,
    UNKNOWN,
    VALIDATION,
    Compilation,
    Health,
    Memory,
    Peak,
    ProcessHealth,
    thin,
)

#: The time between two steps, minus waits for batches, is a pause if it exceeds PAUSE median steps and PAUSE_SECONDS.
PAUSE, PAUSE_SECONDS = 5.0, 0.2

#: Number of steps after which a peak in the phase `start` counts as the training's: the first step allocates the
#: optimiser's state at its end.
MIN_STEPS = 2

#: Minimum ratio of a new peak to the peak so far, because memory in use varies a little.
HIGHER = 1.01


class Process(Protocol):
    """Steps and batches of a process; times are seconds since 1970-01-01 UTC."""

    rank: int
    host: str
    pid: int
    steps: list[float]
    batches: list[tuple[float, str, float, int]]
    gaps: list[tuple[float, float]]


def write_health(folder: Path, processes: Sequence[Process], training: Sequence[Collection[str]]) -> None:
    """Write the record of a program's processes next to the folder of steps, if the processes wrote notes.

    Parameters
    ----------
    folder
        Folder into which the processes wrote steps and notes.
    training
        Iterators of the training loaders of each process.
    """
    found, memory = (
        list[ProcessHealth](),
        min([psutil.virtual_memory().total, *(limit for limit, _ in machine.job_limits())]),
    )
    for process, iterators in zip(processes, training, strict=True):
        share = sum(each.host == process.host for each in processes)
        with contextlib.suppress(OSError):  # a process without notes
            file = folder / f"{NAME}.{process.host}.{process.pid}"
            with open(file, "rb", opener=files.open_regular) as lines:
                found.append(read_process(lines, process, iterators, memory // share))
    if found:
        Health(processes=found).write(folder.with_name(FILE))


def read_process(
    lines: Iterable[bytes], process: Process, training: Collection[str], limit: int | None
) -> ProcessHealth:
    """Return the record of a process from the lines of `dlscale.extensions.health.noted.Notes`.

    Reading stops at the first damaged line, such as the incomplete last line of a killed process.
    """
    shift, points, compilations, breaks = 0.0, list[tuple[float, list[int]]](), list[Compilation](), dict[str, int]()
    phases = Phases(process, training)
    damaged = (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError)
    with contextlib.suppress(*damaged):
        for line in lines:
            kind, _, rest = line.decode("ascii").partition(" ")
            if not line.endswith(b"\n"):
                break
            if kind == "begin":
                shift = float(rest.split()[0]) - float(rest.split()[1])
            elif kind == "m":
                time, *numbers = map(float, rest.split())
                if len(numbers) not in (2, 7) or not all(-1e12 < each < 2**63 for each in (shift + time, *numbers)):
                    break
                points.append((shift + time, [int(each) for each in numbers]))
            elif kind == "c":
                own = json.loads(rest)
                compilations.append(Compilation(step=phases.count(own["time"]), **own))
            elif kind == "k":
                breaks = {str(reason): min(int(count), 2**63) for reason, count in json.loads(rest).items()}
    times = [time for time, _ in points]
    host = [numbers[:2] for _, numbers in points]
    memory = [_memory("cpu", times, host, phases, limit)] if all(map(all, host)) and host else []
    if gpu := [(time, numbers[2:]) for time, numbers in points if len(numbers) == 7]:
        memory.append(_memory("cuda", [time for time, _ in gpu], [own for _, own in gpu], phases, gpu[-1][1][4]))
    return ProcessHealth(
        rank=process.rank,
        steps=phases.count(process.steps[-1]) - 1,
        seconds=process.steps[-1] - process.steps[0],
        memory=[thin(each) for each in memory],
        compilations=compilations,
        breaks=breaks,
    )


class Phases:
    """Phases of a process, from the times of its steps and batches."""

    def __init__(self, process: Process, training: Collection[str]) -> None:
        self._steps, self._gaps = process.steps, process.gaps
        self._others = [time for time, iterator, *_ in process.batches if iterator not in training]
        self._own = [(time, waited) for time, iterator, waited, _ in process.batches if iterator in training]
        lasted = [after - before for before, after in itertools.pairwise(self._steps)]
        self._usual = statistics.median(lasted) if lasted else 0.0
        self._pause = max(PAUSE * self._usual, PAUSE_SECONDS)

    def count(self, time: float) -> int:
        """Return the number of steps that ended until a time; steps in gaps are estimated from the median step."""
        unseen = sum(max(0.0, min(time, end) - begin) for begin, end in self._gaps) / (self._usual or 1.0)
        return bisect.bisect_right(self._steps, time) + round(unseen)

    def between(self, begin: float, end: float) -> str:
        """Return the phase between two times.

        A validation with a loader, or a pause, names the phase even if steps also ended in this time. The time after
        the last batch of a validation, until the next training batch, counts as validation.
        """
        if not self._steps or end <= self._steps[0] or begin < self._steps[0]:
            return START
        if any(since < end and begin < until for since, until in self._gaps):
            return UNKNOWN
        if _last(self._others, end) > begin:
            return VALIDATION
        inside = self._steps[bisect.bisect_right(self._steps, begin) : bisect.bisect_right(self._steps, end)]
        first, last = (bisect.bisect_right(self._own, (time, math.inf)) for time in (begin, end))
        if not inside and first == last:  # a validation includes the computation after its last batch
            return VALIDATION if _last(self._others, begin) > _last(self._steps, begin) else BETWEEN
        longest = max(after - before for before, after in itertools.pairwise([begin, *inside, end]))
        return BETWEEN if longest - sum(waited for _, waited in self._own[first:last]) > self._pause else TRAINING


def _last(times: Sequence[float], until: float) -> float:
    """Return the last of sorted times that is not after `until`; minus infinity without such a time."""
    place = bisect.bisect_right(times, until)
    return times[place - 1] if place else -math.inf


def _memory(
    device: str, times: Sequence[float], points: Sequence[Sequence[int]], phases: Phases, limit: int | None
) -> Memory:
    """Return the memory of a process on a device from points (in use, peak so far, reserved, inactive).

    The phase of a point is the phase since the previous point. The peak of a phase is known if the peak so far rose in
    the phase (or fell, because the program reset it). Until the peak so far rises in a phase other than `start` and
    `training`, it is also an upper bound of the training's memory. For the training's peak, points of the phase `start`
    after `MIN_STEPS` steps also count, because a short training may have no other point.
    """
    named, counts, peaks, high, bounds = list[str](), [phases.count(time) for time in times], dict[str, Peak](), 0, True
    for place, (time, (_, peak, *_)) in enumerate(zip(times, points, strict=True)):
        before = max(place - 1, 0)
        phase = phases.between(times[before], time) if place else START
        named.append(phase)
        if rose := not high <= peak <= HIGHER * high:
            high, bounds = peak, phase in (START, TRAINING)
        trained = phase == TRAINING or (phase == START and counts[place] >= MIN_STEPS)
        found = Peak(bytes=high, first=counts[before], last=counts[place])
        if rose and (phase not in peaks or high > peaks[phase].bytes):
            peaks[phase] = found
        if trained and bounds and (TRAINING not in peaks or high >= peaks[TRAINING].bytes):
            peaks[TRAINING] = found
    columns: Any = list(zip(*points, strict=True))
    more = {"reserved": list(columns[2]), "inactive": list(columns[3])} if device == "cuda" else {}
    return Memory(device=device, steps=counts, phases=named, used=list(columns[0]), peaks=peaks, limit=limit, **more)
