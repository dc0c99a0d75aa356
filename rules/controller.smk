# What this workflow needs of Snakemake beyond what Snakemake offers publicly. All of it is here, each with its reason;
# after an upgrade of Snakemake, look here first.
#
#   the name of the site     `workflow.resource_settings`: of a profile, default resources alone reach the processes that
#                            Snakemake starts for its jobs.
#   the plans asked for      `sys.argv`: the targets are not known before the rules are read, and a run that the machine
#                            cannot do is said before; so is a target that is misspelt.
#   looking, or running      `sys.argv`: jobs of an earlier controller have to be waited for before Snakemake looks which
#                            results are there. `onstart` comes after that, and `--unlock` or `--lint` must wait for nobody.
#   the end of a dry run     `atexit`, `workflow._dag`: a dry run calls no hook.
#   jobs that would run      `workflow.dag.needrun_jobs`: their cost, and what they need.
#   why they would           `workflow.dag.reason`, `workflow.persistence`: said in words.
import atexit
import os
import re
import signal
import sys
from pathlib import Path

from dlscale.core.errors import UserError, unknown
from dlscale.core.lock import only_writer
from dlscale.preflight import why

if not workflow.is_main_process:
    # Slurm warns all processes of a job of its time limit; this one leads to the training, which saves then.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)

LOOKING = r"-\w*n\w*|--(dry-?run|unlock|lint|report|summary|detailed-summary|list.*|.*dag|rulegraph|filegraph)"


def site_name():
    """The profile's site."""
    resource = (workflow.resource_settings.default_resources or {}).get("site")
    text = getattr(resource, "raw", resource)
    return str(text).strip("'\"") if text else None


def asked_plans():
    """The plans that are named on the command line, or the targets."""
    named = {word.removeprefix("plan_") for word in sys.argv if word.startswith("plan_")} & set(CONFIG.plans)
    return named or CONFIG.workflow.targets


def check_targets():
    """Refuse a target of ours that is misspelt, with the nearest name: Snakemake has none."""
    known = {"plan": CONFIG.plans, "data": CONFIG.workflow.datasets, "study": STUDIES}
    for word in sys.argv[1:]:
        what, _, name = word.partition("_")
        if re.fullmatch(r"(plan|data|study)_[\w-]+", word) and name not in known[what] and not Path(word).exists():
            refuse(f"{word}: {unknown({'data': 'dataset'}.get(what, what), name, known[what])}")


def jobs_to_run():
    """Rule and wildcards of the jobs that would run; by the time that its cost is shown a dry run has finished them."""
    if not getattr(workflow, "_dag", None):
        return []
    return [(job.rule.name, job.wildcards) for job in workflow.dag.needrun_jobs(exclude_finished=False)]


def reasons_to_run():
    """The same jobs with what Snakemake has against leaving them out."""
    if not getattr(workflow, "_dag", None):
        return []
    return [reason_to_run(job) for job in workflow.dag.needrun_jobs(exclude_finished=False) if not job.rule.norun]


def reason_to_run(job):
    reason, persistence = workflow.dag.reason(job), workflow.persistence
    known = any(persistence.metadata(file) for file in job.output)
    return why.Waiting(
        job.rule.name,
        dict(job.wildcards.items()),
        # Temporary files are gone as soon as they were used: whoever needs them again has the reason.
        missing=[file for file in reason.missing_output if not (known and file in job.temp_output)],
        known=known,
        before=sorted(reason.params_changed.only_old),
        now=sorted(reason.params_changed.only_new),
        newer=sorted(reason.updated_input),
        inputs=bool(reason.input_changed),
        forced=bool(reason.forced),
        command=bool(reason.code_changed),
    )


def at_end_of_dry_run(show):
    """Call `show` when a dry run ends."""

    def ended():
        if workflow.dryrun:
            show()

    if workflow.is_main_process:
        atexit.register(ended)


HELD = []


def be_the_only_writer(folder, what):
    """Refuse to start where another call of Snakemake writes into `folder`; the lock is held until this one ends."""
    if workflow.is_main_process and not any(re.fullmatch(LOOKING, word) for word in sys.argv):
        lock = only_writer(Path(folder))
        try:
            lock.__enter__()
        except UserError as error:
            print(f"{what}: {error}", file=sys.stderr)
            sys.exit(2)
        HELD.append(lock)


def be_the_only_controller():
    """Refuse to start beside another call in this folder, and wait for jobs that an earlier one left in the queue."""
    be_the_only_writer(".snakemake", "Another call of snakemake is at work")
    if HELD:
        # Jobs of a call that is alive are not left over from an earlier one.
        slurm.wait_for_left_running(os.getcwd())
