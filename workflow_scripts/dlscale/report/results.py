"""What the stages left in run folders, read back and checked."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from dlscale.core.errors import UserError
from dlscale.core.files import read_json
from dlscale.core.schema import Name
from dlscale.core.settings import Raw, read_yaml, validate

#: The three throughput measurements, in the order in which tables and figures show them.
MODES = ("IO", "SYNTHETIC", "FULL")

#: A number; JSON's null stands for one that is not finite.
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]


class _Record(BaseModel):
    """A record that a stage wrote; keys that only later versions know are left alone."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)


class Epoch(_Record):
    """One line of `metrics.jsonl`.

    Attributes
    ----------
    epoch
        From 1.
    step, samples
        Optimiser steps and training samples so far.
    train_loss, valid_loss
        Means over the epoch's training samples and over all validation samples.
    epoch_seconds, valid_seconds
        Time of training and, after it, of validating, s.
    samples_per_second
        Of training, without validation.
    metrics
        Validation metrics by name.
    """

    epoch: int = Field(ge=1)
    step: int
    samples: int
    learning_rate: Number
    train_loss: Number
    valid_loss: Number
    epoch_seconds: float
    samples_per_second: float
    valid_seconds: float = 0.0
    metrics: dict[str, Number] = {}

    @property
    def skill(self) -> float | None:
        """Mean skill over channels; None where the study has none."""
        values = [value for name, value in self.metrics.items() if name.split("/")[0] == "skill"]
        return statistics.fmean(values) if values else None


class Trials(_Record):
    """Mean and standard deviation over trials, samples/s."""

    mean: float = Field(ge=0)
    std: float = Field(0.0, ge=0)


class Throughput(_Record):
    """`throughput.json`; a mode that was not measured is None."""

    io: Trials | None = Field(None, alias="IO")
    synthetic: Trials | None = Field(None, alias="SYNTHETIC")
    full: Trials | None = Field(None, alias="FULL")
    device: dict[str, Any] | str | None = None
    peak_memory_bytes: int | None = None

    def mode(self, name: str) -> Trials | None:
        """Return one of `MODES`."""
        trials: Trials | None = getattr(self, name.lower())
        return trials


class _Reference(_Record):
    """Where a run's results are: in the folder of the plan that owns it."""

    name: Name
    label: str | None = None
    plan: Name
    run: Name


class _PlanFile(_Record):
    """`plan.yaml`."""

    plan: Name
    title: str | None = None
    study: Name
    kind: Literal["set", "ladder"] = "set"
    measure: list[str]
    runs: list[_Reference] = Field(min_length=1)
    left_out: dict[str, str] = {}


@dataclass(frozen=True, eq=False)
class RunResult:
    """One run of a plan, with all that was measured of it.

    Attributes
    ----------
    name, label
        In the plan at hand; the label is for readers.
    owner
        `PLAN/RUN` whose folder holds the results; another plan's where the run was named with `use`.
    settings
        The run's `config.yaml`.
    provenance
        `provenance.json`, empty if there is none.
    epochs
        Empty if the plan does not train.
    throughput
        None if the plan does not measure it.
    prediction
        The figure of prediction against truth, if there is one.
    """

    name: str
    label: str
    owner: str
    settings: Raw
    provenance: Raw
    epochs: list[Epoch]
    throughput: Throughput | None
    prediction: Path | None

    @property
    def last(self) -> Epoch | None:
        """The last epoch."""
        return self.epochs[-1] if self.epochs else None

    @cached_property
    def best_valid_loss(self) -> float | None:
        """The least validation loss of any epoch."""
        return min((epoch.valid_loss for epoch in self.epochs if math.isfinite(epoch.valid_loss)), default=None)

    @cached_property
    def training_speed(self) -> float | None:
        """Median training samples/s over the epochs; the first, which warms up, counts only if it is alone."""
        speeds = [epoch.samples_per_second for epoch in self.epochs]
        return statistics.median(speeds[1:] or speeds) if speeds else None

    @property
    def speed(self) -> float | None:
        """FULL samples/s, or those of training where throughput was not measured."""
        if self.throughput is not None:
            return self.throughput.full.mean if self.throughput.full else None
        return self.training_speed

    @property
    def training_seconds(self) -> float:
        """Time spent training, validation left out, s."""
        return sum(epoch.epoch_seconds for epoch in self.epochs)

    @property
    def device(self) -> Raw:
        """`kind`, `name` and `threads` of the device, as far as they are known."""
        found = self.throughput.device if self.throughput and self.throughput.device else self.provenance.get("device")
        if isinstance(found, Mapping):
            return dict(found)
        return {"name": str(found)} if found else {}


@dataclass(frozen=True)
class PlanResult:
    """A plan and its runs, in the plan's order.

    Attributes
    ----------
    left_out
        Runs that the machine cannot do, and what it lacks.
    """

    name: str
    title: str
    study: str
    kind: str
    measure: list[str]
    runs: list[RunResult]
    left_out: dict[str, str] = field(default_factory=dict)

    def speed_up(self, run: RunResult) -> float | None:
        """Speed relative to the plan's first run; None where either is unknown."""
        first = self.runs[0].speed
        return run.speed / first if run.speed is not None and first else None


def read_plan(path: str | Path) -> PlanResult:
    """Read a plan and the results of all its runs.

    Parameters
    ----------
    path
        `results/plans/PLAN/plan.yaml`.

    Raises
    ------
    UserError
        A file that the plan's `measure` promises is missing, torn, or lacks a key; the message names it.
    """
    path = Path(path)
    plan = validate(_PlanFile, read_yaml(path), where=str(path))
    root = path.parent.parent
    runs = [_read_run(root / reference.plan / reference.run, reference, plan.measure) for reference in plan.runs]
    return PlanResult(plan.plan, plan.title or plan.plan, plan.study, plan.kind, plan.measure, runs, plan.left_out)


def _read_run(folder: Path, reference: _Reference, measure: list[str]) -> RunResult:
    # Only what the plan measures: another plan may have put more into the folder, or be about to.
    train, throughput = "train" in measure, "throughput" in measure
    provenance, prediction = folder / "provenance.json", folder / "prediction.png"
    trials = folder / "throughput.json"
    return RunResult(
        name=reference.name,
        label=reference.label or reference.name,
        owner=f"{reference.plan}/{reference.run}",
        settings=read_yaml(folder / "config.yaml"),
        provenance=_mapping(provenance) if train and provenance.exists() else {},
        epochs=_read_epochs(folder / "metrics.jsonl") if train else [],
        throughput=validate(Throughput, _mapping(trials), where=str(trials)) if throughput else None,
        prediction=prediction if train and prediction.exists() else None,
    )


def _mapping(path: Path) -> Raw:
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(
            f"{path}: expected keys and values, got {type(value).__name__}; delete it and run its stage again"
        )
    return value


def _read_epochs(path: Path) -> list[Epoch]:
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
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}: line {number} is not valid JSON ({error}); {advice}") from None
        epochs.append(validate(Epoch, record, where=f"{path}: line {number}"))
    if not epochs:
        raise UserError(f"{path}: holds no epoch; {advice}")
    return epochs
