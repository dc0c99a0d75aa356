"""A rank that dies, is stopped or hangs ends the run within a minute and is named, with every strategy."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from dlscale.config.site import Limits
from dlscale.core import ranges
from dlscale.core.errors import UserError
from dlscale.core.machine import WATCHDOG
from dlscale.core.process import LOST, MEET
from dlscale.core.progress import Progress
from dlscale.extensions.hangs.hangs import waiting_place
from dlscale.extensions.hangs.record import hang_of
from dlscale.parallel import watchdog
from dlscale.parallel.watchdog import Watchdog
from dlscale.parallel.world import World
from dlscale.train.checkpoint import Checkpoints
from tests.conftest import ROOT, stage, variables
from tests.ranks import spawn
from tests.test_parallel import configure
from tests.waiting import PATIENCE, until

#: Program that replaces `dlscale`. The rank CULPRIT hangs at call number CALL in the part WHERE, such as `forward`.
FAULTY = """
import ctypes, os, sys, time
from dlscale import cli
from dlscale.data.loaders.torch_loader import TorchLoader
from dlscale.parallel import watchdog
from dlscale.train import checkpoint
from dlscale.train.logs import RunLogs
from dlscale.train.step import Network

calls = 0

def falter():
    global calls
    calls += 1
    if calls == int(os.environ["CALL"]) and os.environ.get("RANK", "0") == os.environ["CULPRIT"]:
        print("HANGS", os.getpid(), flush=True)
        if "HOLDS" in os.environ:  # this call holds Python's lock
            ctypes.PyDLL(None).sleep(int(os.environ["HOLDS"]))
        else:
            time.sleep(3600)

def before(owner, name):
    original = getattr(owner, name)
    setattr(owner, name, lambda *arguments: (falter(), original(*arguments))[1])

WHERE = os.environ["WHERE"]
watchdog.GRACE_SECONDS = float(os.environ.get("GRACE", watchdog.GRACE_SECONDS))
if WHERE == "forward":
    before(Network, "losses")
elif WHERE == "writing":
    before(RunLogs, "add")
elif WHERE == "worker":
    from dlscale.data.loaders import torch_loader
    before(torch_loader._Dataset, "__getitem__")
elif WHERE == "checkpoint":
    before(checkpoint, "sha256")
else:
    epoch = TorchLoader.epoch
    def slow(self, *arguments):
        batches = epoch(self, *arguments)
        while True:
            falter()
            try:
                yield next(batches)
            except StopIteration:
                return
    TorchLoader.epoch = slow
sys.exit(cli.main(sys.argv[1:]))
"""

#: Line of `FAULTY` in which the rank hangs.
SLEEP = FAULTY.splitlines().index("            time.sleep(3600)") + 1

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"parallel": {"kind": "fsdp"}},
    "tp": {"geometry": {"tp": 2}},
    "cp": {"geometry": {"cp": 2}},
}
strategies = pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(name, marks=pytest.mark.parallel) for name in ("fsdp", "tp", "cp"))]
)


def begin(folder: Path, data: Path, program: list[str], processes: int = 2, **env: str) -> subprocess.Popen[str]:
    """Start a training of the run in `folder`."""
    starter = [sys.executable, "-m", "dlscale.launch.ranks", f"--nproc-per-node={processes}", *program]
    starter = [sys.executable, *program] if processes == 1 else starter
    arguments = [
        *("--config", folder / "config.yaml", "--manifest", data / "manifest.json", "--threads", 2),
        *("--checkpoints", folder / "checkpoints", "--out", folder, "--log", folder / "train.log"),
    ]
    return subprocess.Popen(
        [*starter, "train", *map(str, arguments)],
        env=variables(**env),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    return sorted(map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))


def said(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob("train*.log")))


def end_of(process: subprocess.Popen[str], folder: Path) -> str:
    """Wait for the end of a process; return its output."""
    try:
        output, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode > 0
    assert "a defect of dlscale" not in output + said(folder) and "Traceback" not in output, output
    return output


@strategies
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_rank_that_dies_or_is_stopped_is_named(
    tmp_path: Path, era5_data: Path, strategy: str, how: signal.Signals, rank: int
) -> None:
    folder = configure(tmp_path / "run", "era5_vit", 2, **STRATEGIES[strategy], training={"steps": 100_000})
    process = begin(folder, era5_data, ["-m", "dlscale"])
    until("an epoch", lambda: "epoch 2 of" in said(folder), process, lambda: said(folder))
    victim = ranks_of(process)[rank]
    os.kill(victim, how)
    output = end_of(process, folder)
    survivor = (folder / ("train.log" if rank else "train.rank1.log")).read_text()
    assert f"process {rank} on " in survivor and "This process also ends" in output, survivor
    assert (": stopped by a signal" in survivor) == (how == signal.SIGSTOP), survivor
    assert not Path(f"/proc/{victim}").exists()


def begin_faulty(
    folder: Path, data: Path, where: str, call: int = 20, culprit: int = 1, processes: int = 2, **env: str
) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(FAULTY)
    env = {"WHERE": where, "CALL": str(call), "CULPRIT": str(culprit), **env}
    return begin(folder, data, [str(folder / "program.py")], processes, **env)


@pytest.mark.slow
@strategies
@pytest.mark.parametrize("where", ["data", pytest.param("forward", marks=pytest.mark.slow)])
def test_a_rank_that_hangs_is_named(
    tmp_path: Path, era5_data: Path, capsys: pytest.CaptureFixture[str], strategy: str, where: str
) -> None:
    folder = configure(tmp_path / "run", "era5_vit", 2, **STRATEGIES[strategy], training={"steps": 100_000})
    output = end_of(begin_faulty(folder, era5_data, where, **{WATCHDOG: "stuck=8"}), folder)
    log = (folder / "train.log").read_text()
    assert "HANGS" in said(folder)
    waits = r"all other processes have waited for \d+ s in \w+ #\d+ at \w+\.py:\d+ for process 1 on \S+ "
    assert re.search(rf"{waits}\({where} at program\.py:{SLEEP}\)", log), log
    assert f'program.py", line {SLEEP}, in falter' in (folder / "train.rank1.log").read_text()
    assert "process 0" not in log.split("all other processes have waited")[1]
    assert "This process also ends" in output
    # `dlscale explain` reads the logs of a run in a results folder.
    (tmp_path / "logs/train/plan").mkdir(parents=True)
    shutil.copy(folder / "train.log", tmp_path / "logs/train/plan/run.log")
    hang = hang_of(tmp_path / "plans/plan/run")
    assert re.search(rf"^train: {waits}\({where} at program\.py:{SLEEP}\)", hang), hang
    run = tmp_path / "plans/plan/run"
    run.mkdir(parents=True)
    shutil.copy(folder / "config.yaml", run)
    assert stage("explain", run) == 0
    explained = capsys.readouterr().out
    assert re.search(rf"^  ended: train: {waits}\({where} at program\.py:{SLEEP}\)", explained, re.M), explained


@pytest.mark.slow
def test_a_loader_process_that_hangs_is_named_with_its_line(tmp_path: Path, era5_data: Path) -> None:
    """The rank waits for data; its log has the stack of its loader process."""
    folder = configure(tmp_path / "run", "era5_vit", 2, loader={"workers": 1}, training={"steps": 100_000})
    end_of(begin_faulty(folder, era5_data, "worker", **{WATCHDOG: "stuck=8"}), folder)
    assert "for process 1 on " in (folder / "train.log").read_text()
    assert f'program.py", line {SLEEP} in falter' in (folder / "train.rank1.log").read_text()


@pytest.mark.parametrize("where", ["worker", "forward"])
def test_a_run_of_one_process_that_hangs_ends(tmp_path: Path, era5_data: Path, where: str) -> None:
    folder = configure(tmp_path / "run", "era5_vit", 1, loader={"workers": 1}, training={"steps": 100_000})
    process = begin_faulty(folder, era5_data, where, culprit=0, processes=1, GRACE="6", **{WATCHDOG: "stuck=5"})
    until("it hangs", lambda: "HANGS" in said(folder), process, lambda: said(folder))
    if where == "worker":
        psutil.Process(int(re.findall(r"HANGS (\d+)", said(folder))[0])).suspend()
    output, part = end_of(process, folder), {"worker": "data", "forward": "forward"}[where]
    assert process.returncode == LOST
    assert re.search(
        rf"no process has made progress for \d+ s, .*: process 0 on \S+ \({part} at \w+\.py:\d+\)", output
    ), output
    assert not [each for each in psutil.process_iter(["cmdline"]) if str(folder) in (each.info["cmdline"] or ())]


def test_a_user_can_ask_for_all_stacks(tmp_path: Path, era5_data: Path) -> None:
    """After SIGQUIT the log has the stacks of a rank, and the training continues."""
    folder = configure(tmp_path / "run", "era5_vit", 2, training={"steps": 100_000})
    process = begin(folder, era5_data, ["-m", "dlscale"])
    until("an epoch", lambda: "epoch 2 of" in said(folder), process, lambda: said(folder))
    os.kill(ranks_of(process)[1], signal.SIGQUIT)
    log = folder / "train.rank1.log"
    until("stacks", lambda: "most recent call first" in log.read_text(), process, log.read_text)
    epochs = said(folder).count("epoch ")
    until("further epochs", lambda: said(folder).count("epoch ") > epochs + 2, process, lambda: said(folder))
    process.terminate()
    process.communicate(timeout=PATIENCE)
    assert 'train.py", line' in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "culprit", "call"), [("checkpoint", 1, 2), pytest.param("writing", 0, 3, marks=pytest.mark.slow)]
)
def test_a_rank_that_hangs_between_epochs_is_named(
    tmp_path: Path, era5_data: Path, where: str, culprit: int, call: int
) -> None:
    """A rank that hangs between epochs is named, even if only its thread for checkpoints hangs."""
    folder = configure(tmp_path / "run", "era5_vit", 2, training={"steps": 100_000})
    output = end_of(begin_faulty(folder, era5_data, where, call, culprit, **{WATCHDOG: "between=8"}), folder)
    call_of_others = r"all other processes have waited for 8 s in \w+ #\d+ at \w+\.py:\d+"
    assert re.search(rf"{call_of_others} for process {culprit} on \S+ \({where}[ )]", output), output
    assert f"process {1 - culprit} on" not in output


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_rank_that_holds_pythons_lock_is_not_reported(tmp_path: Path, era5_data: Path, culprit: int) -> None:
    """A rank without heartbeats continues if the other rank sees that its process is running."""
    folder = configure(tmp_path / "run", "era5_vit", 2, training={"steps": 60})
    # The silence of 12 s exceeds these limits. The longer limit of the first steps applies to a process that the other
    # rank can see.
    process = begin_faulty(folder, era5_data, "data", 2, culprit, HOLDS="12", **{WATCHDOG: "silent=5:stuck=6"})
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output + said(folder)
    assert "HANGS" in said(folder) and "no heartbeat" not in said(folder)


@pytest.mark.slow
def test_a_rank_that_never_releases_pythons_lock_is_named(tmp_path: Path, era5_data: Path) -> None:
    """Rank 0 judges all ranks. If rank 0 hangs, rank 1 reports this."""
    folder = configure(tmp_path / "run", "era5_vit", 2, training={"steps": 100_000})
    limits = {WATCHDOG: "silent=5:stuck=12:between=12"}
    output = end_of(begin_faulty(folder, era5_data, "data", 400, culprit=0, HOLDS="3600", **limits), folder)
    assert "no heartbeat for 13 s from process 0 on" in output and "): still running." in output, output


@pytest.mark.long
@pytest.mark.parametrize("how", ["stopped", "hangs"])
@pytest.mark.parametrize("rank", [0, 1])
def test_within_a_minute(tmp_path: Path, era5_data: Path, how: str, rank: int) -> None:
    """With the watchdog's default limits, all processes of the run end within a minute."""
    folder = configure(tmp_path / "run", "era5_vit", 2, training={"steps": 100_000})
    process = begin_faulty(folder, era5_data, "data", call=200 if how == "hangs" else -1, culprit=rank)
    if how == "hangs":
        until("it hangs", lambda: "HANGS" in said(folder), process, lambda: said(folder))
    else:
        until("an epoch", lambda: "epoch 20 of" in said(folder), process, lambda: said(folder))
    start, processes = time.monotonic(), ranks_of(process)
    if how == "stopped":
        os.kill(processes[rank], signal.SIGSTOP)
    output = end_of(process, folder)
    assert time.monotonic() - start < 60
    assert f"process {rank} on" in output and f"process {1 - rank} on" not in output, output
    assert not any(Path(f"/proc/{each}").exists() for each in processes)


@pytest.mark.slow
def test_a_watchdog_that_cannot_start_leaves_nothing_behind(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        """
import os, torch.distributed as dist
from dlscale.config.run import Geometry
from dlscale.core.errors import PeerLost
from dlscale.parallel import rendezvous, watchdog

connect = watchdog.connect
def refused():
    os.environ["MASTER_PORT"], watchdog.CONNECT = "1", 1.0
    return connect()
watchdog.connect = refused
del os.environ["DLSCALE_MEET"]  # as on several nodes: at an address, not in a folder
try:
    with rendezvous.join(Geometry(gpus_per_node=2), "cpu"):
        pass
except PeerLost as lost:
    print("left behind:", dist.is_initialized(), "accepted no connection in 1 s" in str(lost), flush=True)
"""
    )
    starter = [sys.executable, "-m", "dlscale.launch.ranks", "--nproc-per-node=2", str(program)]
    done = subprocess.run(starter, capture_output=True, text=True, env=variables(), timeout=PATIENCE)
    assert done.stdout.count("left behind: False True") == 2, done.stdout + done.stderr


def test_a_process_that_hangs_before_it_joins_is_named(tmp_path: Path) -> None:
    """A process that hangs before it has a heartbeat ends the run after the limit `between`, not after half an hour."""
    (tmp_path / "program.py").write_text(
        """
import os, time
if os.environ["RANK"] == "1":
    time.sleep(600)
from dlscale.config.run import Geometry
from dlscale.parallel import rendezvous
with rendezvous.join(Geometry(gpus_per_node=2), "cpu"):
    pass
"""
    )
    command = [sys.executable, "-m", "dlscale.launch.ranks", "--nproc-per-node=2", str(tmp_path / "program.py")]
    limited = variables(**{WATCHDOG: "between=5"})
    done = subprocess.run(command, capture_output=True, text=True, env=limited, timeout=PATIENCE)
    assert done.returncode == 1 and "PeerLost: process 1 of 2 did not join in 5 s" in done.stderr, done.stderr


@pytest.mark.parametrize(("rank", "kind"), [("0", "folder"), ("0", "address"), ("1", "address")])
def test_ctrl_c_ends_a_process_that_waits_for_others(tmp_path: Path, rank: str, kind: str) -> None:
    """Ctrl-C also ends a process while PyTorch waits for others, in a folder or at an address."""
    program = (
        "from dlscale.config.run import Geometry; from dlscale.parallel import rendezvous\n"
        "meet = rendezvous._meet; rendezvous._meet = lambda *given: (print(flush=True), meet(*given))[1]\n"
        'with rendezvous.join(Geometry(gpus_per_node=2), "cpu"): pass'
    )
    alone = variables(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="23456")
    alone |= {MEET: str(tmp_path / "meet")} if kind == "folder" else {}
    with subprocess.Popen([sys.executable, "-c", program], env=alone, stdout=subprocess.PIPE, text=True) as waiting:
        try:
            assert waiting.stdout and waiting.stdout.readline()
            time.sleep(1)  # then it waits in C++; if not yet, the signal ends it, too
            waiting.send_signal(signal.SIGINT)
            assert waiting.wait(20) == -signal.SIGINT
        finally:
            waiting.kill()


@pytest.mark.slow
def test_a_request_to_end_does_not_suppress_the_last_message(tmp_path: Path, era5_data: Path) -> None:
    """torchrun's SIGTERM, which arrives while a failed exchange raises its exception, does not suppress the message."""
    folder = configure(tmp_path / "run", "era5_vit", 2, training={"steps": 100_000})
    (folder / "program.py").write_text(
        """
import os, signal, sys
from dlscale import cli
from dlscale.train.train import Interruption

leave = Interruption.__exit__
def cut(self, kind, *details):
    leave(self, kind, *details)
    if kind:
        os.kill(os.getpid(), signal.SIGTERM)
Interruption.__exit__ = cut
sys.exit(cli.main(sys.argv[1:]))
"""
    )
    process = begin(folder, era5_data, [str(folder / "program.py")])
    until("an epoch", lambda: "epoch 2 of" in said(folder), process, lambda: said(folder))
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    output = end_of(process, folder)
    assert "no heartbeat for " in output and " from process 1 on" in output and ": gone: killed" in output, output


# ---- limits ------------------------------------------------------------------------------------------


def test_limits_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Limits.from_environment() == Limits()
    for given, limits in (
        ("off", None),
        ("silent=60", Limits(silent=60)),
        (str(Limits(stuck=90, between=1800)), Limits(stuck=90, between=1800)),
    ):
        monkeypatch.setenv(WATCHDOG, given)
        assert Limits.from_environment() == limits
    for wrong, message in (("silnet=60", "did you mean 'silent'"), ("silent=1", "silent"), ("60", "60")):
        monkeypatch.setenv(WATCHDOG, wrong)
        with pytest.raises(UserError, match=message):
            Limits.from_environment()


@pytest.mark.slow
def test_a_folder_that_fails_is_named_and_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the watchdog's folder is removed, the message names the folder, not a process, and all threads end."""
    monkeypatch.setenv(MEET, str(tmp_path / "meet"))
    said: list[str] = []
    monkeypatch.setattr(watchdog, "end", lambda message, status: said.append(message))
    found = Watchdog(0, 2, limits=Limits(silent=5, stuck=10))
    shutil.rmtree(tmp_path / "meet.watchdog")
    until("its word", lambda: said)
    found.close()
    assert f"the folder {tmp_path}/meet.watchdog" in said[0] and "process 0" not in said[0]
    assert not any(thread.is_alive() for thread in found._threads)


# ---- the verdict without processes -------------------------------------------------------------------


STEPS, BETWEEN, OPENING, REHEARSAL = ranges.STEPS, ranges.BETWEEN, ranges.OPENING, ranges.REHEARSAL


def judge(*signs: dict[str, Any], silent: dict[int, float] | None = None, rank: int = 0) -> Watchdog:
    """Return a rank's watchdog with the given heartbeats; `silent` has seconds without heartbeat by rank."""
    found = object.__new__(Watchdog)
    found.rank, found.size, found.limits, found._named = rank, len(signs), Limits(), []
    found._seen = [watchdog.Heartbeat(host=f"nid{each}", **sign) for each, sign in enumerate(signs)]
    found._quiet = [(silent or {}).get(each, 0.0) for each in range(len(signs))]
    return found


def verdict(*signs: dict[str, Any], silent: dict[int, float] | None = None, rank: int = 0) -> str:
    return judge(*signs, silent=silent, rank=rank)._verdict()


def at(entered: int, range_: str, kind: str, age: float, **more: Any) -> dict[str, Any]:
    return {"entered": entered, "range": range_, "kind": kind, "age": age, "longest": 0.4, **more}


WAITS, BEHIND, GOES_ON = at(100, "backward", STEPS, 50), at(98, "data", STEPS, 51), at(100, "backward", STEPS, 1)


def test_the_verdict() -> None:
    assert "45 s for process 1 on nid1 (data)" in verdict(WAITS, BEHIND)
    assert "for process 1 on nid1 (data), process 2 on nid2 (data)" in verdict(WAITS, BEHIND, BEHIND)
    assert not verdict(WAITS, {**BEHIND, "age": 3}), "one rank continues"
    assert not verdict(WAITS, WAITS), "all ranks compute, or wait for the file system"
    assert "none is behind" in verdict(*2 * [at(100, "backward", STEPS, 1801)])
    assert "45 s for process 0 on nid0 (backward)" in verdict(WAITS | {"exchanges": 7}, WAITS | {"exchanges": 8})
    assert not verdict(WAITS, BEHIND | {"longest": 6.0}), "an earlier range took 6 s"
    assert not verdict(WAITS, at(98, "forward", OPENING, 51)), "the rank behind compiles"
    assert not verdict(WAITS, BEHIND, at(98, "forward", OPENING, 51)), "one of the ranks behind compiles"
    assert "for process 1" in verdict(at(100, "forward", OPENING, 50), BEHIND), "only the waiting rank compiles"
    assert "1800 s for process 1 on nid1 (opening)" in verdict(*[at(n, "", OPENING, 1801) for n in (9, 8)])
    short = judge(*[at(n, "", OPENING, 31) for n in (9, 8)])
    assert not short._verdict()
    short.limits = Limits(between=10)
    assert "30 s for process 1 on nid1 (opening)" in short._verdict(), "three times `between`"
    long = judge(*[at(n, "", OPENING, 3_000) for n in (9, 8)])
    assert long._verdict()
    long.limits = Limits(between=3_600)
    assert not long._verdict(), "opening may last at least as long as work between epochs"
    tests, further, after = (at(n, "self-test", REHEARSAL, 121) for n in (5, 6, 9))
    assert "120 s for process 0 on nid0 (self-test)" in verdict(tests, further, after)
    assert not verdict(at(5, "self-test", REHEARSAL, 100), further), "the rank behind opens connections"


def test_the_verdict_on_different_operations() -> None:
    """If a rank skips an operation, all ranks have begun equally many operations, which differ."""
    first = at(100, "forward", STEPS, 50, line="all_reduce #4 at a.py:8")
    other = at(100, "forward", STEPS, 50, line="all_gather #4 at b.py:9")
    each = "process 0 on nid0 (forward all_reduce #4 at a.py:8), process 1 on nid1 (forward all_gather #4 at b.py:9)"
    assert re.search(rf"45 s in different operations: {re.escape(each)}$", verdict(first, other))
    assert not verdict(first, first), "all ranks wait for the network"
    assert not verdict(first, {**other, "line": "at b.py:9"}), "one rank computes"
    assert "45 s in all_reduce #4 at a.py:8 for process 1 on nid1 (data at c.py:7)" in verdict(
        first, BEHIND | {"line": "at c.py:7"}
    )


def _wait_in_different_operations(rank: int, folder: str) -> None:
    """Rank 1 skips the exchange that rank 0 begins; both ranks write where they wait, and end."""
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    other = dist.new_group()
    dist.all_reduce(torch.ones(1))

    def write() -> None:
        until("the operation", lambda: "#" in waiting_place())
        Path(folder, str(rank)).write_text(waiting_place())
        until("the other rank", Path(folder, str(1 - rank)).exists)
        os._exit(0)

    threading.Thread(target=write).start()
    if rank == 0:
        dist.all_reduce(torch.ones(1))
    dist.all_gather([torch.ones(1)] * 2, torch.ones(1), group=other)


def test_a_skipped_operation_is_named_with_its_line(tmp_path: Path) -> None:
    spawn(_wait_in_different_operations, (str(tmp_path),), 2)
    waits = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    lines = Path(__file__).read_text().splitlines()
    for said, name in zip(waits, ("all_reduce", "all_gather"), strict=True):
        found = re.fullmatch(rf"{name} #\d+ at test_watchdog\.py:(\d+)", said)
        assert found and f"dist.{name}(" in lines[int(found[1]) - 1], said


def test_a_failure_to_describe_a_hang_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the stacks, the process still ends with the verdict; without the operation, heartbeats continue."""

    def fails() -> str:
        raise AttributeError("PyTorch has no such function")

    ends: list[str] = []
    monkeypatch.setattr(watchdog.registry, "provided", lambda name, default: fails)
    monkeypatch.setattr(watchdog, "end", lambda message, status: ends.append(message))
    found = judge(WAITS, BEHIND)
    found._closed, found._heartbeat = threading.Event(), found._seen[0]
    found._end("a verdict")
    assert ends == ["a verdict. This process also ends"] and watchdog.provided_text("waiting_place") == ""


def test_the_awaited_rank_is_logged_after_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """If the limit exceeds a minute, the message is logged once per awaited rank."""
    found = judge(at(120, "step", STEPS, 70), at(110, "writing", BETWEEN, 61))
    assert not found._verdict() and not found._verdict()
    (told,) = caplog.records
    assert re.search(r"61 s for process 1 on nid1 \(writing\).* 600 s", told.getMessage())
    found._seen[0] = found._seen[0]._replace(entered=100, kind=BETWEEN)
    assert not found._verdict()
    assert "process 0 on nid0" in caplog.records[-1].getMessage() and len(caplog.records) == 2
    assert not verdict(*2 * [at(100, "", OPENING, 100)]) and len(caplog.records) == 2, "no rank is behind"


def test_the_verdict_between_epochs() -> None:
    waits = at(120, "step", STEPS, 610)
    assert "600 s for process 0 on nid0 (writing)" in verdict(at(110, "writing", BETWEEN, 601), waits)
    assert not verdict(at(110, "writing", BETWEEN, 590), waits)
    saves = at(111, "checkpoint", BETWEEN, 601, exchanges=50)
    assert not verdict(saves, saves), "all ranks write"
    assert "for process 1 on nid1 (checkpoint)" in verdict(saves | {"background": 8}, saves | {"background": 7})
    # Outside of steps, background threads of some ranks may be ahead; this difference has no meaning.
    assert "none is behind" in verdict(*[at(100, "backward", STEPS, 1801, exchanges=50, background=n) for n in (7, 8)])


def test_the_verdict_on_silence() -> None:
    def sees(state: str, rank: int = 1) -> dict[str, Any]:
        return GOES_ON | {"sees": {str(rank): state}}

    assert not verdict(sees(watchdog.STOPPED), GOES_ON, silent={1: 24})
    stopped = "no heartbeat for 26 s from process 1 on nid1 (backward): stopped by a signal"
    assert verdict(sees(watchdog.STOPPED), GOES_ON, silent={1: 26}) == stopped
    assert ": gone: killed" in verdict(sees(watchdog.ENDED), GOES_ON, silent={1: 26})
    assert not verdict(GOES_ON, GOES_ON, silent={1: 40}), "no rank can see the process"
    assert "46 s from process 1 on nid1 (backward): killed or" in verdict(GOES_ON, GOES_ON, silent={1: 46})
    old = verdict(GOES_ON, GOES_ON, sees(watchdog.THERE), silent={1: 46, 2: 40})
    assert "process 1 on nid1" in old, "the rank that saw the process has been silent since"
    assert not verdict(sees(watchdog.THERE), GOES_ON, silent={1: 40})
    assert verdict(sees(watchdog.THERE), GOES_ON | {"failed": "full disk"}, silent={1: 26}) == (
        "process 1 on nid1 ended: full disk"
    )
    # The second rank judges the first rank.
    assert not verdict(GOES_ON, sees(watchdog.THERE, 0), silent={0: 40}, rank=1)
    assert "process 0 on nid0 (backward): still running" in verdict(
        GOES_ON, sees(watchdog.THERE, 0), silent={0: 46}, rank=1
    )
    assert not verdict(at(100, "", OPENING, 1), sees(watchdog.THERE, 0), silent={0: 1000}, rank=1)
    assert not verdict(WAITS, BEHIND, rank=1), "the second rank must not judge other ranks"


def test_background_exchanges_are_counted_separately(tmp_path: Path) -> None:
    """Ranks that write a checkpoint may differ in progress, so background exchanges count separately."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        steps, background = dist.new_group(), Checkpoints(tmp_path, 1, World(size=2))._background.control
        of_steps, of_threads = watchdog._exchanges()
        dist.all_reduce(torch.ones(1), group=background)
        assert watchdog._exchanges() == (of_steps, of_threads + 1)
        dist.all_reduce(torch.ones(1), group=steps)
        assert watchdog._exchanges() == (of_steps + 1, of_threads + 1)
    finally:
        dist.destroy_process_group()


def test_counted_items_are_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification of data and paired timing enter no range, but may last longer than `GRACE_SECONDS`."""
    monkeypatch.setattr(watchdog, "BEAT", 0.02)
    dog, counter = Watchdog(), Progress("verifying data", 2, "files")
    try:
        for done in range(3):
            until("no progress", lambda: dog._heartbeat.age > 1)
            counter.update(done)
            until("progress", lambda: dog._heartbeat.age <= 1, seconds=60)
    finally:
        dog.close()


def test_ranges_record_the_progress_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "_marked", 0)
    monkeypatch.setattr(ranges, "at", "")  # earlier tests may have changed this value
    before = ranges.entered
    with ranges.part("epoch", BETWEEN):
        with ranges.part("steps", STEPS):
            for _ in range(ranges.FIRST - 1):
                ranges.mark("data")
                assert ranges.kind() == OPENING, "the first steps must have their own limit"
            with ranges.mark("forward"):
                assert (ranges.entered, ranges.at, ranges.kind()) == (before + 2 + ranges.FIRST, "forward", STEPS)
                with ranges.patience():
                    assert ranges.kind() == OPENING
                assert ranges.kind() == STEPS
        assert (ranges.entered, ranges.at, ranges.kind()) == (before + 3 + ranges.FIRST, "epoch", BETWEEN), (
            "the end of a range must count as progress"
        )
        with pytest.raises(ValueError), ranges.part("writing"):
            assert (ranges.at, ranges.kind()) == ("writing", BETWEEN)
            raise ValueError
    assert (ranges.at, ranges.kind()) == ("", OPENING)


def test_the_last_message_is_printed_before_the_exit() -> None:
    program = "from dlscale.core import process; process.end('because', 7)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=variables())
    assert (done.returncode, done.stderr) == (7, "because\n")
    assert LOST not in (0, 1, 2, 75, 130)
