"""The throughput stage: its rates are consistent, count the processed samples, and are readable by benchy's tools."""

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from dlscale.config import resolve as config
from dlscale.config.compute import compute_digest
from dlscale.config.run import Throughput
from dlscale.core.settings import read_yaml
from dlscale.data.loaders.base import Batch
from dlscale.measure import throughput, turns
from dlscale.measure.records import Throughput as Measured
from dlscale.measure.records import Trials
from dlscale.measure.throughput import trials
from dlscale.measure.turns import OPENINGS, TimedRunSettings, TurnFailed, Turns, _enough
from dlscale.parallel.world import World
from dlscale.train.step import Step
from tests.conftest import COSMO, COSMO_RUN, make_run, stage
from tests.test_rungs import need_compiler
from tests.waiting import until

LABELS = ("IO", "SYNTHETIC", "FULL")


def measure(folder: Path, data: Path, **over: Any) -> Path:
    """Run the stage on the tiny U-Net with 10 samples per epoch: batches of 4, 4 and 2."""
    make_run(folder, "cosmo_unet", config.merge(copy.deepcopy(COSMO_RUN), {"samples": {"train": 10}, **over}), COSMO)
    arguments = ["--config", folder / "config.yaml", "--manifest", data / "manifest.json", "--threads", 1]
    assert stage("throughput", *arguments, "--device", "cpu", "--out", folder / "throughput.json") == 0
    return folder / "throughput.json"


TRIALS = {"warmup": 1, "trials": 3, "batches": 4, "seconds": 0, "beside": 0}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, cosmo_data: Path) -> Path:
    return measure(tmp_path_factory.mktemp("measured"), cosmo_data, throughput=TRIALS)


# --- the stage's record ------------------------------------------------------------------------------------------


def samples_of(batches: Iterator[int], settings: dict[str, int]) -> list[int]:
    """Return the number of samples in each trial after the warm-up trials, given the batch sizes."""
    runs = [sum(itertools.islice(batches, settings["batches"])) for _ in range(settings["warmup"] + settings["trials"])]
    return runs[settings["warmup"] :]


def test_the_numbers_count_the_samples_that_were_processed(measured: Path) -> None:
    """Epochs are shorter than a trial and end with a smaller batch: 4 batches have 14 or 12 samples, not 16."""
    assert measured.read_text().endswith("}\n") and measured.read_text().count("\n") == 1, (
        "benchy's readers need a single line"
    )
    found = json.loads(measured.read_text())
    expected = {label: samples_of(itertools.cycle([4, 4, 2]), TRIALS) for label in ("IO", "FULL")}
    expected["SYNTHETIC"] = samples_of(itertools.repeat(4), TRIALS)
    assert expected["IO"] == [14, 12, 14]
    for label in LABELS:
        one = found[label]
        assert len(one["trial_throughput"]) == len(one["trial_time"]) == 3
        counted = [rate * seconds for rate, seconds in zip(one["trial_throughput"], one["trial_time"], strict=True)]
        assert counted == pytest.approx(expected[label], rel=1e-9), label
        assert one["mean"] == pytest.approx(sum(one["trial_throughput"]) / 3, rel=1e-12)
        spread = sum((rate - one["mean"]) ** 2 for rate in one["trial_throughput"])
        assert one["std"] == pytest.approx((spread / 2) ** 0.5, rel=1e-9)
        assert one["avg_iter_throughput"] == one["trial_throughput"]
    assert (found["batch_size"], found["nranks"], found["settings"]) == (4, 1, {**TRIALS, "error": 0.01})
    assert (found["compile"], found["device"]["kind"]) == (None, "cpu")
    assert 50e6 < found["peak_memory_bytes"] < 100e9


# --- measured batches --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("loader", [{"workers": 0}, {"workers": 2}, {"kind": "synthetic"}], ids=str)
def test_synthetic_is_one_resident_batch_for_every_loader(
    tmp_path: Path, cosmo_data: Path, monkeypatch: pytest.MonkeyPatch, loader: dict[str, Any]
) -> None:
    """SYNTHETIC repeats one batch in memory; IO and FULL read the same samples. The test records all batches."""
    seen: dict[str, list[Batch]] = {}

    def noting(label: str, batches: Iterator[Batch], *rest: Any) -> Trials:
        seen[label] = []

        def noted() -> Iterator[Batch]:
            for batch in batches:
                seen[label].append(batch)
                yield batch

        return trials(label, noted(), *rest)

    monkeypatch.setattr(throughput, "trials", noting)
    measure(tmp_path, cosmo_data, loader=loader, throughput={"warmup": 1, "trials": 2, "batches": 2})
    assert {label: len(batches) for label, batches in seen.items()} == dict.fromkeys(LABELS, 6)
    x, y, _ = seen["SYNTHETIC"][0]
    assert (x.shape, y.shape) == ((4, 4, 16, 16, 16), (4, 5, 16, 16, 16))
    for other, target, _ in seen["SYNTHETIC"]:
        assert (other.data_ptr(), target.data_ptr()) == (x.data_ptr(), y.data_ptr()), (
            "all batches must be the same memory"
        )
    # IO and FULL read the same samples: the epochs 1 and 2.
    assert [len(batch[0]) for batch in seen["FULL"]] == [4, 4, 2, 4, 4, 2]
    assert [batch[2] for batch in seen["FULL"]] == [1.0] * 6, "with one process, every batch must have weight 1"
    for a, b in zip(seen["IO"], seen["FULL"], strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])
    if loader.get("kind") != "synthetic":
        firsts = [batch[0][0] for batch in seen["FULL"]]
        assert not any(torch.equal(a, b) for a, b in itertools.combinations(firsts, 2))
        assert not any(torch.equal(x[0], first) for first in firsts), "the cached batch must not be measured again"


@pytest.mark.slow
def test_compilation_is_timed_separately(tmp_path: Path, cosmo_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cold time is measured with an empty cache, the warm time with the cache that the first compilation filled."""
    need_compiler()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    opened, moved = throughput.compilation, list[bool]()

    def watched(step: Step, *rest: Any) -> dict[str, float]:
        before = [p.detach().clone() for p in step.model.parameters()]
        found = opened(step, *rest)
        moved.append(not all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True)))
        return found

    monkeypatch.setattr(throughput, "compilation", watched)
    path = measure(tmp_path, cosmo_data, compile={"mode": "default"}, throughput={"trials": 1, "batches": 1})
    found = json.loads(path.read_text())["compile"]
    assert set(found) == {"cold_seconds", "warm_seconds"}
    assert 0 < found["warm_seconds"] < 0.7 * found["cold_seconds"]
    assert moved == [False]
    torch.compiler.reset()


# --- trials and waiting times ------------------------------------------------------------------------------------


def batches_of(*sizes: int) -> Iterator[Batch]:
    for size in sizes:
        yield torch.full((size, 1), float(size)), torch.zeros(size, 1)


def test_trials_exclude_the_warm_up() -> None:
    consumed: list[int] = []
    ends: list[float] = []

    def consume(x: torch.Tensor, y: torch.Tensor) -> None:
        assert len(x) == len(y)
        consumed.append(len(x))
        time.sleep(0.1 if len(consumed) <= 2 else 0.02)  # the first trial, which is the warm-up, is slow
        ends.append(time.perf_counter())

    found = trials(
        "FULL", batches_of(9, 9, 3, 4, 5, 6, 7), consume, Throughput(warmup=1, trials=2, batches=2, seconds=0), World()
    )
    assert consumed == [9, 9, 3, 4, 5, 6], "each trial must use two batches"
    assert [a * b for a, b in zip(found.trial_time, found.trial_throughput, strict=True)] == pytest.approx([7, 11])
    assert all(seconds >= 0.04 for seconds in found.trial_time)
    # On any machine, the counted time must not include time before the end of the warm-up, by this test's own clock.
    assert sum(found.trial_time) <= time.perf_counter() - ends[1]


def test_a_trial_waits_for_the_device_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated device takes 20 ms per batch. The host only notices this time when it waits for the device."""
    given = 0

    def consume(x: torch.Tensor, y: torch.Tensor) -> None:
        nonlocal given
        given += 1

    def wait(device: torch.device) -> None:
        nonlocal given
        time.sleep(0.02 * given)
        given = 0

    monkeypatch.setattr(throughput, "synchronize", wait)
    monkeypatch.setattr(turns, "synchronize", wait)
    batches = batches_of(*[4] * 8)
    consume(*next(batches))  # the device still works when the first trial begins
    given += 50
    found = trials("FULL", batches, consume, Throughput(warmup=0, trials=2, batches=2, seconds=0), World())
    assert all(seconds >= 0.04 for seconds in found.trial_time)
    assert found.trial_time[0] < 1, "earlier work of the device must not count"


@pytest.mark.slow
def test_a_trial_lasts_as_long_as_it_is_asked_to() -> None:
    """Each trial has as many batches of 2 ms as fit into 0.2 s, although the warm-up begins with a slow batch."""
    first = itertools.chain([0.3], itertools.repeat(0.002))

    def consume(x: torch.Tensor, y: torch.Tensor) -> None:
        time.sleep(next(first))

    settings = Throughput(warmup=1, trials=3, batches=2, seconds=0.2)
    found = trials("FULL", itertools.repeat(next(batches_of(1))), consume, settings, World())
    assert len(found.trial_time) == 3
    assert all(seconds >= 0.19 for seconds in found.trial_time), "single trials may be 5 % shorter"
    counts = [rate * seconds for rate, seconds in zip(found.trial_throughput, found.trial_time, strict=True)]
    assert len(set(map(round, counts))) == 1, "all trials must have the same number of batches"
    assert 20 < counts[0] < 150


class Uneven(World):
    """A world with a second rank whose batches have one sample less."""

    def gather(self, value: Any) -> Any:
        return [value, value - 2] if isinstance(value, int) else [value, value]


def test_each_rank_counts_only_local_samples() -> None:
    """If ranks have unequal batches, each rank's own samples count: 9 + 7 here, not twice 9."""
    found = trials(
        "FULL", batches_of(5, 4), lambda x, y: None, Throughput(warmup=0, trials=1, batches=2, seconds=0), Uneven()
    )
    assert [a * b for a, b in zip(found.trial_time, found.trial_throughput, strict=True)] == pytest.approx([9 + 7])


def test_the_wait_for_data_counts() -> None:
    def late() -> Iterator[Batch]:
        for batch in batches_of(1, 1, 1, 1):
            time.sleep(0.03)
            yield batch

    found = trials("IO", late(), lambda x, y: None, Throughput(warmup=0, trials=2, batches=2, seconds=0), World())
    assert all(seconds >= 0.06 for seconds in found.trial_time)


# ---- paired timing: two runs take turns; one is paused while the other runs ---------------------------


FEW = {"warmup": 0, "trials": 1, "batches": 1, "seconds": 0, "beside": 1, "error": 0.5}
ENDED = (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE)


def timed(folder: Path, data: Path, **over: Any) -> TimedRunSettings:
    settings = config.merge(copy.deepcopy(COSMO_RUN), {"throughput": FEW, **over})
    return TimedRunSettings(str(make_run(folder, "cosmo_unet", settings, COSMO)), str(data / "manifest.json"), "cpu", 1)


def timed_in_turn(folder: Path, data: Path, first: Path, **over: Any) -> Measured:
    own = timed(folder, data, **over)
    arguments = ["--config", own.config, "--manifest", own.manifest, "--threads", 1, "--device", "cpu"]
    assert stage("throughput", *arguments, "--beside", first, "--out", folder / "throughput.json") == 0
    return Measured.read(folder / "throughput.json")


def processes(parent: int) -> list[psutil.Process]:
    """Return all descendants of a process, including workers of loaders."""
    return psutil.Process(parent).children(recursive=True)


def state(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status()
    return psutil.STATUS_DEAD


@pytest.mark.slow
def test_a_run_of_many_times_the_work_is_slower(tmp_path: Path, cosmo_data: Path) -> None:
    """A much larger model has less than half the rate. The record names the run that the ratio refers to."""
    first = timed(tmp_path / "first", cosmo_data, model={"widths": [4, 8]})
    found = timed_in_turn(tmp_path / "own", cosmo_data, Path(first.config), model={"widths": [64, 128]})
    assert found.beside.compute == compute_digest(read_yaml(Path(first.config))) != found.compute
    assert 2 <= len(found.beside.openings) <= OPENINGS
    assert all(len(rounds) % 2 == 0 for rounds in found.beside.openings)
    assert statistics.median(found.beside.ratios) < math.log(0.5)


def test_each_turn_counts_only_samples_of_the_turn(
    tmp_path: Path, cosmo_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If all turns take equally long, their rates are equal."""
    clock = itertools.count()
    run = timed(tmp_path, cosmo_data)
    monkeypatch.setattr(turns.time, "perf_counter", lambda: turns.TURN * next(clock))
    with contextlib.closing(turns._rates(run)) as rates:
        assert next(rates) == 0.0
        assert [next(rates) for _ in range(4)] == [COSMO_RUN["batch_size"] / turns.TURN] * 4


@pytest.mark.slow
def test_a_waiting_run_is_paused_with_its_loader(tmp_path: Path, cosmo_data: Path) -> None:
    """Two runs, each with a loader process, are paused in turn; at nearly all times at least one is paused."""
    own = timed(tmp_path, cosmo_data, loader={"workers": 1}, samples={"train": 64})
    code = (
        "import sys; from dlscale.measure.turns import TimedRunSettings, Turns\n"
        f"own = {own!r}\nturns = Turns(own, own)\nturns.rounds(60, 1e-9)\nturns.close()"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    seen: list[tuple[bool, ...]] = []  # one tuple per observation since the first turn: whether each group was paused
    try:
        until("two runs with a worker each", lambda: len(processes(process.pid)) >= 4 or process.poll() is not None)
        while len(seen) < 100 or len(set(seen) - {(False, False), (True, True)}) < 2:
            assert process.poll() is None, "the process must not end before both runs had their turns"
            groups: dict[int, list[str]] = {}
            for each in processes(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    groups.setdefault(os.getpgid(each.pid), []).append(state(each))
            opened = [states for states in groups.values() if len(states) >= 2]  # groups that include a loader process
            stopped = tuple(set(states) == {psutil.STATUS_STOPPED} for states in opened)
            seen.extend([stopped] if len(opened) == 2 and (seen or any(stopped)) else [])
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    # The turn may change between the observations of the two groups.
    assert sum(map(any, seen)) > 0.9 * len(seen)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_stage_leaves_no_process(tmp_path: Path, cosmo_data: Path, number: int) -> None:
    own = timed(tmp_path, cosmo_data, loader={"workers": 1}, throughput={**FEW, "beside": 60, "error": 1e-9})
    arguments = ["--config", own.config, "--manifest", own.manifest, "--threads", "1", "--device", "cpu"]
    words = [sys.executable, "-m", "dlscale", "throughput", *arguments, "--beside", own.config]
    process = subprocess.Popen([*words, "--out", str(tmp_path / "throughput.json")], start_new_session=True)
    until("turns", lambda: psutil.STATUS_STOPPED in {state(each) for each in processes(process.pid)})
    started = processes(process.pid)
    assert len(started) >= 4
    process.send_signal(number)
    process.wait()
    until("the end of all that it has started", lambda: all(state(each) in ENDED for each in started))
    assert not (tmp_path / "throughput.json").exists()


@pytest.mark.slow
def test_a_failed_paired_timing_keeps_the_own_rates(
    tmp_path: Path, cosmo_data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raw = read_yaml(Path(timed(tmp_path / "first", cosmo_data).config))
    raw["samples"]["crop"] = 4096  # larger than the volumes
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(json.dumps(raw))
    found = timed_in_turn(tmp_path / "own", cosmo_data, wrong)
    assert found.beside is None
    assert found.full is not None
    assert "no paired timing with the plan's first run: " in caplog.text
    assert "4096" in caplog.text


def test_a_killed_partner_is_reported(tmp_path: Path, cosmo_data: Path) -> None:
    own = timed(tmp_path, cosmo_data)
    others = processes(os.getpid())
    turns = Turns(own, own)
    try:
        for each in set(processes(os.getpid())) - set(others):
            each.kill()
        with pytest.raises(TurnFailed, match="ended with status -9"):
            turns.rounds(1, 0.5)
    finally:
        turns.close()


@pytest.mark.parametrize(
    ("spread", "error", "seconds"),
    [(0.0, 0.01, 8), (0.1, 0.1, 8), (0.1, 0.03, 10), (0.3, 0.01, 30)],
    ids=["known", "known well enough", "known roughly", "not known"],
)
def test_how_long_turns_last(spread: float, error: float, seconds: int) -> None:
    """Rounds for nominally 10 s end when the ratio is known, and at the latest after three times as long."""
    draw = random.Random(0)
    rounds = [(1 + draw.gauss(0, spread), 1.0) for _ in range(30)]
    assert next(number for number in range(2, 31) if _enough(rounds[:number], number, 10, error)) == seconds


def test_each_run_goes_first_equally_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run goes first equally often, because the order may affect the speed."""
    said: list[tuple[str, str]] = []

    class Player:
        def __init__(self, timed: TimedRunSettings) -> None:
            self._name = timed.config

        def open(self) -> None:
            said.append(("open", self._name))

        def wait(self) -> None: ...

        def turn(self) -> float:
            said.append(("turn", self._name))
            return 2.0 if self._name == "own" else 1.0

        def pause(self) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setattr("dlscale.measure.turns._subject", Player)
    own, first = (TimedRunSettings(name, "", "cpu", 1) for name in ("own", "first"))
    assert Turns(own, first).rounds(0, 0.5) == 2 * [2 * [(2.0, 1.0)]]
    openings = [name for what, name in said if what == "open"]
    assert set(map(tuple, zip(openings[::2], openings[1::2], strict=True))) == {("own", "first"), ("first", "own")}
    names = [name for what, name in said if what == "turn"]
    for number in (0, 4):
        assert names[number : number + 4] in (["own", "first", "first", "own"], ["first", "own", "own", "first"])
    assert {names[0], names[4]} == {"own", "first"}
