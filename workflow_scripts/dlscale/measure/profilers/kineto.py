"""Traces of PyTorch's profiler, in Chrome's trace event format as Kineto writes it.

Complete events (`"ph": "X"`) have a category, a thread and times in microseconds. A call of CUDA's API and what it put
on the device share the number `correlation`; all the kernels of a replayed CUDA graph share that of `cudaGraphLaunch`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any, NamedTuple

from dlscale.core.ranges import RANGES
from dlscale.measure.profilers.trace import OPERATOR, RANGE, UNKNOWN, WAIT, WORK, Trace, spans, table

#: Categories of work on the device, and of calls of CUDA's API.
DEVICE = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "memset"}
RUNTIME = ("cuda_runtime", "cuda_driver")
#: Operations between processes, as the host names them.
COMM = re.compile(r"(gloo|nccl|mpi|ucc|xccl):")


class _Event(NamedTuple):
    """A complete event; ns."""

    begin: int
    end: int
    thread: int
    name: str
    category: str
    args: dict[str, Any]


def read(trace: list[dict[str, Any]]) -> Trace:
    """Return the trace in events; `ValueError` for one without a step."""
    events = _events(trace)
    marks = [e for e in events if e.category == "user_annotation"]
    ranges = [(*e[:4], 1) for e in marks if e.name in RANGES]
    ranges += [(*e[:3], "comm", 0) for e in marks if COMM.match(e.name)]
    calls = [e for e in events if e.category in RUNTIME]
    by_number = {e.args["correlation"]: (e.begin, e.thread, n) for n, e in enumerate(calls) if "correlation" in e.args}
    work = []
    for e in events:
        if e.category in DEVICE:
            launch, thread, call = by_number.get(e.args.get("correlation"), (e.begin, UNKNOWN, UNKNOWN))
            source = "HtoD" in e.name, "Pageable" in e.name
            size = int(e.args.get("bytes", 0))
            work.append((e.begin, e.end, thread, e.name, DEVICE[e.category], launch, call, size, *source))
    operators = _nested([e for e in events if e.category == "cpu_op"])
    return Trace(
        ranges=table(ranges, RANGE),
        work=table(work, WORK),
        threads={thread for _, _, thread, name, _ in operators if name.startswith("autograd::engine")},
        waits=table(e[:4] for e in calls if WAIT.match(e.name)),
        operators=table(operators, OPERATOR),
        computing=spans(table((row for row in operators if row[3].startswith("aten::")), OPERATOR)),
    )


def _events(trace: list[dict[str, Any]]) -> list[_Event]:
    """Return the complete events; whole nanoseconds from the first one, so that no digits are lost."""
    whole = [e for e in trace if e.get("ph") == "X" and "cat" in e and isinstance(e.get("ts"), int | float)]
    zero = min((e["ts"] for e in whole), default=0.0)
    threads: dict[Any, int] = {}
    events = []
    for e in whole:
        begin, thread = e["ts"] - zero, threads.setdefault((e.get("pid"), e.get("tid")), len(threads))
        times = round(1e3 * begin), round(1e3 * (begin + e["dur"]))
        events.append(_Event(*times, thread, e["name"], e["cat"], e.get("args", {})))
    return events


def _nested(events: list[_Event]) -> list[tuple[int, int, int, str, int]]:
    """Return the operators as rows: the time of each without that of those within it on its thread.

    An operator that calls itself, which is how PyTorch passes it on from autograd to the kernel, is one.
    """
    kept, own = list[_Event](), list[int]()
    open_: dict[int, list[int]] = defaultdict(list)
    for event in sorted(events, key=lambda event: (event.begin, -event.end)):
        stack = open_[event.thread]
        while stack and kept[stack[-1]].end <= event.begin:
            stack.pop()
        if stack:
            if kept[stack[-1]].name == event.name:
                continue
            own[stack[-1]] -= event.end - event.begin
        stack.append(len(kept))
        kept.append(event)
        own.append(event.end - event.begin)
    return [(*event[:4], time) for event, time in zip(kept, own, strict=True)]
