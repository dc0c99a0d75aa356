"""From a rule's wildcards to the files, parameters, command words and resources of its job.

A job's parameters are one dict, `stage`: the SHA-256 of the sources that the stage reaches, and its settings.
Snakemake compares parameters as a set of values, so one dict is compared as a whole. A function that takes `input`,
too, is not compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from dlscale.config import program, resolve
from dlscale.config.compute import compute_settings
from dlscale.config.dataset import DatasetSettings
from dlscale.config.program import Words
from dlscale.config.records import Rung
from dlscale.config.resolve import Configuration
from dlscale.config.run import Geometry, Run
from dlscale.config.site import Site
from dlscale.core import redact, registry, urls
from dlscale.core.errors import UserError
from dlscale.core.files import read_json, sha256, stamp
from dlscale.core.fingerprint import ROOT, data_modules, fingerprint, run_modules
from dlscale.core.machine import gpus
from dlscale.core.process import LAUNCHED
from dlscale.core.stages import RUN_STAGES, STAGES
from dlscale.data import parts
from dlscale.data.kind import DatasetKind
from dlscale.launch import launcher, slurm
from dlscale.preflight import cost
from dlscale.preflight.probe import Finding, probe_raw, probe_script

#: Cores of one machine for what is timed: more than there are, so that no other job disturbs it.
ALL_CORES = 1_024
#: Folder of a run for what its program writes.
OUT = "out"
#: Wildcards of a job, by attribute.
Wildcards = Any
Params = dict[str, Any]


def exactly(names: Iterable[str]) -> str:
    """Return a regular expression of these names and no others; of none it matches nothing."""
    return "|".join(names) or "(?!)"


def decisive_settings(stage: str, run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings that make a stage run again.

    Those that only change what is learnt count for stages that see the run's `training`, and for no other.
    """
    if "training" in STAGES[stage].settings:
        return {**run, "geometry": {key: value for key, value in run["geometry"].items() if key != "memory_mb"}}
    whole = ("samples", "parallel", *STAGES[stage].settings)  # how many there are, what is tested, what is tried
    return {**compute_settings(run), **{key: run[key] for key in whole}}


@dataclass
class Jobs:
    """The jobs of one configuration on one site."""

    configuration: Configuration
    site: Site  #: With its choices made.
    page: str  #: Of all targets.
    call: Sequence[str]  #: Words that call the workflow again with this call's settings.
    own_settings: Sequence[str]  #: Of these the settings.
    is_live: bool  #: Whether the call writes a live page of the targets.
    image: str  #: The image's identity, if any.
    say: Callable[[Finding], None]  #: Prints what was found, and ends the call if nothing can be made of it.
    refuse: Callable[[object], NoReturn]
    rung_file: Callable[[str, int], str]  #: The file that says which trials come to a rung, once it is there.
    keep_going: Callable[[], bool]  #: Whether a broken dataset fails in its own jobs only.
    _looked: set[str] = field(default_factory=set)
    _broken: dict[str, str] = field(default_factory=dict)  #: Faults of datasets, by name.

    def __post_init__(self) -> None:
        workflow = self.configuration.workflow
        self.results, self.datasets, self.plans = workflow.results, workflow.datasets, self.configuration.plans
        self.packages = launcher.packages(self.site)
        #: GPUs of this machine, where it runs the jobs itself.
        self.gpus = 0 if self.site.scheduler else gpus()

    # ---- what they share -----------------------------------------------------------------------------

    def dataset(self, wildcards: Wildcards) -> DatasetSettings:
        return self.datasets[wildcards.dataset]

    def run(self, wildcards: Wildcards) -> Run:
        return self.plans[wildcards.plan][wildcards.run].run

    def params(self, modules: Sequence[str], settings: Any, files: Iterable[Path] = ()) -> Params:
        """Return what makes a job run again; without modules (a fetched file) no code of dlscale decides the result."""
        around = {"image": self.image, "packages": self.packages}
        kept = {key: value for key, value in around.items() if modules and value}
        return {"sources": fingerprint(modules, files), "settings": settings, **kept}

    def own_params(self, stage: str, settings: Any = None, files: Iterable[Path] = ()) -> Params:
        """Return the parameters of a stage that is the same for all studies and kinds of data."""
        return self.params([STAGES[stage].module], settings, files)

    def call_again(self, wildcards: Wildcards, input: Any) -> str:
        return shlex.join(self.call)

    # ---- data ----------------------------------------------------------------------------------------

    def raw_path(self, name: str, raw: Any) -> str:
        acquired = parts.acquired(self.datasets[name], raw)
        return f"{self.results}/data/{name}/source/{raw.name}" if acquired else str(raw.origin)

    def look_for_raw_files(self, name: str) -> None:
        """Say once what to do about raw files that are not there: Snakemake takes what was made of others for done."""
        if name not in self._looked and (found := probe_raw(name, self.datasets[name], Path(self.results))):
            self.say_of_data(found)
        self._looked.add(name)

    def say_of_data(self, found: Finding) -> None:
        """Print a finding about a dataset; one that nothing can be made of ends the call, unless it keeps going."""
        self.say(replace(found, status="warn") if self.keep_going() and found.status == "FAIL" else found)

    def existing(self, files: Iterable[str]) -> list[str]:
        """Return which of other people's files are inputs: a missing one would end a call that keeps going."""
        return [file for file in files if not self.keep_going() or os.access(file, os.F_OK) or self.makes(file)]

    def makes(self, file: str) -> bool:
        return Path(file).is_relative_to(self.results)

    def part(self, wildcards: Wildcards) -> Any:
        return parts.part(self.dataset(wildcards), f"{wildcards.split}/{wildcards.part}")

    def part_sources(self, wildcards: Wildcards) -> list[str]:
        self.look_for_raw_files(wildcards.dataset)
        return self.existing(self._raw_paths(wildcards))

    def _raw_paths(self, wildcards: Wildcards) -> list[str]:
        return [self.raw_path(wildcards.dataset, raw) for raw in self.part(wildcards).raws]

    def source_words(self, wildcards: Wildcards) -> list[str]:
        return ["--source", *self._raw_paths(wildcards)]

    def part_pieces(self, wildcards: Wildcards) -> list[str]:
        folder = f"{self.results}/data/{wildcards.dataset}/pieces/{wildcards.split}/{wildcards.part}"
        return [f"{folder}-{piece}.h5" for piece in range(self.dataset(wildcards).pieces)]

    def data_files(self, name: str) -> list[str]:
        return self.existing(self._data_files(name))

    def _data_files(self, name: str) -> list[str]:
        dataset = self.datasets[name]
        kind = parts.kind_of(dataset)
        if not kind.prepared(dataset):
            return [f"{self.results}/data/{name}/{part.label}.h5" for part in parts.parts(dataset)]
        self.look_for_raw_files(name)
        if raws := parts.raws(dataset).values():
            return [self.raw_path(name, raw) for raw in raws]
        try:
            return kind.prepared_files(dataset)
        except UserError:  # which was printed; its jobs report it
            return kind.origins(dataset)

    def dataset_files(self, wildcards: Wildcards) -> list[str]:
        return self.data_files(wildcards.dataset)

    def prepared_sources(self, wildcards: Wildcards) -> list[str]:
        prepared = parts.kind_of(dataset := self.dataset(wildcards)).prepared(dataset)
        return ["--source", *self._data_files(wildcards.dataset)] if prepared else []

    def dataset_settings(self, wildcards: Wildcards, input: Any) -> str:
        return self.dataset(wildcards).model_dump_json()

    def acquire_params(self, wildcards: Wildcards) -> Params:
        dataset = self.dataset(wildcards)
        kind, settings = parts.kind_of(dataset), None
        if raw := parts.raws(dataset).get(wildcards.file):
            seen = self._seen(wildcards.dataset, raw)
            settings = {**kind.raw_settings(dataset, raw), **({"files": seen} if seen else {})}
        return self.params(data_modules("acquire", dataset.kind, kind.maker(dataset)), settings)

    def _seen(self, name: str, raw: Any) -> Any:
        """Return the state of a raw file's origin, or the fault of a broken one, which its job reports."""
        dataset = self.datasets[name]
        kind = parts.kind_of(dataset)
        if type(kind).look is DatasetKind.look:
            return self._stamp(name, raw)
        try:
            return self._broken.get(name) or kind.look(dataset, raw, Path(self.raw_path(name, raw)))
        except UserError as error:
            self._broken[name] = str(error)
            self.say_of_data(Finding(f"data {name}", "FAIL", str(error)))
        return self._broken[name]

    def _stamp(self, name: str, raw: Any) -> list[int] | None:
        """Return size and time of a user's file; of a missing one those that the manifest remembers."""
        if raw.origin == "simulated" or "://" in raw.origin or self.makes(raw.origin):
            return None
        if os.access(path := Path(raw.origin), os.F_OK) and path.is_file():
            return list(stamp(path))
        manifest = Path(f"{self.results}/data/{name}/manifest.json")
        known = read_json(manifest) if manifest.is_file() else {}
        found: list[int] | None = known.get("provenance", {}).get("raws", {}).get(raw.origin)
        return found

    def preprocess_params(self, wildcards: Wildcards) -> Params:
        dataset = self.dataset(wildcards)
        part = self.part(wildcards)
        settings = parts.kind_of(dataset).part_settings(dataset, part)
        # Files of users may be swapped for older ones, which modification times alone do not show.
        raws = [raw for raw in part.raws if not parts.acquired(dataset, raw)]
        if files := {raw.origin: seen for raw in raws if (seen := self._stamp(wildcards.dataset, raw))}:
            settings = {**settings, "files": files}
        return self.params(data_modules("preprocess", dataset.kind), settings)

    def assemble_params(self, wildcards: Wildcards) -> Params:
        dataset = self.dataset(wildcards)
        return self.own_params("assemble", {"storage": dataset.storage.model_dump(), "pieces": dataset.pieces})

    def describe_params(self, wildcards: Wildcards) -> Params:
        dataset = self.dataset(wildcards)
        settings: Params = {"parts": [part.label for part in parts.parts(dataset)]}
        if parts.kind_of(dataset).prepared(dataset):
            settings["dataset"] = dataset.model_dump(mode="json")
            # Files of others may be swapped for older ones, which modification times alone do not show.
            files = [Path(file) for file in self.data_files(wildcards.dataset)]
            settings["files"] = [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in files if f.exists()]
        return self.params(data_modules("describe", dataset.kind), settings)

    def preview_params(self, wildcards: Wildcards) -> Params:
        return self.params(data_modules("preview", self.dataset(wildcards).kind), None)

    # ---- runs ----------------------------------------------------------------------------------------

    def _samples(self, dataset: str) -> list[str]:
        """Return a dataset's files, and its statistics, by which loaders normalise."""
        return [*self.data_files(dataset), f"{self.results}/data/{dataset}/stats"]

    def run_data(self, wildcards: Wildcards) -> list[str]:
        return self._samples(self.run(wildcards).dataset)

    def run_manifest(self, wildcards: Wildcards) -> str:
        return f"{self.results}/data/{self.run(wildcards).dataset}/manifest.json"

    def run_weights(self, wildcards: Wildcards) -> list[str]:
        """Return the file of weights that a run starts from; that of another run is made first."""
        weights: str | None = self.run(wildcards).training.weights
        run = f"{wildcards.plan}.{wildcards.run}"
        remedy = f"name others in plans.{wildcards.plan}.runs.{wildcards.run}.training.weights"
        if weights and Path(weights).is_relative_to(f"{self.results}/plans"):
            plan, name, *_ = [*Path(weights).relative_to(f"{self.results}/plans").parts, "", ""]
            if name not in self.plans.get(plan, {}) and run not in self._looked:
                what = f"{weights}: no run of this configuration makes it"
                self.say(Finding(f"run {run}", "FAIL", what, f"copy it out of {self.results}/plans, or {remedy}"))
            # Those of the best epoch are no declared output, as not every run keeps them.
            weights = re.sub(r"model_best\.pt$", "model.pt", weights)
        elif weights and run not in self._looked and not Path(weights).exists():
            self.say(Finding(f"run {run}", "FAIL", f"{weights}: no such file or folder", remedy))
        self._looked.add(run)
        return [weights] if weights else []

    def run_params(self, stage: str) -> Callable[[Wildcards], Params]:
        return lambda wildcards: self._run_params(stage, self.run(wildcards), ())

    def _run_params(self, stage: str, run: Run, loaders: Iterable[str]) -> Params:
        if run.program and not STAGES[stage].program:
            self.refuse(
                f"{stage}: a run of a program has no such stage; ask for the files of "
                f"{', '.join(name for name, row in STAGES.items() if row.program)}, or for its plan"
            )
        if run.program:  # what it takes from other settings is in its command
            seen = run.slice(stage)
            own = ("program", "geometry", "dataset", *STAGES[stage].settings)
            settings = json.dumps({key: seen[key] for key in own})
            # Files may be swapped for older ones, which modification times alone do not show.
            digests = {file: sha256(file) for file in self._named_files(run)}
            return self.params([str(STAGES[stage].program), program.__name__], settings) | {"files": digests}
        modules = run_modules(stage, run.study, *run.loaders(stage), *loaders)
        return self.params(modules, json.dumps(decisive_settings(stage, run.slice(stage))))

    # ---- programs ------------------------------------------------------------------------------------

    def _placed(self, run: Run) -> Run:
        """Return a run whose program's folder is where its revision is fetched to."""
        if not (run.program and run.program.repository):
            return run
        folder = Path(self.checkout_folder(str(run.program.revision)), run.program.folder)
        return run.model_copy(update={"program": run.program.model_copy(update={"folder": str(folder)})})

    def checkout_folder(self, revision: str) -> str:
        return f"{self.results}/programs/{revision}"

    def run_checkout(self, wildcards: Wildcards) -> list[str]:
        program = self.run(wildcards).program
        return [self.checkout_folder(str(program.revision))] if program and program.repository else []

    def checkout_repository(self, wildcards: Wildcards) -> str:
        programs = (each.run.program for runs in self.plans.values() for each in runs.values())
        return next(
            (
                str(each.repository)
                for each in programs
                if each and each.repository and each.revision == wildcards.revision
            ),
            "",
        )

    def checkout_params(self, wildcards: Wildcards) -> Params:
        return self.params([], {"repository": self.checkout_repository(wildcards), "revision": wildcards.revision})

    def checkout_launch(self, wildcards: Wildcards, input: Any) -> list[str]:
        return self._stage([*launcher.PYTHON_HERE])

    def _named_files(self, run: Run) -> list[str]:
        """Return the files that the command of a run's program names: it runs again where they change.

        Its first word is one of them if it lies in the program's folder: Python's own file is none of the program's.
        """
        if not run.program:
            return []
        words, results = Words(run.program, OUT), Path(self.results).absolute()
        first, *known = [Path(words.folder, word) for word in words.command]
        if "/" in words.command[0] and first.resolve().is_relative_to(Path(words.folder).resolve()):
            known.append(first)
        # `os.path` takes a word that is too long for a name, such as a script after `-c`, for no file.
        files = [
            file
            for file in known
            if os.path.isfile(file) and not file.absolute().is_relative_to(results)  # noqa: PTH113
        ]
        return list(dict.fromkeys(map(os.path.relpath, files)))

    def program_files(self, wildcards: Wildcards) -> list[str]:
        run, here = self.run(wildcards), f"plans.{wildcards.plan}.runs.{wildcards.run}"
        program = run.program
        if program and not program.repository and here not in self._looked and not os.access(program.folder, os.F_OK):
            remedy = f"get the program's files (git clone), or name their folder in {here}.program.folder"
            self.say(Finding(f"run {wildcards.run}", "FAIL", f"{program.folder}: no such folder", remedy))
        placed = self._placed(run).program
        contained = self.site.engine != "none" or bool(program and program.image)
        if placed and here not in self._looked:
            found = probe_script(wildcards.run, f"{here}.program.command", placed, contained)
            self.say(found) if found else None
        self._looked.add(here)
        return self._named_files(run)

    def program_folder(self, wildcards: Wildcards) -> str:
        """Return the folder `{out}` of a run's program, which stays between its tries."""
        return f"{self.results}/plans/{wildcards.plan}/{wildcards.run}/{OUT}"

    def program_sources(self, wildcards: Wildcards, input: Any) -> str:
        """Return a digest of what decides a program's results: a try goes on from those of one that had the same."""
        stage = json.dumps(self._run_params("program", self.run(wildcards), ()), sort_keys=True)
        return hashlib.sha256(stage.encode()).hexdigest()

    def tune_params(self, wildcards: Wildcards) -> Params:
        return self._run_params("tune", self.run(wildcards), ()) | {"candidates": self._candidates(wildcards)}

    def _candidates(self, wildcards: Wildcards) -> list[Any]:
        """Return the settings to try of a run's program: each its changes, and its run as the stage sees it."""
        asked = self.plans[wildcards.plan][wildcards.run].asked
        if asked is None:
            return []
        cores = slurm.cpus_per_task(self.site.scheduler, asked.geometry) if self.site.scheduler else os.cpu_count() or 1
        found = program.candidates(asked, cores)
        return [[changes, self._placed(run).slice("throughput")] for changes, run in found]

    def tune_candidates(self, wildcards: Wildcards, input: Any) -> list[str]:
        found = self._candidates(wildcards)
        return ["--candidates", json.dumps(found)] if found else []

    def program_start(self, wildcards: Wildcards, input: Any) -> list[str]:
        run = self.run(wildcards)
        return ["--start", json.dumps(self._launch_program(input, run)[1])] if run.program else []

    def run_settings(self, wildcards: Wildcards, input: Any) -> str:
        return self._placed(self.run(wildcards)).model_dump_json()

    def beside(self, wildcards: Wildcards) -> Run | None:
        """Return the run that a run is timed in turn with: the plan's first, if one process runs it."""
        plan, runs = wildcards.plan, self.plans[wildcards.plan]
        first = next((runs[name].run for name in runs if "throughput" in self.configuration.stages(plan, name)), None)
        run = self.run(wildcards)
        # How little a run and its copy differ takes ten seconds to see.
        enough = run.throughput.beside >= 10 if run is first else run.throughput.beside > 0
        alone = first is not None and all(
            (each.geometry if each.program else each.processes).world_size == 1 for each in (first, run)
        )
        contained = any(each.program and each.program.image for each in (first, run) if each)
        return first if enough and alone and not contained else None

    def throughput_params(self, wildcards: Wildcards) -> Params:
        first = self.beside(wildcards)
        run = self.run(wildcards)
        params = self._run_params("throughput", run, first.loaders("throughput") if first else ())
        if first and bool(first.program) != bool(run.program):
            params["first"] = self._run_params("throughput", first, ())["sources"]
        # Of the first run only what its steps do: another learning rate of it is no reason to time all of a plan again.
        return params | ({"beside": json.dumps(compute_settings(first.model_dump(mode="json")))} if first else {})

    def first_data(self, wildcards: Wildcards) -> list[str]:
        """Return manifest and data of the run that a run is timed with, where they are not its own."""
        first = self.beside(wildcards)
        if not first or first.dataset == self.run(wildcards).dataset:
            return []
        return [f"{self.results}/data/{first.dataset}/manifest.json", *self._samples(first.dataset)]

    def throughput_beside(self, wildcards: Wildcards, input: Any) -> list[str]:
        first = self.beside(wildcards)
        if not first:
            return []
        manifest = ["--beside-manifest", input.first[0]] if input.first else []
        return ["--beside", json.dumps(self._placed(first).slice("throughput")), *manifest]

    def train_threads(self, wildcards: Wildcards) -> int:
        """Return the cores of one machine that a training takes: all, unless it says how many, and needs no GPU."""
        return cost.threads("train", self.run(wildcards), bool(self.site.scheduler or self.gpus)) or ALL_CORES

    def checkpoint_sources(self, wildcards: Wildcards, input: Any) -> str:
        return fingerprint(run_modules("train", self.run(wildcards).study))

    def checkpoint_folder(self, wildcards: Wildcards) -> str:
        """Return where a run saves what it goes on from; the rungs of a trial share it."""
        resolved = self.plans[wildcards.plan][wildcards.run]
        return f"{self.results}/checkpoints/{wildcards.plan}/{resolved.trial or wildcards.run}"

    # ---- plans and pages -----------------------------------------------------------------------------

    def plan_settings(self, name: str) -> Params:
        plan = self.configuration.workflow.plans[name]
        study = resolve.study_files()[plan.study]
        runs = [
            {
                "name": resolved.trial or run,
                "label": self.configuration.label(name, run),
                "plan": resolved.plan,
                "run": resolved.name,
                "measure": self.configuration.stages(name, run),
                "repeats": [each.name for each in self.plans[name].values() if each.repeats == run],
            }
            for run, resolved in self.plans[name].items()
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
            "left_out": self.configuration.left_out[name],
            "grams_per_kwh": self.configuration.workflow.site.grams_per_kwh,
            "published": [figure.model_dump(exclude_unset=True) for figure in study.published],
        }

    def sweep_settings(self, name: str) -> Params:
        sweep: Any = self.configuration.workflow.plans[name].sweep
        rungs = {each.rung: [each.run.training.stop_after, each.rung_size] for each in self.plans[name].values()}
        return {
            "method": sweep.method,
            "metric": sweep.metric,
            "trials": sweep.runs,
            "rungs": [*rungs.values()] if sweep.method == "halving" else [],
        }

    def promoted(self, name: str, rung: int) -> list[str]:
        return Rung.read(self.rung_file(name, rung)).trials

    def promote_inputs(self, wildcards: Wildcards) -> list[str]:
        name, before = wildcards.plan, int(wildcards.rung) - 1
        best = self.promoted(name, before) if before else []
        runs = [
            run for run, each in self.plans[name].items() if each.rung == before and (not before or each.trial in best)
        ]
        return [f"{self.results}/plans/{name}/{run}/{file}" for run in runs for file in STAGES["train"].outputs]

    def promote_params(self, wildcards: Wildcards) -> Params:
        return self.own_params("promote", self.sweep_settings(wildcards.plan))

    def measured(self, name: str) -> list[str]:
        """Return the files that a plan's runs leave, of all the stages that they go through."""
        return [
            f"{self.results}/plans/{resolved.plan}/{resolved.name}/{file}"
            for run, resolved in self.plans[name].items()
            if not resolved.rung or resolved.trial in self.promoted(name, resolved.rung)
            for stage in self.configuration.stages(name, run)
            for file in STAGES[stage].outputs
        ]

    def _known(self, name: str) -> list[str]:
        # Of successive halving none are known, for the table asks for its runs.
        return [] if self.configuration.workflow.plans[name].halves else self.measured(name)

    def plan_files(self, name: str) -> list[str]:
        return [*self._known(name), f"{self.results}/plans/{name}/summary.csv"]

    def shown_files(self, name: str, page: bool) -> list[str]:
        """Return what Snakemake's own report shows of a plan; `page`: whether its own page is asked for."""
        folder = f"{self.results}/plans/{name}"
        pictures = [file for file in self._known(name) if Path(file).name == "prediction.png"]
        return [*pictures, f"{folder}/summary.csv", *([f"{folder}/report.html"] if page else [])]

    def plan_datasets(self, names: Iterable[str]) -> list[str]:
        return list(dict.fromkeys(resolved.run.dataset for name in names for resolved in self.plans[name].values()))

    def configure_params(self, wildcards: Wildcards) -> Params:
        return self.own_params("configure", json.dumps(self.plan_settings(wildcards.plan)))

    def collect_inputs(self, wildcards: Wildcards) -> list[str]:
        return self.measured(wildcards.plan)

    def collect_params(self, wildcards: Wildcards) -> Params:
        return self.own_params("collect", self.plan_settings(wildcards.plan))

    def sooner(self, wildcards: Wildcards) -> float:
        return 1 / len(self.plans[wildcards.plan])  # plans of few runs come first

    def live_page(self, wildcards: Wildcards, input: Any) -> list[str]:
        workflow = self.configuration.workflow
        files = self.report_files(workflow.targets)
        page = {
            "title": workflow.report.title,
            "plans": files["plans"],
            "datasets": [str(Path(manifest).parent) for manifest in files["manifests"]],
            "references": files["references"],
            "call": self.call_again(wildcards, input),
            "out": self.page,
        }
        return ["--page", json.dumps(page)] if self.is_live else []

    def report_files(self, names: Sequence[str]) -> dict[str, list[str]]:
        datasets = self.plan_datasets(names)
        # Hidden ones are half of an import that is under way, or was killed.
        references = Path(self.results).glob("references/[!.]*/reference.json")
        return {
            "plans": [f"{self.results}/plans/{name}/plan.yaml" for name in names],
            "tables": [f"{self.results}/plans/{name}/summary.csv" for name in names],
            "manifests": [f"{self.results}/data/{name}/manifest.json" for name in datasets],
            "previews": [f"{self.results}/data/{name}/preview.png" for name in datasets],
            "references": sorted(map(str, references)),
        }

    def report_plan_files(self, wildcards: Wildcards) -> dict[str, list[str]]:
        return self.report_files([wildcards.plan])

    def report_runs(self, wildcards: Wildcards) -> list[str]:
        return list(dict.fromkeys(file for name in self.configuration.workflow.targets for file in self.measured(name)))

    def report_folders(self, wildcards: Wildcards, input: Any) -> list[str]:
        return [str(Path(manifest).parent) for manifest in input.manifests]

    def report_params(self, title: str, names: Iterable[str]) -> Params:
        return self.own_params("report", {"title": title, "plans": list(names)}, ROOT.glob("report/templates/*"))

    def report_plan_params(self, wildcards: Wildcards) -> Params:
        title = self.configuration.workflow.plans[wildcards.plan].title or wildcards.plan
        return self.report_params(title, [wildcards.plan])

    # ---- commands and resources ----------------------------------------------------------------------

    def _place(self, paths: Iterable[str]) -> launcher.Place:
        """Return the folders that a container takes over, for a stage that reads `paths`."""
        folder, results = str(Path.cwd()), Path(self.results).absolute()
        # Commands name it as it was typed, though a link may be on its way; that of a link in the folder is followed.
        results = results.resolve() if results.is_relative_to(folder) else results
        sources = launcher.sources(self.site)
        return launcher.Place(
            folder=folder,
            sources=str(sources),
            uid=os.getuid(),
            gid=os.getgid(),
            data=launcher.outside([*paths, sources / ROOT.name, *registry.roots()], folder, results),
            results=None if results.is_relative_to(folder) else str(results),
        )

    def launch(self, paths: Iterable[str], geometry: Geometry | None = None, secrets: bool = False) -> list[str]:
        """Return the words that start a stage that reads `paths`: in a container it sees these, here and there alike.

        Addresses with secrets, and secrets of programs, are kept from it unless `secrets`.
        """
        try:
            return self._stage(launcher.launch(self.site, self._place(paths), geometry), secrets)
        except UserError as error:
            self.refuse(error)

    def _stage(self, words: list[str], secrets: bool = False) -> list[str]:
        """Return the words that start a stage, with the studies that it knows, and without secrets.

        Variables of the calling shell that number processes, such as RANK, are withheld: a starter sets its own.
        """
        names = [urls.VARIABLE] if self.configuration.secrets and not secrets else []
        names += [name for name in LAUNCHED if name in os.environ]
        withheld = ["env", *(word for name in names for word in ("-u", name))] if names else []
        return [*withheld, *words, *(f"--study={name}={study.file}" for name, study in registry.added().items())]

    def _launch_program(self, paths: Iterable[str], run: Run, secrets: bool = False) -> tuple[list[str], list[str]]:
        """Return the words that start the stage of a run's program, and those that it puts before the command."""
        placed = self._placed(run)
        assert placed.program
        place = self._place([*paths, placed.program.folder])
        try:
            outer, inner = launcher.launch_program(self.site, place, placed)
        except UserError as error:
            self.refuse(error)
        return self._stage(outer, secrets), inner

    def stage_launch(self, wildcards: Wildcards, input: Any) -> list[str]:
        return self.launch(input)

    def run_launch(self, wildcards: Wildcards, input: Any) -> list[str]:
        run = self.run(wildcards)
        programs = [each.program.model_dump() for each in (run, self.beside(wildcards)) if each and each.program]
        if not run.program:
            return self.launch(input, run.processes, redact.has_marker(programs))
        return self._launch_program(input, run, redact.has_marker(programs))[0]

    def acquire_launch(self, wildcards: Wildcards, input: Any) -> list[str]:
        dataset = self.dataset(wildcards)
        raw = parts.raws(dataset).get(wildcards.file)
        there = [raw.origin] if raw and Path(raw.origin).exists() else []
        return self.launch(there, secrets=parts.fetched(dataset))

    def run_device(self, wildcards: Wildcards, input: Any) -> str:
        return launcher.device(self.configuration.workflow.site)

    def resources(self, stage: str) -> dict[str, Callable[..., Any]]:
        """Return functions from wildcards to the resources of a run's stage, or of `data` stages, by name."""

        def resource(name: str) -> Callable[..., Any]:
            def asked(wildcards: Wildcards, attempt: int) -> Any:
                run = self.run(wildcards) if stage in RUN_STAGES else None
                if run:
                    work = cost.run_work(self.configuration, wildcards.plan, wildcards.run, stage)
                else:
                    work = cost.data_work(self.configuration, wildcards.dataset, 1)
                assert self.site.scheduler
                # A time limit is longer at each attempt; None is no resource: the executor asks which are there.
                minutes = cost.minutes(work, Path(self.results), self.site.scheduler) if name == "runtime" else None
                geometry, processes = (run.geometry, run.processes) if run else (None, None)
                limit = minutes and minutes * attempt
                return slurm.request(self.site.scheduler, stage, geometry, limit, processes).get(name)

            return asked

        return {name: resource(name) for name in (slurm.RESOURCES if self.site.scheduler else ())}
