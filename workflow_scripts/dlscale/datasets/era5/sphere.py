"""Spherical harmonics, and the wind and geopotential of a layer of air that is described in them.

Notation: `T` truncation; `J`, `L` latitudes and longitudes of the model's Gaussian grid; `K` fields.
Spectral arrays are complex128 `[..., T+1, T+2]`, indexed by zonal wavenumber m and total wavenumber n
(zero for n < m; the column n = T+1 holds only products such as u cos(latitude)). Harmonics have unit
mean square over the sphere, so element [0, 0] is the global mean. Grids are `[..., latitude, longitude]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Real = NDArray[np.float64]
Complex = NDArray[np.complex128]

RADIUS = 6.371e6  # of the Earth, m
OMEGA = 7.292e-5  # its rotation rate, s-1


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
    """The Gaussian grid on which quadratic products of truncated fields project without aliasing."""

    truncation: int  # largest total wavenumber T (triangular)
    mu: Real  # Gaussian nodes, south to north, `[J]`, J >= (3 T + 1) / 2
    weights: Real  # of the nodes, of sum 1, `[J]`
    table: Real  # `legendre(truncation, mu)`
    m: Real  # zonal wavenumbers, `[T+1, 1]`
    n: Real  # total wavenumbers, `[1, T+2]`
    eps: Real  # `coupling(truncation)`
    kept: NDArray[np.bool_]  # where a scalar has coefficients, m <= n <= T; `[T+1, T+2]`

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
