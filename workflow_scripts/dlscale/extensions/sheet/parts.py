"""Parts of the sheet: facts and tables, each measured, predicted, a setting, or open.

An open fact has the command or the setting that would close it. All figures come from records, from the cost of jobs,
and from predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dlscale.core.text import number

#: Origin of a fact or a row.
Basis = Literal["measured", "predicted", "setting", "open"]

#: Text in place of an unknown value.
OPEN = "open"


@dataclass(frozen=True)
class Fact:
    """A labelled value."""

    label: str
    text: str
    basis: Basis
    note: str = ""  #: Interval or source; for an open fact, how to close it.


@dataclass(frozen=True)
class Row:
    """Cells of a table; the last cell names the origin of the row."""

    cells: tuple[str, ...]
    basis: Basis


@dataclass(frozen=True)
class Grid:
    """Table of measured and predicted rows."""

    title: str
    columns: tuple[str, ...]
    rows: list[Row]
    note: str = ""


@dataclass(frozen=True)
class Curve:
    """Efficiency of a series over devices: (devices, efficiency, low, high)."""

    label: str
    measured: list[tuple[int, float, float, float]]
    predicted: list[tuple[int, float, float, float]]


@dataclass(frozen=True)
class Part:
    """A part of the sheet, to which questions of forms refer by `key`."""

    key: str
    title: str
    facts: Sequence[Fact] = ()
    grids: Sequence[Grid] = ()
    curves: Sequence[Curve] = ()
    commands: Sequence[str] = ()

    @property
    def open(self) -> list[Fact]:
        return [fact for fact in self.facts if fact.basis == "open"]


def fact(
    label: str,
    value: Any,
    todo: str,
    shown: Callable[[Any], str] = number,
    note: str = "",
    basis: Basis = "measured",
) -> Fact:
    """Return the fact of a value; without a value, an open fact with the remedy `todo`."""
    if value is None or value == "":
        return Fact(label, OPEN, "open", todo)
    return Fact(label, value if isinstance(value, str) else shown(value), basis, note)


def counts(parts: Iterable[Part]) -> dict[Basis, int]:
    """Return the number of facts and rows by their origin."""
    found: dict[Basis, int] = {"measured": 0, "predicted": 0, "setting": 0, "open": 0}
    for part in parts:
        rows = [row.basis for grid in part.grids for row in grid.rows]
        for basis in (*(each.basis for each in part.facts), *rows):
            found[basis] += 1
    return found
