"""Relative humidity out of temperature and specific humidity, where a file holds these two alone (ARCO-ERA5)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from dlscale.datasets.era5.channels import base
from dlscale.datasets.era5.variables import Variable

#: Molar mass of water vapour over that of dry air, by the gas constants of the IFS (J/kg/K).
_EPSILON = 287.0597 / 461.5250
_WATER, _ICE = 273.16, 250.16  # K: above the one all condensate is water, below the other all is ice


def saturation_pressure(temperature: np.ndarray) -> np.ndarray:
    """Return the saturation vapour pressure in Pa for temperatures in K: over water, over ice, or a mixture between.

    Tetens' formula as the IFS has it, and so ERA5 (ECMWF 2016, IFS Documentation Cy41r2, part IV, eq. 7.4 to 7.6).
    """
    t = np.asarray(temperature, np.float64)
    water = 611.21 * np.exp(17.502 * (t - 273.16) / (t - 32.19))
    ice = 611.21 * np.exp(22.587 * (t - 273.16) / (t + 0.7))
    share = np.clip((t - _ICE) / (_WATER - _ICE), 0.0, 1.0) ** 2
    return np.asarray(share * water + (1.0 - share) * ice)


def relative_humidity(temperature: np.ndarray, specific_humidity: np.ndarray, pressure: float) -> np.ndarray:
    """Return the relative humidity in %, for K, kg/kg and Pa: vapour pressure over that of saturation.

    It is not cut off: ERA5's own is negative at some points, and above 100 at others.
    """
    q = np.asarray(specific_humidity, np.float64)
    vapour = pressure * q / (_EPSILON + (1.0 - _EPSILON) * q)
    return np.asarray(100.0 * vapour / saturation_pressure(temperature))


def with_humidity(variables: list[Variable], wanted: Collection[str]) -> list[Variable]:
    """Return the variables and, if it is wanted and not among them, the relative humidity that follows from them."""
    by_name = {name: [v for v in variables if base(v.channels[0]) == name] for name in "rtq"}
    if by_name["r"] or not any(base(channel) == "r" for channel in wanted):
        return variables
    pairs = [(t, q) for t in by_name["t"] for q in by_name["q"] if t.origin == q.origin]
    return [*variables, *(_humidity(t, q) for t, q in pairs if np.array_equal(t.times, q.times))]


def _humidity(t: Variable, q: Variable) -> Variable:
    """Describe the relative humidity on the levels that both variables have; it is computed as it is read."""
    places = [[channel.partition("@")[2] for channel in variable.channels] for variable in (t, q)]
    levels = [level for level in places[1] if level and level in places[0]]

    def load(times: np.ndarray, chosen: list[int], rows: slice, columns: slice) -> np.ndarray:
        kelvin, moisture = (
            variable.load(times, [its.index(levels[number]) for number in chosen], rows, columns)
            for variable, its in zip((t, q), places, strict=True)
        )
        out = np.empty_like(kelvin)
        for at in np.ndindex(out.shape[:3]):  # one circle of latitude at a time: little memory for float64
            out[at] = relative_humidity(kelvin[at], moisture[at], 100.0 * float(levels[chosen[at[1]]]))
        return out

    def footprint(levels: int, rows: int, columns: int, apart: int) -> int:
        return sum(variable.footprint(levels, rows, columns, apart) for variable in (t, q))

    return replace(
        q,
        channels=tuple(f"r@{level}" for level in levels),
        units="%",
        long_name="Relative humidity, from temperature and specific humidity",
        load=load,
        footprint=footprint,
    )
