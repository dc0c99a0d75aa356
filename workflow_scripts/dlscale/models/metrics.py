"""Validation metrics [B, ...], and their sums over batches and ranks, which stay on the device.

Shape suffixes: B batch, C channels, H W grid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch


def latitude_weights(latitude: torch.Tensor) -> torch.Tensor:
    """Return cos(latitude) with mean 1, [H, 1], for latitudes [H] in degrees."""
    weights = torch.cos(torch.deg2rad(latitude)).clamp(min=0)
    return (weights / weights.mean())[:, None]


def mean_square(difference_BCHW: torch.Tensor, weights_H1: torch.Tensor) -> torch.Tensor:
    """Return the weighted mean over points of the squared difference, [B, C]."""
    return (difference_BCHW.square() * weights_H1).mean(dim=(-2, -1))


def anomaly_correlation(
    prediction_BCHW: torch.Tensor, target_BCHW: torch.Tensor, climatology_CHW: torch.Tensor, weights_H1: torch.Tensor
) -> torch.Tensor:
    """Return the weighted correlation of the anomalies of prediction and target, [B, C].

    Uncentred, as in WeatherBench 2 (Rasp et al. 2024, arXiv:2308.15560): sum(w p t) / sqrt(sum(w p^2) sum(w t^2)).
    """
    p, t = prediction_BCHW - climatology_CHW, target_BCHW - climatology_CHW
    cross, pp, tt = ((a * b * weights_H1).sum(dim=(-2, -1)) for a, b in ((p, t), (p, p), (t, t)))
    return cross / (pp * tt).sqrt()


class MetricSum:
    """Means over samples of named per-sample values, summed in float64 where they are."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._count = 0

    def add(self, values: Mapping[str, torch.Tensor]) -> None:
        """Add per-sample values [B, ...], if any, all of the same B."""
        for name, value in values.items():
            total = value.detach().double().sum(dim=0)
            self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._count += len(next(iter(values.values()), ()))

    def means(self, over_all: Callable[[torch.Tensor], torch.Tensor] = lambda sums: sums) -> dict[str, torch.Tensor]:
        """Return the mean of each value over samples, [...], on the host; `over_all` sums a tensor over processes."""
        if not self._sums:
            return {}
        device = next(iter(self._sums.values())).device
        count = int(over_all(torch.tensor(self._count, device=device)))
        return {name: (over_all(total) / count).cpu() for name, total in self._sums.items()}


def skill(error: torch.Tensor, naive: torch.Tensor) -> torch.Tensor:
    """Return 1 - error / error of the naive answer, scalars or [C]; NaN where that answer is exact."""
    return torch.where(naive > 0, 1 - error / naive, torch.nan)
