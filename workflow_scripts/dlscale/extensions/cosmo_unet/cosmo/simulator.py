"""Simulate a cosmological box: dark matter by the Zel'dovich approximation, gas by a thermal closure.

1. A Gaussian random field with a cold-dark-matter power spectrum, grown linearly to redshift 2;
2. one particle per cell, moved along the field's gradient (Zel'dovich 1970), which makes the cosmic web;
3. mass and momentum assigned to the periodic grid by cloud-in-cell: the dark matter;
4. gas that follows the dark matter, except on scales on which pressure smooths the gas;
5. a temperature from photo-ionisation equilibrium plus the heat of shocks.

A network can learn the gas, a nonlocal, nonlinear function of the dark matter. This is a teaching model, not a
hydrodynamics code. Lengths are comoving Mpc/h, wavenumbers h/Mpc, velocities peculiar km/s, densities relative to their
mean, temperatures K; constants are near Planck 2018 (arXiv:1807.06209). Arrays are [x, y, z].
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from dlscale.core.files import atomic_write
from dlscale.extensions.cosmo_unet.cosmo.channels import CHANNELS

Array = NDArray[np.float32]
Values = NDArray[np.floating[Any]]  # inputs, in any precision; results are Arrays
Floats = NDArray[np.float64]
Modes = NDArray[Any]  # complex64, which the stubs of numpy.fft do not know

#: Temperature limits, K, for the emptiest voids and the hottest clusters.
TEMPERATURE_RANGE = (1e3, 1e8)
#: Fraction of the gas that is spread evenly and flows by linear theory, so that logarithms and velocities are finite.
DIFFUSE = 1e-3

REDSHIFT = 2.0  # redshift of the Lyman-alpha forest
SIGMA8 = 0.81  # linear rms fluctuation in spheres of 8 Mpc/h, at redshift 0
OMEGA_M = 0.31  # matter over critical density today; the universe is flat
OMEGA_B = 0.049  # baryons over critical density today; baryons suppress the spectrum's small scales
HUBBLE = 0.677  # H0 / (100 km/s/Mpc)
N_S = 0.967  # slope of the primordial spectrum
#: Standard deviation of the Gaussian with which pressure smooths the gas, Mpc/h. Real values are nearer 0.1. This value
#: is larger than a voxel of a demonstration, so that a network can learn a nonlocal relation.
GAS_RADIUS = 0.8


def acquire(dataset: Any, raw: Any, out: Path, progress: Callable[[int, int | None], None]) -> None:
    """Write a simulated box as HDF5: `/Nbody` [4, N, N, N] and `/Hydro` [5, N, N, N], see `CHANNELS`.

    Equal settings give equal bits on processors of the same kind; boxes are independent. Peak memory is about 65 bytes
    per voxel; a core takes about 1 µs per voxel.
    """
    source = dataset.source
    grid, box, key = source.grid, source.box_mpc_h, np.array([source.seed, raw.index], dtype=np.uint64)
    with atomic_write(out) as temporary, h5py.File(temporary, "w") as file:
        file.attrs.update({"redshift": REDSHIFT, "grid": grid, "box_mpc_h": box, "seed": key[0], "index": key[1]})
        for name, (channels, units, _) in CHANNELS.items():
            written = file.create_dataset(name, (len(channels), grid, grid, grid), np.float32, track_times=False)
            written.attrs["channels"], written.attrs["units"] = channels, units
        delta = gaussian_field(grid, box, power_spectrum, np.random.Generator(np.random.Philox(key=key)))
        for number, (name, channel, values) in enumerate(evolve(delta, box), start=1):
            file[name][CHANNELS[name][0].index(channel)] = values
            progress(number, 9)


def evolve(delta: Values, box: float) -> Iterator[tuple[str, str, Array]]:
    """Yield (dataset, channel, values) of every channel in `CHANNELS`, from the density contrast [N, N, N].

    `box` is the edge of the box in Mpc/h.
    """
    displacement = zeldovich(delta, box)
    # km/s per Mpc/h: a·H·f, the growing mode's peculiar velocity over its comoving displacement, with f = Ω_m(z)^0.55
    # (Linder 2005, arXiv:astro-ph/0507263).
    hubble = 100 * math.sqrt(OMEGA_M * (1 + REDSHIFT) ** 3 + 1 - OMEGA_M)
    speed = np.float32(hubble / (1 + REDSHIFT) * _omega_m_at(REDSHIFT) ** 0.55)

    density = deposit(displacement, box)
    yield "Nbody", "dm_density", density
    gas = (1 - DIFFUSE) * smooth(density, box, GAS_RADIUS) + DIFFUSE
    yield "Hydro", "gas_density", gas

    convergence = np.zeros_like(gas)
    for axis, name in enumerate("xyz"):
        linear = speed * displacement[axis]
        momentum = deposit(displacement, box, linear)
        flow = (1 - DIFFUSE) * smooth(momentum, box, GAS_RADIUS) + DIFFUSE * linear
        flow /= gas
        yield "Hydro", f"gas_velocity_{name}", flow
        slope = np.roll(flow, -1, axis) - np.roll(flow, 1, axis)  # by periodic central differences
        slope *= np.float32(flow.shape[axis] / box / 2)
        convergence -= slope
        momentum += DIFFUSE * flow  # negligible, except in empty cells, in which p / rho would be 0 / 0
        momentum /= density + DIFFUSE
        yield "Nbody", f"dm_velocity_{name}", momentum
        del linear, momentum, flow, slope  # free the memory before the next axis

    yield "Hydro", "gas_temperature", temperature(gas, convergence)


def power_spectrum(k_h_mpc: Floats, redshift: float = REDSHIFT) -> Floats:
    """Return the linear matter power spectrum, (Mpc/h)³, for an array of wavenumbers, h/Mpc.

    P(k) = A k^n_s T(k)² D(z)², A from sigma8, T by `transfer`, D by `growth`.
    """
    # sigma8² = ∫ dlnk k³ P(k) W(8k)² / 2π², with W the Fourier transform of a sphere; the midpoint rule converges fast
    step = 0.01
    k = np.exp(np.arange(math.log(1e-5), math.log(1e2), step))
    x = 8.0 * k
    window = 3.0 * (np.sin(x) - x * np.cos(x)) / x**3
    variance = step * np.sum(k**3 * (k**N_S * transfer(k) ** 2) * window**2) / (2 * np.pi**2)
    amplitude = SIGMA8**2 / float(variance) * growth(redshift) ** 2
    k = np.asarray(k_h_mpc, dtype=np.float64)
    power: Floats = amplitude * (k**N_S * transfer(k) ** 2)
    return power


def transfer(k: Floats) -> Floats:
    """Return the zero-baryon-wiggle transfer function of Eisenstein & Hu 1998 (ApJ 496, 605), eq. 26 and 28-31."""
    matter, baryons = OMEGA_M * HUBBLE**2, OMEGA_B * HUBBLE**2
    fraction = OMEGA_B / OMEGA_M
    sound_horizon = 44.5 * math.log(9.83 / matter) / math.sqrt(1 + 10 * baryons**0.75)
    alpha = 1 - 0.328 * math.log(431 * matter) * fraction + 0.38 * math.log(22.3 * matter) * fraction**2
    shape = OMEGA_M * HUBBLE
    effective = shape * (alpha + (1 - alpha) / (1 + (0.43 * k * HUBBLE * sound_horizon) ** 4))
    q = k * (2.7255 / 2.7) ** 2 / effective
    log = np.log(2 * math.e + 1.8 * q)
    return np.asarray(log / (log + (14.2 + 731 / (1 + 62.5 * q)) * q**2))


def growth(redshift: float = REDSHIFT) -> float:
    """Return the linear growth factor, relative to today's (Carroll, Press & Turner 1992, ARA&A 30, 499)."""

    def factor(redshift: float) -> float:
        m = _omega_m_at(redshift)
        vacuum = 1 - m
        return 2.5 * m / (math.pow(m, 4 / 7) - vacuum + (1 + m / 2) * (1 + vacuum / 70)) / (1 + redshift)

    return factor(redshift) / factor(0.0)


def _omega_m_at(redshift: float) -> float:
    matter = OMEGA_M * (1 + redshift) ** 3
    return matter / (matter + 1 - OMEGA_M)


def gaussian_field(grid: int, box: float, spectrum: Callable[[Floats], Floats], rng: np.random.Generator) -> Array:
    """Return a Gaussian random field [N, N, N], float32, of mean 0 and the power `spectrum`.

    White noise is drawn cell by cell and coloured in Fourier space. `grid` N is even.
    """
    modes = np.fft.rfftn(rng.standard_normal((grid, grid, grid), dtype=np.float32))
    kx, ky, kz = _wavenumbers(grid, box)
    cells_per_volume = (grid / box) ** 3
    # Plane by plane, because the spectrum needs 12 temporary arrays.
    for plane, k in zip(modes, kx.ravel(), strict=True):
        plane *= np.sqrt(spectrum(np.sqrt(k**2 + ky**2 + kz**2)[0]) * cells_per_volume)
    modes[0, 0, 0] = 0
    return _to_grid(modes)


def zeldovich(delta: Values, box: float) -> Array:
    """Return the displacement [3, N, N, N], Mpc/h, with the divergence `-delta` [N, N, N] and without curl.

    In Fourier space the displacement is i k / k² · delta_k, the Zel'dovich approximation (1970, A&A 5, 84).
    """
    grid = delta.shape[0]
    modes = np.fft.rfftn(delta.astype(np.float32, copy=False))
    wavenumbers = _wavenumbers(grid, box)
    kx, ky, kz = (k.astype(np.float32) for k in wavenumbers)
    square = kx**2 + ky**2 + kz**2
    square[0, 0, 0] = np.inf
    modes /= square
    del square
    displacement = np.empty((3, *delta.shape), dtype=np.float32)
    for axis, k in enumerate(wavenumbers):
        k = np.where(np.abs(k) > (grid - 1) * np.pi / box, 0, k)  # a Nyquist mode has no real gradient
        displacement[axis] = _to_grid(modes * (1j * k).astype(np.complex64))
    return displacement


def deposit(displacement: Values, box: float, weight: Values | None = None) -> Array:
    """Assign displaced particles, one from each cell, to the periodic grid [N, N, N] by cloud-in-cell.

    Hockney & Eastwood, Computer Simulation Using Particles, chapter 5: a particle is divided by overlap among the 8
    nearest grid points. `displacement` [3, N, N, N] is in Mpc/h; `weight` [N, N, N] is the weight of each particle, 1
    if omitted.
    """
    grid = displacement.shape[1]
    lattice = np.arange(grid, dtype=np.float64)
    total = np.zeros((grid, grid, grid), dtype=np.float32)
    planes = max(1, 2**18 // grid**2)
    # Particles of a slab reach only a few planes, so the histogram is small enough for the cache and for float64.
    for start in range(0, grid, planes):
        slab = slice(start, start + planes)
        x = lattice[slab, None, None] + displacement[0, slab] * (grid / box)
        y = lattice[:, None] + displacement[1, slab] * (grid / box)
        z = lattice + displacement[2, slab] * (grid / box)
        lower = [np.floor(u).astype(np.int64) for u in (x, y, z)]
        shares = [(low + 1 - u, u - low) for u, low in zip((x, y, z), lower, strict=True)]
        first = int(lower[0].min())
        part = np.zeros((int(lower[0].max()) - first + 2) * grid**2)
        for i, j, k in itertools.product((0, 1), repeat=3):
            cell = ((lower[0] - first + i) * grid + (lower[1] + j) % grid) * grid + (lower[2] + k) % grid
            share = shares[0][i] * shares[1][j] * shares[2][k]
            if weight is not None:
                share *= weight[slab]
            part += np.bincount(cell.ravel(), share.ravel(), minlength=part.size)
        for row, values in enumerate(part.reshape(-1, grid, grid), start=first):
            total[row % grid] += values
    return total


def smooth(field: Values, box: float, radius: float) -> Array:
    """Convolve `field` [N, N, N] with a Gaussian of standard deviation `radius` (Mpc/h), periodically.

    The kernel is sampled in real space, so it has no negative lobes and a density stays positive.
    """
    grid = field.shape[0]
    distance = np.minimum(np.arange(grid), grid - np.arange(grid)) * (box / grid)
    kernel = np.exp(-0.5 * (distance / radius) ** 2)
    transfer = np.fft.fft(kernel / kernel.sum()).real.astype(np.float32)
    modes = np.fft.rfftn(field)
    modes *= transfer[:, None, None]
    modes *= transfer[:, None]
    modes *= transfer[: grid // 2 + 1]
    return _to_grid(modes)


def temperature(gas: Array, convergence: Array) -> Array:
    """Return the temperature [N, N, N], K, from the gas density and the velocity's convergence, km/s per Mpc/h.

    Photo-ionised gas has T = 1.2e4 K · density^0.5 up to about ten times the mean density (Hui & Gnedin 1997,
    arXiv:astro-ph/9612232). A strong shock stops collapsing gas within 1 Mpc/h and heats the gas to
    T = 3/16 · μ m_p v² / k_B (Rankine-Hugoniot). This heat is multiplied by density² / (1 + density²) and added; the
    sum is limited to `TEMPERATURE_RANGE`.
    """
    # K per (km/s)²; μ = 0.59 for ionised gas.
    heat_per_speed2 = np.float32(3 / 16 * 0.59 * 1.67262e-27 / 1.380649e-23 * 1e6)
    photoionised = 1.2e4 * (gas / (1 + gas / 10)) ** 0.5
    speed = np.maximum(convergence, 0)
    collapsed = gas**2 / (1 + gas**2)
    return np.clip(photoionised + heat_per_speed2 * speed**2 * collapsed, *TEMPERATURE_RANGE)


def _wavenumbers(grid: int, box: float) -> tuple[Floats, Floats, Floats]:
    """Return the wavenumbers of `rfftn` along x [N, 1, 1], y [1, N, 1] and z [1, 1, N/2 + 1], h/Mpc."""
    full = 2 * np.pi * np.fft.fftfreq(grid, box / grid).astype(np.float64)
    half = 2 * np.pi * np.fft.rfftfreq(grid, box / grid).astype(np.float64)
    return full[:, None, None], full[None, :, None], half[None, None, :]


def _to_grid(modes: Modes) -> Array:
    """Invert `rfftn` on an even grid; `modes` is overwritten, which saves two copies."""
    for axis in (0, 1):
        np.fft.ifft(modes, axis=axis, out=modes)
    return np.fft.irfft(modes, axis=2).astype(np.float32, copy=False)
