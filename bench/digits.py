"""Training speed, digits/s: PyTorch's MNIST example (`bench.published_digits`) against the plan `mnist_fast`.

The digits are real if their files exist (in `data`, or in `shared/data/mnist` next to the repository), else simulated.
To compare accuracy, both programs first train for three epochs. To compare the speed of the training loop, both then
train one epoch each, in turn. The speed excludes validation, start and compilation.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.measure import Options, Row, in_turns
from bench.published_digits import Digits, Program
from bench.training import speed
from dlscale.config import resolve
from dlscale.core import registry
from dlscale.core.machine import missing
from dlscale.data.manifest import Manifest
from dlscale.data.store import Reader
from dlscale.extensions.mnist_cnn.study import MnistCNNSettings
from dlscale.measure.roofline import measure_peaks
from dlscale.parallel.world import World
from dlscale.train.build import open_session
from dlscale.train.checkpoint import Checkpoints
from dlscale.train.trainer import Trainer
from tests.conftest import ROOT, make_dataset

PLAN, EPOCHS, CPU = "mnist_fast", 3, torch.device("cpu")
FILES = {"images": "t10k-images-idx3-ubyte.gz", "labels": "t10k-labels-idx1-ubyte.gz"}
PLACES = (ROOT / "data", ROOT.parent / "shared/data/mnist")
#: Minimum ratio of dlscale's speed to the example's speed. On a CPU, convolutions take most of the time, so a factor of
#: ten is out of reach (see the row «floor»). On a GPU, loading takes most of the example's time.
TARGET = 1.2


def source(quick: bool) -> dict[str, Any]:
    """Return the dataset's source settings."""
    for place in PLACES:
        if not quick and all((place / name).exists() for name in FILES.values()):
            files = {key: str(place / name) for key, name in FILES.items()}
            return {"kind": "files", "all": files, "shares": {"train": 0.8, "valid": 0.2}}
    return {"kind": "simulated", "train": 256 if quick else 8000, "valid": 128 if quick else 2000}


@contextmanager
def cores(count: int) -> Iterator[None]:
    """Limit this process, and the processes that it starts meanwhile, to `count` logical CPUs."""
    threads, allowed = torch.get_num_threads(), os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:count])
    torch.set_num_threads(count)
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
        torch.set_num_threads(threads)


class Theirs:
    """PyTorch's example on a dataset's images; a call trains (first three epochs, later one) and returns samples/s."""

    def __init__(self, manifest: Manifest) -> None:
        train, valid = (self._digits(manifest, split) for split in ("train", "valid"))
        self.program, self.samples, self.accuracy = Program(train, valid), len(train), 0.0
        self._epochs = itertools.count(1)

    @staticmethod
    def _digits(manifest: Manifest, split: Any) -> Digits:
        (file,) = manifest.files(split)
        images, labels = (Reader(manifest.path(file), name).dataset[()] for name in ("images", "labels"))
        return Digits(torch.from_numpy(np.ascontiguousarray(images[:, 0])), torch.from_numpy(labels))

    def __call__(self) -> float:
        seconds = [self.program.epoch(next(self._epochs)) for _ in range(1 if self.accuracy else EPOCHS)]
        self.accuracy = self.accuracy or self.program.accuracy()
        return self.samples / statistics.fmean(seconds)


class Ours:
    """dlscale's trainer on the same images; a call trains as in `Theirs`, and returns samples/s of the last epoch."""

    def __init__(self, run: Any, manifest: Path, folder: Path, stack: ExitStack) -> None:
        self.session = open_session(run, manifest, World(), torch.get_num_threads())
        self.loaders = self.session.loader("train"), self.session.loader("valid")
        for loader in self.loaders:
            stack.callback(loader.close)
        self.metrics = self.session.study.metrics(run, self.session.manifest, CPU)
        self.run, self.folder, self.accuracy = run, folder, 0.0
        self._turns = itertools.count()

    def __call__(self) -> float:
        training = {"epochs": 1 if self.accuracy else EPOCHS, "steps": None}
        run = self.run.model_copy(update={"training": self.run.training.model_copy(update=training)})
        # a new folder, so that the training does not resume from a checkpoint
        checkpoints = Checkpoints(self.folder / str(next(self._turns)), keep=1)
        fit = Trainer(run, self.session.step, self.session.share(), self.loaders, self.metrics, checkpoints, World())
        last = fit.fit()[-1]
        self.accuracy = self.accuracy or last.metrics["accuracy"]
        return speed(last)


def digits(options: Options) -> list[Row]:
    """Compare dlscale's speed with PyTorch's example and with a matrix product, on one core and on two."""
    data = {"kind": "mnist", "source": source(options.quick)}
    manifest = make_dataset(options.folder / "digits", data) / "manifest.json"
    settings = {"targets": [PLAN], "datasets": {"digits": data}}
    plans = {PLAN: {"settings": {"dataset": "digits", "training": {"epochs": EPOCHS}}}}
    known = resolve.load({**settings, "plans": plans})
    runs = known.plans[PLAN]
    run = (runs.get("bf16") or runs["resident"]).run  # not `compile`, which is no faster on a CPU
    assert isinstance(run.model, MnistCNNSettings)
    rows = []
    for count in range(1, 1 + min(2, len(os.sched_getaffinity(0)))):
        with cores(count), ExitStack() as stack:
            theirs = Theirs(Manifest.read(manifest))
            ours = Ours(run, manifest, options.folder / str(count), stack)
            contest: dict[str, Callable[[], float]] = {"ours": ours, "theirs": theirs}
            found = in_turns(max(2, options.repetitions // 2), contest)
            forward = registry.study(run.study).flops(run, ours.session.manifest)
            # forward and backward passes, without the gradient of the images
            flops = 3 * (forward or 0.0) - 2 * 9 * run.model.widths[0] * 26 * 26
            peaks = {kind: measure_peaks(kind, CPU).flops for kind in ("fp32", run.precision)}
        counted = {
            "samples per epoch": theirs.samples,
            "accuracy": ours.accuracy,
            "published accuracy": theirs.accuracy,
            "MFLOP/sample": flops / 1e6,
            **{f"{kind} GFLOP/s": rate / 1e9 for kind, rate in peaks.items()},
        }
        name = f"digits, {count} core{'s' * (count > 1)}"
        floor = [peaks[run.precision] / flops] * len(found["ours"])
        target = None if missing(["bf16"]) else TARGET
        rows += [
            Row(name, "samples/s", found["ours"], "published program", found["theirs"], counted, target),
            Row(
                f"{name}, floor",
                "samples/s",
                found["ours"],
                f"its FLOPs at the rate of a {run.precision} product",
                floor,
                {},
            ),
        ]
    return rows
