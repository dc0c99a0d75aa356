"""The names of channels: those of the published files, whose order is all that names them, and those of archives."""

from __future__ import annotations

import contextlib

#: Name and unit, in the order of FourCastNet (Pathak et al. 2022, arXiv:2202.11214; `parallel_copy_small_set.py` of its
#: code): the tutorials' u10m is channel 0, their figure's t2m channel 2.
CHANNELS = {
    "u10": "m s**-1",
    "v10": "m s**-1",
    "t2m": "K",
    "sp": "Pa",
    "msl": "Pa",
    "t@850": "K",
    "u@1000": "m s**-1",
    "v@1000": "m s**-1",
    "z@1000": "m**2 s**-2",
    "u@850": "m s**-1",
    "v@850": "m s**-1",
    "z@850": "m**2 s**-2",
    "u@500": "m s**-1",
    "v@500": "m s**-1",
    "z@500": "m**2 s**-2",
    "t@500": "K",
    "z@50": "m**2 s**-2",
    "r@500": "%",
    "r@850": "%",
    "tcwv": "kg m**-2",
}
#: ECMWF's short names, by the names in ARCO-ERA5 and WeatherBench2.
SHORT_NAMES = {
    "10m_u_component_of_wind": "u10",
    "10m_v_component_of_wind": "v10",
    "2m_temperature": "t2m",
    "surface_pressure": "sp",
    "mean_sea_level_pressure": "msl",
    "total_column_water_vapour": "tcwv",
    "temperature": "t",
    "u_component_of_wind": "u",
    "v_component_of_wind": "v",
    "geopotential": "z",
    "specific_humidity": "q",
    "relative_humidity": "r",
}


def short(channel: str) -> str:
    """Return `name` or `name@level` in the form in which channels are compared: short name, level without zeros."""
    name, at, level = channel.partition("@")
    with contextlib.suppress(ValueError):
        level = f"{float(level):g}"
    return SHORT_NAMES.get(name, name) + at + level


def base(channel: str) -> str:
    """Return the short name of a channel's variable."""
    return short(channel).partition("@")[0]
