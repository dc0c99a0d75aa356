"""Figures show a user's names: of classes, channels, units."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def literal_text() -> Iterator[None]:
    """Draw a figure and save it in here: a $ is a $, where matplotlib would read mathematics, or fail to.

    Both, since the labels of ticks come into being when it is saved. What is to be mathematics says `parse_math=True`.
    """
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}):
        yield
