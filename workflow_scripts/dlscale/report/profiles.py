"""Build the sections on profiles, job efficiency and telemetry of the page."""

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
from dlscale.report.charts import COLOURS, MODE_COLOURS, MUTED, Chart, View, bars, lines, roofs, time_unit
from dlscale.report.figures import Section, Table, cell, heading, table
from dlscale.report.results import PlanResult, RunResult

#: Maximum number of rows of a profile that the page shows.
TOP = 10

#: Part of a step → (name, colour), in the order of a step. `other` is the time outside of all ranges, `unexplained` the
#: time that no measurement covers.
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
    """The time of a step, by part."""

    label: str  #: Name of the profiler or stage that measured the step.
    parts: dict[str, float]  #: Seconds by part (of `PARTS`).
    full: float | None  #: Seconds of a step of FULL; None if it was not measured.
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

    If device times are known, the time of a part is the device's work in the range of the part, scaled to the device's
    busy time if parts ran concurrently. `data` is then the device's idle time while the host waits for data. `other` is
    the remaining time of the step.
    """
    ranges, idle = tool.ranges, tool.activity.idle_seconds
    found = {part: ranges[part] for part in PARTS if part in ranges}
    whole = ranges.get("step")
    if whole and whole.device_seconds:
        seconds = tool.seconds_per_step or 0.0
        side_by_side = min(1.0, max(0.0, seconds - sum(idle.values())) / whole.device_seconds)
        parts = {part: side_by_side * (time.device_seconds or 0.0) for part, time in found.items()}
        parts["data"] = idle.get("data", 0.0) + idle.get("copy", 0.0)  # the range `copy` lies within `data`
    else:
        seconds = whole.seconds if whole else 0.0
        parts = {part: time.seconds for part, time in found.items()}
        if "copy" in parts and "data" in parts:
            parts["data"] = max(0.0, parts["data"] - parts["copy"])
    return {**parts, "other": max(0.0, seconds - sum(parts.values()))}


def section(plan: PlanResult, page: Path) -> Section | None:
    """Return the time of a step by run and part, and the profilers' files; None without measurements."""
    known = {run: found for run in plan.runs if (found := step(run))}
    steps = list(known.values())
    if not steps:
        return None
    # Steps with different batches are compared per sample.
    sample = len({each.samples for each in steps}) > 1 and all(each.samples for each in steps)
    return Section(
        "Where a step's time goes",
        charts=[timeline(plan, known, sample), *rooflines(plan)],
        form="profiles",
        own=[_profile(plan, run, run.profile, page) for run in plan.runs if run.profile],
    )


def timeline(plan: PlanResult, known: dict[RunResult, StepTime], sample: bool = False) -> Chart:
    """Return the chart of the milliseconds per step (or per sample with `sample`), by part."""
    rows = []
    for run, each in known.items():
        scale = 1e3 / ((each.samples or 1) if sample else 1)
        parts = {part: scale * each.parts[part] for part in PARTS if part in each.parts}
        full = None if each.full is None else scale * each.full
        end = sum(parts.values()) if full is None else full
        said = {"end": max(end, sum(parts.values())), "said": f"{text.number(end)} ms"}
        begin = 0.0
        for part, length in parts.items():
            row = {"run": run.called, "part": PARTS[part][0], "from": begin, "to": begin + length, "time": length}
            rows.append({**row, "of": each.label, "full": full, **said})
            said, begin = {}, begin + length
    shown = {"time": "time (ms)", "full": "step without profiler (ms)", "of": "measured by"}
    title = f"time of a {'sample' if sample else 'step'} (ms)"
    colours = dict(PARTS.values())
    about = _about(sample, list(known.values()))
    more: View = {"colours": colours, "by": "part", "stacked": True, "marked": "full", "shown": shown}
    return bars(f"{plan.name}-timeline", about, rows, title, facts=plan.facts, **more)


#: Minimum FLOPs per byte in a roofline: one FLOP per number of four bytes, for operators without matrix products.
PLAIN = 0.25


def rooflines(plan: PlanResult) -> list[Chart]:
    """Return roofline charts of operators and of modules, for runs with a profile and known peaks."""
    known = [run for run in plan.runs if run.profile and run.profile.work and run.throughput and run.throughput.peaks]
    if not known:
        return []
    about = {
        "operator": f"Roofline of the {TOP} slowest operators. The sloping part of the roof is the measured memory "
        "bandwidth, the flat part the measured rate of a matrix product. A point on the roof is as fast as the device "
        "allows. A larger point takes more of a step. If all operators were on the roof, a step would take "
        f"{'; '.join(map(_least, known))}. Operators without matrix products are drawn at {PLAIN} FLOP/byte. Cached "
        "data may lift a point above the roof.",
        "module": f"Roofline of the {TOP} slowest modules.",
    }
    shown = {
        **{"name": "name", "time": "time (ms per step)", "share": "of all operators (%)", "calls": "calls per step"},
        **{"reached": "of the roof (%)", "intensity": "FLOP/byte", "rate": "GFLOP/s"},
    }
    charts = []
    for part, said in about.items():
        rows = [row for run in known for row in _points(run, part, run is known[-1])]
        charts.append(roofs(f"{plan.name}-{part}s", said, rows, [run.called for run in known], shown))
    return charts


def _points(run: RunResult, part: str, named: bool) -> list[View]:
    """Return points of the slowest operators or modules, and the corners of the roof.

    With `named`, the slowest operator or module has a label.
    """
    import pandas as pd

    assert run.profile and run.throughput and run.throughput.peaks
    peaks = run.throughput.peaks
    table = pd.DataFrame([each.model_dump() for each in run.profile.work])
    table = table.groupby(part)[["seconds", "calls", "flops", "bytes"]].sum().sort_values("seconds", ascending=False)
    rows = list[View]()
    for place, (name, seconds, calls, flops, moved) in enumerate(table.head(TOP).itertuples()):
        intensity = max(flops / moved, PLAIN)
        rate = intensity * moved / seconds
        row = {"run": run.called, "name": name, "time": 1e3 * seconds, "share": 100 * seconds / table.seconds.sum()}
        row |= {"calls": calls, "reached": 100 * rate / min(peaks.flops, intensity * peaks.bytes_per_second)}
        row |= {"intensity": intensity, "rate": 1e-9 * rate, "said": name if named and not place else None}
        rows.append(row)
    bend = peaks.flops / peaks.bytes_per_second
    places = [row["intensity"] for row in rows]
    ends = min(*places, bend) / 2, bend, 2 * max(*places, bend)
    return rows + [
        {"run": run.called, "roof": True, "intensity": x, "rate": 1e-9 * min(peaks.flops, x * peaks.bytes_per_second)}
        for x in ends
    ]


def _least(run: RunResult) -> str:
    """Return the time of a step as text if all operators were on the roof, and the measured time."""
    assert run.profile and run.throughput and run.throughput.peaks
    peaks = run.throughput.peaks
    least = sum(max(each.flops / peaks.flops, each.bytes / peaks.bytes_per_second) for each in run.profile.work)
    now = sum(each.seconds for each in run.profile.work)
    return f"{text.number(1e3 * least)} of {text.number(1e3 * now)} ms ({run.called})"


def _about(sample: bool, steps: Sequence[StepTime]) -> str:
    said = f"Time of each part of a step{', divided by its samples' * sample}, measured while the profiler runs. "
    full = "The vertical line and the number show the time of a training step without a profiler (FULL)."
    said += (
        full
        if any(each.full for each in steps)
        else "The number is the sum of the parts. Without a profiler, a step may be shorter."
    )
    unexplained = (
        " For a run without a profile, the bar comes from the run's rates. It shows a step of training, with the time "
        "of computing alone and at most the time of loading alone. The remaining time is unexplained."
    )
    return said + unexplained * any("unexplained" in each.parts for each in steps)


def _profile(plan: PlanResult, run: RunResult, profile: Profile, page: Path) -> View:
    folder = Path(os.path.relpath(run.folder / "profile", page))
    others = [each for each in profile.top if each.kind not in FUNCTIONS]
    top = [each for each in others if each.kind in ("kernel", "operator")][:TOP] or others[:TOP]
    return {
        "id": plan.anchor(run),
        "label": run.called,
        "tools": [
            (tool, [(title, (folder / name).as_posix()) for title, name in tool.files.items()])
            for tool in profile.tools
        ],
        "tables": [*_functions(run, profile.top), *([_top_table(run, top)] if top else [])],
        "memory": profile.memory,
        "cpu": profile.device.kind == "cpu",
        "summary": (folder / "profile_summary.csv").as_posix(),
    }


#: Kind of row → caption of the table of Python functions.
FUNCTIONS = {
    "function": "Python functions in the main thread of the training process",
    "worker": "Python functions in the worker processes of the training process",
}


def _functions(run: RunResult, rows: Sequence[TopEntry]) -> list[Table]:
    """Return a table of Python functions for each kind of process that was profiled."""
    found = []
    for kind, of in FUNCTIONS.items():
        if mine := [row for row in rows if row.kind == kind]:
            columns = [
                ("", "name", [cell(row.name) for row in mine]),
                ("", "own time", [cell(row.share, text.percent) for row in mine]),
                ("", "with calls", [cell(row.total, text.percent) for row in mine]),
            ]
            caption = f"{of}, with their fractions of the time, including waiting."
            found.append(table(columns, caption, f"{of}, {run.called}", style="top"))
    return found


def _top_table(run: RunResult, top: Sequence[TopEntry]) -> Table:
    columns = [
        ("", "name", [cell(row.name) for row in top]),
        (
            "",
            "ms per step",
            [
                cell(1e3 * row.seconds, note=f"standard deviation {text.number(1e3 * row.std, 2)}" * bool(row.std))
                for row in top
            ],
        ),
        ("", "share", [cell(row.share, text.percent) for row in top]),
        ("", "calls per step", [cell(row.calls, lambda calls: f"{round(calls, 2):,.12g}") for row in top]),
        ("", "kind", [cell(row.kind) for row in top]),
    ]
    about = f"Slowest operations of a step, {run.called}"
    return table(columns, "Slowest operations of a step, from profile_summary.csv.", about, style="top")


# ---- the machine -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobUse:
    """Resources that a stage of a run used on its first node, in the terms of Slurm's `seff`."""

    stage: str
    seconds: float  #: Wall-clock time.
    cores: int  #: Allocated cores.
    cpu_seconds: float  #: CPU time of all processes of the stage.
    peak_bytes: float | None  #: Peak memory of all processes of the stage together.
    memory_bytes: int | None  #: Allocated memory.
    gpu: float | None  #: Fraction of the time in which a GPU ran a kernel, mean over the GPUs.
    waiting: float | None  #: Fraction of a training step spent waiting for data.

    @property
    def efficiency(self) -> float:
        return self.cpu_seconds / (self.seconds * self.cores)

    @property
    def memory(self) -> float | None:
        return self.peak_bytes / self.memory_bytes if self.peak_bytes is not None and self.memory_bytes else None


def job(run: RunResult) -> JobUse | None:
    """Return the resources used by training, or else by the run's first stage; None without telemetry."""
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
        "is CPU time / (wall-clock time × cores). Memory is the peak of all processes together, in which shared "
        "memory counts for each process. Waiting for data is a fraction of a training step."
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


def watched(plan: PlanResult) -> Section | None:
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
    return Section("What the machine did meanwhile", charts=[chart])


#: Telemetry column → (label on the page, factor from the column's unit to the label's; None: number of cores).
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


#: Maximum number of points in the chart of a run.
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
    """Return a row with the known quantities of a node for each sample."""
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
