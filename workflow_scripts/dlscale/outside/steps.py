"""Steps that processes of another program wrote, and the pace that they come to."""

from __future__ import annotations

import bisect
import itertools
import json
import math
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dlscale.core import board
from dlscale.core.errors import UserError

#: Ways of seeing steps in a folder, the surest first: what the program says itself, what PyTorch's functions say.
WAYS = ("timed", "seen")

#: Share of the steps, and least and greatest number of them, that warm up.
WARM_UP, FEWEST, MOST = 0.1, 2, 50

#: Windows of steps, each of which gives a rate.
WINDOWS = 10

#: Steps after a profiler's window that do not count either: batches were fetched meanwhile.
SETTLING = 20

#: A step longer than so many others, and than so many seconds, is a pause: a checkpoint, a compilation.
PAUSE, PAUSE_SECONDS = 10.0, 1.0


#: Begin and end, seconds since 1970-01-01 UTC.
Span = tuple[float, float]


@dataclass
class Process:
    """What one process did; times are seconds since 1970-01-01 UTC."""

    rank: int
    host: str = ""
    pid: int = 0
    steps: list[float] = field(default_factory=list)  #: Their ends.
    loops: list[float] = field(default_factory=list)  #: Begins of loops, where they are known.
    #: Of batches: time of delivery, the loader's iterator, seconds waited, samples.
    batches: list[tuple[float, str, float, int]] = field(default_factory=list)
    gaps: list[Span] = field(default_factory=list)  #: Of which nothing is known.
    cut: int = 0  #: Batches beside gaps whose steps are in them, without steps whose batches are.


@dataclass(frozen=True)
class Pace:
    """Training of all processes together, after warming up, without validations and pauses."""

    begin: float  #: Seconds since 1970-01-01 UTC.
    end: float
    first_step: float  #: When the first step ended.
    processes: int
    steps: int  #: Of the first process, counted.
    samples: bool  #: Whether rates are samples/s; else steps/s.
    batch_size: int | None  #: Samples a step of all processes.
    rates: list[float]  #: By window.
    seconds: list[float]  #: Length of each window, of the first process.
    of_ranks: list[float]  #: Mean rate of each process.
    waiting: float | None  #: Share of the time that processes waited for batches; None where nothing tells.
    training: float  #: Share of the time between first and last step that these steps take.


def read(folder: Path) -> tuple[str, list[Process]]:
    """Return the surest way by which steps in `folder` were seen, and the processes that made any, by rank."""
    for way in WAYS:
        found = [_process(path) for path in sorted(folder.glob(f"{way}.*"))]
        if known := [process for process in found if len(process.steps) > 1]:
            return way, sorted(known, key=lambda process: process.rank)
    return "", []


def _process(path: Path) -> Process:
    """Read a file of `dlscale.outside.timed.Log`; half a last line, of a killed process, is left out."""
    host, _, pid = path.name.partition(".")[2].rpartition(".")
    found, shift, before = Process(0, host, int(pid)), 0.0, ""
    with path.open() as lines:
        for line in lines:
            kind, *words = line.split() if line.endswith("\n") else [""]
            if kind == "begin":
                shift, found.rank = float(words[0]) - float(words[1]), int(words[2])
            elif kind in ("s", "l"):
                (found.steps if kind == "s" else found.loops).append(shift + float(words[0]))
            elif kind == "b":
                found.batches.append((shift + float(words[1]), sys.intern(words[0]), float(words[2]), int(words[3])))
            elif kind == "g":
                found.gaps.append((shift + float(words[0]), shift + float(words[1])))
                found.cut += before == "b"
            found.cut -= before == "g" and kind == "s"
            before = kind
    return found


@dataclass(frozen=True)
class _Step:
    seconds: float
    waited: float
    end: float


def _training(process: Process) -> set[str]:
    """Return the loaders' iterators between whose batches steps are made; a validation's are not among them."""
    of = defaultdict[str, list[float]](list)
    for time, iterator, _, _ in process.batches:
        of[iterator].append(time)
    shares = {iterator: _share(times, process.steps) for iterator, times in of.items()}
    return {iterator for iterator, share in shares.items() if share >= max(shares.values()) / 2 > 0}


def _share(times: Sequence[float], steps: Sequence[float]) -> float:
    """Return the share of an iterator's batches after which a step is made before the next one."""
    places = [bisect.bisect_right(steps, time) for time in times] + [len(steps)]
    gaps = list(itertools.pairwise(places))
    gaps = gaps[:-1] or gaps  # the next epoch's steps are none of the last batch
    return sum(after > before for before, after in gaps) / len(gaps)


def _away(process: Process, apart: Sequence[Span]) -> list[Span]:
    """Return when a process's steps do not count: in its gaps, and from a profiler's begin until some steps later."""
    away = [*process.gaps]
    for begin, end in apart:
        settled = process.steps[bisect.bisect_right(process.steps, end) :][:SETTLING]
        away.append((begin, settled[-1] if settled else end))
    return merged(away)


def merged(spans: Sequence[Span]) -> list[Span]:
    """Return the same time in spans that do not overlap, in order."""
    found = list[Span]()
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            begin, end = found[-1][0], max(end, found.pop()[1])
        found.append((begin, end))
    return found


def _within(begin: float, end: float, spans: Sequence[Span]) -> float:
    """Return the seconds between two times that spans cover."""
    return sum(max(0.0, min(end, after) - max(begin, before)) for before, after in spans)


def _kept(process: Process, training: set[str], away: Sequence[Span]) -> list[_Step]:
    """Return the steps that count, of those whose begin is known: without what warms up, validations and pauses."""
    times, ends = [batch[0] for batch in process.batches], [end for _, end in away]
    found = list[_Step | None]()
    for before, end in itertools.pairwise(process.steps):
        begun = bisect.bisect_left(process.loops, end)
        before = max([before, *process.loops[begun - 1 : begun]])
        nearest = bisect.bisect_right(ends, before)
        if nearest < len(away) and away[nearest][0] < end:
            found.append(None)
            continue
        within = process.batches[bisect.bisect_right(times, before) : bisect.bisect_right(times, end)]
        waited = min(sum(batch[2] for batch in within), end - before)
        alone = all(batch[1] in training for batch in within)
        found.append(_Step(end - before, waited, end) if alone else None)
    skipped = min(max(math.ceil(WARM_UP * len(found)), FEWEST), MOST)
    steps = [step for step in found[skipped:] if step]
    if not steps:
        return []
    longest = max(PAUSE * statistics.median(step.seconds for step in steps), PAUSE_SECONDS)
    return [step for step in steps if step.seconds - step.waited <= longest]


def pace(processes: Sequence[Process], batch_size: int | None = None, apart: Sequence[Span] = ()) -> Pace | None:
    """Return the pace of all processes; None if they made fewer than two steps that count.

    `batch_size` is that of all processes, where the program's own batches do not tell it. Steps in spans `apart` do not
    count.
    """
    iterators, away = [_training(process) for process in processes], [_away(each, apart) for each in processes]
    each = [_kept(*one) for one in zip(processes, iterators, away, strict=True)]
    if not each or min(map(len, each)) < 2:
        return None
    # Samples of a step on average: what is fetched ahead is of another step than the one that it is fetched in.
    sizes = [_samples(*one) for one in zip(processes, iterators, strict=True)]
    known = all(sizes)
    if not known:
        sizes = [(batch_size or 1) / len(each)] * len(each)
    windows = max(1, min(WINDOWS, min(map(len, each)) // 3))
    rates, seconds, of_ranks = [0.0] * windows, list[float](), list[float]()
    for kept, size in zip(each, sizes, strict=True):
        edges = [len(kept) * number // windows for number in range(windows + 1)]
        lengths = [sum(step.seconds for step in kept[a:b]) for a, b in itertools.pairwise(edges)]
        parts = [size * (b - a) for a, b in itertools.pairwise(edges)]
        rates = [rate + part / length for rate, part, length in zip(rates, parts, lengths, strict=True)]
        seconds = seconds or lengths
        of_ranks.append(sum(parts) / sum(lengths))
    whole, steps = (processes[0].steps[0], processes[0].steps[-1]), [step for kept in each for step in kept]
    span = whole[1] - whole[0]
    lasted, waited = sum(step.seconds for step in steps), sum(step.waited for step in steps)
    return Pace(
        begin=each[0][0].end - each[0][0].seconds,
        end=each[0][-1].end,
        first_step=min(process.steps[0] for process in processes),
        processes=len(each),
        steps=len(each[0]),
        samples=known or batch_size is not None,
        batch_size=round(sum(sizes)) if known else batch_size,
        rates=rates,
        seconds=seconds,
        of_ranks=of_ranks,
        waiting=waited / lasted if all(iterators) else None,
        training=sum(step.seconds for step in each[0]) / max(span - _within(*whole, away[0]), 1e-9),
    )


def _samples(process: Process, training: set[str]) -> float:
    """Return the mean samples of a step; 0 where a batch does not tell them."""
    counts = [samples for _, iterator, _, samples in process.batches if iterator in training]
    return sum(counts) / (len(process.steps) + process.cut) if all(counts) else 0.0


# ---- what the program prints, or logs ---------------------------------------------------------------

#: Patterns of what the published programs print, by name: samples/s of all processes, and steps.
PATTERNS = {"nersc": r"avg (\S+) samples/sec"}


def pattern(text: str) -> re.Pattern[str]:
    """Return the pattern that `--rate` names, or is; a `UserError` where it has not one group."""
    try:
        found = re.compile(PATTERNS.get(text, text))
    except re.error as error:
        raise UserError(f"--rate: {text}: no regular expression: {error}") from None
    if found.groups != 1:
        raise UserError(
            f"--rate: {text}: expected one group for the number, as in 'avg (\\S+) samples/sec', or one of "
            f"{', '.join(PATTERNS)}"
        )
    return found


def pace_of_rates(
    printed: Sequence[tuple[float, float]], begin: float, batch_size: int | None, apart: Sequence[Span] = ()
) -> Pace | None:
    """Return the pace that a program printed, with the times of its lines; of more than three the first warms up."""
    times = [begin, *(when for when, _ in printed)]
    skipped = 1 if len(printed) > 3 else 0
    spans = list(itertools.pairwise(times))
    kept = [place for place in range(skipped, len(printed)) if not _within(*spans[place], apart)]
    if not kept:
        return None
    return Pace(
        begin=times[skipped],
        end=times[-1],
        first_step=times[1],
        processes=1,
        steps=len(kept),
        samples=True,
        batch_size=batch_size,
        rates=[printed[place][1] for place in kept],
        seconds=[max(spans[place][1] - spans[place][0], 1e-9) for place in kept],
        of_ranks=[],
        waiting=None,
        training=1.0,
    )


def number_in(match: str) -> float | None:
    """Return a rate that was printed; None of what is no rate."""
    try:
        found = float(match.replace(",", ""))
    except ValueError:
        return None
    return found if math.isfinite(found) and found > 0 else None


def logged(path: Path, begin: float) -> list[tuple[float, float]]:
    """Return times and numbers of steps since `begin` in a program's log: TensorBoard's, or one of JSON lines.

    Of event files the tag with the most points counts. A line of JSON has `step`, or `global_step`, and `time` (seconds
    since 1970-01-01 UTC, or since any moment).
    """
    files = sorted(path.rglob("*.tfevents.*")) if path.is_dir() else [path]
    if not files or not all(file.exists() for file in files):
        raise UserError(
            f"--steps: {path}: no such file; expected a file of JSON lines, or TensorBoard's, or a folder of those"
        )
    if path.is_dir() or ".tfevents." in path.name:
        points = defaultdict[str, dict[int, float]](dict)
        for event in itertools.chain.from_iterable(map(board.events, files)):
            for value in event.summary.value:
                if event.wall_time >= begin and board.scalar(value) is not None:
                    points[value.tag].setdefault(event.step, event.wall_time)
        steps = max(points.values(), key=len, default={})
    else:
        steps = {}
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            try:
                row = json.loads(line)
                steps[int(row.get("step", row.get("global_step")))] = float(row["time"])
            except (ValueError, TypeError, KeyError, AttributeError):
                raise UserError(f"--steps: {path}: line {number}: expected JSON with `step` and `time`") from None
    return sorted((time, step) for step, time in steps.items())


def pace_of_log(
    points: Sequence[tuple[float, float]], batch_size: int | None, apart: Sequence[Span] = ()
) -> Pace | None:
    """Return the pace of steps that were logged, between one point and the next; None of fewer than three points."""
    if len(points) < 3:
        return None
    spans = [
        (after[0] - before[0], after[1] - before[1])
        for before, after in itertools.pairwise(points[1:])
        if not _within(before[0], after[0], apart)
    ]
    if not spans:
        return None
    usual = statistics.median(seconds / steps for seconds, steps in spans if steps > 0)
    # A validation or a checkpoint between two points is none of their steps.
    kept = [(seconds, steps) for seconds, steps in spans if 0 < seconds <= 2 * usual * steps]
    if not kept:
        return None
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
        rates=[share * steps / seconds for seconds, steps in kept],
        seconds=[seconds for seconds, _ in kept],
        of_ranks=[],
        waiting=None,
        training=lasted / max(points[-1][0] - points[1][0] - _within(points[1][0], points[-1][0], apart), 1e-9),
    )
