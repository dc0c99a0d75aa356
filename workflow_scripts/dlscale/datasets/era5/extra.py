"""What a manifest of atmospheric states says beyond what all manifests do."""

from __future__ import annotations

from dlscale.core.records import Record
from dlscale.data.manifest import Manifest


class Extra(Record):
    """See the module."""

    latitude: list[float] = []  # degrees, north to south; empty where files do not tell
    longitude: list[float] = []  # degrees, west to east
    step_hours: float | None = None  # between stored states
    climatology: str | None = None  # path of the mean over training times [1, C, H, W], relative to the manifest
    climatology_sha256: str | None = None  # of its content, which decides a run's scores

    def axes(self) -> tuple[tuple[str, str], tuple[float, float, float, float] | None]:
        """Return the labels of a map's axes and its (left, right, bottom, top), degrees; cells where there are none."""
        if not (self.latitude and self.longitude):
            return ("column", "row"), None
        extent = (self.longitude[0], self.longitude[-1], self.latitude[-1], self.latitude[0])
        return ("longitude (degrees)", "latitude (degrees)"), extent

    @classmethod
    def of(cls, manifest: Manifest) -> Extra:
        """Read the extra part of a manifest."""
        return cls.checked(manifest.extra, f"{manifest.folder}/manifest.json: extra")
