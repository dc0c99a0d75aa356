"""Where the time of runs goes, in the page: profiles, efficiency, telemetry."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlscale.core import text
from dlscale.core.telemetry import Sample, begin, summary
from dlscale.measure.profilers import Profile, ProfiledTool, TopEntry
from dlscale.report import published
from dlscale.report.figures import (
    GRID,
    MODE_COLOURS,
    MUTED,
    RUN_COLOURS,
    Bar,
    Entry,
    Section,
    Strip,
    Table,
    View,
    bars,
    cell,
    heading,
    strips,
    table,
)
from dlscale.report.results import PlanResult, RunResult, first_and_least, slowness

#: How many runs, and rows of a profile, are shown.
BARS, TOP = 8, 10

#: Parts of a step in their order, with name and colour: those of loading and computing as in other figures. `other` is
#: covered by no range, `unexplained` by no measurement.
PARTS = {
    "data": ("waiting for data", MODE_COLOURS["IO"]),
    "copy": ("copy to the device", RUN_COLOURS[6]),
    "forward": ("forward", MODE_COLOURS["SYNTHETIC"]),
    "backward": ("backward", RUN_COLOURS[3]),
    "optimizer": ("optimiser", RUN_COLOURS[5]),
    "compute": ("computing", RUN_COLOURS[4]),
    "other": ("the rest", GRID),
    "unexplained": ("not explained", MUTED),
}


# ---- the devices -----------------------------------------------------------------------------------


def devices(runs: Iterable[RunResult]) -> list[str]:
    """Return the devices that runs were measured on, each once."""
    names = []
    for device in (run.device for run in runs if run.device.name):
        threads = device.threads if device.kind == "cpu" else None
        names.append(f"{device.name}, {text.many(threads, 'thread')}" if threads else device.name)
    return list(dict.fromkeys(names))


# ---- the parts of a step -----------------------------------------------------------------------------


@dataclass(frozen=True)
class StepTime:
    """A step, and where its time goes."""

    label: str
    parts: dict[str, float]  #: Seconds by part (of `PARTS`).
    full: float | None  #: Seconds of a step of FULL; None if it was not measured.
    samples: int | None  #: Samples over all processes.


def step(run: RunResult) -> StepTime | None:
    """Return where a step's time goes: from its profile, else from its throughput; None without either."""
    profile, measured = run.profile, run.throughput
    batch = (measured.batch_size if measured else None) or (profile.batch_size if profile else None)
    full, computing, loading = (
        batch / trials.mean if batch and (trials := run.trials(mode)) and trials.mean else None
        for mode in ("FULL", "SYNTHETIC", "IO")
    )
    tool = next((tool for tool in profile.tools if tool.ranges), None) if profile else None
    if tool:
        return StepTime(f"{run.called} ({tool.name})", of_tool(tool), full, batch)
    if not (full and computing):
        return None
    # A step waits no longer than its batch takes to load. Nothing measured explains the rest.
    parts = {"data": min(max(0.0, full - computing), loading or 0.0), "compute": min(full, computing)}
    return StepTime(run.called, {**parts, "unexplained": max(0.0, full - sum(parts.values()))}, full, batch)


def of_tool(tool: ProfiledTool) -> dict[str, float]:
    """Return seconds a step by part; they add up to the step.

    Of a device they are its work by range, scaled to its busy time where parts ran side by side; `data` is its idle
    time while the host was asking for data, `other` the rest of the step.
    """
    ranges, idle = tool.ranges, tool.activity.idle_seconds
    found = {part: ranges[part] for part in PARTS if part in ranges}
    whole = ranges.get("step")
    if whole and whole.device_seconds:
        seconds = tool.seconds_per_step or 0.0
        side_by_side = min(1.0, max(0.0, seconds - sum(idle.values())) / whole.device_seconds)
        parts = {part: side_by_side * (time.device_seconds or 0.0) for part, time in found.items()}
        parts["data"] = idle.get("data", 0.0) + idle.get("copy", 0.0)  # `copy` is within `data`
    else:
        seconds = whole.seconds if whole else 0.0
        parts = {part: time.seconds for part, time in found.items()}
        if "copy" in parts and "data" in parts:
            parts["data"] = max(0.0, parts["data"] - parts["copy"])
    return {**parts, "other": max(0.0, seconds - sum(parts.values()))}


def section(plan: PlanResult, page: Path) -> Section | None:
    """Return where the time of a step goes, run by run, and the profilers' files; None if nothing tells."""
    known = {run: found for run in plan.runs if (found := step(run))}
    steps = [known[run] for run in first_and_least(list(known), BARS, slowness)]
    if not steps:
        return None
    # Steps of different batches compare by the sample.
    sample = len({each.samples for each in steps}) > 1 and all(each.samples for each in steps)
    return Section(
        "Where a step's time goes",
        legend=[
            Entry(words, colour, "■")
            for part, (words, colour) in PARTS.items()
            if any(each.parts.get(part) for each in steps)
        ],
        plots=[(timeline(f"{plan.name}-timeline", steps, sample), _about(sample, steps))],
        form="profiles",
        own=[_profile(plan, run, run.profile, page) for run in plan.runs if run.profile],
        few=True,
    )


def timeline(name: str, steps: Sequence[StepTime], sample: bool = False) -> str:
    """Draw where the milliseconds of a step go, or those of a `sample`."""
    groups = []
    for each in steps:
        scale = 1e3 / ((each.samples or 1) if sample else 1)
        parts = [(scale * each.parts[part], colour) for part, (_, colour) in PARTS.items() if part in each.parts]
        mark = None if each.full is None else scale * each.full
        end = sum(length for length, _ in parts) if mark is None else mark
        groups.append((each.label, [Bar(parts, f"{text.number(end)} ms", mark=mark)]))
    return bars(name, groups, f"time of a {'sample' if sample else 'step'} (ms)")


def _about(sample: bool, steps: Sequence[StepTime]) -> str:
    said = f"A step{' over the samples of its batch' * sample}, part by part, while the profiler named was at work. "
    full = "The upright line and the number are FULL: other steps, at another moment, with no profiler."
    said += (
        full if any(each.full for each in steps) else "The number is such a step; without a profiler it may be shorter."
    )
    unexplained = (
        " Of a run that was not profiled the bar is FULL, too: computing takes SYNTHETIC's time, waiting for data at "
        "most IO's, and nothing shows where the rest goes."
    )
    return said + unexplained * any("unexplained" in each.parts for each in steps)


def _profile(plan: PlanResult, run: RunResult, profile: Profile, page: Path) -> View:
    folder = Path(os.path.relpath(run.folder / "profile", page))
    top = [each for each in profile.top if each.kind in ("kernel", "operator")][:TOP] or profile.top[:TOP]
    return {
        "id": plan.anchor(run),
        "label": run.called,
        "tools": [
            (tool, [(title, (folder / name).as_posix()) for title, name in tool.files.items()])
            for tool in profile.tools
        ],
        "tables": [_top_table(run, top)] if top else [],
        "memory": profile.memory,
        "cpu": profile.device.kind == "cpu",
        "summary": (folder / "profile_summary.csv").as_posix(),
    }


def _top_table(run: RunResult, top: Sequence[TopEntry]) -> Table:
    columns = [
        ("", "name", [cell(row.name) for row in top]),
        (
            "",
            "ms a step",
            [cell(1e3 * row.seconds, note=f"± {text.number(1e3 * row.std, 2)}" * bool(row.std)) for row in top],
        ),
        ("", "share", [cell(row.share, text.percent) for row in top]),
        ("", "calls a step", [cell(row.calls, lambda calls: f"{round(calls, 2):,.12g}") for row in top]),
        ("", "kind", [cell(row.kind) for row in top]),
    ]
    about = f"Where the time of a step goes, {run.called}"
    return table(columns, "Where the time of a step goes: the first rows of the summary.", about, style="top")


# ---- the machine -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobUse:
    """A stage of a run on its first node, as Slurm's `seff` sees it."""

    stage: str
    seconds: float  #: Wall-clock time.
    cores: int  #: Cores given.
    cpu_seconds: float  #: Processor time of all its processes.
    peak_bytes: float | None  #: Greatest memory of all its processes together.
    memory_bytes: int | None  #: Memory given.
    gpu: float | None  #: Mean share of the time in which a kernel ran.
    waiting: float | None  #: Share of a training step that waits for data.

    @property
    def efficiency(self) -> float:
        return self.cpu_seconds / (self.seconds * self.cores)

    @property
    def memory(self) -> float | None:
        return self.peak_bytes / self.memory_bytes if self.peak_bytes is not None and self.memory_bytes else None


def job(run: RunResult) -> JobUse | None:
    """Return what training used, or a run's first stage; None without telemetry."""
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


def efficiency(plan: PlanResult) -> Section | None:
    """Return the jobs of a plan's runs, and the figures published for them; None without telemetry."""
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
    """Return the machine's telemetry while runs trained, or were measured; None without any."""
    plots = []
    for run in first_and_least([run for run in plan.runs if any(run.telemetry.values())], BARS, slowness):
        stage, nodes = next((stage, nodes) for stage, nodes in run.telemetry.items() if nodes)
        if series := of_node(nodes[0]):
            said = "on its first node: once a second; each strip from 0 to the value at its right."
            plots.append((strips(f"{plan.name}-{run.name}-watched", series), f"{run.called}, stage {stage}, {said}"))
    return Section("What the machine did meanwhile", plots=plots, few=True) if plots else None


#: Quantities that are drawn: column, and factor to the unit in the label; None is the number of cores.
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
    """Return the strips of the quantities that are known of a node."""
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
