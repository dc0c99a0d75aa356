# Read and validate the configuration. `dlscale.rules` has the logic of the rules, which is tested without Snakemake.
import functools
import json
import os
import shlex
import sys
from pathlib import Path

from snakemake import benchmark

from dlscale.config import resolve
from dlscale.config.site import SET_FOR_SBATCH
from dlscale.core import redact, registry, urls
from dlscale.core.errors import UserError
from dlscale.core.files import atomic_write
from dlscale.core.fingerprint import ROOT, remember
from dlscale.core.paths import Results
from dlscale.core.machine import CALLER, SNAKEMAKES, callers_values
from dlscale.core.settings import read_yaml
from dlscale.core.stages import RUN_STAGES
from dlscale.data import parts
from dlscale.launch import image, launcher, slurm
from dlscale.preflight.run import read_target, refuse_late_words, site_words, studies
from dlscale.rules.context import Commands, Context
from dlscale.rules.datasets import Datasets
from dlscale.rules.plans import Plans
from dlscale.rules.runs import Programs
from dlscale.rules.runs import ALL_CORES, Runs

NAME = r"[A-Za-z0-9][A-Za-z0-9_-]*"
#: Folder with the captions of figures and tables in Snakemake's own report.
CAPTIONS = f"{ROOT}/report/captions"

os.environ[CALLER] = callers_values()
os.environ[SNAKEMAKES] = f"{os.environ.get(SNAKEMAKES, '')} {os.getpid()}"
# Snakemake reads all memory maps of a job with a `benchmark:` every 0.5 s for the first 30 readings, then every 30 s.
# The frequent readings take up to 0.3 cores and disturb timed jobs, so the first readings are 5 s apart.
benchmark.BENCHMARK_INTERVAL_SHORT = 5.0  # s
write_records = benchmark.write_benchmark_records


def write_benchmark(records, path, extended):
    """Write a job's benchmark atomically; Snakemake would follow another user's link, or wait for a pipe's reader."""
    with atomic_write(path) as temporary:
        write_records(records, str(temporary), extended)


benchmark.write_benchmark_records = write_benchmark
remember(Path(".snakemake/parsed.json"))


def exactly(names):
    """Return a regular expression that matches exactly these names; without names, it matches nothing."""
    return "|".join(names) or "(?!)"


def layers():
    """Return the layers of the user's configuration, with their folders: config.yaml, --configfile, --config."""
    settings = workflow.config_settings
    if urls.has_secret(settings.config) or redact.redact_programs(settings.config) != settings.config:
        raise UserError(
            "--config: a secret, or an address with a login. Everyone can read a command line, and Snakemake logs it. "
            "Write the setting to a file, and name the file with --configfile"
        )
    files = [*([] if settings.replace_workflow_config else ["config.yaml"]), *settings.configfiles]
    return [*([read_yaml(file), str(Path(file).parent)] for file in files), [settings.config, "."]]


def own_settings():
    """Return the arguments that give another call the settings of this call; configuration files come last."""
    settings = workflow.config_settings
    words = ["--replace-workflow-config"] if settings.replace_workflow_config else []
    if settings.config:
        words += ["--config", *(f"{key}={json.dumps(value)}" for key, value in settings.config.items())]
    files = [os.path.relpath(path) for path in settings.configfiles]
    return [*words, *(["--configfile", *files] if files else [])]


def refuse(message):
    """Print a user's error, and exit. For an exception, Snakemake would also print the line that raised it."""
    print(message, file=sys.stderr)
    sys.exit(2)


def say(finding):
    """Print a finding, and exit on FAIL.

    A call with `--report` does not exit. The process of a job prints nothing, because the job's stage reports errors.
    """
    if not workflow.is_main_process:
        return
    if finding.status == "FAIL" and not REPORTING:
        refuse(str(finding))
    print(finding, file=sys.stderr)


def rung_file(name, rung):
    """Return the file with the trials of a rung of successive halving, once it exists."""
    return checkpoints.promote.get(plan=name, rung=rung).output[0]


def asked_targets():
    """Return the targets of the command line that are results, plans, datasets or studies."""
    refuse_late_words(map(str, (COMMAND_LINE.targets or ()) if COMMAND_LINE else ()), CONFIG)
    found = [read_target(word, CONFIG) for word in asked_names()]
    return [target for target in found if target]


#: Environment variable that gives jobs the path of a copy of this call's configuration, because a user may edit the
#: configuration files while jobs are queued.
CALLED = "DLSCALE_CALLED"

try:
    if (called := os.environ.get(CALLED)) and not workflow.is_main_process:
        whole = json.loads(os.environ.get(urls.VARIABLE, "{}"))
        BASE, LAYERS = redact.put_back(json.loads(Path(called).read_text(encoding="utf-8")), whole)
    else:
        BASE, LAYERS = resolve.site_settings(site_name(), f"{workflow.basedir}/profiles"), layers()
    AS_CALLED = json.dumps([BASE, LAYERS], default=str)
    # The layers are merged over the profile's site; a section with another `kind` is replaced, not merged.
    CONFIG = resolve.load(functools.reduce(resolve.merge, [resolve.resolve_paths(*layer) for layer in LAYERS], BASE))
    urls.publish(CONFIG.secrets)
    ASKED = asked_targets()
    FETCHED = [name for name, dataset in CONFIG.workflow.datasets.items() if parts.fetched(dataset)]
except Exception as error:
    if not (message := str(error) if isinstance(error, UserError) else registry.mistake(error)):
        raise
    refuse(message)

RESULTS = CONFIG.workflow.results
PATHS = Results(RESULTS)
#: Path of the page of all targets.
PAGE = f"{RESULTS}/{resolve.report_page(settings for settings, _ in LAYERS)}"
CONFIG = resolve.with_title(CONFIG, (settings for settings, _ in LAYERS))
STUDIES = studies(CONFIG)
ASKED_DATASETS = [name for name in CONFIG.workflow.datasets if any(name in each.datasets for each in ASKED)]
ASKED_PLANS = [plan for plan in CONFIG.plans if any(plan in each.plans for each in ASKED)]
if workflow.is_main_process and not ASKED_PLANS and not ASKED_DATASETS:
    ASKED_PLANS = CONFIG.workflow.targets

# Resolve the site: container engine and process starter (srun, torchrun) of the stages' commands. Create the objects
# that compute inputs and parameters of jobs from wildcards.
try:
    SITE, REASONS = launcher.resolve(CONFIG.workflow.site)
    if SITE.engine != "none" and not SITE.image:
        built = "such as localhost/dlscale:cpu, which `snakemake image` builds"
        raise UserError(
            f"site.image: engine {SITE.engine} needs an image; name an image, {built}, or set site.engine to none"
        )
    # This check precedes Snakemake's computation of resources, in which an error would end in a traceback.
    for resolved in [run for plan in ASKED_PLANS for run in CONFIG.plans[plan].values() if SITE.scheduler]:
        launcher.check(SITE, resolved.run.geometry, f"plans.{resolved.plan}.runs.{resolved.name}.")
except UserError as error:
    refuse(error)
if workflow.is_main_process:
    tell(*REASONS)

# Slurm would refuse jobs beyond the job limit of a queue, so Snakemake submits these jobs later.
for name, limit in slurm.job_limits(SITE.scheduler).items() if SITE.scheduler else ():
    workflow.register_resource(name, limit)

CONTEXT = Context(
    configuration=CONFIG,
    site=SITE,
    page=PAGE,
    call=["snakemake", *site_words(site_name()), *own_settings()],
    own_settings=own_settings(),
    is_live=ASKED_PLANS is CONFIG.workflow.targets,  # no target was named
    image=image.image_identity(SITE.engine, SITE.image or "", first=workflow.is_main_process),
    say=say,
    refuse=refuse,
    rung_file=rung_file,
    keep_going=keeps_going,
)
COMMANDS = Commands(CONTEXT)
DATASETS = Datasets(CONTEXT, COMMANDS)
PROGRAMS = registry.provided("Programs", Programs)(CONTEXT, COMMANDS)
RUNS = Runs(CONTEXT, COMMANDS, DATASETS, PROGRAMS)
PLANS = Plans(CONTEXT)


def with_user_options(own, user):
    """Return the function of a resource: dlscale's and the user's options of sbatch."""

    def options(wildcards, input, attempt, threads, rulename, async_run):
        more = user.evaluate(
            wildcards, input=input, attempt=attempt, threads=threads, rulename=rulename, async_run=async_run
        )
        return " ".join(filter(None, [own(wildcards, attempt), more.value]))

    return options


def add_user_options():
    """Add the user's resource `slurm_extra` to dlscale's; Snakemake would use only one of the two."""
    settings = workflow.resource_settings
    for one in [each for each in workflow.rules if SITE.scheduler and "mpi" in each.resources]:
        user = settings._parsed_overwrite_resources.get(one.name, {}).get("slurm_extra")
        user = user or settings._parsed_default_resources.get("slurm_extra")
        if user and (taken := SET_FOR_SBATCH.search(str(user.raw))):
            refuse(
                f"{one.name}:slurm_extra: {taken[0]}: dlscale sets this option of sbatch itself, from the site "
                "and the run's geometry; remove the option"
            )
        if user:
            own = COMMANDS.resources(one.name if one.name in RUN_STAGES else "data")["slurm_extra"]
            one.resources.update({"slurm_extra": with_user_options(own, user)})


def image_options():
    arguments = [f"--build-arg={name}={value}" for name, value in SITE.build.arguments.items()]
    return [f"--engine={SITE.engine}", f"--image={SITE.image or ''}", f"--target={SITE.build.target}", *arguments]
