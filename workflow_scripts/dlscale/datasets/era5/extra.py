"""What a manifest of atmospheric states says beyond what all manifests do."""

from __future__ import annotations

from typing import Literal

import numpy as np

from dlscale.core.errors import UserError
from dlscale.core.files import reading, sha256
from dlscale.core.record import Record
from dlscale.data.manifest import File, Manifest


class Extra(Record):
    """See the module."""

    latitude: list[float] = []  # degrees, north to south; empty where files do not tell
    longitude: list[float] = []  # degrees, west to east
    step_hours: float | None = None  # between stored states
    starts: dict[str, float] = {}  # by digest of a file: time of its first state, hours since 1970; all files or none
    before: dict[str, str] = {}  # by digest of a file: that of the file of its series that ends one step before it
    climatology: str | None = None  # path of the mean over training times [1, C, H, W], relative to the manifest
    climatology_sha256: str | None = None  # of its content, which decides a run's scores
    hour_means: str | None = None  # path of the means over training days of each hour of day [24 h / step, C, H, W]
    hour_means_sha256: str | None = None

    def means(self, manifest: Manifest, which: Literal["climatology", "hour_means"]) -> np.ndarray:
        """Map means over training times, [1 or 24 h / step, C, H, W]: a file that is as it was described."""
        path = manifest.path(getattr(self, which) or "")
        with reading(path):
            if sha256(path) != getattr(self, f"{which}_sha256"):
                raise UserError(
                    f"{path}: damaged: its content changed since it was described, and scores come of it; put it back, "
                    f"or delete {manifest.folder / 'manifest.json'} and run the workflow again"
                )
            means: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        return means

    def axes(self) -> tuple[tuple[str, str], tuple[float, float, float, float] | None]:
        """Return the labels of a map's axes and its (left, right, bottom, top), degrees; cells where there are none."""
        if not (self.latitude and self.longitude):
            return ("column", "row"), None
        extent = (self.longitude[0], self.longitude[-1], self.latitude[-1], self.latitude[0])
        return ("longitude (degrees)", "latitude (degrees)"), extent

    @property
    def day(self) -> int | None:
        """Stored steps in a day; None where a day is no whole number of them, or nobody knows."""
        steps = 24 / self.step_hours if self.step_hours else 0.5
        return round(steps) if steps == round(steps) else None

    def ahead(self, steps: int) -> str:
        """Return how long so many stored steps are, in words."""
        return f"{steps * self.step_hours:g} h" if self.step_hours else f"{steps} stored steps"

    def hours(self, file: File, rows: np.ndarray) -> np.ndarray:
        """Return the times of a file's rows, hours since 1970, float64."""
        assert self.step_hours is not None
        return self.starts[file.digest] + self.step_hours * np.asarray(rows, float)

    def slots(self, file: File, rows: np.ndarray) -> np.ndarray:
        """Return which of the means of `hour_means` belongs to each of a file's rows, int64."""
        assert self.step_hours is not None
        slots: np.ndarray = (self.hours(file, rows) % 24 // self.step_hours).astype(np.int64)
        return slots

    @classmethod
    def of(cls, manifest: Manifest) -> Extra:
        """Read the extra part of a manifest."""
        return cls.checked(manifest.extra, f"{manifest.folder}/manifest.json: extra")
