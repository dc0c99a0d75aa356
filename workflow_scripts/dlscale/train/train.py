"""Stage `train`: train one run and write its metrics, logs, weights and a figure."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlscale.config.run import Run, load_run
from dlscale.core import log, provenance, ranges
from dlscale.core.errors import UserError
from dlscale.core.figures import literal_text, save_png
from dlscale.core.files import whole, write_text
from dlscale.core.lock import only_writer
from dlscale.core.records import Epoch, Links, Untrained, epoch_lines
from dlscale.data.manifest import Manifest
from dlscale.parallel.selftest import self_test
from dlscale.parallel.world import describe_device, join
from dlscale.studies import figures
from dlscale.train.build import Session, open_session
from dlscale.train.checkpoint import Checkpoints
from dlscale.train.exhaustion import explained
from dlscale.train.logs import RunLogs
from dlscale.train.memory import total
from dlscale.train.trackers import trackers
from dlscale.train.trainer import Trainer
from dlscale.train.weights import load_weights, weights_digest

#: How many epochs of a run TensorBoard has pictures of at most: a long one is not to fill the disk.
PICTURES = 50

#: Settings that change no weight after a step: which checkpoints are kept, what is looked at before the first step,
#: when to stop, who is told, on what a run computes, who loads its samples. Of given weights the content counts.
NOT_FINGERPRINTED: Any = {
    "training": {
        *("checkpoint_epochs", "keep_checkpoints", "initial_validation", "target", "stop_after", "on_divergence"),
        *("trackers", "weights"),
    },
    "geometry": True,
    "parallel": True,  # but for what is in LEARNT
    "threads": True,
    "loader": True,
}


#: Settings of `parallel` that change what is learnt.
LEARNT = ("sync_batchnorm", "compression", "param_dtype", "reduce_dtype")


def main(args: argparse.Namespace) -> None:
    """Train the run in `args.config` on the data of `args.manifest`; the first rank fills the folder `args.out`."""
    run = load_run(args.config, "train")
    if not run.averages:
        raise UserError(
            "parallel.sync: false: without averaged gradients every process would train a model of its own; leave sync "
            "out, or measure the run's throughput instead"
        )
    with (
        join(run.processes, args.device) as world,
        explained(run, args.manifest, world),
        contextlib.ExitStack() as stack,
    ):
        links = self_test(world, run.selftest)
        session = open_session(run, args.manifest, world, args.threads)
        folder = Path(args.checkpoints) / run_fingerprint(run, session.manifest, args.sources)[:16]
        if world.main:
            stack.enter_context(only_writer(folder.parent))
        checkpoints = Checkpoints(folder, run.training.keep_checkpoints, world)
        if world.main:
            checkpoints.tidy()
        world.barrier()
        loaders = session.loader("train"), session.loader("valid")
        for loader in loaders:
            stack.callback(loader.close)
        metrics = session.study.metrics(run, session.manifest, world.device)
        trainer = Trainer(run, session.step, session.share(), loaders, metrics, checkpoints, world)
        trainer.resume()
        log.go_on(folder / f"rank{world.rank}.log", resumed=trainer.resumed_from is not None)
        if run.training.weights and trainer.resumed_from is None:
            load_weights(session.step.weights, run.training.weights)
        cores = set().union(*world.gather(os.sched_getaffinity(0)))
        if world.main:
            _lead(run, session, trainer, Path(args.out), len(cores), links)
        else:
            _follow(session, trainer)


def _lead(run: Run, session: Session, trainer: Trainer, out: Path, cores: int, links: Links | None) -> None:
    """Train as the rank that writes, and write what there is to show for it; `provenance.json` says that all is there.

    What a former run left is removed first.
    """
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
    tracked = trackers(run.training.trackers, out, settings, trainer.history)
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

    history = trainer.fit(on_epoch, on_begin, logs.add_steps)
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
            loss=session.study.loss_info(run),
            metrics=trainer.metrics.described,
        ).write(out / "provenance.json")
        for other in fingerprint.parent.glob("[0-9a-f]" * len(fingerprint.name)):  # nothing that is not ours
            if other != fingerprint:  # of the run as it was before a change; until now it could have been put back
                shutil.rmtree(other, ignore_errors=True)


def _follow(session: Session, trainer: Trainer) -> None:
    """Train as any other rank; who shares a model does with the first one what `_lead` does with it, in its order."""
    shown = _Shown(session, trainer.epochs)
    trainer.fit(lambda record: shown.predict() if shown.drawn(record) else None)
    with ranges.part("writing", ranges.BETWEEN):
        shown.predict()
        session.step.weights.state_dict(keep=False)
        if trainer.best_weights:
            session.step.weights.whole(trainer.best_weights, keep=False)


class _Shown:
    """The first validation sample, of which pictures are drawn after some epochs."""

    def __init__(self, session: Session, epochs: int) -> None:
        self.x, self.y = session.samples("valid").read(0, 0)
        self._session, self._epochs, self._every = session, epochs, -(-epochs // PICTURES)

    def drawn(self, record: Epoch) -> bool:
        """Whether there is a picture of an epoch."""
        return record.epoch % self._every == 0 or record.epoch == self._epochs

    def predict(self) -> np.ndarray | None:
        """Return the prediction, on the first rank; those who share a model make it together."""
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
    """Return the SHA-256 of what makes a training itself: settings, data, sources, image.

    A run with the same fingerprint goes on from its checkpoints; one that was trained to the end has its outputs
    written again, no more.
    """
    image = provenance.Image.read()
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
