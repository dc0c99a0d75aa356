"""Matplotlib figures with a user's names, in small files."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dlscale.core.files import whole


@contextlib.contextmanager
def literal_text() -> Iterator[None]:
    """Draw and save a figure in here: a `$` is a `$`, unless `parse_math=True`. Labels of ticks arise while saving."""
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}):
        yield


def save_png(figure: Any, path: Path, dpi: int) -> None:
    """Write a figure as PNG, atomically, in 256 colours, which halves its size."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=dpi, format="png")
    picture = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    with whole(path) as temporary:
        picture.save(temporary, format="PNG", optimize=True)
