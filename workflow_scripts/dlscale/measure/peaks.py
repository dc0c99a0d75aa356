"""What a device reaches at best: the rate of a large matrix product, and that of a copy in its memory.

They are the two lines of a roofline (Williams, Waterman and Patterson 2009, doi:10.1145/1498765.1498785), measured
where a run is measured, instead of taken from a data sheet that no program reaches.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from dlscale.core.errors import brief
from dlscale.core.records import Peaks
from dlscale.measure.flops import OperatorCount
from dlscale.parallel.world import World, synchronize
from dlscale.train.precision import compute_dtype

#: Seconds for each of the two.
SECONDS = 0.2
#: Edges of the matrices: those that a device does in a fraction of the time.
EDGES = {"cpu": (256, 512, 1024, 2048, 4096), "cuda": (2048, 4096, 8192, 16384)}
#: Bytes of a buffer: far more than the caches hold.
BUFFER = {"cpu": 2**26, "cuda": 2**30}


def common_peaks(precision: str, world: World) -> Peaks | None:
    """Return the peaks of a device while all of a run's devices are at it, as in a run: the mean of all ranks.

    None, with a line in the log, where a rank has not the memory left for it.
    """
    own: Peaks | None = None
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    world.barrier()
    try:
        own = measure_peaks(precision, world.device)
    except (RuntimeError, MemoryError) as error:
        logging.info("the device's peaks cannot be measured: %s", brief(error))
    found = [peaks for peaks in world.gather(own) if peaks]
    if len(found) < world.size:
        return None
    return Peaks(
        dtype=found[0].dtype,
        flops=statistics.fmean(peaks.flops for peaks in found),
        bytes_per_second=statistics.fmean(peaks.bytes_per_second for peaks in found),
        operator_seconds=statistics.fmean(peaks.operator_seconds or 0.0 for peaks in found),
    )


def measure_peaks(precision: str, device: torch.device) -> Peaks:
    """Return the peaks of a device in a run's precision, whose use of TensorFloat-32 has been set for the process."""
    return Peaks(
        dtype=precision.partition("_")[0],
        flops=product_rate(compute_dtype(precision), device),
        bytes_per_second=copy_rate(device),
        operator_seconds=operator_seconds(device),
    )


def product_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Return the FLOP/s of products of square matrices, at the best of all sizes and turns."""
    best, left = 0.0, SECONDS
    for edge in EDGES[device.type]:
        a, b, c = (torch.randn(edge, edge, device=device).to(dtype) for _ in range(3))
        seconds, spent = best_of(partial(torch.mm, a, b, out=c), device, left / 2)
        best, left = max(best, 2 * edge**3 / seconds), left - spent
        if 3 * 8 * seconds > left:  # the next size takes eight times as long, and one turn to warm up
            break
    return best


def copy_rate(device: torch.device) -> float:
    """Return the bytes/s of a copy from one buffer to another, read and written, at the best of all turns."""
    count = BUFFER[device.type] if device.type == "cuda" else max(BUFFER["cpu"], 4 * cache_bytes())
    # Ones: of zeros that nobody has written a system has but one page.
    source, target = (torch.ones(count, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * count / best_of(partial(target.copy_, source), device, SECONDS)[0]


def operator_seconds(device: torch.device) -> float:
    """Return the seconds that the host takes to call one operator, of those of a chain of products and its gradients.

    On single numbers, of which a device has nothing to compute.
    """
    x = torch.ones(1, device=device, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(100):
            y = y * x
        y.backward()

    with OperatorCount() as counted:
        chain()
    return best_of(chain, device, 0.05)[0] / counted.calls


def best_of(function: Callable[[], object], device: torch.device, limit: float) -> tuple[float, float]:
    """Return the least seconds of a call, and those of all: one warms up, then come those that end within `limit`."""
    start = time.perf_counter()
    times: list[float] = []
    while not times or time.perf_counter() - start + times[-1] < limit or len(times) < 2:
        synchronize(device)
        begin = time.perf_counter()
        function()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times[1:]), time.perf_counter() - start


def cache_bytes() -> int:
    """Return the size of the last cache of a processor core; 0 where the system does not say."""
    sizes = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        if text.endswith("K") and text[:-1].isdecimal():
            sizes.append(int(text[:-1]) * 1024)
    return max(sizes)
