"""A rank that dies, is stopped, or hangs ends all, within a minute, and is named: on every strategy."""

from __future__ import annotations

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
import torch.distributed as dist

from dlscale.core import ending, ranges
from dlscale.parallel import watchdog
from dlscale.parallel.watchdog import Watchdog
from dlscale.parallel.world import World
from dlscale.train.checkpoint import Checkpoints
from tests.conftest import ROOT
from tests.test_parallel import configure
from tests.waiting import PATIENCE, until

#: Run in place of `dlscale`: the second rank does what is asked, in the twentieth step.
HANGS = """
import os, sys, time
from dlscale import cli
from dlscale.data.loaders.torch_loader import TorchLoader
from dlscale.parallel import watchdog
from dlscale.train.step import Network

watchdog.STUCK = float(os.environ["STUCK"])
calls = 0

def hang():
    global calls
    calls += 1
    if calls == 20 and os.environ["RANK"] == "1":
        print("HANGS", flush=True)
        time.sleep(3600)

if os.environ["WHERE"] == "forward":
    losses = Network.losses
    Network.losses = lambda *arguments: (hang(), losses(*arguments))[1]
else:
    epoch = TorchLoader.epoch
    def slow(self, *arguments):
        batches = epoch(self, *arguments)
        while True:
            hang()
            try:
                yield next(batches)
            except StopIteration:
                return
    TorchLoader.epoch = slow
sys.exit(cli.main(sys.argv[1:]))
"""

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"parallel": {"kind": "fsdp"}},
    "tp": {"geometry": {"tp": 2}},
    "cp": {"geometry": {"cp": 2}},
}
strategies = pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(name, marks=pytest.mark.parallel) for name in ("fsdp", "tp", "cp"))]
)


def begin(folder: Path, data: Path, program: list[str], **env: str) -> subprocess.Popen[str]:
    """Start a training of the run in `folder` by two processes."""
    starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *program]
    arguments = ["--config", folder / "config.yaml", "--manifest", data / "manifest.json", "--threads", 2]
    arguments += ["--checkpoints", folder / "checkpoints", "--out", folder, "--log", folder / "train.log"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "workflow_scripts"), **env}
    return subprocess.Popen(
        [*starter, "train", *map(str, arguments)],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return sorted(map(int, children))


def said(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob("train*.log")))


def end_of(process: subprocess.Popen[str], folder: Path) -> str:
    """Wait for the end, and return what was said on the terminal."""
    try:
        output, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode != 0
    assert "a defect of dlscale" not in output + said(folder)
    return output


@strategies
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_rank_that_dies_or_is_stopped_is_named(
    tmp_path: Path, era5_data: Path, strategy: str, how: signal.Signals, rank: int
) -> None:
    folder = configure(tmp_path / "run", "era5_vit", 2, **STRATEGIES[strategy], training={"steps": 100_000})
    process = begin(folder, era5_data, ["-m", "--", "dlscale"])
    until("an epoch", lambda: "epoch 2 of" in said(folder), process, lambda: said(folder))
    start = time.monotonic()
    victim = ranks_of(process)[rank]
    os.kill(victim, how)
    output = end_of(process, folder)
    seconds = time.monotonic() - start
    survivor = (folder / ("train.log" if rank else "train.rank1.log")).read_text()
    assert f"process {rank} on " in survivor and "This process ends with it" in output, survivor
    stopped = "no sign of life" in survivor or "has not answered" in survivor
    assert stopped == (how == signal.SIGSTOP), survivor
    assert seconds < 60 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    assert not Path(f"/proc/{victim}").exists()


@strategies
@pytest.mark.parametrize("where", ["data", pytest.param("forward", marks=pytest.mark.slow)])
def test_a_rank_that_hangs_is_named(tmp_path: Path, era5_data: Path, strategy: str, where: str) -> None:
    folder = configure(tmp_path / "run", "era5_vit", 2, **STRATEGIES[strategy], training={"steps": 100_000})
    (tmp_path / "program.py").write_text(HANGS)
    process = begin(folder, era5_data, ["--", str(tmp_path / "program.py")], WHERE=where, STUCK="8")
    output = end_of(process, folder)
    log = (folder / "train.log").read_text()
    assert "HANGS" in said(folder)
    assert "all have waited for" in log and "s for process 1 on " in log and f"({where})" in log, log
    assert "process 0" not in log.split("all have waited")[1]
    assert "This process ends with it" in output


# ---- judgement alone ---------------------------------------------------------------------------------


class Store:
    """What the ranks would have shown."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key].encode() for key in keys]


def verdict(*signs: tuple[Any, ...], silent: tuple[int, ...] = (), patient: bool = False) -> str | None:
    """Return the verdict on ranks that have entered so many ranges, the last of them this one, ago; the longest range.

    A sixth number is that of the exchanges that it has begun.
    """
    found = object.__new__(Watchdog)
    found.rank, found.size, found._hosts, found._store = 0, len(signs), {}, Store()
    found._seen = [watchdog._Seen() for _ in signs]
    for rank, (entered, name, looping, age, longest, *more) in enumerate(signs):
        found._store.set(f"host/{rank}", f"nid{rank}")
        found._store.set(f"sign/{rank}", json.dumps([1, entered, name, looping, patient, *(more or [0]), age, longest]))
    found._look(found.size)
    now = time.monotonic()
    for rank in silent:
        found._seen[rank].at = now - watchdog.SILENT - 1
    return found._verdict(now)


def test_the_verdict() -> None:
    waits, behind = (100, "backward", True, 50.0, 0.4), (98, "data", True, 51.0, 0.4)
    assert verdict(waits, behind) == "all have waited for 45 s for process 1 on nid1 (data)"
    assert "for process 1 on nid1 (data), process 2 on nid2 (data)" in str(verdict(waits, behind, behind))
    assert verdict(waits, (100, "backward", True, 3.0, 0.4)) is None, "one goes on"
    assert verdict(waits, waits) is None, "all compute, or compile"
    assert "none is behind" in str(verdict(*2 * [(100, "backward", True, 1801.0, 0.4)]))
    assert "45 s for process 0 on nid0 (backward)" in str(verdict((*waits, 7), (*waits, 8))), "in the same range"
    assert verdict(waits, (98, "data", True, 51.0, 6.0)) is None, "a range has taken 6 s before"
    assert verdict(waits, (98, "data", False, 51.0, 0.4)) is None, "it draws, or opens files"
    assert "for process 1" in str(verdict((100, "step", False, 50.0, 0.4), behind)), "a sum after a loop is waited for"
    assert verdict(waits, behind, patient=True) is None, "one of them compiles"
    last = (98, "data", False, 50.0, 0.4)
    assert "for process 1" in str(verdict(last, behind)), "after the last range of a loop"
    assert verdict((3, "forward", True, 300.0, 0.0), (2, "forward", True, 300.0, 0.0)) is None, "it compiles"
    assert "1800 s for process 1" in str(verdict((9, "backward", True, 1801.0, 0.4), (8, "", False, 1801.0, 0.4)))
    tests, further = (5, "self-test", False, 121.0, 0.0), (6, "self-test", False, 121.0, 0.0)
    assert "120 s for process 0 on nid0 (self-test)" in str(verdict(tests, further, (9, "", False, 121.0, 0.0)))
    assert verdict((5, "self-test", False, 100.0, 0.0), further) is None, "it opens connections"
    assert verdict((9, "", False, 121.0, 0.0), (9, "", False, 121.0, 0.0)) is None, "data are opened after it"
    assert "no sign of life for 25 s: process 1 on nid1; " in str(verdict(waits, waits, silent=(1,)))


def test_what_a_thread_exchanges_beside_the_steps_is_not_counted(tmp_path: Path) -> None:
    """Ranks that write a checkpoint are not all as far with that, and none of them hangs."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        steps, beside = dist.new_group(), Checkpoints(tmp_path, 1, World(size=2))._group
        before = watchdog._exchanges()
        dist.all_reduce(torch.ones(1), group=beside)
        assert watchdog._exchanges() == before
        dist.all_reduce(torch.ones(1), group=steps)
        assert watchdog._exchanges() == before + 1
    finally:
        dist.destroy_process_group()


def test_ranges_tell_how_far_a_process_has_come() -> None:
    before = ranges.entered
    with ranges.looping(), ranges.mark("data"):
        assert (ranges.entered, ranges.at, ranges.loops) == (before + 1, "data", 1)
        assert ranges.in_step()
        with ranges.patience():
            assert not ranges.in_step()
        assert ranges.in_step()
    assert ranges.loops == 0 and not ranges.in_step()


def test_the_last_word_is_said_before_the_end() -> None:
    program = "from dlscale.core import ending; ending.end('because', 7)"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "workflow_scripts")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (7, "because\n")
    assert ending.LOST not in (0, 1, 2, 75, 130)
