"""Which files are images, whatever they are called."""

from __future__ import annotations

from typing import IO

from PIL import Image

#: What Pillow decodes itself. For others it may start a program that it finds (Ghostscript, for EPS).
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP", "JPEG2000", "PPM")


def open_image(file: IO[bytes]) -> Image.Image:
    """Open an image; its pixels are not decoded yet."""
    return Image.open(file, formats=FORMATS)
