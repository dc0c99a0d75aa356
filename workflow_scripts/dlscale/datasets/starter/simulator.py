"""Smooth random fields on square images, and how steep they are at each pixel.

A target is a function of the pixels around it, and it is even: a field and its negative are equally likely and have the
same target. So no linear filter does better than the mean of all targets; whatever does has learnt something else.
"""

from __future__ import annotations

import functools

import numpy as np


@functools.cache
def _amplitude(size: int, length: float) -> np.ndarray:
    """Return the factor of each Fourier mode, [size, size // 2 + 1], that gives white noise its length and variance 1.

    The power spectrum exp(-k^2 length^2) makes the variance of a gradient 1 / (2 length^2) a component.
    """
    kx, ky = np.fft.rfftfreq(size) * 2 * np.pi, np.fft.fftfreq(size) * 2 * np.pi
    filtered = np.exp(-(kx[None, :] ** 2 + ky[:, None] ** 2) * length**2 / 2)
    whole = np.exp(-(ky[None, :] ** 2 + ky[:, None] ** 2) * length**2 / 2)
    return np.asarray(filtered / np.sqrt((whole**2).mean()))


def pair(seed: list[int], size: int, length: float, target: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the input and the target of one sample, float32 [size, size] each; see the source's settings."""
    rng = np.random.default_rng(seed)
    if target == "noise":
        both = rng.random((2, size, size), np.float32)
        return both[0], both[1]
    field = np.fft.irfft2(np.fft.rfft2(rng.standard_normal((size, size))) * _amplitude(size, length), s=(size, size))
    steepness = length * np.hypot(*np.gradient(field))
    return field.astype(np.float32), steepness.astype(np.float32)
