"""`dlscale status`: how far the runs of plans are, from what their stages leave: results, logs, and what they tell.

It asks no one: neither Snakemake, so of a result it is seen whether the settings beside it are still those of the
configuration, and the rest is for `dlscale why` to say; nor the nodes, of which it sees the files that they write every
ten seconds (`dlscale.core.progress`).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from dlscale.config.compute import decisive_settings
from dlscale.config.places import check_plans
from dlscale.config.resolve import Configuration, ResolvedRun
from dlscale.core.errors import UserError
from dlscale.core.metrics import Epoch, read_epochs
from dlscale.core.progress import LINE_SECONDS, SUFFIX, Doing, place
from dlscale.core.settings import read_yaml
from dlscale.core.stages import STAGES
from dlscale.core.text import NONE, duration, number, percent
from dlscale.launch import slurm
from dlscale.preflight import cost, expected

State = Literal["running", "silent", "failed", "stopped", "done, of other settings", "done", "waiting"]
#: In the order in which they are told.
STATES: tuple[State, ...] = get_args(State)
#: Of what the configuration asks for differently now.
OTHERS: State = "done, of other settings"

#: Seconds without a word after which a stage on another machine is taken to have ended: a word is due every ten.
SILENT = 12 * LINE_SECONDS
#: How the last word of a stage begins that was asked to end, and will go on: saved, or stopped before it had begun.
STOPPED = ("asked to end", "interrupted")
#: Stages that make a dataset. Logs of all stages lie side by side, and a plan may be called as a dataset is.
DATA_STAGES = ("acquire", "preprocess", "assemble", "describe", "preview")
#: Seconds between two looks of `--watch`.
EVERY = 5.0
#: Seconds without a job that runs or is queued after which `--watch` takes what ended without its result to be the end.
IDLE = 60.0


@dataclass(frozen=True)
class Row:
    """A stage of a run, or what makes a dataset."""

    name: str
    stage: str
    state: State
    doing: Doing | None = None  #: Of what runs.
    epoch: Epoch | None = None  #: The last one, of what trains or has.
    error: str | None = None  #: The last word of what failed.

    @property
    def of_data(self) -> bool:
        """Whether it makes a dataset."""
        return self.name.startswith("data ")


def look(configuration: Configuration, plans: Iterable[str]) -> list[Row]:
    """Return a row for each stage of each run of these plans, and for each job that makes their data."""
    results = Path(configuration.workflow.results)
    rows, seen = list[Row](), set[tuple[str, str]]()
    names = [run.run.dataset for plan in plans for run in configuration.plans[plan].values()]
    datasets = {name: configuration.workflow.datasets[name] for name in names}
    changed = {
        name
        for name, dataset in datasets.items()
        if _changed(results / "data" / name, dataset.model_dump(mode="json", exclude={"memory_mb"}))
    }
    for name in datasets:
        rows += _data(results, name, name in changed)
    for plan in plans:
        for run, resolved in cost.expected_runs(configuration.plans[plan], results).items():
            owner = f"{resolved.plan}.{resolved.name}"
            for stage in configuration.stages(plan, run):
                if (owner, stage) not in seen:
                    seen.add((owner, stage))
                    rows.append(_row(results, resolved, stage, resolved.run.dataset in changed))
    return rows


def _changed(folder: Path, now: dict[str, Any], decide: Callable[[dict[str, Any]], object] = dict) -> bool:
    """Whether what is in a folder was made with other settings than `now`, as far as `decide` looks at them."""
    try:
        before = read_yaml(folder / "config.yaml")
    except UserError:  # it says nothing
        return False
    return decide({key: before.get(key) for key in now}) != decide(now)


def _data(results: Path, name: str, changed: bool) -> list[Row]:
    """Return a row for each job that makes a dataset now; else one, of what became of it."""
    what = f"data {name}"
    logs = {
        log: stage
        for stage in DATA_STAGES
        for folder in (results / "logs" / stage,)
        for log in sorted([*folder.glob(f"{name}/**/*.log*"), *folder.glob(f"{name}.log*")])
    }
    words = [doing for file in logs if file.name.endswith(SUFFIX) and (doing := read(file)) and alive(doing)]
    if words:
        return [Row(what, doing.what, "running", doing) for doing in words]
    if (results / "data" / name / "manifest.json").exists():
        return [Row(what, "", OTHERS if changed else "done")]
    ended = [(stage, ended) for log, stage in logs.items() if (ended := _ended(log, stage))]
    return [Row(what, stage, state, error=word) for stage, (state, word) in ended[:1]] or [Row(what, "", "waiting")]


def _row(results: Path, resolved: ResolvedRun, stage: str, changed: bool) -> Row:
    """Return the row of a stage; `changed`: whether the data are of other settings."""
    plan, run = resolved.plan, resolved.name
    folder, log = results / "plans" / plan / run, results / "logs" / stage / plan / f"{run}.log"
    doing = read(Path(f"{log}{SUFFIX}"))
    state: State = "waiting"
    error: str | None = None
    if doing is not None:
        state = "running" if alive(doing) else "silent"
        said = f"no word since {time.strftime('%H:%M:%S', time.localtime(doing.time))}"
        error = said if state == "silent" else None
    elif ended := _ended(log, stage):
        state, error = ended
    elif (folder / STAGES[stage].outputs[0]).exists():
        changed |= _changed(folder, resolved.run.slice(stage), functools.partial(decisive_settings, stage))
        state = OTHERS if changed else "done"
    epoch = None
    if stage == "train" and state != "waiting":
        with contextlib.suppress(UserError):  # none is done
            epoch = read_epochs(folder / "metrics.jsonl")[-1]
    return Row(f"{plan}.{run}", stage, state, doing, epoch, error)


def _ended(log: Path, stage: str) -> tuple[State, str] | None:
    """Return how a stage ended without its result, and its last word; None if it did not."""
    if not log.is_file() or log.name.endswith(SUFFIX) or not (word := last_word(log, stage)):
        return None
    return "stopped" if word.startswith(STOPPED) else "failed", word


def read(file: Path) -> Doing | None:
    """Return what a process says of itself in a file; None if it says nothing."""
    try:
        return Doing.read(file)
    except UserError:  # gone in the meantime
        return None


def alive(doing: Doing) -> bool:
    """Whether a process is at work: here it can be looked for, elsewhere it has to have said something lately."""
    if doing.place == place():
        with contextlib.suppress(OSError):
            return b"dlscale" in Path(f"/proc/{doing.pid}/cmdline").read_bytes()
        return False
    return time.time() - doing.time < SILENT


def last_word(log: Path, stage: str) -> str | None:
    """Return why a stage ended without its result, as its log ends; None if it did not."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        tail = file.read().decode(errors="replace").splitlines()
    last = next((line for line in reversed(tail) if line.strip()), "")
    start = f"dlscale {stage}: "
    return last.removeprefix(start) if last.startswith(start) else None


# ---- in words ----------------------------------------------------------------------------------------


def lines(rows: Iterable[Row], jobs: list[str] | None = None, left: float | None = None) -> list[str]:
    """Return how far all is, the rows as aligned text, those that wait by plan, and the jobs in the queue.

    `left`: seconds until all is done. What runs comes first; of data that are made only the number is told.
    """
    rows = list(rows)
    counts = {state: sum(row.state == state for row in rows) for state in STATES}
    told = [f"{count} {state}" for state, count in counts.items() if count]
    text = [", ".join(told) + (f"; about {duration(left)} left" if left else "")]
    cells = [("run", "stage", "state", "progress", "left", "loss", "samples/s", "valid loss")]
    for row in sorted(rows, key=lambda row: STATES.index(row.state)):
        if row.state == "waiting" or (row.state == "done" and row.of_data):
            continue
        doing, epoch = row.doing, row.epoch
        values = doing.values if doing else {}
        loss = values.get("loss", epoch.train_loss if epoch else None)
        rate = values.get("samples/s", epoch.samples_per_second if epoch else None)
        cells.append(
            (
                *(row.name, row.stage, row.state, progress_of(row), _left(doing)),
                *(number(loss, 4), number(rate), number(epoch.valid_loss if epoch else None, 4)),
            )
        )
    if cells[1:]:
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        text.append("")
        text += [
            "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
        ]
    if waiting := _waiting(rows):
        text += ["", *waiting]
    text += [f"{row.name} {row.stage}: {row.error}" for row in rows if row.error]
    if any(row.state == OTHERS for row in rows):
        text.append("What would be made again, and why: dlscale why")
    if jobs:
        text.append(f"In the queue: {', '.join(jobs)}")
    return text


def progress_of(row: Row) -> str:
    """Return how far a row is in words."""
    doing = row.doing
    if not (doing and doing.unit):
        return f"epoch {row.epoch.epoch}" if row.epoch else NONE
    done = f"{doing.done:,}" + (f" of {doing.total:,}" if doing.total else "") + f" {doing.unit}"
    done += f" ({percent(doing.done / doing.total)})" if doing.total else ""
    return f"{doing.what}: {done}" if doing.part and doing.what != row.stage else done


def _waiting(rows: Iterable[Row]) -> list[str]:
    """Return what waits: a line for each plan, with how many of its stages do, and one for all data."""
    plans, data = dict[str, Counter[str]](), list[str]()
    for row in rows:
        if row.state == "waiting" and row.of_data:
            data.append(row.name.removeprefix("data "))
        elif row.state == "waiting":
            plans.setdefault(row.name.partition(".")[0], Counter())[row.stage] += 1
    text = [f"waiting: data of {', '.join(data)}"] if data else []
    for plan, stages in plans.items():
        text.append(f"waiting: {plan} ({', '.join(f'{count} {stage}' for stage, count in stages.items())})")
    return text


def _left(doing: Doing | None) -> str:
    """Return how long a stage takes yet, as far as one knows: of a part, which others may follow, that is the least."""
    if doing is None or not doing.left:
        return NONE
    return f"≥ {duration(doing.left)}" if doing.part else duration(doing.left)


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Print how far the plans in `args.plans` are, or the targets; with `--watch` until all is done.

    Returns 1 if something ended without its result, and `--watch` saw for a minute that nothing followed.
    """
    plans = check_plans(args.plans, configuration)
    assert configuration
    scheduled = configuration.workflow.site.scheduler is not None
    busy = time.monotonic()
    while True:
        rows = look(configuration, plans)
        queued = slurm.left_running(str(Path.cwd())) if scheduled else []
        if args.json:
            told = {"rows": [_json(row) for row in rows], "queue": queued}
            print(json.dumps(told, indent=2, ensure_ascii=False), flush=True)
        else:
            show(lines(rows, queued, None if scheduled else left_of(configuration, rows)), args.watch)
        if not args.watch or all(row.state == "done" for row in rows):
            return 0
        if queued or any(row.state == "running" for row in rows):
            busy = time.monotonic()
        elif time.monotonic() - busy >= IDLE and any(row.error for row in rows):
            return 1
        time.sleep(EVERY)


def left_of(configuration: Configuration, rows: Iterable[Row]) -> float:
    """Return how long it takes until all is done on this machine, s; 0 where nothing is left to do."""
    results, jobs, cores = Path(configuration.workflow.results), list[tuple[float, float]](), os.cpu_count() or 1
    rows = [row for row in rows if not row.state.startswith("done")]
    for name in dict.fromkeys(row.name.removeprefix("data ") for row in rows if row.of_data):
        number = cost.data_jobs(configuration.workflow.datasets[name], None)
        jobs += [(expected.OTHERS, expected.share(1, cores))] * number
    for row in [row for row in rows if not row.of_data]:
        plan, run = row.name.split(".")
        work = cost.run_work(configuration, plan, run, row.stage)
        said = row.doing.left if row.doing and not row.doing.part else None
        threads = work.run.threads if work.run and row.stage == "train" else None
        jobs.append((said or expected.seconds(row.stage, work, results), expected.share(threads, cores)))
    return expected.in_all(jobs)


def show(text: list[str], watched: bool) -> None:
    """Print lines; on a terminal, where they are looked at again and again, as many as it has."""
    if watched and sys.stdout.isatty():
        height = shutil.get_terminal_size().lines - 1
        more = len(text) - height + 1
        text = [*text[: height - 1], f"… and {more} lines more"] if more > 1 else text
        print("\033[2J\033[H", end="")
    print("\n".join(text), flush=True)


def _json(row: Row) -> dict[str, object]:
    records = {"doing": row.doing, "epoch": row.epoch}
    return {**asdict(row), **{key: value and value.model_dump(mode="json") for key, value in records.items()}}
