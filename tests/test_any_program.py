"""Tests of docs/any_program.md: its examples run with their libraries, and profiles show where the time is spent."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dlscale.extensions.profile.machine import thinned
from dlscale.extensions.programs import profile, steps, timed
from dlscale.extensions.programs.measure import PLAN, lines
from dlscale.extensions.programs.running import Outcome, Reading, measured
from dlscale.measure.profilers import Profile, TopEntry
from dlscale.measure.records import Throughput
from dlscale.report.verdict import Verdict
from dlscale.results import read_plan
from tests.conftest import ROOT
from tests.programs import write_program
from tests.test_outside import TRAIN, Clock, program
from tests.waiting import until


def measure(folder: Path, *words: object, path: str = os.environ["PATH"]) -> subprocess.CompletedProcess[str]:
    """Run `dlscale measure` in a folder; `path` is the search path for programs."""
    modules = os.pathsep.join(filter(None, [str(ROOT / "workflow_scripts"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": modules, "OMP_NUM_THREADS": "1", "PATH": path}
    command = [sys.executable, "-m", "dlscale", "measure", *map(str, words)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def found(folder: Path, name: str = "train") -> Throughput:
    return Throughput.read(folder / "results/plans" / PLAN / name / "throughput.json")


# ---- the page's examples -----------------------------------------------------------------------------


def example(of: str) -> str:
    """Return the page's example for the library `of`."""
    page = (ROOT / "docs/any_program.md").read_text()
    return next(
        block for block in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL) if of in block[:40]
    )


LIGHTNING = """
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)

    def training_step(self, batch):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


data = TensorDataset(torch.randn(320, 16), torch.randn(320, 1))
off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
Trainer(max_epochs=3, accelerator="cpu", callbacks=[Timed()], **off).fit(Model(), DataLoader(data, batch_size=8))
"""

TRANSFORMERS = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64, n_positions=16))
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (320, 16))]
known = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 3}
args = TrainingArguments("out", report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, **known)
Trainer(model=model, args=args, train_dataset=data, callbacks=[Timed()]).train()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "text"), [("lightning", LIGHTNING), ("transformers", TRANSFORMERS)], ids=["lightning", "transformers"]
)
def test_a_callback_reports_each_step(tmp_path: Path, library: str, text: str) -> None:
    if not importlib.util.find_spec(library):
        pytest.skip(f"{library} is not installed")
    path = program(tmp_path, example(f"# {library.capitalize()}") + text)
    ended = measure(tmp_path, "--", sys.executable, path)
    assert ended.returncode == 0, ended.stderr
    record = found(tmp_path)
    assert record.outside and (record.outside.way, record.batch_size) == ("timed", 8)
    assert 90 <= record.outside.steps <= 120 and record.outside.waiting is not None
    assert (
        measure(tmp_path, "--name", "plain", "--", sys.executable, "-c", "print('untouched')").stdout == "untouched\n"
    )


def test_a_callback_outside_a_measurement_does_nothing(tmp_path: Path) -> None:
    code = (
        "from dlscale.extensions.programs.timed import begun, ended; begun(8); ended(); begun(8); ended(); print('on')"
    )
    environment = {"PYTHONPATH": str(ROOT / "workflow_scripts")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("on\n", "") and not any(tmp_path.iterdir())


# ---- long runs ---------------------------------------------------------------------------------------


def test_files_of_long_runs_stay_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long log keeps only some lines, but still gives the right pace.

    The log has one hour of steps of 10 ms. Two fifths of each step are waiting time.
    """
    now = 1000.0
    monkeypatch.setattr(timed, "MAX_NOTES", 20_000)
    monkeypatch.setenv(timed.FOLDER, str(tmp_path))
    monkeypatch.setattr(timed, "clock", lambda: now)
    log, count = timed.Log("seen"), 360_000
    for _ in range(count):
        now += 0.004
        log.batch(0, 0.004, 8)
        now += 0.006
        log.step()
    log.write()
    (process,) = steps.read(tmp_path)[1]
    pace = steps.pace([process])
    assert len(process.steps) < count / 5 and process.gaps and pace
    assert pace.rates == pytest.approx([800.0] * 10, rel=1e-3)
    assert pace.waiting == pytest.approx(0.4, rel=1e-3) and pace.training == pytest.approx(1, abs=0.01)


def test_the_page_of_a_long_run_draws_means() -> None:
    rows = [{"time": float(second), **({"watts": 50.0 + second % 2} if second % 4 else {})} for second in range(86_400)]
    drawn = thinned(rows)
    assert (
        len(drawn) == 600
        and drawn[0]["time"] == pytest.approx(71.5)
        and drawn[5]["watts"] == pytest.approx(50.667, abs=0.01)
    )
    assert thinned(rows[:600]) == rows[:600] and thinned([]) == []


def test_steps_of_a_profiler_do_not_count(tmp_path: Path) -> None:
    """Steps that a profiler slows down are left out, on every rank.

    Steps just after the profiler are left out, too, because their batches were fetched while the profiler ran.
    """
    for rank in (0, 1):
        clock = Clock(tmp_path, rank)
        clock.epoch(100, wait=0.05, seconds=0.05)
        since = clock.now
        clock.epoch(20, wait=0.05, seconds=0.5)
        until = clock.now
        clock.epoch(15, wait=0.0, seconds=0.05)
        clock.epoch(100, wait=0.05, seconds=0.05)
    span = (since - 1000 + 1.7e9, until - 1000 + 1.7e9)
    processes = steps.read(tmp_path)[1]
    plain, apart = steps.pace(processes), steps.pace(processes, apart=[span])
    assert plain and apart and min(plain.rates) < 100
    assert apart.rates == pytest.approx([160.0] * 10) and apart.waiting == pytest.approx(0.5)
    assert apart.training == pytest.approx(1, abs=0.05), "no time may be missing between the counted steps"
    assert steps.pace(processes, apart=[(0.0, 2e9)]) is None
    printed = [(1.7e9 + 10 * number, 100.0 - 60 * (number == 5)) for number in range(1, 11)]
    rates = steps.pace_of_rates(printed, 1.7e9, None, apart=[(1.7e9 + 43, 1.7e9 + 49)])
    assert rates and rates.rates == [100.0] * 8
    points = [(1.7e9 + step * (0.1 if step < 50 else 0.15), float(step)) for step in range(0, 101, 10)]
    logged = steps.pace_of_log(points, None, apart=[(1.7e9 + 4.5, 1.7e9 + 20)])
    assert logged and logged.rates == pytest.approx([10.0] * 3)


# ---- profiles of a program ---------------------------------------------------------------------------

STACKS = """\
process 7:"sh -c a;b";process 8:"python t.py";thread (8): MainThread;<module> (t.py:9);step (t.py:3) 30
process 7:"sh -c a;b";process 8:"python t.py";thread (8): MainThread;<module> (t.py:9);step (t.py:4) 10
process 7:"sh -c a;b";process 8:"python t.py";thread (8): MainThread;<module> (t.py:9);Watcher._loaders.<locals>.f \
(sitecustomize.py:61);get (q.py:5) 60
process 7:"sh -c a;b";process 8:"python t.py";thread (81): Thread-1 (pin);run (q.py:1) 100
process 7:"sh -c a;b";process 8:"python t.py";process 9:"python t.py";thread (9): MainThread;\
loop (w.py:1);read (d.py:2) 50
"""


def test_functions_are_those_of_main_threads(tmp_path: Path) -> None:
    (tmp_path / "stacks").write_text(STACKS)
    stacks = profile.read_stacks(tmp_path / "stacks")
    assert {stack.processes for stack in stacks} == {(7, 8), (7, 8, 9)}
    unknown = profile.functions(stacks, [], seconds=0.2)
    known = profile.functions(stacks, [steps.Process(3, os.uname().nodename, 8)], seconds=0.2)
    assert {row.rank for row in unknown} == {0} and {row.rank for row in known} == {3}
    rows = {(row.kind, row.name): row for row in unknown}
    assert rows["function", "get (q.py)"].share == 0.6 and rows["function", "step (t.py)"].seconds == pytest.approx(
        0.08
    )
    outer = rows["function", "<module> (t.py)"]
    assert (outer.share, outer.total, outer.calls) == (0, 1, None)
    assert rows["worker", "read (d.py)"].share == 1 and len(rows) == 5
    picture = profile.flames(stacks)
    assert "read (d.py), 33" in picture and "&lt;module&gt;" in picture and "Watcher" not in picture


@pytest.mark.parametrize("steps_follow", [True, False])
def test_stacks_of_a_slow_start_are_replaced_by_those_of_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps_follow: bool
) -> None:
    """A program that imports PyTorch for a long time is sampled again after its first step."""
    tool = tmp_path / "py-spy"
    tool.write_text(
        "#!/bin/sh\nfor word; do out=${word#--output=}; [ $out = $word ] || name=$out; done\n"
        'echo "process 7:\\"python\\";thread (7): MainThread;$(ls $(dirname $name)/../steps | tr -d "\\n") 5" > $name\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(profile, "EARLY", 0.1)
    (tmp_path / "steps").mkdir()
    profilers = profile.Profilers(tmp_path)
    stacks = tmp_path / "profile/py-spy.folded"
    with profilers.sample_stacks(1):
        until("a profile of the start", lambda: stacks.exists() and stacks.read_text())
        clock = Clock(tmp_path / "steps") if steps_follow else None
        if clock:
            until("a profile of steps", lambda: "seen.host.0" in (stacks.read_text() if stacks.exists() else ""))
    after = [steps.Process(0, os.uname().nodename, 7, steps=[9e9, 9.1e9])]
    assert profilers._by_spy(after)[0].problem == profile.UNBEGUN, "no step was made in the sampled seconds"
    rows = profilers._by_spy([])[1]
    assert [row.name for row in rows] == ["seen.host.0" if steps_follow else ""]


def rows_of(folder: Path) -> list[TopEntry]:
    with (folder / "profile/profile_summary.csv").open(newline="") as file:
        return [TopEntry.model_validate(row) for row in csv.DictReader(file)]


@pytest.mark.slow
def test_an_unchanged_program_is_profiled(tmp_path: Path) -> None:
    """PyTorch's profiler and py-spy profile a program without changing its output."""
    if not (shutil.which("py-spy") or Path(sys.executable).with_name("py-spy").exists()):
        pytest.skip("py-spy is not installed")
    text = TRAIN.replace("range(4)", "range(16)")
    ended = measure(tmp_path, "--profile", "--", sys.executable, program(tmp_path, text), 0.004)
    assert ended.returncode == 0, ended.stderr
    assert re.fullmatch(r"(avg \S+ samples/sec\n){16}", ended.stdout)
    folder = tmp_path / "results/plans" / PLAN / "train"
    record, rows = Profile.read(folder / "profile/profile.json"), rows_of(folder)
    by_torch, by_spy = record.tools
    assert by_torch.problem is None and by_spy.problem is None, ended.stderr
    assert (
        by_torch.steps == 10 and by_torch.overhead and {"step", "data", "backward", "optimizer"} <= {*by_torch.ranges}
    )
    assert by_torch.ranges["data"].seconds > 0.5 * by_torch.ranges["step"].seconds, (
        "the dataset must dominate, because it sleeps"
    )
    assert {row.name for row in rows if row.tool == "torch"} >= {"aten::addmm", "aten::mse_loss"}
    (sleeping,) = [row for row in rows if row.tool == "py-spy" and row.name.startswith("Slow.__getitem__")]
    assert sleeping.share > 0.5 and sleeping.total == pytest.approx(sleeping.share, abs=0.05)
    files = {"profile.json", "profile_summary.csv", "torch.rank0.json.gz", "py-spy.folded", "py-spy.svg"}
    assert {path.name for path in (folder / "profile").iterdir()} == files
    page = (tmp_path / "results/plans" / PLAN / "report.html").read_text()
    assert "Slow.__getitem__" in page and "py-spy.svg" in page and "waiting for data" in page
    assert "Slow.__getitem__" in ended.stderr and "torch, 10 steps: waiting for data" in ended.stderr
    assert "dlscale measure --profile" not in ended.stderr, "the run has a profile, so the verdict must not suggest one"
    measured = found(tmp_path)
    assert measured.full and measured.outside and not measured.outside.profiled
    assert "KINETO" not in ended.stderr and "profiler_start" not in ended.stderr


CLOSURE = """
import time, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def closure():
    time.sleep(0.01)
    optimizer.zero_grad()
    loss = model(torch.ones(8)).sum()
    loss.backward()
    return loss
for _ in range(60):
    optimizer.step(closure)
"""


@pytest.mark.slow
def test_time_in_a_closure_is_not_optimiser_time(tmp_path: Path) -> None:
    """Time in a closure counts for the phases in the closure, not for the optimiser.

    Lightning computes the model in a closure of its optimiser's step.
    """
    ended = measure(tmp_path, "--profile", "--", sys.executable, program(tmp_path, CLOSURE), 0)
    assert ended.returncode == 0, ended.stderr
    record = Profile.read(tmp_path / "results/plans" / PLAN / "train/profile/profile.json")
    ranges = {name: found.seconds for name, found in record.tools[0].ranges.items()}
    assert 0 < ranges["optimizer"] < 0.2 * ranges["step"] and 0 < ranges["backward"] < 0.2 * ranges["step"]


@pytest.mark.slow
def test_a_page_compares_runs_of_one_program_alone(tmp_path: Path) -> None:
    """Three runs: one script with two argument lists, and another script."""
    train, other = write_program(tmp_path / "a") / "train.py", tmp_path / "a/other.py"
    other.write_text(train.read_text())
    for words in ([train, "--seconds=0.005"], [train], [other]):
        ended = measure(tmp_path, "--", sys.executable, *words)
        assert ended.returncode == 0, ended.stderr
    page = (tmp_path / "results/plans" / PLAN / "report.html").read_text()
    names = ("train", "other", "train_2")
    assert [f'id="plan.{name}"' in page for name in names] == [True, True, False]
    assert "2 plans, 3 runs" in page and "Each run was timed separately" in page
    plan = read_plan(tmp_path / "results/plans" / PLAN / "plan.yaml")
    assert len({run.compute for run in plan.runs}) == 3, "each run must count as different work"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "epochs", "message", "by_torch"),
    [
        ("Permission Denied: Try running again", 2, "py-spy is not allowed to read other processes", "torch, 10 steps"),
        (
            "no such thing",
            1,
            "py-spy made no profile: Error: no such thing",
            "the program ended during the profiled steps",
        ),
        (None, 0, "the program ended before py-spy sampled it", "fewer than 30 steps of PyTorch's optimisers"),
    ],
)
def test_failing_profilers_are_reported(
    tmp_path: Path, said: str | None, epochs: int, message: str, by_torch: str
) -> None:
    """If the profilers fail, the program is still measured and ends normally."""
    (tmp_path / "bin").mkdir()
    spy = tmp_path / "bin/py-spy"
    spy.write_text(f"#!/bin/sh\necho 'Error: {said}' >&2; exit 1\n")
    spy.chmod(spy.stat().st_mode | stat.S_IXUSR)
    text = TRAIN.replace("range(4)", f"range({epochs or 1})").replace("return 160", f"return {160 if epochs else 80}")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    ended = measure(tmp_path, "--profile", "--", sys.executable, program(tmp_path, text), 0.001, path=path)
    assert ended.returncode == 0 and by_torch in ended.stderr, ended.stderr
    if said != "no such thing" or "before py-spy sampled" not in ended.stderr:  # the program may end first
        assert f"py-spy: no profile: {message}" in ended.stderr
    record = found(tmp_path)
    assert record.outside and not record.outside.profiled
    assert json.loads((tmp_path / "results/plans" / PLAN / "train/profile/profile.json").read_text())["tools"]


def test_a_run_with_only_profiled_steps_is_reported(tmp_path: Path) -> None:
    ended = Outcome(0, 1.7e9, 30.0, None, None, [(1.7e9 + 15, 100.0)], {})
    for apart, said in (([(1.7e9 + 10, 1.7e9 + 20)], True), ([(1.7e9 + 20, 1.7e9 + 30)], False)):
        throughput, _ = measured(["python"], tmp_path, tmp_path / "none.csv", ended, Reading(rate="nersc"), apart)
        assert throughput.outside and throughput.outside.profiled == said and throughput.full
        text = "\n".join(lines(tmp_path, throughput, Verdict(None, [], "", "", "")))
        assert ("Measure again without --profile" in text) == said


def test_no_program_waits_until_pytorch_is_imported() -> None:
    code = "import sys, dlscale.extensions.programs.measure; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT / "workflow_scripts").returncode == 0
