# One call at a time changes results. What each method of Snakemake needs before it begins.
import os
import signal
import sys
from pathlib import Path

from dlscale.core import interrupt
from dlscale.core.errors import UserError
from dlscale.core.process import only_writer
from dlscale.launch import slurm

#: Locks that this call holds until it ends.
HELD = []


def be_the_only_writer(folder, what=""):
    """Refuse to start where another call of Snakemake writes into `folder`; the lock is held until this one ends."""
    if workflow.is_main_process:
        lock = only_writer(Path(folder))
        try:
            lock.__enter__()
        except UserError as error:
            print(f"{what}{error} (dlscale status shows it)", file=sys.stderr)
            sys.exit(2)
        HELD.append(lock)


def be_the_only_controller():
    """Refuse to start beside another call in this folder, and wait for jobs that an earlier one left in the queue."""
    be_the_only_writer(".snakemake", "Another call of snakemake is at work: ")
    if HELD:
        # Jobs of a call that is alive are not left over from an earlier one.
        try:
            slurm.wait_for_left_running(os.getcwd())
        except KeyboardInterrupt:
            refuse("Interrupted: nothing was begun, and the jobs of the earlier call go on.")


def is_dry(executor_plugin=None, **_):
    """Return whether a call is a dry run: by its option, or by its executor."""
    return workflow.output_settings.dryrun or bool(executor_plugin and executor_plugin.common_settings.dryrun_exec)


def lock_results(**named):
    """Refuse to change results while another call does; a dry run changes nothing."""
    interrupt.raise_again(signal.SIGTERM, signal.SIGHUP)  # also of a lost terminal: Snakemake's lock must not stay
    if is_dry(**named) or HELD:
        return
    if SITE.scheduler:
        be_the_only_controller()
    # Snakemake's own lock is of this folder; another checkout may have the same `results`.
    be_the_only_writer(RESULTS)


#: Holds an entry when Snakemake's own report is being made: it shows what is there, and makes nothing.
REPORTING = []


def check_report(**_):
    """Refuse `--report` before all is made that it shows: Snakemake names one file, without what to do."""
    REPORTING.append(True)
    if CONFIG.secrets:  # it would show the files that the addresses stand in
        workflow.configfiles.clear()
    shown = {f"plan {name}": PLANS.shown_files(name, f"plan_{name}" in asked_names()) for name in ASKED_PLANS}
    for name in [*PLANS.datasets(ASKED_PLANS), *ASKED_DATASETS]:
        shown[f"data {name}"] = [PATHS.preview(name)]
    if not ASKED:
        shown["the page of all"] = [PAGE]
    missing = {name: gone for name, files in shown.items() if (gone := [f for f in files if not Path(f).exists()])}
    if missing:
        file = next(iter(missing.values()))[0]
        refuse(
            f"--report: unfinished: {', '.join(missing)} ({file} is not there); run the same command without --report "
            "first, or name finished targets, such as plan_NAME"
        )


def prepare_methods():
    """Have each method that changes results, or shows them, begin with what it needs."""
    for name in ("execute", "delete_output", "cleanup_metadata", "cleanup_shadow"):
        prepare(name, lock_results)
    for name in ("delete_output", "cleanup_metadata", "cleanup_shadow", "create_report", "unlock", "lint"):
        prepare(name, show_all)
    prepare("create_report", check_report)
