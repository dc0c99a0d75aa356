"""Preview of a dataset of images: some images side by side, and the counts of classes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from PIL import ImageOps

from dlscale.data.manifest import Manifest
from dlscale.data.preview import STRIP, Panel, mosaic
from dlscale.extensions.imagenet_resnet50.imagenet.pack import Pack

EDGE = 96  # edge of each image, pixels


def preview(manifest: Manifest) -> Iterator[Panel]:
    """Yield a panel with evenly spaced images of the first training pack, and a panel with the pack's labels."""
    pack = Pack(manifest.path(manifest.files("train")[0]))
    rows = np.unique(np.linspace(0, len(pack.labels) - 1, STRIP**2).astype(int)).tolist()
    shown = np.stack([np.asarray(ImageOps.fit(pack.image(row), (EDGE, EDGE))) for row in rows])
    yield Panel("red, green and blue", "1", mosaic(shown))
    yield Panel("class", "1", pack.labels, classes=manifest.fields["labels"].classes)
