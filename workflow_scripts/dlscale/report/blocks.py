"""What a page is made of: cells in tables, and sections with legends, figures, tables and notes.

A table has one model: the page's template shows it as HTML, `show` on a terminal.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dlscale.core.text import NONE, number
from dlscale.report.figures import MARKERS, PAINT, RUN_COLOURS

#: Words and figures for the template.
View = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """A table's cell."""

    text: str = NONE
    key: float | str = ""  #: Value, and what it sorts by; empty where nothing is known.
    note: str = ""  #: A second line.
    link: str = ""  #: The anchor that it links to.

    @property
    def words(self) -> bool:
        """Whether it holds words, which stand to the left."""
        return isinstance(self.key, str) and self.key != ""


def cell(value: Any, text: Callable[[Any], str] = number, note: str = "", link: str = "") -> Cell:
    """Return the cell of a value, which may be None, words, or not a number."""
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
    about: str = ""  #: For who does not see it.
    sortable: bool = True
    note: str = ""  #: Below it.
    title: str = ""  #: Of what is folded away; else it is in view.
    meaning: str = ""  #: Beside that.
    style: str = ""  #: Class of its own.


def table(columns: Iterable[tuple[str, str, Sequence[Cell]]], caption: str = "", about: str = "", **more: Any) -> Table:
    """Return a table of columns, each with its group, heading and cells; those that no row fills are left out."""
    filled = [column for column in columns if any(each.text != NONE for each in column[2])]
    groups = list(Counter(group for group, _, _ in filled).items())
    headings = [(heading, any(each.words for each in cells)) for _, heading, cells in filled]
    return Table(groups, headings, list(zip(*(cells for _, _, cells in filled), strict=True)), caption, about, **more)


def show(shown: Table) -> None:
    """Print a table on the terminal, as wide as that is, and to anything else as wide as it gets."""
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
    colour: str = ""  #: As in `figures`.
    marker: str = ""  #: A character; else it is a stroke.
    dashes: str = ""
    width: float | None = None
    note: str = ""

    @property
    def paint(self) -> str:
        return PAINT.get(self.colour, "")


def entry(style: int, label: str, note: str = "") -> Entry:
    """Return the entry of the run that has such a colour and marker."""
    return Entry(label, RUN_COLOURS[style], MARKERS[style][1], note=note)


@dataclass(frozen=True)
class Section:
    """A section of a plan: shown where its maker returned one, not None."""

    title: str
    about: str = ""
    legend: Sequence[Entry] = ()
    plots: Sequence[tuple[str, str]] = ()  #: SVG and caption.
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    form: str = ""  #: The template's macro that shows what only this section has.
    own: Any = None  #: What that shows.
    few: bool = False  #: Whether its figures are wide, and few.


def some(shown: int, of: int, what: str, rest: str) -> list[str]:
    """Return a note on how many of all are shown; none where all are."""
    return [f"{shown} of {of} {what}: {rest}"] if shown < of else []


def mean_of(values: Sequence[float], text: Callable[[Any], str] = number) -> Cell:
    """Return the cell of a mean, and below it the least and the greatest if they differ."""
    if not values:
        return Cell()
    ends = min(values), max(values)
    return cell(sum(values) / len(values), text, " to ".join(map(text, ends)) if ends[0] != ends[1] else "")


def with_note(one: Cell, note: str) -> Cell:
    """Return a cell with a further note; an empty one as it is."""
    return replace(one, note="; ".join(filter(None, [one.note, note]))) if one.text != NONE else one


def joules(value: float | None) -> str:
    """Return an energy in words."""
    if value is None:
        return NONE
    return f"{number(value / 1e3)} kJ" if value < 3.6e6 else f"{number(value / 3.6e6)} kWh"
