"""What the profilers that work inside of a run's process have in common."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from dlscale.measure.profilers.records import ProfiledTool, TopEntry

#: What a profiler leaves: what it saw, and its rows of the summary.
Found = tuple[ProfiledTool, list[TopEntry]]


class Unavailable(Exception):
    """A profiler does not work here; the message says why, and what to do."""


class Tool(Protocol):
    """A profiler of steps that this process makes.

    Neither method makes a step: whatever a profiler meets on one rank, all ranks make the same steps.
    """

    name: str

    def attached(self) -> AbstractContextManager[object]:
        """Return the context in which steps are profiled; it raises `Unavailable` at its begin or its end."""

    def found(self, seconds: list[float]) -> Found:
        """Return what was found of the steps, which took so long, and write reports into the folder."""


def report(folder: Path, name: str, rank: int, suffix: str) -> Path:
    """Return the path of a report of this rank."""
    return folder / f"{name}.rank{rank}.{suffix}"
