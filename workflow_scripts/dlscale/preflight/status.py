"""Progress of the runs of plans, for `dlscale status`, and progress of a running workflow call, for its display.

The command reads results, logs, benchmarks and the status files that stages write (`dlscale.core.progress`). The
command asks Slurm only for the list of jobs, and contacts neither Snakemake nor nodes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from dlscale.config.places import check_plans
from dlscale.config.resolve import Configuration
from dlscale.core.errors import UserError
from dlscale.core.files import written_since
from dlscale.core.machine import gpus
from dlscale.core.metrics import Epoch, read_epochs
from dlscale.core.paths import Results
from dlscale.core.process import INTERRUPTED
from dlscale.core.progress import SUFFIX, StageStatus, job_seconds, place
from dlscale.core.stages import DATA_STAGES, STAGES, job_name, stage_of
from dlscale.core.text import NONE, aligned, duration, many, number, percent, shorten
from dlscale.launch import slurm
from dlscale.measure.records import SAMPLE_RATE
from dlscale.preflight import cost
from dlscale.results import RunResult, read_measured

if TYPE_CHECKING:
    from rich.console import RenderableType


#: States of a stage, in the order in which they are printed.
State = Literal["running", "silent", "failed", "done", "waiting"]

#: Seconds without a new status after which a stage on another machine or in a container counts as ended. Validation,
#: compilation and profiling write no status, so the value equals the default of `site.watchdog.between`.
SILENT = 600.0
#: Seconds between two updates of `--watch`, and between two queries of Slurm's queue, which all users share.
EVERY, QUEUE_EVERY = 5.0, 60.0
#: Seconds without a running or queued job after which `--watch` ends, if a stage failed or is silent.
IDLE = 60.0


@dataclass(frozen=True)
class Row:
    """A stage of a run, or of a dataset."""

    name: str
    stage: str
    state: State
    doing: StageStatus | None = None  #: Last status of a running or silent stage.
    epoch: Epoch | None = None  #: Last epoch of a training.
    error: str | None = (
        None  #: Error message of a failed stage, or time of the last status of a silent stage, in words.
    )
    speed: float | None = None  #: Speed of the run, as on the page; only in the row of the stage that measured it.
    unit: str = SAMPLE_RATE

    @property
    def of_data(self) -> bool:
        """Whether the stage makes a dataset."""
        return self.name.startswith("data ")


def look(configuration: Configuration, plans: Iterable[str]) -> list[Row]:
    """Return a row for each stage of each run of these plans, and rows for their datasets."""
    results, rows = Path(configuration.workflow.results), list[Row]()
    for name in dict.fromkeys(run.run.dataset for plan in plans for run in configuration.plans[plan].values()):
        rows += _data(results, name)
    stages = {
        (resolved.plan, resolved.name, stage): None
        for plan in plans
        for run, resolved in cost.expected_runs(configuration.plans[plan], results).items()
        for stage in configuration.stages(plan, run)
    }
    return rows + [_row(results, *each) for each in stages]


def _data(results: Path, name: str) -> list[Row]:
    """Return a row for each running job of a dataset; without running jobs, one row with the dataset's state."""
    what = f"data {name}"
    logs = {  # only logs of data stages: a plan may have the dataset's name
        log: stage
        for stage in DATA_STAGES
        for pattern in (f"{name}/**/*.log*", f"{name}.log*")
        for log in sorted((results / "logs" / stage).glob(pattern))
    }
    told = [doing for file in logs if file.name.endswith(SUFFIX) and (doing := read(file)) and alive(doing)]
    if told:
        return [Row(what, doing.what, "running", doing) for doing in told]
    if Path(Results(results).manifest(name)).exists():
        return [Row(what, "", "done")]
    ended = [Row(what, stage, "failed", error=word) for log, stage in logs.items() if (word := failure(log, stage))]
    return ended[:1] or [Row(what, "", "waiting")]


def _row(results: Path, plan: str, run: str, stage: str) -> Row:
    paths = Results(results)
    log = Path(paths.log(stage, plan, run))
    doing = read(Path(f"{log}{SUFFIX}"))
    state: State = "done" if Path(paths.run(STAGES[stage].outputs[0], plan, run)).exists() else "waiting"
    error, epochs, folder = None, list[Epoch](), Path(paths.run("metrics.jsonl", plan, run)).parent
    if doing and alive(doing):
        state = "running"
    elif doing:
        state, error = "silent", f"no status since {time.strftime('%H:%M:%S', time.localtime(doing.time))}"
    elif error := failure(log, stage):
        state = "failed"
    if stage == "train" and state != "waiting":
        with contextlib.suppress(UserError):  # no epoch has finished
            epochs = read_epochs(folder / "metrics.jsonl")
    measured = RunResult(run, run, folder, f"{plan}/{run}", {}, epochs=epochs, throughput=read_measured(folder))
    return Row(
        f"{plan}.{run}",
        stage,
        state,
        doing,
        measured.last,
        error,
        measured.speed if stage == ("throughput" if measured.throughput else "train") else None,
        measured.unit,
    )


def read(file: Path) -> StageStatus | None:
    """Return a stage's status; None without a status file."""
    with contextlib.suppress(UserError):  # absent, or just deleted
        return StageStatus.read(file)
    return None


def alive(doing: StageStatus) -> bool:
    """Return whether a stage's process runs.

    If the process shares this PID namespace, its PID decides; otherwise (another host, a container) the age of the
    status decides.
    """
    if doing.place == place():
        with contextlib.suppress(OSError):
            return b"dlscale" in Path(f"/proc/{doing.pid}/cmdline").read_bytes()
        return False
    return time.time() - doing.time < SILENT


def last_word(log: Path, stage: str) -> str | None:
    """Return the error message in the last line of a stage's log; None for any other line."""
    if not log.is_file() or log.is_symlink() or log.name.endswith(SUFFIX):
        return None
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        tail = file.read().decode(errors="replace").splitlines()
    last = next((line for line in reversed(tail) if line.strip()), "")
    start = f"dlscale {stage}: "
    return shorten(last.removeprefix(start), 4096) if last.startswith(start) else None


def failure(log: Path, stage: str) -> str | None:
    """Return the error message in the last line of a stage's log; None also if the stage was interrupted."""
    return None if (word := last_word(log, stage)) == INTERRUPTED else word


def describe_failures(jobs: Iterable[tuple[str, Mapping[str, str], str]], since: float) -> list[str]:
    """Return a line for each failure of a call that began at `since` (seconds since 1970-01-01 UTC).

    `jobs` has rule, wildcards and log of each failed job. Jobs with the same message share a line.
    """
    logs = dict[str, list[str]]()
    for rule, wildcards, log in jobs:
        stage, name = stage_of(rule), "".join(job_name(rule, wildcards))
        name += f" ({stage})" if name != rule else ""
        if started := written_since(Path(log), since):
            word = last_word(Path(log), stage) or "it ended without a message, as a killed process does"
        else:  # an earlier call wrote the log
            word = "it did not start; the reason is in the lines above"
        logs.setdefault(f"FAILED {name}: {word}", []).extend([log] * (started and log not in word))
    return sorted(line + f"; log: {', '.join(its)}" * bool(its) for line, its in logs.items())


# ---- output ------------------------------------------------------------------------------------------


def lines(rows: Iterable[Row], jobs: Iterable[str] = (), left: cost.Expected | None = None) -> list[str]:
    """Return lines of text: totals, a table of stages, the waiting stages by plan, errors, and the queued jobs.

    `left` is the remaining time of all stages.
    """
    rows = sorted(rows, key=lambda row: get_args(State).index(row.state))
    counts = [f"{count} {state}" for state, count in Counter(row.state for row in rows).items()]
    text = ["; ".join([", ".join(counts), *(left_words(left) if left else ())])]
    cells = [("run", "stage", "state", "progress", "left", "loss", "speed", "valid loss")]
    waiting = dict[str, Counter[str]]()
    for row in rows:
        doing, epoch = row.doing, row.epoch
        if row.state == "waiting":
            plan, run = row.name.removeprefix("data "), "data" if row.of_data else row.stage
            waiting.setdefault(plan.partition(".")[0], Counter())[run] += 1
        else:
            values = doing.values if doing else {}
            loss = values.get("loss", epoch.train_loss if epoch else None)
            rate = values.get(SAMPLE_RATE, row.speed)
            # The status of a part lacks the time of the stage's other parts.
            left_ = duration(doing.left if doing and not doing.part else None)
            speed, valid = (
                f"{number(rate)} {row.unit}" if rate else NONE,
                number(epoch.valid_loss if epoch else None, 4),
            )
            cells.append((row.name, row.stage, row.state, progress_of(row), left_, number(loss, 4), speed, valid))
    text += ["", *aligned(cells)] if cells[1:] else []
    counted = {name: ", ".join(f"{n} {stage}" for stage, n in stages.items()) for name, stages in waiting.items()}
    text += ["", *(f"waiting: {name} ({stages})" for name, stages in counted.items())] if waiting else []
    text += [f"{row.name} {row.stage}: {row.error}" for row in rows if row.error]
    return text + ([f"In the queue: {', '.join(jobs)}"] if jobs else [])


def progress_of(row: Row) -> str:
    """Return the progress of a row in words."""
    doing = row.doing
    if not (doing and doing.unit):
        return f"epoch {row.epoch.epoch}" if row.epoch else NONE
    done = f"{doing.done:,}" + (f" of {doing.total:,}" if doing.total else "") + f" {doing.unit}"
    done += f" ({percent(doing.done / doing.total)})" if doing.total else ""
    return f"{doing.what}: {done}" if doing.part and doing.what != row.stage else done


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Print the progress of `args.plans` (default: target plans); with `--watch` repeat until all stages are done.

    Return 0, or 1 if a stage failed or is silent and `--watch` saw no job for a minute.
    """
    plans = check_plans(args.plans, configuration)
    assert configuration
    scheduled = configuration.workflow.site.scheduler is not None
    busy, asked, queued = time.monotonic(), -math.inf, list[str]()
    while True:
        rows = look(configuration, plans)
        if scheduled and time.monotonic() - asked >= QUEUE_EVERY:
            asked, queued = time.monotonic(), slurm.left_running(str(Path.cwd())) or []
        if args.json:
            told = {"rows": [asdict(row) for row in rows], "queue": queued}
            print(json.dumps(told, indent=2, ensure_ascii=False, default=lambda record: record.model_dump(mode="json")))
        else:
            text = lines(rows, queued, None if scheduled else left_of(configuration, rows))
            if args.watch and sys.stdout.isatty():
                text = ["\033[2J\033[H" + text[0], *text[1 : shutil.get_terminal_size().lines - 1]]
            print("\n".join(text), flush=True)
        if not args.watch or all(row.state == "done" for row in rows):
            return 0
        if queued or any(row.state == "running" for row in rows):
            busy = time.monotonic()
        elif time.monotonic() - busy >= IDLE and any(row.error for row in rows):
            return 1
        time.sleep(EVERY)


def left_words(left: cost.Expected) -> list[str]:
    """Return the remaining time in words; empty if nothing is left."""
    return [f"{left} left"] if left.seconds else ["time left unknown"] * bool(left.untimed)


def left_of(configuration: Configuration, rows: Iterable[Row]) -> cost.Expected:
    """Return the time until all stages are done on this machine."""
    workflow, cores = configuration.workflow, os.cpu_count() or 1
    rows = [row for row in rows if row.state != "done"]
    datasets = {row.name.removeprefix("data ") for row in rows if row.of_data}
    count = sum(cost.data_jobs(workflow.datasets[name], None) for name in datasets)
    jobs = [(cost.Expected(untimed=1), cost.share(1, cores))] * count
    for row in [row for row in rows if not row.of_data]:
        plan, run = row.name.split(".")
        work = cost.run_work(configuration, plan, run, row.stage)
        said = row.doing.left if row.doing and not row.doing.part else None
        assert work.run is not None
        threads = cost.threads(row.stage, work.run, bool(gpus()))
        takes = cost.seconds_here(row.stage, work, Path(workflow.results)) if said is None else cost.Expected(said)
        jobs.append((takes, cost.share(threads, cores)))
    return cost.in_all(jobs)


# ---- a call, as dlscale's logger plugin for Snakemake shows it ----------------------------------------

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


def progress_line(progress: CallProgress, now: float) -> str:
    """Return the progress of a call as one line."""
    total, *further = progress.total(now)
    told = [f"{total} after {duration(now - progress.began)}", *further]
    for name, rule, *words in progress.each()[:3]:
        told.append(f"{name} {rule}: {', '.join(filter(None, words))}")
    return "; ".join(told)


def progress_bar(progress: CallProgress, now: float) -> RenderableType:
    """Return a progress bar for the call, and a line for each running job."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    total, jobs = Table.grid(padding=(0, 2)), Table.grid(padding=(0, 2))
    share, *words = progress.total(now)
    total.add_row(share, ProgressBar(1.0, progress.share(now), width=20), *words, f"{len(progress.running)} running")
    for row in progress.each():
        jobs.add_row(*map(Text, row))
    return Group(total, jobs)
