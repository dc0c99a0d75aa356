"""Descriptions of losses and metrics, and records of their values by epoch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from dlscale.core.errors import UserError
from dlscale.core.files import read_text
from dlscale.core.record import Measured, Number, Record
from dlscale.core.text import unit


class Metric(Record):
    """Description of a validation metric, for tables and the page."""

    name: str  #: Key in `Epoch.metrics`: `KIND`, or `KIND/CHANNEL` for a metric of one channel.
    title: str  #: Title for readers, without the channel.
    meaning: str = ""  #: Explanation of the metric in one line.
    unit: str = "1"  #: Unit; `1` for a number without a unit.
    better: Literal["lower", "higher"] = "lower"
    naive: str | None = None  #: Key of the best baseline's value in `Epoch.metrics`; None without a baseline.
    answer: str = ""  #: Description of the best baseline without learning.
    #: Name of a baseline, if this metric is the error of this baseline and no metric names this metric as `naive`.
    rival: str = ""
    derived: bool = (
        False  #: Whether the metric is computed from other metrics, as a skill is; pages show those metrics instead.
    )

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]

    @property
    def channel(self) -> str:
        return self.name.partition("/")[2]

    @property
    def full_title(self) -> str:
        """Title for captions: begins with the channel, or with a capital letter if there is no channel."""
        return f"{self.channel} {self.title}" if self.channel else self.title[:1].upper() + self.title[1:]

    @property
    def label(self) -> str:
        shown = unit(self.unit)
        return f"{self.channel} {self.title}".strip() + f" ({shown})" * bool(shown)

    def skill(self, metrics: Mapping[str, float]) -> float | None:
        """Return 1 - error / error of the best baseline without learning.

        The skill is None if higher values are better, if the metric or its baseline has no value, or if the error of
        the baseline is zero.
        """
        value, naive = metrics.get(self.name), metrics.get(self.naive or "")
        return 1 - value / naive if self.better == "lower" and naive and value is not None else None

    def of(self, epoch: Epoch) -> float:
        return epoch.valid_loss if self.name == VALID_LOSS.name else epoch.metrics.get(self.name, math.nan)

    def reaches(self, value: float, target: float) -> bool:
        """Return whether a value is at least as good as the target; always false for NaN."""
        return value <= target if self.better == "lower" else value >= target

    def aim(self, value: float) -> str:
        return f"{self.channel} {self.title} {'≤' if self.better == 'lower' else '≥'} {value:g}".strip()

    def best(self, epochs: Iterable[Epoch]) -> Epoch | None:
        """Return the first epoch with the best value; None without a finite value."""
        known = [epoch for epoch in epochs if math.isfinite(self.of(epoch))]
        sign = 1 if self.better == "lower" else -1
        return min(known, key=lambda epoch: sign * self.of(epoch), default=None)

    def first(self, epochs: Iterable[Epoch], target: float) -> Epoch | None:
        """Return the first epoch that reached the target; None if all epochs missed the target."""
        return next((epoch for epoch in epochs if self.reaches(self.of(epoch), target)), None)


#: Validation loss as a metric.
VALID_LOSS = Metric(name="valid_loss", title="validation loss", meaning="mean over all validation samples")


class LossInfo(Record):
    """Title of a loss, and its unit in words."""

    title: str = "loss"
    unit: str = ""

    @property
    def label(self) -> str:
        return self.title + " loss" * ("loss" not in self.title) + f" ({self.unit})" * bool(self.unit)


class Untrained(Record):
    """Scores of a model before its first step."""

    train_loss: Number = math.nan  #: Loss of the first batch before the first update; NaN until known.
    valid_loss: Number  #: Mean over all validation samples.
    metrics: dict[str, Number] = {}  #: Validation metrics by name.


class Epoch(Record):
    """Line of `metrics.jsonl`: the results of one epoch."""

    epoch: int = Field(ge=1)
    step: int  #: Optimiser steps so far.
    samples: int | None  #: Training samples so far; None if an external program's batch size is unknown.
    learning_rate: Number  #: Learning rate of the epoch's last step.
    train_loss: Number  #: Mean loss over the epoch's training samples.
    valid_loss: Number  #: Mean loss over all validation samples.
    epoch_seconds: Measured  #: Training time without validation, s.
    #: Training throughput. The time includes the wait for the first batch, but not the validation. None if an external
    #: program's batch size is unknown.
    samples_per_second: Measured | None
    valid_seconds: Measured = 0.0  #: Time of the validation after the epoch, s.
    valid_samples: int = 0  #: Validation samples; 0 if unknown.
    valid_steps: int = 0  #: Validation batches; 0 if unknown.
    wall_time: float = 0.0  #: End of the epoch's last training step, seconds since 1970-01-01 UTC.
    metrics: dict[str, Number] = {}  #: Validation metrics by name.
    #: Training metrics by name: means over the epoch of values that are computed before each update.
    train_metrics: dict[str, Number] = {}
    #: Number of skipped steps, whose loss or gradient was not finite; `train_loss` excludes the samples of these steps.
    skipped: int = 0
    #: Settings `geometry`, `parallel`, `threads`, `loader`, which affect times. None if the settings changed within the
    #: epoch; empty if unknown.
    made_with: dict[str, Any] | None = {}
    untrained: Untrained | None = None  #: Scores before training, in the record of the first epoch; None if unmeasured.

    @property
    def begin(self) -> float:
        """Start time, seconds since 1970-01-01 UTC; too late by the pauses if the epoch was interrupted."""
        return self.wall_time - self.epoch_seconds


def read_epochs(path: Path) -> list[Epoch]:
    """Read `metrics.jsonl`; raise a `UserError` if it is missing, damaged or empty."""
    advice = "delete it and run the train stage again"
    try:
        lines = read_text(path).splitlines()
        epochs = [Epoch.checked(json.loads(line), f"{path}: line {row}") for row, line in enumerate(lines, 1)]
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; run the train stage first") from None
    except (OSError, ValueError, RecursionError) as error:  # not UTF-8, or not JSON
        raise UserError(f"{path}: cannot be read ({error}); {advice}") from None
    if not epochs or [epoch.epoch for epoch in epochs] != list(range(1, len(epochs) + 1)):
        raise UserError(
            f"{path}: has {f'{len(epochs)} epochs, but not numbered 1, 2, 3, …' if epochs else 'no epochs'}; {advice}"
        )
    return epochs


def epoch_lines(epochs: Iterable[Epoch]) -> str:
    """Return the text of `metrics.jsonl`."""
    return "".join(epoch.text() + "\n" for epoch in epochs)


class Best(Record):
    """Best epoch of a run, with its weights in `model_best.pt`."""

    metric: str  #: Metric that ranks the epochs: `valid_loss`, or a name in `Epoch.metrics`.
    value: Number
    epoch: int
    step: int
