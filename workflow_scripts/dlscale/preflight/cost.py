"""The cost of runs before they run: how long each takes, on which part of which nodes, and what that is charged.

An estimate stands on a rate in samples/s, and says on which: `measured` with the same compute settings on the same
number of the same devices, or else `published` for the run, or else what the `model` of scaling predicts from
measurements of the same work on other numbers of devices. Where there is none, the time limit that is asked for bounds
the cost of a job; such figures are printed with «≤». Retries are in no figure.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dlscale.config.dataset import DatasetSettings
from dlscale.config.places import check_plans
from dlscale.config.resolve import Configuration, ResolvedRun
from dlscale.config.run import Run
from dlscale.config.site import Job, Qos, Scheduler
from dlscale.config.workflow import Budget
from dlscale.core.errors import UserError
from dlscale.core.stages import STAGES
from dlscale.core.text import duration, many
from dlscale.data import parts
from dlscale.launch import slurm
from dlscale.preflight import rates
from dlscale.preflight.rates import Basis

Hours = Literal["node_hours", "gpu_hours", "charged_hours", "process_hours"]

#: Seconds from a job's start to its first step: interpreter, libraries, data, first batches.
START_UP = 120.0
#: Seconds of compiling a model, as a bound: a time limit has them, an estimate does not.
COMPILING = 600.0
#: Jobs that make a dataset and come one after the other: acquire, preprocess, assemble, describe.
DATA_STEPS = 4
WORDS: dict[Hours, str] = {
    "node_hours": "node-hours",
    "gpu_hours": "GPU-hours",
    "charged_hours": "charged hours",
    "process_hours": "process-hours",
}
#: Notes on estimates that were not measured for the very run.
MARKED: dict[Basis, str] = {
    "published": "at the slowest rate that was published for the run",
    "model": "as the model of scaling predicts, at least, from the same work on other numbers of these devices",
}


@dataclass(frozen=True)
class Work:
    """A job that would run, or several alike."""

    stage: Job  #: `data` stands for acquire, preprocess, assemble and describe.
    plan: str  #: Of data: the dataset.
    run_name: str  #: Of data: in a word what is done.
    run: Run | None = None  #: None for data.
    jobs: int = 1  #: How many of the kind.
    dataset: DatasetSettings | None = None  #: That is made, or that the run has.


@dataclass(frozen=True)
class Estimate:
    """Seconds that one job takes, None where nothing is known but the time `limit`; and what that stands on."""

    seconds: float | None = None
    basis: Basis = "limit"


# ---- how long --------------------------------------------------------------------------------------


def estimate(work: Work, results: Path, scheduler: Scheduler | None = None, start_up: float = START_UP) -> Estimate:
    """Return how long one job of `work` takes: what its stage computes, in training samples, ÷ rate + `start_up` (s) a
    start + what it takes at any rate.

    The table of stages (`dlscale.core.stages`) says what a stage computes, and how many processes start one after the
    other; `dlscale.preflight.rates` how fast. Compilation is left out. Only the `limit` is known of data stages, and
    where the rate or the number of samples is not known.

    Parameters
    ----------
    results
        Folder of results: earlier measurements, and manifests that tell how many samples a dataset has.
    scheduler
        Tells what the nodes compute on, of which a rate has to be; None: this machine.
    """
    run, samples = work.run, _samples(work, results)
    if run is None or samples is None:
        return Estimate()
    found = rates.rate(work.plan, work.run_name, run, results, scheduler)
    return Estimate(samples / found[0] + _aside(work, start_up), found[1]) if found else Estimate()


def minutes(work: Work, results: Path, scheduler: Scheduler) -> int | None:
    """Return the time limit to ask for: 1.5 × the estimate + 10 minutes, at least 15; None if nothing is known.

    Without an estimate it is what the stage may take at most (`dlscale.preflight.rates`), cut to the site's own limit.
    A run that compiles has time for that, too.
    """
    compiling = COMPILING if work.run and work.run.compile.mode != "none" else 0.0
    seconds = estimate(work, results, scheduler).seconds
    if seconds is not None:
        return _limit(seconds + compiling)
    if work.run is None:
        seconds = rates.data_bound(work.plan, work.dataset, results) if work.dataset else None
    elif (samples := _samples(work, results)) is not None:
        manifest = rates.manifest_of(work.run.dataset, work.dataset, results)
        seconds = rates.bound(work.run, samples, manifest, scheduler)
    return None if seconds is None else min(_limit(seconds + compiling + _aside(work)), scheduler.limit(work.stage))


def _limit(seconds: float) -> int:
    return max(math.ceil(1.5 * seconds / 60) + 10, 15)


def _samples(work: Work, results: Path) -> float | None:
    """Return what a job computes, in training samples; None of data, and where it is not known."""
    run, stage = work.run, STAGES.get(work.stage)
    if run is None or stage is None or stage.work is None:
        return None
    return stage.work(run, *(rates.samples_of(run, split, results, work.dataset) for split in ("train", "valid")))


def _aside(work: Work, start_up: float = START_UP) -> float:
    """Return the seconds that a job takes whatever the rate: before its first step, and by the clock."""
    stage = STAGES.get(work.stage)
    by_clock = stage.seconds(work.run) if stage and stage.seconds and work.run else 0.0
    return start_up * (stage.starts(work.run) if stage and stage.starts else 1) + by_clock


# ---- what would run --------------------------------------------------------------------------------


def data_work(configuration: Configuration, name: str, jobs: int) -> Work:
    """Return so many jobs that make a dataset."""
    return Work("data", name, "data", jobs=jobs, dataset=configuration.workflow.datasets[name])


def run_work(configuration: Configuration, plan: str, name: str, stage: Job) -> Work:
    """Return the job of one of a run's stages."""
    run = configuration.plans[plan][name].run
    return Work(stage, plan, name, run, dataset=configuration.workflow.datasets[run.dataset])


def works(configuration: Configuration, plans: Iterable[str] = (), trials: Collection[str] = ()) -> list[Work]:
    """Return the jobs that lack their results: of the plans named, or of the target plans; each run once.

    Only whether a result is there counts, not whether its settings or sources have changed since: that is for the
    workflow to say. `trials` of sweeps that train again have none of their results.
    """
    workflow = configuration.workflow
    results = Path(workflow.results)
    datasets, runs = dict[str, Work](), dict[tuple[str, str, str], Work]()
    for plan in check_plans(list(plans), configuration):
        for run, resolved in expected_runs(configuration.plans[plan], results, trials).items():
            data, owner, name = resolved.run.dataset, resolved.plan, resolved.name
            if not (results / "data" / data / "manifest.json").exists():
                datasets[data] = data_work(
                    configuration, data, data_jobs(workflow.datasets[data], workflow.site.scheduler)
                )
            for stage in configuration.stages(plan, run):
                there = (results / "plans" / owner / name / STAGES[stage].outputs[0]).exists()
                if not there or resolved.trial in trials:
                    runs[owner, name, stage] = run_work(configuration, owner, name, stage)
    return [*datasets.values(), *runs.values()]


def expected_runs(runs: dict[str, ResolvedRun], results: Path, trials: Collection[str] = ()) -> dict[str, ResolvedRun]:
    """Return runs; of each rung of successive halving, whose trials are not chosen yet, so many as it will have."""

    def done(run: ResolvedRun) -> bool:
        return run.trial not in trials and (results / "plans" / run.plan / run.name / "provenance.json").exists()

    left = Counter({run.rung: run.rung_size for run in runs.values()})
    left.subtract(run.rung for run in runs.values() if done(run))
    expected = {}
    for name, run in runs.items():
        if run.trial is None or done(run) or left[run.rung] > 0:
            expected[name] = run
            left[run.rung] -= not done(run)
    return expected


def data_jobs(dataset: DatasetSettings, scheduler: Scheduler | None) -> int:
    """Return how many jobs make a dataset: acquire, preprocess by piece, assemble by part, describe."""
    made = [] if parts.kind_of(dataset).prepared(dataset) else parts.parts(dataset)
    acquired = [raw for raw in parts.raws(dataset).values() if parts.acquired(dataset, raw)]
    if scheduler and scheduler.acquire == "here" and parts.fetched(dataset):
        acquired = []  # no job
    return len(acquired) + len(made) * (dataset.pieces + 1) + 1


# ---- what it costs ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """The cost of one `work`, all its jobs together; a kind of hours that is not known is none of `hours`."""

    work: Work
    estimate: Estimate
    geometry: str  #: In words.
    hours: dict[Hours, float] = field(default_factory=dict)
    partition: str | None = None
    qos: str | None = None
    job_hours: float = 0.0  #: That one of its jobs takes; of a site.


@dataclass(frozen=True)
class Table:
    """The cost of all; `kinds`: the hours that there are. Without nodes and queues it is one kind."""

    rows: tuple[Row, ...]
    kinds: tuple[Hours, ...]

    @property
    def scheduled(self) -> bool:
        """Whether there are nodes and queues to price it by."""
        return "node_hours" in self.kinds

    def total(self, kind: Hours) -> float:
        """Return the sum of what is known, in hours."""
        return math.fsum(row.hours.get(kind, 0.0) for row in self.rows)

    @property
    def bounds(self) -> int:
        """Rows that are upper bounds: time limits."""
        return sum(row.estimate.basis == "limit" and bool(row.hours) for row in self.rows)

    @property
    def unknown(self) -> int:
        """Rows without any figure."""
        return sum(not row.hours for row in self.rows)

    @property
    def longest(self) -> float:
        """Hours until the last result, where nothing waits for nodes: a run, and what makes its data."""
        made = {row.work.plan: DATA_STEPS * row.job_hours for row in self.rows if not row.work.run}
        runs = [row.job_hours + made.get(row.work.run.dataset, 0.0) for row in self.rows if row.work.run]
        return max([*runs, *made.values()], default=0.0)


def price(works: Iterable[Work], scheduler: Scheduler | None, results: Path) -> Table:
    """Return what the works cost on the site's nodes and queues; without a scheduler GPU-hours or process-hours alone.

    Node-hours = hours × nodes × part of a node, which is GPUs ÷ GPUs of a node, or CPUs ÷ CPUs of a node. In the QOS
    for whole nodes a part costs all of the node. Charged hours = node-hours × charge of the QOS. GPU-hours = hours ×
    GPUs that are used. Where the time is unknown it is the time limit that is asked for. A geometry that the site's
    nodes or queues cannot hold is a `UserError`.
    """
    kinds: tuple[Hours, ...] = ("node_hours", "gpu_hours", "charged_hours")
    if scheduler is None:
        kinds = ("gpu_hours",) if rates.device_kind(None) == "cuda" else ("process_hours",)
    return Table(tuple(_price(work, scheduler, results, kinds[0]) for work in works), kinds)


def _price(work: Work, scheduler: Scheduler | None, results: Path, own: Hours) -> Row:
    """Return the row of one work; without a scheduler its hours are of the kind `own`."""
    geometry = work.run.geometry if work.run else None
    time = estimate(work, results, scheduler)
    on_gpus = rates.device_kind(scheduler) == "cuda"
    shown = slurm.shown(work.run.geometry, work.run.processes, on_gpus) if work.run else many(work.jobs, "job")
    if scheduler is None:
        if time.seconds is None or geometry is None:
            return Row(work, time, shown)
        return Row(work, time, shown, {own: time.seconds / 3600 * geometry.world_size})
    limit = minutes(work, results, scheduler)
    asked = slurm.request(scheduler, work.stage, geometry, limit, work.run.processes if work.run else None)
    job_hours = time.seconds / 3600 if time.seconds is not None else asked["runtime"] / 60
    hours = work.jobs * job_hours
    nodes = scheduler.gpu_nodes if geometry else scheduler.cpu_nodes
    qos = asked.get("qos")
    shown += "" if geometry else f" x {asked['cpus_per_task']} CPUs"
    node_hours = hours * asked["nodes"] * slurm.part(scheduler, geometry, qos, asked)
    priced: dict[Hours, float] = {
        "node_hours": node_hours,
        "gpu_hours": hours * (geometry.world_size if geometry and nodes.gpus else 0),
        "charged_hours": node_hours * scheduler.qos.get(qos or "", Qos()).charge,
    }
    return Row(work, time, shown, priced, nodes.partition, qos, job_hours)


def lines(table: Table) -> list[str]:
    """Return the table as aligned text, with a total."""
    if not table.rows:
        return ["Nothing to run: all results are there."]
    rows = [["run", "stage", "geometry", "partition", "QOS", "basis", *(WORDS[kind] for kind in table.kinds)]]
    for row in table.rows:
        bound = "≤" if row.estimate.basis == "limit" else ""
        name = f"{row.work.plan}.{row.work.run_name}" if row.work.run else row.work.plan
        queue = [row.partition or "-", row.qos or "-"]
        hours = [_hours(row.hours.get(kind), bound) for kind in table.kinds]
        rows.append([name, row.work.stage, row.geometry, *queue, row.estimate.basis, *hours])
    bound = "≤" if table.bounds else ""
    known = table.unknown < len(table.rows)
    rows.append(["total", *[""] * 5, *(_hours(table.total(kind) if known else None, bound) for kind in table.kinds)])
    hidden = [] if table.scheduled else ["QOS"]
    hidden += [] if any(row.partition for row in table.rows) else ["partition"]
    columns = [
        [f"{cell:{'<' if number < 6 else '>'}{max(map(len, column))}}" for cell in column]  # hours to the right
        for number, column in enumerate(zip(*rows, strict=True))
        if column[0] not in hidden
    ]
    text = ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
    text += [f"{basis}: {MARKED[basis]}" for basis in MARKED if any(row.estimate.basis == basis for row in table.rows)]
    if table.bounds:
        text.append(f"≤: {table.bounds} of {len(table.rows)} rows at their whole time limit, for want of an estimate")
    if table.unknown:
        text.append(f"?: {table.unknown} of {len(table.rows)} rows without an estimate; they are not in the total")
    return text


def outlook(table: Table, jobs: int, seconds: float | None) -> str:
    """Return what a dry run comes to: how many jobs, what they cost, and how long that takes on this machine (s)."""
    told = [many(jobs, "job")]
    if table.scheduled:
        bound = "≤ " if table.bounds else ""
        node_hours, charged = (f"{bound}{table.total(kind):,.2f}" for kind in ("node_hours", "charged_hours"))
        told.append(f"{node_hours} node-hours (charged {charged})")
        told.append(f"{bound}{duration(3600 * table.longest)} until the end, beside the time in the queue")
    elif seconds is not None:
        told.append(f"about {duration(seconds)} until the end")
    return "; ".join(told)


def _hours(value: float | None, bound: str) -> str:
    return "?" if value is None else f"{bound if value else ''}{value:,.2f}"


def over(table: Table, budget: Budget) -> str | None:
    """Return the one message when the estimate exceeds a cap, or None.

    Without a scheduler there are no node-hours and no charge, so that only `gpu_hours` can be exceeded; without a GPU
    nothing can.
    """
    caps = budget.model_dump(exclude_none=True)
    exceeded = [(kind, hours) for kind in WORDS if (hours := table.total(kind)) > caps.get(kind, math.inf)]
    if not exceeded:
        return None
    bound = "≤ " if table.bounds else ""
    what = [f"{bound}{hours:,.2f} {WORDS[kind]} where budget.{kind} allows {caps[kind]:,g}" for kind, hours in exceeded]
    keys = [f"budget.{kind} to {math.ceil(hours)}" for kind, hours in exceeded]
    rows = f"{table.bounds} of {len(table.rows)} rows are counted at their time limit (site.scheduler.minutes)"
    return (
        f"budget: what would run is estimated at {' and '.join(what)}{f'; {rows}' if bound else ''}; raise "
        f"{' and '.join(keys)}, drop runs or plans, or shorten them (training.epochs or steps, samples.train, "
        "throughput.trials)"
    )


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Print what the plans in `args.plans`, or the targets, will cost yet; more than the budget is a `UserError`."""
    plans = check_plans(args.plans, configuration)
    assert configuration
    workflow = configuration.workflow
    table = price(works(configuration, plans), workflow.site.scheduler, Path(workflow.results))
    print("\n".join(lines(table)))
    if message := over(table, workflow.budget):
        raise UserError(message)
    return 0
