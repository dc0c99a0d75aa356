"""A model on several devices: memory predicted and measured, and the rate, by how the devices share it."""

from __future__ import annotations

from dataclasses import replace

from dlscale.config.records import Published
from dlscale.core.text import NONE, count, number, percent, size
from dlscale.report import figures, published
from dlscale.report.drawing import MODE_COLOURS
from dlscale.report.glance import View
from dlscale.report.results import PlanResult, RunResult
from dlscale.report.tables import Cell, RunsTable, table


def view(plan: PlanResult) -> View | None:
    """Return figures and table; None where nothing was measured."""
    runs = [run for run in plan.runs if run.throughput]
    if not runs:
        return None
    cpu = any(run.device.kind == "cpu" for run in runs)
    process = (
        " Of a processor only the whole process is measured, Python and its libraries included, which nobody predicts: "
        "it stands in the table and is not drawn beside the prediction."
    )
    return {
        "title": "Parallelism",
        "about": "tp: devices that share each layer; cp: those that share a sample's tokens; dp: those that see other "
        "samples, which share the weights, too, with fsdp. Memory is that of one device: predicted before the first "
        "step, a first estimate where devices share a model, and the greatest that was measured." + process * cpu,
        "legend": [("predicted", "io", "■"), ("measured", "full", "■")][: 1 if cpu else 2],
        "strokes": [],
        "plots": [_memory(plan, runs, measured=not cpu), _rates(plan, runs)],
        "table": _table(plan, runs),
        "caption": "± is one standard deviation over the trials. Published figures are of the full size.",
        "note": "",
    }


def _memory(plan: PlanResult, runs: list[RunResult], measured: bool) -> tuple[str, str]:
    bars = [
        (run.label, [(_predicted(run), MODE_COLOURS["IO"]), (_measured(run), MODE_COLOURS["FULL"])][: 1 + measured])
        for run in runs
    ]
    scaled = [(label, [(None if b is None else b / 1e9, colour) for b, colour in each]) for label, each in bars]
    drawing = figures.bars(f"{plan.name}-parallel-memory", scaled, "memory of a device (GB)")
    return drawing, f"Memory of a device: predicted{' (upper bar) and measured (lower bar)' * measured}."


def _rates(plan: PlanResult, runs: list[RunResult]) -> tuple[str, str]:
    bars = [(run.label, [(run.speed, MODE_COLOURS["FULL"])]) for run in runs]
    drawing = figures.bars(f"{plan.name}-parallel-rate", bars, "FULL (samples/s)")
    return drawing, "Samples per second of all devices together."


def _predicted(run: RunResult) -> int | None:
    """Return the peak that a step was predicted to need, bytes; by the throughput stage, or else the profile's."""
    for use in (run.throughput and run.throughput.predicted, run.profile and run.profile.memory and
                run.profile.memory.predicted):  # fmt: skip
        if use:
            return use.peak or use.total
    return None


def _measured(run: RunResult) -> int | None:
    return run.throughput.peak_memory_bytes if run.throughput else None


def _table(plan: PlanResult, runs: list[RunResult]) -> RunsTable:
    geometry = [{"tp": 1, "cp": 1, **(run.settings.get("geometry") or {})} for run in runs]
    shared = [int(at["tp"]) * int(at["cp"]) for at in geometry]
    speeds = [published.speeds_of(plan.record.published, plan.name, run.name) for run in runs]
    columns = [
        ("Run", "run", [Cell(run.label, n, link=plan.anchor(run)) for n, run in enumerate(runs)]),
        ("Devices", "in all", [_count(run.devices) for run in runs]),
        *(("Devices", axis, [_count(each[axis]) for each in geometry]) for axis in ("tp", "cp")),
        ("Devices", "dp", [_count(run.devices // each) for run, each in zip(runs, shared, strict=True)]),
        ("Devices", "weights", [_weights(run) for run in runs]),
        ("Devices", "batch size", [_count(run.settings.get("batch_size")) for run in runs]),
        ("Memory of a device", "predicted", [_size(_predicted(run)) for run in runs]),
        ("Memory of a device", "measured", [_in_all(run) for run in runs]),
        ("Memory of a device", "published", [_published(_memories(plan, run)) for run in runs]),
        ("FULL", "samples/s", [_rate(run) for run in runs]),
        ("FULL", "a device", [_number(run.speed and run.speed / run.devices) for run in runs]),
        ("FULL", "MFU", [_share(run) for run in runs]),
        ("FULL", "published", [_published(each) for each in speeds]),
    ]
    return table(columns)


def _weights(run: RunResult) -> Cell:
    parallel = run.settings.get("parallel") or {}
    kind = str(parallel.get("kind", "ddp"))
    words = {"ddp": "copied", "fsdp": "shared", "dp": "copied at each step"}[kind]
    tp = int((run.settings.get("geometry") or {}).get("tp", 1))
    return Cell(kind, kind, f"divided by tp {tp}{', and shared' if kind == 'fsdp' else ''}" if tp > 1 else words)


def _memories(plan: PlanResult, run: RunResult) -> list[Published]:
    """Return the published memory of what a run does."""
    name = f"{plan.name}.{run.name}"
    return [each for each in plan.record.published if each.metric == "memory" and name in each.runs]


def _count(value: int | None) -> Cell:
    return Cell() if value is None else Cell(count(value), value)


def _size(bytes_: int | None) -> Cell:
    return Cell() if bytes_ is None else Cell(size(bytes_), bytes_)


def _in_all(run: RunResult) -> Cell:
    """Return the measured memory, and on a processor that more than the step's is in it."""
    cell = _size(_measured(run))
    return replace(cell, note="of the whole process") if run.device.kind == "cpu" and cell.text != NONE else cell


def _number(value: float | None) -> Cell:
    return Cell() if not value else Cell(number(value), value)


def _rate(run: RunResult) -> Cell:
    trials = run.trials("FULL")
    return Cell(number(trials.mean), trials.mean, f"± {number(trials.std, 2)}") if trials else Cell()


def _share(run: RunResult) -> Cell:
    mfu = run.throughput.mfu() if run.throughput else None
    return Cell() if mfu is None else Cell(percent(mfu), mfu)


def _published(known: list[Published]) -> Cell:
    """Return the first of several figures, those of other editions below it."""
    if not known:
        return Cell()
    first, *others = known
    notes = [f"{first.devices}, {first.source}", *(f"{published.shown(each)}, {each.source}" for each in others)]
    return Cell(published.shown(first), first.samples_per_second or first.value or 0.0, "; ".join(notes))
