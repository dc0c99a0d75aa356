"""What a trace of some steps says, whichever profiler made it: time by range, device work, waits, idle times, overlaps.

Times are nanoseconds from any zero. An event belongs to the step in which it began, the device's work to the step in
which the host gave it out; a step lasts until the next begins. Device work belongs to the ranges that were open on the
thread that gave it out, that of autograd's threads to those of the thread that makes the steps, which waits for them.
What a loader's threads do is no part of a forward pass, but of the step.

Events are tables with a row each, in any order: `begin`, `end`, `thread` (a number of the process's own), `name`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd

from dlscale.core.ranges import RANGES
from dlscale.measure.profilers.intervals import Intervals, gaps, index_at, intersection, total, union
from dlscale.measure.profilers.records import Activity, ProfiledTool, RangeTime, TopEntry

#: Calls in which the host waits for the device; copies that are not `Async` do, too.
WAIT = re.compile(r"(cuda|cu)(Stream|Device|Event|Ctx)Synchronize|cudaMemcpy(?!.*Async)|cuMemcpy(?!.*Async)")
#: NCCL's kernels.
NCCL = "(?i:nccl)"
#: What the host was in where it was in no range.
OUTSIDE = "outside of ranges"
#: A thread, or a call, that is not known.
UNKNOWN = -1
SECOND = 1e9

EVENTS = ("begin", "end", "thread", "name")
#: `pushed`: whether a thread opened and closed it; those that may overlap others (`comm`) are not.
RANGE = (*EVENTS, "pushed")
#: `own`: the time of an operator without that of those within it.
OPERATOR = (*EVENTS, "own")
#: `kind`: `kernel`, `copy`, `memset`, `graph` (one that was traced as a whole); `launch`: when the host gave it out, or
#: its begin; `call`: the number of the host's call, a graph's work has one; `to_device`: whether it is a copy from the
#: host to the device, `pageable`: whether that is from memory that is not page-locked.
WORK = (*EVENTS, "kind", "launch", "call", "bytes", "to_device", "pageable")

Kind = Literal["range", "kernel", "operator", "copy", "gap"]


def table(rows: Iterable[Sequence[Any]], columns: Sequence[str] = EVENTS) -> pd.DataFrame:
    """Return a table of events."""
    numbers = [name for name in columns if name not in ("name", "kind")]
    return pd.DataFrame(list(rows), columns=list(columns)).astype(dict.fromkeys(numbers, np.int64))


def spans(events: pd.DataFrame) -> Intervals:
    """Return the time that events cover."""
    return union(events[["begin", "end"]].to_numpy(float))


@dataclass(eq=False)
class Trace:
    """The steps of one process, at least one, and what happened in them: what began in no step is left out."""

    ranges: pd.DataFrame  #: `RANGE`, with names of `RANGES`.
    work: pd.DataFrame  #: `WORK` of the device.
    threads: set[int]  #: That make the step beside the thread of the ranges `step`: autograd's.
    waits: pd.DataFrame | None  #: The calls of any thread that wait for the device; None where they were not traced.
    operators: pd.DataFrame | None = None  #: `OPERATOR`; None where they cannot be seen.
    computing: Intervals | None = None  #: When a host without a device computed; None where that was not traced.

    starts: np.ndarray = field(init=False)  #: Of the steps.
    end: int = field(init=False)  #: Of the last step on the host.
    main: int = field(init=False)  #: The thread of the steps.

    def __post_init__(self) -> None:
        steps = self.ranges[self.ranges.name == "step"]
        if steps.empty:
            raise ValueError("no step is in it: the profiler did not see the ranges of the process")
        self.starts, self.end = np.sort(steps.begin), int(steps.end.max())
        self.main = int(steps.sort_values("begin").thread.iloc[0])
        self.ranges, self.work = self._stepped(self.ranges, "begin"), self._stepped(self.work, "launch")
        if self.waits is not None:
            makes_step = self.waits.thread.isin([self.main, *self.threads, UNKNOWN])
            self.waits = self._stepped(self.waits[makes_step], "begin")
        if self.operators is not None:
            self.operators = self._stepped(self.operators, "begin")

    def _stepped(self, events: pd.DataFrame, column: str) -> pd.DataFrame:
        """Return the events that belong to steps by a time, with the number of each one's step."""
        times = events[column].to_numpy()
        step = np.where(times <= self.end, np.searchsorted(self.starts, times, "right") - 1, -1)
        return events.assign(step=step)[step >= 0].reset_index(drop=True)

    @property
    def count(self) -> int:
        """How many steps there are."""
        return len(self.starts)

    @property
    def window(self) -> tuple[int, int]:
        """From the first step until the last is done on host and device."""
        return int(self.starts[0]), max(self.end, int(self.work.end.max()) if len(self.work) else 0)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step: the host may be ahead of the device, which is still at work when the last one ends."""
        return (self.window[1] - self.window[0]) / self.count / SECOND

    def named(self, name: str) -> pd.DataFrame:
        return self.ranges[self.ranges.name == name]

    def device_seconds(self, name: str) -> float | None:
        """Return the seconds a step of the device's work that was given out within a range; None without a device."""
        if self.work.empty:
            return None
        work, ranges = self.work, self.named(name)
        inside = np.full(len(work), name == "step")  # to a step belongs all of it
        for thread in set(work.thread) - {UNKNOWN}:
            of = ranges[(ranges.thread == self.main) & (ranges.pushed == 1)] if thread in self.threads else ranges[:0]
            covered = union(np.concatenate([spans(ranges[ranges.thread == thread]), spans(of)]))
            inside |= (work.thread == thread) & (index_at(covered, work.launch.to_numpy()) >= 0)
        return float((work.end - work.begin)[inside].sum()) / self.count / SECOND

    def idle(self) -> dict[str, Intervals]:
        """Return when the device did nothing, by the innermost range that the thread of the steps was in."""
        if self.work.empty:
            return {}
        rows = self.ranges[(self.ranges.pushed == 1) & (self.ranges.thread == self.main)]
        points = np.unique(np.r_[self.window, rows.begin, rows.end])
        names = np.full(len(points), OUTSIDE, object)
        # What lies within another range begins later, or ends earlier: of those that are open the last one counts.
        for row in rows.sort_values(["begin", "end"], ascending=[True, False]).itertuples():
            names[(points >= row.begin) & (points < row.end)] = row.name
        pieces = np.stack([points[:-1], points[1:]], axis=1).astype(float)
        idle = gaps(spans(self.work), *self.window)
        found = {name: intersection(idle, pieces[names[:-1] == name]) for name in dict.fromkeys(names[:-1])}
        return {name: times for name, times in found.items() if len(times)}


def summarise(trace: Trace, tool: str, rank: int = 0) -> tuple[ProfiledTool, list[TopEntry]]:
    """Return what a profiler's trace of a rank says; with a device a step's time is that of `Trace.step_seconds`."""
    usual = float(np.median(np.diff(np.r_[trace.starts, trace.end]))) / SECOND
    found = _rows(trace, tool, rank)
    summary = ProfiledTool(
        name=tool,
        steps=trace.count,
        complete=True,
        seconds_per_step=trace.step_seconds if len(trace.work) else usual,
        ranges={
            row.name: RangeTime(seconds=row.seconds, std=row.std, device_seconds=trace.device_seconds(row.name))
            for row in found
            if row.kind == "range"
        },
        activity=_activity(trace),
    )
    return summary, found


def _activity(trace: Trace) -> Activity:
    """Return means over the steps."""
    count, work, waits = trace.count, trace.work, trace.waits
    kernels = work[work.kind == "kernel"]
    nccl = kernels.name.str.contains(NCCL).astype(bool)
    sums = spans(kernels[nccl]) if len(work) else spans(trace.named("comm"))
    beside = spans(kernels[~nccl]) if len(work) else trace.computing
    found: dict[str, Any] = {
        "items": None if trace.operators is None else _items(trace, trace.operators) / count,
        "comm_seconds": total(sums) / count / SECOND if len(sums) else None,
        "comm_overlap": None if beside is None else _share(sums, beside),
    }
    if work.empty:
        return Activity(**found)
    copies = work[work.to_device == 1]
    begin, end = trace.window
    return Activity(
        **found,
        launches=len(set(work.call) - {UNKNOWN}) / count,
        syncs=None if waits is None else len(waits) / count,
        sync_seconds=None if waits is None else float((waits.end - waits.begin).sum()) / count / SECOND,
        device_busy=total(spans(work)) / (end - begin),
        idle_seconds={name: total(times) / count / SECOND for name, times in trace.idle().items()},
        copy_bytes=float(copies.bytes.sum()) / count,
        pageable_bytes=float(copies.bytes[copies.pageable == 1].sum()) / count,
        copy_seconds=total(spans(copies)) / count / SECOND,
        copy_overlap=_share(spans(copies), spans(kernels)),
    )


def _rows(trace: Trace, tool: str, rank: int) -> list[TopEntry]:
    """Return the rows of the summary: ranges, then the others by kind, the longest first."""
    work, kernels = trace.work, spans(trace.work[trace.work.kind == "kernel"])

    def row(kind: Kind, name: str, events: pd.DataFrame, lengths: pd.Series, note: str = "") -> TopEntry:
        """Return the row of some events, which last so long."""
        times = lengths.groupby(events.step).sum().reindex(range(trace.count), fill_value=0) / SECOND
        mean, std = float(times.mean()), float(times.std()) if trace.count > 1 else 0.0
        values = {"calls": len(events) / trace.count, "seconds": mean, "std": std, "share": mean / trace.step_seconds}
        return TopEntry(tool=tool, rank=rank, kind=kind, name=name, note=note, **values)

    def rows(kind: Kind, events: pd.DataFrame, lengths: pd.Series) -> list[TopEntry]:
        groups = events.groupby("name")
        return [row(kind, str(name), group, lengths[group.index], _copied(group)) for name, group in groups]

    def _copied(group: pd.DataFrame) -> str:
        if "kind" not in group or group.kind.iloc[0] not in ("copy", "memset"):
            return ""
        hidden, size = 100 * (_share(spans(group), kernels) or 0.0), group.bytes.sum() / trace.count / 1e6
        return f"{size:.4g} MB a step, {hidden:.0f} % of the time beside kernels"

    found = list[TopEntry]()
    for name in RANGES:
        if len(events := trace.named(name)):
            # In which it was open on the host: those that overlap count once.
            covered = events.groupby("step")[["begin", "end"]].apply(lambda each: total(each.to_numpy(float)))
            opened = pd.DataFrame({"step": covered.index, "length": covered.to_numpy()})
            device = trace.device_seconds(name)
            note = "" if device is None else f"{1e3 * device:.4g} ms of work on the device"
            one = row("range", name, opened, opened.length, note)
            found.append(one.model_copy(update={"calls": len(events) / trace.count}))
    others = list[TopEntry]()
    if trace.operators is not None:
        others += rows("operator", trace.operators, trace.operators.own)
    for kind, of in (("kernel", ("kernel", "graph")), ("copy", ("copy", "memset"))):
        some = work[work.kind.isin(of)]
        others += rows(kind, some, some.end - some.begin)  # type: ignore[arg-type]
    for name, idle in trace.idle().items():
        lengths = pd.Series(idle[:, 1] - idle[:, 0])
        step = np.searchsorted(trace.starts, idle[:, 0], "right") - 1  # the last step's work may outlive it
        pieces = pd.DataFrame({"step": step})
        others.append(row("gap", name, pieces, lengths, f"longest {lengths.max() / 1e6:.4g} ms"))
    order = ["operator", "kernel", "copy", "gap"]
    return [*found, *sorted(others, key=lambda each: (order.index(each.kind), -each.seconds))]


def _items(trace: Trace, operators: pd.DataFrame) -> int:
    """Return how many numbers were read from tensors, for which a host waits if they are a GPU's.

    With a device these are the reads in which the host did wait. On a CPU nothing tells them apart; a loader's and an
    optimiser's own numbers are the host's everywhere: what is read within these ranges does not count.
    """
    reads, waits = operators[operators.name == "aten::_local_scalar_dense"], trace.waits
    if waits is None or trace.work.empty:
        of_host = spans(trace.ranges[trace.ranges.name.isin(["data", "optimizer"])])
        return int((index_at(of_host, reads.begin.to_numpy()) < 0).sum())
    return sum(
        bool(((waits.thread == thread) & (waits.begin >= begin) & (waits.begin <= end)).any())
        for begin, end, thread in reads[["begin", "end", "thread"]].to_numpy().tolist()
    )


def _share(a: Intervals, b: Intervals) -> float | None:
    """Return the share of the time of `a` in which `b` is, too."""
    return total(intersection(a, b)) / whole if (whole := total(a)) else None
