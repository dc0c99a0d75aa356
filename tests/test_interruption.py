"""Requests to save or to end during an epoch: no work is lost, and the result is unchanged."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dlscale.config.run import Geometry
from dlscale.core.metrics import read_epochs
from dlscale.parallel.rendezvous import first_host, join
from dlscale.parallel.shards import Shard
from dlscale.train.checkpoint import CheckpointRecord, Checkpoints
from dlscale.train.train import Interruption
from dlscale.train.trainer import Request
from tests.conftest import ERA5, ERA5_RUN, make_run, timeless, train, variables
from tests.ranks import spawn
from tests.waiting import PATIENCE, until

STOPPED = 75
TORCHRUN = [*(sys.executable, "-m", "dlscale.launch.ranks", "--nproc-per-node=2", "-m", "dlscale")]
#: Settings of a run: 10 steps per epoch, with a smaller last batch. Drop-out reveals a random state that was not
#: restored.
RUN: dict[str, Any] = {**ERA5_RUN, "model": {**ERA5_RUN["model"], "dropout": 0.2}, "training": {"epochs": 2}}


def configure(folder: Path, **changes: Any) -> Path:
    make_run(folder, "era5_vit", {**RUN, **changes}, ERA5)
    return folder


def same(one: Path, other: Path) -> None:
    assert timeless(one) == timeless(other)
    assert (one / "model.pt").read_bytes() == (other / "model.pt").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "workers"),
    [
        pytest.param(1, 0, id="each step", marks=pytest.mark.slow),
        pytest.param(3, 2, id="workers"),
        pytest.param(7, 0, id="validation", marks=pytest.mark.slow),
    ],
)
def test_repeated_interruptions_do_not_change_the_result(
    tmp_path: Path, era5_data: Path, monkeypatch: pytest.MonkeyPatch, every: int, workers: int
) -> None:
    """A training that is stopped again and again gives the result of an uninterrupted training.

    Each try trains or validates a few more batches, until a try completes.
    """
    manifest = era5_data / "manifest.json"
    whole, stopped = (configure(tmp_path / name, loader={"workers": workers}) for name in ("whole", "stopped"))
    assert train(whole, manifest) == 0
    newest = []
    for batches in itertools.count(every, every):
        requests = itertools.chain([Request.NONE] * batches, itertools.repeat(Request.END))
        monkeypatch.setattr(Interruption, "poll", lambda self, requests=requests: next(requests))
        status = train(stopped, manifest)
        if status == 0:
            break
        assert status == STOPPED
        assert not (stopped / "provenance.json").exists(), "only a complete result may have this record"
        newest.append(max(int(path.name.split("-")[1]) for path in stopped.glob("checkpoints/*/step-*")))
    assert newest == sorted(newest) and newest[0] == every and len(newest) > 1
    same(whole, stopped)


@pytest.mark.parametrize(("poll", "epoch"), [(4, 0), (-1, -1)], ids=["in an epoch", "in the last validation"])
def test_a_training_continues_bit_by_bit_with_another_loader(
    poll: int, epoch: int, tmp_path: Path, era5_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All loaders deliver the same samples, so a checkpoint does not depend on the loader."""
    manifest = era5_data / "manifest.json"
    whole, stopped = (configure(tmp_path / name) for name in ("whole", "stopped"))
    polls: list[Request] = []
    with monkeypatch.context() as patched:
        patched.setattr(Interruption, "poll", lambda self: polls.append(Request.NONE) or polls[-1])
        assert train(whole, manifest) == 0
        polls[poll:] = [Request.END]
        patched.setattr(Interruption, "poll", lambda self: polls.pop(0))
        assert train(stopped, manifest) == STOPPED
    configure(stopped, loader={"kind": "direct", "workers": 1})
    assert train(stopped, manifest) == 0
    assert json.loads((stopped / "provenance.json").read_text())["resumed_from_step"] is not None
    same(whole, stopped)
    made = [each.made_with for each in read_epochs(stopped / "metrics.jsonl")]
    assert made.pop(epoch) is None, "the epoch must have no loader, because both loaders contributed to its time"
    assert {each["loader"]["kind"] for each in made if each} == {"direct" if poll > 0 else "torch"}


@pytest.mark.parametrize(
    ("ranks", "sums"), [(2, [[1.0, 5.0], [2.0, 7.0]]), (1, [[3.0, 12.0]]), (3, [[3.0, 12.0], [], []])]
)
def test_no_sum_is_lost_with_other_ranks(ranks: int, sums: list[list[float]]) -> None:
    """If the number of ranks changes, no sum of losses or of a training metric is lost."""
    record = CheckpointRecord(sums=[[1.0, 5.0], [2.0, 7.0]])
    assert [record.rank_sums(rank, ranks) for rank in range(ranks)] == sums
    assert CheckpointRecord().rank_sums(0, ranks) == [], "at the beginning of an epoch, sums must be empty"


def _train_until(rank: int, port: int, folder: Path, manifest: Path, steps: int) -> None:
    """Train as one of two ranks; both ranks are asked to end after `steps` steps."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    requests = itertools.chain([Request.NONE] * steps, [Request.END])
    Interruption.poll = lambda self: next(requests)  # type: ignore[method-assign, return-value]
    assert train(folder, manifest) == STOPPED


@pytest.mark.slow
def test_a_training_continues_on_another_number_of_ranks(tmp_path: Path, era5_data: Path) -> None:
    """Two ranks begin and one rank continues from mid-epoch. The result equals a single rank's result."""
    from tests.test_parallel import close

    manifest, plain = era5_data / "manifest.json", {"model": ERA5_RUN["model"]}
    alone, moved = configure(tmp_path / "alone", **plain), tmp_path / "moved"
    assert train(alone, manifest) == 0
    configure(moved, **plain, geometry={"gpus_per_node": 2})
    spawn(_train_until, (20000 + os.getpid() % 20000, moved, manifest, 4), 2)
    configure(moved, **plain)
    assert train(moved, manifest) == 0
    assert json.loads((moved / "provenance.json").read_text())["resumed_from_step"] == 4
    close(alone, moved, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "how"),
    [
        pytest.param(0, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(2, signal.SIGTERM),
        pytest.param(2, signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_terminated(tmp_path: Path, era5_data: Path, workers: int, how: signal.Signals) -> None:
    """A real signal to all processes, including loader workers, makes a training save or end.

    Slurm and terminals send such signals.
    """
    run = {"training": {"steps": 3000, "checkpoint_epochs": 1000}, "loader": {"workers": workers}}
    folder = configure(tmp_path / "run", **run)
    process = begin(folder, era5_data, [sys.executable, "-m", "dlscale"])
    try:
        wait_for(folder / "train.log", "epoch 2 of", process)
        os.killpg(process.pid, signal.SIGUSR2)
        wait_for(folder / "train.log", "asked to save: saved after step", process)
        wait_for(folder / "train.log", f"epoch {4 + (folder / 'train.log').read_text().count('epoch ')} of", process)
        os.killpg(process.pid, how)
        _, errors = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == STOPPED
    assert "asked to end; saved after step" in errors and "Traceback" not in (folder / "train.log").read_text()


@pytest.mark.slow
@pytest.mark.long
def test_a_signal_to_one_process_makes_all_save(tmp_path: Path, era5_data: Path) -> None:
    from tests.test_parallel import train_by

    settings = {"training": {"steps": 1200, "checkpoint_epochs": 1000}, "geometry": {"gpus_per_node": 2}}
    whole, stopped = configure(tmp_path / "whole", **settings), configure(tmp_path / "stopped", **settings)
    process = begin(stopped, era5_data, TORCHRUN)
    try:
        wait_for(stopped / "train.log", "epoch 3 of", process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[1]), signal.SIGTERM)  # the process of rank 1
        _, errors = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == STOPPED and "Traceback" not in errors, errors
    assert "asked to end: saved after step" in (stopped / "train.log").read_text()
    (folder,) = [path for path in (stopped / "checkpoints").iterdir() if path.is_dir()]
    saved = CheckpointRecord.read(max(folder.glob("step-*")) / "checkpoint.json")
    assert saved.step < 1200 and len(saved.sums) == 2
    train_by(2, stopped, era5_data)
    train_by(2, whole, era5_data)
    same(whole, stopped)


def begin(folder: Path, data: Path, starter: list[str]) -> subprocess.Popen[str]:
    """Start the training of the run in `folder` in its own process group."""
    settings = ["--config", "config.yaml", "--manifest", str(data / "manifest.json"), "--threads", "2"]
    return subprocess.Popen(
        [*starter, "train", *settings, "--checkpoints", "checkpoints", "--out", ".", "--log", "train.log"],
        cwd=folder,
        env=variables(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(log: Path, text: str, process: subprocess.Popen[str]) -> None:
    def said() -> str:
        return log.read_text() if log.exists() else ""

    until(f"'{text}' in the log", lambda: text in said(), process, said)


# ---- agreement -------------------------------------------------------------------------------------


def _agree(rank: int, port: int, folder: str) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="3", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    with join(Geometry(gpus_per_node=3), "cpu") as world, Interruption(world, seconds=0.02) as interruption:
        heard = []
        for step in range(400):
            if (rank, step) in ((2, 100), (0, 250)):
                os.kill(os.getpid(), signal.SIGUSR1 if step == 100 else signal.SIGTERM)
            if request := interruption.poll():
                heard.append((step, request.name))
            time.sleep(0.0005 * (1 + rank))
        Path(folder, str(rank)).write_text(repr(heard))


@pytest.mark.slow
def test_all_ranks_receive_requests_at_the_same_step(tmp_path: Path) -> None:
    spawn(_agree, (20000 + os.getpid() % 20000, str(tmp_path)), 3)
    heard = [eval(Path(tmp_path, str(rank)).read_text()) for rank in range(3)]
    assert heard[0] == heard[1] == heard[2]
    (save, end) = heard[0]
    assert save[1] == "SAVE" and 100 <= save[0] < 250 and end[1] == "END" and 250 <= end[0] < 400


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("nid001", "nid001"),
        ("nid[001-004,007],login1", "nid001"),
        ("nid001,nid005", "nid001"),
        ("n[3,5-7]-ib.site.org", "n3-ib.site.org"),
    ],
)
def test_the_first_host_of_slurms_lists(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_a_warning_outside_training_is_ignored(tmp_path: Path) -> None:
    """Slurm's warning does not end a process that is not training.

    Slurm sends its warning to all processes of a job.
    """
    code = (
        "import os, signal, dlscale.cli as cli, dlscale.config.places as c\n"
        "def main(args):\n    os.kill(os.getpid(), signal.SIGUSR2); os.kill(os.getpid(), signal.SIGUSR1)\n"
        "c.main = main\nraise SystemExit(cli.main(['configure', '--settings', '{}', '--out', 'x']))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=PATIENCE, check=True)


@pytest.mark.slow
def test_ranks_end_with_torchrun(tmp_path: Path, era5_data: Path) -> None:
    """If torchrun is killed, its ranks save their state and end."""
    settings = {"training": {"steps": 100_000, "checkpoint_epochs": 100_000}, "geometry": {"gpus_per_node": 2}}
    folder = configure(tmp_path / "run", **settings)
    process = begin(folder, era5_data, TORCHRUN)
    wait_for(folder / "train.log", "epoch 3 of", process)
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    until("the ranks' end", lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))
    assert "asked to end: saved after step" in (folder / "train.log").read_text()


def test_a_kill_during_a_replacement_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    """A kill while a checkpoint is replaced keeps the old checkpoint, and a later save can replace it.

    A step is saved twice if its validation was first interrupted and later completed.
    """
    checkpoints = Checkpoints(tmp_path, 1)

    def save(number: int) -> None:
        checkpoints.save(CheckpointRecord(step=10), {"what": Shard(torch.tensor([number]))})
        checkpoints.wait()

    def load() -> int | None:
        found = checkpoints.load(lambda record: {"what": Shard(torch.tensor([0]))})
        return int(found[1]["what"].tensor) if found else None

    save(1)
    # the state that a kill at this point leaves
    (tmp_path / "step-00000010").rename(tmp_path / ".step-00000010.host.7.abcd.old")
    assert load() is None
    (tmp_path / ".step-00000011.host.7.abcd.part").mkdir()
    checkpoints.tidy()
    assert load() == 1
    save(2)
    assert load() == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
