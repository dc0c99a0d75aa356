"""dlscale's Slurm executor, which extends Snakemake's: which jobs stay active or end when Slurm's replies change."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import snakemake_executor_plugin_slurm as plugin
from snakemake_executor_plugin_slurm import Executor as SlurmExecutor
from snakemake_executor_plugin_slurm.job_status_query import query_job_status_squeue
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo

from snakemake_executor_plugin_dlscale import FORGOTTEN_SECONDS, TEMPORARY, Executor, ExecutorSettings


class Slurm:
    """Replies of `squeue`: None for no reply, else states by job number. Jobs in `ended` are reported as finished."""

    def __init__(self) -> None:
        self.states: dict[str, str] | None = {}
        self.ended: set[str] = set()
        self.clock, self.age = 0.0, 300


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
    monkeypatch.setattr("snakemake_executor_plugin_dlscale.get_min_job_age", lambda: replies.age)
    return replies


@pytest.fixture
def executor() -> Executor:
    """Return an executor whose scheduler records the jobs that finished and failed."""
    made = Executor.__new__(Executor)
    made._checked, made._seen, made._refused, made._submitted, made.wait = [], {}, {}, set(), True
    made.run_uuid, made.logger, made.ended = "uuid", logging.getLogger("test"), []
    made._submitted_job_clusters = set()
    scheduler = SimpleNamespace(
        finish_callback=lambda job: made.ended.append(("finished", job.name)),
        error_callback=lambda job: made.ended.append(("failed", job.name)),
    )
    made.workflow = SimpleNamespace(scheduler=scheduler, executor_settings=SimpleNamespace(requeue=False))
    made._reported, made.next_seconds_between_status_checks = set(), 180
    made.print_job_error = lambda *_, **__: None
    return made


def job(number: str | None) -> SubmittedJobInfo:
    return SubmittedJobInfo(SimpleNamespace(name=f"job {number}", is_group=lambda: False), number)


def active(executor: Executor, jobs: list[SubmittedJobInfo]) -> list[SubmittedJobInfo]:
    async def listed() -> list[SubmittedJobInfo]:
        return [each async for each in executor.check_active_jobs(jobs)]

    return asyncio.run(listed())


def test_status_queries_list_only_the_users_jobs() -> None:
    """If the query of Snakemake's plugin has `--me`, delete the patch, and the report in docs/upstream.md."""
    own = query_job_status_squeue("uuid")
    assert "--me" not in own and plugin.query_job_status_squeue("uuid") == f"{own} --me"
    assert plugin.Executor.check_active_jobs.__globals__["query_job_status_squeue"]("uuid").endswith("--me")


@pytest.mark.parametrize(("age", "expected"), [(None, 180), (600, 180), (300, 150), (120, 60), (2, 10)])
def test_slurm_is_queried_before_it_forgets_a_job(
    executor: Executor, slurm: Slurm, age: int | None, expected: float
) -> None:
    slurm.age = age
    active(executor, [job("1")])
    assert executor.next_seconds_between_status_checks == expected


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


@pytest.mark.parametrize("state", ["REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL"])
def test_a_job_in_a_final_state_has_failed(executor: Executor, slurm: Slurm, state: str) -> None:
    slurm.states = {"1": f"{state} None"}
    assert active(executor, [job("1")]) == [] and executor.ended == [("failed", "job 1")]


@pytest.mark.parametrize(
    ("state", "remedy"),
    [
        ("SPECIAL_EXIT", "scontrol release 1"),
        ("REQUEUE_HOLD launch failed requeued held", "scontrol release 1"),
        ("RESV_DEL_HOLD ReservationDeleted", "scontrol release 1"),
        ("PENDING JobHeldAdmin", "scontrol release 1"),
        ("PENDING PartitionTimeLimit", "scancel 1"),
        ("PENDING DependencyNeverSatisfied", "scancel 1"),
        ("PENDING AssocMaxCpuMinutesPerJobLimit", "scancel 1"),
        ("PENDING AssocGrpCPUMinutesLimit", "scancel 1"),
        *((f"PENDING {reason}", "") for reason in ("Priority", "Resources", "AssocGrpCPURunMinutesLimit", "(null)")),
        *((f"PENDING {reason}", "") for reason in ("AssocMaxJobsLimit", "QOSMaxJobsPerUserLimit", "Dependency")),
        ("RUNNING None", ""),
    ],
)
def test_a_stuck_job_is_reported_once(
    executor: Executor, slurm: Slurm, caplog: pytest.LogCaptureFixture, state: str, remedy: str
) -> None:
    """The log names the reason and the remedy once; the job stays active, since it may be released."""
    slurm.states, jobs = {"1": state}, [job("1")]
    assert active(executor, jobs) == jobs and active(executor, jobs) == jobs and executor.ended == []
    assert [remedy in line and state.rpartition(" ")[2] in line for line in caplog.messages] == [True] * bool(remedy)


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


@pytest.mark.parametrize(
    ("message", "again"),
    [
        ("sbatch: error: QOSMaxSubmitJobPerUserLimit", True),
        ("sbatch: error: AssocGrpSubmitJobsLimit\\nBatch job submission failed", True),
        ("sbatch: error: MaxSubmitJobsPerAccount", True),
        ("sbatch: error: Batch job submission failed: Rate limit exceeded, please retry later", True),
        ("sbatch: error: QOSMaxWallDurationPerJobLimit", False),
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)", True),
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", True),
        ("sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received", True),
        ("sbatch: error: Batch job submission failed: Message receive failure", True),
        ("sbatch: error: invalid account", False),
    ],
)
def test_only_temporary_failures_repeat_a_submission(message: str, again: bool) -> None:
    assert bool(TEMPORARY.search(message)) is again


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
    pauses.clear()  # after a successful submission, refusals are again retried for an hour
    while not executor.ended:
        executor.report_job_error(refused, "QOSMaxSubmitJobPerUserLimit")
        slurm.clock += pauses[-1]
    assert pauses[:5] == [60, 120, 240, 480, 600] and 3600 <= sum(pauses) < 4200
    assert executor.ended == [("failed", "job None")]


#: sbatch that registers a job and prints its ID. The first call times out: after the registration if the file `first`
#: contains `accepted`, otherwise without it.
SBATCH = """
accept() { echo "$(($(cat accepted | wc -l) + 7))|$comment" >>accepted; tail -n 1 accepted | cut -d '|' -f 1; }
for word; do [ "$last" = --comment ] && comment=$word; last=$word; done
echo call >>calls
[ "$(wc -l <calls)" = 1 ] && { [ "$(cat first)" = accepted ] && accept >/dev/null
    echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1; }
accept
"""
#: squeue that lists the registered jobs; the file `silent` has the number of first calls that fail.
SQUEUE = """[ "$(cat silent)" -gt 0 ] && { echo "$(($(cat silent) - 1))" >silent; exit 1; }
cat accepted"""


@pytest.fixture
def submitting(executor: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Executor:
    """Return an executor that submits to stand-ins of Slurm's commands in `tmp_path`, without pauses."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, script in (("sbatch", SBATCH), ("squeue", SQUEUE)):
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    for name, text in (("accepted", ""), ("silent", "0"), ("first", "accepted")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(
        "snakemake_executor_plugin_dlscale.threading.Timer",
        lambda pause, function, arguments: SimpleNamespace(start=lambda: function(*arguments)),
    )
    monkeypatch.setattr(
        SlurmExecutor,
        "report_job_submission",
        lambda self, job: self.ended.append((job.external_jobid, job.aux["slurm_logfile"].relative_to(tmp_path))),
    )
    executor.workflow.executor_settings = ExecutorSettings(status_command="squeue")
    executor.workflow.workdir_init = tmp_path
    executor.slurm_logdir, executor._failed_nodes, executor._main_event_loop = tmp_path, set(), None
    executor.get_account_arg = lambda job: iter([""])
    executor.get_partition_arg = lambda job: ""
    executor.format_job_exec = lambda job: "true"
    return executor


class Resources(dict[str, Any]):
    """Resources of a job, read by `get` or as attributes, as in Snakemake."""

    __getattr__ = dict.__getitem__


def to_submit(group: bool = False) -> SimpleNamespace:
    resources = Resources(nodes=1, runtime=5, mem_mb=100, cpus_per_task=1, slurm_extra="")
    more = {} if group else {"wildcards": ["plan", "run"]}
    rule = SimpleNamespace(name="train")
    return SimpleNamespace(
        name="train", rule=rule, is_group=lambda: group, resources=resources, threads=1, jobid=3, **more
    )


@pytest.mark.parametrize(
    ("first", "silent", "calls", "number"),
    [("accepted", 0, 1, "7"), ("accepted", 2, 1, "7"), ("lost", 0, 2, "7")],
    ids=["accepted", "squeue fails twice", "lost"],
)
def test_a_job_that_slurm_accepted_without_an_answer_is_adopted(
    submitting: Executor,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    first: str,
    silent: int,
    calls: int,
    number: str,
) -> None:
    """After a timeout of sbatch, the executor submits a second job only if Slurm lists no job of the first call."""
    (tmp_path / "first").write_text(first)
    (tmp_path / "silent").write_text(str(silent))
    submitting.run_job(to_submit())
    assert submitting.ended == [(number, Path(f"rule_train/plan_run/{number}.log"))]
    assert len((tmp_path / "calls").read_text().split()) == calls
    assert len((tmp_path / "accepted").read_text().splitlines()) == 1, "Slurm must have one job"
    # the display prints warnings only
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert any(f"as job {number}: not resubmitted." in text for text in warned) == (first == "accepted")


def test_no_job_is_submitted_after_ctrl_c(submitting: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C cancels all jobs by the call's name, after the running submissions; other jobs are not submitted."""
    Path("first").write_text("lost")
    Path("calls").write_text("call\n")  # the next submission succeeds
    for name, script in (("sbatch", f"sleep 0.5\n{SBATCH}"), ("scancel", 'echo "$*" >cancelled; cp accepted seen')):
        Path(name).write_text(f"#!/bin/bash\n{script}\n")
        Path(name).chmod(0o755)
    monkeypatch.setattr(submitting, "shutdown", lambda: submitting._job_submission_executor.shutdown())
    submitting.lock, submitting.active_jobs = threading.Lock(), []
    submitting._job_submission_executor = ThreadPoolExecutor(2)
    for _ in range(8):
        submitting._job_submission_executor.submit(submitting.run_job, to_submit())
    submitting.cancel()
    assert Path("cancelled").read_text().split() == ["--me", "--name=uuid"]
    assert Path("accepted").read_text() == Path("seen").read_text() and 1 <= len(submitting.ended) <= 2
    submitting._try_again(to_submit())
    assert Path("accepted").read_text() == Path("seen").read_text()


def test_the_job_of_an_earlier_try_is_not_adopted(submitting: Executor, tmp_path: Path) -> None:
    """A repeated job has the same comment as its failed first try, which Slurm still lists."""
    (tmp_path / "accepted").write_text("7_[2-3]|rule_train_wildcards_plan_run\n8|rule_train_wildcards_plan_other\n")
    (tmp_path / "first").write_text("lost")
    submitting._submitted = {"7"}
    submitting.run_job(to_submit())
    assert [number for number, _ in submitting.ended] == ["9"]


def test_a_group_that_slurm_may_have_accepted_has_failed(submitting: Executor, tmp_path: Path) -> None:
    """Groups of jobs have equal comments, so the executor cannot tell which group Slurm accepted."""
    messages = list[str]()
    submitting.print_job_error = lambda job, msg=None, **_: messages.append(msg)
    submitting.run_job(to_submit(group=True))
    assert submitting.ended == [("failed", "train")] and (tmp_path / "calls").read_text() == "call\n"
    assert "may have accepted this group of jobs as job 7" in str(messages)
