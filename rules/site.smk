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


def image_options():
    arguments = [f"--build-arg={name}={value}" for name, value in SITE.build.arguments.items()]
    return [f"--engine={SITE.engine}", f"--image={SITE.image or ''}", f"--target={SITE.build.target}", *arguments]
