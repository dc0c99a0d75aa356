"""Measure external programs: the pace agrees with their own clocks, and the programs run as without dlscale."""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import importlib.util
import json
import math
import os
import pickle
import re
import shlex
import signal
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from bench.bottlenecks import outside
from dlscale.core import registry
from dlscale.core.errors import UserError
from dlscale.core.files import translate_error
from dlscale.core.noise import interval
from dlscale.core.settings import read_yaml
from dlscale.extensions.programs import causes, logs, running, steps, timed
from dlscale.extensions.programs import measure as outside_measure
from dlscale.extensions.programs.measure import PLAN
from dlscale.extensions.programs.printed import PER_STEP, Finder, plain, rate_of, value_of
from dlscale.extensions.programs.running import HOOK
from dlscale.measure.records import Outside, Throughput, Trials
from dlscale.parallel.records import Device
from dlscale.report.evidence import Evidence, bound
from dlscale.report.verdict import judge_run, verdict
from dlscale.results import read_plan, read_run
from tests.conftest import ROOT, variables
from tests.waiting import PATIENCE, until

# ---- the pace, computed from recorded steps ----------------------------------------------------------


class Clock:
    """Steps file of one process, written with a simulated clock that starts at 1000 s."""

    def __init__(self, folder: Path, rank: int = 0, way: str = "seen") -> None:
        self.now, self.number, self.iterator, self.optimizer = 1000.0, rank, 0, 0
        self.file = folder / f"{way}.host.{rank}"
        self.file.write_text(f"begin {1.7e9:.6f} 1000.000000 {rank}\n")

    def note(self, line: str) -> None:
        with self.file.open("a") as file:
            file.write(line + "\n")

    def batch(self, wait: float, samples: int = 8) -> None:
        self.now += wait
        self.note(f"b {self.iterator} {self.now:.6f} {wait:.6f} {samples}")

    def step(self, seconds: float) -> None:
        self.now += seconds
        self.note(f"s {self.now:.6f} 0.0 {self.optimizer}")

    def epoch(self, count: int, wait: float, seconds: float, ahead: bool = False) -> None:
        """Train on batches; fetch each batch just before its step, or one step ahead."""
        self.iterator += 1
        if ahead:
            self.batch(wait)
        for number in range(count):
            if not ahead or number < count - 1:
                self.batch(wait)
            self.step(seconds)

    def validate(self, count: int, seconds: float) -> None:
        self.iterator += 1
        for _ in range(count):
            self.batch(0.0, samples=1000)
            self.now += seconds


@pytest.mark.parametrize("ahead", [False, True])
def test_a_pace_is_that_of_training_alone(tmp_path: Path, ahead: bool) -> None:
    """The pace excludes validations, pauses and the first steps, whether or not batches are fetched ahead."""
    clock = Clock(tmp_path)
    clock.now += 30  # time to compile
    for _ in range(5):
        clock.epoch(60, wait=0.02, seconds=0.06, ahead=ahead)
        clock.validate(2, seconds=3.0)
        clock.now += 5  # time to write a checkpoint
    way, processes = steps.read(tmp_path)
    found = steps.pace(processes)
    assert way == "seen" and found
    assert found.rates == pytest.approx([8 / 0.08] * steps.WINDOWS, rel=0.02)
    assert found.waiting == pytest.approx(0.25, abs=0.01) and found.batch_size == 8
    assert found.first_step == pytest.approx(1.7e9 + 30.08 + 0.02 * ahead)
    assert found.training == pytest.approx(0.08 * 270 / (300 * 0.08 + 4 * 11), rel=0.05)


@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("count", [1, 6, 23])
def test_the_wait_for_workers_that_start_again_counts_also_after_a_validation(
    tmp_path: Path, count: int, validates: bool
) -> None:
    """The rate does not depend on a validation between the epochs, also with one step per epoch."""
    clock = Clock(tmp_path)
    for _ in range(40):
        clock.iterator += 1
        for number in range(count):
            clock.batch(0.01 if number else 0.2)
            clock.step(0.04)
        if validates:
            clock.validate(3, seconds=0.5)
            clock.now += 0.3  # metrics and a checkpoint
    found = steps.pace(steps.read(tmp_path)[1])
    seconds = 0.05 * count + 0.19
    assert found and statistics.fmean(found.rates) == pytest.approx(8 * count / seconds, rel=0.03)
    assert found.waiting == pytest.approx((0.01 * count + 0.19) / seconds, rel=0.03)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("how", ["evaluated", "ungraded"])
@pytest.mark.parametrize("loader", [True, False])
def test_a_validation_with_one_iterator_for_all_validations_is_no_training(
    tmp_path: Path, count: int, how: str, loader: bool
) -> None:
    """`next(val_iter)` in evaluation mode or without gradients delivers no samples, and takes no time of steps."""
    clock = Clock(tmp_path)
    for number in range(200):
        clock.iterator = number // 50
        if loader:
            clock.batch(0.01)
        clock.step(0.04)
        if number % 5 == 4:
            clock.iterator, begin = 99, clock.now
            for _ in range(count):
                clock.batch(0.02, samples=32)
                if how == "ungraded":
                    clock.note("u 99")
                clock.now += 0.1
            if how == "evaluated":
                clock.note(f"v {begin:.6f} {clock.now:.6f} 0")
    (process,) = steps.read(tmp_path)[1]
    found = steps.pace([process])
    assert found and (found.samples, found.batch_size) == (loader, 8 if loader else None)
    assert found.rates == pytest.approx([8 / 0.05 if loader else 1 / 0.04] * steps.WINDOWS)
    assert "99" not in steps.training_iterators(process) and found.regular is None
    assert not loader or found.pauses["other"] == pytest.approx(0.12 * count * 35, abs=0.12 * count)


@pytest.mark.parametrize(("every", "expected"), [(10, 25.0), (2, 25.0), (1, 1 / 0.14)])
def test_time_in_evaluation_mode_without_a_loader_is_a_validation_if_it_is_rare(
    tmp_path: Path, every: int, expected: float
) -> None:
    """Time in evaluation mode before every step belongs to the training: a loss may need another model."""
    clock, points = Clock(tmp_path), list[tuple[float, float]]()
    for number in range(200):
        begin = clock.now
        if number % every == every // 2:
            clock.now += 0.1
            clock.note(f"v {begin:.6f} {clock.now:.6f} 0")
        clock.step(0.04)
        points.append((clock.now + 1.7e9 - 1000, float(number)))
    clock.note(f"v {1000.0:.6f} {clock.now:.6f} 0")  # a model that makes steps in evaluation mode
    (process,) = steps.read(tmp_path)[1]
    process.evaluated.remove(max(process.evaluated, key=lambda span: span[1] - span[0]))
    found, logged = steps.pace([process]), steps.pace_of_log(points, None, (), steps.evaluations(process))
    assert found and found.rates == pytest.approx([expected] * steps.WINDOWS)
    assert logged and interval(logged.rates)[0] == pytest.approx(expected) and logged.regular is found.regular is None


@pytest.mark.parametrize("count", [1, 2, 10])
@pytest.mark.parametrize("late", [True, False])
def test_a_model_may_return_to_training_after_the_first_batch(tmp_path: Path, count: int, late: bool) -> None:
    """Transformers calls `train()` in each step: the wait for a first batch does not belong to a validation."""
    clock, mode = Clock(tmp_path), 0.0
    for _ in range(40):
        clock.iterator += 1
        for number in range(count):
            if mode and not late:
                clock.note(f"v {mode:.6f} {clock.now:.6f} 0")
            clock.batch(0.01 if number else 0.2)
            if mode and late:
                clock.note(f"v {mode:.6f} {clock.now:.6f} 0")
            mode = 0.0
            clock.step(0.04)
        mode = clock.now
        clock.validate(3, seconds=0.5)
    found = steps.pace(steps.read(tmp_path)[1])
    assert found and (found.batch_size, found.samples) == (8, True)
    assert statistics.fmean(found.rates) == pytest.approx(8 * count / (0.05 * count + 0.19), rel=0.03)
    assert found.waiting == pytest.approx((0.01 * count + 0.19) / (0.05 * count + 0.19), rel=0.03)


def test_regular_long_steps_are_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    clock = Clock(tmp_path)
    for number in range(200):
        clock.step(0.45 if number % 10 == 3 else 0.05)
    throughput, _ = running.measured(["x"], tmp_path, tmp_path / "none.csv", outcome([]), running.Reading())
    said = capfd.readouterr().err
    assert throughput.full and throughput.full.mean == pytest.approx(10 / 0.9, rel=0.1)
    assert "long steps, 10 steps apart, take 4" in said and re.search(r"training alone makes (19|20)\.\d steps/s", said)


def test_a_model_that_makes_steps_in_evaluation_mode_is_trained(tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    for _ in range(20):
        begin = clock.now
        clock.epoch(10, wait=0.01, seconds=0.04)
        clock.note(f"v {begin:.6f} {clock.now:.6f} 0")
    found = steps.pace(steps.read(tmp_path)[1])
    assert found and found.steps == 179 and found.rates == pytest.approx([160.0] * steps.WINDOWS)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("how", ["optimiser", "gradients", "unknown", "one loader"])
def test_timed_validations_are_no_steps(tmp_path: Path, nested: bool, how: str) -> None:
    """A loop over `timed(loader)` is a validation if only other loops step an optimiser or have gradients.

    Without PyTorch, the steps of all loops count, with a warning if there are several loaders.
    """
    clock, loops = Clock(tmp_path, way="timed"), 0

    def loop(count: int, loader: int, seconds: float, stepped: bool, inner: bool = False) -> None:
        nonlocal loops
        loops += 1
        own = loops
        clock.note(f"l {clock.now:.6f} {own} {loader}")
        for number in range(count):
            clock.iterator = own
            clock.batch(0.01)
            if how == "gradients" and loader == 2:
                clock.note(f"u {own}")
            clock.now += seconds
            if inner and number % 5 == 4:
                loop(4, 2, 0.02, False)
            clock.note(f"s {clock.now:.6f} 0.0 0 {own} {stepped * (number % 2)}")

    for _ in range(10):
        loop(20, 1, 0.04, how == "optimiser", nested and how != "one loader")
        if not nested and how != "one loader":
            loop(10, 2, 0.02, False)
    loop(1, 1, 0.04, False)  # a short epoch, within an accumulation
    (process,) = steps.read(tmp_path)[1]
    found = steps.pace([process])
    assert len(process.steps) == (201 if how != "unknown" else 361 if nested else 301)
    assert found and found.batch_size == 8 and process.unclear == (how == "unknown")
    assert how == "unknown" or found.rates == pytest.approx([160.0] * steps.WINDOWS)


@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("way", ["seen", "timed"])
def test_starting_and_ending_workers_counts_with_and_without_a_validation(
    tmp_path: Path, validates: bool, way: str
) -> None:
    """Between epochs, workers start in 0.3 s and end in 0.2 s: the rate is that of complete epochs."""
    clock = Clock(tmp_path, way=way)
    for _ in range(30):
        clock.iterator += 1
        begin = clock.now
        clock.now += 0.3
        clock.note(f"l {begin:.6f}" if way == "timed" else f"i {begin:.6f} {clock.now:.6f} {clock.iterator}")
        for _ in range(10):
            clock.batch(0.01)
            clock.step(0.04)
        clock.now += 0.2
        for since in (0.15, 0.2):  # the workers' end within the last request
            clock.note(f"e {clock.now - since:.6f} {clock.now:.6f} {clock.iterator}")
        if validates:
            clock.validate(3, seconds=0.5)
            clock.note(f"e {clock.now - 0.2:.6f} {clock.now:.6f} {clock.iterator}")
    found = steps.pace(steps.read(tmp_path)[1])
    assert found and statistics.fmean(found.rates) == pytest.approx(80 / 1.0, rel=0.03)
    assert found.waiting == pytest.approx(0.1, rel=0.05) and found.between_epochs == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("kind", ["seen", "log"])
@pytest.mark.parametrize(("every", "extra"), [(10, 0.3), (4, 0.6), (10, 0.0), (0, 0.3)])
def test_regular_long_steps_are_reported(tmp_path: Path, kind: str, every: int, extra: float) -> None:
    """Long steps at equal distances are reported, because they may contain validations that dlscale cannot detect."""
    clock, points = Clock(tmp_path), list[tuple[float, float]]()
    for number in range(200):
        irregular = not every and (number * number) % 23 == 2
        clock.step(0.05 + extra * (irregular or (every > 0 and number % every == 3)))
        points.append((clock.now, float(number)))
    found = steps.pace(steps.read(tmp_path)[1]) if kind == "seen" else steps.pace_of_log(points, None)
    assert found
    if every and extra:
        assert found.regular == (every, pytest.approx(extra / (0.05 * every + extra), rel=0.1))
    else:
        assert found.regular is None


@pytest.mark.parametrize(("batches", "accumulated"), [(5, 4), (10, 4), (16, 8), (8, 1)])
def test_batches_that_a_library_requests_ahead_count_when_they_are_used(
    tmp_path: Path, batches: int, accumulated: int
) -> None:
    """accelerate requests a batch ahead, and accumulates fewer batches at an epoch's end, before a validation."""
    clock = Clock(tmp_path)
    for _ in range(20):
        clock.iterator += 1
        clock.note(f"a {clock.iterator}")
        clock.batch(0.02)
        for number in range(1, batches + 1):
            if number < batches:
                clock.batch(0.02)
            else:
                clock.now += 0.02  # the request that ends the epoch
            clock.now += 0.08
            if number % accumulated == 0 or number == batches:
                clock.step(0.0)
        clock.validate(3, seconds=0.5)
    found = steps.pace(steps.read(tmp_path)[1])
    expected = 8 * batches / (0.1 * batches + 0.02)  # with the wait for the epoch's first batch
    assert found and statistics.fmean(found.rates) == pytest.approx(expected, rel=0.015)
    assert found.batch_size == round(8 * batches / math.ceil(batches / accumulated))


def test_a_validation_between_loops_is_not_a_step(tmp_path: Path) -> None:
    """An unrecorded validation between two loops is not a step, even if it is too short to count as a pause."""
    clock = Clock(tmp_path, way="timed")
    for _ in range(20):
        clock.note(f"l {clock.now:.6f}")
        clock.epoch(5, wait=0.02, seconds=0.06)
        clock.now += 0.5
    found = steps.pace(steps.read(tmp_path)[1])
    assert found and found.rates == pytest.approx([100.0] * steps.WINDOWS)


@pytest.mark.parametrize(
    ("gap", "each", "batches", "expected"),
    [(0.6, 0.0, 10, 0.6 / 1.1), (0.0, 0.06, 10, 0.0), (0.6, 0.06, 1, 0.0), (0.01, 0.0, 10, 0.01 / 0.51)],
    ids=["epochs", "every step", "an iterator per step", "little"],
)
def test_work_between_epochs_is_a_finding(
    tmp_path: Path, gap: float, each: float, batches: int, expected: float
) -> None:
    """Work of `gap` seconds between epochs is a finding; work of `each` seconds before every batch is not."""
    clock = Clock(tmp_path)
    for _ in range(40):
        clock.now += gap
        clock.iterator += 1
        for _ in range(batches):
            clock.now += each
            clock.batch(0.01)
            clock.step(0.04)
    found = steps.pace(steps.read(tmp_path)[1])
    assert found and found.between_epochs == pytest.approx(expected, abs=0.02)
    full = Trials(
        trial_throughput=found.rates, trial_time=found.seconds, avg_iter_throughput=found.rates, mean=1, std=0
    )
    program = Outside(
        **{"command": ["x"], "way": "seen", "steps": found.steps, "status": 0, "seconds": 1, "first_step_seconds": 0},
        training=1.0,
        waiting=found.waiting,
        between_epochs=found.between_epochs,
    )
    throughput = Throughput(device=Device(kind="cpu"), FULL=full, outside=program)
    finding, limit = causes.between_epochs(Evidence({}, throughput)), bound(throughput)
    assert limit and limit.what == ("work between epochs" if expected > 0.5 else "computation")
    assert ("Work between epochs: " in limit.why) == (expected > 0)
    assert (finding and finding.what) == ("work between epochs" if expected > 0.2 else None)
    assert not finding or (finding.share == pytest.approx(expected, abs=0.02) and "between an epoch" in finding.why)


@pytest.mark.parametrize(("way", "loader", "expected"), [("seen", True, 0), ("seen", False, 1), ("log", False, 0)])
def test_an_unknown_wait_for_data_is_stated(tmp_path: Path, way: str, loader: bool, expected: int) -> None:
    """Steps without batches of PyTorch's DataLoader, as with nnU-Net's own loader, do not show the wait for data."""
    clock = Clock(tmp_path)
    for _ in range(40):
        if loader:
            clock.batch(0.01)
        clock.step(0.04)
    found = steps.pace(steps.read(tmp_path)[1])
    assert found and found.waiting == (pytest.approx(0.2, rel=0.02) if loader else None)
    full = Trials(
        trial_throughput=found.rates, trial_time=found.seconds, avg_iter_throughput=found.rates, mean=1, std=0
    )
    program = Outside(
        **{"command": ["x"], "way": way, "steps": found.steps, "status": 0, "seconds": 1, "first_step_seconds": 0},
        training=1.0,
        waiting=found.waiting,
    )
    throughput = Throughput(device=Device(kind="cpu"), FULL=full, outside=program)
    said = outside_measure.lines(tmp_path, throughput, verdict(Evidence({}, throughput)))
    assert sum("the wait for data is unknown" in line for line in said) == expected


def test_paces_of_processes_add_up(tmp_path: Path) -> None:
    for rank in (1, 0):
        Clock(tmp_path, rank).epoch(100, wait=0.0, seconds=0.1)
    _, processes = steps.read(tmp_path)
    found = steps.pace(processes)
    assert found and [process.rank for process in processes] == [0, 1]
    assert found.rates == pytest.approx([160.0] * 10) and found.rank_rates == pytest.approx([80.0] * 2)
    assert (found.processes, found.batch_size, found.waiting) == (2, 16, 0.0)


def outcome(printed: list[tuple[float, float]]) -> running.Outcome:
    return running.Outcome(0, 1.7e9, 100.0, None, None, printed, {})


@pytest.mark.parametrize("ranks", [1, 2])
def test_of_several_trainings_the_longest_counts(tmp_path: Path, ranks: int) -> None:
    """Of three cross-validation folds with separate optimisers and speeds, the longest fold gives the pace."""
    printed = list[tuple[float, float]]()
    for rank in range(ranks):
        clock = Clock(tmp_path, rank)
        for clock.optimizer, (count, seconds) in enumerate(((30, 0.1), (60, 0.2), (40, 0.05)), 1):
            clock.epoch(count, wait=0.0, seconds=seconds)
            clock.now += 0.3
            printed.append((1.7e9 + clock.now - 1000, 8 * ranks / seconds))
            clock.now += 0.3
    processes = steps.read(tmp_path)[1]
    assert [len(steps.trainings(process)) for process in processes] == [3] * ranks
    found, _, trainings = running._pace_by("seen", running.Reading(), outcome([]), tmp_path, processes, ())
    assert trainings == 3 and found.batch_size == 8 * ranks and found.first_step == pytest.approx(1.7e9 + 0.1)
    assert found.rates == pytest.approx([40.0 * ranks] * steps.WINDOWS) and found.training == pytest.approx(1.0)
    read = running.Reading(rate="nersc")
    found, _, trainings = running._pace_by("rate", read, outcome(printed[:3]), tmp_path, processes, ())
    assert (found.rates, found.first_step, trainings) == ([40.0 * ranks], printed[0][0], 3)


def test_steps_of_loaders_with_an_iterator_per_step_count(tmp_path: Path) -> None:
    """`next(iter(loader))` of two loaders in each step: all steps count; the number of samples is unknown."""
    clock = Clock(tmp_path)
    for _ in range(100):
        for samples in (112, 16):
            clock.iterator += 1
            clock.batch(0.1, samples)
        clock.step(0.3)
    found = steps.pace(steps.read(tmp_path)[1])
    assert found and found.steps == 89 and not found.samples and found.rates == pytest.approx([2.0] * 10)
    assert found.waiting == pytest.approx(0.4)


def test_many_steps_without_a_rate_are_not_too_few(tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    for _ in range(30):
        clock.step(0.3)
        clock.note(f"g {clock.now:.6f} {clock.now + 1:.6f}")
        clock.now += 1
    processes = steps.read(tmp_path)[1]
    with pytest.raises(UserError, match="the program made 30 steps, but dlscale cannot separate them"):
        running._pace_by("seen", running.Reading(), outcome([]), tmp_path, processes, ())


def test_children_that_fit_something_of_their_own_are_not_ranks(tmp_path: Path) -> None:
    """A child counts as a rank if it has a rank or batches of its own, or if its parent has no batches."""
    for number, (rank, parent, batches) in enumerate([(0, 0, True), (0, 0, False), (1, 0, False), (0, 0, True)]):
        clock = Clock(tmp_path, number)
        clock.file.write_text(f"begin {1.7e9:.6f} 1000.000000 {rank} {parent}\n")
        for _ in range(60):
            if batches:
                clock.batch(0.1)
            clock.step(0.2)
    assert sorted(process.pid for process in steps.read(tmp_path)[1]) == [0, 2, 3]
    starter = tmp_path / "seen.host.0"
    starter.write_text("".join(line for line in starter.read_text().splitlines(True) if not line.startswith("b ")))
    assert sorted(process.pid for process in steps.read(tmp_path)[1]) == [0, 1, 2, 3]


def test_successive_trainings_share_no_step(tmp_path: Path) -> None:
    """A training that resumes with another optimiser begins with a step of its own; a GAN's optimisers share steps."""
    clock = Clock(tmp_path)
    for clock.optimizer, count in ((1, 60), (2, 30), (4, 20)):
        clock.epoch(count, wait=0.01, seconds=0.09)
    (process,) = steps.read(tmp_path)[1]
    assert len(process.steps) == len(process.computed) == 110
    assert [round(each - 1.7e9, 2) for each in process.steps[58:62]] == [5.9, 6.0, 6.1, 6.2]
    assert [steps._count(process, span) for span in steps.trainings(process)] == [60, 30, 20]
    clock = Clock(tmp_path)
    for clock.optimizer in [*[1] * 5, *[2, 1] * 30]:
        clock.step(0.1)
    assert len(steps.read(tmp_path)[1][0].steps) == 35


def test_optimisers_that_alternate_and_short_trainings_are_one(tmp_path: Path) -> None:
    """The alternating optimisers of a GAN are one training, and so are federated clients that make a few steps each."""
    for folder, clients in ((tmp_path / "gan", [1, 2] * 40), (tmp_path / "clients", [n // 5 for n in range(80)])):
        folder.mkdir()
        clock = Clock(folder)
        for clock.optimizer in clients:
            clock.step(0.1)
        processes = steps.read(folder)[1]
        assert steps.longest_training(processes) is None and steps.pace(processes)


def test_an_optimiser_at_the_address_of_another_one_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = a_hook(tmp_path, monkeypatch).Watcher()
    first, second = (torch.optim.SGD([torch.zeros(1)], lr=0.1) for _ in range(2))
    assert [watcher._number(each) for each in (first, first)] == [1, 1]
    watcher._known[id(second)] = watcher._known.pop(id(first))
    assert [watcher._number(each) for each in (second, second)] == [2, 2]


def test_waiting_is_that_of_all_processes(tmp_path: Path) -> None:
    for rank, wait in enumerate((0.0, 0.05)):
        Clock(tmp_path, rank).epoch(100, wait=wait, seconds=0.1 - wait)
    found = steps.pace(steps.read(tmp_path)[1])
    assert found and found.waiting == pytest.approx(0.25) and found.waits_of_ranks == pytest.approx([0.0, 0.5])


def test_the_wait_of_a_rank_without_a_loader_is_unknown(tmp_path: Path) -> None:
    """If rank 0 loads the batches of all ranks, as with accelerate's `dispatch_batches`, all ranks wait for rank 0."""
    Clock(tmp_path, 0).epoch(100, wait=0.05, seconds=0.05)
    other = Clock(tmp_path, 1)
    for _ in range(100):
        other.step(0.1)
    found = steps.pace(steps.read(tmp_path)[1])
    assert found and found.processes == 2 and found.waiting is None and found.waits_of_ranks == []


@pytest.mark.parametrize(("made", "counted"), [(11, 8), (101, 90), (1001, 950)])
def test_a_tenth_of_the_steps_warms_up(tmp_path: Path, made: int, counted: int) -> None:
    """The warm-up is a tenth of the steps whose begin is known (all but the first), at least 2 and at most 50."""
    Clock(tmp_path).epoch(made, wait=0.0, seconds=0.1)
    found = steps.pace(steps.read(tmp_path)[1])
    assert found and found.steps == counted


def test_the_limit_for_a_pause_applies_per_step() -> None:
    """A pause is judged per step, not per line: one step of 1 s is a pause among lines of ten 0.1 s steps."""
    points, time, step = [(0.0, 0.0)], 0.0, 0
    for steps_, seconds in ((10, 1.0), (10, 1.0), (1, 1.0), (10, 1.0), (1, 0.1), (10, 1.0)):
        time, step = time + seconds, step + steps_
        points.append((time, step))
    found = steps.pace_of_log(points, None)
    assert found and found.rates == pytest.approx([10.0] * 4) and found.steps == 31


@pytest.mark.parametrize("workers", [1, 2, 8, 16])
@pytest.mark.parametrize("wait", [0.4, 1.5])
@pytest.mark.parametrize(("count", "every"), [(40, 1), (80, 1), (240, 1), (240, 4), (1000, 20)])
@pytest.mark.parametrize("validation", [0.0, 7.0])
def test_waits_in_bursts_count_by_the_clock(
    workers: int, wait: float, count: int, every: int, validation: float
) -> None:
    """A slow batch of one worker is followed by fast batches: the pace agrees with the clock outside of validations."""
    when, points, printed, trained = 1.7e9, list[tuple[float, float]](), list[tuple[float, float]](), [0.0]
    for step in range(1, count + 1):
        seconds = wait if workers > 1 and step % workers == 0 else 0.02
        when, trained = when + seconds, [*trained, trained[-1] + seconds]
        if step % every == 0:
            points.append((when, float(step)))
            printed.append((when, 8 * every / (trained[step] - trained[step - every])))
        when += validation * (step % 50 == 0)
    for pace, warm_up in ((steps.pace_of_rates(printed, 1.7e9, 8), every), (steps.pace_of_log(points, 8), 2 * every)):
        assert pace
        speed, clock = interval(pace.rates)[0], 8 * (count - warm_up) / (trained[-1] - trained[warm_up])
        if warm_up == every or not (validation and wait > 1 and workers > 1):
            assert speed == pytest.approx(clock, rel=0.1)
        else:  # a validation (7 s) hardly exceeds the limit of four waits (6 s), so it may count and lower the rate
            assert speed < 1.1 * clock
        assert pace.training > 0.9 or validation


@pytest.mark.parametrize("seconds", [0.1, 1.0])
def test_few_points_and_one_long_wait_count_by_the_clock(seconds: float) -> None:
    """In a log of few steps, a long wait counts, because dlscale cannot distinguish it from a pause."""
    times = list(accumulate([seconds] * 6 + [20 * seconds] + [seconds] * 4))
    found = steps.pace_of_log([(1.7e9 + when, float(step)) for step, when in enumerate(times)], 8)
    assert found and interval(found.rates)[0] == pytest.approx(8 * 9 / (28 * seconds), rel=0.1)
    assert found.training == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("stated", "of_run", "counts"),
    [(16, True, 64), (16, False, 16), (128, True, 128), (128, False, 128), (64, True, None), (62, False, None)],
)
def test_a_stated_batch_size_is_held_against_the_loaders(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], stated: int, of_run: bool, counts: int | None
) -> None:
    """The loader's 4 × 16 samples per step replace a run's smaller `batch_size`, but not the option `--batch-size`."""
    clock = Clock(tmp_path)
    for _ in range(20):
        for _ in range(4):
            clock.batch(0.01, samples=16)
        clock.step(0.1)
    _, processes = steps.read(tmp_path)
    reading = running._with_delivered(running.Reading(stated, of_run), processes)
    warned = capfd.readouterr().err
    assert reading.batch_size == (counts or stated) and bool(warned) == (counts is not None)
    assert not counts or ("delivered 64 samples per step" in warned and f"The rate uses {counts}" in warned)


def test_rates_read_at_once_share_their_time() -> None:
    """Rates that arrive in one block of output share the block's time, so their harmonic mean counts."""
    printed = [(1.7e9 + block, rate) for block in range(1, 41) for rate in (400.0, 400.0, 20.0)]
    found = steps.pace_of_rates(printed, 1.7e9, None)
    assert found and interval(found.rates)[0] == pytest.approx(3 / (2 / 400 + 1 / 20), rel=0.01)


@pytest.mark.parametrize(("ahead", "samples", "waiting"), [(False, True, 0.5), (True, False, None)])
def test_batches_of_another_thread_are_not_waited_for(
    tmp_path: Path, ahead: bool, samples: bool, waiting: float | None
) -> None:
    clock = Clock(tmp_path)
    for _ in range(100):
        clock.note(f"t {7 if ahead else 1}")
        clock.batch(0.05)
        clock.note("t 1")
        clock.step(0.05)
    found = steps.pace(steps.read(tmp_path)[1])
    assert found and (found.samples, found.waiting) == (samples, waiting if waiting is None else pytest.approx(waiting))
    assert bool(found.waits_of_ranks) != ahead


def test_the_batch_size_option_replaces_the_detected_size(tmp_path: Path) -> None:
    Clock(tmp_path).epoch(100, wait=0.0, seconds=0.1)
    found = steps.pace(steps.read(tmp_path)[1], batch_size=32)
    assert found and (found.batch_size, found.samples) == (32, True) and found.rates == pytest.approx([320.0] * 10)


def test_steps_without_samples_count_as_steps_or_as_the_batch_that_is_named(tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    for _ in range(100):
        clock.step(0.1)
    _, processes = steps.read(tmp_path)
    plain, named = steps.pace(processes), steps.pace(processes, batch_size=32)
    assert plain and not plain.samples and plain.rates == pytest.approx([10.0] * 10) and plain.waiting is None
    assert named and named.samples and named.rates == pytest.approx([320.0] * 10)


def test_reported_steps_take_precedence_over_detected_steps(tmp_path: Path) -> None:
    for way, seconds in (("seen", 0.1), ("timed", 0.2)):
        Clock(tmp_path, way=way).epoch(100, wait=0.0, seconds=seconds)
    (tmp_path / "timed.host.7").write_text("begin 1.0 1.0 0\ns 5.0 0.0 0\ns 6.")  # a killed process leaves half a line
    way, processes = steps.read(tmp_path)
    assert way == "timed" and len(processes) == 1


@pytest.mark.parametrize("accumulated", [1, 4])
def test_a_validation_of_one_batch_and_a_step_that_did_not_end_are_no_samples(tmp_path: Path, accumulated: int) -> None:
    clock = Clock(tmp_path)
    for _ in range(3):
        clock.iterator += 1
        for number in range(5 * accumulated):
            clock.batch(0.01)
            if number % accumulated == accumulated - 1:
                clock.step(0.01)
        clock.iterator += 1
        clock.batch(0.001, samples=1000)
        clock.now += 0.2
    clock.iterator += 1
    clock.batch(0.01)
    found = steps.pace(steps.read(tmp_path)[1])
    assert found and found.batch_size == 8 * accumulated
    assert found.rates == pytest.approx([8 * accumulated / (0.01 * (accumulated + 1))] * len(found.rates), rel=1e-3)


def test_the_last_batch_of_an_epoch_is_smaller(tmp_path: Path) -> None:
    """A smaller last batch counts for the rate, but for the batch size only if smaller batches are frequent."""
    clock = Clock(tmp_path)
    for _ in range(4):
        clock.iterator += 1
        for samples in (64, 64, 64, 64, 8):
            clock.batch(0.0, samples)
            clock.step(0.1)
    found = steps.pace(steps.read(tmp_path)[1])
    assert found and found.batch_size == 53, (
        "the batch size must be the mean, because a fifth of the batches is much smaller"
    )
    for _ in range(2):
        clock.iterator += 1
        for samples in (64,) * 39 + (8,):
            clock.batch(0.0, samples)
            clock.step(0.1)
    found = steps.pace(steps.read(tmp_path)[1])
    assert found and found.batch_size == 64
    assert found.rates[0] == pytest.approx((7 * 64 + 8) / 0.8), "the first window has one smaller batch"


@pytest.mark.parametrize(("batches", "accumulated"), [(9, 8), (11, 8), (17, 16), (31, 16)])
@pytest.mark.parametrize("seconds", [0.1, 1.0])
@pytest.mark.parametrize("how", ["", "ahead", "validated"])
def test_a_shorter_accumulation_at_an_epochs_end_counts(
    tmp_path: Path, batches: int, accumulated: int, seconds: float, how: str
) -> None:
    """Long and short steps alternate: neither is a pause, and rate and samples per step are those of all epochs."""
    clock = Clock(tmp_path)
    for _ in range(20):
        clock.iterator += 1
        if how == "ahead":
            clock.batch(seconds / 10)
        for number in range(1, batches + 1):
            if how != "ahead" or number < batches:
                clock.batch(seconds / 10)
            clock.now += seconds
            if number % accumulated == 0 or number == batches:
                clock.step(0.0)
        if how == "validated":
            clock.validate(3, seconds=2.0)
    found = steps.pace(steps.read(tmp_path)[1])
    assert found and found.batch_size == pytest.approx(8 * batches / 2, abs=0.5)
    assert interval(found.rates)[0] == pytest.approx(8 / (1.1 * seconds), rel=0.015)
    assert sum(found.rank_rates) == pytest.approx(8 / (1.1 * seconds), rel=0.005)


@pytest.mark.parametrize("at_epochs", [False, True])
@pytest.mark.parametrize("loader", [False, True])
def test_long_steps_that_recur_are_pauses_only_between_epochs(tmp_path: Path, at_epochs: bool, loader: bool) -> None:
    """Every eighth step takes 2 s, the others 0.1 s. One step of 100 s is a pause."""
    clock = Clock(tmp_path)
    for number in range(160):
        clock.iterator += at_epochs and number % 8 == 0
        if number % 8 == 0 and at_epochs:
            clock.now += 1.9
        if loader:
            clock.batch(0.0)
        clock.step(100.0 if number == 99 else 2.0 if number % 8 == 7 and not at_epochs else 0.1)
    found = steps.pace(steps.read(tmp_path)[1])
    assert found and found.samples == loader
    expected = 10.0 if at_epochs and loader else 8 / 2.7
    assert interval(found.rates)[0] == pytest.approx(expected * (8 if loader else 1), rel=0.03)


@pytest.mark.parametrize("sizes", [(4, 8, 16, 32), (32, 16, 8, 4)])
def test_batches_may_grow_or_shrink_during_a_training(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """With a schedule of batch sizes, or batches sorted by length, each window counts its own samples."""
    for rank in range(2):
        clock = Clock(tmp_path, rank)
        for samples in sizes:
            for _ in range(100):
                clock.batch(0.0, samples)
                clock.step(samples / 100)
    found = steps.pace(steps.read(tmp_path)[1])
    assert found and found.rates == pytest.approx([200.0] * 10) and found.rank_rates == pytest.approx([100.0] * 2)
    assert found.batch_size == pytest.approx(2 * (15 * 400 - 40 * sizes[0]) / 360, abs=1.1), "warm-up does not count"


def test_a_step_or_two_have_no_pace(tmp_path: Path) -> None:
    Clock(tmp_path).epoch(2, wait=0.0, seconds=0.1)
    assert steps.pace(steps.read(tmp_path)[1]) is None and steps.read(tmp_path / "none") == ("", [])


def test_a_log_of_steps_has_their_pace(tmp_path: Path) -> None:
    """A JSON or TensorBoard log of every tenth step gives the pace of the steps, without validations."""
    time, rows = 1.7e9, []
    for step in range(0, 1000, 10):
        rows.append({"step": step, "time": time, "loss": 1.0})
        time += 0.5 + 7.0 * (step % 100 == 90)
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with SummaryWriter(str(tmp_path / "board")) as board:
        for row in rows:
            board.add_scalar("loss", row["loss"], row["step"], walltime=row["time"])
        board.add_scalar("accuracy", 1.0, 5, walltime=1.7e9)
    for path in (tmp_path / "log.jsonl", tmp_path / "board"):
        (points,) = logs.logged(path, logs.Start(1.7e9 - 1))
        found = steps.pace_of_log(points, batch_size=32)
        assert found and found.rates == pytest.approx([640.0] * 10, rel=1e-4) and found.samples
    assert logs.logged(tmp_path / "board", logs.Start(time + 1)) == [], "events of an earlier run must not count"
    (tmp_path / "board" / "events.out.tfevents.0.of.a.try").write_bytes(b"not one, but as long as a record's head")
    (tmp_path / "board" / "events.out.tfevents.1.of.another").touch()
    (points,) = logs.logged(tmp_path / "board", logs.Start(1.7e9 - 1))
    assert len(points) == 100, "files of killed runs in the same folder must not count"
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "events.out.tfevents.1.of.another").touch()
    with pytest.raises(UserError, match="has no events; expected an event file"):
        logs.logged(tmp_path / "empty", logs.Start(0.0))
    (tmp_path / "log.jsonl").write_text("\nthree\n")
    with pytest.raises(UserError, match="line 1: expected JSON with `step` and `time`"):
        logs.logged(tmp_path / "log.jsonl", logs.Start(0.0))
    with pytest.raises(UserError, match="no such file"):
        logs.logged(tmp_path / "none", logs.Start(0.0))


def test_a_tag_of_several_folders_is_refused_or_chosen(tmp_path: Path) -> None:
    """A tag in several folders is ambiguous, unless one folder resumes the training of another."""

    def write(folder: str, value: float, begin: int, first: int = 1) -> None:
        with SummaryWriter(str(tmp_path / folder)) as board:
            for step in range(first, first + 3):
                board.add_scalar("loss", value, step, walltime=1.7e9 + begin + step)

    def read(tags: dict[str, str], begin: float = 1.7e9) -> dict[str, list[tuple[float, int, float]]]:
        return logs.values(tmp_path, tags, logs.Start(begin), (), 1.7e9 + 3600)

    write("train", 1.0, 0)
    write("valid", 9.0, 0)
    with pytest.raises(UserError, match=r"the tag loss is in several folders: train, valid\. .* `train/loss`"):
        read({"loss": "loss/valid"})
    curves = read({"train/loss": "loss/train", "valid/loss": "loss/valid"})
    assert {name: {value for _, _, value in points} for name, points in curves.items()} == {
        "loss/train": {1.0},
        "loss/valid": {9.0},
    }
    (file,) = (tmp_path / "valid").iterdir()
    assert len(logs.values(file, {"loss": "loss/valid"}, logs.Start(1.7e9), (), 1.7e9 + 3600)["loss/valid"]) == 3
    write("version_9", 2.0, 100, first=2)
    write("version_10", 3.0, 200, first=4)
    points = read({"loss": "loss/valid"}, 1.7e9 + 50)["loss/valid"]
    assert [value for _, _, value in points] == [2.0] * 3 + [3.0] * 3, "a resumed training may write into a new folder"
    write("version_11", 4.0, 300, first=4)
    with pytest.raises(UserError, match="version_9, version_10, version_11"):
        read({"loss": "loss/valid"}, 1.7e9 + 50)


@pytest.mark.parametrize("kind", ["pipe", "device", "link", "pipe in a folder", "link to a folder"])
def test_a_log_is_a_file_or_a_folder_of_files(tmp_path: Path, kind: str) -> None:
    """A pipe, device or link is refused as a log; reading it could take forever."""
    path = tmp_path / "log"
    if kind == "device":
        path = Path("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "pipe in a folder":
        path.mkdir()
        os.mkfifo(path / "events.out.tfevents.1")
    else:
        (tmp_path / "file").write_text('{"step": 1, "time": 2}\n')
        path.symlink_to(tmp_path / "file" if kind == "link" else tmp_path)
    with pytest.raises(UserError, match=": a link, pipe or device; expected a file"):
        logs.logged(path, logs.Start(0.0))


def test_a_log_may_end_within_a_line(tmp_path: Path) -> None:
    """A program that is stopped early leaves half a line. A complete last line counts even without a line end."""
    log, start = tmp_path / "log.jsonl", logs.Start(1.7e9)
    rows = '{"step": 1, "time": 1.7e9}\n{"step": 2, "time": 1700000003.0}'
    for text in (rows, rows + '\n{"step": 3, "ti'):
        log.write_text(text)
        assert logs.logged(log, start) == [[(1.7e9, 1), (1.7e9 + 3, 2)]]
    log.write_text('{"step": 1, "time": 1.7e9}\n{"step": 2, "ti{"epoch": 2}\n{"step": 3, "time": 1.7e9}\n')
    assert logs.logged(log, start) == [[(1.7e9, 1), (1.7e9, 3)]], (
        "the half line and the line appended to it by a new run must not count"
    )
    for step in ("Infinity", "NaN", "[" * 100_000, "null", "true", "1.5", "1" * 400, "1" * 5000, '"two"'):
        log.write_text(f'{{"step": {step}, "time": 1}}\n')
        with pytest.raises(UserError, match="line 1: expected JSON"):
            logs.logged(log, start)
    log.write_text(f'{{"step": 1, "time": 1700000001, "seen": 1{"0" * 400}, "on": true}}\n')
    assert logs.values(log, {"seen": "loss/valid", "on": "valid/on"}, start) == {}


def test_a_log_may_have_other_keys_for_the_step(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    for key in ("global_step", "iteration", "iter", "current_steps"):
        log.write_text(f'{{"{key}": 3, "time": {BEGIN + 1}, "loss": 1.0}}\n')
        assert logs.logged(log, logs.Start(BEGIN)) == [[(BEGIN + 1, 3)]]
    for line, message in (
        (
            {"current_steps": 1, "elapsed_time": "0:00:12"},
            "no `time` among its keys current_steps, elapsed_time;",
        ),
        (
            {"n": 1, "time": 1},
            "no step (`step`, `global_step`, `iteration`, `iter`, `current_steps`) among its keys n, time",
        ),
        ({}, "and no `time` among its keys none; expected a date with time"),
    ):
        log.write_text(json.dumps(line) + "\n")
        with pytest.raises(UserError, match=re.escape(message)):
            logs.logged(log, logs.Start(BEGIN))


@pytest.fixture
def in_india(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set a local time zone other than UTC."""
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "Asia/Kolkata")
        time.tzset()
        yield
    time.tzset()


def write_log(path: Path, times: Iterable[object], mode: str = "w") -> Path:
    with path.open(mode) as file:
        file.writelines(json.dumps({"step": step, "time": time}) + "\n" for step, time in enumerate(times))
    return path


def iso(time: float, zone: tzinfo | None = None) -> str:
    return datetime.fromtimestamp(time, zone).isoformat(" ")


#: Start of a run, seconds since 1970, and times of its 40 steps (50 ms each, from 2 s), seconds after the start.
BEGIN, TICKS = 1.7e9, [2 + number / 20 for number in range(40)]

TIMES: dict[str, Callable[[float], object]] = {
    "seconds": lambda time: time,
    "milliseconds": lambda time: round(time * 1e3),
    "microseconds": lambda time: time * 1e6,
    "nanoseconds": lambda time: round(time * 1e9),
    "text": str,
    "local": iso,
    "T": lambda time: iso(time).replace(" ", "T"),
    "comma": lambda time: iso(time).replace(".", ","),
    "coloured": lambda time: f"\x1b[1;32m{iso(time)}\x1b[0m",
    "UTC": lambda time: iso(time, UTC),
    "Z": lambda time: iso(time, UTC).replace("+00:00", "Z"),
    "UTC without a zone": lambda time: iso(time, UTC).replace("+00:00", ""),
    "another zone": lambda time: iso(time, timezone(timedelta(hours=-8))),
    "since the start": lambda time: time - BEGIN,
    "since the first step": lambda time: time - BEGIN - 2,
    "milliseconds since the start": lambda time: (time - BEGIN) * 1e3,
}


@pytest.mark.parametrize("form", TIMES)
def test_a_log_has_times_of_any_usual_form(tmp_path: Path, in_india: None, form: str) -> None:
    log = write_log(tmp_path / "log.jsonl", [TIMES[form](BEGIN + tick) for tick in TICKS])
    os.utime(log, (BEGIN + 4, BEGIN + 4))
    (points,) = logs.logged(log, logs.Start(BEGIN), BEGIN + 4.5)
    found = steps.pace_of_log(points, batch_size=32)
    assert found and found.rates == pytest.approx([640.0] * 10, rel=1e-3) and found.steps == 38
    assert found.begin == pytest.approx(BEGIN + 2.05, abs=0.06)
    assert logs.values(log, {"step": "loss/valid"}, logs.Start(BEGIN), end=BEGIN + 4.5)["loss/valid"] == [
        (when, step, step) for when, step in points
    ]


def test_losses_are_kept_if_local_time_jumps_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of summer time, an hour of local time occurs twice; steps and losses keep the order of the lines."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        begin, log = datetime(2026, 10, 25, 0, 30, tzinfo=UTC).timestamp(), tmp_path / "log.jsonl"
        lines = [
            {"step": step, "time": datetime.fromtimestamp(begin + 60 * step).isoformat(), "loss": 1 / step}
            for step in range(1, 71)
        ]
        log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        found = logs.values(log, {"loss": "loss/train"}, logs.Start(begin), end=begin + 60 * 71)["loss/train"]
    finally:
        monkeypatch.undo()
        time.tzset()
    assert [(step, value) for _, step, value in found] == [(step, 1 / step) for step in range(1, 71)]


@pytest.mark.parametrize("seconds", [0.02, 0.005])
@pytest.mark.parametrize(("unit", "uptime"), [(1e-3, 15000.0), (1e-3, 300.0), (1.0, 150.0)])
def test_times_since_the_start_are_not_those_since_the_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: float, uptime: float, seconds: float
) -> None:
    """Times since the program's start differ from times since the machine's boot, even if some times fit both."""
    monkeypatch.setattr(logs, "time", SimpleNamespace(time=lambda: BEGIN + 100, perf_counter=lambda: uptime))
    count = int(99.9 / seconds)
    log = write_log(tmp_path / "log.jsonl", [number * seconds / unit for number in range(count)])
    os.utime(log, (BEGIN + 100, BEGIN + 100))
    (points,) = logs.logged(log, logs.Start(BEGIN), BEGIN + 100)
    assert len(points) == count and points[-1][0] - points[0][0] == pytest.approx((count - 1) * seconds)
    write_log(log, [uptime - 100 + number * seconds for number in range(count)])
    (points,) = logs.logged(log, logs.Start(BEGIN), BEGIN + 100)
    assert points[0] == (pytest.approx(BEGIN), 0) and len(points) == count


def test_a_log_may_count_whole_seconds(tmp_path: Path, in_india: None) -> None:
    log = write_log(tmp_path / "log.jsonl", [iso(int(BEGIN + number / 20)) for number in range(200)])
    (points,) = logs.logged(log, logs.Start(BEGIN + 0.3), BEGIN + 11)
    found = steps.pace_of_log(points, batch_size=32)
    assert found and found.rates == pytest.approx([640.0] * 8)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([0.05 + 0.01 * (number * 7 % 10) for number in range(40)], "does not increase with `step`"),
        ([0.05] * 40, "does not increase with `step`"),
        ([0.05 + 1e-4 * number for number in range(40)], "seems to be a step's duration"),
        ([50 + 0.1 * number for number in range(40)], "seems to be a step's duration"),
        ([BEGIN + tick for tick in reversed(TICKS)], "does not increase with `step`"),
        ([BEGIN + tick + 86400 for tick in TICKS], "is outside of the run"),
        ([1e307 + tick for tick in TICKS], "is outside of the run"),
        ([10 * tick for tick in TICKS], "seems to be a step's duration"),
        ([20 + 1.5 * tick for tick in range(40)], "seems to be a step's duration"),
        ([0.5, 0.6, 0.8], "seems to be a step's duration"),
        ([1e6 * tick for tick in TICKS], "is outside of the run"),
        ([-tick for tick in TICKS], "is outside of the run"),
        ([3600 + tick for tick in TICKS], "`time` 3602.0 is outside of the run, which took 4.5 s"),
        ([50 + tick for tick in TICKS], "seems to be a step's duration, or counts from a time before the run"),
        ([tick / 60 for tick in TICKS], "seems to be in minutes"),
        ([tick / 3600 for tick in TICKS], "seems to be in hours"),
        ([iso(BEGIN + 9 * 3600)] * 3, "is outside of the run"),
        (["1.2k"], "line 1: `time` '1.2k': expected a date with time"),
        (["12:00:05"], "line 1: `time` '12:00:05': expected a date with time"),
        ([True], "line 1: `time` True: expected a date with time"),
        ([None], "line 1: `time` None: expected a date with time"),
        ([10**400], "line 1: `time` 1000000000"),
        (["nan", "inf"], "line 1: `time` 'nan': expected a date with time"),
    ],
)
def test_times_of_another_kind_are_refused(tmp_path: Path, in_india: None, times: list[object], message: str) -> None:
    log = write_log(tmp_path / "log.jsonl", times)
    with pytest.raises(UserError, match=re.escape(message)) as refused:
        logs.logged(log, logs.Start(BEGIN), BEGIN + 4.5)
    assert len(str(refused.value)) < 400
    logs.values(log, {"step": "loss/valid"}, logs.Start(BEGIN), end=BEGIN + 4.5) if len(times) > 2 else None


@pytest.mark.parametrize("form", ["seconds", "local", "since the start", "milliseconds since the start"])
@pytest.mark.parametrize("how", ["appended", "anew", "copied"])
@pytest.mark.parametrize("slower", [3.1, 0.5])
def test_steps_of_earlier_runs_do_not_count(tmp_path: Path, in_india: None, form: str, how: str, slower: float) -> None:
    """Steps of earlier runs do not count, whether a program appends to its log, rewrites or replaces the log."""
    log, earlier = tmp_path / "log.jsonl", BEGIN - 86400
    moved = earlier - BEGIN if "since" not in form else 0.0
    write_log(log, [TIMES[form](BEGIN + moved + slower * tick) for tick in TICKS])
    start = replace(logs.start_of(log), begin=BEGIN)
    times = [TIMES[form](BEGIN + tick) for tick in TICKS]
    if how == "copied":
        (tmp_path / "new").write_bytes(log.read_bytes())
        write_log(tmp_path / "new", times, "a").rename(log)
    else:
        write_log(log, times, "a" if how == "appended" else "w")
    (points,) = logs.logged(log, start, BEGIN + 4.5)
    found = steps.pace_of_log(points, batch_size=32)
    assert found and found.rates == pytest.approx([640.0] * 10, rel=1e-3)


def test_trainings_in_one_log_are_apart(tmp_path: Path) -> None:
    """A cross-validation's trainings in one log are separated; steps that two processes log are one training."""
    log, when = tmp_path / "log.jsonl", BEGIN
    with log.open("w") as file:
        for count, seconds in ((30, 0.1), (40, 0.05), (30, 0.2)):
            for step in range(1, count + 1):
                when += seconds
                file.write(json.dumps({"step": step, "time": when}) + "\n")
                file.write(json.dumps({"step": step, "time": when + 0.01}) + "\n")
    trainings = logs.logged(log, logs.Start(BEGIN), BEGIN + 20)
    assert [len(points) for points in trainings] == [30, 40, 30]
    found = steps.pace_of_log(trainings[1], None)
    assert found and found.rates == pytest.approx([20.0] * 10)


@pytest.mark.parametrize("case", ["epochs in JSON", "epochs in folders", "clock"])
def test_a_few_points_of_another_counter_do_not_count(tmp_path: Path, case: str) -> None:
    """In a log of 10 ms steps, lines that count epochs, or the lines at which the clock is set back, are left out."""
    rows, when = list[tuple[str, int, float]](), BEGIN
    for step in range(2000):
        when += 0.01 - (case == "clock" and step == 1500)
        if step % 10 == 0:
            rows.append(("train", step, when))
        if step % 200 == 199 and case != "clock":
            when += 0.1
            rows.append(("val", step // 200 + 1, when))
    path = tmp_path / "log"
    if case == "epochs in folders":
        for name in ("train", "val"):
            with SummaryWriter(str(path / f"loss_{name}")) as board:
                for _, step, time in (row for row in rows if row[0] == name):
                    board.add_scalar("loss", 1.0, step, walltime=time)
    else:
        path.write_text("".join(json.dumps({"step": step, "time": time}) + "\n" for _, step, time in rows))
    points = max(logs.logged(path, logs.Start(BEGIN), when), key=len)
    found = steps.pace_of_log(points, None)
    assert found and found.rates == pytest.approx([100.0] * len(found.rates), rel=0.1)
    assert 1600 < found.steps < 2000


@pytest.mark.parametrize("case", ["time of the epoch", "two counters"])
def test_logs_of_several_clocks_or_counters_are_refused(tmp_path: Path, case: str) -> None:
    log, when = tmp_path / "log.jsonl", 0.0
    with log.open("w") as file:
        for step in range(10, 1200, 10):
            when += 0.1
            time = when % 2 if case == "time of the epoch" else BEGIN + when
            file.write(json.dumps({"step": step, "time": time}) + "\n")
            if case == "two counters" and step % 30 == 0:
                file.write(json.dumps({"step": 8 * step, "time": time + 0.01}) + "\n")
    os.utime(log, (BEGIN + when, BEGIN + when))
    with pytest.raises(UserError, match=r"does not increase with `step`.*Use one clock and one counter of steps"):
        logs.logged(log, logs.Start(BEGIN), BEGIN + when)


def test_a_tag_of_the_training_is_chosen(tmp_path: Path) -> None:
    """Tags of validations with more points are not chosen, nor are tags of several folders merged."""
    for folder, tag, count in (
        *((".", "train_loss", 20), (".", "val_loss_step", 90), (".", "LossVal", 90), ("exp/loss_val", "loss", 80)),
        *(("a", "loss", 15), ("b", "loss", 15)),
    ):
        with SummaryWriter(str(tmp_path / folder)) as board:
            for number in range(count):
                board.add_scalar(tag, 1.0, 10 * number, walltime=BEGIN + number / 10 + 0.05 * (folder == "a"))
    (points,) = logs.logged(tmp_path, logs.Start(BEGIN), BEGIN + 60)
    assert points == [(pytest.approx(BEGIN + number / 10), 10 * number) for number in range(20)]
    (points,) = logs.logged(tmp_path / "exp", logs.Start(BEGIN), BEGIN + 60)
    assert len(points) == 80, "a validation's tag counts if there is no other"


def test_a_tag_of_epochs_does_not_count_steps(tmp_path: Path) -> None:
    """Keras logs `epoch_loss` at step 0, 1, 2; Lightning logs `loss_epoch` at the last step of each epoch."""
    for folder, tag, numbers in (
        *(("keras", "epoch_loss", range(9)), ("both", "epoch_loss", range(99)), ("both", "batch_loss", range(50))),
        ("lightning", "loss_epoch", range(99, 1000, 100)),
    ):
        with SummaryWriter(str(tmp_path / folder)) as board:
            for number, step in enumerate(numbers):
                board.add_scalar(tag, 1.0, step, walltime=BEGIN + number)
    with pytest.raises(UserError, match=r"the tag epoch_loss counts epochs, not steps.*update_freq=10"):
        logs.logged(tmp_path / "keras", logs.Start(BEGIN), BEGIN + 60)
    for folder, count in (("both", 50), ("lightning", 10)):
        (points,) = logs.logged(tmp_path / folder, logs.Start(BEGIN), BEGIN + 120)
        assert len(points) == count


def logged_run(folder: Path, case: str) -> tuple[float, int | None]:
    """Write steps of two batches, and a log of them; return the rate of the training, and the stated samples.

    A step takes 0.2 s. In the case `two optimisers`, a second optimiser steps twice, so the seen steps are uncertain.
    """
    clock, points = Clock(folder), list[tuple[float, int]]()
    for number in range(1, 201):
        clock.batch(0.02)
        clock.now += 0.06
        clock.batch(0.02)
        clock.step(0.1)
        if case == "two optimisers":
            for _ in range(2):
                clock.optimizer = 1
                clock.step(0.0001)
            clock.optimizer = 0
        if "validations" in case and number % 5 == 0:
            clock.iterator = number
            for _ in range(2):
                clock.batch(0.0, 1000)
                clock.now += 0.03 if case == "short validations" else 0.25
            clock.iterator = 0
        if case == "evaluations" and number % 5 == 0:
            clock.now += 0.5
            clock.note(f"v {clock.now - 0.5:.6f} {clock.now:.6f} 0")
        if number % 5 == 0:
            factor = {"micro-batches": 2, "stated micro-batches": 2}.get(case, 1)
            points.append((1.7e9 + clock.now - 1000, number * factor))
    lines = (json.dumps({"step": step, "time": when}) for when, step in points)
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n")
    return 80.0, {"steps": None, "stated micro-batches": 8}.get(case, 16)


@pytest.mark.parametrize(
    ("case", "refused"),
    [
        ("plain", False),
        ("steps", False),
        ("evaluations", False),
        ("validations", True),
        ("short validations", True),
        ("micro-batches", True),
        ("stated micro-batches", False),
        ("two optimisers", False),
    ],
)
def test_seen_steps_decide_on_the_rate_of_a_log(tmp_path: Path, case: str, refused: bool) -> None:
    """Validations between logged steps, and micro-batches that count as steps, do not change the rate silently."""
    rate, size = logged_run(tmp_path, case)
    processes, log = steps.read(tmp_path)[1], tmp_path / "log.jsonl"
    reading = running.Reading(size, log=log, log_start=logs.Start(1.7e9), log_first=True)
    run = replace(outcome([]), seconds=200.0)
    if refused:
        with pytest.raises(
            UserError, match=r"logged steps give (53.3|75.5|160) samples/s, but the program made 80.0 samples"
        ):
            running._pace_by("log", reading, run, tmp_path, processes, ())
        found, *_ = running._pace_by("seen", reading, run, tmp_path, processes, ())
    else:
        found, *_ = running._pace_by("log", reading, run, tmp_path, processes, ())
    expected = rate if size else rate / 16
    assert (found.rates == pytest.approx([expected] * len(found.rates), rel=0.02), found.samples) == (True, bool(size))


def test_event_files_of_other_programs_do_not_count(tmp_path: Path) -> None:
    """Another experiment in the same folder began before the run, or is not a process of the run."""
    for folder, count in (("old", 90), ("other", 80), ("own", 20)):
        with SummaryWriter(str(tmp_path / folder)) as board:
            for number in range(count):
                board.add_scalar("loss", float(count), number, walltime=BEGIN + number / 10)
        (file,) = (tmp_path / folder).iterdir()
        begun, pid = (BEGIN - 60, 1) if folder == "old" else (BEGIN + 2, 2 if folder == "other" else 3)
        file.rename(file.with_name(f"events.out.tfevents.{begun:.0f}.host.{pid}.0"))
    start = logs.Start(BEGIN)
    for own, expected in ((["host.3", "host.4"], 20), ([], 80), (["host.4"], 80)):
        (points,) = logs.logged(tmp_path, start, BEGIN + 60, own)
        assert len(points) == expected
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps/python.host.3").touch()
    run, reading = outcome([]), running.Reading(log=tmp_path, log_start=start)
    found, *_ = running._pace_by("log", reading, run, tmp_path / "steps", [], ())
    assert found.end == pytest.approx(BEGIN + 1.9)
    values = logs.values(tmp_path / "old", {"loss": "loss/train"}, start, (), BEGIN + 60)
    assert values == {}


def test_the_hook_names_its_process(tmp_path: Path) -> None:
    environment = {**os.environ, **running.watched(tmp_path)}
    program = subprocess.Popen([sys.executable, "-c", ""], env=environment)
    assert program.wait() == 0
    assert steps.processes(tmp_path, ("python",)) == [f"{os.uname().nodename}.{program.pid}"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("avg (", "not a regular expression"), ("avg", "one group for the number"), (r"(\d)(\d)", "one group")],
)
def test_a_pattern_has_one_number(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        steps.pattern(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1.2k", ("", 1200)),
        ("3.4M samples/s", ("", 3.4e6)),
        ("1.2 ksamples/s", ("", 1200)),
        ("1,234.5", ("", 1234.5)),
        ("1.234,5", ("", 1234.5)),
        ("1,234", ("", 1234)),
        ("12,5", ("", 12.5)),
        ("0,125", ("", 0.125)),
        ("1'234'567.5", ("", 1234567.5)),
        ("123.4,", ("", 123.4)),
        ("\x1b[1;31m1.5k\x1b[0m samples/s", ("", 1500)),
        ("12.5it/s", (PER_STEP, 12.5)),
        ("12.5 steps/s", (PER_STEP, 12.5)),
        ("2.5s/it", (PER_STEP, 0.4)),
        ("40 ms/step", (PER_STEP, 25)),
        ("300 kg", ("", 300)),
        *((text, None) for text in ("nan", "inf", "-3", "0", "1e300", "word", "0x10", "1.2.3", "", "12q")),
    ],
)
@pytest.mark.parametrize("pattern", [r"rate (\S+)", r"rate ([\d.,'eE+-]+)"])
def test_a_printed_rate_is_read_with_suffix_and_unit(
    text: str, expected: tuple[str, float] | None, pattern: str
) -> None:
    match = re.search(pattern, plain(f"rate {text}"))
    if expected or pattern == r"rate (\S+)":
        found = match and rate_of(match)
        assert (found and (found[0], pytest.approx(found[1]))) == expected


#: Pattern, a line that a program prints, and (unit, rate); None if the number is not a rate.
PRINTED = [
    (r"ms/batch (\S+)", "| lr 0.000249 | ms/batch 619.56 | loss 7.42", (PER_STEP, 1 / 0.61956)),
    (r"sec: (\S+)", "INFO:tensorflow:global_step/sec: 12.2695", (PER_STEP, 12.2695)),
    (r"\(ms\): (\S+)", "iteration 10/ 100 | elapsed time per iteration (ms): 101.0 | loss: 1", (PER_STEP, 1 / 0.101)),
    (r"steps_per_second': (\S+)", "{'loss': 0.5, 'train_steps_per_second': '7.04'}", (PER_STEP, 7.04)),
    (r"samples_per_second': '(\S+)'", "{'train_samples_per_second': '56.3', 'x': 1}", ("", 56.3)),
    (r'steps_per_second":([\d.]+)', '{"loss":0.5,"train_steps_per_second":7.04}', (PER_STEP, 7.04)),
    (r"sec per step (\S+)", "sec per step 0.5", (PER_STEP, 2)),
    (r"s/it\D*(\S+)", "s/it (avg) = 0.5", (PER_STEP, 2)),
    (r"ms/batch \| (\S+)", "| ms/batch | 500 |", (PER_STEP, 2)),
    (r"time_ms=(\S+)", "loss=2.0 step_time_ms=101.0", (PER_STEP, 1 / 0.101)),
    (r"images/sec: (\S+)", "images/sec: 7.5 +/- 0.1", ("", 7.5)),
    (r"ms/sample (\S+)", "ms/sample 5", ("", 200)),
    (r"\((\S+) msec", "step 5 (101.0 msec/step; 3 s)", (PER_STEP, 1 / 0.101)),
    (r"(\S+) secs", "0.5 secs/iter", (PER_STEP, 2)),
    (r"(\S+) usec", "500 usec/it", (PER_STEP, 2000)),
    (r"(\S+) milli", "500 milliseconds per step", (PER_STEP, 2)),
    (r"rate (\S+)", "rate 120 it/min", (PER_STEP, 2)),
    (r"rate (\S+)", "rate 120 samples/min", ("", 2)),
    (r"(\S+) ms/sample", "5 ms/sample", ("", 200)),
    (r"Speed: (\S+)", "Speed: 84.05img/s", ("", 84.05)),
    # A letter after a space is a suffix only before a unit or the end; it may begin the next label.
    *(
        (r"speed: (\S+)", f"speed: 98.5{text}", ("", pytest.approx(rate)))
        for text, rate in (
            *((" G=3", 98.5), (" G: 3", 98.5), (" G_L1: 30", 98.5), (" M 3", 98.5), (",M=3", 98.5), (" kimg 3", 98.5)),
            *((" K it/s: 3", 98.5), (" M it/s 3", 98.5), ("k", 98.5e3), (" k", 98.5e3), ("k, G 3", 98.5e3)),
            *((" ksamples/s", 98.5e3), (" M img/s", 98.5e6), (" k/s", 98.5e3)),
        )
    ),
    (r"kimg/s: (\S+)", "kimg/s: 1.2", ("", 1200)),
    # The suffix m may be million or milli, and other factors are unknown.
    *(
        (r"speed:? ([\d.]+)", text, None)
        for text in (
            *(
                "speed 1.2m samples/s",
                "speed 1.2msamples/s",
                "speed 1.2 m samples/s",
                "speed: 1.2m",
                "speed 1.2B img/s",
            ),
            *("speed 1.2 million samples/s", "speed 1.2 thousand it/s", "speed 1.2mil. samples/s", "speed 1.2µ it/s"),
        )
    ),
    (r"per second: ([\d.]+)", "samples per second: 1.2m", None),
    (r"per second: ([\d.]+)", "samples per second: 84imgs", ("", 84)),
    (r"speed ([\d.]+)", "speed 84.05samples/s", ("", 84.05)),
    (r"speed ([\d.]+)", "speed 101.0ms/step", (PER_STEP, 1 / 0.101)),
    # Short names, and names without a separator.
    *(
        (rf"{label}=(\S+)", f"ppl=240.1, {label}=48.3, lr=0.1", (expected, 48.3) if expected else None)
        for label, expected in (
            *(("ups", PER_STEP), ("wps", ""), ("kwps", ""), ("wpb", ""), ("fps", ""), ("sps", ""), ("ips", "")),
            *(("StepsPerSec", PER_STEP), ("TokensPerSec", ""), ("AvgTokensPerSecond", ""), ("words_per_second", "")),
        )
    ),
    (r"Sec=([\d.]+)", "RunningAvgSamplesPerSec=48.3, MemAllocated=1", ("", 48.3)),
    *((rf"(\S+) {unit}", f"| 48.3 {unit}", None) for unit in ("wps", "words/s", "frames/s", "ktok/s", "k tokens/s")),
    *((rf"(\S+) {unit}", f"| 48.3 {unit}", None) for unit in ("subtokens/s", "megapixels/s", "voxels/s", "atoms/s")),
    *((rf"(\S+) {unit}", f"| 48.3 {unit}", None) for unit in ("nodes/s", "edges/s", "transitions/s", "hours/s")),
    *((rf"(\S+) {unit}", f"| 48.3 {unit}", None) for unit in ("timesteps/s", "env_steps/s", "env steps/s")),
    (r"steps/s: (\S+)", "environment steps/s: 1234", None),
    *((rf"(\S+) {unit}", f"| 48.3 {unit}", ("", 48.3)) for unit in ("patches/s", "clips/s", "graphs/s")),
    (r"(\S+) ups", "| 48.3 ups", (PER_STEP, 48.3)),
    (r"speed (\S+)", "speed 84.05 ups 48.3 wps 19300", ("", 84.05)),
    (r"speed (\S+)", "speed 48.3 source words/s", None),
    (r"speed (\S+)", "speed 84.05 val it/s 3", ("", 84.05)),
    (r"; (\S+)/\d", "; 12345/12345 tok/s; 60 sec", None),
    (r"(\S+) \(", "12.1 (11.9) it/s", (PER_STEP, 12.1)),
    (r"(\S+) \(", "84.05 (48.7 s)", ("", 84.05)),
    # A group must match the complete number.
    (r"([\d ]+) samples/s", "speed: 3 072 samples/s", ("", 3072)),
    (r"([\d ,]+) samples/s", "speed: 1 003 072,5 samples/s", ("", 1003072.5)),
    (r"speed: (\S+)", "speed: 3 072 samples/s", None),
    (r"(\d+) samples/s", "speed: 3 572 samples/s", None),
    (r"([\d.]+) samples/s", "speed: 3,572.5 samples/s", None),
    (r".*([\d.]+) samples/s", "speed: 84.5 samples/s", None),
    (r"(\d+)it/s", "8.13it/s", None),
    (r"speed: (\d+)", "speed: 8,130", None),
    (r"speed: ([\d.]+)", "speed: 1.2e3", None),
    (r"speed: (\d+)", "speed: 84.05", ("", 84)),
    (r"([\d.]+) img/s", "step 100 250.5 img/s", ("", 250.5)),
    (r"([\d.]+) img/s", "10:00:00,123 250.5 img/s", ("", 250.5)),
    (r"^\d+,([\d.]+)", "12,250.5,0.3", ("", 250.5)),
    (r"rate (\S+)", "rate 50 %", None),
    *((r"([\d.]+) samples/s", f"speed {text} samples/s", None) for text in ("1.2e+06", "5.1e2", "1e-1", "1.2e−3")),
    *((r"([\d.]+) samples/s", f"speed {text} samples/s", None) for text in ("1.2D+06", "0x10", "0x1.8p3", "1.2×10^6")),
    *((r".*?([\d.]+) samples/s", f"{text} samples/s", None) for text in ("1_200", "1'200", "1\u2009200", "1,200")),
    *((r"speed ([\d.]+)", f"speed {text} samples/s", None) for text in ("1.2D+06", "1.2e−3", "0x10", "1.2×10^6")),
    (r"speed ([\d.e+]+)", "speed 1.2e+06 samples/s", ("", 1.2e6)),
    (r"([\d:]+)/it", "3/10 [00:51<01:02,  1:31/it]", None),
    # Refused: rates of one device, and of micro-batches.
    *(
        (r"([\d.]+) im", f"step 3: 120.5 im{text}", None)
        for text in (
            "ages/s/gpu on 8 GPUs (total 961 images/s)",
            "g/s/device",
            "g/sec per GPU",
            "g/s (per rank)",
            "g/s/chip",
        )
    ),
    (r"([\d.]+)/s/gpu", "Batch (t): 0.123, 520.3/s, 65.0/s/gpu", None),
    (r", ([\d.]+)/s,", "Batch (t): 0.123, 520.3/s, 65.0/s/gpu", ("", 520.3)),
    *(
        (r"([\d.]+)$", f"{text} 120.5", None)
        for text in ("samples_per_sec_per_gpu:", "Img/sec per GPU:", "SamplesPerSecPerDevice")
    ),
    (r"total ([\d.]+)", "step 3: 120.5 images/s/gpu on 8 GPUs (total 961 images/s)", ("", 961)),
    (r"([\d.]+) im", "on 8 GPUs: 120.5 img/s, max. memory per GPU 3 GB", ("", 120.5)),
    *(
        (r"([\d.]+) mic", f"12 {text}/s", None)
        for text in ("micro-batches", "microbatch", "micro_steps", "micro batches")
    ),
    (r"per second: (\S+)", "micro-batches per second: 12", None),
    # A label may belong to the number after it, and a unit to the number before it.
    (r"it/s (\S+)", "it/s 12.5 ms/step 80", (PER_STEP, 12.5)),
    (r"avg (\S+)", "Epoch 1: 2.5 s/it avg 84.05", ("", 84.05)),
    (r"avg (\S+)", "avg 84.05 min 80 max 90", ("", 84.05)),
    (r"avg (\S+) samples/sec", "Time taken for epoch 2 is 48.7 sec, avg 84.055 samples/sec", ("", 84.055)),
    # A time gives a rate only if it has a unit and is the time of a single step.
    (r"time (\S+)", "step time 101.00 ms", (PER_STEP, 1 / 0.101)),
    (r"time (\S+)ms", "iter 10: loss 2.1234, time 101.00ms, mfu 3.21%", None),
    (r"time (\S+),", "iter 10: loss 2.1234, time 101.00ms, mfu 3.21%", None),
    (r"time: (\S+)", "lr: 1e-3 eta: 1:00 time: 0.2514 data_time: 0.01", None),
    (r"took (\S+)", "100 steps took 5.3 s", None),
    (r"iters: (\S+)", "sec per 10 iters: 5", None),
    (r"(\S+) s/epoch", "5 s/epoch", None),
    (r"GB/s (\S+)", "GB/s 5", None),
    (r"rate (\S+)", "rate 50%", None),
    (r"([\d.]+) tok/s", "iter 3: 1234.5 tok/s", None),
    (r"second=(\S+)", "train_tokens_per_second=1234.5", None),
    (r"gpu (\S+)", "tokens/sec/gpu 1234.5", None),
    (r"tps: (\S+)", "step 3 loss: 2 tps: 7,234 tflops: 3.5 mfu: 4%", None),
    (r"tflops: (\S+)", "step 3 loss: 2 tps: 7,234 tflops: 3.5 mfu: 4%", None),
    *(
        (rf"{re.escape(label)}\D*(\S+)", f"{label}: 0.5", None)
        for label in (
            *("time per step", "time/step", "time_per_step", "batch time avg", "step_time_avg", "step_time mean"),
            *("iters/epoch", "samples per epoch", "images per batch", "batches_per_epoch", "latency p99"),
        )
    ),
    *((rf"{re.escape(label)}\D*(\S+)", f"{label}: 0.5", ("", 0.5)) for label in ("real-time rate", "Timed throughput")),
]


@pytest.mark.parametrize(("pattern", "line", "expected"), PRINTED)
def test_a_rates_unit_is_before_or_after_it(pattern: str, line: str, expected: tuple[str, float] | None) -> None:
    match = re.search(pattern, line)
    found = match and rate_of(match)
    assert (found and (found[0], pytest.approx(found[1]))) == expected


@pytest.mark.parametrize(
    ("pattern", "line", "expected"),
    [
        (r"G_GAN: (\S+)", "D: 0.5 G_GAN: 1.2 G_L1: 30.1", 1.2),
        (r"loss (\S+)", "loss 0.52 K 5", 0.52),
        (r"D (\S+)", "val D 0.52 G 1.30", 0.52),
        (r"loss=(\S+)", "loss=0.52,M=3", 0.52),
        (r"loss=([\d.]+)", "loss=0.52M=3", 0.52),
        (r"loss ([\d.]+)", "loss 0.5 kimg 4", 0.5),
        (r"loss (\S+)", "loss 1.2k, M 3", 1200.0),
        (r"loss (\S+)", "loss 1.2M", 1.2e6),
        (r"loss (\S+)", "loss 5.", 5.0),
        (r"loss (.*)", "loss 1.e-3 K", 1e-3),
        (r"loss (\S+)", "loss 0.52/0.61", 0.52),
        (r"loss (\d\.\d\d)", "loss 2.1999", 2.19),
        (r"loss\D+([\d.]+)", "loss: -3.2", None),
        (r"loss\D+([\d.]+)", "loss −3.2", None),
        (r"loss (\S+)", "loss -nan", math.nan),
        (r"loss ([\d.]+)", "loss 1.2e-3", None),
        (r"acc (\S+)", "acc 95 %", 0.95),
    ],
)
def test_a_printed_loss_is_the_complete_number(pattern: str, line: str, expected: float | None) -> None:
    match = re.search(pattern, line)
    assert match and value_of(match) == (expected and pytest.approx(expected, nan_ok=True))


def test_texts_without_a_complete_number_are_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = "for loss in (0.5, -3.2, -3.1): print('loss:', loss)"
    ended = running.run_command(
        [sys.executable, "-c", program], tmp_path, None, losses={"loss/valid": re.compile(r"loss\D+([\d.]+)")}
    )
    assert [value for _, value in ended.losses["loss/valid"]] == [0.5]
    warned = capfd.readouterr().err
    assert (
        "matched 2 printed texts without a number, which dlscale skipped. The first is `loss: -3.2`. The group"
        in warned
    )


#: Label of a line, with {} for the rank → whether the label certainly names a rank; None: no label.
LABELS = {"{}: ": False, "[{}] ": False, "[rank{}]: ": True, "[1,{}]<stdout>:": True, "INFO [rank {}] ": True, "": None}


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("loader", ["known", "unknown", "none"])
@pytest.mark.parametrize("own", [True, False])
def test_rates_of_single_ranks_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], label: str, loader: str, own: bool
) -> None:
    """Four ranks print their own rate (80 samples/s) or the run's rate; known batches decide whether 80 is refused.

    Without known batches, labels of ranks, or several processes, cause an error or a warning.
    """
    for rank in range(4 if loader != "none" else 0):
        Clock(tmp_path, rank).epoch(50, wait=0.0, seconds=0.1) if loader == "known" else [
            Clock(tmp_path, rank).step(0.1) for _ in range(50)
        ]
    finder = Finder({"": re.compile(r"(\S+) samples/s")})
    lines = [f"{label.format(rank)}step 3 {80.5 if own else 322.0} samples/s".encode() for rank in range(4)]
    for number in range(4):
        finder.look(1.7e9 + number, lines)
    finder.close()
    run = replace(outcome(finder.found[""]), ranks=tuple(finder.ranks()))
    assert len(run.ranks) == (4 if label else 0)
    processes, refused = steps.read(tmp_path)[1], False
    try:
        found, *_ = running._pace_by("rate", running.Reading(rate="x"), run, tmp_path, processes, ())
        assert found.rates == pytest.approx([80.5 if own else 322.0] * len(found.rates))
    except UserError as error:
        refused = True
        assert "each process seems to print its own rate. Let one process print the rate" in str(error)
    warned = "counts as the rate of all processes" in capfd.readouterr().err
    if loader == "known":
        assert (refused, warned) == (own, False)
    else:
        sure = bool(label) and (LABELS[label] or loader == "unknown")
        assert (refused, warned) == (sure, not sure and (bool(label) or loader == "unknown"))


def printed_by(lines: Iterable[str], pattern: str) -> running.Outcome:
    """Return the outcome of a program that prints a line per second."""
    finder = Finder({"": re.compile(pattern)})
    for number, line in enumerate(lines):
        finder.look(1.7e9 + number, [line.encode()])
    finder.close()
    kind = "" if finder.found[""] else PER_STEP
    ambiguous = "" if "clear" in finder.texts else finder.texts.get("ambiguous", "")
    found = replace(outcome(finder.found[kind]), in_steps=kind == PER_STEP, bars=finder.bars[kind])
    return replace(found, ambiguous=ambiguous)


@pytest.mark.parametrize("names", [("Epoch {}: ", "Validation: "), ("", "")])
@pytest.mark.parametrize(("speed", "refused"), [(21.5, False), (200.0, True)])
def test_rates_of_several_bars_are_not_mixed(
    tmp_path: Path, names: tuple[str, str], speed: float, refused: bool
) -> None:
    """Bars of training (20 it/s) and validation alternate: a pattern for both is refused if their speeds differ."""
    lines = list[str]()
    for epoch in range(6):
        for name, count, rate in ((names[0].format(epoch), 60, 20.0 + epoch / 10), (names[1], 200, speed)):
            lines += [f"{name}{n}%|## | {n}/{count} [00:01<00:02, {rate:.2f}it/s, loss=1]" for n in (10, 30, 50)]
    run, read = printed_by(lines, r"([\d.]+)it/s"), running.Reading(rate=r"([\d.]+)it/s")
    if refused:
        with pytest.raises(UserError, match=r"matches lines of different speeds \(.* 20.2, .* 200\), such as training"):
            running._pace_by("rate", read, run, tmp_path, [], ())
    else:
        assert running._pace_by("rate", read, run, tmp_path, [], ())[0].rates


@pytest.mark.parametrize("pattern", [r"([\d.]+)it/s", r"([\d.]+)s/it"])
@pytest.mark.parametrize("slow_first", [True, False])
def test_inverted_rates_of_a_bar_count(tmp_path: Path, pattern: str, slow_first: bool) -> None:
    """tqdm prints 0.625 it/s as `1.60s/it`: both forms of a bar count, but not the outer bar of epochs."""
    bar, lines = "Train: {n}%|## | {n}/90 [00:01<00:02, {rate}, loss=1]", list[str]()
    for number in range(40):
        rate = "1.60s/it" if (number // 5) % 2 == slow_first else "1.25it/s"
        lines += [bar.format(n=number, rate=rate)]
        lines += ["Epochs: 3%|## | 1/30 [00:50<07:30, 50.10s/it]"] * (number % 20 == 19 and "it/s" in pattern)
    found = printed_by(lines, pattern)
    assert [rate for _, rate in sorted(found.printed)] == pytest.approx(
        [0.625 if "1.60" in line else 1.25 for line in lines if "Epochs" not in line]
    )
    assert found.in_steps and len(found.bars) == 1


@pytest.mark.parametrize(
    ("text", "agrees"),
    [("10.1 it/s", True), ("82 samples/s", True), ("2.5 it/s", False), ("40 it/s", False), ("82,125 samples/s", False)],
)
def test_seen_steps_decide_on_printed_rates(tmp_path: Path, text: str, agrees: bool) -> None:
    """A training makes 10 steps/s of 8 samples: printed rates of epochs, of micro-batches or of 82,125 are refused."""
    Clock(tmp_path).epoch(100, wait=0.01, seconds=0.09)
    processes = steps.read(tmp_path)[1]
    run, read = printed_by([f"rate {text}"] * 9, r"rate ([\d.,]+)"), running.Reading(rate=r"rate ([\d.,]+)")
    if agrees:
        assert running._pace_by("rate", read, run, tmp_path, processes, ())[0].rates
    else:
        with pytest.raises(UserError, match=r"the program printed .*, but made (10.0 steps|80.0 samples)/s"):
            running._pace_by("rate", read, run, tmp_path, processes, ())


@pytest.mark.parametrize(
    ("rates", "warned"),
    [
        (["1.234", "1.240", "998"], "decimals"),
        (["1,234", "12,345", "998"], "thousands"),
        (["1.234", "1.24"], ""),
        (["1,234.5"], ""),
        (["0.234"], ""),
        (["1234"], ""),
    ],
)
def test_an_ambiguous_mark_causes_a_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], rates: list[str], warned: str
) -> None:
    run = printed_by([f"speed {rate} samples/s" for rate in rates * 4], r"speed ([\d.,]+)")
    assert running._pace_by("rate", running.Reading(rate="x"), run, tmp_path, [], ())[0].rates
    assert capfd.readouterr().err.count(f"the mark in `{rates[0]}` counts as a separator of {warned}") == bool(warned)


def test_labels_of_epochs_are_not_ranks() -> None:
    finder = Finder({"": re.compile(r"(\S+) samples/s")})
    for epoch in range(3):
        lines = [f"{step}: epoch {epoch} 84.5 samples/s".encode() for step in range(0, 60, 20)]
        finder.look(1.7e9 + epoch, lines)
    finder.close()
    assert len(finder.found[""]) == 9 and finder.ranks() == []


def test_rates_in_steps_are_samples_with_a_batch_size() -> None:
    printed = [(1.0 + number, 10.0) for number in range(8)]
    plain, named = (steps.pace_of_rates(printed, 0.0, size, steps=True) for size in (None, 32))
    assert plain and not plain.samples and plain.rates == [10.0] * 7
    assert named and named.samples and named.rates == [320.0] * 7


@pytest.mark.parametrize("pattern", [r"(\S+) samples/s", r"((?:a|aa)+)b"])
def test_a_slow_pattern_stops_nothing(pattern: str, tmp_path: Path) -> None:
    """Long lines are searched quickly, and a pattern with exponential run time is abandoned."""
    finder, begin = Finder({"": re.compile(pattern)}, tmp_path / "record"), time.perf_counter()
    finder.look(1.0, [b"x" * 60_000] * 20 + [b"a" * 60] * 10 + [b"3 samples/s"] * 5)
    assert time.perf_counter() - begin < 1
    finder.close()
    assert time.perf_counter() - begin < 60
    if pattern.startswith(r"(\S"):
        assert finder.found[""] == [(1.0, 3.0)] * 5 and not finder.slow and not finder.missed
        assert len((tmp_path / "record").read_text().splitlines()) == 5
    else:
        assert finder.slow[""] == 3 and not finder.found[""]


def test_a_batch_confirms_the_loaders_batch_size() -> None:
    """The loader's batch size counts only if the batch, or an array or list in it, has this length."""

    class Array:
        shape = (5, 2)

    batches = [Array(), [Array(), 3], {"x": Array()}, ((1,) * 5, [2]), [Array()] * 3, [], "texts", 5, {}, None]
    assert [timed.samples_of(batch, 5) for batch in batches] == [5, 5, 5, 5, 5, 0, 0, 0, 0, 0]
    assert {timed.samples_of(batch, 4) for batch in batches} == {0}


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.ones(6, 4), 6),
        ([torch.ones(6, 4), torch.ones(6)], 6),
        ({"x": torch.ones(6, 4), "name": ["a"] * 6, "epoch": 3}, 6),
        ((([1],) * 6, ([2],) * 6), 6),
        (torch.ones(8, 4), 0),
        (torch.ones(6, 8), 0),  # time-major
        ([torch.ones(6, 4), torch.ones(2, 90)], 0),  # a graph
        *((None, 0), ("texts", 0), (5, 0), ([], 0)),
    ],
)
def test_a_short_batch_may_have_as_many_samples_as_its_arrays(batch: object, samples: int) -> None:
    assert timed.short_of(batch, 8) == -samples


@pytest.mark.parametrize(("sizes", "mean"), [([8, 8, 8, 8, 8, -2], 7.0), ([8, 8, -2], None), ([-1, -1, -1], None)])
def test_short_batches_have_samples_if_most_batches_have_the_loaders_size(
    tmp_path: Path, sizes: list[int], mean: float | None
) -> None:
    """An epoch's short last batch counts with its own length if at least 80 % of the batches have the loader's size."""
    clock = Clock(tmp_path)
    for _ in range(40):
        clock.iterator += 1
        for size in sizes:
            clock.batch(0.02, size)
            clock.step(0.08)
    found = steps.pace(steps.read(tmp_path)[1])
    assert found and found.samples == (mean is not None)
    assert found.rates == pytest.approx([10 * (mean or 1)] * len(found.rates), rel=0.03)
    assert found.batch_size == (mean and round(mean))


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.ones(1, 1, 8, 8), 1),
        ({"x": torch.ones(1), "name": ["a"]}, 1),
        (torch.ones(1, 32, 64), 0),
        ([torch.ones(1, 32, 64), torch.ones(1, 32)], 0),
        ({"x": torch.ones(1, 32), "n": torch.ones(1)}, 0),
        ([torch.ones(32, 64)], 0),
        ({"x": [torch.ones(32, 64)]}, 0),
    ],
)
def test_a_batch_of_one_item_may_have_several_samples(batch: object, samples: int) -> None:
    """A loader with `batch_size=1` adds an axis of length 1 to items that may be batches themselves."""
    assert timed.samples_of(batch, 1) == samples


@pytest.mark.parametrize(
    ("samples", "number"),
    [
        *((8, 8), (8.0, 8), (np.int64(8), 8), (torch.tensor(8), 8), (True, 0), (8.5, 0), (-5, 0), (0, 0), (None, 0)),
        *(("8", 0), (math.nan, 0), (math.inf, 0), (10**400, 0), (torch.ones(2), 0), ([8], 0)),
    ],
    ids=str,
)
def test_samples_are_a_positive_whole_number_or_unknown(samples: object, number: int) -> None:
    assert timed.sample_count(samples) == number


def test_without_a_measurement_batches_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(timed.FOLDER, raising=False)
    loader = range(3)
    assert timed.timed(loader) is loader


def test_a_timed_loader_is_a_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A timed loader can be iterated repeatedly and by two loops at once; it has a length, attributes and `next`."""
    log = writes(tmp_path, monkeypatch)
    monkeypatch.setattr(timed, "LOG", log)
    loader = timed.timed(torch.utils.data.DataLoader(range(6), batch_size=2))  # type: ignore[arg-type]
    assert [len([*loader]) for _ in range(3)] == [3, 3, 3] and len([*zip(loader, loader, strict=True)]) == 3
    assert len(loader) == 3 and loader.batch_size == 2 and not hasattr(loader, "nothing")
    again = timed.timed([[0, 1], [2, 3]])
    assert next(again) == [0, 1] and next(again) == [2, 3]
    assert next(timed.timed(iter([7]))) == 7 and copy.copy(loader).batch_size == 2
    assert [*timed.timed(number for number in range(2))] == [0, 1]


class OwnLoader(torch.utils.data.DataLoader[int]):
    """Loader that counts its deletions."""

    released = 0

    def __del__(self) -> None:
        OwnLoader.released += 1


def prepared(loader: Any) -> Any:
    """Copy a `DataLoader` with every second sample, as accelerate's `prepare` does in the first of two processes."""
    if not isinstance(loader, torch.utils.data.DataLoader):
        return loader
    return type(loader)(loader.dataset, batch_size=loader.batch_size, sampler=range(0, len(loader.dataset), 2))  # type: ignore[arg-type]


def test_libraries_treat_a_timed_loader_as_its_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A timed `DataLoader` has the class and attributes of its loader; only its own batches are recorded."""
    log = writes(tmp_path, monkeypatch)
    loader = OwnLoader(range(8), batch_size=2)  # type: ignore[arg-type]
    alone = [batch.tolist() for batch in prepared(timed.timed(loader))]
    monkeypatch.setattr(timed, "LOG", log)
    measured = timed.timed(loader)
    assert isinstance(measured, OwnLoader) and not hasattr(measured, "__next__") and measured.sampler is loader.sampler
    assert [batch.tolist() for batch in prepared(measured)] == alone == [[0, 2], [4, 6]]
    measured.epoch = 3
    with pytest.raises(ValueError, match="batch_size"):
        measured.batch_size = 4
    assert vars(loader)["epoch"] == 3 and vars(pickle.loads(pickle.dumps(measured))).keys() == vars(loader).keys()
    other = copy.copy(measured)
    other.epoch, count = 4, len(log._notes)
    assert vars(loader)["epoch"] == 3 and len([*loader]) == 4 and len(log._notes) == count
    assert len([*other]) == 4 and len(log._notes) > count
    gc.collect()
    OwnLoader.released = 0
    del measured
    gc.collect()
    assert OwnLoader.released == 0 and len([*loader]) == 4


def a_hook(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load dlscale's `sitecustomize`, the hook that records steps, as in a measured program."""
    monkeypatch.setenv(timed.FOLDER, str(folder))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    spec = importlib.util.spec_from_file_location("hook", HOOK / "sitecustomize.py")
    assert spec and spec.loader
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    return hook


def test_steps_of_pytorch_1_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are seen without PyTorch 2's global optimiser hook. A step of a class that inherits `step` counts once."""

    class Optimizer:
        def __init__(self, rate: float) -> None:
            self.rate, self.made = rate, 0

        def step(self, closure: object = None) -> int:
            self.made += 1
            return self.made

    class Adam(Optimizer):
        pass

    a_hook(tmp_path, monkeypatch).Watcher()._optimizers(SimpleNamespace(Optimizer=Optimizer))
    for kind in (Optimizer, Adam):
        optimizer = kind(0.1)
        assert [optimizer.step() for _ in range(3)] == [1, 2, 3]
    with monkeypatch.context() as worker:
        worker.setattr(torch.utils.data._utils.worker, "_worker_info", object())
        optimizer.step()  # a step in a loader's worker does not count
    (file,) = tmp_path.glob("seen.*")
    time.sleep(timed.SECONDS)
    optimizer.step()  # this step also writes the steps noted before
    assert len(steps.Tail(file).process.steps) == 6, "consecutive steps of two optimisers must count as one"


# ---- programs ----------------------------------------------------------------------------------------

#: Training that prints the samples/s of each epoch by its own clock.
TRAIN = """
import sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
torch.set_num_threads(1)

class Slow(Dataset):
    def __len__(self): return 160
    def __getitem__(self, i): time.sleep(float(sys.argv[1])); return torch.randn(64), torch.randn(1)

loader, valid = DataLoader(Slow(), batch_size=8), DataLoader(Slow(), batch_size=40)
model = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(4):
    begin = time.perf_counter()
    for x, y in TIMED(loader):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    print(f"avg {160 / (time.perf_counter() - begin)} samples/sec", flush=True)
    with torch.no_grad():
        for x, y in valid: model(x)
"""


def program(folder: Path, text: str = TRAIN, wrapped: str = "") -> Path:
    """Write a program whose loader is wrapped by the function named `wrapped`, if any."""
    path = folder / "train.py"
    path.write_text(textwrap.dedent(text.replace("TIMED", wrapped)))
    return path


def measure(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run `dlscale measure` in a folder; return the completed process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "workflow_scripts"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dlscale", "measure", *map(str, words)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def found(folder: Path, name: str = "train") -> Throughput:
    return Throughput.read(folder / "results/plans" / PLAN / name / "throughput.json")


@pytest.mark.slow
def test_all_ways_agree_with_the_programs_own_clock(tmp_path: Path) -> None:
    """Steps seen in PyTorch, steps timed by an added line and printed rates agree; the output is unchanged."""
    path = program(tmp_path)
    seen = measure(tmp_path, "--", sys.executable, path, 0.004)
    printed = measure(tmp_path, "--rate", "nersc", "--", sys.executable, path, 0.004)
    program(tmp_path, "import dlscale\n" + TRAIN, "dlscale.timed")
    itself = measure(tmp_path, "--", sys.executable, path, 0.004)
    for each, way, name in ((seen, "seen", "train"), (printed, "rate", "train_2"), (itself, "timed", "train_3")):
        assert each.returncode == 0, each.stderr
        own = [float(line.split()[1]) for line in each.stdout.splitlines()]
        record = found(tmp_path, name)
        assert record.outside and record.full and (record.outside.way, len(own)) == (way, 4)
        assert record.full.mean == pytest.approx(sum(own[1:]) / 3, rel=0.1)
        assert f"{name}: " in each.stderr and "samples/s ±" in each.stderr and "results/plans" in each.stderr
    one = found(tmp_path)
    assert one.outside and one.outside.waiting and one.outside.waiting > 0.5 and one.batch_size == 8
    verdict = judge_run(read_run(tmp_path / "results/plans" / PLAN / "train"))
    assert verdict.bound and verdict.bound.what == "data loading"
    causes = {finding.cause for finding in verdict.findings}
    assert causes & {"storage", "neighbour"}, "the sleeping loader must look like slow storage or other programs' load"
    assert (tmp_path / "results/plans" / PLAN / "report.html").stat().st_size > 10_000


@pytest.mark.slow
def test_a_program_may_run_under_nsight_systems(tmp_path: Path, real_nsys: Path) -> None:
    """The documented command writes the reports of Nsight and dlscale, and prints the rate under Nsight."""
    path = program(tmp_path, TRAIN + "raise SystemExit(3)\n")
    words = ["--trace=nvtx,osrt", "--sample=none", "--cpuctxsw=none", "--output=mine"]  # these options need no GPU
    done = measure(tmp_path, "--", real_nsys, "profile", *words, sys.executable, path, 0.004)
    assert done.returncode == 3 and done.stdout.count("samples/sec") == 4, done.stderr
    assert "train: " in done.stderr and "ended with status 3" in done.stderr
    one = found(tmp_path)
    assert one.outside and one.outside.way == "seen" and (tmp_path / "mine.nsys-rep").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("raise SystemExit(3)", 3, "the program ended with status 3 after"),
        ("print('nothing')", 0, "no training step was seen"),
        ("import os; os.kill(os.getpid(), 9)", 137, "the program ended with status 137"),
    ],
)
def test_a_program_without_steps_gives_one_message_and_keeps_the_status(
    tmp_path: Path, code: str, status: int, message: str
) -> None:
    ended = measure(tmp_path, "--", sys.executable, "-c", code)
    assert ended.returncode == status and message in ended.stderr and "Traceback" not in ended.stderr
    assert not any((tmp_path / "results/plans" / PLAN).glob("*")), "no partial result may be left"


def test_secrets_of_a_command_are_not_written_to_files(tmp_path: Path) -> None:
    code = "import sys; assert sys.argv[2] == 's3cret1'; [print('avg', 100 + k, 'samples/sec') for k in range(9)]"
    words = [*("env", "API_KEY=s3cret2", sys.executable, "-c", code, "--token", "s3cret1", "--max-tokens", 4096)]
    url = "https://me:s3cret3@h.example/x?X-Amz-Signature=s3cret4&split=train"
    ended = measure(tmp_path, "--rate", "nersc", "--name", "quiet", "--", *words, url)
    assert ended.returncode == 0 and "s3cret" not in ended.stderr, ended.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if re.search(rb"s3cret[2-9]|token\W+s3cret1", path.read_bytes())] == []
    command = read_yaml(tmp_path / "results/plans" / PLAN / "quiet/config.yaml")["program"]["command"]
    assert command[1] == "API_KEY=***secret.API_KEY***" and command[-5:-1] == [
        "--token",
        "***secret.token***",
        "--max-tokens",
        "4096",
    ]
    assert (
        command[-1] == "https://***secret.login***@h.example/x?X-Amz-Signature=***secret.X-Amz-Signature***&split=train"
    )
    assert found(tmp_path, "quiet").outside.command == command


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    ended = measure(tmp_path, "--", "no-such-command")
    assert ended.returncode == 127 and ended.stderr.count("\n") == 1 and "no-such-command: " in ended.stderr


@pytest.mark.slow
def test_grandchildren_of_a_program_are_ended(tmp_path: Path) -> None:
    """A grandchild in its own session that ignores SIGTERM is also ended."""
    stubborn = (
        "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(99)"
    )
    code = f"""
        import subprocess, sys, time
        subprocess.Popen([sys.executable, '-c', {stubborn!r}], start_new_session=True)
        time.sleep(2)
    """
    ended = measure(tmp_path, "--", sys.executable, program(tmp_path, code))
    assert "left 1 process running" in ended.stderr
    assert not psutil.pid_exists(int(ended.stdout))


#: Program that leaves 30 orphans, which end at once, and a child in a new session. Program and child ignore SIGTERM.
STUBBORN = """
    import os, signal, sys, time
    signal.signal(15, signal.SIG_IGN)
    def state(pid):
        try:
            return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
        except OSError:  # other processes of the machine end meanwhile
            return []
    for _ in range(30):
        if os.fork() == 0:
            os._exit(0 if os.fork() else 0)
        os.wait()
    time.sleep(0.5)
    if os.fork() == 0:
        os.setsid()
    else:
        states = [state(pid) for pid in os.listdir("/proc") if pid.isdigit()]
        os.write(1, b"%d\\n" % sum(each[:2] == ["Z", str(os.getppid())] for each in states))
    os.write(1, b"%d\\n" % os.getpid())  # with PYTHONUNBUFFERED, print writes the line end separately
    time.sleep(1000)
"""


def test_a_killed_measurement_leaves_nothing_running(tmp_path: Path) -> None:
    """Processes that ignore SIGTERM also end. While the program runs, its orphans do not become zombies."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dlscale", "measure", "--", sys.executable, program(tmp_path, STUBBORN)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "workflow_scripts")},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    rows = sorted(int(process.stdout.readline()) for _ in range(3))
    every = psutil.Process(process.pid).children(recursive=True)
    assert rows[0] == 0 and {*rows[1:]} < {each.pid for each in every}
    process.kill()
    process.wait()
    until("all have ended", lambda: not any(each.is_running() for each in every))


def test_open_files_of_the_shell_are_the_programs(tmp_path: Path) -> None:
    path = program(tmp_path, "import os, sys; print(open(sys.argv[1]).read()); os.write(3, b'to descriptor 3')")
    command = shlex.join([sys.executable, "-m", "dlscale", "measure", "--", sys.executable, str(path)])
    shell = f"{command} <(echo lr=1) 3> out"
    told = subprocess.run(
        ["bash", "-c", shell], cwd=tmp_path, env=variables(), capture_output=True, text=True, timeout=120, check=False
    )
    assert told.stdout.split() == ["lr=1"] and told.returncode == 0, told.stderr
    assert (tmp_path / "out").read_text() == "to descriptor 3"


def test_a_pipe_that_does_not_wait_loses_no_output(tmp_path: Path) -> None:
    path = program(tmp_path, "for number in range(300): print('avg', number + 1, 'samples/s', '.' * 1000, flush=True)")
    read, write = os.pipe()
    os.set_blocking(write, False)
    command = [
        sys.executable,
        "-m",
        "dlscale",
        "measure",
        "--rate",
        r"avg ([\d.]+) samples/s",
        "--",
        sys.executable,
        path,
    ]
    with subprocess.Popen(command, cwd=tmp_path, env=variables(), stdout=write, stderr=subprocess.DEVNULL):
        os.close(write)
        time.sleep(5)  # until the pipe is full
        with open(read) as lines:
            text = lines.read()
    assert [int(number) for number in re.findall(r"avg (\d+) ", text)] == list(range(1, 301))


def test_signals_are_the_programs(tmp_path: Path) -> None:
    """The program can save its state on a signal, and the program's exit status is returned."""
    code = (
        "import signal, sys, time; signal.signal(15, lambda *a: sys.exit(9)); print('on', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "dlscale", "measure", "--", sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "workflow_scripts")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stdout.readline() == "on\n"
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 9 and "status 9" in told


#: Program that saves for two seconds after SIGTERM, and a process that runs this program and sends SIGTERM to itself.
SAVES = """
import signal, sys, time
signal.signal(15, lambda *a: (time.sleep(2), sys.exit(9)))
print("on", flush=True)
time.sleep(60)
"""
ASKS = """
import os, sys, threading
from pathlib import Path
from dlscale.extensions.programs.running import run_command
threading.Timer(3, os.kill, (os.getpid(), 15)).start()
grace = float(sys.argv[2]) or None
print(run_command([sys.executable, "-c", sys.argv[1]], Path(sys.argv[3]), None, grace=grace).status)
"""


@pytest.mark.parametrize(("grace", "status"), [(0, 9), (0.5, 128 + signal.SIGKILL)])
def test_only_plans_kill_a_program_that_saves_for_long(tmp_path: Path, grace: float, status: int) -> None:
    told = subprocess.run(
        [sys.executable, "-c", ASKS, SAVES, str(grace), tmp_path / "steps"],
        env=variables(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert told.stdout.split() == ["on", str(status)], told.stderr


# ---- programs of all kinds, and bad input ------------------------------------------------------------

#: Unusual training loops. For each loop, the program prints name, process ID and exit status of the child process.
LOOPS = """
import builtins, io, itertools, multiprocessing, os, queue, sys, threading, time, torch, warnings
warnings.simplefilter("ignore")
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
torch.set_num_threads(1)

class Rows(Dataset):
    def __init__(self, sample=lambda i: torch.randn(64)): self.sample = sample
    def __len__(self): return 480
    def __getitem__(self, i): return self.sample(i)

class Stream(IterableDataset):
    def __iter__(self): return iter(torch.randn(8, 64) for _ in range(60))

model = nn.Linear(64, 1)
adam, sgd = torch.optim.Adam(model.parameters()), torch.optim.SGD(model.parameters(), lr=1e-3)

def train(loader, *optimizers, every=1, x=None):
    for number, batch in enumerate(loader, 1):
        model(batch if x is None else x).square().mean().backward()
        for optimizer in optimizers if number % every == 0 else ():
            optimizer.step()
            optimizer.zero_grad()

def plain(): train(DataLoader(Rows(), batch_size=8), adam)
def accumulates(): train(DataLoader(Rows(), batch_size=8), adam, every=4)
def two_optimizers(): train(DataLoader(Rows(), batch_size=8), adam, sgd)
def no_loader(): train(range(60), adam, sgd, x=torch.randn(8, 64))
def texts(): train(DataLoader(Rows(lambda i: {"text": "a", "n": i}), batch_size=8), adam, x=torch.randn(8, 64))
def boxes():
    rows = Rows(lambda i: (torch.randn(3, 8 + i % 4, 8), {}))
    loader = DataLoader(rows, batch_size=8, collate_fn=lambda batch: tuple(zip(*batch)), num_workers=1)
    train(loader, adam, x=torch.randn(8, 64))
def stream(): train(DataLoader(Stream(), batch_size=None), adam)
def odd_rank():
    os.environ["RANK"] = "first"
    plain()
def closes_files():
    plain()
    os.closerange(3, 256)
    own = os.open(f"own.{os.getpid()}", os.O_CREAT | os.O_RDWR)
    plain()
    assert os.fstat(own).st_size == 0
def lbfgs():
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    for x in DataLoader(Rows(), batch_size=8):
        def closure():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss
        optimizer.step(closure)
def skips_steps():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10**6)
    for number, x in enumerate(DataLoader(Rows(), batch_size=8)):
        scaler.scale(model(x).square().mean() * (1e38 if number == 30 else 1)).backward()
        scaler.step(adam)
        scaler.update()
        adam.zero_grad()

def validates(evaluate):
    batches, net, number = iter(DataLoader(Rows(), batch_size=32)), nn.Sequential(model, nn.Dropout()), 0
    for x in DataLoader(Rows(), batch_size=8):
        net(x).square().mean().backward()
        adam.step()
        adam.zero_grad()
        number += 1
        if number % 5 == 0: evaluate(net, batches)
def validates_by_next():
    def evaluate(net, batches):
        net.eval()
        net(next(batches))
        net.train()
    validates(evaluate)
def validates_without_gradients():
    validates(torch.no_grad()(lambda net, batches: net(next(batches))))
def validates_by_inference():
    validates(torch.inference_mode()(lambda net, batches: net(next(batches))))
def evaluates_parts():
    class Own(nn.Sequential):
        def train(self, mode=True):
            super().train(mode)
            self[1].eval()
            return self
    net, teacher, script = Own(model, nn.Dropout()), nn.Linear(1, 1).eval(), torch.jit.script(nn.Linear(1, 1))
    for x in DataLoader(Rows(), batch_size=8):
        net.train()
        teacher.eval()
        net(x).square().mean().backward()
        adam.step()
        adam.zero_grad()
    assert script.eval().train() is script and not net[1].training and net.eval() is net and not model.training

class Flow(IterableDataset):
    def __init__(self, count=480): self.count = count
    def __iter__(self): return iter(torch.randn(self.count, 3, 4))

X = torch.randn(8, 64)
def flows(collate, count=480, epochs=1, size=8):
    for _ in range(epochs): train(DataLoader(Flow(count), batch_size=size, collate_fn=collate), adam, x=X)

def odd(**members): return lambda batch: type("Odd", (), members)()
def fails(*args): raise RuntimeError("not asked for")
def shape_that_is_a_word(): flows(odd(shape="circle"))
def shape_that_is_a_number(): flows(odd(shape=3))
def shape_of_words(): flows(odd(shape=("a", None)))
def shape_that_fails(): flows(odd(shape=property(fails)))
def values_that_take_more(): flows(odd(values=lambda self, which: fails()))
def attributes_that_fail(): flows(odd(__getattr__=fails, __getattribute__=fails))
def truth_and_length_that_fail(): flows(odd(__bool__=fails, __len__=fails, __iter__=fails, __eq__=fails))
def mapping_that_fails(): flows(lambda batch: type("Odd", (dict,), {"values": fails})())
def class_that_fails(): flows(odd(__class__=property(fails)))
def nested(): flows(torch.nested.nested_tensor)
def scalars(): flows(lambda batch: torch.tensor(1.0))
def images(): flows(list)
def labelled(): flows(lambda batch: tuple(zip(*[(each, 1) for each in batch])))
def rows_one_by_one(): train(DataLoader(Rows(lambda i: torch.randn(1, 64)), num_workers=1), adam)
def batches_as_items(): train(DataLoader(Stream()), adam)
def batches_in_rows(): train(DataLoader(Rows(lambda i: torch.randn(8, 64)), collate_fn=lambda rows: rows[0]), adam)
def pairs(): flows(lambda batch: {"x": torch.stack(batch), "y": 1})
def time_major(): flows(lambda batch: torch.stack(batch, 1))
def joined_graphs(): flows(lambda batch: (torch.cat(batch), torch.ones(2, 40)))
def packed(): flows(nn.utils.rnn.pack_sequence)
def drops_samples(): train(DataLoader(Rows(), batch_size=8, collate_fn=lambda rows: torch.stack(rows[::2])), adam)
def drops_pairs(): train(DataLoader(Rows(), 8, collate_fn=lambda rows: (torch.stack(rows[1:]), [1] * 7)), adam, x=X)
def rows_along_time(): train(DataLoader(Rows(), 8, collate_fn=lambda rows: torch.stack(rows, 1)), adam, x=X)
def joined_rows(): train(DataLoader(Rows(), 8, collate_fn=torch.cat), adam, x=X)
def sampler_of_batches():
    class Lists(Dataset):
        def __len__(self): return 480
        def __getitem__(self, rows): return torch.randn(len(rows), 64)
    train(DataLoader(Lists(), sampler=torch.utils.data.BatchSampler(range(480), 8, False)), adam, x=X)
def sampler_of_requests():
    class Chosen(Dataset):
        def __len__(self): return 480
        def __getitems__(self, request):
            return [torch.randn(64) for _ in (request["ids"] if isinstance(request, dict) else request[1])]
    requests = [{"ids": list(range(8)), "size": 24}, (24, list(range(8)))] * 30
    train(DataLoader(Chosen(), batch_sampler=requests), adam, x=X)
def sampler_of_iterators():
    class Iterators:
        def __iter__(self): return (iter(range(n, n + 8)) for n in range(0, 480, 8))
    for x in DataLoader(Rows(lambda i: torch.full((64,), float(i))), batch_sampler=Iterators()):
        assert len(x) == 8
        train([x], adam)
def last_is_smaller(): flows(torch.stack, 20, 20)
def last_of_many_is_smaller(): flows(torch.stack, 84, 5)
def last_of_six_is_smaller(): flows(torch.stack, 42, 10)
def one_batch_for_all():
    (x, *_) = DataLoader(Rows(), batch_size=480)
    train([x] * 60, adam)
def each_batch_four_times(): train(itertools.chain(*([x] * 4 for x in DataLoader(Rows(), batch_size=32))), adam)
def kept_batches(): train(list(DataLoader(Rows(), batch_size=8)), adam)
def two_loaders(): train(zip(DataLoader(Rows(), batch_size=8), DataLoader(Rows(), batch_size=8)), adam, x=X)
def skips_batches():
    batches = iter(DataLoader(Rows(), batch_size=4))
    for _ in range(60): next(batches)
    train(batches, adam)
def reads_ahead():
    got = queue.Queue(2)
    def fill():
        for batch in DataLoader(Rows(), batch_size=8): got.put(batch)
        got.put(None)
    threading.Thread(target=fill, daemon=True).start()
    train(iter(got.get, None), adam)
def clears_environment():
    os.environ.clear()
    plain()
def replaces_environment():
    os.environ = {}
    plain()
def loses_environment():
    os.environ = None
    plain()
def replaces_functions():
    for module, name in ((builtins, "open"), (io, "open"), (os, "open"), (os, "write"), (os, "close"), (time, "time"),
                         (time, "perf_counter"), (time, "process_time")):
        setattr(module, name, fails)
    plain()
def loses_modules():
    for name in ("multiprocessing.util", "torch.optim.optimizer", "threading"): del sys.modules[name]
    plain()
def loader_of_its_own():
    class Own(DataLoader):
        def __iter__(self): return (batch for batch in super().__iter__())
    torch.utils.data.DataLoader = Own
    train(torch.utils.data.DataLoader(Rows(), batch_size=8), adam)
def leaves_epochs():
    loader = DataLoader(Rows(), batch_size=100, num_workers=1, persistent_workers=True)
    for _ in range(15): train(itertools.islice(loader, 4), adam)
def batch_that_fails():
    def sample(i): return fails() if i == 8 else torch.randn(64)
    batches = iter(DataLoader(Rows(sample), batch_sampler=[[0], [8], *([[0] * 8] * 60)]))
    for _ in range(2):
        try: train(batches, adam)
        except RuntimeError: pass
def step_that_fails():
    class Fails(torch.optim.SGD):
        count = 0
        def step(self, closure=None):
            self.count += 1
            return fails() if self.count % 2 else None
    optimizer = Fails(model.parameters(), lr=0.1)
    for _ in range(60):
        try: optimizer.step()
        except RuntimeError: pass

for run in (plain, accumulates, two_optimizers, no_loader, texts, boxes, stream, odd_rank, closes_files, lbfgs,
            skips_steps, validates_by_next, validates_without_gradients, validates_by_inference, evaluates_parts,
            shape_that_is_a_word, shape_that_is_a_number, shape_of_words, shape_that_fails,
            values_that_take_more, attributes_that_fail, truth_and_length_that_fail, mapping_that_fails,
            class_that_fails, nested, scalars, images, labelled,
            rows_one_by_one, batches_as_items, batches_in_rows, pairs, time_major, joined_graphs, packed,
            drops_samples, drops_pairs, rows_along_time, joined_rows, sampler_of_batches,
            sampler_of_requests, sampler_of_iterators, last_is_smaller, last_of_many_is_smaller, last_of_six_is_smaller,
            one_batch_for_all, each_batch_four_times, kept_batches,
            two_loaders, skips_batches, reads_ahead, clears_environment, replaces_environment, loses_environment,
            replaces_functions, loses_modules, loader_of_its_own, leaves_epochs, batch_that_fails, step_that_fails):
    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    print(run.__name__, process.pid, process.exitcode, flush=True)
"""


def hooked(folder: Path, *words: object, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a program with the hook, as `dlscale measure` does; the steps are written to `folder/steps`."""
    (folder / "steps").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(HOOK), "OMP_NUM_THREADS": "1", timed.FOLDER: str(folder / "steps")}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(
        command, cwd=folder, env=environment | more, capture_output=True, text=True, timeout=300, check=False
    )


#: Four processes, whose batches of 8 samples come from as many parts of the data as the argument gives.
PARTS = """
import multiprocessing, sys, torch
from torch.utils.data import DataLoader, DistributedSampler
torch.set_num_threads(1)
def train(rank, parts):
    torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=4)
    rows, model = list(torch.randn(480, 64)), torch.nn.Linear(64, 1)
    loader = DataLoader(rows, 8, sampler=DistributedSampler(rows, parts, rank % parts))
    adam = torch.optim.Adam(model.parameters())
    for batch in (batch for epoch in range(4) for batch in loader):
        model(batch).mean().backward()
        torch.distributed.barrier()
        adam.step()
fork = multiprocessing.get_context("fork").Process
every = [fork(target=train, args=(rank, int(sys.argv[1]))) for rank in range(4)]
for process in every: process.start()
for process in every: process.join()
"""


@pytest.mark.slow
@pytest.mark.parametrize("parts", [2, 4])
def test_samples_of_processes_that_share_a_batch_count_once(tmp_path: Path, parts: int) -> None:
    """In tensor parallelism, processes of a group get the same batches."""
    assert not hooked(tmp_path, program(tmp_path, PARTS), parts, tmp_path / "meet").stderr
    found = steps.pace(steps.read(tmp_path / "steps")[1])
    assert found and (found.processes, found.batch_size) == (4, 8 * parts)
    assert sum(found.rank_rates) * (found.end - found.begin) / found.steps == pytest.approx(8 * parts, rel=0.5)


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Path | None]]:
    """Return (exit status, steps file) of each loop, by name."""
    folder = tmp_path_factory.mktemp("loops")
    ended = hooked(folder, program(folder, LOOPS))
    assert not ended.stderr
    rows = [line.split() for line in ended.stdout.splitlines()]
    return {name: (status, next((folder / "steps").glob(f"seen.*.{pid}"), None)) for name, pid, status in rows}


@pytest.mark.parametrize(
    ("name", "batch", "count"),
    [
        ("plain", 8, 60),
        ("accumulates", 32, 15),
        ("two_optimizers", 8, 60),
        ("no_loader", None, 60),
        ("texts", 8, 60),
        ("boxes", 8, 60),
        ("stream", None, 60),
        ("odd_rank", 8, 60),
        ("closes_files", 8, 120),
        ("lbfgs", 8, 60),
        ("skips_steps", 8, 59),
        ("validates_by_next", 8, 60),
        ("validates_without_gradients", 8, 60),
        ("validates_by_inference", 8, 60),
        ("evaluates_parts", 8, 60),
        ("shape_that_is_a_word", None, 60),
        ("shape_that_is_a_number", None, 60),
        ("shape_of_words", None, 60),
        ("shape_that_fails", None, 60),
        ("values_that_take_more", None, 60),
        ("attributes_that_fail", None, 60),
        ("truth_and_length_that_fail", None, 60),
        ("mapping_that_fails", None, 60),
        ("class_that_fails", None, 60),
        ("nested", None, 60),
        ("scalars", None, 60),
        ("images", 8, 60),
        ("labelled", 8, 60),
        ("rows_one_by_one", 1, 480),
        ("batches_as_items", None, 60),
        ("batches_in_rows", None, 480),
        ("pairs", 8, 60),
        ("time_major", None, 60),
        ("joined_graphs", None, 60),
        ("packed", None, 60),
        ("drops_samples", None, 60),
        ("drops_pairs", None, 60),
        ("rows_along_time", 8, 60),
        ("joined_rows", 8, 60),
        ("sampler_of_batches", None, 60),
        ("sampler_of_requests", None, 60),
        ("sampler_of_iterators", None, 60),
        ("last_is_smaller", None, 60),
        ("last_of_many_is_smaller", 8, 55),
        ("last_of_six_is_smaller", 7, 60),
        ("one_batch_for_all", None, 60),
        ("each_batch_four_times", None, 60),
        ("kept_batches", None, 60),
        ("two_loaders", None, 60),
        ("skips_batches", 4, 60),
        ("reads_ahead", None, 60),
        ("clears_environment", 8, 60),
        ("replaces_environment", 8, 60),
        ("loses_environment", 8, 60),
        ("replaces_functions", 8, 60),
        ("loses_modules", 8, 60),
        ("loader_of_its_own", 8, 60),
        ("leaves_epochs", 100, 60),
        ("batch_that_fails", 8, 61),
        ("step_that_fails", None, 30),
    ],
)
def test_loops_of_all_kinds(
    loops: dict[str, tuple[str, Path | None]], name: str, batch: int | None, count: int, tmp_path: Path
) -> None:
    """Each step counts once, samples count only if the batch size is certain, and loops end as without dlscale."""
    status, file = loops[name]
    assert status == "0" and file
    (tmp_path / file.name).write_bytes(file.read_bytes())
    _, processes = steps.read(tmp_path)
    pace = steps.pace(processes)
    assert pace and [len(process.steps) for process in processes] == [count]
    assert (pace.batch_size, pace.samples, pace.processes) == (batch, batch is not None, 1)


#: Training whose loaders are all wrapped by `timed`, with validations after or within epochs.
TIMED = """
import sys, sitecustomize
sys.path.insert(0, str(sitecustomize.HERE.parent))
from timed import timed
train_loader, valid = timed(DataLoader(Rows(), batch_size=8)), timed(DataLoader(Rows(), batch_size=40))
for epoch in range(2):
    for number, x in enumerate(train_loader):
        model(x).square().mean().backward()
        adam.step()
        adam.zero_grad()
        if sys.argv[1] == "within" and number % 20 == 5:
            for x in valid: model(x)
    if sys.argv[1] == "after":
        for x in valid: model(x)
"""


@pytest.mark.parametrize("when", ["within", "after"])
def test_timed_around_all_loaders_counts_training_alone(tmp_path: Path, when: str) -> None:
    ended = hooked(tmp_path, program(tmp_path, LOOPS.partition("for run in")[0] + TIMED), when)
    assert ended.returncode == 0 and not ended.stderr
    way, (process,) = steps.read(tmp_path / "steps")
    assert (way, len(process.steps), process.unclear) == ("timed", 120, False)
    assert sum(batch[1] == "0" for batch in process.batches) == 120 < len(process.batches)
    found = steps.pace([process])
    assert found and (found.batch_size, found.samples) == (8, True)


#: Training of 8 epochs with a shorter last accumulation: 256, then 224 samples per step.
PERSISTENT = """
import sys
loader = DataLoader(Rows(), batch_size=8, num_workers=1, persistent_workers=sys.argv[1] == "persistent")
for epoch in range(8):
    for number, x in enumerate(loader, 1):
        model(x).square().mean().backward()
        if number % 32 == 0 or number == len(loader):
            adam.step()
            adam.zero_grad()
    time.sleep(0.1)
"""


@pytest.mark.parametrize("workers", ["new", "persistent"])
def test_epochs_of_persistent_workers_are_recognised(tmp_path: Path, workers: str) -> None:
    """PyTorch uses the iterator of persistent workers again in each epoch."""
    text = LOOPS.partition("for run in")[0] + "import time\n" + PERSISTENT
    ended = hooked(tmp_path, program(tmp_path, text), workers)
    assert ended.returncode == 0 and not ended.stderr
    _, (process,) = steps.read(tmp_path / "steps")
    assert len(process.steps) == 16 and len({batch[1] for batch in process.batches}) == 8
    found = steps.pace([process])
    assert found and (found.batch_size, found.samples) == (240, True) and found.between_epochs > 0.1


AHEAD = """
def ahead(loader):
    batches = iter(loader)
    batch = next(batches)
    for following in batches:
        yield batch
        batch = following
    yield batch
"""


@pytest.mark.parametrize("package", ["accelerate", "other"])
def test_a_library_that_requests_batches_ahead_is_recognised(tmp_path: Path, package: str) -> None:
    """The hook recognises accelerate's loaders by their module."""
    (tmp_path / package).mkdir()
    (tmp_path / package / "data_loader.py").write_text(AHEAD)
    text = LOOPS.partition("for run in")[0] + (
        f"from {package}.data_loader import ahead\n"
        "for _ in range(3): train(ahead(DataLoader(Rows(), batch_size=48)), adam, every=4)\n"
    )
    assert hooked(tmp_path, program(tmp_path, text)).returncode == 0
    (process,) = steps.read(tmp_path / "steps")[1]
    assert len(process.ahead) == 3 * (package == "accelerate")


def test_steps_and_batches_of_several_threads_are_all_written(tmp_path: Path) -> None:
    """No note is lost, or assigned to another thread, if threads switch between noting and writing."""
    code = """
        import sys, threading
        from dlscale.extensions.programs import timed
        timed.SECONDS = timed.MIN_SECONDS = 0.0
        timed.MAX_NOTES = 10**9
        log = timed.Log("seen")
        sys.setswitchinterval(1e-6)
        def fetch():
            for _ in range(20_000): log.batch(1, 0.0, 8)
        def step():
            for _ in range(20_000): log.step(1)
        threads = [threading.Thread(target=each) for each in (fetch, step, step)]
        for each in threads: each.start()
        for each in threads: each.join()
    """
    ended = hooked(tmp_path, "-c", textwrap.dedent(code), PYTHONPATH=str(ROOT / "workflow_scripts"))
    assert not ended.returncode and not ended.stderr
    _, (process,) = steps.read(tmp_path / "steps")
    assert (len(process.steps), len(process.batches), process.damaged) == (40_000, 20_000, 0)
    assert len(process.trainers) == 2 and not process.trainers & process.fetchers["1"]


def test_a_program_continues_if_steps_cannot_be_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording stops if the folder is missing, the file is a folder, or the disk fills within a line."""
    log = writes(tmp_path, monkeypatch)
    assert log.on and log._file.endswith(str(os.getpid())) and steps.stopped(tmp_path) is None
    monkeypatch.setattr(timed, "write_file", lambda place, data: os.write(place, data[:5]))
    log._write(timed.clock())
    assert not log.on and "disk may be full" in (steps.stopped(tmp_path) or "")
    (process,) = steps.read(tmp_path)[1]
    assert len(process.steps) == 2, "half a line at the end of the file must be ignored"
    next(tmp_path.glob("stopped.*")).unlink()
    Path(log._file).unlink()
    Path(log._file).mkdir()
    assert not writes(tmp_path, monkeypatch).on and "IsADirectoryError" in (steps.stopped(tmp_path) or "")
    assert not writes(tmp_path / "none", monkeypatch).on and not (tmp_path / "none").exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("trap", [Path.symlink_to, lambda file, private: os.mkfifo(file)])
def test_a_link_or_pipe_among_the_steps_is_neither_read_nor_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: Callable[[Path, Path], Any]
) -> None:
    """Another user may create links and pipes: a link may lead to a private file, and a pipe never ends."""
    (folder := tmp_path / "steps").mkdir()
    (private := tmp_path / "private").write_text("seen BEGIN-KEY 1")
    trap(folder / "stopped.other.1", private)
    assert re.fullmatch(rf"{folder}/stopped\.other\.1: a link, pipe or device; .*", steps.stopped(folder) or "")
    (folder / "stopped.other.1").unlink()
    trap(folder / f"seen.{os.uname().nodename}.{os.getpid()}", private)
    assert not writes(folder, monkeypatch).on and "OSError" in (steps.stopped(folder) or "")
    trap(record := folder / "printed", private)
    finder = Finder({"loss": re.compile(r"loss (\S+)")}, record)
    finder.look(1.0, [b"loss 7\n"])
    finder.close()
    assert finder.found["loss"] == [(1.0, 7.0)] and private.read_text() == "seen BEGIN-KEY 1"


def writes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> timed.Log:
    """Return a process's log with two written steps and two steps that are still in memory."""
    monkeypatch.setattr(timed, "write_file", os.write)
    monkeypatch.setenv(timed.FOLDER, str(folder))
    log = timed.Log("seen")
    log.step()
    log._due = 0.0
    log.step()
    log._due = math.inf
    log.step()
    log.step()
    return log


@pytest.mark.slow
def test_an_optimiser_that_is_compiled_is_not_seen_and_not_disturbed(tmp_path: Path) -> None:
    code = LOOPS.partition("for run in")[0] + (
        "x, step = torch.randn(8, 64), torch.compile(adam.step, backend='eager')\n"
        "for _ in range(5): model(x).mean().backward(); step()\n"
    )
    ended = hooked(tmp_path, program(tmp_path, code))
    assert ended.returncode == 0 and not list((tmp_path / "steps").glob("seen.*")), ended.stderr


def test_the_longest_of_consecutive_trainings_counts(tmp_path: Path) -> None:
    """Of three consecutive trainings the longest counts, with all processes that trained at the same time."""
    for number, (begin, count) in enumerate(((0, 100), (1000, 300), (1001, 290), (2000, 100))):
        clock = Clock(tmp_path, number)
        clock.now += begin
        clock.epoch(count, wait=0.0, seconds=0.1)
    _, processes = steps.read(tmp_path)
    assert [process.rank for process in processes] == [1, 2]
    # `trainings` also counts the shorter trainings. `first_step` belongs to the first training.
    pace, _, trainings = running._pace_by("seen", running.Reading(), outcome([]), tmp_path, processes, ())
    assert trainings == 3 and pace.first_step == pytest.approx(1.7e9 + 0.1)


#: Training that can be measured in four ways during one run.
FOUR = (
    "import json, dlscale\nlog = open('log.jsonl', 'w')\nnumber = 0\n"
    + TRAIN.replace(
        "        optimizer.step()\n",
        "        optimizer.step()\n        number += 1\n"
        "        print(json.dumps({'step': number, 'time': time.time()}), file=log, flush=True)\n",
    )
).replace("range(4)", "range(8)")


@pytest.mark.slow
def test_four_ways_agree_within_their_intervals(tmp_path: Path) -> None:
    """Seen steps, timed steps, a log and printed rates of one run agree with the program's own clock."""
    path = program(tmp_path, FOUR, "dlscale.timed")
    ended = hooked(tmp_path, path, 0.002, PYTHONPATH=f"{HOOK}:{ROOT / 'workflow_scripts'}")
    own = [float(line.split()[1]) for line in ended.stdout.splitlines()]
    paces = [
        steps.pace(steps.read(tmp_path / "steps")[1]),
        steps.pace_of_log(*logs.logged(tmp_path / "log.jsonl", logs.Start(0.0)), 8),
        steps.pace_of_rates([(1.0 + number, rate) for number, rate in enumerate(own)], 0.0, 8),
    ]
    for file in (tmp_path / "steps").glob("timed.*"):
        file.unlink()
    way, processes = steps.read(tmp_path / "steps")
    paces.append(steps.pace(processes))
    assert way == "seen" and all(paces), ended.stderr
    told = [interval(pace.rates) for pace in paces if pace]
    watch = interval(own[1:])
    for centre, reach in told:
        assert centre == pytest.approx(watch[0], abs=reach + watch[1] + 0.03 * watch[0]), (told, watch)


SHELL = "If it is a script without #! line, start it with its shell: sh {path}"


@pytest.mark.parametrize(
    ("text", "mode", "status", "message"),
    [
        ("echo", 0o644, 126, "Permission denied"),
        ("echo", 0o755, 126, f"Exec format error. {SHELL}"),
        ("#!/no/such", 0o755, 127, "No such file or directory"),
        (None, 0, 126, "Permission denied"),
    ],
)
def test_a_command_that_cannot_be_run_gives_one_message(
    tmp_path: Path, text: str | None, mode: int, status: int, message: str
) -> None:
    path = tmp_path / "it"
    if text is None:
        path.mkdir()
    else:
        path.write_text(text)
        path.chmod(mode)
    ended = measure(tmp_path, "--", path)
    message = message.replace("{path}", str(path))
    assert (ended.returncode, ended.stderr) == (status, f"dlscale measure: {path}: {message}\n")
    assert not any((tmp_path / "results/plans" / PLAN).glob("*"))


REMOVES = "import glob, shutil; shutil.rmtree(*glob.glob('.dlscale-*'))"
PRINTS = "for rate in {}: print('avg', rate, 'samples', end=chr(10)); __import__('time').sleep(0.01)"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch-size", 0, "--", "true"], "--batch-size: 0: expected a whole number from 1"),
        (["--name", "a/b", "--", "true"], "--name: a/b: expected 1 to 40 lower-case"),
        (["--rate", "(", "--", "true"], "--rate: (: not a regular expression"),
        (["--steps", "none", "--", "true"], "log of steps none: no such file"),
        (["--steps", "/dev/zero", "--", "sleep", 60], "/dev/zero: a link, pipe or device; expected a file"),
        (["--rate", r"(\d+)", "--", "true"], r"the program printed no rate that matches (\d+)"),
        (
            ["--rate", r"avg (\S+)", "--", "python", "-c", PRINTS.format("('nan', '-inf', -1, 0, 1e300, 'x', '')")],
            r"the pattern avg (\S+) matched text that is not a rate: `avg nan samples`. Expected samples/s",
        ),
        (
            ["--rate", r"time (\S+),", "--", "echo", "iter 10: loss 2.1, time 101.00ms, mfu 3 %"],
            r"the pattern time (\S+), matched text that is not a rate: `time 101.00ms, mfu 3 %`. Expected samples/s,",
        ),
        (
            ["--", "python", "-c", "import glob, shutil; shutil.rmtree(*glob.glob('.dlscale-*'))"],
            "the program removed .dlscale-",
        ),
        (["--", "env", "-i", sys.executable, "-c", "1"], "no Python process loaded dlscale's hook"),
        (["--", "python", "-I", "-c", "1"], "no Python process loaded dlscale's hook"),
        (["--", "python", "-c", "1"], "no process with dlscale's hook imported PyTorch's optimisers"),
        (["--", "python", "-c", "import torch.optim"], "only steps of PyTorch's optimisers are seen"),
        (
            ["--", "python", "-c", "import dlscale\nfor _ in dlscale.timed(range(3)): pass"],
            "the program made 3 steps, too few",
        ),
    ],
)
def test_bad_input_has_one_clear_message(tmp_path: Path, words: list[object], message: str) -> None:
    words = [sys.executable if word == "python" else word for word in words]
    ended = measure(tmp_path, *words)
    (line,) = ended.stderr.splitlines()
    assert line.startswith("dlscale measure: ") and message.lower() in line.lower()
    refused = any(word in message for word in ("expected", "expression"))
    assert ended.returncode == (2 if refused else 0)
    kept = "log of steps" in message or "too few" in message
    assert any((tmp_path / "results/plans" / PLAN).glob("*")) is kept, (
        "the record must be kept if a log of steps is missing or has too few steps"
    )
    assert ("; the run's record is kept in results/plans/" in line) is kept


def test_a_program_can_make_the_results_folder_itself(tmp_path: Path) -> None:
    """dlscale creates the folder `results` after the program has ended, and keeps the program's files there."""
    needs = "import os\nos.mkdir('results')\nopen('results/own', 'w').close()\n"
    assert measure(tmp_path, "--", sys.executable, program(tmp_path, "raise SystemExit(4)")).returncode == 4
    assert not (tmp_path / "results").exists(), "a failed program leaves nothing behind"
    ended = measure(tmp_path, "--", sys.executable, program(tmp_path, needs + LOOP))
    assert ended.returncode == 0 and "Page: results/plans/" in ended.stderr, ended.stderr
    assert found(tmp_path).full and (tmp_path / "results/own").exists() and not [*tmp_path.glob(".dlscale-*")]


# ---- the record of a run -------------------------------------------------------------------------------

#: Loop of 40 steps of 10 ms with 8 samples each. Code that replaces DO runs before the loop; the exit status is 3.
DOING_LOOP = f"""
import os, sys, time
sys.path.append({str(HOOK.parent)!r})
import timed
steps = os.environ["DLSCALE_STEPS"]
DO
for batch in timed.timed([[0] * 8] * 40): time.sleep(0.01)
sys.exit(3)
"""


@pytest.fixture
def measure_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, Path]]:
    """Return a function that measures `DOING_LOOP` in this process and returns (exit status, folder of the run)."""
    monkeypatch.chdir(tmp_path)

    def called(do: str = "", *words: str, **options: object) -> tuple[int, Path]:
        command = [sys.executable, str(program(tmp_path, DOING_LOOP.replace("\nDO\n", f"\n{do}\n"))), *words]
        absent = {"name": None, "batch_size": None, "rate": None, "steps": None, "profile": False}
        absent |= {"live": False, "loader": False, "hang_after": None, "replay": None}
        status = outside_measure.main(argparse.Namespace(command=command, **absent | options))
        return status, tmp_path / "results/plans" / PLAN / "train"

    return called


Measured = Callable[..., tuple[int, Path]]


@pytest.mark.parametrize("size", [None, 8])
def test_a_page_has_the_unit_of_the_terminal(
    measure_here: Measured, capfd: pytest.CaptureFixture[str], size: int | None
) -> None:
    unit, other = ("samples/s", "steps/s") if size else ("steps/s", "samples/s")
    _, folder = measure_here(batch_size=size)
    told, page = capfd.readouterr().err, (folder.parent / "report.html").read_text()
    assert f" {unit} " in told and other not in told
    assert unit in page and other not in page
    record = json.loads((folder / "throughput.json").read_text())
    assert record["unit"] == unit and 10 < record["FULL"]["mean"] / (size or 1) < 101


def test_words_that_are_not_utf_8_and_junk_among_the_steps(measure_here: Measured) -> None:
    """Next to valid files of steps, other files, pipes, folders, links, invalid bytes and invalid times are ignored."""
    times = ["begin 1e307 1.0 0", "begin 1 1 0\ns nan 0 0", "begin 1 1 0\ns 1 0", f"s 1{'0' * 400} 0 0"]
    status, folder = measure_here(
        "assert os.fsencode(sys.argv[1]) == b'caf\\xe9'\n"
        "os.chdir(steps)\n"
        "for name in ('timed.junk', 'timed.host.x', 'seen.', 'hook2'): open(name, 'w').write('junk')\n"
        "os.mkfifo('timed.host.1'); os.mkdir('timed.host.2'); os.symlink('/dev/zero', 'timed.host.3')\n"
        "open('timed.host.4', 'wb').write(os.urandom(9999))\n"
        f"for number, row in enumerate({[*times, 'é', 'b 1']!r}, 10):\n"
        "    open(f'timed.host.{number}', 'w').write(row + chr(10))\n",
        os.fsdecode(b"caf\xe9"),
    )
    record = Throughput.read(folder / "throughput.json")
    assert status == 3 and record.outside and record.full and record.nranks == 1
    assert record.outside.steps > 30 and 10 < record.full.mean < 101
    assert record.outside.command[2:] == read_yaml(folder / "config.yaml")["program"]["command"][2:] == ["caf\\xe9"]
    assert not (folder / "steps").exists() and (folder.parent / "report.html").exists()


@pytest.mark.parametrize("output", ["2>/dev/full", "2>&1 >/dev/null | true"])
def test_closed_output_does_not_change_the_exit_status(tmp_path: Path, output: str) -> None:
    train = program(tmp_path, DOING_LOOP.replace("\nDO\n", "\n"))
    command = shlex.join([sys.executable, "-m", "dlscale", "measure", "--", sys.executable, str(train)])
    ended = subprocess.run(["bash", "-c", f"set -o pipefail; {command} {output}"], cwd=tmp_path, timeout=PATIENCE)
    assert ended.returncode == 3 and (tmp_path / "results/plans" / PLAN / "train/throughput.json").exists()


def test_the_record_of_a_long_run_without_steps_is_kept(
    measure_here: Measured, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(outside_measure, "UNSEEN_SECONDS", 0.0)
    status, folder = measure_here("sys.exit(4)", rate=r"avg (\S+)")
    assert status == 4 and f"the run's record is kept in {folder.relative_to(Path.cwd())}" in capfd.readouterr().err
    assert read_yaml(folder / "config.yaml")["program"]["status"] == 4


@pytest.mark.parametrize("warn", [True, False])
def test_a_program_without_steps_is_looked_at_for_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], warn: bool
) -> None:
    monkeypatch.setattr(running, "UNSEEN_SECONDS", 0.1)
    watch = running.StartWatch(os.getpid(), tmp_path, warn)
    watch.start()
    watch.join(PATIENCE)
    assert not watch.is_alive() and ("no training step was seen" in capfd.readouterr().err) == warn


def test_a_damaged_line_ends_a_file_of_steps(tmp_path: Path) -> None:
    """Only lines before a damaged line are used. Invalid sample counts, as of another version, become 0 (unknown)."""
    clock = Clock(tmp_path)
    for samples in ("8.0", "None", "--5", "1" + "0" * 400):
        clock.note(f"b 0 {clock.now:.6f} 0.0 {samples}")
        clock.step(0.1)
    clock.note("s 1e300 0.0 0")
    clock.step(0.1)
    (process,) = steps.read(tmp_path)[1]
    assert process.steps == pytest.approx([1.7e9 + 0.1 * number for number in range(1, 5)])
    assert [batch[3] for batch in process.batches] == [0, 0, 0, 0] and process.damaged == 10


def test_a_record_that_cannot_be_written_costs_neither_the_rest_nor_the_status(
    measure_here: Measured, capfd: pytest.CaptureFixture[str]
) -> None:
    """If the record cannot be written, command, exit status, steps and telemetry are still kept."""
    status, folder = measure_here("os.mkdir(f'{steps}/../throughput.json')")
    assert status == 3 and f"; the run's record is kept in {folder.relative_to(Path.cwd())}\n" in capfd.readouterr().err
    kept = read_yaml(folder / "config.yaml")["program"]
    assert kept["status"] == 3 and kept["seconds"] > 0.4 and kept["command"][0] == sys.executable
    assert len(steps.read(folder / "steps")[1][0].steps) == 40 and (folder / "telemetry/throughput.csv").exists()


def test_others_runs_cost_no_page(measure_here: Measured, capfd: pytest.CaptureFixture[str]) -> None:
    """The page omits damaged runs, which a message names, and temporary folders of killed or running calls."""
    plan = Path("results/plans") / PLAN
    for name in ("other", ".train.host.1.abc.part", "folder/throughput.json"):
        (plan / name).mkdir(parents=True)
    for name in ("other", ".train.host.1.abc.part"):
        (plan / name / "throughput.json").write_text("{}")
    (plan / "plan.yaml").write_bytes(b"\xff")
    (plan / "file").write_text("junk")
    status, _ = measure_here()
    told = capfd.readouterr().err
    left = [line.rpartition("; the page leaves out ")[2] for line in told.splitlines() if "leaves out" in line]
    assert status == 3 and sorted(left) == ["folder", "other"] and told.splitlines()[-1].startswith("Page: "), told
    assert [run.name for run in read_plan(plan / "plan.yaml").runs] == ["train"]


@pytest.mark.parametrize("name", ["results", "results/plans", f"results/plans/{PLAN}"])
@pytest.mark.parametrize("kind", ["dangling link", "file"])
def test_unwritable_results_are_reported_at_once(measure_here: Measured, name: str, kind: str) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).symlink_to("gone") if kind == "dangling link" else Path(name).write_text("mine")
    with pytest.raises(OSError) as caught:
        measure_here("raise SystemExit('it began')")
    told = (
        f"{name}: a link to gone, which does not exist"
        if "link" in kind
        else f"{name}.*: a file exists in place of a folder"
    )
    with pytest.raises(UserError, match=f"^{told}"):
        raise translate_error(caught.value, "")


@pytest.mark.parametrize("size", [0, -1, 10**9 + 1, 10**400])
def test_a_batch_has_a_plausible_size(measure_here: Measured, size: int) -> None:
    with pytest.raises(UserError, match=r"--batch-size: .*: expected a whole number from 1 to 1,000,000,000$"):
        measure_here(batch_size=size)


#: Loop without PyTorch: 40 steps of 20 ms.
LOOP = "import dlscale, time\nfor _ in dlscale.timed(range(40)): time.sleep(0.02)\n"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--steps", "none"], "log of steps none: no such file"),
        (["--steps", "train.py"], "the log train.py has fewer than three steps"),
        (["--rate", r"(\d+) samples/s"], r"the program printed no rate that matches (\d+) samples/s"),
    ],
)
def test_steps_count_where_the_named_way_finds_none(tmp_path: Path, option: list[str], message: str) -> None:
    ended = measure(tmp_path, *option, "--", sys.executable, program(tmp_path, LOOP))
    assert ended.returncode == 0 and message in ended.stderr
    assert ". The rate uses the steps " in ended.stderr
    record = found(tmp_path)
    assert record.outside and record.outside.way == "timed" and record.full and 10 < record.full.mean < 50


@pytest.mark.slow
def test_a_fifo_is_no_log(tmp_path: Path) -> None:
    """A FIFO as log is refused before the program starts. If the program creates the FIFO, its result is kept."""
    os.mkfifo(tmp_path / "log")
    ended = measure(tmp_path, "--steps", "log", "--", "touch", "started")
    assert ended.returncode == 2 and "log: a link, pipe or device" in ended.stderr
    assert not (tmp_path / "started").exists()
    (tmp_path / "log").unlink()
    ended = measure(
        tmp_path, "--steps", "log", "--", sys.executable, program(tmp_path, LOOP + "import os; os.mkfifo('log')")
    )
    assert ended.returncode == 0 and "log: a link, pipe or device" in ended.stderr and found(tmp_path).outside


def test_a_program_without_a_step_is_warned_of_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The warning names the remedy for the framework, here JAX, detected by a mapped file in a folder `jaxlib`."""
    monkeypatch.setattr(running, "UNSEEN_SECONDS", 1.0)
    (tmp_path / "jaxlib").mkdir()
    (tmp_path / "jaxlib/xla.so").write_bytes(bytes(4096))
    (tmp_path / "steps").mkdir()
    code = "import mmap, time; f = open('jaxlib/xla.so', 'r+b'); m = mmap.mmap(f.fileno(), 0); time.sleep(6)"
    ended = running.run_command([sys.executable, "-c", code], tmp_path / "steps", None, folder=str(tmp_path))
    told = capsys.readouterr().err
    assert told.count("no training step was seen in 1.00") == 1 and "the program continues" in told
    assert "uses JAX: time its steps with `for batch in dlscale.timed(loader)`" in told
    assert ended.frameworks == {"JAX"} and ended.users == {os.getuid()} and ended.seconds < 30


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"users": frozenset({4242})}, "ran as another user (uid 4242)"),
        ({"status": 137}, "the program ended with status 137 after 30.0\xa0s, before enough steps"),
        (
            {"frameworks": frozenset({"Keras or TensorFlow"})},
            "uses Keras or TensorFlow: time its steps with a callback",
        ),
        ({}, "ends by `os._exit` or a signal within a second"),
        (
            {"pytorch": False},
            "no process with dlscale's hook imported PyTorch's optimisers. If the program uses PyTorch,",
        ),
        ({"full": True}, "is full: no step could be written"),
    ],
)
def test_each_reason_for_missing_steps_has_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    (tmp_path / "hook").touch()
    change = {**change}
    if change.pop("pytorch", True):
        (tmp_path / "pytorch").touch()
    if change.pop("full", False):
        monkeypatch.setattr(running, "MIN_FREE_BYTES", 1 << 62)
    ended = replace(running.Outcome(0, 1.7e9, 30.0, None, None, [], {}), **change)
    with pytest.raises(UserError, match=re.escape(message)):
        running.measured(["train"], tmp_path, tmp_path / "none.csv", ended, running.Reading())


@pytest.mark.slow
def test_rates_between_nonsense(tmp_path: Path) -> None:
    """Words, long lines and binary data between the rates do no harm; nor do three simultaneous calls with one name."""
    code = (
        "import sys, time\n"
        + PRINTS.format("[90, 'nan', 100, 1e300, 'word', *[100] * 5]")
        + ("\nsys.stdout.flush(); sys.stdout.buffer.write(bytes(range(256)) * 4000 + b'\\navg 1_0')")
    )
    path = program(tmp_path, code)
    command = [sys.executable, "-m", "dlscale", "measure", "--rate", r"^avg (\S+)", "--", sys.executable, str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "workflow_scripts")}
    started = [
        subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    for process in started:
        out, told = process.communicate(timeout=120)
        assert process.returncode == 0 and len(out) > 256 * 4000 and b"Traceback" not in told
    names = ["train", "train_2", "train_3"]
    for name in names:
        record = found(tmp_path, name)
        assert record.full and record.outside and record.outside.steps == 7, (
            "six rates of 100 and one rate of 10 must count"
        )
        assert min(record.full.trial_throughput) > 9.9 and 10 < record.full.mean < 100
        assert max(record.full.trial_throughput) < 100.01
        causes = [each.cause for each in judge_run(read_run(tmp_path / "results/plans" / PLAN / name)).findings]
        assert set(causes) <= {"neighbour", "idle"}, "only an idle device or other programs may be reported"
    plan = (tmp_path / "results/plans" / PLAN / "plan.yaml").read_text()
    assert all(f"name: {name}\n" in plan for name in names)


def test_a_program_has_its_own_environment_and_modules(tmp_path: Path) -> None:
    """A program keeps its environment, modules, signals and `sitecustomize`; dlscale's hook is valid Python 3.8."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own/sitecustomize.py").write_text("import sys; sys.own = True")
    (tmp_path / "module_of_its_own.py").touch()
    code = """
        import os, signal, sys, module_of_its_own
        assert sys.own and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
        import json
        print(json.dumps(dict(os.environ)))
    """
    words = [sys.executable, str(program(tmp_path, code))]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'own'}:{ROOT / 'workflow_scripts'}", "RANK": "1"}
    environment |= {"LC_ALL": "", "LANG": "", "PATH": f"{tmp_path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "3"}
    heeded = partial(signal.signal, signal.SIGUSR1, signal.SIG_DFL)  # other tests of this process may ignore the signal
    alone = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, preexec_fn=heeded)
    words = [sys.executable, "-P", "-m", "dlscale", "measure", "--", *words]
    ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    found = json.loads(ended.stdout)
    assert ended.returncode == 0 and found.pop(timed.FOLDER) and "DLSCALE_HOOKS" in found
    del found["DLSCALE_HOOKS"]
    assert found == {**json.loads(alone.stdout), "PYTHONPATH": f"{HOOK}:{environment['PYTHONPATH']}"}
    for file in (HOOK / "sitecustomize.py", HOOK.parent / "timed.py", *registry.hooks()):
        ast.parse(file.read_text(), feature_version=(3, 8))


def test_every_extension_enters_a_program_in_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook loads an extension's file if the extension's variable is set. A broken file affects no other code."""
    good = "import sys\ndef start(log):\n    return {'fractions': lambda module: setattr(sys, 'seen', log.folder)}\n"
    shipped, own = registry.hooks(), dict[Path, str]()
    assert set(shipped.values()) == {"DLSCALE_STEPS", "DLSCALE_LOADER", "DLSCALE_HANG_AFTER", "DLSCALE_REPLAY"}
    for name, code in {"broken": "1 / 0", "startless": "", "good": good}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "inside.py").write_text(code)
        own[tmp_path / name / "inside.py"] = "MINE"
    monkeypatch.setattr(registry, "hooks", lambda: {**own, **shipped})
    code = "import sys, fractions, sitecustomize as hook; print(sys.seen, *(each.__name__ for each in hook.EXTENSIONS))"
    for more, loaded in (
        ({}, set[str]()),
        ({"DLSCALE_HANG_AFTER": "9", "DLSCALE_LOADER": "1"}, {"dlscale_hangs", "dlscale_loading"}),
    ):
        environment = running.watched(tmp_path, {"MINE": "", **more})
        ended = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        folder, *found = ended.stdout.split()
        assert folder == str(tmp_path) and {*found} == {"dlscale_health", "dlscale_good", *loaded}


def test_unbuffered_output_survives_a_kill(tmp_path: Path) -> None:
    """Output without a line end reaches the reader before a kill, as without dlscale."""
    code = "import os, sys; print('epoch 1 .', end=''); print('E', end='', file=sys.stderr); os.kill(os.getpid(), 9)"
    environment = running.watched(tmp_path, {"WORLD_SIZE": "2"})
    ended = subprocess.run([sys.executable, "-u", "-c", code], env=environment, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-9, b"epoch 1 .", b"E")


@pytest.mark.parametrize(("unbuffered", "size"), [("", "2"), ("1", "2"), ("", "")])
def test_lines_of_several_processes_are_whole(tmp_path: Path, unbuffered: str, size: str) -> None:
    """Lines stay complete, even with PYTHONUNBUFFERED, which makes `print` write each argument separately."""
    code = """
        import os, sys
        rank = int(os.environ["RANK"])
        for number in range(3000):
            print("rank", rank, "of", 2, "met at", number, "x" * 50)
            print("error", rank, "of", 2, "at", number, "y" * 50, file=sys.stderr)
    """
    path, log = program(tmp_path, code), tmp_path / "log"
    start = f'for rank in 0 1; do RANK=$rank "{sys.executable}" "{path}" & done; wait'
    call = [sys.executable, "-P", "-m", "dlscale", "measure", "--rate", "nersc", "--", "sh", "-c", start]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "workflow_scripts"), "WORLD_SIZE": size}
    environment["PYTHONUNBUFFERED"] = unbuffered
    with log.open("a") as out:
        subprocess.run(call, cwd=tmp_path, env=environment, stdout=out, stderr=out, check=True)
    expected = [f"rank {rank} of 2 met at {number} {'x' * 50}" for rank in (0, 1) for number in range(3000)]
    expected += [f"error {rank} of 2 at {number} {'y' * 50}" for rank in (0, 1) for number in range(3000)]
    lines = [line for line in log.read_text().splitlines() if not line.startswith("dlscale")]
    assert sorted(lines) == sorted(expected)


def test_a_pythonpath_in_the_command_is_kept(tmp_path: Path) -> None:
    """A command that sets PYTHONPATH keeps its value, which disables the hook; a message names the remedies."""
    path = program(tmp_path, "import os, sys; print(os.environ['PYTHONPATH'], sys.argv[1:])")
    words = ["env", "PYTHONPATH=/its own", sys.executable, str(path), "PYTHONPATH=x"]
    call = [sys.executable, "-P", "-m", "dlscale", "measure"]
    options: list[list[str]] = [[], ["--rate", "nersc"]]
    for more in options:
        ended = subprocess.run(
            [*call, *more, "--", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT / "workflow_scripts")},
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0 and ended.stdout == "/its own ['PYTHONPATH=x']\n", ended.stderr
        lost = "sets PYTHONPATH=/its own"
        assert (lost in ended.stderr) is (not more)


def test_a_closed_standard_output_is_accepted(tmp_path: Path) -> None:
    ended = subprocess.run(
        ["sh", "-c", f'exec "{sys.executable}" -m dlscale measure -- true >&-'],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "workflow_scripts")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0 and ended.stderr.startswith("dlscale measure: no training step")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_planted_causes_are_named(tmp_path: Path) -> None:
    """At least 80 % of the planted causes are found. Programs without a planted cause give no finding."""
    right, wrong, alarms = 0, list[object](), list[object]()
    for number, (name, case) in enumerate(outside.CASES.items()):
        if case.limited and not outside.can_limit():
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        causes = [finding.cause for finding in outside.measure(case, folder)[0].findings]
        if "neighbour" in causes and "neighbour" not in case.causes:
            pytest.skip("other programs are running on this machine")
        if case.causes:
            right += bool({*case.causes} & {*causes})
            wrong += [] if {*case.causes} & {*causes} else [(name, causes)]
        elif causes:
            alarms.append((name, causes))
    assert right >= 4 * len(wrong) and not alarms, (wrong, alarms)


@pytest.mark.parametrize(
    ("counted", "counts"),
    [
        ("step", None),
        ("batch", None),
        ("each of two optimisers", None),
        ("epoch", "epochs"),
        ("sample", "samples"),
        ("batch of a validation", "something else, such as the steps of a validation"),
    ],
)
def test_a_log_counts_the_steps_of_the_training(counted: str, counts: str | None) -> None:
    """dlscale detects that `step` in a log counts something else, which would give a wrong rate."""
    made = [float(number) for number in range(1, 201)]  # a step per second, of two batches of 16 samples
    batches = [(second - part, "0", 0.0, 16) for second in made for part in (0.9, 0.4)]
    one = (1.0, 200.0)
    process = steps.Process(
        0, steps=made, batches=batches, optimizers={"1": one, "2": one} if "two" in counted else {"1": one}
    )
    factors = {"step": 1, "batch": 2, "each of two optimisers": 2, "epoch": 0.02, "sample": 32}
    factor = factors.get(counted, 3)
    points = [(second + 0.1, factor * second) for second in made[4::5]]
    wrong = steps.log_counts_other([*points, (200.5, 1.0)], process)
    assert wrong is None if counts is None else wrong and wrong.endswith(f"so it seems to count {counts}")
    half = replace(
        process, steps=made[:100], batches=[each for each in batches if each[0] < 100], gaps=[(100.0, 201.0)]
    )
    assert counted != "step" or steps.log_counts_other(points, half) is None, (
        "the log may have steps of a gap, which are not noted"
    )
