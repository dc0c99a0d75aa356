"""Tests of `dlscale measure --replay`: speed with a loader that costs nothing, in a copy that changes no file."""

from __future__ import annotations

import collections
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from dlscale.core import machine
from dlscale.core.errors import UserError
from dlscale.extensions.headroom import causes, headroom, replay, scratch
from dlscale.extensions.headroom.headroom import NoHeadroom, of_command
from dlscale.extensions.headroom.records import Headroom
from dlscale.report.evidence import Evidence
from tests.test_any_program import measure
from tests.waiting import until

#: Program with a loader and a model that sleep, so that their times hardly depend on the machine.
TRAIN = """
import argparse, os, sys, time, torch
from torch.utils.data import DataLoader, Dataset
parser = argparse.ArgumentParser()
for name, kind, default in (
    ("load", float, 0.0), ("model", float, 0.0), ("workers", int, 0), ("steps", int, 40), ("kind", str, "plain")
):
    parser.add_argument(f"--{name}", type=kind, default=default)
args = parser.parse_args()
torch.set_num_threads(1)
class Data(Dataset):
    def __len__(self):
        return 4 * args.steps
    def __getitem__(self, index):
        time.sleep(args.load / 4)
        return torch.full((16,), float(index + 1)), torch.tensor(index % 4)
net = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(net.parameters(), 1e-9)
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
    net = torch.nn.parallel.DistributedDataParallel(net)
loader = DataLoader(Data(), batch_size=4, num_workers=args.workers)
if args.kind == "timed":
    import dlscale
    class Loader:
        def __iter__(self):
            return (pair for pair in DataLoaderLess())
    def DataLoaderLess():
        for _ in range(args.steps):
            time.sleep(args.load)
            yield torch.ones(4, 16), torch.zeros(4, dtype=torch.long)
    loader = dlscale.timed(Loader())
elif args.kind == "list":
    loader = [(torch.ones(4, 16), torch.zeros(4, dtype=torch.long))] * args.steps
seen = 0
with open("out.txt", "w") as file:
    for x, y in loader:
        if args.kind == "changes":
            assert x.mean() >= 1, "the program's change of an earlier batch came back"
            x.mul_(0.5)
            x.mul_(0.5)
        time.sleep(args.model)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        seen += 1
    file.write(str(seen))
"""


def _can_copy() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        layers, steps = Path(folder, "layers"), Path(folder, "steps")
        for each in (layers, steps):
            each.mkdir()
        command = [sys.executable, "-I", str(scratch.__file__), str(layers), str(steps), "--", "true"]
        return subprocess.run(command, check=False).returncode == 0


copies = pytest.mark.skipif(not _can_copy(), reason="this machine does not let a user make mount namespaces")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STEPS_ONLY": 2.0, "TURN": 0.15, "MIN_PAIRS": 5, "ERROR": 0.1, "SECONDS": 5.0}.items():
        monkeypatch.setattr(headroom, name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    (folder / "out.txt").write_text("earlier results")
    monkeypatch.chdir(folder)
    return folder / "train.py"


def replayed(script: Path, *words: object, count: int = 8) -> Headroom:
    return of_command([sys.executable, str(script), *map(str, words)], count, script.with_name("log.txt"))


# ---- the speed-up ------------------------------------------------------------------------------------


@copies
@pytest.mark.slow
@pytest.mark.parametrize(
    ("load", "model", "low", "high"),
    [(0.04, 0.0, 6, 400), (0.04, 0.04, 1.6, 2.1), (0.0, 0.04, 0.85, 1.2)],
    ids=["slow loader", "both slow", "slow model"],
)
def test_slow_loaders_and_slow_models_are_told_apart(
    train: Path, load: float, model: float, low: float, high: float
) -> None:
    found = replayed(train, "--load", load, "--model", model)
    assert low < found.gain[0] < high and found.gain[1] <= found.gain[0] <= found.gain[2]
    assert found.significant is (load > 0)
    assert ("at most" in found.text) is (load > 0) and ("no significant gain" in found.text) is (load == 0)
    assert (found.batches, found.copied, found.others, found.processes) == (8, False, False, 1)
    assert found.bytes == 8 * 4 * (16 * 4 + 8)
    assert train.with_name("out.txt").read_text() == "earlier results"


@copies
@pytest.mark.slow
def test_batches_that_workers_have_loaded_in_advance_do_not_count(train: Path) -> None:
    """Workers fill their queue while batches are replayed; plain turns must not profit from this queue."""
    found = replayed(train, "--load", 0.08, "--model", 0.02, "--workers", 2)
    assert 1.6 < found.gain[0] < 2.4, "two workers deliver a batch in 40 ms, and a step takes 20 ms"


@copies
@pytest.mark.slow
def test_a_loader_of_timed(train: Path) -> None:
    found = replayed(train, "--kind", "timed", "--load", 0.03, "--model", 0.03)
    assert 1.6 < found.gain[0] < 2.2


@copies
@pytest.mark.slow
def test_a_program_that_changes_its_batches(train: Path) -> None:
    found = replayed(train, "--kind", "changes", "--load", 0.02, "--model", 0.02)
    assert found.copied and 1.5 < found.gain[0] < 2.2


@copies
@pytest.mark.slow
def test_two_processes_change_turns_together(train: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(train)]
    found = of_command([sys.executable, *torchrun, "--load", "0.04", "--model", "0.04"], 8, train.with_name("log.txt"))
    assert found.processes == 2 and 1.5 < found.gain[0] < 2.2
    assert not [*Path("/dev/shm").glob("dlscale*")]


# ---- a copy that changes nothing -----------------------------------------------------------------------


@copies
def test_the_copy_changes_no_file(
    train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """No file changes: next to the program, in the home folder, on other mounts, in memory, at paths of the command."""
    home, other = tmp_path / "home", tmp_path / "other"
    mounted = train.with_name("mounted")
    for folder in (home, other, mounted):
        folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(mounted)], check=False)  # without root, it is a plain folder
    memory = Path(tempfile.mkdtemp(dir="/dev/shm"))
    request.addfinalizer(lambda: subprocess.run(["umount", str(mounted)], check=False, capture_output=True))
    request.addfinalizer(lambda: shutil.rmtree(memory))
    kept = [folder / "results" for folder in (home, other, mounted, memory)]
    for file in kept:
        file.write_text("earlier")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("WANDB_MODE", "online")
    code = """
import os, pathlib, shutil, sys
for place in ("out.txt", os.path.expanduser("~/results"), *sys.argv[1:], "mounted/results"):
    assert "earlier" in pathlib.Path(place).read_text()
    pathlib.Path(place).write_text("overwritten")
    assert pathlib.Path(place).read_text() == "overwritten"
os.remove(sys.argv[1]); os.mkdir("new"); shutil.move("train.py", "new")
assert os.environ["WANDB_MODE"] == "disabled"
sys.argv = ["train.py", "--load", "0.01", "--model", "0.01"]
exec(compile(open("new/train.py").read(), "train.py", "exec"))
"""
    script = train.with_name("all.py")
    script.write_text(code)
    assert replayed(script, other / "results", memory / "results").gain[0] > 1.3
    names = ["all.py", "log.txt", "mounted", "out.txt", "train.py"]
    assert sorted(path.name for path in train.parent.iterdir()) == names
    for file in (train.with_name("out.txt"), *kept):
        assert file.read_text() in ("earlier", "earlier results")
    assert not [*Path(tempfile.gettempdir()).glob(f"dlscale-replay.*.{os.getpid()}.*")]


@copies
def test_a_killed_dlscale_leaves_no_copy(train: Path, tmp_path: Path) -> None:
    """The copy's keeper ends the copied program and removes the copy's files."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    code = f"from pathlib import Path; from dlscale.extensions.headroom.headroom import of_command as measure; \
measure([{sys.executable!r}, '-c', 'import time; open(\"big\", \"w\"); time.sleep(600)'], 8, Path('log.txt'))"
    with subprocess.Popen([sys.executable, "-c", code], cwd=train.parent, env=environment) as caller:
        until("the copy writes", lambda: [*tmp_path.glob("dlscale-replay.*/files/*.files/**/big")])
        started = psutil.Process(caller.pid).children(recursive=True)
        caller.kill()
    until("the copy ends", lambda: not any(each.is_running() for each in started))
    assert not [*tmp_path.glob("dlscale-replay.*")]


@copies
def test_a_program_that_writes_elsewhere(train: Path) -> None:
    with pytest.raises(NoHeadroom, match=r"--replay does not copy.*/proc/../etc/dlscale_test"):
        replayed(_script(train, "open('/proc/../etc/dlscale_test', 'w')"))
    assert not Path("/etc/dlscale_test").exists()


def test_a_command_that_starts_processes_elsewhere_is_refused(train: Path) -> None:
    with pytest.raises(UserError, match="srun starts processes outside"):
        of_command(["srun", "-n2", "python", "train.py"], 8, train.with_name("log.txt"))
    with pytest.raises(UserError, match="at least 1"):
        replayed(train, count=0)


def test_a_process_outside_of_the_copy_ends_before_the_program_begins(train: Path, tmp_path: Path) -> None:
    steps = tmp_path / "steps"
    steps.mkdir()
    environment = headroom.watched(steps, {replay.REPLAY: "8 1000000", replay.SCRATCH: "1"})
    ended = subprocess.run([sys.executable, "-c", "open('out.txt', 'w')"], env=environment, check=False)
    assert ended.returncode == replay.REFUSED == scratch.REFUSED
    assert "does not run in the scratch copy" in (steps / scratch.REASON).read_text()
    assert train.with_name("out.txt").read_text() == "earlier results"


def test_a_machine_without_namespaces_refuses(train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "scratch.py"
    text = Path(str(scratch.__file__)).read_text()
    broken.write_text(text.replace("    _own_namespace()\n    #", "    _check(1, 'unshare')\n    #"))
    monkeypatch.setattr(scratch, "__file__", str(broken))
    with pytest.raises(UserError, match=r"no scratch copy can be made here.*\{out\}"):
        replayed(train)
    assert train.with_name("out.txt").read_text() == "earlier results"


# ---- programs that cannot be replayed ------------------------------------------------------------------


@copies
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kind", "list", "--model", "0.01"], "other loaders cannot be replayed"),
        (["--kind", "list", "--model", "0.1", "--steps", "1000"], "of steps, no batch came from"),
        (["--kind", "wrong", "--wrong"], "unrecognized arguments"),
    ],
)
def test_programs_that_cannot_be_replayed(train: Path, words: list[str], said: str) -> None:
    with pytest.raises(NoHeadroom, match=said):
        replayed(train, *words)


def test_the_time_before_the_first_step_is_no_step(tmp_path: Path) -> None:
    """The time limit for programs whose loader cannot be replayed begins with the first step."""
    now = time.time()
    (tmp_path / "pytorch").touch()
    os.utime(tmp_path / "pytorch", (now - 100, now - 100))
    notes = tmp_path / "seen.host.1"
    notes.write_text(f"begin {now - 50} 0 0\nt 1\nb 0 1 0.5 8\n")
    assert headroom._stepping(tmp_path) == 0
    notes.write_text(f"{notes.read_text()}s 10 1.0 1\n")
    assert headroom._stepping(tmp_path) == pytest.approx(40, abs=10)
    (tmp_path / "turns.host.1.now").touch()
    assert headroom._stepping(tmp_path) == 0


@copies
def test_a_program_with_too_few_steps(train: Path) -> None:
    code = TRAIN.replace("for x, y in loader:", "for x, y in (next(iter(loader)) for _ in range(12)):")
    with pytest.raises(NoHeadroom, match="before enough turns"):
        replayed(_script(train, code))


@copies
@pytest.mark.parametrize("owner", ["machine", "job"])
def test_a_batch_that_is_too_large_to_keep(train: Path, monkeypatch: pytest.MonkeyPatch, owner: str) -> None:
    """The kept batches fit into the memory of the machine, and of the job, which may have less."""
    if owner == "machine":
        monkeypatch.setattr(headroom, "MEMORY", 0.0)
    else:
        monkeypatch.setattr(machine, "job_limits", lambda: [(2**30, 2**30)])
    with pytest.raises(NoHeadroom, match="bytes that may be kept"):
        replayed(train, "--model", 0.01)


def _script(train: Path, code: str) -> Path:
    script = train.with_name("other.py")
    script.write_text(code)
    return script


# ---- kept batches ----------------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", ["x", "y"])


def test_kept_batches_are_handed_out_again() -> None:
    """Tensors are shared until the program changes one in place; containers and arrays are always new."""
    x = torch.ones(2, 3)
    batch = {"pair": Pair(x, [x, "name"]), "array": np.ones(3)}
    kept = replay.Kept(batch)
    x.zero_()
    first, second = kept.again(), kept.again()
    assert torch.equal(first["pair"].x, torch.ones(2, 3)) and kept.bytes == 24
    assert first["pair"].x is second["pair"].x is first["pair"].y[0] and first["pair"].y[1] == "name"
    first.pop("pair")
    first["array"] *= 2
    assert kept.again()["array"].sum() == 3 and not kept.changed
    second["pair"].x.mul_(3)
    values = [kept.again()["pair"].x.mul_(2).sum() for _ in range(3)]
    assert kept.changed and values == [36, 36, 36]


def test_the_verdict_names_a_loader_whose_cost_is_significant(tmp_path: Path) -> None:
    known = {"batches": 4, "bytes": 100, "processes": 1, "seconds": 10.0}
    slow = Headroom(turns=[(10, 20), (10.1, 20), (9.9, 20), (10, 20.1)], **known)
    noisy = Headroom(turns=[(10, 20), (20, 15), (10, 11), (20, 15)], **known)
    tiny = Headroom(turns=[(10, 10.1), (10, 10.1), (10, 10.1), (10, 10.1)], **known)
    found = []
    for each in (slow, noisy, tiny):
        each.write(tmp_path / "headroom.json")
        found.append(causes.faster_loader(Evidence({}, folder=tmp_path)))
    assert found[0] and found[0].share == pytest.approx(0.5, abs=0.01) and "at most 2.00×" in found[0].why
    assert found[1:] == [None, None] and causes.faster_loader(Evidence({})) is None


# ---- the command -----------------------------------------------------------------------------------------


@copies
@pytest.mark.slow
def test_the_command_measures_the_copy_and_then_the_program(train: Path) -> None:
    ended = measure(train.parent, "--replay", 8, "--", sys.executable, "train.py", "--load", 0.03, "--model", 0.03)
    assert ended.returncode == 0, ended.stderr
    assert "a faster loader gains at most" in ended.stderr and "losses are meaningless" in ended.stderr
    assert train.with_name("out.txt").read_text() == "40"
    folder = train.parent / "results/plans/measured/train"
    assert json.loads((folder / "headroom.json").read_text())["batches"] == 8
    assert "A faster loader gains at most" in (folder.parent / "report.html").read_text()


@copies
@pytest.mark.slow
def test_a_program_that_cannot_be_replayed_is_still_measured(train: Path) -> None:
    ended = measure(train.parent, "--replay", 8, "--", sys.executable, "train.py", "--kind", "list", "--model", 0.01)
    assert ended.returncode == 0 and "other loaders cannot be replayed" in ended.stderr
    assert "steps/s" in ended.stderr and train.with_name("out.txt").read_text() == "40"
    assert not (train.parent / "results/plans/measured/train/headroom.json").exists()
