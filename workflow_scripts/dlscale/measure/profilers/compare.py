"""Two profiles side by side: what got faster, what slower, and what of that is more than noise."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dlscale.core.errors import UserError
from dlscale.core.records import Profile, TopEntry

#: Standard errors that a difference has to exceed: two leave one difference in twenty of mere noise.
CERTAIN = 2.0


@dataclass(frozen=True)
class Change:
    """What became of one row of the summary; seconds a step, 0 where a profile has no such row."""

    tool: str
    kind: str
    name: str
    before: float
    after: float
    noise: float  #: `CERTAIN` standard errors of the difference; infinite where nothing is known of the spread.

    @property
    def difference(self) -> float:
        return self.after - self.before

    @property
    def certain(self) -> bool:
        """Whether it is more than the spread of the steps explains."""
        return abs(self.difference) > self.noise


@dataclass(frozen=True)
class Summary:
    """A profile as it is compared: its rows, and how many steps each profiler saw."""

    rows: list[TopEntry]
    steps: dict[str, int]


def read(path: str | Path) -> Summary:
    """Read the profile of a run: the run's folder, its folder `profile`, or a file in that."""
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    if not (folder / "profile.json").is_file() and (folder / "profile").is_dir():
        folder /= "profile"
    record = Profile.read(folder / "profile.json")
    file = folder / "profile_summary.csv"
    try:
        with file.open(newline="", encoding="utf-8") as lines:
            rows = [
                TopEntry.checked(row, f"{file}: row {number}") for number, row in enumerate(csv.DictReader(lines), 1)
            ]
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; run the profile stage first") from None
    return Summary(rows, {tool.name: tool.steps for tool in record.tools})


def compare(before: Summary, after: Summary) -> list[Change]:
    """Return what became of each row that either has, by profiler, kind and name; of several ranks, their mean.

    The noise is that of a difference of means over n steps of standard deviation s each:
    `CERTAIN` * sqrt(s1^2 / n1 + s2^2 / n2). What drifts from one profile to the other, as a machine's clock, is not in
    it. Only profilers that both have are compared; lines, of which no spread is known, are never certain.
    """
    means = [_means(summary) for summary in (before, after)]
    tools = set.intersection(*({tool for tool, _, _ in of} for of in means))
    changes = []
    for key in dict.fromkeys([*means[0], *means[1]]):
        if key[0] in tools:
            (a, error_a), (b, error_b) = (of.get(key, (0.0, 0.0)) for of in means)
            noise = math.inf if key[1] == "line" else CERTAIN * math.hypot(error_a, error_b)
            changes.append(Change(*key, a, b, noise))
    return changes


def extremes(changes: Iterable[Change], count: int = 10) -> tuple[list[Change], list[Change]]:
    """Return what got faster the most, and what slower the most, the greatest difference first."""
    ordered = sorted(changes, key=lambda change: change.difference)
    faster = [change for change in ordered if change.difference < 0][:count]
    slower = [change for change in reversed(ordered) if change.difference > 0][:count]
    return faster, slower


def _means(summary: Summary) -> dict[tuple[str, str, str], tuple[float, float]]:
    """Return seconds a step, mean over the ranks, and their standard error, by profiler, kind and name."""
    ranks: dict[str, set[int]] = {}
    by_key: dict[tuple[str, str, str], list[TopEntry]] = {}
    for row in summary.rows:
        ranks.setdefault(row.tool, set()).add(row.rank)
        by_key.setdefault((row.tool, row.kind, row.name), []).append(row)
    found = {}
    for key, rows in by_key.items():
        count = len(ranks[key[0]])  # a rank without the row took no time for it
        mean = sum(row.seconds for row in rows) / count
        steps = max(summary.steps.get(key[0], 1), 1)
        error = math.sqrt(sum(row.std**2 for row in rows) / steps) / count
        found[key] = mean, error
    return found
