"""Runs of external programs: the commands that start a program, its files, and the ways in which it ends."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from dlscale.config import resolve
from dlscale.config.run import Geometry
from dlscale.config.site import Site
from dlscale.core import urls
from dlscale.core.errors import UserError
from dlscale.core.machine import STEPS, WATCHDOG
from dlscale.core.metrics import epoch_lines
from dlscale.core.paths import Results
from dlscale.data.manifest import File, Manifest
from dlscale.extensions.hangs.record import hang_of
from dlscale.extensions.programs import checkout, logs, run_program, turns
from dlscale.extensions.programs.files.preview import preview
from dlscale.extensions.programs.jobs import ProgramJobs
from dlscale.extensions.programs.keeper import temporary_folder
from dlscale.extensions.programs.launch import (
    HOOK_SHELL,
    ON_LOOPBACK,
    PROGRAM_SHELL,
    TORCHRUN_VARIABLES,
    launch_program,
)
from dlscale.extensions.programs.program import SOURCES, earlier, epochs_of, of_ranks, steps_at, warn_of_divergence
from dlscale.extensions.programs.running import HOOK, PRINTED
from dlscale.extensions.programs.settings import Program
from dlscale.launch.launcher import ContainerMounts
from tests.conftest import make_run, stage, variables
from tests.programs import TRAIN, settings, write_program
from tests.waiting import PATIENCE, until

PYTHON = ["python", "-P", "-m", "dlscale"]
HERE = ContainerMounts("/scratch/w", "/scratch/w/workflow_scripts", uid=1000, gid=100)
ONE, TWO, FOUR = Geometry(), Geometry(gpus_per_node=2), Geometry(nodes=2, gpus_per_node=2)
STARTERS: dict[str, dict[str, Any]] = {
    "direct": {},
    "torchrun": {"rendezvous": "n1:29500", "start": ["pdsh"]},
    "srun": {"scheduler": {"cpu_nodes": {"cpus": 8}, "gpu_nodes": {"cpus": 8, "gpus": 4}}},
    "mpirun": {"start": ["mpiexec", "-n", "{ranks}"]},
}

# ---- start commands --------------------------------------------------------------------------------


@pytest.mark.parametrize("starter", STARTERS)
@pytest.mark.parametrize("engine", ["none", "docker", "podman", "podman-hpc", "shifter", "apptainer", "enroot"])
def test_the_launch_command_of_a_program(engine: str, starter: str, tmp_path: Path) -> None:
    """With srun, mpirun, several nodes or its own image, a program has its own containers, else the stage's."""
    given = {"engine": engine, "image": "ours:1", "starter": starter, "gpu": False, "host_suffix": "-hsn0"}
    site = Site(**{**given, **STARTERS[starter]})
    for geometry in (ONE, TWO, FOUR):
        for changes in ({}, {"image": "theirs:2"}, {"start": "itself"}):
            program = Program(command=["train"], folder=str(tmp_path), **changes)
            outer, inner = launch_program(site, HERE, SimpleNamespace(program=program, geometry=geometry))
            several = geometry is not ONE and starter != "direct" and "start" not in changes
            apart = bool(changes.get("image")) or (several and (starter != "torchrun" or geometry is FOUR))
            inside = engine != "none" and not apart
            assert outer[-4:] == ([sys.executable, *PYTHON[1:]] if not inside else PYTHON)
            client = {"apptainer": "exec", "enroot": "start"}.get(engine, "run")
            contained = f"{engine} {client}" if engine != "shifter" else "shifter --image"
            assert (contained in " ".join(outer)) is (engine != "none" and not apart)
            assert (contained in " ".join(inner)) is (engine != "none" and apart)
            image = changes.get("image", "ours:1")
            if engine not in ("none", "shifter"):
                words = inner if apart else outer
                assert f"{tmp_path}:{tmp_path}" in " ".join(words).replace("=", " ").split(), (
                    "the program's folder must be mounted"
                )
                assert (image in words and "{folder}" in " ".join(inner)) or not apart
                if engine in ("apptainer", "enroot"):
                    assert (f"--env={STEPS}" in words) is apart, "the hook's variables must reach the program"
                assert (PROGRAM_SHELL in inner) is apart
            if engine == "shifter":  # the image may replace PYTHONPATH
                assert any(word.endswith("/extensions/programs/hook") for word in inner) is apart
                assert (f'{HOOK_SHELL}; exec "$@"' in inner) is apart
            if apart and engine in ("docker", "podman", "podman-hpc"):
                assert {"--env=DLSCALE_STEPS", "--env=DLSCALE_READ", "--env=DLSCALE_HANG_AFTER"} <= set(inner)
            if not several:
                assert not {"srun", "mpiexec", "torchrun"} & set(inner)
            elif starter == "torchrun":
                nodes = ["--nnodes=2", "--rdzv-endpoint=n1:29500", "--rdzv-backend=c10d"]
                meet = ["torchrun", "--no-python", *nodes] if geometry is FOUR else launch_torchrun()
                meet = [*meet, "--nproc-per-node=2", *([] if geometry is FOUR else ON_LOOPBACK)]
                assert inner[-len(meet) :] == meet
                assert (inner[0] == "pdsh") is (geometry is FOUR)
            else:
                begin = "srun" if starter == "srun" else "mpiexec"
                host = "{host}-hsn0" if geometry is FOUR else "127.0.0.1"
                assert inner[:5] == [sys.executable, "-P", "-m", "dlscale.launch.ranks", begin]
                place = inner.index("sh")
                assert inner[place - 3 : place + 4] == [
                    *("env", f"MASTER_ADDR={host}", "MASTER_PORT={port}", "sh", "-c", TORCHRUN_VARIABLES, "sh")
                ]


def launch_torchrun() -> list[str]:
    return ["torchrun", "--no-python", "--standalone"]


#: Program that meets the other ranks, and prints its process id and interfaces in one line, which no other rank breaks.
LISTENING = """
import os, time
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
interfaces = [os.environ.get(f"{name}_SOCKET_IFNAME") for name in ("GLOO", "NCCL")]
print(f"{os.getpid()} {interfaces}\\n", end="", flush=True)
while os.path.exists(os.environ["STAY"]):
    time.sleep(0.1)
"""


def listening(pid: int) -> set[str]:
    """Return the addresses at which a process listens, from the kernel's tables."""
    there = psutil.Process(pid).net_connections("tcp")
    return {each.laddr.ip for each in there if each.status == psutil.CONN_LISTEN}


@pytest.mark.slow
def test_ranks_of_a_program_listen_only_on_loopback(tmp_path: Path) -> None:
    """Only torchrun listens at all addresses: if this changes with PyTorch, change docs/security.md, too."""
    program = Program(command=["train"], folder=str(tmp_path))
    site = Site(engine="none", starter="torchrun", gpu=False)
    _, words = launch_program(site, HERE, SimpleNamespace(program=program, geometry=TWO))
    (script := tmp_path / "program.py").write_text(LISTENING)
    (stay := tmp_path / "stay").touch()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    given = variables(PATH=path, STAY=str(stay))
    command = [*words, sys.executable, str(script)]
    with subprocess.Popen(command, env=given, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        lines = [process.stdout.readline() for _ in range(2)]
        try:
            found = [listening(int(line.split()[0])) for line in lines]
            outer = listening(process.pid)
        finally:
            stay.unlink()
    assert [line.partition(" ")[2] for line in lines] == ["['lo', 'lo']\n"] * 2
    assert found == [{"127.0.0.1"}] * 2 and outer <= {"::", "0.0.0.0"}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}, "3 4 1"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, "1 2 1"),
    ],
)
def test_an_srun_task_gets_the_variables_of_torchrun(given: dict[str, str], told: str) -> None:
    words = ["sh", "-c", TORCHRUN_VARIABLES, "sh", "sh", "-c", "echo $RANK $WORLD_SIZE $LOCAL_RANK"]
    environment = {"PATH": os.environ["PATH"], **given}
    assert subprocess.run(words, env=environment, capture_output=True, text=True).stdout == f"{told}\n"


def test_the_programs_variables_do_not_reach_the_starter(tmp_path: Path) -> None:
    """Only the program gets its variables; its PATH or PYTHONPATH would hide dlscale and the engine from srun."""
    program = Program(command=["train"], folder=str(tmp_path), environment={"PYTHONPATH": "mine", "A": "b c"})
    run = SimpleNamespace(program=program, study="program", batch_size=8)
    found = run_program.RunProgram(run, json.dumps(["env", "--chdir={folder}"]), tmp_path / "out", tmp_path / "steps")
    path = f"PYTHONPATH={HOOK}{os.pathsep}mine"
    assert found.command == ["env", f"--chdir={tmp_path}", "env", path, "A=b c", "train"]
    assert found.environment == {} and found.words == ["train"]


def test_podman_hpc_takes_no_option_of_the_program(tmp_path: Path) -> None:
    """podman-hpc parses all words of its command line, so the program's words are one word of a shell."""
    words = [sys.executable, "-c", "import sys; print(sys.argv[1:])", "--gpu", "--mpi=a b", "--", "--help", "$HOME"]
    run = SimpleNamespace(program=Program(command=words, folder=str(tmp_path)), study="program", batch_size=8)
    for engine in ("podman-hpc", "podman"):
        before = ["env", f"ENGINE={engine}"] if engine == "podman" else ["env", "--", engine, "run", "image"]
        found = run_program.RunProgram(run, json.dumps(before), tmp_path / "out", tmp_path / "steps")
        after = found.command[len(before) :]
        assert not {*words[3:]} & {*after} if engine == "podman-hpc" else after == words
        done = subprocess.run(after, capture_output=True, text=True)
        assert done.stdout == f"{words[3:]}\n", done.stderr


def test_the_programs_secrets_are_in_no_record_and_no_starter_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {"***secret.tok***": "s3{{cret", "***secret.API_KEY***": "s3cret2"}
    monkeypatch.setenv(urls.VARIABLE, json.dumps(secrets))
    environment = {"API_KEY": "***secret.API_KEY***", "A": "b"}
    program = Program(command=["train", "--token=***secret.tok***"], folder=str(tmp_path), environment=environment)
    run = SimpleNamespace(program=program, study="program", batch_size=8)
    found = run_program.RunProgram(run, json.dumps(["env"]), tmp_path / "out", tmp_path / "steps")
    assert found.command == ["env", "env", "A=b", "train", "--token=s3{cret"]
    assert found.environment == {"API_KEY": "s3cret2"}
    assert found.words == ["train", "--token=***secret.tok***"]


@pytest.mark.parametrize(("engine", "named"), [("podman", ["--env=API_KEY"]), ("docker", ["--env=API_KEY"])])
def test_a_container_gets_secrets_by_variable_name(engine: str, named: list[str]) -> None:
    program = Program(command=["train"], image="theirs:2", environment={"API_KEY": "***secret.API_KEY***", "A": "b"})
    site = Site(engine=engine, image="ours:1", gpu=False)
    words = launch_program(site, HERE, SimpleNamespace(program=program, geometry=ONE))[1]
    assert [word for word in words if "API_KEY" in word and "WANDB" not in word] == named


# ---- endings ---------------------------------------------------------------------------------------


def configure(folder: Path, *more: str, **program: Any) -> Path:
    """Write a program and the configuration of its run; return the configuration's path."""
    write_program(folder / "theirs")
    return make_run(folder, "program", settings(folder / "theirs", *more, **program), {"kind": "files"})


def start(folder: Path, sources: str = "a") -> subprocess.Popen[str]:
    words = ["--config", folder / "config.yaml", "--manifest", "none", "--threads", 1, "--sources", sources]
    words += ["--keep", folder / "out", "--out", folder, "--log", folder / "log"]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "dlscale", "program", *map(str, words)],
        env=variables(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the process's exit status and error message."""
    said = process.communicate(timeout=PATIENCE)[1]
    assert "Traceback" not in said
    return process.returncode, said


@pytest.mark.parametrize("status", [0, 1])
def test_a_retry_continues_a_program(tmp_path: Path, status: int) -> None:
    """A program that saved after SIGTERM is incomplete, whatever its exit status. The result covers all attempts."""
    configure(tmp_path, f"--ended={status}", "--seconds=0.1")
    process = start(tmp_path)
    until("a checkpoint", (tmp_path / "out/saved").exists, process, seconds=PATIENCE)
    process.send_signal(signal.SIGTERM)
    code, said = ended(process)
    assert code == 75 and "signal" in said and "Run the stage again" in said
    assert not (tmp_path / "program.json").exists() and not (tmp_path / "program.jsonl").exists()
    assert ended(start(tmp_path)) == (0, "")
    found = [json.loads(line) for line in (tmp_path / "program.jsonl").read_text().splitlines()]
    assert [each["valid_loss"] for each in found] == [1.0, 1 / 2, 1 / 3]
    assert [each["step"] for each in found] == [12, 24, 36], "steps must be counted, because the log counts epochs"
    assert "goes on after epoch 0" in (log := (tmp_path / "log").read_text()) and log.count("goes on after") == 2
    assert not (tmp_path / SOURCES).exists(), "a finished program must start anew if it is forced to run again"


def test_other_files_begin_afresh(tmp_path: Path) -> None:
    """If the files that the resume option names are missing, the program starts anew."""
    configure(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/log.jsonl").write_text("of another\n")
    (tmp_path / SOURCES).write_text("a")
    assert ended(start(tmp_path)) == (0, "")
    assert len((tmp_path / "out/log.jsonl").read_text().splitlines()) == 3


@pytest.mark.slow
def test_a_program_that_hangs_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A site's watchdog limits apply to programs; the message and `dlscale explain` name the line."""
    run = tmp_path / "plans/p/r"
    run.mkdir(parents=True)
    configure(run, command=["python3", "hangs.py"], log=None, losses={}, resume=[])
    program = "import time; from torch.optim.optimizer import step; step()\ntime.sleep(1000)\n"
    Path(next(run.rglob("train.py"))).with_name("hangs.py").write_text(program)
    monkeypatch.setenv(WATCHDOG, "stuck=5:between=6")
    code, said = ended(start(run))
    hang = "no step for 6 s: rank 0 is at hangs.py:2"
    assert code == 2 and f"{hang}. " in said and f"{run}/hang" in said, said
    assert (found := hang_of(run)) and found.startswith(hang) and found.endswith(f"{run}/hang")
    assert stage("explain", run) == 0
    assert capsys.readouterr().out == f"{run}\n  ended: {hang}. Stacks of all processes: {run}/hang\n"
    assert 'hangs.py", line 2' in next((run / "hang").glob("stacks.*")).read_text()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["nosuch"], "program.command: nosuch: no such program here"),
        (["sh", "-c", "exit 3"], "the program ended with status 3 after "),
        (["sh", "-c", "kill -9 $$"], "the program ended with status 137 after "),
        (["sh", "-c", "sleep 1000 & exit 0"], "no training step was seen in "),
    ],
    ids=["absent", "fails", "killed", "no steps, and a daemon"],
)
def test_one_message(tmp_path: Path, command: list[str], message: str) -> None:
    configure(tmp_path, command=command, log=None, losses={}, resume=[])
    process = start(tmp_path)
    code, said = ended(process)
    assert code == 2 and said.startswith(f"dlscale program: {message}") and said.count("\n") == 1, said
    assert not (tmp_path / "program.json").exists()
    left = subprocess.run(["pgrep", "--session", str(process.pid)], capture_output=True, text=True)
    assert left.stdout == ""


@pytest.mark.parametrize("name", ["steps", "out"])
def test_nothing_is_written_or_removed_behind_a_link(tmp_path: Path, name: str) -> None:
    configure(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/mine").write_text("mine")
    (tmp_path / SOURCES).write_text("a")
    (tmp_path / "other/saved").write_text("1")  # without this file the program would not resume
    (tmp_path / name).symlink_to("other")
    code, said = ended(start(tmp_path))
    assert code == 2 and said.startswith(f"dlscale program: {tmp_path / name}: a link, pipe or device; expected"), said
    assert {path.name for path in (tmp_path / "other").iterdir()} == {"mine", "saved"}


def test_steps_of_a_log_that_counts_epochs() -> None:
    points = [(float(time), step, 0.0) for step, time in enumerate([1, 2, 13, 14], 1)]
    # End times of the steps of a second attempt, which resumed after the second epoch.
    ends = [12 + number / 10 for number in range(21)]
    assert steps_at(points, ends, begin=12) == [10, 20, 30, 40]
    assert steps_at(points, ends, begin=0.5) == [0, 0, 11, 21], "the steps of a single attempt must be counted"
    assert steps_at(points, [], begin=12) == [1, 2, 3, 4]
    numbered = [(float(place), step, 1.0) for place, step in ((9, 1), (18, 2), (27, 3))]
    dated = [1.7e9 + number for number in range(120)]
    assert steps_at(numbered, dated, begin=1.7e9) == [40, 80, 120], "a log without times may count epochs"


def test_a_metric_comes_from_the_validation_at_the_same_step() -> None:
    """A metric that was not logged at an epoch's validation is missing, not taken from an earlier epoch."""
    found: Any = SimpleNamespace(full=SimpleNamespace(mean=8.0), outside=SimpleNamespace(samples=True), batch_size=8)
    valid = [(10.0, 4, 0.5), (20.0, 8, 0.4), (30.0, 12, 0.3)]
    curves = {"loss/valid": valid, "valid/late": [(20.0, 8, 0.9)], "valid/epochs": [(10.0, 1, 0.1), (20.0, 2, 0.2)]}
    epochs = epochs_of(curves, [], found, begin=0.0)
    assert [each.metrics for each in epochs] == [{"epochs": 0.1}, {"epochs": 0.2, "late": 0.9}, {}]


@pytest.mark.parametrize(
    ("samples", "size", "ends", "expected"),
    [
        (True, 8, [], (32, 64.0, 0.5)),
        (False, None, [], (None, None, 0.0625)),  # 4 steps at 64 steps/s
        (True, None, [10 + step / 2 for step in range(1, 9)], (None, 64.0, 2.0)),  # only samples/s are known
        (True, None, [], (None, 64.0, 4.0)),  # without step times, `epoch_seconds` includes the validation
    ],
)
def test_samples_of_a_program_are_known_or_missing(
    samples: bool, size: int | None, ends: list[float], expected: tuple[float | None, ...]
) -> None:
    found: Any = SimpleNamespace(
        full=SimpleNamespace(mean=64.0), outside=SimpleNamespace(samples=samples), batch_size=size
    )
    epochs = epochs_of({"loss/valid": [(12.0, 4, 0.5), (16.0, 8, 0.4)]}, ends, found, begin=8.0)
    epoch = json.loads(epoch_lines(epochs).splitlines()[0])
    assert (epoch["samples"], epoch["samples_per_second"], epoch["epoch_seconds"]) == expected
    assert epochs[0].step == 4


FOUND: Any = SimpleNamespace(full=SimpleNamespace(mean=8.0), outside=SimpleNamespace(samples=True), batch_size=8)


def test_a_metric_that_is_printed_at_some_validations_belongs_to_them() -> None:
    """A metric may also be printed before the loss, more often than the loss, or minutes after the loss."""
    losses: list[Any] = [(100.0 * epoch, epoch, 1 / epoch) for epoch in range(1, 7)]
    ends = [float(time) for time in range(1, 601)]

    def metrics(times: list[float]) -> list[float | None]:
        curves = {"loss/valid": losses, "valid/mAP": [(time, n, time) for n, time in enumerate(times, 1)]}
        return [epoch.metrics.get("mAP") for epoch in epochs_of(curves, ends, FOUND, begin=0.0, rows=True)]

    assert metrics([201.0, 401.0, 601.0]) == [None, 201, None, 401, None, 601]
    assert metrics([199.0, 601.0]) == [None, 199, None, None, None, 601]
    assert metrics([101.0, 140.0, 201.0, 301.0, 401.0, 470.0, 501.0, 601.0]) == [101, 201, 301, 401, 501, 601]
    assert metrics([180.0, 280.0, 380.0, 480.0, 580.0, 680.0]) == [180, 280, 380, 480, 580, 680]


@pytest.mark.parametrize("every", [4, 20])
@pytest.mark.parametrize("rows", [False, True])
def test_training_losses_belong_to_their_epoch(rows: bool, every: int) -> None:
    """The mean of an epoch of 20 steps may be logged after the validation, as Lightning does."""
    valid: list[Any] = [(100.0 * epoch, epoch if rows else 20 * epoch, 0.5) for epoch in (1, 2, 3)]
    late = every == 20 or not rows
    train: list[Any] = [
        (5.0 * step + 2 * (late and step % 20 == 0), row if rows else step, (step - 1) // 20 + 1.0)
        for row, step in enumerate(range(every, 61, every), 1)
    ]
    epochs = epochs_of({"loss/valid": valid, "loss/train": train}, [], FOUND, begin=0.0, rows=rows)
    assert [epoch.train_loss for epoch in epochs] == [1, 2, 3]


@pytest.mark.parametrize("last", [0, 1])
def test_epochs_that_count_from_0_are_all_kept(last: int) -> None:
    """With a training loss at 0, epoch 0 is an epoch. Otherwise, the validation loss at 0 is the untrained model's."""
    valid: list[Any] = [(100.0 * epoch, epoch, 10.0 * epoch) for epoch in range(5)]
    trained: list[Any] = [(100.0 * epoch, epoch, 1.0) for epoch in range(1 - last, 5)]
    epochs = epochs_of({"loss/valid": valid, "loss/train": trained}, [], FOUND, begin=0.0)
    assert [epoch.step for epoch in epochs] == [1, 2, 3, 4, 5][: 4 + last]
    assert epochs[0].valid_loss == (0 if last else 10) and (epochs[0].untrained is None) == bool(last)


def test_validations_that_each_process_prints_count_once(caplog: pytest.LogCaptureFixture) -> None:
    every = {"loss/valid": [(10.0, 1.0), (10.1, 3.0), (20.0, 0.5), (20.2, 0.7)], "loss/train": [(9.0, 1.0)] * 4}
    assert of_ranks(every, 2, 0.0) == {
        "loss/valid": [(10.1, 2.0), (20.2, pytest.approx(0.6))],
        "loss/train": [(9.0, 1.0)] * 4,
    }
    assert "loss/valid: each of 2 processes printed its value; their means count" in caplog.text
    caplog.clear()
    for processes, points in ((1, every["loss/valid"]), (2, [(10.0, 1.0), (20.0, 0.5)]), (2, [(1.0, 1.0)] * 3)):
        assert of_ranks({"loss/valid": points}, processes, 0.0) == {"loss/valid": points} and not caplog.text


@pytest.mark.parametrize("written", ['"NaN"', "null", "NaN", '"Infinity"', '"-inf"', "1e999"])
def test_a_diverged_loss_counts_however_it_is_written(
    written: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Programs that write strict JSON replace NaN and infinities by strings or null. Such epochs are not dropped."""
    log = tmp_path / "log.jsonl"
    losses = ["0.5", '"0.25"', written, written]
    log.write_text("".join(f'{{"step": {n}, "time": {1.7e9 + n}, "val": {v}}}\n' for n, v in enumerate(losses, 1)))
    points = logs.values(log, {"val": "loss/valid"}, logs.Start(1.7e9), (), 1.7e9 + 9)["loss/valid"]
    assert [(step, value) for _, step, value in points[:2]] == [(1, 0.5), (2, 0.25)]
    assert [step for _, step, value in points if not math.isfinite(value)] == [3, 4]
    found: Any = SimpleNamespace(full=SimpleNamespace(mean=8.0), outside=SimpleNamespace(samples=True), batch_size=8)
    warn_of_divergence(epochs_of({"loss/valid": points}, [], found, begin=1.7e9))
    assert len(caplog.messages) == 1 and "epoch 3" in caplog.text and "2 of 4 epochs" in caplog.text


@pytest.mark.parametrize("lines", ["steps and validations", "steps only", "a resumed training"])
def test_steps_that_begin_again_in_each_epoch_count_on(
    lines: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log, now = tmp_path / "log.jsonl", 1.7e9
    with log.open("w") as file:
        for epoch in range(3):
            for step in range(10 + 20 * epoch * (lines == "a resumed training"), 41, 10):
                now += 1
                entry = {"epoch": epoch, "step": step, "time": now, "loss": epoch + step / 100}
                file.write(json.dumps(entry) + "\n")
            if lines == "steps and validations":
                file.write(json.dumps({"epoch": epoch, "step": 40, "time": now + 0.5, "val": 10.0 * epoch}) + "\n")
    start = logs.Start(1.7e9)
    curves = logs.values(log, {"val": "loss/valid", "loss": "loss/train"}, start, (), now + 1)
    counted = logs.counted_on(log, curves, start, now + 1)
    if lines == "a resumed training":
        assert counted == curves and not caplog.text
        return
    assert [step for _, step, _ in counted["loss/train"]] == list(range(10, 121, 10))
    if lines == "steps and validations":
        assert [(step, value) for _, step, value in counted["loss/valid"]] == [(40, 0.0), (80, 10.0), (120, 20.0)]
    assert "the steps begin again 2 times, as in each epoch" in caplog.text


def test_skipped_values_of_a_log_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A null between numbers is a missing value, not a divergence."""
    log = tmp_path / "log.jsonl"
    rows = [
        f'{{"step": {n}, "time": {1.7e9 + n}, "val": {v}}}\n' for n, v in enumerate(["null", "0.5", "[1]", "null"], 1)
    ]
    log.write_text("".join(rows))
    points = logs.values(log, {"val": "loss/valid"}, logs.Start(1.7e9), (), 1.7e9 + 9)
    assert points == {"loss/valid": [(1.7e9 + 2, 2, 0.5)]}
    assert f"{log}: skipped 3 values of `val`" in caplog.text and "null in line 1" in caplog.text


def test_lines_without_a_time_or_with_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A line without a time gets the time of the line before; a damaged line with the tag counts as skipped."""
    log = tmp_path / "log.jsonl"
    lines = [
        '{"step": 1, "val": 9}',  # no time is known yet
        f'{{"step": 2, "time": {1.7e9 + 2}, "loss": 3}}',
        '{"step": 2, "val": 0.5}',
        f'{{"step": 4, "time": {1.7e9 + 4}, "loss": 2}}',
        '{"step": 4, "val": 0.25, "oth',
        '{"epoch": 4, "val": 0.125}',
        '{"step": 5, "val": 0.0625}',
        '{"step": 6, "val": 0.03',
    ]
    log.write_text("\n".join(lines), encoding="utf-8-sig")
    points = logs.values(log, {"val": "loss/valid"}, logs.Start(1.7e9), (), 1.7e9 + 9)
    assert points == {"loss/valid": [(1.7e9 + 2, 2, 0.5), (1.7e9 + 4, 5, 0.0625)]}
    assert f"{log}: skipped 3 values of `val`" in caplog.text and "9 in line 1" in caplog.text
    log.write_text(f'{{"step": 1, "time": {1.7e9 + 1}, "val": 0.5}}\n', encoding="utf-8-sig")
    assert logs.values(log, {"val": "a"}, logs.Start(1.7e9), (), 1.7e9 + 9) == {"a": [(1.7e9 + 1, 1, 0.5)]}


def test_losses_of_earlier_tries_keep_their_steps(tmp_path: Path) -> None:
    """A killed first attempt recorded only 240 of its 10 ms steps. The second attempt resumes from the checkpoint."""
    ends = [1000 + step / 100 for step in range(1, 621)]
    marks = [(1000 + step / 100 + 0.001, 1 / step) for step in range(50, 350, 50)]
    for checkpoint in (300, 200, 230):
        steps, keep = tmp_path / f"{checkpoint}/steps", tmp_path / f"{checkpoint}/out"
        steps.mkdir(parents=True)
        keep.mkdir()
        lines = [f"s {end:.6f} 0.0 0\n" for end in ends[:240]]
        (steps / "timed.host.1").write_text("".join(["begin 0.0 0.0 0\n", *lines, "s 10"]))
        lines = [json.dumps(["loss/valid", time, value]) + "\n" for time, value in marks]
        (steps / PRINTED).write_text("".join([*lines, '["loss/va']))
        (keep / "last").touch()
        os.utime(keep / "last", (1000 + checkpoint / 100 - 0.004,) * 2)
        program = Program(
            command=["train", "{resume}"], resume=["--resume", "{out}/last"], losses={"val (.*)": "loss/valid"}
        )
        # The further calls simulate attempts that were killed at their start, before and after they removed the steps.
        for removed in (False, True, True):
            before = earlier(steps.parent, keep, program)
            if removed:
                shutil.rmtree(steps, ignore_errors=True)
        assert before.step in (checkpoint, checkpoint - 1)
        later = [(2000.001 + step / 100, step / 1e3) for step in range(50, 450 - checkpoint, 50)]
        found = before.merged({"loss/valid": later}, [time + 1000 for time in ends])["loss/valid"]
        kept = range(50, checkpoint + 1, 50)
        assert [step for _, step, _ in found] == [*kept, *range(before.step + 50, before.step + 450 - checkpoint, 50)]
        assert [value for _, _, value in found] == [*(1 / step for step in kept), *(value for _, value in later)]


# ---- commands and values ---------------------------------------------------------------------------


def words(**program: Any) -> list[str]:
    mine = {"command": ["train", "{batch_size}"], **program}
    raw: dict[str, Any] = {"study": "program", "runs": {"a": {"program": mine}}}
    found = resolve.load({"targets": ["mine"], "plans": {"mine": raw}}).plans["mine"]["a"].run
    return found.program.command  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ({"command": ["{x}"], "values": {"x": []}}, "program.command: .*after its placeholders are replaced"),
        ({"command": ["{x}"], "values": {"x": ["a/"]}}, "a/: a folder; .*after its placeholders are replaced"),
        ({"folder": "{x}", "values": {"x": ""}}, "program.folder: .*after its placeholders are replaced"),
        (
            {"command": ["a", "{x}"], "values": {"x": ["{x}"]}},
            "program.values: placeholders refer to each other in a circle",
        ),
        (
            {"command": ["a", "b\0c"]},
            r"plans\.mine\.runs\.a\.program\.command: a NUL character; remove it",
        ),
        (
            {"command": ["{kind}"], "values": {"kind": 99}},
            "program.values.kind: another `kind` replaces",
        ),
        ({"values": {"batch_size": 99}}, "program.values.batch_size: a setting has this name"),
        ({"values": {"optimizer.lr": 99}}, "program.values.optimizer.lr: a setting has this name"),
        (
            {"losses": {"a (.)": "loss/vaild"}},
            r"losses: each key needs a name of dlscale \(.*\); loss/valid is required",
        ),
        ({"losses": {"a (.)": "loss/valid", "b (.)": "loss/valid"}}, "losses: two keys have the same name of dlscale"),
        ({"rate": "avg"}, "rate avg: expected a regular expression with one group for the number, or one of nersc"),
        ({"rate": "("}, r"rate \(: expected a regular expression"),
        ({"command": ["{a.b}"], "values": {"a.b": 1}}, "program.values.a.b: names with dots are for settings"),
        (
            {"repository": "/r", "revision": "0" * 40, "folder": "/r/src"},
            "program.folder: /r/src: expected a path relative to program.repository",
        ),
        (
            {"losses": {"a (.)": "loss/train"}},
            r"losses: each key needs a name of dlscale \(.*\); loss/valid is required",
        ),
    ],
)
def test_invalid_words_are_refused(program: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        words(**program)


@pytest.mark.parametrize(
    ("program", "accepted"),
    [
        ({"command": ["torchrun", "--nproc-per-node={gpus_per_node}"]}, False),
        ({"command": ["srun", "--nodes={nodes}"]}, True),
        ({"command": ["srun", "--nodes={geometry.nodes}"]}, True),
        ({"command": ["mpirun", "-n", "{gpus}"]}, True),
        ({"command": ["{srun}"], "values": {"srun": ["srun", "-N{nodes}"]}}, True),
        ({"command": ["start.sh"], "environment": {"NODES": "{nodes}"}}, True),
    ],
)
def test_a_command_that_starts_its_processes_must_get_the_number_of_nodes(
    program: dict[str, Any], accepted: bool
) -> None:
    """Without this number, a run on two nodes would measure only one node; on one node any command is accepted."""
    for nodes in (1, 2):
        run = {"geometry": {"nodes": nodes, "gpus_per_node": 4}, "program": {"start": "itself", **program}}
        raw = {"targets": ["mine"], "plans": {"mine": {"study": "program", "runs": {"a": run}}}}
        if accepted or nodes == 1:
            assert resolve.load(raw).plans["mine"]["a"].run.geometry.nodes == nodes
        else:
            message = (
                r"runs\.a\.program\.start itself: the command contains neither \{nodes\} nor \{gpus\}, .* 2 nodes; "
            )
            with pytest.raises(UserError, match=message):
                resolve.load(raw)


@pytest.mark.parametrize(("sizes", "shown"), [([2000, 500], [2.0, 0.5]), ([], [0.0])])
def test_the_preview_of_files_shows_their_sizes(sizes: list[int], shown: list[float]) -> None:
    files = [File.model_construct(bytes=size) for size in sizes]
    (panel,) = preview(Manifest.model_construct(splits={"train": files}))
    assert panel.values.tolist() == shown and panel.unit == "kB"


def test_words_of_values() -> None:
    """Each number of a list becomes a separate word of the command, and placeholders in values are replaced."""
    found = words(command=["a", "{optimizer.betas}", "{x}"], values={"x": "w={workers}"})
    assert found == ["a", "0.9", "0.999", "w=0"]


def named_files(results: Path, run: Any) -> list[str]:
    """Return the files that the command of a run's program names."""
    context: Any = SimpleNamespace(paths=Results(results))
    return ProgramJobs(context, commands=Any).named_files(run)


def test_long_words_are_accepted(tmp_path: Path) -> None:
    """A word of the command, such as a script after `-c`, may be longer than any file name."""
    run = SimpleNamespace(program=Program(command=["python", "-c", "pass;" * 100]))
    assert named_files(tmp_path, run) == []


def test_an_executable_script_belongs_to_the_sources(tmp_path: Path) -> None:
    """Scripts that a command names, but not interpreters, are sources of the run, and a change reruns it."""
    (tmp_path / "python").symlink_to(sys.executable)
    for name in ("train.sh", "train.py"):
        (tmp_path / name).touch()
    commands = ["./train.sh", "train.py"], ["./python", "train.py"], [str(tmp_path / "train.sh")], [sys.executable]
    found = []
    for command in commands:
        run = SimpleNamespace(program=Program(command=command, folder=str(tmp_path)))
        found.append(sorted(Path(file).name for file in named_files(tmp_path / "results", run)))
    assert found == [["train.py", "train.sh"], ["train.py"], ["train.sh"], []]


def test_steps_of_a_log_alone_have_no_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are only in a log are refused for paired timing at once, because dlscale reads the log too late."""
    monkeypatch.setattr(turns, "PATIENCE", 60.0)
    write = """
        import json, sys, time
        with open(sys.argv[1] + "/log.jsonl", "w") as log:
            for step in range(10_000):
                print(json.dumps({"step": step, "time": time.time()}), file=log, flush=True)
                time.sleep(0.01)
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(write))
    given = settings(tmp_path, command=[sys.executable, "train.py", "{out}"], losses={}, resume=[])
    file = make_run(tmp_path / "w", "program", given, {"kind": "files"})
    player = turns.ProgramSubject(turns.TimedRunSettings(str(file), "none", "cpu", 1))
    with contextlib.closing(player), pytest.raises(turns.TurnFailed, match="only in its log"):
        player.open()
        player.wait()


@pytest.mark.slow
def test_a_killed_stage_leaves_no_stopped_program(tmp_path: Path) -> None:
    """If a stage is killed while its program is paused, all processes end. The next stage removes the old folder."""
    write_program(tmp_path / "theirs")
    (tmp_path / "theirs/train.py").write_text("import os, signal\nif os.fork(): signal.pause()\n" + TRAIN)
    file = make_run(tmp_path / "w", "program", settings(tmp_path / "theirs", "--epochs=1000"), {"kind": "files"})
    code = (
        "import sys, time; from dlscale.measure.turns import TimedRunSettings\n"
        "from dlscale.extensions.programs.turns import ProgramSubject\n"
        "it = ProgramSubject(TimedRunSettings(sys.argv[1], 'none', 'cpu', 1)); it.open(); it.wait(); it.pause()\n"
        "print(flush=True); time.sleep(1000)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(file)], stdout=subprocess.PIPE, text=True, env=variables()
    ) as stage:
        assert stage.stdout and stage.stdout.readline() == "\n"
        keeper, *theirs = psutil.Process(stage.pid).children(recursive=True)
        # A process that waits for the disk stops only afterwards.
        until("both are stopped", lambda: [each.status() for each in theirs] == ["stopped"] * 2)
        stage.kill()
    until("all have ended", lambda: not any(each.is_running() for each in (keeper, *theirs)))
    (left,) = Path(tempfile.gettempdir()).glob(f"dlscale-program.*.{stage.pid}.*")
    with temporary_folder("dlscale-program") as own, temporary_folder("dlscale-program"):
        assert not left.exists() and Path(own).is_dir()


# ---- repositories ----------------------------------------------------------------------------------


def git(folder: Path, *words: str) -> str:
    known = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    return subprocess.run(["git", "-C", folder, *known, *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def published(tmp_path: Path) -> tuple[Path, list[str]]:
    """Return a repository and the hashes of its two commits."""
    folder = tmp_path / "published"
    write_program(folder)
    git(folder, "init", "--quiet")
    commits = []
    for text in ("one", "two"):
        (folder / "README").write_text(text)
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "--message", text)
        commits.append(git(folder, "rev-parse", "HEAD").strip())
    return folder, commits


def fetch(repository: object, revision: str, out: Path) -> None:
    checkout.main(SimpleNamespace(repository=str(repository), revision=revision, out=str(out)))  # type: ignore[arg-type]


def started(tmp_path: Path, revision: str, **more: Any) -> Path:
    """Prepare the program of a run; return the program's working folder."""
    program = Program(command=["python3", "train.py"], revision=revision, **more)
    run = SimpleNamespace(program=program, study="program", batch_size=8)
    return Path(run_program.RunProgram(run, None, tmp_path / "out", tmp_path / "steps").folder)


def test_a_revision_is_fetched(
    published: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, (first, second) = published
    fetch(folder, first, tmp_path / "there")
    assert (tmp_path / "there/README").read_text() == "one"
    mine = {"folder": str(tmp_path / "there"), "repository": str(folder)}
    (tmp_path / "there/README").write_text("three")
    found = started(tmp_path, first, **mine)
    assert found == tmp_path / "checkout" and (found / "README").read_text() == "one"
    with pytest.raises(UserError, match=f"program.revision: .*there: git fetch of {second} failed: "):
        started(tmp_path, second, **mine)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(
        UserError, match=r"program\.revision: git is missing .* Install git, or set program\.repository"
    ):
        started(tmp_path, first, folder=str(folder))
    (tmp_path / "there/README").write_text("one")
    assert (started(tmp_path, first, **mine) / "README").read_text() == "one", (
        "without git, the copy that was fetched earlier must be used"
    )
    with pytest.raises(UserError, match=r"program\.repository.*: git is missing on this machine"):
        fetch(folder, first, tmp_path / "another")


def assumed(folder: Path) -> None:
    (folder / "README").write_text("666")
    git(folder, "update-index", "--assume-unchanged", "README")


def skipped(folder: Path) -> None:
    git(folder, "update-index", "--skip-worktree", "README")
    (folder / "README").unlink()


def shadowed(folder: Path) -> None:
    """Add to the folder a package that hides a module, and an ignored file."""
    (folder / "train").mkdir()
    (folder / "train/__init__.py").touch()
    (folder / ".git/info/exclude").write_text("*.pyc\n")
    (folder / "helper.pyc").touch()


def staged(folder: Path) -> None:
    (folder / "README").write_text("staged")
    git(folder, "add", "README")


def filtered(folder: Path) -> None:
    """Add hooks and commands to the repository's own configuration, and a filter to its attributes."""
    script = folder.parent / "script"
    script.write_text(f"#!/bin/sh\ntouch {folder.parent}/ran\ncat\n")
    script.chmod(0o755)
    for hook in ("post-checkout", "reference-transaction", "post-index-change"):
        (folder / ".git/hooks" / hook).symlink_to(script)
    (folder / ".git/info/attributes").write_text("* filter=evil\n")
    for key in ("core.fsmonitor", "filter.evil.smudge", "filter.evil.clean", "uploadpack.packObjectsHook"):
        git(folder, "config", key, str(script))
    (folder.parent / "ran").unlink(missing_ok=True)


def foreign(folder: Path) -> None:
    filtered(folder)
    if os.getuid() == 0:
        subprocess.run(["chown", "-R", "nobody", folder], check=True)


@pytest.mark.parametrize("change", [assumed, skipped, shadowed, staged, filtered, foreign])
def test_a_program_runs_as_committed(
    published: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    """No command in the folder's git configuration runs, and no uncommitted file is used."""
    folder, (first, _) = published
    change(folder)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "of a hook that calls dlscale"))
    found = started(tmp_path, first, folder=str(folder))
    assert (found / "README").read_text() == "one" and not (tmp_path / "ran").exists()
    assert sorted(each.name for each in found.iterdir()) == [".git", "README", "torch", "train.py"]


def test_names_of_files_are_any_bytes(published: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, _ = published
    (folder / os.fsdecode(b"caf\xe9")).touch()
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "three")
    found = started(tmp_path, git(folder, "rev-parse", "HEAD").strip(), folder=str(folder))
    assert (found / os.fsdecode(b"caf\xe9")).exists()


def test_a_folder_within_a_revision(published: tuple[Path, list[str]], tmp_path: Path) -> None:
    """A program may be in a subfolder of a linked work tree, but its command must not name files in the work tree."""
    folder, (first, _) = published
    git(folder, "worktree", "add", "--quiet", str(tmp_path / "linked"), "HEAD")
    assert started(tmp_path, first, folder=str(tmp_path / "linked/torch")) == tmp_path / "checkout/torch"
    (folder / "data").mkdir()
    with pytest.raises(UserError, match=rf"program.folder: .*data: no such folder in commit {first}"):
        started(tmp_path, first, folder=str(folder / "data"))
    program = Program(command=["python3", str(folder / "train.py")], revision=first, folder=str(folder))
    run = SimpleNamespace(program=program, study="program", batch_size=8)
    with pytest.raises(UserError, match=r"program.command: .*train.py is not in the checkout of program.revision"):
        run_program.RunProgram(run, None, tmp_path / "out", tmp_path / "steps")
    with pytest.raises(UserError, match=r"program.revision: .*w is not in a git repository"):
        (tmp_path / "w").mkdir()
        started(tmp_path, first, folder=str(tmp_path / "w"))


@pytest.mark.parametrize("what", ["submodules", "files in Git LFS"])
def test_files_outside_the_commit_are_refused(published: tuple[Path, list[str]], tmp_path: Path, what: str) -> None:
    folder, (first, _) = published
    if what == "submodules":
        git(folder, "update-index", "--add", "--cacheinfo", f"160000,{first},its module")
    else:
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n"
        (folder / "its module").write_text(pointer)
        git(folder, "add", "its module")
    git(folder, "commit", "--quiet", "--message", "three")
    last = git(folder, "rev-parse", "HEAD").strip()
    with pytest.raises(UserError, match=f"commit {last} has {what}, .*: its module"):
        fetch(folder, last, tmp_path / "there")
    assert not list(tmp_path.glob("*there*"))
    with pytest.raises(UserError, match=f"commit {last} has {what}, .*: its module"):
        started(tmp_path, last, folder=str(folder))


@pytest.mark.parametrize("wrong", ["revision", "address"])
def test_a_repository_that_cannot_be_fetched(published: tuple[Path, list[str]], tmp_path: Path, wrong: str) -> None:
    folder, (first, _) = published
    revision, repository = ("0" * 40, folder) if wrong == "revision" else (first, tmp_path / "nowhere")
    with pytest.raises(UserError, match=f"program.repository {repository}: git fetch of {revision} failed: "):
        fetch(repository, revision, tmp_path / "there")
    assert not list(tmp_path.glob("*there*"))


def test_an_address_with_a_login_is_refused() -> None:
    with pytest.raises(ValueError, match="repository: the address contains a login or a query") as caught:
        Program(command=["a"], repository="https://me:secret@host/a.git", revision="0" * 40)
    assert "secret" not in str(caught.value).partition("input_value")[0]
    Program(command=["a"], repository="/data/a@b/c", revision="0" * 40)
