"""Stage `train`: train one run and write its metrics, logs, weights and a figure.

All code that affects weights is in `dlscale.train.trainer` and its imports, so a change of this module does not make
any run train again.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from dlscale.config.run import Run, load_run
from dlscale.core import ranges, registry
from dlscale.core.errors import UserError
from dlscale.core.files import atomic_write, save_png, write_text
from dlscale.core.metrics import Epoch, Untrained, epoch_lines
from dlscale.core.process import Image, keep_log, only_writer
from dlscale.core.progress import Progress
from dlscale.data.loaders.base import read_batch
from dlscale.data.manifest import Manifest
from dlscale.data.samples import tree_leaves, tree_map
from dlscale.parallel.records import Links
from dlscale.parallel.rendezvous import describe_device
from dlscale.parallel.world import World
from dlscale.studies import figures
from dlscale.train import provenance
from dlscale.train.around import run_context
from dlscale.train.build import Session, open_session
from dlscale.train.checkpoint import Checkpoints
from dlscale.train.logs import RunLogs
from dlscale.train.loop import Batch, Hook
from dlscale.train.memory import total
from dlscale.train.trainer import Request, Trainer, training
from dlscale.train.weight_files import weights_digest

#: Largest number of epochs with pictures in TensorBoard.
PICTURES = 50

#: Settings left out of the fingerprint, because they do not change the weights after a given step: when to save and to
#: stop, trackers, devices, threads, loader. For initial weights (`weights`), the file's content counts instead of the
#: path.
NOT_FINGERPRINTED: Any = {
    "training": {
        *("checkpoint_epochs", "target", "stop_after", "on_divergence", "trackers", "weights"),
    },
    "geometry": True,
    "parallel": True,  # except the keys in LEARNT
    "threads": True,
    "loader": True,
}


#: Signal → request. The scheduler may send the warnings SIGUSR1 and SIGUSR2 long before the time limit, so the training
#: saves and continues.
REQUESTS = {
    signal.SIGUSR1: Request.SAVE,
    signal.SIGUSR2: Request.SAVE,
    signal.SIGTERM: Request.END,
    signal.SIGINT: Request.END,
}

#: Maximum number of steps between two exchanges of requests, because fast steps may suddenly become slow.
MAX_STEPS = 16

#: Settings of `parallel` that change weights.
LEARNT = ("sync_batchnorm", "compression", "param_dtype", "reduce_dtype")


def main(args: argparse.Namespace) -> None:
    """Train the run in `args.config` on the data of `args.manifest`; the first rank writes into `args.out`."""
    run = load_run(args.config, "train")
    if not run.averages:
        raise UserError(
            "parallel.sync: false: without averaged gradients, each process would train a separate model. Remove the "
            "key, or measure the run's throughput instead"
        )
    with run_context(run, args.manifest, args.device) as (world, links), contextlib.ExitStack() as stack:
        session = open_session(run, args.manifest, world, args.threads)
        folder = Path(args.checkpoints) / run_fingerprint(run, session.manifest, args.sources)[:16]
        if world.main:
            stack.enter_context(only_writer(folder.parent))
        checkpoints = Checkpoints(folder, world=world)
        if world.main:
            checkpoints.tidy()
        world.barrier()
        trainer = stack.enter_context(training(run, session, checkpoints, args.out))
        keep_log(folder / f"rank{world.rank}.log", resumed=trainer.resumed_from is not None)
        cores = set().union(*world.gather(os.sched_getaffinity(0)))
        if world.main:
            _lead(run, session, trainer, Path(args.out), len(cores), links)
        else:
            _follow(session, trainer)


def _lead(run: Run, session: Session, trainer: Trainer, out: Path, cores: int, links: Links | None) -> None:
    """Train as the first rank, and write the outputs; `provenance.json` is written last."""
    started = provenance.now()
    _announce(run, session, trainer)
    for name in ("provenance.json", "prediction.png", "model.pt", "model_best.pt"):
        (out / name).unlink(missing_ok=True)
    logs = RunLogs(out, trainer.history, session.study.published_log, trainer.resumed_from or 0)
    settings = run.model_dump(mode="json")
    kept = trainer.checkpoints.folder
    trackers = [registry.named(registry.table("TRACKERS")[name]) for name in run.training.trackers]
    tracked = [open_tracker(out, settings, trainer.history, kept) for open_tracker in trackers]
    shown = _Shown(session, trainer.epochs)

    def on_epoch(record: Epoch) -> None:
        session.manifest.check_files()  # if an open file was truncated, HDF5 reads zeros
        prediction = shown.predict() if shown.drawn(record) else None
        drawn = prediction is not None
        logs.add(record, session.study.picture(run, session.manifest, shown.y, prediction) if drawn else None)
        for each in tracked:
            each.add(record)

    history = fit_with_signals(trainer, on_epoch, lambda untrained: logs.begin(untrained, time.time()), out)
    with ranges.part("writing", ranges.BETWEEN):
        _write_figure(run, session, shown, out / "prediction.png")
        logs.finish(history[-1], out / "prediction.png", settings, trainer.best)
        for each in tracked:
            each.finish(out / "prediction.png", trainer.best)
        _write_weights(out / "model.pt", session.step.weights.state_dict())
        if trainer.best_weights:
            _write_weights(out / "model_best.pt", session.step.weights.gathered(trainer.best_weights))
        write_text(out / "metrics.jsonl", epoch_lines(history))  # a user may have removed `metrics.jsonl`
        provenance.provenance(
            started=started,
            device=describe_device(session.world),
            processes=session.world.size,
            devices=session.devices,
            cores=cores,
            memory_bytes=total(torch.device("cpu")),
            seed=run.seed,
            epochs=len(history),
            parameters=session.parameters,
            training_samples=trainer.train_loader.samples,
            validation_samples=trainer.valid_loader.samples,
            dataset=run.dataset,
            manifest=session.manifest.provenance,
            fingerprint=trainer.checkpoints.folder.name,
            resumed_from_step=trainer.resumed_from,
            links=links,
            best=trainer.best,
            loss=session.study.loss_info,
            metrics=trainer.metrics.described,
        ).write(out / "provenance.json")
        _remove_other_checkpoints(trainer.checkpoints.folder)


def _announce(run: Run, session: Session, trainer: Trainer) -> None:
    until = f" (now up to epoch {trainer.last_epoch})" if trainer.last_epoch < trainer.epochs else ""
    processes = session.world.size
    logging.info(
        f"{run.study}: {session.parameters} parameters, {trainer.train_loader.samples} training and "
        f"{trainer.valid_loader.samples} validation samples, {trainer.total_steps} steps in {trainer.epochs} epochs"
        f"{until}, batch {run.batch_size}, on {session.world.device}"
        f"{f', one of {processes} processes' if processes > 1 else ''}"
    )


def _write_figure(run: Run, session: Session, shown: _Shown, file: Path) -> None:
    import matplotlib

    prediction = shown.predict()
    assert prediction is not None
    with matplotlib.rc_context({"text.parse_math": False}):  # draw `$` as text, also in tick labels, which saving makes
        figure = session.study.figure(run, session.manifest, shown.x, shown.y, prediction)
        y, p = (np.concatenate([*map(np.ravel, tree_leaves(tree))]) for tree in (shown.y, prediction))
        save_png(figure or figures.values(y, p), file, dpi=100)


def _remove_other_checkpoints(folder: Path) -> None:
    """Remove the run's checkpoints from before a change of its settings, data or code.

    These checkpoints were kept until the end of this training, in case the user undid the change.
    """
    for other in folder.parent.glob("[0-9a-f]" * len(folder.name)):  # only folders named by a fingerprint
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)


def _follow(session: Session, trainer: Trainer) -> None:
    """Train as another rank than the first, with predictions and gathers in the same order as in `_lead`."""
    shown = _Shown(session, trainer.epochs)
    fit_with_signals(trainer, lambda record: shown.predict() if shown.drawn(record) else None)
    with ranges.part("writing", ranges.BETWEEN):
        shown.predict()
        session.step.weights.state_dict(keep=False)
        if trainer.best_weights:
            session.step.weights.gathered(trainer.best_weights, keep=False)


def fit_with_signals(
    trainer: Trainer,
    on_epoch: Callable[[Epoch], object] = lambda record: None,
    on_begin: Callable[[Untrained], None] = lambda untrained: None,
    out: Path | None = None,
) -> list[Epoch]:
    """Run `trainer.fit` with progress, signals and extensions' records in `out`; return the records of all epochs."""
    described = sorted(trainer.metrics.described, key=lambda metric: not metric.naive)
    headline = described[0].name if described else ""  # metrics that have a naive baseline come first
    # An epoch may have fewer samples than a batch.
    latest = _Latest(min(trainer.run.batch_size, trainer.train_loader.samples))

    def log_epoch(record: Epoch) -> None:
        shown = f", {headline} {record.metrics[headline]:.4g}" if headline in record.metrics else ""
        logging.info(
            f"epoch {record.epoch} of {trainer.epochs}: {record.epoch_seconds:.1f} s, "
            f"{record.samples_per_second:.2f} samples/s, train loss {record.train_loss:.6f}, valid loss "
            f"{record.valid_loss:.6f} ({record.valid_seconds:.1f} s){shown}"
        )
        on_epoch(record)

    with (
        Interruption(trainer.world) as interruption,
        Progress("training", trainer.total_steps, "steps", latest.values) as progress,
        registry.provided("watch_training", lambda *_: contextlib.nullcontext(((), lambda then: then)))(
            trainer, out
        ) as (watching, validated),
    ):
        hooks = [
            *watching,
            Hook(after_step=latest.add),
            Hook(after_step=lambda number, batch, loss: progress.update(number + 1)),
        ]
        history = trainer.fit(validated(log_epoch), validated(on_begin), hooks, interruption.poll)
    for line in trainer.outcome():
        logging.info(line)
    return history


class Interruption:
    """Context manager that turns signals into requests, on which all ranks agree.

    Ranks may get a signal at different steps, but must all save at the same step. Therefore they exchange requests on
    the host, about every `seconds` seconds, and at least every `MAX_STEPS` steps.
    """

    def __init__(self, world: World, seconds: float = 1.0) -> None:
        self._world, self._seconds = world, seconds
        self._received = Request.NONE
        self._interval = self._left = 1
        self._agreed = 0.0
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._receive) for number in REQUESTS}
        return self

    def __exit__(self, *details: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        request = REQUESTS[signal.Signals(number)]
        with contextlib.suppress(OSError):  # not by `logging`, which this signal may have interrupted
            os.write(2, f"received {signal.Signals(number).name}\n".encode())
        if number == signal.SIGINT:  # a second Ctrl-C ends the process without saving
            signal.signal(number, signal.default_int_handler)
        self._received = max(self._received, request)

    def poll(self) -> Request:
        """Return the most urgent new request of any rank, or NONE; all ranks call this before each batch."""
        if self._world.size == 1:
            request, self._received = self._received, Request.NONE
            return request
        self._left -= 1
        if self._left > 0:
            return Request.NONE
        now = time.monotonic()
        urgency, elapsed = self._world.max(self._received, now - self._agreed)
        # All ranks compute the same next interval, from the slowest rank's time.
        ratio = self._seconds / max(elapsed, 1e-6) if self._agreed else 1.0  # the first exchange has no `elapsed`
        self._interval = self._left = min(max(1, int(self._interval * min(ratio, 4.0))), MAX_STEPS)
        self._agreed = time.monotonic()
        if self._received <= urgency:  # a more urgent signal that arrived meanwhile waits for the next exchange
            self._received = Request.NONE
        return Request(int(urgency))


class _Latest:
    """Loss of the last step on this rank, and samples/s of all ranks since the last call of `values`."""

    def __init__(self, samples: int) -> None:
        self._samples, self._loss = samples, torch.tensor(math.nan)  # samples per step of all ranks
        self._steps, self._before = 0, (time.perf_counter(), 0)  # steps so far; time and steps at the last `values`

    def add(self, number: int, batch: Batch, loss: torch.Tensor) -> None:
        self._loss = loss
        self._steps += 1

    def values(self) -> dict[str, float]:
        """Return the loss and the samples/s by name; this waits for the device."""
        loss, now = float(self._loss.reshape(-1)[0]), time.perf_counter()
        before, steps = self._before
        self._before = now, self._steps
        rate = (self._steps - steps) * self._samples / (now - before)
        return {"loss": loss, "samples/s": rate} if self._steps > steps else {}


class _Shown:
    """First validation sample; its prediction is drawn after some epochs."""

    def __init__(self, session: Session, epochs: int) -> None:
        self.batch = read_batch(session.samples("valid"), 0, range(1))
        self.x, self.y = tree_map(lambda values: values[0].numpy(), self.batch)
        self._session, self._epochs, self._every = session, epochs, -(-epochs // PICTURES)

    def drawn(self, record: Epoch) -> bool:
        """Return whether the prediction is drawn after an epoch."""
        return record.epoch % self._every == 0 or record.epoch == self._epochs

    def predict(self) -> Any:
        """Return the prediction on the first rank, else None; ranks that share a model predict together."""
        world, step = self._session.world, self._session.step
        if not (world.main or step.joint):
            return None
        prediction = step.predict(tree_map(lambda v: v.to(world.device), self.batch[0]), once=True)
        return tree_map(lambda values: values[0].cpu().numpy(), prediction) if world.main else None


def _write_weights(file: Path, state: dict[str, torch.Tensor]) -> None:
    # With a path, torch.save would store the temporary name in the file, and equal weights would give different bytes.
    with atomic_write(file) as path, open(path, "wb") as opened:
        torch.save({key: value.cpu() for key, value in state.items()}, opened)


def run_fingerprint(run: Run, manifest: Manifest, sources: str = "") -> str:
    """Return the SHA-256 of a training's settings, data, sources and image.

    A training resumes only from checkpoints with the same fingerprint.
    """
    image = Image.read()
    decisive = {
        "run": run.model_dump(mode="json", exclude=NOT_FINGERPRINTED),
        "parallel": run.parallel.model_dump(include=set(LEARNT), exclude_defaults=True),
        # All loaders deliver the same samples, except `synthetic`, which delivers random numbers.
        "synthetic": run.loader.kind == "synthetic",
        "data": {split: [file.digest for file in files] for split, files in manifest.splits.items()},
        "fields": {name: info.model_dump(mode="json") for name, info in manifest.fields.items()},
        "extra": manifest.extra,
        "weights": weights_digest(run.training.weights) if run.training.weights else None,
        "sources": sources,
        "image": image.identity if image else None,
    }
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()
