"""`torch`: PyTorch's profiler, on a CPU and on a GPU, with a trace for https://ui.perfetto.dev."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from dlscale.core.ranges import RANGES, marking
from dlscale.extensions.profile.trace import COLUMNS, DEVICE, summarise
from dlscale.measure.profilers import Found, Unavailable

REFUSED = (
    "PyTorch's profiler recorded no GPU work: CUPTI is not permitted, or another profiler uses it (see the log). "
    "Set the driver's option NVreg_RestrictProfilingToAdminUsers=0, start the container with --cap-add SYS_ADMIN, or "
    "end the other profiler"
)
#: Category of Kineto in Chrome's trace event format → kind of event.
KINDS = {
    **{"user_annotation": "range", "cpu_op": "operator", "cuda_runtime": "call", "cuda_driver": "call"},
    **{"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "memset"},
}
#: Row of a table of events, in the order of `COLUMNS`.
Row = tuple[str, str, int, int, int, int, int, int]
#: Names of ranges for communication between processes.
COMM = re.compile(r"(gloo|nccl|mpi|ucc|xccl):")


class TorchProfiler:
    """PyTorch's profiler around some steps of this process."""

    name = "torch"

    def __init__(self, folder: Path, rank: int, device: torch.device) -> None:
        self._path, self._rank, self._device = folder / f"torch.rank{rank}.json.gz", rank, device
        self._profile: profile | None = None

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Profile the steps in this context; mark the ranges of a step with PyTorch's `record_function`."""
        with self._profiler():  # the first start loads CUPTI, which is slow
            torch.zeros(1, device=self._device)
        with self._profiler() as self._profile, marking(record_function):
            yield

    def found(self, seconds: list[float]) -> Found:
        """Write the trace, and return its summary."""
        assert self._profile is not None
        self._profile.export_chrome_trace(str(self._path))
        try:
            with gzip.open(self._path, "rt") as file:
                events = read(json.load(file)["traceEvents"])
            tool, rows = summarise(events, self.name, self._rank)
        except (OSError, ValueError) as error:
            raise Unavailable(
                f"PyTorch's profiler wrote an incomplete trace ({error}). Check the free disk space, or profile fewer "
                "steps (profile.steps)"
            ) from None
        device = events.kind.isin(DEVICE).any()
        if self._device.type == "cuda" and not device:
            raise Unavailable(REFUSED)
        files = {f"trace of rank {self._rank}, for Perfetto": self._path.name}
        known: dict[str, Any] = {"version": torch.__version__, "files": files}
        if not device:
            known["seconds_per_step"] = statistics.median(seconds)
        return tool.model_copy(update=known), rows

    def _profiler(self) -> profile:
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
        return profile(activities=kinds, acc_events=True)


def read(trace: list[dict[str, Any]]) -> pd.DataFrame:
    """Return Kineto's events as a table with `COLUMNS`.

    A call of CUDA's API and the work that the call launches have the same number `correlation`. All kernels of a
    replayed CUDA graph have the number of the replaying call.
    """
    whole = [e for e in trace if e.get("ph") == "X" and e.get("cat") in KINDS]
    zero = min((e["ts"] for e in whole), default=0.0)
    threads: dict[Any, int] = {}
    rows = list[Row]()
    for e in whole:
        kind, name, args, begin = KINDS[e["cat"]], e["name"], e.get("args", {}), e["ts"] - zero
        if kind == "range" and name not in RANGES:
            if not COMM.match(name):
                continue
            name = "comm"
        # Integer nanoseconds from the first event, to keep all digits.
        begin, end = round(1e3 * begin), round(1e3 * (begin + e["dur"]))
        thread = threads.setdefault((e.get("pid"), e.get("tid")), len(threads))
        rows.append((kind, name, begin, end, thread, args.get("correlation", 0), int(args.get("bytes", 0)), 0))
    operators = _nested([row for row in rows if row[0] == "operator"])
    return pd.DataFrame([*(row for row in rows if row[0] != "operator"), *operators], columns=list(COLUMNS))


def _nested(operators: list[Row]) -> list[Row]:
    """Return the operators with their own time, without the time of operators within them on the same thread.

    An operator that calls itself counts once, because PyTorch calls an operator again when it dispatches from autograd
    to the kernel.
    """
    kept, own = list[Row](), list[int]()
    inside: dict[int, list[int]] = defaultdict(list)
    for row in sorted(operators, key=lambda row: (row[2], -row[3])):
        _, name, begin, end, thread, *_ = row
        stack = inside[thread]
        while stack and kept[stack[-1]][3] <= begin:
            stack.pop()
        if stack:
            if kept[stack[-1]][1] == name:
                continue
            own[stack[-1]] -= end - begin
        stack.append(len(kept))
        kept.append(row)
        own.append(end - begin)
    return [(*row[:-1], time) for row, time in zip(kept, own, strict=True)]
