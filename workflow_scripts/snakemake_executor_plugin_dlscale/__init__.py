"""Snakemake's Slurm executor, extended for long calls: `executor: dlscale`.

The class extends the executor of snakemake-executor-plugin-slurm 2.8.0, below called the plugin, and has the same
settings, under the prefix `dlscale-`. Eight differences follow; docs/upstream.md has the reports to the plugin's
authors:

- If Slurm does not answer a status query, jobs stay active. The plugin forgets these jobs, and Snakemake waits forever.
- A preempted job that Slurm does not requeue counts as failed. The plugin waits for such a job forever.
- A job that Slurm has not listed for `FORGOTTEN_SECONDS` counts as failed. The plugin waits for such a job forever.
- A job in a final state that the plugin does not know (`ENDED`) counts as failed, and the log names jobs that Slurm
  holds or can never start. The plugin waits for such jobs forever, without a message.
- A submission that Slurm refuses because of a limit on the number of jobs, or does not answer, is repeated for an hour.
  If Slurm has accepted an unanswered submission, the executor adopts the accepted job instead. The plugin counts the
  job as failed.
- Slurm forgets an ended job after its `MinJobAge`. Between two status queries, at most half of this time passes (at
  least ten seconds). The plugin waits for up to 180 seconds, so the plugin may miss the end of a job.
- Ctrl-C cancels all jobs. The plugin cancels the known jobs first, and then submits the jobs that wait for `sbatch`.
- Status queries list only the user's own jobs. The plugin's queries list the jobs of all users.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import AsyncGenerator
from typing import Any

import snakemake_executor_plugin_slurm as plugin
from snakemake_executor_plugin_slurm import Executor as SlurmExecutor
from snakemake_executor_plugin_slurm import ExecutorSettings, common_settings
from snakemake_executor_plugin_slurm.job_status_query import get_min_job_age, query_job_status, query_job_status_squeue
from snakemake_executor_plugin_slurm.utils import get_job_wildcards
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo

__all__ = ["Executor", "ExecutorSettings", "common_settings"]

#: Seconds without an entry in `squeue` after which a job counts as lost. Ended jobs stay listed for `MinJobAge`.
FORGOTTEN_SECONDS = 900.0
#: Seconds for which a refused submission is repeated; first pause between two attempts; longest pause.
REFUSED_SECONDS, FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 3600.0, 60.0, 600.0
#: Pattern of Slurm's reasons for a temporary failure: a limit on submitted jobs, or a controller that does not answer.
TEMPORARY = re.compile(
    r"\b(?:QOS|Assoc)?(?:Max|Grp)Submit\w*|Unable to contact slurm controller|Socket timed out"
    r"|Rate limit exceeded|Zero Bytes were transmitted"
    r"|(?:Message (?:send|receive)|Communication (?:connection|shutdown)) failure"
)
#: Final states that the plugin takes for states of an active job; states of jobs that wait for a release.
ENDED = {"REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL"}
HELD = {"SPECIAL_EXIT", "REQUEUE_HOLD", "RESV_DEL_HOLD"}
#: Pattern of Slurm's reasons for a pending job that does not start without the user's action.
STUCK = re.compile(
    r"JobHeld\w*|.*held$|BadConstraints|DependencyNeverSatisfied|Partition(?:Time|Node)Limit|Invalid(?:Account|QOS)"
    r"|(?:Account|Qos|QOS)NotAllowed|Reservation(?:Deleted|Invalid)|(?:Assoc|QOS)Grp\w*(?<!Run)Minutes\w*"
    r"|(?:Assoc|QOS)(?:Max|Min)\w*(?:Minutes|PerJob|PerNode)\w*",
    re.IGNORECASE,
)
# The plugin has no setting for this. Without `--me`, Slurm's controller would send the jobs of all users.
plugin.query_job_status_squeue = lambda name: f"{query_job_status_squeue(name)} --me"


class Executor(SlurmExecutor):
    """Executor of Slurm jobs that survives outages of Slurm."""

    def __post_init__(self, test_mode: bool = False) -> None:
        self._checked: list[SubmittedJobInfo] = []  #: Jobs of the running status check that have not ended.
        self._seen: dict[str, float] = {}  #: Time when `squeue` last listed a job, by Slurm's job ID.
        self._reported: set[tuple[str, str]] = set()  #: Slurm's ID and state of stuck jobs that the log names.
        self._submitted: set[str] = set()  #: Slurm's IDs of all submitted jobs, for array jobs the ID of the array.
        self._refused: dict[int, tuple[float, float]] = {}  #: Start of attempts and next pause, s, by `id` of the job.
        super().__post_init__(test_mode)

    async def check_active_jobs(self, active_jobs: list[SubmittedJobInfo]) -> AsyncGenerator[SubmittedJobInfo]:
        """Yield the active jobs: all jobs that Slurm does not report as ended, and that are not lost."""
        self._checked = list(active_jobs)
        async for _ in super().check_active_jobs(active_jobs):
            pass  # `report_job_success` and `report_job_error` remove ended jobs from the list
        self.next_seconds_between_status_checks = min(
            self.next_seconds_between_status_checks,
            max(10, (get_min_job_age() or 3600) / 2),  # not more often than every ten seconds
        )
        if self._checked:
            await self._report_lost_jobs()
        for job in list(self._checked):
            yield job
        self._checked = []

    async def _report_lost_jobs(self) -> None:
        """Report as failed the jobs that Slurm preempted without requeueing, has ended, or no longer lists."""
        command = f"squeue --me --array --noheader --states=all --name={self.run_uuid} --format='%i|%T %r'"
        states, _ = await query_job_status(command, self.logger)
        if states is None:
            return
        now = time.monotonic()
        for job in list(self._checked):
            number = str(job.external_jobid)
            entry = states.get(number) or states.get(number.partition("_")[0]) or ""
            state, _, reason = entry.partition(" ")
            if state:
                self._seen[number] = now
            if state == "PREEMPTED" and not self.workflow.executor_settings.requeue:
                self.report_job_error(job, msg=f"Slurm preempted job {number}, and does not requeue it.")
            elif state in ENDED:
                self.report_job_error(
                    job, msg=f"Slurm ended job {number} in the state {state} ({reason or 'no reason'})."
                )
            elif state in HELD or (state == "PENDING" and STUCK.fullmatch(reason)):
                self._warn_of_stuck_job(number, state, reason)
            elif not state and now - self._seen.setdefault(number, now) > FORGOTTEN_SECONDS:
                minutes = FORGOTTEN_SECONDS / 60
                self.report_job_error(job, msg=f"Slurm has not listed job {number} for {minutes:.0f} minutes.")

    def _warn_of_stuck_job(self, number: str, state: str, reason: str) -> None:
        """Log once that a job does not start without the user's action, and name the action."""
        if (number, reason or state) in self._reported:
            return
        self._reported.add((number, reason or state))
        is_held = state in HELD or "held" in reason.lower()
        remedy = (
            f"Release it with `scontrol release {number}` (only administrators end an administrator's hold)"
            if is_held
            else "Correct the request or the limit"
        )
        self.logger.warning(
            f"Slurm job {number} does not start by waiting: state {state}, reason {reason or 'unknown'}. {remedy}, "
            f"or cancel it with `scancel {number}`."
        )

    def report_job_submission(self, job_info: SubmittedJobInfo) -> None:
        """Report a job as submitted, and forget its earlier refusals."""
        self._refused.pop(id(job_info.job), None)
        self._submitted.add(str(job_info.external_jobid).partition("_")[0])
        super().report_job_submission(job_info)

    def report_job_success(self, job_info: SubmittedJobInfo) -> None:
        """Report a job as finished."""
        self._end(job_info)
        super().report_job_success(job_info)

    def report_job_error(self, job_info: SubmittedJobInfo, msg: str | None = None, **kwargs: Any) -> None:
        """Report a job as failed, or try its submission again.

        Only temporary failures (`TEMPORARY`) lead to another try, for `REFUSED_SECONDS`.
        """
        self._end(job_info)
        if job_info.external_jobid is None and (reason := TEMPORARY.search(msg or "")):
            start, pause = self._refused.get(id(job_info.job), (time.monotonic(), FIRST_PAUSE_SECONDS))
            if time.monotonic() - start < REFUSED_SECONDS:
                self._refused[id(job_info.job)] = start, min(2 * pause, LONGEST_PAUSE_SECONDS)
                self.logger.warning(
                    f"Slurm refuses a job of rule {job_info.job.name}, or does not answer ({reason[0]}). The next "
                    f"attempt follows in {pause:.0f} s."
                )
                timer = threading.Timer(pause, self._try_again, [job_info.job])
                timer.daemon = True
                timer.start()
                return
        super().report_job_error(job_info, msg=msg, **kwargs)

    def _try_again(self, job: Any) -> None:
        """Submit a job again, unless Slurm accepted an earlier submission; then adopt the accepted job.

        An accepted job has the comment that the plugin gives to submissions of this job, and an ID that no submission
        has reported. Groups of jobs with the same name have the same comment, so their jobs are not adopted.
        """
        wildcards = get_job_wildcards(job)
        comment = f"rule_{job.name}" + (f"_wildcards_{wildcards}" if wildcards else "")
        command = f"squeue --me --noheader --states=all --name={self.run_uuid} --format='%i|%k'"
        found, _ = asyncio.run(query_job_status(command, self.logger))
        listed = {number.partition("_")[0] for number, each in (found or {}).items() if each == comment}
        accepted = min(listed - self._submitted, default="")
        if not self.wait:
            return  # the call ends
        if found is None or (accepted and job.is_group()):
            group = accepted and f"Slurm may have accepted this group of jobs as job {accepted}."
            failure = group or "Unable to contact slurm controller"
            self._report_job_error_threadsafe(SubmittedJobInfo(job), failure)
        elif accepted:
            self.logger.warning(
                f"sbatch failed, but Slurm accepted the job of rule {job.name} as job {accepted}: not resubmitted."
            )
            log = self.slurm_logdir / f"rule_{job.name}" / wildcards / f"{accepted}.log"
            self._report_job_submission_threadsafe(SubmittedJobInfo(job, accepted, aux={"slurm_logfile": log}))
        else:
            self.run_job(job)

    def _end(self, job_info: SubmittedJobInfo) -> None:
        self._checked = [job for job in self._checked if job is not job_info]

    def cancel(self) -> None:
        """Wait for running submissions, then cancel all jobs."""
        self.wait = False
        self._job_submission_executor.shutdown(cancel_futures=True)
        super().cancel()

    def cancel_jobs(self, active_jobs: list[SubmittedJobInfo]) -> None:
        """Cancel all jobs of this call, also jobs that Slurm accepted without an answer."""
        super().cancel_jobs([SubmittedJobInfo(None, f"--me --name={self.run_uuid}")])  # options of `scancel`
