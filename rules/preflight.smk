# Before anything runs: what it will cost, whether the site is ready, and whether an earlier call's jobs still run.
import atexit
import re
from collections import Counter

from dlscale.preflight import doctor
from dlscale.core.lock import only_writer
from snakemake.exceptions import WorkflowError


def in_order(work):
    return list(CONFIG.plans).index(work.plan), list(CONFIG.plans[work.plan]).index(work.run_name), work.stage


def waiting_works():
    """The jobs that would run, as the estimate of their cost knows them: data jobs counted by dataset."""
    runs, data = [], Counter()
    # By the time that its cost is shown a dry run has «finished» them all.
    for job in workflow.dag.needrun_jobs(exclude_finished=False):
        name, wildcards = job.rule.name, job.wildcards
        if name in ("train", "throughput"):
            runs.append(cost.Work(name, wildcards.plan, wildcards.run, run_of(wildcards)))
        elif name in ("acquire", "preprocess", "assemble", "describe"):
            data[wildcards.dataset] += 1
    runs.sort(key=in_order)
    return [*(cost.Work("data", name, "data", jobs=number) for name, number in data.items()), *runs]


def examined(works):
    """What `dlscale doctor` finds of the site, for these jobs."""
    plans = {work.plan for work in works if work.run}
    return doctor.check(CONFIG, site_name(), {work.stage for work in works}, plans)


def show_cost():
    """The end of a dry run, which has no hook of Snakemake's: what it would cost, and what would keep it from starting."""
    if workflow.dryrun and getattr(workflow, "_dag", None) and (works := waiting_works()):
        table = cost.price(works, SITE.scheduler, Path(RESULTS))
        failures = [finding for finding in examined(works) if finding.status == "FAIL"]
        lines = [*cost.lines(table), cost.over(table, CONFIG.workflow.budget), *doctor.lines(failures)]
        print("", *filter(None, lines), sep="\n", file=sys.stderr)


if workflow.is_main_process and SITE.scheduler:
    atexit.register(show_cost)
    # Looking, or unlocking, waits for nobody.
    looking = r"-\w*n\w*|--(dry-?run|unlock|lint|report|summary|detailed-summary|list.*|.*dag|rulegraph|filegraph)"
    if not any(re.fullmatch(looking, word) for word in sys.argv):
        # Held until this process ends. Jobs of a call that is alive are not left over from an earlier one.
        CONTROLLER = only_writer(Path(".snakemake"))
        try:
            CONTROLLER.__enter__()
        except UserError as error:
            print(f"Another call of snakemake is at work: {error}", file=sys.stderr)
            sys.exit(2)
        slurm.wait_for_left_running(os.getcwd())


onstart:
    if workflow.non_local_exec and not SITE.scheduler:
        raise WorkflowError(
            "Jobs are submitted, and no site says how; name one: --default-resources \"site='NAME'\""
        )
    works = waiting_works()
    try:
        launcher.check_names([os.getcwd(), RESULTS, *map(str, workflow.config_settings.configfiles)], SITE)
        for work in [work for work in works if work.run]:
            slurm.check(SITE.scheduler, work.run.geometry, f"plans.{work.plan}.runs.{work.run_name}.")
    except UserError as error:
        raise WorkflowError(str(error))
    if problem := cost.over(cost.price(works, SITE.scheduler, Path(RESULTS)), CONFIG.workflow.budget):
        raise WorkflowError(problem)
    if works and (SITE.scheduler or SITE.engine != "none"):
        findings = examined(works)
        print(*doctor.lines(findings), sep="\n", file=sys.stderr)
        if doctor.failed(findings) or (SITE.engine != "none" and not IMAGE):
            raise WorkflowError("The site is not ready; nothing was started. See the lines with FAIL above.")


onsuccess:
    page = Path(RESULTS, "report/index.html")
    if page.exists():
        print(f"Report: {page.resolve()}", file=sys.stderr)
