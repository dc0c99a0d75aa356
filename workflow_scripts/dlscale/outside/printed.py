"""Numbers in what programs print."""

from __future__ import annotations

import re

#: Sequences by which a terminal shows colours.
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")


def plain(text: str) -> str:
    """Return a text without the escape sequences of a terminal."""
    return ESCAPES.sub("", text) if "\x1b" in text else text
