"""Progress of a stage for its log and `dlscale status`, and a table of job times."""

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
from typing import Annotated, NamedTuple, TypeVar

from pydantic import AfterValidator, Field

from dlscale.core.errors import UserError
from dlscale.core.files import read_text
from dlscale.core.machine import LOG_SECONDS
from dlscale.core.record import Record
from dlscale.core.text import duration, number, percent, shorten

Item = TypeVar("Item")

#: Seconds between two lines of progress (`log_seconds` of a site).
LINE_SECONDS = float(os.environ.get(LOG_SECONDS, "10"))

#: Suffix of a progress file, which is next to the stage's log while the stage runs.
SUFFIX = ".doing"
#: Progress file of this process; None if the progress is not recorded.
file: Path | None = None


class StageStatus(Record):
    """Progress of a running stage, written to a file next to the stage's log."""

    what: Annotated[str, AfterValidator(lambda text: shorten(text, 200))]
    part: bool = False  #: Whether the progress is about one part of the stage, so that other parts may follow.
    done: int = 0
    total: int | None = None  #: Final value of `done`; None if unknown.
    unit: Annotated[str, AfterValidator(lambda text: shorten(text, 40))] = ""
    left: float | None = None  #: Estimated time until `done` reaches `total`, s.
    values: dict[str, float] = {}  #: Additional numbers by name, such as loss and samples/s.
    host: str = Field(default_factory=socket.gethostname)
    place: str = Field(default_factory=lambda: place())  #: Scope of `pid`: host and, on Linux, PID namespace.
    pid: int = Field(default_factory=os.getpid)
    job: str | None = Field(default_factory=lambda: os.environ.get("SLURM_JOB_ID"))  #: Job id of Slurm.
    time: float = Field(default_factory=time.time, ge=0, le=1e11)  #: Time of writing, seconds since 1970-01-01 UTC.


@contextlib.contextmanager
def status_file(log: str | os.PathLike[str] | None) -> Iterator[None]:
    """Keep a progress file next to `log` during the block; without a log, write no file."""
    global file
    file = Path(f"{log}{SUFFIX}") if log else None
    try:
        write_status(StageStatus(what="starting"))
        yield
    finally:
        if file:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
        file = None


def place() -> str:
    """Return the scope in which a process id is valid: the host and, on Linux, the PID namespace."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"
    return socket.gethostname()


def write_status(doing: StageStatus) -> None:
    """Write this process's progress to its file; write errors are ignored."""
    if file:
        with contextlib.suppress(UserError, OSError):
            doing.write(file)


class Progress:
    """Counter of items, which logs the progress towards a total (None if the total is unknown)."""

    updates = 0  #: Number of updates of all counters of this process, as a sign of progress for the watchdog.

    def __init__(
        self,
        what: str,
        total: int | None,
        unit: str,
        values: Callable[[], Mapping[str, float]] = dict,
        part: bool = False,
    ) -> None:
        """Start counting.

        `unit` names the items in the plural. `values` returns additional numbers to show, by name. `part` means that
        the stage continues after these items.
        """
        self.what, self.total, self.unit, self.values, self.part = what, total, unit, values, part
        self.done = self._shown = 0  # count, and the count in the last log line
        self._start = self._last = time.monotonic()
        self._first: tuple[float, int] | None = None  # time and count at the first update of this counter

    def update(self, done: int, total: int | None = None) -> None:
        Progress.updates += 1
        self.done = done
        self.total = self.total if total is None else total
        now = time.monotonic()
        self._first = self._first or (now, done)
        if now - self._last >= LINE_SECONDS:
            self._last = now
            self._line()

    @property
    def left(self) -> float | None:
        """Remaining time at the pace of this process, s; None if unknown."""
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
        write_status(
            StageStatus(
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
    """Yield `items` and record their count as the progress of one part of a stage."""
    with Progress(what, total, unit, part=True) as progress:
        for count, item in enumerate(items, 1):
            yield item
            progress.update(count)


# ---- time of the jobs of a call ---------------------------------------------------------------------

#: Line that every stage logs when its work begins; `Job.starting` is read from it.
STARTED = "started in %.1f s"
_STARTED = re.compile(r"^(?:\d\d:\d\d:\d\d )?" + STARTED.replace("%.1f", r"(\d+\.\d)"), re.MULTILINE)


def age() -> float:
    """Return the time since the start of this process, s."""
    ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]  # field 22: start time since boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")


class Job(NamedTuple):
    """A finished job."""

    rule: str
    end: float  #: End time, seconds since 1970-01-01 UTC.
    seconds: float
    starting: float | None  #: Time for starting Python and for the stage's imports, s; None if unknown.


def job_seconds(benchmark: str | Path) -> float | None:
    """Return the duration of a job from Snakemake's benchmark file, s.

    Return None if the file is missing or damaged.
    """
    try:
        return float(re.findall(r"^\d{1,9}(?:\.\d*)?(?=\t|$)", read_text(benchmark).splitlines()[1])[0])
    except (OSError, IndexError, ValueError, UserError):
        return None


def jobs(results: Path, since: float) -> list[Job]:
    """Return the jobs that ended after `since` (seconds since 1970-01-01 UTC), from benchmarks and logs."""
    folder, found = results / "benchmarks", []
    for path in folder.rglob("*.tsv"):
        if (end := path.stat().st_mtime) < since:
            continue
        relative, seconds = path.relative_to(folder), job_seconds(path)
        log = results / "logs" / relative.with_suffix(".log")
        try:
            started = _STARTED.findall(read_text(log, errors="replace")) if log.exists() else []  # one per try
        except UserError:  # a link or pipe
            continue
        if seconds is None:
            continue
        found.append(Job(Path(relative.parts[0]).stem, end, seconds, float(started[-1]) if started else None))
    return found


def lines(done: Iterable[Job], since: float, until: float, cores: int | None = None, busy: float = 0.0) -> list[str]:
    """Return the lines of a table of job times by rule, longest time first; an empty list without jobs.

    `since` and `until` are seconds since 1970-01-01 UTC. `cores` is the number of cores that Snakemake may use (None if
    unknown), and `busy` is the processor time, s, of this call's processes on these cores.
    """
    rules: dict[str, list[Job]] = {}
    for job in done:
        rules.setdefault(job.rule, []).append(job)
    if not rules:
        return []
    elapsed, totals = until - since, {rule: sum(job.seconds for job in own) for rule, own in rules.items()}
    used = (
        f" on {cores} cores; this call used {percent(min(1.0, busy / (cores * elapsed)))} of these cores"
        if cores
        else ""
    )
    beside = (
        " Jobs ran in parallel, so their times add up to more than the elapsed time."
        if sum(totals.values()) > 1.02 * elapsed
        else ""
    )
    width = max(map(len, rules))
    table = [f"  {'':<{width}}  jobs        time  of which starting"]
    for rule, own in sorted(rules.items(), key=lambda item: -totals[item[0]]):
        known = [job.starting for job in own if job.starting is not None]
        starting = f"{sum(known):.1f} s" if known else ""
        table.append(f"  {rule:<{width}}  {len(own):>4}  {totals[rule]:>8.1f} s  {starting:>17}".rstrip())
    return [f"Where the time went: {duration(elapsed)}{used}.{beside}", *table]
