"""Trained models are better than a constant, a linear fit and yesterday's weather."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import xarray

from dlscale.config import resolve as config
from dlscale.data.manifest import Manifest
from dlscale.extensions.cosmo_unet.model import UNet3D
from dlscale.extensions.era5_vit.study import STUDY
from tests.conftest import make_dataset, make_run, records, stage, train

pytestmark = pytest.mark.slow


def volumes(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a split's V boxes of N^3 cells, float64, model units: inputs [4, V, N, N, N], targets [5, V, N, N, N]."""
    boxes = []
    manifest = Manifest.read(folder / "manifest.json")
    for part in manifest.files(split):
        with h5py.File(manifest.path(part)) as file:
            boxes.append((file["Nbody"][:].astype(np.float64), file["Hydro"][:].astype(np.float64)))
    x, y = (np.stack(arrays, axis=1) for arrays in zip(*boxes, strict=True))
    return x, y


def with_one(x: np.ndarray) -> np.ndarray:
    """Return the regressors of a linear fit, [cells, 5]: the four inputs and a constant."""
    flat = x.reshape(len(x), -1)
    return np.vstack([flat, np.ones(flat.shape[1])]).T


def test_a_unet_learns_the_gas_from_neighbouring_cells(tmp_path: Path) -> None:
    data: dict[str, Any] = {
        "kind": "cosmo",
        "source": {"kind": "simulated", "grid": 64, "box_mpc_h": 32.0, "boxes": {"train": 2, "valid": 1}, "seed": 1},
    }
    settings = {
        "batch_size": 4,
        "model": {"widths": [16, 32]},
        "samples": {"crop": 16, "train": 256, "valid": 64},  # 64 disjoint crops cover the validation box
        "loader": {"workers": 0},
        "optimizer": {"lr": 3e-3},
        "training": {"epochs": 6},
        "precision": "fp32",
    }
    make_dataset(tmp_path / "data", data)
    make_run(tmp_path, "cosmo_unet", settings, data)
    assert train(tmp_path, tmp_path / "data" / "manifest.json") == 0

    x, y = volumes(tmp_path / "data", "train")
    x_, y_ = volumes(tmp_path / "data", "valid")
    median = np.median(y.reshape(5, -1), axis=1)  # the constant with the smallest absolute error
    fit = np.linalg.lstsq(with_one(x), y.reshape(5, -1).T, rcond=None)[0]
    truth = y_.reshape(5, -1)
    constant = np.abs(truth - median[:, None]).mean(axis=1)
    linear = np.abs(truth - (with_one(x_) @ fit).T).mean(axis=1)

    def error(model: torch.nn.Module) -> np.ndarray:
        """Return the mean absolute error of each channel over the validation box; the model predicts crop by crop."""
        crops = [slice(start, start + 16) for start in range(0, 64, 16)]
        total = np.zeros(5)
        for z, row, column in np.ndindex(4, 4, 4):
            box = (slice(None), 0, crops[z], crops[row], crops[column])
            with torch.no_grad():
                prediction = model(torch.from_numpy(x_[box]).float()[None])[0].numpy()
            total += np.abs(prediction - y_[box]).mean(axis=(1, 2, 3)) / 64
        return total

    torch.manual_seed(0)
    model = UNet3D(4, 5, widths=(16, 32))
    assert error(model).mean() > constant.mean(), "an untrained model must be worse than a constant"
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert records(tmp_path)[-1]["valid_loss"] == pytest.approx(error(model).mean(), rel=1e-4)
    assert (error(model) < 0.7 * linear).all(), (error(model), linear)
    assert error(model).mean() < 0.5 * linear.mean() < 0.5 * constant.mean()


def test_a_vit_learns_the_next_state(tmp_path: Path) -> None:
    data: dict[str, Any] = {
        "kind": "era5",
        "source": {
            **{"kind": "simulated", "latitudes": 16, "longitudes": 32, "days": 50, "seed": 1},
            **{"train": [2001, 2002], "valid": [2003]},
        },
    }
    settings = {
        "batch_size": 16,
        "model": {"patch": 2, "embed_dim": 64, "depth": 2, "heads": 4, "residual": True},
        "loader": {"workers": 0},
        "optimizer": {"lr": 1e-3},
        "schedule": {"warmup_steps": 20},
        "training": {"epochs": 6},
        "precision": "fp32",
    }
    make_dataset(tmp_path / "data", data)
    make_run(tmp_path, "era5_vit", settings, data)
    assert train(tmp_path, tmp_path / "data" / "manifest.json") == 0
    final = records(tmp_path)[-1]["metrics"]
    manifest = Manifest.read(tmp_path / "data" / "manifest.json")
    weights = np.cos(np.radians(manifest.extra["latitude"]))
    with h5py.File(tmp_path / "data" / "valid" / "2003.h5") as file:
        states = file["fields"][:].astype(np.float64)
    for channel, name in enumerate(manifest.fields["fields"].channels):
        square = np.square(states[1:, channel] - states[:-1, channel]).mean(axis=(0, 2))
        persistence = np.sqrt((square * weights).sum() / weights.sum())
        assert final[f"persistence_rmse/{name}"] == pytest.approx(persistence, rel=1e-4)
        assert final[f"rmse/{name}"] < 0.98 * persistence, name
    # Leave out `regression`, which uses yesterday's states, while this model uses one state. `naive` repeats the best
    # baseline.
    rivals = [name for name in final if name.endswith("_rmse/u10") and not name.startswith(("naive", "regression"))]
    assert len(rivals) == 5 and final["rmse/u10"] < 0.9 * min(final[name] for name in rivals)


def test_the_shipped_plan_beats_all_baselines_on_a_real_month(tmp_path: Path, shared: Callable[[str], Path]) -> None:
    """A run of the shipped plan era5_uk is better than all baselines without learning.

    The scores, in kelvin, equal scores that the test computes from the GRIB file.
    """
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
    before, issued, fitted = kelvin[: 24 * 24], np.arange(24 * 24, 31 * 24 - 6), np.arange(24 * 24 - 6)

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
    # Least squares over all grid points of those training pairs that have a state 24 h earlier.
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
    assert final["skill/t2m"] > 0
    assert final["skill/t2m"] == pytest.approx(1 - final["rmse/t2m"] / errors["regression"], abs=2e-3)
