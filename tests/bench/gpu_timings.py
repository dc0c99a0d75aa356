"""What a GPU does: its own figures, the ladders of both studies, a large model, the loaders alone."""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from importlib import metadata
from typing import Any

import torch

from dlscale.config.run import Throughput
from dlscale.data.loaders.base import Batch, Loader
from dlscale.measure.throughput import endless, peak_memory, trials
from dlscale.parallel.world import World
from dlscale.train.step import Step
from tests.bench.cases import Case
from tests.bench.gpu_checks import loader_of
from tests.bench.tasks import Bench, Task, Values

#: TFLOP/s of dense bf16 matrix products by the makers' datasheets; the first name that is part of a card's.
DATASHEET = {"H100 PCIe": 756, "H100": 989, "H200": 989, "GH200": 989, "A100": 312}
#: Against the rung before: no slower; 2 % is the noise.
NO_SLOWER = 0.98
WORKERS = min(8, len(os.sched_getaffinity(0)))

Rungs = dict[str, dict[str, Any]]
COMPILE: dict[str, Any] = {"compile": {"mode": "default"}}


# --- the machine -------------------------------------------------------------------------------------------------


def machine(bench: Bench) -> Values:
    """Return names and versions."""
    found: Values = {"torch": torch.__version__, "cores": len(os.sched_getaffinity(0))}
    if bench.cuda:
        free, total = torch.cuda.mem_get_info(bench.device)
        found |= {
            "card": torch.cuda.get_device_name(bench.device),
            "CUDA": str(torch.version.cuda),
            "cuDNN": str(torch.backends.cudnn.version()),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
            "free GB": free / 1e9,
            "GB": total / 1e9,
        }
        with suppress(OSError, subprocess.SubprocessError):
            command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            found["driver"] = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.split()[0]
    for package in metadata.distributions():
        name = str(package.metadata["Name"])
        if name.startswith("nvidia-dali") or name in ("numba", "numpy", "h5py"):
            found[name] = package.version
    return found


def product(bench: Bench) -> Values:
    """Return the rate of a large bf16 matrix product, the best of two sizes."""
    best = 0.0
    for size in (8192, 16384) if bench.cuda and not bench.quick else (256,):
        a, b, c = (torch.randn(size, size, device=bench.device, dtype=torch.bfloat16) for _ in range(3))
        best = max(best, 2 * size**3 / bench.seconds(partial(torch.mm, a, b, out=c), 10) / 1e12)
    return {"TFLOP/s": best}


def copying(bench: Bench) -> Values:
    """Return the rate of a copy in memory, bytes read and written."""
    size = 2**32 if bench.cuda and not bench.quick else 2**24
    source, target = (torch.zeros(size, dtype=torch.uint8, device=bench.device) for _ in range(2))
    return {"TB/s": 2 * size / bench.seconds(partial(target.copy_, source), 5) / 1e12}


def to_device(bench: Bench) -> Values:
    """Return the rate of copies from pinned memory."""
    bench.need_cuda()
    size = 2**24 if bench.quick else 2**30
    source = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device=bench.device)
    return {"GB/s": size / bench.seconds(partial(target.copy_, source, non_blocking=True), 3) / 1e9}


def facts(bench: Bench) -> list[Task]:
    """Return the tasks whose figures the others are held against."""
    return [
        Task("machine", "names and versions", 2, partial(machine, bench)),
        Task("machine", "bf16 matrix product", 5, bench.keep("product", partial(product, bench))),
        Task("machine", "copy in memory", 2, partial(copying, bench)),
        Task("machine", "pinned host to device", 2, bench.keep("pinned", partial(to_device, bench))),
    ]


def utilisation(bench: Bench, samples_per_second: float, case: Case) -> Values:
    """Return the shares of the measured and of the datasheet's bf16 rate."""
    rate, found = samples_per_second * case.flops() / 1e12, Values()
    if "product" in bench.found:
        found["MFU (measured peak)"] = rate / bench.found["product"]["TFLOP/s"]
    card = torch.cuda.get_device_name(bench.device) if bench.cuda else ""
    if datasheet := next((peak for name, peak in DATASHEET.items() if name in card), None):
        found["MFU (datasheet)"] = rate / datasheet
    return found


# --- the studies -------------------------------------------------------------------------------------------------


class Data:
    """Samples of one study on disk, made when first asked for."""

    def __init__(self, bench: Bench, case: Case, rows: int, count: int) -> None:
        self._bench, self._case, self._rows, self._count = bench, case, rows, count

    @contextmanager
    def loader(self, kind: str) -> Iterator[Loader]:
        """Open a loader."""
        path = self._bench.folder / f"{self._case.study}.h5"
        if not path.exists():
            self._case.write(path, self._rows)
        samples = self._case.samples(path, self._rows, self._count)
        with closing(loader_of(self._bench, samples, kind, self._case.batch_size, WORKERS)) as loader:
            yield loader

    def rate(self, kind: str, step: Step | None, settings: Throughput) -> float:
        """Return samples/s of training (of loading alone, without a step) on what a loader delivers."""
        with self.loader(kind) as loader, closing(endless(loader, 0)) as batches:  # type: ignore[type-var]
            return median(self._bench, batches, step, settings)


def median(bench: Bench, batches: Iterator[Batch], step: Step | None, settings: Throughput) -> float:
    """Return samples/s, the median of the trials."""

    def consume(x: torch.Tensor, y: torch.Tensor) -> None:
        if step is not None:
            step(x, y)

    return statistics.median(trials("", batches, consume, settings, World(device=bench.device)).trial_throughput)


def compiling(bench: Bench, step: Step, batch: Batch, warm: bool) -> Values:
    """Return the seconds until code was there (what an earlier rung compiled is found on disk), and when found again.

    Parameters
    ----------
    warm
        Whether to ask for the second figure.
    """
    from torch._inductor.utils import clear_caches

    def once() -> float:
        bench.wait()
        start = time.perf_counter()
        step.gradients(*batch)
        bench.wait()
        return time.perf_counter() - start

    found = {"compile s": once()}
    if warm:
        torch.compiler.reset()
        clear_caches()  # those in memory
        found["from disk s"] = once()
    return found


class Ladder:
    """Rungs of one study, each measured by itself on what the rungs before it left as they were."""

    def __init__(self, bench: Bench, case: Case, data: Data, kinds: tuple[str, ...], settings: Throughput) -> None:
        self.bench, self.case, self.data, self.kinds, self.settings = bench, case, data, kinds, settings
        self._before: float | None = None

    def rung(self, over: dict[str, Any], first_compiled: bool) -> Values:
        """Return samples/s on one batch and from each kind of loader, and what they are of the hardware."""
        compiled = over.get("compile", {}).get("mode", "none") != "none"
        if compiled or over.get("cuda_graph"):
            self.bench.need_cuda()
        step = self.case.step(self.bench.device, **over)
        x, y = self.case.batch(self.bench.device)
        found: Values = compiling(self.bench, step, (x, y), first_compiled) if compiled else {}
        found["SYNTHETIC"] = synthetic = median(self.bench, itertools.repeat((x, y)), step, self.settings)
        if self._before:
            found["× rung before"] = synthetic / self._before
        self._before = synthetic
        for kind in self.kinds:
            found[f"FULL {kind}"] = self.data.rate(kind, step, self.settings)
        found |= utilisation(self.bench, synthetic, self.case)
        found["peak GB"] = peak_memory(self.bench.device) / 1e9
        return found

    def tasks(self, label: str, rungs: Rungs, targets: dict[str, dict[str, float]]) -> list[Task]:
        """Return a task for each rung; each keeps what those before it set, unless it says otherwise."""
        tasks, over, compiled = list[Task](), dict[str, Any](), False
        for name, change in rungs.items():
            over = {key: value for key, value in {**over, **change}.items() if value is not None}
            first = "compile" in over and not compiled
            compiled = compiled or first
            do = partial(self.rung, dict(over), first)
            seconds = 60 if first or "reduce" in name or "attention" in name else 20
            tasks.append(Task(label, name, 1 if self.bench.quick else seconds, do, targets.get(name, {})))
        return tasks


VIT_RUNGS: Rungs = {
    "baseline, tf32": {"precision": "tf32"},
    "bf16": {"precision": "bf16"},
    "fused": {"optimizer": {"fused": True}},
    "compile": COMPILE,
    "attention auto": {"attention": "auto"},
    "CUDA graph": {"cuda_graph": True},
    "reduce-overhead": {"cuda_graph": None, "compile": {"mode": "reduce-overhead"}},
}
UNET_RUNGS: Rungs = {
    "baseline, tf32": {"precision": "tf32"},
    "fp16": {"precision": "fp16"},
    "bf16": {"precision": "bf16"},
    "fused": {"optimizer": {"fused": True}},
    "channels last": {"memory_format": "channels_last"},
    "space to depth": {"model": {"space_to_depth": True}},
    "compile": COMPILE,
    "CUDA graph": {"cuda_graph": True},
}


def large(bench: Bench, case: Case, settings: Throughput) -> Values:
    """Measure a large model with all that helps, in the largest batch of 16 or fewer that fits."""
    bench.need_cuda()
    over: dict[str, Any] = {"precision": "bf16", "optimizer": {"fused": True}, **COMPILE, "attention": "auto"}
    batch_size = case.batch_size
    while True:
        try:
            step = case.step(bench.device, batch_size=batch_size, **over)
            batch = case.batch(bench.device, batch_size)
            found = {"batch": batch_size, **compiling(bench, step, batch, warm=False)}
            found["SYNTHETIC"] = median(bench, itertools.repeat(batch), step, settings)
            break
        except torch.OutOfMemoryError:
            if batch_size == 1:
                raise
            step = batch = None  # type: ignore[assignment]
        torch.cuda.empty_cache()  # outside of the handler, whose traceback keeps the tensors
        batch_size //= 2
    found |= utilisation(bench, found["SYNTHETIC"], case)
    found["peak GB"] = peak_memory(bench.device) / 1e9
    return found


def loading(bench: Bench, data: Data, case: Case, kind: str, settings: Throughput) -> Values:
    """Measure a loader alone, beside copies of as many stored bytes from pinned memory."""
    found: Values = {"samples/s": data.rate(kind, None, settings)}
    stored = 2 * sum(torch.Size(shape).numel() for shape in case.shapes)  # fp16
    found["stored MB/sample"] = stored / 1e6
    if "pinned" in bench.found:
        found["floor samples/s"] = bench.found["pinned"]["GB/s"] * 1e9 / stored
        found["× floor"] = found["samples/s"] / found["floor samples/s"]
    return found


def tasks(bench: Bench) -> list[Task]:
    """Return the timings, the most wanted first."""
    if bench.quick:
        unet = Case("cosmo_unet", {"widths": [4, 8]}, (16, 16, 16), batch_size=2)
        vit = Case("era5_vit", {"embed_dim": 32, "depth": 2, "heads": 2}, (32, 64), batch_size=2, channels=3)
        wide = Case("era5_vit", {"embed_dim": 64, "depth": 2, "heads": 2}, (32, 64), batch_size=2, channels=3)
        few = many = Throughput(warmup=1, trials=2, batches=5)
        boxes, years = Data(bench, unet, 24, 20), Data(bench, vit, 8, 20)
    else:
        unet = Case("cosmo_unet", {}, (64, 64, 64), batch_size=64)
        vit = Case("era5_vit", {}, (360, 720), batch_size=16)
        wide = Case("era5_vit", {"embed_dim": 1024}, (360, 720), batch_size=16)
        # A warm-up trial has the steps that a graph needs before it is recorded.
        few, many = Throughput(warmup=1, trials=3, batches=10), Throughput(warmup=1, trials=3, batches=30)
        boxes, years = Data(bench, unet, 256, 64 * 64), Data(bench, vit, 16, 15 * 16)
    h200 = bench.cuda and "H200" in torch.cuda.get_device_name(bench.device) and not bench.quick
    no_slower = {"× rung before": NO_SLOWER}
    best = {"FULL resident": 3000.0} if h200 else {}
    boxes_ladder = Ladder(bench, unet, boxes, ("resident", "streamed"), many)
    years_ladder = Ladder(bench, vit, years, ("resident",), few)
    unet_targets = {"compile": best, "CUDA graph": {**best, **no_slower}}
    # What docs/ladder.md expects of an H200: its attention at a head dimension of 48 is padded to 64.
    vit_targets = {"attention auto": {"FULL resident": 180.0} if h200 else {}, "CUDA graph": no_slower}
    found = boxes_ladder.tasks("U-Net 64³", UNET_RUNGS, unet_targets)
    found += years_ladder.tasks("ViT-384", VIT_RUNGS, vit_targets)
    found.append(Task("ViT-1024", "all", 60, partial(large, bench, wide, few), {"MFU (datasheet)": 0.43}))
    for label, data, case in (("crops", boxes, unet), ("pairs", years, vit)):
        found += [
            Task(label, kind, 15 if kind == "dali" else 5, partial(loading, bench, data, case, kind, many))
            for kind in ("resident", "streamed", "dali")
        ]
    return found
