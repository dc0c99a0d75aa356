"""Invertible maps between physical and model units, one per channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True)
class Transform:
    """`model = (g(physical) - offset) / scale`, with g the identity (`linear`) or the natural logarithm (`log`).

    `offset` and `scale`, above 0, are in units of g(physical). Of `log`, smaller values than `floor` (physical units)
    are raised to it, zeros too.
    """

    kind: Literal["linear", "log"] = "linear"
    offset: float = 0.0
    scale: float = 1.0
    floor: float = 1e-30

    def forward(self, x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Physical to model units: float32, same shape; in `out`, which may be `x`, if given."""
        out = np.empty(x.shape, np.float32) if out is None else out
        if self.kind == "log":
            x = np.log(np.maximum(x, np.float32(self.floor), out=out), out=out)
        np.subtract(x, np.float32(self.offset), out=out)
        return np.divide(out, np.float32(self.scale), out=out)

    def inverse(self, x: Any) -> Any:
        """Model to physical units; `x` is a numpy array or a torch tensor of any shape."""
        y = x * self.scale + self.offset
        if self.kind == "linear":
            return y
        return np.exp(y) if isinstance(y, np.ndarray) else y.exp()


#: Leaves values as they are.
IDENTITY = Transform()
