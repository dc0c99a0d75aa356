"""`dlscale status`, the progress that a stage reports, logs of several attempts, the time spent by rule, and Ctrl-C."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlscale.cli import main
from dlscale.config import resolve
from dlscale.core import progress
from dlscale.core.errors import UserError
from dlscale.core.metrics import Epoch
from dlscale.core.progress import SUFFIX, Job, Progress, StageStatus
from dlscale.core.text import duration
from dlscale.preflight import cost, status
from dlscale.report import sections
from dlscale.results import read_plan
from tests.conftest import variables
from tests.test_report import Results
from tests.waiting import PATIENCE, until

RUNS = {"a": {}, "b": {}}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "results"


def configuration(results: Path, **more: Any) -> resolve.Configuration:
    """Return the configuration of a plan with two trainings."""
    raw = {
        "results": str(results),
        "targets": ["p"],
        "datasets": {"d": {"kind": "starter", "source": {"kind": "simulated"}}},
        "plans": {
            "p": {"study": "starter_cnn", "settings": {"dataset": "d"}, "measure": ["train"], "runs": RUNS},
        },
    }
    return resolve.load(raw | more)


def rows(results: Path) -> dict[str, status.Row]:
    """Return the rows of the plan's status by run name."""
    return {row.name: row for row in status.look(configuration(results), ["p"])}


def write_training_status(results: Path, run: str = "a", **values: Any) -> None:
    doing = {"what": "training", "done": 30, "total": 120, "unit": "steps", "left": 90.0, "time": time.time()}
    file = results / f"logs/train/p/{run}.log{SUFFIX}"
    file.parent.mkdir(parents=True, exist_ok=True)
    StageStatus.model_validate({**doing, "values": {"loss": 0.25, "samples/s": 1234.0}, **values}).write(file)


def epoch(number: int) -> str:
    return Epoch(
        epoch=number,
        step=10 * number,
        samples=80 * number,
        learning_rate=0.1,
        train_loss=0.5,
        valid_loss=0.625,
        epoch_seconds=2.0,
        samples_per_second=40.0,
    ).text()


def test_only_trials_that_may_train_are_expected(results: Path) -> None:
    """For later rungs of a sweep, only the number of trials is known. After the last rung, no row is waiting."""
    halving = {"method": "halving", "over": {"seed": [1, 2, 3]}, "reduction_factor": 3}
    plan = {"study": "starter_cnn", "kind": "sweep", "settings": {"dataset": "d", "training": {"epochs": 3}}}
    asked = configuration(results, plans={"p": {**plan, "sweep": halving}})
    names = [row.name for row in status.look(asked, ["p"])]
    assert len(asked.plans["p"]) == 6 and len(names) == 1 + 3 + 1, names
    for run in ("seed-1-rung0", "seed-2-rung0", "seed-3-rung0", "seed-2-rung1"):
        folder = results / "plans/p" / run
        folder.mkdir(parents=True)
        for file in ("metrics.jsonl", "provenance.json"):
            (folder / file).write_text(epoch(1))
    rows = [row for row in status.look(asked, ["p"]) if not row.of_data]
    assert {row.name: row.state for row in rows} == dict.fromkeys(
        ["p.seed-1-rung0", "p.seed-2-rung0", "p.seed-3-rung0", "p.seed-2-rung1"], "done"
    )


def timed(results: Path, **seconds: float) -> None:
    """Write Snakemake's benchmark files of earlier trainings, with the given seconds by run."""
    for run, took in seconds.items():
        benchmark = results / f"benchmarks/train/p/{run}.tsv"
        benchmark.parent.mkdir(parents=True, exist_ok=True)
        benchmark.write_text(f"s\th:m:s\n{took}\t0:00:16\n")


def test_parallel_runs_take_the_time_of_one_run(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    timed(results, a=16.0, b=16.0)
    for threads, times in ((1, 1), (2, 2)):
        plan = {"study": "starter_cnn", "settings": {"dataset": "d", "threads": threads}, "measure": ["train"]}
        asked = configuration(results, plans={"p": {**plan, "runs": RUNS}})
        runs = [row for row in status.look(asked, ["p"]) if not row.of_data]
        for state in ("waiting", "failed"):  # the next call would run both runs
            runs = [replace(row, state=state) for row in runs]
            assert status.left_of(asked, runs) == cost.Expected(times * 16.0)
        last = StageStatus(what="training", left=0.0)
        assert status.left_of(asked, [replace(row, state="running", doing=last) for row in runs]) == cost.Expected(0.0)


def test_a_run_killed_on_this_machine_is_silent(results: Path) -> None:
    """A process that was killed on this machine counts as silent at once, however recent its last report is."""
    code = "import sys; print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "dlscale"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdout.readline()
        write_training_status(results, place=progress.place(), pid=process.pid)
        write_training_status(
            results, "b", place=progress.place(), pid=os.getppid() if os.getppid() > 1 else 1, time=time.time()
        )
        found = rows(results)
        assert found["p.a"].state == "running" and found["p.b"].state == "silent", (
            "another program with the same process ID must not count"
        )
        (line,) = [each for each in status.lines(found.values()) if each.startswith("p.a")]
        assert line.split("  ")[-1].strip() == "–" and "30 of 120 steps (25\u00a0%)" in line, line
        assert "0.2500" in line and "1,234" in line and "1\u00a0min 30\u00a0s" in line
        process.kill()
    row = rows(results)["p.a"]
    assert row.state == "silent" and row.error and row.error.startswith("no status since ")


@pytest.mark.parametrize(("age", "state"), [(5, "running"), (status.SILENT + 5, "silent")])
def test_a_run_on_another_machine_must_report(results: Path, age: float, state: str) -> None:
    write_training_status(results, place="another machine", pid=1, time=time.time() - age)
    assert rows(results)["p.a"].state == state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "state"),
    [
        ("dlscale train: p.yaml: no such file", "failed"),
        ("dlscale train: asked to end; saved after step 3 of 9; run it again", "failed"),
        ("dlscale train: interrupted", "done"),
        ("epoch 1 of 2: 3.0 s", "done"),
    ],
)
def test_the_reason_of_a_failure_is_the_last_log_line(results: Path, last: str, state: str) -> None:
    """The reason is in the last line of the log; the message of an earlier failed attempt is ignored."""
    log = results / "logs/train/p/a.log"
    log.parent.mkdir(parents=True)
    log.write_text(f"dlscale train: of an earlier try\n{'x' * 5000}\n{last}\n\n")
    run = results / "plans/p/a"
    run.mkdir(parents=True)
    (run / "provenance.json").write_text("{}")
    (run / "metrics.jsonl").write_text(f"{epoch(1)}\n{epoch(2)}\n")
    row = rows(results)["p.a"]
    assert row.state == state and row.epoch and row.epoch.epoch == 2
    assert row.error == (None if state == "done" else last.removeprefix("dlscale train: "))
    text = status.lines([row])
    assert text[0] == f"1 {state}" and "epoch 2" in text[3]


def test_a_part_of_a_stage_is_named_without_the_stages_end(results: Path) -> None:
    def line(**more: Any) -> str:
        counted = {"what": "measuring loading", "part": True, "unit": "trials", "total": 4}
        write_training_status(results, place="another machine", pid=1, **counted, **more)
        (line,) = [line for line in status.lines(rows(results).values()) if line.startswith("p.a ")]
        return line

    assert "measuring loading: 2 of 4 trials (50\u00a0%)  –" in line(done=2, left=3.0)


def test_jobs_in_the_queue(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The list contains only Slurm's jobs that were submitted from this folder."""
    squeue = tmp_path / "bin/squeue"
    squeue.parent.mkdir()
    listed = f"17|PENDING|{tmp_path}|rule_train_wildcards_p_a\n18|RUNNING|/elsewhere|rule_train_wildcards_p_b"
    squeue.write_text(f"#!/bin/sh\necho '{listed}'\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    args = argparse.Namespace(plans=[], json=False, watch=False)
    site = {"scheduler": {"cpu_nodes": {"cpus": 32}, "gpu_nodes": {"cpus": 64, "gpus": 4}}}
    assert status.main(args, configuration(results, site=site)) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "In the queue: 17 (train p_a, pending)"
    args.json = True
    assert status.main(args, configuration(results, site=site)) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["queue"] == ["17 (train p_a, pending)"]
    assert [(row["name"], row["state"]) for row in told["rows"]] == [(n, "waiting") for n in ("data d", "p.a", "p.b")]


def test_the_queue_is_not_queried_with_each_update(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--watch` queries Slurm's queue once a minute, because all users share Slurm."""
    now, queries = 0.0, 0

    def later(seconds: float) -> None:
        nonlocal now
        now += seconds

    def queue(folder: str) -> list[str]:
        nonlocal queries
        queries += 1
        return ["17 (train p_a, pending)"]

    looks = iter([[status.Row("p.a", "train", state)] for state in (*["waiting"] * 30, "done")])
    monkeypatch.setattr(status.time, "monotonic", lambda: now)
    monkeypatch.setattr(status.time, "sleep", later)
    monkeypatch.setattr(status.slurm, "left_running", queue)
    monkeypatch.setattr(status, "look", lambda *_: next(looks))
    nodes = {"cpus": 1}
    site = {"starter": "srun", "scheduler": {"cpu_nodes": nodes, "gpu_nodes": nodes}}
    assert status.main(argparse.Namespace(plans=[], json=False, watch=True), configuration(results, site=site)) == 0
    assert queries == 3  # in 150 s
    assert capsys.readouterr().out.count("In the queue: 17") == 31


def test_watched_until_all_is_done(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--watch` prints the status repeatedly, and ends when all runs are done."""
    states: list[status.State] = ["waiting", "running", "running", "done"]
    looks = iter([[status.Row("p.a", "train", state)] for state in states])
    monkeypatch.setattr(status, "EVERY", 0.0)
    monkeypatch.setattr(status, "look", lambda *_: next(looks))
    assert status.main(argparse.Namespace(plans=[], json=False, watch=True), configuration(results)) == 0
    assert "1 done" in capsys.readouterr().out.splitlines()


def test_watched_until_nothing_follows_a_failure(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a failure, `--watch` ends when no job has run for a minute, because other jobs or a retry may follow."""
    now, looks = 100.0, 0

    def later(seconds: float) -> None:
        nonlocal now, looks
        now, looks = now + seconds, looks + 1
        if looks == 4:  # the job is tried again
            write_training_status(results, place="another machine", pid=1)
        elif looks == 6:
            Path(f"{log}{SUFFIX}").unlink()
        assert looks < 100, "the command must end"

    monkeypatch.setattr(status.time, "monotonic", lambda: now)
    monkeypatch.setattr(status.time, "sleep", later)
    log = results / "logs/train/p/a.log"
    log.parent.mkdir(parents=True)
    log.write_text("dlscale train: no space left\n")
    assert status.main(argparse.Namespace(plans=[], json=False, watch=True), configuration(results)) == 1
    assert looks == 5 + status.IDLE / status.EVERY
    assert capsys.readouterr().out.splitlines()[-1] == "p.a train: no space left"


def test_waiting_runs_are_one_line_per_plan(results: Path) -> None:
    """Totals and the time left come first, then running rows, then one line of waiting runs per plan."""
    write_training_status(results, "b", place="another machine", pid=1)
    asked = configuration(results)
    found = status.look(asked, ["p"])
    data = cost.data_jobs(asked.workflow.datasets["d"], None)
    left = status.left_of(asked, found)
    assert left == cost.Expected(90.0, untimed=1 + data), (
        "the run's own estimate counts; the other jobs were never timed"
    )
    text = status.lines(found, left=left)
    assert text[0] == f"1 running, 2 waiting; at least {duration(90)} left"
    assert [line.split("  ")[0] for line in text[1:4]] == ["", "run", "p.b"]
    assert text[4:] == ["", "waiting: d (1 data)", "waiting: p (1 train)"]
    timed(results, a=7.5)
    assert status.left_of(asked, found) == cost.Expected(97.5, untimed=data), "the time of an earlier run must count"
    assert status.left_of(asked, [replace(row, state="done") for row in found]) == cost.Expected()


def test_the_totals_are_those_of_the_table(results: Path) -> None:
    """A finished dataset has a row in the table, because the totals count this dataset."""
    rows_ = [status.Row("data d", "data", "done"), status.Row("p.a", "train", "done")]
    text = status.lines(rows_)
    assert text[0] == "2 done" and [line.split()[:2] for line in text[3:]] == [["data", "d"], ["p.a", "train"]]


def test_jobs_that_failed_alike_share_a_line(tmp_path: Path) -> None:
    """Both parts of a dataset fail with one message; a message that names its log names the log once."""
    logs = [tmp_path / name for name in ("train.log", "valid.log", "a.log", "old.log")]
    for log in logs[:2]:
        log.write_text("dlscale preprocess: a.npz: no array x\n")
    logs[2].write_text(f"dlscale train: a defect of dlscale: KeyError; see the traceback in the log {logs[2]}\n")
    logs[3].write_text("dlscale train: old\n")
    os.utime(logs[3], (1, 1))
    parts = [("preprocess", {"dataset": "d", "split": name, "part": name}) for name in ("train", "valid")]
    runs = [("train", {"plan": "p", "run": name}) for name in ("a", "b")]
    jobs = [(*job, str(log)) for job, log in zip(parts + runs, logs, strict=True)]
    assert status.describe_failures(jobs, 1000.0) == [
        f"FAILED data d (preprocess): a.npz: no array x; log: {logs[0]}, {logs[1]}",
        f"FAILED p.a (train): a defect of dlscale: KeyError; see the traceback in the log {logs[2]}",
        "FAILED p.b (train): it did not start; the reason is in the lines above",
    ]


def test_datasets_in_preparation_are_listed(results: Path) -> None:
    file = results / f"logs/preprocess/d/train/train-0.log{SUFFIX}"
    file.parent.mkdir(parents=True)
    StageStatus(what="preprocessing train/train", done=1, total=4, unit="rows", place="another machine").write(file)
    row = rows(results)["data d"]
    assert row.state == "running" and row.stage == "preprocessing train/train"
    (results / "data/d").mkdir(parents=True)
    (results / "data/d/manifest.json").write_text("{}")
    file.unlink()
    assert rows(results)["data d"].state == "done"


@pytest.mark.slow
def test_a_plan_of_a_file_that_was_not_named(results: Path) -> None:
    args = argparse.Namespace(plans=["mine"], json=False, watch=False)
    with pytest.raises(UserError) as refused:
        status.main(args, configuration(results))
    assert "--configfile" not in str(refused.value)
    (results / "plans/mine").mkdir(parents=True)
    (results / "plans/mine/plan.yaml").touch()
    with pytest.raises(UserError, match=r"made from another configuration; .*--configfile"):
        status.main(args, configuration(results))


def test_a_measured_run_has_one_speed_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The speed is the rate of FULL or, without FULL, the median rate of the epochs after the first."""
    monkeypatch.chdir(tmp_path)
    made = Results(tmp_path / "results")
    for name, triplet, speed in (("a", (200.0, 25.0, 22.0), "22.0"), ("b", None, "22.5")):
        measure = ("train", "throughput") if triplet else ("train",)
        made.run("p", name, triplet=triplet)
        made.plan("p", {name: name}, measure=measure)
        plan = {"study": "starter_cnn", "settings": {"dataset": "d"}, "measure": [*measure], "runs": {name: {}}}
        asked = configuration(made.root, plans={"p": plan})
        text = [line for line in status.lines(status.look(asked, ["p"])) if line.startswith("p.")]
        assert [f"  {speed} samples/s  " in line for line in text] == [stage == measure[-1] for stage in measure], text
        assert sum("samples/s" in line for line in text) == 1
        assert f"{speed} samples/s" in sections.line(read_plan(made.root / "plans/p/plan.yaml"))
        for command in ("history", "compare"):
            assert main([command, *["p"] * (2 if command == "compare" else 1)]) == 0
            assert f" {speed} " in capsys.readouterr().out


# ---- progress of a stage -----------------------------------------------------------------------------


def test_progress_has_count_time_left_and_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Progress has a count, the time left at this process's pace, and values. A finished stage leaves no file."""
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    caplog.set_level(logging.INFO)
    log = tmp_path / "a.log"
    with progress.status_file(log):
        file = Path(f"{log}{SUFFIX}")
        assert StageStatus.read(file).what == "starting"
        with Progress("training", 100, "steps", lambda: {"loss": 0.5, "odd": float("nan")}) as counted:
            now += 1
            counted.update(41)  # an earlier attempt made 40 steps
            now += 12
            counted.update(53)
            doing = StageStatus.read(file)
            assert (doing.done, doing.total, doing.unit, doing.values) == (53, 100, "steps", {"loss": 0.5})
            assert doing.left == pytest.approx(47.0), "the pace must be one step per second"
            assert (doing.pid, doing.place) == (os.getpid(), progress.place())
    assert not file.exists()
    assert "training: 53 of 100 (53 %) steps, 13 s, loss 0.500, odd NaN, 47.0\u00a0s left" in caplog.text
    assert caplog.text.count("53 of 100") == 1


def test_an_unwritable_status_file_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with progress.status_file(tmp_path / "file" / "a.log"):
        progress.write_status(StageStatus(what="x"))


LOG = """
import os
import sys
from pathlib import Path
from dlscale.core import process
path, kept, resumed, text = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "resumed", sys.argv[4]
process.redirect(path)
print(text, "begins", flush=True)
os.system("echo a child")
process.keep_log(kept, resumed)
print(text, "ends", flush=True)
"""


def test_a_resumed_log_continues_a_removed_log(tmp_path: Path) -> None:
    path, kept = tmp_path / "logs/a.log", tmp_path / "rank0.log"

    def tried(text: str, how: str) -> str:
        subprocess.run([sys.executable, "-c", LOG, path, kept, how, text], check=True, env=variables())
        assert kept.samefile(path)
        return path.read_text()

    first, second, third = (f"{text} begins\na child\n{text} ends\n" for text in ("first", "second", "third"))
    assert tried("first", "anew") == first
    path.unlink()  # Snakemake also removes the log before each try
    assert tried("second", "resumed") == first + second
    assert tried("third", "resumed") == first + second + third, "an existing log must be continued"
    path.unlink()
    assert tried("third", "anew") == third
    kept.unlink()
    assert tried("second", "resumed") == second, "without a kept log, only the new lines must be in the log"
    assert sorted(tmp_path.iterdir()) == [path.parent, kept]


@pytest.mark.parametrize(
    "trap", [lambda kept, private: kept.symlink_to(private), lambda kept, private: os.mkfifo(kept)]
)
def test_a_kept_log_that_another_user_replaced_is_not_read(tmp_path: Path, trap: Callable[[Path, Path], Any]) -> None:
    path, kept, private = tmp_path / "a.log", tmp_path / "rank0.log", tmp_path / "private"
    private.write_text("secret")
    trap(kept, private)
    ended = subprocess.run([sys.executable, "-c", LOG, path, kept, "resumed", "it"], env=variables(), timeout=60)
    assert ended.returncode and "secret" not in path.read_text() and str(kept) in path.read_text()


def test_a_log_that_cannot_be_kept_is_a_line_in_it(tmp_path: Path) -> None:
    path, kept = tmp_path / "a.log", tmp_path / "absent/rank0.log"
    begun = LOG.replace("import os\n", "import logging, os\nlogging.basicConfig(level=20)\n", 1)
    subprocess.run([sys.executable, "-c", begun, path, kept, "resumed", "it"], check=True, env=variables())
    begins, child, said, ends = path.read_text().splitlines()
    assert (begins, child, ends) == ("it begins", "a child", "it ends")
    assert "cannot keep this log for a later try: " in said and str(kept.parent) in said


def test_a_training_that_begins_anew_leaves_no_log_of_another(tmp_path: Path) -> None:
    """The earlier log is removed even if the new log cannot be kept, here because the file systems differ."""
    path, memory = tmp_path / "a.log", Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("/dev/shm and the temporary folder are on the same file system")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        kept = Path(folder, "rank0.log")
        kept.write_text("of another training\n")
        subprocess.run([sys.executable, "-c", LOG, path, kept, "anew", "it"], check=True, env=variables())
        assert path.read_text() == "it begins\na child\nit ends\n" and not list(Path(folder).iterdir())


def test_control_characters_of_a_log_are_not_printed(tmp_path: Path) -> None:
    (log := tmp_path / "a.log").write_text("dlscale train: boom \033[2J\033]0;title\007")
    assert status.last_word(log, "train") == "boom  [2J ]0;title "


def test_a_pipe_is_no_log(tmp_path: Path) -> None:
    """A pipe is refused as a log, because writing to a pipe would wait for a reader."""
    os.mkfifo(path := tmp_path / "pipe")
    words = [sys.executable, "-m", "dlscale", "configure", "--settings", "{}", "--out", tmp_path / "a.yaml"]
    ended = subprocess.run([*words, "--log", path], capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 2 and path.is_fifo()
    assert ended.stderr.startswith(f"dlscale configure: {path}: a link, pipe or device; expected a file"), ended.stderr


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_the_times_of_jobs_are_read_from_files_alone(tmp_path: Path, kind: str) -> None:
    """Only regular files are read. Reading a pipe instead of a log or a benchmark would wait forever."""
    for name, seconds in (("a", 3.0), ("b", 4.0), ("c", 5.0)):
        job(tmp_path, name, 1.0, seconds, None)
    for path in (tmp_path / "benchmarks/b.tsv", tmp_path / "logs/c.log"):
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        os.mkfifo(path) if kind == "pipe" else path.symlink_to("/etc/passwd")
    assert [each.rule for each in progress.jobs(tmp_path, 0.0)] == ["a"]


# ---- time spent by a call ------------------------------------------------------------------------------


def job(results: Path, name: str, end: float, seconds: float, log: str | None) -> None:
    """Write the files that Snakemake and a stage leave after a job."""
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


def test_the_table_has_rules_by_time_and_the_used_cores() -> None:
    done = [Job("configure", 106.0, 4.0, None), Job("train", 112.0, 8.0, 1.5), Job("train", 125.0, 10.0, 2.0)]
    assert progress.lines(done, 100.0, 130.0, cores=2, busy=15.0) == [
        "Where the time went: 30.0\u00a0s on 2 cores; this call used 25\u00a0% of these cores.",
        "             jobs        time  of which starting",
        "  train         2      18.0 s              3.5 s",
        "  configure     1       4.0 s",
    ]
    side = [*done, Job("train", 125.0, 25.0, None)]
    assert "Jobs ran in parallel" in progress.lines(side, 100.0, 130.0)[0]
    assert progress.lines(done, 100.0, 130.0)[0] == "Where the time went: 30.0\u00a0s."
    assert progress.lines([], 100.0, 130.0, 2, 1.0) == []


def test_a_stage_reports_its_start_time(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "dlscale", "configure", "--settings", "{}", "--out", str(tmp_path / "plans/a.yaml")]
    subprocess.run([*words, "--log", str(tmp_path / "logs/configure/a.log")], check=True)
    job(tmp_path, "configure/a", 10.0, 1.0, None)
    (found,) = progress.jobs(tmp_path, 0.0)
    assert found.starting is not None and 0 < found.starting < 30


# ---- Ctrl-C ------------------------------------------------------------------------------------------


INTERRUPTIBLE = """
import os, signal, time
from dlscale.core.interrupt import end_at_once, raise_again
end_at_once("first")
end_at_once("second")
{then}
os.kill(os.getpid(), signal.SIGINT)
time.sleep(10)
"""


@pytest.mark.parametrize(
    ("then", "status", "said"),
    [
        ("", 130, "first: interrupted\n"),
        ("raise_again()", -signal.SIGINT, "KeyboardInterrupt\n"),
        ("raise_again(); end_at_once('')", 130, ""),
    ],
)
def test_ctrl_c_is_one_line_until_there_is_something_to_clean_up(then: str, status: int, said: str) -> None:
    command = [sys.executable, "-c", INTERRUPTIBLE.format(then=then)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr[-len(said) :]) == (status, said)
    assert bool(done.stderr) == bool(said)


def test_ctrl_c_stays_ignored() -> None:
    command = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", sys.executable, "-c"]
    code = INTERRUPTIBLE.format(then="raise_again(); end_at_once('third')").replace("sleep(10)", "sleep(0)")
    done = subprocess.run([*command, code], stderr=subprocess.PIPE, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")


#: Program that runs the command line, and creates a file once it handles Ctrl-C.
STARTING = """
import pathlib, sys
from dlscale.core import interrupt
def end_at_once(name, real=interrupt.end_at_once):
    real(name)
    pathlib.Path("ready").touch()
interrupt.end_at_once = end_at_once
from dlscale.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.3, 0.9])
@pytest.mark.parametrize("words", [["status"], ["measure", "--", "sleep", "60"], ["run"]], ids=lambda words: words[0])
def test_ctrl_c_during_start_up_is_a_line(tmp_path: Path, words: list[str], seconds: float) -> None:
    command = [sys.executable, "-P", "-c", STARTING, *words]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        until("its begin", (tmp_path / "ready").exists, process)
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=PATIENCE)[1]
    assert "Traceback" not in said
    if seconds == 0.0:
        assert (process.returncode, said) == (130, f"dlscale {words[0]}: interrupted\n")
