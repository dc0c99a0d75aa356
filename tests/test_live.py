"""Output of a running call of Snakemake: progress, and records of Snakemake's log."""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from snakemake.logging import LoggerManager
from snakemake.settings.types import OutputSettings
from snakemake_interface_logger_plugins.common import LogEvent
from snakemake_interface_logger_plugins.registry import LoggerPluginRegistry
from snakemake_interface_logger_plugins.tests import TestLogHandlerBase

from dlscale.core import interrupt
from dlscale.core.progress import SUFFIX, StageStatus
from dlscale.preflight import status
from snakemake_logger_plugin_dlscale import TOLD, LogHandler
from tests.waiting import PATIENCE

# ---- progress ----------------------------------------------------------------------------------------


def work(folder: Path, name: str, seconds: float = 10.0, share: float = 1.0, rule: str = "train") -> status.Job:
    return status.Job(name, rule, str(folder / f"{name}.log"), str(folder / f"{name}.tsv"), seconds, True, share)


def says(job: status.Job, **more: object) -> None:
    """Write a job's status file, as a process on another machine would."""
    doing = {"what": "training", "done": 30, "total": 120, "unit": "steps", "left": 90.0, "time": time.time()}
    StageStatus.model_validate({**doing, "place": "elsewhere", "values": {"samples/s": 1234.0}, **more}).write(
        f"{job.log}{SUFFIX}"
    )


def end(job: status.Job, seconds: float | None = None) -> None:
    Path(job.benchmark).write_text(f"s\th:m:s\n{seconds or job.seconds}\t0:00:02\n")
    Path(f"{job.log}{SUFFIX}").unlink(missing_ok=True)


def test_the_remaining_work_is_estimated_as_time(tmp_path: Path) -> None:
    """Jobs that need all cores wait for one another; jobs that need some of the cores run in parallel."""
    now = time.time()
    whole = [work(tmp_path, name, 10) for name in "ab"]
    parts = [work(tmp_path, name, 4, 0.25) for name in "cdef"]
    progress = status.CallProgress(now, [*whole, *parts])
    progress.look(now)
    assert not progress.done and progress.left(now).seconds == 24 and progress.share(now) == 0
    for each in parts:
        end(each)
        os.utime(each.benchmark, (now, now - 0.01))  # a file's time may be 10 ms behind the clock
    progress.look(now + 5)
    assert list(progress.done) == parts and progress.left(now + 5).seconds == 20
    assert progress.share(now + 5) == pytest.approx(0.2)
    says(whole[0], left=15.0, time=now + 5)
    progress.look(now + 6)
    assert progress.left(now + 6).seconds == pytest.approx(14 + 10), "the job's own estimate must be used"
    says(whole[0], left=1.0, part=True, time=now + 6)
    progress.look(now + 6)
    assert progress.left_of(whole[0], now + 6).seconds == pytest.approx(10), "a part's end must not be the job's end"
    assert progress.left_of(whole[0], now + 106).seconds == pytest.approx(10), (
        "an overdue job needs a tenth of its time so far"
    )
    end(whole[0], 20)
    progress.look(now + 6)
    assert progress.left(now + 6).seconds == pytest.approx(10 * 36 / 26), (
        "the remaining job takes 36 / 26 of its estimate"
    )
    end(whole[1])
    progress.look(now + 20)
    assert progress.left(now + 20).seconds == 0 and progress.share(now + 20) == 1
    alone = [work(tmp_path, "alone", 100, 0.1), work(tmp_path, "beside it", 10, 0.1)]
    assert status.CallProgress(now, alone).left(now).seconds == 100, (
        "parallel jobs must take as long as the longest job"
    )


def test_a_call_with_jobs_never_timed_shows_the_jobs_that_are_done(tmp_path: Path) -> None:
    """With jobs that were never timed, the bar counts finished jobs, and the time left is a lower bound."""
    now = time.time()
    jobs = [work(tmp_path, "p.a", 10), *(replace(work(tmp_path, f"p.{n}", 0), timed=False) for n in "bc")]
    progress = status.CallProgress(now, jobs)
    shown = []
    for at, job in enumerate(jobs, start=1):
        shown.append([text.replace("\u00a0", " ") for text in progress.total(now)])
        end(job, 100)
        progress.look(now + at)
    assert shown == [
        ["0 %", "at least 10.0 s left", "0 of 3 jobs"],
        ["33 %", "time left unknown", "1 of 3 jobs"],
        ["67 %", "time left unknown", "2 of 3 jobs"],
    ]


def test_results_of_an_earlier_call_do_not_count_as_done(tmp_path: Path) -> None:
    one = work(tmp_path, "a")
    end(one)
    progress = status.CallProgress(time.time() + 10, [one])
    progress.look(time.time() + 10)
    assert not progress.done


def test_a_line(tmp_path: Path) -> None:
    """The line of progress names a running job, which has a status file, with its progress and speed."""
    now = time.time()
    jobs = [work(tmp_path, "p.a"), work(tmp_path, "p.b")]
    says(jobs[0], time=now)
    progress = status.CallProgress(now - 8, jobs)
    progress.look(now)
    assert re.fullmatch(
        r"7 % .*8\.00 s.*1 min 40 s.*0 of 2 jobs.*p\.a train: 30 of 120 steps \(25 %\).*1,234 samples/s.*1 min 30 s.*",
        status.progress_line(progress, now).replace("\u00a0", " "),
    )


def test_the_display_has_one_bar_and_a_line_per_running_job(tmp_path: Path) -> None:
    now = time.time()
    jobs = [work(tmp_path, f"p.{number}") for number in range(20)]
    says(jobs[0], time=now)
    for each in jobs[1:14]:
        says(each, what="starting", unit="", left=None, values={}, time=now)
    says(jobs[13], what="\033[2J[/red]", unit="", left=None, values={}, time=now)  # written by another user
    progress = status.CallProgress(now - 8, jobs)
    progress.look(now)
    console = Console(file=io.StringIO(), width=120)
    console.print(status.progress_bar(progress, now))
    assert isinstance(console.file, io.StringIO)
    first, *lines = console.file.getvalue().replace("\u00a0", " ").splitlines()
    assert first.split()[:2] == ["3", "%"] and "╸" in first
    assert re.split("  +", first.strip())[-2:] == ["0 of 20 jobs", "14 running"]
    assert re.split("  +", lines[0])[:3] == ["p.0", "train", "30 of 120 steps (25 %)"]
    assert lines[0].rstrip().endswith("1,234 samples/s  1 min 30 s left") and "starting" in lines[1]
    assert "[2J[/red]" in lines[-1] and "\033" not in console.file.getvalue()
    assert len(lines) == 14 and max(map(len, map(str.rstrip, [first, *lines[1:]]))) <= 80, (
        "lines must fit into 80 columns"
    )


# ---- the logger plugin -------------------------------------------------------------------------------


class TestInterface(TestLogHandlerBase):
    """Snakemake's own tests of logger plugins."""

    __test__ = True

    def get_log_handler_cls(self) -> type[LogHandler]:
        return LogHandler

    def get_log_handler_settings(self) -> None:
        return None


class Call:
    """Snakemake's log with dlscale's plugin, set up as in a real call."""

    def __init__(self, name: str, **settings: Any) -> None:
        found = LoggerPluginRegistry().get_plugin("dlscale").get_settings(None)
        self.log = logging.getLogger(name)
        self.log.propagate = False
        self.manager = LoggerManager(self.log, OutputSettings(log_handler_settings={"dlscale": found}, **settings))
        (handler,) = self.manager.get_log_handlers()
        assert isinstance(handler, LogHandler)
        self.handler = handler

    def says(self, text: str | None, level: int = logging.INFO, **fields: Any) -> None:
        self.log.log(level, text, extra=fields)

    def fails(self, jobid: int, why: str | None = None) -> None:
        """Log the records that Snakemake writes for a failed job; `why` is the executor's message."""
        whole = {"rule_name": "train", "rule_msg": why, "input": [], "output": [], "log": [], "conda_env": None}
        more = {"aux": {}, "shellcmd": "false", "container_img": None, "indent": False}
        self.says("RuleException: false", logging.ERROR, event=LogEvent.ERROR, exception="RuleException")
        self.says("Error in rule train", logging.ERROR, event=LogEvent.JOB_ERROR, jobid=jobid, **whole, **more)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Reset `interrupt.seen`, the flag of Ctrl-C, before and after each test."""
    interrupt.seen = False
    yield
    interrupt.seen = False


WARNING = "a warning"


def say_all(call: Call) -> None:
    """Log each kind of record once."""
    call.says("Building DAG of jobs...")
    call.says("Job stats:\ntotal 1\n", event=LogEvent.RUN_INFO, stats={})
    call.says(None, event=LogEvent.SHELLCMD, cmd="the command")
    call.says(WARNING, logging.WARNING)
    call.says("ours", **{TOLD: True})
    call.fails(1)
    call.says("WorkflowError: At least one", logging.ERROR, event=LogEvent.ERROR, exception="WorkflowError")
    call.says("FAILED p.a", **{TOLD: True})
    call.manager.stop()


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({}, [WARNING, "ours", "FAILED p.a"]),
        ({"dryrun": True, "stdout": True}, ["ours", "FAILED p.a"]),
    ],
)
def test_warnings_and_messages_of_the_rules_are_shown(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest, settings: dict[str, Any], shown: list[str]
) -> None:
    """A dry run prints Snakemake's warnings and the number of jobs to standard output, as Snakemake does."""
    say_all(Call(request.node.name, **settings))
    out, err = capsys.readouterr()
    assert err.splitlines() == shown
    assert out.splitlines() == (["Job stats:", "total 1", WARNING] if settings else [])


def test_with_printed_commands_snakemakes_messages_are_shown(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    say_all(Call(request.node.name, printshellcmds=True))
    said = capsys.readouterr().err
    ours = ("ours", "FAILED p.a")
    for text in ("Building DAG", "Job stats:", "the command", WARNING, "Error in rule train:", "At least one", *ours):
        assert said.count(text) == 1, text
    assert said.index("ours") < said.index("Error in rule train:") < said.index("FAILED p.a")


def test_an_executors_message_about_a_failed_job_is_shown(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """An executor's message about a failed job is shown, but not after Ctrl-C.

    For example, the message may contain Slurm's reason for a refused submission.
    """
    for interrupt.seen, shown in ((False, "train, job 3: sbatch failed: 'no such QOS'\n"), (True, "")):
        call = Call(request.node.name)
        call.fails(3, "sbatch failed: 'no such QOS'")
        call.manager.stop()
        assert capsys.readouterr().err == shown


def test_an_error_without_a_failed_job_is_shown(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    call = Call(request.node.name)
    call.says("WorkflowError: no rule", logging.ERROR, event=LogEvent.ERROR, exception="WorkflowError")
    call.manager.stop()
    assert capsys.readouterr().err == "WorkflowError: no rule\n"


def test_messages_of_the_rules_are_shown_after_ctrl_c(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    call = Call(request.node.name, printshellcmds=True)
    interrupt.seen = True
    call.fails(1)
    call.says("Interrupted.", **{TOLD: True})
    call.manager.stop()
    assert capsys.readouterr().err == "Interrupted.\n"


def test_a_retried_job_does_not_count_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """A restarted job is no longer listed as failed. Without a terminal, progress is printed in lines."""
    monkeypatch.setattr("snakemake_logger_plugin_dlscale.LINE_EVERY", 0.0)
    monkeypatch.setattr("snakemake_logger_plugin_dlscale.LOOK_EVERY", 0.05)
    call = Call(request.node.name)
    jobs = [work(tmp_path, "p.a"), work(tmp_path, "p.b")]
    call.handler.expect(jobs)
    said = ""

    def shows(text: str) -> None:
        nonlocal said
        end = time.monotonic() + PATIENCE
        while text not in said.splitlines()[-1:][0] if said else True:
            assert time.monotonic() < end, said
            time.sleep(0.05)
            said += capsys.readouterr().err.replace("\u00a0", " ")

    shows("0 of 2 jobs")
    call.fails(1)
    shows("0 of 2 jobs; 1 failed")
    call.says("Execute 1 jobs...", event=LogEvent.JOB_STARTED, jobs=[1])
    time.sleep(0.5)
    capsys.readouterr()
    said = ""
    shows("0 of 2 jobs")
    assert "failed" not in said
    end(jobs[0])
    shows("1 of 2 jobs")
    call.manager.stop()
    capsys.readouterr()
    time.sleep(0.2)
    assert capsys.readouterr().err == "", "no line may follow the end"


UNSEEN = """
import logging, pathlib, sys, time
from snakemake.logging import LoggerManager
from snakemake.settings.types import OutputSettings
from snakemake_interface_logger_plugins.registry import LoggerPluginRegistry
settings = LoggerPluginRegistry().get_plugin("dlscale").get_settings(None)
log = logging.getLogger("call")
manager = LoggerManager(log, OutputSettings(log_handler_settings={"dlscale": settings}))
print("ready", flush=True)
try:
    for number in range(600):
        log.warning("a word")
        time.sleep(0.05)
except KeyboardInterrupt:
    pathlib.Path(sys.argv[1]).touch()
"""


def test_a_call_with_closed_output_ends(tmp_path: Path) -> None:
    """A call whose output is closed ends, for example in `snakemake 2>&1 | head`."""
    command = [sys.executable, "-c", UNSEEN, str(tmp_path / "ended")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as call:
        assert call.stdout and call.stderr
        assert call.stdout.readline() == "ready\n"
        call.stderr.close()
        assert call.wait(timeout=PATIENCE) in (0, -signal.SIGINT)
    assert (tmp_path / "ended").exists()
