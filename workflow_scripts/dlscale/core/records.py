"""One typed class for each file that a stage writes: its writer and all its readers use it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from dlscale.core.errors import UserError
from dlscale.core.files import read_json, write_json
from dlscale.core.schema import Name
from dlscale.core.text import NONE

#: The three throughput measurements, in the order in which tables and figures show them.
MODES = ("IO", "SYNTHETIC", "FULL")

#: A number; JSON's null stands for one that is not finite.
Number = Annotated[
    float,
    BeforeValidator(lambda value: math.nan if value is None else value),
    PlainSerializer(lambda value: value if math.isfinite(value) else None, return_type=float | None, when_used="json"),
]


class Record(BaseModel):
    """A frozen record. Readers leave alone the keys that only later versions know."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    def text(self) -> str:
        """Return the record as one line of JSON."""
        return self.model_dump_json(by_alias=True, exclude_none=False)

    def write(self, path: str | Path) -> None:
        """Write the record as JSON, whole or not at all."""
        write_json(path, self.model_dump(mode="json", by_alias=True))

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read what `write` wrote; anything else in the file is a `UserError`."""
        return cls.checked(read_json(path), str(path))

    @classmethod
    def checked(cls, values: Any, where: str) -> Self:
        """Return the record in `values`; `where` names the place in the message of the `UserError`."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(map(str, first["loc"]))
            raise UserError(
                f"{where}: {key + ': ' if key else ''}{first['msg']}; not a {cls.__name__} record of this version: "
                "delete the file and run its stage again"
            ) from None


class Metric(Record):
    """What a validation metric is; tables and the page are made from this."""

    name: str  #: As in `Epoch.metrics`: `KIND`, or `KIND/CHANNEL` where there is one for each channel.
    title: str  #: What readers call the kind.
    meaning: str = ""  #: What it means, in a line.
    unit: str = "1"  #: `1` for a number without a unit.
    better: Literal["lower", "higher"] = "lower"
    naive: str | None = None  #: Name of the metric that holds the same score of a naive answer, if there is one.
    answer: str = ""  #: What the naive answer is.
    derived: bool = False  #: Whether it follows from other metrics, as a skill does: the page then shows those.

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]

    @property
    def channel(self) -> str:
        """The channel; empty if the metric is of no channel."""
        return self.name.partition("/")[2]

    def skill(self, metrics: Mapping[str, float]) -> float | None:
        """Return 1 - error / error of the naive answer from metrics by name; None where it has no such answer.

        It is the share of the naive answer's error that is gone; a metric of which more is better has none.
        """
        value, naive = metrics.get(self.name), metrics.get(self.naive or "")
        return 1 - value / naive if self.better == "lower" and naive and value is not None else None


class LossInfo(Record):
    """What a loss is called, and its unit in words."""

    title: str = "loss"
    unit: str = ""


class Epoch(Record):
    """One line of `metrics.jsonl`."""

    epoch: int = Field(ge=1)
    step: int  #: Optimiser steps so far.
    samples: int  #: Training samples so far.
    learning_rate: Number  #: Of the epoch's last step.
    train_loss: Number  #: Mean over the epoch's training samples.
    valid_loss: Number  #: Mean over all validation samples.
    epoch_seconds: float  #: Time of training alone, s.
    samples_per_second: float  #: Of training alone; the wait for the first batch is included.
    valid_seconds: float = 0.0  #: Time of validation, which follows, s.
    wall_time: float = 0.0  #: When the epoch's last training step was done, seconds since 1970-01-01 UTC.
    metrics: dict[str, Number] = {}  #: Validation metrics by name.
    #: The run's geometry and loader, which decide its times; None if they changed within the epoch.
    made_with: dict[str, Any] | None = {}


def read_epochs(path: Path) -> list[Epoch]:
    """Read `metrics.jsonl`; a missing, torn or empty file is a `UserError`."""
    advice = "delete it and run the train stage again"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; run the train stage first") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); {advice}") from None
    epochs = []
    for number, line in enumerate(lines, 1):
        try:
            epochs.append(Epoch.checked(json.loads(line), f"{path}: line {number}"))
        except json.JSONDecodeError as error:
            raise UserError(f"{path}: line {number} is not valid JSON ({error}); {advice}") from None
    if not epochs or [epoch.epoch for epoch in epochs] != list(range(1, len(epochs) + 1)):
        raise UserError(f"{path}: holds {f'not all of {len(epochs)} epochs' if epochs else 'no epoch'}; {advice}")
    return epochs


def epoch_lines(epochs: Iterable[Epoch]) -> str:
    """Return the text of `metrics.jsonl`."""
    return "".join(epoch.text() + "\n" for epoch in epochs)


class Device(Record):
    """What a stage computed on: `cpu` or `cuda`, its name, CPU threads of a process."""

    kind: str = ""
    name: str = ""
    threads: int | None = None


class Trials(Record):
    """One mode of a throughput measurement, in the form of romerojosh/benchy; rates are samples/s, times seconds.

    `avg_iter_throughput` equals the trial's: single steps are not timed, since each would wait for the device.
    """

    trial_throughput: list[float] = []
    trial_time: list[float] = []
    avg_iter_throughput: list[float] = []
    mean: float = Field(ge=0)
    std: float = Field(0.0, ge=0)


class Throughput(Record):
    """`throughput.json`; a mode that was not measured is None."""

    nranks: int = 1  #: Processes.
    batch_size: int | None = None  #: Samples a step over all processes.
    device: Device = Device()
    settings: dict[str, Any] = {}  #: The run's `throughput`: warm-up trials, trials, batches.
    compile: dict[str, float] | None = None  #: `cold_seconds`, `warm_seconds` of compiling, if the run compiles.
    io: Trials | None = Field(None, alias="IO")  #: Loading alone.
    synthetic: Trials | None = Field(None, alias="SYNTHETIC")  #: Computing alone, on a batch that stays on the device.
    full: Trials | None = Field(None, alias="FULL")  #: Both.
    peak_memory_bytes: int | None = None  #: Greatest memory of any process: the GPU's, or the process's on a CPU.

    def mode(self, name: str) -> Trials | None:
        """Return one of `MODES`."""
        trials: Trials | None = getattr(self, name.lower())
        return trials


class Provenance(Record):
    """`provenance.json`: what a training was made with. The train stage writes it last."""

    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)

    command: str | None = None
    started: str | None = None
    finished: str | None = None
    git: dict[str, Any] | None = None
    host: str | None = None
    platform: str | None = None
    python: str | None = None
    packages: dict[str, str | None] = {}
    image: dict[str, str] | None = None
    slurm: dict[str, str] = {}
    device: Device = Device()
    processes: int = 1
    seed: int | None = None
    parameters: int | None = None
    training_samples: int | None = None
    validation_samples: int | None = None
    dataset: str | None = None
    manifest: dict[str, Any] = {}  #: What the dataset was made from.
    fingerprint: str | None = None  #: The first digits of the run's fingerprint, the name of its folder of checkpoints.
    resumed_from_step: int | None = None
    loss: LossInfo = LossInfo()
    metrics: list[Metric] = []  #: What the metrics of the run's epochs are.


class Published(Record):
    """A published figure of a study, as its YAML file has it: a throughput, or the value of a metric."""

    label: str = NONE
    hardware: str = NONE
    source: str = NONE
    runs: list[str] = []  #: `PLAN.RUN` of the runs that do, at full size, what was measured.
    kind: str = "FULL"  #: Of a throughput: one of `MODES`.
    samples_per_second: float | None = Field(None, gt=0)
    metric: str = ""  #: Where the figure is no throughput: its metric, with `value` and `unit`.
    value: float | None = None
    unit: str = "1"

    @property
    def speed(self) -> float:
        """FULL samples/s; 0 if the figure is another one."""
        return (self.samples_per_second or 0.0) if self.kind == "FULL" else 0.0


class RunReference(Record):
    """A run of a plan, and the folder `PLAN/RUN` that holds its results."""

    name: Name
    label: str | None = None
    plan: Name
    run: Name


class PlanRecord(Record):
    """`plan.yaml`: which runs a plan consists of, and what the report needs to know of its study."""

    plan: Name
    title: str | None = None
    study: Name
    study_title: str | None = None
    kind: Literal["set", "ladder"] = "set"
    measure: list[str]  #: The stages that each run goes through.
    runs: list[RunReference] = Field(min_length=1)
    left_out: dict[str, str] = {}  #: Runs that the machine cannot do, and what it lacks.
    published: list[Published] = []
