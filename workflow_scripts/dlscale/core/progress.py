"""Progress of a stage, in its log and for `dlscale status`; and where the time of a call went."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import Field

from dlscale.core.errors import UserError
from dlscale.core.files import read_text
from dlscale.core.record import Record
from dlscale.core.text import duration, number, percent

Item = TypeVar("Item")

LINE_SECONDS = 10.0

#: Ends the name of the file beside a stage's log that tells how far it is. It is gone when the stage is done.
SUFFIX = ".doing"
#: That of this process; None: nobody asks.
file: Path | None = None


class Doing(Record):
    """Progress of a stage that runs: a file beside its log."""

    what: str
    part: bool = False  #: Whether it counts but a part of its stage, which others may follow.
    done: int = 0
    total: int | None = None  #: None: not known.
    unit: str = ""
    left: float | None = None  #: Seconds to the end, as far as one sees.
    values: dict[str, float] = {}  #: Numbers told with it, by name: loss, samples/s.
    host: str = Field(default_factory=socket.gethostname)
    place: str = Field(default_factory=lambda: place())  #: Where its `pid` is a number: host and, on Linux, name space.
    pid: int = Field(default_factory=os.getpid)
    job: str | None = Field(default_factory=lambda: os.environ.get("SLURM_JOB_ID"))  #: Slurm's number.
    time: float = Field(default_factory=time.time)  #: When this was said, seconds since 1970-01-01 UTC.


@contextlib.contextmanager
def told(log: str | os.PathLike[str] | None) -> Iterator[None]:
    """Keep a file beside `log` with this process's progress during the block; without a log, none."""
    global file
    file = Path(f"{log}{SUFFIX}") if log else None
    try:
        tell(Doing(what="starting"))
        yield
    finally:
        if file:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
        file = None


def place() -> str:
    """Return where a process number is valid: the host and, on Linux, the name space."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"
    return socket.gethostname()


def tell(doing: Doing) -> None:
    """Write this process's progress; failures to write are ignored."""
    if file:
        with contextlib.suppress(UserError, OSError):
            doing.write(file)


class Progress:
    """Counter of things, `unit` in the plural, towards a total (None: unknown)."""

    def __init__(
        self,
        what: str,
        total: int | None,
        unit: str,
        values: Callable[[], Mapping[str, float]] = dict,
        part: bool = False,
    ) -> None:
        """Begin to count; `values` returns numbers to show, by name; `part` says that the stage goes on afterwards."""
        self.what, self.total, self.unit, self.values, self.part = what, total, unit, values, part
        self.done = self._shown = 0  # and what the last line said
        self._start = self._last = time.monotonic()
        self._first: tuple[float, int] | None = None  # when the first of this process was done, and the count then

    def update(self, done: int, total: int | None = None) -> None:
        self.done = done
        self.total = self.total if total is None else total
        now = time.monotonic()
        self._first = self._first or (now, done)
        if now - self._last >= LINE_SECONDS:
            self._last = now
            self._line()

    @property
    def left(self) -> float | None:
        """Seconds to the end, at this process's pace; None if not known."""
        if self.total is None or self._first is None or self.done <= self._first[1]:
            return None
        return (self.total - self.done) * (time.monotonic() - self._first[0]) / (self.done - self._first[1])

    def _line(self) -> None:
        values, self._shown = self.values(), self.done
        share = f" of {self.total} ({100 * self.done / self.total:.0f} %)" if self.total else ""
        shown = [f"{time.monotonic() - self._start:.0f} s"]
        shown += [f"{name} {number(value)}" for name, value in values.items()]
        shown += [f"{duration(left)} left"] if (left := self.left) else []
        logging.info("%s: %d%s %s, %s", self.what, self.done, share, self.unit, ", ".join(shown))
        tell(
            Doing(
                what=self.what,
                part=self.part,
                done=self.done,
                total=self.total,
                unit=self.unit,
                left=self.left,
                values={name: value for name, value in values.items() if math.isfinite(value)},
            )
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.done != self._shown:
            self._line()


def tracked(items: Iterable[Item], what: str, total: int | None, unit: str) -> Iterator[Item]:
    """Yield `items`, counting them: a part of what a stage does."""
    with Progress(what, total, unit, part=True) as progress:
        for count, item in enumerate(items, 1):
            yield item
            progress.update(count)


# ---- where the time of a call went ------------------------------------------------------------------

#: Line that every stage logs when it begins to work; `Job.starting` is read from it.
STARTED = "started in %.1f s"
_STARTED = re.compile(r"^(?:\d\d:\d\d:\d\d )?" + STARTED.replace("%.1f", r"(\d+\.\d)"), re.MULTILINE)


def age() -> float:
    """Return how long ago this process was started, s."""
    ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]  # field 22: since the machine's start
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")


class Job(NamedTuple):
    """A job that is done."""

    rule: str
    end: float  #: Seconds since 1970-01-01 UTC.
    seconds: float
    starting: float | None  #: Seconds until Python and the stage's imports had started; None if that is not known.


def took(benchmark: str | Path) -> float | None:
    """Return the time of a job, s, by the file that Snakemake writes; None where that is not there, or torn."""
    try:
        return float(read_text(benchmark).splitlines()[1].split("\t")[0])
    except (OSError, IndexError, ValueError, UserError):
        return None


def jobs(results: Path, since: float) -> list[Job]:
    """Return the jobs that ended after `since` (seconds since 1970-01-01 UTC), from benchmarks and logs."""
    folder, found = results / "benchmarks", []
    for path in folder.rglob("*.tsv"):
        if (end := path.stat().st_mtime) < since:
            continue
        relative, seconds = path.relative_to(folder), took(path)
        log = results / "logs" / relative.with_suffix(".log")
        try:
            started = _STARTED.findall(read_text(log, errors="replace")) if log.exists() else []  # by try
        except UserError:  # a link or pipe
            continue
        if seconds is None:
            continue
        found.append(Job(Path(relative.parts[0]).stem, end, seconds, float(started[-1]) if started else None))
    return found


def lines(done: Iterable[Job], since: float, until: float, cores: int | None = None, busy: float = 0.0) -> list[str]:
    """Return a table of jobs by rule, the longest first; nothing if there was none.

    `since` and `until` are seconds since 1970-01-01 UTC, `busy` the processor time (s) of the call's own processes on
    `cores`, where that is known.
    """
    rules: dict[str, list[Job]] = {}
    for job in done:
        rules.setdefault(job.rule, []).append(job)
    if not rules:
        return []
    elapsed, totals = until - since, {rule: sum(job.seconds for job in own) for rule, own in rules.items()}
    used = f" on {cores} cores, of which this call used {percent(min(1.0, busy / (cores * elapsed)))}" if cores else ""
    beside = " Jobs ran side by side: their times are more in sum." if sum(totals.values()) > 1.02 * elapsed else ""
    width = max(map(len, rules))
    table = [f"  {'':<{width}}  jobs        time  of which starting"]
    for rule, own in sorted(rules.items(), key=lambda item: -totals[item[0]]):
        known = [job.starting for job in own if job.starting is not None]
        starting = f"{sum(known):.1f} s" if known else ""
        table.append(f"  {rule:<{width}}  {len(own):>4}  {totals[rule]:>8.1f} s  {starting:>17}".rstrip())
    return [f"Where the time went: {duration(elapsed)}{used}.{beside}", *table]
