"""Where the time of a call of the workflow went: jobs by rule, the starts of their processes, and the cores it used."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dlscale.core.text import duration, percent

#: Line that every stage logs when it begins to work; `Job.starting` is read from it.
STARTED = "started in %.1f s"
_STARTED = re.compile(r"^(?:\d\d:\d\d:\d\d )?" + STARTED.replace("%.1f", r"(\d+\.\d)"), re.MULTILINE)


def age() -> float:
    """Return how long ago this process was started, s."""
    ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]  # field 22: since the machine's start
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Job:
    """A job that is done."""

    rule: str
    end: float  #: When it was done, seconds since 1970-01-01 UTC.
    seconds: float
    starting: float | None  #: Of these, until Python and what the stage imports had started; None if that is not known.


def jobs(results: Path, since: float) -> list[Job]:
    """Return the jobs that were done after `since` (seconds since 1970-01-01 UTC), from their benchmarks and logs."""
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

    `since` and `until` are the begin and the end of it all, seconds since 1970-01-01 UTC. `busy` is the processor time
    (s) that the call's own processes used of so many `cores`, where that is known; what others used is not.
    """
    rules: dict[str, list[Job]] = {}
    for job in done:
        rules.setdefault(job.rule, []).append(job)
    if not rules:
        return []
    elapsed = until - since
    used = f" on {cores} cores, of which this call used {percent(min(1.0, busy / (cores * elapsed)))}" if cores else ""
    rows = [("", "jobs", "time", "of which starting")]
    for rule, own in sorted(rules.items(), key=lambda item: -sum(job.seconds for job in item[1])):
        known = [job.starting for job in own if job.starting is not None]
        rows.append(
            (rule, str(len(own)), _seconds(sum(job.seconds for job in own)), _seconds(sum(known)) if known else "")
        )
    rows.append(("between jobs", "", _seconds(_uncovered(rules, since, until)), ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join([name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))])
        for name, *cells in rows
    ]
    together = sum(job.seconds for own in rules.values() for job in own) > 1.02 * elapsed
    beside = " Jobs ran side by side: their times are more in sum." if together else ""
    return [f"Where the time went: {duration(elapsed)}{used}.{beside}", *(f"  {row}".rstrip() for row in table)]


def _seconds(value: float) -> str:
    return f"{value:.1f} s"


def _uncovered(rules: dict[str, list[Job]], since: float, until: float) -> float:
    """Return how long no job ran."""
    reached, free = since, 0.0
    for start, end in sorted((job.end - job.seconds, job.end) for own in rules.values() for job in own):
        free += max(0.0, start - reached)
        reached = max(reached, end)
    return free + max(0.0, until - reached)
