"""Loader `synthetic`: one batch on the device, usually of random numbers, delivered again and again.

No other loader can be faster.
"""

from __future__ import annotations

import functools
from collections.abc import Generator

import torch

from dlscale.data.loaders import SyntheticLoader as Settings
from dlscale.data.loaders.base import Batch, Loader, Share, first_samples, read_batch
from dlscale.data.samples import ArraySpec, Samples, tree_map


class SyntheticLoader(Loader):
    """Loader `synthetic`: one random batch on the device, or the first batch if the study has its own `collate`.

    Floats are normally distributed, and float targets are clamped to [-1, 1]. Labels and image bytes are uniform.
    """

    def __init__(self, samples: Samples, settings: Settings, share: Share, device: torch.device) -> None:
        super().__init__(samples, share, device)
        generator, first = torch.Generator().manual_seed(0), share.indices(0, samples.size)
        specs = samples.input_spec, samples.target_spec
        random = functools.partial(_random, count=len(first), generator=generator)
        x, y = read_batch(samples, 0, first) if samples.collate else (tree_map(random, spec) for spec in specs)
        y = y if samples.collate else tree_map(lambda v: v.clamp(-1, 1) if v.is_floating_point() else v, y)
        self._batch = tree_map(lambda values: values.to(device), (x, y))

    def _batches(self, epoch: int, start: int) -> Generator[Batch]:
        for step in range(start, len(self)):
            yield first_samples(self._batch, len(self._share.indices(step, self.samples)))


def _random(spec: ArraySpec, count: int, generator: torch.Generator) -> torch.Tensor:
    shape, dtype = (count, *spec.shape), getattr(torch, spec.dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=dtype)
    return torch.randint(spec.classes or 256, shape, generator=generator, dtype=dtype)


build = SyntheticLoader
