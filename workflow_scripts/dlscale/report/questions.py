"""What plans ask of larger batches, and of devices that share a model: convergence and parallelism, in the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from dlscale.config.records import Published
from dlscale.core.metrics import VALID_LOSS, Metric
from dlscale.core.text import count, duration, many, number, percent, size
from dlscale.report import published
from dlscale.report.blocks import Cell, Section, cell, joules, mean_of, table, with_note
from dlscale.report.results import PlanResult, Reached, RunResult, asked, by_settings, took

# ---- convergence -------------------------------------------------------------------------------------


def aim(plan: PlanResult) -> tuple[Metric, float] | None:
    """Return what all trainings are compared at: their target, or else the least validation loss that all reach."""
    wanted = [asked(run) for run in plan.trained]
    if wanted and wanted[0] and wanted.count(wanted[0]) == len(wanted):
        return wanted[0]
    finite = [loss for run in plan.trained if (loss := run.best_valid_loss) is not None]
    return (VALID_LOSS, max(finite)) if finite else None


def convergence(plan: PlanResult) -> Section | None:
    """Return how trainings with larger and larger batches converge; None of other plans, and where none trained."""
    compared = aim(plan) if plan.record.kind == "convergence" else None
    if compared is None:
        return None
    (metric, value), found = compared, by_settings(plan.trained)
    firsts, several = [runs[0] for _, runs in found], [runs for _, runs in found]
    reached = [[each for run in runs if (each := took(run, metric, value)).epoch] for runs in several]
    target = metric.aim(value)

    def spent(of: Callable[[Reached], float | None], shown: Callable[[float], str] = number) -> list[Cell]:
        return [mean_of([known for each in group if (known := of(each)) is not None], shown) for group in reached]

    columns = [
        ("Training", "run", [Cell(label, n, link=plan.anchor(runs[0])) for n, (label, runs) in enumerate(found)]),
        ("Training", "seeds", [cell(len(runs), count) for runs in several]),
        ("Training", "batch size", [cell(run.setting("batch_size"), count) for run in firsts]),
        ("Training", "devices", [cell(run.devices, count) for run in firsts]),
        ("Training", "learning rate", [_rate(run) for run in firsts]),
        ("Training", "steps", [mean_of([run.epochs[-1].step for run in runs], _whole) for runs in several]),
        ("Training", "validation loss", [_losses([run.final_loss for run in runs]) for runs in several]),
        (f"To {target}", "reached by", [_share(len(a), len(b)) for a, b in zip(reached, several, strict=True)]),
        (f"To {target}", "steps", spent(lambda each: each.epoch.step if each.epoch else None, _whole)),
        (f"To {target}", "samples", spent(lambda each: each.epoch.samples if each.epoch else None, _whole)),
        (f"To {target}", "time", spent(lambda each: each.seconds, duration)),
        (f"To {target}", plan.runs[0].hours, spent(lambda each: each.gpu_hours)),
        (f"To {target}", "energy", spent(lambda each: each.joules, joules)),
    ]
    which = "the target" if all(map(asked, plan.trained)) else "the least that all of them reach"
    return Section(
        "Convergence",
        f"The same training with larger and larger batches. What it took to reach {target}, {which}, is counted from "
        "the first step to the end of the validation that showed it.",
        tables=[table(columns, "Means over the seeds; below, their ends.", f"Convergence of {plan.title}")],
    )


def _share(part: int, of: int) -> Cell:
    return cell(part / of, lambda _: f"{part} of {many(of, 'run')}")


def _rate(run: RunResult) -> Cell:
    """Return the learning rate after warm-up; below, by which rule it follows from that of the base batch size."""
    rate, rule, base = (run.setting(key) for key in ("optimizer.lr", "schedule.scaling", "schedule.base_batch_size"))
    ratio = run.setting("batch_size", 0) / base if base else 1.0
    scale = {"sqrt": math.sqrt(ratio), "linear": ratio}.get(rule, 1.0)
    return cell(None if rate is None else rate * scale, note="" if rule in (None, "none") else rule)


def _whole(value: float) -> str:
    return count(round(value))


def _losses(values: Sequence[float]) -> Cell:
    finite = [value for value in values if math.isfinite(value)]
    lost = len(values) - len(finite)
    if not finite:
        return Cell("diverged")
    return with_note(mean_of(finite), f"{lost} of {len(values)} diverged") if lost else mean_of(finite)


# ---- parallelism -------------------------------------------------------------------------------------


def parallelism(plan: PlanResult) -> Section | None:
    """Return memory predicted and measured, and the rate, by how devices share a model; None of other plans."""
    runs = [run for run in plan.runs if run.throughput] if plan.record.kind == "parallelism" else []
    if not runs:
        return None

    def column(group: str, heading: str, value: Callable[[RunResult], Any], shown: Callable[[Any], str]) -> Any:
        return group, heading, [cell(value(run), shown) for run in runs]

    axes = {axis: [int(run.setting(f"geometry.{axis}", 1)) for run in runs] for axis in ("tp", "cp")}
    dp = [run.devices // (tp * cp) for run, tp, cp in zip(runs, *axes.values(), strict=True)]
    full, speeds = [run.trials("FULL") for run in runs], plan.record.published
    columns = [
        ("Run", "run", [Cell(run.label, n, link=plan.anchor(run)) for n, run in enumerate(runs)]),
        column("Devices", "in all", lambda run: run.devices, count),
        *(("Devices", axis, [cell(value, count) for value in values]) for axis, values in {**axes, "dp": dp}.items()),
        ("Devices", "weights", [_weights(run, tp) for run, tp in zip(runs, axes["tp"], strict=True)]),
        column("Devices", "batch size", lambda run: run.setting("batch_size"), count),
        column("Memory of a device", "predicted", _predicted, size),
        column("Memory of a device", "measured", lambda run: run.throughput and run.throughput.peak_memory_bytes, size),
        ("Memory of a device", "published", [_published(published.memories(speeds, plan.name, r.name)) for r in runs]),
        ("FULL", "samples/s", [cell(t.mean, note=f"± {number(t.std, 2)}") if t else Cell() for t in full]),
        column("FULL", "a device", lambda run: run.speed and run.speed / run.devices, number),
        column("FULL", "MFU", lambda run: run.throughput and run.throughput.mfu(), percent),
        ("FULL", "published", [_published(published.speeds_of(speeds, plan.name, run.name)) for run in runs]),
    ]
    return Section(
        "Parallelism",
        "tp: devices that share each layer; cp: those that share a sample's tokens; dp: those that see other samples, "
        "which share the weights, too, with fsdp. Memory is that of one device: predicted before the first step, a "
        "first estimate where devices share a model, and the greatest that was measured; of a processor that is the "
        "whole process, Python and its libraries included.",
        tables=[
            table(
                columns,
                "± is one standard deviation over the trials. Published figures are of the full size.",
                f"Parallelism of {plan.title}",
            )
        ],
    )


def _predicted(run: RunResult) -> int | None:
    """Return the peak that a step was predicted to need, bytes; by the throughput stage, or else the profile's."""
    profiled = run.profile.memory.predicted if run.profile and run.profile.memory else None
    use = (run.throughput and run.throughput.predicted) or profiled
    return (use.peak or use.total) if use else None


def _weights(run: RunResult, tp: int) -> Cell:
    kind = str(run.setting("parallel.kind", "ddp"))
    words = {"ddp": "copied", "fsdp": "shared", "dp": "copied at each step"}[kind]
    return cell(kind, note=f"divided by tp {tp}{', and shared' * (kind == 'fsdp')}" if tp > 1 else words)


def _published(known: list[Published]) -> Cell:
    """Return the first of several figures, those of other editions below it."""
    if not known:
        return Cell()
    first, *others = known
    notes = [f"{first.devices}, {first.source}", *(f"{published.shown(each)}, {each.source}" for each in others)]
    return cell(first.samples_per_second or first.value or 0.0, lambda _: published.shown(first), "; ".join(notes))
