"""How well jobs used what they were given, as Slurm's `seff` says it, and what the machine did meanwhile."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dlscale.core.telemetry import Sample, begin, summary
from dlscale.core.text import duration, percent, size
from dlscale.report import published
from dlscale.report.blocks import Cell, Section, cell, table
from dlscale.report.figures import Strip, strips
from dlscale.report.profiles import shares
from dlscale.report.results import PlanResult, RunResult, first_and_least, slowness

#: How many runs are drawn, the first and the fastest.
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

    @property
    def memory(self) -> float | None:
        return self.peak_bytes / self.memory_bytes if self.peak_bytes is not None and self.memory_bytes else None


def job(run: RunResult) -> Job | None:
    """Return what training used, or, of a run that did not train, its first stage; None if nobody watched."""
    stage, nodes = next(((stage, nodes) for stage, nodes in run.telemetry.items() if nodes), ("", []))
    known = [sample for sample in nodes[0] if sample.cpu_run is not None] if nodes else []
    if not known:
        return None
    found, given = summary(known), run.provenance
    used = [(gpu.utilization, s.seconds) for s in known for gpu in s.gpus if gpu.utilization is not None]
    return Job(
        stage,
        found.seconds,
        (given and given.cores) or known[0].cores,
        sum((sample.cpu_run or 0.0) * sample.cores * sample.seconds for sample in known),
        found.peaks.get("rss_bytes"),
        given.memory_bytes if given else None,
        sum(share * seconds for share, seconds in used) / sum(seconds for _, seconds in used) if used else None,
    )


def efficiency(plan: PlanResult) -> Section | None:
    """Return the jobs of a plan's runs, and the figures that were published for these runs; None without telemetry."""
    jobs = {run: found for run in plan.runs if (found := job(run))}
    if not jobs:
        return None
    every = list(jobs.values())
    columns = [
        ("", "run", [Cell(run.label, place, link=plan.anchor(run)) for place, run in enumerate(jobs)]),
        ("", "stage", [cell(each.stage) for each in every]),
        ("", "wall-clock", [cell(each.seconds, duration) for each in every]),
        ("", "cores", [cell(each.cores, str) for each in every]),
        ("", "CPU utilised", [cell(each.cpu_seconds, duration) for each in every]),
        ("", "CPU efficiency", [cell(each.efficiency, percent) for each in every]),
        ("", "memory utilised", [cell(each.peak_bytes, size) for each in every]),
        ("", "memory efficiency", [cell(each.memory, percent) for each in every]),
        ("", "GPU utilisation", [cell(each.gpu, percent) for each in every]),
        ("", "waiting for data", [cell(shares(run).get("data"), percent) for run in jobs]),
    ]
    caption = (
        "As Slurm's seff has it, on the first node, start and validation included: CPU efficiency is processor time / "
        "(wall-clock time × cores). Memory is the greatest of all processes together; what they share counts in each. "
        "Waiting for data is a share of a training step."
    )
    known = [
        f"{figure.label}: {published.what(figure)} {published.shown(figure)} ({figure.hardware}; {figure.source})"
        for figure in plan.record.published
        if not figure.samples_per_second and any(f"{plan.name}.{run.name}" in figure.runs for run in jobs)
    ]
    return Section(
        "Job efficiency",
        tables=[table(columns, caption, f"Job efficiency of {plan.title}")],
        notes=[f"Published for these runs, at full size: {' · '.join(known)}"] if known else [],
    )


def watched(plan: PlanResult) -> Section | None:
    """Return what the machine did while runs trained (or were measured, if they were not); None if nobody watched."""
    plots = []
    for run in first_and_least([run for run in plan.runs if any(run.telemetry.values())], BARS, slowness):
        stage, nodes = next((stage, nodes) for stage, nodes in run.telemetry.items() if nodes)
        if series := of_node(nodes[0]):
            said = "on its first node: once a second; each strip from 0 to the value at its right."
            plots.append((strips(f"{plan.name}-{run.name}-watched", series), f"{run.label}, stage {stage}, {said}"))
    return Section("What the machine did meanwhile", plots=plots, few=True) if plots else None


#: Quantities that are watched, in units that read well: their column, and its factor; None is the number of cores.
WATCHED: dict[str, tuple[str, float | None]] = {
    "processors: the run (cores)": ("cpu_run", None),
    "processors: others (cores)": ("cpu_others", None),
    "memory of the run (GiB)": ("rss_bytes", 2**-30),
    "reading, system calls (MB/s)": ("read_bytes_per_second", 1e-6),
    "reading, system calls (thousand/s)": ("reads_per_second", 1e-3),
    "reading, from disks (MB/s)": ("disk_read_bytes_per_second", 1e-6),
    "GPUs, mean (% of time with a kernel)": ("utilization", 100.0),
    "GPUs, mean (W)": ("watts", 1.0),
    "GPUs, mean memory (GiB)": ("memory_bytes", 2**-30),
}


def of_node(samples: Sequence[Sample]) -> list[Strip]:
    """Return the strips of a node: what is known."""
    drawn: list[Strip] = []
    for label, (column, factor) in WATCHED.items():
        points = []
        for sample in samples:
            sources = [sample] if hasattr(sample, column) else sample.gpus
            known = [value for source in sources if (value := getattr(source, column)) is not None]
            if known:
                value = statistics.fmean(known) * (sample.cores if factor is None else factor)
                points.append((sample.time - begin(samples), value))
        top = samples[0].cores if factor is None and points else 100 if column == "utilization" else None
        if points and (top or any(y > 0 for _, y in points)):
            drawn.append((label, [x for x, _ in points], [y for _, y in points], top))
    return drawn
