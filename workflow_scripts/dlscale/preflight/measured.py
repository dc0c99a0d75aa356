"""Measurements of runs, and the bytes that they send and keep: the model of scaling is fitted to them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlscale.config.run import DDP, DP, FSDP, load_run
from dlscale.core import registry
from dlscale.core.errors import UserError
from dlscale.core.metrics import read_epochs
from dlscale.core.settings import flat, read_yaml
from dlscale.core.telemetry import read_nodes
from dlscale.measure.records import Throughput
from dlscale.measure.scaling.fit import Fit, Point, fit
from dlscale.measure.scaling.machine import for_device, named
from dlscale.measure.scaling.model import Job, Measure, Memory, Mode, Tokens, Workload, buckets
from dlscale.parallel.records import Device, Links
from dlscale.preflight.rates import alone, samples_of
from dlscale.report.results import crowd, crowded


@dataclass(frozen=True)
class Study:
    """What was measured of some runs, and what they train."""

    run: Any  #: The first of them, as the train stage sees it.
    fit: Fit
    device: str
    machine: str  #: Whose links it has.
    batch: float  #: Samples of a group of devices that share a model, as measured on fewest devices.
    epoch: tuple[int | None, int | None]  #: Samples of training and validation.
    links: Links | None  #: What a self-test measured, if the machine is the device's own.
    busy: list[str]  #: Runs that were measured on a busy machine, in words.


def read(folders: Sequence[Path], machine: str | None, storage: float, trained: bool = True) -> Study:
    """Return the model fitted to what was measured of the runs in these folders.

    It is of the machine that is named, or that of the device, with the links that the largest run's self-test found.
    `trained` says whether the epochs of trainings count, too: where and with which settings they ran is not recorded.
    """
    places = [each.resolve() for each in folders]
    for place, path in enumerate(folders):
        if places[place] in places[:place]:
            raise UserError(f"{path}: this run is named twice; name it once")
    results = places[0].parents[min(2, len(places[0].parents) - 1)]
    # What a run sends is that of the first one which averages its gradients.
    folders = sorted(folders, key=lambda each: not _sync(read_yaml(each / "config.yaml")))
    settings = [read_yaml(each / "config.yaml") for each in folders]
    for path, other in zip(folders, settings, strict=True):
        _same(folders[0], path, *(_alike(each, sends=_sync(other)) for each in (settings[0], other)))
    run = load_run(folders[0] / "config.yaml", "train")
    points, device, tested, computed = list[Point](), "", list[Links](), list[tuple[Path, dict[str, Any]]]()
    busy = list[str]()
    for path in folders:
        measured = Throughput.read(path / "throughput.json") if (path / "throughput.json").exists() else None
        if measured is None and not (path / "metrics.jsonl").exists():
            raise UserError(
                f"{path}: neither throughput nor training was measured; add throughput to the plan's measure"
            )
        if said := crowded(crowd(measured, read_nodes(path / "telemetry/train.csv") if trained else [])):
            busy.append(f"{path.parent.name}.{path.name} was measured on a busy machine: {said}")
        points += _points(load_run(path / "config.yaml", "train"), path, measured, results, trained)
        if measured and measured.device.kind:
            computed.append((path, _device(measured.device)))
            _same(computed[0][0], path, computed[0][1], computed[-1][1])
        tested += [measured.links] if measured and measured.links else []
        device = device or (measured.device.name if measured and measured.device.kind == "cuda" else "")
    if all(point.of.mode in ("IO", "VALIDATION") for point in points):
        raise UserError(
            f"{', '.join(map(str, folders))}: no throughput to start from; expected SYNTHETIC or FULL in "
            "throughput.json, or a second epoch in metrics.jsonl: run their stages"
        )
    whose = machine or for_device(device)
    on = named(whose).machine
    links = max(tested, key=lambda each: each.processes, default=None) if machine is None else None
    on = on.measured(links) if links else on
    work = replace(workload(run, results), processes=not device, storage=storage)
    first = min(points, key=lambda point: point.job.devices)
    epoch = samples_of(run, "train", results), samples_of(run, "valid", results)
    return Study(run, fit(on, work, points), device or "CPU", whose, first.job.batch, epoch, links, busy)


def _sync(settings: dict[str, Any]) -> bool:
    """Whether a run averages its gradients: what does not is the twin of a run that does."""
    return bool((settings.get("parallel") or {}).get("sync", True))


def _alike(settings: dict[str, Any], sends: bool) -> dict[str, Any]:
    """Return the settings that runs fitted together have in common, by dotted key.

    A run without averages is the twin of one with: of the two those of computing count.
    """
    kept = flat(alone(settings))
    apart = [key for key in kept if key.startswith("parallel.") and (not sends or key == "parallel.sync")]
    return {key: value for key, value in kept.items() if key not in apart or key == "parallel.kind"}


def _device(device: Device) -> dict[str, Any]:
    """Return what a run computed on; threads of a process count where these compute."""
    threads = {"threads": device.threads} if device.kind == "cpu" else {}
    return {"device": device.name or device.kind, **threads}


def _same(first: Path, path: Path, expected: dict[str, Any], found: dict[str, Any]) -> None:
    for key in sorted([*expected, *found], key=lambda key: not key.endswith(".kind")):
        if found.get(key) != expected.get(key):
            raise UserError(
                f"{path}: {key} differs from that of {first}: {found.get(key)}, not {expected.get(key)}; runs that are "
                "fitted together differ in devices and batch size alone: ask for them one by one"
            )


def _points(run: Any, path: Path, measured: Throughput | None, results: Path, trained: bool) -> Iterator[Point]:
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
    if not (trained and (path / "metrics.jsonl").exists()):
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
    from dlscale.parallel.exchanges import averaged
    from dlscale.parallel.model import named as modules
    from dlscale.train.footprint import predict
    from dlscale.train.precision import compute_dtype, convert

    manifest = Manifest.read(results / "data" / run.dataset / "manifest.json")
    study: Any = registry.study(run.study)
    with torch.device("meta"):
        model = study.model(run, manifest)
    convert(model, run.precision)
    sharing, parallel = study.sharding(model), run.parallel
    pair = {"batch_size": 2 * run.local_batch_size, "geometry": type(run.geometry)(gpus_per_node=2)}
    # A group of neighbours that shares the weights counts as all devices; DataParallel as what replaces it.
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
    if attend := modules(model, sharing.attend):
        linear: Any = next(iter(modules(model, sharing.columns).values()))
        width = compute_dtype(run.precision).itemsize
        tokens = Tokens(sharing.tokens, linear.in_features, len(attend), width, run.activation_checkpointing)
    use = predict(run.model_copy(update=pair | {"parallel": DDP()}), manifest, torch.device("cpu"))
    state = use.parameters + use.gradients + use.optimizer
    kept = ((use.peak or use.total) - state) / run.local_batch_size
    workers = max(1, run.loader.workers) if run.loader.kind == "torch" else 1
    memory, size = Memory(state, kept), sum(gradients.values())
    return Workload(size, shares, tokens, gathered=gathered, workers=workers, memory=memory)
