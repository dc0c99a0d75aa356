"""The simulated atmosphere: transforms, dynamics and file."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xarray as xr

from dlscale.core.errors import UserError
from dlscale.extensions.era5_vit.era5 import simulator
from tests.conftest import stage

SPHERE = simulator.Sphere(21)
DAY = simulator.DAY


def zeros(*leading: int) -> simulator.Complex:
    return np.zeros((*leading, *SPHERE.kept.shape), np.complex128)


def random_state(scale: float = 3e-5) -> simulator.Complex:
    """Return a flow and a temperature with content at all scales that products can alias."""
    bits = [np.random.Philox(key=[7, stream]) for stream in (0, 1)]
    return np.stack([scale * simulator.noise(SPHERE, 1, 21, bits[0]), 10 * simulator.noise(SPHERE, 0, 21, bits[1])])


def integrate(state: simulator.Complex, seconds: float, steps: int) -> simulator.Complex:
    """Integrate a state without viscosity and forcing; return the final state."""
    for _ in range(steps):
        state = simulator.runge_kutta(lambda now: simulator.advection(SPHERE, now), state, seconds / steps)
    return state


def simulate(path: Path, year: int = 2001, progress: Callable[..., None] = lambda *done: None, **source: Any) -> Path:
    settings = SimpleNamespace(**{"seed": 0, "truncation": None} | source)
    simulator.acquire(SimpleNamespace(source=settings), SimpleNamespace(index=year), path, progress)
    return path


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> xr.Dataset:
    """Return thirty simulated days on the demo's grid."""
    path = simulate(tmp_path_factory.mktemp("era5") / "2000.nc", 2000, latitudes=32, longitudes=64, days=30, seed=1)
    with xr.open_dataset(path, engine="h5netcdf") as dataset:
        return dataset.load()


# ------------------------------------------------------------------------- spherical harmonics


def test_transforms_invert_each_other() -> None:
    state = random_state()
    back = SPHERE.to_spectral(SPHERE.to_grid(state))
    np.testing.assert_allclose(back[:, SPHERE.kept], state[:, SPHERE.kept], rtol=1e-9, atol=1e-15)


def test_harmonics_are_orthonormal_up_to_a_large_truncation() -> None:
    fine = simulator.Sphere(85)
    for m in (0, 1, 40, 85):
        gram = (fine.table[m].T * fine.weights) @ fine.table[m]
        np.testing.assert_allclose(gram[m:, m:], np.eye(87 - m), atol=1e-12)


def test_velocity_of_an_analytic_mode() -> None:
    # psi = A sin(latitude) cos^3(latitude) cos(3 longitude), for which n = 4
    amplitude = 1e7
    longitude = 2 * np.pi * np.arange(2 * SPHERE.mu.size) / (2 * SPHERE.mu.size)
    sine, cosine = SPHERE.mu[:, None], np.sqrt(1 - SPHERE.mu[:, None] ** 2)
    psi = amplitude * sine * cosine**3 * np.cos(3 * longitude)
    vorticity = SPHERE.to_spectral((-20 / simulator.RADIUS**2 * psi)[None])[0]
    u_cos, v_cos = SPHERE.to_grid(simulator.velocity_from_vorticity(SPHERE, vorticity))
    u = -amplitude / simulator.RADIUS * (cosine**4 - 3 * sine**2 * cosine**2) * np.cos(3 * longitude)
    v = -3 * amplitude / simulator.RADIUS * sine * cosine**2 * np.sin(3 * longitude)
    np.testing.assert_allclose(u_cos, u * cosine, atol=1e-10)
    np.testing.assert_allclose(v_cos, v * cosine, atol=1e-10)


def test_geopotential_of_solid_rotation() -> None:
    # u = U cos(latitude): phi = -Omega a U sin^2(latitude) + constant, with f = 2 Omega sin(latitude)
    wind = 20.0
    vorticity = SPHERE.to_spectral((2 * wind / simulator.RADIUS * SPHERE.mu[:, None] + np.zeros(64))[None])[0]
    phi = SPHERE.to_grid(simulator.geopotential_from_vorticity(SPHERE, vorticity, mean=0.0)[None])[0]
    expected = -simulator.OMEGA * simulator.RADIUS * wind * (SPHERE.mu[:, None] ** 2 - 1 / 3) + np.zeros(64)
    np.testing.assert_allclose(phi, expected, atol=1e-6)


# ------------------------------------------------------------------------------------ dynamics


@pytest.mark.parametrize(("m", "n"), [(1, 1), (3, 5), (8, 12)])
def test_rossby_wave_moves_at_the_phase_speed(m: int, n: int) -> None:
    # One harmonic of any amplitude is an exact solution, which drifts at -2 Omega / (n (n+1)) rad/s.
    state = zeros(2)
    state[0, m, n] = 2e-5
    after = integrate(state, DAY, 48)[0]
    expected = 2 * simulator.OMEGA * m / (n * (n + 1)) * DAY
    assert np.angle(np.exp(1j * (np.angle(after[m, n]) - expected))) == pytest.approx(0, abs=0.01 * abs(expected))
    assert abs(after[m, n]) == pytest.approx(2e-5, rel=1e-4)
    after[m, n] = 0
    assert abs(after).max() < 1e-9 * 2e-5


def test_inviscid_flow_conserves_the_invariants() -> None:
    def invariants(state: simulator.Complex) -> simulator.Real:
        twice = np.where(SPHERE.m > 0, 2, 1)
        psi = simulator.invert_laplacian(SPHERE, state[0])
        energy = -(twice * (psi.conj() * state[0]).real).sum() / 2
        enstrophy, variance = (twice * abs(state) ** 2).sum(axis=(1, 2)) / 2
        return np.array([energy, enstrophy, variance, state[0, 0, 0].real, state[1, 0, 0].real])

    start = random_state()
    after = integrate(start, DAY, 96)
    assert abs(after - start)[0].max() > 0.3 * abs(start[0]).max()  # the flow must have changed
    np.testing.assert_allclose(invariants(after), invariants(start), rtol=1e-5, atol=1e-15)


# ------------------------------------------------------------------------------------ the file


@pytest.mark.parametrize(("year", "steps"), [(2000, 1464), (2001, 1460), (1900, 1460), (2024, 1464)])
def test_a_year_has_the_right_number_of_days(year: int, steps: int) -> None:
    times = simulator.times(year)
    assert times.size == steps
    assert times[0] == np.datetime64(f"{year}-01-01T00") and times[-1] == np.datetime64(f"{year}-12-31T18")


def test_a_source_limits_the_truncation(tmp_path: Path) -> None:
    """However fine the grid is, the temperature has no waves beyond the source's truncation."""
    source = {"kind": "simulated", "latitudes": 64, "longitudes": 128, "days": 1, "truncation": 17}
    settings = {"kind": "era5", "source": {**source, "train": [2001], "valid": [2002]}}
    assert stage("acquire", "--config", json.dumps(settings), "--file", "2001.nc", "--out", tmp_path / "a.nc") == 0
    with xr.open_dataset(tmp_path / "a.nc", engine="h5netcdf") as dataset:
        waves = np.abs(np.fft.rfft(dataset.t2m.values.astype(np.float64))).max(axis=(0, 1))
    assert waves[17] > 1e-3 * waves[1] > 100 * waves[18:].max()


@pytest.mark.slow
def test_file_is_cf_and_in_range(simulated: xr.Dataset) -> None:
    assert dict(simulated.sizes) == {"time": 120, "latitude": 32, "longitude": 64}
    assert simulated.time.values[0] == np.datetime64("2000-01-01T00")
    assert (np.diff(simulated.time.values) == np.timedelta64(6, "h")).all()
    np.testing.assert_allclose(simulated.latitude, 87.1875 - 5.625 * np.arange(32))
    np.testing.assert_allclose(simulated.longitude, 5.625 * np.arange(64))
    assert simulated.latitude.units == "degrees_north" and simulated.longitude.units == "degrees_east"
    ranges = {"u10": (-130, 130), "v10": (-130, 130), "t2m": (215, 330), "vo": (-5e-4, 5e-4), "z": (3e4, 7e4)}
    units = {"u10": "m s-1", "v10": "m s-1", "t2m": "K", "vo": "s-1", "z": "m2 s-2"}
    assert set(simulated.data_vars) == set(ranges)
    for name, (low, high) in ranges.items():
        variable = simulated[name]
        assert variable.dtype == np.float32 and variable.dims == ("time", "latitude", "longitude")
        assert variable.units == units[name] and variable.long_name
        assert low < float(variable.min()) and float(variable.max()) < high
        assert float(variable.std()) > 0.04 * (high - low)
    profile = simulated.t2m.mean(("time", "longitude"))
    assert profile.sel(latitude=0, method="nearest") > profile.sel(latitude=[80, -80], method="nearest").max() + 20


@pytest.fixture(autouse=True)
def short_spinup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator, "SPINUP_DAYS", 2)


def small(path: Path, **changes: Any) -> Path:
    return simulate(path, **{"latitudes": 16, "longitudes": 32, "days": 2} | changes)


def test_same_arguments_same_bytes(tmp_path: Path) -> None:
    assert small(tmp_path / "a.nc").read_bytes() == small(tmp_path / "b.nc").read_bytes()


def test_a_longer_file_begins_as_the_shorter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # three snapshots per chunk, so the last chunk is not full
    monkeypatch.setattr(simulator, "CHUNK_BYTES", 3 * 4 * 16 * 32)
    with (
        xr.open_dataset(small(tmp_path / "a.nc"), engine="h5netcdf") as short,
        xr.open_dataset(small(tmp_path / "b.nc", days=4), engine="h5netcdf") as long,
    ):
        xr.testing.assert_equal(short.load(), long.isel(time=slice(8)).load())
        assert np.isfinite(long.to_dataarray()).all() and (long.vo.std(("latitude", "longitude")) > 1e-5).all()


def test_a_coarse_grid_samples_the_same_fields(tmp_path: Path) -> None:
    fine, coarse = small(tmp_path / "a.nc", longitudes=64), small(tmp_path / "b.nc", longitudes=16)
    with xr.open_dataset(fine, engine="h5netcdf") as a, xr.open_dataset(coarse, engine="h5netcdf") as b:
        np.testing.assert_allclose(a.t2m.values[..., ::4], b.t2m.values, rtol=1e-5)


@pytest.mark.slow
def test_memory_does_not_grow_with_days(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator, "CHUNK_BYTES", 1 << 14)

    def peak(days: int) -> int:
        tracemalloc.start()
        small(tmp_path / "x.nc", latitudes=48, longitudes=96, truncation=21, days=days)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak(1)  # the first call imports modules and fills caches
    more = 20 * 4 * 5 * 48 * 96 * 4  # the data of 20 more days: 7 MB
    assert peak(21) - peak(1) < more / 10


def test_failed_integration_names_a_remedy_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator, "STIRRING", 1e-3)
    with pytest.raises(UserError, match=r"integration failed.*lower `truncation`"):
        small(tmp_path / "x.nc")
    assert list(tmp_path.iterdir()) == []
