"""Stage `throughput`: samples/s of loading alone, of computing alone, and of both together.

IO takes batches from the loader and does nothing with them, SYNTHETIC trains on one batch that stays on the device, and
FULL trains on the loader's batches. Trials and the keys of the JSON are those of romerojosh/benchy. A run of one
process is timed once more, FULL, in turn with the first run of its plan (`dlscale.measure.turns`).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from dlscale.config.compute import compute_digest
from dlscale.config.run import Throughput as Settings
from dlscale.config.run import load_run
from dlscale.core import board
from dlscale.core.files import write_text
from dlscale.core.noise import interval
from dlscale.core.progress import Progress
from dlscale.data.manifest import Manifest
from dlscale.measure.processes import Meter
from dlscale.measure.records import MODES, Beside, Throughput, Trials
from dlscale.measure.roofline import at_least, attempt, common_peaks, sample_work
from dlscale.measure.turns import Ended, Timed, Turns
from dlscale.measure.window import timed_steps, training_batches
from dlscale.parallel.rendezvous import describe_device
from dlscale.parallel.world import World, synchronize
from dlscale.train import memory
from dlscale.train.around import entered, verify
from dlscale.train.build import Session, open_session
from dlscale.train.loop import Batch, run_steps
from dlscale.train.step import Step

#: A trial is this much longer than it has to be, since single ones vary.
MARGIN = 1.1
#: A trial has at most so many times the batches of the one before it: what is made at first use takes long once.
GROWTH = 16


def main(args: argparse.Namespace) -> None:
    """Measure the run in `args.config` on the data of `args.manifest` and write `args.out`, one line of JSON."""
    run = load_run(args.config, "throughput")
    with contextlib.ExitStack() as stack:
        turns = None
        if args.beside:  # before anything is computed: processes are copied
            own = Timed(args.config, args.manifest, args.device, args.threads)
            first = replace(own, config=args.beside, manifest=args.beside_manifest)
            turns = stack.enter_context(contextlib.closing(Turns(own, first)))
        world, links = stack.enter_context(entered(run, args.manifest, args.device))
        if args.beside and args.beside_manifest != args.manifest:
            verify(Manifest.read(args.beside_manifest), ("train", "valid"), world)
        results = measure(run.throughput, open_session(run, args.manifest, world, args.threads))
        results = results.model_copy(update={"links": links, "beside": turns and beside(run.throughput, turns, args)})
        if world.main:
            out = Path(args.out)
            modes = {f"throughput/{mode.lower()}": results.mode(mode) for mode in MODES}
            shown: dict[str, float | None] = {name: found.mean for name, found in modes.items() if found}
            shown |= {"mfu": results.mfu(), "mbu": results.mbu(), "peak_memory_bytes": results.peak_memory_bytes}
            board.write(out.parent / "tensorboard" / "throughput", shown)
            write_text(out, results.text() + "\n")


def beside(settings: Settings, turns: Turns, args: argparse.Namespace) -> Beside | None:
    """Return the run's speed in turns with the first of its plan; None, with the reason in the log, if that fails."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what this process is done with: both runs shall have room
    try:
        rounds = turns.rounds(settings.beside, settings.error)
    except Ended as ended:
        logging.warning("not timed in turn with the plan's first run: %s", ended)
        return None
    found = Beside(compute=compute_digest(load_run(args.beside, "throughput").model_dump(mode="json")), openings=rounds)
    ratio, error = interval(found.ratios)
    logging.info(
        "opened %d times beside the plan's first run: %.3f times as fast, -+ %.3f", len(rounds), math.exp(ratio), error
    )
    return found


def measure(settings: Settings, session: Session) -> Throughput:
    """Return samples/s of all ranks together in each mode."""
    step, world, run = session.step, session.world, session.run
    compiling: dict[str, float] | None = None
    modes: dict[str, Trials] = {}
    with contextlib.closing(session.loader("train")) as loader:
        x, y = next(loader.epoch(0))
        share = session.share()
        cached = x.clone(), y.clone(), share.weight(0, loader.samples)  # the loader will use their memory again
        if run.compile.mode != "none":
            compiling = compilation(step, cached, world.device)
            logging.info("compilation: %(cold_seconds).1f s, %(warm_seconds).1f s from the cache", compiling)
            if loader.samples % run.batch_size:  # the last batch has code of its own, not to be made while we measure
                rest = len(share.indices(len(loader) - 1, loader.samples))
                step.gradients(cached[0][:rest], cached[1][:rest])
        # Epoch 0 gave the cached batch; the others start where no worker has looked ahead. What a rank's loss counts
        # goes with its batches, as in training: by it all ranks decide alike what is recorded as a graph.
        streams: dict[str, tuple[Iterator[Batch], Callable[..., object]]] = {
            "IO": (training_batches(session, loader, 1), lambda *batch: None),
            "SYNTHETIC": (itertools.repeat(cached), step),
            "FULL": (training_batches(session, loader, 1), step),
        }
        for mode, (batches, consume) in streams.items():
            modes[mode] = trials(mode, batches, consume, settings, world)
            logging.info("%s: %.2f +- %.2f samples/s", mode, modes[mode].mean, modes[mode].std)
        if world.data_size > 1 and run.can_step_alone:
            with step.strategy.unsynchronised():  # last: from here on the ranks' weights differ
                modes["alone"] = trials("alone", itertools.repeat(cached), step, settings, world)
            logging.info("SYNTHETIC without sums over ranks: %.2f samples/s", modes["alone"].mean)
    peak_memory = int(*world.max(memory.peak(world.device)))  # before anything that is not the run's
    counted, formula = sample_work(session, cached[:2]) if world.main else (None, None)
    work, peaks = formula or counted, common_peaks(run.arithmetic, world)
    if work and peaks:
        fastest = max(max(found.trial_throughput) for mode, found in modes.items() if mode != "IO")
        peaks = at_least(peaks, fastest * work.flops / session.devices)
    known = run, session.manifest, world.device, cached[:2], step.attention
    memory_use = attempt("memory is not predicted", lambda: memory.predict(*known)) if world.main else None
    return Throughput(
        nranks=session.devices,
        batch_size=run.batch_size,
        device=describe_device(world.device),
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
    """Run the warm-up and the counted trials over one unbroken stream of batches.

    All ranks begin together, and a trial ends with the last of them. Its number of batches is known from the last
    uncounted one, which is repeated until it lasts half as long as asked.
    """
    size, warmed = settings.batches, 0

    def trial() -> tuple[int, float, float]:
        """Return this rank's samples, and the seconds of a trial, of this rank and of the last one."""
        synchronize(world.device)
        world.barrier()
        count, alone = timed_steps(consume, batches, size, world.device)
        return count, alone, world.max(alone)[0]

    with Progress(f"measuring {mode}", settings.warmup + settings.trials, "trials", part=True) as progress:
        lasted = 0.0 if settings.seconds else math.inf
        if settings.seconds:
            run_steps(consume, batches, range(1))  # what is made at first use says nothing of those that follow
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
            rates.append(sum(world.gather(count if world.lead else 0)) / seconds)  # who share a model: the same
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
    """Return the seconds of compiling the forward and backward pass of `step`; no weight is changed.

    `cold_seconds` is with an empty cache on disk, `warm_seconds` with a filled one; an ordinary pass is taken off.
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
