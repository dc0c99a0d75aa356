"""Two runs timed in turns: of both in step, one stopped while the other works, and nothing left behind."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dlscale.config import resolve as config
from dlscale.config.compute import compute_digest
from dlscale.core.settings import read_yaml
from dlscale.measure import turns
from dlscale.measure.records import Throughput
from dlscale.measure.turns import OPENINGS, Ended, Timed, Turns, _enough
from tests.conftest import COSMO, COSMO_RUN, make_run, stage
from tests.waiting import until

FEW = {"warmup": 0, "trials": 1, "batches": 1, "seconds": 0, "beside": 1, "error": 0.5}


def timed(folder: Path, data: Path, **over: Any) -> Timed:
    settings = config.merge(copy.deepcopy(COSMO_RUN), {"throughput": FEW, **over})
    return Timed(str(make_run(folder, "cosmo_unet", settings, COSMO)), str(data / "manifest.json"), "cpu", 1)


def measure(folder: Path, data: Path, first: Path, **over: Any) -> Throughput:
    own = timed(folder, data, **over)
    arguments = ["--config", own.config, "--manifest", own.manifest, "--threads", 1, "--device", "cpu"]
    assert stage("throughput", *arguments, "--beside", first, "--out", folder / "throughput.json") == 0
    return Throughput.read(folder / "throughput.json")


def processes(parent: int) -> list[int]:
    """All that descend from a process, loaders' workers among them."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found += [int(entry.name), *processes(int(entry.name))]
    return found


def state(process: int) -> str:
    """R, S, T (stopped) …; X of one that is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


@pytest.mark.slow
def test_a_run_of_many_times_the_work_is_slower(tmp_path: Path, cosmo_data: Path) -> None:
    """Rounds end early where the ratio is known; the record says whom it is relative to."""
    first = timed(tmp_path / "first", cosmo_data, model={"widths": [4, 8]})
    found = measure(tmp_path / "own", cosmo_data, Path(first.config), model={"widths": [64, 128]})
    assert found.beside.compute == compute_digest(read_yaml(Path(first.config))) != found.compute
    assert 2 <= len(found.beside.openings) <= OPENINGS
    assert all(len(rounds) % 2 == 0 for rounds in found.beside.openings)
    assert statistics.median(found.beside.ratios) < math.log(0.5)


def test_each_turn_counts_its_own_samples(tmp_path: Path, cosmo_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of turns that take the same time all rates are the same."""
    clock = itertools.count()
    run = timed(tmp_path, cosmo_data)
    monkeypatch.setattr(turns.time, "perf_counter", lambda: turns.TURN * next(clock))
    with contextlib.closing(turns._rates(run)) as rates:
        assert next(rates) == 0.0
        assert [next(rates) for _ in range(4)] == [COSMO_RUN["batch_size"] / turns.TURN] * 4


@pytest.mark.slow
def test_one_that_is_not_in_turn_is_stopped_with_its_loader(tmp_path: Path, cosmo_data: Path) -> None:
    """Seen from outside while turns go on: one of the groups is stopped, now this one, now that one."""
    own = timed(tmp_path, cosmo_data, loader={"workers": 1}, samples={"train": 64})
    code = (
        "import sys; from dlscale.measure.turns import Timed, Turns\n"
        f"own = {own!r}\nturns = Turns(own, own)\nturns.rounds(60, 1e-9)\nturns.close()"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    seen: list[tuple[bool, ...]] = []  # from the first turn on, of either group whether it was stopped
    try:
        until("two runs with a worker each", lambda: len(processes(process.pid)) >= 4 or process.poll() is not None)
        while len(seen) < 100 or len(set(seen) - {(False, False), (True, True)}) < 2:
            assert process.poll() is None, "each has its turn"
            groups: dict[int, list[str]] = {}
            for each in processes(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    groups.setdefault(os.getpgid(each), []).append(state(each))
            opened = [states for states in groups.values() if len(states) >= 2]  # with their loaders' processes
            stopped = tuple(set(states) == {"T"} for states in opened)
            seen.extend([stopped] if len(opened) == 2 and (seen or any(stopped)) else [])
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    # Now and then the turn passes between the looks at the one group and at the other.
    assert sum(map(any, seen)) > 0.9 * len(seen)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_a_stage_that_is_killed(tmp_path: Path, cosmo_data: Path, number: int) -> None:
    own = timed(tmp_path, cosmo_data, loader={"workers": 1}, throughput={**FEW, "beside": 60, "error": 1e-9})
    arguments = ["--config", own.config, "--manifest", own.manifest, "--threads", "1", "--device", "cpu"]
    words = [sys.executable, "-m", "dlscale", "throughput", *arguments, "--beside", own.config]
    process = subprocess.Popen([*words, "--out", str(tmp_path / "throughput.json")], start_new_session=True)
    until("turns", lambda: "T" in {state(each) for each in processes(process.pid)})
    started = processes(process.pid)
    assert len(started) >= 4
    process.send_signal(number)
    process.wait()
    until("the end of all that it has started", lambda: all(state(each) in "XZ" for each in started))
    assert not (tmp_path / "throughput.json").exists()


@pytest.mark.slow
def test_what_cannot_be_timed_beside_is_told_and_the_rest_is_there(
    tmp_path: Path, cosmo_data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raw = read_yaml(Path(timed(tmp_path / "first", cosmo_data).config))
    raw["samples"]["crop"] = 4096  # more than the volumes hold
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(json.dumps(raw))
    found = measure(tmp_path / "own", cosmo_data, wrong)
    assert found.beside is None
    assert found.full is not None
    assert "not timed in turn with the plan's first run: " in caplog.text
    assert "4096" in caplog.text


def test_a_run_that_ends_is_told(tmp_path: Path, cosmo_data: Path) -> None:
    own = timed(tmp_path, cosmo_data)
    others = processes(os.getpid())
    turns = Turns(own, own)
    try:
        for each in set(processes(os.getpid())) - set(others):
            os.kill(each, signal.SIGKILL)
        with pytest.raises(Ended, match="ended with status -9"):
            turns.rounds(1, 0.5)
    finally:
        turns.close()


@pytest.mark.parametrize(
    ("spread", "error", "seconds"),
    [(0.0, 0.01, 8), (0.1, 0.1, 8), (0.1, 0.03, 10), (0.3, 0.01, 30)],
    ids=["known", "known well enough", "known roughly", "not known"],
)
def test_how_long_turns_last(spread: float, error: float, seconds: int) -> None:
    """Of ten seconds, one a round: until the ratio is known, or three times as long where it is not known at all."""
    draw = random.Random(0)
    rounds = [(1 + draw.gauss(0, spread), 1.0) for _ in range(30)]
    assert next(number for number in range(2, 31) if _enough(rounds[:number], number, 10, error)) == seconds


def test_who_goes_first_changes_with_each_turn_and_each_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who goes first may be slower, or faster, by that alone: it is each of them as often."""
    said: list[tuple[str, str]] = []

    class Player:
        def __init__(self, timed: Timed) -> None:
            self._name = timed.config

        def send(self, message: str) -> None:
            said.append((message, self._name))

        def receive(self) -> float:
            return 1.0

        def turn(self) -> float:
            said.append(("turn", self._name))
            return 2.0 if self._name == "own" else 1.0

        def stop(self) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setattr("dlscale.measure.turns._Player", Player)
    own, first = (Timed(name, "", "cpu", 1) for name in ("own", "first"))
    assert Turns(own, first).rounds(0, 0.5) == 2 * [2 * [(2.0, 1.0)]]
    openings = [name for what, name in said if what == "open"]
    assert set(map(tuple, zip(openings[::2], openings[1::2], strict=True))) == {("own", "first"), ("first", "own")}
    names = [name for what, name in said if what == "turn"]
    for number in (0, 4):
        assert names[number : number + 4] in (["own", "first", "first", "own"], ["first", "own", "own", "first"])
    assert {names[0], names[4]} == {"own", "first"}
