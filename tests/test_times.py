"""Where the time of a call went: jobs are found and counted by rule, and what the call used is said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from dlscale.core import progress
from dlscale.core.progress import Job


def job(results: Path, name: str, end: float, seconds: float, log: str | None) -> None:
    """Write what Snakemake and a stage leave of a job."""
    for folder, suffix, text in (
        ("benchmarks", ".tsv", f"s\th:m:s\tmax_rss\n{seconds:.4f}\t0:00:09\t-\n"),
        ("logs", ".log", log),
    ):
        if text is not None:
            path = results / folder / f"{name}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            os.utime(path, (end, end))


def test_jobs_are_those_that_ended_since_and_know_how_long_they_started(tmp_path: Path) -> None:
    job(tmp_path, "train/plan/a", 1010.0, 8.5, f"12:00:00 {progress.STARTED % 2.34}\nepoch 1 started in 9.9 s\n")
    job(tmp_path, "report", 1020.0, 1.0, None)
    job(tmp_path, "report/plan", 1021.0, 2.0, "no such line")
    job(tmp_path, "train/plan/old", 999.0, 50.0, progress.STARTED % 1.0)
    found = sorted(progress.jobs(tmp_path, 1000.0), key=lambda done: done.end)
    assert found == [Job("train", 1010.0, 8.5, 2.3), Job("report", 1020.0, 1.0, None), Job("report", 1021.0, 2.0, None)]
    assert progress.jobs(tmp_path / "nothing", 0.0) == []


def test_the_table_has_rules_by_their_time_and_what_was_used() -> None:
    done = [Job("configure", 106.0, 4.0, None), Job("train", 112.0, 8.0, 1.5), Job("train", 125.0, 10.0, 2.0)]
    assert progress.lines(done, 100.0, 130.0, cores=2, busy=15.0) == [
        "Where the time went: 30.0\u00a0s on 2 cores, of which this call used 25\u00a0%.",
        "             jobs        time  of which starting",
        "  train         2      18.0 s              3.5 s",
        "  configure     1       4.0 s",
    ]
    side = [*done, Job("train", 125.0, 25.0, None)]
    assert progress.lines(side, 100.0, 130.0)[0].endswith("Jobs ran side by side: their times are more in sum.")
    assert progress.lines(done, 100.0, 130.0)[0] == "Where the time went: 30.0\u00a0s."
    assert progress.lines([], 100.0, 130.0, 2, 1.0) == []


def test_a_stage_says_how_long_it_took_to_start(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "dlscale", "configure", "--settings", "{}", "--out", str(tmp_path / "plans/a.yaml")]
    subprocess.run([*words, "--log", str(tmp_path / "logs/configure/a.log")], check=True)
    job(tmp_path, "configure/a", 10.0, 1.0, None)
    (found,) = progress.jobs(tmp_path, 0.0)
    assert found.starting is not None and 0 < found.starting < 30
