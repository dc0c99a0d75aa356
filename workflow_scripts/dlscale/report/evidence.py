"""Measurements of a run, the limit of its speed, and causes that slow it, each with a remedy."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlscale.core.settings import Raw
from dlscale.core.telemetry import Summary
from dlscale.core.text import number, percent
from dlscale.measure.profilers import Activity, Profile
from dlscale.measure.records import MODES, Outside, Throughput, Trials, Usage
from dlscale.report.speedup import spread
from dlscale.results import MIN_FRACTION, MIN_SECONDS, UNKNOWN, foreign_cores, setting

#: Settings that several remedies suggest, as YAML.
COMPILED, DIRECT = "compile: {mode: default}", "loader: {kind: direct}"


@dataclass(frozen=True)
class Evidence:
    """The settings and measurements by which a run is judged."""

    settings: Raw
    throughput: Throughput | None = None
    profile: Profile | None = None
    watched: Summary | None = None  #: Telemetry of the first node.
    folder: Path | None = None  #: Folder of the run's records.

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
        """Means per profiled step; each value is from the first profiler that measured it."""
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

        A profiler slows the host but not the device. Therefore the busy seconds come from profiled steps, and the
        length of a step comes from steps without a profiler.
        """
        for tool in self.profile.tools if self.profile and self.cuda else []:
            busy, profiled = tool.activity.device_busy, tool.seconds_per_step
            if busy is not None:
                plain = self.step_seconds or profiled or 1.0
                share = max(0.0, 1 - busy * (profiled or plain) / plain)
                idle = tool.activity.idle_seconds
                # Idle time counts for the innermost range, and `copy` lies within `data`.
                for_data = idle.get("data", 0.0) + idle.get("copy", 0.0)
                return share, min(share, for_data / plain)
        return None

    @property
    def compiled(self) -> bool:
        return bool(self.setting("compile.mode", "none") != "none")

    @property
    def loading(self) -> float:
        """Fraction of training time lost to loading; 0 if unknown, or if loading does not limit the run."""
        io, synthetic, full = map(self.rate, ("IO", "SYNTHETIC", "FULL"))
        if not (io and synthetic and full) or io > 0.8 * synthetic:
            return 0.0
        return max(0.0, 1 - full / synthetic)

    def usage(self, mode: str) -> Usage | None:
        """Return processor and disk usage while `mode` was timed; None if unknown or shorter than `MIN_SECONDS`."""
        trials = self.trials(mode)
        usage = trials.usage if trials else None
        return usage if usage and usage.seconds >= MIN_SECONDS else None

    @property
    def rungs(self) -> list[str]:
        """Settings, as YAML, that often speed up training, and that the run supports but does not use."""
        strategy, captures = self.setting("parallel.kind"), self.setting("compile.mode", "none")
        lacks = {
            "precision: bf16": not any(bits in str(self.setting("precision", "")) for bits in ("8", "16")),
            COMPILED: not self.compiled and strategy != "dp",
            "optimizer: {fused: true}": not self.setting("optimizer.fused")
            and self.setting("optimizer.kind") != "adadelta",
            "cuda_graph: true": self.cuda
            and not self.setting("cuda_graph")
            and strategy not in ("dp", "fsdp")
            and captures in ("none", "default"),
        }
        return [rung for rung, lacking in lacks.items() if lacking]

    @property
    def faster_loader(self) -> str:
        """A sentence that suggests a faster loader; empty for the fastest loader and for synthetic data."""
        if self.setting("loader.kind") in ("direct", "synthetic"):
            return ""
        return f"{DIRECT} loads fields on grids, rows and images with far less work than the loader in use."


@dataclass(frozen=True)
class Finding:
    """One cause that slows a run."""

    cause: str  #: Key of the cause.
    what: str  #: Title, in a few words.
    why: str  #: Evidence with figures, in one or two sentences.
    todo: str  #: Remedy.
    share: float | None  #: Approximate fraction of the run's time that the cause costs; None if unknown.
    rung: str = ""  #: Settings of the remedy, as YAML; empty if the remedy is not a setting.


def crowded_out(usage: Usage) -> bool:
    """Return whether other programs took cores that the run would have used, so that the run's own speed is unknown."""
    spare = usage.cores - usage.cores_cpu_seconds / usage.seconds
    return foreign_cores(usage) > 0.25 and spare < max(0.5, MIN_FRACTION * usage.cores)


#: Fraction by which FULL may exceed the slower of IO and SYNTHETIC by chance, because the three modes are timed at
#: different times. A larger spread of the trials raises this limit.
MAX_EXCESS_FRACTION = 0.1
#: Standard deviation of a rate's trials, as a fraction of the rate, above which the limit is unknown.
MAX_DEVIATION = 0.25


@dataclass(frozen=True)
class Bound:
    """The limit of training speed (FULL)."""

    what: str  #: Name of the limit, in a few words.
    key: str  #: Kind of the limit, and its CSS class on the page: `io`, `synthetic` or `both`.
    why: str  #: Reason, in sentences.
    share: float  #: Rate of FULL / lower rate of IO and SYNTHETIC; 1 for an external program.
    loading: float | None  #: Fraction of the time spent loading; None unless loading and computing take turns.


def bound(throughput: Throughput | None) -> Bound | None:
    """Return the limit of a run's speed; None if the limit was not measured.

    A run of a study is judged by its three rates, which must all be known. FULL cannot exceed the slower of loading
    alone (IO) and computing alone (SYNTHETIC). FULL divided by the slower rate shows how well loading and computing
    overlap. An external program is judged by its wait for batches instead.
    """
    if throughput and throughput.outside:
        return _bound_program(throughput.outside.waiting, throughput.outside.between_epochs)
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
    slower_part = "loading" if slower is modes[0] else "computing"
    reaches = f"{percent(share)} of {slower_part} alone, the slower of the two"
    deviation, part = max(
        (each.std / each.mean, name) for each, name in zip(modes, ("Loading", "Computing", "Training"), strict=True)
    )
    if deviation > MAX_DEVIATION:
        what, key, reaches = UNKNOWN, "both", f"{number(full)} samples/s"
        advice = f"{part} varies by {percent(deviation)} between trials. Measure again on an idle machine."
    elif full - slower.mean > max(
        MAX_EXCESS_FRACTION * slower.mean, *(spread(each) * each.mean for each in (slower, modes[2]))
    ):
        what, key, reaches = (
            UNKNOWN,
            "both",
            f"{number(full)} samples/s, which exceeds {slower_part} alone by more than noise",
        )
        advice = (
            "Training cannot be faster than the slower of loading and computing, so all three rates are unreliable. "
            "Measure again on an idle machine."
        )
    elif share > 1:
        reaches = f"{number(full)} samples/s, as fast as {slower_part} alone, within noise"
    elif share < 0.8 and full < 0.9 * serial:
        advice = "Training is slower than loading and computing one after the other would be" + (
            ", but within noise."
            if full * (1 + spread(modes[2])) >= serial
            else ": both may compete for the same cores or memory."
        )
    elif share < 0.9 and 0.9 * serial <= full <= 1.1 * serial < 0.99 * slower.mean:
        loading = serial / io
        what, key = "missing overlap", "both"
        advice = "Loading and computing take turns instead of overlapping."
    elif share < 0.8:
        advice = "Loading and computing overlap only partly."
    alone = f"Loading alone reaches {number(io)} samples/s, computing alone {number(synthetic)}."
    return Bound(what, key, f"{alone} Training reaches {reaches}. {advice}", share, loading)


def _bound_program(waiting: float | None, between: float) -> Bound | None:
    """Return the limit of an external program, from its wait for batches; None if this wait is unknown."""
    if waiting is None:
        return None
    what = "data loading" if waiting >= 0.5 else "computation" if waiting <= 0.2 else "loading and computing"
    what = "work between epochs" if between >= 0.5 else what
    rest = f"Work between epochs: {percent(between)}. " * (between >= 0.005) + "Computing and everything else: "
    why = f"Waiting for data: {percent(waiting)} of the time. {rest}{percent(max(0, 1 - waiting - between))}."
    return Bound(what, {"data loading": "io", "computation": "synthetic"}.get(what, "both"), why, 1.0, None)
