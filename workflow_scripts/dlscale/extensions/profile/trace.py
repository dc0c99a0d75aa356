"""Summary of profiled events: time by range, device work, waits, idle times and overlaps.

An event on the host belongs to the step in which the event began. Work on the device belongs to the step in which the
host launched the work. The time between two steps counts for the earlier step. Device work also belongs to the ranges
that were open on the launching thread. If a thread of autograd launched the work, the work belongs to the ranges that
were open on the thread that makes the steps.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import numpy as np
import pandas as pd

from dlscale.core.ranges import RANGES
from dlscale.measure.profilers import Activity, ProfiledTool, RangeTime, TopEntry

#: Columns of a table of events; times are nanoseconds from an arbitrary zero.
#:
#: `kind`: `range` (its name is one of `RANGES`), `operator`, `call` (of CUDA's API), or one of `DEVICE`. `thread`:
#: arbitrary number of a thread. `correlation`: number that a call and the work that it launches have in common, or 0.
#: `own`: time of an operator without the operators inside it.
COLUMNS = ("kind", "name", "begin", "end", "thread", "correlation", "bytes", "own")
#: Kinds of work on the device.
DEVICE = ("kernel", "copy", "memset")
#: Calls in which the host waits for the device, including copies without `Async`.
WAIT = re.compile(r"(cuda|cu)(Stream|Device|Event|Ctx)Synchronize|cudaMemcpy(?!.*Async)|cuMemcpy(?!.*Async)")
#: Names of NCCL's kernels.
NCCL = re.compile("nccl", re.IGNORECASE)
#: Names of copies from the host to the device, and of copies from memory that is not page-locked.
TO_DEVICE, PAGEABLE = re.compile("HtoD|Host-to-"), re.compile(r"(HtoD|Host-to-\w+) \(pageable", re.IGNORECASE)
#: Name of idle times during which the host was outside of all ranges.
OUTSIDE = "outside of ranges"
UNKNOWN = -1
SECOND = 1e9

#: Start and end of intervals, float64 [n, 2], unordered. The intervals may overlap.
Intervals = np.ndarray


def union(x: Intervals) -> Intervals:
    """Return the ordered disjoint intervals that cover the same time; touching intervals are merged."""
    x = x[x[:, 1] > x[:, 0]]
    if not len(x):
        return x
    x = x[np.argsort(x[:, 0], kind="stable")]
    ends = np.maximum.accumulate(x[:, 1])
    first = np.r_[True, x[1:, 0] > ends[:-1]]  # the interval begins after the end of all previous intervals
    return np.stack([x[first, 0], ends[np.r_[first[1:], True]]], axis=1)


def total(x: Intervals) -> float:
    """Return the covered time; overlapping parts count once."""
    return float(np.diff(union(x)).sum())


def overlap(a: Intervals, b: Intervals) -> float | None:
    """Return the fraction of the time of `a` that `b` also covers; None if `a` is empty."""
    both = total(a) + total(b) - total(np.concatenate([a, b]))
    return both / total(a) if len(union(a)) else None


def index_at(x: Intervals, times: np.ndarray) -> np.ndarray:
    """Return the index of the interval that contains each time [m], int64 [m]; -1 outside.

    The intervals must be disjoint and ordered. Start and end of an interval belong to the interval.
    """
    if not len(x):
        return np.full(len(times), -1)
    found = np.searchsorted(x[:, 0], times, "right") - 1
    return np.where((found >= 0) & (times <= x[found, 1]), found, -1)


def spans(events: pd.DataFrame) -> Intervals:
    """Return the disjoint intervals that events cover."""
    return union(events[["begin", "end"]].to_numpy(float))


def named(events: pd.DataFrame, pattern: re.Pattern[str]) -> pd.DataFrame:
    """Return the events whose names contain a pattern."""
    return events[np.array([bool(pattern.search(name)) for name in events.name], bool)]


class Trace:
    """The steps of one process with their events; events before the first and after the last step are dropped."""

    def __init__(self, events: pd.DataFrame) -> None:
        steps = events[(events.kind == "range") & (events.name == "step")].sort_values("begin")
        if steps.empty:
            raise ValueError("the trace contains no range with the name step")
        self.starts, self.end, self.main = steps.begin.to_numpy(), int(steps.end.max()), int(steps.thread.iloc[0])
        self.count = len(steps)
        calls = events[(events.kind == "call") & (events.correlation > 0)].sort_values("begin")
        calls = calls.drop_duplicates("correlation").set_index("correlation")
        on_device, launch = events.kind.isin(DEVICE), events.correlation.map(calls.begin).fillna(events.begin)
        thread = events.correlation.map(calls.thread).fillna(UNKNOWN)
        events = events.assign(
            launch=launch.where(on_device, events.begin),
            thread=thread.where(on_device, events.thread),
            length=events.own.where(events.kind == "operator", events.end - events.begin),
        )
        number = np.searchsorted(self.starts, events.launch, "right") - 1
        inside = (number >= 0) & (events.launch <= self.end)
        self.events = events.assign(step=number)[inside]
        self.ranges, self.work, self.operators = self.of("range"), self.of(*DEVICE), self.of("operator")
        #: Ranges that nest on their thread. Ranges of communication are left out, because they overlap other ranges.
        self.pushed = self.ranges[self.ranges.name != "comm"]
        self.engine = self._engine()
        #: Start of the first step; end of the last step or of the steps' device work, whichever is later; ns.
        self.window = int(self.starts[0]), max([self.end, *self.work.end])
        #: Mean seconds per step in the window.
        self.step_seconds = (self.window[1] - self.window[0]) / self.count / SECOND

    def of(self, *kinds: str) -> pd.DataFrame:
        return self.events[self.events.kind.isin(kinds)]

    def _engine(self) -> set[int]:
        """Return autograd's threads, which run operators named `autograd::engine…`.

        Without operators, autograd's threads are the threads without ranges that call the device in every range
        `backward` of the main thread, and at no other time.
        """
        if len(self.operators):
            return set(named(self.operators, re.compile("^autograd::engine")).thread)
        backward = self.ranges[(self.ranges.name == "backward") & (self.ranges.thread == self.main)]
        passes, found = spans(backward), set[int]()
        for thread, calls in self.of("call").groupby("thread"):
            within = set(index_at(passes, calls.begin.to_numpy()).tolist())
            if within == set(range(len(passes))) and thread not in self.pushed.thread.to_numpy():
                found.add(thread)  # type: ignore[arg-type]
        return found

    def device_seconds(self, name: str) -> float | None:
        """Return the device seconds per step of the work that was launched in a range; None without device work."""
        if self.work.empty:
            return None
        work, ranges = self.work, self.ranges[self.ranges.name == name]
        inside = np.full(len(work), name == "step")  # all work is part of a step
        for thread in set(work.thread) - {UNKNOWN}:
            main = (ranges.thread == self.main) & (thread in self.engine) & (name != "comm")
            covered = spans(ranges[(ranges.thread == thread) | main])
            inside |= (work.thread == thread) & (index_at(covered, work.launch.to_numpy()) >= 0)
        return float(work.length[inside].sum()) / self.count / SECOND

    def idle(self) -> pd.DataFrame:
        """Return the idle times of the device as events, each named after the main thread's innermost open range."""
        busy, rows = spans(self.work), self.pushed[self.pushed.thread == self.main]
        edges = np.unique(np.r_[self.window, rows.begin, rows.end, busy.ravel()]).clip(*self.window)
        begins, ends, names = edges[:-1], edges[1:], np.full(len(edges) - 1, OUTSIDE, object)
        # Inner ranges begin later or end earlier, so inner ranges come last in this order and overwrite outer ranges.
        for row in rows.sort_values(["begin", "end"], ascending=[True, False]).itertuples():
            names[(begins >= row.begin) & (begins < row.end)] = row.name
        # Idle times after the end of the last step count for the last step, because its work may still run.
        step = np.searchsorted(self.starts, begins, "right") - 1
        pieces = pd.DataFrame({"name": names, "begin": begins, "end": ends, "length": ends - begins, "step": step})
        return pieces[(index_at(busy, (begins + ends) / 2) < 0) & (pieces.length > 0)]


def summarise(events: pd.DataFrame, tool: str, rank: int = 0) -> tuple[ProfiledTool, list[TopEntry]]:
    """Summarise the events of a rank, for `profile.json` and `profile_summary.csv`.

    Raises
    ------
    ValueError
        The events contain no step.
    """
    trace = Trace(events)
    idle = trace.idle() if len(trace.work) else None
    rows = _rows(trace, tool, rank, idle)
    usual = float(np.median(np.diff(np.r_[trace.starts, trace.end]))) / SECOND
    summary = ProfiledTool(
        name=tool,
        steps=trace.count,
        seconds_per_step=trace.step_seconds if len(trace.work) else usual,
        ranges={
            row.name: RangeTime(seconds=row.seconds, std=row.std, device_seconds=trace.device_seconds(row.name))
            for row in rows
            if row.kind == "range"
        },
        activity=_activity(trace, idle),
    )
    return summary, rows


def _activity(trace: Trace, idle: pd.DataFrame | None) -> Activity:
    each, work = trace.count * SECOND, trace.work
    waits = named(trace.of("call"), WAIT)
    waits = waits[waits.thread.isin([trace.main, *trace.engine])]
    items = _items(trace, waits) / trace.count if len(trace.operators) else None
    if idle is None:
        sums = spans(trace.ranges[trace.ranges.name == "comm"])
        seconds = total(sums) / each if len(sums) else None
        computed = spans(named(trace.operators, re.compile("^aten::")))
        return Activity(
            items=items, comm_seconds=seconds, comm_overlap=overlap(sums, computed) if len(trace.operators) else None
        )
    kernels, copies = work[work.kind == "kernel"], named(work[work.kind == "copy"], TO_DEVICE)
    nccl = named(kernels, NCCL)
    return Activity(
        items=items,
        launches=work.correlation[work.thread != UNKNOWN].nunique() / trace.count,
        syncs=len(waits) / trace.count,
        sync_seconds=float(waits.length.sum()) / each,
        device_busy=total(spans(work)) / (trace.window[1] - trace.window[0]),
        idle_seconds={str(name): length / each for name, length in idle.groupby("name").length.sum().items()},
        copy_bytes=float(copies.bytes.sum()) / trace.count,
        pageable_bytes=float(named(copies, PAGEABLE).bytes.sum()) / trace.count,
        copy_seconds=total(spans(copies)) / each,
        copy_overlap=overlap(spans(copies), spans(kernels)),
        comm_seconds=total(spans(nccl)) / each if len(spans(nccl)) else None,
        comm_overlap=overlap(spans(nccl), spans(kernels.drop(nccl.index))),
    )


def _items(trace: Trace, waits: pd.DataFrame) -> int:
    """Return the number of reads from tensors (`.item()`) that made the host wait.

    Without device work, all reads count, except reads of the loader and the optimiser.
    """
    reads = trace.operators[trace.operators.name == "aten::_local_scalar_dense"]
    if trace.work.empty:
        of_host = spans(trace.ranges[trace.ranges.name.isin(["data", "optimizer"])])
        return int((index_at(of_host, reads.begin.to_numpy()) < 0).sum())
    return sum(
        bool(((waits.thread == thread) & waits.begin.between(begin, end)).any())
        for thread, begin, end in reads[["thread", "begin", "end"]].to_numpy().tolist()
    )


def _rows(trace: Trace, tool: str, rank: int, idle: pd.DataFrame | None) -> list[TopEntry]:
    """Return the rows of the summary: ranges, then operators, kernels, copies and gaps by decreasing time."""
    found, kernels = list[TopEntry](), spans(trace.work[trace.work.kind == "kernel"])

    def add(kind: Literal["range", "operator", "kernel", "copy", "gap"], events: pd.DataFrame, times: Any) -> None:
        """Add a row for each name; `times` are nanoseconds by name and step."""
        if events.empty:
            return
        table = times.unstack(fill_value=0).reindex(columns=range(trace.count), fill_value=0) / SECOND
        means, spread = table.mean(axis=1), table.std(axis=1).fillna(0.0)
        order = (
            [name for name in RANGES if name in means] if kind == "range" else means.sort_values(ascending=False).index
        )
        groups = dict(iter(events.groupby("name")))
        for name in order:
            values = {"calls": len(groups[name]) / trace.count, "seconds": means[name], "std": spread[name]}
            note = _note(trace, kind, groups[name], kernels)
            share = means[name] / trace.step_seconds
            found.append(TopEntry(tool=tool, rank=rank, kind=kind, name=name, note=note, share=share, **values))

    def lengths(events: pd.DataFrame) -> Any:
        return events.groupby(["name", "step"]).length.sum()

    # Time in which a range was open on the host; overlapping ranges of the same name count once.
    opened = trace.ranges.groupby(["name", "step"])[["begin", "end"]].apply(lambda each: total(each.to_numpy(float)))
    add("range", trace.ranges, opened)
    add("operator", trace.operators, lengths(trace.operators))
    add("kernel", of := trace.of("kernel"), lengths(of))
    add("copy", of := trace.of("copy", "memset"), lengths(of))
    if idle is not None:
        add("gap", idle, lengths(idle))
    return found


def _note(trace: Trace, kind: str, events: pd.DataFrame, kernels: Intervals) -> str:
    if kind == "gap":
        return f"longest {events.length.max() / 1e6:.4g} ms"
    if kind == "copy":
        beside, size = 100 * (overlap(spans(events), kernels) or 0.0), events.bytes.sum() / trace.count / 1e6
        return f"{size:.4g} MB per step, {beside:.0f} % of the time overlapping with kernels"
    return ""
