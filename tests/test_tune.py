"""Tuning finds the result of an exhaustive search, reports no false gains, and skips settings that fail."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from dlscale.config import resolve as config
from dlscale.config.run import load_run
from dlscale.core import registry
from dlscale.core.errors import UserError
from dlscale.core.fingerprint import reachable, run_modules
from dlscale.core.progress import Progress
from dlscale.extensions.tune import tune
from dlscale.extensions.tune.records import Duel, Tried, Tuning
from dlscale.extensions.tune.section import tried
from dlscale.extensions.tune.tune import Measure, ratio_interval
from dlscale.parallel.world import CPU, World
from dlscale.report.sections import line
from dlscale.results import read_plan
from tests.conftest import COSMO, COSMO_RUN, make_run, stage
from tests.test_parallel import configure, launch
from tests.test_report import Results

# ---- the search, with known speeds -------------------------------------------------------------------


class Machine:
    """Settings of known speed, samples/s, on a simulated machine with noise, drift and disturbances.

    The noise of a trial falls with the square root of its duration. The drift is a random walk, equal for all settings.
    """

    def __init__(self, rates: Sequence[float], seed: int, noise: float = 0.03, disturbed: float = 0.1) -> None:
        self.rates, self.random = rates, random.Random(seed)
        self.noise, self.disturbed = noise, disturbed
        self.seconds, self.level, self.measured = 0.0, 0.0, list[int]()

    def __call__(self, number: int, seconds: float) -> float | None:
        self.seconds += seconds
        self.measured.append(number)
        if math.isnan(self.rates[number]):
            return None
        self.level += self.random.gauss(0, 0.02 * math.sqrt(seconds))
        error = self.random.gauss(0, self.noise / math.sqrt(seconds))
        slow = math.log(0.8) if self.random.random() < self.disturbed else 0.0
        return self.rates[number] * math.exp(self.level + error + slow)


def search(machine: Machine, seconds: float = 60) -> int | None:
    return tune.search(len(machine.rates), machine, seconds)[0]


def duel(challenger: int, machine: Measure, rounds: int = 8, seconds: float = 30) -> list[tuple[float, float]]:
    rates = tune.in_turns([challenger, 0], machine, rounds, seconds / rounds / 2)
    return list(zip(rates[challenger], rates[0], strict=True))


def exhaustive(rates: Sequence[float]) -> int:
    """Return the number of the fastest setting by the true speeds; the first setting does not count."""
    return max(range(1, len(rates)), key=lambda number: rates[number])


@pytest.mark.parametrize("count", [2, 3, 4, 10, 27])
def test_without_noise_halving_equals_exhaustive_search(count: int) -> None:
    for seed in range(20):
        rates = [random.Random(seed * 100 + number).uniform(50, 150) for number in range(count)]
        machine = Machine(rates, seed, noise=0, disturbed=0)
        machine.random.gauss = lambda *_: 0.0  # type: ignore[method-assign]
        assert search(machine) == exhaustive(rates)
        if count > 2:
            assert machine.seconds == pytest.approx(60)


def test_with_noise_halving_is_nearly_as_good_as_exhaustive_search_without() -> None:
    """200 searches among 20 settings with a spread of 25 % find settings on average less than 2 % below the best."""
    losses = []
    for seed in range(200):
        rates = [100 * math.exp(random.Random(seed * 100 + number).gauss(0, 0.25)) for number in range(20)]
        best = search(Machine(rates, seed))
        assert best
        losses.append(1 - rates[best] / rates[exhaustive(rates)])
    assert statistics.fmean(losses) < 0.02
    assert sorted(losses)[190] < 0.1, "at most 5 % of the searches may lose more than 10 %"


def test_common_drift_does_not_change_the_winner() -> None:
    """The fastest of settings 2 % apart is found although all speeds drift by 1 % per trial."""
    rates = [100 * 1.02**number for number in range(8)]

    def drifting(number: int, seconds: float, clock: list[float] = [0.0]) -> float:  # noqa: B006
        clock[0] += 1
        return rates[number] * math.exp(0.01 * clock[0])

    assert tune.search(8, drifting, 60)[0] == 7
    assert ratio_interval(duel(7, drifting))[0] == pytest.approx(1.02**7, rel=1e-9), (
        "the drift must cancel in each round"
    )


def test_every_rung_takes_as_long_and_has_the_runs_own_setting() -> None:
    machine = Machine([100, *range(50, 60)], 0, noise=0, disturbed=0)
    _, found = tune.search(11, machine, 60)
    assert [len(rung) for rung in found] == [11, 6, 3]
    assert tune.rungs(10) == [10, 5, 2]
    assert all(0 in rung and {len(rates) for rates in rung.values()} == {tune.TURNS} for rung in found)
    assert machine.measured[:22] == [*range(11), *reversed(range(11))]


def test_failed_settings_drop_out() -> None:
    nan = math.nan
    machine = Machine([100, nan, 120, nan, 110, nan], 0)
    assert search(machine) == 2
    assert all(machine.measured.count(number) == 1 for number in (1, 3, 5))
    for rates, best in (([100, nan, 120, nan], 2), ([100, nan, nan], None), ([100.0], None)):
        assert search(Machine(rates, 0)) == best
    assert search(Machine([100, nan], 0)) == 1, "a single remaining setting must be compared with the run's own at once"
    assert tune.in_turns([1, 0], Machine([100, nan], 0), 8, 1).keys() == {0}


def verdicts(rates: tuple[float, float], duels: int, rounds: int) -> tuple[float, float]:
    """Return the fraction of duels that setting 1 wins, and the fraction that setting 0 wins."""
    won, lost = 0, 0
    for seed in range(duels):
        _, low, high = ratio_interval(duel(1, Machine(rates, seed), rounds))
        won, lost = won + (low > 1), lost + (high < 1)
    return won / duels, lost / duels


@pytest.mark.parametrize("rounds", [3, 8])
def test_less_than_one_of_twenty_duels_shows_a_false_gain(rounds: int) -> None:
    assert max(verdicts((100, 100), 1000, rounds)) < 0.05


def test_a_real_gain_is_detected() -> None:
    assert verdicts((100, 130), 200, 8)[0] > 0.95
    assert verdicts((130, 100), 200, 8)[1] > 0.95


def test_only_a_challenger_with_rates_has_a_duel() -> None:
    rates = {0: [1.0, 1.0, 1.0], 1: [2.0, 2.0, 2.0]}
    assert tune.duel(None, rates) is tune.duel(0, rates) is tune.duel(2, rates) is None
    found = tune.duel(1, rates)
    assert found and found.challenger == 1 and found.ratio == pytest.approx(2.0)


def test_a_search_among_equal_settings_shows_no_gain() -> None:
    """The luckiest of many equal settings is measured again, in a duel with the run's own setting, and seldom wins."""
    won = 0
    for seed in range(300):
        machine = Machine([100] * 12, seed)
        best = search(machine)
        assert best
        won += ratio_interval(duel(best, machine))[1] > 1
    assert won / 300 < 0.05


# ---- tried settings ------------------------------------------------------------------------------------


def a_run(tmp_path: Path, **over: Any) -> Any:
    return load_run(
        make_run(tmp_path, "cosmo_unet", config.merge(json.loads(json.dumps(COSMO_RUN)), over), COSMO), "tune"
    )


def test_the_default_space_is_made_from_the_cores(tmp_path: Path) -> None:
    """The number of workers follows from the cores. Prefetching is only tried with workers."""
    run = a_run(tmp_path, loader={"kind": "torch", "workers": 2, "prefetch": 2})
    found = tune.candidates(run, 4, CPU)
    assert found[0] == {}
    assert len(found) == 2 * (1 + 3 * 2), "threads × (no workers + 1, 2, 4 workers × prefetch)"
    assert {each.get("loader.workers", 2) for each in found} == {0, 1, 2, 4}
    assert {each.get("threads") for each in found} == {None, 2}, "all cores must be the run's own setting"
    assert not any("batch_size" in each for each in found)
    assert all("loader.prefetch" not in each for each in found if each.get("loader.workers") == 0)
    on_gpu = tune.candidates(run, 4, torch.device("cuda"))
    assert len(on_gpu) == 7
    assert not any("threads" in each for each in on_gpu)


def test_a_space_that_is_given_is_tried_in_full(tmp_path: Path) -> None:
    space = {
        "workers": [1, 3],
        "prefetch": [2],
        "loaders": ["direct", "dali"],
        "batch_size": [4, 6],
        "threads": [1],
    }
    run = a_run(tmp_path, loader={"kind": "torch", "workers": 0}, tune=space)
    assert run.loaders("tune") == ["torch", "direct", "dali"]
    found = tune.candidates(run, 1, CPU)
    assert [each.get("batch_size") for each in found].count(6) == 4
    assert {"loader.kind": "direct", "loader.workers": 3, "loader.prefetch": 2} in found
    # The fingerprint includes the sources of all loaders that tuning may try.
    assert {registry.loader(kind) for kind in ("torch", "direct", "dali")} <= set(
        reachable(run_modules("tune", "cosmo_unet", *run.loaders("tune")))
    )
    direct = tune.changed(run, found[1])
    assert direct.loader.model_dump() == {
        "kind": "direct",
        "workers": 1,
        "prefetch": 2,
        "resident": "auto",
        "staging": "none",
    }
    assert direct.batch_size == run.batch_size
    with pytest.raises(UserError, match="accumulation_steps 5 is more than"):
        tune.changed(run, {"accumulation_steps": 5})


def test_another_loader_is_taken_with_the_copy_of_the_data_that_it_was_measured_on(tmp_path: Path) -> None:
    space = {"workers": [1], "prefetch": [2], "loaders": ["torch", "direct"], "threads": [1]}
    run = a_run(tmp_path, loader={"kind": "torch", "workers": 1, "prefetch": 2, "staging": "memory"}, tune=space)
    (other,) = tune.candidates(run, 1, CPU)[1:]
    assert other["loader.staging"] == tune.changed(run, other).loader.staging == "memory"


def test_a_mistake_in_the_space_is_one_message(tmp_path: Path) -> None:
    for settings, message in (
        ({"loaders": ["dirct"]}, "no loader that reads data is called 'dirct' (did you mean 'direct'?)"),
        ({"loaders": ["synthetic"]}, "no loader that reads data is called 'synthetic'"),
        ({"workers": [-1]}, "tune.workers.0"),
    ):
        with pytest.raises(UserError) as raised:
            a_run(tmp_path, tune=settings)
        assert message in str(raised.value)


def won(**more: Any) -> Tuning:
    changes = {"loader.kind": "direct", "loader.workers": 2, "threads": 1, "batch_size": 8}
    candidates = [Tried(changes={}), Tried(changes=changes)]
    duel = Duel(challenger=1, rates=[], ratio=1.5, low=1.4, high=1.6)
    return Tuning(run="mine.first", candidates=candidates, duel=duel, command="snakemake it").model_copy(update=more)


def test_the_winner_is_written_as_a_separate_plan() -> None:
    """The run that was tuned keeps its settings, so tuning does not rerun. Any plan can use the best settings."""
    text = tune.tuned(won(), "cosmo_unet")
    for said in (
        "# 1.50× ± 0.10 as fast as ",
        "Adjust the learning rate",
        "#   snakemake it\n",
        "`from: mine_first_tuned.tuned`",
    ):
        assert said in text
    mine = {"study": "cosmo_unet", "settings": {**COSMO_RUN, "dataset": "data"}, "runs": {"first": {"label": "mine"}}}
    other = {"study": "cosmo_unet", "from": "mine_first_tuned.tuned", "runs": {"long": {"training": {"epochs": 7}}}}
    raw: dict[str, Any] = {"targets": ["mine"], "datasets": {"data": COSMO}, "plans": {"mine": mine}}
    before = config.load(json.loads(json.dumps(raw))).plans["mine"]["first"].run
    raw["plans"]["other"] = other
    found = config.load(config.merge(json.loads(json.dumps(raw)), yaml.safe_load(text)))
    assert found.plans["mine"]["first"].run == before
    own, tuned = (found.plans["mine_first_tuned"][name] for name in ("own", "tuned"))
    assert (own.plan, own.name, own.run) == ("mine", "first", before)
    stages = [found.workflow.plans["mine_first_tuned"].stages(name) for name in ("own", "tuned")]
    assert stages == [["throughput"], ["train", "throughput"]]
    by_hand = tune.changed(before, won().changes).model_dump()
    for run in (tuned.run, found.plans["other"]["long"].run):
        same = ("loader", "batch_size", "threads", "model", "samples", "optimizer", "precision", "dataset")
        assert {key: run.model_dump()[key] for key in same} == {key: by_hand[key] for key in same}
    assert found.plans["other"]["long"].run.training.epochs == 7


def test_without_a_gain_no_plan_is_written() -> None:
    text = tune.tuned(won(duel=Duel(challenger=1, rates=[], ratio=1.05, low=0.98, high=1.12)), "cosmo_unet")
    assert yaml.safe_load(text) == {}
    assert "# No significant speed-up: " in text and "1.05× ± 0.07" in text
    assert "learning rate" not in text and "snakemake" not in text


# ---- the stage ---------------------------------------------------------------------------------------

QUICK = {"seconds": 0.4, "workers": [0], "threads": [1], "rounds": 3}


def tune_run(tmp_path: Path, data: Path, **over: Any) -> Tuning:
    a_run(tmp_path, **over)
    arguments = ["--config", tmp_path / "config.yaml", "--manifest", data / "manifest.json", "--threads", 2]
    assert stage("tune", *arguments, "--run", "test.run", "--out", tmp_path, "--device", "cpu") == 0
    return Tuning.read(tmp_path / "tune.json")


@pytest.mark.slow
def test_the_stage_from_end_to_end(
    tmp_path: Path, cosmo_data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Settings with a batch size of 6 run out of memory; all other settings are measured.

    The test slows the torch loader, which the run's own setting uses, so the written plan is faster.
    """
    opened = tune.Session.loader

    def slow(session: Any, split: str) -> Any:
        if session.run.batch_size == 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand more")
        loader = opened(session, split)
        if session.run.loader.kind == "torch":
            epoch = loader.epoch

            def waiting(*arguments: int) -> Any:
                for batch in epoch(*arguments):
                    tune.time.sleep(0.1)  # many times longer than all other work, even on a busy machine
                    yield batch

            loader.epoch = waiting
        return loader

    monkeypatch.setattr(tune.Session, "loader", slow)
    space = {**QUICK, "loaders": ["torch", "direct"], "batch_size": [4, 6], "prefetch": [2]}
    found = tune_run(tmp_path, cosmo_data, tune=space, accumulation_steps=4)
    by_changes = {json.dumps(each.changes, sort_keys=True): each for each in found.candidates}
    assert len(by_changes) == len(found.candidates) == 2 * 2 * 1 + 1, (
        "batch sizes × loaders, and the run's own setting with two threads"
    )
    own = found.candidates[0]
    assert own.changes == {} and own.problem is None
    assert all(len(rung) == tune.TURNS for rung in own.rates)
    assert {each.problem for each in found.candidates if each.changes.get("batch_size") == 6} == {"out of memory"}
    assert all(not rung for each in found.candidates if each.problem for rung in each.rates)
    assert found.duel and found.duel.won
    assert found.changes["loader.kind"] == "direct"
    written = (tmp_path / "tuned.yaml").read_text()
    assert yaml.safe_load(written)["plans"]["test_run_tuned"]["from"] == "test.run"
    assert found.command == f"snakemake --configfile {tmp_path / 'tuned.yaml'} -- plan_test_run_tuned"
    assert f"#   {found.command}\n" in written
    # The page also shows the result.
    rows = tried(found).rows
    assert rows[0][0].text == "original" and "loader.kind: direct" in rows[1][0].text
    assert {row[-1].text for row in rows} == {"–", "out of memory"}


@pytest.mark.slow
@pytest.mark.long
def test_the_run_against_itself_gains_nothing(tmp_path: Path, cosmo_data: Path) -> None:
    """If a setting is compared with itself, at most two of ten duels have an interval without 1."""
    run = a_run(tmp_path, tune=QUICK)
    changes: list[dict[str, Any]] = [{}, {"seed": run.seed}]
    trials = tune._Trials(run, cosmo_data / "manifest.json", World(), 1, changes, Progress("tuning", 160, "trials"))
    left_out = 0
    for _ in range(10):
        _, low, high = ratio_interval(duel(1, trials, seconds=4))
        left_out += not low <= 1 <= high
    trials.close()
    assert left_out <= 2


def test_samples_of_a_shared_model_count_once(tmp_path: Path, cosmo_data: Path) -> None:
    trials = tune._Trials(
        a_run(tmp_path, tune=QUICK), cosmo_data / "manifest.json", World(), 1, [{}], Progress("tuning", 2, "trials")
    )
    assert trials(0, 0.01)
    second: Any = SimpleNamespace(rank=lambda axis: int(axis == "tp"))
    trials._world = replace(World(), mesh=second)
    assert trials(0, 0.01) == 0
    trials.close()


@pytest.mark.slow
def test_several_processes_decide_alike(tmp_path: Path, era5_data: Path) -> None:
    """All processes make the same trials, or they would wait for each other forever. Only the first process writes."""
    folder = configure(
        tmp_path, "era5_vit", 2, tune={**QUICK, "workers": [0, 1], "prefetch": [2], "batch_size": [2, 4, 3]}
    )
    arguments = ["--config", folder / "config.yaml", "--manifest", era5_data / "manifest.json", "--threads", 2]
    done = launch("tune", 2, *arguments, "--run", "test.run", "--out", folder, "--log", folder / "tune.log")
    logs = "".join(path.read_text() for path in folder.glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    found = Tuning.read(folder / "tune.json")
    odd = [each for each in found.candidates if each.changes.get("batch_size") == 3]
    assert odd and all("batch_size 3 is not divisible by" in (each.problem or "") for each in odd)
    assert found.duel
    assert (folder / "tune.rank1.log").read_text().count(found.verdict()) == 1


# ---- the page ----------------------------------------------------------------------------------------


def test_the_page_shows_all_tried_settings(tmp_path: Path) -> None:
    """Original settings and the finalist come first, then settings by rung and speed, and failed settings last."""
    results = Results(tmp_path / "results")
    folder = results.run("mine", "first", epochs=0, triplet=None)
    found = Tuning(
        candidates=[
            Tried(changes={}, rates=[[100.0, 100.0], [90.0, 90.0]]),
            Tried(changes={"threads": 4}, problem="no <threads> left"),
            Tried(changes={"loader.workers": 1}, rates=[[120.0, 120.0]]),
            Tried(changes={"loader.workers": 2}, rates=[[110.0, 110.0], [180.0, 180.0]]),
        ],
        duel=Duel(challenger=3, rates=[(2.0, 1.0)] * 8, ratio=2.0, low=1.9, high=2.1),
        seconds=75,
        run="mine.first",
        command="snakemake --configfile 'my results/tuned.yaml' -- plan_mine_first_tuned",
    )
    found.write(folder / "tune.json")
    results.plan("mine", {"first": "First"}, kind="tune", measure=("tune",))  # type: ignore[arg-type]
    html = results.report()
    for words in (
        "2.00× ± 0.10 as fast as ",
        "<code>snakemake --configfile &#39;my results/tuned.yaml&#39; -- plan_mine_first_tuned</code>",
        "from: mine_first_tuned.tuned",
        "no &lt;threads&gt; left",
    ):
        assert words in html
    places = [html.index(f'scope="row">{text}') for text in ("original", "loader.workers: 2", "loader.workers: 1")]
    assert places == sorted(places) and html.index('scope="row">threads: 4') > places[-1]
    plan = read_plan(results.plans[0])
    assert line(plan).startswith("mine: 2.00× ± 0.10 as fast as ")
    assert [row[2].text for row in tried(found).rows] == ["1.00×", "2.00×", "1.20×", "–"]
