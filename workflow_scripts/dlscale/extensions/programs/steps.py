"""Read the steps that processes of an external program wrote, and compute the program's pace from the steps."""

from __future__ import annotations

import bisect
import itertools
import math
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dlscale.core.errors import UserError, brief
from dlscale.core.files import open_regular, read_text
from dlscale.core.noise import interval
from dlscale.extensions.programs.settings import RATES

#: Ways of detecting steps, beginning with the most reliable way: `dlscale.timed` in the program, and the hook in
#: PyTorch's functions.
WAYS = ("timed", "seen")

#: Warm-up: fraction of the steps, minimum number of steps, maximum number of steps.
WARM_UP, MIN_WARM_UP_STEPS, MAX_WARM_UP_STEPS = 0.1, 2, 50

#: Maximum number of windows into which steps are divided; each window gives a rate.
WINDOWS = 10

#: Number of steps after a profiler's window that do not count, since their batches were fetched during the window.
SETTLING = 20

#: The samples per step are certain only if at least the fraction MIN_SIZED of the batches has a known size, and at most
#: the fraction MAX_REUSED of the steps has no batch of its own (further conditions: `_samples`).
MIN_SIZED, MAX_REUSED = 0.8, 0.02

#: Spans in evaluation mode are validations if at most the fraction MAX_VALIDATED of the steps contains such a span.
#: Otherwise they belong to the training, such as predictions that a loss needs. If all loaders seem to validate, the
#: same limit applies to the steps with their batches.
MAX_VALIDATED = 0.5

#: Minimum number of steps of the longest training; if it has fewer steps, the steps of all trainings count.
MIN_TRAINING_STEPS = 12

#: A step is a pause, such as for a checkpoint or a compilation, if its time without waits for batches and loader
#: workers is longer than PAUSE times the median step, and longer than PAUSE_SECONDS. Logged steps are judged by PAUSE
#: alone.
PAUSE, PAUSE_SECONDS = 10.0, 1.0

#: Minimum distance between pauses, steps. If long steps are more frequent, they belong to the training, such as waits
#: for loader workers. Then only steps at least PAUSE_IN_WAITS times as long as the usual long step are pauses.
MIN_STEPS_BETWEEN_PAUSES, PAUSE_IN_WAITS = 20, 4.0

#: Regular long steps are reported: minimum number of such steps, minimum ratio of a long step and the median step,
#: minimum fraction of the time that they add, and maximum fraction of irregular steps.
MIN_REGULAR, MIN_REGULAR_RATIO, MIN_REGULAR_FRACTION, MAX_IRREGULAR = 4, 2.0, 0.1, 0.2

#: Maximum relative difference at which a log's step number is taken for a process's number of steps, or of samples.
MAX_LOG_DIFFERENCE = 0.2

#: Maximum relative difference between the mean rate of the windows and the rate over the total time.
MAX_CLOCK_ERROR = 0.05

#: Maximum relative difference between the mean rate of the windows and the rate of all detected steps, if long steps
#: are frequent or the samples per step differ.
MAX_PATTERN_ERROR = 0.01

#: Minimum relative difference between the usual and the mean samples per step at which the steps count as different.
MAX_UNUSUAL = 0.1


#: Begin and end, seconds since 1970-01-01 UTC.
Span = tuple[float, float]


@dataclass
class Process:
    """Steps and batches of one process; times are seconds since 1970-01-01 UTC."""

    rank: int
    host: str = ""
    pid: int = 0
    parent: int = 0  #: Id of the process that started this process; 0 if unknown.
    steps: list[float] = field(default_factory=list)  #: End of each step.
    computed: list[float] = field(default_factory=list)  #: CPU seconds of all threads until the end of each step.
    #: Loops over `timed(loader)`, empty if unknown: begin, number, id of the loader.
    loops: list[tuple[float, str, str]] = field(default_factory=list)
    #: Number of the loop that made each step, and whether an optimiser made a step meanwhile; empty if unknown.
    in_loops: list[tuple[str, bool]] = field(default_factory=list)
    evaluated: list[Span] = field(default_factory=list)  #: Spans in which a model was in evaluation mode.
    #: First step of each optimiser that stepped after other optimisers within one step: number of the common step, end
    #: and CPU seconds of the other optimisers' part, the other optimisers, and the optimiser.
    joined: list[tuple[int, float, float, frozenset[str], str]] = field(default_factory=list)
    #: Spans in which iterators started; spans in which iterators ended, by iterator.
    started: dict[str, list[Span]] = field(default_factory=dict)
    ended: dict[str, list[Span]] = field(default_factory=dict)
    ungraded: Counter[str] = field(default_factory=Counter)  #: Batches requested without gradients, by iterator.
    unclear: bool = False  #: Whether some loops over `timed(loader)` may be validations.
    #: Batches: time of delivery, name of the loader's iterator, seconds waited, samples (0: unknown; negative: length
    #: of a short batch, see `with_short`).
    batches: list[tuple[float, str, float, int]] = field(default_factory=list)
    copies: dict[str, int] = field(default_factory=dict)  #: Number of processes with the same batches, by iterator.
    #: Threads in which steps ended; threads that fetched batches, by iterator.
    trainers: set[str] = field(default_factory=set)
    fetchers: dict[str, set[str]] = field(default_factory=dict)
    gaps: list[Span] = field(default_factory=list)  #: Spans in which no steps were noted.
    others: list[Span] = field(default_factory=list)  #: In the first process: trainings of earlier and later processes.
    #: Times at which an optimiser's first and last step ended, by optimiser.
    optimizers: dict[str, Span] = field(default_factory=dict)
    gradients: int = 0  #: Bytes of the gradients that the process's optimisers use; 0 if unknown.
    ahead: set[str] = field(default_factory=set)  #: Iterators whose batches are used one request later.
    cut: int = 0  #: Number of batches whose step is in a gap, minus number of steps whose batch is in a gap.
    file: str = ""
    damaged: int = 0  #: Number of the first line of the file that cannot be read; 0 if all lines can be read.


@dataclass(frozen=True)
class Pace:
    """Training speed of all processes together, without warm-up, validations and pauses."""

    begin: float  #: Start of the first counted step (after warm-up), seconds since 1970-01-01 UTC.
    end: float  #: End of the last counted step, seconds since 1970-01-01 UTC.
    first_step: float  #: End of the first step, seconds since 1970-01-01 UTC.
    processes: int
    steps: int  #: Number of counted steps of the first process; of printed rates if the rate is printed.
    samples: bool  #: Whether rates are samples/s; otherwise steps/s.
    batch_size: int | None  #: Samples per step over all processes.
    rates: list[float]  #: Rate of each window.
    seconds: list[float]  #: Length of each window in the first process, seconds.
    rank_rates: list[float]  #: Mean rate of each process.
    waiting: float | None  #: Fraction of the time in which processes waited for batches; None if unknown.
    #: Fraction of the time from `begin` to `end` that the counted steps of the first process take. Gaps and profiled
    #: spans are not part of the time.
    training: float
    between_epochs: float = 0.0  #: See `dlscale.measure.records.Outside.between_epochs`.
    waits_of_ranks: list[float] = field(default_factory=list)  #: Fraction `waiting` of each process.
    gradients: int = 0  #: Bytes of the gradients of one process; 0 if unknown.
    pauses: dict[str, float] = field(default_factory=dict)  #: See `dlscale.measure.records.Outside.pauses`.
    cores_of_ranks: list[float] = field(default_factory=list)  #: Busy cores of each process, without loader workers.
    regular: tuple[int, float] | None = None  #: See `regular_long`.


def read(folder: Path) -> tuple[str, list[Process]]:
    """Return the most reliable of `WAYS` that detected steps in `folder`, and the processes with steps, by rank.

    Left out are helpers, and processes that did not run during the longest training (`Process.others`), such as those
    of an earlier try. Without steps, the way is empty.
    """
    for way in WAYS:
        found = [_process(path) for path in files(folder, way)]
        if way == "timed":  # the hook knows when models are evaluated
            modes = {(one.host, one.pid): one.evaluated for one in map(_process, files(folder, "seen"))}
            found = [replace(one, evaluated=modes.get((one.host, one.pid), [])) for one in found]
        known = [process for process in found if process.steps]
        if known := [process for process in known if not _is_helper(process, known)]:
            # Processes that ended before the longest process began, or began after its end, are another training.
            longest = max((process.steps for process in known), key=lambda steps: steps[-1] - steps[0])
            others = [one for one in known if one.steps[0] > longest[-1] or one.steps[-1] < longest[0]]
            spans = [(one.steps[0], one.steps[-1]) for one in others if len(one.steps) > MIN_WARM_UP_STEPS]
            known = sorted([one for one in known if one not in others], key=lambda process: process.rank)
            known[0].others = merged(spans)
            return way, known
    return "", []


def _is_helper(process: Process, others: Sequence[Process]) -> bool:
    """Return whether a process without batches and without a rank of its own was started by a process that trains.

    Such a process fits something other than the program's model, such as a curve to a sample.
    """
    starter = (process.host, process.parent, process.rank)
    return not process.batches and any(each.batches and (each.host, each.pid, each.rank) == starter for each in others)


def files(folder: Path, way: str) -> list[Path]:
    """Return the files that `dlscale.extensions.programs.timed.Log` wrote into a folder, named WAY.HOST.PID."""
    named = re.compile(rf"{way}\..*\.\d{{1,18}}", re.ASCII)
    return [path for path in sorted(folder.glob(f"{way}.*")) if named.fullmatch(path.name)]


def _process(path: Path) -> Process:
    """Read a file of `dlscale.extensions.programs.timed.Log`; split common steps, and drop validations.

    The incomplete last line of a killed process is skipped.
    """
    return without_validations(with_split_steps(Tail(path).process))


def with_split_steps(process: Process) -> Process:
    """Return a process in which the last step of a training and the first step of the next training are two steps.

    Optimisers belong to successive trainings, such as before and after a restart from a checkpoint, if the earlier
    optimisers make no more steps, but the later optimiser does.
    """
    steps, computed, last = [*process.steps], [*process.computed], process.optimizers
    for number, end, used, before, after in reversed(process.joined):
        if all(last[each][1] <= end for each in before) and last[after][1] > steps[number]:
            steps.insert(number, end)
            computed.insert(number, used)
    return replace(process, steps=steps, computed=computed, joined=[])


def without_validations(process: Process) -> Process:
    """Return a process without the steps of validations over `timed(loader)`.

    A loop without steps of PyTorch's optimisers validates if its batches have no gradients, or if only loops over other
    loaders contain such steps. If all loops would be validations, all steps count.
    """
    if not process.in_loops:
        return process
    in_loops = [*process.in_loops, *[("", True)] * (len(process.steps) - len(process.in_loops))]
    training = {loop for loop, stepped in in_loops if stepped}
    loaders = {loop: loader for _, loop, loader in process.loops}
    trained = {loaders.get(loop, "") for loop in training}
    others = {loop for loop, _ in in_loops} - training
    validating = {loop for loop in others if process.ungraded[loop] or (training and loaders.get(loop) not in trained)}
    validating = validating if training or others > validating else set()
    used = Counter(loader for _, loop, loader in process.loops if loop in others - validating)
    kept = [number for number, (loop, _) in enumerate(in_loops) if loop not in validating]
    names = defaultdict[str, str](lambda: "0", {loop: loop for loop in validating})  # trainings share a name
    started, ended = (
        {"0": [span for loop, spans in of.items() if loop not in validating for span in spans]}
        for of in (process.started, process.ended)
    )
    return replace(
        process,
        steps=[process.steps[number] for number in kept],
        computed=[process.computed[number] for number in kept],
        in_loops=[],
        unclear=not training and sum(count > 1 for count in used.values()) > 1,
        loops=[each for each in process.loops if each[1] not in validating],
        batches=[(time, names[loop], wait, size) for time, loop, wait, size in process.batches],
        fetchers={names[loop]: process.fetchers[loop] for loop in process.fetchers},
        started=started,
        ended=ended,
        ungraded=Counter({loop: count for loop, count in process.ungraded.items() if loop in validating}),
    )


def stopped(folder: Path) -> str | None:
    """Return the reason why a process stopped taking notes of its steps; None if no process stopped."""
    for path in sorted(folder.glob("stopped.*")):
        try:
            reason = read_text(path, errors="replace").partition(" ")[2].strip()
        except (OSError, UserError) as error:  # another user may have created a link or pipe
            reason = brief(error)
        return reason or "the steps could not be written; the disk may be full"
    return None


class Tail:
    """File of `dlscale.extensions.programs.timed.Log` that grows while it is read."""

    def __init__(self, path: Path) -> None:
        host, _, pid = path.name.partition(".")[2].rpartition(".")
        self._path, self._place, self._shift, self._optimizers, self._before = path, 0, 0.0, set[str](), ""
        self.process = Process(0, host, int(pid), file=str(path))
        self._lines, self._thread = 0, ""
        self.read()

    def read(self) -> None:
        """Read the new lines, up to the first damaged line."""
        try:
            with open(self._path, "rb", opener=open_regular) as lines:
                lines.seek(self._place)
                for line in lines:
                    if self.process.damaged or not line.endswith(b"\n"):
                        break
                    self._place += len(line)
                    self._lines += 1
                    self._note(*line.decode("ascii").split())
        except (OSError, UserError, ValueError, TypeError, IndexError):
            self.process.damaged = self._lines or 1

    def _note(self, kind: str, *words: str) -> None:
        found = self.process
        if kind == "begin":
            self._shift, found.rank = _seconds(words[0]) - _seconds(words[1]), int(words[2])
            found.parent = int(words[3]) if len(words) > 3 else 0
        elif kind == "l":
            loop, loader = (*words[1:], "0", "0")[:2]  # copies of older versions of `timed.py` write no numbers
            found.loops.append((self._shift + _seconds(words[0]), loop, loader))
        elif kind in "vie":
            span = self._shift + _seconds(words[0]), self._shift + _seconds(words[1])
            of = found.evaluated if kind == "v" else found.started if kind == "i" else found.ended
            (of.setdefault(words[2], []) if isinstance(of, dict) else of).append(span)
        elif kind == "u":
            found.ungraded[words[0]] += 1
        elif kind == "t":
            self._thread = words[0]
        elif kind == "s":
            found.trainers.add(self._thread)
            time, computed = self._shift + _seconds(words[0]), _seconds(words[1])
            if found.steps and time < found.steps[-1]:
                if len(found.trainers) == 1:
                    raise ValueError("steps go back in time")
                time = found.steps[-1]  # threads may note their steps in another order
            # If several optimisers step once each, as in a GAN, their steps are one training step.
            if words[2] in self._optimizers or not self._optimizers:
                self._optimizers = set()
            elif words[2] not in found.optimizers:
                before = frozenset(self._optimizers)
                found.joined.append((len(found.steps) - 1, found.steps[-1], found.computed[-1], before, words[2]))
            if not self._optimizers:
                found.steps.append(0.0)
                found.computed.append(0.0)
                if len(words) > 4:
                    found.in_loops += [("", True)] * (len(found.steps) - 1 - len(found.in_loops))  # steps of `ended`
                    found.in_loops.append((words[3], words[4] == "1"))
            self._optimizers.add(words[2])
            found.optimizers[words[2]] = (found.optimizers.get(words[2], (time,))[0], time)
            found.steps[-1], found.computed[-1] = time, computed
        elif kind == "b":
            time, waited = self._shift + _seconds(words[1]), _seconds(words[2])
            found.batches.append((time, sys.intern(words[0]), waited, _samples_in(words[3])))
            found.fetchers.setdefault(words[0], set()).add(self._thread)
        elif kind == "g":
            found.gaps.append((self._shift + _seconds(words[0]), self._shift + _seconds(words[1])))
            found.cut += self._before == "b"
        elif kind == "c":
            found.copies[words[0]] = max(int(words[1]), 1)
        elif kind == "a":
            found.ahead.add(sys.intern(words[0]))
        elif kind == "p":
            found.gradients += int(words[0])
        found.cut -= self._before == "g" and kind == "s"
        self._before = kind if kind not in "tacuvie" else self._before


#: Upper bound of valid times, seconds.
MAX_SECONDS = 1e12


def _seconds(text: str) -> float:
    """Return a time; raise `ValueError` if it is invalid."""
    if not abs(seconds := float(text)) < MAX_SECONDS:
        raise ValueError(f"{text}: expected seconds")
    return seconds


def _samples_in(text: str) -> int:
    """Return the samples of a batch; 0 (unknown) if the program wrote an invalid value."""
    return int(text) if text.removeprefix("-").isdecimal() and len(text) < 10 else 0


@dataclass(frozen=True)
class _Step:
    seconds: float
    waited: float
    end: float
    computed: float
    batches: int  #: Number of training batches fetched during the step.
    samples: int  #: Samples of these batches; 0 if the size of a batch is unknown.
    first: bool  #: Whether the step fetched an iterator's first batch, as at the begin of an epoch.
    #: Whether the step, without a validation before the step, fetched no batch of another loader and, if batches are
    #: `sized` (see `_after_warm_up`), no batch of unknown size.
    alone: bool
    gap: float  #: Seconds from the step's begin until its first training batch was requested; 0 if unknown.
    workers: float  #: Seconds in which workers of the training's loader started and ended.


def with_short(process: Process) -> Process:
    """Return a process whose short batches, such as the last of each epoch, have their length as samples.

    If fewer than the fraction MIN_SIZED of the training batches have a known size, lengths may be something else, such
    as times, and the samples of short batches are unknown.
    """
    training = training_iterators(process)
    sizes = [batch[3] for batch in process.batches if batch[1] in training]
    sign = -1 if sum(size > 0 for size in sizes) >= MIN_SIZED * len(sizes) else 0
    batches = [(*batch[:3], max(batch[3], sign * batch[3])) for batch in process.batches]
    return replace(process, batches=batches) if min(sizes, default=0) < 0 else process


def as_used(process: Process) -> Process:
    """Return a process whose batches have the times at which they are used, if a library requests batches ahead.

    A batch is used when the next batch has been delivered. An iterator's last batch is used in the last step before
    another iterator delivers.
    """
    if not process.ahead:
        return process
    found = list[tuple[float, str, float, int]]()
    requested = defaultdict[str, list[tuple[float, str, float, int]]](list)
    for batch in process.batches:
        (requested[batch[1]] if batch[1] in process.ahead else found).append(batch)
    every = [batch[0] for batch in process.batches]
    for iterator, own in requested.items():
        first = own[0][2]
        for before, after in itertools.pairwise(own):
            found.append((after[0], iterator, after[2] + first, before[3]))
            first = 0.0
        following = bisect.bisect_right(every, own[-1][0])
        end = every[following] if following < len(every) else math.inf
        number = bisect.bisect_right(process.steps, end)  # steps that ended before another iterator delivers
        last = process.steps[number - 2] if number > 1 else 0.0
        found.append((max(last, own[-1][0]), iterator, first, own[-1][3]))
    return replace(process, batches=sorted(found, key=lambda batch: batch[0]))


def training_iterators(process: Process) -> set[str]:
    """Return the iterators of training loaders.

    Steps are made between the batches of a training loader, but not between the batches of a validation. Most batches
    of a validation are requested without gradients, or while a model is in evaluation mode.
    """
    of = defaultdict[str, list[float]](list)
    for time, iterator, _, _ in process.batches:
        of[iterator].append(time)
    every = [batch[0] for batch in process.batches]
    # An iterator's last batch lasts until another iterator delivers, so it does not include steps of the next epoch.
    then = {iterator: every[bisect.bisect_right(every, times[-1]) :][:1] for iterator, times in of.items()}
    shares = {name: _share([*times, *(then[name] or [math.inf])], process.steps) for name, times in of.items()}
    found = {iterator for iterator, share in shares.items() if share >= max(shares.values()) / 2 > 0}
    found |= fresh_iterators(process)
    spans = evaluations(process)
    validating = {
        name
        for name in found
        if max(process.ungraded[name], sum(_covers(spans, time) for time in of[name])) > len(of[name]) / 2
    }
    places = {bisect.bisect_right(process.steps, time) for name in validating for time in of[name]}
    return found - validating if found > validating or len(places) <= MAX_VALIDATED * len(process.steps) else found


def evaluations(process: Process) -> list[Span]:
    """Return the spans without steps in which a model was in evaluation mode, unless most steps have such a span.

    A span ends before the request of the training's next batch: some programs call `train()` after this request.
    """
    steps, every = process.steps, merged(process.evaluated)
    times, numbers = [batch[0] for batch in process.batches], Counter(batch[1] for batch in process.batches)
    outside = {batch[1] for batch in process.batches if not _covers(every, batch[0])}
    spans = list[Span]()
    for begin, end in every:
        if bisect.bisect_right(steps, begin) < bisect.bisect_left(steps, end):
            continue
        within = process.batches[bisect.bisect_left(times, begin) : bisect.bisect_right(times, end)]
        _, last, _, _ = within[-1] if within else (0.0, "", 0.0, 0)
        if last in outside or (numbers[last] == 1 and len(within) > 1):
            asked = [batch[0] - batch[2] for batch in within if batch[1] == last]
            made = [span[0] for span in process.started.get(last, ()) if begin <= span[0] <= end]
            end = max(min([*asked, *made]), begin)
        spans.append((begin, end))
    places = {bisect.bisect_right(steps, begin) for begin, _ in spans}
    return spans if len(places) <= MAX_VALIDATED * len(steps) else []


def _covers(spans: Sequence[Span], time: float) -> bool:
    """Return whether a time is in one of the spans, which are in order and do not overlap."""
    place = bisect.bisect_right(spans, (time, math.inf))
    return place > 0 and spans[place - 1][1] >= time


def fresh_iterators(process: Process) -> set[str]:
    """Return the iterators that delivered a single batch, if most steps have batches of several such iterators.

    Such a program calls `next(iter(loader))` for several loaders in each step, or trains and validates in epochs of one
    batch. These cases cannot be distinguished.
    """
    counts = Counter(batch[1] for batch in process.batches)
    single = [batch for batch in process.batches if counts[batch[1]] == 1]
    places = Counter(bisect.bisect_right(process.steps, batch[0]) for batch in single)
    several = sum(count > 1 for count in places.values())
    return {batch[1] for batch in single} if several > len(process.steps) / 2 else set()


def _share(times: Sequence[float], steps: Sequence[float]) -> float:
    """Return the fraction of the batches, delivered at `times`, that are followed by a step before the next batch."""
    places = [bisect.bisect_right(steps, time) for time in times]
    return statistics.fmean(after > before for before, after in itertools.pairwise(places))


def _away(process: Process, apart: Sequence[Span]) -> list[Span]:
    """Return the spans in which a process's steps do not count.

    Such spans are the process's gaps, and the spans `apart`, each with the `SETTLING` steps after it.
    """
    away = [*process.gaps]
    for begin, end in apart:
        settled = process.steps[bisect.bisect_right(process.steps, end) :][:SETTLING]
        away.append((begin, settled[-1] if settled else end))
    return merged(away)


def merged(spans: Sequence[Span]) -> list[Span]:
    """Return spans in the order of time, with overlapping spans merged."""
    found = list[Span]()
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            begin, end = found[-1][0], max(end, found.pop()[1])
        found.append((begin, end))
    return found


def _inside(begin: float, end: float, spans: Sequence[Span]) -> float:
    """Return the same seconds as `_within`, but faster for many spans, which must be in the order of time."""
    first, last = bisect.bisect_left(spans, (begin,)), bisect.bisect_left(spans, (end,))
    return _within(begin, end, spans[max(first - 1, 0) : last])


def _within(begin: float, end: float, spans: Sequence[Span]) -> float:
    """Return the number of seconds between `begin` and `end` that spans cover; the spans must not overlap."""
    return sum(max(0.0, min(end, after) - max(begin, before)) for before, after in spans)


def _pauses(process: Process, training: set[str], span: Span, away: Sequence[Span]) -> dict[str, float]:
    """Return the seconds of interruptions of the training in a span, by kind; the spans `away` do not count.

    `other`: time in evaluation mode (`evaluations`), and time from the request of a batch of a loader other than the
    training's until the next batch or step; `longest`: longest remaining time without a batch or a step.
    """
    spans = evaluations(process)
    events = [(time, time, True) for time in process.steps]
    batches = [batch for batch in process.batches if not _covers(spans, batch[0])]
    events += [(time - waited, time, iterator in training) for time, iterator, waited, _ in batches]
    other, longest, last, own = sum(_within(*each, [span]) for each in spans), 0.0, span[0], True
    events += [(*each, True) for each in spans]
    for begin, end, trains in sorted(event for event in events if span[0] < event[1] <= span[1]):
        begin = max(begin, last)
        idle = begin - last - _within(last, begin, away)
        other += idle * (not own) + (end - begin) * (not trains)
        longest = max(longest, idle * own)
        last, own = max(last, end), trains
    return {"other": other, "longest": longest}


def _is_ahead(process: Process, training: set[str]) -> bool:
    """Return whether threads other than the training threads fetch batches, so that training does not wait."""
    return any(process.fetchers.get(iterator, set()) - process.trainers for iterator in training)


def _after_warm_up(process: Process, training: set[str], away: Sequence[Span], ahead: bool, sized: bool) -> list[_Step]:
    """Return a process's steps after the warm-up and outside the spans `away`.

    Steps whose begin is unknown are left out. If batches are `sized`, a step with a batch of unknown size is not
    `alone`. If batches are fetched `ahead`, the waiting time of all steps is 0. If the samples per step differ and two
    epochs begin, only complete epochs are returned.
    """
    times, ends = [batch[0] for batch in process.batches], [end for _, end in away]
    found, iterators, evaluated = list[_Step | None](), set[str](), evaluations(process)
    working = merged(
        [span for of in (process.started, process.ended) for name in training for span in of.get(name, ())]
    )
    computed = itertools.pairwise(process.computed)
    for (before, end), (since, until) in zip(itertools.pairwise(process.steps), computed, strict=True):
        last, begun = before, bisect.bisect_left(process.loops, (end,))
        before = max([before, *(loop[0] for loop in process.loops[begun - 1 : begun])])
        within = process.batches[bisect.bisect_left(times, before) : bisect.bisect_left(times, end)]
        own = [batch for batch in within if batch[1] in training]
        if own and len(own) < len(within) and within[-len(own) :] == own:
            # After a validation, the step begins when the training's workers start, or when its batch is requested.
            made = [span[0] for span in process.started.get(own[0][1], ()) if before < span[1] <= own[0][0]]
            before, within = max(within[-len(own) - 1][0], min([*made, own[0][0] - own[0][2]])), own
        # The end of the last epoch's workers belongs to the step, also if a validation followed.
        late = _inside(last, before, working)
        validated = _inside(before, end, evaluated)
        first = not iterators.issuperset(batch[1] for batch in own)
        iterators.update(batch[1] for batch in own)
        nearest = bisect.bisect_right(ends, before)
        if end <= before or (nearest < len(away) and away[nearest][0] < end):
            found.append(None)
            continue
        seconds = max(end - before - validated, 1e-9) + late
        waited = 0.0 if ahead else min(sum(batch[2] for batch in within), seconds)
        samples = sum(batch[3] for batch in own) if all(batch[3] for batch in own) else 0
        alone = len(own) == len(within) and (samples > 0 or not own or not sized)
        requested = min((time - wait for time, _, wait, _ in own), default=before)
        gap = 0.0 if ahead else max(requested - before - _inside(before, requested, evaluated), 0.0) + late
        started = 0.0 if ahead else late + _inside(before, end, working)
        found.append(_Step(seconds, waited, end, until - since, len(own), samples, first, alone, gap, started))
    skipped = min(max(math.ceil(WARM_UP * len(found)), MIN_WARM_UP_STEPS), MAX_WARM_UP_STEPS)
    steps = [step for step in found[skipped:] if step]
    starts = [number for number, step in enumerate(steps) if step.first]
    if len(starts) < 2 or not _differ(_sizes(steps)):
        return steps
    fetched = [sum(step.batches for step in steps[a:b]) for a, b in itertools.pairwise([*starts, None])]
    return steps[starts[0] : None if fetched[-1] == fetched[-2] else starts[-1]]


def _sizes(steps: Sequence[_Step]) -> list[int]:
    """Return the samples of each step, without steps with a batch of unknown size."""
    return [step.samples for step in steps if step.samples or not step.batches]


def _differ(samples: Sequence[int]) -> bool:
    """Return whether steps have different numbers of samples, as with a shorter accumulation at an epoch's end."""
    mean = statistics.fmean(samples or [0])
    return abs(statistics.mode(samples or [0]) - mean) >= MAX_UNUSUAL * mean > 0


def _has_frequent_long_steps(steps: Sequence[_Step]) -> bool:
    """Return whether long steps recur, so that windows with more and fewer long steps have different rates."""
    limit = PAUSE * statistics.median(step.seconds for step in steps)
    return sum(step.seconds > limit for step in steps) * MIN_STEPS_BETWEEN_PAUSES > len(steps)


def regular_long(seconds: Sequence[float]) -> tuple[int, float] | None:
    """Return the distance of long steps that recur regularly, and the fraction of the time that they add.

    Return None if long steps are rare or irregular, or add little time. Regular long steps may contain a validation
    without a loader, a checkpoint, or a wait for another loader's workers.
    """
    usual = statistics.median(seconds or [0.0])
    long = [number for number, each in enumerate(seconds) if each > MIN_REGULAR_RATIO * usual]
    if len(long) < MIN_REGULAR:
        return None
    every = statistics.mode(after - before for before, after in itertools.pairwise(long))
    phase = statistics.mode(number % every for number in long)
    regular = [each for number, each in enumerate(seconds) if number % every == phase]
    hits = sum(number % every == phase for number in long)
    missed, irregular = len(regular) - hits, len(long) - hits
    added = (statistics.median(regular) - usual) * len(regular) / sum(seconds)
    exact = every > 1 and missed <= MAX_IRREGULAR * len(regular) and irregular <= MAX_IRREGULAR * hits
    return (every, added) if exact and added >= MIN_REGULAR_FRACTION else None


def _rates_of_windows(
    each: Sequence[Sequence[_Step]], amounts: Sequence[Sequence[float]], count: int
) -> tuple[list[float], list[float]]:
    """Divide each process's steps into `count` windows; return total rates, and seconds in the first process."""
    rates, seconds = [0.0] * count, list[float]()
    for kept, amount in zip(each, amounts, strict=True):
        edges = itertools.pairwise([len(kept) * number // count for number in range(count + 1)])
        windows = [(sum(amount[a:b]), sum(step.seconds for step in kept[a:b])) for a, b in edges]
        rates = [rate + part / length for rate, (part, length) in zip(rates, windows, strict=True)]
        seconds = seconds or [length for _, length in windows]
    return rates, seconds


def _without_long_steps(steps: Sequence[_Step]) -> list[_Step]:
    """Return the steps that are `alone`, without pauses.

    A step is judged per batch, because with gradient accumulation steps have different numbers of batches. Long steps
    within an epoch that recur soon are not pauses, unless they are much longer than usual long steps (PAUSE_IN_WAITS);
    then the steps between the first and the last long step count.
    """
    if not (steps := [step for step in steps if step.alone]):
        return []
    usual = PAUSE * statistics.median(step.seconds / max(step.batches, 1) for step in steps)
    busy = [step.seconds - step.waited - step.workers for step in steps]
    limits = [max(usual * max(step.batches, 1), PAUSE_SECONDS) for step in steps]
    long = [number for number, (seconds, limit) in enumerate(zip(busy, limits, strict=True)) if seconds > limit]
    inner = [number for number in long if not steps[number].first]
    distances = [after - before for before, after in itertools.pairwise(inner)]
    if len(distances) > 1 and statistics.median(distances) < MIN_STEPS_BETWEEN_PAUSES:
        least = PAUSE_IN_WAITS * statistics.median_low(busy[number] for number in inner)
        long = [number for number in long if steps[number].first or busy[number] > least]
        steps = steps[: inner[-1] + 1]
        long += range(inner[0] + 1)  # the counted steps begin after a long step, and end with a long step
    pauses = set(long)
    return [step for number, step in enumerate(steps) if number not in pauses]


def _between_epochs(steps: Sequence[_Step]) -> float:
    """Return the seconds that pass in steps before a new iterator is asked for its first batch, beyond the usual gap.

    The result is 0 if each step has a new iterator, because then there are no epochs.
    """
    gaps = [step.gap for step in steps if step.batches and not step.first]
    usual = statistics.median(gaps) if gaps else math.inf
    return sum(max(step.gap - usual, 0.0) for step in steps if step.first)


def trainings(process: Process) -> list[Span]:
    """Return the spans of successive trainings, which have different optimisers.

    Spans with at most `MIN_WARM_UP_STEPS` steps are left out.
    """
    spans = merged(list(process.optimizers.values()))
    return [span for span in spans if _count(process, span) > MIN_WARM_UP_STEPS]


def _count(process: Process, span: Span) -> int:
    """Return the number of a process's steps that ended in a span."""
    return bisect.bisect_right(process.steps, span[1]) - bisect.bisect_left(process.steps, span[0])


def longest_training(processes: Sequence[Process]) -> tuple[Span, int] | None:
    """Return the longest training of the first process, and the number of its trainings.

    Return None if there is only one training, or if the longest training has fewer than `MIN_TRAINING_STEPS` steps.
    """
    spans = trainings(processes[0]) if processes else []
    longest = max(spans, key=lambda span: span[1] - span[0], default=(0.0, 0.0))
    return (longest, len(spans)) if len(spans) > 1 and _count(processes[0], longest) >= MIN_TRAINING_STEPS else None


def printed_in(printed: Sequence[tuple[float, float]], span: Span, process: Process) -> list[tuple[float, float]]:
    """Return the numbers printed during a training of a process, or between this training and the next."""
    end = min((begin for begin, _ in trainings(process) if begin > span[1]), default=math.inf)
    return [each for each in printed if span[0] <= each[0] < end]


def _in_training(process: Process, span: Span) -> Process:
    """Return a copy of a process with only the steps of the training that overlaps `span` most."""
    begin, end = max(trainings(process), key=lambda own: _within(*span, [own]), default=span)
    inside = slice(bisect.bisect_left(process.steps, begin), bisect.bisect_right(process.steps, end))
    return replace(process, steps=process.steps[inside], computed=process.computed[inside])


def pace(processes: Sequence[Process], batch_size: int | None = None, apart: Sequence[Span] = ()) -> Pace | None:
    """Return the pace of all processes; None without processes, or if a process has fewer than two counted steps.

    `batch_size`, over all processes, replaces the size that the program's batches show. Steps in the spans `apart` do
    not count. If there are several trainings, only the longest training counts, unless it is short (see
    `longest_training`).
    """
    first_step = min((time for each in processes for time in (each.steps[0], *sum(each.others, ()))), default=0.0)
    processes = [as_used(with_short(without_validations(process))) for process in processes]
    if several := longest_training(processes):
        processes = [_in_training(process, several[0]) for process in processes]
    iterators, away = [training_iterators(process) for process in processes], [_away(each, apart) for each in processes]
    ahead = [_is_ahead(*one) for one in zip(processes, iterators, strict=True)]
    # Mean samples per step, since a batch that is fetched ahead belongs to a later step than the step that fetches it.
    sizes = [0.0 if batch_size else _samples(*one) for one in zip(processes, iterators, ahead, strict=True)]
    known = all(sizes)
    every = [_after_warm_up(*one, known) for one in zip(processes, iterators, away, ahead, strict=True)]
    each = [_without_long_steps(one) for one in every]
    if not each or min(map(len, each)) < 2:
        return None
    if not known:
        sizes = [(batch_size or 1) / len(each)] * len(each)
    # Processes that share a model, as in tensor parallelism, train on copies of the same batch.
    shared = [one.copies.get(name, 1) for one, names in zip(processes, iterators, strict=True) for name in names]
    copies = min(shared) if known else 1
    usual, amounts = 0, list[list[float]]()
    for steps, kept, size in zip(every, each, sizes, strict=True):
        samples = _sizes(steps) if known else []
        mean = statistics.fmean(samples) if _differ(samples) else size
        often = statistics.mode(samples or [0])
        usual += round(mean) if _differ(samples) or 4 * samples.count(often) < 3 * len(samples) else often
        exact = known and all(step.batches for step in steps)  # otherwise batches are fetched for later steps
        one = sum(samples) / max(sum(step.batches for step in steps if step.samples), 1)  # samples of a batch
        relative = [step.samples / step.batches / one if known and step.batches else 1.0 for step in kept]
        amounts.append(
            [(step.samples if exact else mean * of) / copies for step, of in zip(kept, relative, strict=True)]
        )
    rank_rates = [sum(amount) / sum(step.seconds for step in kept) for amount, kept in zip(amounts, each, strict=True)]
    uneven = any(map(_differ, map(_sizes, every))) or any(map(_has_frequent_long_steps, each))
    for count in range(max(1, min(WINDOWS, min(map(len, each)) // 3)), 0, -1):
        rates, seconds = _rates_of_windows(each, amounts, count)
        if not uneven or abs(interval(rates)[0] / sum(rank_rates) - 1) <= MAX_PATTERN_ERROR:
            break
    begin, end = each[0][0].end - each[0][0].seconds, each[0][-1].end
    lasted = [sum(step.seconds for step in kept) for kept in each]
    waited = [sum(step.waited for step in kept) for kept in each]
    waits_known = all(iterators) and not any(ahead)  # a rank without a loader may receive its batches from another rank
    return Pace(
        begin=begin,
        end=end,
        first_step=first_step,
        processes=len(each),
        steps=len(each[0]),
        samples=known or batch_size is not None,
        batch_size=round(usual / copies) if known else batch_size,
        rates=rates,
        seconds=seconds,
        rank_rates=rank_rates,
        gradients=processes[0].gradients,
        pauses=_pauses(processes[0], iterators[0], (begin, end), away[0]),
        between_epochs=min(_between_epochs(each[0]) / lasted[0], 1.0),
        waiting=sum(waited) / sum(lasted) if waits_known else None,
        training=lasted[0] / max(end - begin - _within(begin, end, away[0]), 1e-9),
        waits_of_ranks=[one / of for one, of in zip(waited, lasted, strict=True)] if waits_known else [],
        cores_of_ranks=[sum(step.computed for step in kept) / of for kept, of in zip(each, lasted, strict=True)],
        regular=regular_long([step.seconds - step.waited for step in each[0] if not step.first]),
    )


def _samples(process: Process, training: set[str], ahead: bool) -> float:
    """Return the mean samples per step; 0 if the number is uncertain.

    The number is certain if most training batches have a known size, nearly every step has a batch of its own, the
    thread that trains also fetches the batches, and the batches of different loaders or iterators do not alternate.
    """
    batches = [batch for batch in process.batches if batch[1] in training]
    sizes = [batch[3] for batch in batches if batch[3]]
    if ahead or len(process.steps) < 2 or not batches or len(sizes) < MIN_SIZED * len(batches):
        return 0.0
    if _overlap(batches) or fresh_iterators(process):
        return 0.0
    # Batches before the first step may have been unused; batches after the last step do not belong to a step.
    first, last = process.steps[0], process.steps[-1]
    count, steps = sum(first < batch[0] <= last for batch in batches), len(process.steps) - 1 + process.cut
    if steps < 1 or count < steps - max(2, MAX_REUSED * steps):
        return 0.0
    each = max(round(count / steps), 1)
    exact = abs(count - each * steps) <= each + 1
    return statistics.fmean(sizes) * (each if exact else count / steps)


def _overlap(batches: Sequence[tuple[float, str, float, int]]) -> bool:
    """Return whether an iterator delivers a batch between two batches of another iterator."""
    last, ended = "", set[str]()
    for _, iterator, _, _ in batches:
        if iterator != last:
            if iterator in ended:
                return True
            ended.add(last)
            last = iterator
    return False


# ---- printed rates and logged steps -----------------------------------------------------------------


def pattern(text: str) -> re.Pattern[str]:
    """Compile the pattern of `--rate`, which is a regular expression or the name of a pattern in `RATES`.

    Raise `UserError` unless the pattern has exactly one group.
    """
    try:
        found = re.compile(RATES.get(text, text))
    except re.error as error:
        raise UserError(f"--rate: {text}: not a regular expression: {error}") from None
    if found.groups != 1:
        raise UserError(
            f"--rate: {text}: expected one group for the number, as in 'avg (\\S+) samples/sec', or a name: "
            f"{', '.join(RATES)}"
        )
    return found


def pace_of_rates(
    printed: Sequence[tuple[float, float]],
    begin: float,
    batch_size: int | None,
    apart: Sequence[Span] = (),
    steps: bool = False,
) -> Pace | None:
    """Return the pace that follows from printed rates and the times at which they were printed.

    The rates are samples/s, or steps/s if `steps`. If there are more than three rates, the first rate is warm-up.
    Return None without rates outside the spans `apart`.
    """
    times = [begin, *(when for when, _ in printed)]
    skipped = 1 if len(printed) > 3 else 0
    spans = list(itertools.pairwise(times))
    kept = [place for place in range(skipped, len(printed)) if not _within(*spans[place], apart)]
    if not kept:
        return None
    factor = (batch_size or 1) if steps else 1
    lines = list[tuple[float, float]]()
    # Lines that were read together have the same time: they count as one line with their mean rate.
    for _, same in itertools.groupby(kept, key=lambda place: times[place + 1]):
        places = list(same)
        rate = statistics.harmonic_mean([printed[place][1] for place in places]) * factor
        lines.append((max(spans[places[0]][1] - spans[places[0]][0], 1e-9), rate))
    # All lines cover about the same number of samples. If a line took longer than its rate allows, the program also did
    # something else, such as a validation.
    usual = statistics.median(seconds * rate for seconds, rate in lines)
    lasted = [(min(seconds, usual / rate), rate) for seconds, rate in lines]
    windows = _windows([(seconds, seconds * rate) for seconds, rate in lasted])
    return Pace(
        begin=times[skipped],
        end=times[-1],
        first_step=times[1],
        processes=1,
        steps=len(kept),
        samples=not steps or batch_size is not None,
        batch_size=batch_size,
        rates=[amount / seconds for seconds, amount in windows],
        seconds=[seconds for seconds, _ in windows],
        rank_rates=[],
        waiting=None,
        training=1.0,
    )


def _without_pauses(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Drop stretches (seconds, steps) that contain a rare long step, such as a validation or a checkpoint."""
    usual = statistics.median_low(seconds / steps for seconds, steps in spans)
    ends = list(itertools.accumulate(steps for _, steps in spans))
    # Only a stretch that takes more than twice the usual time can contain a pause.
    longest = [seconds - usual * (steps - 1) if seconds > 2 * usual * steps else 0.0 for seconds, steps in spans]
    limit = PAUSE * usual
    while long := [number for number, seconds in enumerate(longest) if seconds >= limit]:
        distances = [ends[after] - ends[before] for before, after in itertools.pairwise(long)]
        if statistics.median(distances or ends[-1:]) >= MIN_STEPS_BETWEEN_PAUSES:
            break
        limit = PAUSE_IN_WAITS * statistics.median_low(longest[number] for number in long)
    pauses = set(long)
    return [span for number, span in enumerate(spans) if number not in pauses]


def _windows(stretches: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Join stretches (seconds, steps or samples) into at most `WINDOWS` windows of similar length.

    If waits come in bursts, fewer windows are made, so that the mean of the windows' rates agrees with the rate over
    the total time.
    """
    times, amounts = ([0.0, *itertools.accumulate(each)] for each in zip(*stretches, strict=True))
    found = list[tuple[float, float]]()
    for count in range(min(WINDOWS, len(stretches)), 0, -1):
        edges = sorted({_nearest(times, times[-1] * number / count) for number in range(count + 1)})
        found = [(times[b] - times[a], amounts[b] - amounts[a]) for a, b in itertools.pairwise(edges)]
        mean = interval([amount / seconds for seconds, amount in found])[0]
        if abs(mean * times[-1] / amounts[-1] - 1) <= MAX_CLOCK_ERROR:
            break
    return found


def _nearest(times: Sequence[float], time: float) -> int:
    """Return the index of the entry of `times` that is nearest to `time`."""
    after = min(bisect.bisect_left(times, time), len(times) - 1)
    return after - 1 if after and time - times[after - 1] < times[after] - time else after


def processes(folder: Path, kinds: Sequence[str] = WAYS) -> list[str]:
    """Return the names HOST.PID of the processes that wrote files of the given kinds into a folder of steps.

    The kind `python` is all processes with the hook.
    """
    return [path.name.partition(".")[2] for kind in kinds for path in files(folder, kind)]


def in_order(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the longest sequence of points, given in the order of time, whose step numbers increase."""
    ends, last, before = list[float](), list[int](), list[int]()
    for number, (_, step) in enumerate(points):
        length = bisect.bisect_left(ends, step)
        ends[length : length + 1], last[length : length + 1] = [step], [number]
        before.append(last[length - 1] if length else -1)
    found, number = list[tuple[float, float]](), last[-1] if last else -1
    while number >= 0:
        found.append(points[number])
        number = before[number]
    return found[::-1]


def log_counts_other(points: Sequence[tuple[float, float]], process: Process) -> str | None:
    """Return a message if a log's step numbers do not count steps; None if they do, or for fewer than three points.

    Step numbers that count micro-batches, or the steps of each of several optimisers, are accepted. The hook does not
    see the steps of compiled optimisers, but it sees their batches.
    """
    if len(points := in_order(points)) < 3:
        return None
    (begin, first), (end, last) = points[1], points[-1]
    made = bisect.bisect_right(process.steps, end) - bisect.bisect_right(process.steps, begin)
    training = training_iterators(process)
    batches = [each for each in process.batches if begin < each[0] <= end and each[1] in training]
    logged, samples = last - first, sum(abs(each[3]) for each in batches)
    many_samples = samples > 2 * len(batches) and abs(logged - samples) <= MAX_LOG_DIFFERENCE * samples
    few = logged < (1 - MAX_LOG_DIFFERENCE) * made / max(len(process.optimizers), 1) - 2
    # During gaps, steps are not noted.
    noted = logged * (1 - _within(begin, end, merged(process.gaps)) / max(end - begin, 1e-9))
    most = (1 + MAX_LOG_DIFFERENCE) * max(made * max(len(process.optimizers), 1), len(batches)) + 2
    if not (few or many_samples or noted > most):
        return None
    other = "samples" if many_samples else "epochs" if few else "something else, such as the steps of a validation"
    return (
        f"the logged step grows by {logged:,.0f} while the training makes {made:,} steps, so it seems to count {other}"
    )


def pace_of_log(
    points: Sequence[tuple[float, float]],
    batch_size: int | None,
    apart: Sequence[Span] = (),
    evaluated: Sequence[Span] = (),
) -> Pace | None:
    """Return the pace of logged steps; None if fewer than three points have different times.

    Also return None if no steps were made outside the spans `apart`. If the steps of some points do not increase with
    the time, as after the clock was set back, spans around these times and steps do not count. The spans `evaluated`
    (see `evaluations`) do not belong to the steps' time.
    """
    ordered = {*in_order(points)}
    others = sorted(step for when, step in points if (when, step) not in ordered)
    # If points have the same time, as with a clock of whole seconds, the first point counts.
    points = [next(same) for _, same in itertools.groupby(points, key=lambda point: point[0])]
    spans = [
        (max(after[0] - before[0] - _inside(before[0], after[0], evaluated), 1e-9), after[1] - before[1])
        for before, after in itertools.pairwise(points[1:])
        if {before, after} <= ordered
        and bisect.bisect(others, before[1]) == bisect.bisect(others, after[1])
        and not _within(before[0], after[0], apart)
    ]
    if not spans:
        return None
    kept = _without_pauses(spans)
    windows = _windows(kept)
    share = batch_size or 1
    lasted = sum(seconds for seconds, _ in kept)
    return Pace(
        begin=points[1][0],
        end=points[-1][0],
        first_step=points[0][0],
        processes=1,
        steps=round(sum(steps for _, steps in kept)),
        samples=batch_size is not None,
        batch_size=batch_size,
        rates=[share * steps / seconds for seconds, steps in windows],
        seconds=[seconds for seconds, _ in windows],
        rank_rates=[],
        waiting=None,
        training=lasted / max(points[-1][0] - points[1][0] - _within(points[1][0], points[-1][0], apart), 1e-9),
        regular=regular_long([seconds / steps for seconds, steps in kept]),
    )
