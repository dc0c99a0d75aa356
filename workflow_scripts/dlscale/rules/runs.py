"""Files, parameters and command-line arguments of the jobs of runs, computed from wildcards."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlscale.config.compute import compute_settings
from dlscale.config.run import Run
from dlscale.core import redact
from dlscale.core.fingerprint import fingerprint, run_modules
from dlscale.core.stages import STAGES
from dlscale.preflight import cost
from dlscale.preflight.probe import Finding
from dlscale.rules.context import Commands, Context, Params, Wildcards
from dlscale.rules.datasets import Datasets

#: Cores requested by timed jobs: more than a machine has, so that no other job runs at the same time.
ALL_CORES = 1_024


@dataclass
class Programs:
    """Files and command-line arguments of a run's external program; empty for other runs.

    The extension `programs` provides a subclass. Without this extension, no run has a program.
    """

    context: Context
    commands: Commands

    def params(self, stage: str, run: Run) -> Params:
        """Return the parameters of a stage, for a run with a program; a change repeats the stage."""
        raise AssertionError("without the extension `programs`, no run has a program")

    def launch(self, paths: Iterable[str], run: Run, secrets: bool = False) -> tuple[list[str], list[str]]:
        """Return the command of a stage, for a run with a program, and the arguments before the program's command."""
        raise AssertionError("without the extension `programs`, no run has a program")

    def with_fetched_folder(self, run: Run) -> Run:
        return run

    def checkout(self, wildcards: Wildcards) -> list[str]:
        return []

    def files(self, wildcards: Wildcards) -> list[str]:
        return []

    def start(self, wildcards: Wildcards, input: Any) -> list[str]:
        return []

    def tune_candidates(self, wildcards: Wildcards, input: Any) -> list[str]:
        return []


def decisive_settings(stage: str, run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings that make a stage run again.

    Stages that do not use the run's `training` ignore settings that change only the learning. All stages ignore the
    requested memory (`geometry.memory_mb`).
    """
    if "training" in STAGES[stage].settings:
        return {**run, "geometry": {key: value for key, value in run["geometry"].items() if key != "memory_mb"}}
    # `compute_settings` lacks the numbers of samples and the self-test, so its sections are replaced.
    return compute_settings(run) | {key: run[key] for key in ("samples", "parallel", *STAGES[stage].settings)}


@dataclass
class Runs:
    """Jobs of runs."""

    context: Context
    commands: Commands
    datasets: Datasets
    programs: Programs

    def data_files(self, wildcards: Wildcards) -> list[str]:
        return self.datasets.samples(self.context.run(wildcards).dataset)

    def manifest(self, wildcards: Wildcards) -> str:
        return self.context.paths.manifest(self.context.run(wildcards).dataset)

    def weights(self, wildcards: Wildcards) -> list[str]:
        """Return the file of weights from which a run starts; empty without such weights.

        If the file is a result of another run, that other run is trained first.
        """
        weights: str | None = self.context.run(wildcards).training.weights
        run = f"{wildcards.plan}.{wildcards.run}"
        remedy = f"name other weights in plans.{wildcards.plan}.runs.{wildcards.run}.training.weights"
        if weights and Path(weights).is_relative_to(self.context.paths.plans):
            plan, name, *_ = [*Path(weights).relative_to(self.context.paths.plans).parts, "", ""]
            if name not in self.context.plans.get(plan, {}) and run not in self.context.looked:
                what = f"{weights}: no run of this configuration makes this file"
                self.context.say(
                    Finding(f"run {run}", "FAIL", what, f"copy the file out of {self.context.paths.plans}, or {remedy}")
                )
            # The weights of the best epoch are not a declared output, because not every run keeps these weights.
            weights = re.sub(r"model_best\.pt$", "model.pt", weights)
        elif weights and run not in self.context.looked and not Path(weights).exists():
            self.context.say(Finding(f"run {run}", "FAIL", f"{weights}: no such file or folder", remedy))
        self.context.looked.add(run)
        return [weights] if weights else []

    def params(self, stage: str) -> Callable[[Wildcards], Params]:
        """Return the parameter function of a stage that depends only on the run."""
        return lambda wildcards: self._params(stage, self.context.run(wildcards))

    def _params(self, stage: str, run: Run, loaders: Iterable[str] = ()) -> Params:
        """Return the parameters that make a stage run again: settings, and sources of the study and the loaders."""
        if run.program:
            return self.programs.params(stage, run)
        modules = [*run_modules(stage, run.study, *run.loaders(stage), *loaders), *STAGES[stage].imports(run)]
        return self.context.params(modules, json.dumps(decisive_settings(stage, run.slice(stage))))

    def settings(self, wildcards: Wildcards, input: Any) -> str:
        return self.programs.with_fetched_folder(self.context.run(wildcards)).model_dump_json()

    def paired_with(self, wildcards: Wildcards) -> Run | None:
        """Return the plan's first timed run if paired timing compares a run with this first run, else None.

        Both runs must have one process, and neither may use an image of an external program. `throughput.beside` must
        be positive, and at least 10 s if the run is the first run, which is compared with a copy of itself.
        """
        plan, runs = wildcards.plan, self.context.plans[wildcards.plan]
        first = next(
            (runs[name].run for name in runs if "throughput" in self.context.configuration.stages(plan, name)), None
        )
        run = self.context.run(wildcards)
        # The first run is timed with its copy: measuring the small difference takes at least ten seconds.
        enough = run.throughput.beside >= 10 if run is first else run.throughput.beside > 0
        alone = first is not None and all(
            (each.geometry if each.program else each.processes).world_size == 1 for each in (first, run)
        )
        contained = any(each.program and each.program.image for each in (first, run) if each)
        return first if enough and alone and not contained else None

    def throughput_params(self, wildcards: Wildcards) -> Params:
        first = self.paired_with(wildcards)
        run = self.context.run(wildcards)
        params = self._params("throughput", run, first.loaders("throughput") if first else ())
        if first and bool(first.program) != bool(run.program):
            params["first"] = self._params("throughput", first)["sources"]
        # Only settings that change the first run's steps count: another learning rate must not repeat all timings.
        return params | ({"beside": json.dumps(compute_settings(first.model_dump(mode="json")))} if first else {})

    def first_data(self, wildcards: Wildcards) -> list[str]:
        """Return manifest and data of the first run in paired timing; empty if both runs read the same dataset."""
        first = self.paired_with(wildcards)
        if not first or first.dataset == self.context.run(wildcards).dataset:
            return []
        return [self.context.paths.manifest(first.dataset), *self.datasets.samples(first.dataset)]

    def throughput_beside(self, wildcards: Wildcards, input: Any) -> list[str]:
        first = self.paired_with(wildcards)
        if not first:
            return []
        manifest = ["--beside-manifest", input.first[0]] if input.first else []
        return ["--beside", json.dumps(self.programs.with_fetched_folder(first).slice("throughput")), *manifest]

    def train_threads(self, wildcards: Wildcards) -> int:
        """Return the threads of a training job: `ALL_CORES`, or the sum of `threads` over the run's processes.

        Only a run on CPUs that sets `threads`, but not `cpus`, shares the machine.
        """
        return (
            cost.threads("train", self.context.run(wildcards), bool(self.context.site.scheduler or self.context.gpus))
            or ALL_CORES
        )

    def checkpoint_sources(self, wildcards: Wildcards, input: Any) -> str:
        return fingerprint(run_modules("train", self.context.run(wildcards).study))

    def checkpoint_folder(self, wildcards: Wildcards) -> str:
        """Return the folder of a run's checkpoints, which all rungs of a trial share."""
        resolved = self.context.plans[wildcards.plan][wildcards.run]
        return self.context.paths.checkpoints(wildcards.plan, resolved.trial or wildcards.run)

    def launch(self, wildcards: Wildcards, input: Any) -> list[str]:
        run = self.context.run(wildcards)
        programs = [each.program.model_dump() for each in (run, self.paired_with(wildcards)) if each and each.program]
        if not run.program:
            return self.commands.start(input, run.processes, redact.has_marker(programs))
        return self.programs.launch(input, run, redact.has_marker(programs))[0]
