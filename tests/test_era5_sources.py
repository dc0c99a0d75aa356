"""Readers of atmospheric files: every format compared with plain xarray, and each mistake with its message."""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import functools
import http.server
import importlib.util
import json
import math
import os
import re
import shutil
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import h5netcdf
import h5py
import numpy as np
import pytest
import xarray as xr
import zarr

from dlscale.core import urls
from dlscale.core.errors import UserError
from dlscale.data.kind import Part, RawFile
from dlscale.data.manifest import IDENTITY
from dlscale.extensions.era5_vit.era5 import source as era5_source
from dlscale.extensions.era5_vit.era5 import zarr as era5_zarr
from dlscale.extensions.era5_vit.era5.kind import Era5Dataset
from dlscale.extensions.era5_vit.era5.source import Era5Source, _regular, gridded, open_source, open_variables
from dlscale.extensions.era5_vit.era5.zarr import acquire
from tests.conftest import served

REAL = Path(__file__).resolve().parents[2] / "shared" / "data" / "era5"
GRIB = REAL / "era5-2mt-2019-03-uk.grib"
FORMATS = ("netcdf4", "packed", "netcdf3", "grib")
SHORT_NAMES = {"t2m": "2t", "u10": "10u", "z": "z", "t": "t"}
UNITS = {"t2m": "K", "u10": "m s**-1", "z": "m**2 s**-2", "t": "K"}
LEVELS = (850, 500, 200)
HOURS = {"units": "hours since 2020-01-01"}

# These warnings come from the tests' own plain reads.
pytestmark = pytest.mark.filterwarnings(
    "ignore::xarray.SerializationWarning",
    "ignore:Consolidated metadata",
    "ignore:Failed to open Zarr store with consolidated",
    "ignore:invalid value encountered in cast",
    "ignore:Cannot close a netcdf_file opened with mmap",
)


# ------------------------------------------------------------------------------------------------- making input


def atmosphere(
    start: str = "2020-02-27",
    hours: int = 96,
    step: int = 6,
    names: tuple[str, ...] = ("t2m", "u10", "z", "t"),
    height: int = 9,
    width: int = 12,
    seed: int = 0,
) -> xr.Dataset:
    """Return random states [time, (level,) latitude, longitude], north to south; z and t have the levels LEVELS."""
    times = np.datetime64(start, "ns") + np.arange(0, hours, step) * np.timedelta64(1, "h")
    latitude, longitude = 60.0 - min(2.5, 150 / height) * np.arange(height), 2.5 * np.arange(width)
    rng, variables = np.random.default_rng(seed), {}
    for name in names:
        levels = LEVELS if name in ("z", "t") else ()
        shape = (times.size, *((len(levels),) if levels else ()), height, width)
        values = (280 + 10 * rng.standard_normal(shape)).astype(np.float32)
        dims = ("time", *(("level",) if levels else ()), "latitude", "longitude")
        variables[name] = (dims, values, {"units": UNITS[name], "long_name": f"the {name}"})
    axes = {"time": times, "latitude": latitude, "longitude": longitude}
    if {"z", "t"} & set(names):
        axes["level"] = np.array(LEVELS, np.int32)
    return xr.Dataset(variables, axes)


def write(states: xr.Dataset, path: Path, form: str, chunk: int = 4) -> Path:
    """Write a file in one of FORMATS, or a Zarr store; chunked formats get `chunk` times per chunk. Return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    chunks = {
        str(n): tuple(min(chunk, v.sizes[d]) if d == "time" else v.sizes[d] for d in v.dims) for n, v in states.items()
    }
    if form == "grib":
        write_grib(states, path)
    elif form == "zarr":
        states.to_zarr(path, encoding={name: {"chunks": sizes} for name, sizes in chunks.items()}, consolidated=False)
    elif form == "netcdf3":
        states.to_netcdf(path, engine="scipy", format="NETCDF3_CLASSIC")
    else:
        encoding: dict[str, dict[str, Any]] = {name: {"chunksizes": sizes} for name, sizes in chunks.items()}
        if form == "packed":
            packing = {"dtype": "int16", "scale_factor": 0.003, "add_offset": 280.0, "_FillValue": -32767, "zlib": True}
            encoding = {name: {**value, **packing} for name, value in encoding.items()}
        states.to_netcdf(path, engine="h5netcdf", encoding=encoding)
    return path


def write_grib(states: xr.Dataset, path: Path, mode: str = "wb", edition: int = 2, **keys: Any) -> None:
    """Write one message per time, variable and level, in this order; IEEE packing keeps values of edition 2 exact."""
    eccodes = pytest.importorskip("eccodes")
    latitude, longitude = states.latitude.values, states.longitude.values
    grid = {
        "Ni": longitude.size,
        "Nj": latitude.size,
        "jScansPositively": int(latitude[0] < latitude[-1]),
        "latitudeOfFirstGridPointInDegrees": latitude[0],
        "latitudeOfLastGridPointInDegrees": latitude[-1],
        "longitudeOfFirstGridPointInDegrees": longitude[0],
        "longitudeOfLastGridPointInDegrees": longitude[-1],
        "iDirectionIncrementInDegrees": 2.5,
        "jDirectionIncrementInDegrees": 2.5,
    }
    with open(path, mode) as file:
        for time in states.time.values:
            stamp = str(time.astype("datetime64[m]"))
            clock = {"dataDate": int(stamp[:10].replace("-", "")), "dataTime": int(stamp[11:].replace(":", ""))}
            for name, array in states.items():
                for level in states.level.values if "level" in array.dims else (None,):
                    values = array.sel(time=time, **({} if level is None else {"level": level})).values
                    message = eccodes.codes_grib_new_from_samples(f"regular_ll_pl_grib{edition}")
                    level_key = {} if level is None else {"level": int(level)}
                    named = {**grid, **clock, "shortName": SHORT_NAMES[str(name)], **level_key, **keys}
                    for key, value in {**named, **({"packingType": "grid_ieee"} if edition == 2 else {})}.items():
                        eccodes.codes_set(message, key, value)
                    eccodes.codes_set_values(message, values.astype(float).ravel())
                    eccodes.codes_write(message, file)
                    eccodes.codes_release(message)


def settings(channels: list[str], **keys: Any) -> Era5Dataset:
    fixed = {
        "kind": "era5",
        "source": {"kind": "files", "paths": ["unused"]},
        "split": {"train": ["2000-01-01", "2000-01-02"], "valid": ["2001-01-01", "2001-01-02"]},
    }  # tests give their days in the part
    return Era5Dataset.model_validate({**fixed, "channels": channels, **keys})


def part(first: str | None = None, last: str | None = None) -> Part:
    period = (dt.date.fromisoformat(first), dt.date.fromisoformat(last)) if first and last else None
    return Part("train", "2020", (), period=period)


def fields(source: Era5Source, block: int = 5) -> np.ndarray:
    """Return all fields of a source, read in small blocks."""
    rows = source.fields[0].rows
    whole = np.concatenate([source.read(n, min(n + block, rows))["fields"] for n in range(0, rows, block)])
    assert (whole.dtype, whole.shape) == (np.float32, source.fields[0].shape)
    return whole


def refused(*paths: Path, channels: tuple[str, ...] = ("t2m",), of: Part | None = None, **keys: Any) -> str:
    """Return the one-line message of the `UserError` that opening or reading raises."""
    with pytest.raises(UserError) as caught:
        fields(open_source(settings(list(channels), **keys), of or part(), list(paths)))
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700, message
    return message


# ---------------------------------------------------------------------------------------------------- real files


@pytest.mark.slow
@pytest.mark.skipif(not GRIB.exists(), reason="the real ERA5 file is missing")
def test_real_grib_is_read_like_cfgrib_reads_it(tmp_path: Path) -> None:
    path = tmp_path / GRIB.name
    shutil.copy(GRIB, path)
    truth = xr.open_dataset(GRIB, engine="cfgrib", backend_kwargs={"indexpath": ""})
    source = open_source(settings(["t2m"]), part("2019-03-25", "2019-03-31"), [path])
    np.testing.assert_array_equal(fields(source, 50)[:, 0], truth.t2m.sel(time=slice("2019-03-25", "2019-03-31")))
    assert (source.fields[0].shape, source.fields[0].units) == ((168, 1, 33, 49), ("K",))
    assert source.attributes["long_names"] == ["2 metre temperature"]
    np.testing.assert_array_equal(source.coordinates["latitude"], truth.latitude)
    np.testing.assert_array_equal(source.coordinates["longitude"], truth.longitude)
    assert source.row_coordinates["time"][0] == (dt.date(2019, 3, 25) - dt.date(1970, 1, 1)).days * 24
    source.close()
    assert list(tmp_path.iterdir()) == [path], "reading must not write an index file next to the input"

    every_sixth = open_source(settings(["t2m"], step_hours=6), part("2019-03-01", "2019-03-31"), [path])
    np.testing.assert_array_equal(fields(every_sixth)[:, 0], truth.t2m.values[::6])
    assert "covers 2019-03-01 00:00 to 2019-03-31 23:00" in refused(path, of=part("2019-03-25", "2019-04-02"))
    assert "did you mean 't2m'" in refused(path, channels=("t2n",))


# --------------------------------------------------------------------------------------------------- every format


def truth_of(states: xr.Dataset, path: Path, form: str) -> xr.Dataset:
    """Return the file as plain xarray reads it; for GRIB return `states`, because GRIB stores them exactly."""
    if form == "grib":
        return states
    keys: dict[str, Any] = {"zarr": {"engine": "zarr", "consolidated": False}, "netcdf3": {"engine": "scipy"}}
    return xr.open_dataset(path, **keys.get(form, {"engine": "h5netcdf"}))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("north_first", [True, False], ids=["north-south", "south-north"])
def test_values_order_and_levels(tmp_path: Path, form: str, north_first: bool) -> None:
    states = atmosphere()
    stored = states if north_first else states.isel(latitude=slice(None, None, -1))
    path = write(stored, tmp_path / "file", form)  # without a suffix, so that the content decides the format
    truth = truth_of(stored, path, form).sortby("latitude", ascending=False)
    channels = ["t@500", "u10", "z@200", "t2m", "t@850"]
    source = open_source(settings(channels), part(), [path])
    assert source.fields[0].channels == tuple(channels)
    assert (source.fields[0].units, source.fields[0].channel_axis) == (("K", "m s**-1", "m**2 s**-2", "K", "K"), 1)
    assert all(transform == IDENTITY for transform in source.fields[0].transforms)
    values = fields(source)
    for position, channel in enumerate(channels):
        name, _, level = channel.partition("@")
        one = truth[name].sel(level=int(level)) if level else truth[name]
        expected = one.transpose("time", "latitude", "longitude").values.astype(np.float32)
        np.testing.assert_array_equal(values[:, position], expected, err_msg=channel)
    np.testing.assert_array_equal(source.coordinates["latitude"], states.latitude)
    np.testing.assert_array_equal(source.coordinates["longitude"], states.longitude)
    hours = (states.time.values - np.datetime64("1970-01-01")) / np.timedelta64(1, "h")
    np.testing.assert_array_equal(source.row_coordinates["time"], hours)
    assert {array.dtype for array in source.coordinates.values()} == {np.dtype(np.float64)}
    assert source.attributes["source_files"] == [str(path)]
    source.close()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_crop_and_downsampling_against_a_slow_loop(tmp_path: Path, form: str) -> None:
    states = atmosphere(hours=24).isel(latitude=slice(None, None, -1))
    path = write(states, tmp_path / "file", form)
    north_first = truth_of(states, path, form).sortby("latitude", ascending=False)
    source = open_source(settings(["u10", "z@500"], crop=(7, 11), downsample=3), part(), [path])
    values = fields(source, 3)
    assert values.shape == (4, 2, 2, 3)  # a grid of 7x11 points has 2x3 complete blocks of 3x3
    raw = np.stack([north_first.u10, north_first.z.sel(level=500).transpose("time", "latitude", "longitude")], 1)
    for index in np.ndindex(values.shape):
        t, c, i, j = index
        block = [raw[t, c, 3 * i + a, 3 * j + b] for a in range(3) for b in range(3)]
        assert values[index] == pytest.approx(np.mean(block, dtype=np.float64), rel=1e-6)
    np.testing.assert_allclose(source.coordinates["latitude"], [57.5, 50.0])
    np.testing.assert_allclose(source.coordinates["longitude"], [2.5, 10.0, 17.5])


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_spread_over_files(tmp_path: Path, form: str) -> None:
    """Files per day and channel are joined, in any order.

    Some files have another format, with latitudes from south to north.
    """
    states = atmosphere(names=("t2m", "u10"))
    paths = []
    for day in ("2020-02-29", "2020-02-27", "2020-03-01", "2020-02-28"):
        for name in ("u10", "t2m"):
            odd = day == "2020-03-01"
            piece = states[[name]].sel(time=day).isel(latitude=slice(None, None, -1 if odd else 1))
            paths.append(write(piece, tmp_path / f"{name}-{day}", "netcdf4" if odd else form))
    source = open_source(settings(["t2m", "u10"]), part("2020-02-27", "2020-03-01"), paths)
    expected = np.stack([states.t2m.values, states.u10.values], axis=1)
    np.testing.assert_allclose(fields(source, 3), expected, atol=0.002 if form == "packed" else 0)
    assert set(source.attributes["source_files"]) == {str(path) for path in paths}
    only = open_source(settings(["u10"]), part("2020-02-28", "2020-02-28"), paths)
    assert only.attributes["source_files"] == [str(tmp_path / "u10-2020-02-28")]


@pytest.mark.slow
def test_the_names_that_axes_go_by(tmp_path: Path) -> None:
    """Axes and variables are found under all usual names.

    These are the names in the climate data store's current NetCDF files, short names, and long names of variables.
    Levels may be in pascals.
    """
    states = atmosphere(names=("t2m", "z"))
    present = states.rename(time="valid_time", level="pressure_level").expand_dims(number=1)
    present = present.assign_coords(expver=("valid_time", ["0001"] * 16))
    plain = states.rename(latitude="lat", longitude="lon", level="plev", z="geopotential")
    plain = plain.assign_coords(plev=np.array(LEVELS) * 100.0).transpose("time", "lon", "plev", "lat")
    plain.plev.attrs["units"] = "Pa"
    expected = np.stack([states.z.sel(level=500).values, states.t2m.values], axis=1)
    for name, file in {"present": present, "plain": plain}.items():
        file.to_netcdf(tmp_path / name, engine="h5netcdf")
        for channels in (["z@500", "t2m"], ["geopotential@500.0", "2m_temperature"]):
            source = open_source(settings(channels), part(), [tmp_path / name])
            np.testing.assert_array_equal(fields(source), expected, err_msg=name)


def test_longitudes_continue_across_the_meridian(tmp_path: Path) -> None:
    states = atmosphere(names=("t2m",)).assign_coords(longitude=(350 + 2.5 * np.arange(12)) % 360)
    west = atmosphere(names=("u10",)).assign_coords(longitude=-10 + 2.5 * np.arange(12))
    paths = [write(states, tmp_path / "a.nc", "netcdf4"), write(west, tmp_path / "b.nc", "netcdf3")]
    source = open_source(settings(["t2m", "u10"], downsample=2), part(), paths)
    np.testing.assert_allclose(source.coordinates["longitude"], 351.25 + 5 * np.arange(6))


@pytest.mark.slow
def test_grib_of_many_shapes(tmp_path: Path) -> None:
    """GRIB files with different times per variable, or with forecast steps, are read.

    xarray's view of a file cannot contain such variables.
    """
    states, path = atmosphere(), tmp_path / "mixed.grib"
    write_grib(states[["u10", "z", "t"]].isel(time=slice(None, None, -1)), path)  # times in reverse order
    write_grib(states[["t2m"]].isel(time=slice(4, None)), path, "ab")
    source = open_source(settings(["z@850", "u10"]), part(), [path])
    np.testing.assert_array_equal(fields(source), np.stack([states.z.sel(level=850), states.u10], axis=1))
    message = refused(path, channels=("u10", "t2m"))
    assert "'t2m' at 2020-02-27 00:00 is missing" in message and "(4 such times" in message
    later = open_source(settings(["u10", "t2m"]), part("2020-02-28", "2020-03-01"), [path])
    np.testing.assert_array_equal(fields(later)[:, 1], states.t2m[4:])

    # forecasts of 6 h and 12 h from each of four base times, 12 h apart
    forecast = tmp_path / "forecast.grib"
    for base in range(0, 8, 2):
        for ahead in (1, 2):
            shifted = states[["t2m"]].isel(time=[base + ahead]).assign_coords(time=states.time.values[[base]])
            write_grib(shifted, forecast, "ab", forecastTime=6 * ahead)
    source = open_source(settings(["t2m"]), part(), [forecast])
    np.testing.assert_array_equal(fields(source)[:, 0], states.t2m[1:9])


# ------------------------------------------------------------------------------------------------------- memory


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("downsample", [1, 3])
def test_memory_per_row_is_bounded_by_bytes_per_row(tmp_path: Path, form: str, downsample: int) -> None:
    """A block needs at most `bytes_per_row` of memory per row.

    The test measures only Python's buffers, not the libraries' buffers for a chunk or a message.
    """
    states = atmosphere(hours=400, step=1, names=("t2m", "u10", "z"), height=60, width=90)
    if form == "grib":  # GRIB is slow to write
        states = states.isel(time=slice(0, 100))
    path = write(states, tmp_path / "file", form, chunk=4)
    source = open_source(settings(["t2m", "z@500"], downsample=downsample), part(), [path])
    block = 16
    source.read(0, 1)
    tracemalloc.start()
    try:
        for start in range(0, source.fields[0].rows - block, block):
            source.read(start, start + block)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    bound = block * source.bytes_per_row
    assert peak < bound + 200_000
    assert bound < min(12 * 4 * block * 2 * 60 * 90, states.nbytes / 2), "the bound must be much smaller than the data"


# ------------------------------------------------------------------------------------------------------- mistakes


def changed(change: Callable[[xr.Dataset], xr.Dataset]) -> Callable[[Path], list[Path]]:
    """Return a function that writes a changed file of t2m and z."""

    def make(folder: Path) -> list[Path]:
        change(atmosphere(names=("t2m", "z"))).to_netcdf(folder / "odd.nc", engine="h5netcdf")
        return [folder / "odd.nc"]

    return make


def two(change: Callable[[xr.Dataset], xr.Dataset], second: str = "u10") -> Callable[[Path], list[Path]]:
    """Return a function that writes a file of t2m and a changed second file."""

    def make(folder: Path) -> list[Path]:
        other = change(atmosphere(names=(second,), seed=1))
        return [write(atmosphere(names=("t2m",)), folder / "a.nc", "netcdf4"), write(other, folder / "b.nc", "netcdf4")]

    return make


def raw_bytes(content: bytes) -> Callable[[Path], list[Path]]:
    def make(folder: Path) -> list[Path]:
        (folder / "odd.nc").write_bytes(content)
        return [folder / "odd.nc"]

    return make


def curvilinear(states: xr.Dataset) -> xr.Dataset:
    y, x = np.meshgrid(states.latitude, states.longitude, indexing="ij")
    plain = states.drop_vars(["latitude", "longitude"]).rename(latitude="y", longitude="x")
    return plain.assign_coords(latitude=(("y", "x"), y), longitude=(("y", "x"), x))


def without(index: int) -> Callable[[xr.Dataset], xr.Dataset]:
    return lambda states: states.isel(time=[i for i in range(16) if i != index])


def in_celsius(states: xr.Dataset) -> xr.Dataset:
    """Return states for the four following days, with the unit C."""
    later = states.assign_coords(time=states.time + np.timedelta64(96, "h"))
    later.t2m.attrs["units"] = "C"
    return later


def pipe(folder: Path) -> list[Path]:
    os.mkfifo(folder / "pipe")
    return [folder / "pipe"]


SAME: Callable[[xr.Dataset], xr.Dataset] = lambda states: states  # noqa: E731
BOTH = {"channels": ("t2m", "u10")}
MISTAKES: dict[str, tuple[Callable[[Path], list[Path]], dict[str, Any], list[str]]] = {
    "missing": (lambda folder: [folder / "none.nc"], {}, ["none.nc: no such file"]),
    "folder": (lambda folder: [folder], {}, ["a folder; expected a file"]),
    "empty": (raw_bytes(b""), {}, ["is empty"]),
    "foreign": (raw_bytes(b"PK\x03\x04...."), {}, ["neither GRIB nor NetCDF", "PK", "Unpack an archive", "nccopy"]),
    "variable": (changed(SAME), {"channels": ("t2n",)}, ["no file contains the channel 't2n' (did you mean 't2m'?)"]),
    "level": (changed(SAME), {"channels": ("z@501",)}, ["channel 'z@501'", "z@850, z@500, z@200"]),
    "which level": (changed(SAME), {"channels": ("z",)}, ["the files contain: z@850, z@500, z@200"]),
    "before": (changed(SAME), {"of": part("2020-02-26", "2020-03-01")}, ["'t2m' covers 2020-02-27 00:00 to"]),
    "torn day": (
        *(changed(lambda s: s.isel(time=slice(None, -3))), {"of": part("2020-02-27", "2020-03-01")}),
        ["at 2020-03-01 06:00 is missing", "off the step of 6 h (3 such times; in no file)"],
    ),
    "torn first day": (
        *(changed(lambda s: s.isel(time=slice(3, None))), {"of": part("2020-02-27", "2020-03-01"), "step_hours": 12}),
        ["at 2020-02-27 00:00 is missing", "off the step of 12 h (2 such times"],
    ),
    "after": (changed(SAME), {"of": part("2021-01-01", "2021-01-02")}, ["expected 2021-01-01 to 2021-01-02", "split"]),
    "crop": (changed(SAME), {"crop": (10, 12)}, ["crop 10 x 12", "does not fit the grid of 9 latitudes and 12"]),
    "downsample": (changed(SAME), {"downsample": 10}, ["downsample 10 does not fit"]),
    "no time": (changed(lambda s: s.isel(time=0, drop=True)), {}, ["'t2m' has the dimensions latitude (9)"]),
    "no times": (changed(lambda s: s.isel(time=[])), {}, ["'t2m' has the dimensions time (0)"]),
    "no dates": (
        *(changed(lambda s: s.assign_coords(time=np.arange(16))), {}),
        ["the times cannot be read", "expected dates of the standard calendar"],
    ),
    "points": (
        *(changed(lambda s: s.stack(station=("latitude", "longitude")).reset_index("station")), {}),
        ["station (108)", "cdo remapbil"],
    ),
    "curvilinear": (changed(curvilinear), {}, ["y (9)", "cdo remapbil"]),
    "poles": (changed(lambda s: s.assign_coords(latitude=s.latitude + 32)), {}, ["within ±90 degrees"]),
    "pipe": (pipe, {}, ["pipe: a pipe or a device; expected a file"]),
    "rotated": (
        *(changed(lambda s: s.assign_coords(latitude=s.latitude.assign_attrs(standard_name="grid_latitude"))), {}),
        ["on a rotated grid (standard_name grid_latitude); expected a regular grid"],
    ),
    "shuffled": (changed(lambda s: s.isel(latitude=[0, 2, 1])), {}, ["strictly monotonic"]),
    "members": (changed(lambda s: xr.concat([s, s], "number")), {}, ["number (2)", "xarray's `isel`"]),
    "forecast": (changed(lambda s: s.assign_coords(step=6)), {}, ["forecasts: `valid_time`"]),
    "lead": (
        *(changed(lambda s: s.assign_coords(fhr=((), 24.0, {"standard_name": "forecast_period"}))), {}),
        ["forecasts: `valid_time`"],
    ),
    "text": (changed(lambda s: s.astype(str)), {}, ["'t2m' has the type <U"]),
    "gap": (changed(without(5)), {}, ["at 2020-02-28 06:00 is missing", "(1 such times; in no file)"]),
    "finer step": (changed(SAME), {"step_hours": 3}, ["at 2020-02-27 03:00 is missing", "step of 3 h"]),
    "nothing left": (changed(SAME), {"step_hours": 2400}, ["at multiples of step_hours (2400)"]),
    "one channel short": (two(without(5)), BOTH, ["'u10' at 2020-02-28 06:00 is missing", "(1 such times"]),
    "twice": (two(without(0), "t2m"), {}, ["2020-02-27 06:00 is missing, repeated", "a.nc and", "Cut repeated times"]),
    "grids": (two(lambda s: s.isel(latitude=slice(0, 8))), BOTH, ["'u10' is on another grid", "8 x 12 from 60, 0 in"]),
    "shifted": (two(lambda s: s.assign_coords(longitude=s.longitude + 1.25)), BOTH, ["another grid"]),
    "units": (two(in_celsius, "t2m"), {}, ["b.nc, in 'C'; expected", "a.nc, in 'K'", "to one unit"]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_give_one_message(tmp_path: Path, case: str) -> None:
    make, keys, expected = MISTAKES[case]
    message = refused(*make(tmp_path), **keys)
    assert all(text in message for text in expected), message


@pytest.mark.slow
@pytest.mark.parametrize("form", ["netcdf4", "packed", "netcdf3", "grib"])
def test_torn_files(tmp_path: Path, form: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A file that is truncated at any position is reported as torn, and the libraries print nothing."""
    content = write(atmosphere(names=("t2m",)), tmp_path / "file", form).read_bytes()
    for share in (0.02, 0.3, 0.6, 0.9, 0.999):
        (tmp_path / "torn").write_bytes(content[: int(len(content) * share)])
        assert "torn" in refused(tmp_path / "torn", of=part("2020-02-27", "2020-03-01"))
    assert capfd.readouterr() == ("", "")


def test_damaged_grib(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write(atmosphere(names=("t2m",)), tmp_path / "file.grib", "grib")
    content = path.read_bytes()
    second = content.index(b"GRIB", 10)
    for start in (second + 10, second + 40, second + 110, second + 150):
        path.write_bytes(content[:start] + b"\xff" * 40 + content[start + 40 :])
        assert "incomplete or damaged" in refused(path)
    path.write_bytes(content[:16] + b"\1" + content[17:])  # length of the identification section
    assert "ecCodes crashes while it reads the structure" in refused(path)
    reduced = tmp_path / "reduced.grib"
    eccodes = pytest.importorskip("eccodes")
    with open(reduced, "wb") as file:
        eccodes.codes_write(eccodes.codes_grib_new_from_samples("reduced_gg_pl_32_grib2"), file)
    assert "on a grid of type reduced_gg; expected" in refused(reduced, channels=("t@1000",))
    assert capfd.readouterr() == ("", "")


def test_grib_without_the_extra_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GRIB is an extra, because it needs 180 MB and the demo does not need it."""
    monkeypatch.setitem(sys.modules, "cfgrib", None)
    (tmp_path / "a.grib").write_bytes(b"GRIB" + bytes(100))
    assert "GRIB needs cfgrib" in (message := refused(tmp_path / "a.grib")) and "dlscale[grib]" in message


@pytest.mark.parametrize("form", ["netcdf4", "netcdf3"])
def test_netcdf_with_attributes_of_grib_is_netcdf(tmp_path: Path, form: str) -> None:
    """Files from cfgrib and from the Climate Data Store have the word GRIB in their first bytes."""
    states = atmosphere(names=("t2m",)).assign_attrs(GRIB_edition=1, GRIB_centre="ecmf")
    path = write(states, tmp_path / "a.nc", form)
    assert b"GRIB" in path.read_bytes()[:1024]
    np.testing.assert_array_equal(fields(open_source(settings(["t2m"]), part(), [path]))[:, 0], states.t2m)
    path.write_bytes(b"CDF\x05" + path.read_bytes()[4:])
    assert "convert other forms of NetCDF" in refused(path)


def test_another_order_of_points_is_refused(tmp_path: Path) -> None:
    write_grib(atmosphere(names=("t2m",)), tmp_path / "a.grib", jPointsAreConsecutive=1)
    assert "from west to east (jPointsAreConsecutive is set)" in refused(tmp_path / "a.grib")


@pytest.mark.parametrize("edition", [1, 2])
@pytest.mark.parametrize(
    ("first", "count", "lowest"),
    [(0, 144, -180), (0, 104, -180), (20, 143, 0), (160, 30, -180), (350, 12, 0), (-10, 12, -180), (170, 1, -180)],
)
def test_each_grib_value_has_its_own_position(
    tmp_path: Path, edition: int, first: float, count: int, lowest: float
) -> None:
    """ecCodes sorts `distinctLongitudes`, but not the values of a row such as 0, …, 177.5, -180, …, -2.5."""
    eccodes = pytest.importorskip("eccodes")
    longitude = (first + 2.5 * np.arange(count) - lowest) % 360.0 + lowest
    states = atmosphere(hours=12, names=("t",), height=3, width=count).assign_coords(longitude=longitude)
    states = states.isel(level=[0])
    for name, stored in {"north": states, "south": states.isel(latitude=slice(None, None, -1))}.items():
        write_grib(stored, path := tmp_path / name, edition=edition)
        with open(path, "rb") as file:
            message = eccodes.codes_grib_new_from_file(file)
        keys = ("latitudes", "longitudes", "values")
        latitudes, longitudes, values = (eccodes.codes_get_array(message, key) for key in keys)
        truth = dict(zip(zip(latitudes, longitudes.round(3) % 360.0, strict=True), values, strict=True))
        source = open_source(settings(["t@850"]), part(), [path])
        west_to_east = source.coordinates["longitude"]
        expected = [[truth[h, w % 360.0] for w in west_to_east] for h in source.coordinates["latitude"]]
        np.testing.assert_array_equal(fields(source)[0, 0], np.float32(expected))
        np.testing.assert_allclose(west_to_east - west_to_east[0], 2.5 * np.arange(count))


def test_levels_between_whole_hectopascals(tmp_path: Path) -> None:
    """ecCodes truncates the key `level` to 1 for 1.5 hPa; a layer has no level."""
    exact = {"t@1": (0, 100), "t@1.5": (0, 150), "t@2.5": (1, 2500), "t@0.5": (0, 50), "t@0.0033": (2, 33)}
    exact |= {"t@850.5": (0, 85050), "t@500": (-2, 500)}
    states = atmosphere(hours=12, names=("t",)).isel(level=[0])
    for number, (factor, value) in enumerate(exact.values()):
        surface = {"scaleFactorOfFirstFixedSurface": factor, "scaledValueOfFirstFixedSurface": value}
        write_grib(states + number, tmp_path / "a.grib", "ab", typeOfFirstFixedSurface=100, **surface)
    levels = open_source(settings(list(exact)), part(), [tmp_path / "a.grib"])
    expected = np.stack([(states + number).t[:, 0] for number in range(len(exact))], axis=1)
    np.testing.assert_array_equal(fields(levels), expected)

    write_grib(states, tmp_path / "b.grib", edition=1, indicatorOfTypeOfLevel=210, level=150)
    assert open_source(settings(["t@1.5"]), part(), [tmp_path / "b.grib"]).fields[0].rows == 2
    layer = {"scaledValueOfFirstFixedSurface": 100000, "scaledValueOfSecondFixedSurface": 50000}
    layer |= {"scaleFactorOfFirstFixedSurface": 0, "scaleFactorOfSecondFixedSurface": 0}
    write_grib(states, tmp_path / "c.grib", typeOfFirstFixedSurface=100, typeOfSecondFixedSurface=100, **layer)
    assert refused(tmp_path / "c.grib", channels=("t@1000",)).endswith("the files contain: t")


PACKED = {"scale_factor": np.float32(0.01), "add_offset": np.float32(273.15)}


@pytest.mark.parametrize(
    ("dtype", "value", "attributes", "bounds"),
    [
        ("i2", -32768, {**PACKED, "valid_min": np.int16(-300), "valid_max": np.int16(4500)}, "270.15 to 318.15 (1 "),
        ("i2", -32768, {**PACKED, "valid_range": np.float32([150, 350])}, "150 to 350 (1 "),
        ("i2", 4600, {**PACKED, "valid_max": np.int16(4500)}, "-inf to 318.15 (1 "),
        ("i2", 4500, {**PACKED, "valid_range": np.int16([-300, 4500])}, ""),
        ("i2", 4600, {"scale_factor": -0.5, "valid_max": np.int16(4500)}, "-2250 to inf (1 "),
        ("i2", 4600, {"scale_factor": -0.5, "valid_max": np.float32(0)}, ""),
        ("i2", -32768, {**PACKED, "missing_value": np.float32(-54.53)}, "no value"),
        ("i1", -3, {"_Unsigned": "true", "valid_range": np.int8([0, -6])}, "0 to 250 (1 "),
        ("f4", -9999, {"valid_range": np.float64([99.9, 350])}, "99.9 to 350 (1 "),
        ("f4", 99.9, {"valid_range": np.float64([99.9, 350])}, ""),
        ("f4", 99.9, {"valid_range": "0 to 100"}, ""),
        ("f4", -999.9, {"missing_value": np.float64(-999.9)}, "no value"),
        ("f4", 1e20, {"_FillValue": np.float64(1e20)}, "no value"),
        ("f8", 1e20, {"missing_value": np.float32(1e20)}, "no value"),
        ("f8", 1.0001e20, {"missing_value": np.float32(1e20)}, ""),
        ("i1", -127, PACKED, "no value"),
        ("u1", 255, PACKED, "no value"),
        ("i8", -9223372036854775806, PACKED, "no value"),
        ("u8", 18446744073709551614, PACKED, "no value"),
        ("i2", -32767, {**PACKED, "missing_value": np.int16(32766)}, "no value"),
        ("i1", -127, {**PACKED, "missing_value": np.int8(99)}, ""),
        ("i2", -32767, {**PACKED, "_FillValue": np.int16(32766)}, ""),
        ("u1", 200, {"_Unsigned": "false", "missing_value": np.uint8(200)}, "no value"),
        ("f8", -173.8457274, {**PACKED, "add_offset": np.float32(2), "missing_value": -173.8457274}, "no value"),
        ("i8", -5, {"_Unsigned": "true", "missing_value": np.int64(-5)}, "no value"),
    ],
)
def test_values_outside_the_valid_range_are_refused(
    tmp_path: Path, dtype: str, value: float, attributes: dict[str, Any], bounds: str
) -> None:
    """Values outside `valid_min`, `valid_max`, `valid_range` are refused, and missing values are read as NaN.

    Limits may be packed or unpacked.
    """
    stored = np.full((4, 2, 3), 100, dtype)
    stored[2, 1, 1] = value
    with h5netcdf.File(tmp_path / "a.nc", "w") as file:
        file.dimensions = {"time": 4, "latitude": 2, "longitude": 3}
        file.create_variable("time", ("time",), data=6.0 * np.arange(4)).attrs["units"] = "hours since 2020-01-01"
        file.create_variable("latitude", ("latitude",), data=np.float32([50, 49]))
        file.create_variable("longitude", ("longitude",), data=np.float32([0, 1, 2]))
        file.create_variable("t2m", ("time", "latitude", "longitude"), data=stored).attrs.update(attributes)
    with contextlib.ExitStack() as stack:
        (variable,), _ = open_variables(tmp_path / "a.nc", {"t2m"}, stack)
        read = partial(variable.load, np.arange(4), [0], slice(0, 2), slice(0, 3))
        if bounds in ("", "no value"):
            assert np.isnan(read()).sum() == bool(bounds)
        else:
            with pytest.raises(UserError, match=rf"a.nc: 't2m': .* outside the valid range, {re.escape(bounds)}"):
                read()


@pytest.mark.parametrize(
    ("values", "packing", "expected"),
    [
        (np.float32([280.25, 281.75]), {"scale_factor": np.int16(1)}, [280.25, 281.75]),
        (np.int16([20_000, 5]), {"scale_factor": np.int16(10)}, [200_000.0, 50.0]),
        (np.int16([20_000, 5]), {"scale_factor": np.int16([10]), "_FillValue": np.int16(5)}, [200_000.0, math.nan]),
        (np.int16([100, 5]), {"scale_factor": np.float32(0.5), "add_offset": np.int32(273)}, [323.0, 275.5]),
    ],
)
@pytest.mark.parametrize("form", ["netcdf4", "netcdf3"])
def test_an_integer_scale_factor_keeps_decimals(
    tmp_path: Path, values: np.ndarray, packing: dict[str, Any], expected: list[float], form: str
) -> None:
    """xarray alone decodes to the type of `scale_factor`: 280.25 would become 280, and 200000 would become 3392."""
    axes = {"time": ("time", [0.0, 6.0], HOURS), "latitude": [50.0, 49.0], "longitude": [0.0]}
    stored = np.stack([values, values])[..., None]
    states = xr.Dataset({"t2m": (("time", "latitude", "longitude"), stored, packing)}, axes)
    kinds: dict[str, Any] = {"netcdf4": {"engine": "h5netcdf"}, "netcdf3": {"engine": "scipy"}}
    states.to_netcdf(
        tmp_path / "a.nc", **kinds[form], encoding={} if "_FillValue" in packing else {"t2m": {"_FillValue": None}}
    )
    with contextlib.ExitStack() as stack:
        (variable,), _ = open_variables(tmp_path / "a.nc", {"t2m"}, stack)
        np.testing.assert_array_equal(variable.load(np.arange(1), [0], slice(0, 2), slice(0, 1)).ravel(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("downsample", [1, 3])
def test_a_missing_value_is_reported_with_date_and_position(tmp_path: Path, downsample: int) -> None:
    """A missing value is NaN, a fill value, an entry of a bitmap, or NetCDF's number for unwritten values."""
    states = atmosphere(names=("t2m",))
    states.t2m[2, 3, 4] = np.nan
    files = [write(states, tmp_path / form, form) for form in ("netcdf4", "packed", "netcdf3")]
    write_grib(states.fillna(1e9), tmp_path / "grib", bitmapPresent=1, missingValue=1e9)
    unwritten = states.fillna(9.969209968386869e36)
    unwritten.to_netcdf(tmp_path / "unwritten", engine="h5netcdf", encoding={"t2m": {"_FillValue": None}})
    never = states.fillna(-32767 * 0.003 + 280.0)  # the number that NetCDF's library leaves in unwritten integers
    packing = {"dtype": "int16", "scale_factor": 0.003, "add_offset": 280.0, "_FillValue": None}
    never.to_netcdf(tmp_path / "never", engine="h5netcdf", encoding={"t2m": packing})
    place = "52.5, longitude 10" if downsample == 1 else "50, longitude 10"
    for file in [*files, tmp_path / "grib", tmp_path / "unwritten", tmp_path / "never"]:
        message = refused(file, downsample=downsample)
        assert f"channel 't2m' has no value at 2020-02-27 12:00, latitude {place} (1 " in message
        shape = (16, 1, 3, 12)
        assert fields(open_source(settings(["t2m"], crop=[3, 12]), part(), [file])).shape == shape, (
            "a missing value outside the crop must not matter"
        )


# ---------------------------------------------------------------------------------------------- from a Zarr store

CHANNELS = ["t@500", "2m_temperature", "z@200", "t@850"]


def days(first: str, last: str, store: Path | str) -> RawFile:
    return RawFile("train-2020.nc", str(store), period=(dt.date.fromisoformat(first), dt.date.fromisoformat(last)))


def weatherbench(**keys: Any) -> xr.Dataset:
    """Return states with names as in ARCO-ERA5 and axes as in WeatherBench2.

    Longitude comes before latitude, and latitudes run from south to north.
    """
    states = atmosphere(**keys).rename(t2m="2m_temperature").isel(latitude=slice(None, None, -1))
    return states.transpose("time", "level", "longitude", "latitude")


@pytest.mark.parametrize("consolidated", [True, False])
@pytest.mark.parametrize("version", [2, 3])
def test_zarr_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, consolidated: bool, version: int) -> None:
    monkeypatch.setattr(era5_zarr, "MEMORY", 1_000_000)
    states = weatherbench(step=1, hours=120)
    chunks = {name: {"chunks": (7, 2, 12, 9)[: array.ndim]} for name, array in states.items() if array.ndim == 4}
    states.to_zarr(tmp_path / "store", consolidated=consolidated, zarr_format=version, encoding=chunks)
    seen: list[tuple[int, int]] = []
    out = tmp_path / "source" / "train-2020.nc"
    dataset = settings(CHANNELS, step_hours=6)
    acquire(dataset, days("2020-02-28", "2020-03-01", tmp_path / "store"), out, lambda *done: seen.append(done))
    assert seen == sorted(seen) and seen[-1] == (12, 12)

    truth = xr.open_dataset(tmp_path / "store", engine="zarr", chunks=None).sortby("latitude", ascending=False)
    truth = truth.sel(time=slice("2020-02-28", "2020-03-01")).isel(time=slice(None, None, 6))
    plain = xr.open_dataset(out, engine="h5netcdf")
    assert list(plain.data_vars) == CHANNELS
    for channel in CHANNELS:
        name, _, level = channel.partition("@")
        expected = truth[name].sel(level=int(level)) if level else truth[name]
        np.testing.assert_array_equal(plain[channel], expected.transpose("time", "latitude", "longitude"))
        assert plain[channel].attrs["units"] == truth[name].attrs["units"]
    np.testing.assert_array_equal(plain.time, truth.time)
    np.testing.assert_array_equal(plain.latitude, truth.latitude)

    source = open_source(dataset, part("2020-02-28", "2020-03-01"), [out])
    assert source.fields[0].channels == tuple(CHANNELS)
    for position, channel in enumerate(CHANNELS):
        np.testing.assert_array_equal(fields(source)[:, position], plain[channel])


@pytest.mark.parametrize(
    ("version", "fill", "mark", "shards", "lacks"),
    [
        (3, 0.0, None, None, "2 of 8"),
        (3, math.nan, None, None, ""),
        (3, 0.0, math.nan, None, "2 of 8"),  # written by xarray 2024, which left out `fill_value`
        (3, -1.0, -1.0, None, ""),
        (2, None, None, None, "2 of 8"),
        (2, 0.0, None, None, ""),
        (3, 0.0, None, (4, 10, 12), "2 of 8"),
        (3, 0.0, None, (12, 5, 12), "2 of 8"),
        (3, math.nan, None, (12, 5, 12), ""),
    ],
)
def test_an_unwritten_chunk_of_a_zarr_store_is_refused(
    tmp_path: Path, version: Any, fill: float | None, mark: float | None, shards: Any, lacks: str
) -> None:
    """A missing chunk, also within a shard, is refused: it would be read as the fill value, by default 0 K."""
    states = atmosphere(names=("t2m",))
    states.to_zarr(tmp_path / "store", zarr_format=version, consolidated=False)
    group = zarr.open_group(tmp_path / "store", mode="r+")
    values, attributes = (
        group["t2m"][:],
        {key: value for key, value in group["t2m"].attrs.items() if key != "_FillValue"},
    )
    names = {"dimension_names": group["t2m"].metadata.dimension_names} if version == 3 else {}
    del group["t2m"]
    if mark is not None:
        attributes["_FillValue"] = base64.standard_b64encode(np.float64(mark).tobytes()).decode()
    made = {"shape": values.shape, "chunks": (4, 5, 12), "shards": shards, "dtype": "f4", "fill_value": fill}
    array = group.create_array("t2m", attributes=attributes, config={"write_empty_chunks": True}, **made, **names)
    if fill is None:
        path = tmp_path / "store" / "t2m" / ".zarray"
        path.write_text(json.dumps({**json.loads(path.read_text()), "fill_value": None}))
        array = zarr.open_group(tmp_path / "store", mode="r+")["t2m"]
    array[4:] = values[4:]
    whole = days("2020-02-27", "2020-03-01", tmp_path / "store")
    with pytest.raises(UserError, match=f"'t2m': {lacks} chunks were never written" if lacks else "has no value at"):
        acquire(settings(["t2m"]), whole, tmp_path / "out.nc")
    array[:4] = values[:4]
    acquire(settings(["t2m"]), whole, tmp_path / "out.nc")
    np.testing.assert_array_equal(xr.open_dataset(tmp_path / "out.nc", engine="h5netcdf").t2m, states.t2m)


SHARDS = partial(zarr.codecs.ShardingCodec, chunk_shape=(2, 9, 12))


def sharded_store(path: Path, *codecs: Any) -> Any:
    """Write a store in which t2m has these codecs and the fill value 0; return the array."""
    states = atmosphere(names=("t2m",))
    states.to_zarr(path, zarr_format=3, consolidated=False)
    group = zarr.open_group(path, mode="r+")
    values, attributes = group["t2m"][:], group["t2m"].attrs.asdict()
    del group["t2m"], attributes["_FillValue"]
    shape = {"shape": values.shape, "chunk_shape": (8, 9, 12), "dimension_names": list(states.t2m.dims)}
    array = zarr.create(
        store=path, path="t2m", dtype="f4", zarr_format=3, codecs=codecs, attributes=attributes, fill_value=0, **shape
    )
    array[:] = values
    return array


@pytest.mark.parametrize("where", ["start", "end"])
@pytest.mark.parametrize(
    "codecs",
    [
        [zarr.codecs.BytesCodec(), zarr.codecs.Crc32cCodec()],
        [zarr.codecs.BytesCodec()],
        [zarr.codecs.BytesCodec(endian="big")],
    ],
)
def test_an_unwritten_chunk_is_found_whatever_the_index_of_the_shard(
    tmp_path: Path, where: Any, codecs: list[Any]
) -> None:
    """The index of a shard may be at its start, without a checksum, and with either order of bytes."""
    sharded = sharded_store(tmp_path / "store", SHARDS(index_codecs=codecs, index_location=where))
    whole = days("2020-02-27", "2020-03-01", tmp_path / "store")
    written = sharded[:]
    sharded[4:6] = 0.0  # as the fill value
    assert (sharded[4:6] == 0.0).all()
    with pytest.raises(UserError, match="'t2m': 1 of 8 chunks were never written"):
        acquire(settings(["t2m"]), whole, tmp_path / "out.nc")
    sharded[4:6] = written[4:6]
    acquire(settings(["t2m"]), whole, tmp_path / "out.nc")
    np.testing.assert_array_equal(xr.open_dataset(tmp_path / "out.nc", engine="h5netcdf").t2m, written)


@pytest.mark.filterwarnings("ignore:Combining a `sharding_indexed` codec")
@pytest.mark.parametrize(
    "codecs",
    [
        [SHARDS(index_codecs=[zarr.codecs.BytesCodec(), zarr.codecs.GzipCodec()])],
        [SHARDS(chunk_shape=(4, 9, 12), codecs=[SHARDS()])],
        [SHARDS(), zarr.codecs.GzipCodec()],
        [zarr.codecs.TransposeCodec(order=(0, 1, 2)), SHARDS()],
    ],
    ids=["compressed index", "shards in shards", "compressed shards", "transposed"],
)
def test_shards_that_cannot_be_checked_are_refused(tmp_path: Path, codecs: list[Any]) -> None:
    sharded_store(tmp_path / "store", *codecs)
    with pytest.raises(UserError, match=r"t2m: chunks that were never written cannot be found .*sharding_indexed"):
        acquire(settings(["t2m"]), days("2020-02-27", "2020-03-01", tmp_path / "store"), tmp_path / "out.nc")


@pytest.mark.parametrize("version", [2, 3])
def test_old_consolidated_metadata_of_a_folder_are_ignored(tmp_path: Path, version: Any) -> None:
    """Attributes that were corrected later are used instead of the older copies in the consolidated metadata."""
    packing = {"dtype": "i2", "scale_factor": 0.01, "add_offset": 280.0, "_FillValue": -32767}
    states = atmosphere(names=("t2m",))
    states.to_zarr(tmp_path / "store", zarr_format=version, consolidated=True, encoding={"t2m": packing})
    path = tmp_path / "store/t2m" / (".zattrs" if version == 2 else "zarr.json")
    about = json.loads(path.read_text())
    about.get("attributes", about)["add_offset"] = 290.0
    path.write_text(json.dumps(about))
    acquire(settings(["t2m"]), days("2020-02-27", "2020-02-28", tmp_path / "store"), tmp_path / "out.nc")
    read = xr.open_dataset(tmp_path / "out.nc", engine="h5netcdf").t2m
    np.testing.assert_allclose(read, states.t2m[:8] + 10.0, atol=0.006)


def test_acquisition_has_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(era5_zarr, "MEMORY", 4_000_000)
    states = atmosphere(hours=600, step=1, names=("t2m", "u10"), height=80, width=120)
    write(states, tmp_path / "store", "zarr", chunk=10)
    acquire(settings(["t2m"]), days("2020-02-27", "2020-02-27", tmp_path / "store"), tmp_path / "warm.nc")
    blocks: list[tuple[int, int]] = []
    tracemalloc.start()
    try:
        raw = days("2020-02-27", "2020-03-22", tmp_path / "store")
        acquire(settings(["t2m", "u10"]), raw, tmp_path / "out.nc", lambda *done: blocks.append(done))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4e6 + 1.5e6 < states.nbytes / 8  # the blocks, and 1.5 MB that xarray and Zarr keep
    assert len(blocks) > 5


def test_complex_values_are_refused(tmp_path: Path) -> None:
    """NumPy would drop the imaginary parts."""
    (states := atmosphere(names=("t2m",)) * 1j).to_netcdf(tmp_path / "a.nc", engine="h5netcdf", invalid_netcdf=True)
    assert "'t2m' has the type complex64; expected real numbers" in refused(tmp_path / "a.nc")
    states.to_zarr(tmp_path / "store", consolidated=False)
    with pytest.raises(UserError, match="'t2m' has the type complex64"):
        acquire(settings(["t2m"]), days("2020-02-27", "2020-02-28", tmp_path / "store"), tmp_path / "out.nc")


@pytest.mark.parametrize(
    ("attributes", "wrong"),
    [
        ({"SCALE_FACTOR": 0.01}, "SCALE_FACTOR (0.01)"),
        ({"fill_value": -999.0}, "fill_value (-999.0)"),
        ({"ValidRange": np.float32([0, 400])}, "ValidRange"),
        ({"slope": 0.1, "intercept": 0.0}, "slope (0.1)"),
        ({"gain": 1.0, "offset": np.float32([3.0])}, "offset (3.0)"),
        ({"scale": "0.1"}, "scale (0.1)"),
        ({"nodata": np.int16(-1)}, "nodata (-1)"),
        ({"missing": -1.0}, "missing (-1.0)"),
        ({"scale": 1, "offset": 0.0, "nodata": np.nan, "Fill_Value": np.float32(np.nan), "bias": [0.0, 0.0]}, ""),
        ({"ScaleFactor": 1.0, "AddOffset": 0.0, "fmissing_value": 1e15, "actual_range": [0.0, 400.0]}, ""),
    ],
)
def test_other_spellings_of_attributes_are_refused(tmp_path: Path, attributes: dict[str, Any], wrong: str) -> None:
    """xarray ignores other spellings, so packed or missing values would count as data."""
    states = atmosphere(names=("t2m",))
    states.t2m.attrs.update(attributes)
    states.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    if wrong:
        assert f"'t2m' has the attribute {wrong}" in refused(tmp_path / "a.nc")
    else:
        np.testing.assert_array_equal(
            fields(open_source(settings(["t2m"]), part(), [tmp_path / "a.nc"]))[:, 0], states.t2m
        )


@pytest.mark.parametrize("address", ["file:///data/store", "local://data/store"])
def test_addresses_of_folders_are_refused(address: str) -> None:
    """Changes of a store at an address are not detected, and its old consolidated metadata are used."""
    with pytest.raises(ValueError, match=f"store {address}: the address of a folder; give the folder's path"):
        settings(["t2m"], source={"kind": "zarr", "store": address})


def test_invalid_stores_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    write(atmosphere(names=("t2m",)), tmp_path / "torn", "zarr")
    for chunk in (tmp_path / "torn" / "t2m" / "c").rglob("*"):
        if chunk.is_file():
            chunk.write_bytes(chunk.read_bytes()[:20])
    write(atmosphere(names=("t2m",)), tmp_path / "interrupted", "zarr")
    next(chunk for chunk in (tmp_path / "interrupted/t2m/c/1").rglob("*") if chunk.is_file()).unlink()
    write(atmosphere(names=("t2m",)), tmp_path / "damaged", "zarr")
    about = json.loads((tmp_path / "damaged/t2m/zarr.json").read_text())
    (tmp_path / "damaged/t2m/zarr.json").write_text(json.dumps({**about, "attributes": []}))
    cases = {
        "none": "the Zarr store cannot be opened",
        "damaged": "damaged: cannot be read .* copy it again",
        "folder": "the Zarr store cannot be opened",
        "torn": "incomplete or damaged",
        "interrupted": "has no value at .* again",
    }
    for name, expected in cases.items():
        with pytest.raises(UserError, match=expected):
            acquire(settings(["t2m"]), days("2020-02-27", "2020-02-28", tmp_path / name), tmp_path / "out.nc")
        assert not (tmp_path / "out.nc").exists()


class Server(http.server.SimpleHTTPRequestHandler):
    """Server of a folder. While `refusing` is positive, requests for chunks of t2m fail, as on an overloaded server.

    If `login` is set, requests with another login fail.
    """

    refusing = 0
    login: str | None = None

    def do_GET(self) -> None:
        if self.login and self.headers.get("Authorization") != self.login:
            self.send_error(401)
        elif "/t2m/c/" in self.path and Server.refusing:
            Server.refusing -= 1
            self.send_error(503)
        else:
            super().do_GET()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    pytest.importorskip("aiohttp", reason="http stores need aiohttp")
    write(atmosphere(names=("t2m",)), tmp_path / "store", "zarr")
    xr.open_dataset(tmp_path / "store", engine="zarr").load().to_zarr(tmp_path / "served", consolidated=True)
    with served(functools.partial(Server, directory=str(tmp_path))) as place:
        yield f"http://{place}"
    Server.refusing = 0


def test_over_http(tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(era5_zarr, "_LONGEST_WAIT_S", 0.01)
    Server.refusing = 2
    acquire(settings(["t2m"]), days("2020-02-28", "2020-02-29", f"{server}/served"), tmp_path / "out.nc")
    assert Server.refusing == 0, "temporary errors must be retried"
    truth = atmosphere(names=("t2m",)).sel(time=slice("2020-02-28", "2020-02-29"))
    np.testing.assert_array_equal(xr.open_dataset(tmp_path / "out.nc", engine="h5netcdf").t2m, truth.t2m)

    (tmp_path / "out.nc").unlink()
    Server.refusing = 10**6
    with pytest.raises(UserError, match="most compute nodes have no network: run acquisition"):
        acquire(settings(["t2m"]), days("2020-02-28", "2020-02-29", f"{server}/served"), tmp_path / "out.nc")
    assert not (tmp_path / "out.nc").exists()


@pytest.mark.parametrize("fill", [0.0, "NaN"])
def test_a_missing_chunk_of_a_remote_store_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fill: float | str
) -> None:
    """A missing chunk would be read as 0 K; the chunks of other variables may be missing."""
    monkeypatch.setattr(era5_zarr, "_LONGEST_WAIT_S", 0.01)
    atmosphere(names=("t2m", "u10")).to_zarr(tmp_path / "lacking", zarr_format=3, consolidated=True)
    for path in (tmp_path / "lacking/zarr.json", tmp_path / "lacking/t2m/zarr.json"):
        about = json.loads(path.read_text())
        consolidated = about.get("consolidated_metadata", {"metadata": {"t2m": about}})["metadata"]
        consolidated["t2m"]["fill_value"] = fill
        path.write_text(json.dumps(about))
    memory = fsspec.filesystem("memory")
    store = f"/{tmp_path.name}"  # the memory keeps the stores of all tests
    memory.put(str(tmp_path / "lacking"), store, recursive=True)
    raw = days("2020-02-27", "2020-03-01", f"memory:/{store}")
    memory.rm(f"{store}/u10/c", recursive=True)
    acquire(settings(["t2m"]), raw, tmp_path / "out.nc")
    memory.rm(f"{store}/t2m/c", recursive=True)
    expected = f"{store}: 't2m': the chunk t2m/c/0/0/0 is missing, and would be read as 0" if fill == 0 else "no value"
    with pytest.raises(UserError, match=expected):
        acquire(settings(["t2m"]), raw, tmp_path / "again.nc")
    assert not (tmp_path / "again.nc").exists()


@pytest.mark.parametrize("place", ["start", "end"])
@pytest.mark.parametrize("remote", [True, False], ids=["remote", "folder"])
@pytest.mark.parametrize(("numbers", "mark"), [("f4", None), ("i2", None), ("i2", -5)])
def test_a_missing_chunk_within_a_shard_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: str, mark: int | None, remote: bool, place: str
) -> None:
    """A missing chunk within a shard, which would be read as 0, is refused; in a remote store, only of wanted times."""
    monkeypatch.setattr(era5_zarr, "_LONGEST_WAIT_S", 0.01)
    states, folder = atmosphere(names=("t2m",)), tmp_path / "store"
    states.drop_vars("t2m").to_zarr(folder, zarr_format=3, consolidated=False)
    group = zarr.open_group(folder, mode="r+")
    array = zarr.create_array(
        group.store,
        name="t2m",
        shape=(16, 9, 12),
        dtype=numbers,
        fill_value=0,
        chunks=(2, 9, 12),
        shards={"shape": (8, 9, 12), "index_location": place},
        attributes={**states.t2m.attrs, **({} if mark is None else {"_FillValue": mark})},
        dimension_names=("time", "latitude", "longitude"),
    )
    array[2:] = states.t2m[2:].values.astype(numbers)
    zarr.consolidate_metadata(group.store)
    if remote:
        memory, store = fsspec.filesystem("memory"), f"/{tmp_path.name}"
        memory.put(str(folder), store, recursive=True)
        words, folder = "channel 't2m' has no value at 2020-02-27 00:00", f"memory:/{store}"  # type: ignore[assignment]
        acquire(settings(["t2m"]), days("2020-02-28", "2020-03-01", folder), tmp_path / "later.nc")
        later = xr.open_dataset(tmp_path / "later.nc", engine="h5netcdf").t2m
        np.testing.assert_array_equal(later, states.t2m[4:].values.astype(numbers))
    else:
        words = "'t2m': 1 of 8 chunks were never written"
    with pytest.raises(UserError, match=words):
        acquire(settings(["t2m"]), days("2020-02-27", "2020-03-01", folder), tmp_path / "out.nc")


def test_a_login_reaches_a_store_and_no_message(tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, shown = f"{server.replace('//', '//me:pa55@')}/served", f"{server}/served"
    monkeypatch.setenv(urls.VARIABLE, json.dumps({shown: whole}))
    monkeypatch.setattr(era5_zarr, "_LONGEST_WAIT_S", 0.01)
    monkeypatch.setattr(Server, "login", "Basic " + base64.b64encode(b"me:pa55").decode())
    acquire(settings(["t2m"]), days("2020-02-28", "2020-02-29", shown), tmp_path / "out.nc")
    assert b"pa55" not in (tmp_path / "out.nc").read_bytes()
    Server.refusing = 10**6
    with pytest.raises(UserError, match="cannot be read") as reading:
        acquire(settings(["t2m"]), days("2020-02-28", "2020-02-29", shown), tmp_path / "out.nc")
    monkeypatch.setattr(Server, "login", "another")
    with pytest.raises(UserError) as opening:
        acquire(settings(["t2m"]), days("2020-02-28", "2020-02-29", shown), tmp_path / "out.nc")
    assert "pa55" not in f"{reading.value} {opening.value}"


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/store", "gs://bucket/store", "odd://bucket/store"])
def test_no_network_or_no_package_is_one_message(tmp_path: Path, address: str) -> None:
    if address.startswith("gs") and importlib.util.find_spec("gcsfs"):
        pytest.skip("gcsfs is installed, and would use the network")
    with pytest.raises(UserError) as caught:
        acquire(settings(["t2m"]), days("2020-02-28", "2020-02-29", address), tmp_path / "out.nc")
    assert str(caught.value).startswith(address)
    assert "compute nodes have no network" in str(caught.value) or "pip install" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("levels", [(1000.0, 500.0, 1000.0), (1000.0011, 1000.0012, 500.0)])
def test_levels_with_the_same_name_are_refused(levels: tuple[float, ...]) -> None:
    """Only the first of two equal levels would be read."""
    states = atmosphere(names=("z",)).assign_coords(level=("level", np.float64(levels)))
    with pytest.raises(UserError, match="f: 'z' has several levels at 1000 hPa"):
        gridded(states, "f", {"z"})


def test_wrapped_longitudes_and_expver_have_their_own_remedy() -> None:
    west = np.array([*range(352, 360), *range(8)], float)
    assert _regular(np.arange(3.0), west, "f")[1].tolist() == [*range(352, 368)]
    with pytest.raises(UserError, match="longitudes jump back at the meridian"):
        _regular(np.arange(3.0), np.array([*range(8), *range(352, 360)], float), "f")
    with pytest.raises(UserError, match="first and the last longitude are the same meridian"):
        _regular(np.arange(3.0), np.linspace(0.0, 360.0, 5), "f")
    assert _regular(np.arange(3.0), np.arange(0.0, 360.0, 0.25), "f")[1].size == 1440
    axes = {"time": [0, 1], "expver": [1, 5], "latitude": [1.0, 0.0], "longitude": [0.0, 1.0]}
    array = xr.DataArray(np.zeros((2, 2, 2, 2)), axes, [*axes], "t2m")
    with pytest.raises(UserError, match=r"`expver` separates ERA5 from ERA5T.*t2m.max"):
        gridded(array.to_dataset(), "f", {"t2m"})


@pytest.mark.parametrize(
    ("axis", "units", "levels", "channel"),
    [
        ("level", "Pascal", (85000, 50000, 20000), "z@500"),
        ("level", "millibars", LEVELS, "z@500"),
        ("level", "kPa", (85, 50, 20), ""),
        ("level", "m", LEVELS, ""),
        ("latitude", "degrees_north", LEVELS, "z@500"),
        ("latitude", "radian", LEVELS, ""),
        ("latitude", "degrees_south", LEVELS, ""),
        ("longitude", "degrees_west", LEVELS, ""),
        ("longitude", "degreesW", LEVELS, ""),
        ("longitude", "degree_E", LEVELS, "z@500"),
    ],
)
def test_units_of_axes_are_applied_or_refused(
    tmp_path: Path, axis: str, units: str, levels: tuple[int, ...], channel: str
) -> None:
    """Levels in Pa, hPa or millibars are read; other levels, radians, and degrees south or west are refused."""
    states = atmosphere(names=("z",)).assign_coords(level=("level", np.float64(levels)))
    states[axis].attrs["units"] = units
    states.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    if channel:
        source = open_source(settings([channel]), part(), [tmp_path / "a.nc"])
        np.testing.assert_array_equal(fields(source)[:, 0], states.z[:, 1])
    else:
        message = refused(tmp_path / "a.nc", channels=("z@500",))
        assert f"'{axis}': '{units.lower()}'" in message and "expected pressure levels in hPa" in message


@pytest.mark.parametrize(
    ("said", "is_pressure"),
    [
        ({}, True),
        ({"long_name": "pressure_level"}, True),
        ({"standard_name": "air_pressure", "long_name": "pressure"}, True),
        ({"standard_name": "atmosphere_hybrid_sigma_pressure_coordinate"}, False),
        ({"standard_name": "depth"}, False),
        ({"long_name": "model_level_number", "positive": "down"}, False),
    ],
)
def test_levels_without_units_are_pressures_unless_they_say_otherwise(said: dict[str, str], is_pressure: bool) -> None:
    states = atmosphere(names=("z",))
    states["level"].attrs = said
    if is_pressure:
        assert "z@500" in gridded(states, "f", {"z"})[0][0].channels
    else:
        with pytest.raises(UserError, match="expected pressure levels in hPa"):
            gridded(states, "f", {"z"})


@pytest.mark.parametrize(
    ("start", "first"),
    [
        ("2019-01-01 00:00:00 +06:00", "2018-12-31T18:00"),
        ("2019-01-01 00:00:00 -3", "2019-01-01T03:00"),
        ("2019-1-1T12:00Z", "2019-01-01T12:00"),
        ("2019-01-01 00:00:0.0 UTC", "2019-01-01T00:00"),
        *((start, "") for start in ("2019-01-01 12:00:00 6:00", "2019-01-01 00:00:00 UTC+3", "01/02/2019")),
    ],
)
def test_time_zones_are_applied_or_refused(start: str, first: str) -> None:
    """A zone is subtracted (UDUNITS' grammar); forms that libraries read differently are refused."""
    clock = xr.Variable("time", np.arange(2), {"units": f"hours since {start}", "calendar": "standard"})
    if first:
        assert era5_source._decoded_times(clock, "f")[0] == np.datetime64(first)
    else:
        with pytest.raises(UserError, match=r"times cannot be read .*00:00:00 \+01:00"):
            era5_source._decoded_times(clock, "f")


@pytest.mark.parametrize(("mark", "is_number"), [("-999", True), ("-99.9f", True), ("none", False)])
def test_a_missing_value_that_is_a_text_is_refused(tmp_path: Path, mark: str, is_number: bool) -> None:
    """xarray ignores a text in `missing_value`, so missing values would count as data."""
    states = atmosphere(names=("t2m",))
    states.t2m[2, 3, 4] = -999.0
    states.t2m.encoding["_FillValue"] = None
    states.t2m.attrs["missing_value"] = mark
    states.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    if is_number:
        assert f"'t2m' has the text '{mark}' as its attribute missing_value" in refused(tmp_path / "a.nc")
    else:
        assert fields(open_source(settings(["t2m"]), part(), [tmp_path / "a.nc"])).min() == -999.0


@pytest.mark.parametrize(
    ("temperature", "moisture", "wrong"),
    [("K", "kg kg**-1", ""), ("kelvin", "1", ""), ("degC", "kg kg-1", "'t' is in 'degC'"), ("K", "g/kg", "'q' is in")],
)
def test_relative_humidity_needs_known_units(temperature: str, moisture: str, wrong: str) -> None:
    """The formula takes K and kg/kg; other units would give relative humidities of thousands of per cent."""
    states = atmosphere(names=("t",))
    states = states.assign(q=0.0 * states.t + 5e-3)
    states.t.attrs["units"], states.q.attrs["units"] = temperature, moisture
    variables, names = gridded(states.assign_coords(time=("time", 6 * np.arange(16), HOURS)), "f", {"t", "q", "r"})
    with pytest.raises(UserError, match=f"f: {wrong}.*; expected [Kk]") if wrong else contextlib.nullcontext():
        source = Era5Source(settings(["r@500"]), variables, names, None, "f")
        kelvin = states.t.sel(level=500).values[0].astype(float)
        expected = era5_source.relative_humidity(kelvin, np.full_like(kelvin, 5e-3), 50000.0)
        np.testing.assert_allclose(source.read(0, 1)["fields"][0, 0], expected, rtol=1e-5)


MEMBER, OVER_TIME = {"productDefinitionTemplateNumber": 1}, {"productDefinitionTemplateNumber": 8, "stepType": "accum"}
ABOVE, ENSEMBLE, RAIN = (
    {"typeOfLevel": "heightAboveGround"},
    {"productDefinitionTemplateNumber": 2},
    {"paramId": 228, **OVER_TIME},
)
#: By case: channel, GRIB keys of two kinds of fields (alternating in a file, or in two files), and expected message.
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "members": ("t2m", {**MEMBER, "number": 0}, {**MEMBER, "number": 3}, "number is 0 in .*, 3 in"),
    "a member and no member": ("t2m", {}, {**MEMBER, "number": 3}, "number is 0 in .*, 3 in"),
    "heights": ("t", {**ABOVE, "level": 80}, {**ABOVE, "level": 90}, "is heightAboveGround 80 in .*, .*Ground 90 in"),
    "level types": ("t", {**ABOVE, "level": 80}, {"typeOfLevel": "surface"}, "Ground 80 in .*, surface 0 in"),
    "step types": ("t2m", {}, {**OVER_TIME, "stepRange": "0-6"}, "stepType is instant in .*, accum in"),
    "lengths": ("tp", {**RAIN, "stepRange": "0-6"}, {**RAIN, "stepRange": "0-12"}, "is 6 h in .*, 12 h in"),
    "mean and spread": (
        "t2m",
        {**ENSEMBLE, "derivedForecast": 0},
        {**ENSEMBLE, "derivedForecast": 4},
        " 0 in .*, 4 in",
    ),
}


@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("case", KINDS)
def test_grib_fields_of_different_kinds_are_refused(tmp_path: Path, case: str, files: int) -> None:
    """Members, levels or statistics over time that alternate in a file, or differ between files, are refused."""
    channel, *keys, words = KINDS[case]
    states, paths = atmosphere(names=("t2m",)), [tmp_path / name for name in ("a.grib", "b.grib")[:files]]
    for number, its in enumerate(keys):
        chosen = slice(number, None, 2) if files == 1 else slice(8 * number, 8 * number + 8)
        hours = np.timedelta64(int(its.get("stepRange", "0-0").partition("-")[2]), "h")
        fields_of_kind = states.isel(time=chosen)
        write_grib(fields_of_kind.assign_coords(time=fields_of_kind.time - hours), paths[-number], "ab", **its)
    message = refused(*paths, channels=(channel,))
    assert re.search(f"'{channel}' has fields of different kinds: .*{words}", message), message


def test_accumulations_over_equal_times_are_one_series(tmp_path: Path) -> None:
    """Accumulations over 6 hours from two forecasts, and instantaneous fields of several lead times, are read."""
    states, path = atmosphere(names=("t2m",)), tmp_path / "a.grib"
    for number, span in enumerate(("0-6", "6-12")):
        end = np.timedelta64(6 + 6 * number, "h")
        some = states.isel(time=slice(number, None, 2))
        keys = {**RAIN, "stepRange": span}
        write_grib(some.assign_coords(time=some.time - end), path, "ab", **keys)
        write_grib(some.assign_coords(time=some.time - end), path, "ab", forecastTime=6 + 6 * number)
    for channel in ("tp", "t2m"):
        source = open_source(settings([channel]), part(), [path])
        np.testing.assert_array_equal(fields(source)[:, 0], states.t2m)


def test_netcdf_files_of_different_kinds_are_refused(tmp_path: Path) -> None:
    """Members, GRIB's step types and CF's statistics over time must agree between NetCDF files, and with GRIB files."""
    states = atmosphere(names=("t2m",))
    first, second = states.isel(time=slice(0, 8)), states.isel(time=slice(8, None))
    write_grib(first, tmp_path / "a.grib", productDefinitionTemplateNumber=1, number=3)
    cases: list[tuple[dict[str, Any], dict[str, str], str]] = [
        ({"number": 4}, {}, "number is 3 in .*a.nc, 4 in .*b.nc"),
        ({"number": 3.0}, {"GRIB_stepType": "avg"}, "stepType is instant in .*, avg in .*b.nc"),
        ({"level": ((), 85000.0, {"units": "Pa"})}, {}, "level is 500 in .*a.nc, 850 in .*b.nc"),
        ({}, {"cell_methods": "area: mean time: mean"}, "cell_methods is time: point in .*, time: mean in .*b.nc"),
    ]
    first = first.assign_coords(number=3, level=500)
    first.t2m.attrs |= {"GRIB_stepType": "instant", "cell_methods": "time: point"}
    for coordinates, attributes, words in cases:
        other = second.assign_coords(coordinates)
        other.t2m.attrs = {**states.t2m.attrs, **attributes}
        paths = [write(states, tmp_path / name, "netcdf4") for name, states in (("a.nc", first), ("b.nc", other))]
        assert re.search(f"'t2m' has fields of different kinds: {words}", refused(*paths))
    later = write(second.assign_coords(number=3), tmp_path / "b.nc", "netcdf4")
    source = open_source(settings(["t2m"]), part(), [tmp_path / "a.grib", later])
    np.testing.assert_array_equal(fields(source)[:, 0], states.t2m)


def test_messages_of_different_units_in_one_grib_file_are_refused(tmp_path: Path) -> None:
    """Total cloud cover has one name in GRIB, but is a fraction (paramId 164) or per cent (228164)."""
    states = atmosphere(names=("t2m",))
    for number, times in enumerate((slice(0, 8), slice(8, None))):
        write_grib(states.isel(time=times), tmp_path / "a.grib", "ab", paramId=(164, 228164)[number])
    message = refused(tmp_path / "a.grib", channels=("tcc",))
    assert "'tcc' is on another grid or in other units" in message and "in '%'; expected" in message


@pytest.mark.parametrize("units", ["K", "Pa", "m"])
def test_a_part_of_a_chunk_that_was_never_written_is_refused(tmp_path: Path, units: str) -> None:
    """HDF5 reads 0 where a part of a chunk was never written: refused for temperatures and pressures."""
    states = atmosphere(names=("t2m",))
    states.t2m.attrs["units"] = units
    write(states, tmp_path / "a.nc", "netcdf4", chunk=8)
    with h5py.File(tmp_path / "a.nc", "r+") as file:
        file["t2m"][14:] = 0.0
        file["t2m"].attrs["_FillValue"] = np.float32([np.nan])
    if units == "m":
        read = fields(open_source(settings(["t2m"]), part(), [tmp_path / "a.nc"]), block=16)
        assert not read[14:].any() and read[13].all()
    else:
        assert f"'t2m' is 0 {units} at all points of 1 fields in this block" in refused(tmp_path / "a.nc")
    assert fields(open_source(settings(["t2m"]), part("2020-02-27", "2020-02-28"), [tmp_path / "a.nc"])).all()


@pytest.mark.parametrize(("declared", "grown"), [(False, True), (False, False), (True, True)])
def test_times_that_were_never_written_are_refused(tmp_path: Path, declared: bool, grown: bool) -> None:
    """HDF5 reads unwritten values as 0, and NetCDF pads variables that are shorter than an unlimited dimension."""
    shape, fill = (8 if grown else 4, 2, 3), {"fillvalue": np.nan} if declared else {}
    with h5netcdf.File(tmp_path / "a.nc", "w") as file:
        file.dimensions = {"time": None, "latitude": 2, "longitude": 3}
        file.resize_dimension("time", 8)
        clock = file.create_variable("time", ("time",), "f8", data=6.0 * np.arange(8))
        clock.attrs["units"] = "hours since 2020-01-01"
        file.create_variable("latitude", ("latitude",), data=np.float32([50, 49]))
        file.create_variable("longitude", ("longitude",), data=np.float32([0, 1, 2]))
        file.create_variable("t2m", ("time", "latitude", "longitude"), "f4", chunks=(1, 2, 3), **fill)
    with h5py.File(tmp_path / "a.nc", "r+") as file:
        file["t2m"].resize(shape)
        file["t2m"][:4] = 280.0
    message = refused(tmp_path / "a.nc")
    assert ("has no value at 2020-01-02 00:00" if declared else "a part of 't2m' was never written") in message
