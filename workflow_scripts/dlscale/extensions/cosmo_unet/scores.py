"""Loss per sample, in plain PyTorch.

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


def _mean(values_BC: torch.Tensor) -> torch.Tensor:
    return values_BC.mean(dim=tuple(range(1, values_BC.dim())))
