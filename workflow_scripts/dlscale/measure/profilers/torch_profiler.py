"""`torch`: PyTorch's profiler, on a CPU and on a GPU, with a trace for https://ui.perfetto.dev."""

from __future__ import annotations

import contextlib
import gzip
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from dlscale.core.ranges import marking
from dlscale.core.records import ProfiledTool
from dlscale.measure.profilers.kineto import summarise, with_memory
from dlscale.measure.profilers.tool import Found, Unavailable, report


class TorchProfiler:
    """See `dlscale.measure.profilers.tool.Tool`."""

    name = "torch"

    def __init__(self, folder: Path, rank: int, device: torch.device) -> None:
        self._folder, self._rank, self._device = folder, rank, device
        self._profile: profile | None = None

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Profile steps; the ranges of a step are PyTorch's `record_function`."""
        with self._profiler():  # its first start loads the device's own profiler, which takes long
            torch.zeros(1, device=self._device)
        with self._profiler() as self._profile, marking(record_function):
            yield

    def found(self, seconds: list[float]) -> Found:
        """Write the trace, and read it."""
        assert self._profile is not None
        path = report(self._folder, self.name, self._rank, "trace.json")
        self._profile.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
        path.unlink()
        try:
            ranges, activity, rows = summarise(trace["traceEvents"], self._rank)
        except ValueError as error:
            raise Unavailable(
                f"PyTorch's profiler has lost the steps: {error}; profile fewer (profile.steps)"
            ) from None
        trace["traceEvents"] = with_memory(trace["traceEvents"])
        trace.pop("traceName", None)
        path = report(self._folder, self.name, self._rank, "json.gz")
        with gzip.open(path, "wt", compresslevel=5) as file:
            json.dump(trace, file)
        tool = ProfiledTool(
            name=self.name,
            version=torch.__version__,
            steps=len(seconds),
            seconds_per_step=statistics.median(seconds),
            complete=True,
            ranges=ranges,
            activity=activity,
            files={f"trace of rank {self._rank}, for Perfetto": path.name},
        )
        return tool, rows

    def _profiler(self) -> profile:
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
        return profile(activities=kinds, profile_memory=True, acc_events=True)


@contextlib.contextmanager
def memory_history(path: Path) -> Iterator[None]:
    """Write what each piece of a GPU's memory holds, and who asked for it: for https://pytorch.org/memory_viz."""
    torch.cuda.memory._record_memory_history(stacks="python")
    try:
        yield
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
