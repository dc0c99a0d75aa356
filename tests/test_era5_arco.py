"""SC23's 20 channels from a store with ARCO-ERA5's layout: names, units, order, hours and chunks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec.config
import h5py
import numpy as np
import pytest
import xarray as xr

from dlscale.core.settings import read_yaml
from dlscale.data.manifest import Manifest
from dlscale.extensions.era5_vit.era5 import kind, zarr
from dlscale.extensions.era5_vit.era5.describe import CHANNELS
from dlscale.extensions.era5_vit.era5.kind import Era5Dataset
from dlscale.extensions.era5_vit.era5.source import relative_humidity, saturation_pressure
from dlscale.extensions.mnist_cnn.mnist.kind import MnistDataset
from tests.conftest import ROOT, make_dataset

pytestmark = pytest.mark.filterwarnings("ignore:Consolidated metadata")

LEVELS = (50, 500, 700, 850, 1000)  # the levels that the channels need, and one more level
#: Name in the store, units, mean and spread of each surface channel, by channel.
SURFACE = {
    "u10": ("10m_u_component_of_wind", "m s**-1", 0.0, 5.0),
    "v10": ("10m_v_component_of_wind", "m s**-1", 0.0, 5.0),
    "t2m": ("2m_temperature", "K", 280.0, 15.0),
    "sp": ("surface_pressure", "Pa", 97000.0, 500.0),
    "msl": ("mean_sea_level_pressure", "Pa", 101300.0, 500.0),
    "tcwv": ("total_column_water_vapour", "kg m**-2", 20.0, 3.0),
}
LEVELLED = {
    "t": ("temperature", "K", 255.0, 10.0),
    "u": ("u_component_of_wind", "m s**-1", 5.0, 10.0),
    "v": ("v_component_of_wind", "m s**-1", 0.0, 10.0),
    "z": ("geopotential", "m**2 s**-2", 50000.0, 800.0),
    "q": ("specific_humidity", "kg kg**-1", 2e-3, 3e-4),
}
ROWS, COLUMNS = 19, 36  # as with 721 x 1440 points, rows include both poles and columns surround the globe


def shipped() -> dict[str, Any]:
    """Return the settings of the shipped dataset `era5_arco`."""
    return read_yaml(ROOT / "workflow_scripts/dlscale/extensions/era5_vit/study.yaml")["datasets"]["era5_arco"]


def arco(hours: int = 48, first: str = "2019-12-31") -> xr.Dataset:
    """Return random hourly states, with latitudes from north to south and longitudes from 0."""
    rng, variables = np.random.default_rng(0), {}
    for group, levels in ((SURFACE, ()), (LEVELLED, LEVELS)):
        for name, units, mean, spread in group.values():
            shape = (hours, *((len(levels),) if levels else ()), ROWS, COLUMNS)
            values = (mean + spread * rng.standard_normal(shape)).astype(np.float32)
            dims = ("time", *(("level",) if levels else ()), "latitude", "longitude")
            variables[name] = (dims, values, {"units": units, "long_name": name.replace("_", " ")})
    axes = {
        "time": np.datetime64(first, "ns") + np.arange(hours) * np.timedelta64(1, "h"),
        "level": np.array(LEVELS, np.int64),
        "latitude": np.linspace(90, -90, ROWS, dtype=np.float32),
        "longitude": np.arange(0, 360, 360 / COLUMNS, dtype=np.float32),
    }
    return xr.Dataset(variables, axes)


def write(states: xr.Dataset, store: Path) -> None:
    chunks = {str(name): {"chunks": (1, *values.shape[1:])} for name, values in states.data_vars.items()}
    states.to_zarr(store, encoding=chunks, consolidated=True)


def small(store: Path) -> dict[str, Any]:
    """Return the settings of the shipped dataset, on a store of three days."""
    days = {"train": ["2019-12-31", "2020-01-01"], "valid": ["2020-01-02", "2020-01-02"]}
    return shipped() | {"source": {"kind": "zarr", "store": str(store)}, "split": days, "crop": [ROWS - 1, COLUMNS]}


def humidity(t: float, q: float, p: float) -> float:
    """Return the relative humidity in %, number by number, by the formula in the IFS documentation."""
    share = min(max((t - 250.16) / (273.16 - 250.16), 0.0), 1.0) ** 2
    over_water = 611.21 * math.exp(17.502 * (t - 273.16) / (t - 32.19))
    over_ice = 611.21 * math.exp(22.587 * (t - 273.16) / (t + 0.7))
    ratio = 461.5250 / 287.0597
    vapour = p * q * ratio / (1 + q * (ratio - 1))
    return 100 * vapour / (share * over_water + (1 - share) * over_ice)


def expected(states: xr.Dataset, channel: str, time: int) -> np.ndarray:
    """Return a channel at one time without the south pole, averaged over blocks of 2 x 2 by plain loops."""
    name, _, level = channel.partition("@")
    if name == "r":
        t, q = (states[LEVELLED[of][0]].sel(level=int(level)).values[time] for of in "tq")
        full = np.array(
            [
                [humidity(t[row, column], q[row, column], 100.0 * int(level)) for column in range(COLUMNS)]
                for row in range(ROWS)
            ]
        )
    elif level:
        full = states[LEVELLED[name][0]].sel(level=int(level)).values[time].astype(np.float64)
    else:
        full = states[SURFACE[name][0]].values[time].astype(np.float64)
    return np.array(
        [[full[2 * r : 2 * r + 2, 2 * c : 2 * c + 2].mean() for c in range(COLUMNS // 2)] for r in range(ROWS // 2)]
    )


def test_the_shipped_dataset_is_the_published_one() -> None:
    dataset = Era5Dataset.model_validate(shipped())
    assert dataset.channels == list(CHANNELS), "the channels must have the published order"
    assert kind.KIND.grid(dataset) == (360, 720)
    assert dataset.step_hours == 6
    assert [(part.split, int(part.name)) for part in kind.KIND.parts(dataset)] == [
        *(("train", year) for year in range(1979, 2016)),
        *(("valid", year) for year in (2016, 2017)),
        ("test", 2018),
    ]
    files = [raw.name for part in kind.KIND.parts(dataset) for raw in part.raws]
    assert len(set(files)) == len(files) == 40, "each year must have its own file"


@pytest.mark.slow
def test_the_channels_are_those_of_the_store(tmp_path: Path) -> None:
    states = arco(hours=72)
    write(states, tmp_path / "store")
    folder = make_dataset(tmp_path / "data", small(tmp_path / "store"))
    info = Manifest.read(folder / "manifest.json").fields["fields"]
    assert (info.channels, info.units) == (list(CHANNELS), list(CHANNELS.values()))
    assert info.grid == [ROWS // 2, COLUMNS // 2]
    for split, name, start, times in (("train", 2019, 0, 4), ("train", 2020, 24, 4), ("valid", 2020, 48, 4)):
        with h5py.File(folder / split / f"{name}.h5") as file:
            found = file["fields"][...]
            np.testing.assert_allclose(file["latitude"][...], 85.0 - 20.0 * np.arange(ROWS // 2))
        assert found.shape == (times, 20, ROWS // 2, COLUMNS // 2)
        for row in range(times):
            for position, channel in enumerate(CHANNELS):
                truth = expected(states, channel, start + 6 * row)
                np.testing.assert_allclose(found[row, position], truth, rtol=2e-6, atol=2e-5, err_msg=channel)


def test_only_changes_of_the_stored_part_fetch_raw_files_again() -> None:
    """Another crop or downsampling fetches raw files again, because they contain only cropped and averaged states.

    Other days of another split do not fetch raw files again.
    """

    def fetched(**changes: Any) -> dict[str, Any]:
        dataset = Era5Dataset.model_validate(shipped() | changes)
        return kind.KIND.raw_settings(dataset, kind.KIND.parts(dataset)[0].raws[0])

    assert fetched() not in (fetched(crop=[640, 1440]), fetched(downsample=4))
    assert fetched() == fetched(split=shipped()["split"] | {"test": None})


def test_relative_humidity_is_that_of_the_ifs() -> None:
    """Relative humidity and saturation pressure follow the IFS documentation.

    Saturation pressures (Pa) agree with the WMO's tables within 0.5 %: over water at 20 °C, over ice at -40 °C.
    """
    for t, pressure, within in ((273.16, 611.21, 1e-6), (293.15, 2338.8, 5e-3), (233.15, 12.84, 5e-3)):
        assert saturation_pressure(np.array(t)) == pytest.approx(pressure, rel=within)
    assert (np.diff(saturation_pressure(np.linspace(200, 310, 111))) > 0).all()
    for t in (200.0, 250.16, 262.0, 273.16, 300.0):
        for q in (-1e-6, 0.0, 1e-5, 2e-2):
            found = relative_humidity(np.array(t), np.array(q), 85000.0)
            assert found == pytest.approx(humidity(t, q, 85000.0), rel=1e-12)


def test_the_digests_of_the_shipped_digits_are_those_of_the_files(shared: Callable[[str], Path]) -> None:
    """For the two files that are available locally, the shipped digests match, without a download."""
    source = read_yaml(ROOT / "workflow_scripts/dlscale/extensions/mnist_cnn/study.yaml")["datasets"]["mnist_web"][
        "source"
    ]
    # each file must have a digest, and no other file may have one
    MnistDataset.model_validate({"kind": "mnist", "source": source})
    assert len(source["sha256"]) == 4
    for name in ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"):
        assert hashlib.sha256(shared(f"data/mnist/{name}").read_bytes()).hexdigest() == source["sha256"][name]


@pytest.mark.parametrize(
    ("own", "anonymous"),
    [({}, True), ({"endpoint_url": "https://x"}, True), ({"key": "a", "secret": "b"}, False), ({"anon": False}, False)],
)
def test_an_account_of_fsspecs_configuration_is_used(
    own: dict[str, Any], anonymous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`anon` is added only without an account: with `anon`, s3fs would ignore key and secret."""
    monkeypatch.setitem(fsspec.config.conf, "s3", own)
    given = zarr._storage_options("s3://bucket/store.zarr")
    assert given.pop("anon", False) == anonymous
    assert given == {key: value for key, value in own.items() if key != "anon"}
