"""Test the study `starter_ocean` (batches are dicts): the general tests of studies, physics and quality."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlscale.config.resolve import load
from dlscale.core.metrics import read_epochs
from dlscale.extensions.scaffold.study_tests import *  # noqa: F403
from dlscale.extensions.scaffold.study_tests import make_dataset
from dlscale.extensions.starter_ocean.basin.source import STEPS, diffused
from dlscale.extensions.starter_ocean.model import sea_mse
from tests.conftest import TINY, make_run, train

STUDY, DATASET, RUN = "starter_ocean", TINY["starter_ocean"]["dataset"], TINY["starter_ocean"]["run"]


def test_heat_stays_in_its_sea() -> None:
    """Diffusion keeps the sum of each sea, lets nothing cross a coast, and approaches the mean."""
    sea = np.ones((1, 6, 7), bool)
    sea[:, :, 3] = False  # two seas
    before = np.where(sea, np.random.default_rng(0).normal(size=sea.shape), 0.0)
    after = diffused(before, sea, np.array([0.2]))
    for half in (slice(0, 3), slice(4, 7)):
        assert after[:, :, half].sum() == pytest.approx(before[:, :, half].sum())
        assert after[:, :, half].std() < 0.5 * before[:, :, half].std()
    assert not after[:, :, 3].any()
    assert STEPS > 1 and np.array_equal(diffused(before, sea, np.zeros(1)), before)


def test_the_loss_ignores_land() -> None:
    target = {"after": torch.zeros(1, 1, 2, 2), "sea": torch.tensor([[[1, 1], [0, 0]]], dtype=torch.uint8)}
    prediction = torch.tensor([[[[1.0, 3.0], [100.0, 100.0]]]])
    assert sea_mse(prediction, target).tolist() == [5.0]


@pytest.mark.slow
def test_the_demo_reaches_the_promised_quality(tmp_path: Path) -> None:
    """The RMSE is below a fifth of the RMSE of the unchanged temperature, as `study.yaml` promises."""
    demo: Any = load({"targets": ["starter_ocean_demo"]})
    run = demo.plans["starter_ocean_demo"]["single"].run.model_dump(mode="json")
    dataset = demo.workflow.datasets[run["dataset"]]
    make_dataset(dataset, tmp_path / "data/manifest.json")
    make_run(tmp_path / "run", STUDY, {"threads": 1}, dataset.model_dump(mode="json"))
    assert train(tmp_path / "run", tmp_path / "data/manifest.json") == 0
    found = read_epochs(tmp_path / "run/metrics.jsonl")[-1].metrics
    assert found["rmse"] < 0.2 * found["rmse_of_unchanged"]
