"""What a device reaches at best: the rate of a large matrix product, and that of a copy in its memory.

They are the two lines of a roofline (Williams, Waterman and Patterson 2009, doi:10.1145/1498765.1498785), measured
where a run is measured, instead of taken from a data sheet that no program reaches.

On a processor each thread computes and copies by itself, all of them at once, and their rates are added. One product
that all threads share waits for the slowest of them in each call; where other programs are at work that one is often
not even running, and the same machine seemed to do 2 GFLOP/s or 180, by chance.
"""

from __future__ import annotations

import itertools
import logging
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from dlscale.core.errors import brief
from dlscale.measure.flops import OperatorCount
from dlscale.measure.records import Peaks
from dlscale.parallel.world import World, synchronize
from dlscale.train.precision import compute_dtype

#: Seconds of the products, and of the copies.
PRODUCT_SECONDS = {"cpu": 0.3, "cuda": 0.2}
COPY_SECONDS = 0.2
#: Edges of the matrices; a size is left out where a call of it takes more than a quarter of the time.
EDGES = {"cpu": (256, 512, 1024, 2048), "cuda": (2048, 4096, 8192, 16384)}
#: Bytes of a buffer, of a device or of all threads together, and of each thread at least: far more than caches hold. A
#: thread's is copied piece by piece.
BUFFER = {"cpu": 2**28, "cuda": 2**30}
LEAST, PIECE = 2**24, 2**23


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


def at_least(peaks: Peaks, flops: float) -> Peaks:
    """Return peaks that are not below the FLOP/s that the run itself reached on a device.

    What was reached can be reached: a peak below it is a wrong one, by which MFU would exceed 1 and a roofline lie
    below its point. So the peak is raised, and the log says so.
    """
    if flops <= peaks.flops:
        return peaks
    logging.warning(
        "the run reached %.4g GFLOP/s on a device, more than a matrix product did (%.4g): its own rate is the peak",
        flops / 1e9,
        peaks.flops / 1e9,
    )
    return peaks.model_copy(update={"flops": flops})


def product_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Return the FLOP/s of products of square matrices: of a device, or of all threads of this process together."""
    if device.type == "cpu":
        return _at_once(partial(_best_product, dtype, device))
    return _best_product(dtype, device)


def _best_product(dtype: torch.dtype, device: torch.device) -> float:
    """Return the FLOP/s of the best of all calls, of all sizes in turn.

    The best rate so far tells how long a size will take. So a first call that is slow (threads and clocks that wake,
    libraries that are loaded) leaves a size out for a while, not for good.
    """
    limit, best, products = PRODUCT_SECONDS[device.type], 0.0, dict[int, Callable[[], object]]()
    end = time.perf_counter() + limit
    while time.perf_counter() < end or not best:
        for edge in EDGES[device.type]:
            if best and 2 * edge**3 / best > limit / 4:
                break
            if edge not in products:
                a, b, c = (torch.randn(edge, edge, device=device).to(dtype) for _ in range(3))
                products[edge] = partial(torch.mm, a, b, out=c)
                products[edge]()
            best = max(best, 2 * edge**3 / _seconds(products[edge], device))
    return best


def copy_rate(device: torch.device) -> float:
    """Return the bytes/s of copies, read and written: of a device, or of all threads of this process together."""
    if device.type == "cpu":
        return _at_once(partial(_own_copies, max(LEAST, BUFFER["cpu"] // _threads())))
    source, target = (torch.ones(BUFFER["cuda"], dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * BUFFER["cuda"] / best_of(partial(target.copy_, source), device, COPY_SECONDS)


def _own_copies(size: int) -> float:
    """Return the bytes/s that a thread copies between buffers of a size while others do, by its own processor time.

    Not the best call: that is one of a moment in which the others paused, and the memory is shared. By processor time
    other programs take nothing from it, but for what they move themselves.
    """
    # Ones: of zeros that nobody has written a system has but one page.
    source, target = (torch.ones(size, dtype=torch.uint8).split(PIECE) for _ in range(2))
    rates = list[float]()
    end = time.perf_counter() + COPY_SECONDS
    for here, there in itertools.cycle(zip(source, target, strict=True)):
        begin = time.thread_time()
        there.copy_(here)
        rates.append(2 * len(here) / max(time.thread_time() - begin, 1e-9))
        if time.perf_counter() >= end:
            break
    return statistics.median(rates)


def _at_once(work: Callable[[], float]) -> float:
    """Return the sum of what all threads find, each of which does this work by itself.

    As many threads as PyTorch uses in this process, if there are cores for them: more would be counted twice.
    """
    before, count = torch.get_num_threads(), _threads()
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return sum(each.result() for each in [pool.submit(work) for _ in range(count)])
    finally:
        torch.set_num_threads(before)  # of threads to come, too


def _threads() -> int:
    """Return the threads that PyTorch uses in this process, at most as many as there are cores for it."""
    return min(torch.get_num_threads(), len(os.sched_getaffinity(0)))


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
    return best_of(chain, device, 0.05) / counted.calls


def best_of(function: Callable[[], object], device: torch.device, limit: float) -> float:
    """Return the least seconds of a call: one warms up, then come those that end within `limit`, three at least."""
    start = time.perf_counter()
    times: list[float] = []
    while not times or time.perf_counter() - start + times[-1] < limit or len(times) < 4:
        times.append(_seconds(function, device))
    return min(times[1:])


def _seconds(function: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call and of what it has the device do."""
    synchronize(device)
    begin = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - begin
