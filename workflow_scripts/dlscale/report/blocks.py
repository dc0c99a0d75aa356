"""Cells, tables, legends and sections of the page; `show` prints a table on a terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dlscale.core.text import NONE, number
from dlscale.report.figures import MARKERS, RUN_COLOURS

#: Values for the template.
View = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """A table's cell."""

    text: str = NONE
    key: float | str = ""  #: Value to sort by; empty where nothing is known.
    note: str = ""  #: A second line.
    link: str = ""  #: Anchor.


def cell(value: Any, text: Callable[[Any], str] = number, note: str = "", link: str = "") -> Cell:
    """Return the cell of a value: a number, words, or None."""
    if value is None:
        return Cell()
    if isinstance(value, str):
        return Cell(value or NONE, value, note, link)
    return Cell(text(value), value, note, link) if math.isfinite(value) else Cell(number(value))


@dataclass(frozen=True)
class Table:
    """Columns in groups, and rows of cells; the first cell of a row is its heading."""

    groups: list[tuple[str, int]]  #: Names and widths; one without a name is no row of headings.
    columns: list[tuple[str, bool]]  #: Headings, and whether they are of words.
    rows: list[tuple[Cell, ...]]
    caption: str = ""
    about: str = ""  #: Caption for screen readers.
    sortable: bool = True
    note: str = ""  #: Text below it.
    title: str = ""  #: Title, if it is folded away.
    meaning: str = ""  #: Text beside the title.
    style: str = ""  #: Class in CSS.


def table(columns: Iterable[tuple[str, str, Sequence[Cell]]], caption: str = "", about: str = "", **more: Any) -> Table:
    """Return a table of columns (group, heading, cells), without empty ones."""
    filled = [column for column in columns if any(each.text != NONE for each in column[2])]
    groups = list(Counter(group for group, _, _ in filled).items())
    headings = [
        (heading, any(isinstance(each.key, str) and each.key for each in cells)) for _, heading, cells in filled
    ]
    return Table(groups, headings, list(zip(*(cells for _, _, cells in filled), strict=True)), caption, about, **more)


def show(shown: Table) -> None:
    """Print a table: as wide as the terminal, elsewhere on whole lines."""
    import sys

    import rich.box
    from rich.console import Console
    from rich.table import Table as Terminal
    from rich.text import Text

    printed = Terminal(box=rich.box.SIMPLE_HEAD, title=shown.caption or None, title_justify="left", title_style="bold")
    for heading, words in shown.columns:
        printed.add_column(Text(heading), justify="left" if words else "right", overflow="fold")
    for row in shown.rows:
        printed.add_row(*(Text(_printable(f"{each.text} {each.note}".strip())) for each in row))
    Console(width=None if sys.stdout.isatty() else 1000, highlight=False, soft_wrap=False).print(printed)


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text.replace("\u00a0", " "))


@dataclass(frozen=True)
class Entry:
    """An entry of a legend: a marker in a colour, or a stroke."""

    label: str
    colour: str = ""  #: One of `figures.PAINT`.
    marker: str = ""  #: A character; none for a stroke.
    dashes: str = ""
    width: float | None = None
    note: str = ""


def entry(style: int, label: str, note: str = "") -> Entry:
    """Return the entry of a run, with the colour and marker of its `style`."""
    return Entry(label, RUN_COLOURS[style], MARKERS[style][1], note=note)


@dataclass(frozen=True)
class Section:
    """A section of a plan."""

    title: str
    about: str = ""
    legend: Sequence[Entry] = ()
    plots: Sequence[tuple[str, str]] = ()  #: SVG and caption.
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    form: str = ""  #: Macro of the template for `own`.
    own: Any = None  #: Content that only this section has.
    few: bool = False  #: Whether its figures are wide, and few.


def some(shown: int, of: int, what: str, rest: str) -> list[str]:
    """Return a note, in a list, on how many of all are shown; an empty list where all are."""
    return [f"{shown} of {of} {what}: {rest}"] if shown < of else []


def joules(value: float | None) -> str:
    """Return an energy in words."""
    if value is None:
        return NONE
    return f"{number(value / 1e3)} kJ" if value < 3.6e6 else f"{number(value / 3.6e6)} kWh"
