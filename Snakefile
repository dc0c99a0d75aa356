# dlscale: from a configuration to a measured, reproducible scaling study.
#
#   snakemake                      the plans that config.yaml names as targets, and the report
#   snakemake plan_NAME            one plan, with a report of its own
#   snakemake study_NAME           all target plans of one study
#   snakemake data_NAME            one dataset, described and drawn
#   snakemake -n                   what would run, and why
from snakemake.utils import min_version

min_version("9.19")


# This line documents the software: only `--sdm apptainer` would use this image. The site sets the engine and the image
# of the stages.
container: "docker://ghcr.io/dlscale/dlscale:cpu-0.1.0"


include: "rules/controller.smk"
include: "rules/display.smk"
include: "rules/locks.smk"
include: "rules/common.smk"


# This line is for `snakemake --lint` and for readers: rules/common.smk has already read the file, with error messages
# that name the line.
configfile: "config.yaml"


wildcard_constraints:
    dataset=NAME,
    plan=NAME,
    run=NAME,
    split="train|valid|test",
    part=r"[A-Za-z0-9_-]+",
    piece=r"\d+",
    rung=r"\d+",


localrules:
    all,
    image,
    configure_plan,
    preview,
    collect,
    report,
    report_plan,


# Without a scheduler, or if compute nodes have no network (`acquire: here`), `fetch` runs on this machine.
if not SITE.scheduler or SITE.scheduler.acquire == "here":

    localrules:
        fetch,


rule all:
    default_target: True
    input:
        PAGE,
        [PLANS.files(plan) for plan in CONFIG.workflow.targets],


include: "rules/preflight.smk"
include: "rules/image.smk"
include: "rules/configure.smk"
include: "rules/data.smk"
include: "rules/train.smk"
include: "rules/measure.smk"
include: "rules/report.smk"


for file in registry.rules():

    include: file


add_user_options()


# One target per dataset, per plan and per study, including the shipped ones.
for name in CONFIG.workflow.datasets:

    rule:
        name:
            f"data_{name}"
        input:
            PATHS.manifest(name),
            PATHS.preview(name),


for name in [name for name, runs in CONFIG.plans.items() if runs]:

    rule:
        name:
            f"plan_{name}"
        input:
            PLANS.files(name),
            PATHS.plan_page(name),


for name in STUDIES:

    rule:
        name:
            f"study_{name}"
        input:
            [PLANS.files(plan) for plan in STUDIES[name]],
            [PATHS.plan_page(plan) for plan in STUDIES[name]],
