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
    gpus: int = Field(1, ge=1)  #: Number of GPUs of the measurement; samples/s are over all of them, memory is per GPU.
    batch_size: int | None = Field(None, ge=1)  #: Samples per step over all GPUs.
    source: str = NONE
    runs: list[str] = []  #: `PLAN.RUN` of the runs that repeat the published measurement.
    like: list[str] = []  #: `PLAN.RUN` of runs with the same step, but other data or another size.
    kind: str = "FULL"  #: Mode of a throughput, one of `MODES`.
    samples_per_second: float | None = Field(None, gt=0)
    std: float | None = Field(None, ge=0)  #: Standard deviation of a throughput over its trials, samples/s.
    metric: str = ""  #: Key of `PUBLISHED_KINDS` or a validation metric; empty for a throughput.
    value: float | None = None
    by_epoch: list[float] = []  #: Values [epochs] after each epoch; alternative to `value`.
    unit: str = "1"
    series: list[Name] = []  #: Series of the study to which the figure belongs.
    #: Training samples of the measured epochs, or samples of the measured validation; the time then includes the wait
    #: for the first batch. None: the figure is about steps only.
    samples: int | None = Field(None, ge=1)
    epochs: int | None = Field(None, ge=1)  #: Number of epochs, each with a validation, if the figure is a time.
    tp: int = Field(1, ge=1)  #: Devices that shared the model's weights, as in `geometry`.
    cp: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _one_figure(self) -> Self:
        given = [self.samples_per_second is not None, self.value is not None, bool(self.by_epoch)]
        if sum(given) != 1 or (self.samples_per_second is None) == (not self.metric):
            raise ValueError(f"{self.label}: expected samples_per_second, or metric with either value or by_epoch")
        return self

    @property
    def speed(self) -> float:
        """FULL throughput over all GPUs, samples/s; 0 for other figures."""
        return (self.samples_per_second or 0.0) if self.kind == "FULL" else 0.0

    def speed_of(self, run: str) -> bool:
        """Return whether the figure is a FULL throughput that `run` (PLAN.RUN) can be compared with."""
        return bool(self.speed) and run in (*self.runs, *self.like)

    @property
    def devices(self) -> str:
        return f"{self.gpus} × {self.hardware}" if self.gpus > 1 else self.hardware


class Series(Record):
    """Published figures of one program on one machine, for fitting the model of scaling."""

    title: str
    machine: Name  #: Name of the machine in `extensions/predict/machines.yaml`.
    parameters: int = Field(ge=1)
    gradient_bytes: int = Field(4, ge=1)  #: Bytes per element of a gradient in communication.
    collectives: int | None = Field(None, ge=1)  #: Collectives per step, if published; None: from PyTorch's buckets.
    fit: int = Field(8, ge=1)  #: Maximum number of GPUs of the figures that are fitted; larger ones are predicted.
    valid_samples: int | None = Field(None, ge=1)  #: Number of samples of a validation.
    workers: int = Field(1, ge=1)  #: Workers of a device's loader that load separate batches; 1 for DALI's threads.
    loaded: float | None = Field(None, gt=0)  #: Rate that a device's loader reached with another model, samples/s.
    tokens: tuple[int, int, int] | None = None  #: Tokens of a sample, width of a token, number of blocks.


#: Names of published figures that are neither a throughput nor a validation metric, by key of `metric`.
PUBLISHED_KINDS = {
    "train_loss": "training loss",
    "valid_loss": "validation loss",
    "time": "time",
    "validation_time": "time of a validation",
    "validation_speed": "samples a second of validation",
    "memory": "memory of a GPU",
    "steps_per_second": "steps a second",
    "parameters": "parameters",
    "scaling_efficiency": "scaling efficiency",
    "communication": "share of communication",
    "collectives": "collectives a step",
}


#: Kinds of plans: independent runs, runs that build on each other, or runs generated from a block of settings.
PlanKind = Literal["set", "ladder", "tune", "sweep", "weak_scaling", "strong_scaling", "convergence", "parallelism"]


class RunReference(Record):
    """A run of a plan, and the folder `PLAN/RUN` of its results."""

    name: Name
    label: str | None = None
    plan: Name
    run: Name
    measure: list[str]  #: Stages of the run.
    repeats: list[Name] = []  #: Runs of the same plan that repeat its training with other seeds.


class SweepRecord(Record):
    """Trials of a plan of kind `sweep`, and the metric that ranks them."""

    method: Literal["grid", "random", "halving"]
    metric: str  #: Metric that ranks the trials: `valid_loss`, a validation metric, or `samples_per_second`.
    trials: dict[Name, dict[str, Any]]  #: Values by dotted key, by trial.
    rungs: list[tuple[int, int]] = []  #: Last epoch and number of trials of each rung; empty without halving.


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
    measure: list[str]  #: Stages of the plan; the stages of a single run are in its reference.
    runs: list[RunReference] = Field(min_length=1)  #: Runs; for successive halving, each trial's run of the first rung.
    sweep: SweepRecord | None = None  #: Record of the sweep, for kind sweep.
    left_out: dict[str, str] = {}  #: Requirements that the machine lacks, by skipped run.
    grams_per_kwh: float | None = None  #: CO₂ emission of the site's electricity, g/kWh.
    published: list[Published] = []
