"""Facts of atmospheric states in their manifest: grid, times, means."""

from __future__ import annotations

from typing import Literal

import numpy as np

from dlscale.core.errors import UserError
from dlscale.core.files import reading, sha256
from dlscale.core.record import Record
from dlscale.data.manifest import File, Manifest


class Extra(Record):
    """The extra part of a manifest."""

    latitude: list[float] = []  # degrees, north to south
    longitude: list[float] = []  # degrees, west to east
    step_hours: float = 6.0  # between stored states
    starts: dict[str, float] = {}  # start time by digest of a file, hours since 1970; for all files, or empty
    before: dict[str, str] = {}  # by digest of a file: digest of the file that ends one step before it
    climatology: str | None = None  # path of the mean over training times [1, C, H, W], relative to the manifest
    climatology_sha256: str | None = None  # of its content, on which scores depend
    hour_means: str | None = None  # path of the means over training days of each hour of day [24 h / step, C, H, W]
    hour_means_sha256: str | None = None

    def means(self, manifest: Manifest, which: Literal["climatology", "hour_means"]) -> np.ndarray:
        """Map means over training times, [1 or 24 h / step, C, H, W]; raise `UserError` if the file changed."""
        path = manifest.path(getattr(self, which))
        with reading(path):
            if sha256(path) != getattr(self, f"{which}_sha256"):
                raise UserError(
                    f"{path}: damaged: its content changed since it was described, and scores depend on it; restore "
                    f"it, or delete {manifest.folder / 'manifest.json'} and run the workflow again"
                )
            means: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        return means

    @property
    def day(self) -> int | None:
        """Stored steps per day; None if a step does not divide a day."""
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
