"""Benchmarks in turns: contestants alternate in one process, so other programs slow all contestants alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Options:
    """Options of a benchmark: small sizes (`quick`), folder for files, number of measurements per contestant."""

    quick: bool
    folder: Path
    repetitions: int


@dataclass(frozen=True)
class Row:
    """One result with its reference.

    Attributes
    ----------
    values, references
        One number per repetition, in `unit`. Value i and reference i are from the same turn.
    reference
        Name of the reference: a bound set by the hardware, or another program.
    counted
        The bytes, FLOPs and sizes behind the numbers.
    target
        Minimum ratio to reach (for the unit s: maximum ratio); None without a target.
    """

    name: str
    unit: str
    values: list[float]
    reference: str
    references: list[float]
    counted: Mapping[str, float]
    target: float | None = None

    @property
    def ratio(self) -> float:
        """Median of value / reference over the repetitions."""
        return statistics.median(a / b for a, b in zip(self.values, self.references, strict=True))

    @property
    def reached(self) -> bool:
        """Whether the target is reached; true without a target."""
        if self.target is None:
            return True
        return self.ratio <= self.target if self.unit == "s" else self.ratio >= self.target

    @property
    def verdict(self) -> str:
        """`pass` or `SHORT`, with the target; empty without a target."""
        sign = "≤" if self.unit == "s" else "≥"
        return "" if self.target is None else f"{'pass' if self.reached else 'SHORT'} ({sign} {self.target:g})"

    def to_json(self) -> dict[str, Any]:
        """Return all attributes, both medians and the ratio."""
        medians = {"value": statistics.median(self.values), "reference_value": statistics.median(self.references)}
        return {**asdict(self), **medians, "ratio": self.ratio}

    def cells(self) -> list[str]:
        """Return the cells of the table's row."""
        value, reference = statistics.median(self.values), statistics.median(self.references)
        return [
            self.name,
            f"{figures(value)} {self.unit}",
            f"{figures(min(self.values))}–{figures(max(self.values))} ({len(self.values)}×)",
            f"{figures(reference)} {self.reference}",
            f"{self.ratio:.3f}",
            self.verdict,
            ", ".join(f"{key} {figures(amount)}" for key, amount in self.counted.items()),
        ]


HEADINGS = ["row", "median", "spread", "reference", "ratio", "target", "counted"]


def figures(value: float) -> str:
    """Format a number with three significant figures; from 1000 to 1e6, as an integer."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def table(rows: list[Row]) -> str:
    """Format rows as a table with aligned columns."""
    cells = [HEADINGS, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def summary(rows: list[Row]) -> str:
    """Return one line: how many targets are reached and missed, and the names of the missed targets."""
    targets = [row for row in rows if row.target is not None]
    short = [row.name for row in targets if not row.reached]
    names = ": " + "; ".join(short) if short else ""
    return f"{len(targets)} targets: {len(targets) - len(short)} pass, {len(short)} short{names}"


#: Seconds between two measurements.
PAUSE_S = 0.3


def in_turns(repetitions: int, contestants: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Call every contestant once as a warm-up, then repeat turns; return the measurements by contestant.

    A pause before each measurement lets loaders finish the batches that they prepare after their own measurement.
    """
    for contestant in contestants.values():
        contestant()
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repetitions):
        for name, contestant in contestants.items():
            time.sleep(PAUSE_S)
            found[name].append(contestant())
    return found


def seconds(action: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
