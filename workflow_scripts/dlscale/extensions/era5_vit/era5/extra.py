"""Facts about atmospheric states in the manifest: grid, times, means."""

from __future__ import annotations

from typing import Literal

import numpy as np

from dlscale.core.errors import UserError
from dlscale.core.files import reading, sha256
from dlscale.core.record import Record
from dlscale.data.manifest import File, Manifest


class Extra(Record):
    """Part of a manifest that only atmospheric states have."""

    latitude: list[float] = []  # degrees, north to south
    longitude: list[float] = []  # degrees, west to east
    step_hours: float = 6.0  # hours between stored states
    starts: dict[str, float] = {}  # digest of a file → start time, hours since 1970; empty if any time is unknown
    before: dict[str, str] = {}  # digest of a file → digest of the file that ends one step before the file begins
    climatology: str | None = None  # path of the mean over training times [1, C, H, W]
    climatology_sha256: str | None = None  # digest of the climatology, on which scores depend
    hour_means: str | None = None  # path of the mean states of each hour of day [24 h / step, C, H, W]
    hour_means_sha256: str | None = None

    def means(self, manifest: Manifest, which: Literal["climatology", "hour_means"]) -> np.ndarray:
        """Memory-map the means `which`, [1 or 24 h / step, C, H, W]; raise `UserError` if the file has changed."""
        path = manifest.path(getattr(self, which))
        with reading(path):
            if sha256(path) != getattr(self, f"{which}_sha256"):
                raise UserError(
                    f"{path}: damaged: the content has changed since the dataset was described, but scores depend on "
                    f"it. Restore the file, or delete {manifest.folder / 'manifest.json'} and run the workflow again"
                )
            means: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        return means

    @property
    def day(self) -> int | None:
        """Number of stored steps per day; None if a day is not a multiple of the step."""
        steps = 24 / self.step_hours
        return round(steps) if steps == round(steps) else None

    def hours(self, file: File, rows: np.ndarray) -> np.ndarray:
        """Return the times of a file's rows, hours since 1970, float64."""
        return self.starts[file.digest] + self.step_hours * np.asarray(rows, float)

    def slots(self, file: File, rows: np.ndarray) -> np.ndarray:
        """Return the index into `hour_means` for each of a file's rows, int64."""
        slots: np.ndarray = (self.hours(file, rows) % 24 // self.step_hours).astype(np.int64)
        return slots

    @classmethod
    def of(cls, manifest: Manifest) -> Extra:
        """Read the extra part of a manifest."""
        return cls.checked(manifest.extra, f"{manifest.folder}/manifest.json: extra")
