"""A plan and its runs, with the records that the stages left in their folders: their only reader above the stages.

A record that is missing, torn, or lacks a key is a `UserError`. Whoever can do without a run hands in a list,
`lacking`, which then tells what each run lacks that is left out.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from dlscale.config.compute import compute_digest
from dlscale.config.records import PlanRecord, Rung, RunReference
from dlscale.core.errors import UserError, unknown
from dlscale.core.metrics import VALID_LOSS, Epoch, LossInfo, Metric, read_epochs
from dlscale.core.settings import Raw, flat, read_yaml
from dlscale.core.stages import RUN_STAGES
from dlscale.core.telemetry import Sample, begin, energy, read_nodes
from dlscale.core.text import percent
from dlscale.measure.profiling import Profile
from dlscale.measure.records import MODES, Throughput, Trials, Usage
from dlscale.measure.tuning import Tuning
from dlscale.parallel.records import Device
from dlscale.train.provenance import Provenance

T = TypeVar("T")

#: Metrics that runs of any study can be ranked by in a sweep.
GENERAL_METRICS = ("valid_loss", "samples_per_second")

#: Records by stage; a stage that left its record was measured.
RECORDS = {
    "train": "metrics.jsonl",
    "throughput": "throughput.json",
    "profile": "profile/profile.json",
    "tune": "tune.json",
}

#: Share of the time, or of the cores, from which on a cause is told: two measurements of the same differ by as much.
LEAST = 0.1

#: Seconds below which a measurement says nothing of processor time, which the system counts in hundredths of a second.
LEAST_SECONDS = 0.2

#: Share of a machine's cores from which on there are few left for others.
CROWDED = 0.8


@dataclass(frozen=True, eq=False)
class RunResult:
    """One run of a plan, with all that was measured of it."""

    name: str  #: In the plan at hand.
    label: str  #: The same for readers.
    folder: Path  #: That holds the results.
    owner: str  #: `PLAN/RUN` whose folder holds the results; another plan's where the run was named with `use`.
    settings: Raw  #: The run's `config.yaml`.
    provenance: Provenance | None = None
    epochs: list[Epoch] = field(default_factory=list)  #: Empty if the plan does not train.
    #: None if the plan does not measure it. Its peaks are those that all runs of the plan share.
    throughput: Throughput | None = None
    profile: Profile | None = None  #: As above.
    prediction: Path | None = None  #: The figure of prediction against truth, if there is one.
    #: By stage that the plan measures: samples of each node meanwhile; empty where that is not known.
    telemetry: dict[str, list[list[Sample]]] = field(default_factory=dict)
    tuning: Tuning | None = None  #: None if the plan does not tune.
    repeats: list[list[Epoch]] = field(default_factory=list)  #: The same training with other seeds.

    @property
    def last(self) -> Epoch | None:
        return self.epochs[-1] if self.epochs else None

    def over_seeds(self, value: Callable[[Epoch], float | None]) -> list[list[float]]:
        """Return a value after each epoch that all repeats came to: of each seed, the run's own first; without None."""
        epochs = zip(self.epochs, *self.repeats, strict=False)
        return [[y for epoch in each if (y := value(epoch)) is not None] for each in epochs]

    @property
    def final_loss(self) -> float:
        """Last validation loss; infinite if it is not a number or there is none."""
        loss = self.last.valid_loss if self.last else math.inf
        return loss if math.isfinite(loss) else math.inf

    @cached_property
    def best_valid_loss(self) -> float | None:
        """Least validation loss of any epoch."""
        return min((epoch.valid_loss for epoch in self.epochs if math.isfinite(epoch.valid_loss)), default=None)

    @cached_property
    def timed(self) -> list[Epoch]:
        """Epochs trained with the last one's geometry and loader: a resumed run may have changed either."""
        made = self.last.made_with if self.last else None
        return [epoch for epoch in self.epochs if made is not None and epoch.made_with == made]

    @cached_property
    def training_speed(self) -> float | None:
        """Median training samples/s over the epochs; the first, which warms up, counts only if it is alone."""
        speeds = [epoch.samples_per_second for epoch in self.timed]
        return statistics.median(speeds[1:] or speeds) if speeds else None

    @property
    def training_seconds(self) -> float | None:
        """Time spent training, validation left out, s; None where geometry or loader changed on the way."""
        return sum(epoch.epoch_seconds for epoch in self.epochs) if self.timed == self.epochs else None

    @property
    def energy(self) -> float | None:
        """Energy of the GPUs from the start of training to its end, J; None if an earlier try did a part of it."""
        whole = self.provenance and self.provenance.resumed_from_step is None
        return energy(self.telemetry.get("train", [])) if whole else None

    @cached_property
    def energy_per_sample(self) -> float | None:
        """Joules a training sample, over the epochs that `training_speed` is of, validation left out."""
        nodes, joules, samples = self.telemetry.get("train", []), 0.0, 0.0
        for epoch in self.timed[1:] or self.timed:
            used = energy(nodes, epoch.begin, epoch.wall_time)
            if used is not None and epoch.begin >= begin(nodes[0]):  # else of an earlier try
                joules, samples = joules + used, samples + epoch.samples_per_second * epoch.epoch_seconds
        return joules / samples if samples else None

    @property
    def speed(self) -> float | None:
        """FULL samples/s, or those of training where throughput was not measured."""
        if self.throughput is not None:
            return self.throughput.full.mean if self.throughput.full else None
        return self.training_speed

    def trials(self, mode: str) -> Trials | None:
        """Return what was measured in one of `MODES`."""
        return self.throughput.mode(mode) if self.throughput else None

    @cached_property
    def compute(self) -> str:
        """Digest of all settings that decide how long a step takes: equal for runs that do the same work."""
        measured = self.throughput.compute if self.throughput else None
        return measured or compute_digest(self.settings)

    def setting(self, path: str, default: Any = None) -> Any:
        """Return a setting by its dotted path."""
        return setting(self.settings, path, default)

    @property
    def devices(self) -> int:
        return int(self.setting("geometry.nodes", 1)) * int(self.setting("geometry.gpus_per_node", 1))

    @property
    def averages(self) -> bool:
        """Whether its devices average their gradients: else it is the twin of such a run, and no training."""
        return bool(self.setting("parallel.sync", True))

    @property
    def device(self) -> Device:
        known = (self.throughput, self.profile, self.provenance, self.tuning)
        devices = [record.device for record in known if record]
        return next((device for device in devices if device.name), Device())

    @property
    def hours(self) -> str:
        """Name of hours x devices: hardly anybody counts processors in GPU-hours."""
        return "GPU-hours" if self.device.kind == "cuda" else "device-hours"

    @property
    def crowd(self) -> float:
        """Greatest share of the cores that others kept busy while it was timed: trained, if it was not timed."""
        return crowd(self.throughput, self.telemetry.get("train", []))


def setting(settings: Raw, path: str, default: Any = None) -> Any:
    """Return a setting by its dotted path; the default where it is not there, or null."""
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
        """Metrics that the study describes, by name, in its order."""
        return {metric.name: metric for run in self.runs if run.provenance for metric in run.provenance.metrics}

    @cached_property
    def metrics(self) -> dict[str, Metric]:
        """Metrics of the last epochs by name: those that the study describes, then those with a name only."""
        measured = dict.fromkeys(name for run in self.trained for name in run.epochs[-1].metrics)
        described = {name: metric for name, metric in self.described.items() if name in measured}
        return described | {
            name: Metric(name=name, title=name.partition("/")[0]) for name in measured if name not in described
        }

    @cached_property
    def lead(self) -> Metric | None:
        """Metric that says best how good a run is: the first with a naive answer, or else the first of all."""
        candidates = [metric for metric in self.described.values() if not metric.derived]
        return next((metric for metric in candidates if metric.naive), next(iter(candidates), None))

    @property
    def answers(self) -> list[str]:
        """Naive answers: each of several, where a metric is measured by the strongest of them."""
        several = [metric.rival for metric in self.described.values() if metric.rival]
        return several or [metric.answer for metric in self.described.values() if metric.answer]

    def answer(self, metric: Metric, values: Mapping[str, float]) -> str:
        """Return what the naive answer of a metric is: with several, also which of them is the strongest."""
        rivals = (other for other in self.described.values() if other.rival and other.channel == metric.channel)
        error = values.get(metric.naive or "")
        name = next((other.rival for other in rivals if error is not None and values.get(other.name) == error), "")
        return f"{metric.answer}, {name}" if name else metric.answer

    @property
    def judge(self) -> Metric | None:
        """Metric that runs are ranked by: the leading one. Of one by channels None, which stands for the loss."""
        return None if self.lead and self.lead.channel else self.lead

    @cached_property
    def best(self) -> RunResult | None:
        return next(iter(self.ranked), None)

    def _rank(self, run: RunResult) -> tuple[int, int, float]:
        """Return a key that is least for the best run; in a sweep of successive halving one that came furthest."""
        value, better = self.score(run)
        halved = self.record.sweep and self.record.sweep.rungs
        # Not how many epochs were trained: a target may end a training before its rung does.
        rung = int(run.setting("training.stop_after", 0)) if halved else 0
        return (0, -rung, value if better == "lower" else -value) if math.isfinite(value) else (1, 0, 0.0)

    def score(self, run: RunResult) -> tuple[float, str]:
        """Return what a trained run is ranked by, and which values of it are better; not a number if it diverged."""
        if self.record.sweep:
            return self._swept(run, self.record.sweep.metric)
        if self.judge is None:
            return run.final_loss, "lower"
        return run.epochs[-1].metrics.get(self.judge.name, math.nan), self.judge.better

    def _swept(self, run: RunResult, metric: str) -> tuple[float, str]:
        if metric not in (*GENERAL_METRICS, *self.metrics):
            known = [*self.metrics, *GENERAL_METRICS]
            raise UserError(f"{self.name}: sweep.metric: {unknown('metric', metric, known)}")
        if not math.isfinite(run.final_loss):
            return math.nan, "lower"
        if metric == "samples_per_second":
            return run.speed or math.nan, "higher"
        described = VALID_LOSS if metric == VALID_LOSS.name else self.metrics[metric]
        return described.of(run.epochs[-1]), described.better

    @property
    def ranked(self) -> list[RunResult]:
        return sorted(self.trained, key=self._rank)

    def skill(self, epoch: Epoch) -> float | None:
        """Return the mean skill over the channels of the leading metric; None if it has no naive answer."""
        kind = self.lead.kind if self.lead else None
        skills = [metric.skill(epoch.metrics) for metric in self.described.values() if metric.kind == kind]
        known = [skill for skill in skills if skill is not None]
        return statistics.fmean(known) if known else None

    @cached_property
    def loss(self) -> LossInfo:
        """Loss of the trained runs; only its name if it is not the same for all."""
        losses = {run.provenance.loss if run.provenance else LossInfo() for run in self.trained}
        return losses.pop() if len(losses) == 1 else LossInfo(title="losses of several kinds")

    def anchor(self, run: RunResult) -> str:
        """Return the identifier of a run in the page; names have no dots, so it is unique."""
        return f"run.{self.name}.{run.name}"


# ---- several runs ------------------------------------------------------------------------------------


def by_settings(runs: Sequence[RunResult]) -> list[tuple[str, list[RunResult]]]:
    """Return runs that differ in nothing but their seed together, each group with what it is called, in order."""
    found: dict[str, list[RunResult]] = {}
    for run in runs:
        settings = {key: value for key, value in flat(run.settings).items() if key not in ("seed", "label")}
        found.setdefault(json.dumps(settings, sort_keys=True, default=str), []).append(run)
    return [(without_seed(alike[0]) if len(alike) > 1 else alike[0].label, alike) for alike in found.values()]


def without_seed(run: RunResult) -> str:
    """Return what a run is called together with its like of other seeds."""
    return run.label.removesuffix(f", seed {run.settings.get('seed')}")


def first_and_least(runs: Sequence[T], limit: int, key: Callable[[T], float]) -> list[T]:
    """Return at most `limit` runs in the plan's order: the first, and those of the least `key`."""
    ranked = sorted(range(1, len(runs)), key=lambda index: (key(runs[index]), index))[: limit - 1]
    return [runs[index] for index in sorted([*ranked, 0])] if runs else []


def slowness(run: RunResult) -> float:
    """Return a key that is least for the fastest run."""
    return -(run.speed or 0.0)


def changes(before: Raw, after: Raw) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ by dotted key, labels apart, as they were before and after; None is not there."""
    old, new = (flat({**settings, "label": None}) for settings in (before, after))
    return {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}


# ---- targets -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reached:
    """A run's target, and what it took from the first step to the end of the validation that showed it.

    None where it was not reached, or is not known: time where geometry or loader changed on the way, energy where an
    earlier try did a part of it. Start-up and the time between two tries do not count.
    """

    aim: str  #: In words.
    epoch: Epoch | None  #: The first that reached it.
    nearest: float | None  #: Best value of the metric in any epoch.
    seconds: float | None = None  #: Of training and validation.
    gpu_hours: float | None = None  #: These seconds x devices. A process without a GPU counts as a device, too.
    joules: float | None = None


def asked(run: RunResult) -> tuple[Metric, float] | None:
    """Return what a run was to reach: a metric and its value; None if it has no target, or the metric is not known."""
    wanted = run.setting("training.target")
    described = [VALID_LOSS, *(run.provenance.metrics if run.provenance else ())]
    metric = next((metric for metric in described if wanted and metric.name == wanted["metric"]), None)
    return (metric, float(wanted["value"])) if metric else None


def reached(run: RunResult) -> Reached | None:
    """Return what became of a run's target; None if it has none, was not trained, or its metric is not known."""
    wanted = asked(run)
    return took(run, *wanted) if wanted and run.epochs else None


def took(run: RunResult, metric: Metric, value: float) -> Reached:
    """Return what a trained run took until a metric was as good as a value."""
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


def crowd(throughput: Throughput | None, training: Sequence[Sequence[Sample]]) -> float:
    """Return the greatest share of the cores that others kept busy while a run was timed: trained, if nothing else.

    0 where it is too little to tell, or, of a training, where cores were left over.
    """
    if throughput:
        return _beside_trials([trials.usage for mode in MODES if (trials := throughput.mode(mode)) and trials.usage])
    shares = []
    for samples in training:
        known = [(s.seconds, s.cpu, s.cpu_others) for s in samples if s.cpu is not None and s.cpu_others is not None]
        seconds = sum(each for each, _, _ in known)
        if seconds >= LEAST_SECONDS:
            used, others = (sum(each[0] * each[column] for each in known) / seconds for column in (1, 2))
            shares.append(others if others >= LEAST and used >= CROWDED else 0.0)
    return max(shares, default=0.0)


def _beside_trials(usages: Sequence[Usage]) -> float:
    known = [usage for usage in usages if usage.seconds >= LEAST_SECONDS]
    if not known:
        return 0.0
    busy = sum(others(usage) * usage.seconds for usage in known) / sum(usage.seconds for usage in known)
    return min(busy / known[0].cores, 1.0) if busy >= max(0.25, LEAST * known[0].cores) else 0.0


def others(usage: Usage) -> float:
    """Return how many of the run's cores other programs kept busy."""
    return max(0.0, usage.cores_cpu_seconds - usage.cpu_seconds) / usage.seconds


def crowded(share: float) -> str:
    """Return in words that others kept such a share of the cores busy; nothing if it was too little to tell."""
    return f"other programs kept {percent(share)} of the cores busy" if share else ""


# ---- reading -----------------------------------------------------------------------------------------


def read_plan(
    path: str | Path, rung: int | None = None, stages: Sequence[str] = RUN_STAGES, lacking: list[str] | None = None
) -> PlanResult:
    """Read a plan, `results/plans/PLAN/plan.yaml`, and the results of all its runs.

    Of successive halving a trial's run is that of the last rung that it came to; with `rung` those of this rung alone
    are read. Of each run these `stages` are read, where the plan measures them. A run that cannot be read is left out,
    with a word of why in `lacking`; without such a list that is a `UserError`.
    """
    path = Path(path)
    plan = PlanRecord.checked(read_yaml(path), str(path))
    runs = list[RunResult]()
    try:
        furthest = _furthest(plan, path.parent, rung)
    except UserError as error:  # a sweep that has not chosen yet
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


def read_run(folder: Path, stages: Iterable[str] = RECORDS) -> RunResult:
    """Read one run by its folder, what was measured of it by these stages; its peaks are those that its plan shares."""
    folder = folder.resolve()
    measured = [stage for stage in stages if (folder / RECORDS[stage]).exists()]
    own = RunReference.model_construct(name=folder.name, plan=folder.parent.name, run=folder.name, measure=measured)
    plan = folder.parent / "plan.yaml"
    beside = read_plan(plan, stages=["throughput"], lacking=[]).runs if plan.exists() else []
    others_ = [run for run in beside if run.folder.resolve() != folder]
    return with_shared_peaks([_read(folder.parent.parent, own, measured), *others_])[0]


def _furthest(plan: PlanRecord, folder: Path, rung: int | None) -> list[RunReference]:
    if not (plan.sweep and plan.sweep.rungs):
        return plan.runs
    runs, there = {run.name: run for run in plan.runs}, {run.name for run in plan.runs}
    for number in range(1, (len(plan.sweep.rungs) if rung is None else rung + 1)):
        there = set(Rung.read(folder / f"rung{number}.json").trials)
        runs |= {name: runs[name].model_copy(update={"run": f"{name}-rung{number}"}) for name in there & runs.keys()}
    return [run for name, run in runs.items() if rung is None or name in there]


def _read(root: Path, reference: RunReference, measured: Sequence[str]) -> RunResult:
    """Read these stages' records of a run, and no others: another plan may have put more there, or be about to."""
    folder, train = root / reference.plan / reference.run, "train" in measured
    records = {stage: folder / file for stage, file in RECORDS.items() if stage in measured}
    provenance, prediction = folder / "provenance.json", folder / "prediction.png"
    return RunResult(
        name=reference.name,
        label=reference.label or reference.name,
        folder=folder,
        owner=f"{reference.plan}/{reference.run}",
        settings=read_yaml(folder / "config.yaml"),
        provenance=Provenance.read(provenance) if train and provenance.exists() else None,
        epochs=read_epochs(records["train"]) if train else [],
        throughput=Throughput.read(records["throughput"]) if "throughput" in records else None,
        profile=Profile.read(records["profile"]) if "profile" in records else None,
        prediction=prediction if train and prediction.exists() else None,
        telemetry={stage: read_nodes(folder / f"telemetry/{stage}.csv") for stage in measured},
        tuning=Tuning.read(records["tune"]) if "tune" in records else None,
        repeats=[read_epochs(folder.parent / name / RECORDS["train"]) for name in reference.repeats] if train else [],
    )


# ---- peaks -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Roof:
    """Bounds of a computation in one format on one device."""

    device: Device
    nranks: int  #: Ranks that share it: those of a CPU share its memory, while each GPU has its own.
    dtype: str
    flops: float  #: FLOP/s of a matrix product.
    bytes_per_second: float  #: Of a copy.


def roofs(measured: Iterable[Throughput]) -> list[Roof]:
    """Return the roofs of all devices and formats, in the order in which they first come.

    Each run measures its peaks at a moment of its own, and on a machine that is not quiet they differ by a multiple. A
    device can reach again what it reached once, in copies for any format: the greatest counts, or shares (MFU, MBU) of
    two runs would contradict their speeds.
    """
    found = [(*_place(each), each.peaks) for each in measured if each.peaks]
    products = dict.fromkeys((device, nranks, peaks.dtype) for device, nranks, peaks in found)
    return [
        Roof(
            *(device, nranks, dtype),
            max(peaks.flops for *at, peaks in found if (*at, peaks.dtype) == (device, nranks, dtype)),
            max(peaks.bytes_per_second for *at, peaks in found if at == [device, nranks]),
        )
        for device, nranks, dtype in products
    ]


def with_shared_peaks(runs: Sequence[RunResult]) -> list[RunResult]:
    """Return the runs of a plan, each with the peaks that they all share."""
    found = {(roof.device, roof.nranks, roof.dtype): roof for roof in roofs(r.throughput for r in runs if r.throughput)}
    shared = []
    for run in runs:
        own = run.throughput
        if own and own.peaks:
            roof = found[*_place(own), own.peaks.dtype]
            peaks = own.peaks.model_copy(update={"flops": roof.flops, "bytes_per_second": roof.bytes_per_second})
            run = replace(run, throughput=own.model_copy(update={"peaks": peaks}))
        shared.append(run)
    return shared


def _place(measured: Throughput) -> tuple[Device, int]:
    return measured.device, 1 if measured.device.kind == "cuda" else measured.nranks
