"""What a trace of some steps says, whichever profiler made it: time by range, device work, waits, idle times, overlaps.

Times are nanoseconds from any zero. An event belongs to the step in which it began, the device's work to the step in
which the host gave it out; a step lasts until the next begins. Device work belongs to the ranges that were open on the
thread that gave it out, that of autograd's threads to those of the thread that makes the steps, which waits for them.
What a loader's threads do is no part of a forward pass, but of the step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from dlscale.core.ranges import RANGES
from dlscale.measure.profilers.intervals import Intervals, gaps, index_at, intersection, total, union
from dlscale.measure.profilers.records import Activity, ProfiledTool, RangeTime, TopEntry

#: Calls in which the host waits for the device; copies that are not `Async` do, too.
WAIT = re.compile(r"(cuda|cu)(Stream|Device|Event|Ctx)Synchronize|cudaMemcpy(?!.*Async)|cuMemcpy(?!.*Async)")
#: NCCL's kernels.
NCCL = re.compile(r"nccl", re.IGNORECASE)
#: What the host was in where it was in no range.
OUTSIDE = "outside of ranges"
#: A number that is not known.
UNKNOWN = -1
SECOND = 1e9

Kind = Literal["range", "kernel", "operator", "copy", "gap"]
Times = NDArray[np.int64]
Lengths = NDArray[np.float64]
Chosen = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Events:
    """Things that happened, in any order; each field is an array [n]."""

    begin: Times
    end: Times
    thread: Times  #: A number of the process's own; `UNKNOWN` where it is.
    name: NDArray[np.object_]

    @classmethod
    def of(cls, rows: Iterable[Sequence[Any]]) -> Self:
        """Return the events of rows, which have a value for each field."""
        columns = list(zip(*rows, strict=True)) or [()] * len(fields(cls))
        types = [object if each.name in ("name", "kind") else np.int64 for each in fields(cls)]
        return cls(*(np.array(column, dtype) for column, dtype in zip(columns, types, strict=True)))

    def __len__(self) -> int:
        return len(self.begin)

    def __getitem__(self, chosen: Chosen) -> Self:
        return type(self)(*(getattr(self, each.name)[chosen] for each in fields(self)))

    @property
    def lengths(self) -> Lengths:
        return (self.end - self.begin).astype(np.float64)

    @property
    def spans(self) -> Intervals:
        """Return the time that they cover."""
        return union(np.stack([self.begin, self.end], axis=1).astype(np.float64))


SomeEvents = TypeVar("SomeEvents", bound=Events)


@dataclass(frozen=True, eq=False)
class Ranges(Events):
    """Ranges of the steps, by their names in `RANGES`."""

    pushed: Times  #: 1 for those that a thread opened and closed; 0 for those that may overlap others (`comm`).


@dataclass(frozen=True, eq=False)
class Operators(Events):
    """Operators of PyTorch."""

    own: Times  #: The time of each without that of those within it.


@dataclass(frozen=True, eq=False)
class Work(Events):
    """What the device did; `thread` gave it out."""

    kind: NDArray[np.object_]  #: `kernel`, `copy`, `memset`, `graph` (one that was traced as a whole).
    launch: Times  #: When the host gave it out; its begin where that is not known.
    call: Times  #: The number of the host's call, or `UNKNOWN`; a graph's work has one call.
    bytes: Times
    to_device: Times  #: Whether it is a copy from the host to the device.
    pageable: Times  #: Whether that is from memory that is not page-locked; `UNKNOWN` where nothing is said.


@dataclass(eq=False)
class Trace:
    """The steps of one process, at least one, and what happened in them: what began in no step is left out."""

    ranges: Ranges
    work: Work
    threads: set[int]  #: That make the step beside the thread of the ranges `step`: autograd's.
    waits: Events | None  #: The calls of any thread that wait for the device; None where they were not traced.
    operators: Operators | None = None  #: None where they cannot be seen.
    computing: Intervals | None = None  #: When a host without a device computed; None where that was not traced.

    starts: Times = field(init=False)  #: Of the steps.
    end: int = field(init=False)  #: Of the last step on the host.
    main: int = field(init=False)  #: The thread of the steps.

    def __post_init__(self) -> None:
        steps = self.ranges[self.ranges.name == "step"]
        self.starts, self.end = np.sort(steps.begin), int(steps.end.max())
        self.main = int(steps.thread[steps.begin.argmin()])
        self.ranges = self.ranges[self.step(self.ranges.begin) >= 0]
        self.work = self.work[self.step(self.work.launch) >= 0]
        if self.waits is not None:
            makes_step = np.isin(self.waits.thread, [self.main, *self.threads, UNKNOWN])
            self.waits = self.waits[makes_step & (self.step(self.waits.begin) >= 0)]
        if self.operators is not None:
            self.operators = self.operators[self.step(self.operators.begin) >= 0]

    @property
    def count(self) -> int:
        """How many steps there are."""
        return len(self.starts)

    @property
    def window(self) -> tuple[int, int]:
        """From the first step until the last is done on host and device."""
        return int(self.starts[0]), int(self.work.end.max(initial=self.end))

    @property
    def step_seconds(self) -> float:
        """Seconds of a step: the host may be ahead of the device, which is still at work when the last one ends."""
        return (self.window[1] - self.window[0]) / self.count / SECOND

    def step(self, times: Times) -> Times:
        """Return the number of the step at each time [n], -1 for none."""
        return np.where(times <= self.end, np.searchsorted(self.starts, times, "right") - 1, -1)

    def named(self, name: str) -> Ranges:
        return self.ranges[self.ranges.name == name]

    def sums(self, times: Times, values: Lengths) -> Lengths:
        """Return the seconds of each step [steps], of values (ns) by the times [n] at which they belong to one."""
        step = np.searchsorted(self.starts, times, "right") - 1
        return np.bincount(step, values, self.count) / SECOND

    def within(self, name: str) -> Chosen:
        """Return which of the device's work was given out within a range; to a step belongs all of it."""
        if name == "step":
            return np.ones(len(self.work), bool)
        ranges, thread, inside = self.named(name), self.work.thread, np.zeros(len(self.work), bool)
        for one in set(thread.tolist()) - {UNKNOWN}:
            own = ranges[ranges.thread == one].spans
            inside |= (thread == one) & (index_at(own, self.work.launch) >= 0)
        steps = ranges[(ranges.thread == self.main) & (ranges.pushed == 1)].spans
        return inside | np.isin(thread, [*self.threads]) & (index_at(steps, self.work.launch) >= 0)

    def idle(self) -> dict[str, Intervals]:
        """Return when the device did nothing, by the innermost range that the thread of the steps was in."""
        if not len(self.work):
            return {}
        rows = self.ranges[(self.ranges.pushed == 1) & (self.ranges.thread == self.main)]
        points = np.unique(np.r_[self.window, rows.begin, rows.end])
        names = np.full(len(points), OUTSIDE, object)
        # What lies within another range begins later, or ends earlier: of those that are open the last one counts.
        for number in np.lexsort([-rows.end, rows.begin]):
            names[(points >= rows.begin[number]) & (points < rows.end[number])] = rows.name[number]
        pieces = np.stack([points[:-1], points[1:]], axis=1).astype(np.float64)
        idle = gaps(self.work.spans, *self.window)
        found = {name: intersection(idle, pieces[names[:-1] == name]) for name in dict.fromkeys(names[:-1])}
        return {name: spans for name, spans in found.items() if len(spans)}


def summarise(trace: Trace, tool: str, rank: int = 0) -> tuple[ProfiledTool, list[TopEntry]]:
    """Return what a profiler's trace of a rank says; with a device a step's time is that of `Trace.step_seconds`."""
    usual = float(np.median(np.diff(np.r_[trace.starts, trace.end]))) / SECOND
    summary = ProfiledTool(
        name=tool,
        steps=trace.count,
        complete=True,
        seconds_per_step=trace.step_seconds if len(trace.work) else usual,
        ranges={name: _range_time(trace, name) for name in RANGES if len(trace.named(name))},
        activity=activity(trace),
    )
    return summary, rows(trace, tool, rank)


def activity(trace: Trace) -> Activity:
    """Return means over the steps."""
    count, work, operators = trace.count, trace.work, trace.operators
    kernels = work[work.kind == "kernel"]
    nccl = np.array([bool(NCCL.search(name)) for name in kernels.name], bool)
    sums = kernels[nccl].spans if len(work) else trace.named("comm").spans
    beside = kernels[~nccl].spans if len(work) else trace.computing
    found: dict[str, Any] = {
        "operators": None if operators is None else len(operators) / count,
        "items": None if operators is None else _items(trace, operators) / count,
        "comm_seconds": total(sums) / count / SECOND if len(sums) else None,
        "comm_overlap": None if beside is None else _share(sums, beside),
    }
    if not len(work):
        return Activity(**found)
    copies = work[work.to_device == 1]
    known = bool((copies.pageable != UNKNOWN).all())
    begin, end = trace.window
    return Activity(
        **found,
        launches=len(set(work.call.tolist()) - {UNKNOWN}) / count,
        syncs=None if trace.waits is None else len(trace.waits) / count,
        sync_seconds=None if trace.waits is None else float(trace.waits.lengths.sum()) / count / SECOND,
        device_busy=total(work.spans) / (end - begin),
        idle_seconds={name: total(spans) / count / SECOND for name, spans in trace.idle().items()},
        copy_bytes=float(copies.bytes.sum()) / count,
        pageable_bytes=float(copies.bytes[copies.pageable == 1].sum()) / count if known else None,
        copy_seconds=total(copies.spans) / count / SECOND,
        copy_overlap=_share(copies.spans, kernels.spans),
    )


def rows(trace: Trace, tool: str, rank: int) -> list[TopEntry]:
    """Return the rows of the summary: ranges, then the others by kind, the longest first."""
    found, work, kernels = list[TopEntry](), trace.work, trace.work[trace.work.kind == "kernel"].spans

    def add(kind: Kind, name: str, calls: int, times: Lengths, note: str = "") -> None:
        """Add a row of so many calls in all steps, and of the seconds of each step."""
        mean = float(times.mean())
        values = {"calls": calls / trace.count, "seconds": mean, "std": _std(times), "share": mean / trace.step_seconds}
        found.append(TopEntry(tool=tool, rank=rank, kind=kind, name=name, note=note, **values))

    for name in RANGES:
        if len(events := trace.named(name)):
            device = float(work[trace.within(name)].lengths.sum()) / trace.count / SECOND
            note = f"{1e3 * device:.4g} ms of work on the device" if len(work) else ""
            add("range", name, len(events), _open(trace, name), note)
    if trace.operators is not None:
        for name, each in _by_name(trace.operators):
            add("operator", name, len(each), trace.sums(each.begin, each.own.astype(np.float64)))
    for name, one in _by_name(work[np.isin(work.kind, ["kernel", "graph"])]):
        add("kernel", name, len(one), trace.sums(one.launch, one.lengths))
    for name, one in _by_name(work[np.isin(work.kind, ["copy", "memset"])]):
        hidden, size = 100 * (_share(one.spans, kernels) or 0.0), one.bytes.sum() / trace.count / 1e6
        note = f"{size:.4g} MB a step, {hidden:.0f} % of the time beside kernels"
        add("copy", name, len(one), trace.sums(one.launch, one.lengths), note)
    for name, spans in trace.idle().items():
        lengths = spans[:, 1] - spans[:, 0]
        note = f"longest {lengths.max() / 1e6:.4g} ms"
        add("gap", name, len(spans), trace.sums(spans[:, 0].astype(np.int64), lengths), note)
    kinds = list(dict.fromkeys(row.kind for row in found))
    return sorted(found, key=lambda row: (kinds.index(row.kind), -row.seconds if row.kind != "range" else 0.0))


def _by_name(events: SomeEvents) -> list[tuple[str, SomeEvents]]:
    names, group = np.unique(events.name, return_inverse=True)
    return [(str(name), events[group == number]) for number, name in enumerate(names)]


def _open(trace: Trace, name: str) -> Lengths:
    """Return the seconds of each step in which a range was open on the host."""
    events = trace.named(name)
    step = trace.step(events.begin)
    return np.array([total(events[step == number].spans) for number in range(trace.count)]) / SECOND


def _range_time(trace: Trace, name: str) -> RangeTime:
    times = _open(trace, name)
    device = trace.work[trace.within(name)].lengths.sum() / trace.count / SECOND if len(trace.work) else None
    return RangeTime(seconds=float(times.mean()), std=_std(times), device_seconds=device)


def _items(trace: Trace, operators: Operators) -> int:
    """Return how many numbers were read from tensors, for which a host waits if they are a GPU's.

    With a device these are the reads in which the host did wait. On a CPU nothing tells them apart; a loader's and an
    optimiser's own numbers are the host's everywhere: what is read within these ranges does not count.
    """
    reads = operators[operators.name == "aten::_local_scalar_dense"]
    if trace.waits is None or not len(trace.work):
        of_host = trace.ranges[np.isin(trace.ranges.name, ["data", "optimizer"])]
        return int((index_at(of_host.spans, reads.begin) < 0).sum())
    waits = trace.waits
    within = [
        (waits.thread == thread) & (waits.begin >= begin) & (waits.begin <= end)
        for begin, end, thread in zip(reads.begin, reads.end, reads.thread, strict=True)
    ]
    return sum(bool(each.any()) for each in within)


def _share(a: Intervals, b: Intervals) -> float | None:
    """Return the share of the time of `a` in which `b` is, too."""
    return total(intersection(a, b)) / whole if (whole := total(a)) else None


def _std(times: Lengths) -> float:
    return float(times.std(ddof=1)) if len(times) > 1 else 0.0
