"""How images are resized and where their middle is: torchvision's rules, by Pillow."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image


def short_edge(height: int, width: int, edge: int) -> tuple[int, int]:
    """Return height and width once the shorter edge is `edge`; the longer one is rounded down, as torchvision does."""
    return (edge, int(edge * width / height)) if height <= width else (int(edge * height / width), edge)


def centre(height: int, width: int, size: int) -> tuple[int, int]:
    """Return the first row and column of the square in the middle; halves are rounded to even, as torchvision does."""
    return round((height - size) / 2), round((width - size) / 2)


def resized(image: Image.Image, height: int, width: int) -> Image.Image:
    """Return an image at another size, bilinear with antialiasing.

    Pillow makes a pass along rows and one along columns, and rounds to bytes after each. Which one comes first depends
    on its version and the sizes: here it is always that along rows, as in all versions before 13.
    """
    from PIL import Image  # only here: what is computed of sizes alone needs no Pillow

    filtered = image.resize((width, image.height), Image.Resampling.BILINEAR)
    return filtered.resize((width, height), Image.Resampling.BILINEAR)
