# Lock results: only one call at a time may change them. Run checks before Snakemake changes or shows results.
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
    """Exit if another call of Snakemake writes into `folder`; otherwise lock it until this call ends."""
    if workflow.is_main_process:
        lock = only_writer(Path(folder))
        try:
            lock.__enter__()
        except UserError as error:
            print(f"{what}{error}; see `dlscale status`", file=sys.stderr)
            sys.exit(2)
        HELD.append(lock)


def be_the_only_controller():
    """Exit if another call runs in this folder; wait for queued jobs of an earlier call."""
    be_the_only_writer(".snakemake", "Another call of snakemake is at work: ")
    if HELD:
        # Only the main process has the lock. All queued jobs now belong to an earlier call.
        try:
            slurm.wait_for_left_running(os.getcwd())
        except KeyboardInterrupt:
            refuse("Interrupted: no job was started. The jobs of the earlier call continue.")


def is_dry(executor_plugin=None, **_):
    """Return whether a call is a dry run: by its option, or by its executor."""
    return workflow.output_settings.dryrun or bool(executor_plugin and executor_plugin.common_settings.dryrun_exec)


def lock_results(**named):
    """Refuse to change results while another call changes results; a dry run needs no lock."""
    # Turn SIGTERM and SIGHUP (lost terminal) into KeyboardInterrupt, so that Snakemake removes its lock.
    interrupt.raise_again(signal.SIGTERM, signal.SIGHUP)
    if is_dry(**named) or HELD:
        return
    if SITE.scheduler:
        be_the_only_controller()
    # Snakemake locks this folder only; another checkout may use the same results folder.
    be_the_only_writer(RESULTS)


#: Non-empty if the call has --report. Such a call runs no jobs, so a failed check is printed but does not end the call.
REPORTING = []


def check_report(**_):
    """Refuse `--report` if a file for the report is missing: Snakemake would name one file, without a remedy."""
    REPORTING.append(True)
    # Snakemake's report would embed the configuration files, which contain secrets.
    if CONFIG.secrets:
        workflow.configfiles.clear()
    shown = {f"plan {name}": PLANS.shown_files(name, f"plan_{name}" in asked_names()) for name in ASKED_PLANS}
    for name in [*PLANS.datasets(ASKED_PLANS), *ASKED_DATASETS]:
        shown[f"data {name}"] = [PATHS.preview(name)]
    if not ASKED:
        shown["the page of all targets"] = [PAGE]
    missing = {name: gone for name, files in shown.items() if (gone := [f for f in files if not Path(f).exists()])}
    if missing:
        file = next(iter(missing.values()))[0]
        refuse(
            f"--report: unfinished: {', '.join(missing)} ({file} is not there); run the same command without --report "
            "first, or name finished targets, such as plan_NAME"
        )


def prepare_methods():
    """Let locks and checks precede the methods of Snakemake that change or show results."""
    for name in ("execute", "delete_output", "cleanup_metadata", "cleanup_shadow"):
        prepare(name, lock_results)
    for name in ("delete_output", "cleanup_metadata", "cleanup_shadow", "create_report", "unlock", "lint"):
        prepare(name, show_all)
    prepare("create_report", check_report)
