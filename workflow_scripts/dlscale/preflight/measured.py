"""What was measured of runs, and what they send and keep: what the model of scaling is fitted to."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlscale.config.parallel import DDP, FSDP
from dlscale.config.run import load_run
from dlscale.core import registry
from dlscale.core.errors import UserError
from dlscale.core.records import Links, Throughput, read_epochs
from dlscale.core.settings import read_yaml
from dlscale.measure.scaling.fit import Fit, Point, fit
from dlscale.measure.scaling.machine import for_device, named
from dlscale.measure.scaling.model import Job, Measure, Memory, Mode, Tokens, Workload, buckets
from dlscale.preflight.cost import samples_of

#: Settings in which runs that are fitted together are alike: all that decides how long a sample takes.
ALIKE = (
    *("study", "dataset", "model", "samples", "loader", "precision", "compile", "cuda_graph", "memory_format"),
    *("attention", "accumulation_steps", "activation_checkpointing", "threads"),
)
#: Bytes of a gradient as it is sent.
SENT = {"none": 4, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Study:
    """What was measured of some runs, and what they train."""

    run: Any  #: The first of them, as the train stage sees it.
    fit: Fit
    device: str
    batch: float  #: Samples of a group of devices that share a model, as measured on fewest devices.
    epoch: tuple[int | None, int | None]  #: Samples of training and validation.
    links: Links | None  #: What a self-test measured, if the machine is the device's own.


def read(folders: Sequence[Path], machine: str | None, storage: float) -> Study:
    """Return the model fitted to what was measured of the runs in these folders.

    It is of the machine that is named, or that of the device, with the links that the largest run's self-test found.
    """
    places = [each.resolve() for each in folders]
    for place, path in enumerate(folders):
        if places[place] in places[:place]:
            raise UserError(f"{path}: this run is named twice; name it once")
    results = places[0].parents[min(2, len(places[0].parents) - 1)]
    settings = [read_yaml(each / "config.yaml") for each in folders]
    for path, other in zip(folders, settings, strict=True):
        for key in ALIKE:
            if other.get(key) != settings[0].get(key):
                raise UserError(
                    f"{path}: {key} differs from that of {folders[0]}; runs that are fitted together differ in devices "
                    "and batch size alone: plan them one by one"
                )
    run = load_run(folders[0] / "config.yaml", "train")
    points, device, tested = list[Point](), "", list[Links]()
    for path in folders:
        measured = Throughput.read(path / "throughput.json") if (path / "throughput.json").exists() else None
        if measured is None and not (path / "metrics.jsonl").exists():
            raise UserError(
                f"{path}: neither throughput nor training was measured; add throughput to the plan's measure"
            )
        points += _points(load_run(path / "config.yaml", "train"), path, measured, results)
        tested += [measured.links] if measured and measured.links else []
        device = device or (measured.device.name if measured and measured.device.kind == "cuda" else "")
    if all(point.of.mode in ("IO", "VALIDATION") for point in points):
        raise UserError(
            f"{', '.join(map(str, folders))}: no throughput to start from; expected SYNTHETIC or FULL in "
            "throughput.json, or a second epoch in metrics.jsonl: run their stages"
        )
    on = named(machine or for_device(device)).machine
    links = max(tested, key=lambda each: each.processes, default=None) if machine is None else None
    on = on.measured(links) if links else on
    work = replace(workload(run, results), processes=not device, storage=storage)
    first = min(points, key=lambda point: point.job.devices)
    epoch = samples_of(run, "train", results), samples_of(run, "valid", results)
    return Study(run, fit(on, work, points), device or "CPU", first.job.batch, epoch, links)


def _points(run: Any, path: Path, measured: Throughput | None, results: Path) -> Iterator[Point]:
    """Yield what was measured of a run: its modes, and its epochs after the first, which warms up."""
    at = run.geometry
    if measured:
        for key, found, expected in (
            ("nranks", measured.nranks, at.world_size),
            ("batch_size", measured.batch_size or run.batch_size, run.batch_size),
        ):
            if found != expected:
                raise UserError(
                    f"{path / 'throughput.json'}: {key}: got {found}, and config.yaml beside it says {expected}: it "
                    "was measured of another run; run the throughput stage again"
                )
    job = Job(at.world_size, run.batch_size * at.model_size / at.world_size, at.tp, at.cp, at.gpus_per_node)
    together = getattr(run.parallel, "sync", True)
    modes: dict[str, Mode] = {"IO": "IO", "SYNTHETIC": "SYNTHETIC", "ALONE": "ALONE", "FULL": "FULL"}
    if not together:
        modes = {"IO": "IO", "SYNTHETIC": "ALONE"}
    for name, mode in modes.items():
        trials = measured.mode(name) if measured else None
        if trials:
            yield Point(job, _positive(trials.mean, f"{path / 'throughput.json'}: {name}.mean"), Measure(mode))
    if not (path / "metrics.jsonl").exists():
        return
    epochs = [epoch for epoch in read_epochs(path / "metrics.jsonl") if epoch.made_with is not None][1:]
    training, validating = (samples_of(run, split, results) for split in ("train", "valid"))
    if epochs and training:
        where = f"{path / 'metrics.jsonl'}: samples_per_second of epoch"
        rates = [_positive(epoch.samples_per_second, f"{where} {epoch.epoch}") for epoch in epochs]
        yield Point(job, statistics.median(rates), Measure("EPOCH", training))
    taken = [epoch.valid_seconds for epoch in epochs if epoch.valid_seconds]
    if taken and validating:
        yield Point(job, validating / statistics.median(taken), Measure("VALIDATION", validating))


def _positive(value: float, where: str) -> float:
    if value <= 0:
        raise UserError(f"{where}: got {value:g}; expected more than 0: delete the file and run its stage again")
    return value


def workload(run: Any, results: Path) -> Workload:
    """Return what a run sends and keeps, from its model, without any of its memory."""
    import torch

    from dlscale.data.manifest import Manifest
    from dlscale.parallel.model import named as modules
    from dlscale.train.memory import predict

    manifest = Manifest.read(results / "data" / run.dataset / "manifest.json")
    study: Any = registry.study(run.study)
    with torch.device("meta"):
        model = study.model(run, manifest)
    sharing, parallel = study.sharding(model), run.parallel
    sharded = isinstance(parallel, FSDP)
    bytes_ = SENT[parallel.reduce_dtype if sharded else getattr(parallel, "compression", "none")]
    tensors = [float(p.numel() * bytes_) for p in reversed(list(model.parameters())) if p.requires_grad]
    if sharded:
        units = reversed(list(modules(model, sharing.units).values()))
        parts = [float(sum(p.numel() for p in unit.parameters()) * bytes_) for unit in units]
        parts = [part for part in (sum(tensors) - sum(parts), *parts) if part > 0]
        shares = tuple(part / sum(parts) for part in parts)
    else:
        given = getattr(parallel, "bucket_mb", None)
        first = getattr(parallel, "first_bucket_mb", None) or given or 1
        shares = buckets(tensors, (given or 25) * 2**20, first * 2**20)
    tokens = None
    if attend := modules(model, sharing.attend):
        linear: Any = next(iter(modules(model, sharing.columns).values()))
        tokens = Tokens(sharing.tokens, linear.in_features, len(attend), 4 if run.precision in ("fp32", "tf32") else 2)
    two = {"batch_size": 2 * run.local_batch_size, "geometry": type(run.geometry)(gpus_per_node=2), "parallel": DDP()}
    use = predict(run.model_copy(update=two), manifest, torch.device("cpu"))
    state = use.parameters + use.gradients + use.optimizer
    kept = ((use.peak or use.total) - state) / run.local_batch_size
    workers = max(1, run.loader.workers) if run.loader.kind == "torch" else 1
    return Workload(sum(tensors), shares, tokens, sharded=sharded, workers=workers, memory=Memory(state, kept))
