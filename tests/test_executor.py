"""dlscale's Slurm executor, which extends Snakemake's: which jobs stay active or end when Slurm's replies change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from snakemake_executor_plugin_slurm import Executor as SlurmExecutor
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo

from snakemake_executor_plugin_dlscale import FORGOTTEN_SECONDS, REFUSED, Executor


class Slurm:
    """Replies of `squeue`: None for no reply, else states by job number. Jobs in `ended` are reported as finished."""

    def __init__(self) -> None:
        self.states: dict[str, str] | None = {}
        self.ended: set[str] = set()
        self.clock = 0.0


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    replies = Slurm()

    async def check(self: Any, active_jobs: list[SubmittedJobInfo]) -> AsyncIterator[SubmittedJobInfo]:
        for job in active_jobs if replies.states is not None else []:
            if job.external_jobid in replies.ended:
                self.report_job_success(job)
            else:
                yield job

    async def query(command: str, logger: Any) -> tuple[Any, Any]:
        return replies.states, None if replies.states is None else 0.1

    monkeypatch.setattr(SlurmExecutor, "check_active_jobs", check)
    monkeypatch.setattr("snakemake_executor_plugin_dlscale.query_job_status", query)
    monkeypatch.setattr("snakemake_executor_plugin_dlscale.time.monotonic", lambda: replies.clock)
    return replies


@pytest.fixture
def executor() -> Executor:
    """Return an executor whose scheduler records the jobs that finished and failed."""
    made = Executor.__new__(Executor)
    made._checked, made._seen, made._refused, made._timers = [], {}, {}, []
    made.run_uuid, made.logger, made.ended = "uuid", logging.getLogger("test"), []
    made._submitted_job_clusters = set()
    scheduler = SimpleNamespace(
        finish_callback=lambda job: made.ended.append(("finished", job.name)),
        error_callback=lambda job: made.ended.append(("failed", job.name)),
    )
    made.workflow = SimpleNamespace(scheduler=scheduler, executor_settings=SimpleNamespace(requeue=False))
    made.print_job_error = lambda *_, **__: None
    return made


def job(number: str | None) -> SubmittedJobInfo:
    return SubmittedJobInfo(SimpleNamespace(name=f"job {number}", is_group=lambda: False), number)


def active(executor: Executor, jobs: list[SubmittedJobInfo]) -> list[SubmittedJobInfo]:
    async def listed() -> list[SubmittedJobInfo]:
        return [each async for each in executor.check_active_jobs(jobs)]

    return asyncio.run(listed())


def test_jobs_stay_active_without_a_reply(executor: Executor, slurm: Slurm) -> None:
    jobs = [job("1"), job("2_3")]
    slurm.states = None
    assert active(executor, jobs) == jobs and executor.ended == []
    slurm.states, slurm.ended = {"1": "COMPLETED", "2_3": "RUNNING"}, {"1"}
    assert active(executor, jobs) == jobs[1:] and executor.ended == [("finished", "job 1")]


@pytest.mark.parametrize("requeue", [False, True])
def test_a_preempted_job_has_failed_unless_slurm_requeues_it(executor: Executor, slurm: Slurm, requeue: bool) -> None:
    executor.workflow.executor_settings.requeue = requeue
    jobs = [job("1"), job("2")]
    slurm.states = {"1": "PREEMPTED", "2": "RUNNING"}
    assert active(executor, jobs) == (jobs if requeue else jobs[1:])
    assert executor.ended == ([] if requeue else [("failed", "job 1")])


def test_a_job_that_slurm_no_longer_lists_has_failed(executor: Executor, slurm: Slurm) -> None:
    """A job that Slurm has not listed for 15 minutes has failed. Slurm lists a pending array's jobs as the array."""
    jobs = [job("1"), job("2_3")]
    slurm.states = {"1": "RUNNING", "2": "PENDING"}
    assert active(executor, jobs) == jobs
    slurm.states = {"2": "PENDING"}
    slurm.clock += FORGOTTEN_SECONDS - 1
    assert active(executor, jobs) == jobs
    slurm.states = None
    slurm.clock += 10
    assert active(executor, jobs) == jobs
    slurm.states = {"2": "PENDING"}
    assert active(executor, jobs) == jobs[1:] and executor.ended == [("failed", "job 1")]


def test_jobs_under_query_are_cancelled_too(executor: Executor, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs whose status is being queried are cancelled, too, although Snakemake's list is empty during the query."""
    cancelled = list[str]()
    monkeypatch.setattr(
        SlurmExecutor, "cancel_jobs", lambda self, jobs: cancelled.extend(str(each.external_jobid) for each in jobs)
    )
    executor._checked = [job("1"), job("2")]
    executor.cancel_jobs([])
    assert cancelled == ["1", "2"]


@pytest.mark.parametrize(
    ("message", "again"),
    [
        ("sbatch: error: QOSMaxSubmitJobPerUserLimit", True),
        ("sbatch: error: AssocGrpSubmitJobsLimit\\nBatch job submission failed", True),
        ("sbatch: error: QOSMaxWallDurationPerJobLimit", False),
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)", True),
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", False),  # or submitted
        ("sbatch: error: invalid account", False),
    ],
)
def test_only_temporary_refusals_repeat_a_submission(message: str, again: bool) -> None:
    assert bool(REFUSED.search(message)) is again


def test_a_refused_submission_is_repeated_for_an_hour(
    executor: Executor, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = list[float]()
    timer = SimpleNamespace(start=lambda: None, cancel=lambda: None)
    monkeypatch.setattr(
        "snakemake_executor_plugin_dlscale.threading.Timer",
        lambda pause, function, arguments: pauses.append(pause) or timer,
    )
    refused = job(None)
    monkeypatch.setattr(SlurmExecutor, "report_job_submission", lambda self, job: None)
    executor.report_job_error(refused, "QOSMaxSubmitJobPerUserLimit")
    slurm.clock += 3600
    executor.report_job_submission(refused)
    pauses.clear()  # after a successful submission, the hour starts anew
    while not executor.ended:
        executor.report_job_error(refused, "QOSMaxSubmitJobPerUserLimit")
        slurm.clock += pauses[-1]
    assert pauses[:5] == [60, 120, 240, 480, 600] and 3600 <= sum(pauses) < 4200
    assert executor.ended == [("failed", "job None")]
