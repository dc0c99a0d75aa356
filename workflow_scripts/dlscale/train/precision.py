"""Number formats of the computation."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16}


def set_matmul_precision(precision: str) -> None:
    """Switch TensorFloat-32 on for `tf32`, fp16 and bf16, off for `fp32` (process-wide)."""
    allow = precision != "fp32"
    torch.set_float32_matmul_precision("high" if allow else "highest")
    torch.backends.cudnn.allow_tf32 = allow


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which to run the model and its loss."""
    if precision not in AUTOCAST:
        return nullcontext()
    return torch.autocast(device.type, AUTOCAST[precision])


def grad_scaler(precision: str, device: torch.device) -> torch.amp.GradScaler:
    """Return the loss scaler, which does nothing but for fp16."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")
