# Before and after the jobs: what they cost, whether the site is ready, what became of them.
import functools
import os
import time

from dlscale.core import progress
from dlscale.core.files import write_text
from dlscale.core.fingerprint import TABLES
from dlscale.rules.calls import Call, show_requests

STARTED = time.time() - progress.age()
SOURCES = Path(".snakemake/sources")
CALL = Call(JOBS, ASKED_PLANS, ASKED_DATASETS, workflow.resource_settings.cores)

# Once: jobs that Snakemake starts as processes of their own read this file, too.
if workflow.is_main_process:
    for plan in ASKED_PLANS:
        for run, lacking in CONFIG.left_out[plan].items():
            print(f"{plan}.{run} is left out: this machine lacks {lacking}.", file=sys.stderr)


def remember_sources():
    """Write down what the digests of sources stand for, with which jobs are recorded."""
    for job in workflow.dag.needrun_jobs():
        job.params
    why.remember(TABLES, SOURCES)


def keep_configuration():
    """Write this call's configuration for its jobs."""
    file, secrets = Path(".snakemake/called.json").absolute(), CONFIG.secrets
    addresses = {whole: url for url, whole in secrets.items() if not redact.has_marker(url)}
    # A layer may have secrets that another one replaces.
    hidden = redact.redact_programs(json.loads(urls.exchanged(AS_CALLED, addresses)), secrets)
    urls.publish(secrets)
    write_text(file, json.dumps(hidden))
    os.environ[CALLED] = str(file)


def show_end():
    """Print, at the end of a call, what is gone, and where the pages are."""
    for line in CALL.lost():
        print(line, file=sys.stderr)
    CALL.show_pages(map(Path, asked_files()))


def looked():
    """Print what a dry run found; return its status. Or tell the process that asked."""
    reasons = why.found(reasons_to_run(), functools.partial(why.remembered, SOURCES, TABLES))
    lost = CALL.lost(files_to_make())
    if answer({"reasons": reasons, "lost": lost}):
        return 0
    if reasons or lost:
        print("", "Why:", *(f"  {line}" for line in [*reasons, *lost]), sep="\n", file=sys.stderr)
    if SITE.scheduler:
        show_requests(requests_to_show())
    return CALL.verdict(jobs_to_run(), workflow.config_settings.configfiles)


def show_failures():
    """Print a line for each job that failed; return whether that says all."""
    if INTERRUPTED:
        print("", process.INTERRUPTED_CALL, sep="\n", file=sys.stderr)
        return True
    lines = sorted(why.failed(*job, STARTED) for job in failed_jobs())
    if lines:
        if status.asked():
            lines = [f"What Snakemake says: {', '.join(workflow.logger_manager.get_logfile())}", *lines]
        print("", *lines, sep="\n", file=sys.stderr)
    return bool(lines)


have_the_last_word(looked, show_end, show_failures)
prepare_methods()


onstart:
    if workflow.non_local_exec and not SITE.scheduler:
        raise WorkflowError(
            "Jobs are submitted, and no site says how; name one: --default-resources \"site='NAME'\""
        )
    if line := why.replaced(reasons_to_run()):
        print(line, file=sys.stderr)
    remember_sources()
    try:
        CALL.start(jobs_to_run(), workflow.config_settings.configfiles)
        keep_configuration()
    except UserError as error:
        raise WorkflowError(str(error))
    if status.asked():
        status.tell(CALL.to_tell(jobs_to_run()))
    for page in [file for file in asked_files() if Path(file).suffix == ".html"][:1]:
        print(f"The page will be {Path(page).resolve()}", file=sys.stderr)


onsuccess:
    # What of this machine's cores was used is known if all jobs were its own.
    cores = None if workflow.non_local_exec or SITE.engine != "none" else workflow.resource_settings.cores
    done = progress.jobs(Path(RESULTS), STARTED)
    print(*progress.lines(done, STARTED, time.time(), cores, sum(os.times()[:4])), sep="\n", file=sys.stderr)
    remember_sources()
    CALL.show_results()
    show_end()
