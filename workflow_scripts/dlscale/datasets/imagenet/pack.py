"""A pack: an HDF5 file of many images of any size, each of which is read alone.

===========  =============================================================================================
`bytes`      uint8 [total]: the images one after the other, in one piece of the file, which can be mapped
`index`      int64 [N, 4]: first byte, bytes, height and width of each image
`labels`     int64 [N]: classes
`classes`    names of the classes, in the order of the labels
===========  =============================================================================================

Attributes: `form`, `encoded`, files (JPEG, PNG) as they were, or `decoded`, RGB [H, W, 3]; `sha256` of it all; `files`,
the digest of the packed files' names, sizes and times.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image

from dlscale.core.errors import UserError, brief
from dlscale.core.files import reading
from dlscale.data import store

#: Formats that Pillow decodes itself. For others it may start a program that it finds (Ghostscript, for EPS).
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP", "JPEG2000", "PPM")
DAMAGED = "the pack is damaged: delete it and run the workflow again"


def open_image(file: IO[bytes]) -> Image.Image:
    """Open an image; its pixels are not decoded yet."""
    return Image.open(file, formats=FORMATS)


def short_edge(height: int, width: int, edge: int) -> tuple[int, int]:
    """Return height and width once the shorter edge is `edge`; the longer one is rounded down."""
    return (edge, int(edge * width / height)) if height <= width else (int(edge * height / width), edge)


class Pack:
    """One pack: its bytes are mapped, all else is in memory."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        with store.open_file(path) as file, reading(path, "not a pack of images: delete it and run the workflow again"):
            self.form, self.digest = str(file.attrs["form"]), str(file.attrs["sha256"])
            self.bytes: np.ndarray = store.map_chunks(file["bytes"])[(0,)]
            self.index: np.ndarray = file["index"][()]
            self.labels: np.ndarray = file["labels"][()]
            self.classes = [name.decode() for name in file["classes"][()]]

    def __reduce__(self) -> tuple[Any, ...]:
        return Pack, (self.path,)  # a mapping would be copied

    def stored(self, row: int) -> np.ndarray:
        """Return an image's file, uint8 [bytes], or its pixels, uint8 [H, W, 3]."""
        first, count, height, width = self.index[row].tolist()
        values = self.bytes[first : first + count]
        return values if self.form == "encoded" else values.reshape(height, width, 3)

    def image(self, row: int) -> Image.Image:
        """Return an image, RGB."""
        stored = self.stored(row)
        if self.form == "decoded":
            return Image.fromarray(stored)
        try:
            with open_image(io.BytesIO(stored.data)) as image:
                image.load()
                return image if image.mode == "RGB" else image.convert("RGB")
        except Exception as error:  # Pillow raises what its decoders stumble upon
            raise UserError(f"{self.path}: image {row} cannot be decoded ({brief(error)}); {DAMAGED}") from None
