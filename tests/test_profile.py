"""The profile stage writes files of each profiler and process, reports failures, and has no effect on training."""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dlscale.config.run import load_run
from dlscale.core import ranges
from dlscale.core.errors import UserError
from dlscale.core.ranges import marking
from dlscale.extensions.profile import lines, profile
from dlscale.extensions.profile.torch_profiler import TorchProfiler
from dlscale.extensions.profile.window import Window
from dlscale.measure.profilers import Profile, TopEntry, Unavailable
from dlscale.parallel.world import World
from dlscale.train.build import open_session
from dlscale.train.step import Step
from tests.conftest import COSMO, COSMO_RUN, make_run, stage, train
from tests.test_parallel import configure, launch

STEPS = 4
ALL = ["torch", "lines"]


def profiled(folder: Path, data: Path, over: dict[str, Any] | None = None, **settings: Any) -> int:
    """Profile the tiny U-Net; return the exit status."""
    plain = {**COSMO_RUN, "loader": {"workers": 0}, "profile": {"skip": 1, "steps": STEPS, **settings}}
    make_run(folder, "cosmo_unet", {**plain, **(over or {})}, COSMO)
    arguments = ["--config", folder / "config.yaml", "--manifest", data / "manifest.json", "--threads", 1]
    return stage("profile", *arguments, "--device", "cpu", "--out", folder / "profile")


def rows_of(folder: Path) -> list[TopEntry]:
    with (folder / "profile/profile_summary.csv").open(newline="") as file:
        return [TopEntry.model_validate(row) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, cosmo_data: Path) -> Path:
    folder = tmp_path_factory.mktemp("profiled")
    (folder / "profile").mkdir()
    (folder / "profile/of_a_former_call.txt").write_text("")
    assert profiled(folder, cosmo_data, tools=ALL, functions=["dlscale.train.step:set_learning_rate"]) == 0
    return folder


# ---- files of a profile ------------------------------------------------------------------------------------------


def test_each_profiler_is_timed_against_plain_steps(done: Path) -> None:
    found = Profile.read(done / "profile/profile.json")
    assert [tool.name for tool in found.tools] == ALL == found.settings["tools"]
    assert len(found.seconds_per_step) == 2 * STEPS * len(ALL), (
        "there must be plain steps before and after each profiler"
    )
    assert min(found.seconds_per_step) > 0
    assert (found.nranks, found.batch_size, found.device.kind) == (1, 4, "cpu")
    for tool in found.tools:
        assert tool.problem is None and tool.version and tool.steps == STEPS
        assert tool.seconds_per_step and tool.seconds_per_step > 0
        assert tool.overhead and tool.overhead.ratio > 0.2 and tool.overhead.noise
    torch_tool = found.tools[0]
    assert set(torch_tool.ranges) == {"step", "data", "copy", "forward", "backward", "optimizer"}
    inside = sum(torch_tool.ranges[name].seconds for name in ("data", "forward", "backward", "optimizer"))
    assert 0.8 * torch_tool.ranges["step"].seconds < inside < torch_tool.ranges["step"].seconds
    assert torch_tool.activity.items == 0, "a step must not wait for a value of the device"
    assert len({(row.tool, row.kind) for row in found.top}) >= 3
    assert max(Counter((row.tool, row.kind) for row in found.top).values()) <= profile.TOP
    assert {each.module for each in found.work} >= {"down.0.0 (Conv3d)", "backward", "optimizer"}


def test_the_files_are_those_that_are_named(done: Path) -> None:
    """The folder has exactly the files that the record names: files of an earlier call are removed."""
    found = Profile.read(done / "profile/profile.json")
    named = {file for tool in found.tools for file in tool.files.values()}
    assert named == {"torch.rank0.json.gz", "lines.rank0.txt"}
    assert {file.name for file in (done / "profile").iterdir()} == named | {"profile.json", "profile_summary.csv"}
    assert {file.name for file in done.iterdir()} == {"config.yaml", "profile"}
    with gzip.open(done / "profile/torch.rank0.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    counts = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
    assert [counts[name] for name in ("step", "data", "forward", "backward", "optimizer")] == [STEPS] * 5


def test_lines_are_those_of_step_model_loss_samples_and_loader(done: Path) -> None:
    rows = {row.name: row for row in rows_of(done) if row.tool == "lines"}

    def the(file: str, text: str) -> TopEntry:
        (one,) = [row for name, row in rows.items() if name.startswith(f"{file}:") and text in name]
        return one

    for file, text, calls in (
        ("dlscale/train/step.py", ".backward()", 1),
        ("dlscale/extensions/cosmo_unet/model.py", "return torch.tanh(", 1),
        ("dlscale/extensions/cosmo_unet/scores.py", "loss_B = ", 1),
        ("dlscale/data/samples.py", "return x, self.target.read(", 4),  # one call per sample of a batch
        ("dlscale/data/loaders/base.py", "x, y = samples.read(", 4),
    ):
        assert the(file, text).calls == calls, file
    whole = the("dlscale/train/step.py", "return self._train(")
    assert the("dlscale/train/step.py", ".backward()").seconds < whole.seconds < 1.5 * whole.seconds / whole.share
    text = (done / "profile/lines.rank0.txt").read_text()
    assert "def gradients(" in text and "% Time" in text


def test_where_other_processes_read_this_one_does_for_once(tmp_path: Path, cosmo_data: Path) -> None:
    assert profiled(tmp_path, cosmo_data, {"loader": {"workers": 1}}, tools=["lines"]) == 0
    reading = [row for row in rows_of(tmp_path) if row.note == lines.ELSEWHERE]
    (read,) = [row for row in reading if "return x, self.target.read(" in row.name]
    assert read.calls == 4 and read.seconds > 0
    assert all("samples.py" in row.name for row in reading)


# ---- failures ----------------------------------------------------------------------------------------------------


def test_a_failing_profiler_is_reported(
    tmp_path: Path, cosmo_data: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a profiler fails, the other profilers continue. If all profilers fail, the stage fails."""

    def forbidden(tool: TorchProfiler) -> None:
        raise Unavailable("CUPTI is refused")

    monkeypatch.setattr(TorchProfiler, "attached", forbidden)
    assert profiled(tmp_path / "a", cosmo_data, tools=["torch", "lines"]) == 0
    refused, timed = Profile.read(tmp_path / "a/profile/profile.json").tools
    assert refused.problem == "CUPTI is refused" and timed.problem is None and timed.files
    assert profiled(tmp_path / "b", cosmo_data, tools=["torch"]) == 2
    assert "no profiler works here: torch: CUPTI is refused" in capfd.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "b/profile").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dlscale.train.step", "expected MODULE:NAME or MODULE:CLASS.NAME"),
        ("no.such:thing", "No module named 'no'"),
        ("dlscale.train.step:Step.gradient", "no attribute 'gradient'"),
        ("math:sin", "MODULE:CLASS.NAME of a Python function"),
        ("exits_at_import:f", "profile.functions: exits_at_import:f: 0; expected an importable name"),
    ],
)
def test_functions_are_found_by_their_names(
    tmp_path: Path, name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "exits_at_import.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert lines.resolve("dlscale.train.step:Step.gradients") is Step.gradients
    with pytest.raises(UserError, match=re.escape(words)):
        lines.resolve(name)


@pytest.mark.slow
def test_a_wrong_setting_is_one_message(tmp_path: Path, cosmo_data: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert profiled(tmp_path, cosmo_data, tools=["lines"], ranks=[0, 1]) == 2
    assert "profile.ranks: 1: this run has 1 process" in capfd.readouterr().err.splitlines()[-1]


# ---- ranges ------------------------------------------------------------------------------------------------------


@pytest.fixture
def window(tmp_path: Path, cosmo_data: Path) -> Iterator[Window]:
    over = {"loader": {"workers": 0}, "profile": {"skip": 1, "steps": 3}, "accumulation_steps": 2}
    run = load_run(make_run(tmp_path, "cosmo_unet", {**COSMO_RUN, **over}, COSMO), "profile")
    session: Any = open_session(run, cosmo_data / "manifest.json", World(), 1)
    window = Window(session.run.profile, session)
    window.run(1)
    yield window
    window.close()


def test_ranges_are_balanced_and_nested(window: Window) -> None:
    seen: list[str] = []

    @contextmanager
    def noted(name: str) -> Iterator[None]:
        seen.append(name)
        yield
        seen.append(f"/{name}")

    with marking(noted):
        seconds = window.run(2)
    data = ["data", "copy", "/copy", "/data"]
    part = ["forward", "/forward", "backward", "/backward"]
    assert seen == ["step", *data, *part, *part, "optimizer", "/optimizer", "/step"] * 2
    assert len(seconds) == 2 and window.number == 3
    assert set(seen) <= {*ranges.RANGES, *(f"/{name}" for name in ranges.RANGES)}


def test_a_profiler_closes_ranges_after_an_error(window: Window, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), TorchProfiler(tmp_path, 0, torch.device("cpu")).attached():
        window.run(1)
        raise ZeroDivisionError
    assert ranges._marker is None
    assert not torch.autograd.profiler._is_profiler_enabled


# ---- several processes, and no effect on trainings ---------------------------------------------------------------


@pytest.mark.slow
def test_two_processes(tmp_path: Path, era5_data: Path) -> None:
    """Each profiled rank has files and rows, and all-reduces have their own range."""
    folder = configure(tmp_path, "era5_vit", 2, profile={"tools": ["torch", "lines"], "steps": 3, "ranks": [1, 0]})
    arguments = ["--config", folder / "config.yaml", "--manifest", era5_data / "manifest.json", "--threads", 2]
    ended = launch("profile", 2, *arguments, "--out", folder / "profile", "--log", folder / "log")
    assert ended.returncode == 0, ended.stderr + (folder / "log").read_text()
    found, rows = Profile.read(folder / "profile/profile.json"), rows_of(folder)
    files = {f"{name}.rank{rank}.{end}" for name, end in (("torch", "json.gz"), ("lines", "txt")) for rank in (0, 1)}
    assert {file.name for file in (folder / "profile").iterdir()} == {*files, "profile.json", "profile_summary.csv"}
    assert {file for tool in found.tools for file in tool.files.values()} == files
    seen = found.tools[0]
    assert found.nranks == 2 and 0 < seen.ranges["comm"].seconds < seen.ranges["step"].seconds
    assert seen.activity.comm_seconds and 0 <= seen.activity.comm_overlap <= 1  # type: ignore[operator]
    for rank in (0, 1):
        mine = {row.name for row in rows if row.rank == rank and row.kind == "range"}
        assert mine == {"step", "data", "copy", "forward", "backward", "optimizer", "comm"}
    assert {row.rank for row in rows if row.tool == "lines"} == {0, 1}
    assert {row.rank for row in found.top} == {0}
    assert {each.operator for each in found.work} >= {"addmm", "mm"}


@pytest.mark.slow
def test_training_is_the_same_after_a_profile(tmp_path: Path, cosmo_data: Path) -> None:
    """A profile in the same folder changes no bit of the weights, and a training does not change `profile.json`."""
    make_run(tmp_path / "plain", "cosmo_unet", {**COSMO_RUN, "loader": {"workers": 0}}, COSMO)
    assert profiled(tmp_path / "profiled", cosmo_data, tools=["torch", "lines"]) == 0
    before = (tmp_path / "profiled/profile/profile.json").read_bytes()
    for name in ("plain", "profiled"):
        assert train(tmp_path / name, cosmo_data / "manifest.json", "--device", "cpu") == 0
    assert (tmp_path / "profiled/profile/profile.json").read_bytes() == before
    assert (tmp_path / "plain/model.pt").read_bytes() == (tmp_path / "profiled/model.pt").read_bytes()
