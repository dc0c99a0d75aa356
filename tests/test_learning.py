"""What is trained has learnt something: more than yesterday's weather knows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray

from dlscale.config import resolve as config
from dlscale.data.manifest import Manifest
from dlscale.studies.era5_vit.study import STUDY
from tests.conftest import make_dataset, records, stage, train

pytestmark = pytest.mark.slow


def test_the_shipped_plan_beats_all_naive_answers_on_a_real_month(
    tmp_path: Path, shared: Callable[[str], Path]
) -> None:
    """era5_uk as it is, one of its runs. Scores in kelvin, checked against the GRIB file itself."""
    path = shared("data/era5/era5-2mt-2019-03-uk.grib")
    loaded = config.load(
        {"targets": ["era5_uk"], "datasets": {"era5_uk": {"source": {"paths": [str(path)]}}}},
    )
    run: Any = loaded.plans["era5_uk"]["vit"].run
    make_dataset(tmp_path / "data", loaded.workflow.datasets["era5_uk"].model_dump(mode="json"))
    assert stage("configure", "--settings", run.model_dump_json(), "--out", tmp_path / "config.yaml") == 0
    assert train(tmp_path, tmp_path / "data" / "manifest.json") == 0
    final = records(tmp_path)[-1]["metrics"]

    with xarray.open_dataset(path, engine="cfgrib", backend_kwargs={"indexpath": ""}) as opened:
        kelvin = opened["t2m"].values.astype(np.float64)
        weights = np.cos(np.radians(opened["latitude"].values))[:, None]
    assert kelvin.shape == (31 * 24, 33, 49)
    assert 260 < kelvin.min() < kelvin.max() < 310
    before, issued, fitted = kelvin[: 24 * 24], np.arange(24 * 24, 31 * 24 - 6), np.arange(24 * 24 - 6)
    assert len(issued) == 162

    def rmse(answer: np.ndarray) -> float:
        square = np.square(answer - kelvin[issued + 6]).mean(axis=(0, 2), keepdims=True)[0]
        return float(np.sqrt((square * weights).sum() / weights.sum()))

    mean = before.reshape(24, 24, 33, 49).mean(axis=0)
    now, then = (kelvin[fitted + lead] - mean[(fitted + lead) % 24] for lead in (0, 6))
    damping = (now * then * weights).sum() / (now * now * weights).sum()
    naive = {
        "persistence": kelvin[issued],
        "climatology": mean[(issued + 6) % 24],
        "diurnal": kelvin[issued] + mean[(issued + 6) % 24] - mean[issued % 24],
        "damped": mean[(issued + 6) % 24] + damping * (kelvin[issued] - mean[issued % 24]),
        "yesterday": kelvin[issued] + kelvin[issued - 18] - kelvin[issued - 24],
    }
    # Least squares over all points of all training pairs that have a yesterday.
    lags, at = (0, 1, 18, 24), np.arange(24, 24 * 24 - 6)
    root = np.sqrt(np.broadcast_to(weights, (33, 49)))
    columns = [*(kelvin[at - lag] for lag in lags), np.ones((len(at), 33, 49))]
    matrix = np.stack([(column * root).ravel() for column in columns], axis=1)
    *fit, offset = np.linalg.lstsq(matrix, (kelvin[at + 6] * root).ravel())[0]
    naive["regression"] = offset + sum(b * kelvin[issued - lag] for b, lag in zip(fit, lags, strict=True))
    errors = {name: rmse(answer) for name, answer in naive.items()}
    assert {name: round(error, 2) for name, error in errors.items()} == {
        "persistence": 2.72,
        "climatology": 1.83,
        "diurnal": 1.81,
        "damped": 1.63,
        "yesterday": 1.46,
        "regression": 1.36,
    }
    for name, error in errors.items():
        assert final[f"{name}_rmse/t2m"] == pytest.approx(error, rel=1e-3)
    assert final["naive_rmse/t2m"] == final["regression_rmse/t2m"]

    model = STUDY.model(run, Manifest.read(tmp_path / "data" / "manifest.json")).eval()
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    normal = (kelvin - before.mean()) / before.std()
    clock = [wave(2 * np.pi * issued / 24)[:, None, None] + 0 * normal[issued] for wave in (np.sin, np.cos)]
    assert run.samples.clock == ["hour"]
    x = np.stack([*(normal[issued - lag] for lag in (0, *run.samples.history)), *clock], axis=1)
    with torch.no_grad():
        forecast = model(torch.from_numpy(x).float())[:, 0].double().numpy() * before.std() + before.mean()
    assert final["rmse/t2m"] == pytest.approx(rmse(forecast), rel=1e-3)
    assert final["rmse/t2m"] <= 1.40
    assert final["skill/t2m"] == pytest.approx(1 - final["rmse/t2m"] / errors["regression"], abs=2e-3)
    assert final["skill/t2m"] > 0
