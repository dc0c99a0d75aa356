"""Runs, tables and pages of plans."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlscale.config import resolve
from dlscale.config.records import Rung
from dlscale.core import registry
from dlscale.core.fingerprint import ROOT
from dlscale.core.stages import STAGES
from dlscale.rules.context import Context, Params, Wildcards


@dataclass
class Plans:
    """Tables and pages of plans."""

    context: Context

    def settings(self, name: str) -> Params:
        plan = self.context.configuration.workflow.plans[name]
        study = resolve.study_files()[plan.study]
        runs = [
            {
                "name": resolved.trial or run,
                "label": self.context.configuration.label(name, run),
                "plan": resolved.plan,
                "run": resolved.name,
                "measure": self.context.configuration.stages(name, run),
                "repeats": [each.name for each in self.context.plans[name].values() if each.repeats == run],
            }
            for run, resolved in self.context.plans[name].items()
            if resolved.rung == 0 and not resolved.repeats
        ]
        return {
            "plan": name,
            "title": plan.title or name,
            "study": plan.study,
            "study_title": study.title,
            "kind": plan.kind,
            "measure": plan.measure,
            "runs": runs,
            "sweep": self.sweep_settings(name) if plan.sweep else None,
            "left_out": self.context.configuration.skipped_runs[name],
            "grams_per_kwh": self.context.configuration.workflow.site.grams_per_kwh,
            "published": [figure.model_dump(exclude_unset=True) for figure in study.published],
        }

    def sweep_settings(self, name: str) -> Params:
        sweep: Any = self.context.configuration.workflow.plans[name].sweep
        rungs = {
            each.rung: [each.run.training.stop_after, each.rung_size] for each in self.context.plans[name].values()
        }
        return {
            "method": sweep.method,
            "metric": sweep.metric,
            "trials": sweep.runs,
            "rungs": [*rungs.values()] if sweep.method == "halving" else [],
        }

    def promoted(self, name: str, rung: int) -> list[str]:
        return Rung.read(self.context.rung_file(name, rung)).trials

    def promote_inputs(self, wildcards: Wildcards) -> list[str]:
        name, before = wildcards.plan, int(wildcards.rung) - 1
        best = self.promoted(name, before) if before else []
        runs = [
            run
            for run, each in self.context.plans[name].items()
            if each.rung == before and (not before or each.trial in best)
        ]
        return [self.context.paths.run(file, name, run) for run in runs for file in STAGES["train"].outputs]

    def promote_params(self, wildcards: Wildcards) -> Params:
        return self.context.own_params("promote", self.sweep_settings(wildcards.plan))

    def measured(self, name: str) -> list[str]:
        """Return the output files of all stages of a plan's runs; on later rungs, only of promoted trials."""
        return [
            self.context.paths.run(file, resolved.plan, resolved.name)
            for run, resolved in self.context.plans[name].items()
            if not resolved.rung or resolved.trial in self.promoted(name, resolved.rung)
            for stage in self.context.configuration.stages(name, run)
            for file in STAGES[stage].outputs
        ]

    def _known(self, name: str) -> list[str]:
        # With successive halving, the files are not known yet: the rule of the table (`collect`) requests them later.
        return [] if self.context.configuration.workflow.plans[name].halves else self.measured(name)

    def files(self, name: str) -> list[str]:
        return [*self._known(name), self.context.paths.table(name)]

    def shown_files(self, name: str, page: bool) -> list[str]:
        """Return the files of a plan that Snakemake's own report shows; `page` adds the plan's page."""
        paths = self.context.paths
        pictures = [file for file in self._known(name) if Path(file).name == "prediction.png"]
        return [*pictures, paths.table(name), *([paths.plan_page(name)] if page else [])]

    def datasets(self, names: Iterable[str]) -> list[str]:
        return list(
            dict.fromkeys(resolved.run.dataset for name in names for resolved in self.context.plans[name].values())
        )

    def configure_params(self, wildcards: Wildcards) -> Params:
        return self.context.own_params("configure", json.dumps(self.settings(wildcards.plan)))

    def runs(self, wildcards: Wildcards) -> list[str]:
        return self.measured(wildcards.plan)

    def collect_params(self, wildcards: Wildcards) -> Params:
        return self.context.own_params("collect", self.settings(wildcards.plan))

    def sooner(self, wildcards: Wildcards) -> float:
        return 1 / len(self.context.plans[wildcards.plan])  # plans with few runs come first

    def live_page(self, wildcards: Wildcards, input: Any) -> list[str]:
        workflow = self.context.configuration.workflow
        files = self.files_of_page(workflow.targets)
        page = {
            "title": workflow.report.title,
            "plans": files["plans"],
            "datasets": [str(Path(manifest).parent) for manifest in files["manifests"]],
            "references": files["references"],
            "call": self.context.call_again(wildcards, input),
            "out": self.context.page,
        }
        return ["--page", json.dumps(page)] if self.context.is_live else []

    def files_of_page(self, names: Sequence[str]) -> dict[str, list[str]]:
        datasets = self.datasets(names)
        paths = self.context.paths
        return {
            "plans": [paths.plan(name) for name in names],
            "tables": [paths.table(name) for name in names],
            "manifests": [paths.manifest(name) for name in datasets],
            "previews": [paths.preview(name) for name in datasets],
            "references": paths.references(),
        }

    def page_files(self, wildcards: Wildcards) -> dict[str, list[str]]:
        return self.files_of_page([wildcards.plan])

    def target_runs(self, wildcards: Wildcards) -> list[str]:
        return list(
            dict.fromkeys(file for name in self.context.configuration.workflow.targets for file in self.measured(name))
        )

    def page_folders(self, wildcards: Wildcards, input: Any) -> list[str]:
        return [str(Path(manifest).parent) for manifest in input.manifests]

    def page_params(self, title: str, names: Iterable[str]) -> Params:
        return self.context.own_params(
            "report",
            {"title": title, "plans": list(names)},
            ROOT.glob("report/templates/*"),
            registry.page_modules(),
        )

    def plan_page_params(self, wildcards: Wildcards) -> Params:
        title = self.context.configuration.workflow.plans[wildcards.plan].title or wildcards.plan
        return self.page_params(title, [wildcards.plan])
