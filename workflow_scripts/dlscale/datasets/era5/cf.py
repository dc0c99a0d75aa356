"""The layout of the NetCDF files that dlscale writes: CF conventions, [time, latitude, longitude]."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import h5netcdf
import numpy as np


def create_series(
    file: h5netcdf.File,
    hours: np.ndarray,
    latitude: np.ndarray,
    longitude: np.ndarray,
    variables: Iterable[tuple[str, ...]],
    chunk: int | None = None,
) -> list[Any]:
    """Create dimensions, coordinates and empty float32 variables; return the variables.

    `hours` [T] count since 1970-01-01T00 UTC, axes are degrees; a variable has a name, units, long name and perhaps a
    CF standard name. `chunk` times are stored together; contiguous if None.
    """
    axes = {"time": hours, "latitude": latitude, "longitude": longitude}
    units = {"time": "hours since 1970-01-01", "latitude": "degrees_north", "longitude": "degrees_east"}
    file.dimensions = {name: values.size for name, values in axes.items()}
    for name, values in axes.items():
        coordinate = file.create_variable(name, (name,), np.float64, data=values)
        coordinate.attrs.update(units=units[name], standard_name=name, long_name=name)
    file.variables["time"].attrs["calendar"] = "proleptic_gregorian"
    file.attrs["Conventions"] = "CF-1.8"
    chunks = None if chunk is None else (chunk, latitude.size, longitude.size)
    created = []
    for name, *attributes in variables:
        variable = file.create_variable(name, tuple(axes), np.float32, chunks=chunks)
        variable.attrs.update(zip(("units", "long_name", "standard_name"), attributes, strict=False))
        created.append(variable)
    return created
