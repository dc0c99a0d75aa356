"""`dlscale cost`: estimate the time, nodes and charge of jobs before they run.

An estimate is based on a rate in samples/s, measured or published, of the same work on the same kind of device
(docs/sites.md). A stage without training samples needs no rate, because the settings define its time. If a rate is
needed but unknown, the job's time limit is an upper bound, marked «≤». Estimates do not include retries.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dlscale.config.compute import compute_digest
from dlscale.config.dataset import DatasetSettings
from dlscale.config.places import check_plans
from dlscale.config.resolve import Configuration, ResolvedRun, load, study_files
from dlscale.config.run import Run
from dlscale.config.site import Job, Scheduler
from dlscale.config.workflow import Budget
from dlscale.core import registry
from dlscale.core.errors import UserError
from dlscale.core.machine import gpus
from dlscale.core.paths import Results
from dlscale.core.progress import job_seconds
from dlscale.core.stages import STAGES, turns_seconds
from dlscale.core.text import aligned, duration, many
from dlscale.data import parts
from dlscale.data.manifest import FieldInfo, File, Manifest
from dlscale.launch import slurm
from dlscale.measure.records import SAMPLE_RATE
from dlscale.results import read_measured

Basis = Literal["measured", "published", "settings", "limit"]

#: Assumed FLOP/s without a measurement, by kind of device. `cuda`: a twentieth of an A100's fp32 peak (19.5 TFLOP/s,
#: NVIDIA's data sheet). `cpu`, per process: a tenth of the fp32 rate of one current core.
TRUSTED = {"cuda": 1e12, "cpu": 1e10}
#: Assumed seconds of a step in addition to its matrix products, and seconds in which a process loads one sample. Both
#: are rough upper bounds: thousands of launches and a collective take about 0.01 s, and one core decodes about a
#: hundred photographs per second.
STEP_SECONDS, LOADING_SECONDS = 0.25, 0.01
#: Assumed bytes/s of a data stage that simulates and preprocesses: less than a tenth of the 4 to 32 MB/s that the
#: simulators of the demo datasets reached on a core of a shared AMD EPYC.
DATA_RATE = 0.3e6
Hours = Literal["node_hours", "gpu_hours", "charged_hours"]

#: Seconds from a job's start to its first step (interpreter, libraries, data, first batches): on a site with a
#: scheduler, and on this machine.
START_UP, START_UP_HERE = 120.0, 5.0
#: Upper bound on the seconds to compile a model. Time limits include this time; estimates do not.
COMPILING = 600.0
#: Longest duration of paired timing on a busy machine, as a multiple of `throughput.beside` (`measure/turns.py`).
BUSY = 3
WORDS: dict[Hours, str] = {
    "node_hours": "node-hours",
    "gpu_hours": "GPU-hours",
    "charged_hours": "charged hours",
}


@dataclass(frozen=True)
class Work:
    """A job that would run, or several identical jobs."""

    stage: Job  #: The stage; `data` for all stages that make a dataset.
    plan: str  #: Name of the plan; for data, name of the dataset.
    run_name: str  #: Name of the run; for data, `data`.
    run: Run | None = None  #: Settings of the run; None for data.
    jobs: int = 1  #: Number of jobs.
    dataset: DatasetSettings | None = None  #: The dataset that is made, or that the run reads.


@dataclass(frozen=True)
class Estimate:
    """Estimated seconds of one job (None if only the time limit is known), and the basis of the estimate."""

    seconds: float | None = None
    basis: Basis = "limit"


def device_kind(scheduler: Scheduler | None) -> Literal["cuda", "cpu"]:
    """Return the device kind of runs, on the site's nodes or, without a scheduler, on this machine."""
    return "cuda" if (gpus() if scheduler is None else scheduler.gpu_nodes.gpus) else "cpu"


# ---- rates -----------------------------------------------------------------------------------------


def _measured(plan: str, name: str, run: Run, results: Path, scheduler: Scheduler | None) -> float | None:
    """Return a rate, samples/s, that was measured with the run's compute settings on the site's kind of device.

    Return the run's own rate, else the slowest rate of the other runs; None without measured rates.
    """
    digest, kind = compute_digest(run.model_dump(mode="json")), device_kind(scheduler)
    gpu, alike = scheduler.gpu_nodes.gpu_name.lower() if scheduler else "", dict[Path, float]()
    for path in results.glob("plans/[!.]*/[!.]*/throughput.json"):
        with contextlib.suppress(UserError):  # skip incomplete records
            found = read_measured(path.parent)
            here = found and found.device.kind == kind and gpu in found.device.name.lower()
            if found and here and found.full and found.unit == SAMPLE_RATE and found.compute == digest:
                alike[path.parent] = found.full.mean
    return alike.get(Path(Results(results).run("", plan, name))) or min(alike.values(), default=None)


def _published(plan: str, name: str, run: Run) -> float | None:
    """Return the slowest rate per GPU published for a shipped run, times the run's devices, samples/s.

    Return None if no rate is published, or if dataset, model or samples differ from the shipped settings.
    """
    study = study_files()[run.study]
    figures = [figure for figure in study.published if figure.speed_of(f"{plan}.{name}")]
    shipped = _shipped(plan).get(name) if figures and plan in study.plans else None
    if shipped is None or _size(run) != _size(shipped.run):
        return None
    # A demo may list a figure that was published for a larger model.
    published = [each.split(".") for figure in figures for each in figure.runs]
    models = [_shipped(plan)[name].run.model.model_dump() for plan, name in published]
    if models and run.model.model_dump() not in models:
        return None
    return min(figure.speed / figure.gpus for figure in figures) * run.geometry.world_size


@functools.cache
def _shipped(plan: str) -> dict[str, ResolvedRun]:
    """Return the runs of a plan with the settings of its study's file."""
    return load({"targets": [plan]}).plans[plan]


def _size(run: Run) -> dict[str, Any]:
    """Return the settings that determine the computing and loading work of a sample."""
    samples = {key for key, info in type(run.samples).model_fields.items() if key not in ("train", "valid")}
    return run.model_dump(include={"dataset": True, "model": True, "samples": samples})


# ---- the dataset -----------------------------------------------------------------------------------


def manifest_of(name: str, dataset: DatasetSettings | None, results: Path) -> Manifest | None:
    """Return a dataset's manifest.

    Before the dataset is made, derive an outline of the manifest from the dataset's settings. Return None if the
    settings do not suffice.
    """
    try:
        return Manifest.read(Results(results).manifest(name))
    except UserError:
        outline = parts.kind_of(dataset).outline(dataset) if dataset else None
    if outline is None or dataset is None:
        return None
    fields = {
        field: FieldInfo(
            channels=list(map(str, range(channels))),
            units=[""] * channels,
            grid=list(grid),
            transforms=[],
            stored="model",
            mean=[],
            std=[],
            channel_axis=0,
            classes=outline.classes.get(field),
        )
        for field, (channels, grid) in outline.fields.items()
    }
    splits = {
        split: [File(path="", rows=count, bytes=0, digest="") for count in rows] for split, rows in outline.rows.items()
    }
    return Manifest(kind=dataset.kind, fields=fields, splits=splits)


def samples_of(
    run: Run, split: Literal["train", "valid"], results: Path, dataset: DatasetSettings | None = None
) -> int | None:
    """Return the number of samples per epoch of a split: the requested number, limited by the files.

    Before the content of the files is known, return the requested number; None without a request.
    """
    asked: int | None = getattr(run.samples, split, None)
    manifest = manifest_of(run.dataset, dataset, results)
    files = manifest.splits.get(split) if manifest else None
    if not files:
        return asked
    kind = registry.kind(registry.study(run.study).dataset)
    there: int | None = kind.available(run.samples, [file.rows for file in files])
    return asked if there is None else min(asked or there, there)


# ---- upper bounds on the time ----------------------------------------------------------------------


def bound(run: Run, samples: float, manifest: Manifest | None, scheduler: Scheduler) -> float | None:
    """Return an upper bound on the seconds to train on `samples`; None without a FLOPs formula or a manifest.

    The bound is micro-batches · `STEP_SECONDS` + samples · (`LOADING_SECONDS` + F / `TRUSTED`) / devices. F, the FLOPs
    of one training sample, is three forward passes, or four forward passes with activation checkpointing.
    """
    try:
        forward = registry.study(run.study).flops(run, manifest) if manifest else None
    except Exception:  # the dataset does not fit the model, or does not exist yet: the stage will report it
        forward = None
    if forward is None:
        return None
    flops = forward * (4 if run.activation_checkpointing else 3)
    each = LOADING_SECONDS + flops / TRUSTED[device_kind(scheduler)]
    return samples / run.batch_size * STEP_SECONDS * run.accumulation_steps + samples * each / run.geometry.world_size


def data_bound(name: str, dataset: DatasetSettings, results: Path) -> float | None:
    """Return an upper bound on the seconds of a data stage: the dataset's bytes divided by `DATA_RATE`.

    Return None if the number of bytes is unknown.
    """
    if outline := parts.kind_of(dataset).outline(dataset):
        return 4 * outline.values / DATA_RATE
    manifest = manifest_of(name, None, results)
    return sum(file.bytes for files in manifest.splits.values() for file in files) / DATA_RATE if manifest else None


# ---- estimates -------------------------------------------------------------------------------------


def estimate(work: Work, results: Path, scheduler: Scheduler | None = None, start_up: float = START_UP) -> Estimate:
    """Estimate the time of one job: samples ÷ rate + `start_up` (s) for each start + the stage's fixed seconds.

    The table of stages defines the number of training samples, the starts and the fixed seconds; a stage without
    samples needs no rate. A measured rate takes precedence over a published rate, which counts only for GPUs.
    Compilation is not included. Data stages have no estimate.

    Parameters
    ----------
    results
        Folder with earlier measurements and manifests.
    scheduler
        Scheduler whose nodes define the device on which a rate must have been measured; None for this machine.
    """
    samples, aside = _demand(work, results, start_up)
    if work.run is None or not samples:
        return Estimate() if samples is None else Estimate(aside, "settings")
    if rate := _measured(work.plan, work.run_name, work.run, results, scheduler):
        return Estimate(samples / rate + aside, "measured")
    rate = _published(work.plan, work.run_name, work.run) if device_kind(scheduler) == "cuda" else None
    return Estimate(samples / rate + aside, "published") if rate else Estimate()


def minutes(work: Work, results: Path, scheduler: Scheduler) -> int | None:
    """Return the time limit of a job in minutes: 1.5 × the estimate + 10, at least 15.

    Without an estimate, an upper bound (`bound`, `data_bound`) replaces the estimate, and the limit is at most the
    site's limit. Without an upper bound, return None. The limit includes compilation, and time for paired timing that
    takes three times as long, as on a busy machine.
    """
    more = COMPILING if work.run and work.run.compile.mode != "none" else 0.0
    more += (BUSY - 1) * turns_seconds(work.run) if work.run and work.stage == "throughput" else 0.0
    seconds = estimate(work, results, scheduler).seconds
    if seconds is not None:
        return _limit(seconds + more)
    samples, aside = _demand(work, results, START_UP)
    if work.run is None:
        seconds = data_bound(work.plan, work.dataset, results) if work.dataset else None
    elif samples is not None:
        manifest = manifest_of(work.run.dataset, work.dataset, results)
        seconds = bound(work.run, samples, manifest, scheduler)
    return None if seconds is None else min(_limit(seconds + more + aside), scheduler.limit(work.stage))


def _limit(seconds: float) -> int:
    return max(math.ceil(1.5 * seconds / 60) + 10, 15)


def _demand(work: Work, results: Path, start_up: float) -> tuple[float | None, float]:
    """Return the number of training samples of a job, and the job's fixed seconds, including its starts.

    The number is None if it is unknown, and for data.
    """
    run, stage = work.run, STAGES.get(work.stage)
    if run is None or stage is None or stage.work is None:
        return None, start_up
    samples = stage.work(run, *(samples_of(run, split, results, work.dataset) for split in ("train", "valid")))
    by_clock = stage.seconds(run) if stage.seconds else 0.0
    return samples, start_up * (stage.starts(run) if stage.starts else 1) + by_clock


@dataclass(frozen=True)
class Expected:
    """Time of jobs on this machine, s."""

    seconds: float = 0.0  #: Expected time; a job whose time is unknown counts only with its fixed seconds.
    untimed: int = 0  #: Number of jobs whose time is unknown.
    busy: float = 0.0  #: Additional seconds of paired timing on a busy machine.

    def __str__(self) -> str:
        least = "at least" if self.untimed else "about"
        most = f" ({duration(self.seconds + self.busy)} on a busy machine)" if self.busy and not self.untimed else ""
        return f"{least} {duration(self.seconds)}{most}"

    @property
    def note(self) -> str:
        """Number of jobs that the time does not include, in words; empty for zero jobs."""
        return f"{many(self.untimed, 'job')} never timed here" if self.untimed else ""


def seconds_here(stage: str, work: Work | None, results: Path, benchmark: Path | None = None) -> Expected:
    """Return the time of a job on this machine, from a measured rate, settings or the file of its last `benchmark`.

    If the time is unknown, return the job's fixed seconds, and count the job as never timed.
    """
    known, busy = Estimate(), 0.0
    if work:
        benchmark = Path(Results(results).benchmark(stage, work.plan, work.run_name))
        known = estimate(work, results, start_up=START_UP_HERE)
        busy = (BUSY - 1) * turns_seconds(work.run) if work.run and stage == "throughput" else 0.0
    seconds = known.seconds if known.basis in ("measured", "settings") else None
    if seconds is None and benchmark:
        seconds, busy = job_seconds(benchmark), 0.0
    if seconds is not None:
        return Expected(seconds, busy=busy)
    return Expected(_demand(work, results, 0.0)[1] if work else 0.0, untimed=1)


def in_all(jobs: Iterable[tuple[Expected, float]]) -> Expected:
    """Return the total time of jobs, from each job's time and the fraction of the machine that the job uses.

    The total is at least the time of the longest job.
    """
    jobs = list(jobs)
    together = sum(job.seconds * share for job, share in jobs)
    return Expected(
        max([together, *(job.seconds for job, _ in jobs)], default=0.0),
        sum(job.untimed for job, _ in jobs),
        sum(job.busy * share for job, share in jobs),
    )


def threads(stage: str, run: Run, on_gpus: bool) -> int | None:
    """Return the number of logical CPUs that a run's job uses; None: all.

    Only a training on CPUs uses fewer logical CPUs, if its run sets `threads` but not `cpus`.
    """
    # All runs with `cpus` use the machine's first CPUs, so two such runs cannot run at the same time.
    alone = stage != "train" or on_gpus or run.cpus
    return None if alone or not run.threads else run.threads * run.processes.gpus_per_node


def share(threads: int | None, cores: int) -> float:
    """Return the fraction of a machine that a job with this number of threads uses; None means all of its `cores`."""
    return min(threads or cores, cores) / cores


# ---- jobs to run -----------------------------------------------------------------------------------


def data_work(configuration: Configuration, name: str, jobs: int) -> Work:
    """Return `jobs` jobs that make a dataset."""
    return Work("data", name, "data", jobs=jobs, dataset=configuration.workflow.datasets[name])


def run_work(configuration: Configuration, plan: str, name: str, stage: Job) -> Work:
    """Return the job for one stage of a run; on a later rung, only the epochs since the previous rung count."""
    runs = configuration.plans[plan]
    resolved, run = runs[name], runs[name].run
    if resolved.rung:
        before = runs[f"{resolved.trial}-rung{resolved.rung - 1}"].run.training.stop_after or 0
        own = {"stop_after": (run.training.stop_after or 0) - before}
        run = run.model_copy(update={"training": run.training.model_copy(update=own)})
    return Work(stage, plan, name, run, dataset=configuration.workflow.datasets[run.dataset])


def works(
    configuration: Configuration, plans: Iterable[str] = (), again: Collection[tuple[str, str | None]] = ()
) -> list[Work]:
    """Return the jobs whose results are missing, for these plans or the targets; each run counts once.

    Changed settings or sources are ignored. `again` has plan and name of each trial that is trained again on all rungs,
    although its results exist.
    """
    workflow = configuration.workflow
    results, paths = Path(workflow.results), Results(workflow.results)
    datasets, runs = dict[str, Work](), dict[tuple[str, str, str], Work]()
    for plan in check_plans(list(plans), configuration):
        for run, resolved in expected_runs(configuration.plans[plan], results).items():
            data, owner, name = resolved.run.dataset, resolved.plan, resolved.name
            if not Path(paths.manifest(data)).exists():
                datasets[data] = data_work(
                    configuration, data, data_jobs(workflow.datasets[data], workflow.site.scheduler)
                )
            for stage in configuration.stages(plan, run):
                there = Path(paths.run(STAGES[stage].outputs[0], owner, name)).exists()
                if not there or (owner, resolved.trial) in again:
                    runs[owner, name, stage] = run_work(configuration, owner, name, stage)
    return [*datasets.values(), *runs.values()]


def expected_runs(runs: dict[str, ResolvedRun], results: Path) -> dict[str, ResolvedRun]:
    """Return the runs of a plan; each rung has only as many trials as it will have in the end.

    With successive halving, the trials of a later rung are unknown in advance, but the number of trials is known.
    """
    trained = {name: Results(results).run("provenance.json", run.plan, run.name) for name, run in runs.items()}
    done = {name for name, file in trained.items() if Path(file).exists()}
    left = Counter({run.rung: run.rung_size for run in runs.values()})
    left.subtract(runs[name].rung for name in done)
    expected = {}
    for name, run in runs.items():
        if run.trial is None or name in done or left[run.rung] > 0:
            expected[name] = run
            left[run.rung] -= name not in done
    return expected


def data_jobs(dataset: DatasetSettings, scheduler: Scheduler | None) -> int:
    """Return the number of jobs that make a dataset: acquire files, preprocess pieces, assemble parts, describe."""
    made = [] if parts.kind_of(dataset).prepared(dataset) else parts.parts(dataset)
    acquired = [raw for raw in parts.raws(dataset).values() if parts.acquired(dataset, raw)]
    if scheduler and scheduler.acquire == "here" and parts.fetched(dataset):
        acquired = []  # fetched on the controller's machine, not in a job
    return len(acquired) + len(made) * (dataset.pieces + 1) + 1


# ---- costs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """Cost of one `Work`, summed over its jobs."""

    work: Work
    basis: Basis
    geometry: str  #: Geometry in words.
    hours: dict[Hours, float]
    queue: str | None  #: Name of the queue; None without queues.
    nodes: str = ""  #: Kind of nodes in words, if the site charges CPU nodes and GPU nodes to different accounts.

    @property
    def plain(self) -> dict[str, Any]:
        return {
            "plan": self.work.plan,
            "run": self.work.run_name if self.work.run else None,
            "stage": self.work.stage,
            "jobs": self.work.jobs,
            "geometry": self.geometry,
            "queue": self.queue,
            "nodes": self.nodes or None,
            "basis": self.basis,
            **dict(self.hours.items()),
        }


def price(works: Iterable[Work], scheduler: Scheduler, results: Path) -> list[Row]:
    """Return the cost of works on the site's nodes and queues.

    Node-hours = hours × nodes × fraction of a node (the greatest of GPUs, CPUs and memory; 1 in queues with
    `whole_nodes`).
    Charged hours = node-hours × charge of the queue; the first `full_charge_minutes` of each job count in full.
    GPU-hours = hours × GPUs: all GPUs of the nodes in queues with `whole_nodes`, in other queues the devices of the run
    (one for a data job); zero on nodes without GPUs.
    Without an estimate, the hours are the time limit. Raise `UserError` for a geometry that does not fit the site.
    """
    rows = []
    for work in works:
        geometry = work.run.geometry if work.run else None
        processes = work.run.processes if work.run else None
        time, limit = estimate(work, results, scheduler), minutes(work, results, scheduler)
        asked = slurm.request(scheduler, work.stage, geometry, limit, processes)
        hours = work.jobs * (asked["runtime"] / 60 if time.seconds is None else time.seconds / 3600)
        name, queue = slurm.choose_queue(scheduler, geometry)
        full = min(queue.full_charge_minutes / 60 * work.jobs / hours, 1.0) if hours else 0.0
        nodes = scheduler.gpu_nodes if geometry else scheduler.cpu_nodes
        gpus = nodes.gpus * asked["nodes"] if queue.whole_nodes else geometry.world_size if geometry else 1
        node_hours = hours * asked["nodes"] * slurm.part(scheduler, geometry, queue, asked)
        priced: dict[Hours, float] = {
            "node_hours": node_hours,
            "gpu_hours": hours * gpus if nodes.gpus else 0.0,
            "charged_hours": node_hours * (full + (1 - full) * queue.charge),
        }
        jobs = f"{many(work.jobs, 'job')} x {asked['cpus_per_task']} CPUs"
        shown = slurm.shown(geometry, processes, device_kind(scheduler) == "cuda") if geometry else jobs
        apart = scheduler.cpu_nodes.account_suffix != scheduler.gpu_nodes.account_suffix
        kind = ("GPU nodes" if geometry else "CPU nodes") if apart else ""
        rows.append(Row(work, time.basis, shown, priced, name or None, kind))
    return rows


def by_account(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return rows by their kind of nodes; all rows together if the site charges all nodes to one account."""
    return {name: [row for row in rows if row.nodes == name] for name in sorted({row.nodes for row in rows} or {""})}


def total(rows: Iterable[Row], kind: Hours) -> float:
    """Return the sum of rows, in hours."""
    return math.fsum(row.hours[kind] for row in rows)


def bound_mark(rows: Iterable[Row]) -> str:
    """Return «≤» if the basis of a row is a time limit, else an empty text."""
    return "≤" if any(row.basis == "limit" for row in rows) else ""


def lines(rows: Sequence[Row]) -> list[str]:
    """Return rows as aligned text, with a total."""
    if not rows:
        return ["All results exist. Repetitions after changes are not estimated; `dlscale run -n` lists them."]
    cells = [["run", "stage", "geometry", "queue", "basis", *WORDS.values()]]
    for row in rows:
        name = f"{row.work.plan}.{row.work.run_name}" if row.work.run else row.work.plan
        hours = [_hours([row], kind) for kind in WORDS]
        cells.append([name, row.work.stage, row.geometry, row.queue or "-", row.basis, *hours])
    for nodes, charged in by_account(rows).items():
        cells.append([f"total {nodes}".strip(), *[""] * 4, *(_hours(charged, kind) for kind in WORDS)])
    note = ["≤: upper bound; without an estimate, the full time limit is counted"] if bound_mark(rows) else []
    return aligned(cells, right=range(5, len(cells[0]))) + note


def outlook(rows: Sequence[Row], jobs: int, here: Expected | None, targets: int = 0) -> str:
    """Return the summary of a dry run: number of jobs, and their cost on a site or their time `here`."""
    what = many(jobs, "job") + f" and {many(targets, 'target')}" * bool(targets)  # Snakemake's total counts both
    if here is not None:
        if here.untimed >= jobs:
            return f"{what}; duration unknown, because no such job has run here"
        return "; ".join(filter(None, [what, f"{here} until the end", here.note]))
    costs = [
        f"{nodes}{': ' * bool(nodes)}{_hours(charged, 'node_hours')} node-hours "
        f"(charged {_hours(charged, 'charged_hours')})"
        for nodes, charged in by_account(rows).items()
    ]
    return "; ".join([what, *costs])


def _hours(rows: Sequence[Row], kind: Hours) -> str:
    value = total(rows, kind)
    return f"{bound_mark(rows) if value else ''}{value:,.2f}"


def budget_message(rows: Sequence[Row], budget: Budget) -> str | None:
    """Return a message if the estimate exceeds a cap of the budget, else None.

    A cap applies to CPU nodes and to GPU nodes separately if the site charges them to different accounts.
    """
    caps = budget.model_dump(exclude_none=True)
    exceeded = [
        f"{_hours(charged, kind)} {WORDS[kind]}{' on ' * bool(nodes)}{nodes}, but budget.{kind} is {caps[kind]:,g}"
        for kind in WORDS
        for nodes, charged in by_account(rows).items()
        if total(charged, kind) > caps.get(kind, math.inf)
    ]
    if not exceeded:
        return None
    limits = (
        " (≤: jobs without an estimate count at their time limit; lower site.scheduler.minutes)"
        if bound_mark(rows)
        else ""
    )
    return (
        f"budget: the jobs need an estimated {' and '.join(exceeded)}{limits}. Raise the budget, drop runs or "
        "plans, or shorten the runs (training.epochs or steps, samples.train, throughput.trials)"
    )


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Print the cost of `args.plans` or the targets; refuse a cost above the budget with a `UserError`."""
    plans = check_plans(args.plans, configuration)
    assert configuration
    workflow = configuration.workflow
    if workflow.site.scheduler is None:
        raise UserError("this site has no scheduler, so nothing is charged. Name a site, such as --profile perlmutter")
    rows = price(works(configuration, plans), workflow.site.scheduler, Path(workflow.results))
    print(json.dumps([row.plain for row in rows], indent=2) if args.json else "\n".join(lines(rows)))
    if message := budget_message(rows, workflow.budget):
        raise UserError(message)
    return 0
