"""What a trace of PyTorch's profiler says: time by range, by operator, kernel and copy; waits, idle times, overlaps.

The trace is in Chrome's trace event format as Kineto writes it: complete events (`"ph": "X"`) with a category, a thread
and times in microseconds. A call of CUDA's API and what it put on the device share the number `correlation`; all the
kernels of a replayed CUDA graph share that of `cudaGraphLaunch`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dlscale.core.ranges import RANGES
from dlscale.core.records import Activity, RangeTime, TopEntry
from dlscale.measure.profilers.intervals import Intervals, gaps, index_at, intersection, intervals, total, union

DEVICE, RUNTIME = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")
#: Operations between processes: as the host names them, and NCCL's kernels.
COMM, COMM_KERNEL = re.compile(r"(gloo|nccl|mpi|ucc|xccl):"), re.compile(r"nccl", re.IGNORECASE)
#: Calls in which the host waits for the device; copies that are not `Async` do, too. A loader's threads may wait for
#: the device as long as they like: only those of the threads that make the step count.
WAIT = re.compile(r"(cuda|cu)(Stream|Device|Event|Ctx)Synchronize|cudaMemcpy(?!.*Async)|cuMemcpy(?!.*Async)")
#: Shorter times between two pieces of work on the device are how it starts the next, not a wait for the host.
IDLE_SECONDS = 10e-6


@dataclass(frozen=True)
class Event:
    """A complete event; seconds."""

    name: str
    category: str
    thread: Any
    begin: float
    end: float
    args: dict[str, Any]

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Steps:
    """The profiled steps: what happened in which, and means over them."""

    def __init__(self, spans: Intervals) -> None:
        self.spans, self.count = spans, len(spans)
        self.seconds = float((spans[:, 1] - spans[:, 0]).mean())

    def of(self, events: Iterable[Event]) -> np.ndarray:
        """Return the step in which each event began, -1 for none."""
        return index_at(self.spans, np.array([event.begin for event in events]))

    def sums(self, step: np.ndarray, values: Iterable[float]) -> np.ndarray:
        """Return the sum of values [n] in each step [steps], by the step of each [n]."""
        weights, inside = np.array(list(values), float), step >= 0
        return np.bincount(step[inside], weights[inside], self.count)

    def mean(self, step: np.ndarray, values: Iterable[float]) -> float:
        return float(self.sums(step, values).mean())


def summarise(trace: list[dict[str, Any]], rank: int = 0) -> tuple[dict[str, RangeTime], Activity, list[TopEntry]]:
    """Return ranges, activity and all rows of the summary of a trace's events.

    Work on the device belongs to the step, and to the range, in which the host gave it out, whenever it ran. Raises
    `ValueError` for a trace without a step.
    """
    events = _events(trace)
    marks = {name: [e for e in events if e.category == "user_annotation" and e.name == name] for name in RANGES}
    if not marks["step"]:
        raise ValueError("the trace holds no range called 'step'")
    steps, main = Steps(_spans(sorted(marks["step"], key=lambda e: e.begin))), marks["step"][0].thread
    begin, end = steps.spans[0, 0], steps.spans[-1, 1]
    operators, own = _nested([e for e in events if e.category == "cpu_op" and begin <= e.begin <= end])
    calls = {e.args["correlation"]: e for e in events if e.category in RUNTIME and "correlation" in e.args}
    launched = [
        (e, calls[e.args["correlation"]])
        for e in events
        if e.category in DEVICE and e.args.get("correlation") in calls and begin <= calls[e.args["correlation"]].begin
    ]
    device = [e for e, _ in launched]
    launches = list({id(call): call for _, call in launched}.values())
    engine = {e.thread for e in operators if e.name.startswith("autograd::engine")} | {main}
    has_device = bool(calls or device)
    kernels = [e for e in device if e.category == "kernel"]
    comm_kernels = [e for e in kernels if COMM_KERNEL.search(e.name)]
    comm = [e for e in events if e.category == "user_annotation" and COMM.match(e.name)]

    # ---- ranges
    ranges = {}
    launch_step = steps.of(call for _, call in launched)
    for name in RANGES:
        if found := marks[name]:
            host = steps.sums(steps.of(found), (e.seconds for e in found))
            within = _within(found, [call for _, call in launched], main, engine, everywhere=name == "step")
            work = steps.sums(np.where(within, launch_step, -1), (e.seconds for e in device))
            ranges[name] = _range_time(host, work if has_device else None)
    if comm:  # several may be under way at a time
        spans = _spans(comm)
        host = np.array([total(intersection(spans, span[None])) for span in steps.spans])
        within = np.array([bool(COMM_KERNEL.search(e.name)) for e in device], bool)
        work = steps.sums(np.where(within, launch_step, -1), (e.seconds for e in device))
        ranges["comm"] = _range_time(host, work if has_device else None)

    # ---- activity
    busy, computing = _spans(device), _spans(e for e in kernels if e not in comm_kernels)
    last = max([end, *(e.end for e in device)])
    copies = [e for e in device if "HtoD" in e.name]
    pageable = [e for e in copies if "Pageable" in e.name]
    waits = [e for e in events if e.category in RUNTIME and e.thread in engine and WAIT.match(e.name)]
    communicated = _spans(comm_kernels if has_device else comm)
    beside = computing if has_device else _spans(e for e in operators if e.name.startswith("aten::"))
    communicated = intersection(communicated, np.array([[begin, last]]))
    activity = Activity(
        operators=steps.mean(steps.of(operators), np.ones(len(operators))),
        items=_items(steps, operators, waits, marks["data"] + marks["optimizer"], has_device),
    )
    if has_device:
        activity = activity.model_copy(
            update={
                "launches": steps.mean(steps.of(launches), np.ones(len(launches))),
                "syncs": steps.mean(steps.of(waits), np.ones(len(waits))),
                "sync_seconds": steps.mean(steps.of(waits), (e.seconds for e in waits)),
                "device_busy": total(busy) / (last - begin),
                "copy_bytes": steps.mean(_launch_steps(steps, launched, copies), map(_bytes, copies)),
                "pageable_bytes": steps.mean(_launch_steps(steps, launched, pageable), map(_bytes, pageable)),
                "copy_seconds": steps.mean(_launch_steps(steps, launched, copies), (e.seconds for e in copies)),
                "copy_overlap": _share(_spans(copies), _spans(kernels)),
            }
        )
    if len(communicated):
        overlap = {"comm_seconds": total(communicated) / steps.count, "comm_overlap": _share(communicated, beside)}
        activity = activity.model_copy(update=overlap)

    # ---- rows
    table = _Table(steps, rank)
    for name, time in ranges.items():
        count = len(comm) if name == "comm" and comm else len(marks[name])
        share = time.seconds / steps.seconds
        row = {"calls": count / steps.count, "seconds": time.seconds, "std": time.std, "share": share}
        table.rows.append(TopEntry(tool="torch", rank=rank, kind="range", name=name, **row))
    table.add("operator", operators, steps.of(operators), own)
    moved = [e for e in device if e.category != "kernel"]
    table.add("kernel", kernels, _launch_steps(steps, launched, kernels), [e.seconds for e in kernels])
    table.add("copy", moved, _launch_steps(steps, launched, moved), [e.seconds for e in moved])
    if has_device:
        table.idle(gaps(busy, begin, last), [e for name in RANGES[1:] for e in marks[name] if e.thread == main])
    return ranges, activity, table.rows


def with_memory(trace: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events and counters of them that Perfetto draws as curves: bytes allocated since the profile began."""
    counters = []
    for event in trace:
        if event.get("name") == "[memory]":
            args = event["args"]
            number = int(args.get("Device Id", -1))
            place = "host" if number < 0 else f"device {number}"
            value = {"allocated": args.get("Total Allocated", 0)}
            counters.append(
                {"ph": "C", "name": f"memory: {place}", "pid": event["pid"], "ts": event["ts"], "args": value}
            )
    return [event for event in trace if event.get("name") != "[memory]"] + counters


class _Table:
    """Rows of the summary."""

    def __init__(self, steps: Steps, rank: int) -> None:
        self._steps, self._rank, self.rows = steps, rank, list[TopEntry]()

    def add(
        self,
        kind: Literal["operator", "kernel", "copy", "gap"],
        events: list[Event],
        step: np.ndarray,
        seconds: Iterable[float],
        name: Callable[[Event], str] = lambda event: event.name,
    ) -> None:
        """Add a row for each name of the events, the longest first; those outside of steps do not count."""
        sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(self._steps.count))
        calls: dict[str, int] = defaultdict(int)
        for event, number, value in zip(events, step, seconds, strict=True):
            if number >= 0:
                sums[name(event)][number] += value
                calls[name(event)] += 1
        for key, values in sorted(sums.items(), key=lambda item: -item[1].sum()):
            mean = float(values.mean())
            row = {"seconds": mean, "std": _std(values), "share": mean / self._steps.seconds}
            row["calls"] = calls[key] / self._steps.count
            self.rows.append(TopEntry(tool="torch", rank=self._rank, kind=kind, name=key, **row))

    def idle(self, spans: Intervals, ranges: list[Event]) -> None:
        """Add the device's idle times, by the innermost range that the host was in when each began."""
        spans = spans[spans[:, 1] - spans[:, 0] >= IDLE_SECONDS]
        events = []
        for begin, end in spans.tolist():
            at = [e for e in ranges if e.begin <= begin <= e.end]
            place = f"while the host was in {min(at, key=lambda e: e.seconds).name}" if at else "elsewhere in the step"
            events.append(Event(f"idle {place}", "gap", None, begin, end, {}))
        # The device may be at work after the last step has ended on the host: that is of this step.
        step = np.searchsorted(self._steps.spans[:, 0], [e.begin for e in events], "right") - 1
        self.add("gap", events, step, [e.seconds for e in events])


def _events(trace: list[dict[str, Any]]) -> list[Event]:
    """Return the complete events; seconds from the first one, so that no digits are lost."""
    whole = [e for e in trace if e.get("ph") == "X" and "cat" in e and isinstance(e.get("ts"), int | float)]
    zero = min((e["ts"] for e in whole), default=0.0)
    events = []
    for e in whole:
        begin = e["ts"] - zero
        thread, args = (e.get("pid"), e.get("tid")), e.get("args", {})
        events.append(Event(e["name"], e["cat"], thread, 1e-6 * begin, 1e-6 * (begin + e["dur"]), args))
    return events


def _spans(events: Iterable[Event]) -> Intervals:
    return intervals((e.begin, e.end) for e in events)


def _bytes(event: Event) -> float:
    return float(event.args.get("bytes", 0))


def _share(a: Intervals, b: Intervals) -> float | None:
    """Return the share of the time of `a` in which `b` is, too."""
    return total(intersection(a, b)) / whole if (whole := total(a)) else None


def _std(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def _range_time(host: np.ndarray, device: np.ndarray | None) -> RangeTime:
    on_device = None if device is None else float(device.mean())
    return RangeTime(seconds=float(host.mean()), std=_std(host), device_seconds=on_device)


def _launch_steps(steps: Steps, launched: list[tuple[Event, Event]], events: list[Event]) -> np.ndarray:
    """Return the step in which the host gave out each event."""
    call_of = {id(event): call for event, call in launched}
    return steps.of(call_of[id(event)] for event in events)


def _within(
    ranges: list[Event], calls: list[Event], main: Any, engine: set[Any], everywhere: bool = False
) -> np.ndarray:
    """Return for each call whether it was made within one of the ranges, bool [n].

    A call belongs to the ranges of its own thread; that of autograd's threads, to those of the step's. What a loader's
    threads do meanwhile is no part of a forward pass, but of the step (`everywhere`).
    """
    spans = {thread: union(_spans(e for e in ranges if e.thread == thread)) for thread in {e.thread for e in ranges}}
    inside = np.zeros(len(calls), bool)
    for thread in {call.thread for call in calls}:
        here = np.array([call.thread == thread for call in calls], bool)
        owner = main if everywhere or thread in engine else thread
        if owner in spans:
            times = np.array([call.begin for call in calls])[here]
            inside[here] = index_at(spans[owner], times) >= 0
    return inside


def _items(steps: Steps, operators: list[Event], waits: list[Event], of_host: list[Event], has_device: bool) -> float:
    """Return how many numbers a step reads from tensors, for which a host waits if they are a GPU's.

    With a device these are the reads in which the host did wait. On a CPU nothing tells them apart; a loader's and an
    optimiser's own numbers are the host's everywhere: what is read within the ranges `of_host` does not count.
    """
    reads = [e for e in operators if e.name == "aten::_local_scalar_dense"]
    if has_device:
        at = {thread: np.sort([e.begin for e in waits if e.thread == thread]) for thread in {e.thread for e in reads}}
        counts = [len(set(np.searchsorted(at[e.thread], [e.begin, e.end]))) > 1 for e in reads]
    else:
        counts = list(index_at(union(_spans(of_host)), np.array([e.begin for e in reads])) < 0)
    return steps.mean(steps.of(reads), counts)


def _nested(events: list[Event]) -> tuple[list[Event], list[float]]:
    """Return the operators and the time of each without that of those within it on its thread.

    An operator that calls itself, which is how PyTorch passes it on from autograd to the kernel, is one.
    """
    kept, own = list[Event](), list[float]()
    open_: dict[Any, list[int]] = defaultdict(list)
    for event in sorted(events, key=lambda event: (event.begin, -event.end)):
        stack = open_[event.thread]
        while stack and kept[stack[-1]].end <= event.begin:
            stack.pop()
        if stack:
            if kept[stack[-1]].name == event.name:
                continue
            own[stack[-1]] -= event.seconds
        stack.append(len(kept))
        kept.append(event)
        own.append(event.seconds)
    return kept, own
