# Print cost and checks before the jobs begin, and results after the jobs have ended.
import os
import time

from dlscale.core import progress, registry
from dlscale.core.files import write_text
from dlscale.core.fingerprint import save_tables
from dlscale.report.report import live_page
from dlscale.rules.calls import Call

STARTED = time.time() - progress.age()
CALL = Call(CONTEXT, PLANS, ASKED_PLANS, ASKED_DATASETS, workflow.resource_settings.cores, tell)


def unexplained(jobs):
    """Explain nothing: the extension `why` is absent."""
    return []


explain_jobs = registry.provided("explain_jobs", unexplained)
replaced_results = registry.provided("replaced_results", unexplained)

# Only in the main process, because the processes that Snakemake starts for jobs also read this file.
if workflow.is_main_process:
    for plan in ASKED_PLANS:
        for run, lacking in CONFIG.skipped_runs[plan].items():
            tell(f"{plan}.{run} is left out: this machine lacks {lacking}.")


def remember_sources():
    """Save the table of source files behind each fingerprint that is recorded with jobs."""
    for job in workflow.dag.needrun_jobs():
        job.params
    save_tables()


def keep_configuration():
    """Write this call's configuration for its jobs."""
    file, secrets = Path(".snakemake/called.json").absolute(), CONFIG.secrets
    addresses = {whole: url for url, whole in secrets.items() if not redact.has_marker(url)}
    # Secrets in a layer that another layer overrides must be hidden, too.
    hidden = redact.redact_programs(json.loads(urls.exchanged(AS_CALLED, addresses)), secrets)
    urls.publish(secrets)
    write_text(file, json.dumps(hidden))
    os.environ[CALLED] = str(file)


def show_end():
    """Print missing results, and the paths of the pages, at the end of a call."""
    tell(*CALL.missing_results())
    CALL.show_pages(map(Path, asked_files()))


def tell_nothing():
    """If no job would run, print that all files are up to date, unless Snakemake's own message is shown."""
    if displays() and not workflow.dag:
        tell("Nothing to be done: all files exist, and are up to date.")


def show_nothing():
    """Print the end of a call for which all files are up to date."""
    tell_nothing()
    show_end()


def looked():
    """Print the findings of a dry run, and return the exit status.

    If another command of dlscale started the dry run, write reasons and missing results for this command instead.
    """
    reasons = explain_jobs(reasons_to_run())
    lost = CALL.missing_results(files_to_make())
    if write_reply({"reasons": reasons, "lost": lost}):
        return 0
    if workflow.persistence.locked:
        tell("Another call is running in this folder: files that the other call is making count as missing.")
    tell_nothing()
    if reasons or lost:
        tell("", "Why:", *(f"  {line}" for line in [*reasons, *lost]))
    if SITE.scheduler:
        tell(*slurm.requests(requests_to_show()))
    return CALL.verdict(jobs_to_run(), workflow.config_settings.configfiles, targets_to_reach())


have_the_last_word(looked, show_nothing)
prepare_methods()


onstart:
    if workflow.non_local_exec and not SITE.scheduler:
        raise WorkflowError(
            "Jobs would be submitted, but no site is set. Name a site: --default-resources \"site='NAME'\""
        )
    if line := replaced_results(reasons_to_run()):
        tell(line)
    remember_sources()
    try:
        CALL.start(jobs_to_run(), workflow.config_settings.configfiles)
        keep_configuration()
    except UserError as error:
        raise WorkflowError(str(error))
    for display in displays():
        display.expect(CALL.expected(jobs_to_run()))
    for page in [file for file in asked_files() if Path(file).suffix == ".html"][:1]:
        live = f"; until then, {live_page(page).name} next to it shows the progress" if CONTEXT.is_live else ""
        tell(f"The page will be {Path(page).resolve()}{live}")


onsuccess:
    # CPU use is known only if all jobs ran as child processes of this call: not through Slurm, not in containers.
    cores = None if workflow.non_local_exec or SITE.engine != "none" else workflow.resource_settings.cores
    done = progress.jobs(Path(RESULTS), STARTED)
    tell(*progress.lines(done, STARTED, time.time(), cores, sum(os.times()[:4])))
    remember_sources()
    CALL.show_results()
    show_end()


onerror:
    if interrupt.seen:
        tell("", process.INTERRUPTED_CALL)
    else:
        tell(f"Snakemake's log: {', '.join(log)}")
        tell(*status.describe_failures(failed_jobs(), STARTED))
