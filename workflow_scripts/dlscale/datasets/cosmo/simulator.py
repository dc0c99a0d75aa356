"""A cosmological box in seconds: dark matter by the Zel'dovich approximation, gas by a thermal closure.

The steps, from the initial field to the nine channels that the study `cosmo_unet` learns between:

1. a Gaussian random field with a cold-dark-matter power spectrum, grown linearly to one redshift;
2. one particle a cell, moved along the field's gradient (Zel'dovich 1970), which makes the cosmic web;
3. mass and momentum assigned to the periodic grid by cloud-in-cell: the dark matter;
4. gas that follows the dark matter's mass and momentum, except below the length where pressure holds it up;
5. a temperature from photo-ionisation equilibrium (the fluctuating Gunn-Peterson approximation) plus the heat
   of shocks where the gas flows together.

So the gas is a nonlocal and nonlinear function of the dark matter, and (but for a trace in empty cells) of nothing
else: a network with a receptive field can learn what no constant and no fit of one voxel to one voxel can. It is a
teaching model, not a hydrodynamics code; no figure from it says anything about the Universe.

Lengths are comoving Mpc/h, wavenumbers h/Mpc, velocities peculiar km/s, densities relative to their mean,
temperatures K. Arrays are C-order [x, y, z], and component i of a vector belongs to axis i of the array.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from dlscale.core.files import whole
from dlscale.datasets.cosmo.channels import CHANNELS

Array = NDArray[np.float32]
Values = NDArray[np.floating[Any]]  # what is read, in any precision; what is made is an Array
Floats = NDArray[np.float64]
Modes = NDArray[Any]  # complex64, which the stubs of numpy.fft do not know

TEMPERATURE_RANGE = (1e3, 1e8)
"""K; the emptiest voids and the hottest clusters. The closure has no business outside."""

DIFFUSE = 1e-3
"""The share of the gas that is spread evenly and flows as linear theory has it: so no voxel is without gas, and the
logarithm of its density and its velocity are finite. In the dark matter's empty cells it decides the velocity."""


@dataclass(frozen=True)
class Physics:
    """What is simulated; by default near Planck 2018 (arXiv:1807.06209), at the redshift of the Lyman-alpha forest."""

    redshift: float = 2.0
    sigma8: float = 0.81  # linear rms fluctuation in spheres of 8 Mpc/h, at redshift 0
    omega_m: float = 0.31  # matter over critical density today; the universe is flat
    omega_b: float = 0.049  # baryons likewise; they suppress the spectrum's small scales
    hubble: float = 0.677  # H0 / (100 km/s/Mpc)
    n_s: float = 0.967  # slope of the primordial spectrum
    # Mpc/h; standard deviation of the Gaussian over which pressure smooths the gas. Real ones are nearer 0.1;
    # this one spans voxels at the resolution of a demonstration, so that there is something nonlocal to learn.
    gas_radius: float = 0.8
    t0: float = 1.2e4  # K; photo-ionised gas at mean density
    gamma: float = 1.5  # T = t0 · density^(gamma - 1) where photo-ionisation rules
    # Mpc/h; converging gas is stopped over this length, and its motion turns to heat. 0: no shocks.
    shock_length: float = 1.0


def simulate_box(
    path: str | os.PathLike[str],
    *,
    grid: int,
    box_mpc_h: float,
    seed: int,
    index: int,
    physics: Physics | None = None,
    progress: Callable[[str], None] = lambda phase: None,
) -> None:
    """Write one box of `grid`³ cells and side `box_mpc_h` (Mpc/h) to `path` (HDF5), whole or not at all.

    `/Nbody` [4, N, N, N] and `/Hydro` [5, N, N, N] are float32, contiguous, and carry `channels` and `units`
    (see `CHANNELS`). The file's attributes are the settings.

    The box is a pure function of the settings: with the same libraries on the same kind of processor, bit by bit.
    Every (seed, index) is the key of a counter-based generator, so boxes are independent, and any one can be made
    without the others. Memory peaks at about 65 bytes a voxel (9 GB at 512³); one core takes about 1 µs a voxel.
    `progress` is called with the name of each phase as it begins. Nowhere to write is a `UserError`.
    """
    physics = physics or Physics()
    key = np.array([seed, index], dtype=np.uint64)
    with whole(path) as temporary, h5py.File(temporary, "w") as file:
        file.attrs.update({**asdict(physics), "grid": grid, "box_mpc_h": box_mpc_h, "seed": key[0], "index": key[1]})
        for name, (channels, units, _) in CHANNELS.items():
            dataset = file.create_dataset(name, (len(channels), grid, grid, grid), np.float32, track_times=False)
            dataset.attrs["channels"], dataset.attrs["units"] = channels, units
        progress("initial field")
        rng = np.random.Generator(np.random.Philox(key=key))
        delta = gaussian_field(grid, box_mpc_h, lambda k: power_spectrum(k, physics), rng)
        for name, channel, values in evolve(delta, box_mpc_h, physics, progress):
            file[name][CHANNELS[name][0].index(channel)] = values


def acquire(dataset: Any, raw: Any, out: Path, progress: Callable[[int, int | None], None]) -> None:
    """Simulate the box of a raw file."""
    phases, source = itertools.count(1), dataset.source
    simulate_box(
        out,
        grid=source.grid,
        box_mpc_h=source.box_mpc_h,
        seed=source.seed,
        index=raw.index,
        physics=Physics(redshift=source.redshift),
        progress=lambda phase: progress(next(phases), 7),
    )


def evolve(
    delta: Values, box: float, physics: Physics, tell: Callable[[str], None] = lambda phase: None
) -> Iterator[tuple[str, str, Array]]:
    """Yield (dataset, channel, values) of every channel in `CHANNELS` from the linear field `delta`.

    One channel at a time, in no promised order, so that a caller that writes each away holds few of them. `delta` is
    the linear density contrast [N, N, N] at the snapshot's redshift, `box` its side in Mpc/h. Of `physics` the
    spectrum's parameters (sigma8, omega_b, hubble, n_s) are already in `delta`.
    """
    tell("displacement")
    displacement = zeldovich(delta, box)
    speed = velocity_per_displacement(physics)

    tell("density")
    density = deposit(displacement, box)
    yield "Nbody", "dm_density", density
    gas = (1 - DIFFUSE) * smooth(density, box, physics.gas_radius) + DIFFUSE
    yield "Hydro", "gas_density", gas

    convergence = np.zeros_like(gas)
    for axis, name in enumerate("xyz"):
        tell(f"velocity {name}")
        linear = speed * displacement[axis]
        momentum = deposit(displacement, box, linear)
        flow = (1 - DIFFUSE) * smooth(momentum, box, physics.gas_radius) + DIFFUSE * linear
        flow /= gas
        yield "Hydro", f"gas_velocity_{name}", flow
        convergence -= _slope(flow, axis, box)
        momentum += DIFFUSE * flow  # negligible but where the cell is all but empty, and p / rho is 0 / 0
        momentum /= density + DIFFUSE
        yield "Nbody", f"dm_velocity_{name}", momentum
        del linear, momentum, flow  # or the next axis would be held beside this one

    tell("temperature")
    yield "Hydro", "gas_temperature", temperature(gas, convergence, physics)


def power_spectrum(k_h_mpc: Floats, physics: Physics | None = None) -> Floats:
    """Return the linear matter power spectrum at `physics.redshift`.

    P(k) = A k^n_s T(k)² D(z)², A from sigma8; T is the zero-baryon-wiggle form of Eisenstein & Hu 1998
    (ApJ 496, 605, arXiv:astro-ph/9709112), equations 26 and 28-31, and D is `growth`. For wavenumbers of any shape,
    0 or more, in h/Mpc, the result has that shape, float64, (Mpc/h)³; it is 0 at k = 0.
    """
    physics = physics or Physics()

    def unnormalised(k: Floats) -> Floats:
        power: Floats = k**physics.n_s * _transfer(k, physics) ** 2
        return power

    # sigma8² = ∫ dlnk k³ P(k) W(8k)² / 2π², with W the transform of a sphere; the midpoint rule converges fast here
    step = 0.01
    k = np.exp(np.arange(math.log(1e-5), math.log(1e2), step))
    x = 8.0 * k
    window = 3.0 * (np.sin(x) - x * np.cos(x)) / x**3
    variance = step * np.sum(k**3 * unnormalised(k) * window**2) / (2 * np.pi**2)
    amplitude = physics.sigma8**2 / float(variance) * growth(physics) ** 2
    return amplitude * unnormalised(np.asarray(k_h_mpc, dtype=np.float64))


def _transfer(k: Floats, physics: Physics) -> Floats:
    """Eisenstein & Hu 1998, equations 26 and 28-31; `k` in h/Mpc (the paper's is in 1/Mpc)."""
    matter, baryons = physics.omega_m * physics.hubble**2, physics.omega_b * physics.hubble**2
    fraction = physics.omega_b / physics.omega_m
    sound_horizon = 44.5 * math.log(9.83 / matter) / math.sqrt(1 + 10 * baryons**0.75)
    alpha = 1 - 0.328 * math.log(431 * matter) * fraction + 0.38 * math.log(22.3 * matter) * fraction**2
    shape = physics.omega_m * physics.hubble
    effective = shape * (alpha + (1 - alpha) / (1 + (0.43 * k * physics.hubble * sound_horizon) ** 4))
    q = k * (2.7255 / 2.7) ** 2 / effective
    log = np.log(2 * math.e + 1.8 * q)
    return np.asarray(log / (log + (14.2 + 731 / (1 + 62.5 * q)) * q**2))


def growth(physics: Physics) -> float:
    """Return the linear growth factor at the redshift over today's (Carroll, Press & Turner 1992, ARA&A 30, 499)."""

    def factor(redshift: float) -> float:
        m = _omega_m_at(redshift, physics.omega_m)
        vacuum = 1 - m
        return 2.5 * m / (math.pow(m, 4 / 7) - vacuum + (1 + m / 2) * (1 + vacuum / 70)) / (1 + redshift)

    return factor(physics.redshift) / factor(0.0)


def velocity_per_displacement(physics: Physics) -> np.float32:
    """Return a·H·f, km/s a Mpc/h: the growing mode's peculiar velocity over its comoving displacement.

    f = Ω_m(z)^0.55 (Linder 2005, arXiv:astro-ph/0507263).
    """
    z = physics.redshift
    hubble = 100 * math.sqrt(physics.omega_m * (1 + z) ** 3 + 1 - physics.omega_m)  # km/s a Mpc/h
    return np.float32(hubble / (1 + z) * _omega_m_at(z, physics.omega_m) ** 0.55)


def _omega_m_at(redshift: float, omega_m: float) -> float:
    matter = omega_m * (1 + redshift) ** 3
    return matter / (matter + 1 - omega_m)


def gaussian_field(grid: int, box: float, spectrum: Callable[[Floats], Floats], rng: np.random.Generator) -> Array:
    """Return a Gaussian random field [N, N, N], float32, of mean 0 and the asked power spectrum.

    White noise is drawn cell by cell and coloured in Fourier space: the result is real without any care for
    conjugate modes. `grid` is N, even; `box` the side in Mpc/h; `spectrum` takes wavenumbers (h/Mpc, any shape) to
    power ((Mpc/h)³).
    """
    modes = np.fft.rfftn(rng.standard_normal((grid, grid, grid), dtype=np.float32))
    kx, ky, kz = _wavenumbers(grid, box)
    cells_per_volume = (grid / box) ** 3
    for plane, k in zip(modes, kx.ravel(), strict=True):  # a plane at a time: the spectrum needs a dozen temporaries
        plane *= np.sqrt(spectrum(np.sqrt(k**2 + ky**2 + kz**2)[0]) * cells_per_volume)
    modes[0, 0, 0] = 0
    return _to_grid(modes)


def zeldovich(delta: Values, box: float) -> Array:
    """Return the displacement [3, N, N, N], Mpc/h, whose divergence is `-delta`, and whose curl is 0.

    The Zel'dovich approximation (1970, A&A 5, 84): a particle moves along a straight line from where it began, by
    i k / k² · delta_k in Fourier space. It holds until streams cross, and shows the web of filaments and sheets.
    `delta` is the linear density contrast [N, N, N], whose mean is ignored, and `box` its side in Mpc/h.
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
    """Assign displaced particles, one from each cell, to the periodic grid by cloud-in-cell.

    Hockney & Eastwood, Computer Simulation Using Particles, chapter 5: each particle is a cube of the size of a
    cell, shared out by overlap between the 8 nearest grid points.
    `displacement` [3, N, N, N], Mpc/h, is that of the particle that began at each grid point, of any length: the box of
    side `box` is periodic. `weight` [N, N, N] is what each carries; 1 if omitted, which gives the density relative to
    its mean. The sum of the result [N, N, N] is that of the weights.
    """
    grid = displacement.shape[1]
    lattice = np.arange(grid, dtype=np.float64)
    total = np.zeros((grid, grid, grid), dtype=np.float32)
    planes = max(1, 2**18 // grid**2)
    # A slab of neighbours lands on few planes: the histogram stays small, in the cache, and exact (float64).
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
    """Return `field` [N, N, N] convolved with a Gaussian of standard deviation `radius` (Mpc/h), periodically.

    The kernel is sampled in real space, not in Fourier space: so it has no negative lobes however small the radius
    (0 Mpc/h nearly leaves the field as it is), and a density stays positive. The mean is kept.
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


def temperature(gas: Array, convergence: Array, physics: Physics) -> Array:
    """Return the gas temperature [N, N, N], K.

    Photo-ionised gas keeps T = t0 · density^(gamma - 1) up to some ten times the mean (Hui & Gnedin 1997,
    arXiv:astro-ph/9612232), where cooling ends the rise: the density saturates smoothly at 10. Gas that flows
    together is stopped by a strong shock, T = 3/16 · μ m_p v² / k_B (Rankine-Hugoniot, monatomic), with v the
    velocity difference over `shock_length`, as far as the gas is dense enough to have collapsed.
    `gas` is the density relative to its mean, above 0; `convergence` is minus the divergence of its velocity,
    km/s a Mpc/h.
    """
    heat_per_speed2 = np.float32(3 / 16 * 0.59 * 1.67262e-27 / 1.380649e-23 * 1e6)  # K a (km/s)²; μ = 0.59: ionised
    photoionised = physics.t0 * (gas / (1 + gas / 10)) ** (physics.gamma - 1)
    speed = physics.shock_length * np.maximum(convergence, 0)
    collapsed = gas**2 / (1 + gas**2)
    return np.clip(photoionised + heat_per_speed2 * speed**2 * collapsed, *TEMPERATURE_RANGE)


def _wavenumbers(grid: int, box: float) -> tuple[Floats, Floats, Floats]:
    """The modes of `rfftn` along x [N, 1, 1], y [1, N, 1] and z [1, 1, N/2 + 1], h/Mpc."""
    full = 2 * np.pi * np.fft.fftfreq(grid, box / grid).astype(np.float64)
    half = 2 * np.pi * np.fft.rfftfreq(grid, box / grid).astype(np.float64)
    return full[:, None, None], full[None, :, None], half[None, None, :]


def _to_grid(modes: Modes) -> Array:
    """The inverse of `rfftn` on an even grid; `modes` is overwritten, which spares two copies of the box."""
    for axis in (0, 1):
        np.fft.ifft(modes, axis=axis, out=modes)
    return np.fft.irfft(modes, axis=2).astype(np.float32, copy=False)


def _slope(field: Array, axis: int, box: float) -> Array:
    """The derivative along `axis`, by periodic central differences, a Mpc/h."""
    difference = np.roll(field, -1, axis) - np.roll(field, 1, axis)
    difference *= np.float32(field.shape[axis] / box / 2)
    return difference
