"""Memory of a step: measured, and predicted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from dlscale.core import registry
from dlscale.core.ranges import marking
from dlscale.data.loaders.base import Batch
from dlscale.parallel.records import Memory
from dlscale.parallel.world import synchronize
from dlscale.train import memory
from dlscale.train.build import Session

#: Range of a step → name in `Memory.measured`; the memory is measured at the end of the range.
STAGES = {"forward": "forward", "backward": "backward", "optimizer": "step"}


def in_use(device: torch.device) -> int:
    """Return the bytes in use: by tensors on a GPU, or by this process on a CPU."""
    if device.type == "cuda":  # PyTorch's number of the device; NVML numbers devices differently
        return torch.cuda.memory_allocated(device)
    return int(psutil.Process().memory_info().rss)


def reset_peak(device: torch.device) -> None:
    """Reset the peak memory in use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):  # not permitted on every system
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM, the peak


def measure(session: Session, batch: Batch) -> Memory | None:
    """Make a step on `batch`, which is on the device; return its measured and predicted memory.

    Return None without the extension that predicts memory.
    """
    predict = registry.provided("predict_memory", None)
    if predict is None:
        return None
    device = session.world.device
    measured = {"set-up": in_use(device)}

    @contextlib.contextmanager
    def marker(name: str) -> Iterator[None]:
        yield
        if stage := STAGES.get(name):
            synchronize(device)
            measured[stage] = max(in_use(device), measured.get(stage, 0))  # largest over micro-batches

    predicted = predict(session.run, session.manifest, device, batch, session.step.attention)
    reset_peak(device)
    with marking(marker):
        session.step(*batch)
    # Linux counts peak and present memory separately, so the peak may be below the present memory.
    most = max(memory.peak(device), *measured.values())
    return Memory(predicted=predicted, measured=measured, peak=most, device=memory.total(device))
