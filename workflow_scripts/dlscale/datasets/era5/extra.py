"""What a manifest of atmospheric states says beyond what all manifests do."""

from __future__ import annotations

from dlscale.core.records import Record
from dlscale.data.manifest import Manifest


class Extra(Record):
    """See the module.

    Attributes
    ----------
    latitude, longitude
        Of the grid, degrees, north to south and west to east; empty where files do not tell.
    step_hours
        Time between stored states, h.
    climatology
        Path of the mean over training times [1, C, H, W], relative to the manifest.
    """

    latitude: list[float] = []
    longitude: list[float] = []
    step_hours: float | None = None
    climatology: str | None = None

    @classmethod
    def of(cls, manifest: Manifest) -> Extra:
        """Read the extra part of a manifest."""
        return cls.checked(manifest.extra, f"{manifest.folder}/manifest.json: extra")
