"""Variables of NetCDF files and Zarr stores, through xarray."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dlscale.core.errors import UserError
from dlscale.datasets.era5.variables import GRID, TORN, Variable, reading, regular, usable

if TYPE_CHECKING:
    import xarray as xr

# what the axes are called: by CF, ECMWF's two generations of NetCDF, cfgrib, ARCO-ERA5 and WeatherBench2
TIMES = ("valid_time", "time")
LATITUDES = ("latitude", "lat")
LONGITUDES = ("longitude", "lon")
LEVELS = ("isobaricInhPa", "isobaricInPa", "pressure_level", "level", "plev", "lev")


def open_netcdf(path: Path, engine: str, wanted: Collection[str], stack: contextlib.ExitStack) -> list[Variable]:
    """List the variables of a NetCDF file or a local Zarr store."""
    import xarray as xr

    with reading(path):
        opened = stack.enter_context(xr.open_dataset(path, engine=engine, decode_times=False, cache=False))
        return gridded(opened, str(path), wanted)


def gridded(dataset: xr.Dataset, origin: str, wanted: Collection[str], advice: str = TORN) -> list[Variable]:
    """List the variables of an xarray dataset that lie on time, latitude and longitude, and perhaps level.

    Parameters
    ----------
    dataset
        Opened lazily with `decode_times=False` and `cache=False`.
    origin
        For messages.
    wanted
        Names whose variables must be readable: a `UserError` says why they are not. Others are left out.
    advice
        What to do when a read fails later on.
    """
    times = functools.cache(lambda clock: _decoded_times(dataset.variables[clock], origin))  # one for all variables
    return usable(
        {
            str(name): functools.partial(_gridded, dataset, str(name), times, origin, advice)
            for name in dataset.data_vars
        },
        wanted,
        origin,
    )


def _gridded(dataset: xr.Dataset, name: str, times: Callable[[str], np.ndarray], origin: str, advice: str) -> Variable:
    """Describe one variable, or say why it is not a series of states on a regular grid."""
    array = dataset[name]

    def refused(problem: str) -> UserError:
        axes = ", ".join(f"{dim} ({size})" for dim, size in array.sizes.items()) or "none"
        return UserError(f"{origin}: '{name}' {problem}; its dimensions: {axes}")

    def coordinate(candidates: Sequence[str], ndim: Sequence[int] = (1,)) -> str | None:
        """Return the first of these that belongs to the variable; an axis rather than a single value."""
        known = {key: dataset.variables[key] for key in candidates if key in dataset.variables}
        fitting = [key for key, axis in known.items() if axis.ndim in ndim and set(axis.dims) <= set(array.dims)]
        return max(fitting, key=lambda key: known[key].ndim, default=None)

    named = {"latitude": coordinate(LATITUDES), "longitude": coordinate(LONGITUDES)}
    named |= {"time": coordinate(TIMES, (0, 1)), "level": coordinate(LEVELS, (0, 1))}
    coordinates = {key: dataset.variables[other] for key, other in named.items() if other is not None}
    axes = {key: variable.dims[0] for key, variable in coordinates.items() if variable.ndim}
    if len({axes.get("latitude"), axes.get("longitude")} - {None}) < 2:
        raise refused(f"is not on axes {' / '.join(LATITUDES)} and {' / '.join(LONGITUDES)}; {GRID}")
    if named["time"] is None:
        raise refused(f"has no time axis; expected {' or '.join(TIMES)}")
    if not array.size:
        raise refused("holds no values")
    rest = [dim for dim in array.dims if dim not in axes.values()]
    if further := [dim for dim in rest if array.sizes[dim] > 1]:
        raise refused(f"has the further dimension {further[0]}; select one of its entries, or average over it")

    channels: tuple[str, ...] = (name,)
    if "level" in coordinates:
        level = coordinates["level"]
        hectopascals = np.atleast_1d(level.values) / (100.0 if level.attrs.get("units") == "Pa" else 1.0)
        channels = tuple(f"{name}@{value:g}" for value in hectopascals)

    values = array.variable
    order = [axes[key] for key in ("time", "level", "latitude", "longitude") if key in axes]

    def load(times: np.ndarray, levels: list[int], rows: slice, columns: slice) -> np.ndarray:
        asked = {"time": _compact(times), "level": _compact(levels), "latitude": rows, "longitude": columns}
        index: dict[Any, Any] = {axes[key]: asked[key] for key in axes} | dict.fromkeys(rest, 0)
        # transposed only once it is read: a lazy transposition would make the library read point by point
        read = values.isel(index).load().transpose(*order).values
        return np.asarray(read, np.float32).reshape(len(times), len(levels), rows.stop - rows.start, -1)

    chunks = {axes[key]: 1 for key in axes} | values.encoding.get("preferred_chunks", {})
    height, width = (array.sizes[axes[key]] for key in ("latitude", "longitude"))
    stored = np.dtype(values.encoding.get("dtype", values.dtype)).itemsize

    def footprint(levels: list[int], rows: slice, columns: slice) -> tuple[int, int]:
        selected = len(levels) * (rows.stop - rows.start) * (columns.stop - columns.start)
        indices = {"level": levels, "latitude": range(height)[rows], "longitude": range(width)[columns]}
        touched = 1  # stored values: whole chunks
        for key in axes.keys() & indices.keys():
            chunk = chunks[axes[key]]
            touched *= min(len({index // chunk for index in indices[key]}) * chunk, array.sizes[axes[key]])
        # both kinds twice, while they are unpacked and then masked and scaled; and the result
        return 2 * stored * touched, (2 * values.dtype.itemsize + 4) * selected

    return regular(
        Variable(
            origin,
            channels,
            str(array.attrs.get("units", "")),
            str(array.attrs.get("long_name", array.attrs.get("standard_name", name))),
            times(named["time"]),
            coordinates["latitude"].values.astype(np.float64),
            coordinates["longitude"].values.astype(np.float64),
            load,
            footprint,
            chunks[axes["time"]] if "time" in axes else 1,
            advice,
        )
    )


def _decoded_times(clock: xr.Variable, origin: str) -> np.ndarray:
    """Decode a CF time axis to datetime64[s], [T]."""
    import xarray as xr

    try:
        coder = xr.coders.CFDatetimeCoder(use_cftime=False, time_unit="s")
        times = xr.conventions.decode_cf_variable("time", clock, decode_times=coder).values
    except Exception as error:
        raise UserError(f"{origin}: the time axis cannot be read ({' '.join(str(error).split())[:200]})") from error
    if times.dtype.kind != "M" or np.isnat(times).any():
        units, calendar = (clock.attrs.get(key, "none") for key in ("units", "calendar"))
        raise UserError(
            f"{origin}: the time axis holds no dates of the standard calendar (units: {units}, calendar: {calendar}); "
            "expected, e.g., 'hours since 1900-01-01'"
        )
    nearest_second = times.astype("datetime64[ms]") + np.timedelta64(500, "ms")  # hours as float32 are a little off
    return np.atleast_1d(nearest_second.astype("datetime64[s]"))


def _compact(indices: Sequence[int] | np.ndarray) -> slice | np.ndarray:
    """Return a slice in place of evenly spaced, ascending indices: every format reads these fast."""
    indices = np.asarray(indices)
    steps = np.unique(np.diff(indices))
    if steps.size > 1 or (steps.size == 1 and steps[0] <= 0):
        return indices
    return slice(int(indices[0]), int(indices[-1]) + 1, int(steps[0]) if steps.size else 1)
