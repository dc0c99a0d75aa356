"""`dlscale predict RUN …`: predict a run on other devices, and name the fastest and the cheapest configuration.

The scaling model (`dlscale.extensions.predict.model`) is fitted to the measurements of the runs (docs/planning.md).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dlscale.config.compute import compute_digest, compute_settings
from dlscale.config.places import run_folder
from dlscale.config.resolve import Configuration, study_files
from dlscale.config.run import DDP, DP, FSDP, Geometry, load_run
from dlscale.core import registry
from dlscale.core.errors import UserError
from dlscale.core.metrics import read_epochs
from dlscale.core.paths import Results
from dlscale.core.settings import flat, read_yaml
from dlscale.core.text import aligned, duration, many, number, percent, shorten, size
from dlscale.extensions.predict import analytic
from dlscale.extensions.predict import fit as fitting
from dlscale.extensions.predict.fit import Fit, Point, Prediction, fit
from dlscale.extensions.predict.model import (
    STEPS,
    Job,
    Measure,
    Memory,
    Mode,
    StepTimes,
    Tokens,
    Workload,
    buckets,
    evenly,
    for_device,
    memory,
    named,
    seconds,
    step,
)
from dlscale.extensions.predict.series import series_of
from dlscale.measure.records import SAMPLE_RATE, Throughput
from dlscale.parallel.records import Links
from dlscale.preflight.cost import samples_of
from dlscale.results import read_measured
from dlscale.train.provenance import Provenance

#: Numeric options, and the upper bound of their values.
NUMBERS = "devices", "tp", "cp", "batch_size", "per_node", "storage", "memory", "price", "epochs", "target_samples"
MAX_VALUE = 1e15
#: Settings that may differ between runs which are fitted together.
FREE = "geometry", "batch_size"


# ---- measurements ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasuredRuns:
    """Measurements of runs, and the scaling model fitted to the measurements."""

    run: Any  #: Settings of the first run, for the stage `train`.
    fit: Fit
    device: str  #: Name of the measured devices.
    machine: str  #: Name of the machine, or its YAML file; the machine determines the links.
    batch: float  #: Samples per step of each group of devices that share a model, in the run on the fewest devices.
    epoch: tuple[int | None, int | None]  #: Number of samples in a training epoch, and in a validation.
    links: Links | None  #: Links measured by a self-test; None if they were not measured, or if a machine was named.


def read(folders: Sequence[Path], machine: str | None, storage: float) -> MeasuredRuns:
    """Read the runs in these folders, and fit the scaling model to their measurements.

    Parameters
    ----------
    machine
        Name or YAML file of a machine. If None, the machine is chosen by the measured device, and has the links that
        the self-test with the most processes measured.
    storage
        Samples/s that the storage delivers to all devices.
    """
    folders = list({each.resolve(): each for each in folders}.values())
    above = folders[0].resolve().parents
    results = above[min(2, len(above) - 1)]
    run = load_run(folders[0] / "config.yaml", "train")
    points, records = list[Point](), list[Throughput | Provenance]()
    settings, computed = dict[Path, Any](), dict[Path, Any]()
    for path in folders:
        here = load_run(path / "config.yaml", "train")
        if not getattr(here.parallel, "sync", True):
            raise UserError(f"{path}: parallel.sync is false, so the run does not average gradients. Name another run")
        if (order := here.geometry.order) != Geometry().order:
            raise UserError(f"{path}: geometry.order: got {order}; only {Geometry().order} can be predicted")
        measured, raw = read_measured(path), read_yaml(path / "config.yaml", linked=False)
        if measured is None and not (path / "metrics.jsonl").exists():
            raise UserError(
                f"{path}: no measured throughput and no training. Add `throughput` to the plan's key `measure`, and "
                "run the plan"
            )
        if measured and measured.unit != SAMPLE_RATE:
            raise UserError(
                f"{path}: the batch size is unknown, so the speed is in steps/s. Put {{batch_size}} into "
                "program.command, or measure with --batch-size"
            )
        settings[path] = flat({key: each for key, each in compute_settings(raw).items() if key not in FREE})
        for key in [key for key in settings[path] if key.startswith("program.") and _follows(key)]:
            del settings[path][key]
        trained = path / "provenance.json"
        records.append(measured or (Provenance.read(trained) if trained.exists() else Provenance()))
        device = records[-1].device
        if device.kind:
            threads = {"threads": device.threads} if device.kind == "cpu" else {}
            computed[path] = {"device": device.name or device.kind, **threads}
        for own in filter(None, (settings, computed)):
            _check_alike(own)
        if measured and measured.compute != compute_digest(raw):
            raise UserError(
                f"{path / 'throughput.json'}: measured with other settings than in the config.yaml next to this "
                "file. Run the throughput stage again"
            )
        points += _points(here, path, measured, results)
    if all(point.of.mode in ("IO", "VALIDATION") for point in points):
        raise UserError(
            f"{', '.join(map(str, folders))}: no measured speed of training or computing. Run the throughput stage, or "
            "train for at least two epochs"
        )
    device_name = next((each.device.name for each in records if each.device.kind == "cuda"), "")
    on_device = device_name or "CPU"
    tested = [each.links for each in records if each.links] if machine is None else []
    links = max(tested, key=lambda each: each.processes, default=None)
    whose = machine or for_device(on_device) or ("processes" if links else "")
    if not whose:
        raise UserError(f"--machine: no shipped machine has {on_device}; give a YAML file with its levels of links")
    described = named(whose)
    if machine and described.devices and not described.has(on_device):
        raise UserError(
            f"--machine {machine}: has {', '.join(described.devices)}, but the runs were measured on {on_device}. "
            f"Name a machine with {on_device}, or measure the runs on a device of this machine"
        )
    on = described.machine.measured(links) if links else described.machine
    work = replace(workload(run, results, records[0]), processes=not device_name, storage=storage)
    batch = min(points, key=lambda point: point.job.devices).job.batch
    epoch = samples_of(run, "train", results), samples_of(run, "valid", results)
    return MeasuredRuns(run, fit(on, work, points), on_device, whose, batch, epoch, links)


def unmeasured(model: analytic.Model) -> MeasuredRuns:
    """Return a scaling model without measurements, from FLOPs, shapes and data sheets."""
    kind, device = "fsdp" if model.gathered_bytes else "ddp", model.device.source
    run = SimpleNamespace(study=model.name, parallel=SimpleNamespace(kind=kind), training=SimpleNamespace(epochs=None))
    return MeasuredRuns(run, analytic.fitted(model), device, model.machine, model.batch, (None, None), None)


def _follows(key: str) -> bool:
    """Return whether a program's setting depends on devices or batch size, so it may differ between runs."""
    own = key.removeprefix("program.values.")
    return own == key or own.split(".")[0] in (*FREE, "nodes", "gpus", "gpus_per_node", "local_batch_size")


def _check_alike(settings: dict[Path, dict[str, Any]]) -> None:
    """Refuse the last run if its settings differ from the first run's."""
    first, last = next(iter(settings)), next(reversed(settings))
    expected, found = settings[first], settings[last]
    for key in sorted([*expected, *found], key=lambda key: not key.endswith(".kind")):
        if found.get(key) != expected.get(key):
            raise UserError(
                f"{last}: {key} is {found.get(key)}, but {expected.get(key)} in {first} (None: not set). "
                "Runs that are fitted together may differ only in geometry and batch size. Predict the runs one by one"
            )


def _points(run: Any, path: Path, measured: Throughput | None, results: Path) -> Iterator[Point]:
    """Yield points for a run's measured modes, training epochs and validations.

    The first epoch is skipped as warm-up. If the run was resumed with another geometry or loader, only epochs with the
    last geometry and loader count.
    """
    at = run.geometry
    job = Job(at.world_size, run.batch_size * at.model_size / at.world_size, at.tp, at.cp, at.gpus_per_node)
    modes: list[Mode] = ["IO", "SYNTHETIC", "ALONE", "FULL"]
    for mode in modes:
        if measured and (trials := measured.mode(mode)):
            yield Point(job, trials.mean, Measure(mode))
    if not (path / "metrics.jsonl").exists():
        return
    epochs = read_epochs(path / "metrics.jsonl")
    made = epochs[-1].made_with
    epochs = [epoch for epoch in epochs if made is not None and epoch.made_with == made][1:]
    training, validating = (samples_of(run, split, results) for split in ("train", "valid"))
    rates = [epoch.samples_per_second for epoch in epochs if epoch.samples_per_second is not None]
    if rates and training:
        yield Point(job, statistics.median(rates), Measure("EPOCH", training))
    # A diverged epoch has no validation.
    taken = [epoch.valid_seconds for epoch in epochs if epoch.valid_seconds and math.isfinite(epoch.train_loss)]
    if taken and validating:
        yield Point(job, validating / statistics.median(taken), Measure("VALIDATION", validating))


def workload(run: Any, results: Path, measured: Throughput | Provenance | None = None) -> Workload:
    """Return the workload of a run, computed from the run's model on the meta device.

    The workload of an external program is computed from the gradients' size, which dlscale's hook recorded.
    """
    if run.program:
        outside = measured.outside if isinstance(measured, Throughput) else None
        if not (outside and outside.gradient_bytes):
            raise UserError(
                "the program cannot be predicted: no optimiser step was recorded, so the size of the gradients is "
                "unknown"
            )
        return Workload(float(outside.gradient_bytes), buckets(evenly(float(outside.gradient_bytes))))
    import torch

    from dlscale.data.manifest import Manifest
    from dlscale.extensions.memory.prediction import predict
    from dlscale.extensions.predict.exchanges import averaged
    from dlscale.parallel.model import named as modules
    from dlscale.train.precision import compute_dtype, convert

    manifest = Manifest.read(Results(results).manifest(run.dataset))
    study: Any = registry.study(run.study)
    with torch.device("meta"):
        model = study.model(run, manifest)
    convert(model, run.precision, run.keep_norms_fp32)
    sharing, parallel = study.sharding(model), run.parallel
    pair = {"batch_size": 2 * run.local_batch_size, "geometry": type(run.geometry)(gpus_per_node=2)}
    # Hybrid sharding (HSDP) is predicted as FSDP over all devices, and DataParallel as DistributedDataParallel.
    kind = parallel.model_copy(update={"shard": None}) if isinstance(parallel, FSDP) else parallel
    kind = DDP() if isinstance(kind, DP) else kind
    sent = averaged(run.model_copy(update=pair | {"parallel": kind}), model, sharing)
    gradients = {name: float(each.gradient) for name, each in reversed(sent.items())}
    gathered = None
    if isinstance(parallel, FSDP):
        gathered = (
            float(sum(each.forward for each in sent.values())),
            float(sum(each.backward for each in sent.values())),
        )
        units = [f"{unit}." for unit in reversed(modules(model, sharing.units))]
        parts = [sum(size for name, size in gradients.items() if name.startswith(unit)) for unit in units]
        parts = [part for part in (sum(gradients.values()) - sum(parts), *parts) if part > 0]
        shares = tuple(part / sum(parts) for part in parts)
    else:
        given = getattr(parallel, "bucket_mb", None)
        first = getattr(parallel, "first_bucket_mb", None) or given or 1
        shares = buckets(list(gradients.values()), (given or 25) * 2**20, first * 2**20)
    tokens = None
    columns: list[Any] = [*modules(model, sharing.columns).values()]  # empty for a model without tensor parallelism
    if (attend := modules(model, sharing.attend)) and columns:
        linear = columns[0]
        width = compute_dtype(run.arithmetic).itemsize
        tokens = Tokens(sharing.tokens, linear.in_features, len(attend), width, bool(run.activation_checkpointing))
    use = predict(run.model_copy(update=pair | {"parallel": DDP()}), manifest, torch.device("cpu"))
    state = use.parameters + use.gradients + use.optimizer
    kept = ((use.peak or use.total) - state) / run.local_batch_size
    workers = max(1, run.loader.workers) if run.loader.kind == "torch" else 1
    memory, size = Memory(state, kept), sum(gradients.values())
    return Workload(size, shares, tokens, gathered=gathered, workers=workers, memory=memory)


# ---- predictions -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """Prediction of a job: a row of the printed table."""

    job: Job
    nodes: int
    rate: Prediction  #: Samples/s over all devices.
    efficiency: float  #: Rate, divided by the number of devices and by the rate of one device.
    memory: float | None  #: Bytes per device; None if unknown.
    seconds: float | None  #: Duration of the training, seconds; None if the number of samples or epochs is unknown.
    node_hours: float | None  #: Node-hours of the training; None if `seconds` is None.
    parts: StepTimes
    measured: float | None  #: Measured samples/s of this job; None if it was not measured.


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Print predictions of the runs `args.runs`, or of the model in the file `args.model`, on other devices.

    With `args.validate` print predictions of published figures instead.
    """
    if args.validate:
        print("\n".join(validated()))
        return 0
    if bool(args.runs) == bool(args.model):
        raise UserError(
            "RUN: expected either measured runs (PLAN.RUN, or the folder of a run), or --model FILE, or --validate"
        )
    for flag in NUMBERS:
        given = getattr(args, flag)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not 0 < value <= MAX_VALUE:
                got = shorten(str(value), 20)
                raise UserError(f"--{flag.replace('_', '-')}: got {got}; expected more than 0, at most {MAX_VALUE:.0e}")
    if args.model and (args.machine or args.storage):
        raise UserError("--machine and --storage are for measured runs; the file of --model names its machine")
    if args.model:
        measured = unmeasured(analytic.read(args.model))
    else:
        measured = read([run_folder(name, configuration) for name in args.runs], args.machine, args.storage or math.inf)
    rows, left_out = table(measured, args)
    if not rows:
        raise UserError(f"--devices: all configurations are left out: {'; '.join(left_out)}")
    if args.json:
        print(json.dumps([_json(row) for row in rows], indent=2))
    else:
        band = "90 % band" if measured.fit.points else f"range of {len(analytic.public_ratios())} public runs"
        text = [*head(measured), "", *lines(rows, band), "", *words(measured, rows, args)]
        print("\n".join([*text, *(f"Left out: {each}" for each in left_out)]))
    return 0


def validated() -> list[str]:
    """Return a Markdown table of published figures and their predictions, and its summary."""
    checks = [
        check
        for file in study_files().values()
        for name, series in series_of(file).items()
        for check in fitting.check(name, series, file.published)
    ]
    rows = ["| " + " | ".join(row) + " |" for row in fitting.table(checks)]
    return [rows[0], "|" + "---|" * rows[0].count(" | ") + "---|", *rows[1:], "", *fitting.summary(checks)]


def table(measured: MeasuredRuns, args: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """Return predictions of the requested jobs, and the reasons why other jobs are left out."""
    rows, left_out = list[Row](), list[str]()
    limit = args.memory * 1e9 if args.memory else math.inf
    for devices, tp, cp in itertools.product(args.devices, args.tp, args.cp):
        try:
            row = _row(measured, args, devices, tp, cp)
            if (row.memory or 0) > limit:
                needed = f"{size(row.memory)} per device, but --memory allows {args.memory:g} GB"
                raise UserError(needed + f" (tp {tp}, cp {cp})" * (tp * cp > 1))
            rows.append(row)
        except UserError as error:
            left_out.append(f"{many(devices, 'device')}: {error}")
    return rows, left_out


def _row(measured: MeasuredRuns, args: argparse.Namespace, devices: int, tp: int, cp: int) -> Row:
    fitted, here = measured.fit, args.per_node or measured.fit.machine.per_node
    if devices % (tp * cp):
        raise UserError(f"not a multiple of tp x cp = {tp * cp}")
    if devices > here and devices % here:
        raise UserError(f"not a multiple of the {here} devices per node")
    if (tp > 1 or cp > 1) and fitted.work.tokens is None:
        raise UserError(f"study {measured.run.study} supports neither tp nor cp: devices cannot share its model")
    dp = devices // (tp * cp)
    batch = args.batch_size / dp if args.batch_size else measured.batch
    if batch < 1:
        raise UserError(
            f"--batch-size {args.batch_size}: less than one sample per step for each of the {dp} groups of devices"
        )
    job, one = Job(devices, batch, tp, cp, min(devices, here)), Job(1, measured.batch)
    rate, nodes, ratios = fitted.rate(job), math.ceil(devices / here), analytic.public_ratios()
    rate = rate if fitted.points else replace(rate, low=rate.value * ratios[0], high=rate.value * ratios[-1])
    total = _seconds(measured, args, job, rate.value)
    return Row(
        job=job,
        nodes=nodes,
        rate=rate,
        efficiency=rate.value / devices / fitted.rate(one).value,
        memory=memory(fitted.work, job),
        seconds=total,
        node_hours=None if total is None else nodes * total / 3600,
        parts=step(fitted.machine, fitted.work, fitted.costs, job),
        measured=next((point.rate for point in fitted.points if (point.job, point.of) == (job, STEPS)), None),
    )


def _seconds(measured: MeasuredRuns, args: argparse.Namespace, job: Job, rate: float) -> float | None:
    """Return the duration of the training in seconds; None if the number of samples or epochs is unknown.

    With `target_samples`, the training has this many samples and no validation. Otherwise each epoch ends with a
    validation.
    """
    if args.target_samples:
        return float(args.target_samples / rate)
    training, validating = measured.epoch
    epochs = args.epochs or measured.run.training.epochs
    if not (training and epochs):
        return None
    both, fitted = Measure("BOTH", training, validating or 0), measured.fit
    return epochs * fitted.predict(lambda costs: seconds(fitted.machine, fitted.work, costs, job, both)).value


# ---- output ----------------------------------------------------------------------------------------


def head(measured: MeasuredRuns) -> list[str]:
    """Return lines that describe the measurements behind the predictions."""
    most = max((point.job.devices for point in measured.fit.points), default=0)
    kind = f"{measured.run.parallel.kind} on {measured.device}, links of {measured.machine}"
    fitted = f"fitted to {many(len(measured.fit.points), 'measurement')} on up to {many(most, 'device')}"
    links, (low, *_, high) = measured.links, analytic.public_ratios()
    return [
        f"{measured.run.study}, {kind}: {fitted if most else 'not measured; from FLOPs, shapes and data sheets alone'}",
        *([] if most else [f"Range: {low:.2f} to {high:.2f} times the predicted rate, as for public runs."]),
        *([f"Links, measured by {links.processes} processes: {links.line()}"] if links else []),
        f"Efficiency: rate divided by the number of devices, and by the rate of one device with a batch of "
        f"{measured.batch:g}.",
    ]


def lines(rows: Sequence[Row], band: str = "90 % band") -> list[str]:
    """Return the rows as lines of an aligned table; `band` is the heading of the likely range of samples/s."""
    cells = [
        {
            "devices": f"{row.job.devices:,}",
            "nodes": f"{row.nodes:,}",
            "dp x cp x tp": f"{row.job.dp} x {row.job.cp} x {row.job.tp}",
            "batch": f"{row.job.samples:,.0f}",
            "samples/s": number(row.rate.value),
            band: f"{number(row.rate.low)} to {number(row.rate.high)}",
            "measured": number(row.measured),
            "efficiency": percent(row.efficiency),
            "memory": size(row.memory),
            "time": duration(row.seconds),
            "node-hours": number(row.node_hours),
        }
        for row in rows
    ]
    return aligned([list(cells[0]), *(list(row.values()) for row in cells)], right=range(len(cells[0])))


def words(measured: MeasuredRuns, rows: Sequence[Row], args: argparse.Namespace) -> list[str]:
    """Return lines that name the fastest and the cheapest job, followed by warnings.

    Jobs with more samples per step than the training data are excluded, unless all jobs have more.
    """
    training = None if args.target_samples else measured.epoch[0]
    large = [row for row in rows if training and row.job.samples > training]
    possible = [row for row in rows if row not in large] or rows
    fastest = max(possible, key=lambda row: row.rate.value)
    # If the length of the training is unknown, compare node-seconds per sample.
    cheapest = min(possible, key=lambda row: row.nodes / row.rate.value if row.node_hours is None else row.node_hours)
    text = [f"Fastest: {_shown(fastest, args)}.", f"Cheapest: {_shown(cheapest, args)}."]
    if large:
        counts = ", ".join(f"{devices:,}" for devices in dict.fromkeys(row.job.devices for row in large))
        text.append(
            f"{counts} devices: a step has more samples than the training data, which have {training:,}. Give a "
            "smaller --batch-size, or --target-samples for other data."
        )
    if any(row.job.shared > 1 for row in rows):
        text.append(
            "The memory of devices that share a model is a rough estimate; the report page of such a run has a better "
            "estimate."
        )
    return text


def _shown(row: Row, args: argparse.Namespace) -> str:
    text = many(row.job.devices, "device") + (f", tp {row.job.tp}, cp {row.job.cp}" if row.job.shared > 1 else "")
    text += f", {number(row.rate.value)} samples/s"
    if row.seconds is None or row.node_hours is None:
        return text
    price = f", {row.node_hours * args.price:,.2f} at {args.price:g} per node-hour" if args.price else ""
    return f"{text}, trained in {duration(row.seconds)} for {number(row.node_hours)} node-hours{price}"


def _json(row: Row) -> dict[str, Any]:
    rate = {"low": row.rate.low, "samples_per_second": row.rate.value, "high": row.rate.high}
    return (
        asdict(row.job) | {"dp": row.job.dp} | rate | {k: v for k, v in asdict(row).items() if k not in ("job", "rate")}
    )
