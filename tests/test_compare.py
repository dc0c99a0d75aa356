"""`dlscale compare`, and its `--gate`: results beside earlier ones, where noise is no change and a loss is one."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlscale.cli import main
from dlscale.measure.records import Beside, Throughput, Trials, Usage
from dlscale.parallel.records import Device
from dlscale.report.gate import Look
from tests.test_report import Results
from tests.test_speedup import noisy


def crowd(folder: Path, others: float = 0.45) -> None:
    """Have it that other programs kept such a share of the two cores busy while a run was timed."""
    measured = Throughput.read(folder / "throughput.json")
    assert measured.full
    used = Usage(seconds=10.0, cores=2, cpu_seconds=5.0, cores_cpu_seconds=5.0 + 20 * others)
    measured.model_copy(update={"full": measured.full.model_copy(update={"usage": used})}).write(
        folder / "throughput.json"
    )


class Machine:
    """A machine on which runs of known speeds are measured again and again, each time a little otherwise."""

    def __init__(self, root: Path, seed: int = 0) -> None:
        self.root, self._draw = root, np.random.default_rng(seed)

    def measure(
        self, folder: str, speeds: dict[str, float], spread: float | dict[str, float] = 0.01, **more: Any
    ) -> Path:
        """Write a results folder with plan `p`; the first run is the one that the others are timed in turn with."""
        results = Results(self.root / folder)
        for name, speed in speeds.items():
            path, own = results.run("p", name), spread[name] if isinstance(spread, dict) else spread
            mean = speed * math.exp(self._draw.normal(0, own))
            ratio = speed / next(iter(speeds.values())) * math.exp(self._draw.normal(0, own / 4))
            trials = Trials(
                trial_throughput=[mean * 0.99, mean, mean * 1.01], trial_time=[1.0] * 3, mean=mean, std=mean / 100
            )
            beside = Beside(
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


def gate(results: Path, *more: str) -> int:
    assert results == Path.cwd() / "results"
    return main(["compare", "p", "--gate", "reference.json", *more])


def rows(said: str) -> dict[str, str]:
    """Return the rows of a printed table by their first words, without the spaces between columns."""
    lines = [line.split() for line in said.splitlines()]
    return {words[0]: " ".join(words[1:]) for words in lines if words}


# ---- compare ---------------------------------------------------------------------------------------


def test_two_results_are_compared_run_by_run(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    before = machine.measure("before", SPEEDS, spread=0)
    after = machine.measure("after", {"first": 100.0, "fast": 180.0, "new": 300.0}, spread=0)
    assert main(["compare", str(before), str(after)]) == 0
    said = capsys.readouterr().out
    first, fast = (rows(said)[f"p.{name}"] for name in ("first", "fast"))
    assert first.startswith("100 100 1.00× ± 0.060, within noise – 0."), "not over itself"
    assert re.match(r"150 180 1\.20× ± 0\.0\d+ 1\.20× ± 0\.0", fast)
    assert f"only in {before}: p.faster" in said and f"only in {after}: p.new" in said


def test_a_busy_machine_is_told_where_runs_are_compared(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each run that it concerns, by what the page goes by: a neighbour, or speeds that cannot be."""
    before, after = (machine.measure(folder, SPEEDS, spread=0) for folder in ("before", "after"))
    assert main(["compare", str(before), str(after)]) == 0
    assert "busy" not in capsys.readouterr().out
    crowd(after / "plans/p/fast")
    for name, synthetic in (("first", 600.0), ("faster", 210.0)):
        file = before / f"plans/p/{name}/throughput.json"
        measured = Throughput.read(file)
        measured.model_copy(update={"synthetic": Trials(mean=synthetic)}).write(file)
    assert main(["compare", str(before), str(after)]) == 0
    said = rows(capsys.readouterr().out)
    neighbour = "other programs kept 45\u00a0% of the cores busy"
    assert said["p.fast"].endswith(" ".join(f"– -> {neighbour}".split()))
    assert "SYNTHETIC is the same computation in faster and in first" in said["p.first"]
    assert main(["compare", str(before), str(after), "--json"]) == 0
    found = {run["run"]: run["busy"] for run in json.loads(capsys.readouterr().out)["runs"]}
    assert found["p.fast"] == [None, neighbour] and found["p.faster"][0] and not found["p.faster"][1]


def test_plans_are_compared_by_their_runs(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.measure("results", SPEEDS)
    results = Results(machine.root / "results")
    results.run("q", "fast", loader={"kind": "torch", "workers": 4}, final=0.4)
    results.plan("q", {"fast": "fast"})
    assert main(["compare", "p", "q", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["run"] for each in found["runs"]] == ["fast"]
    assert found["runs"][0]["settings"] == ["loader.workers 0 -> 4"]
    assert found["runs"][0]["valid_loss"][0] > found["runs"][0]["valid_loss"][1]
    assert found["alone"]["p"] == ["first", "faster"]


def test_what_is_not_finished_is_left_out(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """One run that lacks a result, of any plan in the folder, does not keep the others from being compared."""
    before, after = machine.measure("before", SPEEDS), machine.measure("after", SPEEDS)
    (before / "plans/p/fast/metrics.jsonl").unlink()
    assert main(["compare", str(before), str(after)]) == 0
    said = capsys.readouterr()
    assert "p.first" in rows(said.out) and f"only in {after}: p.fast" in said.out
    (line,) = said.err.splitlines()
    assert line.startswith("left out: p.fast: ") and "metrics.jsonl" in line
    for run in SPEEDS:
        (before / f"plans/p/{run}/metrics.jsonl").unlink(missing_ok=True)
    assert main(["compare", str(before), str(after)]) == 2
    assert "no run is finished; p.first: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("p", "nowhere"), "nowhere: neither a folder of results nor of a plan; no plan is called 'nowhere'"),
        (("p", "other"), "no run of one is in the other; name plans with runs in common"),
        (("p", "empty"), "empty: neither a folder of results nor of a plan"),
    ],
)
def test_what_cannot_be_compared_is_one_message(
    machine: Machine, capsys: pytest.CaptureFixture[str], names: tuple[str, str], said: str
) -> None:
    machine.measure("results", SPEEDS)
    results = Results(machine.root / "results")
    results.run("other", "else")
    results.plan("other", {"else": "else"})
    (machine.root / "empty/plans").mkdir(parents=True)
    assert main(["compare", *names]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


# ---- gate ------------------------------------------------------------------------------------------


def test_noise_does_not_fail_it_and_five_per_cent_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements that vary by 1 %, five in the reference: of forty more at most two fail, of forty slower ones 38."""
    monkeypatch.chdir(tmp_path)
    machine = Machine(tmp_path, seed=5)
    for _ in range(5):
        assert gate(machine.measure("results", SPEEDS), "--update") == 0
    equal = [gate(machine.measure("results", SPEEDS)) for _ in range(40)]
    slower = [gate(machine.measure("results", {**SPEEDS, "fast": 150 / 1.05})) for _ in range(40)]
    assert set(equal) | set(slower) <= {0, 1}
    assert sum(equal) <= 2
    assert sum(slower) >= 38


def test_a_loss_on_a_busy_machine_says_so(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    results = machine.measure("results", SPEEDS)
    assert gate(results, "--update") == 0
    machine.measure("results", {**SPEEDS, "fast": 75.0})
    crowd(results / "plans/p/fast")
    capsys.readouterr()
    assert gate(results) == 1
    losses, others = [], []
    for line in capsys.readouterr().out.splitlines():
        (losses if line.startswith("LOSS") else others).append(line)
    assert losses and all(
        line.endswith("busy machine: other programs kept 45\u00a0% of the cores busy") for line in losses
    )
    assert others and not any("busy" in line for line in others)
    assert gate(results, "--json") == 1
    assert {look["run"] for look in json.loads(capsys.readouterr().out) if look["busy"]} == {"p.fast"}


def test_what_is_slower_is_named(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(5):
        gate(machine.measure("results", SPEEDS), "--update")
    capsys.readouterr()
    assert gate(machine.measure("results", {**SPEEDS, "fast": 120.0})) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("LOSS")] == ["p.fast,", "p.fast,"]
    assert any("over the first run: -20" in line or "over the first run: -19" in line for line in lines)


def test_beside_a_single_measurement_both_have_the_spread_of_their_trials(machine: Machine) -> None:
    """Trials of either vary by 1 %, which is 3.5 % of the two means' ratio; processes differ by 5 %: 6 % in all."""
    gate(machine.measure("results", {"first": 100.0}, spread=0), "--update")
    assert gate(machine.measure("results", {"first": 100 / 1.057}, spread=0)) == 0
    assert gate(machine.measure("results", {"first": 100 / 1.065}, spread=0)) == 1


def test_it_says_what_it_noted_and_how_far_down_noise_reaches(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    """Noise is as wide in logarithms: down it is fewer per cent than up, and a loss is what lies below."""
    assert gate(machine.measure("results", SPEEDS, spread=0), "--update") == 0
    assert capsys.readouterr().out == "reference.json: 3 runs noted: p.first, p.fast, p.faster\n"
    line = Look("p.fast", "samples/s", -0.39, 0.4, 1).line()
    assert line.startswith("as before") and "noise -33.0 to +49.2 %" in line
    assert Look("p.fast", "samples/s", -0.41, 0.4, 1).line().startswith("LOSS")


def test_a_plan_that_did_not_run_is_no_misspelt_one(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.measure("results", SPEEDS)
    Path("config.yaml").write_text("targets: [starter_demo]\n")
    assert main(["compare", "--gate", "reference.json", "--update"]) == 2
    assert "plan starter_demo has no results yet; name those that have: p" in capsys.readouterr().err


def test_what_was_noted_is_not_held_against_itself(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the same rates twice nothing varies, and yet a hundredth is noise; a loss stays one when it is noted."""
    for _ in range(2):
        gate(machine.measure("results", {"first": 100.0}, spread=0), "--update")
    assert gate(machine.measure("results", {"first": 99.2}, spread=0)) == 0
    slower = machine.measure("results", {"first": 90.0}, spread=0)
    for more in ([], ["--update"], []):
        capsys.readouterr()
        gate(slower, *more)
        line = capsys.readouterr().out.splitlines()[0]
        assert line.startswith("LOSS") and "-10.0 %" in line and "(2 measurements before)" in line


@pytest.mark.slow
def test_a_run_that_varies_more_than_the_others_has_its_own_noise(machine: Machine) -> None:
    """One of six varies by 5 %, the others by 0.5 %; with the spread of all together 16 of 60 looks failed."""
    speeds = {f"run{number}": 100.0 for number in range(6)}
    spread = dict.fromkeys(speeds, 0.005) | {"run5": 0.05}
    for _ in range(8):
        gate(machine.measure("results", speeds, spread), "--update")
    assert sum(gate(machine.measure("results", speeds, spread)) for _ in range(60)) <= 6


def test_gains_over_another_first_run_are_not_held_against_it(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    """The runs are as fast as before, and the plan's first run is another one, which is faster."""
    for _ in range(3):
        gate(machine.measure("results", SPEEDS), "--update")
    capsys.readouterr()
    other = {"other": 300.0, "fast": 150.0, "faster": 200.0}
    results = machine.measure("results", other)
    assert gate(results) == 0
    assert "over the first run" not in capsys.readouterr().out
    gate(results, "--update")
    (runs,) = json.loads(Path("reference.json").read_text())["machines"].values()
    gains = [each["gain"] for each in runs["p.fast"]["measured"]]
    assert gains[:3] == [None] * 3 and gains[3] == pytest.approx(math.log(0.5), abs=0.05)


def test_other_work_and_other_machines_are_not_held_against_it(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    gate(machine.measure("results", SPEEDS), "--update")
    slow = {name: speed / 2 for name, speed in SPEEDS.items()}
    assert gate(machine.measure("results", slow, device=Device(kind="cuda", name="A100"))) == 2
    assert "it has none of these runs on this machine" in capsys.readouterr().err
    assert gate(machine.measure("results", slow, compute="other")) == 2
    assert gate(machine.measure("results", slow)) == 1


def test_another_file_is_not_written_over(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """Also one of JSON, such as a result named by mistake."""
    file = machine.measure("results", SPEEDS) / "plans/p/first/throughput.json"
    before = file.read_bytes()
    for more in ([], ["--update"]):
        assert main(["compare", "p", "--gate", str(file), *more]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith("machines: Field required; no reference: name another file, which --update makes")
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["compare", "p", "--gate", "none.json"],
            "none.json: no such file; expected a reference, which --update makes",
        ),
        (["compare", "p", "--gate", 300 * "x", "--update"], "x: a name is too long"),
        (["compare", "q", "--gate", "none.json"], "no plan is called 'q'"),
        (["compare", "p", "--gate", "torn.json"], "torn.json"),
    ],
)
def test_mistakes_are_one_message(
    machine: Machine, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    machine.measure("results", SPEEDS)
    Path("torn.json").write_text("{")
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
