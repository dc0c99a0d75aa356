"""Figures of matplotlib: with a user's names of classes, channels and units, in small files."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dlscale.core.files import whole


@contextlib.contextmanager
def literal_text() -> Iterator[None]:
    """Draw a figure and save it in here: a $ is a $, where matplotlib would read mathematics, or fail to.

    Both, since the labels of ticks come into being when it is saved. What is to be mathematics says `parse_math=True`.
    """
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}):
        yield


def save_png(figure: Any, path: Path, dpi: int) -> None:
    """Write a figure as a PNG file, whole or not at all, in 256 colours, which halves it: pages hold many."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=dpi, format="png")
    picture = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    with whole(path) as temporary:
        picture.save(temporary, format="PNG", optimize=True)
