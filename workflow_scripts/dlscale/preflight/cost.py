"""What runs will cost before they run: how long each takes, on which part of which nodes, and what that is charged.

An estimate stands on a rate in samples/s: measured here with the run's own batch size and devices, or else published
for the run. Where there is none, the stage's time limit bounds what a job can cost; such figures are printed with «≤».
Retries are in no figure.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dlscale.config.dataset import DatasetSettings
from dlscale.config.resolve import Configuration, study_files
from dlscale.config.run import Run
from dlscale.config.site import Job, Nodes, Qos, Scheduler
from dlscale.config.workflow import Budget
from dlscale.core import registry
from dlscale.core.errors import UserError, unknown
from dlscale.core.stages import STAGES
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
    """A job that would run, or several alike.

    Attributes
    ----------
    stage
        `data` stands for acquire, preprocess, assemble and describe.
    plan, run_name
        Of a run. Of data: the dataset, and in a word what is done.
    run
        None for data.
    jobs
        How many of the kind.
    """

    stage: Job
    plan: str
    run_name: str
    run: Run | None = None
    jobs: int = 1


@dataclass(frozen=True)
class Estimate:
    """How long one job takes: `seconds`, None where nothing is known but the time `limit`; and what that stands on."""

    seconds: float | None
    basis: Basis


# ---- how long --------------------------------------------------------------------------------------


def estimate(work: Work, results: Path, scheduler: Scheduler | None = None) -> Estimate:
    """Return how long one job of `work` takes: what its stage computes, in training samples, ÷ rate + 120 s.

    The table of stages (`dlscale.core.stages`) says what a stage computes. 120 s start a process. Compilation is left
    out.

    Parameters
    ----------
    results
        Folder of results: earlier measurements, and manifests that tell how many samples a dataset has.
    scheduler
        Tells whether the nodes have GPUs, without which no published figure holds.

    Returns
    -------
    Estimate
        `limit` without seconds for data stages, where no rate is known, and where the samples are not known yet.
    """
    run = work.run
    rate, basis = _rate(work, results, scheduler)
    if run is None or rate is None:
        return Estimate(None, "limit")
    computed = STAGES[work.stage].work
    samples = computed(run, *(_samples(run, split, results) for split in ("train", "valid"))) if computed else None
    return Estimate(samples / rate + START_UP, basis) if samples is not None else Estimate(None, "limit")


def minutes(work: Work, results: Path, scheduler: Scheduler) -> int | None:
    """Return the time limit to ask for: 1.5 × the estimate + 10 minutes, at least 15; None if nothing is known."""
    seconds = estimate(work, results, scheduler).seconds
    return None if seconds is None else max(math.ceil(1.5 * seconds / 60) + 10, 15)


def _rate(work: Work, results: Path, scheduler: Scheduler | None) -> tuple[float | None, Basis]:
    """Return samples/s of all devices together."""
    if work.run is None:
        return None, "limit"
    if (rate := _measured(work, work.run, results)) is not None:
        return rate, "measured"
    if scheduler is not None and not scheduler.gpu_nodes.gpus:
        return None, "limit"
    rate = _published(work, work.run)
    return (None, "limit") if rate is None else (rate, "published")


def _measured(work: Work, run: Run, results: Path) -> float | None:
    found = _json(results / "plans" / work.plan / work.run_name / "throughput.json")
    same = found.get("batch_size") == run.batch_size and found.get("nranks") == run.geometry.world_size
    full = found.get("FULL")
    rate = full.get("mean") if same and isinstance(full, dict) else None
    return float(rate) if isinstance(rate, int | float) and rate > 0 else None


def _published(work: Work, run: Run) -> float | None:
    """Return the slowest figure that was published for the run: a job shall not end before its work does.

    It is one device's; those of a run on several add up. It holds for the full size: runs of the demo, which tables set
    beside the same figures, are other models on other data.
    """
    study = study_files()[run.study]
    settings, samples = study.settings, run.samples.model_dump(exclude={"train", "valid"})
    full_size = (
        run.dataset == settings["dataset"]
        and all(getattr(run.model, key) == value for key, value in settings["model"].items())
        and all(samples[key] == value for key, value in settings["samples"].items() if key in samples)
    )
    rates = [figure.speed for figure in published.speeds_of(study.published, work.plan, work.run_name)]
    return min(rates) * run.geometry.world_size if full_size and rates else None


def _samples(run: Run, split: Literal["train", "valid"], results: Path) -> int | None:
    """Return the samples of a split in an epoch: those asked for, and at most as many as the files hold."""
    asked: int | None = getattr(run.samples, split, None)
    files = _json(results / "data" / run.dataset / "manifest.json").get("splits", {}).get(split)
    kind = registry.kind(registry.study(run.study).dataset)
    there = kind.available(run.samples, [int(file["rows"]) for file in files]) if files else None
    return asked if there is None else min(asked or there, there)


def _json(path: Path) -> dict[str, Any]:
    """Return a JSON object; an empty one where the file is not there, or torn: it only serves a guess."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# ---- what would run --------------------------------------------------------------------------------


def works(configuration: Configuration, plans: Iterable[str] = ()) -> list[Work]:
    """Return the jobs that lack their results: of the plans named, or of the target plans; each run once.

    Only whether a result is there counts, not whether its settings or sources have changed since: that is for the
    workflow to say.

    Raises
    ------
    UserError
        No such plan.
    """
    names = list(plans) or configuration.workflow.targets
    for name in names:
        if name not in configuration.plans:
            raise UserError(unknown("plan", name, configuration.plans))
    results = Path(configuration.workflow.results)
    datasets: dict[str, Work] = {}
    runs: dict[tuple[str, str, str], Work] = {}
    for name in names:
        for resolved in configuration.plans[name].values():
            data = resolved.run.dataset
            if not (results / "data" / data / "manifest.json").exists():
                jobs = data_jobs(configuration.workflow.datasets[data], configuration.workflow.site.scheduler)
                datasets[data] = Work("data", data, "data", jobs=jobs)
            for stage in configuration.workflow.plans[name].measure:
                file = STAGES[stage].outputs[0]
                if not (results / "plans" / resolved.plan / resolved.name / file).exists():
                    key = (resolved.plan, resolved.name, stage)
                    runs[key] = Work(stage, resolved.plan, resolved.name, resolved.run)
    return [*datasets.values(), *runs.values()]


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

    Attributes
    ----------
    geometry, qos
        In words; None without a scheduler or a queue.
    node_hours, gpu_hours, charged_hours
        None where nothing is known: without a scheduler there is no time limit either, nor nodes to count.
    """

    work: Work
    estimate: Estimate
    geometry: str
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
    GPUs that are used. Where the time is unknown it is the time limit that is asked for.

    Raises
    ------
    UserError
        A geometry that the site's nodes or queues cannot hold.
    """
    return Table(tuple(_price(work, scheduler, results) for work in works), scheduler is not None)


def _price(work: Work, scheduler: Scheduler | None, results: Path) -> Row:
    geometry = work.run.geometry if work.run else None
    found = estimate(work, results, scheduler)
    shown = slurm.shown(geometry) if geometry else f"{work.jobs} job{'s' if work.jobs > 1 else ''}"
    if scheduler is None:
        if found.seconds is None or geometry is None:
            return Row(work, found, shown)
        return Row(work, found, shown, gpu_hours=found.seconds / 3600 * geometry.world_size)
    asked = slurm.request(scheduler, work.stage, geometry)
    hours = work.jobs * (found.seconds / 3600 if found.seconds is not None else int(asked["runtime"]) / 60)
    nodes = scheduler.cpu_nodes if geometry is None else scheduler.gpu_nodes
    qos = str(asked["qos"]) if "qos" in asked else None
    if geometry is None:
        shown += f" x {asked['cpus_per_task']} CPUs"
    node_hours = hours * int(asked["nodes"]) * _part(scheduler, nodes, qos, asked)
    gpus = geometry.world_size if geometry and nodes.gpus else 0
    charge = scheduler.qos.get(qos or "", Qos()).charge
    return Row(work, found, shown, qos, node_hours, hours * gpus, node_hours * charge)


def _part(scheduler: Scheduler, nodes: Nodes, qos: str | None, asked: slurm.Request) -> float:
    """Return the part of each node that is paid for."""
    if qos is not None and qos == scheduler.whole_qos and qos != scheduler.part_qos:
        return 1.0
    if "gres" in asked:
        return int(str(asked["gres"]).rpartition(":")[2]) / nodes.gpus
    return min(int(asked["cpus_per_task"]) * int(asked.get("tasks_per_node", 1)) / nodes.cpus, 1.0)


def lines(table: Table) -> list[str]:
    """Return the table as aligned text, with a total."""
    if not table.rows:
        return ["Nothing to run: all results are there."]
    kinds: list[Hours] = ["node_hours", "gpu_hours", "charged_hours"] if table.scheduled else ["gpu_hours"]
    words = ["run", "stage", "geometry", *(["QOS"] if table.scheduled else []), "basis"]
    cells = [[*words, *(WORDS[kind] for kind in kinds)]]
    for row in table.rows:
        bound = "≤" if row.estimate.basis == "limit" else ""
        name = row.work.plan if row.work.run is None else f"{row.work.plan}.{row.work.run_name}"
        what = [name, row.work.stage, row.geometry, *([row.qos or "-"] if table.scheduled else []), row.estimate.basis]
        cells.append([*what, *(_hours(getattr(row, kind), bound) for kind in kinds)])
    bound = "≤" if table.bounds else ""
    sums = {kind: table.total(kind) if table.unknown < len(table.rows) else None for kind in kinds}
    cells.append(["total", *[""] * (len(words) - 1), *(_hours(sums[kind], bound) for kind in kinds)])
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    text = [
        "  ".join(
            cell.ljust(width) if column < len(words) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
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
    exceeded: list[tuple[Hours, float]] = [
        (kind, cap) for kind in WORDS if (cap := getattr(budget, kind)) is not None and table.total(kind) > cap
    ]
    if not exceeded:
        return None
    kinds = [kind for kind, _ in exceeded]
    what = " and ".join(
        f"{'≤ ' if table.bounds else ''}{table.total(kind):,.2f} {WORDS[kind]} where budget.{kind} allows {cap:,g}"
        for kind, cap in exceeded
    )
    keys = " and ".join(f"budget.{kind} to {math.ceil(table.total(kind))}" for kind in kinds)
    bounds = (
        f"; {table.bounds} of {len(table.rows)} rows are counted at their time limit (site.scheduler.minutes)"
        if table.bounds
        else ""
    )
    return (
        f"budget: what would run is estimated at {what}{bounds}; raise {keys}, drop runs or plans, or shorten them "
        "(training.epochs or steps, samples.train, throughput.trials)"
    )


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Print what the plans in `args.plans`, or the targets, would cost; return 0.

    Raises
    ------
    UserError
        No configuration, no such plan, or more than the budget.
    """
    if configuration is None:
        raise UserError("config.yaml: no such file here; name one with --configfile")
    scheduler = configuration.workflow.site.scheduler
    results = Path(configuration.workflow.results)
    table = price(works(configuration, args.plans), scheduler, results)
    print("\n".join(lines(table)))
    if message := over(table, configuration.workflow.budget):
        raise UserError(message)
    return 0
