"""What runs will cost before they run: how long each takes, on which part of which nodes, and what that is charged.

An estimate stands on a rate in samples/s: measured here with the run's own batch size and devices, or else published
for the run. Where there is none, the stage's time limit bounds what a job can cost; such figures are printed with «≤».
Retries are in no figure.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dlscale.config.dataset import DatasetSettings
from dlscale.config.resolve import Configuration, ResolvedRun, study_files
from dlscale.config.run import Geometry, Run
from dlscale.config.site import Job, Qos, Scheduler
from dlscale.config.workflow import Budget
from dlscale.core import registry
from dlscale.core.errors import UserError, unknown
from dlscale.core.files import read_json
from dlscale.core.records import Throughput
from dlscale.core.stages import STAGES
from dlscale.core.text import many
from dlscale.data import parts
from dlscale.launch import slurm
from dlscale.report import published

Basis = Literal["measured", "published", "limit"]
Hours = Literal["node_hours", "gpu_hours", "charged_hours"]

#: Seconds from a job's start to its first step: interpreter, libraries, data, first batches.
START_UP = 120.0
WORDS: dict[Hours, str] = {"node_hours": "node-hours", "gpu_hours": "GPU-hours", "charged_hours": "charged hours"}


@dataclass(frozen=True)
class Work:
    """A job that would run, or several alike."""

    stage: Job  #: `data` stands for acquire, preprocess, assemble and describe.
    plan: str  #: Of data: the dataset.
    run_name: str  #: Of data: in a word what is done.
    run: Run | None = None  #: None for data.
    jobs: int = 1  #: How many of the kind.


@dataclass(frozen=True)
class Estimate:
    """How long one job takes: `seconds`, None where nothing is known but the time `limit`; and what that stands on."""

    seconds: float | None = None
    basis: Basis = "limit"


# ---- how long --------------------------------------------------------------------------------------


def estimate(work: Work, results: Path, scheduler: Scheduler | None = None) -> Estimate:
    """Return how long one job of `work` takes: what its stage computes, in training samples, ÷ rate + 120 s a start.

    The table of stages (`dlscale.core.stages`) says what a stage computes, and how many processes start one after the
    other. Compilation is left out. Only the `limit` is known of data stages, and where the rate or the number of
    samples is not known.

    Parameters
    ----------
    results
        Folder of results: earlier measurements, and manifests that tell how many samples a dataset has.
    scheduler
        Tells whether the nodes have GPUs, without which no published figure holds.
    """
    run, stage = work.run, STAGES.get(work.stage)
    if run is None or stage is None or stage.work is None:
        return Estimate()
    basis: Basis = "measured"
    rate = _measured(work, run, results)
    if rate is None and (scheduler is None or scheduler.gpu_nodes.gpus):
        basis, rate = "published", _published(work, run)
    samples = stage.work(run, samples_of(run, "train", results), samples_of(run, "valid", results))
    starts = stage.starts(run) if stage.starts else 1
    return Estimate() if rate is None or samples is None else Estimate(samples / rate + starts * START_UP, basis)


def minutes(work: Work, results: Path, scheduler: Scheduler) -> int | None:
    """Return the time limit to ask for: 1.5 × the estimate + 10 minutes, at least 15; None if nothing is known."""
    seconds = estimate(work, results, scheduler).seconds
    return None if seconds is None else max(math.ceil(1.5 * seconds / 60) + 10, 15)


def _measured(work: Work, run: Run, results: Path) -> float | None:
    """Return samples/s of all devices together, as measured here; None if they are not, or the file is torn."""
    try:
        measured = Throughput.read(results / "plans" / work.plan / work.run_name / "throughput.json")
    except UserError:
        return None
    same = (measured.batch_size, measured.nranks) == (run.batch_size, run.geometry.world_size)
    return measured.full.mean or None if same and measured.full else None


def _published(work: Work, run: Run) -> float | None:
    """Return the slowest samples/s published for the run, for all its devices: a job shall not end before its work.

    A figure counts for each of its devices, and is of the full size: tables set it beside runs of the demo, which are
    of another size.
    """
    study = study_files()[run.study]
    settings, samples = study.settings, run.samples.model_dump(exclude={"train", "valid"})
    full_size = (
        run.dataset == settings["dataset"]
        and all(getattr(run.model, key) == value for key, value in settings["model"].items())
        and all(samples[key] == value for key, value in settings["samples"].items() if key in samples)
    )
    rates = [figure.speed / figure.gpus for figure in published.speeds_of(study.published, work.plan, work.run_name)]
    return min(rates) * run.geometry.world_size if full_size and rates else None


def samples_of(run: Run, split: Literal["train", "valid"], results: Path) -> int | None:
    """Return the samples of a split in an epoch: those asked for, and at most as many as the files hold."""
    asked: int | None = getattr(run.samples, split, None)
    try:
        files = read_json(results / "data" / run.dataset / "manifest.json")["splits"][split]
    except (UserError, KeyError, TypeError):  # not made yet, or torn
        return asked
    kind = registry.kind(registry.study(run.study).dataset)
    there: int | None = kind.available(run.samples, [int(file["rows"]) for file in files]) if files else None
    return asked if there is None else min(asked or there, there)


# ---- what would run --------------------------------------------------------------------------------


def works(configuration: Configuration, plans: Iterable[str] = ()) -> list[Work]:
    """Return the jobs that lack their results: of the plans named, or of the target plans; each run once.

    Only whether a result is there counts, not whether its settings or sources have changed since: that is for the
    workflow to say. A plan that is not there is a `UserError`.
    """
    workflow = configuration.workflow
    results = Path(workflow.results)
    datasets: dict[str, Work] = {}
    runs: dict[tuple[str, str, str], Work] = {}
    for plan in list(plans) or workflow.targets:
        if plan not in configuration.plans:
            raise UserError(unknown("plan", plan, configuration.plans))
        for run, resolved in _expected(configuration.plans[plan], results).items():
            data, owner, name = resolved.run.dataset, resolved.plan, resolved.name
            if not (results / "data" / data / "manifest.json").exists():
                jobs = data_jobs(workflow.datasets[data], workflow.site.scheduler)
                datasets[data] = Work("data", data, "data", jobs=jobs)
            for stage in configuration.stages(plan, run):
                if not (results / "plans" / owner / name / STAGES[stage].outputs[0]).exists():
                    runs[owner, name, stage] = Work(stage, owner, name, resolved.run)
    return [*datasets.values(), *runs.values()]


def _expected(runs: dict[str, ResolvedRun], results: Path) -> dict[str, ResolvedRun]:
    """Return runs; of each rung of successive halving, whose trials are not chosen yet, so many as it will have."""

    def done(run: ResolvedRun) -> bool:
        return (results / "plans" / run.plan / run.name / "provenance.json").exists()

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
    """What one `work` costs, all its jobs together.

    Hours are None where nothing is known: without a scheduler there is no time limit either, nor nodes to count.
    """

    work: Work
    estimate: Estimate
    geometry: str  #: In words.
    qos: str | None = None
    node_hours: float | None = None
    gpu_hours: float | None = None
    charged_hours: float | None = None


@dataclass(frozen=True)
class Table:
    """What all of it costs; `scheduled`: whether there are nodes and queues to price it by."""

    rows: tuple[Row, ...]
    scheduled: bool

    def total(self, kind: Hours) -> float:
        """Return the sum of what is known, in hours."""
        return math.fsum(getattr(row, kind) or 0.0 for row in self.rows)

    @property
    def bounds(self) -> int:
        """How many rows are upper bounds: time limits."""
        return sum(row.estimate.basis == "limit" and row.gpu_hours is not None for row in self.rows)

    @property
    def unknown(self) -> int:
        """How many rows have no figure at all."""
        return sum(row.gpu_hours is None for row in self.rows)


def price(works: Iterable[Work], scheduler: Scheduler | None, results: Path) -> Table:
    """Return what the works cost on the site's nodes and queues; without a scheduler the GPU-hours alone.

    Node-hours = hours × nodes × part of a node, which is GPUs ÷ GPUs of a node, or CPUs ÷ CPUs of a node. In the QOS
    for whole nodes a part costs all of the node. Charged hours = node-hours × charge of the QOS. GPU-hours = hours ×
    GPUs that are used. Where the time is unknown it is the time limit that is asked for. A geometry that the site's
    nodes or queues cannot hold is a `UserError`.
    """
    return Table(tuple(_price(work, scheduler, results) for work in works), scheduler is not None)


def _price(work: Work, scheduler: Scheduler | None, results: Path) -> Row:
    geometry = work.run.geometry if work.run else None
    time = estimate(work, results, scheduler)
    shown = slurm.shown(work.run.geometry, work.run.processes) if work.run else many(work.jobs, "job")
    if scheduler is None:
        known = time.seconds / 3600 * geometry.world_size if time.seconds is not None and geometry else None
        return Row(work, time, shown, gpu_hours=known)
    asked = slurm.request(scheduler, work.stage, geometry, processes=work.run.processes if work.run else None)
    hours = work.jobs * (time.seconds / 3600 if time.seconds is not None else asked["runtime"] / 60)
    nodes = scheduler.gpu_nodes if geometry else scheduler.cpu_nodes
    qos = asked.get("qos")
    shown += "" if geometry else f" x {asked['cpus_per_task']} CPUs"
    node_hours = hours * asked["nodes"] * _part(scheduler, geometry, qos, asked)
    gpus = geometry.world_size if geometry and nodes.gpus else 0
    charge = scheduler.qos.get(qos or "", Qos()).charge
    return Row(work, time, shown, qos, node_hours, hours * gpus, node_hours * charge)


def _part(scheduler: Scheduler, geometry: Geometry | None, qos: str | None, asked: slurm.Request) -> float:
    """Return the part of each node that is paid for."""
    nodes = scheduler.gpu_nodes if geometry else scheduler.cpu_nodes
    if qos is not None and qos == scheduler.whole_qos and qos != scheduler.part_qos:
        return 1.0
    if geometry and nodes.gpus:
        return geometry.gpus_per_node / nodes.gpus
    return min(float(asked["cpus_per_task"] * asked.get("tasks_per_node", 1) / nodes.cpus), 1.0)


def lines(table: Table) -> list[str]:
    """Return the table as aligned text, with a total."""
    if not table.rows:
        return ["Nothing to run: all results are there."]
    kinds: list[Hours] = list(WORDS) if table.scheduled else ["gpu_hours"]
    rows = [["run", "stage", "geometry", "QOS", "basis", *(WORDS[kind] for kind in kinds)]]
    for row in table.rows:
        bound = "≤" if row.estimate.basis == "limit" else ""
        name = f"{row.work.plan}.{row.work.run_name}" if row.work.run else row.work.plan
        hours = [_hours(getattr(row, kind), bound) for kind in kinds]
        rows.append([name, row.work.stage, row.geometry, row.qos or "-", row.estimate.basis, *hours])
    bound, any_known = "≤" if table.bounds else "", table.unknown < len(table.rows)
    rows.append(["total", "", "", "", "", *(_hours(table.total(kind) if any_known else None, bound) for kind in kinds)])
    columns = [
        [f"{cell:{'<' if number < 5 else '>'}{max(map(len, column))}}" for cell in column]  # hours to the right
        for number, column in enumerate(zip(*rows, strict=True))
        if table.scheduled or column[0] != "QOS"
    ]
    text = ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
    if table.bounds:
        text.append(f"≤: {table.bounds} of {len(table.rows)} rows at their whole time limit, for want of an estimate")
    if table.unknown:
        text.append(f"?: {table.unknown} of {len(table.rows)} rows without an estimate; they are not in the total")
    return text


def _hours(value: float | None, bound: str) -> str:
    return "?" if value is None else f"{bound if value else ''}{value:,.2f}"


def over(table: Table, budget: Budget) -> str | None:
    """Return the one message when the estimate exceeds a cap, or None.

    Without a scheduler there are no node-hours and no charge, so that only `gpu_hours` can be exceeded.
    """
    caps = budget.model_dump(exclude_none=True)
    exceeded = [(kind, hours) for kind in WORDS if (hours := table.total(kind)) > caps.get(kind, math.inf)]
    if not exceeded:
        return None
    bound, bounds = "", ""
    if table.bounds:
        bound = "≤ "
        bounds = f"; {table.bounds} of {len(table.rows)} rows are counted at their time limit (site.scheduler.minutes)"
    what = [f"{bound}{hours:,.2f} {WORDS[kind]} where budget.{kind} allows {caps[kind]:,g}" for kind, hours in exceeded]
    keys = [f"budget.{kind} to {math.ceil(hours)}" for kind, hours in exceeded]
    return (
        f"budget: what would run is estimated at {' and '.join(what)}{bounds}; raise {' and '.join(keys)}, drop runs "
        "or plans, or shorten them (training.epochs or steps, samples.train, throughput.trials)"
    )


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Print what the plans in `args.plans`, or the targets, would cost; more than the budget is a `UserError`."""
    if configuration is None:
        raise UserError("config.yaml: no such file here; name one with --configfile")
    workflow = configuration.workflow
    table = price(works(configuration, args.plans), workflow.site.scheduler, Path(workflow.results))
    print("\n".join(lines(table)))
    if message := over(table, workflow.budget):
        raise UserError(message)
    return 0
