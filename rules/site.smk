# Where and how the stages' commands run: the site's engine and starter, and what a job asks of its scheduler.
try:
    SITE, REASONS = launcher.resolve(CONFIG.workflow.site)
    if SITE.engine != "none" and not SITE.image:
        built = "such as localhost/dlscale:cpu, which `snakemake image` builds"
        raise UserError(
            f"site.image: engine {SITE.engine} needs an image; name one, {built}, or set site.engine to none"
        )
    # Before Snakemake asks for their resources, of which a mistake would be a traceback.
    for resolved in [run for plan in ASKED_PLANS for run in CONFIG.plans[plan].values() if SITE.scheduler]:
        launcher.check(SITE, resolved.run.geometry, f"plans.{resolved.plan}.runs.{resolved.name}.")
except UserError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
GPUS = 0 if SITE.scheduler else gpus()
IMAGE = image.inherited(SITE.engine, SITE.image or "", first=workflow.is_main_process)
PACKAGES = launcher.packages(SITE)
if workflow.is_main_process:
    for reason in REASONS:
        print(reason, file=sys.stderr)


def image_options():
    arguments = [f"--build-arg={name}={value}" for name, value in SITE.build.arguments.items()]
    return [f"--engine={SITE.engine}", f"--image={SITE.image or ''}", f"--target={SITE.build.target}", *arguments]


def launch(paths, geometry=None):
    """The words that start a stage that reads `paths`: in a container it sees these, here and there alike."""
    folder, results = os.getcwd(), Path(RESULTS).resolve()
    place = launcher.Place(
        folder=folder,
        sources=str(ROOT.parent),
        uid=os.getuid(),
        gid=os.getgid(),
        data=launcher.outside([*paths, ROOT.parent, *registry.roots()], folder, results),
        results=None if results.is_relative_to(folder) else str(results),
    )
    studies = [f"--study={name}={study.file}" for name, study in registry.added().items()]
    return [*launcher.launch(SITE, place, geometry), *studies]


def withheld():
    """Words that keep addresses with secrets from a process that fetches none."""
    return ["env", "-u", urls.VARIABLE] if CONFIG.secrets else []


def stage_launch(wildcards, input):
    """The words that start a stage. Taking `input` keeps them from making it run again."""
    return [*withheld(), *launch(input)]


def run_launch(wildcards, input):
    """The words that start one of a run's stages, on the devices of its geometry."""
    return [*withheld(), *launch(input, run_of(wildcards).processes)]


def run_device(wildcards, input):
    """What one of a run's stages computes on. Taking `input` keeps it from making a job run."""
    return launcher.device(CONFIG.workflow.site)


def acquire_launch(wildcards, input):
    """The words that start a stage that reads what is no file of the workflow, such as a local store."""
    dataset = dataset_of(wildcards)
    raw = parts.raws(dataset).get(wildcards.file)
    words = launch([raw.origin] if raw and Path(raw.origin).exists() else [])
    return words if parts.fetched(dataset) else [*withheld(), *words]


def requested(job, *more):
    """What a job asks of the scheduler, by its geometry, minutes and processes; nothing where there is none."""
    return slurm.request(SITE.scheduler, job, *more) if SITE.scheduler else {}


def limit(name, work, attempt):
    """The time limit of a job, longer at each attempt, where it is what is asked for; None if nothing is known."""
    minutes = cost.minutes(work, Path(RESULTS), SITE.scheduler) if name == "runtime" else None
    return minutes and minutes * attempt


def data_resource(name):
    """A function from wildcards to one resource of a data stage; its time limit from how much is made."""

    def resource(wildcards, attempt):
        work = cost.data_work(CONFIG, wildcards.dataset, 1)
        return requested("data", None, limit(name, work, attempt)).get(name)

    return resource


def run_resource(stage, name):
    """A function from wildcards to one resource of a run's stage; its time limit from what is known of its speed."""

    def resource(wildcards, attempt):
        run, work = run_of(wildcards), cost.run_work(CONFIG, wildcards.plan, wildcards.run, stage)
        return requested(stage, run.geometry, limit(name, work, attempt), run.processes).get(name)

    return resource


# None is no resource: the executor asks which are there.
RESOURCES = slurm.RESOURCES if SITE.scheduler else []
DATA_RESOURCES = {name: data_resource(name) for name in RESOURCES}


def run_resources(stage):
    """All resources of one of a run's stages."""
    return {name: run_resource(stage, name) for name in RESOURCES}
