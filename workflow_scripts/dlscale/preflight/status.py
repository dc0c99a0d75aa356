"""Progress: of the runs of plans (`dlscale status`), and of a call of the workflow while it runs (`dlscale run`).

Both read results, logs, benchmarks and the status files that stages write every ten seconds (`dlscale.core.progress`);
neither asks Snakemake or the nodes. A call that is shown writes its jobs into a file.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from dlscale.config.places import check_plans
from dlscale.config.resolve import Configuration
from dlscale.core import machine
from dlscale.core.errors import UserError
from dlscale.core.files import read_json, write_json
from dlscale.core.machine import gpus
from dlscale.core.metrics import Epoch, read_epochs
from dlscale.core.process import INTERRUPTED
from dlscale.core.progress import LINE_SECONDS, SUFFIX, Doing, place, took
from dlscale.core.stages import DATA_STAGES, STAGES
from dlscale.core.text import NONE, aligned, duration, many, number, percent
from dlscale.launch import slurm
from dlscale.preflight import cost

if TYPE_CHECKING:
    from rich.console import RenderableType

#: In the order in which they are printed.
State = Literal["running", "silent", "failed", "done", "waiting"]

#: Seconds without a status after which a stage on another machine, or in a container, counts as ended: as many as the
#: watchdog waits between epochs. A validation, a compilation, or a profile tells none meanwhile.
SILENT = 60 * LINE_SECONDS
#: Seconds between two looks of `--watch`.
EVERY = 5.0
#: Seconds without a job after which a failure ends `--watch`.
IDLE = 60.0
#: Variable with the file into which a call writes its jobs: then Snakemake itself says no more than what is wrong.
TOLD = "DLSCALE_TOLD"
#: Variable with the descriptor of a pipe to the process that shows a call.
PIPE = "DLSCALE_PIPE"
#: Seconds between two looks at a call, and between two lines where there is no terminal.
LOOK_EVERY, LINE_EVERY = 0.5, 20.0
#: Rest of a job that takes longer than expected, as a share of its time so far.
OVERDUE = 0.1


@dataclass(frozen=True)
class Row:
    """A stage of a run, or of a dataset."""

    name: str
    stage: str
    state: State
    doing: Doing | None = None  #: Of a stage that runs.
    epoch: Epoch | None = None  #: The last one, of a training.
    error: str | None = None  #: The last word of a stage that failed.

    @property
    def of_data(self) -> bool:
        """Whether it makes a dataset."""
        return self.name.startswith("data ")


def look(configuration: Configuration, plans: Iterable[str]) -> list[Row]:
    """Return a row for each stage of each run of these plans, and for each job that makes their data."""
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
    """Return a row for each running job of a dataset; else one on its state."""
    what = f"data {name}"
    logs = {  # of all stages lie side by side, and a plan may be called as a dataset is
        log: stage
        for stage in DATA_STAGES
        for pattern in (f"{name}/**/*.log*", f"{name}.log*")
        for log in sorted((results / "logs" / stage).glob(pattern))
    }
    told = [doing for file in logs if file.name.endswith(SUFFIX) and (doing := read(file)) and alive(doing)]
    if told:
        return [Row(what, doing.what, "running", doing) for doing in told]
    if (results / "data" / name / "manifest.json").exists():
        return [Row(what, "", "done")]
    ended = [Row(what, stage, "failed", error=word) for log, stage in logs.items() if (word := failure(log, stage))]
    return ended[:1] or [Row(what, "", "waiting")]


def _row(results: Path, plan: str, run: str, stage: str) -> Row:
    folder, log = results / "plans" / plan / run, results / "logs" / stage / plan / f"{run}.log"
    doing = read(Path(f"{log}{SUFFIX}"))
    state: State = "done" if (folder / STAGES[stage].outputs[0]).exists() else "waiting"
    error, epoch = None, None
    if doing and alive(doing):
        state = "running"
    elif doing:
        state, error = "silent", f"no word since {time.strftime('%H:%M:%S', time.localtime(doing.time))}"
    elif error := failure(log, stage):
        state = "failed"
    if stage == "train" and state != "waiting":
        with contextlib.suppress(UserError):  # none is done
            epoch = read_epochs(folder / "metrics.jsonl")[-1]
    return Row(f"{plan}.{run}", stage, state, doing, epoch, error)


def read(file: Path) -> Doing | None:
    """Return a stage's status; None if it tells none."""
    with contextlib.suppress(UserError):  # gone in the meantime
        return Doing.read(file)
    return None


def alive(doing: Doing) -> bool:
    """Return whether a process is at work: by its number on this machine, by its status's time on others."""
    if doing.place == place():
        with contextlib.suppress(OSError):
            return b"dlscale" in Path(f"/proc/{doing.pid}/cmdline").read_bytes()
        return False
    return time.time() - doing.time < SILENT


def last_word(log: Path, stage: str) -> str | None:
    """Return the reason at the end of a log why its stage ended without its result; None if there is none."""
    if not log.is_file() or log.name.endswith(SUFFIX):
        return None
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        tail = file.read().decode(errors="replace").splitlines()
    last = next((line for line in reversed(tail) if line.strip()), "")
    start = f"dlscale {stage}: "
    return last.removeprefix(start) if last.startswith(start) else None


def failure(log: Path, stage: str) -> str | None:
    """Return the reason at the end of a log why its stage failed; None also if the stage was interrupted."""
    return None if (word := last_word(log, stage)) == INTERRUPTED else word


# ---- in words ----------------------------------------------------------------------------------------


def lines(rows: Iterable[Row], jobs: Iterable[str] = (), left: cost.Expected | None = None) -> list[str]:
    """Return totals, the rows as aligned text, the waiting stages by plan, and the jobs in the queue.

    `left`: the time until all is done.
    """
    rows = sorted(rows, key=lambda row: get_args(State).index(row.state))
    counts = Counter(row.state for row in rows)
    text = [", ".join(f"{count} {state}" for state, count in counts.items())]
    text[0] += "".join(f"; {each}" for each in left_words(left)) if left else ""
    cells = [("run", "stage", "state", "progress", "left", "loss", "samples/s", "valid loss")]
    waiting = dict[str, Counter[str]]()
    for row in rows:
        doing, epoch = row.doing, row.epoch
        if row.state == "waiting":
            plan, run = row.name.removeprefix("data "), "data" if row.of_data else row.stage
            waiting.setdefault(plan.partition(".")[0], Counter())[run] += 1
        elif row.state != "done" or not row.of_data:
            values = doing.values if doing else {}
            loss = values.get("loss", epoch.train_loss if epoch else None)
            rate = values.get("samples/s", epoch.samples_per_second if epoch else None)
            left_ = duration(doing.left if doing and not doing.part else None)  # further parts may follow
            figures = number(loss, 4), number(rate), number(epoch.valid_loss if epoch else None, 4)
            cells.append((row.name, row.stage, row.state, progress_of(row), left_, *figures))
    text += ["", *aligned(cells)] if cells[1:] else []
    text += [""] * bool(waiting)
    for name, stages in waiting.items():
        text.append(f"waiting: {name} ({', '.join(f'{count} {stage}' for stage, count in stages.items())})")
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
    """Print the progress of `args.plans`, or the targets; with `--watch` until all is done.

    Returns 1 if something failed, and `--watch` saw for a minute that nothing followed.
    """
    plans = check_plans(args.plans, configuration)
    assert configuration
    scheduled = configuration.workflow.site.scheduler is not None
    busy = time.monotonic()
    while True:
        rows = look(configuration, plans)
        queued = slurm.left_running(str(Path.cwd())) or [] if scheduled else []
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
    """Return the time left in words, and how many jobs it leaves out."""
    return [*([f"{left} left"] if left.seconds else []), *filter(None, [left.note])]


def left_of(configuration: Configuration, rows: Iterable[Row]) -> cost.Expected:
    """Return the time until all is done on this machine."""
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


# ---- a call of the workflow while it runs ------------------------------------------------------------


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


def asked() -> bool:
    """Return whether another process shows this call."""
    return TOLD in os.environ


def be_shown() -> None:
    """Send the output of this call to the process that shows it."""
    sys.stdout.flush()
    sys.stderr.flush()
    for stream in (1, 2):
        os.dup2(int(os.environ[PIPE]), stream)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def speak() -> None:
    """Leave the terminal to this call: no other process shows its progress."""
    del os.environ[TOLD]


def tell(jobs: Iterable[Job]) -> None:
    """Write the jobs of this call for the process that shows it."""
    write_json(os.environ[TOLD], [vars(job) for job in jobs])


# ---- progress ----------------------------------------------------------------------------------------


@dataclass
class CallProgress:
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
        """Return the progress of all jobs in words: per cent, time left, number."""
        left, count = left_words(self.left(now)), f"{len(self.done)} of {many(len(self.jobs), 'job')}"
        return [percent(self.share(now)), *left, count]

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


# ---- the call ----------------------------------------------------------------------------------------


def _begin(parent: int) -> None:
    """Have this process end with its parent; block Ctrl-C until `end_at_once`: Python would print a traceback."""
    machine.with_parent(parent, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def shown(command: Sequence[str]) -> int:
    """Run Snakemake and show its progress; return its status. Until it calls `be_shown` its output is its own.

    In a group of its own Snakemake, with its jobs, hears no terminal: Ctrl-C is passed on, and when this process ends
    before, as with its terminal, Snakemake is asked to end.
    """
    from rich.console import Console
    from rich.live import Live

    console, said, last = Console(stderr=True), deque[str](), 0.0
    bar = Live(console=console, auto_refresh=False, transient=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        told, progress = Path(folder, "jobs.json"), CallProgress(time.time())
        reading, writing = os.pipe()
        child = subprocess.Popen(
            command,
            env={**machine.given(), TOLD: str(told), PIPE: str(writing)},
            stdin=subprocess.DEVNULL,
            pass_fds=[writing],
            process_group=0,
            preexec_fn=functools.partial(_begin, os.getpid()),
        )

        def interrupt(*_: object) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGINT)

        for number, handler in (
            (signal.SIGINT, interrupt),
            (signal.SIGTERM, lambda *_: child.terminate()),
        ):
            stack.callback(signal.signal, number, signal.signal(number, handler))
        os.close(writing)

        def read_output() -> None:  # closes it, too: another thread that did would wait for the end of the output
            with os.fdopen(reading, encoding="utf-8", errors="replace") as output:
                said.extend(map(str.rstrip, output))

        reader = threading.Thread(target=read_output, daemon=True)
        reader.start()
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
                console.print(text, style=colour, markup=False, highlight=False, soft_wrap=True)
            if progress.jobs and console.is_terminal:
                if not bar.is_started:
                    stack.enter_context(bar)
                bar.update(drawn(progress, now), refresh=True)
            elif progress.jobs and now - last >= LINE_EVERY and not ended:
                last = now
                console.print(line(progress, now), markup=False, highlight=False, soft_wrap=True)
            if ended:
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(LOOK_EVERY)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode
