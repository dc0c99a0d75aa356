"""Time of a call of the workflow, by rule."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from dlscale.core.text import duration, percent

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


def jobs(results: Path, since: float) -> list[Job]:
    """Return the jobs that ended after `since` (seconds since 1970-01-01 UTC), from benchmarks and logs."""
    folder, found = results / "benchmarks", []
    for path in folder.rglob("*.tsv"):
        if (end := path.stat().st_mtime) < since:
            continue
        relative = path.relative_to(folder)
        try:
            seconds = float(path.read_text().splitlines()[1].split("\t")[0])
        except (IndexError, ValueError):  # half-written, by a job that was ended
            continue
        log = results / "logs" / relative.with_suffix(".log")
        started = _STARTED.findall(log.read_text(errors="replace")) if log.exists() else []  # by try
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
