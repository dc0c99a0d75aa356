"""Stage `train`: train one run and write its metrics, logs, weights and a figure.

All that decides a weight is in `dlscale.train.trainer` and its imports: an edit to this module trains nothing again.
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
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlscale.config.run import Run, load_run
from dlscale.core import ranges
from dlscale.core.errors import UserError
from dlscale.core.figures import literal_text, save_png
from dlscale.core.files import whole, write_text
from dlscale.core.metrics import Epoch, Untrained, epoch_lines
from dlscale.core.process import Image, go_on, only_writer
from dlscale.core.progress import Progress
from dlscale.data.manifest import Manifest
from dlscale.parallel.records import Links
from dlscale.parallel.rendezvous import describe_device
from dlscale.studies import figures
from dlscale.train import provenance
from dlscale.train.around import entered
from dlscale.train.build import Session, open_session
from dlscale.train.checkpoint import Checkpoints
from dlscale.train.interruption import Interruption
from dlscale.train.logs import RunLogs, Wandb
from dlscale.train.loop import Batch, Hook
from dlscale.train.memory import total
from dlscale.train.trainer import Trainer, training
from dlscale.train.weights import weights_digest

#: Greatest number of epochs with pictures in TensorBoard.
PICTURES = 50

#: Settings that change no weight after a step: when to stop, who is told, on what a run computes, who loads its
#: samples. Of given weights the content counts.
NOT_FINGERPRINTED: Any = {
    "training": {
        *("target", "stop_after", "on_divergence", "trackers", "weights"),
    },
    "geometry": True,
    "parallel": True,  # but for what is in LEARNT
    "threads": True,
    "loader": True,
}


#: Settings of `parallel` that change weights.
LEARNT = ("sync_batchnorm", "compression", "param_dtype", "reduce_dtype")


def main(args: argparse.Namespace) -> None:
    """Train the run in `args.config` on the data of `args.manifest`; the first rank fills the folder `args.out`."""
    run = load_run(args.config, "train")
    if not run.averages:
        raise UserError(
            "parallel.sync: false: without averaged gradients every process would train a model of its own; leave sync "
            "out, or measure the run's throughput instead"
        )
    with entered(run, args.manifest, args.device) as (world, links), contextlib.ExitStack() as stack:
        session = open_session(run, args.manifest, world, args.threads)
        folder = Path(args.checkpoints) / run_fingerprint(run, session.manifest, args.sources)[:16]
        if world.main:
            stack.enter_context(only_writer(folder.parent))
        checkpoints = Checkpoints(folder, world=world)
        if world.main:
            checkpoints.tidy()
        world.barrier()
        trainer = stack.enter_context(training(run, session, checkpoints))
        go_on(folder / f"rank{world.rank}.log", resumed=trainer.resumed_from is not None)
        cores = set().union(*world.gather(os.sched_getaffinity(0)))
        if world.main:
            _lead(run, session, trainer, Path(args.out), len(cores), links)
        else:
            _follow(session, trainer)


def _lead(run: Run, session: Session, trainer: Trainer, out: Path, cores: int, links: Links | None) -> None:
    """Train as the rank that writes, and write the outputs; `provenance.json` comes last."""
    started = provenance.now()
    until = f" (of which {trainer.last_epoch} now)" if trainer.last_epoch < trainer.epochs else ""
    training, validation, processes = trainer.train_loader.samples, trainer.valid_loader.samples, session.world.size
    logging.info(
        f"{run.study}: {session.parameters} parameters, {training} training and {validation} validation samples, "
        f"{trainer.total_steps} steps in {trainer.epochs} epochs{until}, batch {run.batch_size}, "
        f"on {session.world.device}{f', one of {processes} processes' if processes > 1 else ''}"
    )
    for name in ("provenance.json", "prediction.png", "model.pt", "model_best.pt"):
        (out / name).unlink(missing_ok=True)
    logs = RunLogs(out, trainer.history, session.study.published_log, trainer.resumed_from or 0)
    settings = run.model_dump(mode="json")
    tracked = [Wandb(out, settings, trainer.history) for name in run.training.trackers if name == "wandb"]
    shown = _Shown(session, trainer.epochs)

    def on_begin(untrained: Untrained) -> None:
        logs.begin(untrained, time.time())

    def on_epoch(record: Epoch) -> None:
        session.manifest.check_files()  # HDF5 reads what was cut off as zeros
        prediction = shown.predict() if shown.drawn(record) else None
        drawn = prediction is not None
        logs.add(record, session.study.picture(run, session.manifest, shown.y, prediction) if drawn else None)
        for each in tracked:
            each.add(record)

    history = fit(trainer, on_epoch, on_begin, logs.add_steps)
    with ranges.part("writing", ranges.BETWEEN):
        prediction, (x, y) = shown.predict(), (shown.x, shown.y)
        assert prediction is not None
        with literal_text():
            figure = session.study.figure(run, session.manifest, x, y, prediction) or figures.values(y, prediction)
            save_png(figure, out / "prediction.png", dpi=100)
        logs.finish(history[-1], out / "prediction.png", settings, trainer.best)
        for each in tracked:
            each.finish(out / "prediction.png", trainer.best)
        _write_weights(out / "model.pt", session.step.weights.state_dict())
        if trainer.best_weights:
            _write_weights(out / "model_best.pt", session.step.weights.whole(trainer.best_weights))
        write_text(out / "metrics.jsonl", epoch_lines(history))  # somebody may have removed what grew
        fingerprint = trainer.checkpoints.folder
        provenance.provenance(
            started=started,
            device=describe_device(session.world.device),
            processes=processes,
            devices=session.devices,
            cores=cores,
            memory_bytes=total(torch.device("cpu")),
            seed=run.seed,
            parameters=session.parameters,
            training_samples=training,
            validation_samples=validation,
            dataset=run.dataset,
            manifest=session.manifest.provenance,
            fingerprint=fingerprint.name,
            resumed_from_step=trainer.resumed_from,
            links=links,
            best=trainer.best,
            loss=session.study.loss_info,
            metrics=trainer.metrics.described,
        ).write(out / "provenance.json")
        for other in fingerprint.parent.glob("[0-9a-f]" * len(fingerprint.name)):  # nothing that is not ours
            if other != fingerprint:  # of the run as it was before a change; until now it could have been put back
                shutil.rmtree(other, ignore_errors=True)


def _follow(session: Session, trainer: Trainer) -> None:
    """Train as any other rank, with the joint predictions and gathers of `_lead` in its order."""
    shown = _Shown(session, trainer.epochs)
    fit(trainer, lambda record: shown.predict() if shown.drawn(record) else None)
    with ranges.part("writing", ranges.BETWEEN):
        shown.predict()
        session.step.weights.state_dict(keep=False)
        if trainer.best_weights:
            session.step.weights.whole(trainer.best_weights, keep=False)


def fit(
    trainer: Trainer,
    on_epoch: Callable[[Epoch], object] = lambda record: None,
    on_begin: Callable[[Untrained], None] = lambda untrained: None,
    on_steps: Callable[[int, Mapping[str, float]], None] = lambda step, values: None,
) -> list[Epoch]:
    """Train to the last epoch with progress and signals; return the records of all epochs.

    `on_steps` gets every ten seconds the step, its loss, the samples/s of all since, and the seconds left.
    """
    described = sorted(trainer.metrics.described, key=lambda metric: not metric.naive)
    headline = described[0].name if described else ""  # the first with a naive answer, or else the first
    samples = min(trainer.run.batch_size, trainer.train_loader.samples)  # an epoch may have fewer than a batch
    latest = _Latest(samples, trainer.total_steps, on_steps)

    def tell(record: Epoch) -> None:
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
    ):
        hooks = [
            Hook(after_step=latest.add),
            Hook(after_step=lambda number, batch, loss: progress.update(number + 1)),
        ]
        history = trainer.fit(tell, on_begin, hooks, interruption.poll)
    for line in trainer.outcome():
        logging.info(line)
    return history


class _Latest:
    """The last step's loss on this rank, and the samples/s of all since the last call of `values`."""

    def __init__(self, samples: int, steps: int, tell: Callable[[int, Mapping[str, float]], None]) -> None:
        self._samples, self._total, self._tell = samples, steps, tell  # of a step, of all
        self._step, self._loss = 0, torch.tensor(math.nan)
        self._before = time.perf_counter(), 0
        self._steps = 0  # of this process

    def add(self, number: int, batch: Batch, loss: torch.Tensor) -> None:
        self._step, self._loss = number + 1, loss
        self._steps += 1

    def values(self) -> dict[str, float]:
        """Return both by name, and tell them with the seconds left; this waits for the device."""
        loss, now = float(self._loss), time.perf_counter()
        before, steps = self._before
        self._before = now, self._steps
        rate = (self._steps - steps) * self._samples / (now - before)
        values = {"loss": loss, "samples/s": rate} if self._steps > steps else {}
        if values:
            left = (self._total - self._step) * self._samples / rate
            self._tell(self._step, {**values, "seconds_left": left})
        return values


class _Shown:
    """The first validation sample, of which pictures are drawn after some epochs."""

    def __init__(self, session: Session, epochs: int) -> None:
        self.x, self.y = session.samples("valid").read(0, 0)
        self._session, self._epochs, self._every = session, epochs, -(-epochs // PICTURES)

    def drawn(self, record: Epoch) -> bool:
        """Return whether an epoch has a picture."""
        return record.epoch % self._every == 0 or record.epoch == self._epochs

    def predict(self) -> np.ndarray | None:
        """Return the prediction on the first rank; ranks that share a model make it together."""
        world, step = self._session.world, self._session.step
        if not (world.main or step.joint):
            return None
        prediction = step.predict(torch.from_numpy(self.x)[None].to(world.device), once=True)[0]
        return prediction.cpu().numpy() if world.main else None


def _write_weights(file: Path, state: dict[str, torch.Tensor]) -> None:
    # Given a path, torch.save would put its (temporary) name into the file: equal weights, unequal bytes.
    with whole(file) as path, open(path, "wb") as opened:
        torch.save({key: value.cpu() for key, value in state.items()}, opened)


def run_fingerprint(run: Run, manifest: Manifest, sources: str = "") -> str:
    """Return the SHA-256 of a training's settings, data, sources and image; the same one resumes its checkpoints."""
    image = Image.read()
    decisive = {
        "run": run.model_dump(mode="json", exclude=NOT_FINGERPRINTED),
        "parallel": run.parallel.model_dump(include=set(LEARNT), exclude_defaults=True),
        # Loaders deliver the same samples, but for the one that delivers no data.
        "synthetic": run.loader.kind == "synthetic",
        "data": {split: [file.digest for file in files] for split, files in manifest.splits.items()},
        "fields": {name: info.model_dump(mode="json") for name, info in manifest.fields.items()},
        "extra": manifest.extra,
        "weights": weights_digest(run.training.weights) if run.training.weights else None,
        "sources": sources,
        "image": image.identity if image else None,
    }
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()
