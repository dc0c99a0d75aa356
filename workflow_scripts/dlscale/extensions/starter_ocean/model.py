"""A small convolutional network with two inputs and a mask.

Shape suffixes: B batch, C channels, H W the grid.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn


class OceanCNN(nn.Module):
    """Network of 3 x 3 convolutions that predict the temperature change in the sea."""

    def __init__(self, hidden: int = 16, layers: int = 5) -> None:
        super().__init__()
        widths = [3, *[hidden] * (layers - 1), 1]
        self.layers = nn.ModuleList(nn.Conv2d(below, above, 3, padding=1) for below, above in pairwise(widths))

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the temperature after mixing, [B, 1, H, W], from `before` [B, 1, H, W], `mixing` [B], `sea` [B, H, W].

        The mask `sea` is 1 in the sea and 0 on land.
        """
        before_B1HW, sea_B1HW = inputs["before"], inputs["sea"][:, None]
        mixing_B1HW = inputs["mixing"][:, None, None, None].expand_as(sea_B1HW)
        y_BCHW = torch.cat([before_B1HW, sea_B1HW, mixing_B1HW], dim=1)
        for layer in self.layers[:-1]:
            y_BCHW = nn.functional.gelu(layer(y_BCHW))
        change_B1HW: torch.Tensor = self.layers[-1](y_BCHW)
        return before_B1HW + sea_B1HW * change_B1HW


def sea_mse(prediction_B1HW: torch.Tensor, target: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean squared error over the sea of each sample, [B], in K^2."""
    sea_BHW = target["sea"]
    squares_BHW = (prediction_B1HW - target["after"]).square().squeeze(1) * sea_BHW
    return squares_BHW.sum(dim=(1, 2)) / sea_BHW.sum(dim=(1, 2))
