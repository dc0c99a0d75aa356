"""Metrics that several studies use, in plain PyTorch."""

from __future__ import annotations

import torch


def skill(error: torch.Tensor, naive: torch.Tensor) -> torch.Tensor:
    """Return the skill 1 - `error` / `naive`, scalars or [C]; `naive` is the error of a baseline without learning.

    The skill is NaN if `naive` is zero.
    """
    return torch.where(naive > 0, 1 - error / naive, torch.nan)
