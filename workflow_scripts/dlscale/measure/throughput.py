"""Stage `throughput`: samples/s of loading alone, of computing alone, and of both together.

IO takes batches from the loader and does nothing with them. SYNTHETIC trains on one batch that stays
on the device. FULL trains on what the loader delivers. Each is measured in `warmup` uncounted and then
`trials` counted trials of `batches` batches, as romerojosh/benchy defined them; the JSON has its keys.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import resource
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import torch

from dlscale.config.run import Run, Throughput, load_run
from dlscale.core.files import write_text
from dlscale.core.progress import Progress
from dlscale.data.loaders.base import Batch, Loader, Share
from dlscale.parallel.world import World, join
from dlscale.train.session import Session, device_facts, open_session
from dlscale.train.step import Step


def main(args: argparse.Namespace) -> None:
    """Measure the run in `args.config` on the data of `args.manifest` and write `args.out`, one line of JSON."""
    run = load_run(args.config, "throughput")
    with join(run.geometry, args.device) as world:
        results = measure(run, open_session(run, args.manifest, world, args.threads))
        if world.main:
            write_text(Path(args.out), json.dumps(results) + "\n")


def measure(run: Run, session: Session) -> dict[str, Any]:
    """Return what the JSON holds: samples/s of all processes together, and the settings."""
    step, world = session.step, session.world
    results: dict[str, Any] = {
        "nranks": world.size,
        "batch_size": run.batch_size,
        "device": device_facts(world.device),
        "settings": run.throughput.model_dump(),
    }
    with contextlib.closing(session.loader("train")) as loader:
        x, y = next(loader.epoch(0))
        cached = x.clone(), y.clone()  # the loader will use their memory again
        if run.compile.mode != "none":
            results["compile"] = compilation(step, cached, world.device)
            logging.info("compilation: %(cold_seconds).1f s, %(warm_seconds).1f s from the cache", results["compile"])
            if loader.samples % run.batch_size:  # the last batch has code of its own, not to be made while we measure
                share = Share(run.batch_size, world.rank, world.size).indices(len(loader) - 1, loader.samples)
                step.gradients(cached[0][: len(share)], cached[1][: len(share)])

        def nothing(x: torch.Tensor, y: torch.Tensor) -> None:
            pass

        # Epoch 0 gave the cached batch; the others start where no worker has looked ahead.
        for label, batches, consume in (
            ("IO", endless(loader, 1), nothing),
            ("SYNTHETIC", repeat(cached), step),
            ("FULL", endless(loader, 1), step),
        ):
            with contextlib.closing(batches):
                results[label] = trials(label, batches, consume, run.throughput, world)
            logging.info("%s: %.2f +- %.2f samples/s", label, results[label]["mean"], results[label]["std"])
    results["peak_memory_bytes"] = int(world.most(peak_memory(world.device)))
    return results


def trials(
    label: str, batches: Iterator[Batch], consume: Callable[..., object], settings: Throughput, world: World
) -> dict[str, Any]:
    """Run the warm-up and the counted trials over one unbroken stream of batches.

    All processes begin together, their samples count together, and a trial ends with the last of them.

    Returns
    -------
    dict
        `trial_throughput` (samples/s), `trial_time` (s), `avg_iter_throughput` (samples/s; here the same as the
        trial's: single steps are not timed, since that would make each wait for the device), `mean`, `std` (of
        the counted trials; 0 for one), in samples/s.
    """
    rates: list[float] = []
    times: list[float] = []
    with Progress(f"measuring {label}", settings.warmup + settings.trials, "trials") as progress:
        for trial in range(-settings.warmup, settings.trials):
            samples = 0
            synchronize(world.device)
            world.wait()
            start = time.perf_counter()
            for _ in range(settings.batches):
                x, y = next(batches)
                consume(x, y)
                samples += len(x)
            synchronize(world.device)
            seconds = world.most(time.perf_counter() - start)
            samples = sum(world.gather(samples))
            if trial >= 0:
                rates.append(samples / seconds)
                times.append(seconds)
            progress.update(trial + settings.warmup + 1)
    return {
        "trial_throughput": rates,
        "trial_time": times,
        "avg_iter_throughput": rates,
        "mean": statistics.fmean(rates),
        "std": statistics.stdev(rates) if len(rates) > 1 else 0.0,
    }


def compilation(step: Step, batch: Batch, device: torch.device) -> dict[str, float]:
    """Return the seconds that compiling the forward and backward pass of `step` takes; no weight is changed.

    Returns
    -------
    dict
        `cold_seconds` with an empty cache on disk, `warm_seconds` when a process finds what an earlier one left there;
        of both the time of an ordinary pass is taken off.
    """
    from torch._inductor.utils import clear_caches, fresh_cache

    def seconds() -> float:
        synchronize(device)
        start = time.perf_counter()
        step.gradients(*batch)
        synchronize(device)
        return time.perf_counter() - start

    firsts = []
    with fresh_cache():  # in a folder of its own
        for _ in ("cold", "warm"):
            torch.compiler.reset()
            clear_caches()  # those in memory
            firsts.append(seconds())
        ordinary = min(seconds() for _ in range(3))
    cold, warm = (max(first - ordinary, 0.0) for first in firsts)
    return {"cold_seconds": cold, "warm_seconds": warm}


def endless(loader: Loader, first_epoch: int) -> Generator[Batch]:
    """Yield batches epoch after epoch."""
    epoch = first_epoch
    while True:
        yield from loader.epoch(epoch)
        epoch += 1


def repeat(batch: Batch) -> Generator[Batch]:
    """Yield the same batch for ever."""
    while True:
        yield batch


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device: torch.device) -> int:
    """Return the greatest memory in use so far, bytes: the GPU's, or this process's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
