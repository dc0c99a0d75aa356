# Before anything runs: what it will cost, whether the site is ready, and whether an earlier call's jobs still run.
import time
from collections import Counter
from dataclasses import asdict

from dlscale.core import times
from dlscale.core.fingerprint import TABLES
from dlscale.core.machine import gpus
from dlscale.core.stages import DATA_STAGES, RUN_STAGES
from dlscale.preflight import disks, dryrun, environment
from snakemake.exceptions import WorkflowError

STARTED = time.time() - times.age()

# Once: jobs that Snakemake starts as processes of their own read this file, too.
if workflow.is_main_process:
    for plan in ASKED_PLANS:
        for run, lacking in CONFIG.left_out[plan].items():
            print(f"{plan}.{run} is left out: this machine lacks {lacking}.", file=sys.stderr)


def in_order(work):
    return list(CONFIG.plans).index(work.plan), list(CONFIG.plans[work.plan]).index(work.run_name), work.stage


def trials_of(plan, works):
    """The trials of a sweep that would train."""
    return {CONFIG.plans[plan][work.run_name].trial for work in works if work.plan == plan} - {None}


def waiting_works():
    """The jobs that would run, as the estimate of their cost knows them: data jobs counted by dataset."""
    runs, data, halving = [], Counter(), []
    for name, wildcards in jobs_to_run():
        if name in RUN_STAGES:
            runs.append(cost.run_work(CONFIG, wildcards.plan, wildcards.run, name))
        elif name in DATA_STAGES:
            data[wildcards.dataset] += 1
        elif name == "promote":
            halving.append(wildcards.plan)
    # Which trials come to a later rung is not known yet, but how many.
    later = [work for plan in dict.fromkeys(halving) for work in cost.works(CONFIG, [plan], trials_of(plan, runs))]
    runs += [work for work in later if work.run and CONFIG.plans[work.plan][work.run_name].rung and work not in runs]
    runs.sort(key=in_order)
    return [*(cost.data_work(CONFIG, name, number) for name, number in data.items()), *runs]


def examined(works):
    """What `dlscale doctor` finds of the site, for these jobs."""
    plans = {work.plan for work in works if work.run}
    return doctor.check(CONFIG, site_name(), {work.stage for work in works}, plans)


def check_start(works):
    """Raise a `UserError` if jobs cannot be started here as they would have to be."""
    paths = [os.getcwd(), RESULTS, *registry.roots(), *workflow.config_settings.configfiles]
    launcher.check_names(map(str, paths), SITE)
    for work in [work for work in works if work.run]:
        launcher.check(SITE, work.run.geometry, f"plans.{work.plan}.runs.{work.run_name}.")


def lacking_here(works):
    """What runs need and this machine lacks where it runs them itself, or does badly: found without import of torch."""
    runs = {f"{work.plan}.{work.run_name}": work.run for work in works if work.run}
    findings = [*environment.probe_here(runs, gpus()), disks.probe_space(Path(RESULTS))]
    return [finding for finding in findings if finding.status in ("FAIL", "warn")]


def show_obstacle():
    """Print what would keep the jobs of a dry run from starting."""
    works = waiting_works()
    try:
        check_start(works)
    except UserError as error:
        print("", f"It would not start: {error}", sep="\n", file=sys.stderr)
    if works and not (SITE.scheduler or SITE.engine != "none") and (findings := lacking_here(works)):
        heading = "It would not start:" if doctor.failed(findings) else "It would start, but:"
        print("", heading, *doctor.lines(findings), sep="\n", file=sys.stderr)


def show_requests():
    """Print what the jobs of a dry run would ask of Slurm, those that ask for the same together."""
    asked = {}
    for resources, rule, wildcards in requests_to_show():
        job = f"{rule} {'.'.join([wildcards.plan, wildcards.run]) if rule in RUN_STAGES else wildcards.dataset}"
        asked.setdefault(slurm.words(resources), set()).add(job)
    if asked:
        print(
            "",
            *(f"sbatch {words}: {', '.join(sorted(asked[words]))}" for words in sorted(asked)),
            sep="\n",
            file=sys.stderr,
        )


def show_cost():
    """Print what the jobs of a dry run would cost, and what would keep them from starting."""
    if works := waiting_works():
        table = cost.price(works, SITE.scheduler, Path(RESULTS))
        failures = [finding for finding in examined(works) if finding.status == "FAIL"]
        lines = [*cost.lines(table), cost.over(table, CONFIG.workflow.budget), *doctor.lines(failures)]
        print("", *filter(None, lines), sep="\n", file=sys.stderr)


SOURCES = Path(".snakemake/sources")


def remember_sources():
    """Write down what the digests of sources stand for, with which jobs are recorded."""
    if getattr(workflow, "_dag", None):
        for job in workflow.dag.needrun_jobs():
            job.params
    why.remember(TABLES, SOURCES)


def reasons():
    """Why the jobs of a dry run would run, and what is gone although nothing would make it."""
    found = why.found(reasons_to_run(), why.remembered(SOURCES, TABLES))
    found.lost += lost(files_to_make()) if workflow.scheduler is not None else []
    return found


def lost(making=()):
    """Lines of what is gone of the runs and datasets that were asked for, though nothing would make it."""
    trained = [run for plan in ASKED_PLANS for run in CONFIG.plans[plan].values()]
    runs = dict.fromkeys(f"{run.plan}/{run.name}" for run in trained)
    return why.lost(RESULTS, runs, dict.fromkeys(plan_datasets(ASKED_PLANS) + asked_datasets()), making, own_settings())


def show_end():
    """Print, at the end of a call, what is gone, and where the pages are."""
    for line in lost():
        print(line, file=sys.stderr)
    show_pages()


def show_reasons():
    """Print why the jobs of a dry run would run, and what is gone although they leave it."""
    why.show(reasons())


def answer():
    """Tell the process that asked what would run, and why."""
    dryrun.answer(cost.named(waiting_works()), asdict(reasons()))


def show_pages():
    """Print where the pages of what was asked for are; of a part of a plan its page; of datasets their pictures."""
    files = list(map(Path, asked_files()))
    pages = [file for file in files if file == Path(PAGE) or file.name == "report.html"]
    if not pages:
        parts = [file.relative_to(RESULTS).parts for file in files if file.is_relative_to(RESULTS)]
        plans = dict.fromkeys(part[1] for part in parts if part[0] == "plans")
        pages = [page for plan in plans if (page := Path(RESULTS, "plans", plan, "report.html")).exists()]
    for page in pages:
        old = page not in files and any(page.stat().st_mtime < file.stat().st_mtime for file in files if file.exists())
        newer = f" (older than what was asked for: snakemake plan_{page.parent.name} writes it anew)" if old else ""
        print(f"Report: {page.resolve()}{newer}", file=sys.stderr)
    for picture in [] if pages else [file for file in files if file.name == "preview.png"]:
        print(f"Preview: {picture.resolve()}", file=sys.stderr)


if dryrun.asked():
    at_end_of_dry_run(answer)
else:
    at_end_of_dry_run(show_obstacle)
    if SITE.scheduler:
        at_end_of_dry_run(show_cost)
        at_end_of_dry_run(show_requests)
    at_end_of_dry_run(show_reasons)
at_end_of_nothing(show_end)
if SITE.scheduler:
    be_the_only_controller()
# Snakemake's own lock is of this folder; another checkout may have the same `results`.
be_the_only_writer(RESULTS, "results")


onstart:
    if workflow.non_local_exec and not SITE.scheduler:
        raise WorkflowError(
            "Jobs are submitted, and no site says how; name one: --default-resources \"site='NAME'\""
        )
    works = waiting_works()
    if line := why.replaced(reasons_to_run()):
        print(line, file=sys.stderr)
    remember_sources()
    try:
        check_start(works)
    except UserError as error:
        raise WorkflowError(str(error))
    if problem := cost.over(cost.price(works, SITE.scheduler, Path(RESULTS)), CONFIG.workflow.budget):
        raise WorkflowError(problem)
    if works and not (SITE.scheduler or SITE.engine != "none"):
        if findings := lacking_here(works):
            print(*doctor.lines(findings), sep="\n", file=sys.stderr)
        if doctor.failed(findings):
            raise WorkflowError("Nothing was started. See the lines with FAIL above.")
    if works and (SITE.scheduler or SITE.engine != "none"):
        findings = examined(works)
        print(*doctor.lines(findings), sep="\n", file=sys.stderr)
        if doctor.failed(findings) or (SITE.engine != "none" and not IMAGE):
            raise WorkflowError("The site is not ready; nothing was started. See the lines with FAIL above.")


def show_times():
    """Print where the time went, and what of this machine's cores was used if all jobs were its own."""
    used = os.times()
    here = not (workflow.non_local_exec or SITE.engine != "none")
    busy = used.user + used.system + used.children_user + used.children_system
    done = times.jobs(Path(RESULTS), STARTED)
    lines = times.lines(done, STARTED, time.time(), workflow.resource_settings.cores if here else None, busy)
    print(*lines, sep="\n", file=sys.stderr)


onsuccess:
    show_times()
    remember_sources()
    show_end()
