"""The 3D U-Net of Harrington et al. (2021), arXiv:2106.12662.

Shape suffixes: B batch, C channels, D H W the grid.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class UNet3D(nn.Module):
    """Stride-2 convolutions down, transposed convolutions up, each level's skip concatenated.

    Parameters
    ----------
    in_channels, out_channels
        Channels of input and output.
    widths
        Channels after each level down; the n levels halve the grid n times. The published six,
        64 to 512, with 4 channels in and 5 out have 116,977,029 parameters.
    init_std
        Weights are drawn from N(0, init_std); biases are 0.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        widths: Sequence[int] = (64, 128, 256, 512, 512, 512),
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        conv: dict[str, Any] = {"kernel_size": 4, "stride": 2, "padding": 1}
        sizes = [in_channels, *widths]
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv3d(a, b, **conv), nn.LeakyReLU(0.01, inplace=True))
            for a, b in itertools.pairwise(sizes)
        )
        # From the bottom up: each level ends with the width of the level above, then meets its skip.
        self.up = nn.ModuleList()
        width = widths[-1]
        for above in reversed(widths[:-1]):
            self.up.append(nn.Sequential(nn.ConvTranspose3d(width, above, **conv), nn.ReLU(inplace=True)))
            width = 2 * above
        self.last = nn.ConvTranspose3d(width, out_channels, **conv)
        for module in self.modules():
            if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
                nn.init.normal_(module.weight, 0.0, init_std)
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def forward(self, x_BCDHW: torch.Tensor) -> torch.Tensor:
        """Map [B, in_channels, D, H, W] to [B, out_channels, D, H, W] in (-1, 1); D, H, W divide by 2^levels."""
        x = x_BCDHW
        skips = []
        for level in self.down:
            x = level(x)
            skips.append(x)
        x = skips.pop()
        for level in self.up:
            x = torch.cat([level(x), skips.pop()], dim=1)
        return torch.tanh(self.last(x))
