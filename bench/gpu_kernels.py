"""Kernels and idle time of a step; speed of attention kernels and decoders."""

from __future__ import annotations

import json
import math
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from bench.cases import Case, sizes
from bench.gpu_timings import Data, data
from bench.tasks import Bench, Skip, Task, Values
from dlscale.data.loaders import direct_loader
from dlscale.data.loaders.direct_loader import Resident, on_device
from dlscale.train.attention import BACKENDS, only

#: Settings of each study's last rung before compilation.
BEST: dict[str, dict[str, Any]] = {
    "cosmo_unet": {
        "precision": "bf16",
        "optimizer": {"fused": True},
        "memory_format": "channels_last",
        "model": {"space_to_depth": True},
    },
    "era5_vit": {"precision": "bf16", "optimizer": {"fused": True}, "attention": "auto"},
}

# --- a step's kernels --------------------------------------------------------------------------------------------

#: Pattern of kernel names by kind; the first match counts. On a CPU, the patterns apply to operators.
KINDS = {
    "attention": r"flash|fmha|sdpa|attention",
    # Conversions have "to" in their names. Names of products may also contain a layout: sm90_xmma_..._gemm_..._nhwc_...
    "layout": r"(nchw|nhwc|ncdhw|ndhwc)_?to|(?<!conv_)transpose|converttensor|im2col",
    "convolutions, products": r"conv|gemm|xmma|nvjet|cutlass|wgrad|dgrad|fprop|cublas|addmm|\bmm\b|bmm|linear",
    "optimiser": r"multi_tensor|adam|sgd|foreach",
    "copies": r"memcpy|memset|copy",
}
MAX_ROWS = 15  #: Maximum number of rows in tables of kernels.
STEPS = 3  #: Number of profiled steps.


@dataclass(frozen=True)
class Launch:
    """A kernel or a copy on the device; times in microseconds."""

    name: str
    start: float
    duration: float


def launches(bench: Bench, action: Callable[[], object], count: int) -> list[Launch]:
    """Return the kernels and copies of `count` calls from PyTorch's trace, sorted by start.

    On a CPU these are the outermost operations of each thread.
    """
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA if bench.cuda else kinds.CPU]) as profiler:
        for _ in range(count):
            action()
        bench.wait()
    path = bench.folder / "trace.json"
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    path.unlink()
    wanted = ("kernel", "gpu_memcpy", "gpu_memset") if bench.cuda else ("cpu_op",)
    events = [event for event in events if event.get("cat") in wanted]
    return outermost(events) if not bench.cuda else [_launch(e) for e in sorted(events, key=lambda e: e["ts"])]


def outermost(events: Iterable[dict[str, Any]]) -> list[Launch]:
    """Return the events of a trace that lie within no other event of the same thread."""
    found, ends = list[Launch](), defaultdict[Any, float](lambda: -math.inf)
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        if event["ts"] >= ends[event["tid"]]:
            ends[event["tid"]] = event["ts"] + event["dur"]
            found.append(_launch(event))
    return found


def _launch(event: dict[str, Any]) -> Launch:
    return Launch(event["name"], float(event["ts"]), float(event["dur"]))


def busy(found: list[Launch]) -> tuple[float, float]:
    """Return two times in microseconds: while any launch runs, and from the first start to the last end."""
    covered, end = 0.0, -math.inf
    for launch in sorted(found, key=lambda launch: launch.start):
        last = launch.start + launch.duration
        covered += max(0.0, last - max(launch.start, end))
        end = max(end, last)
    return covered, end - min(launch.start for launch in found)


def kind_of(name: str) -> str:
    """Return the kind of a kernel, by name."""
    return next((kind for kind, text in KINDS.items() if re.search(text, name.lower())), "elementwise, sums")


def shares(found: list[Launch], steps: int) -> dict[str, list[Values]]:
    """Return two tables: ms per step by kind, and ms per step of the longest kernels."""
    kinds, names, counts = defaultdict[str, float](float), defaultdict[str, float](float), defaultdict[str, int](int)
    for launch in found:
        kinds[kind_of(launch.name)] += launch.duration
        names[launch.name] += launch.duration
        counts[launch.name] += 1
    total = sum(kinds.values())

    def row(label: str, name: str, microseconds: float, **more: Any) -> Values:
        return {label: name, "ms/step": microseconds / steps / 1e3, "%": 100 * microseconds / total, **more}

    def first(times: dict[str, float]) -> list[tuple[str, float]]:
        return sorted(times.items(), key=lambda item: -item[1])[:MAX_ROWS]

    return {
        "kinds": [row("kind", kind, microseconds) for kind, microseconds in first(kinds)],
        "kernels": [
            row("kernel", _short(name), microseconds, **{"launches/step": counts[name] / steps})
            for name, microseconds in first(names)
        ],
    }


def _short(name: str) -> str:
    """Return a kernel's name without common prefixes, cut to 70 characters."""
    return re.sub(r"^void |at::native::|\(anonymous namespace\)::|<unnamed>::", "", name)[:70]


def host_and_device(bench: Bench, action: Callable[[], object], count: int) -> Values:
    """Return the ms that the host needs to launch a step, and that the device needs to compute the step.

    Host time is measured on single steps that begin on an idle device. With consecutive steps, the host would wait for
    space in the device's queue. Device time is measured on consecutive steps, by events (on a CPU, by the clock).
    """
    launching, times = list[float](), list[float]()
    for _ in range(count):
        bench.wait()
        start = time.perf_counter()
        action()
        launching.append(time.perf_counter() - start)
    for _ in range(3):
        bench.wait()
        start = time.perf_counter()
        if bench.cuda:
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
        for _ in range(count):
            action()
        if bench.cuda:
            ended.record()
            ended.synchronize()
        times.append(begun.elapsed_time(ended) / 1e3 if bench.cuda else time.perf_counter() - start)
    host, device = statistics.median(launching), min(times) / count
    return {"host ms": 1e3 * host, "device ms": 1e3 * device, "host / device": host / device}


def profile(bench: Bench, case: Case) -> Values:
    """Return a step's host and device time, launches, idle fraction and longest kernels."""
    step = case.step(bench.device, **BEST[case.study])
    action = partial(step, *case.delivered(step))
    for _ in range(2 if bench.quick else 10):  # warm-up: algorithm search, compilation, graph capture
        action()
    found = host_and_device(bench, action, 2 if bench.quick else 10)
    seen = launches(bench, action, STEPS)
    if not seen:
        raise Skip("the profiler recorded no work of the device")
    covered, window = busy(seen)
    found |= {
        "samples/s": case.batch_size / found["device ms"] * 1e3,
        "launches/step": len(seen) / STEPS,
        "idle %": 100 * (1 - covered / window),
    }
    return found | shares(seen, STEPS)


# --- attention ---------------------------------------------------------------------------------------------------

HEAD_DIMENSIONS = (48, 64, 128)


def attention(bench: Bench, kind: str, samples: int, tokens: int, width: int) -> Values:
    """Measure an attention kernel at each head dimension, in bf16 and the model's layout.

    `width` is split into heads. FLOPs are counted as in the FlashAttention papers (Dao 2023, arXiv:2307.08691, section
    4.1): 4 N^2 times the width for the forward pass. The backward pass has 2.5 times as many FLOPs, because it
    recomputes the scores.
    """
    rows = list[Values]()
    for dimension in HEAD_DIMENSIONS:
        heads = max(width // dimension, 1)
        shape = (samples, tokens, heads, dimension)
        q, k, v, gradient = (
            torch.randn(shape, device=bench.device, dtype=torch.bfloat16).transpose(1, 2) for _ in range(4)
        )
        for tensor in (q, k, v):
            tensor.requires_grad_()

        def both(
            tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = (q, k, v), gradient: torch.Tensor = gradient
        ) -> None:
            for tensor in tensors:
                tensor.grad = None  # drop gradients, because accumulating them would take time
            F.scaled_dot_product_attention(*tensors).backward(gradient)

        row: Values = {"head dimension": dimension, "heads": heads}
        flops = 4 * samples * tokens**2 * heads * dimension
        try:
            with only(kind):
                with torch.no_grad():
                    forward = bench.seconds(partial(F.scaled_dot_product_attention, q, k, v), 2 if bench.quick else 5)
                duration = bench.seconds(both, 2 if bench.quick else 5)
            row |= {"forward ms": 1e3 * forward, "forward TFLOP/s": flops / forward / 1e12}
            row |= {"both ms": 1e3 * duration, "both TFLOP/s": 3.5 * flops / duration / 1e12, "why not": ""}
        except (RuntimeError, ImportError) as error:  # the kernel is missing, or memory is too small for the kernel
            row |= dict.fromkeys(("forward ms", "forward TFLOP/s", "both ms", "both TFLOP/s"), "")
            row["why not"] = " ".join(str(error).split())[:80]
        rows.append(row)
    if all(row["why not"] for row in rows):
        raise Skip(f"no such kernel on this machine: {rows[0]['why not']}")
    return {"tokens": tokens, "samples": samples, "width": width, "head dimensions": rows}


# --- decoding ----------------------------------------------------------------------------------------------------

#: Value of `fused` by label: decode with the Triton kernel, or with PyTorch's operations.
DECODERS = {"kernel": True, "operations": False}


@contextmanager
def decoder(fused: bool, device: torch.device) -> Iterator[None]:
    """Make `on_device` use the kernel if `fused`, else PyTorch's operations."""
    found = direct_loader.kernel(device)
    if fused and found is None:
        raise Skip("no Triton" if device.type == "cuda" else "Triton is only interpreted on a CPU")
    direct_loader.kernel.cache_clear()
    kernel, direct_loader.kernel = direct_loader.kernel, lambda device: found if fused else None  # type: ignore[assignment]
    try:
        yield
    finally:
        direct_loader.kernel = kernel


def decoding(bench: Bench, data: Data, fused: bool, wide: bool) -> Values:
    """Measure how fast the device decodes the stored values of a batch.

    If `wide`, there are so many values that indices need 64 bits. GB/s counts the minimum traffic: each stored value is
    read once and each decoded value written once.
    """
    if wide:
        bench.need_cuda()
    samples = data.samples()
    fields, batch_size = (samples.input, samples.target), data.case.batch_size
    boxes = samples.boxes(0).take(range(batch_size))
    held = Resident(samples, bench.device)._held
    work = []
    for field, (values, firsts, strides), starts in zip(fields, held, (boxes.input, boxes.target), strict=True):
        shift = max(2**31 - len(values), 0) if wide else 0
        if shift:
            large = torch.zeros(shift + len(values), dtype=values.dtype, device=bench.device)
            large[shift:] = values
            values = large
        stride = strides[boxes.file]
        base = shift + firsts[boxes.file] + (starts * stride[:, 1:]).sum(axis=1)
        work.append((values, field.plan(boxes.file, boxes.symmetry, base, stride), field))

    def action() -> list[torch.Tensor]:
        return [on_device(values, plan, field) for values, plan, field in work]

    with decoder(fused, bench.device):
        out = action()
        found = host_and_device(bench, action, 2 if bench.quick else 20)
        count = len(launches(bench, action, 1))
    stored = sum(tensor.numel() * values.element_size() for tensor, (values, *_) in zip(out, work, strict=True))
    least = stored + sum(tensor.numel() * tensor.element_size() for tensor in out)
    return {
        **found,
        "ms/sample": found["device ms"] / batch_size,
        "launches": count,
        "least MB/sample": least / batch_size / 1e6,
        "GB/s": least / found["device ms"] / 1e6,
        "dtype": str(out[0].dtype).removeprefix("torch."),
    }


def profiles(bench: Bench) -> list[Task]:
    """Return the profiles of a step."""
    unet, vit, _ = sizes(bench.quick)
    return [
        Task(f"profile {label}", "eager", seconds, partial(profile, bench, case))
        for label, case, seconds in (("U-Net 64³", unet, 30), ("ViT-384", vit, 15))
    ]


def attentions(bench: Bench) -> list[Task]:
    """Return the measurements of attention kernels."""
    tokens, samples, width = (64, 2, 128) if bench.quick else (4050, 16, 384)
    return [
        Task("attention", kind, 10, partial(attention, bench, kind, samples, tokens, width))
        for kind in BACKENDS
        # `math` needs too much memory, because it stores all attention scores; `efficient` is never the fastest.
        if kind not in ("math", "efficient")
    ]


def decoders(bench: Bench) -> list[Task]:
    """Return the measurements of decoding batches."""
    boxes, years = data(bench)
    return [
        Task("decode", f"{label}, {name}, {bits}", 10, partial(decoding, bench, source, fused, bits == "int64"))
        for label, source, bits in (("crops", boxes, "int32"), ("pairs", years, "int64"))
        for name, fused in DECODERS.items()
    ]
