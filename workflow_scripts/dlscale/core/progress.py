"""Progress of a stage: a bar on a terminal, a line every ten seconds in a log."""

from __future__ import annotations

import importlib.util
import logging
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

Item = TypeVar("Item")

LINE_SECONDS = 10.0


class Progress:
    """Counts things, named by `unit` in the plural, towards a total (None: unknown) and shows the count."""

    def __init__(self, what: str, total: int | None, unit: str) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.done = 0
        self._start = self._last = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty() and importlib.util.find_spec("rich"):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress

            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn(unit),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(what, total=total)

    def update(self, done: int, total: int | None = None) -> None:
        """Set the count to `done`."""
        self.done = done
        self.total = self.total if total is None else total
        if self._bar:
            self._bar.update(self._task, completed=done, total=self.total)
        elif time.monotonic() - self._last >= LINE_SECONDS:
            self._last = time.monotonic()
            self._line()

    def _line(self) -> None:
        share = f" of {self.total} ({100 * self.done / self.total:.0f} %)" if self.total else ""
        logging.info("%s: %d%s %s, %.0f s", self.what, self.done, share, self.unit, time.monotonic() - self._start)

    def close(self) -> None:
        """Remove the bar; in a log, write a last line."""
        if self._bar:
            self._bar.stop()
        elif self.done:
            self._line()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def tracked(items: Iterable[Item], what: str, total: int | None, unit: str) -> Iterator[Item]:
    """Yield `items`, counting them."""
    with Progress(what, total, unit) as progress:
        for count, item in enumerate(items, 1):
            yield item
            progress.update(count)
