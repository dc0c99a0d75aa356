"""Training losses: scalars from a prediction and its target.

Shape suffixes: B batch, C channels; the grid's axes follow.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F


def l1(prediction_BC: torch.Tensor, target_BC: torch.Tensor, density_weight: float = 0.0) -> torch.Tensor:
    """Mean absolute error, plus `density_weight` times that of exp(14 x) of channel 0 (the density itself).

    With a weight of zero the exponential is not computed.
    """
    loss = F.l1_loss(prediction_BC, target_BC)
    if density_weight:
        loss = loss + density_weight * F.l1_loss((14.0 * prediction_BC[:, 0]).exp(), (14.0 * target_BC[:, 0]).exp())
    return loss


def relative_l2(prediction_BC: torch.Tensor, target_BC: torch.Tensor) -> torch.Tensor:
    """Mean over samples of ||prediction - target|| / ||target||, norms over channels and points."""
    rest = tuple(range(1, target_BC.dim()))  # to flatten instead would copy what is channels-last
    difference = torch.linalg.vector_norm(prediction_BC - target_BC, dim=rest)
    return (difference / torch.linalg.vector_norm(target_BC, dim=rest)).mean()
