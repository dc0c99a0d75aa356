"""Speed, samples/s, of the trainer and its step, compared with a bare loop, the tutorials' step and upper bounds.

Everything runs on one thread, in many short turns. The median ignores single turns that other programs disturb.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from bench import published
from bench.cases import Case
from bench.measure import Options, Row, in_turns
from dlscale.config.run import Throughput
from dlscale.config.site import Limits
from dlscale.core.metrics import Epoch
from dlscale.data.loaders import DirectLoader, direct_loader
from dlscale.data.loaders import SyntheticLoader as SyntheticSettings
from dlscale.data.loaders.base import Batch, Share
from dlscale.data.loaders.synthetic_loader import SyntheticLoader
from dlscale.data.samples import ArraySpec
from dlscale.extensions.health.training import watch_training
from dlscale.measure.throughput import trials
from dlscale.parallel.watchdog import Watchdog
from dlscale.parallel.world import World
from dlscale.studies.base import Metrics
from dlscale.train.checkpoint import Checkpoints
from dlscale.train.loop import run_steps
from dlscale.train.step import set_learning_rate
from dlscale.train.trainer import Trainer

CPU = torch.device("cpu")
UNET = Case("cosmo_unet", {"widths": [16, 32]}, (32, 32, 32), batch_size=2)
VIT = Case("era5_vit", {"patch": 8, "embed_dim": 96, "depth": 4, "heads": 4}, (64, 128), batch_size=4, channels=16)
#: Larger cases, closer to the tutorials' sizes: more arithmetic per loaded value, and tens of ms per step.
FULL_UNET = Case("cosmo_unet", {"widths": [32, 64, 128]}, (32, 32, 32), batch_size=2)
FULL_VIT = Case("era5_vit", {"patch": 8, "embed_dim": 192, "depth": 4, "heads": 4}, (96, 192), batch_size=1)
NAMES = {"cosmo_unet": "U-Net", "era5_vit": "ViT"}
#: Minimum ratio of speed to the reference that counts as «no slower»; timings vary by 2 %.
NO_SLOWER = 0.98
#: Minimum ratio of the speed of `run_steps` without hooks to a bare loop of the same step; 0.5 % is noise.
NO_COST = 0.995


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def label(case: Case) -> str:
    """Return the name of a case in rows."""
    return f"{NAMES[case.study]} {'×'.join(map(str, case.grid))}"


def counts(case: Case, model: nn.Module, steps: int) -> dict[str, float]:
    """Return the sizes behind a row's numbers."""
    return {
        "threads": torch.get_num_threads(),
        "steps": steps,
        "batch": case.batch_size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "FLOPs/sample": case.flops(),
    }


def rate(step: Callable[..., torch.Tensor], batch: Batch, count: int) -> float:
    """Return samples/s of `count` steps on one batch."""
    start = time.perf_counter()
    for _ in range(count):
        loss = step(*batch)
    loss.item()
    return count * len(batch[0]) / (time.perf_counter() - start)


def speed(epoch: Epoch) -> float:
    """Return the samples/s that the trainer recorded for an epoch."""
    assert epoch.samples_per_second is not None
    return epoch.samples_per_second


def adam(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """Return PyTorch's Adam with the study's settings."""
    settings: Any = case.run().optimizer
    return torch.optim.Adam(model.parameters(), lr=settings.lr, betas=settings.betas, eps=settings.eps)


def bare_loop(case: Case) -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    """Return dlscale's model, and a minimal step that trains it."""
    model, loss = case.step(CPU).model, case.loss()
    optimizer = adam(case, model)
    model.train()

    def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        value = loss(model(x), y).mean()
        value.backward()
        optimizer.step()
        return value.detach()

    return model, call


def trainer(options: Options, case: Case, steps: int, guarded: bool | None = None) -> Callable[[], float]:
    """Return a function that trains for an epoch and returns the samples/s that the trainer records.

    If `guarded` is true, all guards are on: the search for NaN with `on_divergence: skip`, the watchdog, and the record
    of memory. If `guarded` is false, all guards are off. By default, only the search for NaN is on.
    """
    run, step = case.run(**({"training": {"on_divergence": "skip"}} if guarded else {})), case.step(CPU)
    if guarded is False:
        step._gradients.check = lambda *values: None  # type: ignore[method-assign]

    def loader(size: int, batch_size: int) -> SyntheticLoader:
        specs = [ArraySpec(tuple(shape)) for shape in case.shapes]
        samples: Any = SimpleNamespace(size=size, input_spec=specs[0], target_spec=specs[1], collate=None)
        return SyntheticLoader(samples, SyntheticSettings(kind="synthetic"), Share(batch_size), CPU)

    batches, valid = loader(steps * case.batch_size, case.batch_size), loader(1, 1)
    turns = itertools.count()

    def epoch() -> float:
        # a new folder, so that the training does not resume from a checkpoint
        folder = options.folder / case.study / str(next(turns))
        fit = Trainer(
            run, step, Share(case.batch_size), (batches, valid), Metrics(), Checkpoints(folder, keep=1), World()
        )
        if not guarded:
            return speed(fit.fit()[0])
        with closing(Watchdog(limits=Limits())), watch_training(fit, folder) as (hooks, _):
            return speed(fit.fit(hooks=hooks)[0])

    return epoch


def published_loop(case: Case) -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    """Return the tutorial's model with dlscale's weights, and the tutorial's step."""
    ours = case.step(CPU).model
    if case.study == "cosmo_unet":
        theirs: nn.Module = published.UNet(4, 5, case.model["widths"])
    else:
        sizes = {"embed": case.model["embed_dim"], "depth": case.model["depth"], "heads": case.model["heads"]}
        theirs = published.ViT(case.grid, case.model["patch"], case.channels, **sizes)  # type: ignore[arg-type]
    with torch.no_grad():
        for p, q in zip(theirs.parameters(), ours.parameters(), strict=True):
            p.copy_(q)
    loss = published.l1 if case.study == "cosmo_unet" else published.relative_l2
    return theirs, published.step(theirs, loss, adam(case, theirs))


def hookless(step: Callable[..., torch.Tensor], batch: Batch, count: int) -> float:
    """Return samples/s of `run_steps` without hooks."""
    start = time.perf_counter()
    run_steps(step, itertools.repeat(batch), range(count))
    return count * len(batch[0]) / (time.perf_counter() - start)


def ours(case: Case) -> Callable[..., torch.Tensor]:
    """Return dlscale's step, which sets its learning rate as the trainer does."""
    step = case.step(CPU)

    def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        set_learning_rate(step.optimizer, 1e-4)
        return step(x, y)

    return call


def steps(options: Options) -> list[Row]:
    """Measure U-Net and ViT at small sizes, because short steps show overhead best."""
    count, turns = (2, 2) if options.quick else (3, 24 * options.repetitions)
    rows = []
    with one_thread():
        for case in (UNET, VIT):
            batch = case.batch(CPU)
            model, bare = bare_loop(case)
            _, theirs = published_loop(case)
            counted = counts(case, model, count)
            step, own = case.step(CPU), partial(rate, ours(case), batch, count)
            unchecked = case.step(CPU)
            unchecked._gradients.check = lambda *values: None  # type: ignore[method-assign]
            contests: list[tuple[str, Callable[[], float], str, Callable[[], float], float]] = [
                ("trainer", trainer(options, case, count), "a bare loop", partial(rate, bare, batch, count), NO_SLOWER),
                ("step", own, "published step", partial(rate, theirs, batch, count), NO_SLOWER),
                (
                    "loop without hooks",
                    partial(hookless, step, batch, count),
                    "a bare loop of its step",
                    partial(rate, step, batch, count),
                    NO_COST,
                ),
                (
                    "step with the search for NaN",
                    partial(rate, step, batch, count),
                    "step without the search",
                    partial(rate, unchecked, batch, count),
                    NO_SLOWER,
                ),
            ]
            for name, measure, reference, measure_reference, target in contests:
                found = in_turns(turns, {name: measure, reference: measure_reference})
                title = f"{name}, {label(case)}"
                rows.append(Row(title, "samples/s", found[name], reference, found[reference], counted, target))
    return rows


def guards(options: Options) -> list[Row]:
    """Measure what all guards cost together, in epochs of some seconds, because the watchdog works once a second."""
    count, turns = (2, 2) if options.quick else (100, 2 * options.repetitions)
    rows = []
    with one_thread():
        for case in (UNET, VIT):
            all_on, all_off = trainer(options, case, count, True), trainer(options, case, count, False)
            found = in_turns(turns, {"on": all_on, "off": all_off})
            counted = counts(case, case.step(CPU).model, count)
            name = f"trainer with all guards, {label(case)}"
            rows.append(Row(name, "samples/s", found["on"], "without guards", found["off"], counted, NO_SLOWER))
    return rows


def full(options: Options) -> list[Row]:
    """Compare the speed of training on real samples with the slower of loading and computing."""
    with one_thread():
        return [full_row(options, case, rows) for case, rows in ((FULL_UNET, 64), (FULL_VIT, 16))]


def full_row(options: Options, case: Case, rows: int) -> Row:
    """Measure one study on a file of `rows` rows; loading, computing and training take turns."""
    batches, turns = (2, 2) if options.quick else (6, 4 * options.repetitions)
    settings = Throughput(
        warmup=1, trials=1, batches=batches, seconds=0
    )  # one turn; the warm-up trial fills the loader's buffers
    path = options.folder / f"{case.study}.h5"
    case.write(path, rows)
    step, wanted = case.step(CPU), DirectLoader(kind="direct", workers=1)
    samples = case.samples(path, rows, count=64 * case.batch_size)
    with closing(direct_loader.build(samples, wanted, Share(case.batch_size), CPU)) as loader:
        x, y = next(loader.epoch(0))
        cached = x.clone(), y.clone()

        def stream() -> Iterator[Batch]:
            return (each for epoch in itertools.count(1) for each in loader.epoch(epoch))

        def nothing(x: torch.Tensor, y: torch.Tensor) -> None:
            pass

        def mean(label: str, batches: Iterator[Batch], consume: Callable[..., object]) -> float:
            return trials(label, batches, consume, settings, World()).mean

        found = in_turns(
            turns,
            {
                "IO": lambda: mean("IO", stream(), nothing),
                "SYNTHETIC": lambda: mean("SYNTHETIC", itertools.repeat(cached), step),
                "FULL": lambda: mean("FULL", stream(), step),
            },
        )
    bound = [min(pair) for pair in zip(found["IO"], found["SYNTHETIC"], strict=True)]
    counted = {
        **counts(case, step.model, batches),
        "stored bytes/sample": 2 * (x.numel() + y.numel()) / case.batch_size,
        "loading": statistics.median(found["IO"]),
        "computing": statistics.median(found["SYNTHETIC"]),
        "loader threads": wanted.workers,
    }
    name = f"training, {label(case)}, direct"
    return Row(name, "samples/s", found["FULL"], "the slower of loading and computing", bound, counted, target=0.97)
