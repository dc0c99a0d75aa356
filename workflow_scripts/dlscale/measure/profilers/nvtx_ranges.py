"""Ranges of a step (`dlscale.core.ranges`) as NVTX ranges, which Nsight Systems records.

They come from PyTorch where it is built with CUDA, else from NVIDIA's package `nvtx`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dlscale.core.ranges import Marker
from dlscale.parallel.strategy import CommHook

#: The range within which nsys records a run that has no CUDA.
CAPTURE = "dlscale capture"


def marker() -> Marker:
    """Return what opens an NVTX range, for `dlscale.core.ranges.marking`."""
    if torch.version.cuda:
        return torch.cuda.nvtx.range
    import nvtx

    return nvtx.annotate


@contextlib.contextmanager
def recorded(device: torch.device) -> Iterator[None]:
    """Have nsys, which waits for it, record what happens in this context (`nsys.recording` has the words)."""
    if device.type == "cuda":
        torch.cuda.profiler.start()
        try:
            yield
        finally:
            torch.cuda.profiler.stop()
    else:
        with marker()(CAPTURE):
            yield


def averaged(hook: CommHook) -> CommHook:
    """Return what averages a bucket of gradients as `hook` does, in a range `comm`.

    The range lasts from the launch until the sum is there; with NCCL until the device has been told to make it, and
    NCCL's kernels show the rest.
    """

    def within(group: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        end = _begun("comm")

        def ended(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            end()
            return done.value()

        # What DDP waits for is this future, after the range's end: a mere callback would wait for Python's lock until
        # the thread that makes the steps, which then goes on, gives it away.
        return hook(group, bucket).then(ended)

    return within


def _begun(name: str) -> Callable[[], None]:
    """Begin a range that may end in another thread; return what ends it."""
    if torch.version.cuda:
        handle = torch.cuda.nvtx.range_start(name)
        return lambda: torch.cuda.nvtx.range_end(handle)
    import nvtx

    started = nvtx.start_range(name)
    return lambda: nvtx.end_range(started)
