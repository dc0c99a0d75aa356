"""Loader `synthetic`: one batch of random numbers on the device, delivered again and again.

No other loader can be faster.
"""

from __future__ import annotations

from collections.abc import Generator

import torch

from dlscale.data.loaders import SyntheticLoader as Settings
from dlscale.data.loaders.base import Batch, Loader, Share
from dlscale.data.samples import ArraySpec, Samples


class SyntheticLoader(Loader):
    """Loader `synthetic`: one random batch on the device.

    Floats are normally distributed, and float targets are clamped to [-1, 1]. Labels and image bytes are uniform.
    """

    def __init__(self, samples: Samples, settings: Settings, share: Share, device: torch.device) -> None:
        super().__init__(samples, share, device)
        generator = torch.Generator().manual_seed(0)
        count = len(share.indices(0, samples.size))
        self._x = _random(samples.input_spec, count, generator).to(device)
        y = _random(samples.target_spec, count, generator)
        self._y = (y.clamp(-1, 1) if y.is_floating_point() else y).to(device)

    def _batches(self, epoch: int, start: int) -> Generator[Batch]:
        for step in range(start, len(self)):
            count = len(self._share.indices(step, self.samples))
            yield self._x[:count], self._y[:count]


def _random(spec: ArraySpec, count: int, generator: torch.Generator) -> torch.Tensor:
    shape, dtype = (count, *spec.shape), getattr(torch, spec.dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=dtype)
    return torch.randint(spec.classes or 256, shape, generator=generator, dtype=dtype)


build = SyntheticLoader
