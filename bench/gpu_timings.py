"""Timings on a GPU: the ladders of U-Net and ViT, a large ViT, batch sizes, and loading without training.

The targets for an H200 are the expectations in docs/benchmarks.md ("On a GPU").
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.cases import Case, sizes
from bench.gpu_checks import loader_of
from bench.gpu_machine import PINNED, PRODUCT, is_h200
from bench.tasks import Bench, Skip, Task, Values
from dlscale.config.run import Throughput
from dlscale.core.machine import missing
from dlscale.data.loaders.base import Batch, Loader
from dlscale.data.samples import GridSamples
from dlscale.measure.throughput import trials
from dlscale.parallel.world import World
from dlscale.train import memory
from dlscale.train.step import Step

#: Peak of dense bf16 matrix products, TFLOP/s, by part of the card's name (data sheets); the first match counts.
DATASHEET = {"H100 PCIe": 756, "H100": 989, "H200": 989, "GH200": 989, "A100": 312}
#: Minimum ratio of speed to the previous rung that counts as «no slower»; timings vary by 2 %.
NO_SLOWER = 0.98
#: Row of the large ViT in 16 bits, to which 8 bits are compared.
LARGE = "ViT-1024: bf16"
WORKERS = min(8, len(os.sched_getaffinity(0)))

Rungs = dict[str, dict[str, Any]]
COMPILE: dict[str, Any] = {"compile": {"mode": "default"}}


def utilisation(bench: Bench, samples_per_second: float, case: Case) -> Values:
    """Return achieved FLOP/s as fractions of the measured and the data sheet's bf16 peak."""
    rate, found = samples_per_second * case.flops() / 1e12, Values()
    if peak := bench.found.get(PRODUCT, {}).get("TFLOP/s"):
        found["MFU (measured peak)"] = rate / peak
    card = torch.cuda.get_device_name(bench.device) if bench.cuda else ""
    if datasheet := next((peak for name, peak in DATASHEET.items() if name in card), None):
        found["MFU (datasheet)"] = rate / datasheet
    return found


# --- the studies -------------------------------------------------------------------------------------------------


class Data:
    """Samples of one study in a file, which is written on first use."""

    def __init__(self, bench: Bench, case: Case, rows: int, count: int) -> None:
        self.case = case
        self._bench, self._rows, self._count = bench, rows, count

    def samples(self) -> GridSamples:
        """Return the samples."""
        return self.case.samples(self._path(), self._rows, self._count)

    def manifest(self) -> Path:
        """Write the manifest of the samples; return its path."""
        path = self._path()
        described = path.with_suffix(".json")
        self.case.described(path, self._rows, self._count).write(described)
        return described

    def _path(self) -> Path:
        path = self._bench.folder / f"{self.case.study}.h5"
        if not path.exists():
            self.case.write(path, self._rows)
        return path

    @contextmanager
    def loader(self, kind: str) -> Iterator[Loader]:
        with closing(loader_of(self._bench, self.samples(), kind, self.case.batch_size, WORKERS)) as loader:
            yield loader

    def rate(self, kind: str, step: Step | None, settings: Throughput) -> float:
        """Return samples/s of training on a loader's batches, or of loading only if `step` is None."""
        with self.loader(kind) as loader:
            batches = (each for epoch in itertools.count() for each in loader.epoch(epoch))
            with closing(batches):
                return median(self._bench, batches, step, settings)


def median(bench: Bench, batches: Iterator[Batch], step: Step | None, settings: Throughput) -> float:
    """Return samples/s: the median of the trials."""

    def consume(x: torch.Tensor, y: torch.Tensor) -> None:
        if step is not None:
            step(x, y)

    return statistics.median(trials("", batches, consume, settings, World(device=bench.device)).trial_throughput)


def compiling(bench: Bench, step: Step, batch: Batch, warm: bool) -> Values:
    """Return the seconds of a first step that compiles, and of a step that finds its compiled code on disk.

    The first step may also find code that an earlier rung compiled.

    Parameters
    ----------
    warm
        Whether to measure the second step.
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
        clear_caches()  # clear only the caches in memory
        found["from disk s"] = once()
    return found


class Ladder:
    """Rungs of one study. Each rung is measured separately, and keeps the settings of all earlier rungs."""

    def __init__(self, bench: Bench, case: Case, data: Data, kinds: tuple[str, ...], settings: Throughput) -> None:
        self.bench, self.case, self.data, self.kinds, self.settings = bench, case, data, kinds, settings

    def rung(self, over: dict[str, Any], first_compiled: bool, before: str) -> Values:
        """Return samples/s on a repeated batch and on each kind of loader, utilisation and peak memory.

        `before` is the label of the previous rung's row.
        """
        compiled = over.get("compile", {}).get("mode", "none") != "none"
        if compiled or over.get("cuda_graph"):
            self.bench.need_cuda()
        step = self.case.step(self.bench.device, **over)
        x, y = self.case.delivered(step)
        found: Values = compiling(self.bench, step, (x, y), first_compiled) if compiled else {}
        found["SYNTHETIC"] = synthetic = median(self.bench, itertools.repeat((x, y)), step, self.settings)
        if earlier := self.bench.found.get(before, {}).get("SYNTHETIC"):
            found["× rung before"] = synthetic / earlier
        for kind in self.kinds:
            found[f"FULL {kind}"] = self.data.rate(kind, step, self.settings)
        found |= utilisation(self.bench, synthetic, self.case)
        found["peak GB"] = memory.peak(self.bench.device) / 1e9
        return found

    def tasks(self, label: str, rungs: Rungs, targets: dict[str, dict[str, float]]) -> list[Task]:
        """Return one task per rung; each rung changes some settings and keeps all others of the rung before."""
        tasks, over, compiled, before = list[Task](), dict[str, Any](), False, ""
        for name, change in rungs.items():
            over = {key: value for key, value in {**over, **change}.items() if value is not None}
            first = "compile" in over and not compiled
            compiled = compiled or first
            do = partial(self.rung, dict(over), first, before)
            # A rung takes 35 s, because cuDNN's search takes up to 30 s.
            seconds = 60 if first else 35
            tasks.append(Task(label, name, seconds, do, targets.get(name, {})))
            before = tasks[-1].label
        return tasks


VIT_RUNGS: Rungs = {
    "bf16": {"precision": "bf16", "optimizer": {"fused": True}},
    "compile": COMPILE,
}
UNET_RUNGS: Rungs = {
    "baseline, tf32": {"precision": "tf32"},
    "bf16": {"precision": "bf16"},
    "channels last": {"memory_format": "channels_last", "optimizer": {"fused": True}},
    "space to depth": {"model": {"space_to_depth": True}},
    "compile": COMPILE,
    "CUDA graph": {"cuda_graph": True},
}


def large(bench: Bench, case: Case, settings: Throughput, precision: str) -> Values:
    """Measure a large model with all optimisations; halve the batch size until the batch fits in memory."""
    bench.need_cuda()
    if precision == "fp8" and missing(["fp8"]):
        raise Skip(f"needs {missing(['fp8'])[0]}")
    over: dict[str, Any] = {"precision": precision, "optimizer": {"fused": True}, **COMPILE, "attention": "auto"}
    batch_size = case.batch_size
    while True:
        try:
            step = case.step(bench.device, batch_size=batch_size, **over)
            batch = case.delivered(step, batch_size)
            found = {"batch": batch_size, **compiling(bench, step, batch, warm=False)}
            found["SYNTHETIC"] = median(bench, itertools.repeat(batch), step, settings)
            break
        except torch.OutOfMemoryError:
            if batch_size == 1:
                raise
            step = batch = None  # type: ignore[assignment]
        torch.cuda.empty_cache()  # after the handler, because the traceback keeps the tensors alive
        batch_size //= 2
    if precision != "bf16" and (plain := bench.found.get(LARGE, {}).get("SYNTHETIC")):
        found["× bf16"] = found["SYNTHETIC"] / plain
    found |= utilisation(bench, found["SYNTHETIC"], case)
    found["peak GB"] = memory.peak(bench.device) / 1e9
    return found


def loading(bench: Bench, data: Data, case: Case, kind: str, settings: Throughput) -> Values:
    """Measure loading only; compare it with copying as many stored bytes from pinned memory."""
    found: Values = {"samples/s": data.rate(kind, None, settings)}
    stored = 2 * sum(torch.Size(shape).numel() for shape in case.shapes)  # 2 bytes per value of fp16
    found["stored MB/sample"] = stored / 1e6
    if copied := bench.found.get(PINNED, {}).get("GB/s"):
        found["floor samples/s"] = copied * 1e9 / stored
        found["× floor"] = found["samples/s"] / found["floor samples/s"]
    return found


def sized(bench: Bench, case: Case, over: dict[str, Any], batch_size: int, settings: Throughput) -> Values:
    """Measure a step with one batch size."""
    try:
        step = case.step(bench.device, batch_size=batch_size, **over)
        batch = case.delivered(step, batch_size)
        found: Values = {"SYNTHETIC": median(bench, itertools.repeat(batch), step, settings)}
    except torch.OutOfMemoryError:
        raise Skip("does not fit into the device's memory") from None
    found |= {"ms/step": 1e3 * batch_size / found["SYNTHETIC"], **utilisation(bench, found["SYNTHETIC"], case)}
    return {**found, "peak GB": memory.peak(bench.device) / 1e9}


def data(bench: Bench) -> tuple[Data, Data]:
    """Return the data of U-Net and ViT."""
    unet, vit, _ = sizes(bench.quick)
    if bench.quick:
        return Data(bench, unet, 24, 20), Data(bench, vit, 8, 20)
    return Data(bench, unet, 256, 64 * 64), Data(bench, vit, 16, 15 * 16)


def _trials(bench: Bench) -> tuple[Throughput, Throughput]:
    """Return settings of short and of long trials. The warm-up trial includes the capture of a graph."""
    if bench.quick:
        return (Throughput(warmup=1, trials=2, batches=5, seconds=0),) * 2
    return Throughput(warmup=1, trials=3, batches=10, seconds=0), Throughput(warmup=1, trials=3, batches=30, seconds=0)


def expected(bench: Bench, rate: float, kind: str = "FULL resident") -> dict[str, float]:
    """Return the target samples/s of a row's value `kind`; empty unless the device is an H200."""
    return {kind: rate} if is_h200(bench) else {}


def compiled(bench: Bench) -> list[Task]:
    """Return the compiled rungs of the U-Net, for which docs/benchmarks.md has only expected speeds."""
    return unet(bench, compiled=True)


def unet(bench: Bench, compiled: bool = False) -> list[Task]:
    """Return the rungs of the U-Net that are compiled, or that are not."""
    case, (_, many), (boxes, _) = sizes(bench.quick)[0], _trials(bench), data(bench)
    targets = {
        "channels last": expected(bench, 2450),
        "compile": expected(bench, 3400),
        "CUDA graph": {**expected(bench, 3400), "× rung before": NO_SLOWER},
    }
    tasks = Ladder(bench, case, boxes, ("resident", "streamed"), many).tasks("U-Net 64³", UNET_RUNGS, targets)
    first = list(UNET_RUNGS).index("compile")
    return tasks[first:] if compiled else tasks[:first]


def wide(bench: Bench) -> list[Task]:
    """Return the measurements of the large ViT, in 16 and in 8 bits."""
    case, (few, _) = sizes(bench.quick)[2], _trials(bench)
    targets = {"bf16": {**expected(bench, 70, "SYNTHETIC"), "MFU (datasheet)": 0.43}, "fp8": {"× bf16": 1.0}}
    return [Task("ViT-1024", name, 60, partial(large, bench, case, few, name), goal) for name, goal in targets.items()]


def vit(bench: Bench) -> list[Task]:
    """Return the rungs of the ViT."""
    (_, case, _), (few, _), (_, years) = sizes(bench.quick), _trials(bench), data(bench)
    targets = {
        "compile": expected(bench, 180),
    }
    return Ladder(bench, case, years, ("resident",), few).tasks("ViT-384", VIT_RUNGS, targets)


def sweeps(bench: Bench) -> list[Task]:
    """Return the measurements of growing batch sizes, uncompiled, because each size would compile for a minute."""
    unet, vit, _ = sizes(bench.quick)
    few, many = _trials(bench)
    most = {"precision": "bf16", "optimizer": {"fused": True}}
    unet_over: dict[str, Any] = {**most, "memory_format": "channels_last", "model": {"space_to_depth": True}}
    vit_over: dict[str, Any] = {**most, "attention": "auto"}
    counts = ((2, 4), (2, 4)) if bench.quick else ((64, 256), (8, 32))
    return [
        Task(f"batch {label}", str(count), 10, partial(sized, bench, case, over, count, settings))
        for label, case, over, settings, sizes_ in (
            ("U-Net 64³", unet, unet_over, many, counts[0]),
            ("ViT-384", vit, vit_over, few, counts[1]),
        )
        for count in sizes_
    ]


def loaders(bench: Bench) -> list[Task]:
    """Return the measurements of loading only."""
    _, many = _trials(bench)
    crops = data(bench)[0]
    return [
        Task("crops", kind, seconds, partial(loading, bench, crops, crops.case, kind, many))
        for kind, seconds in (("streamed", 5), ("dali", 15))
    ]
