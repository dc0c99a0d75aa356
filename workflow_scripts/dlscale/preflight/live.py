"""Progress of a call of the workflow while it runs, by the time that its jobs take.

`dlscale run` starts Snakemake, which writes its jobs into a file. Their status files and benchmarks then tell how far
each is: drawn on a terminal, elsewhere a line now and then.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dlscale.core import machine
from dlscale.core.files import read_json, write_json
from dlscale.core.progress import SUFFIX, Doing
from dlscale.core.text import duration, many, number, percent
from dlscale.preflight import cost, status

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Variable with the file into which a call writes its jobs: then Snakemake itself says no more than what is wrong.
TOLD = "DLSCALE_TOLD"
#: Seconds between two looks, and between two lines where there is no terminal.
EVERY, LINE_EVERY = 0.5, 20.0
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
    share: float  #: Of the machine, while it runs.


def asked() -> bool:
    """Whether another process shows this call."""
    return TOLD in os.environ


def tell(jobs: Iterable[Job]) -> None:
    """Write the jobs of this call for the process that shows it."""
    write_json(os.environ[TOLD], [vars(job) for job in jobs])


# ---- progress ----------------------------------------------------------------------------------------


@dataclass
class Progress:
    """Progress of a call; times are seconds since 1970-01-01 UTC."""

    began: float
    jobs: list[Job] = field(default_factory=list)
    done: dict[Job, float] = field(default_factory=dict)  #: Seconds that they took.
    running: dict[Job, tuple[float, Doing]] = field(default_factory=dict)  #: Begin and status.

    def look(self, now: float) -> None:
        """Look for jobs that run and that are done."""
        for job in [job for job in self.jobs if job not in self.done]:
            benchmark = Path(job.benchmark)
            since, _ = self.running.pop(job, (now, None))
            if benchmark.exists() and benchmark.stat().st_mtime >= self.began:
                self.done[job] = cost.took(benchmark) or job.seconds
            elif (doing := status.read(Path(f"{job.log}{SUFFIX}"))) and status.alive(doing):
                self.running[job] = since, doing

    def left_of(self, job: Job, now: float) -> float:
        """Return the time that a job takes yet, s; jobs that are done tell how much longer than expected."""
        expected = sum(other.seconds for other in self.done)
        takes = job.seconds * (sum(self.done.values()) / expected if expected else 1.0)
        if job not in self.running:
            return takes
        since, doing = self.running[job]
        if doing.left is not None and not doing.part:
            return max(0.0, doing.left - (now - doing.time))
        return max(takes - (now - since), OVERDUE * (now - since))

    def left(self, now: float) -> float:
        """Return the time that all jobs take yet, s."""
        return cost.in_all((self.left_of(job, now), job.share) for job in self.jobs if job not in self.done)

    def share(self, now: float) -> float:
        """Return the share of the time that has passed, of 1."""
        passed = now - self.began
        return passed / (passed + self.left(now)) if passed > 0 else 0.0

    def total(self, now: float) -> list[str]:
        """Return the progress of all jobs in words: per cent, time left, number."""
        left = f"about {duration(self.left(now))} left"
        return [percent(self.share(now)), left, f"{len(self.done)} of {many(len(self.jobs), 'job')}"]

    def each(self) -> list[list[str]]:
        """Return the progress of each job that runs in words: name, stage, count, samples/s, time left."""
        rows = []
        for job, (_, doing) in self.running.items():
            done = status.progress_of(status.Row(job.name, job.rule, "running", doing)) if doing.unit else doing.what
            rate = doing.values.get("samples/s")
            left = f"{duration(doing.left)} left" if doing.left and not doing.part else ""
            rows.append([job.name, job.rule, done, f"{number(rate)} samples/s" if rate else "", left])
        return rows


def line(progress: Progress, now: float) -> str:
    """Return the progress of a call in a line."""
    total, *further = progress.total(now)
    told = [f"{total} after {duration(now - progress.began)}", *further]
    for name, rule, *words in progress.each()[:3]:
        told.append(f"{name} {rule}: {', '.join(filter(None, words))}")
    return "; ".join(told)


def drawn(progress: Progress, now: float) -> RenderableType:
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


# ---- the call ----------------------------------------------------------------------------------------


def run(command: Sequence[str]) -> int:
    """Run Snakemake and show its progress; return its status.

    Ctrl-C comes to both, as a terminal has it. When this process ends before, Snakemake is asked to end.
    """
    from rich.console import Console
    from rich.live import Live

    console, said, shown = Console(stderr=True), deque[str](), 0.0
    bar = Live(console=console, auto_refresh=False, transient=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        told, progress = Path(folder, "jobs.json"), Progress(time.time())
        child = subprocess.Popen(
            command,
            env={**os.environ, TOLD: str(told)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=functools.partial(machine.with_parent, os.getpid(), signal.SIGTERM),
        )
        for number, handler in (
            (signal.SIGINT, lambda *_: None),
            (signal.SIGTERM, lambda *_: child.terminate()),
        ):
            stack.callback(signal.signal, number, signal.signal(number, handler))
        assert child.stdout
        reader = threading.Thread(target=lambda lines: said.extend(map(str.rstrip, lines)), args=[child.stdout])
        reader.daemon = True
        reader.start()
        if console.is_terminal:
            stack.enter_context(bar)
        while True:
            ended, now = child.poll() is not None, time.time()
            if ended:
                reader.join(5)  # what outlives Snakemake may hold the pipe
            if not progress.jobs and told.exists():
                progress.jobs = [Job(**job) for job in read_json(told)]
                progress.began = min(now, told.stat().st_mtime)
            progress.look(now)
            while said:
                text = said.popleft()
                colour = "red" if text.startswith(("FAILED", "FAIL ")) else ""
                if progress.jobs or not text.startswith("Using "):  # profiles, before Snakemake reads our rules
                    console.print(text, style=colour, markup=False, highlight=False, soft_wrap=True)
            if progress.jobs and bar.is_started:
                bar.update(drawn(progress, now), refresh=True)
            elif progress.jobs and now - shown >= LINE_EVERY and not ended:
                shown = now
                console.print(line(progress, now), markup=False, highlight=False, soft_wrap=True)
            if ended:
                break
            time.sleep(EVERY)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode
