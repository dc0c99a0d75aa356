"""What holds a run back, how far it is from its device's limit, and what to try next: from all that was measured of it.

`dlscale explain RUN` prints it, and the page shows it.

Each function of `LOOKS` looks for a cause and returns what it found with the figures that show it, or None: what was
not measured shows nothing, and a run without such causes is bound by its computation or its loader alone, which `bound`
says.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dlscale.config.places import run_folder
from dlscale.core.errors import UserError
from dlscale.core.settings import Raw
from dlscale.core.telemetry import Sample, Summary, summary
from dlscale.core.text import many, number, percent, size
from dlscale.measure.profilers.records import Activity, Profile
from dlscale.measure.records import Throughput, Trials, Usage
from dlscale.report.diagnosis import UNKNOWN, Bound, bound
from dlscale.report.results import LEAST, LEAST_SECONDS, RunResult, crowd, others, read_run, setting
from dlscale.report.speedup import between

if TYPE_CHECKING:
    from dlscale.config.resolve import Configuration

#: Why a GPU's clocks go down that is no fault.
POWER_CAP = "power cap"


@dataclass(frozen=True)
class Evidence:
    """What was measured of a run; None what was not."""

    settings: Raw
    throughput: Throughput | None = None
    profile: Profile | None = None
    watched: Summary | None = None  #: What the first node did meanwhile.

    def trials(self, mode: str) -> Trials | None:
        return self.throughput.mode(mode) if self.throughput else None

    def rate(self, mode: str) -> float | None:
        """Samples/s; None if they were not measured."""
        trials = self.trials(mode)
        return trials.mean if trials and trials.mean else None

    def setting(self, path: str, default: Any = None) -> Any:
        """Return a setting by its dotted path."""
        return setting(self.settings, path, default)

    @property
    def cuda(self) -> bool:
        device = (self.throughput or self.profile or Throughput()).device
        return device.kind == "cuda"

    @property
    def activity(self) -> Activity:
        """What the profilers saw of a step, each figure from the first that has it."""
        seen: dict[str, Any] = {}
        for tool in reversed(self.profile.tools if self.profile else []):
            seen |= tool.activity.model_dump(exclude_none=True)
        return Activity(**seen)

    @property
    def step_seconds(self) -> float | None:
        """Median seconds of a step with no profiler at work."""
        steps = self.profile.seconds_per_step if self.profile else []
        return statistics.median(steps) if steps else None

    @property
    def idle(self) -> tuple[float, float] | None:
        """Shares of a step for which a GPU does nothing, and of these for which the host waits for data; None unseen.

        A profiler makes the host slower and not the device: what the device is busy for is taken from the profiled
        steps, in seconds, and the step's length from those without a profiler.
        """
        for tool in self.profile.tools if self.profile and self.cuda else []:
            busy, profiled = tool.activity.device_busy, tool.seconds_per_step
            if busy is not None:
                plain = self.step_seconds or profiled or 1.0
                share = max(0.0, 1 - busy * (profiled or plain) / plain)
                idle = tool.activity.idle_seconds
                for_data = idle.get("data", 0.0) + idle.get("copy", 0.0)  # which is within `data`
                return share, min(share, for_data / plain)
        return None

    @property
    def compiled(self) -> bool:
        return bool(self.setting("compile.mode", "none") != "none")

    @property
    def loading(self) -> float:
        """Share of the time that would be saved if loading took none; 0 where it is not loading that bounds the run."""
        io, synthetic, full = map(self.rate, ("IO", "SYNTHETIC", "FULL"))
        if not (io and synthetic and full) or io > 0.8 * synthetic:
            return 0.0
        return max(0.0, 1 - full / synthetic)

    @property
    def readers(self) -> int:
        """Processes or threads that load: the training process itself where there are no others."""
        return max(1, int(self.setting("loader.workers", 1)))


@dataclass(frozen=True)
class Finding:
    """One cause that holds a run back."""

    cause: str  #: Its name.
    what: str  #: In a few words.
    why: str  #: The figures that show it, in a sentence or two.
    todo: str  #: What to try next.
    share: float | None  #: Of the run's time, what it costs, about; None where that is not known.


@dataclass(frozen=True)
class Verdict:
    """What is to be said of a run."""

    bound: Bound | None  #: From the three throughputs; None if they were not all measured.
    findings: list[Finding]  #: Causes, the dearest first.
    limit: str  #: How far the run is from what its device can do; empty if that was not measured.
    todo: str  #: What to try next: of the dearest cause, or else of what bounds the run.


def of(run: RunResult) -> Verdict:
    """Judge a run of a plan."""
    return verdict(Evidence(run.settings, run.throughput, run.profile, watched(run.telemetry)))


def watched(telemetry: Mapping[str, Sequence[Sequence[Sample]]]) -> Summary | None:
    """Return what the first node did while throughput was measured, or while the run trained."""
    nodes = next((telemetry[stage] for stage in ("throughput", "train") if telemetry.get(stage)), None)
    return summary(nodes[0]) if nodes else None


def verdict(evidence: Evidence) -> Verdict:
    """Judge a run from what was measured of it."""
    every = [finding for look in LOOKS if (finding := look(evidence))]
    found = [finding for finding in every if finding.share is None or finding.share >= LEAST]
    # What disturbs a measurement comes first: with it, nothing else is certain. What costs nothing here comes last.
    found.sort(key=lambda finding: (finding.cause != "neighbour", -(finding.share or 0.0)))
    bounding = bound(evidence.throughput)
    if bounding and bounding.what == UNKNOWN:  # nothing that is made of these rates is told, but what disturbed them
        found = [finding for finding in found if finding.cause in ("neighbour", "throttled")]
        again = "Measure again with nothing else running, or on nodes of your own: none of these rates hold."
        return Verdict(bounding, found, "", again)
    costs = [finding for finding in found if finding.share is not None or finding.cause == "neighbour"]
    todo = costs[0].todo if costs else _next(evidence, bounding)
    return Verdict(bounding, found, limit(evidence), todo if costs or not found else f"{found[0].todo} {todo}")


# ---- causes: loading ---------------------------------------------------------------------------------


def loading(evidence: Evidence) -> Finding | None:
    """Loading alone is slow: for want of files, of workers beside idle cores, or of cores for what it computes."""
    usage, delivers = _usage(evidence, "IO"), f"Loading alone delivers {number(evidence.rate('IO'))} samples/s"
    if not (evidence.loading and usage):
        return None
    busy, idle = usage.cpu_seconds / usage.seconds / min(evidence.readers, usage.cores), _idle(usage)
    faster = _faster_loader(evidence)
    if busy > 0.5 and idle >= 0.5 and evidence.readers < usage.cores:
        count, more = evidence.setting("loader.workers", 1), min(usage.cores, max(2, 2 * evidence.readers))
        why = (
            f"{delivers} with {many(count, 'worker')}, which {'is' if count == 1 else 'are'} busy, while "
            f"{number(idle, 2)} of {usage.cores} cores are idle."
        )
        todo = f"loader: {{workers: {more}}}; `dlscale tune` finds how many are best.{faster}"
        return Finding("workers", "too few workers", why, todo, evidence.loading)
    # Other programs took cores that the run would have used, which had none to spare: whether it is slow nobody knows.
    if others(usage) > 0.25 and idle < max(0.5, LEAST * usage.cores):
        return None
    if busy > 0.5:
        cores = number(usage.cpu_seconds / usage.seconds, 2)
        why = f"{delivers}, and keeps {cores} of {usage.cores} cores busy with it."
        todo = faster.strip() or "Store the data as the model takes them: float16, channels last, no compression."
        return Finding("loader", "the loader's work", why, todo, evidence.loading)
    read = usage.read_bytes
    disk = f", in which {size(read / usage.seconds)}/s came from disks" if read else ""
    return Finding(
        "storage",
        "slow storage",
        f"{delivers}, and what loads computes for only {percent(busy)} of that time{disk}: the rest it waits for "
        "files.",
        "Copy the data to faster storage (a node's own disk, or memory); store float16, and chunks of the size of a "
        "sample; let more workers wait at the same time (loader.workers).",
        evidence.loading,
    )


def overlap(evidence: Evidence) -> Finding | None:
    """Loading and computing take turns."""
    found = bound(evidence.throughput)
    if not found or found.loading is None:
        return None
    share, turns = min(found.loading, 1 - found.share), evidence.setting("loader.workers") == 0
    if share < 2 * LEAST and not turns:  # three measurements, one after the other: FULL may have met a slow moment
        return None
    why = "there is nobody who loads while the model computes" if turns else "they do not overlap"
    return Finding(
        "overlap",
        "loading and computing in turn",
        f"FULL is what one after the other gives: {percent(found.loading)} of the time is loading, and {why}.",
        ("loader: {workers: 1} or more." if turns else "More workers, or a longer prefetch.")
        + _faster_loader(evidence),
        share,
    )


# ---- causes: several processes -----------------------------------------------------------------------


def straggler(evidence: Evidence) -> Finding | None:
    """One process is slower than the others, which wait for it."""
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
                f"Rank {rank} {doing} {number(slowest)} samples/s where the others reach {number(usual)}: all wait "
                "for it in every step.",
                f"Look at the node and the device of rank {rank}: clocks, temperature, other programs; leave the node "
                "out if it stays slow.",
                1 - slowest / usual,
            )
    return None


def communication(evidence: Evidence) -> Finding | None:
    """Sums of gradients over the processes, which computation does not hide."""
    measured, activity, seconds = evidence.throughput, evidence.activity, evidence.step_seconds
    alone, together = evidence.trials("alone"), evidence.trials("SYNTHETIC")
    if straggler(evidence):
        return None
    if alone and together and measured and together.mean:
        if between(together, alone).noise:
            return None
        share = 1 - together.mean / alone.mean
        why = (
            f"{measured.nranks} processes compute {number(alone.mean)} samples/s while none waits for the others' "
            f"gradients, and {number(together.mean)} when they add them up."
        )
    elif activity.comm_seconds and seconds:  # a step in a CUDA graph has no form without
        exposed = activity.comm_seconds * (1 - (activity.comm_overlap or 0.0))
        share = min(exposed / seconds, 1.0)
        why = (
            f"Of a step's {1e3 * seconds:.1f} ms, gradients are added up over the processes for "
            f"{1e3 * activity.comm_seconds:.1f} ms, and for {1e3 * exposed:.1f} ms of that nothing else is computed."
        )
    else:
        return None
    return Finding(
        "communication",
        "communication",
        why,
        "A larger batch on each device (batch_size), or accumulation_steps, which add up less often; other buckets "
        "(parallel: bucket_mb, first_bucket_mb).",
        share,
    )


# ---- causes: computing -------------------------------------------------------------------------------


def launches(evidence: Evidence) -> Finding | None:
    """Operators that are too small: to call them takes longer than to compute them."""
    if evidence.setting("cuda_graph") or evidence.loading:
        return None
    seconds, launched = evidence.step_seconds, evidence.activity.launches
    if evidence.idle:
        idle, for_data = evidence.idle
        share = idle - for_data
        with_ = f" with {number(launched)} launches in it" if launched else ""
        why = f"The device is idle for {percent(share)} of a step{with_}: the host does not keep up."
        if share < 0.25 or sync(evidence):
            return None
    else:
        work = evidence.throughput.work if evidence.throughput else None
        peaks = evidence.throughput.peaks if evidence.throughput else None
        rate, batch = evidence.rate("SYNTHETIC"), evidence.throughput.batch_size if evidence.throughput else None
        if rate and batch:
            seconds = batch / rate
        operators = work.operators if work else None
        each = peaks.operator_seconds if peaks else None
        if not (operators and each and seconds) or evidence.compiled:
            return None
        share = operators * each / seconds
        # A GPU computes meanwhile: the host holds it up when calling takes all of the step.
        if share < (0.9 if evidence.cuda else 0.3):
            return None
        share = min(share, 1.0)
        why = (
            f"A step calls {number(operators)} operators, and {1e6 * each:.1f} µs to call each are {percent(share)} of "
            f"its {1e3 * seconds:.1f} ms."
        )
    fuse = [] if evidence.compiled else ["compile: {mode: default}"]
    fuse += ["cuda_graph: true"] if evidence.cuda else []
    fuse += [] if evidence.setting("optimizer.fused") else ["optimizer: {fused: true}"]
    return Finding("launches", "tiny operators", why, f"{', '.join([*fuse, 'a larger batch_size'])}.", share)


def sync(evidence: Evidence) -> Finding | None:
    """The host waits for the device within a step."""
    activity, seconds = evidence.activity, evidence.step_seconds
    items = activity.items or 0.0
    share: float | None = None
    if evidence.idle and activity.sync_seconds is not None and seconds:
        waited = activity.sync_seconds / seconds
        if waited < LEAST or (not items and (activity.syncs or 0) < 1):
            return None
        # A host that waits costs nothing while the device has work: only what that is idle, if not for want of data.
        idle, for_data = evidence.idle
        share = idle - max(for_data, evidence.loading)
        if share < LEAST:
            return None
        why = (
            f"The host waits for the device {number(activity.syncs or items)} times a step, for {percent(waited)} of "
            f"it, and has nothing ready when it goes on: the device is idle for {percent(idle)}."
        )
    elif items >= 1:
        why = f"A step reads {many(round(items), 'number')} from tensors (`.item()`, `float()`, `if tensor`)"
        why += ": on a GPU the host waits there until all before it is computed. On a processor it costs nothing."
    else:
        return None
    return Finding(
        "sync",
        "a wait in the loop",
        why,
        "Keep the number on the device (`detach()`), and read it once an epoch; the profile's lines show where it is.",
        share,
    )


def memory(evidence: Evidence) -> Finding | None:
    """The operators move more than they compute: memory, not arithmetic, takes the time."""
    measured = evidence.throughput
    used = measured.mbu("SYNTHETIC") if measured else None
    if not (measured and used and measured.work and measured.peaks) or launches(evidence) or evidence.loading:
        return None
    if evidence.compiled:  # nobody knows which passes are left
        return None
    moving = (measured.work.bytes or 0.0) / measured.peaks.bytes_per_second
    computing = measured.work.flops / measured.peaks.flops
    if moving < 1.5 * computing or used < 0.4:
        return None
    half = [] if "16" in str(evidence.setting("precision", "")) else ["precision: bf16 (half the bytes)"]
    rungs = ["compile: {mode: default} (one pass for many)", *half, "memory_format: channels_last for convolutions"]
    return Finding(
        "memory",
        "memory bandwidth",
        f"The step's operators read and write {size(measured.work.bytes)} a sample, {percent(min(used, 1.0))} of what "
        f"the memory can move in that time; their arithmetic alone would take {percent(computing / moving)} of it.",
        f"{', '.join(rungs)}.",
        min(used, 1.0) - min(used, 1.0) * computing / moving,
    )


def copies(evidence: Evidence) -> Finding | None:
    """Batches go to the device from memory that is not page-locked: the copy makes the host wait."""
    activity, seconds = evidence.activity, evidence.step_seconds
    if not (activity.pageable_bytes and activity.copy_seconds and seconds):
        return None
    if activity.pageable_bytes < 0.1 * (activity.copy_bytes or activity.pageable_bytes):
        return None
    return Finding(
        "copies",
        "copies from pageable memory",
        f"{size(activity.pageable_bytes)} a step are copied to the device from pageable memory, in "
        f"{percent(activity.copy_seconds / seconds)} of the step, and nothing overlaps such copies.",
        "loader: {pin_memory: true}, or loader: {kind: direct}, which copies from page-locked buffers.",
        max(activity.copy_seconds / seconds, 0.0),
    )


# ---- causes: the machine -----------------------------------------------------------------------------


def neighbour(evidence: Evidence) -> Finding | None:
    """Other programs keep the machine busy."""
    share = crowd(evidence.throughput, [])
    usage = _usage(evidence, "FULL") or _usage(evidence, "IO") or _usage(evidence, "SYNTHETIC")
    if not (share and usage):
        return None
    return Finding(
        "neighbour",
        "a busy neighbour",
        f"Programs that are not the run's kept {number(share * usage.cores, 2)} of the {usage.cores} cores busy that "
        "it may use, while it was measured.",
        "Measure again with nothing else running, or on nodes of your own: what was measured is too low.",
        None,
    )


def throttled(evidence: Evidence) -> Finding | None:
    """The GPU's clocks are held back, by power or temperature."""
    watched = evidence.watched
    if not (watched and watched.seconds):
        return None
    reasons = sorted(watched.throttle_reasons, key=lambda reason: -watched.throttle_reasons[reason])
    held = watched.throttled_seconds / watched.seconds
    # At its power cap a GPU that has much to do always is: only the cycles count that it lost. Heat is a fault.
    share = watched.clock_loss if reasons == [POWER_CAP] else held
    return Finding(
        "throttled",
        "clocks held back",
        f"For {percent(held)} of the time a GPU ran slower than it could ({', '.join(reasons)}), and lost "
        f"{percent(watched.clock_loss)} of its cycles.",
        "A power cap is the site's to lift; heat wants another node; lower precision takes less power.",
        share,
    )


#: Each looks for one cause, or one of several that exclude each other.
LOOKS: tuple[Callable[[Evidence], Finding | None], ...] = (
    loading,
    overlap,
    straggler,
    communication,
    launches,
    sync,
    memory,
    copies,
    neighbour,
    throttled,
)


# ---- what else is said -------------------------------------------------------------------------------


def limit(evidence: Evidence) -> str:
    """Say how far the run is from its device's limit."""
    measured = evidence.throughput
    if not (measured and measured.work and measured.peaks and (mfu := measured.mfu("FULL")) is not None):
        return ""
    arithmetic = measured.peaks.flops / measured.work.flops if measured.work.flops else math.inf
    # The bytes are those of a step that is not compiled.
    moved = measured.work.bytes if not evidence.compiled else None
    memory_ = measured.peaks.bytes_per_second / moved if moved else math.inf
    roof, kind = min((arithmetic, "arithmetic"), (memory_, "memory"))
    if not math.isfinite(roof):
        return ""
    many_ = f" of {measured.nranks} devices" if measured.nranks > 1 else ""
    return (
        f"FULL reaches {percent(mfu)} of the {number(measured.peaks.flops * measured.nranks / 1e9)} GFLOP/s"
        f"{many_} that a matrix product in {measured.peaks.dtype} does. The roof over this model is {kind}: "
        f"{number(roof * measured.nranks)} samples/s."
    )


def _next(evidence: Evidence, bounding: Bound | None) -> str:
    if bounding is None:
        return "Measure throughput: it says what bounds the run."
    if bounding.key == "io":
        return _faster_loader(evidence).strip() or "The loader is the fastest there is: store less, or use more nodes."
    rungs = []
    if "16" not in str(evidence.setting("precision", "")):
        rungs.append("precision: bf16")
    if not evidence.compiled:
        rungs.append("compile: {mode: default}")
    if not evidence.setting("optimizer.fused") and evidence.setting("optimizer.kind") != "adadelta":
        rungs.append("optimizer: {fused: true}")
    if evidence.cuda and not evidence.setting("cuda_graph"):
        rungs.append("cuda_graph: true")
    return f"{', '.join(rungs)}." if rungs else "All rungs are taken: a larger batch, or more devices."


def _faster_loader(evidence: Evidence) -> str:
    kind = evidence.setting("loader.kind")
    return "" if kind in ("direct", "synthetic") else " loader: {kind: direct} loads with far less work."


def _usage(evidence: Evidence, mode: str) -> Usage | None:
    trials = evidence.trials(mode)
    usage = trials.usage if trials else None
    return usage if usage and usage.seconds >= LEAST_SECONDS else None


def _idle(usage: Usage) -> float:
    return usage.cores - usage.cores_cpu_seconds / usage.seconds


# ---- dlscale explain ---------------------------------------------------------------------------------


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Print what holds the runs `args.runs` (PLAN.RUN, or their folders) back; return the exit status."""
    found = dict[str, Verdict]()
    for name in args.runs:
        run = read_run(run_folder(name, configuration))
        if not (run.throughput or run.profile):
            raise UserError(
                f"{run.folder}: neither throughput nor a profile was measured yet; run its plan, which needs "
                "`throughput` or `profile` in its `measure`"
            )
        found[name] = of(run)
    if args.json:
        print(json.dumps({name: asdict(each) for name, each in found.items()}, indent=2))
    else:
        print("\n\n".join("\n".join(lines(name, each)) for name, each in found.items()))
    return 0


def lines(name: str, found: Verdict) -> list[str]:
    """Return a verdict as lines of text."""
    unknown = found.bound and found.bound.what == UNKNOWN
    bound_by = f": bound by {found.bound.what}" if found.bound else ""
    text = [f"{name}{': what bounds it is not known' if unknown else bound_by}"]
    text += _wrapped(found.bound.why) if found.bound else []
    for finding in found.findings:
        costs = "" if finding.share is None else f", about {percent(finding.share)} of the time"
        text += ["", f"  {finding.what}{costs}", *_wrapped(finding.why)]
    text += ["", *_wrapped(found.limit)] if found.limit else []
    return [*text, "", *_wrapped(f"Try next: {found.todo}")]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent="  ", subsequent_indent="  ")
