"""Memory of a device: in use, greatest in use, and available."""

from __future__ import annotations

import contextlib
import re
import resource
import sys
from pathlib import Path

import psutil
import torch

from dlscale.core.machine import job_limits, text_of


def in_use(device: torch.device) -> int:
    """Return the bytes that tensors hold on a GPU, or this process on a CPU."""
    if device.type == "cuda":  # by PyTorch's own number of the device, which NVML counts in another way
        return torch.cuda.memory_allocated(device)
    return int(psutil.Process().memory_info().rss)


def reset_peak(device: torch.device) -> None:
    """Reset the greatest memory in use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):  # not allowed everywhere
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM


def peak(device: torch.device) -> int:
    """Return the greatest bytes in use since `reset_peak`, of a GPU, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Not `ru_maxrss`, which a process inherits.
    if own := re.search(r"^VmHWM:\s*(\d+) kB", text_of(Path("/proc/self/status")), re.MULTILINE):
        return 1024 * int(own[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def of_children() -> int:
    """Return the bytes that child processes hold now; shared ones count once (PSS)."""
    found = 0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it may end meanwhile
            info = child.memory_full_info()
            found += getattr(info, "pss", info.uss)
    return found


def total(device: torch.device, processes: int = 1) -> int:
    """Return the bytes of the device; of a CPU those that one of so many processes of the node may have."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    own = [limit for limit, _ in _own_limits()]
    return int(min([psutil.virtual_memory().total // processes, *(n // processes for n, _ in job_limits()), *own]))


def available(device: torch.device) -> int:
    """Return the bytes that this process may still take on the device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    rests = [limit - used for limit, used in (*_own_limits(), *job_limits())]
    return int(max(min([psutil.virtual_memory().available, *rests]), 0))


def _own_limits() -> list[tuple[int, int]]:
    """Return the limit of this process's memory (`ulimit -v`), if there is one, and its use."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return [] if limit == resource.RLIM_INFINITY else [(limit, int(psutil.Process().memory_info().vms))]
