"""Causes of a slow run.

Each function in `CAUSES` looks for one cause. The function returns a finding with its evidence, or None if the cause is
absent or was not measured. An extension adds functions by their full names, in its table `CAUSES`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from dlscale.core import registry
from dlscale.core.text import many, number, percent, size
from dlscale.measure.records import Throughput
from dlscale.parallel.network import is_tcp
from dlscale.report.evidence import COMPILED, DIRECT, Evidence, Finding, bound, crowded_out
from dlscale.report.speedup import between
from dlscale.results import MIN_FRACTION, foreign_cpu_fraction


def loading(evidence: Evidence) -> Finding | None:
    """Find slow loading: slow storage, too few workers for the cores, or too much work for the cores."""
    usage, delivers = evidence.usage("IO"), f"Loading alone delivers {number(evidence.rate('IO'))} samples/s"
    if not (evidence.loading and usage):
        return None
    own = max(1, int(evidence.setting("loader.workers", 1)))
    # The usage covers all processes of a node, and each process has its own workers.
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
            f"while {number(idle, 2)} of {usage.cores} cores are idle."
        )
        rung = f"loader: {{workers: {more}}}"
        todo = f"{rung}. The stage `tune` finds the best number of workers. {faster}".rstrip()
        return Finding("workers", "too few workers", why, todo, evidence.loading, rung)
    if crowded_out(usage):
        return None
    if busy > 0.5:
        cores = number(usage.cpu_seconds / usage.seconds, 2)
        why = f"{delivers} and keeps {cores} of {usage.cores} cores busy."
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


def straggler(evidence: Evidence) -> Finding | None:
    """Find one slow rank that all other ranks wait for."""
    for mode, doing in (("alone", "computes"), ("IO", "loads")):
        trials = evidence.trials(mode)
        if not trials or len(trials.rank_throughput) < 2 or (mode == "IO" and not evidence.loading):
            continue
        slowest = min(trials.rank_throughput)
        rank = trials.rank_throughput.index(slowest)
        usual = statistics.median([rate for number_, rate in enumerate(trials.rank_throughput) if number_ != rank])
        if slowest < 0.85 * usual:
            return Finding(
                "straggler",
                f"slow rank {rank}",
                f"Rank {rank} {doing} {number(slowest)} samples/s, while the median of the other ranks is "
                f"{number(usual)}. All other ranks wait for the slow rank in every step.",
                f"Check the node and the device of rank {rank}: clocks, temperature, other programs. Exclude the node "
                "if it stays slow.",
                1 - slowest / usual,
            )
    return None


def communication(evidence: Evidence) -> Finding | None:
    """Find gradient averaging that computation does not hide."""
    measured, activity, seconds = evidence.throughput, evidence.activity, evidence.step_seconds
    alone, together = evidence.trials("alone"), evidence.trials("SYNTHETIC")
    if alone and together and measured and together.mean:
        if between(together, alone).noise:
            return None
        share = 1 - together.mean / alone.mean
        why = (
            f"Gradient averaging over {measured.nranks} processes lowers the rate of computing alone from "
            f"{number(alone.mean)} to {number(together.mean)} samples/s."
        )
    elif activity.comm_seconds and seconds:  # `alone` is missing if a CUDA graph contains the averaging
        exposed = activity.comm_seconds * (1 - (activity.comm_overlap or 0.0))
        share = min(exposed / seconds, 1.0)
        why = (
            f"A step takes {1e3 * seconds:.1f} ms. Averaging gradients takes {1e3 * activity.comm_seconds:.1f} ms of "
            f"the step, and no computation overlaps with {1e3 * exposed:.1f} ms of the averaging."
        )
    else:
        return None
    return Finding(
        "communication",
        "communication",
        why,
        "Use a larger batch on each device (batch_size). If memory is short, raise accumulation_steps, because "
        "gradients are averaged once per step. Try other bucket sizes (parallel: bucket_mb, first_bucket_mb).",
        share,
    )


def network(evidence: Evidence) -> Finding | None:
    """Find TCP between nodes, which NCCL uses if it finds no plug-in for the site's network."""
    if not is_tcp(used := (evidence.throughput or Throughput()).device.network):
        return None
    return Finding(
        "network",
        "TCP between nodes",
        f"NCCL exchanged gradients between nodes over TCP (network {used}).",
        "If the nodes have a faster network, provide NCCL's plug-in for it, and declare the network (site.fabric).",
        None,
    )


def launches(evidence: Evidence) -> Finding | None:
    """Find operators that take longer to launch than to compute."""
    if evidence.setting("cuda_graph") or evidence.loading:
        return None
    if evidence.idle:
        idle, for_data = evidence.idle
        share, launched = idle - for_data, evidence.activity.launches
        with_ = f" with {number(launched)} launches" if launched else ""
        why = (
            f"Apart from waiting for data, the device is idle for {percent(share)} of a step{with_}, because the host "
            "does not launch work fast enough."
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
        "Keep such numbers on the device (`detach()`) and read them once per epoch. The profile shows the line of "
        "code that reads them.",
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


def neighbour(evidence: Evidence) -> Finding | None:
    """Find other programs on the run's cores."""
    share = foreign_cpu_fraction(evidence.throughput, [])
    usage = evidence.usage("FULL") or evidence.usage("IO") or evidence.usage("SYNTHETIC")
    if not (share and usage):
        return None
    return Finding(
        "neighbour",
        "busy machine",
        f"Other programs kept {number(share * usage.cores, 2)} of the run's {usage.cores} cores busy while the run was "
        "measured.",
        "Measure again on an idle machine, because these rates are probably too low.",
        None,
    )


def throttled(evidence: Evidence) -> Finding | None:
    """Find GPU clocks reduced by power or temperature limits."""
    watched = evidence.watched
    if not (watched and watched.seconds):
        return None
    reasons = sorted(watched.throttle_reasons, key=lambda reason: -watched.throttle_reasons[reason])
    held = watched.throttled_seconds / watched.seconds
    # A busy GPU always reaches its power cap, so a power cap costs only the lost clock cycles. Other reasons, such as
    # heat, are faults: all their time counts.
    faults = sum(watched.throttle_reasons[reason] for reason in reasons if reason != "power cap") / watched.seconds
    share = max(watched.clock_loss, min(faults, held))
    return Finding(
        "throttled",
        "reduced GPU clocks",
        f"For {percent(held)} of the time at least one GPU ran below its normal clock ({', '.join(reasons)}). The "
        f"slowest GPU lost {percent(watched.clock_loss)} of its cycles.",
        "If power is capped, ask the site's staff for a higher cap. If the GPU is too hot, use another node. Lower "
        "precision needs less power.",
        share,
    )


CAUSES: tuple[Callable[[Evidence], Finding | None], ...] = (
    loading,
    overlap,
    straggler,
    communication,
    network,
    launches,
    sync,
    memory,
    copies,
    neighbour,
    throttled,
)


def findings(evidence: Evidence) -> Iterator[Finding]:
    """Yield the findings of all functions in `CAUSES`, including functions of extensions."""
    for look in (*CAUSES, *map(registry.named, registry.table("CAUSES").values())):
        if finding := look(evidence):
            yield finding
