"""Cost: seconds, node-hours and charges, compared with numbers computed by hand, and the messages about cost."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from dlscale.config import resolve as config
from dlscale.config.compute import compute_digest
from dlscale.config.dataset import dataset_type
from dlscale.config.resolve import Configuration
from dlscale.config.run import Geometry, load_run
from dlscale.config.site import Scheduler
from dlscale.config.workflow import Budget
from dlscale.core.settings import validate
from dlscale.core.stage import training_work
from dlscale.data import reads
from dlscale.data.manifest import File, Manifest
from dlscale.launch import slurm
from dlscale.preflight import cost
from dlscale.preflight.cost import Estimate, Work
from tests.conftest import ROOT, TINY, stage

PERLMUTTER = ROOT / "profiles/perlmutter/site.yaml"


def load(tmp_path: Path, **changes: Any) -> Configuration:
    """Return the shipped configuration with changes, on Perlmutter, with results in `tmp_path`."""
    raw = config.merge(config.site_settings(PERLMUTTER), yaml.safe_load((ROOT / "config.yaml").read_text()))
    return config.load(config.merge(raw, {"results": str(tmp_path), **changes}))


def ladder(**settings: Any) -> dict[str, Any]:
    """Return a change of the ladder's settings."""
    return {"cosmo_ladder": {"settings": settings}}


def scheduler(**changes: Any) -> Scheduler:
    raw = yaml.safe_load(PERLMUTTER.read_text())["scheduler"]
    return Scheduler.model_validate(config.merge(copy.deepcopy(raw), changes))


def work(configuration: Configuration, name: str, stage: Any = "train") -> Work:
    return cost.run_work(configuration, *name.split("."), stage)


#: Device record of Perlmutter's GPUs.
A100 = {"kind": "cuda", "name": "NVIDIA A100-SXM4-40GB"}


def measured(results: Path, work: Work, rate: object, device: dict | None = None, **changes: Any) -> Path:
    """Write the record that the throughput stage would write for a run with `changes`; return the path."""
    settings = config.merge(work.run.model_dump(mode="json"), changes)
    file = results / "plans" / work.plan / work.run_name / "throughput.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    geometry = settings["geometry"]
    record = {
        "nranks": geometry["nodes"] * geometry["gpus_per_node"],
        "batch_size": settings["batch_size"],
        "device": A100 if device is None else device,
        "compute": compute_digest(settings),
        "FULL": {"mean": rate},
    }
    file.write_text(json.dumps(record))
    (file.parent / "config.yaml").write_text(yaml.safe_dump(settings))
    return file


def manifest(results: Path, dataset: str, **rows: list[int]) -> None:
    file = results / "data" / dataset / "manifest.json"
    file.parent.mkdir(parents=True)
    splits = {
        split: [File(path=f"{n}.h5", rows=r, bytes=1, digest="") for n, r in enumerate(rows[split])] for split in rows
    }
    Manifest(kind="", fields={}, splits=splits).write(file)


# ---- seconds -----------------------------------------------------------------------------------------


def test_epochs(tmp_path: Path) -> None:
    """The estimate of a training counts its samples and uses the published speed.

    The training has 4 epochs of 4096 crops. Validation has 512 crops before the first epoch and after each epoch. The
    published speed is 85.2 samples/s.
    """
    found = cost.estimate(work(load(tmp_path), "cosmo_ladder.baseline"), tmp_path, scheduler())
    assert found.basis == "published"
    assert found.seconds == pytest.approx((16384 + 2560 / 3) / 85.2 + 120) == pytest.approx(322.3, abs=0.1)
    # Each of three modes has 6 trials of 50 batches of 64. Fixed times are added: one second for each of the 18 trials,
    # and 30 s of paired timing.
    found = cost.estimate(work(load(tmp_path), "cosmo_ladder.baseline", "throughput"), tmp_path, scheduler())
    assert found.basis == "published" and found.seconds == pytest.approx(3 * 19200 / 85.2 + 120 + 18 + 30)
    # The time limit allows 90 s of paired timing: 1.5 x 904 s give 23 minutes instead of 22.
    assert cost.minutes(work(load(tmp_path), "cosmo_ladder.baseline", "throughput"), tmp_path, scheduler()) == 33
    tuned = cost.estimate(work(load(tmp_path), "cosmo_ladder.compile", "tune"), tmp_path, scheduler())
    assert tuned == Estimate(120 + 120, "settings"), "tuning must take the time in its settings, at any rate"


def test_data_without_a_sample(tmp_path: Path) -> None:
    """For a dataset without samples, the work is unknown; `dlscale doctor` reports the dataset's fault."""
    configuration = load(tmp_path, plans=ladder(training={"epochs": None, "steps": 10}))
    assert training_work(work(configuration, "cosmo_ladder.baseline").run, 0, 8) is None


def test_profile(tmp_path: Path) -> None:
    """The estimate of a profile covers nsys, in its own process, and torch.

    Each tool has 10 warm-up steps and 3 windows of 20 steps. The rate is published or measured.
    """
    found = cost.estimate(work(load(tmp_path), "cosmo_ladder.baseline", "profile"), tmp_path, scheduler())
    assert found.basis == "published" and found.seconds == pytest.approx(2 * (10 + 3 * 20) * 64 / 85.2 + 2 * 120)
    four = work(load(tmp_path), "cosmo_profile.four", "profile")
    assert cost.estimate(four, tmp_path, scheduler()).basis == "limit"
    measured(tmp_path, four, 6000.0)
    found = cost.estimate(four, tmp_path, scheduler())
    assert found.basis == "measured" and found.seconds == pytest.approx(2 * (10 + 3 * 20) * 256 / 6000 + 2 * 120)
    assert cost.minutes(four, tmp_path, scheduler()) == math.ceil(1.5 * (5.97 + 240 + 600) / 60) + 10


def test_a_published_figure_of_several_devices_counts_once(tmp_path: Path) -> None:
    """A published speed of several devices is divided by the number of devices.

    Four GPUs together reached 202 samples/s, so eight GPUs are expected to reach twice this speed. On several devices,
    the stage measures a fourth mode: steps without averaging of gradients.
    """
    found = cost.estimate(work(load(tmp_path), "era5_published.bs64_opt", "throughput"), tmp_path, scheduler())
    assert found.basis == "published" and found.seconds == pytest.approx(4 * 6 * 50 * 64 / 202 + 120 + 24)
    runs = {"bs64_opt": {"geometry": {"nodes": 2, "gpus_per_node": 4}}}
    eight = work(load(tmp_path, plans={"era5_published": {"runs": runs}}), "era5_published.bs64_opt", "throughput")
    assert cost.estimate(eight, tmp_path, scheduler()).seconds == pytest.approx(4 * 6 * 50 * 64 / (2 * 202) + 120 + 24)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("cosmo_demo.bf16", {}),  # the figure is shown next to the demo, whose size differs
        ("era5_demo.baseline", {}),
        ("cosmo_ladder.baseline", {"model": {"widths": [64, 128, 256]}}),
        ("cosmo_ladder.baseline", {"samples": {"crop": 128}}),
        ("cosmo_ladder.baseline", {"dataset": "cosmo_demo"}),
        ("cosmo_ladder.compile", {}),  # no published figure
        ("cosmo_published.base", {}),
    ],
)
def test_a_published_figure_is_of_the_full_size(tmp_path: Path, name: str, settings: dict) -> None:
    changes = {"plans": {name.split(".")[0]: {"settings": settings}}}
    if settings.get("dataset"):
        changes["datasets"] = {"cosmo_demo": {"source": {"grid": 256}}}
    assert cost.estimate(work(load(tmp_path, **changes), name), tmp_path, scheduler()) == Estimate(None, "limit")


@pytest.mark.slow
@pytest.mark.parametrize(
    "other",
    [
        {"batch_size": 32},
        {"geometry": {"gpus_per_node": 2}},
        {"model": {"widths": [4, 8]}},
        {"precision": "bf16"},
        {"device": {"kind": "cpu", "name": "a laptop's"}},
        {"device": {"kind": "cuda", "name": "NVIDIA GeForce RTX 4060 Laptop GPU"}},
        {"device": {}},
        {"rate": 0.0},
        {"rate": None},
        {"rate": "fast"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_measurement_with_other_settings_does_not_count(tmp_path: Path, other: dict) -> None:
    """A measurement with other settings or on another device does not count.

    The measurement's record decides, because config.yaml next to it may already have newer settings.
    """
    here = work(load(tmp_path), "cosmo_ladder.baseline")
    file = measured(tmp_path, here, **{"rate": 50.0, **other})
    (file.parent / "config.yaml").write_text(yaml.safe_dump(here.run.model_dump(mode="json")))
    assert cost.estimate(here, tmp_path, scheduler()).basis == "published"


def test_another_run_that_does_the_same_work_counts(tmp_path: Path) -> None:
    """A measurement of another run with the same work counts; the learning rate does not change the work.

    The slowest of several such measurements counts, unless the run itself was measured.
    """
    configuration = load(tmp_path, plans=ladder(optimizer={"lr": 0.5}))
    here, other = (work(configuration, f"cosmo_ladder.{run}") for run in ("baseline", "compile"))
    for name, rate in (("one", 50.0), ("two", 40.0)):
        measured(tmp_path, Work("throughput", "elsewhere", name, here.run), rate, optimizer={"lr": 1.0})
    found = cost.estimate(here, tmp_path, scheduler())
    assert found.basis == "measured" and found.seconds == pytest.approx((16384 + 2560 / 3) / 40 + 120)
    assert cost.estimate(other, tmp_path, scheduler()).basis == "limit"
    measured(tmp_path, here, 60.0)
    assert cost.estimate(here, tmp_path, scheduler()).seconds == pytest.approx((16384 + 2560 / 3) / 60 + 120)


def test_the_digest_is_that_of_the_stage(tmp_path: Path) -> None:
    """In every shipped plan, the throughput stage's settings have the compute digest of the complete run."""
    for runs in load(tmp_path).plans.values():
        for resolved in runs.values():
            seen = load_run(json.dumps(resolved.run.slice("throughput")), "throughput")
            digests = {compute_digest(each.model_dump(mode="json")) for each in (resolved.run, seen)}
            assert len(digests) == 1, resolved.name


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "{", "[]", '{"batch_size": 64, "nranks": 1, "FULL": 3}', "\xff"])
def test_a_torn_measurement_does_not_count(tmp_path: Path, text: str) -> None:
    measured(tmp_path, work(load(tmp_path), "cosmo_ladder.baseline"), 1.0).write_text(text, encoding="latin-1")
    assert cost.estimate(work(load(tmp_path), "cosmo_ladder.baseline"), tmp_path, scheduler()).basis == "published"


@pytest.mark.slow
def test_samples_are_counted_where_the_dataset_is(tmp_path: Path) -> None:
    """The number of samples is read from the dataset.

    The two states of a pair are 6 time steps apart, so files of 100, 50 and 5 time steps have 94, 44 and 0 pairs.
    """
    here = work(load(tmp_path), "era5_uk.vit")
    measured(tmp_path, here, 10.0)
    assert cost.estimate(here, tmp_path, scheduler()) == Estimate(None, "limit")
    assert cost.estimate(work(load(tmp_path), "era5_uk.vit", "throughput"), tmp_path, scheduler()).basis == "measured"
    manifest(tmp_path, "era5_uk", train=[100, 50, 5], valid=[30])
    found = cost.estimate(here, tmp_path, scheduler())
    assert found.basis == "measured" and found.seconds == pytest.approx((25 * 138 + 26 * 24 / 3) / 10 + 120)
    here = work(load(tmp_path), "era5_demo.baseline")
    measured(tmp_path, here, 10.0)
    manifest(tmp_path, "era5_demo", train=[101], valid=[1001])  # the plan requests 256 and 64
    assert cost.estimate(here, tmp_path, scheduler()).seconds == pytest.approx((3 * 100 + 4 * 64 / 3) / 10 + 120)


@pytest.mark.parametrize(("rate", "minutes"), [(85.2, 19), (1e9, 15), (17237.3334 / 480, 25)])
def test_minutes(tmp_path: Path, rate: float, minutes: int) -> None:
    """The time limit is 1.5 times the estimate plus 10 minutes, at least 15 minutes.

    322 s give 19 minutes, 120 s give the minimum, and 600 s give 25 minutes.
    """
    here = work(load(tmp_path), "cosmo_ladder.baseline")
    measured(tmp_path, here, rate)
    assert cost.minutes(here, tmp_path, scheduler()) == minutes


def test_minutes_of_the_shipped_demo(tmp_path: Path) -> None:
    """Before any file exists and any run was measured, the demo's jobs request minutes instead of 12 hours.

    More work requests more time, up to the site's limit.
    """
    configuration = load(tmp_path)  # samples and channels of files that do not exist yet are unknown
    for unknown in work(configuration, "cosmo_ladder.compile"), cost.data_work(configuration, "era5_uk", 1):
        assert cost.minutes(unknown, tmp_path, scheduler()) is None
    waiting = cost.works(configuration)
    assert {work.stage for work in waiting} == {"data", "train", "throughput", "profile"}
    limits = {(work.plan, work.run_name, work.stage): cost.minutes(work, tmp_path, scheduler()) for work in waiting}
    assert {key: limit for key, limit in limits.items() if not 15 <= (limit or 0) <= 50} == {}

    def train(**settings: Any) -> int:
        changed = load(tmp_path, plans={"cosmo_demo": {"settings": settings}})
        return cost.minutes(work(changed, "cosmo_demo.baseline"), tmp_path, scheduler()) or 0

    assert train() < train(model={"widths": [512, 1024]}) < train(model={"widths": [512, 1024]}, training={"epochs": 8})
    assert train(model={"widths": [4096, 8192]}, training={"epochs": 1000}) == scheduler().limit("train") == 720


def test_a_bound_by_hand(tmp_path: Path) -> None:
    """The upper bound of a training's time equals the bound computed by hand.

    A forward pass of `cosmo_demo` takes 2 x 64 x (16^3 x 8 (4 + 2 x 5) + 8^3 x 16 (8 + 8)) FLOPs per crop of 32^3.
    """
    here = work(load(tmp_path), "cosmo_demo.baseline")
    assert here.run and here.dataset
    data = cost.manifest_of("cosmo_demo", here.dataset, tmp_path)
    forward = 2 * 64 * (16**3 * 8 * (4 + 2 * 5) + 8**3 * 16 * (8 + 8))
    samples = 4 * 256
    expected = samples / 8 * 0.25 + samples * (0.01 + 3 * forward / 1e12)
    assert cost.bound(here.run, samples, data, scheduler()) == pytest.approx(expected)


@pytest.mark.parametrize("study", TINY)
def test_an_outline_equals_the_finished_dataset(study: str, tiny_data: Callable[[str], Path], tmp_path: Path) -> None:
    """An outline (a predicted manifest) has the channels, grids, classes and rows of the dataset's later files."""
    made = Manifest.read(tiny_data(study) / "manifest.json")
    outline = cost.manifest_of("none", reads.load_dataset(json.dumps(TINY[study]["dataset"])), tmp_path)
    for name, field in outline.fields.items():
        there = made.fields[name]
        assert (len(field.channels), field.grid, field.classes) == (len(there.channels), there.grid, there.classes)
    rows = {split: sorted(file.rows for file in files) for split, files in outline.splits.items() if files}
    assert rows == {split: sorted(file.rows for file in files) for split, files in made.splits.items() if files}


def test_an_outline_has_the_days_of_leap_years(tmp_path: Path) -> None:
    source = {"kind": "simulated", "latitudes": 16, "longitudes": 32, "train": [2000, 2001], "valid": [2004]}
    outline = cost.manifest_of("none", reads.load_dataset(json.dumps({"kind": "era5", "source": source})), tmp_path)
    rows = {split: [file.rows for file in files] for split, files in outline.splits.items() if files}
    assert rows == {"train": [4 * 366, 4 * 365], "valid": [4 * 366]}


# ---- hours -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "gpus", "queue", "charged"),
    [
        (1, 1, "shared", 0.25),
        (1, 2, "shared", 0.5),
        (1, 4, "regular", 1),
        (2, 4, "regular", 2),
        (1, 3, "regular", 1),  # too large for a part of a node, so the complete node is charged
    ],
)
def test_nodes(tmp_path: Path, nodes: int, gpus: int, queue: str, charged: float) -> None:
    geometry = {"nodes": nodes, "gpus_per_node": gpus}
    here = work(load(tmp_path, plans=ladder(geometry=geometry, batch_size=96)), "cosmo_ladder.baseline")
    measured(tmp_path, here, (16384 + 2560 / 3) / 3480)  # the training takes an hour
    (row,) = cost.price([here], scheduler(), tmp_path)
    assert row.queue == queue == slurm.request(scheduler(), "train", here.run.geometry)["qos"]
    assert row.basis == "measured"
    assert row.hours["node_hours"] == row.hours["charged_hours"] == pytest.approx(charged)
    occupied = 4 if queue == "regular" else gpus  # no other job can use the rest of a complete node
    assert row.hours["gpu_hours"] == pytest.approx(nodes * occupied)
    assert row.geometry == slurm.shown(Geometry(nodes=nodes, gpus_per_node=gpus))


def test_a_dry_run_prints_the_cost_of_all_jobs(tmp_path: Path) -> None:
    known, unknown = (work(load(tmp_path), f"cosmo_ladder.{run}") for run in ("baseline", "compile"))
    site = scheduler(minutes={"train": 720, "data": 120})
    table = cost.price([known, unknown, Work("data", "cosmo_demo", "data", jobs=10)], site, tmp_path)
    said = cost.outlook(table, 9, None)
    assert said.startswith("9 jobs; ") and said.count("≤2.50") == said.count("≤3.02") == 2 and "CPU nodes" in said
    site = scheduler(minutes={"train": 720}, gpu_nodes={"account_suffix": ""})  # one account
    table = cost.price([known, unknown], site, tmp_path)
    assert cost.outlook(table, 9, None).startswith("9 jobs; ≤3.02 ")


@pytest.mark.parametrize(
    ("here", "words"),
    [
        (cost.Expected(90.0), ("about 1 min 30 s",)),
        (cost.Expected(90.0, untimed=2), ("at least 1 min 30 s", "2 jobs never timed")),
        (cost.Expected(30.0, untimed=3), ("duration unknown",)),
        (cost.Expected(90.0, busy=60.0), ("about 1 min 30 s (2 min 30 s on a busy machine)",)),
    ],
)
def test_a_dry_run_marks_untimed_jobs(here: cost.Expected, words: tuple[str, ...]) -> None:
    assert all(each in cost.outlook([], 3, here).replace("\u00a0", " ") for each in ("3 jobs", *words))


def test_the_time_of_a_job_follows_from_earlier_runs(tmp_path: Path) -> None:
    """A job's time is unknown at first. Later, the time is the job's last duration, or follows from the rate."""
    train = work(load(tmp_path), "cosmo_ladder.baseline")
    never = cost.Expected(0.0, untimed=1)
    assert cost.seconds_here("train", train, tmp_path) == never
    file = tmp_path / "benchmarks/train/cosmo_ladder/baseline.tsv"
    file.parent.mkdir(parents=True)
    for text, found in (("s\th:m:s\n", never), ("s\th:m:s\n7.5\t0:00:07\n", cost.Expected(7.5))):
        file.write_text(text)
        assert cost.seconds_here("train", train, tmp_path) == found
    measured(tmp_path, train, (16384 + 2560 / 3) / 3480, {"kind": "cpu"})
    found = cost.seconds_here("train", train, tmp_path)
    assert found.seconds == pytest.approx(3480 + cost.START_UP_HERE) and not found.untimed
    assert cost.seconds_here("collect", None, tmp_path, file) == cost.Expected(7.5)
    assert cost.seconds_here("collect", None, tmp_path, tmp_path / "no.tsv") == never


def test_paired_timing_is_in_the_estimate(tmp_path: Path) -> None:
    """The estimate includes `throughput.beside` seconds of paired timing, even for a run that was never timed.

    On a busy machine, paired timing takes three times as long.
    """
    timing = work(load(tmp_path), "cosmo_ladder.baseline", "throughput")
    assert timing.run and timing.run.throughput.beside == 30
    assert cost.seconds_here("throughput", timing, tmp_path) == cost.Expected(48.0, untimed=1), (
        "30 s of paired timing and 18 s of trials"
    )
    measured(tmp_path, timing, 100.0, {"kind": "cpu"})
    found = cost.seconds_here("throughput", timing, tmp_path)
    samples = cost.STAGES["throughput"].work(timing.run, None, None)  # type: ignore[misc]
    assert (found.seconds, found.busy) == (pytest.approx(samples / 100 + 48 + cost.START_UP_HERE), 60)


@pytest.mark.parametrize("study", ["cosmo_unet", "era5_vit", "imagenet_resnet50"])
def test_published_rates_price_the_shipped_plans_that_they_name(study: str) -> None:
    """Published speeds price the shipped plans that they name, including settings that these plans add."""
    own = config.study_files()[study]
    figures = [figure for figure in own.published if figure.speed]
    named = {run for figure in figures for run in figure.runs if run.partition(".")[0] in own.plans}
    configuration = config.load({"targets": sorted({name.partition(".")[0] for name in named})})
    unpriced = []
    for name in sorted(named):
        plan, _, run = name.partition(".")
        found = configuration.plans[plan].get(run)
        if found and not cost._published(plan, run, found.run):
            unpriced.append(name)
    assert not unpriced


@pytest.mark.parametrize(
    ("full_charge_minutes", "charged"),
    [(0, 0.25), (30, 0.5 + 0.5 * 0.25), (60, 1.0), (120, 1.0)],
)
def test_the_first_minutes_may_count_in_full(tmp_path: Path, full_charge_minutes: int, charged: float) -> None:
    here = work(load(tmp_path, plans=ladder(geometry={"gpus_per_node": 4}, batch_size=96)), "cosmo_ladder.baseline")
    measured(tmp_path, here, (16384 + 2560 / 3) / 3480)  # the training takes an hour
    preempt = {"preempt": {"charge": 0.25, "full_charge_minutes": full_charge_minutes}}
    site = scheduler(run_queues=["preempt"], queues=preempt)
    (row,) = cost.price([here], site, tmp_path)
    assert (row.hours["node_hours"], row.hours["charged_hours"]) == (pytest.approx(1.0), pytest.approx(charged))


def test_cpu_cluster(tmp_path: Path) -> None:
    """On nodes without GPUs, the CPUs determine the charged fraction of a node, and GPU-hours are zero."""
    site = scheduler(
        gpu_nodes={"gpus": 0, "cpus": 64, "account_suffix": ""}, data_cpus=16, run_queues=["regular", "shared"]
    )
    here = work(load(tmp_path), "cosmo_ladder.baseline")
    measured(tmp_path, here, (16384 + 2560 / 3) / 3480, {"kind": "cpu", "name": "EPYC"})
    (row,) = cost.price([here], site, tmp_path)
    assert row.geometry == "1 node x 1 process = 1 rank (dp 1)"
    # The queue regular charges complete nodes.
    assert (row.hours["node_hours"], row.hours["gpu_hours"]) == (pytest.approx(1.0), 0)
    site = site.model_copy(update={"run_queues": ["shared"]})
    (row,) = cost.price([here], site, tmp_path)
    assert row.hours["node_hours"] == pytest.approx(0.25)


@pytest.mark.parametrize("gpus", [0, 1])
def test_without_a_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    """Without a scheduler, an estimate uses measured or published GPU rates only if this machine has a GPU."""
    monkeypatch.setattr("dlscale.preflight.cost.gpus", lambda: gpus)
    here = work(load(tmp_path), "cosmo_ladder.baseline")
    assert cost.estimate(here, tmp_path).basis == ("published" if gpus else "limit")
    measured(tmp_path, here, 50.0, {"kind": "cuda"})
    assert cost.estimate(here, tmp_path).basis == ("measured" if gpus else "limit")


# ---- jobs that would run -----------------------------------------------------------------------------


def test_trials_that_train_again_have_no_results(tmp_path: Path) -> None:
    """Trials that train again count as missing, also in later rungs.

    Their settings may have changed. Existing files alone would mean «nothing to run».
    """
    plan = {
        "study": "mnist_cnn",
        "kind": "sweep",
        "settings": {"training": {"epochs": 4}},
        "sweep": {"method": "halving", "over": {"seed": [1, 2]}, "reduction_factor": 2},
    }
    configuration = load(tmp_path, plans={"swept": plan})
    rungs = [training_work(work(configuration, f"swept.seed-1-rung{rung}").run, 90, 0) for rung in (0, 1)]
    assert rungs == [180, 180], "the second rung must continue after two epochs"
    for name in ("seed-1-rung0", "seed-2-rung0", "seed-1-rung1"):
        (tmp_path / "plans/swept" / name).mkdir(parents=True)
        for file in ("metrics.jsonl", "provenance.json"):
            (tmp_path / "plans/swept" / name / file).touch()

    def waiting(*trials: str) -> list[str]:
        again = [("swept", trial) for trial in trials]
        return [work.run_name for work in cost.works(configuration, ["swept"], again) if work.run]

    assert waiting() == []
    again = waiting("seed-1", "seed-2")
    assert {"seed-1-rung0", "seed-2-rung0"} <= {*again} and len(again) == 3


def test_unfinished_jobs_are_counted_once(tmp_path: Path) -> None:
    """A run that `use` names counts once, under its own name.

    Finished runs do not count, and datasets come first.
    """
    plans = {
        "mine": {
            "study": "cosmo_unet",
            "from": "cosmo_demo.baseline",
            "measure": ["train"],
            "runs": {"reference": {"use": "cosmo_demo.baseline"}, "larger": {"batch_size": 16}},
        }
    }
    configuration = load(tmp_path, plans=plans)
    assert [(w.stage, w.plan, w.run_name) for w in cost.works(configuration, ["mine", "mine"])] == [
        ("data", "cosmo_demo", "data"),
        ("train", "cosmo_demo", "baseline"),
        ("train", "mine", "larger"),
    ]
    manifest(tmp_path, "cosmo_demo", train=[64])
    (tmp_path / "plans/mine/larger").mkdir(parents=True)
    (tmp_path / "plans/mine/larger/provenance.json").touch()
    measured(tmp_path, work(configuration, "cosmo_demo.baseline"), 3.0)  # the training of this run is still missing
    assert [(w.stage, w.run_name) for w in cost.works(configuration, ["mine"])] == [("train", "baseline")]
    both = cost.works(configuration, ["mine", "cosmo_demo"])
    assert [w.stage for w in both if w.run_name == "baseline"] == ["train", "profile"]
    assert all(w.run == configuration.plans[w.plan][w.run_name].run for w in both)
    # the results of `mine.reference` are in this folder
    (tmp_path / "plans/cosmo_demo/baseline/provenance.json").touch()
    assert cost.works(configuration, ["mine"]) == []


def test_a_download_is_not_a_scheduler_job() -> None:
    """A download is not a scheduler job, because compute nodes may lack a network, unless the site requests a job."""
    source = {"kind": "files", "train": ["https://example.org/a.h5", "b.h5"], "valid": ["c.h5"]}
    dataset = validate(dataset_type(), {"kind": "cosmo", "source": source}, "d")
    here, job = (cost.data_jobs(dataset, scheduler(acquire=where)) for where in ("here", "job"))
    # preprocess and assemble three files, and describe: 7 jobs; fetching one file is the eighth
    assert (here, job) == (7, 8)


# ---- messages -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_lines(tmp_path: Path) -> None:
    configuration = load(tmp_path)
    works = [
        Work("data", "cosmo_demo", "data", jobs=10),
        *(work(configuration, f"cosmo_ladder.{run}") for run in ("baseline", "compile")),
    ]
    *table, note = cost.lines(cost.price(works, scheduler(minutes={"train": 720, "data": 120}), tmp_path))
    shown = slurm.shown(Geometry())
    assert [re.split("  +", line) for line in table] == [
        ["run", "stage", "geometry", "queue", "basis", "node-hours", "GPU-hours", "charged hours"],
        ["cosmo_demo", "data", "10 jobs x 32 CPUs", "shared", "limit", "≤2.50", "0.00", "≤2.50"],
        ["cosmo_ladder.baseline", "train", shown, "shared", "published", "0.02", "0.09", "0.02"],
        ["cosmo_ladder.compile", "train", shown, "shared", "limit", "≤3.00", "≤12.00", "≤3.00"],
        ["total CPU nodes", "≤2.50", "0.00", "≤2.50"],
        ["total GPU nodes", "≤3.02", "≤12.09", "≤3.02"],
    ]
    assert len({len(line) for line in table}) == 1  # all lines end in the same column
    assert {line.index("shared") for line in table[1:4]} == {table[0].index("queue")}
    assert "≤: upper bound" in note and "time limit" in note


def test_a_cost_above_the_budget_gives_one_message(tmp_path: Path) -> None:
    """The message names the limit, the estimate and the remedy. A limit that is exactly met passes."""
    table = cost.price([work(load(tmp_path), "cosmo_ladder.baseline")], scheduler(run_queues=["premium"]), tmp_path)
    gpu = cost.total(table, "gpu_hours")
    assert cost.budget_message(table, Budget()) is None
    assert cost.budget_message(table, Budget(gpu_hours=gpu, charged_hours=1)) is None
    message = cost.budget_message(table, Budget(gpu_hours=gpu * 0.999, charged_hours=1)) or ""
    assert "0.36 GPU-hours on GPU nodes" in message and "budget.gpu_hours" in message and "\n" not in message
    assert "Raise the budget, drop runs" in message and "samples.train" in message
    assert "charged" not in message and "≤" not in message
    table = cost.price([work(load(tmp_path), "cosmo_ladder.compile")], scheduler(minutes={"train": 720}), tmp_path)
    message = cost.budget_message(table, Budget(gpu_hours=10)) or ""
    assert "≤12.00 GPU-hours" in message and "site.scheduler.minutes" in message


def test_the_budget_applies_to_each_account(tmp_path: Path) -> None:
    """CPU nodes and GPU nodes with different accounts are compared with the budget separately, otherwise together."""
    works = [Work("data", "cosmo_demo", "data", jobs=10), work(load(tmp_path), "cosmo_ladder.compile")]  # 2.5 h, 3 h
    limits = {"minutes": {"train": 720, "data": 120}}
    apart = cost.price(works, scheduler(**limits), tmp_path)
    assert cost.budget_message(apart, Budget(charged_hours=3)) is None
    message = cost.budget_message(apart, Budget(charged_hours=2)) or ""
    both = ("2.50 charged hours on CPU nodes", "3.00 charged hours on GPU nodes")
    assert all(each in message for each in both)
    together = cost.price(works, scheduler(**limits, gpu_nodes={"account_suffix": ""}), tmp_path)
    assert "≤5.50 charged hours" in (cost.budget_message(together, Budget(charged_hours=3)) or "")


@pytest.mark.slow
def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command merges files over config.yaml, as the workflow does, and returns 2 if a budget is exceeded."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"results: {tmp_path}/results\nbudget: {{charged_hours: 1000}}\n")
    asked = ["cost", "cosmo_ladder", "--profile", "perlmutter", "--configfile", mine]
    assert stage(*asked) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("cosmo_ladder.")]
    assert len(lines) == 2 * len(load(tmp_path).plans["cosmo_ladder"])
    assert stage(*asked, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) >= len(lines) and {row["plan"] for row in rows if row["run"]} == {"cosmo_ladder"}
    assert sum(row["node_hours"] for row in rows) > 0
    mine.write_text(f"results: {tmp_path}/results\nbudget: {{charged_hours: 0.5}}\n")
    assert stage(*asked) == 2
    assert "dlscale cost: budget: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("epochs", "steps", "until", "samples"), [(5, None, 2, 24), (None, 10, 2, 24), (None, 10, None, 40)]
)
def test_a_partial_training_counts_only_the_part(
    epochs: int | None, steps: int | None, until: int | None, samples: int
) -> None:
    """The estimate of a training that stops early covers only the steps until the stop.

    The training has 12 samples in batches of 4. Validation has 3 samples before the first epoch and after each epoch; a
    validation sample takes a third of the work.
    """
    training = SimpleNamespace(epochs=epochs, steps=steps, stop_after=until)
    assert training_work(SimpleNamespace(batch_size=4, training=training), 12, 3) == samples + 1 + (until or 4)
