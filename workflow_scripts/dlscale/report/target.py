"""What runs were to reach (`training.target`), after which epoch they did, and what it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dlscale.core.metrics import VALID_LOSS, Epoch, Metric
from dlscale.core.telemetry import energy
from dlscale.core.text import NONE, count, duration, number
from dlscale.report.results import PlanResult, RunResult


@dataclass(frozen=True)
class Reached:
    """A run's target. What it took is counted from the first step to the end of the validation that showed it.

    Start-up and the time between two tries are left out. None where it was not reached, or is not known: time where
    geometry or loader changed on the way, energy where an earlier try did a part of it.
    """

    aim: str  #: In words.
    epoch: Epoch | None  #: The first that reached it.
    nearest: float | None  #: The metric's best value of any epoch.
    seconds: float | None = None  #: Of training and validation.
    gpu_hours: float | None = None  #: These seconds x devices. A process without a GPU counts as a device, too.
    joules: float | None = None


def asked(run: RunResult) -> tuple[Metric, float] | None:
    """Return what a run was to reach: a metric and its value; None if it has no target, or the metric is not known."""
    wanted = (run.settings.get("training") or {}).get("target")
    described = [VALID_LOSS, *(run.provenance.metrics if run.provenance else ())]
    metric = next((metric for metric in described if wanted and metric.name == wanted["metric"]), None)
    return (metric, float(wanted["value"])) if wanted and metric else None


def reached(run: RunResult) -> Reached | None:
    """Return what became of a run's target; None if it has none, was not trained, or its metric is not known."""
    wanted = asked(run)
    return took(run, *wanted) if wanted and run.epochs else None


def took(run: RunResult, metric: Metric, value: float) -> Reached:
    """Return what a trained run took until a metric was as good as a value."""
    aim = metric.aim(value)
    epoch, best = metric.first(run.epochs, value), metric.best(run.epochs)
    nearest = metric.of(best) if best else None
    if epoch is None:
        return Reached(aim, None, nearest)
    passed = run.epochs[: run.epochs.index(epoch) + 1]
    seconds = sum(each.epoch_seconds + each.valid_seconds for each in passed) if run.timed == run.epochs else None
    devices = (run.provenance.devices or run.provenance.processes) if run.provenance else None
    joules = None
    if run.energy is not None and epoch.wall_time:
        start = passed[0].wall_time - passed[0].epoch_seconds
        joules = energy(run.telemetry.get("train", []), start, epoch.wall_time + epoch.valid_seconds)
    hours = seconds * devices / 3600 if seconds is not None and devices else None
    return Reached(aim, epoch, nearest, seconds, hours, joules)


def glance(plan: PlanResult) -> list[dict[str, Any]]:
    """Return for each target of the plan's runs, in words, who reached it first and who for the least."""
    by_aim: dict[str, list[tuple[RunResult, Reached]]] = {}
    for run in plan.runs:
        if found := reached(run):
            by_aim.setdefault(found.aim, []).append((run, found))
    views = []
    for aim, of in by_aim.items():
        there = [(run, found) for run, found in of if found.epoch]
        views.append(
            {
                "aim": aim,
                "of": len(of),
                "reached": len(there),
                "first": _least(there, "seconds") or _shown(next(iter(there), None)),
                "cheapest": _least(there, "gpu_hours"),
                "thriftiest": _least(there, "joules"),
                "missed": [(run.label, number(found.nearest)) for run, found in of if not found.epoch],
            }
        )
    return views


def _least(there: Sequence[tuple[RunResult, Reached]], key: str) -> dict[str, Any] | None:
    known = [pair for pair in there if getattr(pair[1], key) is not None]
    return _shown(min(known, key=lambda pair: getattr(pair[1], key), default=None))


def _shown(pair: tuple[RunResult, Reached] | None) -> dict[str, Any] | None:
    if pair is None:
        return None
    run, found = pair
    epoch = found.epoch
    assert epoch is not None  # it is of those that are there
    return {
        "run": run.label,
        "epochs": epoch.epoch,
        "samples": count(epoch.samples),
        "time": None if found.seconds is None else duration(found.seconds),
        "hours": None if found.gpu_hours is None else f"{number(found.gpu_hours)} {hours_of(run)}",
        "energy": None if found.joules is None else joules(found.joules),
    }


def hours_of(run: RunResult) -> str:
    """Return what hours x devices are called: hardly anybody counts processors in GPU-hours."""
    return "GPU-hours" if run.device.kind == "cuda" else "device-hours"


def joules(value: float | None) -> str:
    """Return an energy in words."""
    if value is None:
        return NONE
    return f"{number(value / 1e3)} kJ" if value < 3.6e6 else f"{number(value / 3.6e6)} kWh"
