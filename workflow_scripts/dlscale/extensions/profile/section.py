"""Section of the page: where the time of a step goes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from dlscale.core import text
from dlscale.extensions.profile.machine import PARTS, StepTime, step
from dlscale.measure.profilers import Profile, ProfiledTool, TopEntry
from dlscale.parallel.records import Memory
from dlscale.report.figures import (
    FIT,
    Chart,
    Fold,
    Item,
    Link,
    Section,
    Table,
    View,
    bars,
    cell,
    rounded,
    scale_of,
    styles,
    table,
    tooltip,
)
from dlscale.report.sections import Page
from dlscale.results import PlanResult, RunResult

#: Maximum number of rows of a profile that the page shows.
TOP = 10

#: Note on the files of profilers.
TRACES = (
    "Traces (`.json.gz`) open in ui.perfetto.dev, and `.nsys-rep` files open in NVIDIA Nsight Systems. The links work "
    "only if the results folder is next to this page."
)


def section(plan: PlanResult, page: Page) -> Section | None:
    """Return the time of a step by run and part, and the profilers' files; None without measurements."""
    known = {run: found for run in plan.runs if (found := step(run))}
    steps = list(known.values())
    if not steps:
        return None
    # Steps with different batches are compared per sample.
    sample = len({each.samples for each in steps}) > 1 and all(each.samples for each in steps)
    profiled = [(run, run.profile) for run in plan.runs if run.profile]
    return Section(
        "Where a step's time goes",
        charts=[timeline(plan, known, sample), *rooflines(plan)],
        folds=[_fold(plan, run, each, page.folder, run is profiled[0][0]) for run, each in profiled],
        notes=[TRACES] if profiled else [],
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


#: Minimum FLOP/byte of a point in a roofline (one FLOP per float32), because only FLOPs of matrix products count.
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
    """Return as text the time of a step if all operators were on the roof, and the measured time."""
    assert run.profile and run.throughput and run.throughput.peaks
    peaks = run.throughput.peaks
    least = sum(max(each.flops / peaks.flops, each.bytes / peaks.bytes_per_second) for each in run.profile.work)
    now = sum(each.seconds for each in run.profile.work)
    return f"{text.number(1e3 * least)} instead of {text.number(1e3 * now)} ms ({run.called})"


def _about(sample: bool, steps: Sequence[StepTime]) -> str:
    measured = ", measured while the profiler runs" * any("unexplained" not in each.parts for each in steps)
    full = "The vertical line and the number show the time of a training step without a profiler."
    said = f"Time of each part of a step{', divided by its samples' * sample}{measured}. " + (
        full
        if any(each.full for each in steps)
        else "The number is the sum of the parts. Without a profiler, a step may be shorter."
    )
    unexplained = (
        " Without a profile, the parts are estimates: the computing is a step of computing alone. The wait for data is "
        "the rest, but not longer than loading alone. The remaining time is unexplained."
    )
    return said + unexplained * any("unexplained" in each.parts for each in steps)


def _fold(plan: PlanResult, run: RunResult, profile: Profile, page: Path, opened: bool) -> Fold:
    folder = Path(os.path.relpath(run.folder / "profile", page))
    others = [each for each in profile.top if each.kind not in FUNCTIONS]
    top = [each for each in others if each.kind in ("kernel", "operator")][:TOP] or others[:TOP]
    return Fold(
        Link(run.called, f"#{plan.anchor(run)}"),
        Link("profile_summary.csv", (folder / "profile_summary.csv").as_posix()),
        tables=[*_functions(run, profile.top), *([_top_table(run, top)] if top else [])],
        after=[_memory(profile.memory, profile.device.kind == "cpu")] if profile.memory else [],
        items=[_item(tool, folder) for tool in profile.tools],
        open=opened,
    )


def _memory(memory: Memory, cpu: bool) -> str:
    predicted, size = memory.predicted, text.size
    said = (
        f"Memory predicted before the first step: {size(predicted.total)} (parameters {size(predicted.parameters)}, "
        f"gradients {size(predicted.gradients)}, optimiser {size(predicted.optimizer)}, activations "
        f"{size(predicted.activations)})"
    )
    if memory.peak:
        of = "measured peak of the entire process, with Python and its libraries" if cpu else "measured peak"
        said += f"; {of}: {size(memory.peak)}"
    return said + (f"; memory of the device: {size(memory.device)}" if memory.device else "") + "."


def _item(tool: ProfiledTool, folder: Path) -> Item:
    said = f" {tool.version}" if tool.version else ""
    if tool.problem:
        return Item(tool.name, f"{said}: no profile. {tool.problem}")
    said += f": {tool.overhead.words}" if tool.overhead else ""
    return Item(tool.name, said, [Link(title, (folder / name).as_posix()) for title, name in tool.files.items()])


#: Kind of row → caption of the table of Python functions.
FUNCTIONS = {
    "function": "Python functions in the main thread of the training process",
    "worker": "Python functions in the worker processes of the training process",
}


def _functions(run: RunResult, rows: Sequence[TopEntry]) -> list[Table]:
    """Return tables of Python functions: of the training process, and of its workers."""
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


def roofs(name: str, about: str, rows: Sequence[View], runs: Sequence[str], shown: Mapping[str, str]) -> Chart:
    """Return a roofline chart: points below roofs, in the colours of the runs, on logarithmic axes.

    A row is a point, or a corner of a "roof", with "intensity" (FLOP/byte) and "rate" (GFLOP/s). A point also has its
    "share" (% of the time of all operators or modules), and may have a text, "said".

    Parameters
    ----------
    shown
        Fields of the tooltip, with their titles.
    """
    kept, looks = rounded(rows), styles(runs)
    pair = {"field": "run", "type": "nominal"}
    axes = {"x": ("intensity", "arithmetic intensity (FLOP/byte)"), "y": ("rate", "rate (GFLOP/s)")}
    encoding: View = {
        axis: {"field": name, "title": title, "type": "quantitative"} for axis, (name, title) in axes.items()
    }
    for axis, room in (("x", 50), ("y", 25)):  # space for texts at the ends
        encoding[axis]["scale"] = {"type": "log", "nice": False, "padding": room}
    encoding |= {
        "color": {**pair, "scale": scale_of({run: colour for run, (colour, _) in looks.items()})},
        "opacity": {"condition": {"param": "chosen", "value": 0.8}, "value": 0.08},
        "tooltip": tooltip(kept, {"run": "run", **shown}),
    }
    params = [
        {"name": "chosen", "select": {"type": "point", "fields": ["run"]}, "bind": "legend"},
        {"name": "view", "select": {"type": "interval", "zoom": "wheel![event.shiftKey]"}, "bind": "scales"},
    ]
    shape = {**pair, "scale": scale_of({run: shape for run, (_, shape) in looks.items()})}
    size = {"field": "share", "type": "quantitative", "scale": {"range": [12, 400]}, "legend": None}
    layer: list[View] = [
        {
            "mark": {"type": "line", "clip": True},
            "transform": [{"filter": "datum.roof"}],
            "params": params,
            "encoding": {"tooltip": {"value": None}},
        },
        {
            "mark": {"type": "point", "filled": True, "clip": True},
            "transform": [{"filter": "!datum.roof"}],
            "encoding": {"shape": shape, "size": size},
        },
        {
            "mark": {"type": "text", "dy": -14, "limit": 160, "clip": True},
            "transform": [{"filter": "datum.said"}],
            "encoding": {"text": {"field": "said"}},
        },
    ]
    main = {"data": {"values": kept}, "encoding": encoding, "layer": layer}
    spec = {"description": about, "width": "container", "height": 300, "autosize": FIT, "layer": [main]}
    return Chart(name, about, spec, runs=list(runs))
