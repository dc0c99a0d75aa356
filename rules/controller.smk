# What this workflow needs of Snakemake beyond what Snakemake offers publicly. All of it is here, each with its reason;
# after an upgrade of Snakemake, look here first.
#
#   the name of the site     `workflow.resource_settings`: of a profile, default resources alone reach the processes that
#                            Snakemake starts for its jobs.
#   the plans asked for      `snakemake.cli.get_argument_parser`: the targets are not known before the rules are read, and a
#                            run that the machine cannot do is refused before; so is a misspelt target.
#   looking, or running      `workflow.execute`, `create_report` and others: Snakemake's parsed settings choose one of these
#                            methods. Jobs of an earlier controller have to be waited for before Snakemake looks which
#                            results are there. `onstart` comes after that, and `--unlock` or `--lint` must wait for
#                            nothing.
#   the end of a call        `workflow.execute`: a dry run calls no hook, nor does a call that finds all made.
#   jobs that failed         `workflow.scheduler.failed`: each is named at the end, with its last word.
#   whether it keeps going   `workflow.execution_settings`: then a broken dataset must not end the call.
#   the files asked for      `workflow.dag`: the pages that show them are named at the end.
#   jobs that would run      `workflow.dag.needrun_jobs`: their cost, and what they need.
#   what they ask for        `job.resources`, `workflow._localrules`: a rule's message takes the place of its resources.
#   no secret in a report    `workflow.configfiles`: files that hold whole addresses are not put into `--report`.
#   why they would           `workflow.dag.reason`, `workflow.persistence`: said in words.
import gc
import os
import signal
import sys
from pathlib import Path

from dlscale.core import interrupt, process
from dlscale.preflight import status, why
from dlscale.preflight.run import answer, in_turn
from snakemake.cli import get_argument_parser
from snakemake.exceptions import WorkflowError

gc.freeze()  # what is imported stays; to look for garbage among it took a fifth of a dry run

if workflow.is_main_process:
    interrupt.end_at_once("snakemake")
else:
    # Slurm warns all processes of a job of its time limit; this one leads to the training, which saves then.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


#: The command line of the call, without what its profile adds; a job of a scheduler is a call of its own.
COMMAND_LINE = get_argument_parser().parse_args(sys.argv[1:]) if workflow.is_main_process else None


def site_name():
    """The profile's site."""
    resource = (workflow.resource_settings.default_resources or {}).get("site")
    text = getattr(resource, "raw", resource)
    return str(text).strip("'\"") if text else None


def prepare(name, prepared):
    """Call `prepared` before the method `name` of `workflow`, which Snakemake's parsed settings choose."""
    if workflow.is_main_process:
        setattr(workflow, name, in_turn(prepared, getattr(workflow, name)))


def keeps_going():
    """Whether a broken dataset fails in its own jobs only; a job's own process leaves it to its stage."""
    settings = workflow.execution_settings
    return not workflow.is_main_process or bool(settings and settings.keep_going)


def asked_names():
    """Return the targets of the command line: also those of options, which Snakemake adds to them."""
    if not workflow.is_main_process:
        return []
    named = (COMMAND_LINE.targets, COMMAND_LINE.prioritize, COMMAND_LINE.forcerun, COMMAND_LINE.until)
    return list(dict.fromkeys(str(word) for words in named for word in words or ()))


def asked_files():
    """The files that were asked for: by name, or as inputs of a target without files of its own."""
    return sorted(map(str, workflow.dag.derived_targetfiles))


def jobs_to_run():
    """The jobs that would run, target rules left out; by the time that it is asked a dry run has finished them."""
    return [job for job in workflow.dag.needrun_jobs(exclude_finished=False) if not job.rule.norun]


def requests_to_show():
    """What each job that would be submitted asks for, and its rule and wildcards, where commands are printed."""
    settings = workflow.output_settings
    if not settings.printshellcmds or settings.quiet:
        return []
    return [
        (dict(job.resources.items()), job.rule.name, job.wildcards)
        for job in jobs_to_run()
        if job.rule.name not in workflow._localrules  # a dry run takes all jobs for local ones
    ]


def reasons_to_run():
    """The same jobs with what Snakemake has against leaving them out."""
    return [reason_to_run(job) for job in jobs_to_run()]


def files_to_make():
    """The files of the same jobs."""
    return {str(file) for job in jobs_to_run() for file in job.output}


def reason_to_run(job):
    reason, persistence = workflow.dag.reason(job), workflow.persistence
    known = any(persistence.metadata(file) for file in job.output)
    forcing = workflow.dag_settings
    asked = forcing.forceall or forcing.forcetargets or forcing.forcerun
    return why.Waiting(
        job.rule.name,
        dict(job.wildcards.items()),
        # Temporary files are gone as soon as they were used: whoever needs them again has the reason.
        missing=[
            f"{file}/" if file.is_directory else str(file)
            for file in job.output  # in their order; Snakemake's reasons are a set
            if file in reason.missing_output and not (known and file in job.temp_output)
        ],
        known=known,
        failed=status.failure(Path(next(iter(job.log), "")), why.stage_of(job.rule.name)) is not None,
        before=sorted(reason.params_changed.only_old),
        now=sorted(reason.params_changed.only_new),
        newer=sorted(reason.updated_input),
        inputs=bool(reason.input_changed),
        follows=bool(reason.updated_input_run),
        # Snakemake forces what was cut short by itself (--rerun-incomplete).
        forced=bool(reason.forced and asked),
        interrupted=bool(reason.forced and not asked),
        command=bool(reason.code_changed),
    )


def failed_jobs():
    """Rule, wildcards and log of each job that failed."""
    jobs = workflow.scheduler.failed if workflow.scheduler is not None else ()
    alone = [each for job in jobs for each in (job.jobs if job.is_group() else [job])]
    return [(job.rule.name, dict(job.wildcards.items()), next(iter(job.log), "")) for job in alone]


def have_the_last_word(looked, nothing):
    """Have a call end with a word of ours: `looked` after a dry run, which returns its status; `nothing` if all was made."""

    def ended():
        if workflow.dryrun:
            return looked()
        if not workflow.dag:  # a graph without jobs is false
            nothing()
        return 0

    if workflow.is_main_process:
        workflow.execute = process.with_last_word(workflow.execute, ended)
