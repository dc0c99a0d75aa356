"""Parts of the sheet with facts: problem, machine, efficiency, energy, memory, storage, commands."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from dlscale.core.paths import Results
from dlscale.core.settings import flat
from dlscale.core.text import NONE, count, many, number, percent, shorten, size
from dlscale.extensions.sheet.evidence import Evidence, named, nodes_of
from dlscale.extensions.sheet.parts import Fact, fact
from dlscale.preflight.cost import device_kind
from dlscale.report.evidence import bound
from dlscale.report.figures import grams, joules
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
    cores = [many(made.cores, "usable core")] if made and made.cores else []
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
    yield fact("Energy per sample", each, todo, joules, "of the GPUs, or of nodes without GPUs")
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
