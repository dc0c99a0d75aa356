"""Where the time of a step goes, part by part, read from what was measured of a run."""

from __future__ import annotations

from dlscale.measure.profilers.records import ProfiledTool
from dlscale.report import figures
from dlscale.report.results import RunResult


def bar(run: RunResult) -> figures.Bar | None:
    """Return where a step's time goes: from its profile, else from its throughput; None if neither tells."""
    profile, measured = run.profile, run.throughput
    batch = (measured.batch_size if measured else None) or (profile.batch_size if profile else None)
    step, computing, loading = (
        batch / trials.mean if batch and (trials := run.trials(mode)) and trials.mean else None
        for mode in ("FULL", "SYNTHETIC", "IO")
    )
    tool = next((tool for tool in profile.tools if tool.ranges), None) if profile else None
    if tool:
        return figures.Bar(f"{run.label} ({tool.name})", of_tool(tool), step, batch)
    if not (step and computing):
        return None
    # A step cannot wait longer than its batch takes to load. What is missing beyond that nobody has measured: the two
    # slow each other down, or something else did.
    waiting = min(max(0.0, step - computing), loading or 0.0)
    parts = {"data": waiting, "compute": min(step, computing)}
    return figures.Bar(run.label, {**parts, "unexplained": max(0.0, step - sum(parts.values()))}, step, batch)


def shares(run: RunResult) -> dict[str, float]:
    """Return the share of a step's time that each part has; nothing if nothing tells."""
    found = bar(run)
    whole = sum(found.parts.values()) if found else 0.0
    return {part: seconds / whole for part, seconds in found.parts.items()} if found and whole else {}


def of_tool(tool: ProfiledTool) -> dict[str, float]:
    """Return seconds a step by part; they add up to the step.

    Of a device they are its work by range, where parts of it ran side by side shares of the time that it was busy;
    `data` is the time for which it was idle while the host was asking for data, `other` all the rest of the step.
    """
    ranges, idle = tool.ranges, tool.activity.idle_seconds
    found = {part: ranges[part] for part in figures.PARTS if part in ranges}
    if work := ranges["step"].device_seconds if "step" in ranges else None:
        step = tool.seconds_per_step or 0.0
        side_by_side = min(1.0, max(0.0, step - sum(idle.values())) / work)
        parts = {part: side_by_side * (time.device_seconds or 0.0) for part, time in found.items()}
        parts["data"] = idle.get("data", 0.0) + idle.get("copy", 0.0)  # `copy` is within `data`
    else:
        step = ranges["step"].seconds if "step" in ranges else 0.0
        parts = {part: time.seconds for part, time in found.items()}
        if "copy" in parts and "data" in parts:
            parts["data"] = max(0.0, parts["data"] - parts["copy"])
    return {**parts, "other": max(0.0, step - sum(parts.values()))}
