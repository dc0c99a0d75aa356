"""Simulate a substitute for ERA5: a stirred layer of air on a rotating sphere.

The barotropic vorticity equation is solved by the spectral transform method in spherical harmonics (Bourke 1972; Hack &
Jakob 1992, NCAR/TN-343); the flow transports a temperature. Vorticity and temperature relax towards a fixed, unstable
climate, which keeps the flow turbulent; diffusion removes structures below the truncation. Only a random kick every 6
hours, about 6 per cent of the change in 6 hours, is unpredictable. The model has no seasons, divergence, vertical
structure or surface.

Notation: `T` truncation; `J` latitudes of a grid (a Gaussian grid has 2 J longitudes); `K` fields. Spectral arrays are
complex128 `[..., T+1, T+2]`, by zonal wavenumber m and total wavenumber n (zero for n < m; the column n = T+1 holds
only products such as u cos(latitude)). Harmonics have mean square 1. Grids are `[..., latitude, longitude]`. A state
is vorticity (s-1) and temperature (K), `[2, T+1, T+2]`.
"""

from __future__ import annotations

import calendar
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import h5netcdf
import numpy as np
from numpy.typing import NDArray

from dlscale.core.errors import UserError
from dlscale.core.files import atomic_write
from dlscale.extensions.era5_vit.era5.deferred import DeferredErrorFile

Real = NDArray[np.float64]
Complex = NDArray[np.complex128]

RADIUS = 6.371e6  # Earth's radius, m
OMEGA = 7.292e-5  # rotation rate of the Earth, s-1

CHUNK_BYTES = 1 << 20  # bytes of a variable that are kept in memory and then written together

# Name, units, long name and CF standard name of each variable, in the order of the channels of a snapshot.
VARIABLES = (
    ("u10", "m s-1", "eastward wind", "eastward_wind"),
    ("v10", "m s-1", "northward wind", "northward_wind"),
    ("t2m", "K", "temperature", "air_temperature"),
    ("vo", "s-1", "relative vorticity", "atmosphere_relative_vorticity"),
    ("z", "m2 s-2", "geopotential near 500 hPa", "geopotential"),
)

DAY = 86400.0  # s
INTERVAL = 6 * 3600.0  # between snapshots, s

# Climate, relaxation times and forces are tuned so that winds, temperatures and heights are realistic, and so that the
# change in 6 hours is 0.3 to 0.5 standard deviations on a 5.6 degree grid.
SPINUP_DAYS = 20  # days that are simulated first and discarded
STIRRING = 1e-6  # s-1, root mean square of the 6-hourly vorticity kick (the vorticity itself: about 5e-5)


def coupling(truncation: int) -> Real:
    """Return epsilon[m, n] = sqrt((n^2 - m^2) / (4 n^2 - 1)), `[T+1, T+3]`, zero for n <= m.

    Neighbouring harmonics: mu P[n] = eps[n+1] P[n+1] + eps[n] P[n-1], with mu = sin(latitude).
    """
    m, n = np.ogrid[0.0 : truncation + 1, 0.0 : truncation + 3]
    eps: Real = np.sqrt(np.maximum(n**2 - m**2, 0.0) / (4 * n**2 - 1).clip(min=1.0))
    return eps


def legendre(truncation: int, mu: Real) -> Real:
    """Return the associated Legendre functions P[m, j, n] at `mu` = sin(latitude), `[T+1, J, T+2]`, of mean square 1.

    Recurrence in n from P[m, m] (Belousov 1962).
    """
    eps = coupling(truncation)
    table = np.zeros((truncation + 1, mu.size, truncation + 2))
    sectoral = np.ones_like(mu)
    for m in range(truncation + 1):
        if m:
            sectoral = sectoral * np.sqrt((2 * m + 1) / (2 * m) * (1 - mu**2))
        table[m, :, m] = sectoral
        for n in range(m + 1, truncation + 2):
            below = eps[m, n - 1] * table[m, :, n - 2] if n - 2 >= m else 0.0
            table[m, :, n] = (mu * table[m, :, n - 1] - below) / eps[m, n]
    return table


def synthesis(spectral: Complex, table: Real, longitudes: int) -> Real:
    """Evaluate spectral fields `[K, T+1, T+2]` with `table` [T+1, J, T+2] on a grid, `[K, J, longitudes]`."""
    columns = np.ascontiguousarray(spectral.transpose(1, 2, 0)).view(np.float64)  # [m, n, 2K], for a real product
    fourier = (table @ columns).view(np.complex128).transpose(2, 1, 0)
    return np.fft.irfft(fourier, n=longitudes, axis=-1, norm="forward")


class Sphere:
    """Gaussian grid on which quadratic products of truncated fields can be projected without aliasing.

    T is the truncation. `mu` [J], with J >= (3 T + 1) / 2, are the nodes of the grid from south to north; the `weights`
    [J] of the nodes have the sum 1. `kept` [T+1, T+2] is true for the coefficients of a scalar, m <= n <= T. `table`
    takes 8 (T+1) J (T+2) bytes.
    """

    def __init__(self, truncation: int) -> None:
        self.truncation = truncation
        nodes = 8 * -(-(3 * truncation + 1) // 16)  # a multiple of 8, for fast Fourier transforms
        self.mu, weights = np.polynomial.legendre.leggauss(nodes)
        self.weights: Real = weights / 2
        self.table, self.eps = legendre(truncation, self.mu), coupling(truncation)
        wavenumbers = np.ogrid[0.0 : truncation + 1, 0.0 : truncation + 2]
        self.m: Real = wavenumbers[0]  # zonal wavenumber, [T+1, 1]
        self.n: Real = wavenumbers[1]  # total wavenumber, [1, T+2]
        self.kept: NDArray[np.bool_] = (self.n >= self.m) & (self.n <= truncation)

    def to_grid(self, spectral: Complex) -> Real:
        """Evaluate spectral fields `[K, T+1, T+2]` on the Gaussian grid, `[K, J, 2J]`."""
        return synthesis(spectral, self.table, 2 * self.mu.size)

    def to_spectral(self, grid: Real) -> Complex:
        """Project fields `[K, J, 2J]` on the harmonics; return `[K, T+1, T+2]`, including the column n = T+1."""
        fourier = np.fft.rfft(grid, axis=-1, norm="forward")[..., : self.truncation + 1] * self.weights[:, None]
        columns = np.ascontiguousarray(fourier.transpose(2, 1, 0)).view(np.float64)
        projected = (self.table.transpose(0, 2, 1) @ columns).view(np.complex128)
        return np.ascontiguousarray(projected.transpose(2, 0, 1))


def invert_laplacian(sphere: Sphere, spectral: Complex) -> Complex:
    """Solve laplacian(x) = `spectral` for x with global mean zero: x = -a^2 / (n (n+1)) `spectral`."""
    return -(RADIUS**2) * spectral / np.where(sphere.n > 0, sphere.n * (sphere.n + 1), np.inf)


def velocity_from_vorticity(sphere: Sphere, vorticity: Complex) -> Complex:
    """Return (u, v) cos(latitude) of the non-divergent flow, m/s, `[2, T+1, T+2]`.

    u = -d(psi)/d(latitude) / a and v = d(psi)/d(longitude) / (a cos(latitude)), laplacian(psi) = vorticity.
    """
    psi, n, eps = invert_laplacian(sphere, vorticity), sphere.n, sphere.eps
    north = np.zeros_like(psi)  # cos(latitude) d(psi)/d(latitude), by `coupling` of neighbouring n
    north[:, :-1] = (n[:, :-1] + 2) * eps[:, 1:-1] * psi[:, 1:]
    north[:, 1:] -= (n[:, 1:] - 1) * eps[:, 1:-1] * psi[:, :-1]
    return np.stack([-north, 1j * sphere.m * psi]) / RADIUS


def geopotential_from_vorticity(sphere: Sphere, vorticity: Complex, mean: float = 54500.0) -> Complex:
    """Return the geopotential in linear balance, laplacian(phi) = div(f grad(psi)), m2 s-2, `[T+1, T+2]`.

    The linear balance is also valid at the equator (Lorenz 1960).
    """
    u_cos = velocity_from_vorticity(sphere, vorticity)[0]
    mu_vorticity = np.zeros_like(vorticity)  # mu times the vorticity, by `coupling` of neighbouring n
    mu_vorticity[:, 1:] = sphere.eps[:, 1:-1] * vorticity[:, :-1]
    mu_vorticity[:, :-1] += sphere.eps[:, 1:-1] * vorticity[:, 1:]
    phi = invert_laplacian(sphere, 2 * OMEGA * (mu_vorticity - u_cos / RADIUS))
    phi[0, 0] = mean
    return phi


def times(year: int, days: int | None = None) -> NDArray[np.datetime64]:
    """Return the 6-hourly times of `days` days (the full year by default) from `year`-01-01T00."""
    days = min(365 + calendar.isleap(year), days or 366)
    return np.datetime64(f"{year:04d}-01-01T00", "h") + 6 * np.arange(4 * days)


def snapshot(sphere: Sphere, state: Complex, mu: Real, table: Real, longitudes: int) -> NDArray[np.float32]:
    """Evaluate the `VARIABLES` of a state on a grid, `[5, J, longitudes]` float32.

    `mu` [J] are the sines of the grid's latitudes, and `table` is `legendre` of `mu`. If `longitudes` is too small for
    the truncation, the fields are evaluated on a multiple of the longitudes, and subsampled.
    """
    wind, phi = velocity_from_vorticity(sphere, state[0]), geopotential_from_vorticity(sphere, state[0])
    spectral = np.concatenate([wind, state[1:], state[:1], phi[None]])
    every = -(-(2 * sphere.truncation + 1) // longitudes)
    fields = synthesis(spectral, table, every * longitudes)[..., ::every]
    fields[:2] /= np.sqrt(1 - mu**2)[:, None]
    return fields.astype(np.float32)


def acquire(dataset: Any, raw: Any, out: Path, progress: Callable[[int, int | None], None]) -> None:
    """Write a simulated year as CF NetCDF-4: float32 `VARIABLES` (time, latitude, longitude), 6-hourly.

    The same settings give the same bytes on the same machine; different seeds or years give independent trajectories.
    The memory does not depend on the number of days. `progress` is called with the number of 6-hour steps done, and
    with their total number.
    """
    source, year = dataset.source, raw.index
    latitudes, longitudes, seed = source.latitudes, source.longitudes, source.seed
    resolved = min(longitudes // 2, latitudes) - 1
    truncation = source.truncation or min(max(resolved, 21), 127)  # storms need 21 or more; above 127, a year is slow
    when = times(year, source.days)
    latitude = 90.0 - 180.0 * (np.arange(latitudes) + 0.5) / latitudes
    longitude = 360.0 * np.arange(longitudes) / longitudes
    mu = np.sin(np.deg2rad(latitude))
    sphere, table = Sphere(truncation), legendre(truncation, mu)
    spinup, steps = 4 * SPINUP_DAYS, when.size
    chunk = min(steps, max(1, CHUNK_BYTES // (4 * latitudes * longitudes)))
    block = np.empty((chunk, len(VARIABLES), latitudes, longitudes), np.float32)
    states = trajectory(sphere, seed, year)

    with atomic_write(out) as temporary, DeferredErrorFile(temporary) as raw, h5netcdf.File(raw, "w") as file:
        hours = when.astype(np.int64).astype(np.float64)
        file.attrs["title"] = "Simulated 6-hourly atmosphere in the manner of ERA5"
        variables = create_series(file, hours, latitude, longitude, VARIABLES, chunk)
        file.attrs["source"] = f"dlscale barotropic vorticity model, T{truncation}, seed {seed}, year {year}"
        for done, state in enumerate(itertools.islice(states, spinup + steps), start=1):
            if (kept := done - spinup) > 0:
                block[(kept - 1) % chunk] = snapshot(sphere, state, mu, table, longitudes)
                if kept % chunk == 0 or kept == steps:
                    start = (kept - 1) // chunk * chunk
                    for channel, variable in enumerate(variables):
                        variable[start:kept] = block[: kept - start, channel]
            if done % max(1, (spinup + steps) // 100) == 0 or done == spinup + steps:
                progress(done, spinup + steps)


def create_series(
    file: h5netcdf.File,
    hours: np.ndarray,
    latitude: np.ndarray,
    longitude: np.ndarray,
    variables: Iterable[tuple[str, ...]],
    chunk: int | None = None,
) -> list[Any]:
    """Create dimensions, coordinates and empty float32 variables; return the variables.

    `hours` [T] count from 1970-01-01T00 UTC; `latitude` and `longitude` are in degrees. Each of `variables` has a name,
    units, a long name, and optionally a CF standard name. `chunk` times are stored together; if `chunk` is None, the
    variables are contiguous.
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


def advection(sphere: Sphere, state: Complex) -> Complex:
    """Return -div(velocity * (vorticity + f, temperature)), the inviscid unforced tendency.

    The flux form conserves global means. Since there is no aliasing, energy and enstrophy are conserved up to the error
    of the time step.
    """
    fields = sphere.to_grid(np.concatenate([velocity_from_vorticity(sphere, state[0]), state]))
    wind, carried = fields[:2], fields[2:]
    carried[0] += 2 * OMEGA * sphere.mu[:, None]
    wind /= 1 - sphere.mu[:, None] ** 2
    east, north = sphere.to_spectral((wind[:, None] * carried).reshape(4, *carried.shape[1:])).reshape(2, *state.shape)
    # the derivative in latitude moves to the test function: (1 - mu^2) dP[n]/dmu, integrated by parts
    n, eps = sphere.n, sphere.eps
    convergence: Complex = -1j * sphere.m * east
    convergence[..., 1:] += (n[:, 1:] + 1) * eps[:, 1:-1] * north[..., :-1]
    convergence[..., :-1] -= n[:, :-1] * eps[:, 1:-1] * north[..., 1:]
    convergence[..., ~sphere.kept] = 0
    return convergence / RADIUS


def noise(sphere: Sphere, low: int, high: int, bits: np.random.Philox) -> Complex:
    """Return an isotropic random field with mean square near 1 and wavenumbers low <= n <= high, `[T+1, T+2]`.

    The coefficients do not depend on the truncation.
    """
    real, imaginary = np.random.Generator(bits).standard_normal((2, high + 1, high + 1))
    m, n = np.ogrid[: high + 1, : high + 1]
    drawn = np.where(m > 0, (real + 1j * imaginary) / np.sqrt(2), real) * ((n >= m) & (n >= low))
    field = np.zeros((sphere.truncation + 1, sphere.truncation + 2), np.complex128)
    kept = min(high, sphere.truncation) + 1
    field[:kept, :kept] = drawn[:kept, :kept] / np.sqrt((high + 1) ** 2 - low**2)
    return field


def climate(sphere: Sphere) -> Complex:
    """Return the fixed state towards which the model relaxes, `[2, T+1, T+2]`.

    The state has jets u = 20 m/s sin^2(2 latitude) cos(latitude), and poles that are 46 K colder than the equator.
    Fixed random fields are added: mountains to the vorticity, continents (17 K) to the temperature.
    """
    mu = sphere.mu[:, None] + np.zeros(2 * sphere.mu.size)
    jets = -8 * 20.0 / RADIUS * mu * (1 - mu**2) * (1 - 3 * mu**2)  # -(1/a) d(u cos(latitude)) / dmu
    zonal = np.where(sphere.kept, sphere.to_spectral(np.stack([jets, 302.0 - 46.0 * mu**2])), 0)
    mountains = noise(sphere, 12, 16, np.random.Philox(key=[0, 1]))
    continents = noise(sphere, 4, 10, np.random.Philox(key=[0, 2]))
    return zonal + np.stack([2.5e-4 * mountains, 17.0 * continents])


def tendency(sphere: Sphere, state: Complex, target: Complex) -> Complex:
    """Return d(state)/dt, the sum of `advection` and relaxation to `target`; all are `[2, T+1, T+2]`.

    Vorticity relaxes in 10 days, temperature in 8 days.
    """
    rates = 1 / (DAY * np.array([10.0, 8.0])[:, None, None])
    return advection(sphere, state) + rates * (target - state)


def runge_kutta(rate: Callable[[Complex], Complex], state: Complex, step: float) -> Complex:
    """Advance d(state)/dt = rate(state) by `step` seconds, to fourth order."""
    first = rate(state)
    second = rate(state + step / 2 * first)
    third = rate(state + step / 2 * second)
    fourth = rate(state + step * third)
    return state + step / 6 * (first + 2 * second + 2 * third + fourth)


def fastest_wind(sphere: Sphere, state: Complex) -> float:
    """Return the largest wind speed on the grid, m/s; raise `UserError` if the integration failed."""
    wind = sphere.to_grid(velocity_from_vorticity(sphere, state[0]))
    fastest = float(np.sqrt((wind**2).sum(0) / (1 - sphere.mu[:, None] ** 2)).max())
    if not (fastest < 400.0 and np.isfinite(state).all()):  # above 400 m/s the integration fails with any step
        raise UserError(
            f"simulated era5: the integration failed (fastest wind {fastest:.3g} m/s, expected below 400 m/s); lower "
            "`truncation`"
        )
    return fastest


def six_hours(sphere: Sphere, state: Complex, target: Complex) -> Complex:
    """Return the state 6 hours later, relaxed to `target`; raise `UserError` if the integration failed."""
    with np.errstate(all="ignore"):  # `fastest_wind` reports overflows
        # The Courant number is at most 1.5, since the Runge-Kutta scheme is stable up to 2.8; a step is at most an
        # hour.
        longest = 1.5 * RADIUS / (sphere.truncation * max(fastest_wind(sphere, state), 1.0))
        steps = int(np.ceil(INTERVAL / min(3600.0, longest)))
        scale = sphere.n * (sphere.n + 1) / (sphere.truncation * (sphere.truncation + 1))
        # The diffusion is linear and stiff, so it is integrated exactly after each step. The e-folding time is 8 hours
        # at the truncation; the power of the Laplacian is so high that storms are hardly damped.
        diffusion = np.exp(-INTERVAL / steps / (3600 * 8.0) * scale**8)
        for _ in range(steps):
            state = diffusion * runge_kutta(lambda now: tendency(sphere, now, target), state, INTERVAL / steps)
        fastest_wind(sphere, state)
    return state


def trajectory(sphere: Sphere, seed: int, year: int) -> Iterator[Complex]:
    """Yield the states `[2, T+1, T+2]` every 6 hours, without end.

    The random numbers depend only on the seed, the year and the number of the interval.
    """

    def bits(interval: int, stream: int) -> np.random.Philox:
        return np.random.Philox(key=[seed, year], counter=[0, 0, interval, stream])

    target = climate(sphere)
    state = np.where(sphere.m == 0, target, 0)
    state[0] += 3e-5 * noise(sphere, 6, 12, bits(0, 1))
    for interval in itertools.count():
        state[0] += STIRRING * noise(sphere, 6, 12, bits(interval, 0))
        state = six_hours(sphere, state, target)
        yield state.copy()
