"""Parts of the sheet with facts: problem, machine, efficiency, energy, memory, storage, commands, requested hours."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dlscale.core.paths import Results
from dlscale.core.progress import job_seconds
from dlscale.core.settings import flat
from dlscale.core.stages import STAGES
from dlscale.core.text import NONE, count, duration, many, number, percent, shorten, size
from dlscale.extensions.sheet.evidence import Evidence, named, nodes_of
from dlscale.extensions.sheet.parts import Basis, Fact, fact
from dlscale.preflight import cost
from dlscale.preflight.cost import device_kind
from dlscale.report.evidence import bound
from dlscale.report.figures import grams, joules
from dlscale.report.speedup import spread
from dlscale.results import UNKNOWN, reached


def problem(evidence: Evidence) -> Iterator[Fact]:
    """Yield the facts about study, data, model and training."""
    run, plan, manifest = evidence.trained or evidence.shown, evidence.plans[0], evidence.manifest
    yield Fact("Study", plan.record.study_title or plan.record.study, "setting", f"plan {plan.name}: {plan.title}")
    data, splits = str(run.setting("dataset")), manifest.splits if manifest else {}
    rows = [f"{count(sum(file.rows for file in files))} {split}" for split, files in splits.items() if files]
    fields = manifest.fields.items() if manifest else ()
    shapes = [f"{name} {' × '.join(map(str, (len(info.channels), *info.grid)))}" for name, info in fields]
    samples = f"{data}: {', '.join(rows)}" if rows else None
    yield fact("Data", samples, f"dlscale run data_{data}{evidence.options}", note="; ".join(shapes))
    model = {key: value for key, value in flat(run.setting("model", {})).items() if value is not None}
    note = shorten(", ".join(f"{key} {value}" for key, value in model.items()), 100)
    made = evidence.trained.provenance if evidence.trained else None
    yield fact("Parameters", made and made.parameters, evidence.remedy("train"), count, note)
    work = evidence.timed.throughput.work if evidence.timed and evidence.timed.throughput else None
    note = f"forward and backward pass, {work.source}" if work else ""
    yield fact("FLOPs per sample", work and work.flops, evidence.remedy("throughput"), note=note)
    axes = [f"{axis} {n}" for axis in ("tp", "cp") if (n := run.setting(f"geometry.{axis}", 1)) > 1]
    how = " ".join([str(run.setting("parallel.kind", "ddp")).upper(), *axes])
    note = f"{run.setting('precision')}, compile {run.setting('compile.mode')}, loader {run.setting('loader.kind')}"
    yield Fact("Parallelism", how, "setting", note)
    rate, law = number(run.setting("optimizer.lr")), run.setting("schedule.kind", NONE)
    note = f"learning rate {rate}, schedule {law}, {run.setting('training.epochs', NONE)} epochs"
    batch = f"batch {count(run.batch_size)}, optimiser {run.setting('optimizer.kind', NONE)}"
    yield Fact("Training", batch, "setting", note)
    every = run.setting("training.checkpoint_epochs")
    note = "a killed job resumes at its last checkpoint"
    todo = "set training.checkpoint_epochs, and run again"
    yield fact("Checkpoints", every and f"every {many(every, 'epoch')}", todo, note=note, basis="setting")


def machine(evidence: Evidence) -> Iterator[Fact]:
    """Yield the facts about devices, network and software."""
    run, todo = evidence.shown, evidence.remedy("throughput")
    made, where = evidence.trained.provenance if evidence.trained else None, run.environment
    gpu, most = where.gpus[0] if where and where.gpus else None, max(evidence.runs, key=lambda each: each.devices)
    memory = f", {size(gpu.memory_bytes)}" if gpu and gpu.memory_bytes else ""
    what = "GPU" if run.device.kind == "cuda" else "process"
    note = f"measured on up to {many(most.devices, what)} of {many(nodes_of(most), 'node')}"
    yield fact("Device", run.device.name and run.device.name + memory, todo, note=note)
    if scheduler := evidence.configuration.workflow.site.scheduler:
        wanted, here = scheduler.gpu_nodes.gpu_name or device_kind(scheduler), f"{run.device.kind} {run.device.name}"
        same = "the site's" if wanted.lower() in here.lower() and run.device.kind == device_kind(scheduler) else None
        todo_there = f"the runs were measured on {run.device.name}, the site has {wanted}: measure there"
        yield fact("Measured devices", same, todo_there, note=wanted)
    cores = [many(made.cores, "usable CPU")] if made and made.cores else []
    ram = [f"{size(made.memory_bytes)} usable"] if made and made.memory_bytes else []
    yield fact("Node", where and where.processor, todo, note=", ".join([*cores, *ram]))
    links = next((each.links for each in (most.throughput, most.provenance) if each and each.links), None)
    note = f"{links.backend} self-test of {links.processes} processes" if links else ""
    yield fact("Network", links and links.line(), "measure a run on several devices (docs/parallel.md)", note=note)
    versions = {"Python": where.python, **where.versions} if where else {}
    note = f"Linux {where.kernel}; {len(where.packages)} packages recorded" if where else ""
    yield fact("Software", ", ".join(f"{key} {value}" for key, value in versions.items()), todo, note=note)
    image = where.image or {"name": "none"} if where else {}
    yield fact("Container", image.get("name"), todo, note=image.get("digest") or "")
    commit = where.commit() if where else ""
    yield fact("Code", commit[:12] + commit[40:], "run dlscale from a Git checkout", note="commit of dlscale")


def efficiency(evidence: Evidence) -> Iterator[Fact]:
    """Yield the facts about the use of the devices."""
    measured, todo = evidence.timed.throughput if evidence.timed else None, evidence.remedy("throughput")
    peaks = measured.peaks if measured else None
    note = f"of {number(peaks.flops / 1e12)} TFLOP/s ({peaks.dtype}), measured on the device" if peaks else ""
    yield fact("MFU", measured and measured.mfu(), todo, percent, note)
    note = f"of {number(peaks.bytes_per_second / 1e9)} GB/s, measured on the device" if peaks else ""
    yield fact("Memory bandwidth", measured and measured.mbu(), todo, percent, note)
    limit = bound(measured)
    known = limit if limit and limit.what != UNKNOWN else None
    yield fact(
        "Limit of the speed", known and known.what, f"{todo}, on an idle machine", note=known.why if known else ""
    )
    used = evidence.trained.goodput if evidence.trained else None
    note = f"validation {percent(used.validation)}, start and saving {percent(used.rest)}" if used else ""
    yield fact("Time in training steps", used and used.training, evidence.remedy("train"), percent, note)


def energy(evidence: Evidence) -> Iterator[Fact]:
    """Yield the facts about energy; the request's energy is the energy per sample times all samples and trainings."""
    run, trained, wanted = evidence.timed, evidence.trained, evidence.args.trainings
    each = (run.energy_of("FULL") if run else None) or (trained.energy_per_sample if trained else None)
    todo = "measure on a node with power readings (NVML, RAPL, Cray counters)"
    yield fact("Energy per sample", each, todo, joules, "of the GPUs; on nodes without GPUs, of the nodes")
    found = reached(trained) if trained else None
    total = found.joules if found else trained.energy if trained else None
    yield fact("Energy of a training", total, todo, joules, named(trained) if trained else "")
    asked = each * evidence.samples * wanted if each and evidence.samples else None
    note = f"energy per sample × {count(evidence.samples)} samples × {many(wanted, 'training')}"
    yield fact("Energy of the request", asked, todo, joules, note, "predicted")
    factor = evidence.plans[0].record.grams_per_kwh
    mass = grams(asked, factor) if asked and factor is not None else None
    yield fact("CO₂ of the request", mass, "set site.grams_per_kwh, and measure the energy", basis="predicted")


def memory(evidence: Evidence) -> Iterator[Fact]:
    """Yield the facts about the memory of a device."""
    run, measured = evidence.timed, evidence.timed.throughput if evidence.timed else None
    what = "GPU memory" if evidence.shown.device.kind == "cuda" else "process with Python and libraries"
    note = f"{what}, {many(run.devices, 'device')}, batch {count(run.batch_size)}" if run else ""
    todo = evidence.remedy("throughput")
    yield fact("Peak per device", measured and measured.peak_memory_bytes, todo, size, note)
    use = measured.predicted if measured else None
    parts = {"weights": "parameters", "gradients": "gradients", "optimiser": "optimizer", "activations": "activations"}
    note = ", ".join(f"{name} {size(getattr(use, key))}" for name, key in parts.items()) if use else ""
    yield fact("Tensors per device", use and (use.peak or use.total), todo, size, note, "predicted")
    note = f"tensors, {many(evidence.production, 'device')}"
    yield fact("Tensors in production", evidence.predicted and evidence.predicted.memory, todo, size, note, "predicted")


def file_sizes(folder: str | Path) -> list[int]:
    """Return the sizes of all files in a folder and its subfolders, bytes."""
    return [(Path(root) / name).lstat().st_size for root, _, names in os.walk(folder) for name in names]


def storage(evidence: Evidence) -> Iterator[Fact]:
    """Yield the facts about files, and about the rate of reading."""
    run, data = (
        evidence.trained,
        [file for files in evidence.manifest.splits.values() for file in files] if evidence.manifest else [],
    )
    total, wanted = sum(file.bytes for file in data), evidence.args.trainings
    todo = f"dlscale run data_{evidence.shown.setting('dataset')}{evidence.options}"
    yield fact("Data", total or None, todo, size, many(len(data), "file"))
    own = file_sizes(run.folder) if run else []
    yield fact("Results of a training", sum(own) or None, evidence.remedy("train"), size, many(len(own), "file"))
    kept = file_sizes(Results(evidence.results).checkpoints(*run.owner.split("/", 1))) if run else []
    todo = f"{evidence.remedy('train')}, and write the sheet before the checkpoints are deleted"
    yield fact("Checkpoints of a training", sum(kept) or None, todo, size, many(len(kept), "file"))
    need = total + wanted * (sum(own) + sum(kept)) if data and own else None
    note = f"data, and {many(wanted, 'training')} with checkpoints"
    yield fact("Storage of the request", need, evidence.remedy("train"), size, note, "predicted")
    rate, rows = evidence.predicted.rate.value if evidence.predicted else None, sum(file.rows for file in data)
    read = f"{size(rate * total / rows)}/s" if rate and rows else None
    note = f"{number(rate)} samples/s on {many(evidence.production, 'device')} × {size(total / rows if rows else None)}"
    yield fact("Reading in production", read, evidence.remedy("throughput"), note=note, basis="predicted")
    alone = evidence.timed.trials("IO") if evidence.timed else None
    note = f"loader without training, {many(evidence.timed.devices, 'device')}" if evidence.timed else ""
    yield fact("Loading alone", alone and f"{number(alone.mean)} samples/s", evidence.remedy("throughput"), note=note)


def commands(evidence: Evidence) -> list[str]:
    """Return the commands that repeat the measurements, the predictions and the sheet."""
    where, args = evidence.shown.environment, evidence.args
    commit = where.git["commit"][:12] if where and where.git else ""
    runs = [point.run for _, each in evidence.scaled[:1] for point in each.points] or [evidence.shown]
    given = {"production": args.production, "machine": args.machine, "devices": " ".join(map(str, args.devices))}
    given |= {"trainings": args.trainings} if args.trainings != 1 else {}
    own = "".join(f" --{name} {value}" for name, value in given.items() if value)
    machine = f" --machine {args.machine}" if args.machine else ""
    return [
        *([f"git checkout {commit} && make install && source .venv/bin/activate"] if commit else []),
        f"dlscale run {evidence.names}{evidence.options}",
        f"dlscale predict {' '.join(map(named, runs))} --devices {evidence.production}{machine}{evidence.options}",
        f"dlscale report --sheet {evidence.names}{own}{evidence.options}",
    ]


@dataclass(frozen=True)
class Amount:
    """A quantity with its interval, and the origin of the quantity."""

    value: float
    low: float
    high: float
    basis: Basis

    def times(self, factor: float, more: float = 0.0) -> Amount:
        """Return the amount times a positive factor, plus `more`."""
        value, low, high = (end * factor + more for end in (self.value, self.low, self.high))
        return Amount(value, low, high, self.basis)


def request(evidence: Evidence) -> Iterator[Fact]:
    """Yield the steps from the samples of a training to the requested node-hours."""
    run, samples, todo = evidence.trained, evidence.samples, evidence.remedy("train")
    found, wanted = reached(run) if run else None, evidence.args.trainings
    what = "until the target" if found else "all its samples, because no target is set"
    note = f"{named(run)}, {what}" if run else ""
    remedy = "reach the target: train longer, or set another target" if found else todo
    yield fact("1  Samples of a training", samples, remedy, count, note)

    rate, on = _rate(evidence), many(evidence.production, "device")
    note = f"{on}; {number(rate.low)} to {number(rate.high)}" if rate else ""
    note += _disturbed(evidence) if rate and rate.basis == "predicted" else ""
    shown = f"{number(rate.value)} samples/s" if rate else None
    yield fact("2  Rate", shown, evidence.remedy("throughput"), note=note, basis=rate.basis if rate else "open")

    speed, spent = run.training_speed if run else None, found.seconds if found else None
    spent = spent if found else run.training_seconds if run else None
    factor = spent * speed / samples if spent and speed and samples else None
    note = "time of the training × its rate ÷ its samples: first batches, validations"
    yield fact("3  Waits, validations", factor and f"factor {number(factor)}", todo, note=note)

    nodes, time = _nodes(evidence), None
    note = "1 ÷ 2 × 3"
    if run and spent and run.devices == evidence.production and not run.foreign_cpu_fraction:
        time, note = Amount(spent, spent, spent, "measured"), f"{named(run)}; one training, without an interval"
    elif samples and rate and factor:
        value, low, high = (samples / each * factor for each in (rate.value, rate.high, rate.low))
        time = Amount(value, low, high, "predicted")
        note += f"; {duration(time.low)} to {duration(time.high)}"
    basis: Basis = time.basis if time else "open"
    yield fact("4  Time of a training", time and time.value, todo, duration, note, basis)
    hours = time.times(nodes / 3600) if time and nodes else None
    note = f"4 × {many(nodes or 0, 'node')}"
    yield fact("5  Node-hours of a training", hours and hours.value, todo, number, note, basis)
    yield Fact("6  Trainings", count(wanted), "setting", "--trainings; the applicant explains the number")
    rest, why, mark = _remaining(evidence)
    yield fact(
        "7  Measurements to run",
        None if rest is None else f"{mark}{number(rest)} node-hours",
        why,
        note=why,
        basis="predicted",
    )
    total = hours.times(wanted, rest or 0.0) if hours and rest is not None else None
    ends = [number(total.low), number(total.high)] if total else []
    span = f", {' to '.join(ends)}" if len({*ends}) > 1 else ""
    shown = f"{mark}{number(total.value)} node-hours" if total else None
    note = f"5 × 6 + 7{span}; a reserve for failures is the applicant's decision{_disturbed(evidence)}"
    yield fact("Request", shown, "close the open lines above", note=note, basis="predicted")
    yield fact(
        "Spent on the measurements",
        _spent(evidence),
        "keep the folder `benchmarks` of the results",
        note="node-hours of all finished jobs of these runs",
    )


def _disturbed(evidence: Evidence) -> str:
    return "; other programs disturbed the measurements: measure again" * evidence.production_forecast[0].disturbed


def _rate(evidence: Evidence) -> Amount | None:
    """Return the samples/s in production: measured without disturbance on these devices, or else predicted."""
    runs = [run for run in evidence.rated if run.devices == evidence.production and not run.foreign_cpu_fraction]
    trials = next((trials for run in runs if (trials := run.trials("FULL"))), None)
    if trials and (error := spread(trials)) < 1:
        return Amount(trials.mean, trials.mean * (1 - error), trials.mean * (1 + error), "measured")
    row = evidence.predicted
    return Amount(row.rate.value, row.rate.low, row.rate.high, "predicted") if row else None


def _nodes(evidence: Evidence) -> int | None:
    """Return the nodes of a training in production."""
    own = [nodes_of(run) for run in evidence.runs if run.devices == evidence.production]
    return next(iter(own), evidence.predicted.nodes if evidence.predicted else None)


def _remaining(evidence: Evidence) -> tuple[float | None, str, str]:
    """Return the node-hours of jobs without results (None if unknown), their explanation, and «≤» for a bound.

    Hours on CPU nodes of another account are only in the explanation.
    """
    works = cost.works(evidence.configuration, [plan.name for plan in evidence.plans])
    scheduler = evidence.configuration.workflow.site.scheduler
    if not works:
        return 0.0, "all runs of these plans have results", ""
    if scheduler is None:
        return None, f"{many(len(works), 'job')} left; name the site (--profile), or dlscale run {evidence.names}", ""
    apart = cost.by_account(cost.price(works, scheduler, evidence.results))
    data = cost.total(apart.get("CPU nodes", []), "node_hours")
    more = f"; in addition {number(data)} node-hours on CPU nodes" if data else ""
    rows = apart.get("GPU nodes", apart.get("", []))
    return cost.total(rows, "node_hours"), f"{many(len(works), 'job')} left, dlscale cost{more}", cost.bound_mark(rows)


def _spent(evidence: Evidence) -> float | None:
    """Return the node-hours of the finished jobs of all runs; None if no duration is known."""
    paths, total = Results(evidence.results), 0.0
    for owner, run in {run.owner: run for run in evidence.runs}.items():
        files = [paths.benchmark(stage, *owner.split("/", 1)) for stage in STAGES]
        total += sum(job_seconds(file) or 0.0 for file in files) * nodes_of(run) / 3600
    return total or None
