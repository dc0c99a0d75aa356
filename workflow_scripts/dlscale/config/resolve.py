"""Resolve the user's configuration into validated datasets and complete runs.

The user's configuration is merged over the YAML files of the studies, so that a user can change any shipped dataset or
plan by name. The settings of a run are merged from layers: the settings of the study (or of the run that the plan's
`from` names), of the plan, of the earlier rungs in a ladder, and of the run itself.
"""

from __future__ import annotations

import copy
import fnmatch
import functools
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dlscale.config.dataset import Written, seen
from dlscale.config.places import MEASURED
from dlscale.config.records import Published
from dlscale.config.run import Run, run_class
from dlscale.config.site import Site
from dlscale.config.workflow import BLOCKS, Plan, Workflow, workflow_class
from dlscale.core import registry
from dlscale.core.errors import Refused, UserError, cut, nearest, unknown
from dlscale.core.machine import NEEDS, gpus, has_package, missing
from dlscale.core.redact import redact_programs
from dlscale.core.schema import MAX_SEED, Name, Strict
from dlscale.core.settings import Raw, holds, read_yaml, validate
from dlscale.core.stages import STAGES
from dlscale.core.urls import hide

#: Keys that define the runs of a plan; a plan needs at least one of these keys.
MAKING = {"runs", *(block for block, _ in BLOCKS.values())}
#: Pairs of settings that exclude each other.
EXCLUSIVE = (("epochs", "steps"), ("batch_size", "local_batch_size"), ("warmup_steps", "warmup_epochs"))
#: Default of `kind` by section, for the sections of a run that have a default.
KINDS = {key: field.default.kind for key, field in Run.model_fields.items() if hasattr(field.default, "kind")}
#: Layer of settings: key path at which the user or study wrote the settings, and the settings.
Layer = tuple[str, Raw]
#: Name of a plan, and name of a run in this plan.
RunKey = tuple[str, str]


class StudyFile(Strict):
    """YAML file of a study; the study's settings are validated after the user's settings are merged over them."""

    title: str | None = None
    settings: dict[str, Any]
    datasets: dict[str, Any] = {}
    plans: dict[str, Any] = {}
    #: Name of an extension → plans that are skipped without the extension.
    plans_need: dict[str, list[str]] = {}
    published: list[Published] = []
    series: dict[Name, Any] = {}  #: Published series, which the extension `predict` validates.


@dataclass(frozen=True)
class ResolvedRun:
    """A run of a plan with its settings.

    `plan` and `name` give the folder of the run's results. For a run with `use`, they are the plan and name of the run
    that `use` names.
    """

    plan: str
    name: str
    run: Run
    trial: str | None = None  #: Trial of successive halving that this run trains, from the end of the previous rung on.
    rung: int = 0
    rung_size: int = 0  #: Number of trials in the run's rung; the scores in the previous rung decide which trials.
    repeats: str | None = None  #: Name of the run of the plan that this run repeats with another seed.
    asked: Run | None = None  #: For an external program, the run before placeholders in the command were replaced.


@dataclass(frozen=True)
class Configuration:
    """Validated configuration."""

    workflow: Workflow  #: Configuration file, merged with the shipped datasets and plans.
    plans: dict[str, dict[str, ResolvedRun]]  #: Plan → name of the run → run, in the plan's order.
    skipped_runs: dict[
        str, dict[str, str]
    ]  #: Requirements that this machine lacks, by plan and by name of the skipped run.
    #: Redacted address → full address of a dataset, and marker → secret of a program.
    secrets: dict[str, str] = field(default_factory=dict, repr=False)

    def stages(self, plan: str, run: str) -> list[str]:
        stages = ["train"] if self.plans[plan][run].repeats else self.workflow.plans[plan].stages(run)
        return of_program(stages) if self.plans[plan][run].run.program else stages

    def label(self, plan: str, run: str) -> str:
        resolved = self.plans[plan][run]
        if "use" in (self.workflow.plans[plan].runs.get(run) or {}):
            return f"{run} (= {resolved.plan}.{resolved.name})"
        return resolved.run.label or run


def load(raw: Mapping[str, Any]) -> Configuration:
    """Validate the user's configuration, which Snakemake has merged, and resolve all runs.

    Invalid settings raise a `UserError` with the path of the key, the expected value and the nearest valid name.
    """
    user, secrets = _plain(raw), dict[str, str]()
    for section in ("datasets", "plans", "studies"):
        if not isinstance(user.setdefault(section, {}), dict):
            raise UserError(f"configuration: {section}: expected names and their settings")
    user["datasets"] = hide(user["datasets"], "configuration: datasets", secrets)
    for name, study in user["studies"].items():
        if isinstance(study, str):  # the path of an outside study
            registry.add(name, study)
            user["studies"][name] = {}
    files, there = study_files(), registry.extensions()
    own = {name: files[name].model_dump(include={"settings", "plans"}) for name in registry.added()}
    hidden = redact_programs([{key: user[key] for key in ("studies", "plans")}, own], secrets)
    user |= hidden[0]
    files |= {name: files[name].model_copy(update=each) for name, each in hidden[1].items()}
    merged: Raw = {"studies": {}, "datasets": {}, "plans": {}}
    for name, file in files.items():
        study = registry.added().get(name)
        datasets = hide(
            resolve_paths({"datasets": file.datasets}, study.yaml.parent)["datasets"] if study else file.datasets,
            f"{written_in(name)}: datasets",
            secrets,
        )
        absent = {plan for extension in file.plans_need.keys() - there for plan in file.plans_need[extension]}
        origins = {plan: str(isinstance(its, dict) and its.get("from")) for plan, its in file.plans.items()}
        while more := {plan for plan, run in origins.items() if run.split(".")[0] in absent} - absent:
            absent |= more
        own = {"datasets": datasets, "plans": {plan: file.plans[plan] for plan in file.plans if plan not in absent}}
        if twice := [
            f"{each}.{key}" for each in own for key, value in own[each].items() if merged[each].get(key, value) != value
        ]:
            raise UserError(f"configuration: studies.{name}: {twice[0]}: another study uses this name; rename it")
        merge(merged, own)
    _check_names(user, merged)
    merge(merged, user)
    merged["targets"] = _targets(merged)
    try:
        workflow = validate(workflow_class(of_runs=False), merged)
    except UserError:
        workflow = validate(workflow_class(), merged)  # messages of this larger class can suggest keys of a run
    _check_references(workflow, files)
    resolver = _Resolver(workflow, files)
    left_out = {plan: resolver.skipped_runs(plan) for plan in workflow.plans}
    plans = dict[str, dict[str, ResolvedRun]]()
    for name, plan in workflow.plans.items():
        # Skipped runs are also checked, because an error in the configuration must not depend on the machine.
        resolved = {run: resolver.run(name, run) for run in plan.runs}
        resolver.check_settings(name, plan, resolved)
        runs = {run: each for run, each in resolved.items() if run not in left_out[name]}
        if name in workflow.targets and not runs:
            lacking = "; ".join(f"{run}: {what}" for run, what in left_out[name].items())
            raise UserError(f"configuration: targets: plan {name} has no run that this machine supports ({lacking})")
        plans[name] = _filled(_repeated(name, plan, _rungs(name, plan, runs)))
    return Configuration(workflow, plans, left_out, secrets)


def _targets(merged: Raw) -> Any:
    """Return the targets with each pattern replaced by the matching plans, in the order of the plans.

    A pattern is a target with `*`, such as `*_demo`.
    """
    targets = merged.get("targets")
    if not isinstance(targets, list):
        return targets  # absent, or invalid and refused later
    found = list[Any]()
    for target in targets:
        if not (isinstance(target, str) and "*" in target):
            found.append(target)
        elif fits := fnmatch.filter(merged["plans"], target):
            found += fits
        else:
            raise UserError(f"configuration: targets: no plan matches the pattern '{target}'")
    return list(dict.fromkeys(found)) if len(found) != len(targets) else found


def _filled(runs: dict[str, ResolvedRun]) -> dict[str, ResolvedRun]:
    """Return a plan's runs with the placeholders of external programs replaced by the run's settings."""
    return {
        name: replace(
            each, run=each.run.model_copy(update={"program": each.run.program.filled(each.run)}), asked=each.run
        )
        if each.run.program
        else each
        for name, each in runs.items()
    }


def of_program(stages: Iterable[str]) -> list[str]:
    """Return the stages that an external program supports, with `program` instead of `train`."""
    there = ("program" if stage == "train" else stage for stage in stages)
    return [stage for stage in there if STAGES[stage].program]


def _check_names(user: Raw, shipped: Raw) -> None:
    """Refuse a misspelt name of a shipped dataset or plan.

    An entry with a misspelt name looks new, and lacks a key that a new dataset or plan needs. Also refuse a plan with
    the name `MEASURED`.
    """
    if MEASURED in user["plans"]:
        raise UserError(f"configuration: plans.{MEASURED}: `dlscale measure` uses this name; choose another name")
    for section, key in {"datasets": "kind", "plans": "study"}.items():  # the key that a new entry needs
        known = shipped[section].keys() | user[section].keys()
        for name, settings in user[section].items():
            new = name not in shipped[section] and isinstance(settings, dict)
            if new and not nearest(key, settings):  # validation reports a misspelt key
                needed = key + " and runs" * (section == "plans" and not settings.keys() & MAKING)
                what = f"a new {section[:-1]} needs {needed}{nearest(name, known - {name})}"
                raise UserError(f"configuration: {section}.{name}: {what}")


def _check_references(workflow: Workflow, files: Mapping[str, StudyFile]) -> None:
    if wrong := [name for name in workflow.studies if name not in files]:
        raise UserError(f"configuration: studies: {unknown('study', wrong[0], files)}; or give the path of its file")
    if wrong := [name for name in workflow.targets if name not in workflow.plans]:
        raise UserError(
            f"configuration: targets: {unknown('plan', wrong[0], workflow.plans)}"
            + f"; to make a dataset: dlscale run {wrong[0]}" * wrong[0].startswith("data_")
        )
    for name, dataset in workflow.datasets.items():
        kind = registry.kind(dataset.kind)
        parts = Counter(part.label for part in ([] if kind.prepared(dataset) else kind.parts(dataset)))
        if wrong := [
            part for part, times in parts.items() if times > 1 or not re.fullmatch(r"\w+/[A-Za-z0-9_-]+", part)
        ]:
            raise UserError(
                f"configuration: datasets.{name}: {wrong[0]}: expected a part's name of letters, digits, _ and -, "
                "unique within its split"
            )
        for origin in kind.origins(dataset):
            if "://" not in origin and set(origin) & set("{}\n"):
                what = (
                    f"{origin!r}: braces are wildcards to Snakemake, and line breaks are not allowed; rename the file"
                )
                raise UserError(f"configuration: datasets.{name}.source: {what}")


def _rungs(plan_name: str, plan: Plan, trials: dict[str, ResolvedRun]) -> dict[str, ResolvedRun]:
    """Return a plan's runs; for successive halving, one run per trial and rung."""
    if not (plan.sweep and plan.halves and trials):
        return trials
    lengths = {each.run.training.epochs for each in trials.values()}
    epochs = lengths.pop()
    if lengths or epochs is None:
        raise UserError(
            f"configuration: plans.{plan_name}.sweep: halving needs training.epochs, with the same value for all "
            "trials; set this key instead of steps, and do not vary it"
        )
    runs = {}
    for rung, (until, size) in enumerate(plan.sweep.rungs(len(trials), epochs)):
        for trial, resolved in trials.items():
            training = resolved.run.training.model_copy(update={"stop_after": until})
            run = resolved.run.model_copy(update={"training": training})
            name = f"{trial}-rung{rung}"
            runs[name] = replace(resolved, name=name, run=run, trial=trial, rung=rung, rung_size=size)
    return runs


def _repeated(plan_name: str, plan: Plan, runs: dict[str, ResolvedRun]) -> dict[str, ResolvedRun]:
    """Return a plan's runs, each followed by its repetitions with the next seeds."""
    found = {}
    for name, resolved in runs.items():
        found[name] = resolved
        # A run of another plan has its repetitions in that plan.
        own = resolved.plan == plan_name and "train" in plan.stages(name)
        for seed in range(resolved.run.seed + 1, resolved.run.seed + plan.repeat) if own else ():
            again = f"{name}-seed{seed}"
            if again in runs or len(again) > 64 or seed > MAX_SEED:
                raise UserError(
                    f"configuration: plans.{plan_name}.repeat: a repetition cannot be called {again}, because this run "
                    f"exists already, the name has more than 64 characters, or the seed is above {MAX_SEED}; "
                    f"rename {name}, or lower its seed"
                )
            label = f"{resolved.run.label or name}, seed {seed}"
            run = resolved.run.model_copy(update={"seed": seed, "label": label})
            found[again] = replace(resolved, name=again, run=run, repeats=name)
    return found


def load_files(*paths: str | Path, site: str | Path | None = None, over: Iterable[Raw] = ()) -> Configuration:
    """Load a configuration from a site (`site_settings`), YAML files and `over`; later values override earlier ones."""
    raw = site_settings(site)
    for settings in [*(resolve_paths(read_yaml(path), Path(path).parent) for path in paths), *over]:
        merge(raw, settings)
    return load(raw)


def resolve_paths(raw: Raw, folder: str | Path) -> Raw:
    """Return a file's settings with the paths of studies and datasets resolved relative to `folder`."""

    def written(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: written(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [written(inner) for inner in value]
        if not isinstance(value, str):
            return value
        found = Written(value)
        found.folder = Path(folder).absolute()
        return found

    found = dict(raw)
    if isinstance(studies := raw.get("studies"), Mapping):
        found["studies"] = {name: seen(written(its)) if isinstance(its, str) else its for name, its in studies.items()}
    if isinstance(datasets := raw.get("datasets"), Mapping):
        found["datasets"] = {
            name: {**its, "source": written(its["source"])} if isinstance(its, Mapping) and "source" in its else its
            for name, its in datasets.items()
        }
    return found


def site_settings(site: str | Path | None, profiles: str | Path = "profiles") -> Raw:
    """Return the settings of a profile's site, over which a configuration is merged.

    `site` is the name of a folder in `profiles` with a `site.yaml`, or a path (with a slash). The result is empty
    without a `site`, and for a profile that only has settings of Snakemake.
    """
    if not site:
        return {}
    path = Path(site) if "/" in str(site) else Path(profiles) / str(site)
    path = path / "site.yaml" if path.suffix != ".yaml" else path
    if path.is_file():
        raw = read_yaml(path)
        validate(Site, raw, where=str(path))
        return {"site": raw}
    if path.with_name("profile.yaml").is_file():  # this profile only has settings of Snakemake
        return {}
    known = sorted(file.parent.name for file in Path(profiles).glob("*/site.yaml") if file.parent.name != "default")
    raise UserError(f"site: {path}: no such file; {unknown('site', str(site), known)}")


def study_files() -> dict[str, StudyFile]:
    """Return the YAML file of each registered study."""
    return {name: _study_file(study.yaml) for name, study in registry.studies().items()}


def written_in(study: str) -> str:
    """Return the name by which messages refer to a study's settings.

    The name is `(shipped) NAME`, or the YAML file of an outside study.
    """
    outside = registry.added().get(study)
    return str(outside.yaml) if outside else f"(shipped) {study}"


@functools.cache
def _study_file(path: Path) -> StudyFile:
    return validate(StudyFile, read_yaml(path), where=str(path))


def merge(base: Raw, over: Mapping[str, Any]) -> Raw:
    """Merge `over` into `base` in place, key by key, and return `base`.

    A section with a different `kind` replaces the old section completely, except that a plan is always merged. A
    setting in `over` removes the setting in `base` that excludes it (`EXCLUSIVE`).
    """
    for key, value in over.items():
        old = base.get(key)
        if not isinstance(value, Mapping):
            base[key] = copy.deepcopy(value)
        elif isinstance(old, dict) and (
            {"runs", "study"} & old.keys() or value.get("kind", kind := old.get("kind", KINDS.get(key))) == kind
        ):
            merge(old, value)
        else:
            base[key] = copy.deepcopy(dict(value))
    for one, other in [*EXCLUSIVE, *((other, one) for one, other in EXCLUSIVE)]:
        # If the value is a mapping, `one` is not the setting of that name, but for example the name of a run.
        if not isinstance(over.get(one), Mapping | None) and other not in over:
            base.pop(other, None)
    return base


def report_page(layers: Iterable[Mapping[str, Any]]) -> str:
    """Return the path of the targets' page, relative to the results folder.

    Later `layers` override earlier layers. `report/index.html` is the page of the targets of the layer that sets the
    results folder. If a later layer changes the targets, the page is named after the new targets.
    """
    folder: str | None = None
    targets: list[str] = []
    own: list[str] = []
    for layer in layers:
        targets = layer.get("targets", targets)
        if layer.get("results", folder) != folder or not own:
            folder, own = layer.get("results", folder), targets
    if targets == own:
        return "report/index.html"
    name = "+".join(targets).replace("*", "all")  # no plan has a plus in its name
    if len(name) > 60 or name == "index":
        name = f"{targets[0]}+{len(targets) - 1}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return f"report/{name}.html"


def with_title(configuration: Configuration, layers: Iterable[Mapping[str, Any]]) -> Configuration:
    """Return the configuration with the title of the targets' page.

    A title counts if it is in the layer that sets the targets, or in a later layer. Without such a title, the page
    gets the titles of the first three targets.
    """
    title, targets = None, None
    for layer in layers:
        if layer.get("targets", targets) != targets:
            targets, title = layer["targets"], None
        title = (layer.get("report") or {}).get("title", title)
    workflow = configuration.workflow
    names = [workflow.plans[name].title or name if name in workflow.plans else name for name in workflow.targets]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    report = workflow.report.model_copy(update={"title": title or f"{', '.join(names[:3])}{more}"})
    return replace(configuration, workflow=workflow.model_copy(update={"report": report}))


def _plain(value: Any, where: str = "configuration") -> Any:
    """Copy nested mappings to dicts and sequences to lists.

    Refuse NUL characters. Replace the string `null`, which `--config` passes for null, by None.
    """
    if any(isinstance(text, str) and "\0" in text for text in (value if isinstance(value, Mapping) else [value])):
        raise UserError(f"{where}: a NUL character; remove it")
    if isinstance(value, Mapping):
        return {key: _plain(inner, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, where) for inner in value]
    return None if value == "null" else value


class _Resolver:
    """Resolver of runs, which resolves a run on demand because `use` and `from` may refer to any plan."""

    def __init__(self, workflow: Workflow, files: dict[str, StudyFile]) -> None:
        self.workflow, self.files = workflow, files
        self._layers: dict[RunKey, tuple[RunKey, list[Layer]]] = {}
        self._runs: dict[RunKey, Run] = {}
        self._open: list[RunKey] = []
        self._skipped_runs: dict[str, dict[str, str]] = {}
        site, contained = workflow.site, workflow.site.engine != "none"
        #: Number of GPUs of this machine, for the check in `_gpus`; 0 (no check) if runs may start on other nodes.
        self._here = 0 if site.scheduler or site.start else gpus()
        #: Requirements that the site meets; None: those that this machine meets. Other nodes without containers use
        #: this Python, so packages that `provides` names must be installed here.
        self._provided = (
            [need for need in site.provides if contained or has_package(need)]
            if site.provides is not None and (contained or site.scheduler or site.start)
            else None
        )

    def run(self, plan: str, name: str) -> ResolvedRun:
        owner, layers = self.layers(plan, name)
        if owner not in self._runs:
            study = self.workflow.plans[owner[0]].study
            merged = functools.reduce(merge, (layer for _, layer in layers), {"study": study})
            run = validate(run_class(study), merged, layers=layers)
            self._check_dataset(run, f"plans.{owner[0]}.runs.{owner[1]}", layers)
            self._runs[owner] = run
        return ResolvedRun(*owner, self._runs[owner])

    def skipped_runs(self, plan: str) -> dict[str, str]:
        """Return the runs of a plan that this machine does not support, with the requirements that are not met."""
        if plan not in self._skipped_runs:
            self._skipped_runs[plan] = {}  # ends the recursion in a circle of `use`, which `layers` reports
            for name in self.workflow.plans[plan].runs:
                parts = [part for _, part in self.workflow.plans[plan].parts(name) if isinstance(part, dict)]
                written = {key: value for part in parts for key, value in part.items() if key in ("needs", "use")}
                needs = written.get("needs", [])
                if not isinstance(needs, list) or any(need not in [*NEEDS] for need in needs):
                    what = f"expected a list of {', '.join(NEEDS)}, got {cut(repr(needs))}"
                    raise UserError(f"configuration: plans.{plan}.runs.{name}.needs: {what}")
                lacking = missing(needs, self._provided)
                other, _, run = str(written.get("use", "")).partition(".")
                if other in self.workflow.plans and run in (there := self.skipped_runs(other)):
                    lacking.append(there[run])
                if lacking := lacking or self._gpus(plan, name):
                    self._skipped_runs[plan][name] = " and ".join(lacking)
        return self._skipped_runs[plan]

    def _gpus(self, plan: str, name: str) -> list[str]:
        """Return a list of one text, the run's number of GPUs, if this machine has fewer GPUs.

        The list is empty on a machine with enough GPUs or without any GPU, or if runs start on other nodes.
        """
        if not self._here:
            return []
        sections = [layer["geometry"] for _, layer in self.layers(plan, name)[1] if "geometry" in layer]
        geometry = functools.reduce(merge, filter(lambda section: isinstance(section, dict), sections), Raw())
        asked = str(geometry.get("gpus_per_node", 1))  # `--config` passes a string
        return [f"{asked} GPUs (it has {self._here})"] if asked.isdecimal() and int(asked) > self._here else []

    def layers(self, plan: str, name: str) -> tuple[RunKey, list[Layer]]:
        """Return the plan and name of the run that owns the results, and the layers of the run's settings."""
        key = (plan, name)
        self.skipped_runs(plan)  # called before `key` is in `_open`, because `skipped_runs` may call `layers` again
        if key in self._open:
            chain = " -> ".join(".".join(step) for step in [*self._open, key])
            raise UserError(f"configuration: plans: 'use' and 'from' form a circle: {chain}; remove one of these keys")
        if key not in self._layers:
            self._open.append(key)
            self._layers[key] = self._collect(plan, name)
            self._open.pop()
        return self._layers[key]

    def _collect(self, plan_name: str, name: str) -> tuple[RunKey, list[Layer]]:
        plan, here = self.workflow.plans[plan_name], f"plans.{plan_name}"
        if plan.study not in self.files:
            raise UserError(
                f"configuration: {here}.study: {unknown('study', plan.study, self.files)}; add `studies: "
                f"{{{plan.study}: PATH}}`, or name the file with this entry in a further --configfile"
            )
        written = [(f"{here}.{key}", self._settings(f"{here}.{key}", settings)) for key, settings in plan.parts(name)]
        own = [(where, {key: value for key, value in part.items() if key != "needs"}) for where, part in written]
        where, last = own[-1]
        if "use" in last:
            if len(last) > 1:
                raise UserError(f"configuration: {where}: 'use' excludes all other keys; remove them")
            return self.layers(*self._reference(f"{where}.use", last["use"], plan))
        left_out = self.skipped_runs(plan_name)  # a skipped rung does not affect the later rungs
        before = [run for run in plan.runs if run == name or run not in left_out]
        before = before[: before.index(name)] if plan.kind == "ladder" else []
        layers = self.layers(plan_name, before[-1])[1] if before else self._base(plan_name, plan)
        inherited = [(path, {key: value for key, value in layer.items() if key != "label"}) for path, layer in layers]
        return (plan_name, name), [*inherited, *own]

    def _base(self, plan_name: str, plan: Plan) -> list[Layer]:
        here = f"plans.{plan_name}"
        if plan.from_:
            layers = self.layers(*self._reference(f"{here}.from", plan.from_, plan))[1]
        else:
            user = self._settings(f"studies.{plan.study}", self.workflow.studies.get(plan.study, {}))
            layers = [
                (f"{written_in(plan.study)}: settings", self.files[plan.study].settings),
                (f"studies.{plan.study}", user),
            ]
        if plan.kind in ("sweep", "convergence"):  # a run that diverges must not stop the other runs
            layers = [*layers, (f"{here}.kind", {"training": {"on_divergence": "stop"}})]
        return [*layers, (f"{here}.settings", self._settings(f"{here}.settings", plan.settings))]

    def check_settings(self, name: str, plan: Plan, resolved: Mapping[str, ResolvedRun]) -> None:
        """Refuse a training without averaged gradients, plan settings that no run uses, and misuse of programs.

        Misuse means that a run's stages or settings do not fit its external program, or that a run without a program
        has `tune.values`.
        """
        for run, found in resolved.items():
            if "train" in plan.stages(run) and not found.run.averages:
                raise UserError(
                    f"configuration: plans.{name}.runs.{run}.parallel.sync: false: without averaged gradients every "
                    f"process would train a different model; remove train from plans.{name}.measure, or list only the "
                    f"other runs in plans.{name}.only.train"
                )
            if program := found.run.program:
                layers = self.layers(found.plan, found.name)[1] if registry.study(plan.study).programs else []
                # In a study with a model, settings describe the program's work, and need not be in its command.
                own = [(where, layer) for where, layer in layers if not where.startswith(written_in(plan.study))]
                if wrong := program.problem(found.run, name, run, self.workflow, own):
                    raise UserError(f"configuration: {wrong}")
            elif found.run.tune.values:
                raise UserError(
                    f"configuration: plans.{name}.runs.{run}.tune.values: this key is only for external programs; "
                    "remove the key"
                )
        where = f"plans.{name}.settings"
        if plan.settings and all(where not in dict(self.layers(name, run)[1]) for run in plan.runs):
            used = next(iter(plan.runs.values()))["use"]
            raise UserError(
                f"configuration: {where}: no run uses these settings, because all runs of the plan belong to other "
                f"plans or are based on {used}; change plans.{used.partition('.')[0]}, or write plans.{name}.from: "
                f"{used} and a run with another name"
            )

    def _reference(self, where: str, text: Any, plan: Plan) -> RunKey:
        target, _, run = str(text).partition(".")
        other, what = self.workflow.plans.get(target), ""
        if other is None:
            what = f"{unknown('plan', target, self.workflow.plans)}; expected the form plan.run"
        elif run not in other.runs:
            what = unknown(f"run of plan {target}", run, other.runs)
        elif other.halves and where.endswith(".use"):
            what = f"{text} is a trial of successive halving, trained rung by rung; use the key 'from' instead"
        elif other.study != plan.study:
            what = (
                f"{text} belongs to study {other.study}, but this plan belongs to {plan.study}; use a run of "
                f"{plan.study}"
            )
        if what:
            raise UserError(f"configuration: {where}: {what}")
        return target, run

    @staticmethod
    def _settings(where: str, value: Any) -> Raw:
        value = {} if value is None else value
        if not isinstance(value, dict):
            raise UserError(f"configuration: {where}: expected settings (keys and values), got {cut(repr(value))}")
        if "study" in value:
            raise UserError(f"configuration: {where}.study: a plan has one study; set the key `study` of the plan")
        return value

    def _check_dataset(self, run: Run, where: str, layers: list[Layer]) -> None:
        """Refuse a run that does not fit its dataset.

        The message names the layer of the key at fault.
        """
        dataset, study, key, what = self.workflow.datasets.get(run.dataset), registry.study(run.study), "dataset", ""
        if dataset is None:
            what = unknown("dataset", run.dataset, self.workflow.datasets)
        elif dataset.kind != study.dataset:
            what = f"'{run.dataset}' is of kind {dataset.kind}, but study {run.study} needs kind {study.dataset}"
        elif grid := registry.kind(dataset.kind).grid(dataset):
            try:
                study.check_grid(run, grid)
            except Refused as error:
                key, _, what = str(error).partition(" ")
        if what:
            prefix = next((path for path, layer in reversed(layers) if holds(layer, tuple(key.split(".")))), where)
            raise UserError(f"configuration: {prefix}.{key}: {what}")
