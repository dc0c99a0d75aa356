"""The 3D U-Net of Harrington et al. (2021), arXiv:2106.12662.

Shape suffixes: B batch, C channels, D H W the grid.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class _PaddedInput(nn.Conv3d):
    """A convolution whose input channels are padded with zeros to a multiple while it computes."""

    multiple = 1

    def forward(self, x_BCDHW: torch.Tensor) -> torch.Tensor:
        channels = (0, 0, 0, 0, 0, 0, 0, -self.in_channels % self.multiple)
        if not channels[-1]:
            return super().forward(x_BCDHW)
        return self._conv_forward(F.pad(x_BCDHW, channels), F.pad(self.weight, channels), self.bias)


class _PaddedOutput(nn.ConvTranspose3d):
    """A transposed convolution that computes a multiple of output channels and drops the surplus."""

    multiple = 1

    def forward(self, x_BCDHW: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        surplus = -self.out_channels % self.multiple
        if not surplus:
            return super().forward(x_BCDHW)
        assert self.bias is not None
        weight, bias = F.pad(self.weight, (0, 0, 0, 0, 0, 0, 0, surplus)), F.pad(self.bias, (0, surplus))
        y_BCDHW = F.conv_transpose3d(x_BCDHW, weight, bias, self.stride, self.padding)  # type: ignore[arg-type]
        return y_BCDHW[:, : self.out_channels]


def _join(level: nn.Module, *x_BCDHW: torch.Tensor) -> torch.Tensor:
    return level(torch.cat(x_BCDHW, dim=1) if len(x_BCDHW) > 1 else x_BCDHW[0])


class UNet3D(nn.Module):
    """Stride-2 convolutions down, transposed convolutions up, each level's skip concatenated.

    Parameters
    ----------
    widths
        Channels after each level down; the n levels halve the grid n times. The published six,
        64 to 512, with 4 channels in and 5 out have 116,977,029 parameters.
    init_std
        Weights are drawn from N(0, init_std); biases are 0.
    pad_channels
        Compute with input and output channels padded with zeros to a multiple of this, as tensor cores like it; the
        parameters are the same.
    checkpointing
        Keep only each level's inputs for the backward pass, and compute the level again there.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        widths: Sequence[int] = (64, 128, 256, 512, 512, 512),
        init_std: float = 0.02,
        pad_channels: int = 1,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        conv: dict[str, Any] = {"kernel_size": 4, "stride": 2, "padding": 1}
        sizes = [in_channels, *widths]
        self.down = nn.ModuleList(
            nn.Sequential(kind(a, b, **conv), nn.LeakyReLU(0.01, inplace=True))
            for kind, (a, b) in zip(
                [_PaddedInput, *[nn.Conv3d] * (len(widths) - 1)], itertools.pairwise(sizes), strict=True
            )
        )
        # From the bottom up: each level ends with the width of the level above, then meets its skip.
        self.up = nn.ModuleList()
        width = widths[-1]
        for above in reversed(widths[:-1]):
            self.up.append(nn.Sequential(nn.ConvTranspose3d(width, above, **conv), nn.ReLU(inplace=True)))
            width = 2 * above
        self.last = _PaddedOutput(width, out_channels, **conv)
        self.down[0][0].multiple = self.last.multiple = pad_channels  # type: ignore[index]
        for module in self.modules():
            if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
                nn.init.normal_(module.weight, 0.0, init_std)
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def forward(self, x_BCDHW: torch.Tensor) -> torch.Tensor:
        """Map [B, in_channels, D, H, W] to [B, out_channels, D, H, W] in (-1, 1); D, H, W divide by 2^levels."""
        skips = [x_BCDHW]
        for level in self.down:
            skips.append(self._run(level, skips[-1]))
        x = [skips.pop()]
        for level in (*self.up, self.last):
            x = [self._run(level, *x), skips.pop()]
        return torch.tanh(x[0])

    def _run(self, level: nn.Module, *x_BCDHW: torch.Tensor) -> torch.Tensor:
        """Apply a level to its inputs joined: joined within, so that checkpointing does not keep the copy."""
        if self.checkpointing and torch.is_grad_enabled():
            y_BCDHW: torch.Tensor = checkpoint(_join, level, *x_BCDHW, use_reentrant=False, preserve_rng_state=False)
            return y_BCDHW
        return _join(level, *x_BCDHW)
