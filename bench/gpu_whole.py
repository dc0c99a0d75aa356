"""Checks of complete programs: steps of one rank with NCCL; commands that train, resume and measure.

One rank exchanges no data, but the code around the exchange runs: the process group, DistributedDataParallel, hooks,
buckets and streams.
"""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import loading
from bench.cases import Case, sizes
from bench.gpu_checks import FUSED, SGD, UNET, VIT, Errors, distance
from bench.gpu_timings import COMPILE, median
from bench.tasks import Bench, Skip, Task, Values
from dlscale.config.run import Throughput
from dlscale.core.errors import UserError
from dlscale.data.manifest import Manifest
from dlscale.parallel.world import World
from dlscale.train.build import build_step
from dlscale.train.step import Step

# --- one rank ----------------------------------------------------------------------------------------------------


class Several(World):
    """A world of one rank that reports two data-parallel ranks, so DistributedDataParallel wraps the model.

    Strategies read `data_size`. Code that exchanges other values reads `size`, which stays 1, so means are the
    rank's own values.
    """

    @property
    def data_size(self) -> int:
        """Number of data-parallel ranks that this world reports."""
        return 2


@contextmanager
def group(bench: Bench) -> Iterator[World]:
    """Open a process group of one rank, with NCCL on a GPU and with gloo on a CPU."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    device = torch.device("cuda", torch.cuda.current_device()) if bench.cuda else bench.device
    backend, own = ("nccl", device) if bench.cuda else ("gloo", None)
    dist.init_process_group(backend, rank=0, world_size=1, store=store, device_id=own)
    try:
        yield Several(device=device)
    finally:
        dist.destroy_process_group()


def made(case: Case, world: World, over: dict[str, Any]) -> Step:
    """Return a step in a world; the initial weights are always equal."""
    run = case.run(**{**over, "optimizer": over.get("optimizer", SGD)})

    def model() -> torch.nn.Module:
        with world.device:
            return case.network(run)

    step = build_step(run, model, case.loss(), world)
    if step.strategy.exchanges != (world.data_size > 1):
        raise AssertionError(
            f"{type(world).__name__}: data_size is {world.data_size}, but strategy.exchanges is "
            f"{step.strategy.exchanges}; expected exchanges only if data_size > 1"
        )
    return step


def exchanges() -> int:
    """Return the number of collective operations that the default group has started."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[attr-defined]


def one_rank(bench: Bench, over: dict[str, Any]) -> Values:
    """Compare a wrapped model with a plain model: losses, exchanges and, if compiled, numbers of graphs and calls."""
    from torch._dynamo.utils import counters

    if over.get("cuda_graph"):
        bench.need_cuda()
    errors, found = Errors(), Values()
    with group(bench) as world:
        found["backend"] = dist.get_backend()
        for case in (UNET, VIT):
            graphs, seen = [], list[int]()
            losses: list[list[torch.Tensor]] = []
            for kind in (World(device=world.device), world):
                torch.compiler.reset()
                counters.clear()
                try:
                    step = made(case, kind, over)
                except UserError as error:
                    raise Skip(str(error)) from None
                x, y = case.batch(world.device)
                before = exchanges()
                losses.append([step(x, y) for _ in range(15)])  # enough steps to record a CUDA graph
                bench.wait()
                seen.append(exchanges() - before)
                graphs.append({key: counters["stats"][key] for key in ("unique_graphs", "calls_captured")})
            if seen[0] or not seen[1]:
                raise AssertionError(f"{case.study}: {seen[0]} exchanges plain, {seen[1]} wrapped; expected 0 and some")
            found[f"{case.study} exchanges"] = seen[1]
            for mine, plain in zip(losses[1], losses[0], strict=True):
                errors.hold("loss", distance(mine, plain), 1e-3 if "precision" in over else 1e-4)
            if over.get("compile"):
                if graphs[1] != graphs[0] or graphs[1]["unique_graphs"] != 1:
                    raise AssertionError(
                        f"{case.study}: graphs plain {graphs[0]}, wrapped {graphs[1]}; expected one equal graph"
                    )
                found[f"{case.study} calls in one graph"] = graphs[1]["calls_captured"]
    return {**found, **errors}


def exchanging(bench: Bench, case: Case, over: dict[str, Any]) -> Values:
    """Measure a plain step and a wrapped step; the difference is the cost of gradient hooks and buckets."""
    settings = Throughput(warmup=1, trials=3, batches=2 if bench.quick else 20, seconds=0)
    found = Values()
    with group(bench) as world:
        for name, kind in (("plain", World(device=world.device)), ("wrapped", world)):
            step = made(case, kind, {**FUSED, **over})
            found[f"{name} samples/s"] = median(bench, itertools.repeat(case.delivered(step)), step, settings)
    return {**found, "wrapped / plain": found["wrapped samples/s"] / found["plain samples/s"]}


# --- as a user runs it -------------------------------------------------------------------------------------------

PATIENCE = 150.0  #: Timeout of a stage, seconds.
EPOCHS = 24  # epochs of 8 steps: enough time to stop the training midway


def stage(bench: Bench, name: str, folder: Path, *words: object) -> subprocess.Popen[str]:
    """Start a stage in its own process, as the workflow's commands do."""
    command = [sys.executable, "-m", "dlscale", name, *map(str, words), "--device", bench.device.type]
    with (folder / f"{name}.log").open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, text=True)


def ended(process: subprocess.Popen[str], log: Path, wanted: int = 0) -> None:
    """Wait for a stage to end; raise unless its exit status is `wanted`."""
    status = process.wait(PATIENCE)
    if status != wanted:
        raise AssertionError(f"exit status {status}, expected {wanted}: {log.read_text()[-400:]}")


def epochs(folder: Path) -> list[dict[str, Any]]:
    """Return the records in metrics.jsonl so far, one per epoch."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def end_to_end(bench: Bench) -> Values:
    """Check that a resumed training reaches the losses of an uninterrupted training; measure samples/s.

    Losses may differ by rounding, because sums are computed in another order.
    """
    # the stages import both packages, so skip the check if a package is missing
    for package in ("tensorboard", "matplotlib"):
        __import__(package)
    case = Case("cosmo_unet", {"widths": [8, 16]}, (32, 32, 32) if bench.cuda else (16, 16, 16), batch_size=8)
    folder = bench.folder / "end to end"
    folder.mkdir()
    for name in ("train.h5", "valid.h5"):
        case.write(folder / name, 2 * case.grid[0])
    manifest = described(case, folder)
    rate = {"throughput": {"warmup": 1, "trials": 2, "batches": 5 if bench.quick else 50, "seconds": 0}}
    samples = {"kind": "crops", "crop": case.grid[0], "train": 64, "valid": 8}
    run = case.run(
        training={"epochs": EPOCHS},
        samples=samples,
        loader={"kind": "direct", "workers": 2, "resident": "never"},
        precision="bf16",
        optimizer={"fused": True},
        memory_format="channels_last",
        **rate,
    )
    found, results = Values(), dict[str, list[dict[str, Any]]]()
    for name in ("uninterrupted", "resumed"):
        out = folder / name
        out.mkdir()
        words = ["--config", run.model_dump_json(), "--manifest", manifest, "--threads", 1]
        training = partial(stage, bench, "train", out, *words, "--checkpoints", out / "checkpoints", "--out", out)
        start = time.monotonic()
        process = training()
        if name == "resumed":
            while process.poll() is None and not epochs(out) and time.monotonic() < start + PATIENCE:
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            # status 75: the training has saved its state and must be called again
            ended(process, out / "train.log", 75)
            process = training()
        ended(process, out / "train.log")
        found[f"{name} s"] = time.monotonic() - start
        results[name] = epochs(out)
    resumed = json.loads((folder / "resumed" / "provenance.json").read_text())["resumed_from_step"]
    if not 0 < (resumed or 0) < EPOCHS * 8:
        raise AssertionError(f"resumed from step {resumed}; expected a step between the first and the last")
    errors = Errors()
    for straight, again in zip(results["uninterrupted"], results["resumed"], strict=True):
        errors.hold("loss", abs(again["train_loss"] / straight["train_loss"] - 1), 0.01)
    out = folder / "uninterrupted"
    ended(stage(bench, "throughput", out, *words, "--out", out / "throughput.json"), out / "throughput.log")
    measured = json.loads((out / "throughput.json").read_text())
    found |= {"resumed from step": resumed, "first loss": results["uninterrupted"][0]["train_loss"]}
    found |= {"last loss": results["uninterrupted"][-1]["train_loss"], "loss is off by": errors["loss"]}
    return found | {mode: measured[mode]["mean"] for mode in ("IO", "SYNTHETIC", "FULL")}


def described(case: Case, folder: Path) -> Path:
    """Write the manifest of `train.h5` and `valid.h5` as the describe stage does; return its path."""
    fields = loading.cosmo_fields(2 * case.grid[0])
    manifests = [loading.manifest(folder / name, "cosmo", fields) for name in ("train.h5", "valid.h5")]
    splits = {split: each.splits["train"] for split, each in zip(("train", "valid"), manifests, strict=True)}
    normal = {  # mean and standard deviation of the random values
        name: info.model_copy(update={"mean": [0.0] * len(info.channels), "std": [1.0] * len(info.channels)})
        for name, info in manifests[0].fields.items()
    }
    manifest = Manifest(kind="cosmo", fields=normal, splits=splits, folder=folder)
    manifest.write(folder / "manifest.json")
    return folder / "manifest.json"


def tasks(bench: Bench) -> list[Task]:
    """Return the checks of one rank and of the user's commands."""
    backend = "NCCL" if bench.cuda else "gloo"
    forms: dict[str, dict[str, Any]] = {
        "plain": {},
        "bf16, accumulation": {"precision": "bf16", "accumulation_steps": 2},
        "compile, bf16": {**COMPILE, "precision": "bf16"},
    }
    unet = sizes(bench.quick)[0]
    best: dict[str, Any] = {
        "precision": "bf16",
        "memory_format": "channels_last",
        "model": {"space_to_depth": True},
    }
    return [
        *(
            Task(f"one rank, {backend}", name, 30 if "compile" in over else 5, partial(one_rank, bench, over))
            for name, over in forms.items()
        ),
        Task(f"one rank, {backend}", "U-Net 64³", 40, partial(exchanging, bench, unet, best)),
        Task("end to end", "train, resume, throughput", 90, partial(end_to_end, bench)),
    ]


def last(bench: Bench) -> list[Task]:
    """Return the checks that run last, because a failing graph with exchanges may break the process."""
    graph: dict[str, Any] = {"optimizer": {**SGD, "fused": True}, "cuda_graph": True}
    return [
        Task(f"one rank, {'NCCL' if bench.cuda else 'gloo'}", name, 10, partial(one_rank, bench, {**graph, **over}))
        for name, over in {"CUDA graph": {}, "CUDA graph, fp16": {"precision": "fp16"}}.items()
    ]
