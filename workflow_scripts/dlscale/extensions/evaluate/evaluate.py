"""`dlscale evaluate RUN`: compute the loss and metrics of a run's weights on the run's validation or test data."""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING

from dlscale.config.places import run_folder
from dlscale.config.run import Compile, Geometry, RunCore, load_run
from dlscale.core.errors import UserError
from dlscale.core.files import write_text
from dlscale.core.metrics import LossInfo, Metric, read_epochs
from dlscale.core.record import Number, Record
from dlscale.core.text import number, unit
from dlscale.train.around import run_context
from dlscale.train.build import open_session
from dlscale.train.provenance import Provenance
from dlscale.train.validation import naive_means, validate
from dlscale.train.weight_files import load_weights

if TYPE_CHECKING:
    from dlscale.config.resolve import Configuration

#: Files of weights in the run's folder, by the names that `--weights` accepts.
KEPT = {"last": "model.pt", "best": "model_best.pt"}


#: Maximum relative difference between the computed validation loss and the training's. Device and precision may differ.
MAX_DIFFERENCE = 0.1


class Evaluation(Record):
    """Result of `dlscale evaluate` for a run."""

    weights: str  #: File of the weights.
    split: str
    samples: int
    loss: Number  #: Mean over the samples.
    metrics: dict[str, Number] = {}  #: Means over the samples.
    loss_info: LossInfo = LossInfo()
    described: list[Metric] = []


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Print the scores of the runs `args.runs` (PLAN.RUN or folders); also write the file `args.out`, if set."""
    found = [
        evaluate(run_folder(name, configuration), args.weights, args.split, args.device, args.threads, args.manifest)
        for name in args.runs
    ]
    text = "[" + ",\n".join(each.text() for each in found) + "]\n"
    if args.out:
        write_text(args.out, text)
    print(text if args.json else "\n\n".join("\n".join(lines(*pair)) for pair in zip(args.runs, found, strict=True)))
    return 0


def evaluate(
    path: Path,
    weights: str = "last",
    split: str = "valid",
    device: str = "auto",
    threads: int | None = None,
    manifest: str | Path | None = None,
) -> Evaluation:
    """Compute the scores of the run in the folder `path` on a single device.

    For the split `valid` the scores are those that the training computed after the epoch of the weights, except for
    differences by the device and the precision.

    Parameters
    ----------
    weights
        `last`, `best`, or a file of weights.
    split
        `valid` or `test`. The run's setting `samples.valid` also limits the number of test samples.
    threads
        CPU threads (default: the threads of the training, if recorded).
    manifest
        Manifest of the dataset (default: data/DATASET/manifest.json in the run's results folder).
    """
    run, own = load_run(path / "config.yaml", "train"), manifest is None
    file = path / KEPT[weights] if weights in KEPT else Path(weights)
    if not file.is_file():
        raise UserError(f"{file}: no such weights. Train the run first; training.keep_best keeps the best weights")
    above = path.resolve().parents
    manifest = manifest or above[min(2, len(above) - 1)] / "data" / run.dataset / "manifest.json"
    record = path / "provenance.json"
    if threads is None and record.exists():
        threads = Provenance.read(record).device.threads
    run = single_device_run(run)
    with run_context(run, manifest, device, (split,)) as (world, _), contextlib.ExitStack() as stack:
        session = open_session(run, manifest, world, threads)
        load_weights(session.step.weights, file)
        loader = session.loader(split)
        stack.callback(loader.close)
        metrics = session.study.metrics(run, session.manifest, world.device)
        logging.info("%s: %d samples of %s, on %s", file, loader.samples, split, world.device)
        naive = naive_means(metrics, loader, session.share(), world, split=split)
        loss, numbers = validate(run.study, session.step, metrics, loader, world, naive=naive)
    if own and (weights, split) == ("last", "valid") and (trained := path / "metrics.jsonl").exists():
        known = read_epochs(trained)[-1].valid_loss
        if math.isfinite(known) and not abs(loss - known) <= MAX_DIFFERENCE * abs(known):
            logging.warning(
                "%s: the loss is %s, but the training computed %s: the weights are those of another run, or the data "
                "have changed",
                file,
                number(loss, 6),
                number(known, 6),
            )
    return Evaluation(
        weights=str(file),
        split=split,
        samples=loader.samples,
        loss=loss,
        metrics=numbers,
        loss_info=session.study.loss_info,
        described=metrics.described,
    )


def single_device_run(run: RunCore) -> RunCore:
    """Return the settings of the run on a single device, with its batch size per device.

    Compilation and CUDA graphs are off, because in an evaluation they take more time than they save. FSDP with
    `param_dtype: bf16` becomes `precision: bf16_pure`, since both cast weights and inputs.
    """
    precision = "bf16_pure" if getattr(run.parallel, "param_dtype", "fp32") == "bf16" else run.precision
    changes = {"batch_size": run.local_batch_size, "geometry": Geometry(), "compile": Compile(), "cuda_graph": False}
    return run.model_copy(update={**changes, "precision": precision})


def lines(name: str, found: Evaluation) -> list[str]:
    """Return the scores as lines of text.

    If the score of the best baseline without learning is known, it follows in parentheses.
    """
    text = [f"{name}: {found.weights}, {found.samples} samples of {found.split}"]
    described = {metric.name: metric for metric in found.described}
    naive = {metric.naive for metric in found.described}
    rows = [(f"loss ({found.loss_info.title})", number(found.loss, 6), "")]
    for key, value in found.metrics.items():
        metric = described.get(key, Metric(name=key, title=key))
        if key not in naive:
            answer = found.metrics.get(metric.naive or "")
            beside = "" if answer is None else f"  ({metric.answer}: {number(answer, 4)})"
            shown = f"{number(value, 6)} {unit(metric.unit)}".rstrip()
            rows.append((" ".join(filter(None, (metric.title, metric.channel))), shown, beside))
    width = max(len(title) for title, _, _ in rows)
    return [*text, *(f"  {title:{width}}  {value}{beside}" for title, value, beside in rows)]
