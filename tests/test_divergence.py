"""Losses and gradients of NaN or infinity: detection, policies, the command `batch`, and equal replicas.

Each policy is compared with a training that omits the bad steps.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from dlscale.cli import STOPPED
from dlscale.config import resolve as config
from dlscale.config.run import Geometry, Training, load_run
from dlscale.core import registry
from dlscale.core.errors import UserError
from dlscale.core.files import sha256
from dlscale.data.loaders.base import open_samples, read_batch
from dlscale.data.manifest import Manifest
from dlscale.extensions.batch import replicas
from dlscale.extensions.batch.replicas import check_replicas
from dlscale.extensions.era5_vit.scores import relative_l2
from dlscale.parallel.rendezvous import join
from dlscale.parallel.world import Mesh, World
from dlscale.train.build import build_optimizer, build_step, open_session
from dlscale.train.checkpoint import CheckpointRecord, read
from dlscale.train.step import Step, set_learning_rate
from dlscale.train.train import Interruption
from dlscale.train.trainer import Request, Trainer, _EpochSums, learning_rate, peak_rate
from tests.conftest import TINY, error_line, make_dataset, make_run, records, stage, timeless, train
from tests.ranks import spawn
from tests.test_ddp import as_rank
from tests.test_mesh import FSDP, VIT, Case, batches, whole
from tests.test_rungs import settings
from tests.test_training import Waits, checkpoint_folder
from tests.waiting import PATIENCE

# --- one step -----------------------------------------------------------------------------------------------------


class Faulty(nn.Module):
    """Network with batch normalisation. An input of 1000 makes an activation infinite; 2000 makes a gradient NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.first(x.clamp(max=3)))
        y = y + torch.where((x == 1000).any(), torch.inf, 0.0)
        bad = bool((x == 2000).any())
        if bad and y.requires_grad:
            y.register_hook(lambda gradient: gradient * torch.nan)
        return self.last(y.relu())


#: Name of a planted fault → value of one input, and the expected code (2: bad loss, 1: bad gradient alone).
PLANTED = {"data": (torch.nan, 2), "activation": (1000.0, 2), "gradient": (2000.0, 1)}


def square(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return (p - t).square().mean(1)


def numbered(number: int, planted: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randn(5, 8, generator=torch.Generator().manual_seed(number)).split([6, 2], dim=1)
    if planted is not None:
        x[3, 2] = planted
    return x.contiguous(), y.contiguous()


def faulty_step(**over: Any) -> Step:
    return build_step(settings("era5_vit", batch_size=5, **over), Faulty, square)


def state(step: Step) -> dict[str, torch.Tensor]:
    return {name: shard.copy("cpu").tensor for name, shard in step.shards().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


ADAM = {"kind": "adamw", "lr": 0.01}
MOMENTUM = {"kind": "sgd", "lr": 0.1, "momentum": 0.9}


@pytest.mark.parametrize(
    "over",
    [
        {"optimizer": ADAM},
        {"optimizer": {**ADAM, "fused": True}},
        {"optimizer": MOMENTUM},
        {"optimizer": {**MOMENTUM, "fused": True}},
        {"optimizer": {"kind": "adadelta"}},
        {"optimizer": {**ADAM, "clip_norm": 0.1, "fused": True}, "accumulation_steps": 2},
        {"optimizer": ADAM, "precision": "bf16_master"},
        {"optimizer": {**ADAM, "eps": 1e-3}, "precision": "fp16_pure"},
        {"optimizer": {**MOMENTUM, "clip_norm": 0.1}, "precision": "fp16"},
        {"optimizer": {**MOMENTUM, "fused": True}, "precision": "fp16_master"},
    ],
    ids=lambda over: "-".join(str(value) for value in over["optimizer"].values()) + over.get("precision", ""),
)
def test_a_skipped_step_changes_no_bit(over: dict[str, Any]) -> None:
    """Weights, buffers and optimiser equal those of a loop that omits the bad steps, also at the first step."""
    scaled = over.get("precision") in ("fp16", "fp16_master")
    for planted, bad in PLANTED.values():
        if scaled and bad == 1:  # an overflow, as the loss scaler expects
            continue
        step, omitting = faulty_step(**over), faulty_step(**over)
        step.skip_bad()
        for number in range(7):
            wrong = number in (0, 3, 4)
            before = state(step)
            step(*numbered(number, planted if wrong else None))
            assert float(step.bad) == wrong, (planted, number)
            if wrong:
                assert equal(state(step), before), (planted, number)
                omitting.scaler.load_state_dict(step.scaler.state_dict())  # a bad step may halve the loss scale
            else:
                omitting(*numbered(number))
        # A first step without earlier moments may give zeros another sign.
        assert all(torch.equal(a, b) for a, b in zip(state(step).values(), state(omitting).values(), strict=True))
        assert step.scaler.state_dict() == omitting.scaler.state_dict()


def test_a_skipping_step_equals_a_plain_loop() -> None:
    step = faulty_step(optimizer=ADAM)
    step.skip_bad()
    torch.manual_seed(settings("era5_vit").seed)
    model = Faulty()
    adam = build_optimizer(model.parameters(), settings("era5_vit", optimizer=ADAM).optimizer)
    for number in range(6):
        x, y = numbered(number, torch.nan if number == 2 else None)
        step(x, y)
        if number != 2:
            adam.zero_grad()
            square(model(x), y).mean().backward()
            adam.step()
    assert equal(dict(model.state_dict()), dict(step.model.state_dict()))


@pytest.mark.parametrize("planted", PLANTED)
def test_the_first_bad_step_and_its_cause_are_known(planted: str) -> None:
    """The epoch's record distinguishes a bad loss (2) from a bad gradient alone (1)."""
    value, code = PLANTED[planted]
    for skips in (False, True):
        step = faulty_step(optimizer=ADAM)
        if skips:
            step.skip_bad()
        sums = _EpochSums(CheckpointRecord(bad={2: 2}), range(3, 8), World(), step, 1)
        for number in range(3, 8):
            batch = numbered(number, value if number == 4 else None)
            sums.add(number, batch, step(*batch))
        later = {} if skips else {5: 2, 6: 2, 7: 2}  # the weights are NaN then
        assert sums.bad() == {2: 2, 4: code, **later}
        assert np.isfinite(sums.total()).all() == skips


class Eight(list[int]):
    """Loader of four batches with two samples each."""

    samples = 8


def test_half_of_the_steps_may_be_left_out() -> None:
    trainer: Any = SimpleNamespace(
        name="RUN",
        run=SimpleNamespace(batch_size=2, seed=0, training=SimpleNamespace(on_divergence="skip")),
        train_loader=Eight(range(4)),
        share=SimpleNamespace(count=lambda number, samples: 2),
        step=SimpleNamespace(skips=True),
    )
    Trainer._judge_steps(trainer, {0: 1, 2: 2}, 4)
    with pytest.raises(UserError, match=r"the first of 3 such steps of 4"):
        Trainer._judge_steps(trainer, {0: 1, 1: 1, 2: 2}, 4)


def test_totals_over_ranks_leave_each_ranks_sums() -> None:
    """A training that is asked to end during its validation saves each rank's sums, which `total` must not change."""

    class Two(World):
        def sum(self, values: torch.Tensor) -> torch.Tensor:
            return values.mul_(2)

    sums = _EpochSums(CheckpointRecord(sums=[[1.0, 3.0]]), range(0), Two(), faulty_step(), 2)
    assert sums.total() == sums.total() == [2.0, 6.0]
    assert sums.by_rank() == [[1.0, 3.0]]


@pytest.mark.parametrize("fused", [True, False])
def test_only_a_skipping_step_without_fused_optimiser_waits(fused: bool) -> None:
    for skips in (False, True):
        step = faulty_step(optimizer={**ADAM, "fused": fused})
        if skips:
            step.skip_bad()
        given = [numbered(number) for number in range(3)]
        for x, y in given:  # `Faulty` also reads a value, which waits; `own` counts these waits
            with Waits(step.optimizer) as counted:
                step.gradients(x, y)
            own = counted.count
            with Waits(step.optimizer) as counted:
                step(x, y)
            assert counted.count - own == (skips and not fused)


def test_complex_and_missing_gradients_are_checked() -> None:
    """The check includes complex gradients, and ignores parameters without a gradient."""

    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.idle = nn.Parameter(torch.randn(4, dtype=torch.cfloat)), nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=6)[:, :2]

    step = build_step(settings("era5_vit", batch_size=5, optimizer=ADAM), Spectral, square)
    step.skip_bad()
    step(*numbered(0))
    assert float(step.bad) == 0
    before = state(step)
    step(*numbered(1, torch.inf))
    assert float(step.bad) == 1 and equal(before, state(step))


# --- a training ---------------------------------------------------------------------------------------------------

IMAGES = {"kind": "starter", "source": {"kind": "simulated", "size": 16, "train": 38, "valid": 8, "seed": 3}}
EPOCHS, ROW = 3, 17


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset of 38 training samples with NaN in one input."""
    folder = make_dataset(tmp_path_factory.mktemp("data") / "images", IMAGES)
    manifest = folder / "manifest.json"
    (info,) = Manifest.read(manifest).files("train")
    with h5py.File(folder / info.path, "r+") as file:
        file["input"][ROW, 0, 3, 5] = np.nan
    # Update the digest, as if the data had been prepared with NaN.
    manifest.write_text(manifest.read_text().replace(info.digest, sha256(folder / info.path)))
    Manifest.checked(json.loads(manifest.read_text()), "").write(manifest)
    return folder


def configured(folder: Path, **over: Any) -> Path:
    base = {**TINY["starter_cnn"]["run"], "batch_size": 4, "training": {"epochs": EPOCHS}}
    make_run(folder, "starter_cnn", config.merge(copy.deepcopy(base), over), IMAGES)
    return folder


def bad_sample(data: Path, folder: Path, epoch: int) -> int:
    """Return the number of the sample with NaN in an epoch (from 0), by reading all samples."""
    samples = open_samples(load_run(folder / "config.yaml", "train"), Manifest.read(data / "manifest.json"), "train")
    found = [n for n in range(samples.size) if any(np.isnan(each).any() for each in samples.read(epoch, n))]
    assert len(found) == 1
    return found[0]


@pytest.fixture(scope="module")
def skipped(spoilt: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = configured(tmp_path_factory.mktemp("skip") / "run", training={"on_divergence": "skip"})
    assert train(folder, spoilt / "manifest.json") == 0
    return folder


def test_a_failed_training_names_step_and_batch(
    spoilt: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = configured(tmp_path / "run")
    capfd.readouterr()
    assert train(folder, spoilt / "manifest.json") == 2
    line = error_line(capfd)
    index = bad_sample(spoilt, folder, 0)
    step, first = index // 4 + 1, index // 4 * 4
    assert f"epoch 1: the loss of step {step} is NaN or infinite" in line
    assert f"seed 0, epoch 1, samples {first} to {min(first + 3, 37)})" in line
    command = f"dlscale batch {folder} --step {step}"
    assert f"`{command}`" in line and "lower optimizer.lr" in line
    # The named command shows the sample, its file, and the tensors.
    more = ("--manifest", spoilt / "manifest.json", "--out", tmp_path / "batch.npz", "--json")
    assert stage(*command.split()[1:], *more) == 0
    shown = json.loads(capfd.readouterr().out)
    assert [each["index"] for each in shown["samples"]] == list(range(first, min(first + 4, 38)))
    (bad,) = [each for each in shown["samples"] if each["bad"]]
    assert (bad["index"], bad["source"], bad["bad"]) == (index, f"train/train.h5, row {ROW}", 1)
    assert [(each["name"], each["nan"], each["infinite"]) for each in shown["tensors"]] == [
        ("input", 1, 0),
        ("target", 0, 0),
    ]
    run = load_run(folder / "config.yaml", "train")
    samples = open_samples(run, Manifest.read(spoilt / "manifest.json"), "train")
    x, y = read_batch(samples, 0, range(first, min(first + 4, 38)))
    with np.load(tmp_path / "batch.npz") as kept:
        assert np.array_equal(kept["input"], x, equal_nan=True) and np.array_equal(kept["target"], y)
    assert shown["tensors"][0]["maximum"] == pytest.approx(np.nanmax(x))
    assert stage("batch", folder, "--step", 31, "--manifest", spoilt / "manifest.json") == 2
    assert "this training has the steps 1 to 30" in error_line(capfd)


def test_a_training_that_skips_equals_a_loop_that_omits_the_step(spoilt: Path, skipped: Path) -> None:
    run = load_run(skipped / "config.yaml", "train")
    session = open_session(run, spoilt / "manifest.json", World(), 1)
    step, loader = session.step, session.loader("train")
    found = records(skipped)
    for epoch in range(EPOCHS):
        wrong, losses = bad_sample(spoilt, skipped, epoch) // 4, []
        for number, (x, y) in enumerate(loader.epoch(epoch)):
            peak = peak_rate(run.schedule, run.optimizer.lr, run.batch_size)
            set_learning_rate(step.optimizer, learning_rate(run.schedule, peak, 10 * epoch + number, 30, 10))
            if number != wrong:
                losses += [float(step(x, y))] * len(x)
        assert found[epoch]["skipped"] == 1
        assert found[epoch]["train_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    weights = torch.load(skipped / "model.pt", weights_only=True)
    assert equal(weights, {name: value.cpu() for name, value in step.weights.state_dict().items()})
    loader.close()


def test_another_policy_keeps_the_skipped_steps_of_a_finished_training(
    spoilt: Path, skipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training takes no step, and keeps the records that the page counts (`test_report`)."""
    shutil.copytree(skipped.parent, tmp_path / "skip")
    folder = configured(tmp_path / "skip" / "run", training={"on_divergence": "fail"})
    monkeypatch.delattr(Step, "__call__")
    assert train(folder, spoilt / "manifest.json") == 0
    assert [record["skipped"] for record in records(folder)] == [1] * EPOCHS
    finished_like(folder, skipped)


@pytest.mark.slow
def test_stop_and_fail_save_no_bad_weights(spoilt: Path, tmp_path: Path) -> None:
    folder = configured(tmp_path / "run", training={"on_divergence": "stop"})
    assert train(folder, spoilt / "manifest.json") == 0
    (only,) = records(folder)
    assert (only["train_loss"], only["valid_loss"], only["skipped"]) == (None, None, 0)
    assert not list(checkpoint_folder(folder).glob("step-*"))


@pytest.mark.slow
def test_a_training_that_skips_most_steps_fails(
    spoilt: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Step.__call__
    monkeypatch.setattr(Step, "__call__", lambda self, x, y, *w: call(self, x * torch.nan, y, *w))
    folder = configured(tmp_path / "run", training={"on_divergence": "skip"})
    assert train(folder, spoilt / "manifest.json") == 2
    assert "the first of 10 such steps of 10" in error_line(capfd)


def finished_like(folder: Path, skipped: Path) -> None:
    """Compare a training with `skipped`: weights, best weights, records and last checkpoint."""
    for name in ("model.pt", "model_best.pt"):
        assert (folder / name).read_bytes() == (skipped / name).read_bytes(), name
    assert timeless(folder) == timeless(skipped)
    last = [read(checkpoint_folder(each) / "step-00000030") for each in (folder, skipped)]
    assert equal(*last), "moments and random states must agree, too"


class Killed(Exception):
    pass


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param((), id="uninterrupted"),
        # The first epoch has 10 steps, and 10 more after the roll-back.
        pytest.param((10,), id="before the roll-back", marks=pytest.mark.slow),
        pytest.param((14,), id="in the repeated epoch", marks=pytest.mark.slow),
        pytest.param((24, 3), id="twice"),
    ],
)
def test_a_rolled_back_training_equals_one_that_skipped(
    spoilt: Path, skipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: tuple[int, ...]
) -> None:
    """A training that rolls back, even if it is killed and repeated, gives the bits of a training that skips."""
    folder = configured(tmp_path / "run", training={"on_divergence": "roll_back", "checkpoint_epochs": 2})
    call, left = Step.__call__, [0]

    def dying(self: Step, *batch: Any) -> torch.Tensor:
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        return call(self, *batch)

    monkeypatch.setattr(Step, "__call__", dying)
    for left[0] in calls:
        assert train(folder, spoilt / "manifest.json") == 1
        assert left[0] == 0
    left[0] = 0
    assert train(folder, spoilt / "manifest.json") == 0
    finished_like(folder, skipped)
    step = json.loads((folder / "provenance.json").read_text())["resumed_from_step"]
    assert (step is None) == (not calls), "a roll-back is part of its try, whose energy and goodput are known"


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["skip", "roll_back"])
def test_an_interrupted_epoch_saves_no_bad_weights(
    spoilt: Path, skipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """A training that is asked to end after a bad step saves finite weights or none, and continues bit by bit."""
    folder = configured(tmp_path / "run", training={"on_divergence": policy})
    wrong, asked = bad_sample(spoilt, folder, 0) // 4, iter(range(100))
    with monkeypatch.context() as patched:
        patched.setattr(Interruption, "poll", lambda self: Request.END if next(asked) == wrong + 1 else Request.NONE)
        assert train(folder, spoilt / "manifest.json") == STOPPED
    saved = [int(each.name[5:]) for each in checkpoint_folder(folder).glob("step-*")]
    assert saved == ([wrong + 1] if policy == "skip" else [0])
    assert train(folder, spoilt / "manifest.json") == 0
    finished_like(folder, skipped)


# --- several ranks ------------------------------------------------------------------------------------------------

MODES: dict[str, Case] = {
    "ddp": Case(2, over={"optimizer": {**ADAM, "fused": True}}),
    "fsdp": Case(2, parallel=FSDP, over={"optimizer": ADAM}),
    "tp": Case(2, {"tp": 2}, over={"optimizer": ADAM}),
    "cp": Case(2, {"cp": 2}, over={"optimizer": MOMENTUM, "precision": "bf16"}),
    "fp16": Case(2, over={"optimizer": {**MOMENTUM, "fused": True}, "precision": "fp16"}),
}


def _one_bad(rank: int, port: int) -> None:
    as_rank(rank, port)
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    with join(Geometry(gpus_per_node=2), "cpu") as joined:
        for name, case in MODES.items():
            run = case.run()
            world = replace(joined, mesh=Mesh(run.geometry, "cpu") if run.geometry.model_size > 1 else None)
            step, omitting = (build_step(run, case.model, relative_l2, world, VIT.sharding) for _ in range(2))
            step.skip_bad()
            batches(case, step, world, range(1))
            batches(case, omitting, world, range(1))
            before = state(step)
            for code, plant in ((2, bad_loss), (1, bad_gradient)):
                if (name, code) == ("fp16", 1):
                    continue
                with plant(step, rank == 1):
                    batches(case, step, world, range(1, 2))
                assert float(step.bad) == 1, (name, code, rank)
                assert equal(before, state(step)), (name, code, rank)
            batches(case, step, world, range(2, 3))
            batches(case, omitting, world, range(2, 3))
            if name != "fp16":  # after an overflow, another loss scale may round differently
                assert equal(whole(step.weights.state_dict()), whole(omitting.weights.state_dict())), name
            # Replicas are equal. A changed number is found if both ranks hold the parameter.
            check_replicas(step, world, 3)
            with torch.no_grad():
                parameter = [*step.model.named_parameters()][-1][1]
                local = parameter.to_local() if name == "fsdp" else parameter
                if rank == 1 and local.numel():
                    local.view(-1)[-1] += 1e-3
            if name in ("ddp", "cp"):
                with pytest.raises(UserError, match=r"epoch 3: parameter .* differs between the ranks 0 \| 1 "):
                    check_replicas(step, world, 3)
            elif name == "fsdp":
                check_replicas(step, world, 3)


@contextlib.contextmanager
def bad_loss(step: Step, bad: bool) -> Iterator[None]:
    """Make the loss infinite with finite gradients, on this rank only if `bad`."""
    loss = step.network.loss
    step.network.loss = (lambda p, t: loss(p, t) + torch.inf) if bad else loss
    yield
    step.network.loss = loss


@contextlib.contextmanager
def bad_gradient(step: Step, bad: bool) -> Iterator[None]:
    """Make a gradient infinite after the exchange, on this rank only if `bad`."""
    collect = step.weights.collect_gradients

    def overflowing() -> None:
        collect()
        if bad:
            next(p.grad for p in step.weights.updated if p.grad is not None and p.grad.numel()).view(-1)[0] = torch.inf

    step.weights.collect_gradients = overflowing  # type: ignore[method-assign]
    yield
    step.weights.collect_gradients = collect  # type: ignore[method-assign]


@pytest.mark.slow
def test_all_ranks_skip_a_step_that_is_bad_on_one() -> None:
    spawn(_one_bad, (20000 + (os.getpid() * 3) % 20000,), 2)


@pytest.mark.slow
def test_a_training_compares_its_replicas(spoilt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    monkeypatch.setattr(replicas, "check_replicas", lambda step, world, epoch: compared.append(epoch))
    folder = configured(tmp_path / "run", training={"on_divergence": "skip", "check_replicas": True})
    assert train(folder, spoilt / "manifest.json") == 0
    assert compared == [1, 2, 3]


def test_replicas_are_not_compared_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key is refused when settings are read, instead of having no effect."""
    assert Training(epochs=1, check_replicas=True).check_replicas
    found = registry.table
    monkeypatch.setattr(registry, "table", lambda name, *taken: {} if name == "PROVIDES" else found(name, *taken))
    with pytest.raises(ValidationError, match="needs dlscale's extension batch"):
        Training(epochs=1, check_replicas=True)
