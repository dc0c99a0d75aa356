# Uses of Snakemake beyond its public interface, with reasons. After an upgrade of Snakemake, check this list first,
# then common.smk (benchmark interval, register_resource), display.smk (log handlers) and preflight.smk
# (persistence).
#
#   name of the site         `workflow.resource_settings`: default resources are the only part of a profile that reaches
#                            the processes that Snakemake starts for its jobs.
#   requested plans          `snakemake.cli.get_argument_parser`: Snakemake knows the targets only after it has read the
#                            rules, but misspelt targets, and runs that this machine cannot run, are refused earlier.
#   dry run or not           `workflow.execute`, `create_report` and others: Snakemake's settings choose one of these
#                            methods. The call must wait for jobs of an earlier controller before Snakemake checks which
#                            results exist. `onstart` would be too late, and `--unlock` or `--lint` must not wait.
#   end of a call            `workflow.execute`: no hook is called after a dry run, or if all files are up to date.
#   failed jobs              `workflow.scheduler.failed`: the end of a call lists them, with their last messages.
#   signals of Slurm         `JobScheduler.exit_gracefully`, the handler of TERM: Snakemake only waits for jobs;
#                            dlscale passes the signal on to the processes of these jobs.
#   --keep-going             `workflow.execution_settings`: with this option, a broken dataset must not end the call.
#   requested files          `workflow.dag`: the end of a call lists the pages that show these files.
#   jobs that would run      `workflow.dag.needrun_jobs`: their cost and requirements.
#   requests of jobs         `job.resources`, `workflow._localrules`: Snakemake prints no requests of rules with a
#                            message.
#   user's options of sbatch `rule.resources`, `workflow.resource_settings._parsed_overwrite_resources` and
#                            `_parsed_default_resources`: a user's `slurm_extra` would replace dlscale's, or be ignored.
#   secrets in a report      `workflow.configfiles`: configuration files with logins or secrets are left out of
#                            --report.
#   reasons of jobs          `workflow.dag.reason`, `workflow.persistence`: printed as sentences.
import gc
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

from dlscale.core import interrupt, process
from dlscale.core.stages import stage_of
from dlscale.preflight import status
from dlscale.preflight.run import Waiting, in_turn, write_reply
from snakemake.cli import get_argument_parser
from snakemake.exceptions import WorkflowError
from snakemake.scheduling.job_scheduler import JobScheduler

gc.freeze()  # imported objects are never garbage, and searching them took a fifth of a dry run

if workflow.is_main_process:
    interrupt.end_at_once("snakemake")
else:
    # Slurm may signal only the first process of a task (proctrack/cgroup). For a run on one device, this process is
    # Snakemake. Without these handlers, Snakemake would ignore USR2, the warning before the time limit, and after TERM
    # would only wait for the training.
    signal.signal(signal.SIGUSR2, process.pass_on)
    JobScheduler.exit_gracefully = in_turn(partial(process.pass_on, signal.SIGTERM), JobScheduler.exit_gracefully)


#: Command line of the call, without its profile's settings; None in the process of a job.
COMMAND_LINE = get_argument_parser().parse_args(sys.argv[1:]) if workflow.is_main_process else None


def site_name():
    """Return the site that the profile names."""
    resource = (workflow.resource_settings.default_resources or {}).get("site")
    text = getattr(resource, "raw", resource)
    return str(text).strip("'\"") if text else None


def prepare(name, prepared):
    """Call `prepared` before each call of the method `name` of `workflow`."""
    if workflow.is_main_process:
        setattr(workflow, name, in_turn(prepared, getattr(workflow, name)))


def keeps_going():
    """Return whether a broken dataset fails only in its own jobs; always true in a job's own process."""
    settings = workflow.execution_settings
    return not workflow.is_main_process or bool(settings and settings.keep_going)


def asked_names():
    """Return the targets of the command line, including targets in options, which Snakemake adds to the targets."""
    if not workflow.is_main_process:
        return []
    named = (COMMAND_LINE.targets, COMMAND_LINE.prioritize, COMMAND_LINE.forcerun, COMMAND_LINE.until)
    return list(dict.fromkeys(str(word) for words in named for word in words or ()))


def asked_files():
    """Return the requested files: by name, or as inputs of a target without outputs."""
    return sorted(map(str, workflow.dag.derived_targetfiles))


def jobs_to_run():
    """Return the jobs that would run, without target rules.

    Finished jobs are included, because a dry run has marked all jobs as finished.
    """
    return [job for job in workflow.dag.needrun_jobs(exclude_finished=False) if not job.rule.norun]


def targets_to_reach():
    """Return the number of target rules, which Snakemake counts as jobs."""
    return sum(job.rule.norun for job in workflow.dag.needrun_jobs(exclude_finished=False))


def requests_to_show():
    """Return resources, rule and wildcards of each job to submit, if commands are printed."""
    settings = workflow.output_settings
    if not settings.printshellcmds or settings.quiet:
        return []
    return [
        (dict(job.resources.items()), job.rule.name, job.wildcards)
        for job in jobs_to_run()
        if job.rule.name not in workflow._localrules  # a dry run treats all jobs as local
    ]


def reasons_to_run():
    """Return the jobs that would run with Snakemake's reasons."""
    return [reason_to_run(job) for job in jobs_to_run()]


def files_to_make():
    """Return the output files of the jobs that would run."""
    return {str(file) for job in jobs_to_run() for file in job.output}


def failure_time(log, stage):
    """Return the time when a stage failed, such as `2026-11-30 00:45`; empty if its last try did not fail."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(log.stat().st_mtime)) if status.failure(log, stage) else ""


def reason_to_run(job):
    reason, persistence = workflow.dag.reason(job), workflow.persistence
    known = any(persistence.metadata(file) for file in job.output)
    forcing = workflow.dag_settings
    asked = forcing.forceall or forcing.forcetargets or forcing.forcerun
    return Waiting(
        job.rule.name,
        dict(job.wildcards.items()),
        # A missing temporary file is not a separate reason: Snakemake deletes it after use, and makes it again only for
        # a job that needs it.
        missing=[
            f"{file}/" if file.is_directory else str(file)
            for file in job.output  # loop over the outputs, because `missing_output` is a set without order
            if file in reason.missing_output and not (known and file in job.temp_output)
        ],
        known=known,
        failed=failure_time(Path(next(iter(job.log), "")), stage_of(job.rule.name)),
        before=sorted(reason.params_changed.only_old),
        now=sorted(reason.params_changed.only_new),
        newer=sorted(reason.updated_input),
        inputs=bool(reason.input_changed),
        follows=bool(reason.updated_input_run),
        # Snakemake itself forces interrupted jobs (--rerun-incomplete).
        forced=bool(reason.forced and asked),
        interrupted=bool(reason.forced and not asked),
        command=bool(reason.code_changed),
    )


def failed_jobs():
    """Return rule, wildcards and log of each job that failed."""
    jobs = workflow.scheduler.failed if workflow.scheduler is not None else ()
    alone = [each for job in jobs for each in (job.jobs if job.is_group() else [job])]
    return [(job.rule.name, dict(job.wildcards.items()), next(iter(job.log), "")) for job in alone]


def have_the_last_word(looked, nothing):
    """Call `looked` at the end of a dry run, and `nothing` at the end of a call without jobs.

    `looked` returns the exit status of the dry run.
    """

    def ended():
        if workflow.dryrun:
            return looked()
        if not workflow.dag:  # a graph without jobs is false
            nothing()
        return 0

    if workflow.is_main_process:
        workflow.execute = process.with_last_word(workflow.execute, ended)
