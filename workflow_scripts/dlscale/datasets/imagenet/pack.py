"""A pack: an HDF5 file of many images of any size, each of which is read alone.

===========  =============================================================================================
`bytes`      uint8 [total]: the images one after the other, in one piece of the file, which can be mapped
`index`      int64 [N, 4]: of each image its first byte and how many it has, and its height and width
`labels`     int64 [N]: its class
`classes`    names of the classes, in the order of the labels
===========  =============================================================================================

The attribute `form` says what the bytes are: `encoded`, a file (JPEG, PNG) as it was, or `decoded`, pixels RGB
[H, W, 3]; the attribute `sha256` is the digest of it all, and `files`, where there is one, that of how the files looked
which it was made of.
"""

from __future__ import annotations

import functools
import io
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image

from dlscale.core.errors import UserError, brief
from dlscale.core.files import reading
from dlscale.data.mapped import map_chunks
from dlscale.data.store import Reader

#: What Pillow decodes itself. For others it may start a program that it finds (Ghostscript, for EPS).
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP", "JPEG2000", "PPM")


def open_image(file: IO[bytes]) -> Image.Image:
    """Open an image; its pixels are not decoded yet."""
    return Image.open(file, formats=FORMATS)


DAMAGED = "the pack is damaged: delete it and run the workflow again"


class Pack:
    """One pack, opened on first use and once per process."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)

    @functools.cached_property
    def _opened(self) -> tuple[str, np.ndarray]:
        reader = Reader(self.path, "bytes")
        mapped = map_chunks(reader.dataset)
        with reading(self.path, DAMAGED):
            if "form" not in reader.dataset.file.attrs or len(mapped) != 1:
                raise UserError(f"{self.path}: not a pack of images; delete it and run the workflow again")
            return str(reader.dataset.file.attrs["form"]), mapped[(0,)]

    @property
    def form(self) -> str:
        """What the bytes are: `encoded` or `decoded`."""
        return self._opened[0]

    @property
    def bytes(self) -> np.ndarray:
        """Of all images, uint8 [total], mapped."""
        return self._opened[1]

    @functools.cached_property
    def index(self) -> np.ndarray:
        """First byte, bytes, height and width of each image, int64 [N, 4]."""
        return Reader(self.path, "index")[(slice(None),)]

    @functools.cached_property
    def labels(self) -> np.ndarray:
        """Classes, int64 [N]."""
        return Reader(self.path, "labels")[(slice(None),)]

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}  # a mapping would be copied

    def image(self, row: int) -> Image.Image:
        """Return an image, RGB."""
        try:
            first, count, height, width = self.index[row].tolist()
            stored = self.bytes[first : first + count]
            if self.form == "decoded":
                return Image.fromarray(stored.reshape(height, width, 3))
            with open_image(io.BytesIO(stored.data)) as image:
                image.load()
                return image if image.mode == "RGB" else image.convert("RGB")
        except UserError:
            raise
        except Exception as error:  # Pillow raises what its decoders stumble upon
            raise UserError(f"{self.path}: image {row} cannot be decoded ({brief(error)}); {DAMAGED}") from None
