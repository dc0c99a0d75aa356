"""Which settings decide how long a step takes."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest

from dlscale.config import resolve
from dlscale.config.compute import KEYS, compute_digest
from dlscale.config.run import Run, RunCore
from dlscale.core.stages import RUN_STAGES
from dlscale.rules.jobs import decisive_settings
from tests.conftest import ERA5, ERA5_RUN

LEARNT: list[dict[str, Any]] = [
    {"optimizer": {"lr": 0.5}},
    {"optimizer": {"betas": [0.8, 0.9]}},
    {"optimizer": {"weight_decay": 0.2}},
    {"optimizer": {"eps": 1e-7}},
    {"seed": 7},
    {"schedule": {"kind": "constant"}},
    {"label": "another"},
    {"training": {"epochs": 9}},
    {"samples": {"train": 8}},
    {"throughput": {"trials": 9}},
]
#: Stages that run again for the first key of these, where that is not training alone.
AGAIN: dict[str, set[str]] = {"label": set(), "samples": set(RUN_STAGES), "throughput": {"throughput"}}
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
    {"parallel": {"sync": False}},
]


def run(**over: Any) -> Run:
    settings = {"dataset": "data", "optimizer": {"weight_decay": 0.1}}
    settings = resolve.merge(resolve.merge(copy.deepcopy(ERA5_RUN), settings), over)
    plan = {"study": "era5_vit", "measure": ["throughput"], "runs": {"run": settings}}
    raw = {"targets": ["test"], "datasets": {"data": ERA5}, "plans": {"test": plan}}
    return resolve.load(raw).plans["test"]["run"].run


def decisive(stage: str, run: Run) -> Any:
    return decisive_settings(stage, run.slice(stage))


once = functools.cache(run)


@pytest.mark.parametrize("over", LEARNT, ids=str)
def test_what_is_learnt_changes_no_step(over: dict[str, Any]) -> None:
    """No rate is another one, and no stage but training runs again, unless there are other samples or trials."""
    plain, other = once(), run(**over)
    assert compute_digest(other.model_dump(mode="json")) == compute_digest(plain.model_dump(mode="json"))
    again = {stage for stage in RUN_STAGES if decisive(stage, other) != decisive(stage, plain)}
    assert again == (AGAIN[key] if (key := next(iter(over))) in AGAIN else {"train"})


def test_of_momentum_it_counts_whether_there_is_any() -> None:
    much, less, none = (
        decisive("throughput", run(optimizer={"kind": "sgd", "momentum": value})) for value in (0.9, 0.8, 0.0)
    )
    assert much == less != none


@pytest.mark.parametrize("over", COMPUTED, ids=str)
def test_what_is_computed_does(over: dict[str, Any]) -> None:
    plain, other = once(), run(**over)
    assert compute_digest(other.model_dump(mode="json")) != compute_digest(plain.model_dump(mode="json"))
    assert all(decisive(stage, other) != decisive(stage, plain) for stage in RUN_STAGES)


def test_every_setting_that_stages_share_is_judged() -> None:
    """A new setting of a run belongs to the keys, or it is the seed."""
    assert set(KEYS) == set(RunCore.model_fields) - {"seed"}


def test_what_one_stage_sees_of_a_run_has_the_digest_of_the_whole() -> None:
    assert compute_digest(run().slice("throughput")) == compute_digest(run().model_dump(mode="json"))
