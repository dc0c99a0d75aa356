"""Causes of a slow run: loading."""

from __future__ import annotations

from dlscale.core.text import many, number, percent, size
from dlscale.report.evidence import DIRECT, Evidence, Finding, bound, crowded_out
from dlscale.results import MIN_FRACTION


def loading(evidence: Evidence) -> Finding | None:
    """Find slow loading: too few workers for the CPUs, too much work for the CPUs, or slow storage."""
    usage, delivers = evidence.usage("IO"), f"Loading alone delivers {number(evidence.rate('IO'))} samples/s"
    if not (evidence.loading and usage):
        return None
    own = max(1, int(evidence.setting("loader.workers", 1)))
    # The usage is of all processes of a node, each of which has its own workers.
    ranks = 1 if evidence.setting("parallel.kind") == "dp" else int(evidence.setting("geometry.gpus_per_node", 1))
    readers = ranks * own
    busy = usage.cpu_seconds / usage.seconds / min(readers, usage.cores)
    idle = usage.cores - usage.cores_cpu_seconds / usage.seconds
    faster = evidence.faster_loader
    if busy > 0.5 and idle >= 0.5 and readers < usage.cores:
        count, more = evidence.setting("loader.workers", 1), min(-(-usage.cores // ranks), max(2, 2 * own))
        with_ = many(count, "worker") + " per process" * (ranks > 1)
        why = (
            f"{delivers} with {with_}. The loading {'process is' if count == ranks == 1 else 'processes are'} busy, "
            f"while {number(idle, 2)} of {usage.cores} CPUs are idle."
        )
        rung = f"loader: {{workers: {more}}}"
        todo = f"{rung}. The stage `tune` finds the best number of workers. {faster}".rstrip()
        return Finding("workers", "too few workers", why, todo, evidence.loading, rung)
    if crowded_out(usage):
        return None
    if busy > 0.5:
        cores = number(usage.cpu_seconds / usage.seconds, 2)
        why = f"{delivers} and keeps {cores} of {usage.cores} CPUs busy."
        todo = faster or "Store the data as the model needs them: float16, channels last, no compression."
        return Finding("loader", "the loader's work", why, todo, evidence.loading, DIRECT if faster else "")
    read = usage.read_bytes
    disk = f", while disks delivered {size(read / usage.seconds)}/s" if read else ""
    return Finding(
        "storage",
        "slow storage",
        f"{delivers}. The run's processes computed for only {percent(busy)} of that time and waited for files for the "
        f"rest of the time{disk}.",
        "Copy the data to faster storage (the node's own disk, or memory). Store float16, in chunks of one sample. "
        "Use more workers (loader.workers), so that more files are read at the same time.",
        evidence.loading,
    )


def overlap(evidence: Evidence) -> Finding | None:
    """Find loading and computing that take turns instead of overlapping."""
    found = bound(evidence.throughput)
    if not found or found.loading is None:
        return None
    share, turns = min(found.loading, 1 - found.share), evidence.setting("loader.workers") == 0
    # The rates are measured at different times, so a slow moment of the machine may explain a small share.
    if share < 2 * MIN_FRACTION and not turns:
        return None
    todo = "loader: {workers: 1} or more." if turns else "Use more loader.workers, or a longer loader.prefetch."
    why = "No worker loads while the model computes" if turns else "Loading and computing do not overlap"
    return Finding(
        "overlap",
        "loading and computing take turns",
        f"Training loads for {percent(found.loading)} of the time and computes for the rest of the time. {why}.",
        f"{todo} {evidence.faster_loader}".rstrip(),
        share,
        "loader: {workers: 1}" if turns else "",
    )
