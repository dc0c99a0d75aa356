# What the rules share: the validated configuration, and functions from wildcards to files and parameters.
#
# Every job's parameters are one dict, `stage`: the SHA-256 of the sources that the stage reaches, and the
# settings that it depends on. Snakemake compares parameters as a set of values, so one dict is compared as
# a whole; imported modules and configuration read inside a stage it would not see at all.
import json
import os
import sys
from pathlib import Path

from dlscale.data import parts
from dlscale.preflight import cost
from dlscale.config import resolve as configuration
from dlscale.launch import image
from dlscale.launch import launcher
from dlscale.launch import slurm
from dlscale.core import stages
from dlscale.core.errors import UserError
from dlscale.core.fingerprint import ROOT, fingerprint
from dlscale.config.dataset import Era5Prepared
from dlscale.config.run import ThroughputRun, TrainRun
from dlscale.core.settings import read_yaml

NAME = r"[A-Za-z0-9][A-Za-z0-9_-]*"


def site_name():
    """The profile's site: among its default resources, which alone reach the jobs that Snakemake starts elsewhere."""
    found = (workflow.resource_settings.default_resources or {}).get("site")
    text = getattr(found, "raw", found)
    return str(text).strip("'\"") if text else None


def user_configuration():
    """The profile's site, config.yaml, then --configfile, then --config; another `kind` replaces a section."""
    settings = workflow.config_settings
    raw = configuration.site_settings(site_name(), f"{workflow.basedir}/profiles")
    for path in [*([] if settings.replace_workflow_config else ["config.yaml"]), *settings.configfiles]:
        configuration.merge(raw, read_yaml(path))
    return configuration.merge(raw, settings.config)


try:
    CONFIG = configuration.load(user_configuration())
except UserError as error:
    # The message alone: Snakemake would add the places in its files where the exception passed.
    print(error, file=sys.stderr)
    sys.exit(2)

NAMED = {word.removeprefix("plan_") for word in sys.argv if word.startswith("plan_")} & set(CONFIG.plans)
ASKED_PLANS = NAMED or CONFIG.workflow.targets
# Once: jobs that Snakemake starts as processes of their own read this file, too.
if workflow.is_main_process:
    for plan in ASKED_PLANS:
        for run, lacking in CONFIG.left_out[plan].items():
            print(f"{plan}.{run} is left out: this machine lacks {lacking}.", file=sys.stderr)

RESULTS = CONFIG.workflow.results
STUDIES = {}
for plan in CONFIG.workflow.targets:
    STUDIES.setdefault(CONFIG.workflow.plans[plan].study, []).append(plan)


def exactly(names):
    """A regular expression of these names and no others; of none it matches nothing."""
    return "|".join(names) or "(?!)"


FETCHING = [name for name, dataset in CONFIG.workflow.datasets.items() if parts.fetched(dataset)]
FETCHED = exactly(FETCHING)
SIMULATED = exactly(name for name in CONFIG.workflow.datasets if name not in FETCHING)


# ---- from wildcards to settings --------------------------------------------------------------------


def dataset_of(wildcards):
    return CONFIG.workflow.datasets[wildcards.dataset]


def run_of(wildcards):
    return CONFIG.plans[wildcards.plan][wildcards.run].run


def part_of(wildcards):
    return parts.part(dataset_of(wildcards), f"{wildcards.split}/{wildcards.part}")


def stage_params(stage, subject, settings, files=()):
    modules = stages.modules(stage, subject)  # none: what comes from elsewhere, which no code of ours makes
    found = {"sources": fingerprint(modules, files), "settings": settings}
    return {**found, "image": IMAGE} if IMAGE and modules else found


# ---- data ------------------------------------------------------------------------------------------


def raw_path(dataset, raw):
    """Where a raw file lies: in the dataset's source folder if it is acquired."""
    return f"{RESULTS}/data/{dataset}/source/{raw.name}" if raw.acquired else raw.origin


def part_sources(wildcards):
    return [raw_path(wildcards.dataset, raw) for raw in part_of(wildcards).raws]


def part_pieces(wildcards):
    folder = f"{RESULTS}/data/{wildcards.dataset}/pieces/{wildcards.split}/{wildcards.part}"
    return [f"{folder}-{piece}.h5" for piece in range(dataset_of(wildcards).pieces)]


def data_files(name):
    """All files that hold a dataset's samples."""
    dataset = CONFIG.workflow.datasets[name]
    if isinstance(dataset.source, Era5Prepared):
        return parts.prepared_files(dataset.source)
    if parts.prepared(dataset):
        return [raw_path(name, part.raws[0]) for part in parts.parts(dataset)]
    return [f"{RESULTS}/data/{name}/{part.split}/{part.name}.h5" for part in parts.parts(dataset)]


def dataset_files(wildcards):
    return data_files(wildcards.dataset)


def prepared_sources(wildcards, input):
    """Arguments that name a prepared dataset's files."""
    dataset = dataset_of(wildcards)
    return ["--source", *input.files] if parts.prepared(dataset) else []


def dataset_settings(wildcards, input):
    """A dataset's settings as its stages read them. Taking `input` keeps them from making a stage run again."""
    return dataset_of(wildcards).model_dump_json()


def configure_dataset_params(wildcards):
    return stage_params("configure", None, dataset_of(wildcards).model_dump_json())


def acquire_params(wildcards):
    dataset = dataset_of(wildcards)
    raws = parts.raws(dataset)
    settings = parts.raw_settings(dataset, raws[wildcards.file]) if wildcards.file in raws else None
    return stage_params("acquire", dataset, settings)


def preprocess_params(wildcards):
    dataset = dataset_of(wildcards)
    return stage_params("preprocess", dataset, parts.part_settings(dataset, part_of(wildcards)))


def assemble_params(wildcards):
    dataset = dataset_of(wildcards)
    settings = {"storage": dataset.storage.model_dump(), "pieces": dataset.pieces}
    return stage_params("assemble", None, settings)


def describe_params(wildcards):
    dataset = dataset_of(wildcards)
    settings = {"parts": [f"{part.split}/{part.name}" for part in parts.parts(dataset)]}
    if parts.prepared(dataset):
        settings["dataset"] = dataset.model_dump(mode="json", exclude={"memory_mb"})
        # Files of others may be swapped for older ones, which modification times alone do not show.
        found = [Path(file) for file in data_files(wildcards.dataset)]
        settings["files"] = [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in found if f.exists()]
    return stage_params("describe", None, settings)


def preview_params(wildcards):
    return stage_params("preview", None, None)


# ---- runs ------------------------------------------------------------------------------------------


def run_data(wildcards):
    return data_files(run_of(wildcards).dataset)


def run_manifest(wildcards):
    return f"{RESULTS}/data/{run_of(wildcards).dataset}/manifest.json"


def configure_run_params(wildcards):
    return stage_params("configure", None, run_of(wildcards).model_dump_json())


def run_launch(wildcards, input):
    """The words that start one of a run's stages. Taking `input` keeps them from making it run again."""
    return launcher.launch(SITE, place(input), run_of(wildcards).geometry)


def train_params(wildcards):
    run = run_of(wildcards)
    return stage_params("train", run, json.dumps(run.slice(TrainRun)))


def throughput_params(wildcards):
    run = run_of(wildcards)
    return stage_params("throughput", run, json.dumps(run.slice(ThroughputRun)))


# ---- plans and reports -----------------------------------------------------------------------------


def plan_settings(name):
    """A plan as its tables and pages need it."""
    plan = CONFIG.workflow.plans[name]
    runs = [
        {"name": run, "label": resolved.run.label or run, "plan": resolved.plan, "run": resolved.name}
        for run, resolved in CONFIG.plans[name].items()
    ]
    return {
        "plan": name,
        "title": plan.title or name,
        "study": plan.study,
        "kind": plan.kind,
        "measure": plan.measure,
        "runs": runs,
        "left_out": CONFIG.left_out[name],
    }


def measured(name):
    """The files that a plan's runs leave: of training, of measuring throughput, or of both."""
    plan = CONFIG.workflow.plans[name]
    files = {
        "train": ["metrics.jsonl", "provenance.json", "prediction.png"],
        "throughput": ["throughput.json"],
    }
    return [
        f"{RESULTS}/plans/{resolved.plan}/{resolved.name}/{file}"
        for resolved in CONFIG.plans[name].values()
        for file in ["config.yaml", *(file for stage in plan.measure for file in files[stage])]
    ]


def plan_files(name):
    """Everything that a plan produces."""
    settings = [f"{RESULTS}/data/{dataset}/config.yaml" for dataset in plan_datasets([name])]
    return [*settings, *measured(name), f"{RESULTS}/plans/{name}/summary.csv"]


def plan_datasets(names):
    """Folders of the datasets that plans use, each once, in order."""
    return list(dict.fromkeys(resolved.run.dataset for name in names for resolved in CONFIG.plans[name].values()))


def configure_plan_params(wildcards):
    return stage_params("configure", None, json.dumps(plan_settings(wildcards.plan)))


def collect_inputs(wildcards):
    return measured(wildcards.plan)


def collect_params(wildcards):
    return stage_params("collect", None, plan_settings(wildcards.plan))


def report_files(names):
    return {
        "plans": [f"{RESULTS}/plans/{name}/plan.yaml" for name in names],
        "tables": [f"{RESULTS}/plans/{name}/summary.csv" for name in names],
        "runs": list(dict.fromkeys(file for name in names for file in measured(name))),
        "manifests": [f"{RESULTS}/data/{name}/manifest.json" for name in plan_datasets(names)],
        "previews": [f"{RESULTS}/data/{name}/preview.png" for name in plan_datasets(names)],
    }


def report_plan_files(wildcards):
    return report_files([wildcards.plan])


def report_folders(wildcards, input):
    """The datasets' folders."""
    return [str(Path(manifest).parent) for manifest in input.manifests]


def report_params(title, names):
    files = [*ROOT.glob("report/templates/*"), *ROOT.glob("studies/*.yaml")]
    return stage_params("report", None, {"title": title, "plans": list(names)}, files)


def report_plan_params(wildcards):
    title = CONFIG.workflow.plans[wildcards.plan].title or wildcards.plan
    return report_params(title, [wildcards.plan])
