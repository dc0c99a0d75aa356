"""Speed-ups in a report: they have an error, noise is not a speed-up, and runs with the same work count as one run."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dlscale.core.noise import interval, pooled
from dlscale.extensions.compare.compare import change, relative_to_first
from dlscale.measure.records import Outside, PairedTiming, Throughput, Trials
from dlscale.report import sections
from dlscale.report.collect import rows_of
from dlscale.report.speedup import (
    DISTURBED,
    MIN_PAIRED_LOG_DIFFERENCE,
    VAGUE,
    SpeedUp,
    SpeedUps,
    _key,
    measured_apart,
)
from dlscale.results import PlanResult, read_plan
from tests.test_report import Page, Results


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "results")


def trials(mean: float, spread: float = 0.01) -> Trials:
    rates = [mean * (1 - spread), mean, mean * (1 + spread)]
    return Trials(trial_throughput=rates, trial_time=[1.0] * 3, mean=mean, std=mean * spread)


def timed(results: Results, name: str, full: float, ratios: list[float] | None, compute: str = "") -> None:
    """Write a run: `full` samples/s if timed alone, `ratios` to the first run's speed in paired timing."""
    folder = results.run("p", name)
    beside = PairedTiming(compute="first", openings=[[(100 * ratio, 100.0)] for ratio in ratios]) if ratios else None
    measured = Throughput.read(folder / "throughput.json")
    measured = measured.model_copy(update={"full": trials(full), "beside": beside, "compute": compute or name})
    measured.write(folder / "throughput.json")


def noisy(ratio: float, count: int = 40, spread: float = 0.05, seed: int = 0) -> list[float]:
    values = np.random.default_rng(seed).normal(0, spread, count // 2)
    return [ratio * math.exp(value) for value in (*values, *-values)]


def plan_of(results: Results, *names: str, kind: str = "set") -> PlanResult:
    return read_plan(results.plan("p", {name: name for name in names}, kind=kind))  # type: ignore[arg-type]


# ---- the interval ----------------------------------------------------------------------------------


def test_the_interval_contains_the_mean_in_95_per_cent() -> None:
    """About 95 % of 2,000 intervals, each from 20 normal values, contain the mean, even with 10 % of outliers."""
    draw = np.random.default_rng(1)
    for burst in (0.0, 0.1):
        held = 0
        for _ in range(2000):
            values = draw.normal(0.3, 1.0, 20) + draw.choice([0, 20, -20], 20, p=[1 - burst, burst / 2, burst / 2])
            centre, error = interval(list(values))
            held += abs(centre - 0.3) <= error
        assert 0.93 < held / 2000 < 0.985, (burst, held)


def test_the_order_of_settings_separates_no_series() -> None:
    assert _key(8, {"a": 1, "b": 2}) == _key(8, {"b": 2, "a": 1}) != _key(4, {"a": 1, "b": 2})


def test_few_values_use_students_t() -> None:
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 4.302653 / math.sqrt(3)))
    assert interval([0.1 + 0.2, 0.3, 0.3]) == (pytest.approx(0.3), 0.0)
    assert interval([1.0]) == (1.0, math.inf)


def test_the_pooled_spread_is_that_within_groups() -> None:
    """Each group's mean costs one degree of freedom; a group with a single value has no spread."""
    assert pooled([[1.0, 2.0, 3.0], [10.0, 12.0], [5.0]]) == (pytest.approx(math.sqrt(4 / 3)), 3)
    assert pooled([[1.0], [2.0]]) == (0.0, 0)


def test_an_opening_counts_all_rounds_except_bursts() -> None:
    rounds = [(2.0, 1.0), (8.0, 1.0), (1.0, 2.0), (2.0, 2.0), (500.0, 1.0)]
    found = PairedTiming(compute="first", openings=[rounds[:2], rounds]).ratios
    assert found == pytest.approx([math.log(4), math.log(2 * 8 * 1) / 3])


# ---- compared runs ---------------------------------------------------------------------------------


def test_paired_timing_takes_precedence_over_separate_timing(results: Results) -> None:
    """Another program halved the separately measured speed of the second run. In paired timing, it is 3 % faster."""
    timed(results, "first", 100, noisy(1.0, seed=1))
    timed(results, "second", 50, noisy(1.03, spread=0.02, seed=2))
    plan = plan_of(results, "first", "second")
    found = SpeedUps(plan.runs).over(plan.runs[1], plan.runs[0])
    assert found and found.ratio == pytest.approx(1.03) and not found.noise
    assert found.low < 1.03 < found.high and found.words.startswith("1.03× ± 0.0")


def test_two_runs_are_compared_by_their_turns_with_a_third(results: Results) -> None:
    timed(results, "first", 100, noisy(1.0, seed=1))
    timed(results, "a", 50, noisy(1.10, spread=0.01, seed=2))
    timed(results, "b", 500, noisy(1.21, spread=0.01, seed=3))
    first, a, b = plan_of(results, "first", "a", "b").runs
    speeds = SpeedUps([first, a, b])
    assert (found := speeds.over(b, a)) and found.ratio == pytest.approx(1.1)
    assert (back := speeds.over(first, b)) and back.ratio == pytest.approx(1 / 1.21)
    one = speeds.over(a, first)
    assert one and found.error > one.error, "the error must include both runs"


def test_the_noise_floor_is_the_difference_between_copies(results: Results) -> None:
    """Copies of the first run differ by 4 %, so a gain of 3 % may be chance, however exactly it is timed."""
    timed(results, "first", 100, noisy(1.04, spread=0.001, seed=1))
    timed(results, "second", 100, noisy(1.03, spread=0.001, seed=2))
    plan = plan_of(results, "first", "second")
    speeds = SpeedUps(plan.runs)
    assert speeds.floor == pytest.approx(math.log(1.04))
    assert (found := speeds.over(plan.runs[1], plan.runs[0])) and found.noise and found.words.endswith(", within noise")
    timed(results, "first", 100, noisy(1.001, spread=0.001, seed=1))
    plan = plan_of(results, "first", "second")
    assert SpeedUps(plan.runs).floor == MIN_PAIRED_LOG_DIFFERENCE
    assert (found := SpeedUps(plan.runs).over(plan.runs[1], plan.runs[0])) and not found.noise


def test_a_run_that_was_disturbed_is_less_sure_than_the_others(results: Results) -> None:
    """One of ten runs varies by 5 %, all others by 0.5 %: its interval includes 1 in at least 85 % of 400 plans.

    With only the pooled spread of all runs, the interval included 1 in half of the plans.
    """
    results.run("p", "run")
    run, draw, held = plan_of(results, "run").runs[0], np.random.default_rng(0), 0
    for _ in range(400):
        runs = []
        for number, spread in enumerate([*[0.005] * 9, 0.05]):
            openings = [[(100 * math.exp(log), 100.0)] for log in draw.normal(0, spread, 4)]
            measured = Throughput(
                full=trials(100), beside=PairedTiming(compute="0", openings=openings), compute=str(number)
            )
            runs.append(replace(run, throughput=measured))
        found = SpeedUps(runs).over(runs[-1], runs[0])
        held += found is not None and found.noise
    assert held >= 340


def test_the_gain_over_the_first_run_has_the_spread_of_both(results: Results) -> None:
    """A gain of 3 % over another run is noise if repeated timings vary by 5 %, but not if they vary by 0.1 %."""
    for spread, noise in ((0.05, True), (0.001, False)):
        timed(results, "first", 100, None)
        timed(results, "before", 100, noisy(1.10, count=4, spread=spread, seed=1))
        timed(results, "after", 100, noisy(1.133, count=4, spread=spread, seed=2))
        _, before, after = plan_of(results, "first", "before", "after").runs
        found = relative_to_first(after, before)
        assert found and found.ratio == pytest.approx(1.03) and found.noise is noise
        openings = [each.throughput.beside.ratios for each in (before, after)]  # type: ignore[union-attr]
        common, own = pooled(openings)[0], [np.std(ratios, ddof=1) for ratios in openings]
        variance = sum(max(common, each) ** 2 / 4 for each in own)
        error = 2.446912 * math.sqrt(variance)  # Student's t with 6 degrees of freedom
        assert found.error == pytest.approx(math.hypot(error, MIN_PAIRED_LOG_DIFFERENCE))


def test_a_ratio_without_a_meaning_is_not_shown() -> None:
    assert SpeedUp(math.log(0.634), math.log(1000)).words == VAGUE
    assert SpeedUp(math.log(1.02), 0.05).words.startswith("1.02×"), "noise of 5 % must be shown with its interval"
    assert SpeedUp(math.log(8), 1.0).words.startswith("8.00×"), "the interval excludes 1"
    assert not SpeedUp(math.log(2), math.inf).unknown, "single trials have no interval"


def test_compare_of_two_runs_of_a_plan_is_the_plans_paired_timing(results: Results) -> None:
    """Other programs disturbed the separate speeds, which say the opposite."""
    timed(results, "first", 50, None, compute="first")
    timed(results, "second", 100, noisy(0.74))
    first, second = plan_of(results, "first", "second").runs
    for run in (first, second):
        vars(run)["foreign_cpu_fraction"] = vars(run)["foreign_load"] = 0.8  # replaces cached properties
    found = change("p.first -> p.second", first, second)["speed"]
    assert found["ratio"] == pytest.approx(0.74) and found["interval"][1] < 0.8
    elsewhere = replace(second, folder=second.folder.parents[1] / "q/second")
    vars(elsewhere)["foreign_cpu_fraction"] = vars(elsewhere)["foreign_load"] = 0.8
    found = change("p.first -> q.second", first, elsewhere)["speed"]
    assert found["ratio"] is found["interval"] is None and "not known" in found["words"]


def test_separate_speeds_of_a_busy_machine_have_no_ratio(results: Results) -> None:
    """The trials agree, but another program slowed the second run. Paired timing slows both runs alike."""
    for name, speed in (("first", 100.0), ("second", 50.0)):
        timed(results, name, speed, None)
    plan = plan_of(results, "first", "second")
    first, second = plan.runs
    assert (quiet := SpeedUps(plan.runs).over(second, first)) and not quiet.noise and quiet.words.startswith("0.500×")
    plan.runs[1] = disturbed = replace(second)
    vars(disturbed)["foreign_cpu_fraction"] = vars(disturbed)["foreign_load"] = 0.6  # replaces cached properties
    for one, other in ((disturbed, first), (first, disturbed)):
        found = SpeedUps(plan.runs).over(one, other)
        assert found and found.noise and found.words == DISTURBED and math.isinf(found.error)
    assert (row := rows_of(plan)[1])["speed_up_noise"] == "yes" and row.get("speed_up_low") is None
    assert sections.line(plan).startswith("p: fastest run not known; highest rate 100 samples/s, “first”; ")
    bar = sections.speed(plan)["bars"][1]  # type: ignore[index]
    assert bar["gain"].unknown == DISTURBED and not bar["fastest"]
    timed(results, "second", 50, noisy(0.5, spread=0.01, seed=2))
    plan = plan_of(results, "first", "second")
    vars(plan.runs[1])["foreign_cpu_fraction"] = 0.6
    assert (paired := SpeedUps(plan.runs).over(plan.runs[1], plan.runs[0])) and paired.words.startswith("0.500× ±")


def test_separate_timing_uses_the_spread_of_trials_and_of_equal_work(results: Results) -> None:
    timed(results, "first", 100, None)
    timed(results, "second", 130, None)
    plan = plan_of(results, "first", "second")
    assert (found := SpeedUps(plan.runs).over(plan.runs[1], plan.runs[0])) and not found.noise
    timed(results, "again", 60, None, compute="first")  # the same work was measured at 60 and at 100 samples/s
    plan = plan_of(results, "first", "second", "again")
    assert (found := SpeedUps(plan.runs).over(plan.runs[1], plan.runs[0])) and found.noise


def test_a_training_is_not_compared_with_full(results: Results) -> None:
    """The first of three runs has no throughput. Therefore the third run is compared with the second."""
    for name, full in (("trained", 100.0), ("plain", 100.0), ("fast", 200.0)):
        timed(results, name, full, None)
    plan = plan_of(results, "trained", "plain", "fast")
    plan.runs[0] = replace(plan.runs[0], throughput=None)
    assert measured_apart(plan.runs[1], plan.runs[0]) is None
    said = sections.speed(plan)
    assert said and (said["fastest"], said["first"], said["of"]) == ("fast", "plain", 2)
    assert said["gain"] and said["gain"].ratio == pytest.approx(2)
    assert [row["speed_up"] for row in rows_of(plan)] == [None, 1, pytest.approx(2)]


def test_rates_of_different_units_are_not_compared(results: Results) -> None:
    """Steps/s and samples/s keep their units in table, charts and the plan's line, but have no ratio."""
    for name, full in (("steps", 10.0), ("twice", 20.0), ("samples", 640.0)):
        timed(results, name, full, None)
    plan = plan_of(results, "steps", "twice", "samples")
    program = Outside(
        command=["x"], way="seen", samples=False, steps=9, status=0, seconds=9, first_step_seconds=1, training=1
    )
    for number, run in enumerate(plan.runs[:2]):
        assert run.throughput
        measured = run.throughput.model_copy(update={"outside": program, "io": None, "synthetic": None})
        plan.runs[number] = replace(run, throughput=measured)
    steps, _, samples = plan.runs
    assert [run.unit for run in plan.runs] == ["steps/s", "steps/s", "samples/s"]
    assert measured_apart(samples, steps) is None and SpeedUps(plan.runs).over(samples, steps) is None
    found = sections.speed(plan)
    assert found and (found["unit"], found["fastest"], found["of"]) == ("steps/s", "twice", 2)
    assert "20.0 steps/s" in sections.line(plan) and "samples/s" not in sections.line(plan)
    rows = rows_of(plan)
    assert [row.get("full_steps_per_second") for row in rows] == [10.0, 20.0, None]
    assert [row.get("full_samples_per_second") for row in rows] == [None, None, 640.0]
    assert [row["speed_up"] for row in rows] == [1, pytest.approx(2), None]
    compared = change("p.twice", steps, samples)
    assert (compared["samples_per_second"], compared["steps_per_second"]) == ([None, 640.0], [10.0, None])
    assert compared["speed"] is None
    section = sections.throughput(plan, None)  # type: ignore[arg-type]
    assert section and len(section.charts) == 2


# ---- texts of the report ---------------------------------------------------------------------------


def test_runs_of_the_same_work_give_no_headline(results: Results) -> None:
    """Runs that differ only in the learning rate do the same work, so 46 and 105 samples/s give no speed-up."""
    for name, full in (("slow", 46.0), ("fast", 105.0)):
        timed(results, name, full, None, compute="same")
    plan = plan_of(results, "slow", "fast")
    said = Page(results.report()).text
    assert "of runs slow and fast; mean of runs whose settings differ without effect on speed (46.0 to 105)" in said
    assert [row["speed_up_noise"] for row in results.collect(results.plans[0])] == ["yes", "yes"]
    assert sections.line(plan).startswith("p: 75.5 samples/s; "), (
        "the mean must be shown, because all runs do the same work"
    )


def test_sentences_that_readers_misunderstood_are_complete(results: Results) -> None:
    """The page states what paired timing is, why rates may differ from ratios, and what signs and directions mean."""
    timed(results, "first", 100.0, None)
    timed(results, "second", 150.0, noisy(1.5, spread=0.01))
    plan_of(results, "first", "second")
    said = Page(results.report()).text.replace("\u00a0", " ")
    for sentence in (
        "Single-process runs were timed alternately with first, so that slow-downs of the machine affect both runs. "
        "The speeds below the bars were measured separately, so their ratios may differ from the bars.",
        "Bars to the right mean less error than persistence, and bars to the left mean more error",
        "±half-width of a 95 % interval, which contains the true value in 95 of 100 measurements",
        "efficiencymeasured rate divided by the ideal rate",
        "communicationfraction by which a step is shorter in the run without gradient averaging",
    ):
        assert sentence in said


@pytest.mark.parametrize("several", [2, 9, 16])
def test_many_equal_runs_give_no_headline(results: Results, several: int) -> None:
    """In at most 5 % of 200 plans of equal runs (spread 5 %), the report calls another run faster than the first.

    With intervals for single comparisons, the fraction was 25 % for plans of sixteen runs.
    """
    names = [f"run{number}" for number in range(several)]
    for name in names:
        results.run("p", name)
    runs, draw, wrong = plan_of(results, *names).runs, np.random.default_rng(several), 0
    for _ in range(200):
        measured = []
        for run in runs:
            openings = [[(100 * math.exp(log), 100.0)] for log in draw.normal(0, 0.05, 4)]
            beside = PairedTiming(compute="run0", openings=openings)
            measured.append(replace(run, throughput=Throughput(full=trials(100), beside=beside, compute=run.name)))
        speeds = SpeedUps(measured)
        wrong += speeds.fastest(speeds.groups)[0].runs != [measured[0]]
    assert wrong <= 10


def test_the_headline_has_an_error_and_equally_fast_runs(results: Results) -> None:
    timed(results, "plain", 140, noisy(1.0, seed=1))
    timed(results, "bf16", 240, noisy(1.74, spread=0.02, seed=2))
    timed(results, "fused", 242, noisy(1.745, spread=0.02, seed=3))
    said_ = sections.speed(plan_of(results, "plain", "bf16", "fused", kind="ladder"))
    assert said_ and said_["fastest"] == "fused" and said_["like"] == ["bf16"]
    said = Page(results.report()).text
    assert re.search(r"1\.7[45]× ± 0\.03\d* Speed-up of run fused over plain", said)
    assert "As fast as fused within noise: bf16." in said
    rows = results.collect(results.plans[0])
    assert float(rows[2]["speed_up"]) == pytest.approx(1.745)
    assert float(rows[2]["speed_up_low"]) < 1.745 < float(rows[2]["speed_up_high"])
    assert [row["step_speed_up_noise"] for row in rows] == ["", "no", "yes"]
