"""Decoding on a device: the formula of `DecodePlan`, by one fused kernel or by PyTorch's operations."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import numpy as np
import torch

from dlscale.data.loaders.base import Delivery
from dlscale.data.samples import BoxField, DecodePlan


def torch_dtype(dtype: np.dtype) -> torch.dtype:
    """Return the PyTorch type of the same name."""
    found: torch.dtype = getattr(torch, dtype.name)
    return found


def on_device(
    stored: torch.Tensor, plan: DecodePlan, field: BoxField, dtype: torch.dtype, delivery: Delivery
) -> torch.Tensor:
    """Evaluate the formula where `stored` [values] is.

    The result, of `dtype` [B, *spec.shape] in the delivery's layout, has boxes [C, *extent], perhaps without an axis of
    one cell. PyTorch's operations need memory for the positions of one channel besides.
    """
    device, shape = stored.device, (len(plan.places), *field.spec.shape)
    numbers = [torch.from_numpy(each) for each in plan]
    if device.type == "cuda":  # PyTorch gives pinned memory out again once the copies from it are done
        numbers = [each.pin_memory().to(device, non_blocking=True) for each in numbers]
    plan = DecodePlan(*numbers)
    if (decode := kernel(device)) is None:
        values = _by_operations(stored, plan, field.extent).reshape(shape)
        return values.to(dtype, memory_format=delivery.layout_of(values.dim()))
    out = delivery.empty(shape, dtype, device)
    decode(stored, *plan, field.extent, out)
    return out


@functools.cache
def kernel(device: torch.device) -> Callable[..., None] | None:
    """Return the fused kernel for a GPU; Triton, which comes with PyTorch for CUDA, interprets it on a processor."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    from dlscale.data.loaders.decode_kernel import decode

    return decode


def _by_operations(stored: torch.Tensor, plan: DecodePlan, extent: tuple[int, int, int]) -> torch.Tensor:
    """Return the values, float32 [B, C, cells]."""
    integer = torch.int32 if stored.numel() < 2**31 else torch.int64
    base, step, channel = plan.places.to(integer).tensor_split([1, 4], dim=1)
    shift, factor, offset = plan.numbers[..., None].unbind(1)
    position = base  # of each cell in `stored`, [B, cells], axis by axis
    for axis, size in enumerate(extent):
        cells = torch.arange(size, dtype=integer, device=stored.device) * step[:, axis, None]
        position = (position[:, :, None] + cells[:, None]).flatten(1)
    count, channels = channel.shape
    out = torch.empty(count, channels, position.shape[1], device=stored.device)
    for c in range(channels):
        values = stored.index_select(0, (position + channel[:, c, None]).flatten()).reshape(position.shape)
        out[:, c] = (values.float() - shift[:, c]) * factor[:, c] + offset[:, c]
    return out
