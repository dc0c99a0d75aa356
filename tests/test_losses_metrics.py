"""Losses and validation metrics equal plain numpy computations, in the metrics' physical units."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from dlscale.core.errors import UserError
from dlscale.data.manifest import Manifest
from dlscale.extensions.cosmo_unet.scores import l1
from dlscale.extensions.cosmo_unet.study import STUDY as COSMO_UNET
from dlscale.extensions.era5_vit.era5.kind import PairSamples
from dlscale.extensions.era5_vit.scores import anomaly_correlation, latitude_weights, relative_l2
from dlscale.extensions.era5_vit.study import STUDY as ERA5_VIT
from dlscale.studies.base import Metrics
from dlscale.train.validation import MetricSum
from tests.conftest import make_dataset

CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def f32(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x.astype(np.float32))


# --- losses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0.0, 0.25])
def test_l1_equals_the_formula(weight: float) -> None:
    p, t = 0.2 * random(3, 5, 4, 4, 4), 0.2 * random(3, 5, 4, 4, 4, seed=1)
    density = np.abs(np.exp(14 * p[:, 0]) - np.exp(14 * t[:, 0])).mean(axis=(1, 2, 3))
    expected = np.abs(p - t).mean(axis=(1, 2, 3, 4)) + weight * density
    np.testing.assert_allclose(l1(torch.from_numpy(p), torch.from_numpy(t), weight).numpy(), expected, rtol=1e-12)


def test_without_a_weight_the_exponential_is_not_computed() -> None:
    """Without a weight for the density's error, neither the loss nor its gradient computes the exponential.

    exp(14e4) is infinite, and 0 x infinity would be NaN.
    """
    p, t = torch.full((1, 5, 2, 2, 2), 1e4, requires_grad=True), torch.zeros(1, 5, 2, 2, 2)
    loss = l1(p, t)
    assert loss.item() == pytest.approx(1e4)
    loss.backward()
    assert torch.equal(p.grad, torch.full_like(p, 1 / p.numel()))
    assert not l1(p, t, 0.1).isfinite(), "with a weight, the exponential must be computed"


def test_relative_l2_is_the_flattened_one_bit_by_bit() -> None:
    """The relative L2 loss equals the tutorial's loss, which flattens the tensors, bit by bit.

    For channels-last tensors, values are summed in another order, so the losses differ by rounding.
    """
    p, t = (f32(random(4, 6, 24, 40, seed=seed)) for seed in (0, 1))
    flat, plain, last = (p.clone().requires_grad_() for _ in range(3))
    expected = (flat - t).flatten(1).norm(dim=1) / t.flatten(1).norm(dim=1)
    found, other = relative_l2(plain, t), relative_l2(last.contiguous(memory_format=torch.channels_last), t)
    assert torch.equal(found, expected)
    torch.testing.assert_close(other, expected)
    for loss in (expected, found, other):
        loss.mean().backward()
    assert torch.equal(plain.grad, flat.grad)  # type: ignore[arg-type]
    torch.testing.assert_close(last.grad, flat.grad)


def test_relative_l2_is_each_samples_ratio() -> None:
    p, t = random(4, 3, 6, 8), random(4, 3, 6, 8, seed=1)
    t *= np.array([1, 10, 100, 0.1])[:, None, None, None]
    expected = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(p, t, strict=True)]
    tensors = [torch.from_numpy(value) for value in (p, t)]
    np.testing.assert_allclose(relative_l2(*tensors).numpy(), expected, rtol=1e-12)
    assert relative_l2(tensors[1], tensors[1]).tolist() == [0] * 4
    assert relative_l2(0 * tensors[1], tensors[1]).tolist() == pytest.approx([1] * 4)


# --- parts of metrics -------------------------------------------------------------------------------------------------


def test_latitude_weights_are_cosines_with_mean_one() -> None:
    latitude = np.linspace(90, -90, 37)
    w = latitude_weights(torch.from_numpy(latitude))
    np.testing.assert_allclose(w[:, 0].numpy(), np.cos(np.radians(latitude)) / np.cos(np.radians(latitude)).mean())
    assert (latitude_weights(torch.tensor([90.0, 0.0, -90.0])) >= 0).all(), "rounding must not make a weight negative"
    assert torch.equal(latitude_weights(torch.zeros(4)), torch.ones(4, 1))


def test_anomaly_correlation_equals_the_formula() -> None:
    p, t, c = random(2, 3, 5, 7), random(2, 3, 5, 7, seed=1), random(3, 5, 7, seed=2)
    latitude = np.linspace(80, -40, 5)
    w = np.cos(np.radians(latitude))[:, None]
    expected = np.empty((2, 3))
    for sample, channel in np.ndindex(2, 3):
        a, b = p[sample, channel] - c[channel], t[sample, channel] - c[channel]
        expected[sample, channel] = (w * a * b).sum() / np.sqrt((w * a * a).sum() * (w * b * b).sum())
    p_, t_, c_ = (torch.from_numpy(value) for value in (p, t, c))
    weights = latitude_weights(torch.from_numpy(latitude))
    np.testing.assert_allclose(anomaly_correlation(p_, t_, c_, weights).numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(anomaly_correlation(t_, t_, c_, weights).numpy(), 1, rtol=1e-12)
    np.testing.assert_allclose(anomaly_correlation(2 * c_ - t_, t_, c_, weights).numpy(), -1, rtol=1e-12)


def test_sums_over_batches_are_those_over_all_at_once() -> None:
    values = {"scalar": f32(random(11)), "by_channel": f32(random(11, 3, seed=1))}
    batched, whole = MetricSum(), MetricSum()
    whole.add(values)
    for start in (0, 4, 8):  # batches of 4, 4 and 3 samples
        batched.add({name: value[start : start + 4] for name, value in values.items()})
    for name, value in values.items():
        expected = value.numpy().astype(np.float64).mean(axis=0)
        assert whole.means()[name].dtype == torch.float64
        np.testing.assert_allclose(batched.means()[name].numpy(), expected, rtol=1e-14)
        np.testing.assert_allclose(whole.means()[name].numpy(), expected, rtol=1e-14)


# --- the studies' metrics ---------------------------------------------------------------------------------------


def summary(metrics: Any, x: torch.Tensor, y: torch.Tensor, p: torch.Tensor, batch: int) -> dict[str, float]:
    """Return the metrics as the trainer computes them: batch by batch, with a smaller last batch."""
    total = MetricSum()
    for start in range(0, len(x), batch):
        part = slice(start, start + batch)
        total.add(metrics.per_sample(x[part], y[part], p[part]))
    naive = MetricSum()
    naive.add(metrics.naive(range(len(x))))
    found: dict[str, float] = metrics.summarise(naive.means() | total.means())
    assert sorted(found) == sorted(metric.name for metric in metrics.described), "every metric must be described"
    assert all(metric.naive is None or metric.naive in found for metric in metrics.described)
    return found


def units_of(metrics: Metrics) -> dict[str, str]:
    return {metric.name: metric.unit for metric in metrics.described}


def naive_answers(data: Path, states: np.ndarray, dt: int, w: np.ndarray) -> dict[str, np.ndarray]:
    """Return the predictions of baselines without learning [pairs, C, H, W] for the pairs of a validation file.

    The file begins at midnight and has a state every 6 hours.
    """
    years = []
    for year in (2001, 2002):
        with h5py.File(data / "train" / f"{year}.h5") as file:
            years.append(file["fields"][:].astype(np.float64))
    mean = np.stack([np.concatenate([year[hour::4] for year in years]).mean(axis=0) for hour in range(4)])
    top = bottom = 0.0
    for year in years:
        now = np.array([year[t] - mean[t % 4] for t in range(len(year) - dt)])
        then = np.array([year[t + dt] - mean[(t + dt) % 4] for t in range(len(year) - dt)])
        top, bottom = (total + (w * now * other).sum(axis=(0, 2, 3)) for total, other in ((top, then), (bottom, now)))
    factor = (top / bottom)[:, None, None]
    back = 4 * -(-dt // 4)
    lags = sorted({0, 1, back - dt, back})
    # Coefficients of each channel: least squares over all points of all pairs; each point is a row of the matrix.
    pairs = [(year, t) for year in years for t in range(back, len(year) - dt)]
    root = np.broadcast_to(np.sqrt(w), mean.shape[-2:]).ravel()
    fit = []
    for c in range(mean.shape[1]):
        rows = [np.stack([*(year[t - lag][c].ravel() for lag in lags), np.ones(root.size)]) * root for year, t in pairs]
        wanted = np.concatenate([year[t + dt][c].ravel() * root for year, t in pairs])
        fit.append(np.linalg.lstsq(np.concatenate(rows, axis=1).T, wanted)[0])
    answers: dict[str, list[np.ndarray]] = {}
    for t in range(len(states) - dt):
        x, now, then = states[t], mean[t % 4], mean[(t + dt) % 4]
        change = states[t - back + dt] - states[t - back] if t >= back else 0
        for name, answer in {
            "persistence": x,
            "climatology": then,
            "diurnal": x + then - now,
            "damped": then + factor * (x - now),
            "yesterday": x + change,
            "regression": np.stack(
                [
                    f[-1] + sum(b * states[t - lag][c] for b, lag in zip(f, lags, strict=False))
                    for c, f in enumerate(fit)
                ]
            )
            if t >= back
            else then + factor * (x - now),
        }.items():
            answers.setdefault(name, []).append(answer)
    return {name: np.stack(each) for name, each in answers.items()}


@pytest.mark.parametrize("dt", [1, 3, 6])
def test_era5_metrics_are_plain_numpy_in_physical_units(era5_data: Path, dt: int) -> None:
    manifest = Manifest.read(era5_data / "manifest.json")
    run = SimpleNamespace(samples=PairSamples(kind="pairs", dt=dt))
    info = manifest.fields["fields"]
    with h5py.File(era5_data / "valid" / "2003.h5") as file:
        fields = file["fields"][:].astype(np.float64)
    mean, std = (
        np.load(era5_data / "stats" / f"global_{name}.npy")[0].astype(np.float64) for name in ("means", "stds")
    )
    climatology = np.load(era5_data / "stats" / "time_means.npy")[0].astype(np.float64)
    x, y = fields[:-dt], fields[dt:]
    # Make the errors differ between samples.
    p = y + std * 0.3 * random(*y.shape) * np.linspace(0.5, 2, len(y))[:, None, None, None]
    w = np.cos(np.radians(manifest.extra["latitude"]))
    w = (w / w.mean())[:, None]

    normal = [f32((value - mean) / std) for value in (x, y, p)]
    metrics = ERA5_VIT.metrics(run, manifest, CPU)
    found = summary(metrics, *normal, batch=4)
    answers = naive_answers(era5_data, fields, dt, w)
    for c, name in enumerate(info.channels):
        rmse = np.sqrt((w * (p - y)[:, c] ** 2).mean())
        naive = {key: np.sqrt((w * (answer - y)[:, c] ** 2).mean()) for key, answer in answers.items()}
        assert found[f"rmse/{name}"] == pytest.approx(rmse, rel=1e-4)
        for key, error in naive.items():
            assert found[f"{key}_rmse/{name}"] == pytest.approx(error, rel=1e-4), key
        assert found[f"naive_rmse/{name}"] == pytest.approx(min(naive.values()), rel=1e-4)
        assert found[f"skill/{name}"] == pytest.approx(1 - rmse / min(naive.values()), abs=1e-4)
        roots = np.sqrt((w * ((p - y)[:, c] / std[c]) ** 2).mean(axis=(1, 2)))
        assert found[f"rmse_normalised/{name}"] == pytest.approx(roots.mean(), rel=1e-4)
        assert abs(found[f"rmse_normalised/{name}"] - rmse / std[c].item()) > 1e-3, (
            "the test data must distinguish the root of a mean from a mean of roots"
        )
        a, b = (value[:, c] - climatology[c] for value in (p, y))
        cross, aa, bb = ((w * one * two).sum(axis=(1, 2)) for one, two in ((a, b), (a, a), (b, b)))
        assert found[f"acc/{name}"] == pytest.approx((cross / np.sqrt(aa * bb)).mean(), rel=1e-3)
        assert units_of(metrics)[f"rmse/{name}"] == units_of(metrics)[f"damped_rmse/{name}"] == info.units[c]

    perfect = summary(ERA5_VIT.metrics(run, manifest, CPU), normal[0], normal[1], normal[1], batch=4)
    for name in info.channels:
        assert perfect[f"acc/{name}"] == pytest.approx(1, abs=1e-6)
        assert (perfect[f"rmse/{name}"], perfect[f"skill/{name}"]) == (0, 1)


def test_baselines_without_data_are_left_out(era5_data: Path) -> None:
    """A baseline without learning is left out if its data are missing.

    Without times of day, the climatology is the mean of all times.
    """
    manifest = Manifest.read(era5_data / "manifest.json")
    run = SimpleNamespace(samples=PairSamples(kind="pairs"))
    every = ["persistence", "climatology", "diurnal", "damped", "yesterday", "regression"]
    for missing, left in (
        ({}, every),
        ({"hour_means": None}, ["persistence", "climatology", "damped", "yesterday", "regression"]),
        ({"hour_means": None, "climatology": None}, ["persistence", "yesterday", "regression"]),
        ({"step_hours": 5.0, "hour_means": None}, ["persistence", "climatology", "damped"]),
        ({"step_hours": 5.0, "hour_means": None, "climatology": None}, ["persistence"]),
    ):
        metrics = ERA5_VIT.metrics(run, manifest.model_copy(update={"extra": manifest.extra | missing}), CPU)
        assert list(metrics.called) == left
        assert {name: values.shape for name, values in metrics.naive(range(3, 5)).items()} == {
            f"{name}_square": (2, len(manifest.fields["fields"].channels)) for name in left
        }


@pytest.mark.parametrize(("name", "field"), [("era5", "fields"), ("cosmo", "Nbody"), ("cosmo", "Hydro")])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_fit_names_the_value_that_is_not_finite(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, field: str, value: float
) -> None:
    """Data that were damaged after preparation end in one message, not in an error of linear algebra."""
    shutil.copytree(request.getfixturevalue(f"{name}_data"), tmp_path / "data")
    manifest = Manifest.read(tmp_path / "data" / "manifest.json")
    path = manifest.path(manifest.files("train")[0])
    with h5py.File(path, "r+") as file:
        file[field][(9, 1) if name == "era5" else (1, 9)] = value
    channel = manifest.fields[field].channels[1]
    with pytest.raises(UserError) as caught:
        if name == "era5":
            ERA5_VIT.metrics(SimpleNamespace(samples=PairSamples(kind="pairs")), manifest, CPU).naive(range(4, 5))
        else:
            COSMO_UNET.metrics(None, manifest, CPU)
    assert str(caught.value).startswith(f"{path}: {field}: channel '{channel}' is not finite at row 9 ")
    assert "correct these values" in str(caught.value)


def test_yesterday_may_lie_in_the_file_before(era5_data: Path, tmp_path: Path) -> None:
    """`yesterday` also finds states in the previous file: the day before the first validation pair is training data."""
    channels = Manifest.read(era5_data / "manifest.json").fields["fields"].channels[:1]
    settings = {
        "kind": "era5",
        "source": {"kind": "files", "paths": [str(era5_data / "source" / "2001.nc")]},
        "channels": channels,
        "split": {"train": ["2001-01-01", "2001-01-03"], "valid": ["2001-01-04", "2001-01-05"]},
    }
    manifest = Manifest.read(make_dataset(tmp_path / "data", settings) / "manifest.json")
    with h5py.File(era5_data / "source" / "2001.nc") as file:
        states = file[channels[0]][()].astype(np.float64)
    w = np.cos(np.radians(manifest.extra["latitude"]))
    w = (w / w.mean())[:, None]
    run = SimpleNamespace(samples=PairSamples(kind="pairs"))
    errors = ERA5_VIT.metrics(run, manifest, CPU).naive(range(7))["yesterday_square"]
    issued = np.arange(12, 19)
    wrong = states[issued] + states[issued - 3] - states[issued - 4] - states[issued + 1]
    expected = (w * wrong**2).mean(axis=(1, 2)) / manifest.fields["fields"].std[0] ** 2
    np.testing.assert_allclose(errors[:, 0].numpy(), expected, rtol=1e-4)
    means = np.load(tmp_path / "data" / manifest.extra["hour_means"])
    np.testing.assert_allclose(means[:, 0], states[:12].reshape(3, 4, *states.shape[1:]).mean(axis=0), rtol=1e-5)


def physical(y: np.ndarray) -> np.ndarray:
    """Undo the transforms of the tutorial's data by hand.

    Densities are exp(14 x), velocities are 1000 x, and the temperature is 10^(5 + 3 x).
    """
    return np.stack([np.exp(14 * y[:, 0]), *(1000 * y[:, c] for c in (1, 2, 3)), 10 ** (5 + 3 * y[:, 4])], axis=1)


def test_cosmo_metrics_are_plain_numpy_in_physical_units(cosmo_data: Path) -> None:
    manifest = Manifest.read(cosmo_data / "manifest.json")
    boxes, inputs = {}, {}
    for split in ("train", "valid"):
        for file in manifest.files(split):
            with h5py.File(manifest.path(file)) as opened:
                boxes[split, file.path] = opened["Hydro"][:].astype(np.float64)
                inputs[split, file.path] = opened["Nbody"][:].astype(np.float64)
    train_mean = np.stack([box for (split, _), box in boxes.items() if split == "train"]).mean(axis=(0, 2, 3, 4))
    valid = next(box for (split, _), box in boxes.items() if split == "valid")
    y = np.stack([valid[:, 4 * i : 4 * i + 16, :16, :16] for i in range(5)])  # 5 samples in batches of 2, 2 and 1
    p = y + 0.02 * random(*y.shape) * np.arange(1, 6)[:, None, None, None, None]

    # Least squares over all cells of the training boxes at once. The data stage adds up sums of blocks.
    points = [key for key in boxes if key[0] == "train"]
    terms = np.concatenate([inputs[key].reshape(4, -1) for key in points], axis=1).T
    answers = np.concatenate([boxes[key].reshape(5, -1) for key in points], axis=1).T
    *slope, offset = np.linalg.lstsq(np.column_stack([terms, np.ones(len(terms))]), answers)[0]
    dark = next(box for (split, _), box in inputs.items() if split == "valid")
    x = np.stack([dark[:, 4 * i : 4 * i + 16, :16, :16] for i in range(5)])
    line = np.einsum("co,bcdhw->bodhw", np.array(slope), x) + offset.reshape(1, 5, 1, 1, 1)

    metrics = COSMO_UNET.metrics(None, manifest, CPU)
    found = summary(metrics, f32(x), f32(y), f32(p), batch=2)
    of_mean = np.abs(train_mean.reshape(1, 5, 1, 1, 1) - y).mean()
    assert found["l1"] == pytest.approx(np.abs(p - y).mean(), rel=1e-5)
    assert found["l1_of_mean"] == pytest.approx(of_mean, rel=1e-4)
    of_line = np.abs(line - y).mean()
    assert found["l1_of_line"] == pytest.approx(of_line, rel=1e-3) and of_line < of_mean
    assert found["naive_l1"] == min(found["l1_of_line"], found["l1_of_mean"])
    assert found["skill"] == pytest.approx(1 - np.abs(p - y).mean() / of_line, abs=1e-3)
    expected = np.abs(physical(p) - physical(y)).mean(axis=(0, 2, 3, 4))
    naive, of_the_line = (
        np.abs(physical(answer) - physical(y)).mean(axis=(0, 2, 3, 4))
        for answer in (train_mean.reshape(1, 5, 1, 1, 1), line)
    )
    names = ["gas_density", "gas_velocity_x", "gas_velocity_y", "gas_velocity_z", "gas_temperature"]
    units = ["mean density", "km/s", "km/s", "km/s", "K"]
    for name, unit, value, of_the_mean, of_it in zip(names, units, expected, naive, of_the_line, strict=True):
        assert found[f"mae/{name}"] == pytest.approx(value, rel=1e-4)
        assert found[f"mae_of_mean/{name}"] == pytest.approx(of_the_mean, rel=1e-3)
        assert found[f"mae_of_line/{name}"] == pytest.approx(of_it, rel=1e-3)
        assert found[f"naive_mae/{name}"] == pytest.approx(min(of_the_mean, of_it), rel=1e-3)
        assert units_of(metrics)[f"mae/{name}"] == units_of(metrics)[f"mae_of_mean/{name}"] == unit
