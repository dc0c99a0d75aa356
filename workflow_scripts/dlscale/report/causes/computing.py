"""Causes of a slow run: operators, memory, and copies to the device."""

from __future__ import annotations

from dlscale.core.text import many, number, percent, size
from dlscale.report.evidence import COMPILED, Evidence, Finding
from dlscale.results import MIN_FRACTION


def launches(evidence: Evidence) -> Finding | None:
    """Find operators that take longer to launch than to compute."""
    if evidence.setting("cuda_graph") or evidence.loading:
        return None
    if evidence.idle:
        idle, for_data = evidence.idle
        share, launched = idle - for_data, evidence.activity.launches
        with_ = f" with {number(launched)} launches" if launched else ""
        why = (
            f"In addition to its wait for data, the device is idle for {percent(share)} of a step{with_}, because the "
            "host does not launch work fast enough."
        )
        if share < 0.25 or sync(evidence):
            return None
    else:
        measured, rate = evidence.throughput, evidence.rate("SYNTHETIC")
        if not (measured and measured.batch_size and measured.work and measured.peaks and rate) or evidence.compiled:
            return None
        operators, each = measured.work.operators or 0.0, measured.peaks.operator_seconds or 0.0
        seconds = measured.batch_size / rate
        share = min(operators * each / seconds, 1.0)
        # A GPU computes while the host launches, so launching delays the GPU only if it takes nearly all of the step.
        if share < (0.9 if evidence.cuda else 0.3):
            return None
        why = (
            f"A step launches {number(operators)} operators. Launching them at {1e6 * each:.1f} µs each takes "
            f"{percent(share)} of the step's {1e3 * seconds:.1f} ms."
        )
    fuse = [rung for rung in evidence.rungs if "precision" not in rung]
    todo = f"{', '.join([*fuse, 'a larger batch_size'])}."
    return Finding("launches", "tiny operators", why, todo, share, next(iter(fuse), ""))


def sync(evidence: Evidence) -> Finding | None:
    """Find steps in which the host waits for the device."""
    activity, seconds = evidence.activity, evidence.step_seconds
    items = activity.items or 0.0
    share: float | None = None
    if evidence.idle and activity.sync_seconds is not None and seconds:
        waited, (idle, for_data) = activity.sync_seconds / seconds, evidence.idle
        # The cost is the device's idle time, without the wait for data.
        share = idle - max(for_data, evidence.loading)
        if min(waited, share) < MIN_FRACTION or (not items and (activity.syncs or 0) < 1):
            return None
        why = (
            f"The host waits for the device {number(activity.syncs or items)} times per step, which takes "
            f"{percent(waited)} of the step. After each wait, no work is ready for the device, which is idle for "
            f"{percent(idle)} of the step."
        )
    elif items >= 1:
        why = (
            f"A step reads {many(round(items), 'number')} from tensors (`.item()`, `float()`, `if tensor`). On a GPU, "
            "the host waits at each read until all earlier work is done. On a CPU, a read costs nothing."
        )
    else:
        return None
    return Finding(
        "sync",
        "a wait in the loop",
        why,
        "Keep numbers, such as losses, on the device (`detach()`), and read them once per epoch. The profile shows the "
        "lines of code that wait.",
        share,
    )


def memory(evidence: Evidence) -> Finding | None:
    """Find operators that are limited by memory bandwidth and not by arithmetic."""
    measured = evidence.throughput
    used = measured.mbu("SYNTHETIC") if measured else None
    # Compiling fuses operators, so the bytes that a compiled step moves are unknown.
    if not (measured and used and measured.work and measured.peaks and not evidence.compiled):
        return None
    moving = (measured.work.bytes or 0.0) / measured.peaks.bytes_per_second
    computing = measured.work.flops / measured.peaks.flops
    if moving < 1.5 * computing or used < 0.4 or launches(evidence) or evidence.loading:
        return None
    half = [] if "16" in str(evidence.setting("precision", "")) else ["precision: bf16 (half the bytes)"]
    rungs = [f"{COMPILED} (one memory pass for many operators)", *half, "memory_format: channels_last for convolutions"]
    return Finding(
        "memory",
        "memory bandwidth",
        f"The step's operators move {size(measured.work.bytes)} per sample, at {percent(min(used, 1.0))} of the memory "
        f"bandwidth. Arithmetic needs only {percent(computing / moving)} of the time that these transfers need.",
        f"{', '.join(rungs)}.",
        min(used, 1.0) - min(used, 1.0) * computing / moving,
        COMPILED,
    )


def copies(evidence: Evidence) -> Finding | None:
    """Find copies to the device from memory that is not page-locked."""
    activity, seconds = evidence.activity, evidence.step_seconds
    if not (activity.pageable_bytes and activity.copy_seconds and seconds) or (
        activity.pageable_bytes < 0.1 * (activity.copy_bytes or activity.pageable_bytes)
    ):
        return None
    return Finding(
        "copies",
        "copies from pageable memory",
        f"Each step copies {size(activity.pageable_bytes)} to the device from pageable memory. All copies to the "
        f"device take {percent(activity.copy_seconds / seconds)} of the step. The host waits for each copy from "
        "pageable memory.",
        "loader: {pin_memory: true}, or loader: {kind: direct}, which copies from page-locked buffers.",
        max(activity.copy_seconds / seconds, 0.0),
        "loader: {pin_memory: true}",
    )
