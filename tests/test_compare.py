"""`dlscale compare` and `history`: noise is not reported as a change, and with `--gate` a loss of speed fails."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from dlscale.cli import main
from dlscale.core.files import save_png
from dlscale.extensions.compare import history
from dlscale.measure.records import PairedTiming, Throughput, Trials
from dlscale.parallel.records import Device
from tests.test_environment import BEFORE
from tests.test_report import Results
from tests.test_speedup import noisy


class Machine:
    """Machine that measures runs of known speeds, with random noise in each measurement."""

    def __init__(self, root: Path, seed: int = 0) -> None:
        self.root, self._draw = root, np.random.default_rng(seed)

    def measure(
        self, folder: str, speeds: dict[str, float], spread: float | dict[str, float] = 0.01, **more: Any
    ) -> Path:
        """Write results of plan `p`, in which runs have a paired timing with the first run; return the folder."""
        results = Results(self.root / folder)
        for name, speed in speeds.items():
            path, own = results.run("p", name), spread[name] if isinstance(spread, dict) else spread
            mean = speed * math.exp(self._draw.normal(0, own))
            ratio = speed / next(iter(speeds.values())) * math.exp(self._draw.normal(0, own / 4))
            trials = Trials(
                trial_throughput=[mean * 0.99, mean, mean * 1.01], trial_time=[1.0] * 3, mean=mean, std=mean / 100
            )
            beside = PairedTiming(
                compute=next(iter(speeds)),
                openings=[[(100 * r, 100.0)] for r in noisy(ratio, seed=int(self._draw.integers(1 << 30)))],
            )
            measured = Throughput.read(path / "throughput.json")
            parts = {"io": Trials(mean=1000), "synthetic": Trials(mean=400)}
            update = {"full": trials, **parts, "compute": name, "beside": beside, **more}
            measured.model_copy(update=update).write(path / "throughput.json")
        results.plan("p", {name: name for name in speeds})
        return self.root / folder


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.chdir(tmp_path)
    return Machine(tmp_path)


SPEEDS = {"first": 100.0, "fast": 150.0, "faster": 200.0}


def rows(said: str) -> dict[str, str]:
    """Return the rows of a printed table by their first word, without the spaces between columns."""
    lines = [line.split() for line in said.splitlines()]
    return {words[0]: " ".join(words[1:]) for words in lines if words}


# ---- compare ---------------------------------------------------------------------------------------


def test_two_results_are_compared_run_by_run(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    before = machine.measure("before", SPEEDS, spread=0)
    after = machine.measure("after", {"first": 100.0, "fast": 180.0, "new": 300.0}, spread=0)
    assert main(["compare", str(before), str(after)]) == 0
    said = capsys.readouterr().out
    first, fast = (rows(said)[f"p.{name}"] for name in ("first", "fast"))
    assert first.startswith("100 100 1.00× ± 0.060, within noise – 0."), (
        "the first run must not have a speed-up over itself"
    )
    assert re.match(r"150 180 1\.20× ± 0\.0\d+ 1\.20× ± 0\.0", fast)
    assert f"only in {before}: p.faster" in said and f"only in {after}: p.new" in said


def test_plans_are_compared_by_their_runs(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.measure("results", SPEEDS)
    results = Results(machine.root / "results")
    results.run("q", "fast", loader={"kind": "torch", "workers": 4}, final=0.4)
    results.plan("q", {"fast": "fast"})
    (machine.root / "p").mkdir()  # a plan may have the same name as a folder without results
    assert main(["compare", "p", "q", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["run"] for each in found["runs"]] == ["fast"]
    assert found["runs"][0]["settings"] == ["loader.workers 0 -> 4"]
    assert found["runs"][0]["valid_loss"][0] > found["runs"][0]["valid_loss"][1]
    assert found["alone"]["p"] == ["first", "faster"]


def test_two_runs_are_compared(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """Two runs of one plan or of two plans are compared, by PLAN.RUN or by folder.

    A run is also compared with the run of the same name in a plan or folder.
    """
    machine.measure("results", SPEEDS, spread=0)
    machine.measure("before", {"first": 50.0, "fast": 50.0}, spread=0)
    results = Results(machine.root / "results")
    results.run("q", "else", loader={"kind": "torch", "workers": 4})
    results.plan("q", {"else": "else"})
    for names, row, speeds in (
        (("p.first", "p.fast"), "p.first -> p.fast", [100, 150]),
        (("p.fast", "results/plans/p/first"), "p.fast -> p.first", [150, 100]),
        (("p.fast", "p.fast"), "p.fast", [150, 150]),
        (("p.first", "q.else"), "p.first -> q.else", [100, 22]),
        (("before", "p.fast"), "p.fast", [50, 150]),
        (("before/plans/p/fast", "p"), "p.fast", [50, 150]),
    ):
        assert main(["compare", *names, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [each["run"] for each in found["runs"]] == [row]
        assert found["runs"][0]["samples_per_second"] == pytest.approx(speeds)
        assert found["runs"][0]["speed"]["ratio"] == pytest.approx(speeds[1] / speeds[0])
        assert found["alone"] == {}


def test_runs_of_other_studies_are_refused(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs of different studies are refused without --force, even if their plans or runs have the same name."""
    for folder, study in (("results", "forecast"), ("elsewhere", "gas")):
        results = Results(machine.root / folder)
        for plan, its in (("p", study), ("same", "forecast"), ("q", "gas")):
            results.run(plan, "a", its)
            results.plan(plan, {"a": "a"}, study=its)
    for names in (("p.a", "q.a"), ("p", "q"), ("results", "elsewhere"), ("p.a", "elsewhere/plans/p/a")):
        assert main(["compare", *names]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"dlscale compare: {' and '.join(names)}: the studies differ (forecast and gas)")
        assert "--force" in line
        assert main(["compare", *names, "--force"]) == 0
        assert "study forecast -> gas" in capsys.readouterr().out
    assert main(["compare", "same", "elsewhere/plans/same"]) == 0


def test_other_software_is_named_in_a_line(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [machine.measure("before", SPEEDS), machine.measure("after", SPEEDS)]
    after = BEFORE.model_copy(update={"versions": {**BEFORE.versions, "driver": "580.2"}})
    for folder, met in zip(folders, (BEFORE, after), strict=True):
        for run in ("first", "fast"):
            (folder / f"plans/p/{run}/telemetry").mkdir(exist_ok=True)
            met.write(folder / f"plans/p/{run}/telemetry/throughput.json")
    assert main(["compare", "--gate", *map(str, folders)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("(p.first, p.fast)" in line and "driver 570.1 → 580.2" in line for line in lines)


def test_unfinished_runs_are_left_out(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """A run without a result is left out, and all other runs are compared."""
    before, after = machine.measure("before", SPEEDS), machine.measure("after", SPEEDS)
    (before / "plans/p/fast/metrics.jsonl").unlink()
    assert main(["compare", str(before), str(after)]) == 0
    said = capsys.readouterr()
    assert "p.first" in rows(said.out) and f"only in {after}: p.fast" in said.out
    (line,) = said.err.splitlines()
    assert line.startswith("left out: p.fast: ") and "metrics.jsonl" in line


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("p", "nowhere"), "no plan is called 'nowhere'"),
        (("p.first", "p.frist"), "p.frist: no such run; expected PLAN.RUN"),
        (("p.first", "other.empty"), "other.empty: no stage of the run is finished"),
        (("p", "other"), "no run in common"),
        (("results", "elsewhere"), "no run in common"),
        (("p", "./p"), "./p: expected a run (PLAN.RUN), a plan"),
        (("p", "empty"), "empty: expected a run (PLAN.RUN), a plan"),
    ],
)
def test_incomparable_results_give_one_message(
    machine: Machine, capsys: pytest.CaptureFixture[str], names: tuple[str, str], said: str
) -> None:
    machine.measure("results", SPEEDS)
    results = Results(machine.root / "results")
    results.run("other", "else")
    results.plan("other", {"else": "else"})
    results.run("other", "empty", epochs=0, triplet=None)
    elsewhere = Results(machine.root / "elsewhere")
    for plan in ("q", "r"):  # names that the plans in `results` do not have
        elsewhere.run(plan, "fast")
        elsewhere.plan(plan, {"fast": "fast"})
    (machine.root / "empty/plans").mkdir(parents=True)
    assert main(["compare", *names]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


# ---- gate ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_five_per_cent_fail_the_comparison_and_noise_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 1 % noise, at most 2 of 40 equal results fail; if a run is 5 % slower, at least 38 of 40 results fail."""
    monkeypatch.chdir(tmp_path)
    machine = Machine(tmp_path, seed=5)
    machine.measure("before", SPEEDS)
    equal, slower = (
        [main(["compare", "before", str(machine.measure("after", speeds)), "--gate"]) for _ in range(40)]
        for speeds in (SPEEDS, {**SPEEDS, "fast": 150 / 1.05})
    )
    assert set(equal) | set(slower) <= {0, 1}
    assert sum(equal) <= 2
    assert sum(slower) >= 38


def test_slower_runs_are_named(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """A run with other work, another device or a single trial cannot be judged."""
    before = machine.measure("before", SPEEDS)
    after = machine.measure("after", {**SPEEDS, "fast": 120.0})
    assert main(["compare", str(before), str(after)]) == 0
    capsys.readouterr()
    assert main(["compare", str(before), str(after), "--gate"]) == 1
    assert capsys.readouterr().out.endswith("slower beyond noise: p.fast\n")
    assert main(["compare", str(after), str(before), "--gate"]) == 0
    once = {"full": Trials(trial_throughput=[50.0], trial_time=[1.0], mean=50.0), "beside": None}
    for more in ({"device": Device(kind="cuda", name="A100")}, {"compute": "other"}, once):
        machine.measure("after", {name: speed / 2 for name, speed in SPEEDS.items()}, **more)
        assert main(["compare", str(before), str(after), "--gate"]) == 2
        assert "--gate cannot compare any run" in capsys.readouterr().err
    assert main(["compare", str(before), str(after), "--gate", "--profiles"]) == 2
    assert "--gate compares speeds" in capsys.readouterr().err


# ---- history: each result compared with the previous result ----------------------------------------------


DAYS = ("2026-03-01", "2026-05-01", "2026-07-01")


def measured(machine: Machine, speeds: tuple[float, ...]) -> list[str]:
    """Measure plan `p` on each day of `DAYS`, on the last day with a new driver; return the folders, newest first."""
    folders = []
    for day, speed in zip(DAYS, speeds, strict=True):
        folder = machine.measure(day, {"first": speed, "fast": 1.5 * speed}, spread=0)
        driver = {"driver": "580.2"} if day == DAYS[-1] else {}
        for run in ("first", "fast"):
            (folder / f"plans/p/{run}/telemetry").mkdir(exist_ok=True)
            update = {"time": f"{day}T12:00:00+00:00", "versions": BEFORE.versions | driver}
            BEFORE.model_copy(update=update).write(folder / f"plans/p/{run}/telemetry/throughput.json")
        folders.append(str(folder))
    return folders[::-1]


def test_each_result_is_compared_with_the_previous_one(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    folders = measured(machine, (100.0, 101.0, 150.0))
    shutil.copytree(folders[0], "copy")  # the copy must count once
    assert main(["history", *folders, "copy", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first = [each for each in found if each["run"] == "p.first"]
    assert [each["run"] for each in found] == ["p.fast"] * 3 + ["p.first"] * 3
    assert [each["time"][:10] for each in first] == list(DAYS)
    assert [each["samples_per_second"] for each in first] == pytest.approx([100, 101, 150])
    assert [each["ratio"] for each in first] == [None, pytest.approx(1.01), pytest.approx(150 / 101)]
    assert first[0]["over_before"] is None and "within noise" in first[1]["over_before"]
    assert "noise" not in first[2]["over_before"] and first[2]["differs"] == "driver 570.1 → 580.2"
    assert main(["history", *folders]) == 0 and "NaN" not in capsys.readouterr().out


def test_other_work_and_other_devices_are_not_compared(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    others: tuple[dict[str, Any], ...] = ({}, {"device": Device(kind="cuda", name="a GPU")}, {"compute": "other"})
    folders = [str(machine.measure(f"{n}", {"first": 100.0 * n}, **more)) for n, more in enumerate(others, 1)]
    assert main(["history", *folders, "--json"]) == 0
    assert [each["over_before"] for each in json.loads(capsys.readouterr().out)] == [None] * 3


def test_history_since_a_day_is_printed_and_drawn(
    machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = measured(machine, (100.0, 101.0, 150.0))
    drawn = list[Any]()

    def save(figure: Any, path: Path, dpi: int) -> None:
        drawn.append(figure)
        save_png(figure, path, dpi)

    monkeypatch.setattr(history, "save_png", save)
    assert main(["history", *folders, "--since", DAYS[1], "--out", "history.png"]) == 0
    said = capsys.readouterr().out
    assert said.count("p.first") == 2 and "2026-05-01 12:00" in said and DAYS[0] not in said
    (fast, _) = drawn[0].axes[0].containers
    assert fast.lines[0].get_ydata() == pytest.approx([1, 150 / 101])
    assert "p.fast" in rows(said) and Image.open(Path("history.png")).size == (900, 500)


def test_a_dollar_in_a_name_is_drawn_as_text(tmp_path: Path) -> None:
    found = pd.DataFrame({"run": ["p.r"], "device": [r"GPU $\foo{$ x"], "time": [f"{DAYS[0]}T00:00:00+00:00"]})
    history.draw(found.assign(samples_per_second=1.0, steps_per_second=math.nan, interval=0.1), tmp_path / "h.png")
    assert Image.open(tmp_path / "h.png").size == (900, 500)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--since", "yesterday"], "--since: yesterday: expected a day such as 2026-11-26"),
        (["--since", "2027-01-01"], "history: no measurements since 2027-01-01"),
    ],
)
def test_a_wrong_history_call_gives_one_message(
    machine: Machine, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["history", *measured(machine, (100.0, 101.0, 150.0)), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
