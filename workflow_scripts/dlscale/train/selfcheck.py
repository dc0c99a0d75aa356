"""A check of convolutions and attention in 16 bits against float32, at the start of a run.

Libraries have been wrong without a message: cuDNN 9.8 to 9.10 gave wrong values in bf16 3-D convolutions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from dlscale.core.errors import UserError
from dlscale.train.attention import Context

#: Greatest error of an element over the root mean square of all: some 13 (bf16) and 20 (fp16) roundings.
TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.01}

#: Name: the function's name in `torch.nn.functional`, shapes of its inputs, and its arguments.
CHECKS: dict[str, tuple[str, list[tuple[int, ...]], dict[str, int]]] = {
    "2-D convolution": ("conv2d", [(2, 8, 16, 16), (16, 8, 4, 4)], {"stride": 4}),
    "3-D convolution": ("conv3d", [(2, 8, 8, 8, 8), (16, 8, 4, 4, 4)], {"stride": 2, "padding": 1}),
    "transposed 3-D convolution": (
        "conv_transpose3d",
        [(2, 8, *[4] * 3), (8, 16, *[4] * 3)],
        {"stride": 2, "padding": 1},
    ),
    "attention": ("scaled_dot_product_attention", [(2, 2, 64, 32)] * 3, {}),
}

#: By function: the operation that a study names.
OPERATIONS = {
    "conv2d": "conv2d",
    "conv3d": "conv3d",
    "conv_transpose3d": "conv3d",
    "scaled_dot_product_attention": "attention",
}
LAYOUT = {4: torch.channels_last, 5: torch.channels_last_3d}


def check_operations(
    dtype: torch.dtype,
    device: torch.device,
    channels_last: bool = False,
    attention: Context = nullcontext,
    head_dim: int = 32,
    operations: Collection[str] = (),
) -> None:
    """Raise a `UserError` where a forward or backward pass in `dtype` differs from float32 by more than rounding.

    `channels_last` checks convolutions of that order in memory, which are other kernels; `attention` and `head_dim` are
    the context that chooses the run's kernel of attention, and the head dimension of its model. `operations` are those
    of the model (`Study.operations`); all are checked of a model that names none.
    """
    generator = torch.Generator().manual_seed(0)
    for name, (function, shapes, arguments) in CHECKS.items():
        if operations and OPERATIONS[function] not in operations:
            continue
        # Rounded to `dtype` first: only the arithmetic differs. The truth is computed by another library, on the host.
        if name == "attention":
            shapes = [(*shape[:-1], head_dim) for shape in shapes]
        inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        operation = partial(getattr(F, function), **arguments)
        own = [x.to(device) for x in inputs]
        if channels_last and "convolution" in name:
            own = [x.contiguous(memory_format=LAYOUT[x.dim()]) for x in own]
        with attention():
            values = _passes(operation, own)
        truth = _passes(operation, [x.float() for x in inputs])
        for what, a, b in zip(("forward", *["backward"] * len(inputs)), values, truth, strict=True):
            _compare(f"{name} ({what})", a, b, dtype)


def check_layers(
    model: nn.Module, predict: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...], device: torch.device
) -> int:
    """Raise a `UserError` where a convolution of the model in 16 bits differs from float32 by more than rounding.

    Libraries choose their kernels by shape: each layer is checked where it stands, on what it is given when `predict`
    computes random inputs of `shape`, forward and backward, once for each shape. Samples do not touch each other in a
    convolution, so the truth, computed in float32 without cuDNN, is that of the first and the last of the batch.

    The model computes as in evaluation, so that random inputs leave no trace in its statistics, and is left in the mode
    that it had. Return how many layers were checked.
    """
    seen: set[object] = set()

    def check(layer: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        shape = (str(layer), inputs[0].shape, inputs[0].stride(), output.dtype)
        if shape in seen or output.dtype not in TOLERANCE:
            return
        seen.add(shape)  # before the layer is called again
        some = sorted({0, len(output) - 1})
        gradient = torch.zeros_like(output)
        gradient[some] = torch.randn_like(output[some])
        wanted = layer.weight.requires_grad  # not if frozen, nor if made of others, here where gradients are off
        exact = copy.deepcopy(layer).to(output.dtype).float()
        with torch.enable_grad():
            given = inputs[0].detach().requires_grad_()
            own = layer(given)
            x_own, *w_own = torch.autograd.grad(own, (given, layer.weight)[: 1 + wanted], gradient)
            with torch.autocast(device.type, enabled=False), torch.backends.cudnn.flags(enabled=False):
                few = inputs[0].detach()[some].to(output.dtype).float().requires_grad_()
                truth = exact(few)
                x_true, *w_true = torch.autograd.grad(truth, (few, exact.weight)[: 1 + wanted], gradient[some].float())
        name = f"{layer} of {tuple(given.shape)}"
        for what, a, b in (
            ("forward", own[some], truth),
            ("gradient of the input", x_own[some], x_true),
            *(("gradient of the weights", a, b) for a, b in zip(w_own, w_true, strict=True)),
        ):
            _compare(f"{name} ({what})", a.detach(), b.detach().cpu(), output.dtype)

    layers = [layer for layer in model.modules() if isinstance(layer, _ConvNd)]
    hooks = [layer.register_forward_hook(check) for layer in layers]
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            predict(torch.randn(shape, device=device))
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return len(seen)


def _compare(what: str, found: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype) -> None:
    error, size = float((found.cpu().float() - truth).abs().max()), float(truth.square().mean().sqrt())
    error = error / size if size else error  # all are 0 where weights begin as zeros
    if not error <= TOLERANCE[dtype]:  # so that NaN is an error, too
        raise UserError(
            f"precision: {what} in {dtype} is wrong on this {found.device.type}: error {error:.2g}, tolerance "
            f"{TOLERANCE[dtype]:g} (PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}; known to be "
            "wrong: cuDNN 9.8 to 9.10); use another version of PyTorch or cuDNN, or precision fp32 or tf32"
        )


def _passes(operation: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the result, then the gradients of all inputs."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    result = operation(*inputs)
    incoming = (torch.arange(result.numel()) % 7 - 3).reshape(result.shape).to(result)  # exact in all formats
    return [result.detach(), *torch.autograd.grad(result, inputs, incoming)]
