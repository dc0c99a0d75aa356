"""Training losses of each sample. Shape suffixes: B batch, C channels; the grid's axes follow."""

from __future__ import annotations

import torch


def l1(prediction_BC: torch.Tensor, target_BC: torch.Tensor, density_weight: float = 0.0) -> torch.Tensor:
    """Return the mean absolute error of each sample, [B], and `density_weight` times that of exp(14 x) of channel 0.

    With a weight of zero the exponential is not computed.
    """
    loss_B = _mean((prediction_BC - target_BC).abs())
    if density_weight:
        loss_B = loss_B + density_weight * _mean(
            ((14.0 * prediction_BC[:, 0]).exp() - (14.0 * target_BC[:, 0]).exp()).abs()
        )
    return loss_B


def relative_l2(prediction_BC: torch.Tensor, target_BC: torch.Tensor) -> torch.Tensor:
    """Return ||prediction - target|| / ||target|| of each sample, [B]; norms are over channels and points."""
    rest = tuple(range(1, target_BC.dim()))  # to flatten instead would copy what is channels-last
    difference = torch.linalg.vector_norm(prediction_BC - target_BC, dim=rest)
    return difference / torch.linalg.vector_norm(target_BC, dim=rest)


def _mean(values_BC: torch.Tensor) -> torch.Tensor:
    return values_BC.mean(dim=tuple(range(1, values_BC.dim())))
