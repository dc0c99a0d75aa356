"""A small convolutional network from images to images.

Shape suffixes: B batch, C channels, H W the image.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn


class StarterCNN(nn.Module):
    """Convolutions of 3 x 3, each followed by LeakyReLU, including the last; images keep their size."""

    def __init__(self, in_channels: int = 1, out_channels: int = 1, hidden: int = 64, layers: int = 5) -> None:
        super().__init__()
        widths = [in_channels, *[hidden] * (layers - 1), out_channels]
        convolutions = (nn.Conv2d(below, above, 3, padding=1) for below, above in pairwise(widths))
        self.layers = nn.Sequential(*(module for layer in convolutions for module in (layer, nn.LeakyReLU())))

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Return images [B, C, H, W] of the same size as `x_BCHW`."""
        y_BCHW: torch.Tensor = self.layers(x_BCHW)
        return y_BCHW


def mse(prediction_BC: torch.Tensor, target_BC: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error of each sample, [B], over channels and pixels."""
    return (prediction_BC - target_BC).square().mean(dim=tuple(range(1, target_BC.dim())))
