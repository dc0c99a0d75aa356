"""Which settings decide how long a step takes."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from dlscale.config import resolve
from dlscale.config.compute import KEYS, compute_digest
from dlscale.config.run import Run, RunCore
from tests.conftest import ERA5, ERA5_RUN

LEARNT: list[dict[str, Any]] = [
    {"optimizer": {"lr": 0.5}},
    {"optimizer": {"betas": [0.8, 0.9]}},
    {"optimizer": {"weight_decay": 0.2}},
    {"seed": 7},
    {"label": "another"},
    {"training": {"epochs": 9}},
    {"samples": {"train": 8}},
    {"throughput": {"trials": 9}},
]
COMPUTED: list[dict[str, Any]] = [
    {"batch_size": 2},
    {"optimizer": {"weight_decay": 0}},
    {"optimizer": {"fused": True}},
    {"optimizer": {"clip_norm": 1.0}},
    {"precision": "bf16"},
    {"loader": {"workers": 3}},
    {"loader": {"kind": "direct"}},
    {"threads": 1},
    {"model": {"depth": 1}},
    {"activation_checkpointing": True},
    {"geometry": {"gpus_per_node": 2}},
    {"parallel": {"kind": "fsdp"}},
]


def run(**over: Any) -> Run:
    settings = {"dataset": "data", "optimizer": {"weight_decay": 0.1}}
    settings = resolve.merge(resolve.merge(copy.deepcopy(ERA5_RUN), settings), over)
    plan = {"study": "era5_vit", "measure": ["throughput"], "runs": {"run": settings}}
    raw = {"targets": ["test"], "datasets": {"data": ERA5}, "plans": {"test": plan}}
    return resolve.load(raw).plans["test"]["run"].run


def digest(**over: Any) -> str:
    return compute_digest(run(**over).model_dump(mode="json"))


@pytest.mark.parametrize("over", LEARNT, ids=str)
def test_what_is_learnt_changes_no_step(over: dict[str, Any]) -> None:
    assert digest(**over) == digest()


@pytest.mark.parametrize("over", COMPUTED, ids=str)
def test_what_is_computed_does(over: dict[str, Any]) -> None:
    assert digest(**over) != digest()


def test_averaging_takes_time() -> None:
    two = {"geometry": {"gpus_per_node": 2}}
    assert digest(**two, parallel={"kind": "ddp", "sync": False}) != digest(**two, parallel={"kind": "ddp"})


def test_every_setting_that_stages_share_is_judged() -> None:
    """A new setting of a run belongs to the keys, or it is the seed."""
    assert set(KEYS) == set(RunCore.model_fields) - {"seed"}


def test_what_one_stage_sees_of_a_run_has_the_digest_of_the_whole() -> None:
    assert compute_digest(run().slice("throughput")) == digest()
