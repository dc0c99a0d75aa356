"""Extension: the stage `profile`, its profilers, and page sections on profiles, job efficiency and telemetry."""

from typing import Any

from dlscale.core.registry import provider, table
from dlscale.core.stage import Stage, path

PROFILERS = {
    "torch": "dlscale.extensions.profile.torch_profiler",
    "lines": "dlscale.extensions.profile.lines",
}


def profile_work(run: Any, train: int | None, valid: int | None) -> float | None:
    """Return the number of samples that the profile stage computes.

    The number is (skipped steps x processes + 3 x profilers x profiled steps) x batch size, with `processes`
    from `profile_starts`. Each profiler has 3 windows of steps: before, during and after its recording.
    """
    steps = run.profile.skip * profile_starts(run) + 3 * len(run.profile.tools) * run.profile.steps
    return float(steps * run.batch_size)


def profile_starts(run: Any) -> int:
    """Return the number of processes in which a rank makes steps, one after the other.

    The profilers `torch` and `lines` share the first process. Each other profiler starts one more process.
    """
    return 1 + len({*run.profile.tools} - PROFILERS.keys())


STAGES = {
    "profile": Stage(
        "dlscale.extensions.profile.profile",
        "Profile some steps of a run: time and memory by operation.",
        "run",
        (path("--out", "folder to write: profile.json, profile_summary.csv, traces"),),
        settings=("profile",),
        outputs=("profile/profile.json", "profile/profile_summary.csv", "telemetry/profile.csv"),
        nodes="geometry",
        work=profile_work,
        starts=profile_starts,
        imports=lambda run: [*provider("predict_memory"), *(table("PROFILERS")[name] for name in run.profile.tools)],
        after="throughput",
    ),
}

SECTIONS = {
    "profile": "dlscale.extensions.profile.section.section",
    "efficiency": "dlscale.extensions.profile.machine.efficiency",
    "telemetry": "dlscale.extensions.profile.machine.telemetry",
}
