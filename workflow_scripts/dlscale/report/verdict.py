"""Judge a run: what limits its speed, and whether other programs disturbed the measurement.

`dlscale explain RUN` and the page show this verdict. Each function in `DETECTORS` looks for one cause. The function
returns a finding with its evidence, or None if the cause is absent or was not measured.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dlscale.config.places import run_folder
from dlscale.core.errors import UserError
from dlscale.core.settings import Raw
from dlscale.core.telemetry import Summary, summary
from dlscale.core.text import many, number, percent, size
from dlscale.measure.profilers import Activity, Profile
from dlscale.measure.records import MODES, SAMPLE_RATE, Outside, Throughput, Trials, Usage
from dlscale.parallel.network import TCP
from dlscale.report.results import (
    MIN_FRACTION,
    MIN_SECONDS,
    UNKNOWN,
    RunResult,
    foreign_cores,
    foreign_cpu_fraction,
    read_run,
    setting,
)
from dlscale.report.speedup import between, spread

if TYPE_CHECKING:
    from dlscale.config.resolve import Configuration

# ---- what bounds a run -------------------------------------------------------------------------------

#: Settings that several remedies suggest, as YAML.
COMPILED, DIRECT = "compile: {mode: default}", "loader: {kind: direct}"

#: Memory pressure is reported if processes of the node wait for memory for at least this fraction of the time.
STALLED = 0.1

#: Too many threads are reported if threads wait for a core for at least this fraction of the time.
QUEUED = 0.5

#: Limits for reporting that an external program slows down: minimum number of windows of steps in each third of its
#: run, and minimum fraction of the speed that is lost from the first third to the last third.
WINDOWS, SLOWER = 3, 0.2

#: Step time of an external program, seconds. Launching operators dominates shorter steps on a CPU.
TINY = 4e-3

#: Fraction by which FULL may exceed the slower of IO and SYNTHETIC by chance, because the three modes are timed at
#: different times. A larger spread of the trials raises this limit.
MAX_EXCESS_FRACTION = 0.1


@dataclass(frozen=True)
class Bound:
    """The limit of training speed (FULL)."""

    what: str  #: Name of the limit, in a few words.
    key: str  #: Name of the limit's colour on the page.
    why: str  #: Reason, in sentences.
    share: float  #: FULL / the slower of IO and SYNTHETIC; 1 for an external program.
    loading: float | None  #: Fraction of the time spent loading if loading and computing take turns; else None.


def bound(throughput: Throughput | None) -> Bound | None:
    """Return the limit of a run's speed; None if the limit was not measured.

    A run of a study is judged by its three rates, which must all be known. FULL cannot exceed the slower of loading
    alone (IO) and computing alone (SYNTHETIC). FULL divided by the slower rate shows how well loading and computing
    overlap. An external program is judged by its wait for batches instead.
    """
    if throughput and throughput.outside:
        return _bound_outside(throughput.outside)
    modes = [trials for mode in MODES if throughput and (trials := throughput.mode(mode))]
    if len(modes) < len(MODES) or not all(trials.mean for trials in modes):
        return None
    io, synthetic, full = (trials.mean for trials in modes)
    slower = min(modes[:2], key=lambda trials: trials.mean)
    if io < 0.8 * synthetic:
        what, key, advice = "data loading", "io", "A faster loader would help."
    elif synthetic < 0.8 * io:
        what, key, advice = "computation", "synthetic", "A faster loader would not help."
    else:
        what, key, advice = "loading and computing", "both", "Only making both faster would help."
    share = full / slower.mean
    serial = 1 / (1 / io + 1 / synthetic)  # the rate if loading and computing take turns
    loading = None
    reaches = f"{percent(share)} of the slower rate"
    if full - slower.mean > max(
        MAX_EXCESS_FRACTION * slower.mean, *(spread(each) * each.mean for each in (slower, modes[2]))
    ):
        what, key, reaches = UNKNOWN, "both", f"{number(full)} samples/s, which is more than noise explains"
        advice = (
            "Training cannot be faster than the slower of loading and computing. The machine was probably disturbed, "
            "so all three rates are unreliable. Measure again."
        )
    elif share > 1:
        reaches = (
            f"{number(full)} samples/s, the rate of {'loading' if slower is modes[0] else 'computing'} within noise"
        )
    elif share < 0.8 and full < 0.9 * serial:
        advice = "Loading and computing compete for the same cores or memory. Taking turns would be faster."
    elif share < 0.9 and 0.9 * serial <= full <= 1.1 * serial < 0.99 * slower.mean:
        loading = serial / io
        what, key = "missing overlap", "both"
        advice = "Loading and computing take turns instead of overlapping."
    elif share < 0.8:
        advice = "Loading and computing overlap only partly."
    alone = f"Loading alone reaches {number(io)} samples/s, computing alone {number(synthetic)}."
    return Bound(what, key, f"{alone} Training reaches {reaches}. {advice}", share, loading)


def _bound_outside(program: Outside) -> Bound | None:
    """Return the limit of an external program, from its wait for batches; None if this wait is unknown."""
    if program.waiting is None:
        return None
    share, rest = percent(program.waiting), percent(1 - program.waiting)
    what, key = "both alike", "both"
    if program.waiting >= 0.5:
        what, key = "data loading", "io"
    elif program.waiting <= 0.2:
        what, key = "computation", "synthetic"
    why = f"Waiting for data: {share} of each step. Computing and everything else: {rest}."
    return Bound(what, key, why, 1.0, None)


# ---- a quiet machine ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Disturbance:
    """Load from other programs or jobs while runs of a plan were measured."""

    tag: str  #: Name, in a few words.
    summary: str  #: Other programs, fraction of the cores that they used, and disturbed runs, in one clause.
    advice: str  #: Consequence and remedy, in sentences.

    @property
    def text(self) -> str:
        return f"{self.summary[0].upper()}{self.summary[1:]}. {self.advice}"


def disturbance(runs: Sequence[RunResult], call: str = "snakemake") -> Disturbance | None:
    """Describe the load that disturbed runs; None on a quiet machine.

    If other programs disturbed throughput measurements of a study, the advice ends with a command that repeats these
    measurements; `call` is its beginning.
    """
    busy = {run: run.foreign_cpu_fraction for run in runs if run.foreign_cpu_fraction}
    foreign = {run: run.foreign_load for run in runs if run.foreign_load}
    if not busy:
        return None
    if not foreign:
        return Disturbance(
            "own jobs ran alongside",
            _load(busy, len(runs), "other jobs of the same Snakemake call", "trained"),
            "Runs with the setting `threads` train at the same time, so their speeds are lower than on an idle "
            "machine. To measure speed, add `throughput` to the plan's `measure`, because the stage `throughput` runs "
            "alone.",
        )
    files = [str(run.folder / "throughput.json") for run in foreign if run.throughput and not run.throughput.outside]
    return Disturbance(
        "busy machine",
        _load(foreign, len(runs), "other programs", "was measured" if len(foreign) == 1 else "were measured"),
        "These rates are probably too low, and speed-ups between the runs are unknown. Measure again on an idle machine"
        + (f": {call} --force {shlex.join(files)}" if files else "."),
    )


def _load(runs: Mapping[RunResult, float], of: int, programs: str, did: str) -> str:
    ends = dict.fromkeys(map(percent, (min(runs.values()), max(runs.values()))))
    names = "; ".join(run.called for run in runs)
    which = f"{len(runs)} of {of} runs" if len(runs) > 3 else f"run{'s' * (len(runs) > 1)} {names}"
    return f"{programs} used {' to '.join(ends)} of the cores while {which} {did}"


# ---- the verdict -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evidence:
    """The settings and measurements by which a run is judged."""

    settings: Raw
    throughput: Throughput | None = None
    profile: Profile | None = None
    watched: Summary | None = None  #: Telemetry of the first node.

    @property
    def outside(self) -> Outside | None:
        """Record of an external program; None for a training of dlscale."""
        return self.throughput.outside if self.throughput else None

    def trials(self, mode: str) -> Trials | None:
        return self.throughput.mode(mode) if self.throughput else None

    def rate(self, mode: str) -> float | None:
        trials = self.trials(mode)
        return trials.mean if trials and trials.mean else None

    def setting(self, path: str, default: Any = None) -> Any:
        return setting(self.settings, path, default)

    @property
    def cuda(self) -> bool:
        return (self.throughput or self.profile or Throughput()).device.kind == "cuda"

    @property
    def activity(self) -> Activity:
        """Means per profiled step, each from the first profiler that measured it."""
        seen: dict[str, Any] = {}
        for tool in reversed(self.profile.tools if self.profile else []):
            seen |= tool.activity.model_dump(exclude_none=True)
        return Activity(**seen)

    @property
    def step_seconds(self) -> float | None:
        """Median step time without a profiler, seconds."""
        steps = self.profile.seconds_per_step if self.profile else []
        return statistics.median(steps) if steps else None

    @property
    def idle(self) -> tuple[float, float] | None:
        """Fraction of a step in which the GPU is idle, and fraction in which it waits for data; None if not measured.

        A profiler slows the host but not the device. So the busy seconds come from profiled steps, and the length of a
        step comes from steps without a profiler.
        """
        for tool in self.profile.tools if self.profile and self.cuda else []:
            busy, profiled = tool.activity.device_busy, tool.seconds_per_step
            if busy is not None:
                plain = self.step_seconds or profiled or 1.0
                share = max(0.0, 1 - busy * (profiled or plain) / plain)
                idle = tool.activity.idle_seconds
                for_data = idle.get("data", 0.0) + idle.get("copy", 0.0)  # the range `copy` lies within `data`
                return share, min(share, for_data / plain)
        return None

    @property
    def compiled(self) -> bool:
        return bool(self.setting("compile.mode", "none") != "none")

    @property
    def loading(self) -> float:
        """Fraction of the time lost to loading; 0 if loading does not limit the run."""
        io, synthetic, full = map(self.rate, ("IO", "SYNTHETIC", "FULL"))
        if not (io and synthetic and full) or io > 0.8 * synthetic:
            return 0.0
        return max(0.0, 1 - full / synthetic)


@dataclass(frozen=True)
class Finding:
    """One cause that slows a run."""

    cause: str  #: Key of the cause.
    what: str  #: Title, in a few words.
    why: str  #: Evidence with figures, in one or two sentences.
    todo: str  #: Remedy.
    share: float | None  #: Approximate fraction of the run's time that the cause costs; None if unknown.
    rung: str = ""  #: Settings of the remedy, as YAML; empty if the remedy is not a setting.


@dataclass(frozen=True)
class Verdict:
    """The verdict on a run."""

    bound: Bound | None  #: Limit of the training speed; None if it was not measured.
    findings: list[Finding]  #: Causes, the most expensive first.
    limit: str  #: Distance of the training speed from the device's limit, in words; empty if not measured.
    todo: str  #: Remedy for other programs if there are any, then for the most expensive cause or else for the limit.
    rung: str = ""  #: Settings of the last remedy in `todo`, as YAML; empty if this remedy is not a setting.


def judge_run(run: RunResult) -> Verdict:
    """Judge a run of a plan by its records.

    The telemetry comes from the run's first node during the throughput stage, or else during training.
    """
    nodes = run.telemetry.get("throughput") or run.telemetry.get("train")
    return verdict(Evidence(run.settings, run.throughput, run.profile, summary(nodes[0]) if nodes else None))


def verdict(evidence: Evidence) -> Verdict:
    """Judge a run by its measurements."""
    every = [finding for look in DETECTORS if (finding := look(evidence))]
    found = [finding for finding in every if finding.share is None or finding.share >= MIN_FRACTION]
    # Other programs come first, because they make all other findings uncertain. TCP and swapping follow,
    # because they look like slow exchanges and slow loading. Findings without a cost come last.
    first = {"neighbour": 0, "network": 1, "swapping": 2}
    found.sort(key=lambda finding: (first.get(finding.cause, len(first)), -(finding.share or 0.0)))
    bounding = bound(evidence.throughput)
    if bounding and bounding.what == UNKNOWN:  # findings based on these rates are unreliable
        found = [finding for finding in found if finding.cause in ("neighbour", "throttled")]
        again = "Measure again on an idle machine, because these rates are unreliable."
        return Verdict(bounding, found, "", again)
    # The remedy for other programs is added before the next remedy and does not replace it.
    before = [finding.todo for finding in found if finding.cause == "neighbour"]
    costs = [finding for finding in found if finding.share is not None]
    if costs:
        todo, rung = costs[0].todo, costs[0].rung
    else:
        todo, rung = _next(evidence, bounding)
        before = before or [finding.todo for finding in found[:1]]
    return Verdict(bounding, found, limit(evidence), " ".join([*before, todo]), rung)


# ---- causes: loading ---------------------------------------------------------------------------------


def loading(evidence: Evidence) -> Finding | None:
    """Find slow loading: slow storage, too few workers for the cores, or too much work for the cores."""
    usage, delivers = _usage(evidence, "IO"), f"Loading alone delivers {number(evidence.rate('IO'))} samples/s"
    if not (evidence.loading and usage):
        return None
    own = max(1, int(evidence.setting("loader.workers", 1)))
    # The usage covers all processes of a node, and each process has its own workers.
    ranks = 1 if evidence.setting("parallel.kind") == "dp" else int(evidence.setting("geometry.gpus_per_node", 1))
    readers = ranks * own
    busy = usage.cpu_seconds / usage.seconds / min(readers, usage.cores)
    idle = usage.cores - usage.cores_cpu_seconds / usage.seconds
    faster = _faster_loader(evidence)
    if busy > 0.5 and idle >= 0.5 and readers < usage.cores:
        count, more = evidence.setting("loader.workers", 1), min(-(-usage.cores // ranks), max(2, 2 * own))
        with_ = many(count, "worker") + " per process" * (ranks > 1)
        why = (
            f"{delivers} with {with_}. The loading {'process is' if count == ranks == 1 else 'processes are'} busy, "
            f"while {number(idle, 2)} of {usage.cores} cores are idle."
        )
        rung = f"loader: {{workers: {more}}}"
        todo = f"{rung}. `dlscale tune` finds the best number of workers.{faster}"
        return Finding("workers", "too few workers", why, todo, evidence.loading, rung)
    if _crowded_out(usage):
        return None
    if busy > 0.5:
        cores = number(usage.cpu_seconds / usage.seconds, 2)
        why = f"{delivers} and keeps {cores} of {usage.cores} cores busy."
        todo = faster.strip() or "Store the data as the model needs them: float16, channels last, no compression."
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
    if (
        share < 2 * MIN_FRACTION and not turns
    ):  # the rates are measured at different times, so FULL may have met a slow moment
        return None
    why = "No worker loads while the model computes" if turns else "Loading and computing do not overlap"
    return Finding(
        "overlap",
        "loading and computing take turns",
        f"Training loads for {percent(found.loading)} of the time and computes for the rest of the time. {why}.",
        ("loader: {workers: 1} or more." if turns else "Use more workers, or a longer prefetch.")
        + _faster_loader(evidence),
        share,
        "loader: {workers: 1}" if turns else "",
    )


# ---- causes: several processes -----------------------------------------------------------------------


def straggler(evidence: Evidence) -> Finding | None:
    """Find one slow rank that all other ranks wait for."""
    if evidence.outside:
        return _slow_process(evidence.outside, evidence.cuda)
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


def _slow_process(program: Outside, cuda: bool) -> Finding | None:
    """Find one process of an external program that waits for data, or computes, longer than the other processes."""
    # With GPUs, busy cores are no evidence, because a host spins while its GPU waits for other ranks.
    for shares, doing in (
        (program.rank_waiting, "waits for batches"),
        ([] if cuda else program.rank_cores, "computes"),
    ):
        if len(shares) < 2:
            continue
        slowest = max(shares)
        rank = shares.index(slowest)
        usual = statistics.median([share for number_, share in enumerate(shares) if number_ != rank])
        if slowest - usual >= 2 * MIN_FRACTION and usual < 0.75 * slowest:
            cores = "" if shares is program.rank_waiting else " (100 % is one core)"
            return Finding(
                "straggler",
                f"slow rank {rank}",
                f"Rank {rank} {doing} for {percent(slowest)} of a step{cores}, while the median of the other ranks is "
                f"{percent(usual)}. All other ranks wait for the slow rank in every step.",
                f"Check whether rank {rank} has more samples or files, does extra work, or shares its node with other "
                "programs.",
                min(slowest - usual, 1.0),
            )
    return None


def communication(evidence: Evidence) -> Finding | None:
    """Find gradient averaging that computation does not hide."""
    measured, activity, seconds = evidence.throughput, evidence.activity, evidence.step_seconds
    alone, together = evidence.trials("alone"), evidence.trials("SYNTHETIC")
    if straggler(evidence):
        return None
    if alone and together and measured and together.mean:
        if between(together, alone).noise:
            return None
        share = 1 - together.mean / alone.mean
        why = (
            f"Gradient averaging over {measured.nranks} processes lowers the rate of computing alone from "
            f"{number(alone.mean)} to {number(together.mean)} samples/s."
        )
    elif activity.comm_seconds and seconds:  # a step in a CUDA graph cannot run without averaging
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
    if (evidence.throughput or Throughput()).device.network != TCP:
        return None
    return Finding(
        "network",
        "TCP between nodes",
        f"NCCL exchanged gradients between nodes over TCP (network {TCP}).",
        "If the nodes have a faster network, provide NCCL's plug-in for it, and declare the network (site.fabric).",
        None,
    )


# ---- causes: computing -------------------------------------------------------------------------------


def launches(evidence: Evidence) -> Finding | None:
    """Find operators that take longer to launch than to compute."""
    if evidence.setting("cuda_graph") or evidence.loading:
        return None
    if evidence.idle:
        idle, for_data = evidence.idle
        share, launched = idle - for_data, evidence.activity.launches
        with_ = f" with {number(launched)} launches" if launched else ""
        why = (
            f"The device is idle for {percent(share)} of a step{with_}, besides waiting for data, because the host "
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
    fuse = [rung for rung in _rungs(evidence) if "precision" not in rung]
    todo = f"{', '.join([*fuse, 'a larger batch_size'])}."
    return Finding("launches", "tiny operators", why, todo, share, next(iter(fuse), ""))


def sync(evidence: Evidence) -> Finding | None:
    """Find steps in which the host waits for the device."""
    activity, seconds = evidence.activity, evidence.step_seconds
    items = activity.items or 0.0
    share: float | None = None
    if evidence.idle and activity.sync_seconds is not None and seconds:
        waited, (idle, for_data) = activity.sync_seconds / seconds, evidence.idle
        # Only the device's idle time counts, without the wait for data.
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
        "code.",
        share,
    )


def memory(evidence: Evidence) -> Finding | None:
    """Find operators that are limited by memory bandwidth and not by arithmetic."""
    measured = evidence.throughput
    used = measured.mbu("SYNTHETIC") if measured else None
    # Compiling removes an unknown number of passes over memory.
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
        f"The step's operators move {size(measured.work.bytes)} per sample, which is {percent(min(used, 1.0))} of the "
        f"bytes that the memory can move in that time. Arithmetic needs only {percent(computing / moving)} of the time "
        "that these transfers need.",
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


# ---- causes: the machine -----------------------------------------------------------------------------


def neighbour(evidence: Evidence) -> Finding | None:
    """Find other programs on the run's cores."""
    share = foreign_cpu_fraction(evidence.throughput, [])
    usage = _usage(evidence, "FULL") or _usage(evidence, "IO") or _usage(evidence, "SYNTHETIC")
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
    # A busy GPU always reaches its power cap, so for this reason only lost cycles count. Other reasons, such as heat,
    # are faults.
    faults = sum(watched.throttle_reasons[reason] for reason in reasons if reason != "power cap") / watched.seconds
    share = max(watched.clock_loss, min(faults, held))
    return Finding(
        "throttled",
        "reduced GPU clocks",
        f"For {percent(held)} of the time at least one GPU ran below its normal clock ({', '.join(reasons)}). The "
        f"slowest GPU lost {percent(watched.clock_loss)} of its cycles.",
        "If power is capped, ask the site. If the GPU is too hot, use another node. Lower precision needs less power.",
        share,
    )


# ---- causes: external programs -----------------------------------------------------------------------


def waiting(evidence: Evidence) -> Finding | None:
    """Find an external program that waits for batches: slow storage, few workers, or expensive loading."""
    program, usage = evidence.outside, _usage(evidence, "FULL")
    if not (program and program.waiting and program.waiting >= 2 * MIN_FRACTION) or (usage and _crowded_out(usage)):
        return None
    why = f"The program waits for data for {percent(program.waiting)} of each step"
    busy = usage.cpu_seconds / usage.seconds if usage else 0.0
    spare = usage and usage.cores - usage.cores_cpu_seconds / usage.seconds
    read = f", and disks deliver {size(usage.read_bytes / usage.seconds)}/s" if usage and usage.read_bytes else ""
    ranks = evidence.throughput.nranks if evidence.throughput else 1
    if usage and busy < 0.5 * min(ranks, usage.cores):
        return Finding(
            "storage",
            "slow storage",
            f"{why} and keeps only {number(busy, 2)} of {usage.cores} cores busy{read}. The program waits for files, "
            "or it sleeps.",
            "Copy the data to faster storage (the node's own disk, or memory). Use more workers (num_workers of its "
            "DataLoader), so that more files are read at the same time.",
            program.waiting,
        )
    idle = f", while {number(spare, 2)} of {usage.cores} cores are idle" if usage and spare and spare >= 0.5 else ""
    todo = "Use more workers (num_workers of its DataLoader), up to the number of cores. " if idle or not usage else ""
    return Finding(
        "workers" if idle else "loader",
        "too few workers" if idle else "the loader's work",
        f"{why}{idle}{read}.",
        f"{todo}Store the data in the form that the model takes, so that there is less to decode and to transform.",
        program.waiting,
    )


def small_steps(evidence: Evidence) -> Finding | None:
    """Find steps of an external program that are too small for its device."""
    program, full = evidence.outside, evidence.trials("FULL")
    if not (program and full and full.mean) or (program.waiting or 0.0) > 0.5 or idle(evidence):
        return None
    batch = evidence.throughput.batch_size if evidence.throughput and program.samples else 1
    seconds = batch / full.mean if batch else math.inf
    gpu = evidence.watched.means.get("gpu0_utilization") if evidence.watched else None
    if evidence.cuda and gpu is not None and gpu < 0.7:
        why = (
            f"The GPU computes for only {percent(gpu)} of the time. The host does not launch work fast enough, or it "
            "waits for the GPU within a step (`.item()`, `print(loss)`)."
        )
        share = 1 - gpu
    elif not evidence.cuda and seconds < TINY:
        why = (
            f"A step takes {1e3 * seconds:.2f} ms. In such a short step, launching the operators takes about as long "
            "as computing them. Launching takes the same time at any batch size."
        )
        share = min(1.0, 0.5 * TINY / seconds) * 0.5
    else:
        return None
    todo = (
        "Use a larger batch, or torch.compile. On a GPU, use a fused optimiser or CUDA graphs (mode='reduce-overhead')."
    )
    return Finding("launches", "tiny steps", why, todo, share)


def idle(evidence: Evidence) -> Finding | None:
    """Find an external program that leaves cores idle within its steps, for a reason other than its loader."""
    program, usage = evidence.outside, _usage(evidence, "FULL")
    if not (program and usage and evidence.throughput) or evidence.cuda or _crowded_out(usage) or straggler(evidence):
        return None
    least = min(evidence.throughput.nranks, usage.cores)
    busy = usage.cpu_seconds / usage.seconds
    share = 1 - busy / least - (program.waiting or 0.0)
    if share < 0.3:
        return None
    read = f", and disks deliver {size(usage.read_bytes / usage.seconds)}/s" if usage.read_bytes else ""
    return Finding(
        "idle",
        "idle processors",
        f"The program keeps only {number(busy, 2)} of {usage.cores} cores busy{read}. Its loader is not the reason. "
        "Within a step the program waits for files, the network or other processes, or it sleeps.",
        "Read ahead in a loader's workers. Log and save in a thread. `--profile` shows the lines of code that wait.",
        share,
    )


def besides(evidence: Evidence) -> Finding | None:
    """Find an external program that spends much time outside its training steps."""
    program = evidence.outside
    if not program or program.training > 1 - 2 * MIN_FRACTION:
        return None
    share = 1 - program.training
    unseen = " A log does not show the wait for data, but `dlscale.timed` does." if program.way == "log" else ""
    return Finding(
        "besides",
        "much time outside training",
        f"From the first counted step to the last, {percent(share)} of the time is spent outside the steps, on "
        "validations, checkpoints and other pauses. The rate does not count this time.",
        "Validate and save less often. Validate on fewer samples, in larger batches. Save in a thread." + unseen,
        share,
    )


def slowing(evidence: Evidence) -> Finding | None:
    """Find an external program that slows down.

    Every window of its last third is slower than every window of its first third, by at least the fraction `SLOWER`.
    """
    full = evidence.trials("FULL")
    rates = full.trial_throughput if evidence.outside and full else []
    before, after = rates[: len(rates) // 3], rates[-(len(rates) // 3) :]
    if len(before) < WINDOWS or max(after) > (1 - SLOWER) * min(before):
        return None
    first, last = statistics.fmean(before), statistics.fmean(after)
    unit = evidence.throughput.unit if evidence.throughput else SAMPLE_RATE
    return Finding(
        "slowing",
        "the program slows down",
        f"The program reached {number(first)} {unit} in the first third of its steps, and {number(last)} {unit} in the "
        "last third.",
        "Check whether lists, logs or kept graphs of losses grow from step to step, whether numbers become tiny "
        "(`torch.set_flush_denormal(True)`), and whether heat reduces the clocks.",
        1 - statistics.fmean(rates) / first,
    )


def threads(evidence: Evidence) -> Finding | None:
    """Find an external program with more threads than cores."""
    program, usage = evidence.outside, _usage(evidence, "FULL")
    if not (program and program.queued and usage) or evidence.cuda or foreign_cores(usage) > 0.25:
        return None
    busy = usage.cpu_seconds / usage.seconds
    if program.queued < QUEUED or busy < 0.8 * usage.cores or (program.waiting or 0.0) >= 2 * MIN_FRACTION:
        return None
    return Finding(
        "threads",
        "more threads than cores",
        f"Threads waited for a core for {percent(min(program.queued, 1.0))} of the time. The program itself kept "
        f"nearly all of its {usage.cores} cores busy.",
        "Set OMP_NUM_THREADS, or torch.set_num_threads, to the number of cores divided by the number of processes. "
        "Use fewer loader workers.",
        None,
    )


def unwatched(evidence: Evidence) -> Finding | None:
    """Find an external program that dlscale did not watch to the end."""
    program = evidence.outside
    if not (program and program.stopped):
        return None
    return Finding(
        "unwatched",
        "steps not watched to the end",
        f"dlscale stopped watching before the program ended: {program.stopped}. The rate covers only the steps before "
        "that time.",
        "If the disk is full, free some space. Otherwise report this message as a defect of dlscale.",
        None,
    )


def stalled(evidence: Evidence) -> Finding | None:
    """Find memory pressure: the machine swaps, or it reads files again that did not stay in memory."""
    program = evidence.outside
    if not (program and program.stalled and program.stalled >= STALLED):
        return None
    return Finding(
        "swapping",
        "too little memory",
        f"Processes of this machine waited for memory for {percent(min(program.stalled, 1.0))} of the time. The "
        "machine swaps, or it reads files again that did not stay in memory.",
        "Use fewer workers, a smaller prefetch or a smaller batch, or request more memory.",
        min(program.stalled, 1.0),
    )


DETECTORS: tuple[Callable[[Evidence], Finding | None], ...] = (
    loading,
    overlap,
    straggler,
    communication,
    network,
    launches,
    sync,
    memory,
    copies,
    waiting,
    small_steps,
    idle,
    besides,
    slowing,
    threads,
    stalled,
    unwatched,
    neighbour,
    throttled,
)


def limit(evidence: Evidence) -> str:
    """Describe how far a run is from its device's limit; empty if the limit was not measured."""
    measured = evidence.throughput
    if not (measured and measured.work and measured.peaks and (mfu := measured.mfu("FULL")) is not None):
        return ""
    arithmetic = measured.peaks.flops / measured.work.flops if measured.work.flops else math.inf
    # The bytes are known only for a step that is not compiled.
    moved = measured.work.bytes if not evidence.compiled else None
    memory_ = measured.peaks.bytes_per_second / moved if moved else math.inf
    roof, kind = min((arithmetic, "arithmetic"), (memory_, "memory bandwidth"))
    if not math.isfinite(roof):
        return ""
    many_ = f" on {measured.nranks} devices" if measured.nranks > 1 else ""
    return (
        f"Training reaches {percent(mfu)} of the {number(measured.peaks.flops * measured.nranks / 1e9)} GFLOP/s that "
        f"matrix products in {measured.peaks.dtype} reach{many_}. If {kind} were the only limit, this model would "
        f"reach {number(roof * measured.nranks)} samples/s."
    )


def _more_threads(evidence: Evidence) -> str:
    """Suggest more threads to an external program that uses few of its cores; else return an empty text."""
    usage, waiting = _usage(evidence, "FULL"), (evidence.outside and evidence.outside.waiting) or 0.0
    if evidence.cuda or not usage or waiting > 0.3 or usage.cpu_seconds / usage.seconds > 0.6 * usage.cores:
        return ""
    busy = number(usage.cpu_seconds / usage.seconds, 2)
    return f"Use more threads (OMP_NUM_THREADS, `torch.set_num_threads`): {busy} of {usage.cores} cores are busy. "


def _next(evidence: Evidence, bounding: Bound | None) -> tuple[str, str]:
    """Return the next remedy to try, and its settings as YAML."""
    if evidence.outside:
        looked = "Look at the slowest entries of the program's profile."
        if not evidence.profile:
            looked = "`dlscale measure --profile -- COMMAND` shows where the program's time goes."
        return f"{_more_threads(evidence)}{looked}", ""
    if bounding is None:
        return "Measure throughput, which shows the limit of the run.", ""
    if bounding.key == "io":
        faster = _faster_loader(evidence).strip()
        return faster or "The fastest loader is in use. Store less data, or use more nodes.", DIRECT if faster else ""
    if not (rungs := _rungs(evidence)):
        return "No further setting is suggested. Try a larger batch, or more devices.", ""
    return f"{', '.join(rungs)}.", rungs[0]


def _rungs(evidence: Evidence) -> list[str]:
    """Return the most useful settings of the ladder, as YAML, that a run could use but does not use."""
    strategy, captures = evidence.setting("parallel.kind"), evidence.setting("compile.mode", "none")
    lacks = {
        "precision: bf16": "16" not in str(evidence.setting("precision", "")),
        COMPILED: not evidence.compiled and strategy != "dp",
        "optimizer: {fused: true}": not evidence.setting("optimizer.fused")
        and evidence.setting("optimizer.kind") != "adadelta",
        "cuda_graph: true": evidence.cuda
        and not evidence.setting("cuda_graph")
        and strategy not in ("dp", "fsdp")
        and captures in ("none", "default"),
    }
    return [rung for rung, lacking in lacks.items() if lacking]


def _faster_loader(evidence: Evidence) -> str:
    kind = evidence.setting("loader.kind")
    return (
        ""
        if kind in ("direct", "synthetic")
        else f" {DIRECT} loads fields on grids, rows and images with far less work."
    )


def _crowded_out(usage: Usage) -> bool:
    """Return whether other programs took cores that the run would have used.

    If so, the run's own speed is unknown.
    """
    spare = usage.cores - usage.cores_cpu_seconds / usage.seconds
    return foreign_cores(usage) > 0.25 and spare < max(0.5, MIN_FRACTION * usage.cores)


def _usage(evidence: Evidence, mode: str) -> Usage | None:
    trials = evidence.trials(mode)
    usage = trials.usage if trials else None
    return usage if usage and usage.seconds >= MIN_SECONDS else None


# ---- dlscale explain ---------------------------------------------------------------------------------


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Print the verdicts on `args.runs` (PLAN.RUN, or folders of runs); return the exit status."""
    found = dict[str, Verdict]()
    for name in args.runs:
        run = read_run(run_folder(name, configuration))
        if not (run.throughput or run.profile):
            raise UserError(
                f"{run.folder}: this run has neither throughput nor a profile yet. Add `throughput` or `profile` to "
                "its plan's `measure`, and run the plan"
            )
        found[name] = judge_run(run)
    if args.json:
        print(json.dumps({name: asdict(each) for name, each in found.items()}, indent=2))
    else:
        print("\n\n".join("\n".join(lines(name, each)) for name, each in found.items()))
    return 0


def lines(name: str, found: Verdict) -> list[str]:
    """Format a verdict as lines of text."""
    said = ""
    if found.bound:
        said = ": its limit is not known" if found.bound.what == UNKNOWN else f": bound by {found.bound.what}"
    return [f"{name}{said}", *format_findings(found)]


def format_findings(found: Verdict) -> list[str]:
    """Format the reason, the findings and the next step as lines of text."""
    text = _wrapped(found.bound.why) if found.bound else []
    for finding in found.findings:
        costs = "" if finding.share is None else f", about {percent(finding.share)} of the time"
        text += ["", f"  {finding.what}{costs}", *_wrapped(finding.why)]
    text += ["", *_wrapped(found.limit)] if found.limit else []
    return [*text, "", *_wrapped(f"Try next: {found.todo}")]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent="  ", subsequent_indent="  ")
