"""Memory that is used again."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


class Buffers:
    """Memory that is used again, by name: new memory costs as much as a pass over it, since the system clears it."""

    def __init__(self) -> None:
        self._held: dict[str, np.ndarray] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        """Return an array of any content, in the memory of the last one of that name if that suffices."""
        needed = math.prod(shape)
        if name not in self._held or self._held[name].dtype != dtype or self._held[name].size < needed:
            self._held[name] = np.empty(needed, dtype)
        return self._held[name][:needed].reshape(shape)
