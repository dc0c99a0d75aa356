"""Read a plan and its runs from the records that the stages wrote.

Reading raises `UserError` if a record is missing or truncated, or lacks a key.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

from dlscale.config.compute import compute_digest
from dlscale.config.records import PlanRecord, Rung, RunReference
from dlscale.core import registry
from dlscale.core.environment import Environment, differences
from dlscale.core.errors import UserError, unknown
from dlscale.core.metrics import VALID_LOSS, Epoch, LossInfo, Metric, read_epochs
from dlscale.core.settings import Raw, flat, read_yaml
from dlscale.core.stages import RUN_STAGES, STAGES
from dlscale.core.telemetry import Sample, begin, energy, read_nodes
from dlscale.core.text import shorten
from dlscale.measure.profilers import Profile
from dlscale.measure.records import MODES, SAMPLE_RATE, STEP_RATE, Throughput, Trials, Usage
from dlscale.parallel.records import Device
from dlscale.train.provenance import Provenance

T = TypeVar("T")

#: Stage → class of its record, for stages whose record only an extension reads.
EXTENDED = {stage: row.record for stage, row in STAGES.items() if row.record}

#: Stage → file of its record.
RECORDS = {
    "train": "metrics.jsonl",
    "program": "program.json",
    "throughput": "throughput.json",
    "profile": "profile/profile.json",
    **{stage: STAGES[stage].outputs[0] for stage in EXTENDED},
}

#: File with the epochs of an external program that logs its losses.
LOSSES = "program.jsonl"

#: Minimum fraction of the time, or of the cores, that is reported; smaller fractions may be noise.
MIN_FRACTION = 0.1

#: Text for a limit or a ratio that noise or a busy machine hides.
UNKNOWN = "not known"

#: Minimum duration of a measurement of CPU time, seconds, because the system counts in hundredths of a second.
MIN_SECONDS = 0.2

#: Other programs disturb a training only if at least this fraction of the cores is busy.
CROWDED = 0.8


@dataclass(frozen=True)
class Goodput:
    """Fractions of a run's time; a resumed run's time begins with its first epoch."""

    training: float
    validation: float
    rest: float  #: Fraction for starting, saving, and waiting between tries.


@dataclass(frozen=True, eq=False)
class RunResult:
    """One run of a plan, with its measurements."""

    name: str  #: Name of the run in this plan.
    label: str  #: Name of the run on the page.
    folder: Path
    owner: str  #: `PLAN/RUN` of the folder. PLAN is another plan if this plan names the run with `use`.
    settings: Raw  #: Content of `config.yaml`.
    provenance: Provenance | None = None
    epochs: list[Epoch] = field(default_factory=list)  #: Epochs of a training or a program's log; empty without both.
    throughput: Throughput | None = None  #: Record of the throughput stage, else `program`. Peaks: `with_shared_peaks`.
    profile: Profile | None = None
    prediction: Path | None = None  #: Figure of prediction against truth.
    telemetry: dict[str, list[list[Sample]]] = field(default_factory=dict)  #: Samples of each node, by stage.
    environments: dict[str, Environment] = field(default_factory=dict)  #: Machine and software, by stage.
    records: dict[str, Any] = field(default_factory=dict)  #: Records of extensions, by stage.
    repeats: list[list[Epoch]] = field(default_factory=list)  #: Epochs of each repetition with another seed.
    program: Throughput | None = None  #: Speed of an external program over its entire run.

    @property
    def study(self) -> str:
        return str(self.setting("study", ""))

    @property
    def called(self) -> str:
        """Name of the run in commands, followed by its label unless the label begins with the name."""
        return self.label if self.label.partition(" (= ")[0] == self.name else f"{self.name} · {self.label}"

    @property
    def last(self) -> Epoch | None:
        return self.epochs[-1] if self.epochs else None

    @cached_property
    def mean(self) -> Epoch:
        """Last epoch of a trained run; with several seeds, losses and metrics are means over the seeds."""
        last = [epochs[-1] for epochs in (self.epochs, *self.repeats) if epochs]
        common = [name for name in last[0].metrics if all(name in each.metrics for each in last)]
        metrics = {name: statistics.fmean(each.metrics[name] for each in last) for name in common}
        losses = {name: statistics.fmean(getattr(each, name) for each in last) for name in ("train_loss", "valid_loss")}
        return last[0].model_copy(update={**losses, "metrics": metrics})

    @property
    def final_loss(self) -> float:
        """Last validation loss; infinite if it is missing or not finite."""
        loss = self.last.valid_loss if self.last else math.inf
        return loss if math.isfinite(loss) else math.inf

    @cached_property
    def best_valid_loss(self) -> float | None:
        return min((epoch.valid_loss for epoch in self.epochs if math.isfinite(epoch.valid_loss)), default=None)

    @cached_property
    def timed(self) -> list[Epoch]:
        """Epochs with the same settings that affect times (`Epoch.made_with`) as the last epoch."""
        made = self.last.made_with if self.last else None
        return [epoch for epoch in self.epochs if made is not None and epoch.made_with == made]

    @cached_property
    def training_speed(self) -> float | None:
        """Speed of the training, in `unit`; None if unknown.

        This is the median over the epochs, without the first epoch (warm-up) if there are more epochs. For an external
        program in steps/s, this is the mean over the program's entire run.
        """
        if self.unit == STEP_RATE:
            return self.program.full.mean if self.program and self.program.full else None
        speeds = [epoch.samples_per_second for epoch in self.timed if epoch.samples_per_second is not None]
        return statistics.median(speeds[1:] or speeds) if speeds else None

    @property
    def training_seconds(self) -> float | None:
        """Training time without validation, s; None if settings that affect times changed during the run."""
        return sum(epoch.epoch_seconds for epoch in self.epochs) if self.timed == self.epochs else None

    @property
    def goodput(self) -> Goodput | None:
        """Fractions of the run's time over all tries.

        None without epochs, if the epochs have no times, or if the clock jumped.
        """
        if not self.last or not self.epochs[0].wall_time:
            return None
        start, end = self.epochs[0].begin, self.last.wall_time + self.last.valid_seconds
        made = self.provenance
        # The provenance of a resumed run has only the times of its last try.
        if made and made.started and made.finished and made.resumed_from_step is None:
            start, end = (dt.datetime.fromisoformat(time).timestamp() for time in (made.started, made.finished))
        training, validation = (
            sum(getattr(each, f"{part}_seconds") for each in self.epochs) for part in ("epoch", "valid")
        )
        if not 0 < training + validation < end - start + 2:  # start and end are rounded to seconds
            return None
        seconds = max(end - start, training + validation)
        return Goodput(training / seconds, validation / seconds, 1 - (training + validation) / seconds)

    @property
    def energy(self) -> float | None:
        """Energy of the train stage, J, of the GPUs or of nodes without GPUs; None if unknown or resumed."""
        whole = self.provenance and self.provenance.resumed_from_step is None
        return energy(self.telemetry.get("train", [])) if whole else None

    @cached_property
    def energy_per_sample(self) -> float | None:
        """Energy per training sample without validation, J, over the same epochs as `training_speed`."""
        nodes, joules, samples = self.telemetry.get("train", []), 0.0, 0.0
        for epoch in self.timed[1:] or self.timed:
            used = energy(nodes, epoch.begin, epoch.wall_time)
            if used is not None and epoch.begin >= begin(nodes[0]):  # the telemetry lacks epochs of earlier tries
                joules, samples = joules + used, samples + (epoch.samples_per_second or 0.0) * epoch.epoch_seconds
        return joules / samples if samples else None

    def energy_of(self, mode: str) -> float | None:
        """Return the energy per sample of a mode of the throughput stage, J; None if unknown."""
        trials, nodes = self.trials(mode), self.telemetry.get("throughput", [])
        if not (trials and trials.usage and (since := trials.usage.begin)) or self.unit != SAMPLE_RATE:
            return None
        samples = sum(rate * time for rate, time in zip(trials.trial_throughput, trials.trial_time, strict=True))
        used = energy(nodes, since, since + trials.usage.seconds)
        return used / samples if used and samples else None

    @property
    def speed(self) -> float | None:
        """Speed in mode FULL of `throughput`; without this record, speed of the training."""
        if self.throughput is not None:
            return self.throughput.full.mean if self.throughput.full else None
        return self.training_speed

    @property
    def unit(self) -> str:
        """Unit of `speed` and of all other speeds of the run."""
        return self.throughput.unit if self.throughput else SAMPLE_RATE

    def trials(self, mode: str) -> Trials | None:
        return self.throughput.mode(mode) if self.throughput else None

    @cached_property
    def compute(self) -> str:
        """Digest of the settings that affect the step time; runs that do the same work have equal digests."""
        measured = self.throughput.compute if self.throughput else None
        return measured or compute_digest(self.settings)

    def setting(self, path: str, default: Any = None) -> Any:
        return setting(self.settings, path, default)

    @property
    def batch_size(self) -> int | None:
        """Global batch size; for an external program the measured batch size, or None if unknown."""
        measured = self.throughput
        return measured.batch_size if measured and measured.outside else self.setting("batch_size")

    @property
    def devices(self) -> int:
        return int(self.setting("geometry.nodes", 1)) * int(self.setting("geometry.gpus_per_node", 1))

    @property
    def averages(self) -> bool:
        """Whether the devices average their gradients; a run without averaging only shows the cost of averaging."""
        return bool(self.setting("parallel.sync", True))

    @property
    def device(self) -> Device:
        devices = [record.device for record in (self.throughput, self.profile, self.provenance) if record]
        return next((device for device in devices if device.name), Device())

    @property
    def environment(self) -> Environment | None:
        """Machine and software of the throughput stage, or else of another stage."""
        order = ("throughput", *self.environments)
        return next((self.environments[stage] for stage in order if stage in self.environments), None)

    @property
    def hours(self) -> str:
        return "GPU-hours" if self.device.kind == "cuda" else "device-hours"

    @cached_property
    def foreign_cpu_fraction(self) -> float:
        return foreign_cpu_fraction(self.throughput, self.telemetry.get("train", []))

    @cached_property
    def foreign_load(self) -> float:
        """`foreign_cpu_fraction` without the load of other jobs of the same Snakemake call."""
        return foreign_cpu_fraction(self.throughput, self.telemetry.get("train", []), own_jobs=False)


def environment_changes(before: RunResult, after: RunResult) -> list[str]:
    """Return the differences in machine and software between two runs; empty if an environment is unknown."""
    known = [run.environment for run in (before, after) if run.environment]
    return differences(*known) if len(known) == 2 else []


def setting(settings: Raw, path: str, default: Any = None) -> Any:
    """Return a setting by its dotted path; the default if it is missing or null."""
    value: Any = settings
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return default if value is None else value


@dataclass(frozen=True, eq=False)
class PlanResult:
    """A plan and its runs, in the plan's order."""

    record: PlanRecord
    runs: list[RunResult]

    @property
    def name(self) -> str:
        return self.record.plan

    @property
    def title(self) -> str:
        return self.record.title or self.record.plan

    @property
    def repeats(self) -> bool:
        return any(run.repeats for run in self.runs)

    @cached_property
    def trained(self) -> list[RunResult]:
        return [run for run in self.runs if run.epochs]

    @cached_property
    def described(self) -> dict[str, Metric]:
        return {metric.name: metric for run in self.runs if run.provenance for metric in run.provenance.metrics}

    @cached_property
    def metrics(self) -> dict[str, Metric]:
        """Name → metric of the last epochs; metrics that the study describes come first."""
        measured = dict.fromkeys(name for run in self.trained for name in run.epochs[-1].metrics)
        described = {name: metric for name, metric in self.described.items() if name in measured}
        return described | {
            name: Metric(name=name, title=name.partition("/")[0]) for name in measured if name not in described
        }

    @cached_property
    def lead(self) -> Metric | None:
        """Main metric of the plan, not derived: the first metric with a baseline, or else the first metric."""
        candidates = [metric for metric in self.described.values() if not metric.derived]
        return next((metric for metric in candidates if metric.naive), next(iter(candidates), None))

    @property
    def answers(self) -> list[str]:
        """Names of baselines without learning: all candidates for the best baseline, or else each metric's baseline."""
        several = [metric.rival for metric in self.described.values() if metric.rival]
        return several or [metric.answer for metric in self.described.values() if metric.answer]

    @property
    def judge(self) -> Metric | None:
        """Metric that ranks the runs; None if the loss ranks them.

        The loss ranks the runs if `lead` is the metric of a single channel, or missing.
        """
        return None if self.lead and self.lead.channel else self.lead

    @cached_property
    def best(self) -> RunResult | None:
        """Best of the trained runs; None if all diverged, or without trained runs."""
        return next((run for run in self.ranked if math.isfinite(self.score(run)[0])), None)

    def _rank(self, run: RunResult) -> tuple[int, int, float]:
        """Return a sort key, smallest for the best run; in successive halving, the last rung comes first."""
        value, better = self.score(run)
        halved = self.record.sweep and self.record.sweep.rungs
        # The number of epochs does not show the rung, because a target may end a training before the end of its rung.
        rung = int(run.setting("training.stop_after", 0)) if halved else 0
        return (0, -rung, value if better == "lower" else -value) if math.isfinite(value) else (1, 0, 0.0)

    def score(self, run: RunResult) -> tuple[float, str]:
        """Return the value that ranks a trained run (NaN if it diverged), and whether "lower" or "higher" is better."""
        metric = self.record.sweep.metric if self.record.sweep else None
        # If all runs diverged, no metric was measured. Every study has the loss and the speed.
        known = [*(self.metrics or self.described), "valid_loss", "samples_per_second"]
        if metric and metric not in known:
            raise UserError(f"{self.name}: sweep.metric: {unknown('metric', metric, known)}")
        if metric and not math.isfinite(run.final_loss):
            return math.nan, "lower"
        if metric == "samples_per_second":
            if run.unit != SAMPLE_RATE:
                raise UserError(
                    f"{self.name}: sweep.metric samples_per_second: the batch size of {run.name} is unknown, so its "
                    "speed is in steps/s; put {batch_size} into program.command"
                )
            return run.speed or math.nan, "higher"
        described = self.metrics.get(metric, VALID_LOSS) if metric else self.judge or VALID_LOSS
        return described.of(run.mean), described.better

    @property
    def ranked(self) -> list[RunResult]:
        return sorted(self.trained, key=self._rank)

    @cached_property
    def loss(self) -> LossInfo:
        """Loss of the trained runs; if the losses differ, a general title."""
        losses = {run.provenance.loss if run.provenance else LossInfo() for run in self.trained}
        return losses.pop() if len(losses) == 1 else LossInfo(title="losses of several kinds")

    def changed(self, run: RunResult) -> str:
        """Return up to four settings that differ from the first run (in a ladder: from the run before), as text."""
        before = dict(zip(self.runs[1:], self.runs, strict=False)) if self.record.kind == "ladder" else {}
        other = before.get(run, self.runs[0])
        named = [f"{key}: {new}" for key, (_, new) in changes(other.settings, run.settings).items() if new is not None]
        return ", ".join(named[:4]) + " …" * (len(named) > 4)

    @cached_property
    def facts(self) -> dict[str, str]:
        """Name and label of a run → settings that the run changes, for tooltips of charts."""
        return {run.called: said for run in self.runs if (said := self.changed(run))}

    def anchor(self, run: RunResult) -> str:
        """Return the identifier of a run in the page; it is unique because names have no dots."""
        return f"run.{self.name}.{run.name}"


# ---- several runs ------------------------------------------------------------------------------------


def by_settings(runs: Sequence[RunResult]) -> list[tuple[str, list[RunResult]]]:
    """Group runs that differ only in their seed; return (name of the group, runs), in the plan's order."""
    found: dict[str, list[RunResult]] = {}
    for run in runs:
        settings = {key: value for key, value in flat(run.settings).items() if key not in ("seed", "label")}
        found.setdefault(json.dumps(settings, sort_keys=True, default=str), []).append(run)
    return [(without_seed(alike[0]) if len(alike) > 1 else alike[0].label, alike) for alike in found.values()]


def without_seed(run: RunResult) -> str:
    """Return the label of a run without its seed."""
    return run.label.removesuffix(f", seed {run.settings.get('seed')}")


def first_and_least(runs: Sequence[T], limit: int, key: Callable[[T], Any]) -> list[T]:
    """Return at most `limit` runs in the plan's order: the first run, and the runs with the smallest `key`."""
    ranked = sorted(range(1, len(runs)), key=lambda index: (key(runs[index]), index))[: limit - 1]
    return [runs[index] for index in sorted([*ranked, 0])] if runs else []


def slowness(run: RunResult) -> float:
    """Return a sort key: smallest for the fastest run."""
    return -(run.speed or 0.0)


def changes(before: Raw, after: Raw) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, except labels: dotted key → (before, after), None if missing."""
    old, new = (flat({**settings, "label": None}) for settings in (before, after))
    return {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}


# ---- targets -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reached:
    """A run's target, and the cost from the first step to the end of the validation that reached the target.

    All costs are None if the target was not reached. Time and GPU-hours are also None if settings that affect
    times changed during the run, and energy is also None if the run was resumed.
    """

    aim: str  #: Target, in words.
    epoch: Epoch | None  #: First epoch that reached the target; None if no epoch did.
    nearest: float | None  #: Best value of the metric in any epoch.
    seconds: float | None = None  #: Time of training and validation, s.
    gpu_hours: float | None = None  #: `seconds` x devices / 3600; a process without a GPU counts as one device.
    joules: float | None = None


def target_of(run: RunResult) -> tuple[Metric, float] | None:
    """Return a run's target as (metric, value); None without a target, or if the metric is unknown."""
    wanted = run.setting("training.target")
    described = [VALID_LOSS, *(run.provenance.metrics if run.provenance else ())]
    known = [metric for metric in described if wanted and metric.name == wanted["metric"]]
    return (known[0], float(wanted["value"])) if known else None


def reached(run: RunResult) -> Reached | None:
    """Return the outcome of a run's target; None without a target or without epochs."""
    wanted = target_of(run)
    return cost_to_reach(run, *wanted) if wanted and run.epochs else None


def cost_to_reach(run: RunResult, metric: Metric, value: float) -> Reached:
    """Return the cost of a training until a metric reached a value."""
    epoch, best = metric.first(run.epochs, value), metric.best(run.epochs)
    nearest = metric.of(best) if best else None
    if epoch is None:
        return Reached(metric.aim(value), None, nearest)
    passed = run.epochs[: run.epochs.index(epoch) + 1]
    seconds = sum(each.epoch_seconds + each.valid_seconds for each in passed) if run.timed == run.epochs else None
    devices = (run.provenance.devices or run.provenance.processes) if run.provenance else None
    joules = None
    if run.energy is not None and epoch.wall_time:
        joules = energy(run.telemetry.get("train", []), passed[0].begin, epoch.wall_time + epoch.valid_seconds)
    hours = seconds * devices / 3600 if seconds is not None and devices else None
    return Reached(metric.aim(value), epoch, nearest, seconds, hours, joules)


# ---- other programs ----------------------------------------------------------------------------------


def foreign_cpu_fraction(
    throughput: Throughput | None, training: Sequence[Sequence[Sample]], own_jobs: bool = True
) -> float:
    """Return the fraction of the cores that other programs kept busy while a run was timed, or else trained.

    The fraction is 0 if it is within the error of the measurement, and for a training also if enough cores were idle.
    For a training, other jobs of the same Snakemake call count only with `own_jobs`.
    """
    if throughput:
        return _beside_trials([trials.usage for mode in MODES if (trials := throughput.mode(mode)) and trials.usage])
    shares = []
    for samples in training:
        known = [
            (s.seconds, s.cpu, s.cpu_others - (0.0 if own_jobs else s.cpu_call or 0.0))
            for s in samples
            if s.cpu is not None and s.cpu_others is not None
        ]
        seconds = sum(each for each, _, _ in known)
        if seconds >= MIN_SECONDS:
            used, others = (sum(each[0] * each[column] for each in known) / seconds for column in (1, 2))
            shares.append(others if others >= MIN_FRACTION and used >= CROWDED else 0.0)
    return max(shares, default=0.0)


def _beside_trials(usages: Sequence[Usage]) -> float:
    known = [usage for usage in usages if usage.seconds >= MIN_SECONDS]
    if not known:
        return 0.0
    busy = sum(foreign_cores(usage) * usage.seconds for usage in known) / sum(usage.seconds for usage in known)
    return min(busy / known[0].cores, 1.0) if busy >= max(0.25, MIN_FRACTION * known[0].cores) else 0.0


def foreign_cores(usage: Usage) -> float:
    """Return the number of logical CPUs that other programs kept busy."""
    return max(0.0, usage.cores_cpu_seconds - usage.cpu_seconds) / usage.seconds


# ---- reading -----------------------------------------------------------------------------------------


def read_plan(
    path: str | Path, rung: int | None = None, stages: Sequence[str] = RUN_STAGES, lacking: list[str] | None = None
) -> PlanResult:
    """Read a plan, `results/plans/PLAN/plan.yaml`, and the records of the `stages` of its runs.

    In successive halving, the last rung of each trial is read, or only the trials of `rung`. A run that cannot be read
    raises `UserError`. With a list `lacking`, such a run is left out instead, and the reason is appended to the list.
    """
    path = Path(path)
    plan = PlanRecord.checked(read_yaml(path, linked=False), str(path))
    runs = list[RunResult]()
    try:
        furthest = _furthest(plan, path.parent, rung)
    except UserError as error:  # a sweep that has not promoted its trials yet
        if lacking is None:
            raise
        lacking.append(f"{plan.plan}: {error}")
        furthest = []
    for run in furthest:
        try:
            runs.append(_read(path.parent.parent, run, [stage for stage in run.measure if stage in stages]))
        except UserError as error:
            if lacking is None:
                raise
            lacking.append(f"{plan.plan}.{run.name}: {error}")
    return PlanResult(plan, with_shared_peaks(runs))


def read_run(folder: Path) -> RunResult:
    """Read one run from its folder, with the peaks that all runs of its plan share."""
    plan = folder.resolve().parent / "plan.yaml"
    beside = read_plan(plan, stages=["throughput"], lacking=[]).runs if plan.exists() else []
    return with_shared_peaks([read_alone(folder), *beside])[0]


def read_alone(folder: Path) -> RunResult:
    """Read one run from its folder, without its plan."""
    folder = folder.resolve()
    measured = [stage for stage, file in RECORDS.items() if (folder / file).exists()]
    own = RunReference.model_construct(name=folder.name, plan=folder.parent.name, run=folder.name, measure=measured)
    return _read(folder.parent.parent, own, measured)


def _furthest(plan: PlanRecord, folder: Path, rung: int | None) -> list[RunReference]:
    if not (plan.sweep and plan.sweep.rungs):
        return plan.runs
    runs, there = {run.name: run for run in plan.runs}, {run.name for run in plan.runs}
    for number in range(1, (len(plan.sweep.rungs) if rung is None else rung + 1)):
        there = set(Rung.read(folder / f"rung{number}.json").trials)
        runs |= {name: runs[name].model_copy(update={"run": f"{name}-rung{number}"}) for name in there & runs.keys()}
    return [run for name, run in runs.items() if rung is None or name in there]


#: Setting that pages show or compute with → its type. Runs of earlier versions may lack some settings.
SHOWN: dict[str, type] = {
    **dict.fromkeys(("batch_size", "geometry.nodes", "geometry.gpus_per_node"), int),
    **dict.fromkeys(("study", "precision", "compile.mode", "parallel.kind", "optimizer.kind", "loader.kind"), str),
}


def _settings(path: Path) -> Raw:
    """Read a run's settings; raise a `UserError` for a damaged value of `SHOWN`."""
    found = read_yaml(path, linked=False)
    for key, kind in SHOWN.items():
        if not isinstance(value := setting(found, key, kind()), kind):
            raise UserError(f"{path}: {key}: got {shorten(repr(value), 60)}; the file is damaged: repeat the run")
    return found


def _read(root: Path, reference: RunReference, measured: Sequence[str]) -> RunResult:
    """Read only the records of the stages in `measured`, because another plan may be writing the other records."""
    folder, train = root / reference.plan / reference.run, "train" in measured
    records = {stage: folder / file for stage, file in RECORDS.items() if stage in measured}
    program = Throughput.read(records["program"]) if "program" in records else None
    logged = program is not None and (folder / LOSSES).exists()  # the program logged its losses
    provenance, prediction = folder / "provenance.json", folder / "prediction.png"
    result = RunResult(
        name=reference.name,
        label=reference.label or reference.name,
        folder=folder,
        owner=f"{reference.plan}/{reference.run}",
        settings=_settings(folder / "config.yaml"),
        provenance=Provenance.read(provenance) if train and provenance.exists() else None,
        epochs=read_epochs(folder / (RECORDS["train"] if train else LOSSES)) if train or logged else [],
        program=program,
        throughput=Throughput.read(records["throughput"]) if "throughput" in records else program,
        profile=Profile.read(records["profile"]) if "profile" in records else None,
        prediction=prediction if train and prediction.exists() else None,
        telemetry={
            stage: read_nodes(folder / f"telemetry/{stage}.csv") for stage in sorted(measured, key=RUN_STAGES.index)
        },
        environments={
            stage: Environment.read(file) for stage in measured if (file := folder / f"telemetry/{stage}.json").exists()
        },
        records={
            stage: registry.named(EXTENDED[stage]).read(file) for stage, file in records.items() if stage in EXTENDED
        },
        repeats=[
            read_epochs(folder.parent / name / (RECORDS["train"] if train else LOSSES))
            for name in reference.repeats
            if train or logged
        ],
    )
    if result.provenance and result.provenance.epochs not in (None, len(result.epochs)):
        raise UserError(
            f"{folder / RECORDS['train']}: has {len(result.epochs)} of {result.provenance.epochs} epochs; delete it "
            "and run the train stage again"
        )
    return result


# ---- peaks -------------------------------------------------------------------------------------------


def read_measured(folder: Path) -> Throughput | None:
    """Read the throughput record of a run; None without a record."""
    path = folder / "throughput.json"
    return _read_throughput(path, path.stat().st_mtime_ns) if path.exists() else None


@cache
def _read_throughput(path: Path, changed: int) -> Throughput:
    return Throughput.read(path)


def with_shared_peaks(runs: Sequence[RunResult]) -> list[RunResult]:
    """Return runs with the greatest peaks that any run measured on the same device (FLOP/s: in the same precision).

    On a busy machine, measured peaks may differ by a factor of two or more. MFU and MBU relative to different peaks
    would contradict the speeds.
    """
    known = [(_place(each), each.peaks) for run in runs if (each := run.throughput) and each.peaks]
    shared = []
    for run in runs:
        if (own := run.throughput) and own.peaks:
            alike = [peaks for place, peaks in known if place == _place(own)]
            most = {
                "flops": max(peaks.flops for peaks in alike if peaks.dtype == own.peaks.dtype),
                "bytes_per_second": max(peaks.bytes_per_second for peaks in alike),
            }
            run = replace(run, throughput=own.model_copy(update={"peaks": own.peaks.model_copy(update=most)}))
        shared.append(run)
    return shared


def _place(measured: Throughput) -> tuple[Device, int]:
    """Return (device, number of ranks that share the device's memory): all ranks on a CPU, one on a GPU."""
    return measured.device, 1 if measured.device.kind == "cuda" else measured.nranks
