"""Linear layers whose matrix products are in 8 bits, as torchao makes them.

The factors of each product, forward and backward, are multiplied by a scale, then rounded to 8 bits. The scale
maps the largest absolute value of a tensor, or of a row (`fp8_rowwise`), to the largest value of the format: e4m3, or
e5m2 for gradients of `fp8` (Micikevicius et al. 2022, arXiv:2209.05433). Weights, optimiser state and results keep
their formats.
"""

from __future__ import annotations

import dataclasses
import logging

import torch
from torch import nn

from dlscale.core.errors import UserError

#: Lowest compute capability with 8-bit matrix products (Ada).
CAPABILITY = (8, 9)

#: 8-bit products need sizes that are multiples of this number.
MULTIPLE = 16

#: Precision → name of torchao's recipe.
RECIPES = {"fp8": "tensorwise", "fp8_rowwise": "rowwise"}


def convert(model: nn.Module, precision: str) -> None:
    """Replace linear layers of a model in place; keep parameters and their names.

    Only layers whose sizes are multiples of `MULTIPLE` are replaced. On a CPU, factors are rounded to 8 bits, but
    multiplied in the format of autocast: this is slower than `bf16`, and only shows the effect on the loss.

    Raises
    ------
    UserError
        The GPU has no 8-bit products, torchao is not installed, or no layer can be replaced.
    """
    device = next(model.parameters()).device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        raise UserError(
            f"precision: {precision}: {torch.cuda.get_device_name(device)} has no 8-bit matrix products (L40, H100 and "
            "newer GPUs have them); use precision bf16"
        )
    try:
        from torchao import float8
    except ImportError:
        raise UserError(f"precision: {precision}: torchao is not installed; pip install 'dlscale[fp8]'") from None
    if not (count := sum(map(_fits, model.modules()))):
        raise UserError(
            f"precision: {precision}: no linear layer has sizes that are multiples of {MULTIPLE}; use precision bf16"
        )
    emulated = device.type != "cuda"
    config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(RECIPES[precision]), emulate=emulated)
    float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda layer, _: _fits(layer))
    how = "; a CPU only emulates 8 bits, more slowly than bf16" if emulated else ""
    logging.info("%d linear layers multiply in 8 bits (%s)%s", count, RECIPES[precision], how)


def _fits(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) and not (layer.in_features % MULTIPLE or layer.out_features % MULTIPLE)
