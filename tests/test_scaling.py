"""Plans of kind weak_scaling, strong_scaling, convergence and parallelism: their runs and their sections of the page.

The expected numbers of the page are computed by hand from the records.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlscale.config import resolve
from dlscale.config.records import Published
from dlscale.config.resolve import ResolvedRun
from dlscale.core import telemetry
from dlscale.core.errors import UserError
from dlscale.core.metrics import epoch_lines
from dlscale.core.text import number
from dlscale.measure.records import Throughput, Trials, Usage
from dlscale.parallel.records import Device, MemoryUse
from dlscale.report import curves, scaling, sections
from dlscale.report.figures import Chart, Table, lines
from dlscale.report.speedup import series as series_of
from dlscale.results import PlanResult, cost_to_reach, read_plan
from tests.test_report import Results

WEAK: dict[str, Any] = {"study": "cosmo_unet", "kind": "weak_scaling"}


def load(plan: dict[str, Any]) -> dict[str, ResolvedRun]:
    return resolve.load({"targets": ["p"], "plans": {"p": plan}}).plans["p"]


# ---- runs ------------------------------------------------------------------------------------------


def test_weak_scaling_keeps_each_devices_batch() -> None:
    runs = load({**WEAK, "scaling": {"devices": [8, 1, 2, 4], "per_node": 4, "batch_sizes": [64, 16]}})
    expected: dict[str, tuple[int, int, bool]] = {}
    for batch in (16, 64):
        for variant, counts in (("ddp", (1, 2, 4, 8)), ("no_sync", (2, 4, 8))):  # one device does not communicate
            expected |= {f"b{batch}_{variant}_{count}": (count, batch * count, variant == "ddp") for count in counts}
    found = {name: each.run for name, each in runs.items()}
    assert list(found) == list(expected)
    for name, (count, batch, sync) in expected.items():
        run = found[name]
        assert (run.geometry.world_size, run.batch_size, run.averages) == (count, batch, sync), name
        assert (run.geometry.nodes, run.geometry.gpus_per_node) == ((2, 4) if count == 8 else (1, count)), name
    labels = [found[name].label for name in ("b16_ddp_8", "b16_no_sync_2")]
    assert labels == ["8 devices, 16 each", "2 devices, 16 each, no sync"]


def test_an_explicit_twin_is_recognised() -> None:
    """A run with `sync: "false"`, a string from `--config`, is also recognised as the run without averaging."""
    variants = {"ddp": {}, "no_sync": {"parallel": {"sync": "false"}}}
    runs = load({**WEAK, "scaling": {"devices": [1, 2], "batch_sizes": [64], "variants": variants}})
    assert list(runs) == ["b64_ddp_1", "b64_ddp_2", "b64_no_sync_2"] and not runs["b64_no_sync_2"].run.averages


def test_strong_scaling_keeps_the_batch_of_all() -> None:
    runs = load({**WEAK, "kind": "strong_scaling", "scaling": {"devices": [1, 2, 4], "batch_sizes": [64]}})
    assert {each.run.batch_size for each in runs.values()} == {64}
    assert (runs["b64_ddp_4"].run.local_batch_size, runs["b64_ddp_1"].run.label) == (16, "1 device, 64 in all")


def test_devices_that_share_a_model_count_as_one_for_the_batch() -> None:
    plan = {"study": "era5_vit", "kind": "weak_scaling", "settings": {"geometry": {"tp": 2}}}
    runs = load({**plan, "scaling": {"devices": [2, 8], "batch_sizes": [16]}})
    assert [(each.run.geometry.dp, each.run.batch_size) for each in runs.values()] == [(1, 16), (4, 64)] * 2


def test_an_explicit_run_replaces_a_generated_run() -> None:
    block = {"devices": [1, 4], "batch_sizes": [64]}
    named = {"b64_ddp_1": {"use": "cosmo_published.bs64_opt"}, "more": {"batch_size": 128}}
    runs = load({**WEAK, "from": "cosmo_published.bs64_opt", "scaling": block, "runs": named})
    assert (runs["b64_ddp_1"].plan, runs["b64_ddp_1"].name) == ("cosmo_published", "bs64_opt")
    assert list(runs) == ["b64_ddp_1", "b64_ddp_4", "b64_no_sync_4", "more"] and runs["more"].run.batch_size == 128


def test_convergence_repeats_larger_batches_by_each_rule() -> None:
    sizes = {256: {"geometry": {"gpus_per_node": 4}, "training": {"epochs": 20}}, 64: None}
    block = {"batch_sizes": sizes, "scaling": ["sqrt", "linear"], "seeds": [0, 7]}
    runs = load({"study": "cosmo_unet", "kind": "convergence", "convergence": block})
    names = [f"b64_sqrt_seed{seed}" for seed in (0, 7)]  # all rules give the same rate for the base batch size
    names += [f"b256_{rule}_seed{seed}" for rule in ("sqrt", "linear") for seed in (0, 7)]
    assert list(runs) == names
    run = runs["b256_linear_seed7"].run
    assert (run.seed, run.batch_size, run.schedule.scaling, run.schedule.base_batch_size) == (7, 256, "linear", 64)
    assert (run.geometry.world_size, run.training.epochs, run.training.on_divergence) == (4, 20, "stop")
    assert (run.label, runs["b64_sqrt_seed0"].run.label) == ("batch 256, linear, seed 7", "batch 64, seed 0")


SCALING = {"devices": [1, 2], "batch_sizes": [64]}
BIG: dict[str, Any] = {"study": "cosmo_unet", "kind": "convergence"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "where", "message"),
    [
        (
            {"scaling": {**SCALING, "devices": [6]}},
            "scaling",
            "devices [6]: each number above per_node ",
        ),
        ({"scaling": {**SCALING, "devices": [2, 2]}}, "scaling.devices", "2 is listed twice"),
        ({"scaling": {**SCALING, "devices": []}}, "scaling.devices", "at least 1 value"),
        ({"scaling": {"devices": [2]}}, "scaling.batch_sizes", "this key is missing"),
        ({}, "runs", "a plan of kind weak_scaling needs the key scaling; for example {devices: "),
        (
            {"kind": "set", "scaling": SCALING},
            "",
            "scaling: a plan of kind set does not have this key; write kind: weak_scaling or",
        ),
        (
            {"kind": "strong_scaling", "scaling": {**SCALING, "devices": [1, 3]}},
            "scaling.devices",
            "batch_size 64 is not divisible by geometry.nodes x geometry.gpus_per_node / (tp 1 x cp 1) = 3",
        ),
        (
            {"scaling": {**SCALING, "variants": {"a": {"batch_size": 3}}}},
            "scaling.variants",
            "a: this block sets batch_size from its other keys; remove",
        ),
        (
            {"scaling": {**SCALING, "variants": {"a": {"geometry": {"nodes": 3}}}}},
            "scaling.variants",
            "a: this block sets geometry.nodes from its other keys",
        ),
        (
            {"scaling": {**SCALING, "variants": {"a": {"label": "x"}}}},
            "scaling.variants",
            "a: this block sets label from its other keys",
        ),
        (
            {"scaling": {**SCALING, "variants": {"a": {"precison": "fp16"}}}},
            "scaling.variants.a",
            "did you mean 'precision'?",
        ),
        (
            {"scaling": {**SCALING, "variants": {"a": {"parallel": {"sync": False}}}}},
            "scaling",
            "variants: at least one variant must average gradients; add ddp: {}",
        ),
        ({"scaling": {**SCALING, "variants": {"a" * 60: {}}}}, "", "expected 1 to 64 letters"),
        ({"scaling": {**SCALING, "variants": {"a": 3}}}, "scaling.variants", "a: expected settings"),
        ({"scaling": SCALING, "runs": {"b64_ddp_1": {}}}, "runs", "b64_ddp_1: scaling generates this run; write {use:"),
        ({"scaling": SCALING, "measure": ["train"]}, "runs.b64_no_sync_2.parallel.sync", "remove train from plans"),
        ({"scaling": SCALING, "settings": {"geometry": {"tp": 2}}}, "scaling.devices.geometry", "change gpus_per_node"),
        ({"scaling": {**SCALING, "devices": [10**9]}}, "scaling.devices.0", "less than or equal to 1000000"),
        (
            {"scaling": {**SCALING, "batch_sizes": [10**30]}},
            "scaling.batch_sizes.0",
            "less than or equal to 1000000000",
        ),
        (
            {"scaling": {"devices": [10**6], "batch_sizes": [10**6]}},
            "scaling.devices",
            "local_batch_size: got 1000000; expected a whole number that, multiplied by 1000000",
        ),
        (
            {"scaling": {"devices": [*range(1, 5000)], "per_node": 1, "batch_sizes": [*range(1, 5000)]}},
            "scaling",
            "devices x batch_sizes x variants: expected at most 10000 runs",
        ),
        (
            {**BIG, "convergence": {"batch_sizes": [*range(1, 5000)], "seeds": [*range(5000)]}},
            "convergence",
            "batch_sizes x scaling x seeds: expected at most 10000 runs",
        ),
        (BIG, "runs", "a plan of kind convergence needs the key convergence; for example {batch_sizes: "),
        ({**BIG, "convergence": {"batch_sizes": [4, 4]}}, "convergence.batch_sizes", "4 is listed twice"),
        ({**BIG, "convergence": {"batch_sizes": [[4]]}}, "convergence.batch_sizes", "got '[4]'"),
        ({**BIG, "convergence": {"batch_sizes": [4], "scaling": ["cubic"]}}, "convergence.scaling", "got 'cubic'"),
        (
            {**BIG, "convergence": {"batch_sizes": {4: {"seed": 1}}}},
            "convergence.batch_sizes",
            "4: this block sets seed from its other keys",
        ),
        (
            {**BIG, "convergence": {"batch_sizes": {4: {"label": "x"}}}},
            "convergence.batch_sizes",
            "4: this block sets label from its other keys",
        ),
        (
            {**BIG, "convergence": {"batch_sizes": {4: {"schedule": {"base_batch_size": 2}}}}},
            "convergence.batch_sizes",
            "4: this block sets schedule.base_batch_size from its other keys",
        ),
        (
            {**BIG, "convergence": {"batch_sizes": {4: {"optimizer": {"lrr": 1}}}}},
            "convergence.batch_sizes.4.optimizer",
            "did you mean 'lr'?",
        ),
    ],
)
def test_impossible_scaling_plans_are_refused_with_the_key(plan: dict[str, Any], where: str, message: str) -> None:
    path = ".".join(filter(None, ("configuration: plans.p", where)))
    with pytest.raises(UserError, match=f"{re.escape(path)}.*{re.escape(message)}") as caught:
        load({**WEAK, **plan})
    assert "\n" not in str(caught.value)


# ---- the page: weak and strong scaling --------------------------------------------------------------


def trials(mean: float, std: float = 0.0) -> Trials:
    return Trials(trial_throughput=[mean] * 4, trial_time=[1.0] * 4, avg_iter_throughput=[mean] * 4, mean=mean, std=std)


def measured(
    results: Results,
    name: str,
    devices: int,
    batch: int,
    rates: tuple[Trials, Trials, Trials],
    sync: bool = True,
    alone: Trials | None = None,
    **settings: Any,
) -> Path:
    """Write a run with measured throughput on `devices` devices, in nodes of four."""
    nodes = max(devices // 4, 1)
    own: dict[str, Any] = {
        "geometry": {"nodes": nodes, "gpus_per_node": devices // nodes},
        "parallel": {"kind": "ddp", "sync": sync},
    }
    folder = results.run("plan", name, epochs=0, triplet=None, batch_size=batch, **(own | settings))
    io, synthetic, full = rates
    device = Device(kind="cuda", name="Example GPU")
    Throughput(
        nranks=devices, batch_size=batch, device=device, io=io, synthetic=synthetic, full=full, alone=alone
    ).write(folder / "throughput.json")
    return folder


#: Samples/s (IO, SYNTHETIC, FULL) by number of devices: TOGETHER with communication, APART without it.
TOGETHER = {1: (200.0, 100.0, 90.0), 2: (380.0, 180.0, 160.0), 8: (1200.0, 600.0, 576.0)}
APART = {2: (384.0, 200.0, 170.0), 8: (1210.0, 800.0, 720.0)}


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "results")


@pytest.fixture
def weak(results: Results) -> PlanResult:
    runs = {}
    for sync, rates in ((True, TOGETHER), (False, APART)):
        for devices, triplet in rates.items():
            name = f"b16_{'ddp' if sync else 'no_sync'}_{devices}"
            io, synthetic, full = map(trials, triplet)
            alone = trials(triplet[1] / 0.8) if sync and devices > 1 else None
            measured(results, name, devices, 16 * devices, (io, synthetic, full), sync, alone)
            runs[name] = name.replace("_", " ")
    return read_plan(results.plan("plan", runs, kind="weak_scaling", measure=("throughput",)))


def cells(table: Table, row: int) -> dict[tuple[str, str], tuple[str, str]]:
    """Return the text and note of a row's cells, by (group, heading)."""
    groups = [group for group, width in table.groups for _ in range(width)]
    headings = [heading for heading, _ in table.columns]
    found = [(cell.text.replace("\u00a0", " "), cell.note.replace("\u00a0", " ")) for cell in table.rows[row]]
    return dict(zip(zip(groups, headings, strict=True), found, strict=True))


def test_efficiency_and_communication_equal_values_by_hand(weak: PlanResult) -> None:
    (series,) = series_of(weak)
    assert (series.batch, series.label) == (16, "16 samples per device")
    assert [point.devices for point in series.points] == [1, 2, 8]
    modes = ("IO", "SYNTHETIC", "FULL")
    for point in series.points:
        for column, mode in enumerate(modes):
            own, one = TOGETHER[point.devices][column], TOGETHER[1][column]
            efficiency, share = point.efficiency(mode), point.communication(mode)
            assert point.ideal(mode) == pytest.approx(one * point.devices)
            assert efficiency and efficiency.value == pytest.approx(own / (one * point.devices))
            assert point.rate(mode) == pytest.approx(own)
            if point.devices == 1:
                assert share is None and efficiency.noise == 0
            else:
                assert share and share.value == pytest.approx(1 - own / APART[point.devices][column])
        assert (point.alone.value if point.alone else None) == (None if point.devices == 1 else pytest.approx(0.2))


def test_the_table_shows_measured_and_ideal_values(weak: PlanResult) -> None:
    view = scaling.section(weak)
    row = cells(view.tables[0], 2)
    assert row["Run", "run"] == ("b16_ddp_8", "b16 ddp 8")
    expected = {
        ("Run", "devices"): ("8", "2 nodes"),
        ("Run", "samples per step"): ("128", ""),
        ("FULL", "samples/s"): ("576 (standard deviation 0)", "ideal 720"),
        ("FULL", "efficiency"): ("80 %", "± 4 %"),  # 5 % of 80 %: equal runs may differ by 5 %
        ("SYNTHETIC", "communication"): ("25 %", "± 4 %"),
        ("FULL", "communication"): ("20 %", "± 4 %"),
        ("IO", "communication"): ("1 %", "± 5 %"),  # loading does not communicate, so this is noise
        ("One process", "communication"): ("20 %", ""),
        ("Training step", "time (ms)"): ("222", ""),
    }
    assert {key: row[key] for key in expected} == expected
    assert cells(view.tables[0], 0)["FULL", "efficiency"] == ("100 %", "")
    assert len(view.tables[0].rows) == 3  # runs without averaging of gradients (`no_sync`) have no rows
    said = scaling.glance(weak)
    assert said and re.match(r"efficiency 80 % ± 4 % on 8 devices .* 20 % ± 4 %", said.replace("\u00a0", " "))


def test_energy_of_a_sample_is_that_of_the_trials_alone(results: Results) -> None:
    """Only energy during the trials counts: each GPU uses 100 W then, and 1000 W otherwise. A kWh emits 400 g CO₂."""
    for devices, rate in ((1, 100.0), (2, 160.0)):
        full = trials(rate).model_copy(
            update={"usage": Usage(begin=1.7e9 + 10, seconds=4.0, cores=1, cpu_seconds=1.0, cores_cpu_seconds=1.0)}
        )
        folder = measured(results, f"d{devices}", devices, 8 * devices, (trials(500.0), trials(500.0), full))
        rows = [
            telemetry.Sample(
                *(1.7e9 + second, 1.0, 2),
                gpus=(telemetry.GpuSample(watts=100.0 if 10 < second <= 14 else 1000.0),) * devices,
            )
            for second in range(1, 21)
        ]
        (folder / "telemetry").mkdir()
        (folder / "telemetry/throughput.csv").write_text(telemetry.header(devices) + "".join(map(telemetry.line, rows)))
    plan = read_plan(results.plan("plan", {"d1": "1", "d2": "2"}, kind="weak_scaling", measure=("throughput",)))
    view = scaling.section(plan)
    assert view and [chart.y for chart in view.charts][-1] == {"value": "energy (J per sample)"}
    assert [row["value"] for row in view.charts[-1].rows] == [1.0, 1.25]
    assert cells(view.tables[0], 1)["Energy of training", "per sample"] == ("1.25 J", "")
    plan = replace(plan, record=plan.record.model_copy(update={"grams_per_kwh": 400.0}))
    view = scaling.section(plan)
    assert view and [row["grams"] for row in view.charts[-1].rows] == pytest.approx([111.111, 138.889], rel=1e-5)
    assert cells(view.tables[0], 1)["Energy of training", "CO₂ per million samples"] == ("139 g", "")


def test_noise_grows_with_the_spread_of_the_trials(results: Results) -> None:
    """The noise combines 5 %, by which equal runs may differ, with the 95 % intervals of both means."""
    for devices, rate, std in ((1, 100.0, 20.0), (2, 160.0, 48.0)):
        measured(results, f"d{devices}", devices, 8 * devices, (trials(500.0), trials(500.0), trials(rate, std)))
    plan = read_plan(results.plan("plan", {"d1": "1", "d2": "2"}, kind="weak_scaling", measure=("throughput",)))
    (series,) = series_of(plan)
    efficiency = series.points[1].efficiency("FULL")
    assert efficiency and efficiency.value == pytest.approx(0.8)
    # Student's t with three degrees of freedom is 3.182446.
    assert efficiency.noise == pytest.approx(0.8 * math.hypot(3.182446 * 0.2 / 2, 3.182446 * 0.3 / 2, math.log(1.05)))
    assert replace(efficiency, noise=math.inf).interval_text == "(single trials, no interval)"


def test_strong_scaling_compares_runs_of_one_batch(results: Results) -> None:
    for devices, rate in ((2, 100.0), (4, 150.0)):
        measured(results, f"d{devices}", devices, 64, (trials(900.0), trials(rate), trials(rate)))
    plan = read_plan(results.plan("plan", {"d2": "2", "d4": "4"}, kind="strong_scaling", measure=("throughput",)))
    (series,) = series_of(plan)
    assert series.label == "64 samples per step"
    efficiency = series.points[1].efficiency("FULL")
    assert efficiency and efficiency.value == pytest.approx(0.75)  # relative to two devices, the smallest number
    assert series.points[1].communication("FULL") is None


def test_variants_are_series_of_their_own_and_share_a_twin(results: Results) -> None:
    runs = {}
    variants: dict[str, dict[str, Any]] = {"ddp": {}, "large": {"bucket_mb": 100}, "no_sync": {"sync": False}}
    for variant, parallel in variants.items():
        for devices in (1, 2):
            if (variant, devices) != ("no_sync", 1):
                rate = trials({"ddp": 80.0, "large": 90.0, "no_sync": 100.0}[variant] * devices)
                chosen = {"kind": "ddp", "bucket_mb": None, "sync": True} | parallel
                measured(results, f"{variant}_{devices}", devices, 8 * devices, (rate, rate, rate), parallel=chosen)
                runs[f"{variant}_{devices}"] = f"{variant} {devices}"
    found = series_of(read_plan(results.plan("plan", runs, kind="weak_scaling", measure=("throughput",))))
    assert [each.label for each in found] == [
        "8 samples per device; bucket_mb default",
        "8 samples per device; bucket_mb 100",
    ]
    shares = [each.points[1].communication("SYNTHETIC") for each in found]
    assert [share and pytest.approx(share.value) for share in shares] == [0.2, 0.1]


def test_the_charts_show_measured_and_ideal_values(weak: PlanResult) -> None:
    view = scaling.section(weak)
    assert view and [chart.about.split(":")[0] for chart in view.charts] == [
        "16 samples per device",
        "Overhead of communication",
        "Efficiency",
    ]
    rates, overhead, scaled = view.charts

    def points(chart: Chart, **which: str) -> list[tuple[int, float]]:
        rows = [row for row in chart.rows if which.items() <= row.items()]
        return [(row["devices"], row["value"]) for row in rows if "value" in row]

    for column, mode in enumerate(("loading", "computing", "training")):
        assert points(rates, mode=mode, what="measured") == [(n, TOGETHER[n][column]) for n in (1, 2, 8)]
        assert points(rates, mode=mode, what="ideal") == [(n, TOGETHER[1][column] * n) for n in (1, 2, 8)]
    assert rates.y == {"value": "throughput (samples/s)", "time": "time (s per million samples)"}
    times = [
        (row["devices"], row["time"]) for row in rates.rows if (row["mode"], row["what"]) == ("training", "measured")
    ]
    assert times == [(n, pytest.approx(1e6 / TOGETHER[n][2], rel=1e-4)) for n in (1, 2, 8)]
    assert points(overhead, what="with") == [(1, 100.0), (2, 180.0), (8, 600.0)]
    assert points(overhead, what="without") == [(1, 100.0), (2, 200.0), (8, 800.0)]
    efficiencies = [found for point in series_of(weak)[0].points if (found := point.efficiency("FULL"))]
    for row, each in zip(scaled.rows, efficiencies, strict=True):
        assert (row["high"] - row["low"]) / 2 == pytest.approx(100 * each.noise, rel=1e-4)
    assert all(100 * each.noise > 3 for each in efficiencies[1:])


@pytest.mark.parametrize(("many", "scale"), [(4.0, "linear"), (40.0, "log")])
def test_a_fields_own_range_determines_the_scale(many: float, scale: str) -> None:
    """Rates of 100 to 400 and times of 2,500 to 10,000 have linear axes, because neither spans a large factor.

    Rates of 100 to 4,000 have a logarithmic axis.
    """
    rows = [
        {"run": "a", "devices": n, "value": 100.0 * factor, "time": 1e4 / factor} for n, factor in ((1, 1.0), (2, many))
    ]
    chart = lines("rates", "Rates.", rows, {"devices": "devices"}, {"value": "rate", "time": "time"})
    assert chart.scale == scale


@pytest.mark.parametrize("loading", [100.0, 1e6])
def test_loading_that_would_flatten_the_other_lines_is_not_drawn(results: Results, loading: float) -> None:
    for devices in (1, 2):
        rates = (trials(loading), trials(100.0 * devices), trials(90.0 * devices))
        measured(results, f"d{devices}", devices, 16 * devices, rates)
    plan = read_plan(results.plan("plan", {"d1": "1", "d2": "2"}, kind="weak_scaling", measure=("throughput",)))
    view = scaling.section(plan)
    assert view and {row["mode"] for row in view.charts[0].rows} == {
        "computing",
        "training",
        *(["loading"] if loading == 100.0 else []),
    }
    assert ("Loading is not drawn" in view.charts[0].about) is (loading > 100.0)


def test_the_first_view_of_weak_scaling_shows_the_efficiency(weak: PlanResult) -> None:
    """The efficiency on 8 devices is 80 %. Communication is 20 %, by comparison with a run without averaging."""
    line = r"plan: 576 samples/s, efficiency 80 % ± 4 % on 8 devices .* communication .* 20 % ± 4 %"
    assert re.match(line, sections.line(weak).replace("\u00a0", " "))
    found = sections.fastest_bound(weak, "snakemake")
    assert found and found["bound"].what == "communication" and "20\u00a0% ± 4\u00a0% shorter" in found["bound"].why
    assert found["run"] == "b16_ddp_8 · b16 ddp 8"


@pytest.mark.parametrize("rate", [576.0, 560.0])
def test_communication_within_noise_has_no_fraction(results: Results, rate: float) -> None:
    """Communication is reported as noise if the run without gradient averaging is equally fast or slower."""
    runs = {}
    for name, devices, sync, full in (("one", 1, True, 90.0), ("all", 8, True, 576.0), ("twin", 8, False, rate)):
        measured(results, name, devices, 16 * devices, (trials(5000.0), trials(600.0), trials(full)), sync)
        runs[name] = name
    plan = read_plan(results.plan("plan", runs, kind="weak_scaling", measure=("throughput",)))
    assert (scaling.glance(plan) or "").endswith("(16 samples per device); communication is within noise")


@pytest.mark.parametrize(
    ("std", "busy", "why"), [(0.0, True, "busy machine"), (200.0, False, "too few or too noisy trials")]
)
def test_an_efficiency_of_noise_or_of_a_busy_machine_is_not_known(
    weak: PlanResult, std: float, busy: bool, why: str
) -> None:
    """An efficiency from noisy or disturbed runs is left out; it was once shown as 307 % ± 149 % of the ideal."""
    usage = Usage(seconds=9.0, cores=2, cpu_seconds=5.0, cores_cpu_seconds=15.0 if busy else 5.0)
    changed = []
    for run in weak.runs:
        assert run.throughput and run.throughput.full
        full = run.throughput.full.model_copy(update={"usage": usage, "std": std})
        changed.append(replace(run, throughput=run.throughput.model_copy(update={"full": full})))
    plan = PlanResult(weak.record, changed)
    assert re.match(rf"plan: 576 samples/s, .* on 8 devices .* not known: {why}", sections.line(plan))
    speed = sections.speed(plan)
    assert speed and (speed["efficiency"]["ratio"], speed["efficiency"]["interval_text"]) == ("not known", why)
    found = sections.fastest_bound(plan, "snakemake")
    assert found and found["bound"].what != "communication"


def test_the_card_of_a_scaling_plan_omits_twins(weak: PlanResult) -> None:
    speed = sections.speed(weak)
    assert speed and (speed["fastest"], speed["of"]) == ("b16_ddp_8 · b16 ddp 8", 3)


def test_published_efficiency_is_shown_next_to_the_run(weak: PlanResult) -> None:
    figure = Published(
        label="x", source="SC22", gpus=8, runs=["plan.b16_ddp_8"], metric="scaling_efficiency", value=78, unit="%"
    )
    figures = [
        figure,
        figure.model_copy(update={"metric": "communication", "value": 25.0}),
        Published(runs=figure.runs, samples_per_second=100),  # a rate must not be shown next to ratios
    ]
    view = scaling.section(PlanResult(weak.record.model_copy(update={"published": figures}), weak.runs))
    row = cells(view.tables[0], 2)
    assert row["FULL", "efficiency"][1] == "± 4 %; published: 78 %, SC22"
    assert row["SYNTHETIC", "communication"][1] == "± 4 %; published: 25 %, SC22"
    assert "published" not in row["FULL", "communication"][1] + row["SYNTHETIC", "efficiency"][1]


# ---- the page: convergence --------------------------------------------------------------------------


def converged(results: Results, seeds: tuple[int, ...] = (0, 1), **training: Any) -> PlanResult:
    runs = {}
    for batch, rule, final in ((64, "sqrt", 0.6), (256, "sqrt", 0.65), (256, "linear", 0.9)):
        for seed in seeds:
            name = f"b{batch}_{rule}_seed{seed}"
            results.run(
                "plan",
                name,
                epochs=4,
                speed=64.0 * batch / 64,
                triplet=None,
                final=final + 0.02 * seed,
                batch_size=batch,
                seed=seed,
                geometry={"nodes": 1, "gpus_per_node": batch // 64},
                optimizer={"lr": 1e-3},
                schedule={"scaling": rule, "base_batch_size": 64},
                training=training,
            )
            runs[name] = f"batch {batch}, {rule}, seed {seed}"
    return read_plan(results.plan("plan", runs, kind="convergence", measure=("train",)))


def test_seeds_make_a_band_from_the_least_to_the_greatest(results: Results) -> None:
    plan = converged(results, seeds=(0, 1, 2))
    merged = curves.drawn(plan)
    assert [(run.label, 1 + len(run.repeats)) for run in merged] == [
        ("batch 64, sqrt", 3),
        ("batch 256, sqrt", 3),
        ("batch 256, linear", 3),
    ]
    # an epoch takes 2.0 s (128 samples at 64 samples/s), and its validation 1.5 s
    for over, step in (("step", 8), ("samples", 128), ("time", 2.0 + 1.5)):
        for epoch, row in enumerate(curves.curve(merged[0], "", lambda epoch: epoch.valid_loss)):
            losses = [run.epochs[epoch].valid_loss for run in plan.runs[:3]]
            assert (row[over], row["value"]) == (pytest.approx(step * (epoch + 1)), pytest.approx(sum(losses) / 3))
            assert (row["low"], row["high"]) == (min(losses), max(losses)) and row["low"] < row["high"]


def test_the_cost_of_a_target_is_the_mean_over_seeds(results: Results) -> None:
    wanted = 0.3 * 0.7 + 0.01
    plan = converged(results, target={"metric": "valid_loss", "value": wanted, "stop": False})
    view = scaling.convergence(plan)
    assert view and "the target" in view.about
    heading = f"To validation loss ≤ {wanted:g}"
    first, _, last = (cells(view.tables[0], row) for row in range(3))
    steps = [
        each.epoch.step for each in [cost_to_reach(run, *scaling.aim(plan)) for run in plan.runs[:2]] if each.epoch
    ]
    assert len(steps) == 2
    assert first[heading, "reached by"][0] == "2 of 2 runs" and last[heading, "reached by"][0] == "0 of 2 runs"
    assert first[heading, "steps"][0] == str(round(sum(steps) / 2))
    assert first["Training", "learning rate"] == ("0.00100", "sqrt")
    assert (last["Training", "learning rate"], last[heading, "time"]) == (("0.00400", "linear"), ("–", ""))
    plan.runs[0].settings["training"]["target"]["value"] = 0.1
    other = scaling.convergence(PlanResult(plan.record, plan.runs))
    assert other and "the lowest value that all trainings reach" in other.about, (
        "runs with different targets need a common value"
    )


def test_a_diverged_training_is_reported_and_drawn_until_divergence(results: Results) -> None:
    plan = converged(results)
    path = plan.runs[-1].folder / "metrics.jsonl"
    epochs = [*plan.runs[-1].epochs[:2], plan.runs[-1].epochs[2].model_copy(update={"valid_loss": math.nan})]
    path.write_text(epoch_lines(epochs))
    plan = read_plan(results.plans[0])
    assert len(curves.curve(curves.drawn(plan)[-1], "", lambda epoch: epoch.valid_loss)) == 2
    view = scaling.convergence(plan)
    (kept,) = (run.final_loss for run in plan.runs[-2:-1])
    assert view and cells(view.tables[0], 2)["Training", "validation loss"] == (number(kept), "1 of 2 diverged")
    assert "<h3>Convergence</h3>" in results.report()


# ---- the page: parallelism --------------------------------------------------------------------------


def test_predicted_measured_and_published_memory_is_shown(results: Results) -> None:
    use = MemoryUse(parameters=2, gradients=2, optimizer=4, activations=20, peak=30_000_000_000)
    for name, settings in (
        ("ddp", {"parallel": {"kind": "ddp", "sync": True}}),
        ("tp4", {"geometry": {"nodes": 4, "gpus_per_node": 4, "tp": 4}}),
        ("fsdp", {"parallel": {"kind": "fsdp"}}),
    ):
        folder = measured(results, name, 4, 64, (trials(300.0), trials(120.0), trials(100.0, 2.0)), **settings)
        found = Throughput.read(folder / "throughput.json")
        found.model_copy(update={"predicted": use, "peak_memory_bytes": 32_700_000_000}).write(
            folder / "throughput.json"
        )
    plan = read_plan(
        results.plan("plan", {n: n for n in ("ddp", "tp4", "fsdp")}, kind="parallelism", measure=("throughput",))
    )
    memory = Published(
        hardware="A100", gpus=16, source="SC23", runs=["plan.tp4"], metric="memory", value=32.7, unit="GB"
    )
    later = memory.model_copy(update={"value": 33.2, "source": "SC24"})
    speed = Published(hardware="A100", gpus=16, source="SC23", runs=["plan.tp4"], samples_per_second=114.4)
    view = scaling.parallelism(
        PlanResult(plan.record.model_copy(update={"published": [memory, later, speed]}), plan.runs)
    )
    ddp, tp4, fsdp = (cells(view.tables[0], row) for row in range(3))
    assert [tp4["Devices", key][0] for key in ("in all", "tp", "cp", "dp")] == ["16", "4", "1", "4"]
    assert [tp4["Memory of a device", key][0] for key in ("predicted", "measured")] == ["30.0 GB", "32.7 GB"]
    expected = {
        ("Devices", "weights"): ("ddp", "divided by tp 4"),
        ("Memory of a device", "published"): ("32.7 GB", "16 × A100, SC23; 33.2 GB, SC24"),
        ("FULL", "samples/s"): ("100", "standard deviation 2.0"),
        ("FULL", "published"): ("114.4 samples/s", "16 × A100, SC23"),
    }
    assert {key: tp4[key] for key in expected} == expected
    assert (ddp["Devices", "weights"], fsdp["Devices", "weights"]) == (("ddp", "copied"), ("fsdp", "sharded"))
    assert ddp["FULL", "published"] == ("–", "")
