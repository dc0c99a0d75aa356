"""Stage `throughput`: samples/s of loading alone, of computing alone, and of both together.

IO takes batches from the loader and does nothing with them. SYNTHETIC trains on one batch that stays
on the device. FULL trains on what the loader delivers. Each is measured in `warmup` uncounted and then
`trials` counted trials of `batches` batches, as romerojosh/benchy defined them; the JSON has its keys.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import torch

from dlscale.config.run import Throughput as Settings
from dlscale.config.run import load_run
from dlscale.core import board
from dlscale.core.files import write_text
from dlscale.core.progress import Progress
from dlscale.core.records import MODES, MemoryUse, Throughput, Trials
from dlscale.data.loaders.base import Loader
from dlscale.measure.flops import sample_work
from dlscale.measure.peaks import at_least, common_peaks
from dlscale.measure.usage import Meter
from dlscale.parallel.selftest import self_test
from dlscale.parallel.world import World, describe_device, join, synchronize
from dlscale.train import memory
from dlscale.train.build import Session, open_session
from dlscale.train.exhaustion import explained
from dlscale.train.loop import Batch, Hook, run_steps
from dlscale.train.step import Step


def main(args: argparse.Namespace) -> None:
    """Measure the run in `args.config` on the data of `args.manifest` and write `args.out`, one line of JSON."""
    run = load_run(args.config, "throughput")
    with join(run.processes, args.device) as world, explained(run, args.manifest, world):
        links = self_test(world, run.selftest)
        results = measure(run.throughput, open_session(run, args.manifest, world, args.threads))
        results = results.model_copy(update={"links": links})
        if world.main:
            out = Path(args.out)
            board.write(out.parent / "tensorboard" / "throughput", scalars(results))
            write_text(out, results.text() + "\n")


def scalars(results: Throughput) -> dict[str, float | None]:
    """Return samples/s, MFU, MBU and memory for TensorBoard; None is what was not measured."""
    modes = {f"throughput/{mode.lower()}": results.mode(mode) for mode in MODES}
    rates = {name: trials.mean for name, trials in modes.items() if trials}
    return {**rates, "mfu": results.mfu(), "mbu": results.mbu(), "peak_memory_bytes": results.peak_memory_bytes}


def measure(settings: Settings, session: Session) -> Throughput:
    """Return samples/s of all ranks together in each mode."""
    step, world, run = session.step, session.world, session.run
    compiling: dict[str, float] | None = None
    modes: dict[str, Trials] = {}
    with contextlib.closing(session.loader("train")) as loader:
        x, y = next(loader.epoch(0))
        share = session.share()
        weights = [share.weight(number, loader.samples) for number in range(len(loader))]
        cached = x.clone(), y.clone(), weights[0]  # the loader will use their memory again
        if run.compile.mode != "none":
            compiling = compilation(step, cached, world.device)
            logging.info("compilation: %(cold_seconds).1f s, %(warm_seconds).1f s from the cache", compiling)
            if loader.samples % run.batch_size:  # the last batch has code of its own, not to be made while we measure
                rest = len(share.indices(len(loader) - 1, loader.samples))
                step.gradients(cached[0][:rest], cached[1][:rest])
        # Epoch 0 gave the cached batch; the others start where no worker has looked ahead. What a rank's loss counts
        # goes with its batches, as in training: by it all ranks decide alike what is recorded as a graph.
        weighted = ((x, y, weight) for (x, y), weight in zip(endless(loader, 1), itertools.cycle(weights)))
        streams: dict[str, tuple[Iterator[Batch], Callable[..., object]]] = {
            "IO": (endless(loader, 1), lambda x, y: None),
            "SYNTHETIC": (itertools.repeat(cached), step),
            "FULL": (weighted, step),
        }
        for mode, (batches, consume) in streams.items():
            modes[mode] = trials(mode, batches, consume, settings, world)
            logging.info("%s: %.2f +- %.2f samples/s", mode, modes[mode].mean, modes[mode].std)
        if world.data_size > 1 and run.can_step_alone:
            with step.unsynchronised():  # last: from here on the ranks' weights differ
                modes["alone"] = trials("alone", itertools.repeat(cached), step, settings, world)
            logging.info("SYNTHETIC without sums over ranks: %.2f samples/s", modes["alone"].mean)
    peak_memory = int(*world.max(memory.peak(world.device)))  # before anything that is not the run's
    counted, formula = sample_work(session, cached[:2]) if world.main else (None, None)
    work, peaks = formula or counted, common_peaks(run.precision, world)
    if work and peaks:
        fastest = max(max(found.trial_throughput) for mode, found in modes.items() if mode != "IO")
        peaks = at_least(peaks, fastest * work.flops / session.devices)
    results = Throughput(
        nranks=session.devices,
        batch_size=run.batch_size,
        device=describe_device(world.device),
        settings=settings.model_dump(),
        compile=compiling,
        **modes,
        work=work,
        peaks=peaks,
        peak_memory_bytes=peak_memory,
        predicted=predicted(session, cached[:2]) if world.main else None,
    )
    if (mfu := results.mfu()) is not None:
        logging.info("FULL: %.2g of the device's peak FLOP/s (MFU)", mfu)
    return results


def predicted(session: Session, batch: Batch) -> MemoryUse | None:
    """Return the memory that a step on such a batch is predicted to take; None where its code asks for values."""
    run, world = session.run, session.world
    try:
        return memory.predict(run, session.manifest, world.device, batch, session.step.attention)
    except Exception as error:
        logging.warning("memory is not predicted: %s", error)
        return None


def trials(
    mode: str, batches: Iterator[Batch], consume: Callable[..., object], settings: Settings, world: World
) -> Trials:
    """Run the warm-up and the counted trials over one unbroken stream of batches.

    All ranks begin together, their samples count together, and a trial ends with the last of them.
    """
    rates, times, own, counts = list[float](), list[float](), list[float](), list[int]()
    count = Hook(after_step=lambda number, batch, result: counts.append(len(batch[0])))
    with Progress(f"measuring {mode}", settings.warmup + settings.trials, "trials") as progress:
        for trial in range(-settings.warmup, settings.trials):
            if trial == 0:
                meter = Meter()
            counts.clear()
            synchronize(world.device)
            world.barrier()
            start = time.perf_counter()
            run_steps(consume, batches, range(settings.batches), [count])
            synchronize(world.device)
            alone = time.perf_counter() - start
            (seconds,) = world.max(alone)
            rate = sum(world.gather(sum(counts) if world.lead else 0)) / seconds  # who share a model see the same
            if trial >= 0:
                rates.append(rate)
                times.append(seconds)
                own.append(sum(counts) / alone)
            progress.update(trial + settings.warmup + 1)
    usage = meter.usage(world)
    return Trials(
        trial_throughput=rates,
        trial_time=times,
        avg_iter_throughput=rates,
        mean=statistics.fmean(rates),
        std=statistics.stdev(rates) if len(rates) > 1 else 0.0,
        rank_throughput=world.gather(statistics.fmean(own)),
        usage=usage,
    )


def compilation(step: Step, batch: Batch, device: torch.device) -> dict[str, float]:
    """Return the seconds that compiling the forward and backward pass of `step` takes; no weight is changed.

    `cold_seconds` is with an empty cache on disk, `warm_seconds` with what an earlier process left there; the time of
    an ordinary pass is taken off.
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
    for epoch in itertools.count(first_epoch):
        yield from loader.epoch(epoch)
