"""Define the parts of the page: tables, and sections that contain tables and charts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlscale.core.text import NONE, number
from dlscale.report.charts import Chart

if TYPE_CHECKING:
    from dlscale.results import PlanResult, RunResult


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str = NONE
    key: float | str = ""  #: Value to sort by; empty if unknown.
    note: str = ""  #: Second line of the cell.
    link: str = ""  #: Anchor, on the same page, that the cell links to; empty without a link.


def cell(value: Any, text: Callable[[Any], str] = number, note: str = "", link: str = "") -> Cell:
    """Return the cell of a value: a number, words, or None."""
    if value is None:
        return Cell()
    if isinstance(value, str):
        return Cell(value or NONE, value, note, link)
    return Cell(text(value), value, note, link) if math.isfinite(value) else Cell(number(value))


def heading(plan: PlanResult, run: RunResult, place: int) -> Cell:
    """Return the first cell of a run's row."""
    return Cell(run.name, place, "" if run.label == run.name else run.label, plan.anchor(run))


@dataclass(frozen=True)
class Table:
    """Columns in groups, and rows of cells; the first cell of a row is its heading."""

    groups: list[tuple[str, int]]  #: (Name, number of columns) of each group; an unnamed group has no heading.
    columns: list[tuple[str, bool]]  #: (Heading, whether its cells are text) of each column.
    rows: list[tuple[Cell, ...]]
    caption: str = ""
    about: str = ""  #: Caption for screen readers.
    sortable: bool = True
    note: str = ""  #: Text below the table.
    title: str = ""  #: Title of the fold that contains the table; empty if the table is always open.
    meaning: str = ""  #: Text next to the title.
    style: str = ""  #: CSS class.


def table(columns: Iterable[tuple[str, str, Sequence[Cell]]], caption: str = "", about: str = "", **more: Any) -> Table:
    """Return a table of columns (group, heading, cells), without empty columns."""
    filled = [column for column in columns if any(each.text != NONE for each in column[2])]
    groups = list(Counter(group for group, _, _ in filled).items())
    headings = [
        (heading, any(isinstance(each.key, str) and each.key for each in cells)) for _, heading, cells in filled
    ]
    return Table(groups, headings, list(zip(*(cells for _, _, cells in filled), strict=True)), caption, about, **more)


@dataclass(frozen=True)
class Link:
    """A text with the address that it links to."""

    text: str
    href: str


@dataclass(frozen=True)
class Item:
    """An item of a list: a name, a text, and links."""

    name: str
    text: str
    links: Sequence[Link] = ()


@dataclass(frozen=True)
class Fold:
    """Results of one run, which the reader may fold away; `before` and `after` are paragraphs around the tables."""

    title: Link
    aside: str | Link = ""
    before: Sequence[str] = ()
    tables: Sequence[Table] = ()
    after: Sequence[str] = ()
    items: Sequence[Item] = ()
    open: bool = False  #: Whether the fold is open at first.


@dataclass(frozen=True)
class Section:
    """A section of a plan."""

    title: str
    about: str = ""
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    form: str = ""  #: Name of the template's macro that shows `own`.
    own: Any = None  #: Content that only this section has.
    folds: Sequence[Fold] = ()


def some(shown: int, of: int, what: str, rest: str) -> list[str]:
    """Return a list with a note such as `8 of 20 runs: …`; empty if all items are shown."""
    return [f"{shown} of {of} {what}: {rest}"] if shown < of else []


def grams(value: float | None, per_kwh: float | None) -> str:
    """Return the mass of CO₂ as text for an energy in joules, at `per_kwh` grams of CO₂ per kWh."""
    if value is None or per_kwh is None:
        return NONE
    mass = value / 3.6e6 * per_kwh
    return f"{number(mass)} g" if mass < 1000 else f"{number(mass / 1000)} kg"


def joules(value: float | None) -> str:
    """Return an energy in joules as text."""
    if value is None:
        return NONE
    if value < 3600:
        return f"{number(value)} J"
    return f"{number(value / 3600)} Wh" if value < 3.6e6 else f"{number(value / 3.6e6)} kWh"
