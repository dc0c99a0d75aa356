"""Stage `throughput`: measure the samples/s of loading, of computing, and of training.

Loading (IO) takes batches from the loader without using them. Computing (SYNTHETIC) trains on one batch that stays on
the device. Training (FULL) trains on the loader's batches. Trials and JSON keys are those of romerojosh/benchy.
For a single-process run with `--beside`, paired timing (`dlscale.measure.turns`) then compares FULL with the plan's
first run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from dlscale.config.compute import compute_digest
from dlscale.config.run import Throughput as Settings
from dlscale.config.run import load_run
from dlscale.core import board, registry
from dlscale.core.files import write_text
from dlscale.core.progress import Progress
from dlscale.data.loaders.base import first_samples
from dlscale.data.manifest import Manifest
from dlscale.data.samples import tree_map
from dlscale.measure.processes import Meter
from dlscale.measure.records import MODE_NAMES, MODES, Throughput, Trials
from dlscale.measure.roofline import at_least, attempt, common_peaks, sample_work
from dlscale.measure.turns import paired, timed_steps
from dlscale.parallel.rendezvous import describe_device
from dlscale.parallel.world import World, synchronize
from dlscale.train import memory
from dlscale.train.around import run_context, verify
from dlscale.train.build import Session, open_session
from dlscale.train.loop import Batch, run_steps
from dlscale.train.step import Step

#: Factor on the number of batches per trial, so that trials last long enough even if steps become faster.
MARGIN = 1.1
#: Maximum factor by which the number of batches grows from one warm-up trial to the next, because one short trial may
#: be much faster than later trials.
GROWTH = 16


def main(args: argparse.Namespace) -> None:
    """Measure the run in `args.config` on the data of `args.manifest`; write one line of JSON to `args.out`."""
    run = load_run(args.config, "throughput")
    with contextlib.ExitStack() as stack:
        # Start the timed processes before any computation, because they are forks of this process.
        turns = stack.enter_context(paired(args))
        world, links = stack.enter_context(run_context(run, args.manifest, args.device))
        if args.beside and args.beside_manifest != args.manifest:
            verify(Manifest.read(args.beside_manifest), ("train", "valid"), world)
        results = measure(run.throughput, open_session(run, args.manifest, world, args.threads))
        results = results.model_copy(update={"links": links, "beside": turns and turns.paired_timing(run.throughput)})
        if world.main:
            out = Path(args.out)
            modes = {f"throughput/{mode.lower()}": results.mode(mode) for mode in MODES}
            shown: dict[str, float | None] = {name: found.mean for name, found in modes.items() if found}
            shown |= {"mfu": results.mfu(), "mbu": results.mbu(), "peak_memory_bytes": results.peak_memory_bytes}
            board.write(out.parent / "tensorboard" / "throughput", shown)
            write_text(out, results.text() + "\n")


def measure(settings: Settings, session: Session) -> Throughput:
    """Measure each mode, over all ranks together; return the record."""
    step, world, run = session.step, session.world, session.run
    compiling: dict[str, float] | None = None
    modes: dict[str, Trials] = {}
    with contextlib.closing(session.loader("train")) as loader:
        batch = tree_map(torch.clone, next(loader.epoch(0)))  # clones, as the loader reuses its memory
        share = session.share()
        cached = *batch, share.weight(0, loader.samples)
        if run.compile.mode != "none":
            compiling = compilation(step, cached, world.device)
            logging.info("compilation: %(cold_seconds).1f s, %(warm_seconds).1f s from the cache", compiling)
            if loader.samples % run.batch_size:  # compile for the smaller last batch now, not in a trial
                step.gradients(*first_samples(batch, len(share.indices(len(loader) - 1, loader.samples))))
        # The cached batch comes from epoch 0. IO and FULL start with epoch 1, which no worker has prefetched. As in
        # training, batches include the weight of the rank's loss, on which the choice of a CUDA graph depends.
        streams: dict[str, tuple[Iterator[Batch], Callable[..., object]]] = {
            "IO": (session.training_batches(loader, 1), lambda *batch: None),
            "SYNTHETIC": (itertools.repeat(cached), step),
            "FULL": (session.training_batches(loader, 1), step),
        }
        for mode, (batches, consume) in streams.items():
            modes[mode] = trials(mode, batches, consume, settings, world)
            logging.info(
                "%s: %.2f samples/s, standard deviation %.2f", MODE_NAMES[mode], modes[mode].mean, modes[mode].std
            )
        if world.data_size > 1 and run.can_step_alone:
            with step.strategy.unsynchronised():  # the last mode, because the ranks' weights differ afterwards
                modes["alone"] = trials("alone", itertools.repeat(cached), step, settings, world)
            logging.info("computing without averaged gradients: %.2f samples/s", modes["alone"].mean)
    peak_memory = int(*world.max(memory.peak(world.device)))  # before sample_work and common_peaks, which need memory
    counted, formula = sample_work(session, batch) if world.main else (None, None)
    work, peaks = formula or counted, common_peaks(run.arithmetic, world)
    if work and peaks:
        fastest = max(max(found.trial_throughput) for mode, found in modes.items() if mode != "IO")
        peaks = at_least(peaks, fastest * work.flops / session.devices)
    known = run, session.manifest, world.device, batch, step.attention
    predict = registry.provided("predict_memory", None) if world.main else None
    memory_use = attempt("memory cannot be predicted", lambda: predict(*known)) if predict else None
    return Throughput(
        nranks=session.devices,
        batch_size=run.batch_size,
        device=describe_device(world),
        settings=settings.model_dump(),
        compute=compute_digest(run.model_dump(mode="json")),
        compile=compiling,
        **modes,
        work=work,
        peaks=peaks,
        peak_memory_bytes=peak_memory,
        predicted=memory_use,
    )


def trials(
    mode: str, batches: Iterator[Batch], consume: Callable[..., object], settings: Settings, world: World
) -> Trials:
    """Run warm-up and counted trials of a mode (one of `MODES`, or `alone`) over one unbroken stream of batches.

    All ranks begin a trial together, and the trial ends when the slowest rank ends. At least `settings.warmup` warm-up
    trials run, and more until a trial takes at least half of `settings.seconds`. The last warm-up trial determines the
    number of batches per counted trial, at least `settings.batches`.
    """
    size, warmed = settings.batches, 0

    def trial() -> tuple[int, float, float]:
        """Run a trial; return (samples of this rank, seconds of this rank, seconds of the slowest rank)."""
        synchronize(world.device)
        world.barrier()
        count, alone = timed_steps(consume, batches, size, world.device)
        return count, alone, world.max(alone)[0]

    with Progress(
        f"measuring {MODE_NAMES.get(mode, 'computing without averaged gradients')}",
        settings.warmup + settings.trials,
        "trials",
        part=True,
    ) as progress:
        lasted = 0.0 if settings.seconds else math.inf
        if settings.seconds:
            run_steps(consume, batches, range(1))  # one-time set-up
        while warmed < settings.warmup or lasted < settings.seconds / 2:
            lasted = trial()[2]
            enough = math.ceil(MARGIN * settings.seconds * size / max(lasted, 1e-6))
            size = max(settings.batches, min(enough, GROWTH * size))
            warmed += 1
            progress.update(min(warmed, settings.warmup))
        meter = Meter()
        rates, times, own = list[float](), list[float](), list[float]()
        for number in range(settings.trials):
            count, alone, seconds = trial()
            # Ranks that share a model (tp, cp) have the same samples, so only the first of them counts samples.
            rates.append(sum(world.gather(count if world.lead else 0)) / seconds)
            times.append(seconds)
            own.append(count / alone)
            progress.update(settings.warmup + number + 1)
    return Trials(
        trial_throughput=rates,
        trial_time=times,
        avg_iter_throughput=rates,
        mean=statistics.fmean(rates),
        std=statistics.stdev(rates) if len(rates) > 1 else 0.0,
        rank_throughput=world.gather(statistics.fmean(own)),
        usage=meter.usage(world),
    )


def compilation(step: Step, batch: Batch, device: torch.device) -> dict[str, float]:
    """Return the seconds to compile the forward and backward pass of `step`, without changing weights.

    `cold_seconds` is the time with an empty cache on disk, and `warm_seconds` the time with a filled cache. The seconds
    of an ordinary pass are subtracted from both.
    """
    from torch._inductor.utils import clear_caches, fresh_cache

    def seconds() -> float:
        synchronize(device)
        start = time.perf_counter()
        step.gradients(*batch)
        synchronize(device)
        return time.perf_counter() - start

    firsts = []
    with fresh_cache():  # a temporary cache on disk
        for _ in ("cold", "warm"):
            torch.compiler.reset()
            clear_caches()  # the caches in memory
            firsts.append(seconds())
        ordinary = min(seconds() for _ in range(3))
    cold, warm = (max(first - ordinary, 0.0) for first in firsts)
    return {"cold_seconds": cold, "warm_seconds": warm}
