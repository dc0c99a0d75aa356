"""Vision transformer that maps fields to fields (Dosovitskiy et al. 2021, arXiv:2010.11929).

Shape suffixes: B batch, C channels, H W the grid, N tokens, E embedding, A heads, K head dimension.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

#: Operators whose outputs a selective checkpoint keeps: matrix products and attention, which take most of the time.
KEPT = [
    getattr(torch.ops.aten, name).default
    for name in (
        *("mm", "addmm", "bmm", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
        *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    )
]


class Attend(nn.Module):
    """Scaled dot-product attention; a module, so that context parallelism can register hooks on it."""

    def forward(self, q_BANK: torch.Tensor, k_BANK: torch.Tensor, v_BANK: torch.Tensor) -> torch.Tensor:
        """Return [B, A, N, K] for queries of N tokens; keys and values may have more tokens."""
        return F.scaled_dot_product_attention(q_BANK, k_BANK, v_BANK)


class Attention(nn.Module):
    """Multi-head self-attention; with tensor parallelism a device has only some of the heads.

    Queries, keys and values have a linear layer each, as published, but one matrix product computes all.
    """

    def __init__(self, embed_dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_dim = embed_dim // heads
        self.q, self.k, self.v = (nn.Linear(embed_dim, embed_dim) for _ in range(3))
        self.attend = Attend()
        self.projection = nn.Linear(embed_dim, embed_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BNE: torch.Tensor) -> torch.Tensor:
        layers = (self.q, self.k, self.v)
        weight, bias = (torch.cat([getattr(layer, name) for layer in layers]) for name in ("weight", "bias"))
        qkv_BN3AK = F.linear(x_BNE, weight, bias).unflatten(-1, (3, -1, self.head_dim))
        y_BANK = self.attend(*(values_BNAK.transpose(1, 2) for values_BNAK in qkv_BN3AK.unbind(2)))
        return self.dropout(self.projection(y_BANK.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, embed_dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(embed_dim, eps=1e-6)
        self.attention = Attention(embed_dim, heads, dropout)
        self.norm2 = nn.LayerNorm(embed_dim, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(embed_dim, 4 * embed_dim),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(4 * embed_dim, embed_dim),
            nn.Dropout(dropout),
        )

    def forward(self, x_BNE: torch.Tensor) -> torch.Tensor:
        x_BNE = x_BNE + self.attention(self.norm1(x_BNE))
        return x_BNE + self.mlp(self.norm2(x_BNE))


class _Patches(nn.Conv2d):
    """Convolution whose stride is the kernel size; on a CPU in 16 bits, computed as a matrix product.

    The matrix product avoids an error: with Intel's AMX, oneDNN 3.12 computes such convolutions wrong in bf16 if there
    are few channels.
    """

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        narrow = x_BCHW.dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu")
        if x_BCHW.device.type != "cpu" or not narrow:
            return super().forward(x_BCHW)
        rows, columns = self.kernel_size
        patches = x_BCHW.unflatten(2, (-1, rows)).unflatten(4, (-1, columns)).permute(0, 2, 4, 1, 3, 5).flatten(3)
        return F.linear(patches, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


class ViT(nn.Module):
    """Vision transformer: patches become tokens, blocks transform tokens, a linear head makes patches.

    The published base model (360 x 720 points, patch 8, 20 channels, embed_dim 384, depth 12) has 23,832,960
    parameters.

    Parameters
    ----------
    image_size, patch
        Size of the image (H, W), and size of a patch (rows, columns), points. H is a multiple of rows, W of columns.
    residual
        If True, add the input's first out_channels channels to the output. If "linear", add a learnt linear combination
        of all input channels.
    static
        Further input channels, [S, H, W], which are the same for all inputs.
    checkpointing
        Whether the backward pass repeats the forward pass of each block, which saves memory. If "selective", the
        backward pass repeats all operators except `KEPT`.
    """

    static: torch.Tensor | None

    def __init__(
        self,
        image_size: tuple[int, int],
        patch: tuple[int, int],
        in_channels: int,
        out_channels: int,
        embed_dim: int = 384,
        depth: int = 12,
        heads: int = 8,
        dropout: float = 0.0,
        residual: bool | Literal["linear"] = False,
        static: torch.Tensor | None = None,
        checkpointing: bool | Literal["selective"] = False,
    ) -> None:
        super().__init__()
        (height, width), (rows, columns) = image_size, patch
        self.grid = (height // rows, width // columns)
        self.patch, self.out_channels, self.residual = patch, out_channels, residual
        self.checkpointing, tokens = checkpointing, self.grid[0] * self.grid[1]
        #: Heads, tokens, head dimension.
        self.attention_shape = (heads, tokens, embed_dim // heads)
        self.register_buffer("static", static, persistent=False)
        channels = in_channels + (0 if static is None else len(static))
        self.embedding = _Patches(channels, embed_dim, kernel_size=patch, stride=patch)
        self.position = nn.Parameter(torch.zeros(1, tokens, embed_dim))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(embed_dim, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        self.head = nn.Linear(embed_dim, out_channels * rows * columns, bias=False)
        nn.init.trunc_normal_(self.position, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        self.linear: nn.Conv2d | None = None
        if residual == "linear":
            self.linear = nn.Conv2d(channels, out_channels, kernel_size=1)
            nn.init.dirac_(self.linear.weight)
            nn.init.zeros_(self.linear.get_parameter("bias"))

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Map [B, in_channels, H, W] to [B, out_channels, H, W]."""
        if self.static is not None:
            x_BCHW = torch.cat([x_BCHW, self.static.to(x_BCHW.dtype).expand(len(x_BCHW), -1, -1, -1)], dim=1)
        x_BNE = self.embedding(x_BCHW).flatten(2).transpose(1, 2)
        x_BNE = self.dropout(x_BNE + self.position)
        kept = partial(create_selective_checkpoint_contexts, KEPT)
        options: dict[str, Any] = {"context_fn": kept} if self.checkpointing == "selective" else {}
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                # With drop-out, the repeated forward pass must drop the same values.
                options["preserve_rng_state"] = self.dropout.p > 0
                x_BNE = checkpoint(block, x_BNE, use_reentrant=False, **options)
            else:
                x_BNE = block(x_BNE)
        y = self.head(self.norm(x_BNE))  # [B, N, rows * columns * C]
        y = y.unflatten(1, self.grid).unflatten(-1, (*self.patch, self.out_channels))  # [B, h, w, rows, columns, C]
        y_BCHW = y.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
        if self.linear is not None:
            return self.linear(x_BCHW) + y_BCHW
        return x_BCHW[:, : self.out_channels] + y_BCHW if self.residual else y_BCHW
