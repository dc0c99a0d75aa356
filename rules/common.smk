# What the rules share: the validated configuration, and functions from wildcards to files and parameters.
#
# Every job's parameters are one dict, `stage`: the SHA-256 of the sources that the stage reaches, and the
# settings that it depends on. Snakemake compares parameters as a set of values, so one dict is compared as
# a whole; imported modules and configuration read inside a stage it would not see at all.
import functools
import json
import os
import shlex
import sys
from pathlib import Path

from dlscale.config import resolve
from dlscale.config.compute import compute_settings, decisive_settings
from dlscale.core import registry, urls
from dlscale.core.errors import UserError
from dlscale.core.fingerprint import ROOT, data_modules, fingerprint, remember, run_modules
from dlscale.core.machine import gpus
from dlscale.config.records import Rung
from dlscale.core.settings import read_yaml
from dlscale.core.stages import STAGES
from dlscale.data import parts
from dlscale.launch import image, launcher, slurm
from dlscale.preflight import cost, doctor
from dlscale.preflight.data import probe_kept, probe_raw

NAME = r"[A-Za-z0-9][A-Za-z0-9_-]*"

remember(Path(".snakemake/parsed.json"))


def layers():
    """The user's configuration: config.yaml, then --configfile, then --config."""
    settings = workflow.config_settings
    if urls.has_secret(settings.config):
        raise UserError(
            "--config: an address with a login: everyone can read a command line, and Snakemake logs it; "
            "write it into a file, and name that with --configfile"
        )
    files = [*([] if settings.replace_workflow_config else ["config.yaml"]), *settings.configfiles]
    return [*map(read_yaml, files), settings.config]


def user_configuration():
    """The profile's site, and the layers over it; another `kind` replaces a section."""
    site = resolve.site_settings(site_name(), f"{workflow.basedir}/profiles")
    return functools.reduce(resolve.merge, LAYERS, site)


def call_again(wildcards, input):
    """Words for a shell: a call with this one's settings. Taking `input` keeps them from making a job run."""
    site = site_name()
    return shlex.join(["snakemake", *(["--workflow-profile", f"profiles/{site}"] if site else []), *own_settings()])


def call_with_files(wildcards, input):
    """The same, up to further files of settings."""
    call = call_again(wildcards, input)
    return call if "--configfile" in own_settings() else f"{call} --configfile"


def own_settings():
    """Words of a call that give it this call's settings; files of settings are the last of them."""
    settings = workflow.config_settings
    words = ["--replace-workflow-config"] if settings.replace_workflow_config else []
    if settings.config:
        words += ["--config", *(f"{key}={json.dumps(value)}" for key, value in settings.config.items())]
    files = [os.path.relpath(path) for path in settings.configfiles]
    return [*words, *(["--configfile", *files] if files else [])]


def refuse(message):
    """Say what a user did wrong, and end. The message alone: Snakemake would add where the exception passed."""
    print(message, file=sys.stderr)
    sys.exit(2)


def say(finding):
    """Print what was found, and end if nothing can be made of it; a job's own process leaves both to its stage."""
    (line,) = doctor.lines([finding])
    if not workflow.is_main_process:
        return
    if finding.status == "FAIL" and not REPORTING:
        refuse(line)
    print(line, file=sys.stderr)


try:
    LAYERS = layers()
    CONFIG = resolve.load(user_configuration())
    urls.publish(CONFIG.secrets)
except Exception as error:
    if not (message := str(error) if isinstance(error, UserError) else registry.mistake(error)):
        raise
    refuse(message)

RESULTS = CONFIG.workflow.results
#: The page of all targets.
PAGE = f"{RESULTS}/{resolve.report_page(LAYERS)}"
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


def stage_params(modules, settings, files=()):
    """What makes a job run again; without modules (a fetched file) no code of dlscale decides the result."""
    params = {"sources": fingerprint(modules, files), "settings": settings}
    around = {"image": IMAGE, "packages": PACKAGES} if modules else {}
    return {**params, **{key: value for key, value in around.items() if value}}


def own_params(stage, settings=None, files=()):
    """Return the parameters of a stage that is the same for all studies and kinds of data."""
    return stage_params([STAGES[stage].module], settings, files)


# ---- data ------------------------------------------------------------------------------------------


def raw_path(dataset, raw):
    """Where a raw file lies: in the dataset's source folder if it is acquired."""
    acquired = parts.acquired(CONFIG.workflow.datasets[dataset], raw)
    return f"{RESULTS}/data/{dataset}/source/{raw.name}" if acquired else raw.origin


@functools.cache
def look_for_raw_files(name):
    """Say what to do about raw files that are not there, and end: Snakemake takes what was made of others for done."""
    asked = name, CONFIG.workflow.datasets[name], Path(RESULTS)
    finding = probe_raw(*asked) or probe_kept(*asked)
    if finding:
        say(finding)


def part_sources(wildcards):
    look_for_raw_files(wildcards.dataset)
    return [raw_path(wildcards.dataset, raw) for raw in part_of(wildcards).raws]


def part_pieces(wildcards):
    folder = f"{RESULTS}/data/{wildcards.dataset}/pieces/{wildcards.split}/{wildcards.part}"
    return [f"{folder}-{piece}.h5" for piece in range(dataset_of(wildcards).pieces)]


def data_files(name):
    """All files that hold a dataset's samples."""
    dataset = CONFIG.workflow.datasets[name]
    kind = parts.kind_of(dataset)
    if kind.prepared(dataset):
        look_for_raw_files(name)
        raws = parts.raws(dataset).values()
        return [raw_path(name, raw) for raw in raws] or kind.prepared_files(dataset)
    return [f"{RESULTS}/data/{name}/{part.label}.h5" for part in parts.parts(dataset)]


def dataset_files(wildcards):
    return data_files(wildcards.dataset)


def prepared_sources(wildcards, input):
    """Arguments that name a prepared dataset's files."""
    dataset = dataset_of(wildcards)
    return ["--source", *input.files] if parts.kind_of(dataset).prepared(dataset) else []


def dataset_settings(wildcards, input):
    """A dataset's settings as its stages read them. Taking `input` keeps them from making a stage run again."""
    return dataset_of(wildcards).model_dump_json()


def configure_dataset_params(wildcards):
    return own_params("configure", dataset_of(wildcards).model_dump_json())


def acquire_params(wildcards):
    dataset = dataset_of(wildcards)
    kind, raws = parts.kind_of(dataset), parts.raws(dataset)
    settings = None
    if raw := raws.get(wildcards.file):
        try:
            seen = kind.look(dataset, raw, Path(raw_path(wildcards.dataset, raw)))
        except UserError as error:
            refuse(error)
        settings = {**kind.raw_settings(dataset, raw), **({"files": seen} if seen else {})}
    return stage_params(data_modules("acquire", dataset.kind, kind.maker(dataset)), settings)


def preprocess_params(wildcards):
    dataset = dataset_of(wildcards)
    settings = parts.kind_of(dataset).part_settings(dataset, part_of(wildcards))
    return stage_params(data_modules("preprocess", dataset.kind), settings)


def assemble_params(wildcards):
    dataset = dataset_of(wildcards)
    return own_params("assemble", {"storage": dataset.storage.model_dump(), "pieces": dataset.pieces})


def describe_params(wildcards):
    dataset = dataset_of(wildcards)
    settings = {"parts": [part.label for part in parts.parts(dataset)]}
    if parts.kind_of(dataset).prepared(dataset):
        settings["dataset"] = dataset.model_dump(mode="json", exclude={"memory_mb"})
        # Files of others may be swapped for older ones, which modification times alone do not show.
        files = [Path(file) for file in data_files(wildcards.dataset)]
        settings["files"] = [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in files if f.exists()]
    return stage_params(data_modules("describe", dataset.kind), settings)


def preview_params(wildcards):
    return stage_params(data_modules("preview", dataset_of(wildcards).kind), None)


# ---- runs ------------------------------------------------------------------------------------------


def run_data(wildcards):
    """A dataset's files, and its statistics, by which loaders normalise."""
    dataset = run_of(wildcards).dataset
    return [*data_files(dataset), f"{RESULTS}/data/{dataset}/stats"]


def run_manifest(wildcards):
    return f"{RESULTS}/data/{run_of(wildcards).dataset}/manifest.json"


def run_weights(wildcards):
    """The file of weights that a run starts from; that of another run is made first."""
    weights = run_of(wildcards).training.weights
    if weights and Path(weights).is_relative_to(f"{RESULTS}/plans"):
        # Those of the best epoch are no declared output, as not every run keeps them; they come with the last one's.
        weights = weights.removesuffix("model_best.pt") + "model.pt" * weights.endswith("model_best.pt")
    elif weights:
        look_for_weights(weights, wildcards.plan, wildcards.run)
    return [weights] if weights else []


@functools.cache
def look_for_weights(weights, plan, run):
    """Say which key names weights that are not there, as of raw files."""
    if not Path(weights).exists():
        remedy = f"name others in plans.{plan}.runs.{run}.training.weights"
        finding = doctor.Finding(f"run {plan}.{run}", "FAIL", f"{weights}: no such file or folder", remedy)
        say(finding)


def configure_run_params(wildcards):
    return own_params("configure", run_of(wildcards).model_dump_json())


def run_params(stage):
    """A function from wildcards to the params of one of a run's stages."""

    def params(wildcards):
        run = run_of(wildcards)
        modules = run_modules(stage, run.study, *run.loaders(stage))
        return stage_params(modules, json.dumps(decisive_settings(stage, run.slice(stage))))

    return params


def run_settings(stage):
    """A function to the settings of a run as a stage reads them. Taking `input` keeps them from making it run again."""

    def settings(wildcards, input):
        return json.dumps(run_of(wildcards).slice(stage))

    return settings


def first_run(plan):
    """The run of a plan that its others are timed in turn with: the first, if one process runs it and it is timed."""
    for run, resolved in CONFIG.plans[plan].items():
        if "throughput" in CONFIG.stages(plan, run):
            return resolved.run if resolved.run.processes.world_size == 1 else None
    return None


def beside(wildcards):
    """The run that a run is timed in turn with, if it is."""
    run = run_of(wildcards)
    first = first_run(wildcards.plan)
    # How little a run and its copy differ takes ten seconds to see.
    enough = run.throughput.beside >= 10 if run is first else run.throughput.beside > 0
    return first if enough and run.processes.world_size == 1 else None


def throughput_params(wildcards):
    run, first = run_of(wildcards), beside(wildcards)
    modules = run_modules(
        "throughput", run.study, *run.loaders("throughput"), *(first.loaders("throughput") if first else ())
    )
    params = stage_params(modules, json.dumps(decisive_settings("throughput", run.slice("throughput"))))
    # Of the first run only what its steps do: another learning rate of it is no reason to time all of a plan again.
    work = {"beside": json.dumps(compute_settings(first.model_dump(mode="json")))} if first else {}
    return params | work


def first_data(wildcards):
    """The manifest and the data of the run that a run is timed in turn with, where they are not its own."""
    first = beside(wildcards)
    if not first or first.dataset == run_of(wildcards).dataset:
        return []
    folder = f"{RESULTS}/data/{first.dataset}"
    return [f"{folder}/manifest.json", *data_files(first.dataset), f"{folder}/stats"]


def throughput_beside(wildcards, input):
    """Arguments that name the run to be timed in turn with. Taking `input` keeps them from making a job run."""
    first = beside(wildcards)
    if not first:
        return []
    manifest = ["--beside-manifest", input.first[0]] if input.first else []
    return ["--beside", json.dumps(first.slice("throughput")), *manifest]


def train_threads(wildcards):
    """The cores of one machine that a training takes: all, unless it says how many it computes on, and needs no GPU."""
    run = run_of(wildcards)
    return run.threads * run.processes.gpus_per_node if run.threads and not (SITE.scheduler or GPUS) else 64


def checkpoint_sources(wildcards, input):
    """The sources that decide what a checkpoint means: all of a training's but its loader, which changes no sample."""
    return fingerprint(run_modules("train", run_of(wildcards).study))


# ---- plans and reports -----------------------------------------------------------------------------


def plan_settings(name):
    """A plan as its tables and pages need it: `dlscale.core.records.PlanRecord`."""
    plan = CONFIG.workflow.plans[name]
    study = resolve.study_files()[plan.study]
    runs = [
        {
            "name": resolved.trial or run,
            "label": CONFIG.label(name, run),
            "plan": resolved.plan,
            "run": resolved.name,
            "measure": CONFIG.stages(name, run),
            "repeats": [each.name for each in CONFIG.plans[name].values() if each.repeats == run],
        }
        for run, resolved in CONFIG.plans[name].items()
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
        "sweep": sweep_settings(name) if plan.sweep else None,
        "left_out": CONFIG.left_out[name],
        "published": [figure.model_dump(exclude_unset=True) for figure in study.published],
    }


def sweep_settings(name):
    """A sweep as its tables and pages need it: `dlscale.core.records.SweepRecord`."""
    sweep, sizes = CONFIG.workflow.plans[name].sweep, {}
    for resolved in CONFIG.plans[name].values():
        if resolved.trial:
            sizes[resolved.rung] = (resolved.run.training.stop_after, resolved.rung_size)
    rungs = [list(size) for size in sizes.values()]
    return {"method": sweep.method, "metric": sweep.metric, "trials": sweep.runs, "rungs": rungs}


def promoted(name, rung):
    """The trials of a sweep that come to a rung of successive halving: known once the rung before is done."""
    return Rung.read(checkpoints.promote.get(plan=name, rung=rung).output[0]).trials


def chosen_runs(name):
    """A plan's runs; of successive halving those that come to their rung."""
    return {
        run: resolved
        for run, resolved in CONFIG.plans[name].items()
        if not resolved.rung or resolved.trial in promoted(name, resolved.rung)
    }


def promote_inputs(wildcards):
    """What the runs of the rung before leave."""
    name, before = wildcards.plan, int(wildcards.rung) - 1
    trials = promoted(name, before) if before else CONFIG.workflow.plans[name].runs
    runs = [f"{RESULTS}/plans/{name}/{trial}-rung{before}" for trial in trials]
    return [f"{run}/{file}" for run in runs for file in ("config.yaml", *STAGES["train"].outputs)]


def promote_params(wildcards):
    return own_params("promote", sweep_settings(wildcards.plan))


def checkpoint_folder(wildcards):
    """Where a run saves what it goes on from; the rungs of a trial share it."""
    resolved = CONFIG.plans[wildcards.plan][wildcards.run]
    return f"{RESULTS}/checkpoints/{wildcards.plan}/{resolved.trial or wildcards.run}"


def measured(name):
    """The files that a plan's runs leave, of all the stages that they go through."""
    return [
        f"{RESULTS}/plans/{resolved.plan}/{resolved.name}/{file}"
        for run, resolved in chosen_runs(name).items()
        for file in [
            "config.yaml",
            *(f for stage in CONFIG.stages(name, run) for f in STAGES[stage].outputs),
        ]
    ]


def plan_files(name):
    """Everything that a plan produces."""
    settings = [f"{RESULTS}/data/{dataset}/config.yaml" for dataset in plan_datasets([name])]
    # Which runs of successive halving there are shows on the way; the table, made of them all, asks for them.
    runs = [] if CONFIG.workflow.plans[name].halves else measured(name)
    return [*settings, *runs, f"{RESULTS}/plans/{name}/summary.csv"]


def shown_files(name):
    """What Snakemake's own report shows of a plan."""
    # Of successive halving a trial's prediction comes before the table.
    runs = [] if CONFIG.workflow.plans[name].halves else measured(name)
    page = [f"{RESULTS}/plans/{name}/report.html"] if f"plan_{name}" in sys.argv else []
    return [
        *(file for file in runs if Path(file).name == "prediction.png"),
        f"{RESULTS}/plans/{name}/summary.csv",
        *page,
    ]


def plan_datasets(names):
    """Names of the datasets that plans use, each once, in order."""
    return list(dict.fromkeys(resolved.run.dataset for name in names for resolved in CONFIG.plans[name].values()))


def configure_plan_params(wildcards):
    return own_params("configure", json.dumps(plan_settings(wildcards.plan)))


def collect_inputs(wildcards):
    return measured(wildcards.plan)


def collect_params(wildcards):
    return own_params("collect", plan_settings(wildcards.plan))


def sooner(wildcards):
    """A job's priority: plans of few runs come first, so that a part of the page is soon whole."""
    return 1 / len(CONFIG.plans[wildcards.plan])


def page_to_fill(wildcards, input):
    """Arguments that name the page of all targets, where that is made. Taking `input` keeps them from counting."""
    if ASKED_PLANS is not CONFIG.workflow.targets:  # some were named, if only the same ones
        return []
    files = report_files(CONFIG.workflow.targets)
    page = {
        "title": CONFIG.workflow.report.title,
        "plans": files["plans"],
        "datasets": [str(Path(manifest).parent) for manifest in files["manifests"]],
        "references": files["references"],
        "call": call_again(wildcards, input),
        "out": PAGE,
    }
    return ["--page", json.dumps(page)]


def report_files(names):
    return {
        "plans": [f"{RESULTS}/plans/{name}/plan.yaml" for name in names],
        "tables": [f"{RESULTS}/plans/{name}/summary.csv" for name in names],
        "manifests": [f"{RESULTS}/data/{name}/manifest.json" for name in plan_datasets(names)],
        "previews": [f"{RESULTS}/data/{name}/preview.png" for name in plan_datasets(names)],
        # Hidden ones are half of an import that is under way, or was killed.
        "references": sorted(map(str, Path(RESULTS).glob("references/[!.]*/reference.json"))),
    }


def report_plan_files(wildcards):
    return report_files([wildcards.plan])


def report_runs(wildcards):
    """What the runs of the targets leave; a function, for some are chosen on the way."""
    return list(dict.fromkeys(file for name in CONFIG.workflow.targets for file in measured(name)))


def report_folders(wildcards, input):
    """The datasets' folders."""
    return [str(Path(manifest).parent) for manifest in input.manifests]


def report_params(title, names):
    return own_params("report", {"title": title, "plans": list(names)}, ROOT.glob("report/templates/*"))


def report_plan_params(wildcards):
    title = CONFIG.workflow.plans[wildcards.plan].title or wildcards.plan
    return report_params(title, [wildcards.plan])
