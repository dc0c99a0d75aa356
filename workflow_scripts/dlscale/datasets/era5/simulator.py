"""A simulated stand-in for ERA5: one stirred layer of air on a rotating sphere, written as NetCDF.

The model is the barotropic vorticity equation on the whole sphere, solved by the spectral transform
method in spherical harmonics (Bourke 1972; Hack & Jakob 1992, NCAR/TN-343), with a temperature
that the flow carries along. Vorticity and temperature relax towards a fixed, barotropically unstable
"climate" (jets, and the imprint of mountains and continents), which keeps the flow turbulent and its
statistics stationary; scale-selective diffusion removes what cascades below the truncation. A small
random kick every 6 hours is all that is unpredictable: about 6 per cent of the change in 6 hours. The rest
can be learnt, and persistence is a poor forecast of it.

What it is not: there are no seasons, no divergence, no vertical structure and no surface; `u10`,
`v10` and `t2m` are the wind and the temperature of the one layer, named for the channels that they
stand in for. Extremes of wind and height exceed the Earth's.

What it costs, on one core: 32 x 64 (T31) for a year, 15 s; 360 x 720 (T127), about 45 minutes and 0.2 GB.

Notation: `T` truncation; `J`, `L` latitudes and longitudes of the model's Gaussian grid; `K` fields.
Spectral arrays are complex128 `[..., T+1, T+2]`, indexed by zonal wavenumber m and total wavenumber n
(zero for n < m; the column n = T+1 holds only products such as u cos(latitude)). Harmonics have unit
mean square over the sphere, so element [0, 0] is the global mean. Grids are `[..., latitude, longitude]`.
"""

from __future__ import annotations

import calendar
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5netcdf
import numpy as np
from numpy.typing import NDArray

from dlscale.core.errors import UserError
from dlscale.core.files import Forgiving, whole

Real = NDArray[np.float64]
Complex = NDArray[np.complex128]

RADIUS = 6.371e6  # of the Earth, m
OMEGA = 7.292e-5  # its rotation rate, s-1
DAY = 86400.0  # s
INTERVAL = 6 * 3600.0  # between snapshots, s

SMALLEST_TRUNCATION, LARGEST_TRUNCATION = 21, 127  # by default: storms need the one, a year affords the other
LONGEST_STEP = 3600.0  # s; the Courant number sets the step where the wind is strong
FASTEST_WIND = 400.0  # m/s; beyond it the integration is failing, whatever the step
CHUNK_BYTES = 1 << 20  # of one variable: held in memory, then written at once

# The climate and its relaxation times, tuned for winds, temperatures and heights like the real ones, and
# for a change in 6 hours of 0.3 to 0.5 standard deviations on a 5.6 degree grid.
JET_SPEED = 20.0  # m/s
MOUNTAIN_VORTICITY = 2.5e-4  # s-1, root mean square; slowly approached, never reached
POLAR_COOLING = 46.0  # K, from equator to pole
CONTINENT_WARMTH = 17.0  # K, root mean square
VORTICITY_DAYS = 10.0
TEMPERATURE_DAYS = 8.0
DIFFUSION_HOURS = 8.0  # e-folding time at the truncation
DIFFUSION_ORDER = 8  # power of the Laplacian: steep, so that the storms themselves are spared

# name, units, long name, CF standard name; the order of the channels of a snapshot
VARIABLES = (
    ("u10", "m s-1", "eastward wind", "eastward_wind"),
    ("v10", "m s-1", "northward wind", "northward_wind"),
    ("t2m", "K", "temperature", "air_temperature"),
    ("vo", "s-1", "relative vorticity", "atmosphere_relative_vorticity"),
    ("z", "m2 s-2", "geopotential near 500 hPa", "geopotential"),
)


# ------------------------------------------------------------------------- spherical harmonics


def coupling(truncation: int) -> Real:
    """Return epsilon[m, n] = sqrt((n^2 - m^2) / (4 n^2 - 1)), `[T+1, T+3]`, zero for n <= m.

    It couples neighbouring harmonics: mu P[n] = eps[n+1] P[n+1] + eps[n] P[n-1], with mu = sin(latitude).
    """
    m, n = np.ogrid[0.0 : truncation + 1, 0.0 : truncation + 3]
    eps: Real = np.sqrt(np.maximum(n**2 - m**2, 0.0) / (4 * n**2 - 1).clip(min=1.0))
    return eps


def legendre(truncation: int, mu: Real) -> Real:
    """Return the associated Legendre functions P[m, j, n] at `mu` = sin(latitude), `[T+1, J, T+2]`.

    Their mean square over -1 <= mu <= 1 is 1. Recurrence in n from P[m, m] (Belousov 1962); values that
    underflow near the poles are zero there for every n that the truncation keeps.
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
    """Evaluate fields on a grid: `[K, T+1, T+2]` and `table` [T+1, J, T+2] to `[K, J, longitudes]`."""
    columns = np.ascontiguousarray(spectral.transpose(1, 2, 0)).view(np.float64)  # [m, n, 2K]: a real product
    fourier = (table @ columns).view(np.complex128).transpose(2, 1, 0)
    return np.fft.irfft(fourier, n=longitudes, axis=-1, norm="forward")


def analysis(grid: Real, table: Real, weights: Real) -> Complex:
    """Project fields on the harmonics: `[K, J, L]`, Gaussian `weights` [J] of sum 1, to `[K, T+1, T+2]`."""
    fourier = np.fft.rfft(grid, axis=-1, norm="forward")[..., : table.shape[0]] * weights[:, None]
    columns = np.ascontiguousarray(fourier.transpose(2, 1, 0)).view(np.float64)
    return np.ascontiguousarray((table.transpose(0, 2, 1) @ columns).view(np.complex128).transpose(2, 0, 1))


@dataclass(frozen=True)
class Sphere:
    """The Gaussian grid on which quadratic products of truncated fields project without aliasing.

    Attributes
    ----------
    truncation
        Largest total wavenumber T (triangular).
    mu, weights
        Gaussian nodes (south to north) and their weights, of sum 1, `[J]`, J >= (3 T + 1) / 2.
    table
        `legendre(truncation, mu)`.
    m, n, eps
        Wavenumbers `[T+1, 1]`, `[1, T+2]`, and `coupling(truncation)`.
    kept
        True where a scalar has coefficients, m <= n <= T; `[T+1, T+2]`.
    """

    truncation: int
    mu: Real
    weights: Real
    table: Real
    m: Real
    n: Real
    eps: Real
    kept: NDArray[np.bool_]

    @classmethod
    def of(cls, truncation: int) -> Sphere:
        """Build the grid and its tables for a truncation; 8 (T+1) J (T+2) bytes, 0.2 GB at T239."""
        nodes = 8 * -(-(3 * truncation + 1) // 16)  # a multiple of 8: the Fourier transforms stay fast
        mu, weights = np.polynomial.legendre.leggauss(nodes)
        m, n = np.ogrid[0.0 : truncation + 1, 0.0 : truncation + 2]
        kept = (n >= m) & (n <= truncation)
        return cls(truncation, mu, weights / 2, legendre(truncation, mu), m, n, coupling(truncation), kept)

    def to_grid(self, spectral: Complex) -> Real:
        """Evaluate `[K, T+1, T+2]` on the Gaussian grid, `[K, J, 2J]`."""
        return synthesis(spectral, self.table, 2 * self.mu.size)

    def to_spectral(self, grid: Real) -> Complex:
        """Project `[K, J, 2J]` on the harmonics, to `[K, T+1, T+2]`, the column n = T+1 included."""
        return analysis(grid, self.table, self.weights)


def invert_laplacian(sphere: Sphere, spectral: Complex) -> Complex:
    """Solve laplacian(x) = `spectral` on the sphere, with global mean zero: x = -a^2 / (n (n+1)) times it."""
    return -(RADIUS**2) * spectral / np.where(sphere.n > 0, sphere.n * (sphere.n + 1), np.inf)


def cos_gradient_north(sphere: Sphere, spectral: Complex) -> Complex:
    """Return cos(latitude) d/d(latitude) of scalars `[..., T+1, T+2]`, exactly, in harmonics up to n = T+1."""
    result = np.zeros_like(spectral)
    n, eps = sphere.n, sphere.eps
    result[..., :-1] = (n[:, :-1] + 2) * eps[:, 1:-1] * spectral[..., 1:]
    result[..., 1:] -= (n[:, 1:] - 1) * eps[:, 1:-1] * spectral[..., :-1]
    return result


def velocity_from_vorticity(sphere: Sphere, vorticity: Complex) -> Complex:
    """Return (u, v) cos(latitude) of the non-divergent flow, m/s, `[2, T+1, T+2]`.

    u = -d(psi)/d(latitude) / a and v = d(psi)/d(longitude) / (a cos(latitude)), laplacian(psi) = vorticity.
    Times cos(latitude) both are smooth at the poles and finite sums of harmonics.
    """
    psi = invert_laplacian(sphere, vorticity)
    return np.stack([-cos_gradient_north(sphere, psi), 1j * sphere.m * psi]) / RADIUS


def geopotential_from_vorticity(sphere: Sphere, vorticity: Complex, mean: float = 54500.0) -> Complex:
    """Return the geopotential in linear balance, laplacian(phi) = div(f grad(psi)), m2 s-2, `[T+1, T+2]`.

    It is geostrophic balance that also holds at the equator (Lorenz 1960): f zeta - (2 Omega / a^2) (a u cos).
    """
    u_cos = velocity_from_vorticity(sphere, vorticity)[0]
    mu_vorticity = np.zeros_like(vorticity)  # mu times the vorticity, by the coupling of neighbours
    mu_vorticity[:, 1:] = sphere.eps[:, 1:-1] * vorticity[:, :-1]
    mu_vorticity[:, :-1] += sphere.eps[:, 1:-1] * vorticity[:, 1:]
    phi = invert_laplacian(sphere, 2 * OMEGA * (mu_vorticity - u_cos / RADIUS))
    phi[0, 0] = mean
    return phi


# ----------------------------------------------------------------------------------- the model


def advection(sphere: Sphere, state: Complex) -> Complex:
    """Return -div(velocity * (vorticity + f, temperature)), the inviscid unforced tendency.

    In flux form, so that global means do not change; alias-free, so that energy and enstrophy are
    conserved up to the error of the time step.

    Parameters
    ----------
    state
        Vorticity (s-1) and temperature (K), `[2, T+1, T+2]`.
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
    """Return a random field of mean square near 1, statistically isotropic, low <= n <= high, `[T+1, T+2]`.

    A truncation drops coefficients, and does not change those that it keeps.
    """
    real, imaginary = np.random.Generator(bits).standard_normal((2, high + 1, high + 1))
    m, n = np.ogrid[: high + 1, : high + 1]
    drawn = np.where(m > 0, (real + 1j * imaginary) / np.sqrt(2), real) * ((n >= m) & (n >= low))
    field = np.zeros((sphere.truncation + 1, sphere.truncation + 2), np.complex128)
    kept = min(high, sphere.truncation) + 1
    field[:kept, :kept] = drawn[:kept, :kept] / np.sqrt((high + 1) ** 2 - low**2)
    return field


def climate(sphere: Sphere) -> Complex:
    """Return the fixed state that the model relaxes to: vorticity (s-1), temperature (K), `[2, T+1, T+2]`.

    Jets u = U sin^2(2 latitude) cos(latitude) and cold poles, plus frozen random patterns, the same for
    every seed and year: the mountains and the continents of this planet. As a flow it is strongly
    unstable, and so the model stays turbulent without noise.
    """
    mu = sphere.mu[:, None] + np.zeros(2 * sphere.mu.size)
    jets = -8 * JET_SPEED / RADIUS * mu * (1 - mu**2) * (1 - 3 * mu**2)  # -(1/a) d(u cos(latitude)) / dmu
    zonal = np.where(sphere.kept, sphere.to_spectral(np.stack([jets, 302.0 - POLAR_COOLING * mu**2])), 0)
    mountains = noise(sphere, 12, 16, np.random.Philox(key=[0, 1]))
    continents = noise(sphere, 4, 10, np.random.Philox(key=[0, 2]))
    return zonal + np.stack([MOUNTAIN_VORTICITY * mountains, CONTINENT_WARMTH * continents])


def tendency(sphere: Sphere, state: Complex, target: Complex) -> Complex:
    """Return d(state)/dt: `advection`, and relaxation to `target`, all `[2, T+1, T+2]`."""
    rates = 1 / (DAY * np.array([VORTICITY_DAYS, TEMPERATURE_DAYS])[:, None, None])
    return advection(sphere, state) + rates * (target - state)


def runge_kutta(rate: Callable[[Complex], Complex], state: Complex, step: float) -> Complex:
    """Advance d(state)/dt = rate(state) by `step` seconds, to fourth order."""
    first = rate(state)
    second = rate(state + step / 2 * first)
    third = rate(state + step / 2 * second)
    fourth = rate(state + step * third)
    return state + step / 6 * (first + 2 * second + 2 * third + fourth)


def fastest_wind(sphere: Sphere, state: Complex) -> float:
    """Return the largest wind speed on the grid, m/s.

    Raises
    ------
    UserError
        It is absurd, or the state is not finite: the integration has failed.
    """
    wind = sphere.to_grid(velocity_from_vorticity(sphere, state[0]))
    fastest = float(np.sqrt((wind**2).sum(0) / (1 - sphere.mu[:, None] ** 2)).max())
    if not (fastest < FASTEST_WIND and np.isfinite(state).all()):
        raise UserError(
            f"simulated era5: the integration failed (fastest wind {fastest:.3g} m/s, expected below "
            f"{FASTEST_WIND:g} m/s); lower `courant`, `stirring` or `truncation`"
        )
    return fastest


def six_hours(sphere: Sphere, state: Complex, target: Complex, courant: float = 1.5) -> Complex:
    """Return the state 6 hours later; deterministic.

    Parameters
    ----------
    state, target
        Vorticity (s-1) and temperature (K), and the `climate` they relax to, `[2, T+1, T+2]`.
    courant
        Bound on step x fastest wind x T / a; the Runge-Kutta scheme is stable up to 2.8.

    Raises
    ------
    UserError
        As `fastest_wind`, before or after.
    """
    with np.errstate(all="ignore"):  # what overflows is reported by `fastest_wind`
        longest = courant * RADIUS / (sphere.truncation * max(fastest_wind(sphere, state), 1.0))
        steps = int(np.ceil(INTERVAL / min(LONGEST_STEP, longest)))
        scale = sphere.n * (sphere.n + 1) / (sphere.truncation * (sphere.truncation + 1))
        # linear and stiff: integrated exactly, after each step
        diffusion = np.exp(-INTERVAL / steps / (3600 * DIFFUSION_HOURS) * scale**DIFFUSION_ORDER)
        for _ in range(steps):
            state = diffusion * runge_kutta(lambda now: tendency(sphere, now, target), state, INTERVAL / steps)
        fastest_wind(sphere, state)
    return state


def trajectory(sphere: Sphere, seed: int, year: int, stirring: float, courant: float) -> Iterator[Complex]:
    """Yield the states `[2, T+1, T+2]` every 6 hours, without end, from a random one that is not yielded.

    Before each 6 hours the vorticity gets a random kick of root mean square `stirring` (s-1). Initial state
    and kicks are functions of (seed, year, number of the interval) alone.
    """

    def bits(interval: int, stream: int) -> np.random.Philox:
        return np.random.Philox(key=[seed, year], counter=[0, 0, interval, stream])

    target = climate(sphere)
    state = np.where(sphere.m == 0, target, 0)
    state[0] += 3e-5 * noise(sphere, 6, 12, bits(0, 1))
    for interval in itertools.count():
        state[0] += stirring * noise(sphere, 6, 12, bits(interval, 0))
        state = six_hours(sphere, state, target, courant)
        yield state.copy()


# ------------------------------------------------------------------------------------ the file


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


def simulate_year(
    path: str | os.PathLike[str],
    *,
    year: int,
    latitudes: int,
    longitudes: int,
    days: int | None = None,
    seed: int = 0,
    truncation: int | None = None,
    spinup_days: int = 20,
    stirring: float = 1e-6,
    courant: float = 1.5,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write one simulated year as CF NetCDF-4: float32 `VARIABLES` (time, latitude, longitude), 6-hourly.

    The same arguments give the same bytes on the same machine; other seeds and years give independent
    trajectories of the same planet. Memory does not grow with `days`: one chunk of each variable, and the
    Legendre tables. `path` appears whole or not at all.

    Parameters
    ----------
    path
        The file to write.
    year, days
        From January 1st, for so many days; None for the whole year, 1460 or 1464 snapshots.
    latitudes, longitudes
        Size of the regular grid, see `coordinates`.
    seed
        Of the initial state and of the kicks, with the year.
    truncation
        Largest total wavenumber of the model; None for all that the grid resolves, between 21 and 127,
        so that a snapshot holds the model's whole state. The cost grows as its fourth power.
    spinup_days
        Simulated and discarded first.
    stirring
        Root mean square of the random kick of vorticity before each 6 hours, s-1; of a field near 5e-5.
    courant
        See `six_hours`.
    progress
        Called as (6-hour steps done, steps in all), about a hundred times.

    Raises
    ------
    UserError
        An argument is out of its range, the integration fails, or the file cannot be written.
    """
    if truncation is None:
        resolved = min(longitudes // 2, latitudes) - 1
        truncation = min(max(resolved, SMALLEST_TRUNCATION), LARGEST_TRUNCATION)
    for name, value, low, high in (
        ("year", year, 1700, 2200),  # what datetime64[ns] holds
        ("latitudes", latitudes, 4, 4096),
        ("longitudes", longitudes, 4, 8192),
        ("days", 1 if days is None else days, 1, 365 + calendar.isleap(year)),
        ("seed", seed, 0, 2**63 - 1),
        ("truncation", truncation, 17, 511),
        ("spinup_days", spinup_days, 0, 10000),
        ("stirring", stirring, 0.0, 1.0),
        ("courant", courant, 0.01, 2.5),
    ):
        if not low <= value <= high or (isinstance(low, int) and int(value) != value):
            kind = "a whole number" if isinstance(low, int) else "a number"
            raise UserError(f"simulated era5: `{name}` is {value}, set it to {kind} from {low} to {high}")

    when, (latitude, longitude) = times(year, days), coordinates(latitudes, longitudes)
    mu = np.sin(np.deg2rad(latitude))
    sphere, table = Sphere.of(truncation), legendre(truncation, mu)
    spinup, steps = 4 * spinup_days, when.size
    chunk = min(steps, max(1, CHUNK_BYTES // (4 * latitudes * longitudes)))
    block = np.empty((chunk, len(VARIABLES), latitudes, longitudes), np.float32)
    states = trajectory(sphere, seed, year, stirring, courant)

    with whole(path) as temporary, Forgiving(temporary) as raw, h5netcdf.File(raw, "w") as file:
        variables = _define(file, when, latitude, longitude, chunk)
        file.attrs["source"] = f"dlscale barotropic vorticity model, T{truncation}, seed {seed}, year {year}"
        for done, state in enumerate(itertools.islice(states, spinup + steps), start=1):
            if (kept := done - spinup) > 0:
                block[(kept - 1) % chunk] = snapshot(sphere, state, mu, table, longitudes)
                if kept % chunk == 0 or kept == steps:
                    start = (kept - 1) // chunk * chunk
                    for channel, variable in enumerate(variables):
                        variable[start:kept] = block[: kept - start, channel]
            if progress and (done % max(1, (spinup + steps) // 100) == 0 or done == spinup + steps):
                progress(done, spinup + steps)


def _define(
    file: h5netcdf.File, when: NDArray[np.datetime64], latitude: Real, longitude: Real, chunk: int
) -> list[Any]:
    """Create dimensions, coordinates and empty variables (chunked in time); return the variables."""
    file.dimensions = {"time": when.size, "latitude": latitude.size, "longitude": longitude.size}
    hours = (when - when[0]).astype(np.int64)
    since = {"units": f"hours since {np.datetime_as_string(when[0], 'D')} 00:00:00", "calendar": "proleptic_gregorian"}
    for name, values, attributes in (
        ("time", hours, since),
        ("latitude", latitude, {"units": "degrees_north"}),
        ("longitude", longitude, {"units": "degrees_east"}),
    ):
        coordinate = file.create_variable(name, (name,), data=values)
        coordinate.attrs.update({**attributes, "standard_name": name, "long_name": name})
    file.attrs["Conventions"] = "CF-1.8"
    file.attrs["title"] = "Simulated 6-hourly atmosphere in the manner of ERA5"
    variables = []
    for name, units, long_name, standard_name in VARIABLES:
        shape = (chunk, latitude.size, longitude.size)
        variable = file.create_variable(name, ("time", "latitude", "longitude"), np.float32, chunks=shape)
        variable.attrs.update({"units": units, "long_name": long_name, "standard_name": standard_name})
        variables.append(variable)
    return variables


def acquire(dataset: Any, raw: Any, out: Path, progress: Callable[[int, int | None], None]) -> None:
    """Simulate the year of a raw file."""
    source = dataset.source
    simulate_year(
        out,
        year=raw.index,
        latitudes=source.latitudes,
        longitudes=source.longitudes,
        days=source.days,
        seed=source.seed,
        progress=progress,
    )
