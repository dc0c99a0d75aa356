"""Modules with a common weight: the weight is trained, saved and loaded once, under all its names."""

from __future__ import annotations

import contextlib
import faulthandler
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dlscale.config.run import Geometry, RunCore
from dlscale.core.errors import UserError
from dlscale.parallel.model import ModelParallel
from dlscale.parallel.rendezvous import join
from dlscale.parallel.sharding import Sharding
from dlscale.parallel.shards import own_shards
from dlscale.parallel.world import Pretended, World
from dlscale.train.build import build_step
from dlscale.train.checkpoint import CheckpointRecord, Checkpoints
from dlscale.train.step import Step, make_state
from dlscale.train.weight_files import load_weights
from tests.ranks import fake_group, spawn
from tests.test_ddp import as_rank, squares
from tests.test_rungs import settings
from tests.waiting import PATIENCE

BATCH = 8
TIED = ("body.a.weight", "body.b.weight")
ALL = {"body.a.weight", "body.a.bias", "body.b.weight", "body.b.bias", "head.weight", "head.bias"}


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Body(), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def run_of(parallel: dict[str, Any], **over: Any) -> RunCore:
    geometry = {"gpus_per_node": 2} if parallel else {}
    adam = {"kind": "adam", "lr": 1e-2, "eps": 1e-3}
    return settings("era5_vit", geometry=geometry, parallel=parallel, batch_size=BATCH, optimizer=adam, **over)


def step_of(world: World, **over: Any) -> Step:
    return build_step(run_of({"kind": "ddp"} if world.size > 1 else {}, **over), Model, squares, world)


def train(step: Step, world: World, *numbers: int) -> None:
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        x, y = (torch.randn(BATCH, 6, generator=generator).chunk(world.size)[world.rank] for _ in range(2))
        step(x, y)


def state(step: Step) -> dict[str, torch.Tensor]:
    """Check the names in the model's state; return a copy of the state."""
    found = {name: value.clone() for name, value in step.weights.state_dict().items()}
    assert found.keys() == ALL
    assert torch.equal(*(found[name] for name in TIED))
    return found


def save(step: Step, world: World, folder: Path) -> None:
    checkpoints = Checkpoints(folder, 1, world)
    checkpoints.save(CheckpointRecord(step=1, scaler=step.scaler.state_dict()), own_shards(step.shards(), world))
    checkpoints.wait()


def resume(step: Step, world: World, folder: Path) -> None:
    make_state(step.optimizer)
    loaded = Checkpoints(folder, 1, world).load(lambda record: {n: p.empty() for n, p in step.shards().items()})
    step.load(loaded[1], loaded[0].scaler)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("precision", ["fp32", "bf16_master", "bf16_pure"])
def test_one_process(tmp_path: Path, precision: str) -> None:
    world, (one, other) = World(), (step_of(World(), precision=precision) for _ in range(2))
    train(one, world, 0)
    save(one, world, tmp_path / "saved")
    resume(other, world, tmp_path / "saved")
    same(state(other), state(one))
    train(one, world, 1)
    train(other, world, 1)
    same(state(other), state(one))
    path, again = tmp_path / "model.pt", step_of(World(), precision=precision)
    torch.save(one.weights.state_dict(), path)
    load_weights(again.weights, path)
    same(state(again), state(one))
    best = {name: shard.copy("cpu") for name, shard in one.weights.shards().items()}
    same(again.weights.gathered(best), state(one))


def _together(rank: int, port: int, folder: Path) -> None:
    as_rank(rank, port)
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    found: dict[str, Any] = {}
    with join(Geometry(gpus_per_node=2), "cpu") as world:
        step = step_of(world)
        assert step.model.body.a.weight is step.model.body.b.weight
        train(step, world, 0, 1)
        found["both"] = state(step)
        save(step, world, folder / "both")
        for origin in ("alone", "both"):
            step = step_of(world)
            resume(step, world, folder / origin)
            found[f"from {origin}"] = state(step)
            train(step, world, 2)
            found[f"from {origin}, on"] = state(step)
        step = step_of(world)
        load_weights(step.weights, folder / "model.pt")
        found["with given weights"] = state(step)
    torch.save(found, folder / f"{rank}.pt")


def test_tied_weights_learn_and_resume_like_one_process(tmp_path: Path) -> None:
    """A training with tied weights continues from one process to two, from two to two, and back to one."""
    torch.set_num_threads(1)
    step = step_of(World())
    train(step, World(), 0, 1)
    save(step, World(), tmp_path / "alone")
    given = state(step)
    torch.save(given, tmp_path / "model.pt")
    train(step, World(), 2)
    expected = state(step)
    spawn(_together, (20000 + (os.getpid() * 7) % 20000, tmp_path), 2)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        same(found["both"], given, 1e-5)
        same(found["with given weights"], given)
        for origin, saved in {"alone": given, "both": found["both"]}.items():
            same(found[f"from {origin}"], saved)
            same(found[f"from {origin}, on"], expected, 1e-5)
    step = step_of(World())
    resume(step, World(), tmp_path / "both")
    same(state(step), found["both"])


def test_given_weights_may_have_any_of_the_names(tmp_path: Path) -> None:
    path, step = tmp_path / "w.pt", step_of(World())
    train(step, World(), 0)
    saved = state(step)
    for name in TIED:
        other = step_of(World())
        torch.save({key: value for key, value in saved.items() if key != name}, path)
        load_weights(other.weights, path)
        same(state(other), saved)
    torch.save(saved | {TIED[1]: saved[TIED[1]] + 1}, path)
    with pytest.raises(UserError, match=r"tied in the model, different in the file: body\.a\.weight and body\.b"):
        load_weights(step.weights, path)
    save(step, World(), tmp_path / "saved")
    other = step_of(World())
    load_weights(other.weights, next((tmp_path / "saved").glob("step-*")))
    same(state(other), saved)


def _fsdp(units: list[str]) -> None:
    with fake_group(2):
        build_step(run_of({"kind": "fsdp"}), Model, squares, World(size=2), lambda model: Sharding(units=units))


def _tp(columns: list[str]) -> None:
    sharding = Sharding(tokens=4, first="body", last="head", columns=columns)
    ModelParallel(Model(), sharding, Pretended(Geometry(gpus_per_node=2, tp=2)), torch.device("cpu"))


@pytest.mark.parametrize(
    ("attempt", "modules", "refused"),
    [
        (_fsdp, ["body"], True),
        (_tp, ["head"], False),
        (_tp, ["body.a"], True),
        (_tp, ["body.*"], True),
    ],
)
def test_separating_tied_weights_is_refused(
    attempt: Callable[[list[str]], None], modules: list[str], refused: bool
) -> None:
    told = pytest.raises(UserError, match=r"body\.a\.weight and body\.b\.weight are (tied|one tensor)")
    with told if refused else contextlib.nullcontext():
        attempt(modules)
