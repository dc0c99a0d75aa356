"""Loss and metrics per sample, in plain PyTorch.

Shape suffixes: B batch, C channels, H W grid; a suffix without H W allows a grid with any number of axes.
"""

from __future__ import annotations

import torch


def relative_l2(prediction_BC: torch.Tensor, target_BC: torch.Tensor) -> torch.Tensor:
    """Return ||prediction - target|| / ||target|| of each sample, [B]; norms are over channels and points."""
    rest = tuple(range(1, target_BC.dim()))  # flattening would copy channels-last tensors
    difference = torch.linalg.vector_norm(prediction_BC - target_BC, dim=rest)
    return difference / torch.linalg.vector_norm(target_BC, dim=rest)


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

    With anomalies p and t: sum(w p t) / sqrt(sum(w p^2) sum(w t^2)), uncentred as in WeatherBench 2 (Rasp et al. 2024,
    arXiv:2308.15560).
    """
    p, t = prediction_BCHW - climatology_CHW, target_BCHW - climatology_CHW
    cross, pp, tt = ((a * b * weights_H1).sum(dim=(-2, -1)) for a, b in ((p, t), (p, p), (t, t)))
    return cross / (pp * tt).sqrt()
