"""Readers of atmospheric files: every format against plain xarray, and every mistake with its message."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import numpy as np
import xarray as xr

REAL = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "era5"
GRIB, CLASSIC = REAL / "era5-2mt-2019-03-uk.grib", REAL / "eraint_uvz.nc"
FORMATS = ("netcdf4", "packed", "netcdf3", "zarr", "grib")
SHORT_NAMES = {"t2m": "2t", "u10": "10u", "z": "z", "t": "t"}
UNITS = {"t2m": "K", "u10": "m s**-1", "z": "m**2 s**-2", "t": "K"}
LEVELS = (850, 500, 200)

Period = tuple[dt.date, dt.date]


# ------------------------------------------------------------------------------------------------- making input


def atmosphere(
    start: str = "2020-02-27",
    hours: int = 96,
    step: int = 6,
    names: tuple[str, ...] = ("t2m", "u10", "z", "t"),
    height: int = 9,
    width: int = 12,
) -> xr.Dataset:
    """Random states [time, (level,) latitude, longitude], north to south; z and t are on LEVELS."""
    times = np.datetime64(start, "ns") + np.arange(0, hours, step) * np.timedelta64(1, "h")
    axes = {
        "time": times,
        "level": ("level", np.array(LEVELS, np.int32), {"units": "hPa"}),
        "latitude": np.linspace(60.0, 60.0 - 2.5 * (height - 1), height),
        "longitude": np.arange(width) * 2.5,
    }
    rng, data = np.random.default_rng(hash(start) % 1000), {}
    for name in names:
        dims = ["time", "latitude", "longitude"]
        if name in ("z", "t"):
            dims.insert(1, "level")
        shape = [np.size(axes[dim]) if dim != "level" else len(LEVELS) for dim in dims]
        values = (280 + 10 * rng.standard_normal(shape)).astype(np.float32)
        data[name] = (dims, values, {"units": UNITS[name], "long_name": f"the {name}"})
    return xr.Dataset(data, axes)


def write(states: xr.Dataset, path: Path, form: str) -> Path:
    """Write in one of FORMATS; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if form == "grib":
        write_grib(states, path)
    elif form == "zarr":
        states.chunk_encoding = None if False else None  # type: ignore[attr-defined]
    return path
