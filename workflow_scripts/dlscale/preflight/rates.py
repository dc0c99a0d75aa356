"""How fast a run will be, in samples/s of all its devices, and what that stands on; and how large its dataset is.

A rate counts for a run only if it is of the same work on the same device: measured with the same compute settings, or
published for the run, or predicted by the model of scaling from measurements of the same work on other numbers of
devices. Where there is none of these, `bound` says how slow a run may be; a time limit stands on that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
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
from dlscale.parallel.records import Device
from dlscale.report import published

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


# ---- the device ------------------------------------------------------------------------------------


def device_kind(scheduler: Scheduler | None) -> Literal["cuda", "cpu"]:
    """Return what runs compute on: on the site's nodes or, without a scheduler, here."""
    return "cuda" if (gpus() if scheduler is None else scheduler.gpu_nodes.gpus) else "cpu"


def on_the_site(device: Device, scheduler: Scheduler | None) -> bool:
    """Whether what was measured on a device was measured on one as the site's: of its kind and, where it says, name."""
    name = scheduler.gpu_nodes.gpu_name if scheduler else ""
    return device.kind == device_kind(scheduler) and name.lower() in device.name.lower()


# ---- rates -----------------------------------------------------------------------------------------


def rate(plan: str, name: str, run: Run, results: Path, scheduler: Scheduler | None) -> tuple[float, Basis] | None:
    """Return samples/s of all devices of the run `plan`.`name` together, and what they stand on; None if unknown."""
    if found := _measured(plan, name, run, results, scheduler):
        return found, "measured"
    if device_kind(scheduler) == "cuda" and (found := _published(plan, name, run)):
        return found, "published"
    found = _modelled(run, results, scheduler)
    return (found, "model") if found else None


@functools.cache
def _record(path: Path, changed: int) -> Throughput | None:
    try:
        return Throughput.read(path)
    except UserError:  # torn
        return None


def _records(results: Path, scheduler: Scheduler | None) -> Iterator[tuple[Path, Throughput]]:
    """Yield what was measured on devices as the site's, with the run's folder."""
    for path in sorted(results.glob("plans/*/*/throughput.json")):
        record = _record(path, path.stat().st_mtime_ns)
        if record and record.full and record.full.mean and on_the_site(record.device, scheduler):
            yield path.parent, record


def _measured(plan: str, name: str, run: Run, results: Path, scheduler: Scheduler | None) -> float | None:
    """Return what was measured with the run's compute settings: of itself or else, the slowest, of other runs."""
    digest = compute_digest(run.model_dump(mode="json"))
    alike = {folder: record for folder, record in _records(results, scheduler) if record.compute == digest}
    own = alike.get(results / "plans" / plan / name)
    return min((record.full.mean for record in ([own] if own else alike.values()) if record.full), default=None)


def _published(plan: str, name: str, run: Run) -> float | None:
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
    rates = [figure.speed / figure.gpus for figure in published.speeds_of(study.published, plan, name)]
    return min(rates) * run.geometry.world_size if full_size and rates else None


def _modelled(run: Run, results: Path, scheduler: Scheduler | None) -> float | None:
    """Return the lower end of what the model of scaling predicts from runs alike but in devices and batch size.

    None where none was measured, where the model does not know the run's form, or is asked for too many devices.
    """
    wanted = alone(run.model_dump(mode="json"))
    folders = []
    for folder, record in _records(results, scheduler):
        path = folder / "config.yaml"
        kept, digest = _settings(path, path.stat().st_mtime_ns) if path.exists() else (None, "")
        # What was measured before the settings changed is of other settings.
        if kept == wanted and record.compute == digest:
            folders.append((folder, (folder / "throughput.json").stat().st_mtime_ns))
    if not folders or (fit := _fit(tuple(folders))) is None:
        return None
    from dlscale.measure.scaling.model import Job

    at = run.geometry
    if at.model_size > 1 and fit.work.tokens is None:
        return None
    job = Job(at.world_size, run.local_batch_size, at.tp, at.cp, at.gpus_per_node)
    return fit.rate(job).low if fit.doublings(job) <= DOUBLINGS else None


def alone(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the compute settings of a run but those in which runs that are fitted together differ."""
    return {key: each for key, each in compute_settings(settings).items() if key not in ("geometry", "batch_size")}


@functools.cache
def _settings(path: Path, changed: int) -> tuple[dict[str, Any] | None, str]:
    """Return the settings of a run that are compared, and the digest of all; None of a file that is torn."""
    try:
        settings = read_yaml(path)
    except UserError:
        return None, ""
    return alone(settings), compute_digest(settings)


@functools.cache
def _fit(folders: tuple[tuple[Path, int], ...]) -> Fit | None:
    """Return the model fitted to runs in these folders, each with the time of its measurement; None if it cannot be."""
    from dlscale.preflight.measured import read  # seconds, with PyTorch: only where there is something to fit

    try:
        return read([folder for folder, _ in folders], None, math.inf, trained=False).fit
    except UserError:
        return None


# ---- the dataset -----------------------------------------------------------------------------------


def manifest_of(name: str, dataset: DatasetSettings | None, results: Path) -> Manifest | None:
    """Return a dataset's manifest or, before it is made, what its settings say of it, without values; None if nothing.

    A manifest that is torn, or of another version, is none.
    """
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
    """Return the samples of a split in an epoch: those asked for, and at most as many as the files hold, or will."""
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
    """Return seconds that computing so many training samples may take on the site, where nothing was measured.

    seconds = steps · s + samples · (l + F / f) / devices, with s and l the seconds of `STEP_SECONDS` and
    `LOADING_SECONDS`, f the FLOP/s that a device is trusted to do, and F the FLOPs of a training sample: three times a
    forward pass by the study's formula, four with activation checkpointing. None where there is no formula, or nothing
    is known of the data.
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
    """Return seconds that a data stage may take: all that is simulated, or was stored, at `DATA_RATE`.

    None where neither settings nor a manifest say how much that is.
    """
    if outline := parts.kind_of(dataset).outline(dataset):
        return 4 * outline.values / DATA_RATE
    manifest = manifest_of(name, None, results)
    return sum(file.bytes for files in manifest.splits.values() for file in files) / DATA_RATE if manifest else None
