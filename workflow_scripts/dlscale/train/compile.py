"""`torch.compile`, and its needs of the machine."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from dlscale.core.errors import UserError

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function, mode: str, device: torch.device) -> Function:
    """Return the function compiled in this mode (the run's `compile.mode`), once for each shape of batch."""
    if mode == "none":
        return function
    if device.type == "cpu":
        check_compiler(mode)
    return cast(Function, torch.compile(function, mode=mode, dynamic=False))


def check_compiler(mode: str) -> None:
    """Raise a `UserError` where code for a CPU cannot be built."""
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    what = f"compile.mode {mode}: torch.compile builds C++ code for a CPU, and this machine has no"
    todo = "or set compile: {mode: none}"
    try:
        get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        raise UserError(f"{what} C++ compiler; install g++, or name another in CXX, {todo}") from None
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        raise UserError(f"{what} Python headers ({headers}/Python.h); install them (python3-dev), {todo}")
