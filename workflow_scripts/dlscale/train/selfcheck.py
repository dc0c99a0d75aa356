"""A check of convolutions and attention in 16 bits against float32, at the start of a run.

cuDNN 9.8 to 9.10 gave wrong values in bf16 3-D convolutions, without a message.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial

import torch
from torch.nn import functional as F

from dlscale.core.errors import UserError
from dlscale.train.attention import Context

#: Greatest error of an element over the root mean square of all: some 13 (bf16) and 20 (fp16) roundings.
TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.01}

#: By name: operation (`Study.operations`), function of `torch.nn.functional`, shapes of its inputs, and arguments.
CHECKS: dict[str, tuple[str, str, list[tuple[int, ...]], dict[str, int]]] = {
    "2-D convolution": ("conv2d", "conv2d", [(2, 8, 16, 16), (16, 8, 4, 4)], {"stride": 4}),
    "3-D convolution": ("conv3d", "conv3d", [(2, 8, 8, 8, 8), (16, 8, 4, 4, 4)], {"stride": 2, "padding": 1}),
    "transposed 3-D convolution": (
        *("conv3d", "conv_transpose3d"),
        [(2, 8, *[4] * 3), (8, 16, *[4] * 3)],
        {"stride": 2, "padding": 1},
    ),
    "attention": ("attention", "scaled_dot_product_attention", [(2, 2, 64, 32)] * 3, {}),
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

    `channels_last`, `attention` and `head_dim` choose the run's kernels; `operations` are the model's, or all.
    """
    generator = torch.Generator().manual_seed(0)
    for name, (operation, function, shapes, arguments) in CHECKS.items():
        if operations and operation not in operations:
            continue
        # Rounded to `dtype` first: only the arithmetic differs.
        if name == "attention":
            shapes = [(*shape[:-1], head_dim) for shape in shapes]
        inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        compute = partial(getattr(F, function), **arguments)
        own = [x.to(device) for x in inputs]
        if channels_last and "convolution" in name:
            own = [x.contiguous(memory_format=LAYOUT[x.dim()]) for x in own]
        with attention():
            values = _passes(compute, own)
        truth = _passes(compute, [x.float() for x in inputs])
        for what, a, b in zip(("forward", *["backward"] * len(inputs)), values, truth, strict=True):
            _compare(f"{name} ({what})", a, b, dtype)


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
    """Return the result and the gradients of all inputs."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    result = operation(*inputs)
    incoming = (torch.arange(result.numel()) % 7 - 3).reshape(result.shape).to(result)  # exact in all formats
    return [result.detach(), *torch.autograd.grad(result, inputs, incoming)]
