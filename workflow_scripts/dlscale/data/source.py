"""What the preprocess stage asks of a reader of raw files."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from dlscale.data.store import Field


class Source(Protocol):
    """One part's raw input, streamed along rows (slabs of a volume, times of a series).

    Attributes
    ----------
    fields
        What the part will hold, at the stored resolution (after cropping and block-averaging).
    bytes_per_row
        Memory that `read` needs for one row: raw buffers and results, in bytes.
    coordinates
        Small arrays kept beside the data: `latitude` [H], `longitude` [W] (degrees), `time` [rows]
        (hours since 1970-01-01), where there are such.
    attributes
        Provenance of the raw file, as plain values.
    """

    fields: tuple[Field, ...]
    bytes_per_row: int
    coordinates: dict[str, np.ndarray]
    attributes: dict[str, Any]

    def read(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Return rows [start, stop) of each field, in model units (cosmo) or physical ones (era5), float32."""
        ...

    def close(self) -> None:
        """Close the raw files."""
        ...
