"""Kernels and idle time of a step; speed of single convolutions, attention kernels and decoders."""

from __future__ import annotations

import json
import math
import re
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
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


def profile(bench: Bench, case: Case, over: dict[str, Any]) -> Values:
    """Return a step's host and device time, launches, idle fraction and longest kernels."""
    if over.get("cuda_graph"):
        bench.need_cuda()
    step = case.step(bench.device, **BEST[case.study], **over)
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


# --- convolutions ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Convolution:
    """The convolution of one layer, with channels that may be padded.

    Attributes
    ----------
    grid
        Size of the input: [D, H, W].
    arguments
        Stride, padding, dilation, transposed, output padding, groups, as `aten::convolution` takes them.
    weight
        Shape of the weights, padding included.
    flops
        FLOPs of one pass over a sample, without padding: 2 per weight for each cell of the coarser grid.
    """

    name: str
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    weight: tuple[int, ...]
    flops: int

    @property
    def transposed(self) -> bool:
        """Whether the convolution is transposed."""
        return bool(self.arguments[3])

    @property
    def channels(self) -> int:
        """Channels of the input."""
        return self.weight[0 if self.transposed else 1]


def convolutions(case: Case) -> list[Convolution]:
    """Return the convolutions of a model, in order of computation.

    A layer whose channels are not multiples of 8 is listed again, padded to multiples of 8. The pair shows the cost of
    few channels, which `space_to_depth` avoids.
    """
    found = list[Convolution]()

    def note(name: str, layer: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        transposed = isinstance(layer, nn.ConvTranspose3d)
        rest = (layer.stride, layer.padding, layer.dilation, transposed, layer.output_padding, layer.groups)
        shape = tuple(layer.weight.shape)
        padded = (*(-(-size // 8) * 8 for size in shape[:2]), *shape[2:])
        grid = tuple(inputs[0].shape[2:])
        flops = 2 * layer.weight.numel() * math.prod(grid if transposed else output.shape[2:])
        for label, weight in {name: shape, f"{name}, padded": padded}.items():
            if label == name or weight != shape:
                found.append(Convolution(label, grid, rest, weight, flops))

    with torch.device("meta"):
        model = case.network(case.run())
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Conv3d | nn.ConvTranspose3d):
                layer.register_forward_hook(partial(note, name))
        model(torch.empty(1, *case.shapes[0]))
    return found


def convolution(bench: Bench, layer: Convolution, batch_size: int, layout: torch.memory_format) -> Values:
    """Measure a layer in bf16: forward pass, and gradients of input and weights."""

    def random(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, device=bench.device, dtype=torch.bfloat16)
        return values.to(memory_format=layout)

    x, weight = random(batch_size, layer.channels, *layer.grid), random(*layer.weight)
    forward = partial(torch.ops.aten.convolution, x, weight, None, *layer.arguments)
    y: torch.Tensor = forward()
    gradient = random(*y.shape)

    def backward(mask: list[bool]) -> object:
        return torch.ops.aten.convolution_backward(gradient, x, weight, None, *layer.arguments, mask)

    found: Values = {"layer": layer.name, "weights": "x".join(map(str, layer.weight))}
    passes = {"forward": forward, "input": partial(backward, [True, False, False])}
    passes["weight"] = partial(backward, [False, True, False])
    for name, action in passes.items():
        seconds = bench.seconds(action, 2 if bench.quick else 10)
        found |= {f"{name} ms": 1e3 * seconds, f"{name} TFLOP/s": batch_size * layer.flops / seconds / 1e12}
    return found


def table_of_convolutions(bench: Bench, case: Case, layout: torch.memory_format, search: int | None) -> Values:
    """Measure all convolutions of a model in one layout.

    If `search` is None, cuDNN guesses the fastest algorithm. Otherwise cuDNN tries the first `search` algorithms of its
    list (0: all algorithms; PyTorch's default: 10).

    A new thread measures, because PyTorch keeps the chosen algorithm of each shape per thread. Times of a few
    microseconds are mostly the kernel's launch.
    """
    rows, errors = list[Values](), list[BaseException]()

    def measure() -> None:
        try:
            for layer in convolutions(case):
                rows.append(convolution(bench, layer, case.batch_size, layout))
        except BaseException as error:
            errors.append(error)

    cudnn: Any = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.benchmark_limit
    cudnn.benchmark = search is not None
    if search is not None:
        cudnn.benchmark_limit = search
    try:
        thread = threading.Thread(target=measure)
        thread.start()
        thread.join()
    finally:
        cudnn.benchmark, cudnn.benchmark_limit = before
    if errors:
        raise errors[0]
    # The model's time counts only the padded version of a layer that is listed twice. The first layer's input needs no
    # gradient.
    padded = {str(row["layer"]).removesuffix(", padded") for row in rows if ", padded" in str(row["layer"])}
    computed = [row for row in rows if row["layer"] not in padded]
    parts = {name: sum(row[f"{name} ms"] for row in computed) for name in ("forward", "input", "weight")}
    parts["input"] -= computed[0]["input ms"]
    total = sum(parts.values())
    return {**{f"{name} ms": ms for name, ms in parts.items()}, "ms/sample": total / case.batch_size, "layers": rows}


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

        def both(tensors: tuple[torch.Tensor, ...] = (q, k, v), gradient: torch.Tensor = gradient) -> None:
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
    """Return the profiles of a step with and without CUDA graphs."""
    unet, vit, _ = sizes(bench.quick)
    return [
        Task(f"profile {label}", name, 30 if case is unet else 15, partial(profile, bench, case, over))
        for label, case in (("U-Net 64³", unet), ("ViT-384", vit))
        for name, over in (("eager", {}), ("CUDA graph", {"cuda_graph": True}))
    ]


def layers(bench: Bench) -> list[Task]:
    """Return the measurements of single convolutions and attention kernels."""
    unet, _, _ = sizes(bench.quick)
    layouts = {"channels last": torch.channels_last_3d, "contiguous": torch.contiguous_format}
    found = [
        Task(
            "convolutions",
            f"{name}, {how}",
            15 if search is None else 30,
            partial(table_of_convolutions, bench, unet, layout, search),
        )
        for name, layout in layouts.items()
        for how, search in {"as guessed": None, "searched": 10, "all searched": 0}.items()
        if search != 0 or name == "channels last"
    ]
    tokens, samples, width = (64, 2, 128) if bench.quick else (4050, 16, 384)
    found += [
        Task("attention", kind, 10, partial(attention, bench, kind, samples, tokens, width))
        for kind in BACKENDS
        if kind != "math"  # needs too much memory, because it stores all attention scores
    ]
    return found


def decoders(bench: Bench) -> list[Task]:
    """Return the measurements of decoding batches."""
    boxes, years = data(bench)
    return [
        Task("decode", f"{label}, {name}, {bits}", 10, partial(decoding, bench, source, fused, bits == "int64"))
        for label, source in (("crops", boxes), ("pairs", years))
        for name, fused in DECODERS.items()
        for bits in ("int32", "int64")
    ]
