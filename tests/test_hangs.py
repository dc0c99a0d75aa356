"""`dlscale measure --hang-after`: a hanging program is ended, and the rank, operation and line are named."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from dlscale.extensions.hangs import collect, inside, supervisor
from dlscale.extensions.hangs.finding import GONE, Process, Waiting, describe, line_of
from dlscale.extensions.hangs.matching import mismatches
from dlscale.extensions.hangs.record import hang_of
from dlscale.extensions.hangs.supervisor import HUNG
from tests.conftest import ROOT, stage
from tests.waiting import PATIENCE, until

#: Distributed training; the first argument selects how rank 1 hangs (`first`: all ranks; `slow`: none). Comments mark
#: the lines that messages name.
TRAIN = """
import ctypes, os, signal, sys, threading, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

how, rank = sys.argv[1], int(os.environ.get("RANK", 0))
with open(f"pid.{os.getpid()}", "w"):
    pass

class Data(Dataset):
    lock = threading.Lock()
    def __len__(self):
        return 10_000
    def __getitem__(self, index):
        if how == "worker" and rank == 1 and index > 100:
            self.lock.acquire()
            self.lock.acquire()  # worker
        return torch.ones(3)

if how == "first":
    time.sleep(1000)  # first
dist.init_process_group("gloo")
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
total = torch.zeros(1)
for step, x in enumerate(DataLoader(Data(), batch_size=2, num_workers=how == "worker")):
    model(x).sum().backward()
    optimizer.step()
    if rank == 1 and step == 60:
        if how == "sleep":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)  # sleep
        if how == "stop":
            # Continued by dlscale, the rank stays in this line.
            os.kill(os.getpid(), signal.SIGSTOP), time.sleep(600)  # stop
        if how == "lock":
            ctypes.PyDLL(None).read(os.pipe()[0], b" ", 1)  # lock
        if how == "skip":
            dist.barrier()  # skip
        if how == "die":
            os._exit(0)
    if how == "slow":
        time.sleep(2)
        if step == 6:
            break
    try:
        dist.all_reduce(total)  # reduce
    except RuntimeError:
        time.sleep(1000)  # alone
    time.sleep(0.01)
dist.destroy_process_group()
print("trained", flush=True)
"""


def row(mark: str) -> str:
    """Return file and number of the line of `TRAIN` with a mark, such as `train.py:61`."""
    lines = TRAIN.splitlines()
    return f"train.py:{next(number for number, text in enumerate(lines, 1) if text.endswith(f'# {mark}'))}"


def begin(folder: Path, how: str, seconds: int, processes: int = 2) -> subprocess.Popen[str]:
    """Start `dlscale measure --hang-after` with torchrun in a folder; return its process."""
    (folder / "train.py").write_text(TRAIN)
    words = ["-P", "-m", "dlscale", "measure", "--hang-after", str(seconds), "--"]
    words += [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "workflow_scripts"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *words, "train.py", how],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end_of(process: subprocess.Popen[str], folder: Path) -> str:
    """Return the output of `dlscale measure`; no process of the program may be left."""
    try:
        output, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    pids = [int(file.suffix[1:]) for file in folder.glob("pid.*")]
    assert pids and not any(map(psutil.pid_exists, pids)), output
    return output


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("sleep", r"rank 1 .*{sleep}; ranks 0, 2 .*all_reduce #\d+ .*{reduce} .*\d+ s"),
        pytest.param(
            "skip",
            r"different operations: rank 0 .*all_reduce #(\d+) .*{reduce} .*; rank 1 .*barrier #\1 .*{skip} ",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "stop",
            r"rank 1 .*signal .*{stop}; rank 0 .*all_reduce #\d+ .*{reduce} ",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "lock",
            r"rank 1 .*\(GIL\) .*{lock}; rank 0 .*all_reduce",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "worker",
            r"rank 1 .*train.py:\d+, .*child process \d+ .*{worker}; rank 0 .*all_reduce #\d+ ",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "die",
            rf"rank 1 {GONE}; .*train.py:\d+; rank 0 .*{{alone}}",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_hanging_rank_is_named_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, expected: str
) -> None:
    """`dlscale measure` and `dlscale explain` name the rank; a rank that ignores SIGTERM (`sleep`) is killed."""
    process = begin(tmp_path, how, 4, processes=3 if how == "sleep" else 2)
    output = end_of(process, tmp_path)
    marks = {mark: row(mark) for mark in ("sleep", "reduce", "skip", "stop", "lock", "worker", "alone")}
    text = expected.format(**marks)
    assert re.search(rf"dlscale measure: no step for \d+ s: .*{text}", output), output
    assert process.returncode == HUNG
    folder = tmp_path / "results/plans/measured/train"
    assert re.search(text, hang_of(folder)) and f"Stacks of all processes: {folder}/hang" in hang_of(folder)
    assert stage("explain", folder) == 0
    ended = rf"^  ended: no step for \d+ s: .*{text}.*\. Stacks of all processes: {folder}/hang$"
    assert re.search(ended, explained := capsys.readouterr().out, re.MULTILINE), explained
    # torchrun prints this after its own, longer wait for a rank that ignores SIGTERM.
    assert how != "sleep" or "forcefully" not in output, output
    stacks = "".join(file.read_text() for file in folder.glob("hang/stacks.*.txt"))
    named = marks["alone" if how == "die" else how].replace("train.py:", 'train.py", line ')
    assert named in stacks, stacks
    if how == "skip":
        reports = [json.loads(file.read_text()) for file in sorted(folder.glob("hang/report.*.json"))]
        (found,) = mismatches([each for each in reports if each.get("entries")])
        assert {row("reduce"), row("skip")} == {found["called"].split()[-1], found["others"]["1"].split()[-1]}, found


def test_processes_that_ignore_sigterm_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process and its child ignore SIGTERM; the pipe is at its end when both have ended."""
    monkeypatch.setattr(supervisor, "GRACE", 0.5)
    command = ["sh", "-c", "trap '' TERM; sleep 1000 & echo ready; wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        supervisor._end(process.pid)
        assert process.communicate(timeout=10)[0] == "" and process.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_a_slow_program_is_not_ended(tmp_path: Path) -> None:
    """Steps of two seconds are progress, as is the end of the training."""
    process = begin(tmp_path, "slow", 4)
    output = end_of(process, tmp_path)
    assert process.returncode == 0 and output.count("trained") == 2 and "no step for" not in output, output


@pytest.mark.slow
def test_a_program_without_a_first_step_is_ended_later(tmp_path: Path) -> None:
    process = begin(tmp_path, "first", 3)
    output = end_of(process, tmp_path)
    assert process.returncode == HUNG
    assert re.search(rf"no step for 3\d s: ranks 0–1 are at {row('first')}", output), output


@pytest.mark.slow
def test_a_user_can_ask_what_a_program_does(tmp_path: Path) -> None:
    """SIGQUIT prints what all processes do; the program continues."""
    (tmp_path / "results").mkdir()
    process = begin(tmp_path, "sleep", 1000)
    folder = tmp_path / "results/plans/measured/train"
    until("steps of both ranks", lambda: len([*folder.glob("steps/hang.status.*[0-9]")]) == 2, process)
    process.send_signal(signal.SIGQUIT)
    until("stacks", lambda: [*folder.glob("hang/stacks.*.txt")], process)
    assert process.poll() is None and not (folder / "hang/finding.txt").exists()
    process.terminate()
    output = end_of(process, tmp_path)
    assert re.search(r"dlscale measure: no step for \d+ s: rank", output) and process.returncode != HUNG, output


@pytest.mark.parametrize("recorded", [True, False])
def test_a_request_writes_the_state_of_the_allocator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    """The snapshot is written if the program records the allocator's history; the report follows in either case."""

    def dump(file: str) -> None:
        assert "complete" not in json.loads((steps / inside.REPORT).read_text())
        Path(file).write_text("state")
        raise OSError("full disk")

    (steps := tmp_path / "steps").mkdir()
    monkeypatch.setenv(inside.AFTER, "10")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: recorded, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    reporter = inside.Reporter(SimpleNamespace(folder=str(steps), rank=1, file=lambda name: steps / name))
    monkeypatch.setattr(reporter, "_children", dict)
    with (tmp_path / "stacks").open("w") as stacks:
        reporter._stacks = stacks.fileno()
        reporter._report(0.0)
    assert json.loads((steps / inside.REPORT).read_text())["complete"]
    assert [*tmp_path.glob("*.pickle")] == [tmp_path / "rank1_memory_snapshot.pickle"] * recorded


def test_ranks_in_the_same_place_are_named_together() -> None:
    """Lost ranks come first, then ranks that do not wait, then waiting ranks by operation."""

    def waits(rank: int, order: int = 412) -> Process:
        return Process(
            rank, rank, waiting=[Waiting(f"all_gather #{order} at train.py:88", "0", order, "all_gather", 60)]
        )

    ranks = [waits(0), waits(1), waits(2), Process(4, 4, line="at data.py:3"), Process(5, 5, GONE), waits(6)]
    assert re.fullmatch(
        rf"rank 5 {GONE}; rank 4 .*data\.py:3; ranks 0–2, 6 .*all_gather #412 .*train\.py:88 .*60 s", describe(ranks)
    )
    assert re.match(".*same operation.* ranks 0–1 ", describe([waits(0), waits(1)]))
    assert re.match(".*different operations.* rank 0 ", describe([waits(0), waits(1, 413)]))
    assert re.fullmatch(r"process 4021 .*train\.py:3", describe([Process(4021, line="at train.py:3")]))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("trap", [Path.symlink_to, lambda file, private: os.mkfifo(file)])
def test_a_link_or_pipe_among_the_steps_is_neither_read_nor_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: Callable[[Path, Path], Any]
) -> None:
    """Another user may create links and pipes: a link may lead to a private file, and a pipe never ends."""
    (steps := tmp_path / "steps").mkdir()
    (private := tmp_path / "private").write_text("BEGIN-KEY 1")
    for name in (f"{inside.STACKS}.host.{os.getpid()}", f"{inside.STACKS}.host.x", f"{inside.REPORT}.host.1"):
        trap(steps / name, private)
    monkeypatch.setattr(collect, "catches_quit", lambda pid: False)
    monkeypatch.setattr(collect, "_spied", lambda processes: {})
    assert collect.collect(steps, os.getpid(), {}, ends=False).stacks == {}
    monkeypatch.setenv(inside.AFTER, "10")
    reporter = inside.Reporter(SimpleNamespace(folder=str(steps), rank=0, file=lambda name: f"{steps}/{name}.host.9"))
    for name in (inside.STACKS, f"{inside.STATUS}.host.9.new"):
        trap(steps / name, private)
    with pytest.raises(OSError, match=str(steps)):
        reporter._write(inside.STATUS, {})
    with pytest.raises(OSError, match=str(steps)):
        inside.open_own(str(steps / inside.STACKS), os.O_WRONLY)
    assert private.read_text() == "BEGIN-KEY 1"


def test_the_line_of_a_forked_child_is_its_own(tmp_path: Path) -> None:
    """The stack of a forked loader process also has frames of its parent, whose lines must not be named."""
    program = tmp_path / "fork.py"
    program.write_text(
        "import faulthandler, multiprocessing, sys\n"
        "def work():\n"
        "    faulthandler.dump_traceback(sys.stdout)\n"
        "def start(work):\n"
        "    process = multiprocessing.get_context('fork').Process(target=work)\n"
        "    process.start()\n"
        "    process.join()\n"
        "start(work)\n"
        "start(faulthandler.dump_traceback)\n"
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=True)
    assert line_of(done.stdout) == "at fork.py:3" and 'fork.py", line 8' in done.stdout
    assert line_of(done.stderr) == "" and 'fork.py", line 9' in done.stderr
