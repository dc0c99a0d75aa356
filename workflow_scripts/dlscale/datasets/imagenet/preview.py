"""A first look at images: some of them side by side, and how many there are of each class."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dlscale.data.manifest import Manifest
from dlscale.data.preview import STRIP, Panel
from dlscale.datasets.imagenet.geometry import centre, resized, short_edge
from dlscale.datasets.imagenet.pack import Pack

EDGE = 96  # of each image, pixels


def preview(manifest: Manifest) -> Iterator[Panel]:
    """Return a panel of images, evenly spread over the first training pack, and one of its labels."""
    pack = Pack(manifest.path(manifest.files("train")[0]))
    rows = np.unique(np.linspace(0, len(pack.labels) - 1, STRIP**2).astype(int))
    shown = np.zeros((STRIP**2, EDGE, EDGE, 3), np.uint8)
    for number, row in enumerate(rows):
        image = pack.image(int(row))
        height, width = short_edge(image.height, image.width, EDGE)
        top, left = centre(height, width, EDGE)
        shown[number] = np.asarray(resized(image, height, width))[top : top + EDGE, left : left + EDGE]
    mosaic = shown.reshape(STRIP, STRIP, EDGE, EDGE, 3).swapaxes(1, 2).reshape(STRIP * EDGE, STRIP * EDGE, 3)
    yield Panel("red, green and blue", "1", mosaic)
    yield Panel("class", "1", pack.labels, classes=manifest.fields["labels"].classes)
