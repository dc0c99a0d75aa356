"""A first look at volumes: the middle slice of the first one."""

from __future__ import annotations

from collections.abc import Iterator

from dlscale.data.manifest import Manifest
from dlscale.data.preview import Panel, channel_panels
from dlscale.data.store import Reader


def preview(manifest: Manifest) -> Iterator[Panel]:
    """Return a panel for each channel of both fields."""
    path = manifest.path(manifest.files("train")[0])
    for name, info in manifest.fields.items():
        reader = Reader(path, name)
        middle = reader.shape[1] // 2
        values = reader[:, middle : middle + 1, :, :][:, 0]
        yield from channel_panels(info, values, ("z (cells)", "y (cells)"))
