"""Samples/s of a run before it runs, what that stands on, and the size of its dataset.

A rate counts only if it is of the same work on the same device (docs/sites.md); without one, `bound` says how long the
run may take.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dlscale.config.compute import compute_digest, compute_settings
from dlscale.config.dataset import DatasetSettings
from dlscale.config.resolve import study_files
from dlscale.config.run import Run
from dlscale.config.site import Scheduler
from dlscale.core import registry
from dlscale.core.errors import UserError
from dlscale.core.machine import gpus
from dlscale.core.settings import read_yaml
from dlscale.data import parts
from dlscale.data.manifest import FieldInfo, File, Manifest
from dlscale.measure.records import Throughput

if TYPE_CHECKING:
    from dlscale.measure.scaling.fit import Fit

Basis = Literal["measured", "published", "model", "limit"]

#: FLOP/s that a device is trusted to do where nothing was measured: a twentieth of an A100's peak in fp32
#: (19.5 TFLOP/s, NVIDIA's data sheet); of a process on some cores a tenth of what one core of today does in fp32.
TRUSTED = {"cuda": 1e12, "cpu": 1e10}
#: Seconds that a step takes beside its products, and that a process takes to load a sample. Judgements: thousands of
#: launches and a collective take some 0.01 s; one core decodes about a hundred photographs a second.
STEP_SECONDS, LOADING_SECONDS = 0.25, 0.01
#: Bytes/s at which a data stage is trusted to simulate and preprocess: less than a tenth of what the simulators of the
#: demo's datasets made on a core of a shared AMD EPYC, 4 to 32 MB/s.
DATA_RATE = 0.3e6
#: Doublings of devices beyond what was measured, up to which the model of scaling is believed.
DOUBLINGS = 3.0


def device_kind(scheduler: Scheduler | None) -> Literal["cuda", "cpu"]:
    """Return what runs compute on: on the site's nodes or, without a scheduler, here."""
    return "cuda" if (gpus() if scheduler is None else scheduler.gpu_nodes.gpus) else "cpu"


# ---- measurements ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Throughput of a run, with the settings beside it."""

    folder: Path
    settings: dict[str, Any]
    record: Throughput

    @property
    def current(self) -> bool:
        """Whether it was measured with these settings."""
        return self.record.compute == compute_digest(self.settings)


def read_measured(folder: Path) -> Measured | None:
    """Read the throughput of a run; None where none was measured."""
    files = folder / "config.yaml", folder / "throughput.json"
    return _read(folder, *(file.stat().st_mtime_ns for file in files)) if all(map(Path.exists, files)) else None


@functools.cache
def _read(folder: Path, *times: int) -> Measured:
    return Measured(folder, read_yaml(folder / "config.yaml"), Throughput.read(folder / "throughput.json"))


def alone(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the compute settings that runs fitted together have in common."""
    return {key: each for key, each in compute_settings(settings).items() if key not in ("geometry", "batch_size")}


def _measurements(results: Path, scheduler: Scheduler | None) -> Iterator[tuple[float, Measured]]:
    """Yield samples/s, FULL, that were measured on devices as the site's; files that cannot be read tell no rate."""
    kind, gpu = device_kind(scheduler), scheduler.gpu_nodes.gpu_name.lower() if scheduler else ""
    for path in sorted(results.glob("plans/*/*/throughput.json")):
        with contextlib.suppress(UserError):
            found = read_measured(path.parent)
            record = found.record if found else Throughput()
            here = record.device.kind == kind and gpu in record.device.name.lower()
            if found and here and record.full and record.full.mean:
                yield record.full.mean, found


# ---- rates -----------------------------------------------------------------------------------------


def rate(plan: str, name: str, run: Run, results: Path, scheduler: Scheduler | None) -> tuple[float, Basis] | None:
    """Return samples/s of all devices of the run `plan`.`name` together, and its basis; None if unknown."""
    if found := _measured(plan, name, run, results, scheduler):
        return found, "measured"
    if device_kind(scheduler) == "cuda" and (found := _published(plan, name, run)):
        return found, "published"
    found = _modelled(run, results, scheduler)
    return (found, "model") if found else None


def _measured(plan: str, name: str, run: Run, results: Path, scheduler: Scheduler | None) -> float | None:
    """Return the run's own rate with its compute settings or else the slowest of other runs."""
    digest = compute_digest(run.model_dump(mode="json"))
    alike = {each.folder: rate for rate, each in _measurements(results, scheduler) if each.record.compute == digest}
    return alike.get(results / "plans" / plan / name) or min(alike.values(), default=None)


def _published(plan: str, name: str, run: Run) -> float | None:
    """Return the slowest samples/s published for the run at full size, for all its devices."""
    study = study_files()[run.study]
    settings, samples = study.settings, run.samples.model_dump(exclude={"train", "valid"})
    full_size = (
        run.dataset == settings["dataset"]
        and all(getattr(run.model, key) == value for key, value in settings["model"].items())
        and all(samples[key] == value for key, value in settings["samples"].items() if key in samples)
    )
    rates = [figure.speed / figure.gpus for figure in study.published if figure.speed_of(f"{plan}.{name}")]
    return min(rates) * run.geometry.world_size if full_size and rates else None


def _modelled(run: Run, results: Path, scheduler: Scheduler | None) -> float | None:
    """Return the lower end of a prediction from runs alike but in devices and batch size; None if that is too far."""
    wanted = alone(run.model_dump(mode="json"))
    alike = [each for _, each in _measurements(results, scheduler) if each.current and alone(each.settings) == wanted]
    times = tuple((each.folder, (each.folder / "throughput.json").stat().st_mtime_ns) for each in alike)
    if not times or (fit := _fit(times)) is None:
        return None
    from dlscale.measure.scaling.model import Job

    at = run.geometry
    if at.model_size > 1 and fit.work.tokens is None:
        return None
    job = Job(at.world_size, run.local_batch_size, at.tp, at.cp, at.gpus_per_node)
    return fit.rate(job).low if fit.doublings(job) <= DOUBLINGS else None


@functools.cache
def _fit(folders: tuple[tuple[Path, int], ...]) -> Fit | None:
    """Return the model fitted to runs, by folder and time of measurement; None if it cannot be."""
    from dlscale.preflight.predict import read  # seconds, with PyTorch: only where there is something to fit

    try:
        return read([folder for folder, _ in folders], None, math.inf, trained=False).fit
    except UserError:
        return None


# ---- the dataset -----------------------------------------------------------------------------------


def manifest_of(name: str, dataset: DatasetSettings | None, results: Path) -> Manifest | None:
    """Return a dataset's manifest; before it is made what its settings say of it, or None."""
    try:
        return Manifest.read(results / "data" / name / "manifest.json")
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
    """Return the samples of a split in an epoch: those asked for, at most those of the files."""
    asked: int | None = getattr(run.samples, split, None)
    manifest = manifest_of(run.dataset, dataset, results)
    files = manifest.splits.get(split) if manifest else None
    if not files:
        return asked
    kind = registry.kind(registry.study(run.study).dataset)
    there: int | None = kind.available(run.samples, [file.rows for file in files])
    return asked if there is None else min(asked or there, there)


# ---- how long it may take at most ------------------------------------------------------------------


def bound(run: Run, samples: float, manifest: Manifest | None, scheduler: Scheduler) -> float | None:
    """Return an upper bound, s, on computing so many training samples; None without a formula of FLOPs or data.

    steps · `STEP_SECONDS` + samples · (`LOADING_SECONDS` + F / `TRUSTED`) / devices, with F the FLOPs of a training
    sample: three forward passes, four with activation checkpointing.
    """
    try:
        forward = registry.study(run.study).flops(run, manifest) if manifest else None
    except (KeyError, ValueError, UserError):  # a dataset that does not fit, which the stage will say
        forward = None
    if forward is None:
        return None
    flops = forward * (4 if run.activation_checkpointing else 3)
    each = LOADING_SECONDS + flops / TRUSTED[device_kind(scheduler)]
    return samples / run.batch_size * STEP_SECONDS * run.accumulation_steps + samples * each / run.geometry.world_size


def data_bound(name: str, dataset: DatasetSettings, results: Path) -> float | None:
    """Return an upper bound, s, on a data stage: all bytes simulated or stored at `DATA_RATE`; None if unknown."""
    if outline := parts.kind_of(dataset).outline(dataset):
        return 4 * outline.values / DATA_RATE
    manifest = manifest_of(name, None, results)
    return sum(file.bytes for files in manifest.splits.values() for file in files) / DATA_RATE if manifest else None
