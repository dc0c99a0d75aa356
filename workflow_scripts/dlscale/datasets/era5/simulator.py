"""Writes simulated years as NetCDF; `dlscale.datasets.era5.dynamics` says what is in them."""

from __future__ import annotations

import calendar
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5netcdf
import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, model_validator

from dlscale.core.files import Forgiving, whole
from dlscale.core.schema import Strict
from dlscale.core.settings import validate
from dlscale.datasets.era5.cf import create_series
from dlscale.datasets.era5.dynamics import trajectory
from dlscale.datasets.era5.sphere import (
    Complex,
    Real,
    Sphere,
    geopotential_from_vorticity,
    legendre,
    synthesis,
    velocity_from_vorticity,
)

SMALLEST_TRUNCATION, LARGEST_TRUNCATION = 21, 127  # by default: storms need the one, a year affords the other
CHUNK_BYTES = 1 << 20  # of one variable: held in memory, then written at once

# name, units, long name, CF standard name; the order of the channels of a snapshot
VARIABLES = (
    ("u10", "m s-1", "eastward wind", "eastward_wind"),
    ("v10", "m s-1", "northward wind", "northward_wind"),
    ("t2m", "K", "temperature", "air_temperature"),
    ("vo", "s-1", "relative vorticity", "atmosphere_relative_vorticity"),
    ("z", "m2 s-2", "geopotential near 500 hPa", "geopotential"),
)


def times(year: int, days: int | None = None) -> NDArray[np.datetime64]:
    """Return the 6-hourly times of `days` days (the whole year by default) from `year`-01-01T00."""
    days = 365 + calendar.isleap(year) if days is None else days
    return np.datetime64(f"{year:04d}-01-01T00", "h") + 6 * np.arange(4 * days)


def coordinates(latitudes: int, longitudes: int) -> tuple[Real, Real]:
    """Return the centres of equal cells in degrees: latitudes north to south, longitudes 0 to 360 from 0."""
    return 90.0 - 180.0 * (np.arange(latitudes) + 0.5) / latitudes, 360.0 * np.arange(longitudes) / longitudes


def snapshot(sphere: Sphere, state: Complex, mu: Real, table: Real, longitudes: int) -> NDArray[np.float32]:
    """Evaluate the `VARIABLES` of one state at any latitudes, `[5, J, longitudes]` float32.

    Parameters
    ----------
    state
        Vorticity (s-1) and temperature (K), `[2, T+1, T+2]`.
    mu, table
        Sines of the latitudes, none a pole, `[J]`, and `legendre` of them.
    longitudes
        How many, equally spaced from 0; where they are too few for the truncation, the fields are sampled.
    """
    wind, phi = velocity_from_vorticity(sphere, state[0]), geopotential_from_vorticity(sphere, state[0])
    spectral = np.concatenate([wind, state[1:], state[:1], phi[None]])
    every = -(-(2 * sphere.truncation + 1) // longitudes)
    fields = synthesis(spectral, table, every * longitudes)[..., ::every]
    fields[:2] /= np.sqrt(1 - mu**2)[:, None]
    return fields.astype(np.float32)


class Year(Strict):
    """A simulated year, and its grid."""

    year: int = Field(ge=1700, le=2200)  # what datetime64[ns] holds
    days: PositiveInt | None = None  # from January 1st; None for the whole year, 1460 or 1464 snapshots
    latitudes: int = Field(ge=4, le=4096)
    longitudes: int = Field(ge=4, le=8192)
    seed: int = Field(0, ge=0, lt=2**63)  # of the initial state and of the kicks, with the year
    # Largest total wavenumber of the model; None for all that the grid resolves, between 21 and 127, so that a snapshot
    # holds the model's whole state. The cost grows as its fourth power.
    truncation: int | None = Field(None, ge=17, le=511)
    spinup_days: int = Field(20, ge=0, le=10000)  # simulated and discarded first
    # Root mean square of the random kick of vorticity before each 6 hours, s-1; of a field near 5e-5.
    stirring: float = Field(1e-6, ge=0, le=1)
    courant: float = Field(1.5, ge=0.01, le=2.5)  # see `six_hours`

    @model_validator(mode="after")
    def _ends(self) -> Year:
        if self.days and self.days > 365 + calendar.isleap(self.year):
            raise ValueError(f"days {self.days}: year {self.year} has fewer")
        return self


def simulate_year(
    path: str | os.PathLike[str], *, progress: Callable[[int, int], None] | None = None, **settings: float | None
) -> None:
    """Write one simulated year as CF NetCDF-4: float32 `VARIABLES` (time, latitude, longitude), 6-hourly.

    The same settings give the same bytes on the same machine; other seeds and years give independent
    trajectories of the same planet. Memory does not grow with `days`: one chunk of each variable, and the
    Legendre tables. `path` appears whole or not at all.

    Parameters
    ----------
    path
        The file to write.
    progress
        Called as (6-hour steps done, steps in all), about a hundred times.
    **settings
        Fields of `Year` by name.

    Raises
    ------
    UserError
        A setting is out of its range, the integration fails, or the file cannot be written.
    """
    year = validate(Year, settings, "simulated era5")
    resolved = min(year.longitudes // 2, year.latitudes) - 1
    truncation = year.truncation or min(max(resolved, SMALLEST_TRUNCATION), LARGEST_TRUNCATION)
    when, (latitude, longitude) = times(year.year, year.days), coordinates(year.latitudes, year.longitudes)
    mu = np.sin(np.deg2rad(latitude))
    sphere, table = Sphere.of(truncation), legendre(truncation, mu)
    spinup, steps = 4 * year.spinup_days, when.size
    chunk = min(steps, max(1, CHUNK_BYTES // (4 * year.latitudes * year.longitudes)))
    block = np.empty((chunk, len(VARIABLES), year.latitudes, year.longitudes), np.float32)
    states = trajectory(sphere, year.seed, year.year, year.stirring, year.courant)

    with whole(path) as temporary, Forgiving(temporary) as raw, h5netcdf.File(raw, "w") as file:
        hours = when.astype(np.int64).astype(np.float64)
        file.attrs["title"] = "Simulated 6-hourly atmosphere in the manner of ERA5"
        variables = create_series(file, hours, latitude, longitude, VARIABLES, chunk)
        file.attrs["source"] = f"dlscale barotropic vorticity model, T{truncation}, seed {year.seed}, year {year.year}"
        for done, state in enumerate(itertools.islice(states, spinup + steps), start=1):
            if (kept := done - spinup) > 0:
                block[(kept - 1) % chunk] = snapshot(sphere, state, mu, table, year.longitudes)
                if kept % chunk == 0 or kept == steps:
                    start = (kept - 1) // chunk * chunk
                    for channel, variable in enumerate(variables):
                        variable[start:kept] = block[: kept - start, channel]
            if progress and (done % max(1, (spinup + steps) // 100) == 0 or done == spinup + steps):
                progress(done, spinup + steps)


def acquire(dataset: Any, raw: Any, out: Path, progress: Callable[[int, int | None], None]) -> None:
    """Simulate the year of a raw file."""
    settings = {key: getattr(dataset.source, key) for key in ("latitudes", "longitudes", "days", "seed")}
    simulate_year(out, year=raw.index, progress=progress, **settings)
