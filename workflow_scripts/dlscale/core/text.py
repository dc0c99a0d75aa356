"""Format numbers, units, times and sizes for readers."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TextIO

#: Text for an unknown value.
NONE = "–"
_SUPERSCRIPTS = str.maketrans("-+0123456789", "⁻⁺⁰¹²³⁴⁵⁶⁷⁸⁹")
_SPACE = "\u00a0"  # keeps a number and its unit on one line
#: Start of a text that a spreadsheet runs as a formula, possibly after single quotes.
FORMULA = re.compile(r"'*[=+\-@\t\r]")

#: Maximum number of names that `listed` returns; further names are only counted.
LISTED = 4

_COLOURS = {"bold": 1, "red": 31}


def coloured(text: str, colour: str, stream: TextIO) -> str:
    """Return a text in a colour if `stream` is a terminal that shows colours (no-color.org)."""
    shown = stream.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")
    return f"\033[{_COLOURS[colour]}m{text}\033[0m" if shown else text


def number(value: float | None, digits: int = 3) -> str:
    """Return `value` as text with `digits` significant digits and thousands separators.

    All digits before the point are kept. Absolute values below 1e-4 (except 0) or from 1e9 on are written with a power
    of ten. None becomes `NONE`, and infinities become ∞.
    """
    if value is None:
        return NONE
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞"
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")
    exponent = math.floor(math.log10(abs(rounded)))
    if exponent < -4 or exponent >= 9:
        mantissa = f"{rounded / 10.0**exponent:.{digits - 1}f}"
        text = f"{mantissa}×10{str(exponent).translate(_SUPERSCRIPTS)}"
    elif exponent >= digits:
        text = f"{value:,.0f}"
    else:
        text = f"{rounded:,.{digits - 1 - exponent}f}"
    return text.replace("-", "−")


def count(value: int | None) -> str:
    """Return a whole number with thousands separators, or `NONE` for None."""
    return NONE if value is None else f"{value:,}"


def many(value: int, what: str) -> str:
    """Return a number with a noun in the singular or plural; `what` is the singular."""
    return f"{value} {what}{'' if value == 1 else 'es' if what.endswith('s') else 's'}"


def listed(names: Sequence[str]) -> str:
    """Return the first names of a list, and the number of further names."""
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")


def are_gone(names: Sequence[str]) -> str:
    """Return `NAMES is gone` or `NAMES are gone`, for missing files."""
    return f"{listed(names)} {'is' if len(names) == 1 else 'are'} gone"


def unit(text: str | None) -> str:
    """Return a unit with superscript powers (both `m s**-1` and `m s-1` become m s⁻¹).

    Return an empty string for `1` and for a missing unit.
    """
    if text in (None, "", "1"):
        return ""
    power = r"(?:\*\*|\^)([-+]?\d+)|(?<=\b[A-Za-z])(-?\d)\b|(?<=\b[A-Za-z]{2})(-?\d)\b"
    return re.sub(power, lambda match: next(filter(None, match.groups())).translate(_SUPERSCRIPTS), str(text))


def percent(share: float) -> str:
    """Return a fraction as a whole number of per cent, or with one significant digit below 0.5 %."""
    return f"{number(100 * share, 1) if abs(share) < 0.005 else f'{100 * share:.0f}'}{_SPACE}%".replace("-", "−")


def duration(seconds: float | None) -> str:
    """Return a duration in seconds, in minutes and seconds, or in hours and minutes."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    if seconds < 60:
        return f"{number(seconds)}{_SPACE}s"
    minutes, seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}{_SPACE}min {seconds}{_SPACE}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,}{_SPACE}h {minutes}{_SPACE}min"


def size(bytes_: float | None, space: str = _SPACE) -> str:
    """Return a size in decimal units (1 kB = 1000 bytes), with `space` before the unit."""
    if bytes_ is None:
        return NONE
    for name in ("B", "kB", "MB", "GB", "TB"):
        if bytes_ < 999.5 or name == "TB":  # 999.5 would be rounded to 1,000
            break
        bytes_ /= 1000
    return f"{number(bytes_)}{space}{name}"


def aligned(rows: Iterable[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return rows of cells as lines with aligned columns; columns with an index in `right` are right-aligned."""
    rows = list(rows)
    sides = [(">" if place in right else "<") for place in range(len(rows[0]))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]


def readable(text: str) -> str:
    """Return a command-line argument as valid text; bytes that are not UTF-8 become hexadecimal escapes."""
    return os.fsencode(text).decode("utf-8", "backslashreplace")


def escape_formula(value: Any) -> Any:
    """Put a quote before text that a spreadsheet would run as a formula.

    Numbers, also as text, and all other values are returned unchanged.
    """
    if not isinstance(value, str) or not FORMULA.match(value):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def shorten(text: str, length: int) -> str:
    """Return `text` in at most `length` printable characters."""
    text = "".join(character if character.isprintable() else " " for character in text)
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"
