"""How well jobs used what they were given, as Slurm's `seff` says it, and for how long they waited for data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlscale.core.telemetry import Sample, summary
from dlscale.core.text import duration, percent, size
from dlscale.report import figures, published
from dlscale.report.glance import View
from dlscale.report.parts import shares
from dlscale.report.results import PlanResult, RunResult, first_and_least, slowness
from dlscale.report.tables import Cell

#: How many runs the figure shows, the first and the fastest.
BARS = 8


@dataclass(frozen=True)
class Job:
    """A stage of a run on its first node. CPU efficiency is the processor time used / (wall-clock time x cores)."""

    stage: str
    seconds: float  #: Wall-clock time.
    cores: int  #: That it was given.
    cpu_seconds: float  #: Processor time of all of its processes.
    peak_bytes: float | None  #: The greatest memory of all its processes together.
    memory_bytes: int | None  #: That it was given.
    gpu: float | None  #: Mean share of the time in which a kernel ran.

    @property
    def efficiency(self) -> float:
        """CPU efficiency, 0 to 1."""
        return self.cpu_seconds / (self.seconds * self.cores)


def job(run: RunResult) -> Job | None:
    """Return what training used, or, of a run that did not train, its first stage; None if nobody watched."""
    stage, nodes = next(((stage, nodes) for stage, nodes in run.telemetry.items() if nodes), ("", []))
    known = [sample for sample in nodes[0] if sample.cpu_run is not None] if nodes else []
    if not known:
        return None
    found, given = summary(known), run.provenance
    return Job(
        stage,
        found.seconds,
        (given and given.cores) or known[0].cores,
        sum((sample.cpu_run or 0.0) * sample.cores * sample.seconds for sample in known),
        found.peaks.get("rss_bytes"),
        given.memory_bytes if given else None,
        _mean_gpu(known),
    )


def _mean_gpu(samples: Sequence[Sample]) -> float | None:
    used = [(gpu.utilization, s.seconds) for s in samples for gpu in s.gpus if gpu.utilization is not None]
    return sum(share * seconds for share, seconds in used) / sum(seconds for _, seconds in used) if used else None


def view(plan: PlanResult) -> View | None:
    """Return the jobs of a plan's runs, and the figures that were published for these runs; None without telemetry."""
    jobs = {run: found for run in plan.runs if (found := job(run))}
    if not jobs:
        return None
    shown = first_and_least(list(jobs), BARS, slowness)
    bars = [(run.label, jobs[run].seconds, jobs[run].efficiency, jobs[run].cores) for run in shown]
    columns = {
        "run": [Cell(run.label, number, link=plan.anchor(run)) for number, run in enumerate(jobs)],
        "stage": [Cell(each.stage, each.stage) for each in jobs.values()],
        "wall-clock": [Cell(duration(each.seconds), each.seconds) for each in jobs.values()],
        "cores": [Cell(str(each.cores), each.cores) for each in jobs.values()],
        "CPU utilised": [Cell(duration(each.cpu_seconds), each.cpu_seconds) for each in jobs.values()],
        "CPU efficiency": [_share(each.efficiency) for each in jobs.values()],
        "memory utilised": [Cell(size(each.peak_bytes), each.peak_bytes or "") for each in jobs.values()],
        "memory efficiency": [_share(_ratio(each.peak_bytes, each.memory_bytes)) for each in jobs.values()],
        "GPU utilisation": [_share(each.gpu) for each in jobs.values()],
        "waiting for data": [_share(shares(run).get("data")) for run in jobs],
    }
    filled = {name: cells for name, cells in columns.items() if any(cell.key != "" for cell in cells)}
    return {
        "columns": list(filled),
        "rows": list(zip(*filled.values(), strict=True)),
        "svg": figures.efficiency(f"{plan.name}-efficiency", bars),
        "published": [
            f"{figure.label}: {published.what(figure)} {published.shown(figure)} ({figure.hardware}; {figure.source})"
            for figure in plan.record.published
            if not figure.samples_per_second and any(f"{plan.name}.{run.name}" in figure.runs for run in jobs)
        ],
    }


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _share(value: float | None) -> Cell:
    return Cell() if value is None else Cell(percent(value), value)
