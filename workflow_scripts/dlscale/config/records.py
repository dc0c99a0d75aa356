"""Records of plans and sweeps, and published figures to compare with."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from dlscale.core.record import Number, Record
from dlscale.core.schema import Name
from dlscale.core.text import NONE


class Published(Record):
    """A published figure of a study: a throughput, or the value of a metric."""

    label: str = NONE
    hardware: str = NONE
    gpus: int = Field(1, ge=1)  #: Number of GPUs. A throughput is the sum over all GPUs; a memory size is for one GPU.
    batch_size: int | None = Field(None, ge=1)  #: Samples per step over all GPUs.
    source: str = NONE
    runs: list[str] = []  #: `PLAN.RUN` of the runs that repeat the published measurement.
    like: list[str] = []  #: `PLAN.RUN` of runs whose step is similar, but with other data or sizes.
    kind: str = "FULL"  #: Mode of a throughput, one of `dlscale.measure.records.MODES`.
    samples_per_second: float | None = Field(None, gt=0)
    std: float | None = Field(None, ge=0)  #: Standard deviation of a throughput over its trials, samples/s.
    metric: str = ""  #: Key of `PUBLISHED_KINDS` or a validation metric; empty for a throughput.
    value: float | None = None
    by_epoch: list[float] = []  #: Values [epochs] of the metric after each epoch; alternative to `value`.
    unit: str = "1"
    series: list[Name] = []  #: Published series (`series` in the study's YAML file) that contain this figure.
    #: Number of training samples in the measured epochs, or of samples in the measured validation. If set, the measured
    #: time includes the wait for the first batch. None if only steps were timed.
    samples: int | None = Field(None, ge=1)
    epochs: int | None = Field(None, ge=1)  #: Number of epochs, with validations, that a published time covers.
    #: Tensor-parallel size `tp` and context-parallel size `cp` of the measurement, as in `geometry`.
    tp: int = Field(1, ge=1)
    cp: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _one_figure(self) -> Self:
        given = [self.samples_per_second is not None, self.value is not None, bool(self.by_epoch)]
        if sum(given) != 1 or (self.samples_per_second is None) == (not self.metric):
            raise ValueError(f"{self.label}: expected samples_per_second, or metric with either value or by_epoch")
        return self

    @property
    def speed(self) -> float:
        """Throughput in training over all GPUs, samples/s; 0 for other figures."""
        return (self.samples_per_second or 0.0) if self.kind == "FULL" else 0.0

    def speed_of(self, run: str) -> bool:
        """Return whether the figure is a throughput in training that can be compared with `run` (PLAN.RUN)."""
        return bool(self.speed) and run in (*self.runs, *self.like)

    @property
    def devices(self) -> str:
        return f"{self.gpus} × {self.hardware}" if self.gpus > 1 else self.hardware


#: Value of `Published.metric` → name for readers, for figures that are neither a throughput nor a validation metric.
PUBLISHED_KINDS = {
    "train_loss": "training loss",
    "valid_loss": "validation loss",
    "time": "time",
    "validation_time": "time of a validation",
    "validation_speed": "samples/s of validation",
    "memory": "memory of a GPU",
    "steps_per_second": "steps/s",
    "parameters": "parameters",
    "scaling_efficiency": "scaling efficiency",
    "communication": "communication (fraction of a step)",
    "collectives": "collectives per step",
}


#: Kinds of plans: the runs are independent, build on each other, or are generated from a block of settings.
PlanKind = Literal["set", "ladder", "tune", "sweep", "weak_scaling", "strong_scaling", "convergence", "parallelism"]


class RunReference(Record):
    """A run of a plan; `plan` and `run` name the folder of the run's results."""

    name: Name
    label: str | None = None
    plan: Name
    run: Name
    measure: list[str]  #: Stages of the run.
    repeats: list[Name] = []  #: Runs of the plan that repeat this run's training with other seeds.


class SweepRecord(Record):
    """Trials of a plan of kind `sweep`, and the metric that ranks them."""

    method: Literal["grid", "random", "halving"]
    metric: str  #: Metric that ranks the trials: `valid_loss`, a validation metric, or `samples_per_second`.
    trials: dict[Name, dict[str, Any]]  #: Values that each trial sets, by dotted key.
    rungs: list[tuple[int, int]] = []  #: Pairs (last epoch, number of trials), one per rung; empty without halving.


class Rung(Record):
    """`rungN.json`: the trials of successive halving that are promoted to rung N (N ≥ 1)."""

    metric: str
    scores: dict[Name, Number]  #: Scores of the trials of the previous rung, best first.
    trials: list[Name]  #: Trials promoted to this rung.


class PlanRecord(Record):
    """`plan.yaml`: the runs of a plan, with titles and published figures for the report."""

    plan: Name
    title: str | None = None
    study: Name
    study_title: str | None = None
    kind: PlanKind = "set"
    measure: list[str]  #: Stages of the plan; each `RunReference` has the stages of its run.
    #: Runs of the plan. For successive halving, the list has each trial's run of the first rung.
    runs: list[RunReference] = Field(min_length=1)
    sweep: SweepRecord | None = None  #: Record of the sweep, for kind sweep.
    left_out: dict[str, str] = {}  #: Skipped runs, each with the requirements that the machine lacks.
    grams_per_kwh: float | None = None  #: CO₂ emission of the site's electricity, g/kWh.
    published: list[Published] = []
