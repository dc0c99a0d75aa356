"""GFLOP/s of forward and backward passes of U-Net and ViT, compared with a matrix product."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from bench.cases import Case
from bench.measure import Options, Row, in_turns

CPU = torch.device("cpu")


def passes(model: nn.Module, x: torch.Tensor, flops: float, count: int) -> Callable[[], float]:
    """Return a function that measures GFLOP/s of forward and backward passes."""

    def measure() -> float:
        start = time.perf_counter()
        for _ in range(count):
            model.zero_grad(set_to_none=True)
            model(x).sum().backward()
        return count * flops / (time.perf_counter() - start) / 1e9

    return measure


def models(options: Options) -> list[Row]:
    """Measure U-Net and ViT in float32, at sizes that suit a CPU."""
    torch.manual_seed(0)
    batch_size, count = 2, 1 if options.quick else 2
    size = 1024 if options.quick else 2048
    cases = {
        "U-Net (16, 32, 64), 32^3": Case("cosmo_unet", {"widths": [16, 32, 64]}, (32, 32, 32), batch_size),
        "ViT 192 x 4, 576 tokens": Case(
            "era5_vit", {"embed_dim": 192, "depth": 4, "heads": 4, "patch": 4}, (96, 96), batch_size
        ),
    }
    a, b, c = (torch.randn(size, size) for _ in range(3))

    def product() -> float:
        start = time.perf_counter()
        torch.mm(a, b, out=c)
        return 2 * size**3 / (time.perf_counter() - start) / 1e9

    timed = {
        name: passes(case.network(case.run()), case.batch(CPU)[0], batch_size * case.flops(), count)
        for name, case in cases.items()
    }
    found = in_turns(options.repetitions, {**timed, "product": product})
    return [
        Row(
            f"{name}, forward + backward",
            "GFLOP/s",
            found[name],
            f"a product of {size}^2 matrices",
            found["product"],
            {"FLOPs/sample": case.flops(), "batch": batch_size},
        )
        for name, case in cases.items()
    ]
