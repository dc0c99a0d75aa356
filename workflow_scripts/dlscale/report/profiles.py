"""Where the time of a step goes, and what became of it: profiles in the page, and side by side."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlscale.core import text
from dlscale.core.errors import UserError
from dlscale.core.noise import standard_errors
from dlscale.measure.profiling import Profile, ProfiledTool, TopEntry
from dlscale.report.blocks import Cell, Entry, Section, Table, View, cell, table
from dlscale.report.figures import GRID, MODE_COLOURS, MUTED, RUN_COLOURS, Bar, bars
from dlscale.report.results import PlanResult, RunResult, first_and_least, slowness

if TYPE_CHECKING:
    import pandas as pd

#: How many runs, and rows of a profile, are shown.
BARS, TOP = 8, 10

#: Parts of a step in the order in which they come, with their names: `other` is what no range covers, `unexplained`
#: what nothing shows. Loading is coloured as IO, computing as runs are, which stand in other figures.
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


# ---- the parts of a step -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A step, and where its time goes."""

    label: str
    parts: dict[str, float]  #: Seconds by part (of `PARTS`).
    full: float | None  #: Seconds of a step of FULL, which a profile's steps are not; None if it was not measured.
    samples: int | None  #: Of a step, over all processes.


def step(run: RunResult) -> Step | None:
    """Return where a step's time goes: from its profile, else from its throughput; None if neither tells."""
    profile, measured = run.profile, run.throughput
    batch = (measured.batch_size if measured else None) or (profile.batch_size if profile else None)
    full, computing, loading = (
        batch / trials.mean if batch and (trials := run.trials(mode)) and trials.mean else None
        for mode in ("FULL", "SYNTHETIC", "IO")
    )
    tool = next((tool for tool in profile.tools if tool.ranges), None) if profile else None
    if tool:
        return Step(f"{run.label} ({tool.name})", of_tool(tool), full, batch)
    if not (full and computing):
        return None
    # A step cannot wait longer than its batch takes to load. What is missing beyond that nobody has measured: the two
    # slow each other down, or something else did.
    parts = {"data": min(max(0.0, full - computing), loading or 0.0), "compute": min(full, computing)}
    return Step(run.label, {**parts, "unexplained": max(0.0, full - sum(parts.values()))}, full, batch)


def shares(run: RunResult) -> dict[str, float]:
    """Return the share of a step's time that each part has; nothing if nothing tells."""
    found = step(run)
    whole = sum(found.parts.values()) if found else 0.0
    return {part: seconds / whole for part, seconds in found.parts.items()} if found and whole else {}


def of_tool(tool: ProfiledTool) -> dict[str, float]:
    """Return seconds a step by part; they add up to the step.

    Of a device they are its work by range, where parts of it ran side by side shares of the time that it was busy;
    `data` is the time for which it was idle while the host was asking for data, `other` all the rest of the step.
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


# ---- the page ----------------------------------------------------------------------------------------


def section(plan: PlanResult, page: Path) -> Section | None:
    """Return where the time of a step goes, run by run, and what the profilers left; None if nothing tells."""
    steps = [found for run in first_and_least(plan.runs, BARS, slowness) if (found := step(run))]
    if not steps:
        return None
    profiled = [run for run in plan.runs if run.profile]
    # Steps of different batches are no before and after: then all bars are those of a sample.
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
        own=[_profile(plan, run, page, before) for run, before in zip(profiled, [None, *profiled], strict=False)],
        few=True,
    )


def timeline(name: str, steps: Sequence[Step], sample: bool = False) -> str:
    """Draw where the milliseconds of a step go, or those of a `sample`."""
    groups = []
    for each in steps:
        scale = 1e3 / ((each.samples or 1) if sample else 1)
        parts = [(scale * each.parts[part], colour) for part, (_, colour) in PARTS.items() if part in each.parts]
        mark = None if each.full is None else scale * each.full
        end = sum(length for length, _ in parts) if mark is None else mark
        groups.append((each.label, [Bar(parts, f"{text.number(end)} ms", mark=mark)]))
    return bars(name, groups, f"time of a {'sample' if sample else 'step'} (ms)")


def _about(sample: bool, steps: Sequence[Step]) -> str:
    said = [f"A step{' over the samples of its batch' * sample}, part by part, while the profiler named was at work."]
    if any(each.full for each in steps):
        said.append("The upright line and the number are FULL: other steps, at another moment, with no profiler.")
    else:
        said.append("The number is such a step; without a profiler it may be shorter.")
    if any("unexplained" in each.parts for each in steps):
        said.append(
            "Of a run that was not profiled the bar is FULL, too: computing takes SYNTHETIC's time, waiting for data "
            "at most IO's, and nothing shows where the rest goes."
        )
    return " ".join(said)


def _profile(plan: PlanResult, run: RunResult, page: Path, before: RunResult | None) -> View:
    profile, folder = run.profile, Path(os.path.relpath(run.folder / "profile", page))
    assert profile
    top = [each for each in profile.top if each.kind in ("kernel", "operator")][:TOP] or profile.top[:TOP]
    files = {
        tool.name: [(title, (folder / name).as_posix()) for title, name in tool.files.items()] for tool in profile.tools
    }
    return {
        "id": plan.anchor(run),
        "label": run.label,
        "tools": [(tool, files[tool.name]) for tool in profile.tools],
        "tables": [
            *([_top_table(run, top)] if top else []),
            *([found] if before and (found := _changes_table(before, run)) else []),
        ],
        "memory": profile.memory,
        "cpu": profile.device.kind == "cpu",
        "summary": (folder / "profile_summary.csv").as_posix(),
    }


def _top_table(run: RunResult, top: Sequence[TopEntry]) -> Table:
    def calls(value: float) -> str:
        return text.count(int(value)) if value == int(value) else text.number(value)

    columns = [
        ("", "name", [Cell(row.name, row.name) for row in top]),
        ("", "ms a step", [_ms(row.seconds, row.std) for row in top]),
        ("", "share", [cell(row.share, text.percent) for row in top]),
        ("", "calls a step", [cell(row.calls, calls) for row in top]),
        ("", "kind", [cell(row.kind) for row in top]),
    ]
    about = f"Where the time of a step goes, {run.label}"
    return table(columns, "Where the time of a step goes: the first rows of the summary.", about, style="top")


def _changes_table(before: RunResult, run: RunResult) -> Table | None:
    """Return what got faster and slower between two profiles and is more than their noise, the greatest first."""
    found = compare(*(read(each.folder) for each in (before, run)))
    found = found[found.certain]
    found = found[found.tool == found.tool.iloc[0]] if len(found) else found  # two profilers would tell the same twice
    caption = f"What got faster and slower since {before.label}, where it is more than the noise of the steps."
    shown = extremes(found, TOP // 2)
    return changes_table(shown, caption, f"{caption[:-1]}, {run.label}") if len(shown) else None


# ---- side by side ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """A profile as it is compared."""

    rows: list[TopEntry]
    steps: dict[str, int]  #: That each profiler saw.
    complete: frozenset[str] = frozenset()  #: The profilers that leave no row out.
    batch: float | None = None  #: Samples a step of one process.


def read(path: str | Path) -> Summary:
    """Read the profile of a run: the run's folder, its folder `profile`, or a file in that."""
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    if not (folder / "profile.json").is_file() and (folder / "profile").is_dir():
        folder /= "profile"
    record = Profile.read(folder / "profile.json")
    return Summary(
        read_rows(folder / "profile_summary.csv"),
        {tool.name: tool.steps for tool in record.tools},
        frozenset(tool.name for tool in record.tools if tool.complete),
        record.batch_size / record.nranks if record.batch_size else None,
    )


def read_rows(file: Path) -> list[TopEntry]:
    """Read a `profile_summary.csv`."""
    try:
        with file.open(newline="", encoding="utf-8") as lines:
            each = enumerate(csv.DictReader(lines), 1)
            rows = [TopEntry.checked(row, f"{file}: row {number}") for number, row in each]
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; run the profile stage first") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{file}: no summary of a profile ({error}); run the profile stage again") from None
    if not rows:
        raise UserError(f"{file}: holds no row; run the profile stage again")
    return rows


def unit(before: Summary, after: Summary) -> str:
    """Return what two profiles are compared by: a `step`, or a `sample` where a step has other ones."""
    return "step" if None in (before.batch, after.batch) or before.batch == after.batch else "sample"


def compare(before: Summary, after: Summary) -> pd.DataFrame:
    """Return what became of each row that either has: tool, kind, name, before, after, noise, difference, certain, per.

    Times are seconds, of several ranks their mean; NaN where a profiler may have left the row out. The noise is half of
    the 95 % interval of a difference of means over n steps of standard deviation s each, sqrt(s1^2 / n1 + s2^2 / n2)
    times Student's t of the fewer steps: infinite of one step, and of lines, of which no spread is known. What drifts
    from one profile to the other is not in it. Only profilers that both have are compared.
    """
    per, both = unit(before, after), (before, after)
    joined = _means(before).add_suffix("_before").join(_means(after).add_suffix("_after"), how="outer").reset_index()
    tools = set.intersection(*({row.tool for row in summary.rows} for summary in both))
    joined = joined[joined.tool.isin(tools)]
    for summary, when in zip(both, ("before", "after"), strict=True):
        scale = 1 / (summary.batch or 1) if per == "sample" else 1.0
        # Of a profiler that leaves nothing out, a row that is not there took no time.
        absent = joined[f"error_{when}"].isna()
        joined[when] = scale * joined[f"mean_{when}"].mask(absent & joined.tool.isin(summary.complete), 0.0)
        joined[f"error_{when}"] = scale * joined[f"error_{when}"].fillna(0.0)
    fewest = {tool: min(summary.steps.get(tool, 1) for summary in both) for tool in tools}
    reaches = [_reach(kind, fewest[tool]) for tool, kind in zip(joined.tool, joined.kind, strict=True)]
    noise = (joined.error_before**2 + joined.error_after**2) ** 0.5 * reaches
    joined["difference"] = joined.after - joined.before
    joined["noise"] = noise.fillna(math.inf).mask(joined.difference.isna(), math.inf)
    joined["certain"] = joined.difference.abs() > joined.noise
    return joined[["tool", "kind", "name", "before", "after", "noise", "difference", "certain"]].assign(per=per)


def _reach(kind: str, steps: int) -> float:
    """Return how many standard errors the noise is; of lines it is unknown."""
    return math.inf if kind == "line" else standard_errors(steps)


def _means(summary: Summary) -> pd.DataFrame:
    """Return seconds a step, mean over the ranks, and their standard error; NaN where a rank may have left it out."""
    import pandas as pd

    rows = pd.DataFrame([{**row.model_dump(), "square": row.std**2} for row in summary.rows])
    found = rows.groupby(["tool", "kind", "name"]).agg({"seconds": "sum", "square": "sum", "rank": "nunique"})
    tools = found.index.get_level_values("tool")
    ranks = tools.map(rows.groupby("tool")["rank"].nunique().to_dict()).to_numpy()
    steps = tools.map({tool: max(summary.steps.get(tool, 1), 1) for tool in set(tools)}).to_numpy()
    # Of a profiler that leaves nothing out, a rank without the row took no time for it.
    lost = (found["rank"] < ranks) & ~tools.isin(list(summary.complete))
    error = (found.square / steps) ** 0.5 / ranks
    return pd.DataFrame({"mean": (found.seconds / ranks).mask(lost), "error": error.mask(lost, 0.0)})


def extremes(changes: pd.DataFrame, count: int = 10) -> pd.DataFrame:
    """Return what got faster the most, then what got slower the most, the greatest difference first."""
    import pandas as pd

    faster = changes[changes.difference < 0].nsmallest(count, "difference")
    return pd.concat([faster, changes[changes.difference > 0].nlargest(count, "difference")])


def unmatched(changes: pd.DataFrame, count: int = 10) -> pd.DataFrame:
    """Return the rows that only one profile has while the other may have left them out, the longest first."""
    lone = changes[changes.difference.isna()]
    return lone.loc[lone[["before", "after"]].max(axis=1).nlargest(count).index]


def changes_table(changes: pd.DataFrame, caption: str, about: str = "") -> Table:
    """Return what became of rows, in milliseconds."""
    rows: list[Any] = list(changes.itertuples())
    per = rows[0].per if rows else "step"
    columns = [
        ("", "name", [Cell(row.name, row.name) for row in rows]),
        ("", "change (ms)", [_ms(row.difference, row.noise) for row in rows]),
        ("", f"before (ms a {per})", [_ms(row.before) for row in rows]),
        ("", f"now (ms a {per})", [_ms(row.after) for row in rows]),
        ("", "kind", [cell(f"{row.kind}, {row.tool}") for row in rows]),
        ("", "certain", [cell("yes" if row.certain else "within the noise") for row in rows]),
    ]
    return table(columns, caption, about or caption, style="top", sortable=False)


def _ms(seconds: float, noise: float = 0.0) -> Cell:
    if math.isnan(seconds):
        return Cell()
    spread = f"± {text.number(1e3 * noise, 2)}" if math.isfinite(noise) else "noise unknown"
    return cell(1e3 * seconds, note=spread * bool(noise))
