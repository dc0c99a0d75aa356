"""Roofline data: the work of a training step for one sample, and the peak rates of a device.

The work follows from a study's formula, or from counting operators. Both count *model* FLOPs, as MFU requires
(Chowdhery et al. 2022, arXiv:2204.02311, appendix B): the FLOPs of products and convolutions, two for a multiply-add,
without recomputation. By formula, the backward pass takes twice the FLOPs of the forward pass. By counting, it takes
less: the gradient of the model's input is not computed.

Peaks are the rates of a large matrix product and of a copy in memory (Williams, Waterman and Patterson 2009,
doi:10.1145/1498765.1498785). On a CPU, peaks are sums over threads that work independently.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count, shape_wrapper

from dlscale.config.run import Geometry
from dlscale.core.errors import brief
from dlscale.data.loaders.base import Batch
from dlscale.data.samples import samples_in, tree_map
from dlscale.measure.records import Peaks, SampleWork
from dlscale.parallel.world import World, synchronize
from dlscale.train.build import Session
from dlscale.train.memory import fake_step
from dlscale.train.precision import compute_dtype

aten = torch.ops.aten
Found = TypeVar("Found")

#: Relative difference between forward FLOPs by formula and by counting above which a warning is logged.
TOLERANCE = 0.02


def attempt(what: str, work: Callable[[], Found]) -> Found | None:
    """Return the result of `work`; if it fails, log `what` and the error, and return None.

    After a failure, the stage continues and keeps its other measurements.
    """
    try:
        return work()
    except Exception as error:  # a model may raise any exception
        logging.info("%s: %s: %s", what, type(error).__name__, brief(error))
        return None


def sample_work(session: Session, batch: Batch) -> tuple[SampleWork | None, SampleWork | None]:
    """Return the work per sample as (counted, by formula), with None for a failure, which is logged.

    The work by formula is also None if the study has no formula.
    """
    work = attempt("FLOPs and bytes cannot be counted", lambda: counted(session, batch))
    forward = attempt("the study's FLOPs formula fails", lambda: session.study.flops(session.run, session.manifest))
    if forward is None:
        return work, None
    formula = SampleWork(
        forward_flops=forward,
        backward_flops=2 * forward,
        bytes=work.bytes if work else None,
        operators=work.operators if work else None,
        source="formula",
    )
    if work and abs(work.forward_flops - formula.forward_flops) > TOLERANCE * formula.forward_flops:
        message = (
            "FLOPs per sample, forward: %.4g by the study's formula, %.4g counted. One of the two numbers is wrong"
        )
        logging.warning(message, formula.forward_flops, work.forward_flops)
    return work, formula


def counted(session: Session, batch: Batch) -> SampleWork:
    """Count FLOPs and bytes of a step's operators per sample of the batch, and the number of operators per step.

    If several devices share a model, the operators of the complete model on one device are counted.
    """
    run = session.run

    def count(checkpointing: bool | str) -> OperatorCount:
        one = run.model_copy(update={"activation_checkpointing": checkpointing, "geometry": Geometry()})
        count = OperatorCount()
        fake = fake_step(one, session.manifest, session.world.device, session.step.attention)
        x, y = tree_map(fake.like, batch)
        fake.train(x, y, count.phase, count)
        return count

    plain = count(False)
    samples = samples_in(batch[0])
    return SampleWork(
        forward_flops=plain.flops["forward"] / samples,
        backward_flops=plain.flops["backward"] / samples,
        bytes=(count(again) if (again := run.activation_checkpointing) else plain).bytes.total() / samples,
        operators=plain.calls,
        source="counted",
    )


class OperatorCount(TorchDispatchMode):
    """Context manager that sums FLOPs and bytes of all operators called within the context, by phase."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.bytes, self.calls = Counter[Any](), Counter[Any](), 0
        self._phase = ""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute operators in this context to the phase `name`."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = self.call(func, args, kwargs)
        self.calls += 1
        key = self.key(func)
        if formula := FORMULAS.get(func._overloadpacket):
            self.flops[key] += formula(*args, **kwargs, out_val=result)
        self.bytes[key] += bytes_moved(func, args, kwargs, result)
        return result

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator and return its result; subclasses may time it."""
        return func(*args, **kwargs)

    def key(self, func: Any) -> Any:
        """Return the key under which an operator is counted."""
        return self._phase


# ---- FLOPs of operators: PyTorch's formulas and additional ones --------------------------------------


def _attention(query: torch.Size, key: torch.Size, value: torch.Size, *rest: Any, **more: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(
    gradient: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *rest: Any, **more: Any
) -> int:
    """Return the FLOPs of four matrix products; the forward pass has two. Recomputed scores do not count."""
    return 2 * int(sdpa_flop_count(query, key, value))


def _convolution_backward(
    gradient: torch.Size, x: torch.Size, weight: torch.Size, *rest: Any, out_shape: Any = None, **more: Any
) -> int:
    """Return a forward pass's FLOPs for each requested gradient (input, weight).

    PyTorch's own formula ignores groups.
    """
    transposed, wanted = rest[4], rest[7]
    places = (x if transposed else gradient)[2:].numel() * x[0]
    return 2 * places * weight.numel() * (int(wanted[0]) + int(wanted[1]))


def _vector(matrix: torch.Size, *rest: Any, **more: Any) -> int:
    return 2 * matrix.numel()


FORMULAS: dict[Any, Any] = {
    **flop_registry,
    **{
        packet: shape_wrapper(formula)
        for formula, names in (
            (_attention, ("_scaled_dot_product_flash_attention_for_cpu",)),
            (
                _attention_backward,
                (
                    "_scaled_dot_product_flash_attention_for_cpu_backward",
                    "_scaled_dot_product_flash_attention_backward",
                    "_scaled_dot_product_efficient_attention_backward",
                    "_scaled_dot_product_cudnn_attention_backward",
                ),
            ),
            (_convolution_backward, ("convolution_backward",)),
            (_vector, ("mv", "dot", "vdot")),
        )
        for name in names
        if (packet := getattr(aten, name, None))
    },
}


# ---- bytes of operators ------------------------------------------------------------------------------

#: Operators that write their first argument without reading it. (`..._like` and `new_...`, which read only shapes, need
#: no entry.)
WRITE_ONLY = {
    "copy_", "fill_", "zero_", "bernoulli_", "normal_", "uniform_", "exponential_", "random_",
    "_foreach_copy_", "_foreach_zero_",
}  # fmt: skip
#: Operator → argument from which the operator reads only as many bytes as it writes.
GATHER = {"gather": "self", "index": "self", "index_select": "self", "embedding": "weight"}


def bytes_moved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the bytes that one call of an operator reads and writes.

    Each input counts as read once, each output as written once, and a tensor that changes in place as read and written.
    Operators in `WRITE_ONLY` and `GATHER` read less. Views, `empty` and queries count as zero.
    """
    name = func._overloadpacket.__name__
    arguments, returns = func._schema.arguments, func._schema.returns
    if func.namespace != "aten" and not any(value is not None for value in tensors_in(result)):
        return 0  # a query, or the begin or end of a profiler's range
    if name.startswith(("empty", "new_empty")) or name == "_unsafe_view":
        return 0
    if any(each.alias_info and not each.alias_info.is_write for each in returns):
        return 0  # a view
    written = sum(_size(value) for value in tensors_in(result)) if not any(each.alias_info for each in returns) else 0
    total = written
    shape_alone = name.endswith("_like") or name.startswith("new_")
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    for place, argument in enumerate(arguments):
        size = sum(_size(value) for value in tensors_in(given.get(argument.name)))
        changed = bool(argument.alias_info and argument.alias_info.is_write)
        if argument.name == "grads" and name.startswith("_fused_") and given.get("grad_scale") is None:
            changed = False  # the schema declares gradients as changed, but they change only with a loss scale
        if GATHER.get(name) == argument.name:
            size = written
        reads = not shape_alone and not (place == 0 and name in WRITE_ONLY)
        total += size * (reads + changed)
    return total


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers."""
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _size(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's distinct elements, so that expanded dimensions count once."""
    sizes = [size if stride or not size else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return math.prod(sizes) * tensor.element_size()


# ---- peaks of a device -----------------------------------------------------------------------------

#: Type of device → seconds for which matrix products are measured.
PRODUCT_SECONDS = {"cpu": 0.3, "cuda": 0.2}
COPY_SECONDS = 0.2  #: Seconds for which copies are measured.
#: Type of device → edges of square matrices. Edges whose product would take over a quarter of `PRODUCT_SECONDS` are
#: skipped.
EDGES = {"cpu": (256, 512, 1024, 2048), "cuda": (2048, 4096, 8192, 16384)}
#: Type of device → bytes of the copied buffer, per GPU or for all CPU threads together; much larger than caches.
BUFFER = {"cpu": 2**28, "cuda": 2**30}
#: Minimum bytes of the copied buffer per thread.
MIN_COPY_BYTES = 2**24
#: Bytes of a single copy by a CPU thread.
PIECE = 2**23


def common_peaks(precision: str, world: World) -> Peaks | None:
    """Measure all devices of a run at the same time; return mean peaks, or None if any measurement fails."""
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    world.barrier()
    own = attempt("the device's peaks cannot be measured", lambda: measure_peaks(precision, world.device))
    found = [peaks for peaks in world.gather(own) if peaks]
    if len(found) < world.size:
        return None
    rates = ("flops", "bytes_per_second", "operator_seconds")
    means = {name: statistics.fmean(getattr(peaks, name) or 0.0 for peaks in found) for name in rates}
    return Peaks(dtype=found[0].dtype, **means)


def measure_peaks(precision: str, device: torch.device) -> Peaks:
    """Measure the peaks of a device in a run's precision."""
    return Peaks(
        dtype=precision.partition("_")[0].replace("fp8", "bf16"),
        flops=product_rate(compute_dtype(precision), device),
        bytes_per_second=copy_rate(device),
        operator_seconds=operator_seconds(device),
    )


def at_least(peaks: Peaks, flops: float) -> Peaks:
    """Return `peaks` with at least `flops`, the FLOP/s that the run reached on a device."""
    if flops <= peaks.flops:
        return peaks
    logging.warning(
        "the run reached %.4g FLOP/s on a device, more than a matrix product reached; the peak is set to this rate",
        flops,
    )
    return peaks.model_copy(update={"flops": flops})


def product_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Measure the FLOP/s of square matrix products, on a GPU or on all threads of this process."""
    work = partial(_best_product, dtype, device)
    return _at_once(work) if device.type == "cpu" else work()


def _best_product(dtype: torch.dtype, device: torch.device) -> float:
    """Return the highest FLOP/s of all products, cycling through the sizes of matrices.

    A size that would take too long at the best rate so far is skipped until the best rate rises, for example after a
    slow first call.
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
    """Measure the bytes/s read and written by copies, on a GPU or on all threads of this process."""
    if device.type == "cpu":
        return _at_once(partial(_own_copies, max(MIN_COPY_BYTES, BUFFER["cpu"] // _threads())))
    source, target = (torch.ones(BUFFER["cuda"], dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * BUFFER["cuda"] / best_of(partial(target.copy_, source), device, COPY_SECONDS)


def _own_copies(size: int) -> float:
    """Return the bytes/s that a thread reads and writes in copies, while other threads also copy.

    The time is the thread's processor time. The rate is the median over copies, because the fastest copy happens while
    other threads pause.
    """
    # Ones, because Linux would map zeros that were never written to a single page, which stays in the cache.
    source, target = (torch.ones(size, dtype=torch.uint8).split(PIECE) for _ in range(2))
    rates, end = list[float](), time.perf_counter() + COPY_SECONDS
    for here, there in itertools.cycle(zip(source, target, strict=True)):
        begin = time.thread_time()
        there.copy_(here)
        rates.append(2 * len(here) / max(time.thread_time() - begin, 1e-9))
        if time.perf_counter() >= end:
            break
    return statistics.median(rates)


def _at_once(work: Callable[[], float]) -> float:
    """Call `work` in each of this process's threads at the same time; return the sum of the results."""
    before, count = torch.get_num_threads(), _threads()
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return sum(each.result() for each in [pool.submit(work) for _ in range(count)])
    finally:
        torch.set_num_threads(before)  # the pool's setting of 1 would also hold for later threads


def _threads() -> int:
    """Return the number of PyTorch's threads in this process, at most the number of the process's logical CPUs."""
    return min(torch.get_num_threads(), len(os.sched_getaffinity(0)))


def operator_seconds(device: torch.device) -> float:
    """Measure the host's seconds per operator call, on products of single numbers and their gradients."""
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
    """Return the shortest time of a call, seconds.

    After a warm-up call, `function` is called repeatedly for about `limit` seconds, and at least three times.
    """
    start = time.perf_counter()
    times: list[float] = []
    while not times or time.perf_counter() - start + times[-1] < limit or len(times) < 4:
        times.append(_seconds(function, device))
    return min(times[1:])


def _seconds(function: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    begin = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - begin
