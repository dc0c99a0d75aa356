"""Progress of a call of the workflow while it runs, as a line or drawn with a bar.

It is read from benchmarks and from the status files that stages write every ten seconds (`dlscale.core.progress`).
Snakemake's logger plugin of dlscale shows it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dlscale.core.progress import SUFFIX, Doing, took
from dlscale.core.text import duration, many, number, percent
from dlscale.preflight import cost
from dlscale.preflight.status import Row, alive, left_words, progress_of, read

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Rest of a job that takes longer than expected, as a share of its time so far.
OVERDUE = 0.1


@dataclass(frozen=True)
class Job:
    """A job of the call."""

    name: str  #: PLAN.RUN, or what else it makes.
    rule: str
    log: str
    benchmark: str
    seconds: float  #: Expected time.
    timed: bool  #: False: the job was never timed here, and `seconds` is a part of its time.
    share: float  #: Of the machine, while it runs.


@dataclass
class CallProgress:
    """Progress of a call; times are seconds since 1970-01-01 UTC."""

    began: float
    jobs: list[Job] = field(default_factory=list)
    done: dict[Job, float] = field(default_factory=dict)  #: Seconds that they took.
    running: dict[Job, tuple[float, Doing]] = field(default_factory=dict)  #: Begin and status.
    failed: int = 0  #: Number of jobs that failed and were not started again.

    def look(self, now: float) -> None:
        """Look for jobs that run and that are done."""
        for job in [job for job in self.jobs if job not in self.done]:
            benchmark = Path(job.benchmark)
            since, _ = self.running.pop(job, (now, None))
            if benchmark.exists() and benchmark.stat().st_mtime >= self.began:
                self.done[job] = took(benchmark) or job.seconds
            elif (doing := read(Path(f"{job.log}{SUFFIX}"))) and alive(doing):
                self.running[job] = since, doing

    def left_of(self, job: Job, now: float) -> cost.Expected:
        """Return the time that a job takes yet; jobs that are done show how much longer than expected."""
        timed = [other for other in self.done if other.timed]
        expected = sum(other.seconds for other in timed)
        takes = job.seconds * (sum(self.done[other] for other in timed) / expected if expected else 1.0)
        if job not in self.running:
            return cost.Expected(takes, not job.timed)
        since, doing = self.running[job]
        if doing.left is not None and not doing.part:
            return cost.Expected(max(0.0, doing.left - (now - doing.time)))
        overdue = OVERDUE * (now - since) if job.timed else 0.0
        return cost.Expected(max(takes - (now - since), overdue), not job.timed)

    def left(self, now: float) -> cost.Expected:
        """Return the time that all jobs take yet."""
        return cost.in_all((self.left_of(job, now), job.share) for job in self.jobs if job not in self.done)

    def share(self, now: float) -> float:
        """Return the fraction of the time that has passed; of the jobs that are done, if some were never timed."""
        if not all(job.timed for job in self.jobs):
            return len(self.done) / len(self.jobs)
        passed = now - self.began
        return passed / (passed + self.left(now).seconds) if passed > 0 else 0.0

    def total(self, now: float) -> list[str]:
        """Return the progress of all jobs in words: per cent, time left, number, failures."""
        left, count = left_words(self.left(now)), f"{len(self.done)} of {many(len(self.jobs), 'job')}"
        failed = [f"{self.failed} failed"] if self.failed else []
        return [percent(self.share(now)), *left, count, *failed]

    def each(self) -> list[list[str]]:
        """Return the progress of each job that runs in words: name, stage, count, samples/s, time left."""
        rows = []
        for job, (_, doing) in self.running.items():
            done = progress_of(Row(job.name, job.rule, "running", doing)) if doing.unit else doing.what
            rate = doing.values.get("samples/s")
            left = f"{duration(doing.left)} left" if doing.left and not doing.part else ""
            rows.append([job.name, job.rule, done, f"{number(rate)} samples/s" if rate else "", left])
        return rows


def line(progress: CallProgress, now: float) -> str:
    """Return the progress of a call in a line."""
    total, *further = progress.total(now)
    told = [f"{total} after {duration(now - progress.began)}", *further]
    for name, rule, *words in progress.each()[:3]:
        told.append(f"{name} {rule}: {', '.join(filter(None, words))}")
    return "; ".join(told)


def drawn(progress: CallProgress, now: float) -> RenderableType:
    """Return a bar for the call, and a line for each job that runs."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    total, jobs = Table.grid(padding=(0, 2)), Table.grid(padding=(0, 2))
    share, *words = progress.total(now)
    total.add_row(share, ProgressBar(1.0, progress.share(now), width=20), *words, f"{len(progress.running)} running")
    for row in progress.each():
        jobs.add_row(*row)
    return Group(total, jobs)
