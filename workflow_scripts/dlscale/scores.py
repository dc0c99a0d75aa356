"""Losses and metrics per sample, in plain PyTorch, that several studies use.

Shape suffixes: B batch, C channels, H W grid; a suffix without H W allows a grid with any number of axes.
"""

from __future__ import annotations

import torch


def l1(prediction_BC: torch.Tensor, target_BC: torch.Tensor, density_weight: float = 0.0) -> torch.Tensor:
    """Return the mean absolute error of each sample, [B], plus a term for high densities.

    The term is `density_weight` times the mean absolute error of exp(14 x) for channel 0. With a weight of zero, the
    term is not computed.
    """
    loss_B = _mean((prediction_BC - target_BC).abs())
    if density_weight:
        loss_B = loss_B + density_weight * _mean(
            ((14.0 * prediction_BC[:, 0]).exp() - (14.0 * target_BC[:, 0]).exp()).abs()
        )
    return loss_B


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


def skill(error: torch.Tensor, naive: torch.Tensor) -> torch.Tensor:
    """Return the skill 1 - `error` / `naive`, scalars or [C]; `naive` is the error of a baseline without learning.

    The skill is NaN if `naive` is zero.
    """
    return torch.where(naive > 0, 1 - error / naive, torch.nan)


def _mean(values_BC: torch.Tensor) -> torch.Tensor:
    return values_BC.mean(dim=tuple(range(1, values_BC.dim())))
