"""One variable of an atmospheric file, and the names that variables go by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dlscale.core.files import TORN

#: What ECMWF's short names are called in ARCO-ERA5 and WeatherBench2.
LONG_NAMES = {
    "u10": "10m_u_component_of_wind",
    "v10": "10m_v_component_of_wind",
    "t2m": "2m_temperature",
    "sp": "surface_pressure",
    "msl": "mean_sea_level_pressure",
    "tcwv": "total_column_water_vapour",
    "t": "temperature",
    "u": "u_component_of_wind",
    "v": "v_component_of_wind",
    "z": "geopotential",
    "q": "specific_humidity",
    "r": "relative_humidity",
}


def names_of(name: str) -> tuple[str, ...]:
    """Return the names under which a variable may stand, its own first."""
    return (name, LONG_NAMES[name]) if name in LONG_NAMES else (name,)


def wanted_names(channels: list[str]) -> set[str]:
    """Return all names under which the variables of these channels may stand."""
    return {name for channel in channels for name in names_of(channel.partition("@")[0])}


def _absent(time: int, level: int, row: int, column: int) -> str:
    return "it is not in the file"


@dataclass(frozen=True, eq=False)
class Variable:
    """One variable of one file, its values not read yet."""

    origin: str  # the file or store, for messages
    channels: tuple[str, ...]  # `name`, or `name@level` for each of L levels
    units: str
    long_name: str
    times: np.ndarray  # [T], when each field is valid, as in the file: sorted or not, some of them twice
    latitude: np.ndarray  # [H], north to south, degrees, float64
    longitude: np.ndarray  # [W], ascending, degrees, float64
    #: `load(times, levels, rows, columns)` reads indices [t] and [l] and a window [h, w] of the grid, as float32
    #: [t, l, h, w]; missing values are NaN.
    load: Callable[[np.ndarray, list[int], slice, slice], np.ndarray]
    #: `footprint(levels, rows, columns)`: bytes that `load` needs for one time: of stored values (whole chunks), and of
    #: decoded ones (the selected window).
    footprint: Callable[[list[int], slice, slice], tuple[int, int]]
    chunk: int = 1  # times that are stored, and hence read, together
    advice: str = TORN  # what to do when `load` fails
    #: `missing(time, level, row, column)`: why the value there is NaN.
    missing: Callable[[int, int, int, int], str] = _absent
    #: [T] each: what tells fields apart, by the key that selects them; None where a field has no such key.
    traits: Mapping[str, np.ndarray] = field(default_factory=dict)
    #: `keys(time)`: further keys and their values of one field, which `select` may name, where traits tell nothing.
    keys: Callable[[int], Mapping[str, Any]] = lambda time: {}
