"""Stage `train`: train one run and write its metrics, logs, weights and a figure."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from dlscale.config.run import Run, load_run
from dlscale.core import provenance
from dlscale.core.files import whole, write_json, write_text
from dlscale.core.lock import only_writer
from dlscale.data.manifest import Manifest
from dlscale.parallel.world import join
from dlscale.train.checkpoint import Checkpoints
from dlscale.train.session import Session, device_facts, open_session
from dlscale.train.tensorboard import Board
from dlscale.train.trainer import Record, Trainer


def main(args: argparse.Namespace) -> None:
    """Train the run in `args.config` on the data of `args.manifest` and fill the run's folder `args.out`.

    Of several processes the first one writes; the others only train.
    """
    run = load_run(args.config, "train")
    with join(run.geometry, args.device) as world:
        session = open_session(run, args.manifest, world, args.threads)
        folder = Path(args.checkpoints) / identity(run, session.manifest, args.sources)[:16]
        if world.main:
            _lead(run, session, folder, Path(args.out))
        else:
            with _trainer(run, session, folder, lambda record: None) as trainer:
                trainer.fit()


@contextlib.contextmanager
def _trainer(run: Run, session: Session, folder: Path, on_epoch: Callable[[Record], None]) -> Iterator[Trainer]:
    """Make the trainer and its loaders, and close them at the end."""
    with contextlib.ExitStack() as stack:
        train, valid = (stack.enter_context(contextlib.closing(session.loader(split))) for split in ("train", "valid"))
        metrics = session.study.metrics(session.run, session.manifest, session.device)
        checkpoints = Checkpoints(folder, run.training.keep_checkpoints)
        yield Trainer(run, session.step, session.loss, train, valid, metrics, checkpoints, on_epoch, session.world)


def _lead(run: Run, session: Session, folder: Path, out: Path) -> None:
    """Train, and write what there is to show for it."""
    started = provenance.now()
    with only_writer(folder.parent), contextlib.ExitStack() as stack:
        Checkpoints(folder, run.training.keep_checkpoints).tidy()
        board_folder = stack.enter_context(whole(out / "tensorboard"))
        board = stack.enter_context(Board(board_folder, run))

        def on_epoch(record: Record) -> None:
            session.manifest.check_files()  # HDF5 reads what was cut off as zeros
            board.epoch(record)

        trainer = stack.enter_context(_trainer(run, session, folder, on_epoch))
        logging.info(
            "%s: %d parameters, %d training and %d validation samples, %d steps in %d epochs, batch %d, on %s%s",
            run.study,
            session.parameters,
            trainer.train_loader.samples,
            trainer.valid_loader.samples,
            trainer.total_steps,
            trainer.epochs,
            run.batch_size,
            session.device,
            f", one of {session.world.size} processes" if session.world.size > 1 else "",
        )
        history = trainer.fit()
        _draw(session, out / "prediction.png", board)
        board.finish(history[-1])
        # Given a path, torch.save would put its (temporary) name into the file: equal weights, unequal bytes.
        with whole(out / "model.pt") as path, open(path, "wb") as file:
            torch.save({key: value.cpu() for key, value in session.step.weights.state_dict().items()}, file)
        write_json(
            out / "provenance.json",
            provenance.provenance(
                started=started,
                device=device_facts(session.device),
                processes=session.world.size,
                seed=run.seed,
                parameters=session.parameters,
                training_samples=trainer.train_loader.samples,
                validation_samples=trainer.valid_loader.samples,
                dataset=run.dataset,
                manifest=session.manifest.provenance,
                fingerprint=folder.name,
                resumed_from_step=trainer.resumed_from,
                metrics=[metric.model_dump() for metric in trainer.metrics.described],
            ),
        )
        write_text(out / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in history))
        for other in folder.parent.glob("[0-9a-f]" * len(folder.name)):  # nothing that is not ours
            if other != folder:  # of the run as it was before a change; until now it could have been put back
                shutil.rmtree(other, ignore_errors=True)


def identity(run: Run, manifest: Manifest, sources: str = "") -> str:
    """Return the SHA-256 of what makes this training itself: settings, data and how they are read, sources.

    A run of the same identity goes on from its checkpoints; one that was trained to the end has its outputs
    written again, no more. Which checkpoints to keep is no part of it.
    """
    parts = {
        "run": run.model_dump(mode="json", exclude={"training": {"checkpoint_epochs", "keep_checkpoints"}}),
        "data": {split: [file.digest for file in files] for split, files in manifest.splits.items()},
        "fields": {name: asdict(info) for name, info in manifest.fields.items()},
        "extra": manifest.extra,
        "sources": sources,
        "image": image.identity if (image := provenance.Image.read()) else None,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _draw(session: Session, path: Path, board: Board) -> None:
    """Draw the first validation sample with its prediction."""
    samples = session.samples("valid")
    x, y = samples.read(0, 0)
    prediction = session.step.predict(torch.from_numpy(x)[None].to(session.device), once=True)[0].cpu().numpy()
    figure = session.study.figure(session.run, session.manifest, x, y, prediction)
    with whole(path) as temporary:
        figure.savefig(temporary, dpi=100, format="png")
    board.figure(figure)
