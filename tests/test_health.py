"""Leaks, peaks outside of training, and recompilations are named; a clean program causes no such finding."""

from __future__ import annotations

import math
import os
import random
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from dlscale.config.places import MEASURED
from dlscale.core import machine
from dlscale.extensions.health import noted, training
from dlscale.extensions.health.causes import describe, growth, repeated
from dlscale.extensions.health.programs import Phases, read_process, write_health
from dlscale.extensions.health.records import FILE, MAX_POINTS, Compilation, Health, Memory, read_record
from dlscale.extensions.programs import timed
from dlscale.report.evidence import Finding
from dlscale.report.verdict import judge_run
from dlscale.results import read_alone
from dlscale.studies.starter_cnn.model import StarterCNN
from tests.conftest import ROOT, TINY, make_dataset, make_run, train
from tests.test_any_program import measure as run_measure

#: Causes that the extension `health` reports.
OURS = ("leak", "peak", "recompilation", "breaks")

#: Program of three epochs with validations; its argument is the defect.
PROGRAM = """
    import sys, time, torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    defect, kept, cache = sys.argv[1], [], {}
    data = TensorDataset(torch.randn(400, 32), torch.randn(400, 8))
    train, valid = DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=100)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def scaled(x, factor):
        return x * factor.bit_length()

    def printed(x):
        y = x + 1
        print(end="")
        return y * 2

    if defect in ("size", "number", "breaks"):
        fixed = torch.compile(scaled, backend="eager", dynamic=False)
        broken = torch.compile(printed, backend="eager")
    for epoch in range(3):
        for step, (x, y) in enumerate(train):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if defect == "leak":
                kept.append(torch.ones(25_000))
            elif defect == "clean":
                cache.setdefault(step, torch.ones(500_000))
            elif defect == "size":
                fixed(torch.ones(2 + step), 1)
            elif defect == "number":
                fixed(torch.ones(2), 2 ** step)
            elif defect == "breaks":
                broken(x)
            time.sleep(0.005)
        with torch.no_grad():
            for x, y in valid:
                model(x)
                if defect == "peak":
                    torch.ones(25_000_000).sum()
"""


def measure(folder: Path, defect: str) -> str:
    """Measure the program with a defect; return what `dlscale measure` prints."""
    (folder / "train.py").write_text(textwrap.dedent(PROGRAM))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "workflow_scripts"), "DLSCALE_STEPS_EVERY": "0.05"}
    command = [sys.executable, "-m", "dlscale", "measure", "--", sys.executable, "train.py", defect]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stderr


def findings(folder: Path) -> dict[str, Finding]:
    """Return the findings of this extension for the measured program, by cause."""
    found = judge_run(read_alone(folder / "results/plans" / MEASURED / "train")).findings
    return {each.cause: each for each in found if each.cause in OURS}


#: Memory after each of 600 steps without noise, in MB, and whether the curve is a leak.
CURVES: dict[str, tuple[Callable[[int], float], bool]] = {
    "constant": (lambda step: 1000.0, False),
    "a leak": (lambda step: 1000 + 0.5 * step, True),
    "a cache that fills, then stays": (lambda step: 1000 + 0.5 * min(step, 450), False),
    "an allocator that settles": (lambda step: 1300 - 300 * math.exp(-step / 100), False),
    "a start that approaches its limit": (lambda step: 1000 + 400 * (1 - math.exp(-step / 250)), False),
    "one large validation": (lambda step: 1000 + 500 * (400 <= step < 420), False),
    "a leak that is too small to matter": (lambda step: 1000 + 0.005 * step, False),
}


@pytest.mark.parametrize("curve", CURVES)
def test_only_steady_growth_is_a_leak(curve: str) -> None:
    """With noise of 5 MB, the growth per step is right to 10 %. A cache that fills and then stays is not a leak."""
    used_at, is_leak = CURVES[curve]
    noise, steps = random.Random(1), list(range(1, 601))
    used = [int(1e6 * (used_at(step) + noise.gauss(0, 5))) for step in steps]
    found = growth(Memory(device="cpu", steps=steps, phases=["training"] * 600, used=used))
    assert (found is not None) == is_leak
    assert not found or found.per_step == pytest.approx(5e5, rel=0.1)


def test_a_leak_of_five_seconds_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first writes are 0.05 s apart, so that a short program has enough points; later writes are a second apart."""
    now, times = 0.0, list[float]()
    monkeypatch.setenv("DLSCALE_STEPS", str(tmp_path))
    for name, replaced in (("clock", lambda: now), ("append", lambda file, text: times.append(now))):
        monkeypatch.setattr(timed, name, replaced)
    log = timed.Log("seen")
    while now < 100:
        now += 0.01
        log.step()
    monkeypatch.undo()
    short = [time for time in times if time < 5]
    steps, used = [int(100 * time) for time in short], [int(3e8 + 1e7 * time) for time in short]
    found = growth(Memory(device="cpu", steps=steps, phases=["training"] * len(short), used=used))
    assert found and found.per_step == pytest.approx(1e5, rel=0.1) and len(times) < 210


def test_a_peak_of_short_epochs_is_found() -> None:
    """If the first interval between points contains the entire first epoch, its peak also counts for the training."""
    epochs = [[epoch + 0.01 * step for step in range(1, 21)] for epoch in range(2)]
    batches = [(time - 0.005, "0", 0.0, 8) for time in epochs[0]] + [(0.21, "1", 0.0, 8), (0.25, "1", 0.0, 8)]
    batches += [(time - 0.005, "2", 0.0, 8) for time in epochs[1]]
    process = SimpleNamespace(rank=0, host="", pid=0, steps=sum(epochs, []), batches=batches, gaps=[])  # noqa: RUF017
    points = [(0.005, 300), (0.205, 310), (1.0, 700), (1.2, 700)]
    lines = ["begin 0 0", *(f"m {time} {100 * 10**6} {peak * 10**6}" for time, peak in points)]
    (memory,) = read_process([f"{line}\n".encode() for line in lines], process, {"0", "2"}, None).memory
    peaks = {phase: (peak.bytes, peak.last) for phase, peak in memory.peaks.items()}
    assert peaks == {"start": (310e6, 20), "training": (310e6, 20), "validation": (700e6, 20)}


@pytest.mark.parametrize(
    ("group", "limit", "used"),
    [
        ("0::/job/step", "/sys/fs/cgroup/job/memory.max", "memory.current"),
        ("4:memory:/job/step", "/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_a_job_may_limit_memory_by_either_version_of_cgroups(
    monkeypatch: pytest.MonkeyPatch, group: str, limit: str, used: str
) -> None:
    """The limit of a parent group counts, too; files in memory that Linux can drop do not count as used."""
    folder = Path(limit).parent
    cache = "inactive_anon 7\ninactive_file 500\n"  # version 1 also has totals, of all groups below this group
    cache = cache.replace("500", "90") + "total_inactive_file 500\n" if "limit" in limit else cache
    texts = {"/proc/self/cgroup": f"9:pids:/other\n{group}", limit: "8000"}
    texts |= {f"{folder}/{used}": "3500", f"{folder}/memory.stat": cache}
    monkeypatch.setattr(machine, "text_of", lambda path: texts.get(str(path), ""))
    assert machine.job_limits() == [(8000, 3000)] and machine.free_memory() == 5000


def test_the_memory_of_a_process_is_limited_by_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes of a job with 8 GB on a larger machine have 4 GB each, although the machine has more."""
    monkeypatch.setattr(machine, "job_limits", lambda: [(8_000_000_000, 0)])
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=500_000_000_000))
    folder = tmp_path / "steps"
    folder.mkdir()
    own = [SimpleNamespace(rank=n, host="host", pid=n, steps=[1.0, 2.0], batches=[], gaps=[]) for n in range(2)]
    for process in own:
        (folder / f"{noted.NAME}.host.{process.pid}").write_text("begin 0 0\nm 1.5 1000 2000\nm 2.0 1000 2000\n")
    write_health(folder, own, [set(), set()])
    assert [each.memory[0].limit for each in read_record(tmp_path).processes] == [4_000_000_000] * 2


def test_each_point_has_the_peak_since_the_last_point() -> None:
    block = b"1" * 2**27
    del block
    (_, before), _, (_, after) = noted.host_memory() or (0, 0), training._reset_peak(), noted.host_memory() or (0, 0)
    assert 0 < after < before - 2**26


def test_phases_follow_from_steps_and_batches() -> None:
    """Steps, batches without steps, pauses and gaps of a process give the phases of its time."""
    steps = [0.1 * number for number in range(1, 51)] + [8.1, 8.2]
    batches = [(5.5, "1", 0.0, 8), (5.6, "1", 0.0, 8), (8.05, "0", 0.0, 8)]
    process = SimpleNamespace(rank=0, host="", pid=0, steps=steps, batches=batches, gaps=[(9.0, 10.0)])
    phases = Phases(process, {"0"})
    spans = [(0.0, 0.1), (1.0, 2.0), (4.5, 5.1), (5.1, 5.7), (5.7, 8.04), (5.7, 8.05), (8.2, 8.9), (8.9, 9.5)]
    expected = ["start", "training", "training", "validation", "validation", "between", "between", "unknown"]
    assert [phases.between(*span) for span in spans] == expected
    assert phases.count(5.05) == 50 and phases.count(9.5) == 57  # half of a gap of ten steps


@pytest.mark.parametrize(
    "defect",
    ["leak", *(pytest.param(each, marks=pytest.mark.slow) for each in ("clean", "peak", "size", "number", "breaks"))],
)
def test_a_defect_of_a_program_is_named(tmp_path: Path, defect: str) -> None:
    """The causes name device, phase, step, function and line; a cache that fills in the first epoch is not a leak."""
    printed = " ".join(measure(tmp_path, defect).split())
    found = findings(tmp_path)
    expected = {"clean": [], "size": ["recompilation"], "number": ["recompilation"]}.get(defect, [defect])
    assert [*found] == expected, found
    record = Health.read(tmp_path / "results/plans" / MEASURED / "train" / FILE).processes[0]
    assert record.steps == 299 and {*record.memory[0].phases} >= {"training", "validation"}
    for finding in found.values():
        assert " ".join(finding.why.split()) in printed
    if defect == "leak":
        grown = re.search(r"grows .*?([\d.]+) kB per step", found["leak"].why.replace("\xa0", " "))
        assert grown and float(grown[1]) == pytest.approx(100, rel=0.25), found["leak"].why  # 25,000 floats
    elif defect == "peak":
        assert "The main memory of rank 0 peaks in validation" in found["peak"].why
        peaks = record.memory[0].peaks
        assert peaks["validation"].bytes - peaks["training"].bytes == pytest.approx(1e8, rel=0.25)
    elif defect in ("size", "number"):
        reason = {"size": "tensor 'x' size mismatch at index 0. expected 9, actual 10", "number": "factor == 128"}
        why = found["recompilation"].why
        assert f"`scaled` ({tmp_path}/train.py:" in why and f"Last reason: {reason[defect]}." in why
        assert f"{line_of(tmp_path, 'def scaled')}) was compiled again 7 times" in why and "reached its limit" in why
    elif defect == "breaks":
        assert f"{tmp_path}/train.py:{line_of(tmp_path, 'print(end')}" in found["breaks"].why
        assert "Failed to trace builtin operator" in found["breaks"].why


def test_a_program_without_memory_keeps_the_state_of_the_allocator(tmp_path: Path) -> None:
    """The program ends before its first step, as without dlscale; the snapshot is kept and named."""
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "torch.cuda.memory._dump_snapshot = lambda file: open(file, 'w').write('state')\n"
        "raise torch.OutOfMemoryError('no memory left')\n"
    )
    done = run_measure(tmp_path, "--", sys.executable, "train.py")
    (file,) = (tmp_path / "results/plans" / MEASURED).glob("*/*memory_snapshot.pickle")
    assert file.read_text() == "state" and f"memory_viz: {file.relative_to(tmp_path)}\n" in done.stderr, done.stderr
    plain = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == plain.returncode == 1 and plain.stderr in done.stderr


def test_a_function_of_pytorch_is_named_with_its_caller() -> None:
    """A user can change the line that calls `nn.Sequential`, but not `nn.Sequential` itself."""
    torch._dynamo.reset()
    compilations = noted.Compilations()
    layers = torch.compile(torch.nn.Sequential(torch.nn.ReLU()), backend="eager", dynamic=False)
    line = sys._getframe().f_lineno + 2
    for size in range(2, 8):
        layers(torch.ones(size))
    torch._dynamo.callback.callback_handler.remove_start_callback(compilations._begin)
    found = repeated([Compilation(step=9, **each) for each in compilations.new()])
    assert f"(of a library, called at {__file__}:{line}) was compiled again 5 times" in describe(found)


def line_of(folder: Path, text: str) -> int:
    lines = (folder / "train.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset with 100 training images and 20 validation images."""
    return make_dataset(tmp_path_factory.mktemp("data") / "images", DATASET)


DATASET = {**TINY["starter_cnn"]["dataset"], "source": {"kind": "simulated", "size": 8, "train": 100, "valid": 20}}


def train_with(defect: str, folder: str, manifest: str) -> None:
    """Train with a defect. Tests call this in a new process, whose allocator has no memory that other tests freed."""
    kept, cache, original = list[torch.Tensor](), dict[int, torch.Tensor](), StarterCNN.forward
    compiled = torch.compile(lambda x, factor: x * factor.bit_length(), backend="eager")

    def forward(model: StarterCNN, x: torch.Tensor) -> torch.Tensor:
        if model.training and defect == "leak":
            kept.append(torch.ones(15_000))
        elif not model.training and defect == "peak":
            torch.ones(25_000_000).sum()
        elif model.training and defect == "recompilation":
            kept.append(x)
            compiled(x, 2 ** len(kept))
        elif defect == "clean":
            cache.setdefault(len(cache) if len(cache) < 50 else 0, torch.ones(500_000))
        return original(model, x)

    StarterCNN.forward = forward  # type: ignore[method-assign]
    assert train(Path(folder), Path(manifest)) == 0


@pytest.mark.parametrize(
    "defect", [pytest.param(each, marks=pytest.mark.slow) for each in ("clean", "leak", "peak", "recompilation")]
)
def test_a_defect_of_a_training_is_named(tmp_path: Path, images: Path, defect: str) -> None:
    """The record of a training has a peak for each phase; a recompilation after the warm-up is also logged."""
    settings = {**TINY["starter_cnn"]["run"], "batch_size": 2, "training": {"epochs": 40}}
    make_run(tmp_path, "starter_cnn", settings, DATASET)
    words = [defect, str(tmp_path), str(images / "manifest.json")]
    code = f"from tests.test_health import train_with; train_with(*{words!r})"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found = {each.cause: each for each in judge_run(read_alone(tmp_path)).findings if each.cause in OURS}
    assert [*found] == [defect] * (defect != "clean"), found
    (record,) = Health.read(tmp_path / FILE).processes
    (memory,) = record.memory
    assert {*memory.peaks} == {"start", "training", "validation", "between"} and len(memory.steps) <= MAX_POINTS
    if defect == "leak":
        grown = re.search(r"grows .*?([\d.]+) kB per step", found["leak"].why.replace("\xa0", " "))
        assert grown and float(grown[1]) == pytest.approx(60, rel=0.25), found["leak"].why
    elif defect == "peak":
        assert "peaks in validation, after step" in found["peak"].why
    elif defect == "recompilation":
        assert f"({__file__}:" in found["recompilation"].why and "factor == 256" in found["recompilation"].why
        assert "compilation continues after the warm-up" in ended.stderr
