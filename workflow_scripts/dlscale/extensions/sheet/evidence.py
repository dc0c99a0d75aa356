"""Results of the plans of a request, and predictions that are fitted to these results."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from dlscale.config.resolve import Configuration
from dlscale.core.errors import UserError
from dlscale.core.paths import Results
from dlscale.data.manifest import Manifest
from dlscale.extensions.predict import predict
from dlscale.measure.records import SAMPLE_RATE
from dlscale.report.speedup import Series, series
from dlscale.results import PlanResult, RunResult, reached


@dataclass(frozen=True)
class Forecast:
    """Predictions of runs on other numbers of devices, or the reason why they are missing."""

    runs: predict.MeasuredRuns | None
    reason: str = ""
    disturbed: bool = False  #: Whether other programs disturbed a run to which the predictions are fitted.

    @classmethod
    def of(cls, runs: Sequence[RunResult], machine: str | None) -> Forecast:
        """Fit the scaling model to runs; a refusal of `dlscale predict` becomes the reason."""
        try:
            found = predict.read([run.folder for run in runs], machine, math.inf)
        except UserError as error:
            return cls(None, str(error))
        return cls(found, disturbed=any(run.foreign_cpu_fraction for run in runs))

    def rows(self, devices: Sequence[int], batch: int | None, samples: int | None = None) -> list[predict.Row]:
        """Return the predictions for numbers of devices; impossible numbers are omitted.

        `batch` is the global batch size (None: each copy of the model gets as many samples as in the measurement).
        `samples` is the number of samples of the training (None: computed from the epochs).
        """
        if self.runs is None:
            return []
        at, asked = self.runs.run.geometry, dict.fromkeys(("per_node", "memory", "epochs"))
        own = {"devices": devices, "tp": [at.tp], "cp": [at.cp], "batch_size": batch, "target_samples": samples}
        return predict.table(self.runs, argparse.Namespace(**asked | own))[0]


@dataclass(frozen=True)
class Evidence:
    """Results of the plans of a request; the first plan is the plan that the request is for."""

    plans: list[PlanResult]
    configuration: Configuration
    args: argparse.Namespace
    lacking: list[str] = field(default_factory=list)  #: Runs without results, each with the reason.

    @property
    def results(self) -> Path:
        return Path(self.configuration.workflow.results)

    @property
    def names(self) -> str:
        """Names of the plans, for commands."""
        return " ".join(plan.name for plan in self.plans)

    @property
    def options(self) -> str:
        """Options that name the configuration, for commands."""
        words = list[str]()
        for flag in ("profile", "configfile", "config"):
            given = getattr(self.args, flag)
            words += [f"--{flag}", *([given] if isinstance(given, str) else given)] if given else []
        return "".join(f" {shlex.quote(word)}" for word in words)

    @cached_property
    def runs(self) -> list[RunResult]:
        return [run for plan in self.plans for run in plan.runs]

    @cached_property
    def rated(self) -> list[RunResult]:
        """Runs that average gradients, with a throughput in samples/s, the first plan's runs first."""
        return [run for run in self.runs if run.throughput and run.averages and run.unit == SAMPLE_RATE]

    @cached_property
    def timed(self) -> RunResult | None:
        """The run with a measured throughput on the most devices, of the first plan if the plan has such runs."""
        own = [run for run in self.rated if run in self.plans[0].runs]
        return max(own or self.rated, key=lambda run: run.devices, default=None)

    @cached_property
    def production(self) -> int:
        """Number of devices of a training in production."""
        return int(self.args.production or (self.timed or self.runs[0]).devices)

    @cached_property
    def trained(self) -> RunResult | None:
        """The training that the request repeats.

        Order of preference: trainings that reached their target, trainings on the devices of production, the fewest
        GPU-hours until the target.
        """

        def rank(run: RunResult) -> tuple[bool, bool, float]:
            found = reached(run)
            hours = found.gpu_hours if found else None
            return hours is None, run.devices != self.production, hours or 0.0

        return min((run for run in self.runs if run.epochs), key=rank, default=None)

    @property
    def shown(self) -> RunResult:
        """The run that represents the plan: `timed`, or else `trained`, or else any run."""
        return self.timed or self.trained or self.runs[0]

    @property
    def samples(self) -> int | None:
        """Samples that the training needed for its target; without a target, all its samples.

        None without a training, or if the training has not reached its target.
        """
        found = reached(self.trained) if self.trained else None
        last = found.epoch if found else self.trained.last if self.trained else None
        return last.samples if last else None

    @cached_property
    def scaled(self) -> list[tuple[PlanResult, Series]]:
        """Series on several numbers of devices."""
        return [(plan, each) for plan in self.plans for each in series(plan) if len(each.points) > 1]

    @cached_property
    def forecasts(self) -> list[Forecast]:
        """Predictions fitted to each series of `scaled`."""
        return [Forecast.of([point.run for point in each.points], self.args.machine) for _, each in self.scaled]

    @cached_property
    def production_forecast(self) -> tuple[Forecast, int | None]:
        """Predictions for production, and their global batch size (None: each copy has the measured batch).

        The predictions are fitted to the first series, or without a series to the run on the most devices.
        """
        if self.scaled:
            plan, first = self.scaled[0]
            return self.forecasts[0], None if plan.record.kind == "weak_scaling" else first.batch
        return Forecast.of([self.timed], self.args.machine) if self.timed else Forecast(None), None

    @cached_property
    def predicted(self) -> predict.Row | None:
        """Prediction for the devices of production; None if it is impossible."""
        forecast, batch = self.production_forecast
        return next(iter(forecast.rows([self.production], batch, self.samples)), None)

    @cached_property
    def manifest(self) -> Manifest | None:
        """Manifest of the dataset; None if the dataset is missing."""
        try:
            return Manifest.read(Results(self.results).manifest(str(self.shown.setting("dataset"))))
        except UserError:
            return None

    def remedy(self, stage: str) -> str:
        """Return the remedy for a stage that was not measured."""
        return f"needs the stage {stage} (`measure`); dlscale run {self.plans[0].name}{self.options}"


def named(run: RunResult) -> str:
    """Return the name of a run in commands, PLAN.RUN of its folder."""
    return run.owner.replace("/", ".")


def nodes_of(run: RunResult) -> int:
    """Return the number of nodes of a run."""
    return int(run.setting("geometry.nodes", 1))
