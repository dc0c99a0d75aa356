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


def _blocks(x_BCDHW: torch.Tensor) -> torch.Tensor:
    """Move space to depth: return [B, 8 C, D/2, H/2, W/2], with channels ordered by cell of the block, then C.

    The memory format is kept. The function also accepts a kernel [O, C, 4, 4, 4].
    """
    if _is_channels_last(x_BCDHW):
        x = x_BCDHW.permute(0, 2, 3, 4, 1).unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).unflatten(1, (-1, 2))
        return x.permute(0, 1, 3, 5, 2, 4, 6, 7).flatten(4).permute(0, 4, 1, 2, 3)  # permutes B D 2 H 2 W 2 C
    x = x_BCDHW.unflatten(4, (-1, 2)).unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
    return x.permute(0, 3, 5, 7, 1, 2, 4, 6).flatten(1, 4)  # permutes B C D 2 H 2 W 2


def _unblocks(x_BCDHW: torch.Tensor) -> torch.Tensor:
    """Move depth to space, from [B, 8 C, D, H, W] to [B, C, 2 D, 2 H, 2 W]."""
    batch, channels, *grid = x_BCDHW.shape
    doubled = [2 * edge for edge in grid]
    if _is_channels_last(x_BCDHW):
        x = x_BCDHW.permute(0, 2, 3, 4, 1).unflatten(-1, (2, 2, 2, -1)).permute(0, 1, 4, 2, 5, 3, 6, 7)
        return x.reshape(batch, *doubled, channels // 8).permute(0, 4, 1, 2, 3)
    x = x_BCDHW.unflatten(1, (2, 2, 2, -1)).permute(0, 4, 5, 1, 6, 2, 7, 3)
    return x.reshape(batch, channels // 8, *doubled)


def _is_channels_last(x_BCDHW: torch.Tensor) -> bool:
    return not x_BCDHW.is_contiguous() and x_BCDHW.is_contiguous(memory_format=torch.channels_last_3d)


class _BlockConv(nn.Conv3d):
    """Convolution with kernel 4, stride 2 and padding 1, computed on blocks of 2^3 cells.

    On blocks the convolution has kernel 2, stride 1, and 8 times the channels. Along each axis, cell 2 o + k of the
    padded grid (weight k, output o) is cell k % 2 of block o + k // 2.
    """

    def forward(self, x_BCDHW: torch.Tensor) -> torch.Tensor:
        kind = x_BCDHW.device.type
        if torch.is_autocast_enabled(kind):  # convert first, so that only half as many bytes are padded and moved
            x_BCDHW = x_BCDHW.to(torch.get_autocast_dtype(kind))
        return F.conv3d(_blocks(F.pad(x_BCDHW, (1,) * 6)), _blocks(self.weight), self.bias)


class _BlockTranspose(nn.ConvTranspose3d):
    """Transpose of `_BlockConv`: a transposed convolution with kernel 2 and stride 1 makes blocks of 2^3 cells.

    The padding is removed.
    """

    def forward(self, x_BCDHW: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        assert self.bias is not None
        y_BCDHW = F.conv_transpose3d(x_BCDHW, _blocks(self.weight), self.bias.repeat(8))
        return F.pad(_unblocks(y_BCDHW), (-1,) * 6)


class _Transpose(nn.ConvTranspose3d):
    """Transposed convolution with kernel 4, stride 2 and padding 1; for a grid of a single cell, a matrix product.

    The product uses the 2^3 of the 4^3 weights whose results are inside the grid. A compiled convolution would fail on
    a GPU with weights in channels last, since the memory format of a single cell is ambiguous: PyTorch's compiler
    expects the weights' gradient in channels last, but cuDNN returns a contiguous gradient (pytorch/pytorch#171622).
    """

    def forward(self, x_BCDHW: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if x_BCDHW.shape[2:].numel() > 1:
            return super().forward(x_BCDHW)
        assert self.bias is not None
        y_BCDHW = torch.einsum("bc,codhw->bodhw", x_BCDHW.flatten(1), self.weight[:, :, 1:3, 1:3, 1:3])
        y_BCDHW = y_BCDHW + self.bias.to(y_BCDHW.dtype)[:, None, None, None]
        last = _is_channels_last(self.weight)
        return y_BCDHW.contiguous(memory_format=torch.channels_last_3d if last else torch.contiguous_format)


def _join(level: nn.Module, *x_BCDHW: torch.Tensor) -> torch.Tensor:
    return level(torch.cat(x_BCDHW, dim=1) if len(x_BCDHW) > 1 else x_BCDHW[0])


class UNet3D(nn.Module):
    """U-Net: convolutions of stride 2 down, transposed convolutions up, with concatenated skip connections.

    The published network, with six levels, 4 input and 5 output channels, has 116,977,029 parameters. `widths`
    are the numbers of channels after each level down. With `space_to_depth` the first and the last layer are computed
    on blocks of 2^3 cells. With `checkpointing` the backward pass repeats the forward pass of each level.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        widths: Sequence[int] = (64, 128, 256, 512, 512, 512),
        init_std: float = 0.02,
        space_to_depth: bool = False,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        conv: dict[str, Any] = {"kernel_size": 4, "stride": 2, "padding": 1}
        sizes = [in_channels, *widths]
        first, last = (_BlockConv, _BlockTranspose) if space_to_depth else (nn.Conv3d, nn.ConvTranspose3d)
        self.down = nn.ModuleList(
            nn.Sequential((nn.Conv3d if level else first)(a, b, **conv), nn.LeakyReLU(0.01, inplace=True))
            for level, (a, b) in enumerate(itertools.pairwise(sizes))
        )
        # From the bottom up: the output of a level has the width of the level above, and is joined with the skip.
        self.up = nn.ModuleList()
        width = widths[-1]
        for above in reversed(widths[:-1]):
            self.up.append(nn.Sequential(_Transpose(width, above, **conv), nn.ReLU(inplace=True)))
            width = 2 * above
        self.last = last(width, out_channels, **conv)
        for module in self.modules():
            if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
                nn.init.normal_(module.weight, 0.0, init_std)
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def forward(self, x_BCDHW: torch.Tensor) -> torch.Tensor:
        """Map [B, in_channels, D, H, W] to [B, out_channels, D, H, W] in (-1, 1); 2^levels divides D, H, W."""
        skips = [x_BCDHW]
        for level in self.down:
            skips.append(self._run(level, skips[-1]))
        x = [skips.pop()]
        for level in (*self.up, self.last):
            x = [self._run(level, *x), skips.pop()]
        return torch.tanh(x[0])

    def _run(self, level: nn.Module, *x_BCDHW: torch.Tensor) -> torch.Tensor:
        """Apply a level to its inputs, joined inside the checkpoint, so that the joined copy is not kept."""
        if self.checkpointing and torch.is_grad_enabled():
            y_BCDHW: torch.Tensor = checkpoint(_join, level, *x_BCDHW, use_reentrant=False, preserve_rng_state=False)
            return y_BCDHW
        return _join(level, *x_BCDHW)
