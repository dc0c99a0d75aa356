"""The train stage equals a plain loop, is repeatable, resumes after kills and damage, and refuses invalid input."""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import safetensors
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dlscale.config import resolve as config
from dlscale.config.run import load_run
from dlscale.core import files, registry
from dlscale.core.errors import Stopped, UserError
from dlscale.core.files import HOST, atomic_write, sha256
from dlscale.core.metrics import Epoch, Metric, Untrained
from dlscale.data.loaders.base import Batch
from dlscale.data.loaders.torch_loader import TorchLoader
from dlscale.data.manifest import Manifest
from dlscale.extensions.cosmo_unet.cosmo.kind import CropSamples
from dlscale.extensions.cosmo_unet.cosmo.samples import Crops
from dlscale.extensions.cosmo_unet.model import UNet3D
from dlscale.extensions.cosmo_unet.scores import l1
from dlscale.extensions.era5_vit.era5.kind import PairSamples
from dlscale.extensions.era5_vit.era5.samples import Pairs
from dlscale.extensions.era5_vit.model import ViT
from dlscale.extensions.era5_vit.scores import relative_l2
from dlscale.extensions.era5_vit.study import Era5ViT
from dlscale.parallel.shards import Shard
from dlscale.parallel.world import World
from dlscale.results import read_alone
from dlscale.studies.base import PublishedLog
from dlscale.train import checkpoint as checkpoint_module
from dlscale.train.build import build_step, open_session
from dlscale.train.checkpoint import CheckpointRecord, Checkpoints, read
from dlscale.train.logs import RunLogs
from dlscale.train.step import Step, make_state
from dlscale.train.train import fit_with_signals, run_fingerprint
from dlscale.train.trainer import Trainer
from tests.conftest import (
    COSMO,
    COSMO_RUN,
    ERA5,
    ERA5_RUN,
    TIMES,
    error_line,
    make_dataset,
    make_run,
    records,
    timeless,
    train,
)
from tests.test_rungs import settings
from tests.waiting import until

CPU = torch.device("cpu")
FILES = {
    *("config.yaml", "metrics.jsonl", "model.pt", "model_best.pt", "prediction.png", "provenance.json"),
    *("tensorboard", "checkpoints", "health.json"),
}
Make = Callable[..., Path]


#: Dataset with one channel, because a tiny training spends most of its time on a figure that has a row per channel.
WEATHER = {**ERA5, "channels": ["t2m"]}


@pytest.fixture(scope="module")
def weather(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny dataset: 2 years of 20 times of t2m for training, one for validation."""
    return make_dataset(tmp_path_factory.mktemp("data") / "weather", WEATHER)


def make_era5(folder: Path, over: dict[str, Any]) -> Path:
    """Write the tiny ViT's config.yaml with the given settings; return its folder."""
    make_run(folder, "era5_vit", config.merge(copy.deepcopy(ERA5_RUN), over), WEATHER)
    return folder


@pytest.fixture
def era5(tmp_path: Path, weather: Path) -> Make:
    """Return a function that trains the tiny ViT in a folder of the given name."""

    def make(name: str = "run", status: int = 0, **over: Any) -> Path:
        folder = make_era5(tmp_path / name, over)
        assert train(folder, weather / "manifest.json") == status
        return folder

    return make


@pytest.fixture
def cosmo(tmp_path: Path, cosmo_data: Path) -> Make:
    """Return a function that trains the tiny U-Net in a folder of the given name."""

    def make(name: str = "run", status: int = 0, **over: Any) -> Path:
        make_run(tmp_path / name, "cosmo_unet", config.merge(copy.deepcopy(COSMO_RUN), over), COSMO)
        assert train(tmp_path / name, cosmo_data / "manifest.json") == status
        return tmp_path / name

    return make


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "model.pt", weights_only=True)


def provenance(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "provenance.json").read_text())


def checkpoint_folder(folder: Path) -> Path:
    (only,) = (path for path in (folder / "checkpoints").iterdir() if path.is_dir())
    return only


def checkpoint(folder: Path) -> CheckpointRecord:
    return CheckpointRecord.read(folder / "checkpoint.json")


def same(a: Any, b: Any) -> bool:
    """Return whether nested states are exactly equal, except for keys in `TIMES`."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a if key not in TIMES)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(one, two) for one, two in zip(a, b, strict=True))
    return bool(a == b)


# --- compared with a plain loop -----------------------------------------------------------------------------------


def bare_loop(
    model: torch.nn.Module,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    samples: Any,
    valid: Any,
    steps_by_epoch: list[int],
    batch: int,
    rate: Callable[[int], float],
    **adam: Any,
) -> tuple[list[float], list[float]]:
    """Train with a plain loop; return the training losses and the validation losses of all epochs."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, **adam)
    step, train_losses, valid_losses = 0, [], []
    for epoch, steps in enumerate(steps_by_epoch):
        total, seen = 0.0, 0
        for number in range(steps):
            chosen = range(number * batch, min((number + 1) * batch, samples.size))
            pairs = [samples.read(epoch, index) for index in chosen]
            x, y = (torch.stack([torch.from_numpy(pair[i]) for pair in pairs]) for i in (0, 1))
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
            optimizer.zero_grad()
            value = loss(model(x), y).mean()
            value.backward()
            optimizer.step()
            step, total, seen = step + 1, total + value.item() * len(chosen), seen + len(chosen)
        train_losses.append(total / seen)
        with torch.no_grad():
            pairs = [valid.read(0, index) for index in range(valid.size)]
            each = [loss(model(torch.from_numpy(x)[None]), torch.from_numpy(y)[None]).item() for x, y in pairs]
        valid_losses.append(sum(each) / len(each))
    return train_losses, valid_losses


@pytest.mark.parametrize(
    ("training", "steps_by_epoch", "samples_so_far"),
    [({"epochs": 2}, [3, 3], [10, 20]), ({"steps": 4}, [3, 1], [10, 14]), ({"steps": 2}, [2], [8])],
    ids=["two epochs", "an epoch cut", "less than one epoch"],
)
def test_the_unet_trains_like_a_plain_loop(
    cosmo: Make, cosmo_data: Path, training: dict[str, int], steps_by_epoch: list[int], samples_so_far: list[int]
) -> None:
    """In each epoch, 10 samples in batches of 4 leave a last batch of 2. Weights must agree bit for bit."""
    folder = cosmo(
        batch_size=4,
        seed=5,
        samples={"train": 10},
        training=training,
        optimizer={"lr": 2e-3, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 1e-4},
        schedule={"warmup_steps": 2, "end_lr": 1e-4, "scaling": "linear", "base_batch_size": 2},
        loss={"density_weight": 0.01},
    )
    manifest, settings = (
        Manifest.read(cosmo_data / "manifest.json"),
        CropSamples(kind="crops", crop=16, train=10, valid=8),
    )
    torch.manual_seed(5)
    model, total = UNet3D(4, 5, widths=(4, 8)), sum(steps_by_epoch)

    def rate(step: int) -> float:
        if step < 2:
            return 2 * 2e-3 * (step + 1) / 2
        return 1e-4 + (2 * 2e-3 - 1e-4) * 0.5 * (1 + math.cos(math.pi * (step - 2) / (total - 2)))

    train_losses, valid_losses = bare_loop(
        model,
        lambda p, t: l1(p, t, 0.01),
        Crops(manifest, "train", settings, 5),
        Crops(manifest, "valid", settings, 5),
        steps_by_epoch,
        batch=4,
        rate=rate,
        betas=(0.8, 0.99),
        eps=1e-7,
        weight_decay=1e-4,
    )
    assert same(dict(model.state_dict()), weights(folder))
    found = records(folder)
    expected = {
        "epoch": list(range(1, len(steps_by_epoch) + 1)),
        "step": np.cumsum(steps_by_epoch).tolist(),
        "samples": samples_so_far,
        "train_loss": pytest.approx(train_losses, rel=1e-6),
        "valid_loss": pytest.approx(valid_losses, rel=1e-6),
        "learning_rate": pytest.approx([rate(r["step"] - 1) for r in found], rel=1e-12),
    }
    assert {key: [r[key] for r in found] for key in expected} == expected
    for before, after in zip([{"samples": 0}, *found], found, strict=False):
        speed = (after["samples"] - before["samples"]) / after["epoch_seconds"]
        assert after["samples_per_second"] == pytest.approx(speed, rel=1e-9), (
            "the speed must count samples, not batches × batch_size"
        )


def test_the_vit_trains_like_a_plain_loop(era5: Make, weather: Path) -> None:
    folder = era5(training={"epochs": 2}, samples={"dt": 2, "train": 9, "valid": 5}, seed=2, batch_size=4)
    manifest = Manifest.read(weather / "manifest.json")
    settings = PairSamples(kind="pairs", dt=2, train=9, valid=5)
    torch.manual_seed(2)
    model = ViT((16, 32), (4, 4), 1, 1, embed_dim=16, depth=2, heads=2)
    train_losses, valid_losses = bare_loop(
        model,
        relative_l2,
        Pairs(manifest, "train", settings, 2),
        Pairs(manifest, "valid", settings, 2),
        [3, 3],
        batch=4,
        rate=lambda step: 1e-3 * 0.5 * (1 + math.cos(math.pi * step / 6)),
        betas=(0.9, 0.95),
    )
    assert same(dict(model.state_dict()), weights(folder))
    expected = {
        "train_loss": pytest.approx(train_losses, rel=1e-6),
        "valid_loss": pytest.approx(valid_losses, rel=1e-6),
        "samples": [9, 18],
    }
    assert {key: [r[key] for r in records(folder)] for key in expected} == expected


# --- repeatable -------------------------------------------------------------------------------------------------

DROPS = {"dropout": 0.2}


def test_the_same_seed_gives_the_same_bits_and_another_does_not(era5: Make) -> None:
    first, second, other = (era5(name, model=DROPS, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert (first / "model.pt").read_bytes() == (second / "model.pt").read_bytes()
    assert timeless(first) == timeless(second)
    one, two = weights(first), weights(other)
    assert not any(torch.equal(one[key], two[key]) for key in one)
    assert all(a["train_loss"] != b["train_loss"] for a, b in zip(records(first), records(other), strict=True))


def test_a_synthetic_loader_trains(era5: Make) -> None:
    folder = era5(loader={"kind": "synthetic"}, samples={"train": 10})
    assert [r["samples"] for r in records(folder)] == [10, 20]
    assert records(folder)[1]["train_loss"] < records(folder)[0]["train_loss"]


# --- validation -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_validation_is_fixed_and_counts_each_sample_once(cosmo: Make, cosmo_data: Path) -> None:
    """The learning rate is too small to change a weight, so every epoch has the initial model's validation loss."""
    found = records(cosmo(batch_size=3, samples={"valid": 8}, training={"epochs": 3}, optimizer={"lr": 1e-30}))
    assert len({r["valid_loss"] for r in found}) == 1
    assert len({json.dumps(r["metrics"]) for r in found}) == 1
    assert len({r["train_loss"] for r in found}) == 3, "training crops must differ between epochs"
    torch.manual_seed(0)
    model = UNet3D(4, 5, widths=(4, 8))
    valid = Crops(Manifest.read(cosmo_data / "manifest.json"), "valid", CropSamples(kind="crops", crop=16, valid=8), 0)
    with torch.no_grad():
        each = [
            np.abs(model(torch.from_numpy(x)[None])[0].numpy() - y).mean()
            for x, y in map(valid.read, [0] * 8, range(8))
        ]
    batches = [each[0:3], each[3:6], each[6:8]]
    assert found[0]["valid_loss"] == pytest.approx(np.mean(each), rel=1e-6)
    assert abs(np.mean([np.mean(batch) for batch in batches]) - np.mean(each)) > 1e-5 * np.mean(each)
    assert found[0]["metrics"]["l1"] == pytest.approx(np.mean(each), rel=1e-6)


def test_validation_runs_without_drop_out(era5: Make) -> None:
    """The learning rate is too small to learn, so only drop-out could change the validation loss."""
    still = {"optimizer": {"lr": 1e-30}, "training": {"epochs": 2}}
    plain, dropping = era5("plain", **still), era5("drops", model=DROPS, **still)
    assert {r["valid_loss"] for r in records(plain)} == {r["valid_loss"] for r in records(dropping)}
    assert len({r["train_loss"] for r in records(dropping)} & {r["train_loss"] for r in records(plain)}) == 0


# --- the trainer without the stage ------------------------------------------------------------------------------


@contextlib.contextmanager
def trainer(folder: Path, data: Path, loader: type[TorchLoader] = TorchLoader, **replaced: Any) -> Iterator[Trainer]:
    """Yield a run's trainer, set up as in the stage."""
    run = load_run(folder / "config.yaml", "train")
    session = open_session(run, data / "manifest.json", World(), 1)
    session.step.network.loss = replaced.get("loss", session.step.network.loss)
    with contextlib.ExitStack() as stack:
        loaders = [stack.enter_context(contextlib.closing(session.loader(split))) for split in ("train", "valid")]
        for one in loaders:
            if loader is not TorchLoader:
                one.__class__ = loader
        metrics = session.study.metrics(run, session.manifest, CPU)
        checkpoints = Checkpoints(folder / "trainer", 1)
        yield Trainer(run, session.step, session.share(), (loaders[0], loaders[1]), metrics, checkpoints, World())


@pytest.mark.slow
def test_the_untrained_model_is_validated(era5: Make, weather: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses of the untrained model are recorded; this measurement does not change the training."""
    over = {"training": {"epochs": 2}, "samples": {"train": 9}, "model": DROPS}
    seen = era5("seen", **copy.deepcopy(over))
    monkeypatch.setattr(Trainer, "_begin", lambda self: None)
    unseen = era5("unseen", **over)
    monkeypatch.undo()
    assert (seen / "model.pt").read_bytes() == (unseen / "model.pt").read_bytes()
    first, second = timeless(seen)
    untrained = first.pop("untrained")
    assert second.pop("untrained") is None
    assert [first, second] == [{key: v for key, v in r.items() if key != "untrained"} for r in timeless(unseen)]
    assert all(record["untrained"] is None for record in timeless(unseen))

    run = load_run(unseen / "config.yaml", "train")
    session = open_session(run, weather / "manifest.json", World(), 1)
    (x, y), samples = next(session.loader("train").epoch(0)), session.samples("valid")
    pairs = [samples.read(0, index) for index in range(samples.size)]
    predict = session.step.predict
    losses = [relative_l2(predict(torch.from_numpy(a)[None]), torch.from_numpy(b)[None]).item() for a, b in pairs]
    assert untrained["valid_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    fresh = open_session(run, weather / "manifest.json", World(), 1)
    assert untrained["train_loss"] == pytest.approx(float(fresh.step(x, y)), rel=1e-6)
    assert untrained["metrics"].keys() == first["metrics"].keys()


def test_a_resumed_run_keeps_the_untrained_losses(
    tmp_path: Path, weather: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that stopped within its first epoch keeps the untrained model's losses and does not measure them again."""
    make_era5(tmp_path, {"training": {"epochs": 1}})
    with trainer(tmp_path, weather) as made:
        (whole,) = fit_with_signals(made)
        made.checkpoints.clear()
    assert whole.untrained and math.isfinite(whole.untrained.train_loss)
    step, validate, validations = Step.__call__, Trainer.validate, []

    def asked(self: Step, *batch: Any) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *batch)

    with trainer(tmp_path, weather) as made, monkeypatch.context() as patched, pytest.raises(Stopped, match="step 1"):
        patched.setattr(Step, "__call__", asked)
        fit_with_signals(made)
    monkeypatch.setattr(Trainer, "validate", lambda self, *hooks: (validations.append(1), validate(self, *hooks))[1])
    begun: list[Untrained] = []
    with trainer(tmp_path, weather) as made:
        made.resume()
        (resumed,) = fit_with_signals(made, on_begin=begun.append)
    assert made.resumed_from == 1 and len(validations) == 1
    assert begun == [resumed.untrained] == [whole.untrained]


class _Slow(TorchLoader):
    """Loader that waits 0.3 s before its first batch."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        time.sleep(0.3)
        yield from super().epoch(epoch, start)


@pytest.mark.slow
def test_the_wait_for_the_first_batch_counts(tmp_path: Path, weather: Path) -> None:
    make_era5(tmp_path, {"training": {"epochs": 1}})
    with trainer(tmp_path, weather, _Slow) as made:
        (record,) = fit_with_signals(made)
    assert min(record.epoch_seconds, record.valid_seconds) >= 0.3
    assert record.samples_per_second <= 38 / 0.3


def test_a_loss_is_one_number_for_each_sample(tmp_path: Path, weather: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_era5(tmp_path, {"training": {"epochs": 1}})
    mean = lambda prediction, target: (prediction - target).abs().mean()  # noqa: E731 - as a study writes it
    monkeypatch.setattr(Era5ViT, "loss", lambda self, run: mean)
    with trainer(tmp_path, weather) as made, pytest.raises(UserError, match=r"era5_vit: its loss has shape \(\) for 4"):
        fit_with_signals(made)


def test_a_metric_that_is_described_has_a_value(tmp_path: Path, weather: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_era5(tmp_path, {"training": {"epochs": 1}})
    with trainer(tmp_path, weather) as made:
        described = [*made.metrics.described, Metric(name="sharpness", title="Sharpness")]
        own = made.metrics.per_sample

        def renamed(x: Any, y: Any, prediction: Any) -> dict[str, Any]:
            return {"valid_loss": next(iter(own(x, y, prediction).values()))}

        for wrong in (renamed, lambda x, y, prediction: {"sharpness": y.mean()}):
            monkeypatch.setattr(type(made.metrics), "per_sample", staticmethod(wrong))
            with pytest.raises(UserError, match="expected a unique name, and a value for each of the 4 samples"):
                made.validate()
        monkeypatch.undo()
        kept = {name: getattr(made.metrics, name) for name in ("per_sample", "naive", "summarise")}
        made.metrics = SimpleNamespace(described=described, **kept)  # type: ignore[assignment]
        with pytest.raises(UserError, match=r"metrics in `described` have no value: sharpness; .*return: rmse"):
            fit_with_signals(made)


class Waits(TorchDispatchMode):
    """Counter of operations for which the host waits for values from the device.

    `_local_scalar_dense` implements a tensor's `.item()`, `float()` and `bool()`. Adam's calls are not counted: by
    default PyTorch keeps Adam's step counters on the CPU, so reading them does not wait for a device.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.optimizer, self.count = optimizer, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.equal)
        if func.overloadpacket in waits:
            counters = {id(state["step"]) for state in self.optimizer.state.values()}
            self.count += id(args[0]) not in counters
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("precision", "fused"),
    # In fp16 without a fused optimiser, PyTorch's loss scaler waits in every step, so there is no such case.
    [
        ("fp32", False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("fp32", True), ("bf16", False), ("fp16", True)]),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("bf16_master", "fp16_master")),
        ("bf16_master", False),
    ],
)
def test_no_step_waits_for_the_device(tmp_path: Path, weather: Path, precision: str, fused: bool) -> None:
    def waits(steps: int, **replaced: Any) -> int:
        over = {"training": {"steps": steps}, "precision": precision, "optimizer": {"lr": 1e-3, "fused": fused}}
        make_era5(tmp_path / str(steps), over)
        with trainer(tmp_path / str(steps), weather, **replaced) as made:
            shutil.rmtree(made.checkpoints.folder)
            with Waits(made.step.optimizer) as counted:
                fit_with_signals(made)
            assert len(made.history) == 1, "the trainer must have trained one epoch in both cases"
        return counted.count

    assert waits(2) == waits(8) > 0, "the number of waits must not depend on the number of steps"

    def watched(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        loss = relative_l2(p, t)
        if p.requires_grad:
            print(loss.detach().sum().item())
        return loss

    assert waits(8, loss=watched) == waits(2, loss=watched) + 6, "an added .item() must be counted"


# --- interrupted and resumed ------------------------------------------------------------------------------------

LONG: dict[str, Any] = {
    # An epoch takes about 0.1 s, so the process can be killed during the training.
    "model": {"patch": [1, 2], **DROPS},
    "samples": {"train": 17, "valid": 2},
    "batch_size": 3,
    "training": {"epochs": 8},
}


def start(folder: Path, manifest: Path) -> subprocess.Popen[str]:
    command = [
        *(sys.executable, "-m", "dlscale", "train", "--config", folder / "config.yaml", "--manifest", manifest),
        *("--checkpoints", folder / "checkpoints", "--out", folder, "--threads", "1", "--device", "cpu"),
    ]
    with open(folder / "log", "wb") as log:
        return subprocess.Popen([str(word) for word in command], stdout=log, stderr=log, text=True)


@pytest.mark.parametrize(
    ("workers", "precision"),
    [
        pytest.param(0, "fp32", id="alone", marks=pytest.mark.slow),
        pytest.param(2, "fp32", id="2 workers"),
        pytest.param(0, "fp16", id="loss scaling", marks=pytest.mark.slow),
        pytest.param(0, "bf16_master", id="master weights", marks=pytest.mark.slow),
        pytest.param(0, "fp16_master", id="both", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_resumes_bit_by_bit(
    tmp_path: Path, weather: Path, capfd: pytest.CaptureFixture[str], workers: int, precision: str
) -> None:
    manifest = weather / "manifest.json"
    over = {**copy.deepcopy(LONG), "precision": precision, "loader": {"workers": workers}}
    for name in ("whole", "killed"):
        make_era5(tmp_path / name, over)
    assert train(tmp_path / "whole", manifest) == 0

    killed, log = tmp_path / "killed", tmp_path / "killed/log"
    process = start(killed, manifest)
    try:
        (first, *_) = until("a checkpoint", lambda: sorted(killed.glob("checkpoints/*/step-*")), process, log.read_text)
        process.send_signal(signal.SIGSTOP)
        # While this process exists, running or stopped, other processes must not write to the run.
        capfd.readouterr()
        assert train(killed, manifest) == 2 and f"in use by process {process.pid} on" in error_line(capfd)
        # A training with other settings is also refused, because it would write the same files.
        make_era5(killed, config.merge(copy.deepcopy(over), {"optimizer": {"lr": 2e-3}}))
        assert train(killed, manifest) == 2
        make_era5(killed, over)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    saved = sorted(first.parent.glob("step-*"))
    done = [record.model_dump() for record in checkpoint(saved[-1]).history]
    assert len(done) < 8, "the training must not end before it is killed"
    assert saved[-1].name == f"step-{6 * len(done):08}" and len(saved) <= 3
    logged = records(killed)
    assert logged[: len(done)] == done and len(logged) - len(done) in (0, 1), "finished epochs must be readable"
    assert set(scalars(killed)["loss/train"]) >= {record["step"] for record in done}
    assert not (killed / "provenance.json").exists(), "only a complete result may have provenance.json"

    assert train(killed, manifest) == 0
    assert provenance(killed)["resumed_from_step"] == 6 * len(done)
    assert provenance(tmp_path / "whole")["resumed_from_step"] is None
    assert records(killed)[: len(done)] == done, "earlier epochs must keep their records, including times"
    assert timeless(killed) == timeless(tmp_path / "whole")
    for name in ("model.pt", "model_best.pt"):
        assert (killed / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    last = [checkpoint_folder(tmp_path / name) / "step-00000048" for name in ("whole", "killed")]
    states = [read(folder) for folder in last]
    assert same(*(checkpoint(folder).model_dump(exclude={"files", "own"}) for folder in last))
    assert {path.name for path in killed.iterdir()} == FILES | {"log"}, "no partial files may be left"
    assert {name.split(".")[0] for name in states[0]} - {"best"} == {"model", "optimizer", "random"}
    assert same(*states), "optimiser moments and random states must agree, too"
    for moment in ("exp_avg", "exp_avg_sq"):
        kept = {name.removeprefix(f"optimizer.{moment}.") for name in states[0] if moment in name.split(".")}
        assert kept == weights(killed).keys()
    assert precision.startswith("fp16") == bool(checkpoint(last[0]).scaler)
    points = [
        (event.step, event.wall_time, event.value) for event in events(killed).Scalars("loss/train") if event.step
    ]
    expected = [(r["step"], r["wall_time"], pytest.approx(r["train_loss"])) for r in records(killed)]
    assert points == expected, "each epoch must be logged once, at the time of its step"


# --- checkpoints ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, weather: Path) -> Path:
    """Return a finished run (3 epochs of 10 steps) that has its two newest checkpoints."""
    folder = make_era5(tmp_path_factory.mktemp("finished") / "run", {"training": {"epochs": 3}, "model": DROPS})
    assert train(folder, weather / "manifest.json") == 0
    return folder


@pytest.fixture
def again(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of the finished run in the state after a kill just after its last checkpoint."""
    shutil.copytree(finished, tmp_path / "run")
    for name in FILES - {"config.yaml", "checkpoints"}:
        with contextlib.suppress(NotADirectoryError):
            shutil.rmtree(tmp_path / "run" / name)
            continue
        (tmp_path / "run" / name).unlink()
    return tmp_path / "run"


class Trap:
    """Object whose unpickling creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.marker}'",)


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _flip(file: Path) -> None:
    """Change one byte in the middle of a tensor."""
    content = bytearray(file.read_bytes())
    tensor = read(file.parent)["model.head.weight"].numpy().tobytes()
    place = content.find(tensor)
    assert place > 0
    content[place + len(tensor) // 2] ^= 0xFF
    file.write_bytes(content)


def _signed(file: Path) -> None:
    """Store the checksum of a changed file in the record, as an attacker with write access could do."""
    record = checkpoint(file.parent)
    record.files[file.name] = sha256(file)
    record.sealed().write(file.with_name("checkpoint.json"))


def _trap(file: Path) -> None:
    """Replace the tensors by a pickle that executes code."""
    file.write_bytes(pickle.dumps(Trap(file.parent.parent / "executed")))
    _signed(file)


def _no_header(file: Path) -> None:
    """Replace the header's length by an impossible number."""
    file.write_bytes((2**40).to_bytes(8, "little") + file.read_bytes()[8:])
    _signed(file)


#: File of the first rank in a checkpoint.
SHARD = "shard-00001-model-00001-of-00001.safetensors"


def _flip_a_digit(file: Path) -> None:
    """Change an epoch's loss in the record."""
    path = file.with_name("checkpoint.json")
    changed = re.sub(
        r'("valid_loss": \d\.\d)(\d)', lambda found: found[1] + str((int(found[2]) + 1) % 10), path.read_text()
    )
    assert changed != path.read_text()
    path.write_text(changed)


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "cut": _cut,
    "pipe": _pipe,
    "flipped": _flip,
    "empty": lambda file: file.write_bytes(b""),
    "missing": lambda file: file.unlink(),
    "record cut": lambda file: _cut(file.with_name("checkpoint.json")),
    "record is no text": lambda file: file.with_name("checkpoint.json").write_bytes(b'{"step": 30, "run": "\xff"}'),
    "record of another kind": lambda file: file.with_name("checkpoint.json").write_text('{"step": "many"}'),
    "list of tensors": _no_header,
    "record flipped": _flip_a_digit,
    "record names no files": lambda file: CheckpointRecord(step=30).sealed().write(file.with_name("checkpoint.json")),
    "trap": _trap,
}


@pytest.mark.parametrize("damage", [None, *DAMAGES])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    again: Path, finished: Path, weather: Path, damage: str | None
) -> None:
    folder = checkpoint_folder(again)
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-00000020", "step-00000030"]
    if damage:
        DAMAGES[damage](folder / "step-00000030" / SHARD)
    assert train(again, weather / "manifest.json") == 0
    assert provenance(again)["resumed_from_step"] == (20 if damage else 30)
    assert (again / "model.pt").read_bytes() == (finished / "model.pt").read_bytes()
    assert timeless(again) == timeless(finished)
    assert not (folder / "executed").exists(), "the code in the checkpoint must not be executed"
    assert [record.model_dump() for record in checkpoint(folder / "step-00000030").history] == records(again)
    if damage == "trap":  # check that the trap works at all
        _trap(folder / "step-00000030" / SHARD)
        with contextlib.suppress(Exception):
            pickle.loads((folder / "step-00000030" / SHARD).read_bytes())
        assert (folder / "executed").exists()


def test_without_a_readable_checkpoint_a_training_starts_again(again: Path, finished: Path, weather: Path) -> None:
    for file in checkpoint_folder(again).glob("step-*/*.safetensors"):
        _cut(file)
    assert train(again, weather / "manifest.json") == 0
    assert provenance(again)["resumed_from_step"] is None
    assert (again / "model.pt").read_bytes() == (finished / "model.pt").read_bytes()


def test_another_loader_trains_a_finished_run_again(finished: Path, weather: Path, tmp_path: Path) -> None:
    """Another loader gives the same weights, but the run trains again, because its samples/s were the old loader's."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    make_era5(run, {"training": {"epochs": 3}, "model": DROPS, "loader": {"kind": "direct", "workers": 0}})
    assert train(run, weather / "manifest.json") == 0
    assert provenance(run)["resumed_from_step"] is None
    assert (run / "model.pt").read_bytes() == (finished / "model.pt").read_bytes()
    assert [r["wall_time"] for r in records(run)] > [r["wall_time"] for r in records(finished)]
    assert [path.name for path in sorted(checkpoint_folder(run).glob("step-*"))] == ["step-00000020", "step-00000030"]


def test_a_changed_setting_does_not_use_the_old_checkpoint(again: Path, finished: Path, weather: Path) -> None:
    over = {"training": {"epochs": 3}, "model": DROPS}
    old = checkpoint_folder(again)
    make_era5(again, over | {"optimizer": {"lr": 1e30}})
    assert train(again, weather / "manifest.json") == 2
    assert old.is_dir(), "a failed change must keep the old checkpoints"
    make_era5(again, over | {"optimizer": {"lr": 2e-3}})
    assert train(again, weather / "manifest.json") == 0
    assert provenance(again)["resumed_from_step"] is None
    assert checkpoint_folder(again) != old, "the old checkpoints must be removed after the new training"
    assert not same(weights(again), weights(finished))


def test_only_own_checkpoint_folders_are_removed(again: Path, weather: Path) -> None:
    for name in ("important", "0123456789abcdeX"):
        (again / "checkpoints" / name).mkdir()
    (again / "checkpoints" / "0123456789abcdef").mkdir()
    assert train(again, weather / "manifest.json") == 0
    assert {path.name for path in (again / "checkpoints").iterdir() if path.is_dir()} == {
        provenance(again)["fingerprint"],
        "important",
        "0123456789abcdeX",
    }


def saved(checkpoints: Checkpoints, step: int, **tensors: torch.Tensor) -> None:
    checkpoints.save(CheckpointRecord(step=step), {name: Shard(tensor) for name, tensor in tensors.items()})
    checkpoints.wait()


def loaded(checkpoints: Checkpoints, **like: torch.Tensor) -> tuple[int, dict[str, torch.Tensor]] | None:
    found = checkpoints.load(lambda record: {name: Shard(torch.zeros_like(value)) for name, value in like.items()})
    return found and (found[0].step, {name: piece.tensor for name, piece in found[1].items()})


def test_an_intact_checkpoint_is_never_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An out-of-memory error or a failing file system does not mean damage, because a later read may succeed."""
    checkpoints, w = Checkpoints(tmp_path, keep=2), torch.zeros(1)
    for step in (1, 2):
        saved(checkpoints, step, w=torch.full((1,), float(step)))

    def failing(error: Exception) -> Callable[..., None]:
        def fail(*_: Any, **__: Any) -> None:
            raise error

        return fail

    for where, name, error in (
        (safetensors, "safe_open", torch.OutOfMemoryError("out of memory")),
        (checkpoint_module, "sha256", OSError(errno.EIO, "Input/output error")),
        (files, "read_text", OSError(errno.ESTALE, "Stale file handle")),  # read_json makes it a UserError
        (checkpoint_module, "fill", OSError(errno.EIO, "Input/output error")),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(where, name, failing(error))
            with pytest.raises(UserError, match=r"may be undamaged"):
                loaded(checkpoints, w=w)
        assert checkpoints.steps() == [1, 2]
    assert loaded(checkpoints, w=w) == (2, {"w": torch.full((1,), 2.0)})
    for like in ({"w": torch.zeros(2)}, {"v": w}):  # another shape, and a missing tensor
        with pytest.raises(UserError, match="this training cannot resume from this checkpoint"):
            loaded(checkpoints, **like)
    _cut(tmp_path / "step-00000002" / SHARD)
    assert loaded(checkpoints, w=w) == (1, {"w": torch.ones(1)})
    saved(checkpoints, 2, w=w)
    assert loaded(checkpoints, w=w) == (2, {"w": w}), "a new checkpoint must replace the damaged one"


@pytest.mark.parametrize("keep", range(1, 7))
def test_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    checkpoints = Checkpoints(tmp_path, keep=keep)
    for step in range(1, 10):
        saved(checkpoints, step, w=torch.zeros(1))
        assert checkpoints.steps() == list(range(1, 10))[max(0, step - keep) : step]


def test_a_checkpoint_of_another_training_is_not_used(tmp_path: Path) -> None:
    """A checkpoint of another training or of another step is refused; both checkpoints are intact and are kept."""
    w, one, other = torch.zeros(1), Checkpoints(tmp_path / "one", keep=2), Checkpoints(tmp_path / "other", keep=2)
    saved(one, 1, w=w)
    shutil.copytree(tmp_path / "one/step-00000001", tmp_path / "other/step-00000001")
    with pytest.raises(UserError, match=r"another training \(one\).* another step \(1\)"):
        loaded(other, w=w)
    (tmp_path / "one/step-00000001").rename(tmp_path / "one/step-00000002")
    with pytest.raises(UserError, match=r"another step \(1\)"):
        loaded(one, w=w)
    assert one.steps() == [2] and other.steps() == [1]


@pytest.mark.parametrize("make", [os.mkfifo, Path.touch], ids=["pipe", "file"])
def test_a_checkpoint_with_an_unlisted_file_is_not_read(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """PyTorch would open every file, and wait forever for the writer of a pipe."""
    checkpoints, w = Checkpoints(tmp_path, keep=2), torch.zeros(1)
    saved(checkpoints, 1, w=w)
    make(tmp_path / "step-00000001/shard-00009-model-00001-of-00001.safetensors")
    with pytest.raises(UserError, match=r"does not list shard-00009-.*safetensors; remove this file"):
        loaded(checkpoints, w=w)
    assert checkpoints.steps() == [1]


def test_lost_lines_of_metrics_are_not_a_shorter_training(finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    assert read_alone(run).last == read_alone(finished).last
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(UserError, match=r"metrics\.jsonl: has 2 of 3 epochs; delete it and run the train stage again"):
        read_alone(run)


@pytest.mark.parametrize("parts", [1, 4])
def test_scores_of_training_batches_are_those_before_the_update(parts: int) -> None:
    """Scores are means over samples, even for unequal micro-batches. Computing scores does not change the weights."""

    def error(prediction: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (prediction - y).square().mean(1)

    def scores(prediction: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.stack([prediction.argmax(1) == y.argmax(1), prediction[:, 0] > 0], dim=1).float()

    run = settings("era5_vit", optimizer={"kind": "adam"}, accumulation_steps=parts, batch_size=12)
    with_scores = build_step(run, lambda: nn.Linear(4, 4), error, scores=scores)
    without = build_step(run, lambda: nn.Linear(4, 4), error)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        x, y = (torch.randn(10, 4, generator=generator) for _ in range(2))
        with torch.no_grad():
            prediction = without.model(x)
            expected = torch.cat([error(prediction, y)[:, None], scores(prediction, y)], dim=1).mean(0)
        found = with_scores(x, y)
        assert torch.allclose(found, expected, rtol=1e-5, atol=0) and torch.allclose(without(x, y), found[0], rtol=1e-6)
        assert 0 < found[1] < 1, "the score must not be 0 or 1"
    assert same(dict(with_scores.weights.state_dict()), dict(without.weights.state_dict()))


@pytest.mark.parametrize("precision", ["fp32", "bf16_master"])
def test_a_training_with_frozen_weights_continues(tmp_path: Path, precision: str) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].requires_grad_(False)
        return model

    run = settings("era5_vit", optimizer={"kind": "adam"}, precision=precision)
    one, other = (build_step(run, make, lambda p, y: (p - y).square().mean(1)) for _ in range(2))
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    one(x, y)
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(CheckpointRecord(step=1), one.shards())
    checkpoints.wait()
    make_state(other.optimizer)
    found = checkpoints.load(lambda record: {name: shard.empty() for name, shard in other.shards().items()})
    other.load(found[1], {})
    assert torch.equal(one(x, y), other(x, y))
    assert same(dict(one.weights.state_dict()), dict(other.weights.state_dict()))


def test_the_fingerprint_changes_only_with_settings_of_the_training(
    finished: Path, weather: Path, tmp_path: Path
) -> None:
    run, manifest = load_run(finished / "config.yaml", "train"), Manifest.read(weather / "manifest.json")
    own = run_fingerprint(run, manifest)
    assert own[:16] == checkpoint_folder(finished).name == provenance(finished)["fingerprint"]

    def changed(**over: Any) -> str:
        make_era5(tmp_path, config.merge({"training": {"epochs": 3}, "model": dict(DROPS)}, over))
        return run_fingerprint(load_run(tmp_path / "config.yaml", "train"), manifest)

    assert changed() == own
    assert changed(label="another name", throughput={"trials": 9}) == own, (
        "settings that the stage does not use must not change the fingerprint"
    )
    assert changed(training={"on_divergence": "stop", "trackers": ["wandb"]}) == own
    assert changed(loader={"kind": "direct", "workers": 3}, geometry={"gpus_per_node": 2}) == own, (
        "settings that keep the samples must not change the fingerprint"
    )
    others = [
        *(changed(seed=1), changed(batch_size=8), changed(model={"dropout": 0.3}), changed(precision="bf16")),
        *(changed(loader={"kind": "synthetic"}), changed(schedule={"end_lr": 1e-9})),
        *(changed(training={"epochs": 4}), changed(samples={"dt": 2})),
        run_fingerprint(run, manifest, sources="other sources"),
    ]

    def with_manifest(change: Callable[[dict[str, Any]], None]) -> str:
        values = json.loads((weather / "manifest.json").read_text())
        for name in ("train", "valid", "stats"):
            shutil.copytree(weather / name, tmp_path / name, dirs_exist_ok=True)
        change(values)
        Manifest.model_validate(values).write(tmp_path / "manifest.json")
        return run_fingerprint(run, Manifest.read(tmp_path / "manifest.json"))

    assert with_manifest(lambda values: None) == own
    assert with_manifest(lambda values: values["provenance"].update(settings="told differently")) == own
    assert manifest.extra["climatology_sha256"] == sha256(weather / "stats/time_means.npy")
    others += [
        with_manifest(lambda values: values["splits"]["train"][0].update(digest="another file")),
        with_manifest(lambda values: values["fields"]["fields"]["transforms"][0].update(scale=7.0)),
        with_manifest(lambda values: values["extra"]["latitude"].reverse()),
        with_manifest(lambda values: values["extra"].update(climatology_sha256="of another file")),
    ]
    assert len({own, *others}) == 1 + 13


@pytest.mark.slow
def test_the_two_newest_checkpoints_are_kept(era5: Make) -> None:
    # `every` is the number of epochs between checkpoints. The last epoch always has a checkpoint.
    for every, kept in ((1, [4, 5]), (4, [4, 5]), (9, [5])):
        training = {"epochs": 5, "checkpoint_epochs": every}
        folder = era5(str(every), training=training, samples={"train": 4, "valid": 2}, batch_size=4)
        assert sorted(path.name for path in checkpoint_folder(folder).glob("step-*")) == [f"step-{n:08}" for n in kept]


def test_a_checkpoint_is_written_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    saved(checkpoints, 7, w=torch.ones(1))

    def failing(*_: Any, **__: Any) -> None:
        raise MemoryError("in the midst of writing")

    for step in (7, 8):
        with monkeypatch.context() as patched, pytest.raises(MemoryError):
            patched.setattr(CheckpointRecord, "write", failing)
            saved(checkpoints, step, w=torch.zeros(1))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]
    assert loaded(checkpoints, w=torch.zeros(1)) == (7, {"w": torch.ones(1)})


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EDQUOT, "Disk quota exceeded")])
def test_an_interrupted_replacement_keeps_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """A folder is replaced by two renames; the second one may fail, or Ctrl-C may come before it."""
    (tmp_path / "crate").mkdir()
    (tmp_path / "crate/old").touch()
    replace = os.replace

    def failing(source: Path, target: Path) -> None:
        if ".part" in source.name:
            raise error
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises((KeyboardInterrupt, UserError)), atomic_write(tmp_path / "crate") as temporary:
        temporary.mkdir()
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["crate", "crate/old"]


def test_a_killed_replacement_leaves_no_folder(tmp_path: Path) -> None:
    """After a kill, the next replacement removes a left former folder, unless that folder was the only copy."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    left, only = (tmp_path / f".{name}.{HOST}.{ended.pid}.ab.old" for name in ("crate", "other"))
    for folder in (tmp_path / "crate", left, only):
        folder.mkdir()
    for name in ("crate", "other"):
        with atomic_write(tmp_path / name) as temporary:
            temporary.mkdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == [only.name, "crate", "other"]


# --- files of a run ----------------------------------------------------------------------------------------------


def events(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder / "tensorboard"), size_guidance={"images": 0, "scalars": 0}).Reload()


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Return TensorBoard's scalars by tag, each as a mapping of steps to values."""
    found = events(folder)
    return {tag: {event.step: event.value for event in found.Scalars(tag)} for tag in found.Tags()["scalars"]}


def test_tensorboard_equals_metrics_jsonl(finished: Path) -> None:
    found, epochs = scalars(finished), records(finished)
    expected = {"loss/train": "train_loss", "loss/valid": "valid_loss", "learning_rate": "learning_rate"}
    for tag, key in {**expected, "samples_per_second": "samples_per_second"}.items():
        told = {step: value for step, value in found[tag].items() if step}
        assert told == pytest.approx({r["step"]: r[key] for r in epochs}, rel=1e-6), tag
    assert len(epochs[0]["metrics"]) == 11
    for name in epochs[0]["metrics"]:
        told = {0: epochs[0]["untrained"]["metrics"][name], **{r["step"]: r["metrics"][name] for r in epochs}}
        assert found[f"valid/{name}"] == pytest.approx(told, rel=1e-6), name
    assert found["final/valid_loss"] == {30: pytest.approx(epochs[-1]["valid_loss"], rel=1e-6)}

    accumulator = events(finished)
    (image,) = accumulator.Images("valid/prediction")
    assert image.step == 30
    assert min(image.width, image.height) > 100
    content = accumulator.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    settings = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert (settings["optimizer.lr"].number_value, settings["model.dropout"].number_value) == (1e-3, 0.2)
    assert (settings["study"].string_value, settings["seed"].number_value) == ("era5_vit", 0)


def test_published_tags_have_the_same_curves(finished: Path) -> None:
    """The TensorBoard curves with the tags of the tutorial's program equal the curves with dlscale's tags.

    The tag for u10 is missing, because the dataset lacks this channel.
    """
    found, epochs = scalars(finished), records(finished)
    for theirs, ours in Era5ViT.published_log.tags.items():
        if ours != "valid/rmse_normalised/u10":
            assert found[theirs] == found[ours], theirs
    assert "RMSE(u10m)/valid" not in found
    assert found["Loss/valid"].keys() == found["Loss/train"].keys() == {0, 10, 20, 30}
    speeds = {r["step"]: 10 / r["epoch_seconds"] for r in epochs}
    assert found["Avg iters per sec"] == pytest.approx(speeds, rel=1e-6)

    pictures = events(finished).Images("Visualization, t2m")
    assert [image.step for image in pictures] == [10, 20, 30]
    first, last = (matplotlib.image.imread(io.BytesIO(image.encoded_image_string)) for image in pictures[::2])
    half = (first.shape[1] - 1) // 2
    truth = [picture[:, : half - 8] for picture in (first, last)]
    assert np.array_equal(*truth) and not np.array_equal(first[:, half + 8 :], last[:, half + 8 :])


def test_logs_that_count_epochs_and_per_cent(tmp_path: Path) -> None:
    log = PublishedLog({"Top1/val": "valid/top1", "Loss/val": "loss/valid"}, "epoch", frozenset({"Top1/val"}))
    untrained = Untrained(train_loss=7.0, valid_loss=6.9, metrics={"top1": 0.001})
    common: dict[str, Any] = {
        **{"learning_rate": 0.1, "samples_per_second": 9.0, "epoch_seconds": 2.0, "wall_time": 99.0},
        **{"samples": 99, "train_loss": 3.0, "valid_loss": 2.0},
    }
    first = Epoch(epoch=1, step=80, metrics={"top1": 0.25}, untrained=untrained, **common)
    second = Epoch(epoch=2, step=160, metrics={"top1": 0.5}, **common)
    logs = RunLogs(tmp_path, [], log)
    logs.begin(untrained, 90.0)
    logs.add(first)
    logs.add(second)
    RunLogs(tmp_path, [first], log, step=80).add(second)  # the run was killed before the second epoch's checkpoint
    found = scalars(tmp_path)
    assert [event.step for event in events(tmp_path).Scalars("Top1/val")] == [0, 1, 2], "each epoch must be logged once"
    assert found["Top1/val"] == {0: pytest.approx(0.1), 1: 25.0, 2: 50.0}
    assert found["valid/top1"] == {0: pytest.approx(0.001), 80: 0.25, 160: 0.5}
    assert found["Loss/val"] == {0: pytest.approx(6.9), 1: 2.0, 2: 2.0} and found["loss/train"][0] == 7.0
    assert found["steps_per_second"] == {80: 40.0, 160: 40.0}


def test_times_and_scores_have_the_published_programs_tags(tmp_path: Path) -> None:
    """The ImageNet tutorial's tags have mean batch times, samples/s, and scores in per cent, by epoch."""
    record = Epoch(
        **{"epoch": 3, "step": 80, "samples": 640, "learning_rate": 0.1, "train_loss": 3.0, "valid_loss": 2.0},
        **{"epoch_seconds": 2.0, "samples_per_second": 320.0, "wall_time": 99.0},
        **{"valid_seconds": 0.5, "valid_samples": 100, "valid_steps": 25},
        metrics={"top1": 0.25, "top5": 0.5},
        train_metrics={"top1": 0.125, "top5": 0.75},
    )
    RunLogs(tmp_path, [], registry.study("imagenet_resnet50").published_log).add(record)
    found = scalars(tmp_path)
    for tag, value in {
        **{"Top1/train": 12.5, "Top5/train": 75.0, "Top1/val": 25.0, "Top5/val": 50.0},
        **{"Time/train": 0.025, "Time/val": 0.02, "Throughput/train": 320.0, "Throughput/val": 200.0},
    }.items():
        assert found[tag] == {3: pytest.approx(value)}, tag
    assert found["train/top1"] == {80: 0.125}

    weather = record.model_copy(update={"metrics": {"rmse_normalised/u10": 0.13}, "train_metrics": {}})
    RunLogs(tmp_path / "vit", [], Era5ViT.published_log).add(weather)
    assert scalars(tmp_path / "vit")["RMSE(u10m)/valid"] == {80: pytest.approx(0.13)}, "the ViT's tags count steps"


def test_scores_before_the_first_step_are_logged_once(tmp_path: Path) -> None:
    """Initial scores are logged once, even if a run stops within its first epoch and is resumed."""
    for step in (0, 3):
        RunLogs(tmp_path, [], step=step).begin(Untrained(valid_loss=6.9), 90.0)
    assert [event.step for event in events(tmp_path).Scalars("loss/valid")] == [0]


def test_the_provenance_of_a_run(finished: Path) -> None:
    found = provenance(finished)
    expected = ViT((16, 32), (4, 4), 1, 1, embed_dim=16, depth=2, heads=2)
    assert found["parameters"] == sum(p.numel() for p in expected.parameters())
    assert (found["training_samples"], found["validation_samples"]) == (2 * 19, 19)
    assert (found["seed"], found["dataset"], found["device"]["kind"], found["device"]["threads"]) == (
        0,
        "data",
        "cpu",
        1,
    )
    assert {metric["name"] for metric in found["metrics"]} == set(records(finished)[0]["metrics"])
    assert found["manifest"]["settings"]["source"]["seed"] == 3
    assert {path.name for path in finished.iterdir()} == FILES
    picture = matplotlib.image.imread(finished / "prediction.png")
    assert min(picture.shape[:2]) > 150 and picture[..., :3].std() > 0.05


# --- invalid input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "which"), [(8, "loss of step 2"), (1, "validation loss")])
def test_a_loss_that_explodes_ends_in_one_message(
    era5: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str], steps: int, which: str
) -> None:
    era5(status=2, training={"steps": steps}, optimizer={"lr": 1e30})
    line = error_line(capfd)
    assert f"epoch 1: the {which} is " in line and "lower optimizer.lr" in line
    expected = {"config.yaml", "checkpoints", "tensorboard", "health.json"}
    assert {path.name for path in (tmp_path / "run").iterdir()} == expected
    assert not list(checkpoint_folder(tmp_path / "run").glob("step-*")), "a checkpoint must not contain a loss of NaN"


def test_a_model_that_does_not_fit_the_data_is_refused(
    tmp_path: Path, weather: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A patch size that does not divide the data files' grid is refused, even if it divides the configured grid."""
    dataset = {**WEATHER, "source": {**WEATHER["source"], "latitudes": 20, "longitudes": 40}}
    make_run(tmp_path, "era5_vit", config.merge(copy.deepcopy(ERA5_RUN), {"model": {"patch": 5}}), dataset)
    assert train(tmp_path, weather / "manifest.json") == 2
    assert "model.patch 5 x 5 does not divide the fields of dataset data (16 x 32 points)" in error_line(capfd)


def test_an_epoch_smaller_than_a_batch_trains_with_a_warning(era5: Make, caplog: pytest.LogCaptureFixture) -> None:
    folder = era5(batch_size=64, training={"epochs": 1})
    told = [record.getMessage() for record in caplog.records if "training samples" in record.getMessage()]
    assert told and told[0].startswith("batch_size 64 is more than the 38 training samples: an epoch is one step, with")
    assert "chosen for batches of 64 may be too high. Use batch_size 38 or less" in told[0]
    assert [(r["step"], r["samples"]) for r in records(folder)] == [(1, 38)]
