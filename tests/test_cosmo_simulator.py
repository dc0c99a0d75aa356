"""The cosmology simulator: each step compared with theory, and the boxes that the study reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

from dlscale.extensions.cosmo_unet.cosmo import simulator
from dlscale.extensions.cosmo_unet.cosmo.channels import CHANNELS


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=seed))


def simulate(path: Path, index: int, progress: Callable[..., None] = lambda *done: None, **source: float) -> Path:
    simulator.acquire(SimpleNamespace(source=SimpleNamespace(**source)), SimpleNamespace(index=index), path, progress)
    return path


def wave(grid: int, axis: int, cycles: int = 1) -> np.ndarray:
    """Return cos(2π·cycles·x/L) along one axis, [N, N, N] float32."""
    return np.cos(2 * np.pi * cycles * np.indices((grid, grid, grid))[axis] / grid).astype(np.float32)


def smooth_field(grid: int, box: float, rms: float) -> np.ndarray:
    """Return a random field without small scales. Linear theory holds if `rms` is small."""
    field = simulator.gaussian_field(grid, box, lambda k: np.exp(-((k * box / 6) ** 2)), rng(3))
    return field * np.float32(rms / field.std())


def measure_power(delta: np.ndarray, box: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the power spectrum of a field, averaged over spherical shells one fundamental mode wide.

    Parameters
    ----------
    delta
        Density contrast, or density relative to its mean, [N, N, N]. The mean is ignored.
    box
        Side, Mpc/h.

    Returns
    -------
    k, power
        float64 [N/2 - 1], the mean wavenumber of each shell (h/Mpc) and its mean power ((Mpc/h)³), for all shells
        below the Nyquist shell. Damping by cloud-in-cell near that shell is not corrected.
    """
    grid = delta.shape[0]
    power = np.abs(np.fft.rfftn(delta)).astype(np.float64) ** 2 * (box**3 / grid**6)
    full, half = (2 * np.pi * each(grid, box / grid) for each in (np.fft.fftfreq, np.fft.rfftfreq))
    k = np.sqrt(full[:, None, None] ** 2 + full[None, :, None] ** 2 + half**2)
    # The half-space stores one number of each conjugate pair. Its two faces contain both numbers.
    twice = np.full(grid // 2 + 1, 2.0)
    twice[[0, -1]] = 1.0
    count = np.broadcast_to(twice, k.shape).ravel()
    shell = np.rint(k * box / (2 * np.pi)).astype(np.int64).ravel()
    modes, k_sum, power_sum = (
        np.bincount(shell, weights)[1 : grid // 2] for weights in (count, count * k.ravel(), count * power.ravel())
    )
    return k_sum / modes, power_sum / modes


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Return a default box of 64³ cells in 32 Mpc/h: values by channel name."""
    path = simulate(tmp_path_factory.mktemp("cosmo") / "box.h5", grid=64, box_mpc_h=32.0, seed=7, index=0)
    with h5py.File(path) as file:
        return {c: v for d in file.values() for c, v in zip(d.attrs["channels"], d[:], strict=True)}


# --- the spectrum and the initial field ---------------------------------------------------------------------------


def test_initial_field_has_the_asked_power() -> None:
    # A shell of m modes (one half conjugate to the other half) scatters by sqrt(2/m) in one realisation. The lowest
    # shell, two fundamental modes from the origin, has 62 modes: 18 %. Sixty realisations reduce the scatter to 2.3 %,
    # so that the tolerance of 10 % is four standard deviations. The curvature of P across a shell adds about 3 %.
    grid, size, realisations = 32, 64.0, 60
    fields = [simulator.gaussian_field(grid, size, simulator.power_spectrum, rng(i)) for i in range(realisations)]
    k, _ = measure_power(fields[0], size)
    power = np.mean([measure_power(field, size)[1] for field in fields], axis=0)
    lowest, nyquist = 2 * np.pi / size, np.pi * grid / size
    middle = np.sqrt(lowest * nyquist)
    decade = (k > middle / 10**0.5) & (k < middle * 10**0.5)
    assert decade.sum() >= 10
    assert power[decade] == pytest.approx(simulator.power_spectrum(k[decade]), rel=0.10)
    assert all(field.dtype == np.float32 and abs(field.mean(dtype=np.float64)) < 1e-6 for field in fields)


def test_spectrum_is_normalised_to_sigma8() -> None:
    k = np.geomspace(1e-4, 50, 20001)
    x = 8 * k
    window = 3 * (np.sin(x) / x**3 - np.cos(x) / x**2)
    integrand = k**2 * simulator.power_spectrum(k, 0.0) * window**2 / (2 * np.pi**2)
    variance = np.sum((integrand[1:] + integrand[:-1]) / 2 * np.diff(k))
    assert math.sqrt(variance) == pytest.approx(simulator.SIGMA8, rel=1e-3)


def test_spectrum_has_the_values_of_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    # T(k) of Eisenstein & Hu 1998 without wiggles, computed independently in the paper's units (1/Mpc), for Ω_m = 0.3,
    # Ω_b = 0.05, h = 0.7, at 2.7255 K.
    for name, value in (("OMEGA_M", 0.3), ("OMEGA_B", 0.05), ("HUBBLE", 0.7)):
        monkeypatch.setattr(simulator, name, value)
    k = np.array([0.01, 0.03, 0.1, 1.0])
    assert simulator.transfer(k) == pytest.approx([0.7861277, 0.433149, 0.1312002, 0.00455319], rel=1e-5)
    ratio = simulator.power_spectrum(k) / (k**simulator.N_S * simulator.transfer(k) ** 2)
    assert ratio == pytest.approx(np.full(4, ratio[0]), rel=1e-12)
    assert simulator.power_spectrum(np.zeros(1))[0] == 0


def test_growth_follows_the_exact_integral(monkeypatch: pytest.MonkeyPatch) -> None:
    def exact(a: float, m: float = 0.31) -> float:  # Heath 1977: D ∝ H ∫ da / (a H)³
        x = np.linspace(1e-6, a, 20001)
        y = (x / (m + (1 - m) * x**3)) ** 1.5
        return float(np.sqrt(m / a**3 + 1 - m) * np.sum((y[1:] + y[:-1]) / 2) * (x[1] - x[0]))

    assert simulator.growth(2.0) == pytest.approx(exact(1 / 3) / exact(1.0), rel=0.01)
    low, high = (simulator.power_spectrum(np.ones(1), z)[0] for z in (0.0, 2.0))
    assert high / low == pytest.approx(simulator.growth() ** 2)
    monkeypatch.setattr(simulator, "OMEGA_M", 1.0)
    assert simulator.growth(3.0) == pytest.approx(0.25)


# --- displacement and deposit -------------------------------------------------------------------------------------


def test_displacement_has_no_curl_and_the_fields_divergence() -> None:
    grid, size = 24, 30.0
    delta = smooth_field(grid, size, 0.5)
    displacement = simulator.zeldovich(delta, size)
    wavenumber = 2 * np.pi * np.fft.fftfreq(grid, size / grid)
    axes = np.meshgrid(wavenumber, wavenumber, wavenumber, indexing="ij")

    def slope(component: int, axis: int) -> np.ndarray:
        return np.fft.ifftn(1j * axes[axis] * np.fft.fftn(displacement[component])).real

    assert sum(slope(i, i) for i in range(3)) == pytest.approx(-delta, abs=1e-4)
    for i, j in ((0, 1), (1, 2), (2, 0)):
        assert np.abs(slope(i, j) - slope(j, i)).max() < 1e-4 * np.abs(slope(i, j)).max()


def test_deposit_equals_the_plain_sum_over_particles() -> None:
    # Displacements of up to three boxes, so all particles wrap, and several slabs share planes.
    grid, size = 6, 9.0
    displacement = rng(2).uniform(-3 * size, 3 * size, (3, grid, grid, grid)).astype(np.float32)
    weight = rng(4).standard_normal((grid, grid, grid)).astype(np.float32)
    expected = np.zeros((grid, grid, grid))
    for start in np.ndindex(grid, grid, grid):
        place = np.array(start) + displacement[(slice(None), *start)].astype(float) * grid / size
        for corner in np.ndindex(2, 2, 2):
            cell = np.floor(place).astype(int) + corner
            expected[tuple(cell % grid)] += weight[start] * np.prod(1 - np.abs(place - cell))
    assert simulator.deposit(displacement, size, weight) == pytest.approx(expected, abs=1e-4)


def test_deposit_conserves_mass_and_momentum() -> None:
    grid, size = 80, 20.0  # more than one slab
    displacement = (5 * rng(5).standard_normal((3, grid, grid, grid))).astype(np.float32)
    density = simulator.deposit(displacement, size)
    assert density.min() >= 0
    assert density.sum(dtype=np.float64) == pytest.approx(grid**3, rel=1e-6)
    momentum = simulator.deposit(displacement, size, displacement[1] + 1)
    assert momentum.sum(dtype=np.float64) == pytest.approx((displacement[1] + 1).sum(dtype=np.float64), rel=1e-5)


# --- velocities and gas -------------------------------------------------------------------------------------------


def test_a_small_perturbation_is_the_growing_mode() -> None:
    grid, size = 32, 64.0
    delta = smooth_field(grid, size, 0.01)
    channels = {name: v for _, name, v in simulator.evolve(delta, size)}
    density = (channels["dm_density"] - 1).ravel()
    # less than 1, because cloud-in-cell implies one-sided differences, which are half a cell off
    assert np.corrcoef(density, delta.ravel())[0, 1] > 0.95
    assert np.dot(density, delta.ravel()) / np.dot(delta.ravel(), delta.ravel()) == pytest.approx(1, abs=0.05)
    scale = 1 / (1 + simulator.REDSHIFT)
    matter, rest = simulator.OMEGA_M / scale**3, 1 - simulator.OMEGA_M
    growth = (matter / (matter + rest)) ** 0.55  # Linder (2005)
    expected = 100 * scale * math.sqrt(matter + rest) * growth * simulator.zeldovich(delta, size)
    for axis, name in enumerate("xyz"):
        for kind in ("dm", "gas"):
            error = channels[f"{kind}_velocity_{name}"] - expected[axis]
            assert np.abs(error).max() < 0.05 * np.abs(expected[axis]).max()


def test_smoothing_damps_a_wave_as_a_gaussian_does() -> None:
    grid, size, radius = 32, 32.0, 2.0
    k = 2 * np.pi * 3 / size
    smoothed = simulator.smooth(1 + wave(grid, 2, cycles=3), size, radius)
    assert smoothed == pytest.approx(1 + math.exp(-0.5 * (k * radius) ** 2) * wave(grid, 2, cycles=3), abs=1e-5)
    spike = np.zeros((grid, grid, grid), np.float32)
    spike[5, 6, 7] = 1000
    for radius in (0.01, 0.5, 2.0):
        smoothed = simulator.smooth(spike, size, radius)
        assert smoothed.min() > -1e-3
        assert smoothed.mean() == pytest.approx(spike.mean(), rel=1e-4)
        assert smoothed.argmax() == spike.argmax()


def test_temperature() -> None:
    density = np.array([0.01, 0.1, 1.0, 10.0, 1000.0], np.float32)
    still = simulator.temperature(density, np.zeros(5, np.float32))
    assert still[2] == pytest.approx(1.2e4, rel=0.05)
    assert still[1] / still[2] == pytest.approx(0.1**0.5, rel=0.05)
    assert still[4] < 1.2e4 * 10**0.5  # cooling limits the rise
    assert np.all(simulator.temperature(density, np.full(5, -300, np.float32)) == still)  # expanding gas has no shock
    shocked = simulator.temperature(density, np.full(5, 100, np.float32))
    assert shocked[4] - still[4] == pytest.approx(1.34e5, rel=0.02)  # 3/16 μ m_p v² / k_B at 100 km/s
    assert shocked[0] == pytest.approx(still[0], rel=0.05)  # voids do not shock
    extreme = simulator.temperature(np.array([1e-6, 1e6], np.float32), np.array([0, 1e6], np.float32))
    assert tuple(extreme) == simulator.TEMPERATURE_RANGE


# --- the file -----------------------------------------------------------------------------------------------------


def test_file_layout(tmp_path: Path) -> None:
    path, phases = tmp_path / "new" / "box.h5", list[tuple[int, int | None]]()
    simulate(path, grid=16, box_mpc_h=20, seed=1, index=2, progress=lambda *done: phases.append(done))
    assert phases == [(channel, 9) for channel in range(1, 10)]
    assert [p.name for p in path.parent.iterdir()] == ["box.h5"]
    with h5py.File(path) as file:
        for name, (channels, units, _) in CHANNELS.items():
            volume = file[name]
            assert (volume.shape, volume.dtype, volume.chunks) == ((len(channels), 16, 16, 16), np.float32, None)
            assert (tuple(volume.attrs["channels"]), tuple(volume.attrs["units"])) == (channels, units)
        assert dict(file.attrs) == {"grid": 16, "box_mpc_h": 20, "seed": 1, "index": 2, "redshift": 2.0}


def test_values_are_physical(box: dict[str, np.ndarray]) -> None:
    assert all(np.isfinite(values).all() for values in box.values())
    empty = box["dm_density"] == 0
    assert empty.any()
    for name in "xyz":  # a cell without particles moves like the gas in this cell
        assert box[f"dm_velocity_{name}"][empty] == pytest.approx(box[f"gas_velocity_{name}"][empty], rel=1e-5)
    for kind in ("dm", "gas"):
        assert box[f"{kind}_density"].mean(dtype=np.float64) == pytest.approx(1, rel=1e-3)
        for name in "xyz":
            assert 10 < box[f"{kind}_velocity_{name}"].std() < 1000
    assert box["gas_density"].min() > 0.99 * simulator.DIFFUSE
    assert box["gas_density"].std() < box["dm_density"].std()  # pressure smooths the gas
    assert 5e3 < np.median(box["gas_temperature"]) < 2e4
    assert 1e5 < box["gas_temperature"].max() < 1e8


def test_same_arguments_same_bytes_and_other_arguments_another_box(tmp_path: Path) -> None:
    paths = [
        simulate(tmp_path / f"{number}.h5", grid=24, box_mpc_h=100.0, seed=seed, index=index)
        for number, (seed, index) in enumerate([(1, 2), (1, 2), (1, 3), (2, 1), (0, 2)])
    ]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    densities = []
    for path in paths[1:]:
        with h5py.File(path) as file:
            densities.append(np.log(file["Hydro"][0]).ravel())
    # Correlations of 24³ independent cells scatter by 0.01; common large modes increase this to a few hundredths.
    assert abs(np.corrcoef(densities) - np.eye(4)).max() < 0.15
