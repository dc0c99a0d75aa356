"""Files exactly as the tutorials distribute them: two studies train on these files without conversion."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from dlscale.core.errors import UserError
from dlscale.data.manifest import Manifest
from dlscale.extensions.cosmo_unet.cosmo.kind import CropSamples
from dlscale.extensions.cosmo_unet.cosmo.samples import Crops
from dlscale.extensions.era5_vit.era5.describe import describe_prepared
from dlscale.extensions.era5_vit.era5.extra import Extra
from dlscale.extensions.era5_vit.era5.kind import Era5Dataset, PairSamples
from dlscale.extensions.era5_vit.era5.samples import Pairs
from tests.conftest import COSMO_RUN, ERA5_RUN, make_dataset, make_parts, make_run, records, stage, train
from tests.raw_files import CHANNELS_OF, cosmo, era5, published, volume, write_volume, write_years

TRAIN, VALID = "downsamp_2048crop_train.h5", "downsamp_1024crop_valid.h5"
CHANNELS, HEIGHT, WIDTH = 20, 8, 16
TIMES = {"train": {2001: 12, 2004: 14}, "valid": {2003: 9}}


def fit(folder: Path, study: str, run: dict[str, Any], dataset: dict[str, Any], data: Path) -> list[dict[str, Any]]:
    """Train a run, then measure its throughput; return the records of its epochs."""
    config = make_run(folder, study, run, dataset)
    assert train(folder, data / "manifest.json", "--device", "cpu") == 0
    out = folder / "throughput.json"
    arguments = ["--config", config, "--manifest", data / "manifest.json", "--device", "cpu", "--threads", 1]
    assert stage("throughput", *arguments, "--out", out) == 0
    assert set(json.loads(out.read_text())) >= {"IO", "SYNTHETIC", "FULL"}
    return records(folder)


# ---- cosmo_unet ------------------------------------------------------------------------------------------


def smooth(edge: int, seed: int) -> dict[str, np.ndarray]:
    """Return a volume's fields in the tutorial's layout; the gas follows the dark matter."""
    fields = published(volume((edge, edge, edge), seed))
    for name in fields:
        for axis in (1, 2, 3):
            fields[name] = (fields[name] + np.roll(fields[name], 1, axis) + np.roll(fields[name], 2, axis)) / 3
    fields["Hydro"][:4] = np.tanh(1.5 * fields["Nbody"]) + 0.1
    return fields


@pytest.mark.slow
def test_the_published_volumes_train_the_unet(tmp_path: Path) -> None:
    """Training and validation volumes have different sizes; they are contiguous float32 without attributes."""
    fields = [smooth(32, 0), smooth(16, 1)]
    paths = [write_volume(tmp_path / "raw" / n, values) for n, values in zip((TRAIN, VALID), fields, strict=True)]
    before = [path.read_bytes() for path in paths]
    settings = cosmo(paths[:1], paths[1:], "prepared")
    data = make_dataset(tmp_path / "data", settings)
    manifest = Manifest.read(data / "manifest.json")
    assert {split: [manifest.path(file) for file in files] for split, files in manifest.splits.items()} == {
        "train": paths[:1],
        "valid": paths[1:],
        "test": [],
    }
    assert not list(data.rglob("*.h5"))  # the data must not be copied
    for name, channels in CHANNELS_OF.items():
        info = manifest.fields[name]
        values = fields[0][name].astype(np.float64)
        assert (info.channels, info.stored) == (channels, "model")
        np.testing.assert_allclose(info.mean, values.mean(axis=(1, 2, 3)), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(info.std, values.std(axis=(1, 2, 3)), rtol=1e-9)
        np.testing.assert_allclose(np.load(data / "stats" / f"{name}_stds.npy").ravel(), info.std, rtol=1e-6)

    # The model gets the stored values, because the tutorial's files are already transformed.
    crops = Crops(manifest, "valid", CropSamples(kind="crops", crop=8, valid=8, train=1), seed=0)
    for index in range(crops.size):
        z, y, x = crops.boxes(0).input[index]
        for name, cut in zip(("Nbody", "Hydro"), crops.read(0, index), strict=True):
            np.testing.assert_array_equal(cut, fields[1][name][:, z : z + 8, y : y + 8, x : x + 8])

    run = {**COSMO_RUN, "samples": {"crop": 16, "train": 18, "valid": 8}, "training": {"epochs": 3}}
    history = fit(tmp_path / "run", "cosmo_unet", run, settings, data)
    assert history[-1]["samples"] == 3 * 18
    assert history[-1]["train_loss"] < 0.97 * history[0]["train_loss"]
    assert [path.read_bytes() for path in paths] == before


# ---- era5_vit --------------------------------------------------------------------------------------------


@pytest.fixture
def years(tmp_path: Path) -> Path:
    """Return a folder in the tutorial's layout: years of 6-hourly fields, with the unused south-pole row."""
    root = write_years(tmp_path / "raw", TIMES, CHANNELS, (HEIGHT + 1, WIDTH))
    climatology = root / "stats" / "time_means.npy"
    np.save(climatology, np.load(climatology)[:, :, :HEIGHT])
    return root


@pytest.mark.slow
def test_the_published_years_train_the_vit(tmp_path: Path, years: Path) -> None:
    settings = era5(years, crop=[HEIGHT, WIDTH])
    data = make_dataset(tmp_path / "data", settings)
    manifest = Manifest.read(data / "manifest.json")
    info, extra = manifest.fields["fields"], Extra.of(manifest)
    assert info.grid == [HEIGHT, WIDTH] and len(info.channels) == CHANNELS
    named = dict(zip(info.channels, info.units, strict=True))  # names follow from the order of the channels
    assert list(named)[:5] == ["u10", "v10", "t2m", "sp", "msl"] and list(named)[-1] == "tcwv"
    assert (named["u10"], named["t2m"], named["r@850"]) == ("m s**-1", "K", "%")
    assert [[file.rows for file in files] for files in manifest.splits.values()] == [[12, 14], [9], []]
    assert extra.step_hours == 6.0
    assert manifest.path(extra.climatology or "") == years / "stats" / "time_means.npy"
    # Coordinates begin at the north pole, in the grid steps of the tutorial's data.
    np.testing.assert_allclose(extra.latitude, 90 - 360 / WIDTH * np.arange(HEIGHT))
    np.testing.assert_allclose(extra.longitude, 360 / WIDTH * np.arange(WIDTH))
    assert not list(data.rglob("*.h5"))

    history = fit(tmp_path / "run", "era5_vit", {**ERA5_RUN, "optimizer": {"lr": 3e-3}}, settings, data)
    assert history[-1]["samples"] == 2 * (11 + 13)
    assert history[-1]["train_loss"] < 0.97 * history[0]["train_loss"]
    assert {"rmse_normalised/u10", "rmse/t2m", "acc/tcwv"} <= set(history[-1]["metrics"])


@pytest.mark.slow
def test_fields_are_standardised_with_the_published_statistics(tmp_path: Path, years: Path) -> None:
    """Fields are (x - mean) / std with the values of the statistics files; only the southernmost row is left out."""
    means, stds = np.linspace(-3, 50, CHANNELS), np.geomspace(0.1, 1e5, CHANNELS)
    for name, values in (("means", means), ("stds", stds)):
        np.save(years / "stats" / f"global_{name}.npy", values.reshape(1, -1, 1, 1).astype(np.float32))
    manifest = Manifest.read(make_dataset(tmp_path / "data", era5(years, crop=[HEIGHT, WIDTH])) / "manifest.json")
    for split in ("train", "valid"):
        pairs = Pairs(manifest, split, PairSamples(kind="pairs", dt=2), seed=0)
        for index in range(pairs.size):
            number, row = int(pairs.boxes(0).file[index]), int(pairs.boxes(0).input[index, 0])
            with h5py.File(manifest.path(manifest.files(split)[number])) as file:
                raw = file["fields"][[row, row + 2]].astype(np.float64)
            expected = (raw[:, :, :HEIGHT] - means[:, None, None]) / stds[:, None, None]
            for found, wanted in zip(pairs.read(0, index), expected, strict=True):
                assert found.shape == (CHANNELS, HEIGHT, WIDTH) and found.dtype == np.float32
                np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_channels_are_named_in_order(tmp_path: Path, years: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names = ["u10", "v10", "t2m", *(f"z@{level}" for level in range(17))]
    data = make_dataset(tmp_path / "data", era5(years, channels=names, crop=[HEIGHT - 2, WIDTH - 1]))
    info = Manifest.read(data / "manifest.json").fields["fields"]
    assert info.channels == names and info.grid == [HEIGHT - 2, WIDTH - 1]
    assert info.units[:4] == ["m s**-1", "m s**-1", "K", "unknown"], "the unit of z@0 must be unknown"
    other = make_parts(tmp_path / "other", era5(years, channels=names[:3]))
    manifest = ["--manifest", tmp_path / "other" / "manifest.json", "--stats", tmp_path / "other" / "stats"]
    assert stage("describe", "--config", tmp_path / "other" / "config.yaml", "--source", *other, *manifest) == 2
    assert "files contain 20 channels of 9 x 16 points, but there are 3 channel names" in capfd.readouterr().err


SIX = 6.0 * np.arange(TIMES["valid"][2003])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("times", "message"),
    [
        (SIX / 6, r"9 times.* 6.* h.* steps of \[1\.\] h.*`step_hours`"),
        (SIX + 720 * (SIX > 24), r"steps of \[  6\. 726\.\] h\. .* gap"),
        (SIX[::-1], r"steps of \[-6\.\] h"),
        (np.where(SIX == 12, np.nan, SIX), r"steps of \[ 6\. nan\] h"),
        (SIX[:-1], "expected 9 times, .*got 8"),
        (np.array([b"2003-01-01"] * SIX.size), "time: expected numbers"),
        (SIX, None),
        (SIX.astype(np.int32), None),
    ],
    ids=["hourly", "gap", "backwards", "nan", "short", "text", "even", "integers"],
)
def test_files_with_other_time_steps_are_refused(tmp_path: Path, times: np.ndarray, message: str | None) -> None:
    """Files with other time steps are refused, because lead times, clocks and hourly means would be wrong."""
    raw = write_years(tmp_path / "raw", TIMES, 3)
    path = raw / "valid" / "2003.h5"
    with h5py.File(path, "a") as file:
        file["time"] = times if times.dtype.kind == "S" else 290_000 + times
    dataset = Era5Dataset.model_validate(era5(raw))
    told = pytest.raises(UserError, match=message) if message else contextlib.nullcontext()
    with told as caught:
        manifest = describe_prepared(dataset, [], tmp_path)
    if message:
        assert str(caught.value).startswith(f"{path}: time: ")
    else:
        assert Extra.of(manifest).starts[manifest.files("valid")[0].digest] == 290_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("units", "is_read"),
    [("hours since 1970-01-01 00:00:00", True), (b"hours", True), ("hours since 1900-01-01", False), ("days", False)],
)
def test_times_in_other_units_are_refused(tmp_path: Path, units: str | bytes, is_read: bool) -> None:
    """Times since 1900, as in ERA5's NetCDF files, would shift the clock by 70 years."""
    raw = write_years(tmp_path / "raw", TIMES, 3)
    with h5py.File(raw / "valid" / "2003.h5", "a") as file:
        file["time"] = 290_000 + SIX
        file["time"].attrs["units"] = units
    refused = pytest.raises(UserError, match=f"2003.h5: time: the unit is '{units!s}'; expected 'hours since 1970")
    with contextlib.nullcontext() if is_read else refused:
        describe_prepared(Era5Dataset.model_validate(era5(raw)), [], tmp_path)


@pytest.mark.slow
def test_a_preprocessed_folder_is_read_as_prepared_data(tmp_path: Path, era5_data: Path) -> None:
    """A folder that dlscale wrote is also valid as `prepared` data: names, units and, up to rounding, samples agree."""
    again = make_dataset(tmp_path / "again", era5(era5_data))
    ours, theirs = (Manifest.read(folder / "manifest.json") for folder in (era5_data, again))
    assert [theirs.path(file) for file in theirs.files("train")] == [
        (era5_data / "train" / f"{year}.h5").resolve() for year in (2001, 2002)
    ]
    a, b = ours.fields["fields"], theirs.fields["fields"]
    assert (a.channels, a.units, a.grid, a.stored) == (b.channels, b.units, b.grid, b.stored)
    mine, other = Extra.of(ours), Extra.of(theirs)
    np.testing.assert_allclose(other.latitude, mine.latitude)
    np.testing.assert_allclose(other.longitude, mine.longitude)
    assert other.step_hours == mine.step_hours
    for key in ("offset", "scale"):
        numbers = [[getattr(t, key) for t in info.transforms] for info in (a, b)]
        np.testing.assert_allclose(numbers[1], numbers[0], rtol=1e-6)  # the .npy files contain float32
    one, two = (Pairs(m, "train", PairSamples(kind="pairs"), seed=4) for m in (ours, theirs))
    for index in range(one.size):
        for x, y in zip(one.read(1, index), two.read(1, index), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(*[np.load(m.path(Extra.of(m).climatology or "")) for m in (ours, theirs)])
