"""A plan and its runs, with the records that the stages left in their folders."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from dlscale.config.compute import compute_digest
from dlscale.config.records import PlanRecord, Rung, RunReference
from dlscale.core.errors import UserError, unknown
from dlscale.core.metrics import Epoch, LossInfo, Metric, read_epochs
from dlscale.core.settings import Raw, flat, read_yaml
from dlscale.core.stages import RUN_STAGES
from dlscale.core.telemetry import Sample, begin, energy, read_nodes
from dlscale.measure.profilers.records import Profile
from dlscale.measure.records import Throughput, Trials
from dlscale.measure.tuning import Tuning
from dlscale.parallel.records import Device
from dlscale.report import peaks
from dlscale.train.provenance import Provenance

T = TypeVar("T")

#: What runs of any study can be ranked by in a sweep.
GENERAL_METRICS = ("valid_loss", "samples_per_second")


@dataclass(frozen=True, eq=False)
class RunResult:
    """One run of a plan, with all that was measured of it."""

    name: str  #: In the plan at hand.
    label: str  #: The same for readers.
    folder: Path  #: That holds the results.
    owner: str  #: `PLAN/RUN` whose folder holds the results; another plan's where the run was named with `use`.
    settings: Raw  #: The run's `config.yaml`.
    provenance: Provenance | None
    epochs: list[Epoch]  #: Empty if the plan does not train.
    #: None if the plan does not measure it. Its peaks are those that all runs of the plan share.
    throughput: Throughput | None
    profile: Profile | None  #: As above.
    prediction: Path | None  #: The figure of prediction against truth, if there is one.
    #: By stage that the plan measures: what each node did meanwhile; empty where that is not known.
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
        """The last validation loss; infinite if it is not a number or there is none."""
        loss = self.last.valid_loss if self.last else math.inf
        return loss if math.isfinite(loss) else math.inf

    @cached_property
    def best_valid_loss(self) -> float | None:
        """The least validation loss of any epoch."""
        return min((epoch.valid_loss for epoch in self.epochs if math.isfinite(epoch.valid_loss)), default=None)

    @cached_property
    def timed(self) -> list[Epoch]:
        """The epochs trained with the last one's geometry and loader: a resumed run may have changed either."""
        return [
            epoch
            for epoch in self.epochs
            if epoch.made_with is not None and epoch.made_with == self.epochs[-1].made_with
        ]

    @cached_property
    def training_speed(self) -> float | None:
        """Median training samples/s over the epochs; the first, which warms up, counts only if it is alone."""
        speeds = [epoch.samples_per_second for epoch in self.timed]
        return statistics.median(speeds[1:] or speeds) if speeds else None

    @property
    def energy(self) -> float | None:
        """What the GPUs used from the start of training to its end, J; None if an earlier try did a part of it."""
        whole = self.provenance and self.provenance.resumed_from_step is None
        return energy(self.telemetry.get("train", [])) if whole else None

    @cached_property
    def energy_per_sample(self) -> float | None:
        """Joules a training sample, over the epochs that `training_speed` is of, validation left out."""
        nodes, joules, samples = self.telemetry.get("train", []), 0.0, 0.0
        for epoch in self.timed[1:] or self.timed:
            start = epoch.wall_time - epoch.epoch_seconds
            used = energy(nodes, start, epoch.wall_time)
            if used is None or start < begin(nodes[0]):  # of an earlier try
                continue
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

    @property
    def devices(self) -> int:
        """Devices that compute it: nodes x devices of each."""
        geometry = self.settings.get("geometry") or {}
        return int(geometry.get("nodes", 1)) * int(geometry.get("gpus_per_node", 1))

    @property
    def averages(self) -> bool:
        """Whether its devices average their gradients: else it is the twin of such a run, and no training."""
        return bool((self.settings.get("parallel") or {}).get("sync", True))

    @property
    def training_seconds(self) -> float | None:
        """Time spent training, validation left out, s; None where geometry or loader changed on the way."""
        return sum(epoch.epoch_seconds for epoch in self.epochs) if self.timed == self.epochs else None

    @property
    def device(self) -> Device:
        """What it was measured on, as far as that is known."""
        known = (self.throughput, self.profile, self.provenance, self.tuning)
        devices = [record.device for record in known if record]
        return next((device for device in devices if device.name), Device())


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
        """Whether a run trains several times, with other seeds."""
        return any(run.repeats for run in self.runs)

    @cached_property
    def trained(self) -> list[RunResult]:
        return [run for run in self.runs if run.epochs]

    @cached_property
    def described(self) -> dict[str, Metric]:
        """The metrics that the study describes, by name, in its order."""
        return {metric.name: metric for run in self.runs if run.provenance for metric in run.provenance.metrics}

    @cached_property
    def metrics(self) -> dict[str, Metric]:
        """The metrics of the last epochs by name: those that the study describes, then those with a name only."""
        measured = dict.fromkeys(name for run in self.trained for name in run.epochs[-1].metrics)
        described = {name: metric for name, metric in self.described.items() if name in measured}
        return described | {
            name: Metric(name=name, title=name.partition("/")[0]) for name in measured if name not in described
        }

    @cached_property
    def lead(self) -> Metric | None:
        """The metric that says best how good a run is: the first with a naive answer, or else the first of all."""
        candidates = [metric for metric in self.described.values() if not metric.derived]
        return next((metric for metric in candidates if metric.naive), next(iter(candidates), None))

    @property
    def answers(self) -> list[str]:
        """What the naive answers are: each of several, where a metric is measured by the strongest of them."""
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
        """The metric that runs are ranked by: the leading one. Of one by channels None, which stands for the loss."""
        return None if self.lead and self.lead.channel else self.lead

    @cached_property
    def best(self) -> RunResult | None:
        """The trained run that is the best after its last epoch."""
        return next(iter(self.ranked), None)

    def _rank(self, run: RunResult) -> tuple[int, int, float]:
        """Return a key that is least for the best run; in a sweep of successive halving one that came furthest."""
        value, better = self.score(run)
        halved = self.record.sweep and self.record.sweep.rungs
        # Not how many epochs were trained: a target may end a training before its rung does.
        rung = int((run.settings.get("training") or {}).get("stop_after") or 0) if halved else 0
        return (0, -rung, value if better == "lower" else -value) if math.isfinite(value) else (1, 0, 0.0)

    def score(self, run: RunResult) -> tuple[float, str]:
        """Return what a trained run is ranked by, and which values of it are better; not a number if it diverged."""
        if self.record.sweep:
            return self._swept(run, self.record.sweep.metric)
        if self.judge is None:
            return run.final_loss, "lower"
        return run.epochs[-1].metrics.get(self.judge.name, math.nan), self.judge.better

    def _swept(self, run: RunResult, metric: str) -> tuple[float, str]:
        if not math.isfinite(run.final_loss):
            return math.nan, "lower"
        if metric == "samples_per_second":
            return run.speed or math.nan, "higher"
        if metric == "valid_loss":
            return run.final_loss, "lower"
        if metric not in self.metrics:
            raise UserError(
                f"{self.name}: sweep.metric: {unknown('metric', metric, [*self.metrics, *GENERAL_METRICS])}"
            )
        return run.epochs[-1].metrics.get(metric, math.nan), self.metrics[metric].better

    @property
    def ranked(self) -> list[RunResult]:
        """The trained runs, the best first."""
        return sorted(self.trained, key=self._rank)

    def skill(self, epoch: Epoch) -> float | None:
        """Return the mean skill over the channels of the leading metric; None if it has no naive answer."""
        kind = self.lead.kind if self.lead else None
        skills = [metric.skill(epoch.metrics) for metric in self.described.values() if metric.kind == kind]
        known = [skill for skill in skills if skill is not None]
        return statistics.fmean(known) if known else None

    @cached_property
    def loss(self) -> LossInfo:
        """What the loss of the trained runs is; only its name if it is not the same for all."""
        losses = {run.provenance.loss if run.provenance else LossInfo() for run in self.trained}
        return losses.pop() if len(losses) == 1 else LossInfo(title="losses of several kinds")

    def anchor(self, run: RunResult) -> str:
        """Return the identifier of a run in the page; names have no dots, so it is unique."""
        return f"run.{self.name}.{run.name}"


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


def read_plan(path: str | Path, rung: int | None = None, stages: Sequence[str] = RUN_STAGES) -> PlanResult:
    """Read a plan, `results/plans/PLAN/plan.yaml`, and the results of all its runs.

    Of successive halving a trial's run is that of the last rung that it came to; with `rung` those of this rung are
    read, and no others. A file that the plan's `measure` promises of these `stages` and that is missing, torn, or lacks
    a key is a `UserError`.
    """
    path = Path(path)
    plan = PlanRecord.checked(read_yaml(path), str(path))
    root = path.parent.parent
    furthest = _furthest(plan, path.parent, rung)
    wanted = [run.model_copy(update={"measure": [s for s in run.measure if s in stages]}) for run in furthest]
    runs = [_read_run(root / run.plan / run.run, run) for run in wanted]
    shared = iter(peaks.shared(run.throughput for run in runs if run.throughput))
    return PlanResult(plan, [replace(run, throughput=next(shared)) if run.throughput else run for run in runs])


def read_finished(path: str | Path) -> tuple[list[RunResult], list[str]]:
    """Read those runs of a plan that have all their results, and say of each other one what it lacks.

    The peaks of a run are its own: other runs may still measure greater ones.
    """
    path = Path(path)
    plan = PlanRecord.checked(read_yaml(path), str(path))
    runs, lacking = list[RunResult](), list[str]()
    try:
        furthest = _furthest(plan, path.parent, None)
    except UserError as error:  # a sweep that has not chosen yet
        return runs, [f"{path.parent.name}: {error}"]
    for run in furthest:
        try:
            runs.append(_read_run(path.parent.parent / run.plan / run.run, run))
        except UserError as error:
            lacking.append(f"{path.parent.name}.{run.name}: {error}")
    return runs, lacking


def _furthest(plan: PlanRecord, folder: Path, rung: int | None) -> list[RunReference]:
    """Return a plan's runs, as `read_plan` reads them."""
    if not (plan.sweep and plan.sweep.rungs):
        return plan.runs
    runs, there = {run.name: run for run in plan.runs}, {run.name for run in plan.runs}
    for number in range(1, (len(plan.sweep.rungs) if rung is None else rung + 1)):
        there = set(Rung.read(folder / f"rung{number}.json").trials)
        runs |= {name: runs[name].model_copy(update={"run": f"{name}-rung{number}"}) for name in there & runs.keys()}
    return [run for name, run in runs.items() if rung is None or name in there]


def read_throughput(folder: Path) -> Throughput | None:
    """Read the throughput of one run by its folder, with the peaks that the runs of its plan share, as the page has it.

    None if it was not measured. What others of the plan have not measured yet, or cannot be read, does not count.
    """
    own = folder / "throughput.json"
    if not own.exists():
        return None
    measured = [Throughput.read(own)]
    root = folder.resolve().parent.parent
    with contextlib.suppress(UserError):
        plan = root / folder.resolve().parent.name / "plan.yaml"
        for run in PlanRecord.checked(read_yaml(plan), str(plan)).runs:
            with contextlib.suppress(UserError):
                if "throughput" in run.measure:
                    measured.append(Throughput.read(root / run.plan / run.run / own.name))
    return peaks.shared(measured)[0]


def _read_run(folder: Path, reference: RunReference) -> RunResult:
    measure = reference.measure
    # Only what the plan measures: another plan may have put more into the folder, or be about to.
    train = "train" in measure
    provenance, prediction = folder / "provenance.json", folder / "prediction.png"
    return RunResult(
        name=reference.name,
        label=reference.label or reference.name,
        owner=f"{reference.plan}/{reference.run}",
        settings=read_yaml(folder / "config.yaml"),
        provenance=Provenance.read(provenance) if train and provenance.exists() else None,
        epochs=read_epochs(folder / "metrics.jsonl") if train else [],
        folder=folder,
        throughput=Throughput.read(folder / "throughput.json") if "throughput" in measure else None,
        profile=Profile.read(folder / "profile/profile.json") if "profile" in measure else None,
        prediction=prediction if train and prediction.exists() else None,
        telemetry={stage: read_nodes(folder / f"telemetry/{stage}.csv") for stage in measure},
        tuning=Tuning.read(folder / "tune.json") if "tune" in measure else None,
        repeats=[read_epochs(folder.parent / name / "metrics.jsonl") for name in reference.repeats] if train else [],
    )
