"""Progress of a running workflow call, as a line of text or with a progress bar.

The data come from Snakemake's benchmarks, and from the status files that stages write every ten seconds
(`dlscale.core.progress`).
dlscale's logger plugin for Snakemake shows the progress.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dlscale.core.files import written_since
from dlscale.core.progress import SUFFIX, StageStatus, job_seconds
from dlscale.core.text import duration, many, number, percent
from dlscale.preflight import cost
from dlscale.preflight.status import Row, alive, left_words, progress_of, read

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Assumed remaining time of a job that is overdue, as a fraction of its time so far.
OVERDUE = 0.1


@dataclass(frozen=True)
class Job:
    """A job of a workflow call."""

    name: str  #: Name of the job: PLAN.RUN, `plan NAME`, `data NAME`, or else the rule.
    rule: str
    log: str
    benchmark: str
    seconds: float  #: Expected duration.
    timed: bool  #: Whether the duration is known (`cost.seconds_here`); if not, `seconds` is a lower bound.
    share: float  #: Fraction of the machine that the job uses.


@dataclass
class CallProgress:
    """Progress of a workflow call; times are seconds since 1970-01-01 UTC."""

    began: float
    jobs: list[Job] = field(default_factory=list)
    done: dict[Job, float] = field(default_factory=dict)  #: Finished job → duration, seconds.
    running: dict[Job, tuple[float, StageStatus]] = field(
        default_factory=dict
    )  #: Running job → time when first seen, and last status.
    failed: int = 0  #: Number of jobs that failed and were not restarted.

    def look(self, now: float) -> None:
        """Update the running and the finished jobs."""
        for job in [job for job in self.jobs if job not in self.done]:
            benchmark = Path(job.benchmark)
            since, _ = self.running.pop(job, (now, None))
            if written_since(benchmark, self.began):
                self.done[job] = job_seconds(benchmark) or job.seconds
            elif (doing := read(Path(f"{job.log}{SUFFIX}"))) and alive(doing):
                self.running[job] = since, doing

    def left_of(self, job: Job, now: float) -> cost.Expected:
        """Return the remaining time of a job.

        A remaining time that the stage reports takes precedence. Otherwise the job's total time is its expected time,
        multiplied by actual / expected time of the finished jobs.
        """
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
        """Return the remaining time of all jobs."""
        return cost.in_all((self.left_of(job, now), job.share) for job in self.jobs if job not in self.done)

    def share(self, now: float) -> float:
        """Return the elapsed fraction of the total time, or the fraction of finished jobs if a job was never timed."""
        if not all(job.timed for job in self.jobs):
            return len(self.done) / len(self.jobs)
        passed = now - self.began
        return passed / (passed + self.left(now).seconds) if passed > 0 else 0.0

    def total(self, now: float) -> list[str]:
        """Return the progress of all jobs as texts: per cent, time left, number of jobs, failures."""
        left, count = left_words(self.left(now)), f"{len(self.done)} of {many(len(self.jobs), 'job')}"
        failed = [f"{self.failed} failed"] if self.failed else []
        return [percent(self.share(now)), *left, count, *failed]

    def each(self) -> list[list[str]]:
        """Return texts on each running job: name, stage, progress, samples/s, time left."""
        rows = []
        for job, (_, doing) in self.running.items():
            done = progress_of(Row(job.name, job.rule, "running", doing)) if doing.unit else doing.what
            rate = doing.values.get("samples/s")
            left = f"{duration(doing.left)} left" if doing.left and not doing.part else ""
            rows.append([job.name, job.rule, done, f"{number(rate)} samples/s" if rate else "", left])
        return rows


def line(progress: CallProgress, now: float) -> str:
    """Return the progress of a call as one line."""
    total, *further = progress.total(now)
    told = [f"{total} after {duration(now - progress.began)}", *further]
    for name, rule, *words in progress.each()[:3]:
        told.append(f"{name} {rule}: {', '.join(filter(None, words))}")
    return "; ".join(told)


def drawn(progress: CallProgress, now: float) -> RenderableType:
    """Return a progress bar for the call, and a line for each running job."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    total, jobs = Table.grid(padding=(0, 2)), Table.grid(padding=(0, 2))
    share, *words = progress.total(now)
    total.add_row(share, ProgressBar(1.0, progress.share(now), width=20), *words, f"{len(progress.running)} running")
    for row in progress.each():
        jobs.add_row(*row)
    return Group(total, jobs)
