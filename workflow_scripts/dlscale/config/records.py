"""Records of plans and sweeps, and the published figures beside them."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from dlscale.core.record import Number, Record
from dlscale.core.schema import Name
from dlscale.core.text import NONE


class Published(Record):
    """A published figure of a study: a throughput, or the value of something else."""

    label: str = NONE
    hardware: str = NONE
    gpus: int = Field(1, ge=1)  #: That made the figure together: samples/s are of all of them, memory is of one.
    batch_size: int | None = Field(None, ge=1)  #: Samples a step over all GPUs.
    source: str = NONE
    runs: list[str] = []  #: `PLAN.RUN` of the runs that do what was measured.
    like: list[str] = []  #: `PLAN.RUN` of those that take the same step from elsewhere, or at another size.
    kind: str = "FULL"  #: Of a throughput: one of `MODES`.
    samples_per_second: float | None = Field(None, gt=0)
    std: float | None = Field(None, ge=0)  #: Of a throughput: standard deviation over its trials.
    metric: str = ""  #: Where the figure is no throughput: a key of `PUBLISHED_KINDS`, or else a validation metric.
    value: float | None = None
    by_epoch: list[float] = []  #: In place of `value`: after each epoch from the first on.
    unit: str = "1"
    series: list[Name] = []  #: Of the study's series, those that it is a point of.
    #: Training samples of the epochs, or samples of the validation, that it was measured over: the wait for the first
    #: batch is in it. None: steps alone.
    samples: int | None = Field(None, ge=1)
    epochs: int | None = Field(None, ge=1)  #: Of a time: so many epochs, each with a validation.
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
        """FULL samples/s of all GPUs together; 0 if the figure is another one."""
        return (self.samples_per_second or 0.0) if self.kind == "FULL" else 0.0

    def speed_of(self, run: str) -> bool:
        """Return whether it is the FULL throughput of the run PLAN.RUN, or of one that takes the same step."""
        return bool(self.speed) and run in (*self.runs, *self.like)

    @property
    def devices(self) -> str:
        return f"{self.gpus} × {self.hardware}" if self.gpus > 1 else self.hardware


class Series(Record):
    """Published figures of one program on one machine: they hold the model of scaling."""

    title: str
    machine: Name  #: As in `extensions/predict/machines.yaml`.
    parameters: int = Field(ge=1)
    gradient_bytes: int = Field(4, ge=1)  #: Of a gradient when it is sent.
    collectives: int | None = Field(None, ge=1)  #: A step, if that was published; else as PyTorch cuts its buckets.
    fit: int = Field(8, ge=1)  #: The model sees figures of at most so many GPUs; the others it must predict.
    valid_samples: int | None = Field(None, ge=1)  #: Of a validation.
    workers: int = Field(1, ge=1)  #: Of a device's loader that make batches of their own; 1 for DALI's threads.
    loaded: float | None = Field(None, gt=0)  #: Samples/s that a device's loader kept up with, if with another model.
    tokens: tuple[int, int, int] | None = None  #: Tokens of a sample, their width, blocks.


#: What a published figure may be of, beside throughput and validation metrics; in words.
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


#: What plans ask: their runs stand alone, build on each other, or are made from a block of settings.
PlanKind = Literal["set", "ladder", "tune", "sweep", "weak_scaling", "strong_scaling", "convergence", "parallelism"]


class RunReference(Record):
    """A run of a plan, and the folder `PLAN/RUN` that holds its results."""

    name: Name
    label: str | None = None
    plan: Name
    run: Name
    measure: list[str]  #: The stages that it goes through.
    repeats: list[Name] = []  #: Runs of the same plan that train it once more, each with another seed.


class SweepRecord(Record):
    """What a plan of kind `sweep` tries."""

    method: Literal["grid", "random", "halving"]
    metric: str  #: What the best trial is best in: `valid_loss`, a validation metric, `samples_per_second`.
    trials: dict[Name, dict[str, Any]]  #: By trial: its values by dotted key.
    rungs: list[tuple[int, int]] = []  #: Of halving: epochs after which each rung ends, and its number of trials.


class Rung(Record):
    """`rungN.json`: the trials of successive halving that come to rung N, from 1 on."""

    metric: str
    scores: dict[Name, Number]  #: Of the trials of the rung before, the best first.
    trials: list[Name]  #: The first of these.


class PlanRecord(Record):
    """`plan.yaml`: the runs of a plan, and the words of its study that the report needs."""

    plan: Name
    title: str | None = None
    study: Name
    study_title: str | None = None
    kind: PlanKind = "set"
    measure: list[str]  #: The stages that its runs go through, each those of its own reference.
    runs: list[RunReference] = Field(min_length=1)  #: Of successive halving each trial, with its run of the first rung.
    sweep: SweepRecord | None = None  #: Of kind sweep.
    left_out: dict[str, str] = {}  #: Runs that the machine cannot do, and what it lacks.
    grams_per_kwh: float | None = None  #: CO₂ of the site's electricity.
    published: list[Published] = []
