"""How far a call of the workflow is, while it runs: by the time that its jobs take, not by their number.

`dlscale run` starts Snakemake, which writes down which jobs there are. What each of them does shows in the files beside
its log, as for `dlscale status`; that it is done, in its benchmark. On a terminal that is drawn, below whatever the
call says; elsewhere it is a line now and then.
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
from typing import TYPE_CHECKING, Any

from dlscale.core import machine
from dlscale.core.files import read_json, write_json
from dlscale.core.progress import SUFFIX, Doing
from dlscale.core.text import duration, many, number, percent
from dlscale.preflight import expected, status

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Names the file into which a call writes its jobs: then Snakemake itself says no more than what is wrong.
TOLD = "DLSCALE_TOLD"
#: Seconds between two looks, and between two lines where there is no terminal.
EVERY, LINE_EVERY = 0.5, 20.0
#: What is left of a job that takes longer than expected: a tenth of what it has taken.
OVERDUE = 0.1
#: Jobs that are drawn, at most.
MOST = 12
#: Columns of a terminal below which no bar is drawn.
NARROW = 60


@dataclass(frozen=True)
class Job:
    """A job of the call."""

    name: str  #: PLAN.RUN, or what else it makes.
    rule: str
    plan: str  #: Empty if it is of no plan.
    log: str
    benchmark: str
    seconds: float  #: That it is expected to take.
    share: float  #: Of the machine, while it runs.


def asked() -> bool:
    """Whether this process is a call that somebody shows."""
    return TOLD in os.environ


def tell(jobs: Iterable[Job]) -> None:
    """Write the jobs of this call for the process that shows it."""
    write_json(os.environ[TOLD], [vars(job) for job in jobs])


# ---- how far -----------------------------------------------------------------------------------------


@dataclass
class Progress:
    """How far a call is; asked again and again, by seconds since 1970-01-01 UTC."""

    began: float
    jobs: list[Job] = field(default_factory=list)
    done: dict[Job, float] = field(default_factory=dict)  #: How many seconds they took.
    running: dict[Job, tuple[float, Doing]] = field(default_factory=dict)  #: Since when, and what they say.
    _share: float = 0.0

    def look(self, now: float) -> list[Job]:
        """Look where the jobs are; return those that have come to their end since the last look."""
        new = []
        for job in [job for job in self.jobs if job not in self.done]:
            benchmark = Path(job.benchmark)
            if benchmark.exists() and benchmark.stat().st_mtime >= self.began:
                self.done[job] = expected.took(benchmark) or job.seconds
                self.running.pop(job, None)
                new.append(job)
            elif (doing := status.read(Path(f"{job.log}{SUFFIX}"))) and status.alive(doing):
                since = self.running[job][0] if job in self.running else now
                self.running[job] = since, doing
            else:
                self.running.pop(job, None)
        return new

    def takes(self, job: Job) -> float:
        """Return how long a job takes, s: as much longer than expected as those of its rule did, or else all."""
        alike = [other for other in self.done if other.rule == job.rule] or [*self.done]
        pace = sum(self.done[other] for other in alike) / sum(other.seconds for other in alike) if alike else 1.0
        return job.seconds * pace

    def left_of(self, job: Job, now: float) -> float:
        """Return how long a job takes yet, s."""
        if job not in self.running:
            return self.takes(job)
        since, doing = self.running[job]
        if doing.left is not None and not doing.part:
            return max(0.0, doing.left - (now - doing.time))
        return max(self.takes(job) - (now - since), OVERDUE * (now - since))

    def left(self, now: float) -> float:
        """Return how long all takes yet, s: jobs wait for one another where the machine has no room for them."""
        return expected.in_all((self.left_of(job, now), job.share) for job in self.jobs if job not in self.done)

    def share(self, now: float) -> float:
        """Return how much of the time has passed, of 1; it never falls, whatever takes longer than expected."""
        passed = now - self.began
        self._share = max(self._share, passed / (passed + self.left(now)) if passed > 0 else 0.0)
        return self._share

    def plan_done(self, job: Job) -> bool:
        """Whether a job that is done was the last of its plan."""
        return bool(job.plan) and all(other in self.done for other in self.jobs if other.plan == job.plan)


def words(job: Job, doing: Doing) -> list[str]:
    """Return what is said of a job that runs: which, its stage, how far, samples/s, seconds left."""
    done = status.progress_of(status.Row(job.name, job.rule, "running", doing)) if doing.unit else doing.what
    rate = doing.values.get("samples/s")
    left = f"{duration(doing.left)} left" if doing.left and not doing.part else ""
    return [job.name, job.rule, done, f"{number(rate)} samples/s" if rate else "", left]


def line(progress: Progress, now: float) -> str:
    """Return how far all is."""
    told = [f"{percent(progress.share(now))} after {duration(now - progress.began)}"]
    told += [f"about {duration(progress.left(now))} left", f"{len(progress.done)} of {many(len(progress.jobs), 'job')}"]
    for job, (_, doing) in list(progress.running.items())[:3]:
        name, rule, *further = words(job, doing)
        told.append(f"{name} {rule}: {', '.join(filter(None, further))}")
    return "; ".join(told)


# ---- the call ----------------------------------------------------------------------------------------


def run(command: Sequence[str]) -> int:
    """Run Snakemake and show how far it is; return its status."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "jobs.json")
        # A group of its own: a terminal's Ctrl-C comes to this process alone, which passes it on, once.
        child = subprocess.Popen(
            command,
            env={**os.environ, TOLD: str(told)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,
            preexec_fn=functools.partial(_begin, os.getpid()),
        )

        def pass_on(number: int, frame: Any) -> None:
            """What is typed goes to all of the group, as a terminal has it; a request to end is for Snakemake."""
            if number == signal.SIGTERM:
                child.terminate()
            else:
                os.killpg(child.pid, signal.SIGINT)

        numbers = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
        heeded = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]  # nohup, say
        before = {number: signal.signal(number, pass_on) for number in heeded}
        said = deque[str]()
        assert child.stdout
        stdout = child.stdout
        reader = threading.Thread(target=lambda: said.extend(map(str.rstrip, stdout)), daemon=True)
        reader.start()
        progress = Progress(time.time())
        screen = _Screen()
        try:
            while child.poll() is None:
                _look(progress, told, said, screen)
                time.sleep(EVERY)
            reader.join(5)  # what outlives Snakemake may hold the pipe
            _look(progress, told, said, screen)
        finally:
            with contextlib.suppress(OSError):  # a pipe that was closed, by which this process ends
                screen.close()
            for number, handler in before.items():
                signal.signal(number, handler)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _begin(parent: int) -> None:
    """Hear what the parent passes on, also where a shell has those in the background ignore it.

    When the parent ends before, by a lost terminal say, Snakemake is asked to end: it finishes what runs.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    machine.with_parent(parent, signal.SIGTERM)


def _look(progress: Progress, told: Path, said: deque[str], screen: _Screen) -> None:
    now = time.time()
    if not progress.jobs and told.exists():
        progress.jobs = [Job(**job) for job in read_json(told)]
        progress.began = min(now, told.stat().st_mtime)
    new = progress.look(now)
    for plan in dict.fromkeys(job.plan for job in new if progress.plan_done(job)):
        screen.say(f"{plan} is done, after {duration(now - progress.began)}")
    while said:
        text = said.popleft()
        if progress.jobs or not text.startswith("Using "):  # profiles, before Snakemake reads our rules
            screen.say(text)
    if progress.jobs:
        screen.show(progress, now)


class _Screen:
    """A bar of all, and a line for each job that runs, below what is said; without a terminal a line now and then."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console, self._shown = Console(stderr=True), 0.0
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        if self._console.is_terminal:
            self._live.start()

    def say(self, text: str) -> None:
        colour = "red" if text.startswith(("FAILED", "FAIL ")) else ""
        self._console.print(text, style=colour, markup=False, highlight=False, soft_wrap=True)

    def show(self, progress: Progress, now: float) -> None:
        if self._live.is_started:
            narrow = self._console.width < NARROW
            self._live.update(line(progress, now) if narrow else _drawn(progress, now), refresh=True)
        elif now - self._shown >= LINE_EVERY and len(progress.done) < len(progress.jobs):
            self._shown = now
            self.say(line(progress, now))

    def close(self) -> None:
        self._live.stop()


def _drawn(progress: Progress, now: float) -> RenderableType:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    total = Table.grid(padding=(0, 2))
    total.add_row(
        percent(progress.share(now)),
        ProgressBar(1.0, progress.share(now), width=20),
        f"about {duration(progress.left(now))} left" if progress.left(now) else "",
        f"{len(progress.done)} of {many(len(progress.jobs), 'job')}, {len(progress.running)} running",
    )
    jobs = Table.grid(padding=(0, 2))
    for job, (_, doing) in list(progress.running.items())[:MOST]:
        jobs.add_row(*words(job, doing))
    if (more := len(progress.running) - MOST) > 0:
        jobs.add_row(f"and {more} more")
    return Group(total, jobs)
