"""GFLOP/s of the models, forward and backward, against a matrix product."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dlscale.models.unet3d import UNet3D
from dlscale.models.vit import ViT
from tests.bench.measure import Options, Row, in_turns


def vit_flops(model: ViT, in_channels: int, batch_size: int) -> int:
    """FLOPs of forward and backward by the published formula: 24 N E^2 + 4 N^2 E a block, thrice that with gradients.

    PyTorch's counter misses the fused attention of a CPU, which is most of a large model. N tokens, E embedding;
    an MLP four times as wide.
    """
    tokens, embed = model.position.shape[1:]
    patch = model.patch[0] * model.patch[1]
    blocks = len(model.blocks) * (24 * tokens * embed**2 + 4 * tokens**2 * embed)
    ends = 2 * tokens * embed * patch * (in_channels + model.out_channels)
    return 3 * batch_size * (blocks + ends)


def unet_flops(model: UNet3D, grid: tuple[int, ...]) -> int:
    """FLOPs of a sample, forward and backward: 2 k^3 C_in C_out a cell of the coarser grid, thrice with gradients."""
    levels = len(model.down)
    convolutions: list[Any] = [level[0] for level in model.down]  # type: ignore[index]
    convolutions += [level[0] for level in model.up] + [model.last]  # type: ignore[index]
    cells = [math.prod(grid) // 8**level for level in (*range(1, levels + 1), *range(levels, 0, -1))]
    return 3 * sum(2 * count * layer.weight.numel() for count, layer in zip(cells, convolutions, strict=True))


def counted_flops(model: nn.Module, x: torch.Tensor) -> int:
    """FLOPs of forward and backward as PyTorch counts them."""
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    return int(counter.get_total_flops())


def passes(model: nn.Module, x: torch.Tensor, flops: int, count: int) -> Callable[[], float]:
    """Return a function that measures GFLOP/s of forward and backward passes."""

    def measure() -> float:
        start = time.perf_counter()
        for _ in range(count):
            model.zero_grad(set_to_none=True)
            model(x).sum().backward()
        return count * flops / (time.perf_counter() - start) / 1e9

    return measure


def models(options: Options) -> list[Row]:
    """Both models at a size that a CPU can do; float32."""
    torch.manual_seed(0)
    batch_size, count = 2, 1 if options.quick else 2
    size = 1024 if options.quick else 2048
    unet, volume = UNet3D(4, 5, (16, 32, 64)), torch.randn(batch_size, 4, 32, 32, 32)
    vit = ViT((96, 96), (4, 4), 20, 20, embed_dim=192, depth=4, heads=4)
    field = torch.randn(batch_size, 20, 96, 96)
    flops = {"unet": counted_flops(unet, volume), "vit": vit_flops(vit, 20, batch_size)}
    seen = counted_flops(vit, field)
    a, b, c = (torch.randn(size, size) for _ in range(3))

    def product() -> float:
        start = time.perf_counter()
        torch.mm(a, b, out=c)
        return 2 * size**3 / (time.perf_counter() - start) / 1e9

    found = in_turns(
        options.repetitions,
        {
            "unet": passes(unet, volume, flops["unet"], count),
            "vit": passes(vit, field, flops["vit"], count),
            "product": product,
        },
    )
    reference = f"a product of {size}^2 matrices"
    return [
        Row(
            "U-Net (16, 32, 64), 32^3, forward + backward",
            "GFLOP/s",
            found["unet"],
            reference,
            found["product"],
            {"FLOPs/sample": flops["unet"] / batch_size, "batch": batch_size},
        ),
        Row(
            "ViT 192 x 4, 576 tokens, forward + backward",
            "GFLOP/s",
            found["vit"],
            reference,
            found["product"],
            {
                "FLOPs/sample": flops["vit"] / batch_size,
                "batch": batch_size,
                "PyTorch's counter sees": seen / batch_size,
            },
        ),
    ]
