"""`torch`: PyTorch's profiler, on a CPU and on a GPU, with a trace for https://ui.perfetto.dev."""

from __future__ import annotations

import contextlib
import gzip
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from dlscale.core.ranges import marking
from dlscale.measure.profilers.kineto import read
from dlscale.measure.profilers.tool import Found, Unavailable, report
from dlscale.measure.profilers.trace import summarise

REFUSED = (
    "PyTorch's profiler saw nothing of the GPU: CUPTI is refused, or another profiler has it; the log has its words. "
    "The driver's option NVreg_RestrictProfilingToAdminUsers=0 allows it, or --cap-add SYS_ADMIN in a container"
)


class TorchProfiler:
    """See `dlscale.measure.profilers.tool.Tool`."""

    name = "torch"

    def __init__(self, folder: Path, rank: int, device: torch.device) -> None:
        self._path, self._rank, self._device = report(folder, self.name, rank, "json.gz"), rank, device
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
        self._profile.export_chrome_trace(str(self._path))
        try:
            with gzip.open(self._path, "rt") as file:
                seen = read(json.load(file)["traceEvents"])
        except (OSError, ValueError) as error:
            raise Unavailable(
                f"PyTorch's profiler left no whole trace ({error}): is the disk full? Or profile fewer steps "
                "(profile.steps)"
            ) from None
        if self._device.type == "cuda" and seen.work.empty:
            raise Unavailable(REFUSED)
        tool, rows = summarise(seen, self.name, self._rank)
        files = {f"trace of rank {self._rank}, for Perfetto": self._path.name}
        known: dict[str, Any] = {"version": torch.__version__, "files": files}
        if seen.work.empty:
            known["seconds_per_step"] = statistics.median(seconds)
        return tool.model_copy(update=known), rows

    def _profiler(self) -> profile:
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
        return profile(activities=kinds, acc_events=True)


@contextlib.contextmanager
def memory_history(path: Path) -> Iterator[None]:
    """Write what each piece of a GPU's memory holds, and who asked for it: for https://pytorch.org/memory_viz."""
    torch.cuda.memory._record_memory_history(stacks="python")
    try:
        yield
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
