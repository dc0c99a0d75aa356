"""Build the page's sections on job efficiency and telemetry, and divide a step's time into parts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dlscale.core import text
from dlscale.core.telemetry import Sample, begin, summary
from dlscale.measure.profilers import ProfiledTool
from dlscale.report import published
from dlscale.report.figures import COLOURS, MODE_COLOURS, MUTED, Section, View, cell, heading, lines, table, time_unit
from dlscale.report.sections import Page
from dlscale.results import PlanResult, RunResult

#: Part of a step → (name, colour), in the order of execution. `other` is the time outside of the profiler's ranges,
#: `unexplained` the time that no measurement covers.
PARTS = {
    "data": ("waiting for data", MODE_COLOURS["IO"]),
    "copy": ("copy to the device", COLOURS[6]),
    "forward": ("forward", MODE_COLOURS["SYNTHETIC"]),
    "backward": ("backward", COLOURS[3]),
    "optimizer": ("optimiser", COLOURS[5]),
    "compute": ("computing", COLOURS[4]),
    "other": ("the rest", COLOURS[7]),
    "unexplained": ("unexplained", MUTED),
}


# ---- the parts of a step -----------------------------------------------------------------------------


@dataclass(frozen=True)
class StepTime:
    """The time of a step, by part."""

    label: str  #: Name of the profiler or stage that measured the step.
    parts: dict[str, float]  #: Seconds by part (of `PARTS`).
    full: float | None  #: Seconds of a training step without a profiler; None if it was not measured.
    samples: int | None  #: Samples per step over all processes.


def step(run: RunResult) -> StepTime | None:
    """Return the time of a step by part, from the run's profile or else from its throughput; None if unknown."""
    profile, measured = run.profile, run.throughput
    batch = (measured.batch_size if measured else None) or (profile.batch_size if profile else None)
    full, computing, loading = (
        batch / trials.mean if batch and (trials := run.trials(mode)) and trials.mean else None
        for mode in ("FULL", "SYNTHETIC", "IO")
    )
    tool = next((tool for tool in profile.tools if tool.ranges), None) if profile else None
    if tool:
        return StepTime(tool.name, of_tool(tool), full, batch)
    if not (full and computing):
        return None
    # A step waits at most as long as loading its batch takes. The remaining time is unexplained.
    parts = {"data": min(max(0.0, full - computing), loading or 0.0), "compute": min(full, computing)}
    return StepTime("throughput", {**parts, "unexplained": max(0.0, full - sum(parts.values()))}, full, batch)


def of_tool(tool: ProfiledTool) -> dict[str, float]:
    """Return part → seconds per step; the sum of all parts is the step time.

    If device times are known, the time of a part is the device's work in its range, scaled so that concurrent parts sum
    to the device's busy time. `data` is then the device's idle time while the host waits for data. `other` is the
    remaining time of the step.
    """
    ranges, idle = tool.ranges, tool.activity.idle_seconds
    found = {part: ranges[part] for part in PARTS if part in ranges}
    whole = ranges.get("step")
    if whole and whole.device_seconds:
        seconds = tool.seconds_per_step or 0.0
        side_by_side = min(1.0, max(0.0, seconds - sum(idle.values())) / whole.device_seconds)
        parts = {part: side_by_side * (time.device_seconds or 0.0) for part, time in found.items()}
        # Idle time counts for the innermost range, and `copy` lies within `data`.
        parts["data"] = idle.get("data", 0.0) + idle.get("copy", 0.0)
    else:
        seconds = whole.seconds if whole else 0.0
        parts = {part: time.seconds for part, time in found.items()}
        if "copy" in parts and "data" in parts:
            parts["data"] = max(0.0, parts["data"] - parts["copy"])
    return {**parts, "other": max(0.0, seconds - sum(parts.values()))}


# ---- the machine -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobUse:
    """Resources that a stage of a run used on its first node, in the terms of Slurm's `seff`."""

    stage: str
    seconds: float  #: Wall-clock time.
    cores: int  #: Logical CPUs that the training may use; if unknown, all logical CPUs of the node.
    cpu_seconds: float  #: CPU time of all processes of the stage.
    peak_bytes: float | None  #: Peak memory of all processes of the stage together.
    memory_bytes: int | None  #: Memory that the training may use; None if unknown.
    gpu: float | None  #: Fraction of the time in which a GPU ran a kernel, mean over the GPUs.
    waiting: float | None  #: Fraction of a training step spent waiting for data.

    @property
    def efficiency(self) -> float:
        return self.cpu_seconds / (self.seconds * self.cores)

    @property
    def memory(self) -> float | None:
        return self.peak_bytes / self.memory_bytes if self.peak_bytes is not None and self.memory_bytes else None


def job(run: RunResult) -> JobUse | None:
    """Return the resources used by training, or else by the first stage with telemetry; None without telemetry."""
    stage, nodes = next(((stage, nodes) for stage, nodes in run.telemetry.items() if nodes), ("", []))
    known = [sample for sample in nodes[0] if sample.cpu_run is not None] if nodes else []
    if not known:
        return None
    found, given, timed = summary(known), run.provenance, step(run)
    parts = timed.parts if timed else {}
    used = [(gpu.utilization, s.seconds) for s in known for gpu in s.gpus if gpu.utilization is not None]
    return JobUse(
        stage,
        found.seconds,
        (given and given.cores) or known[0].cores,
        sum((sample.cpu_run or 0.0) * sample.cores * sample.seconds for sample in known),
        found.peaks.get("rss_bytes"),
        given.memory_bytes if given else None,
        sum(share * seconds for share, seconds in used) / sum(seconds for _, seconds in used) if used else None,
        parts["data"] / sum(parts.values()) if "data" in parts and any(parts.values()) else None,
    )


def efficiency(plan: PlanResult, page: Page) -> Section | None:
    """Return the job efficiency of a plan's runs, with published figures; None without telemetry."""
    jobs = {run: found for run in plan.runs if (found := job(run))}
    if not jobs:
        return None
    every = list(jobs.values())
    columns = [
        ("", "run", [heading(plan, run, place) for place, run in enumerate(jobs)]),
        ("", "stage", [cell(each.stage) for each in every]),
        ("", "wall-clock", [cell(each.seconds, text.duration) for each in every]),
        ("", "cores", [cell(each.cores, str) for each in every]),
        ("", "CPU utilised", [cell(each.cpu_seconds, text.duration) for each in every]),
        ("", "CPU efficiency", [cell(each.efficiency, text.percent) for each in every]),
        ("", "memory utilised", [cell(each.peak_bytes, text.size) for each in every]),
        ("", "memory efficiency", [cell(each.memory, text.percent) for each in every]),
        ("", "GPU utilisation", [cell(each.gpu, text.percent) for each in every]),
        ("", "waiting for data", [cell(each.waiting, text.percent) for each in every]),
    ]
    caption = (
        "Resource use on the first node, including start and validation, in the terms of Slurm's seff. CPU efficiency "
        "is CPU time / (wall-clock time × cores); cores are logical CPUs. Memory is the peak of all processes "
        "together, in which shared memory counts for each process. Waiting for data is a fraction of a training step."
    )
    known = [
        f"{figure.label}: {published.what(figure)} {published.shown(figure)} ({figure.hardware}; {figure.source})"
        for figure in plan.record.published
        if not figure.samples_per_second and any(f"{plan.name}.{run.name}" in figure.runs for run in jobs)
    ]
    return Section(
        "Job efficiency",
        tables=[table(columns, caption, f"Job efficiency of {plan.title}")],
        notes=[f"Published values for the full-size model and data: {' · '.join(known)}"] if known else [],
    )


def telemetry(plan: PlanResult, page: Page) -> Section | None:
    """Return the chart of the machine's telemetry while runs trained or were timed; None without telemetry."""
    rows = list[View]()
    for run in plan.runs:
        nodes = next((nodes for nodes in run.telemetry.values() if nodes), None)
        rows += [{"run": run.called, **row} for row in thinned(of_node(nodes[0]))] if nodes else []
    there = {column: label for column, (label, _) in WATCHED.items() if any(row.get(column) for row in rows)}
    if not there:
        return None
    seconds, unit = time_unit(max(row["time"] for row in rows))
    rows = [{**row, "time": row["time"] / seconds} for row in rows]
    about = (
        "Telemetry of the first node, once a second, while a run was trained or measured. Choose the quantity above."
    )
    about += f" Neighbouring values of a long run are averaged, to at most {POINTS} points."
    chart = lines(f"{plan.name}-watched", about, rows, {"time": f"time ({unit})"}, there, zero=True, logarithmic=False)
    return Section("Telemetry of the machine", charts=[chart])


#: Telemetry column → (label on the page, factor to the label's unit; None: the factor is the number of logical CPUs).
WATCHED: dict[str, tuple[str, float | None]] = {
    "cpu_run": ("CPU: this run (cores)", None),
    "cpu_others": ("CPU: other programs (cores)", None),
    "rss_bytes": ("memory of the run (GiB)", 2**-30),
    "read_bytes_per_second": ("reading, system calls (MB/s)", 1e-6),
    "reads_per_second": ("reading, system calls (thousand/s)", 1e-3),
    "disk_read_bytes_per_second": ("reading, from disks (MB/s)", 1e-6),
    "utilization": ("GPUs, mean (% of time with a kernel)", 100.0),
    "watts": ("GPUs, mean (W)", 1.0),
    "memory_bytes": ("GPUs, mean memory (GiB)", 2**-30),
}


#: Maximum number of points per run in the telemetry chart.
POINTS = 600


def thinned(rows: Sequence[View]) -> list[View]:
    """Average neighbouring rows, down to at most `POINTS` rows."""
    size = -(-len(rows) // POINTS) or 1
    parts = [rows[begin : begin + size] for begin in range(0, len(rows), size)]
    return [
        {
            key: statistics.fmean(row[key] for row in part if key in row)
            for key in dict.fromkeys(k for r in part for k in r)
        }
        for part in parts
    ]


def of_node(samples: Sequence[Sample]) -> list[View]:
    """Return a row for each sample of a node, with its known quantities."""
    rows = []
    for sample in samples:
        row: View = {"time": sample.time - begin(samples)}
        for column, (_, factor) in WATCHED.items():
            sources = [sample] if hasattr(sample, column) else sample.gpus
            known = [value for source in sources if (value := getattr(source, column)) is not None]
            if known:
                row[column] = statistics.fmean(known) * (sample.cores if factor is None else factor)
        rows.append(row)
    return rows
