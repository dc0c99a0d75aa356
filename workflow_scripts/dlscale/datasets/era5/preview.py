"""A first look at atmospheric states: the first one on the map."""

from __future__ import annotations

from collections.abc import Iterator

from dlscale.data.manifest import Manifest
from dlscale.data.preview import Panel, channel_panels
from dlscale.data.store import Reader
from dlscale.datasets.era5.extra import Extra


def preview(manifest: Manifest) -> Iterator[Panel]:
    """Return a panel for each channel."""
    info, extra = manifest.fields["fields"], Extra.of(manifest)
    reader = Reader(manifest.path(manifest.files("train")[0]), "fields")
    state = reader[0:1, :, : info.grid[0], : info.grid[1]][0]
    yield from channel_panels(info, state, *extra.axes())
