"""A profiler's overhead, compared with values computed by hand and with simulations of known overhead."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from dlscale.measure.profilers import Overhead, overhead


def test_an_even_drift_falls_out() -> None:
    """A steady drift has no effect: steps take 100 ms before profiling, 120 ms after it, and 1.5 × 110 ms during it."""
    found = overhead([0.1] * 4, [0.165] * 4, [0.12] * 4)
    assert found.ratio == pytest.approx(1.5)
    assert found.noise == pytest.approx(1.5 * 0.01 / 0.11), (
        "the noise must be the ratio × half the relative difference of the windows without the profiler"
    )


def test_the_noise_is_the_steps_scatter() -> None:
    """Steps without a profiler take 1 s ± 0.1 (std 0.1155). A median has pi / 2 times the variance of a mean."""
    plain = [0.9, 1.1, 0.9, 1.1]
    found = overhead(plain, [2.0] * 4, plain)
    error = 0.1155 * (3.1416 / 2) ** 0.5 / 2  # error of the median of four steps
    assert found.ratio == 2 and found.noise == pytest.approx(3.182 * 2 * error / 2**0.5, rel=1e-3)


def test_no_profiler_makes_steps_faster() -> None:
    found = overhead([0.1] * 4, [0.064] * 4, [0.1] * 4)
    assert found.noise == pytest.approx(0.36) and "take equally long, within ± 36" in found.words


def test_the_text_of_an_overhead() -> None:
    assert "20\u00a0% longer (± 5\u00a0%)" in Overhead(ratio=1.2, noise=0.05).words
    assert "within ± 25" in Overhead(ratio=1.2, noise=0.25).words
    one = overhead([0.1], [0.2], [0.1])
    assert (one.ratio, one.noise) == (pytest.approx(2), None) and "the noise of one step is unknown" in one.words


def share(cost: float, machine: Callable[[random.Random], Callable[[], float]], trials: int = 400) -> float:
    """Return the fraction of trials that find an overhead, if the profiler multiplies step times by `cost`."""
    certain = 0
    for seed in range(trials):
        pace = machine(random.Random(seed))
        before, profiled, after = ([factor * pace() for _ in range(10)] for factor in (1.0, cost, 1.0))
        found = overhead(before, profiled, after)
        certain += abs(found.ratio - 1) > found.noise
    return certain / trials


def quiet(draw: random.Random) -> Callable[[], float]:
    return lambda: draw.gauss(0.1, 0.003)


def drifting(draw: random.Random) -> Callable[[], float]:
    """Return a function that returns step times with noise and a linear drift of up to 2 % per step."""
    slope, step = draw.uniform(-0.002, 0.002), iter(range(30))
    return lambda: 0.1 + slope * next(step) + draw.gauss(0, 0.003)


def disturbed(draw: random.Random) -> Callable[[], float]:
    """Return a function that returns step times; another program makes about every fourth step 1.5 times as long."""
    return lambda: draw.gauss(0.1, 0.003) * (1.5 if draw.random() < 0.25 else 1.0)


@pytest.mark.parametrize("machine", [quiet, drifting, disturbed])
def test_nothing_is_seldom_called_a_cost(machine: Callable[[random.Random], Callable[[], float]]) -> None:
    assert share(1.0, machine) < 0.05


@pytest.mark.parametrize(("machine", "least"), [(quiet, 0.99), (drifting, 0.2), (disturbed, 0.05)])
def test_a_cost_is_found(machine: Callable[[random.Random], Callable[[], float]], least: float) -> None:
    """An overhead of 20 % is found in over 99 % of trials on a quiet machine, 20 % with drift, 5 % if disturbed."""
    assert share(1.2, machine) > least
