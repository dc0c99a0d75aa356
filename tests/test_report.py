"""The report: results are read correctly, the tables have the right numbers, and a browser shows the page."""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from html import unescape
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imsave
from PIL import Image

from dlscale.config.records import PlanKind, PlanRecord, Published, RunReference
from dlscale.config.resolve import load_files
from dlscale.core import telemetry, text
from dlscale.core.errors import UserError
from dlscale.core.metrics import Epoch, LossInfo, Metric, epoch_lines, read_epochs
from dlscale.data.manifest import FieldInfo, File, Manifest, Transform
from dlscale.extensions.profile import machine as profiles
from dlscale.extensions.profile import section as profile_section
from dlscale.extensions.tune.records import Duel, Tried, Tuning
from dlscale.extensions.tune.section import tuned_winner
from dlscale.measure.profilers import Activity, Overhead, Profile, ProfiledTool, RangeTime, TopEntry
from dlscale.measure.records import OperatorWork, Peaks, SampleWork, Throughput, Trials, Usage
from dlscale.parallel.records import Device, Memory, MemoryUse
from dlscale.report import collect, curves, figures, published, report, sections
from dlscale.report.evidence import bound
from dlscale.report.figures import joules
from dlscale.report.verdict import disturbance, judge_run
from dlscale.results import read_plan, read_run
from dlscale.studies.figures import values as draw_values
from dlscale.train.provenance import Provenance
from tests.conftest import ROOT, stage
from tests.test_environment import BEFORE

HOSTILE = """</title><script>alert(1)</script>"&'{{ 7*7 }}"""
A100 = {"hardware": "A100 40 GB"}
PUBLISHED = [
    Published(label="baseline", runs=["ladder.baseline"], kind="FULL", samples_per_second=9.4, source="S1", **A100),
    Published(label="baseline", runs=["ladder.baseline"], kind="FULL", samples_per_second=8.8, source="S2", **A100),
    Published(label="fast", runs=["ladder.bf16"], samples_per_second=64.0, source="S2", **A100),
    Published(label="loading", runs=["ladder.baseline"], kind="IO", samples_per_second=77.0, source="S1", **A100),
    Published(label="u10 RMSE", metric="rmse_normalised/u10", value=0.13, source="S1", runs=["p.a"]),
]


# ---- results as the stages write them ------------------------------------------------------------


def png(path: Path, width: int = 60, height: int = 40) -> None:
    """Write a small picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    imsave(path, np.add.outer(2 * np.arange(height), 4 * np.arange(width)))


@dataclass(frozen=True)
class Study:
    """Facts about a study in the records of its runs.

    `values` returns the metrics for a given error relative to the best baseline without learning.
    """

    settings: dict[str, Any]
    described: list[Metric]
    loss: LossInfo
    values: Callable[[float], dict[str, float]]
    published: list[Published] = field(default_factory=list)
    title: str | None = None


def forecast_values(shrink: float) -> dict[str, float]:
    """Return the metrics of two channels; errors are `shrink` times the errors of persistence."""
    persistence, std = {"u10": 2.0, "t2m": 2.67}, {"u10": 4.0, "t2m": 8.0}
    values: dict[str, float] = {}
    for channel, naive in persistence.items():
        rmse = shrink * naive
        values |= {f"rmse/{channel}": rmse, f"persistence_rmse/{channel}": naive, f"skill/{channel}": 1 - shrink}
        values |= {f"rmse_normalised/{channel}": rmse / std[channel], f"acc/{channel}": 0.99 - 0.1 * shrink}
    return values


def gas_values(shrink: float) -> dict[str, float]:
    return {
        "l1": 0.04 * shrink,
        "l1_of_mean": 0.04,
        "skill": 1 - shrink,
        "mae/density": 0.7 * shrink,
        "mae/velocity_x": 120 * shrink,
    }


def of_channels(units: dict[str, str], kind: str, title: str, **more: Any) -> list[Metric]:
    """Return a metric `kind/CHANNEL` per channel; `naive/CHANNEL`, if given, is its baseline without learning."""
    naive = more.pop("naive", None)
    return [
        Metric(name=f"{kind}/{name}", title=title, unit=unit, naive=f"{naive}/{name}" if naive else None, **more)
        for name, unit in units.items()
    ]


WINDS, GAS = {"u10": "m s**-1", "t2m": "K"}, {"density": "1", "velocity_x": "km/s"}
NO_UNITS = dict.fromkeys(WINDS, "1")
STUDIES = {
    "forecast": Study(
        {"dataset": "demo_states", "model": {"kind": "vit"}, "loss": {"kind": "relative_l2"}},
        [
            *of_channels(
                WINDS,
                "rmse",
                "RMSE",
                meaning="root-mean-square error over all validation samples and points, in physical units",
                naive="persistence_rmse",
                answer="persistence",
            ),
            *of_channels(
                NO_UNITS,
                "rmse_normalised",
                "RMSE, normalised",
                meaning="RMSE of standardised fields, averaged over samples, as published",
            ),
            *of_channels(WINDS, "persistence_rmse", "RMSE of persistence"),
            *of_channels(NO_UNITS, "skill", "skill", better="higher", derived=True),
            *of_channels(
                NO_UNITS,
                "acc",
                "ACC",
                meaning="anomaly correlation coefficient against the training climatology; 1 is perfect",
                better="higher",
            ),
        ],
        LossInfo(title="relative L2", unit="no unit"),
        forecast_values,
        PUBLISHED,
        "ERA5 forecast",
    ),
    "gas": Study(
        {"dataset": "demo_volumes", "model": {"kind": "unet3d"}, "loss": {"kind": "l1"}},
        [
            Metric(
                name="l1",
                title="L1",
                meaning="mean absolute error in model units",
                naive="l1_of_mean",
                answer="the training mean",
            ),
            Metric(name="l1_of_mean", title="L1 of the mean"),
            Metric(name="skill", title="skill", better="higher", derived=True),
            *of_channels(
                GAS,
                "mae",
                "MAE",
                meaning="mean absolute error over all validation samples and points, in physical units",
                naive="mae_of_mean",
                answer="the training mean",
            ),
        ],
        LossInfo(title="L1", unit="model units"),
        gas_values,
    ),
    # A study with a score that should be high, and without channels, baseline or description of the loss.
    "digits": Study(
        {"dataset": "digits", "model": {"kind": "net"}, "loss": {"kind": "entropy"}},
        [Metric(name="accuracy", title="accuracy", meaning="share of right answers", better="higher")],
        LossInfo(),
        lambda shrink: {"accuracy": 1 - 0.1 * shrink},
    ),
}


STATES = FieldInfo(
    channels=["u10", "t2m"],
    units=["m s**-1", "K"],
    grid=[32, 64],
    transforms=[Transform("linear", 0.5, 4.0), Transform("linear", 281.3, 8.0)],
    stored="physical",
    mean=[0.5, 281.3],
    std=[4.0, 8.0],
    minimum=[-20.0, 240.0],
    maximum=[25.0, 310.0],
)
VOLUMES = FieldInfo(
    channels=["density", "velocity_x"],
    units=["1", "km/s"],
    grid=[64] * 3,
    transforms=[Transform("log", 0.0, 14.0, 1e-3), Transform("linear", 0.0, 1000.0)],
    stored="model",
    mean=[-0.01, 0.0],
    std=[0.1, 0.2],
)
LABELS = FieldInfo(
    channels=["label"], units=["1"], grid=[], transforms=[Transform("linear")], stored="model", mean=[4.5], std=[2.9]
)
STATE_FACTS = ["a state every 6 h", "latitude 87° to −87°", "longitude 0° to 354°"]
DATASETS = {
    "demo_states": Manifest(kind="states", rows="times", fields={"fields": STATES}, splits={}, facts=STATE_FACTS),
    "demo_volumes": Manifest(kind="volumes", rows="planes", fields={"Hydro": VOLUMES}, splits={}),
    "digits": Manifest(kind="digits", rows="images", fields={"label": LABELS}, splits={}),
}


ENVIRONMENT = BEFORE.model_copy(
    update={"python": "3.12.1", "versions": {"torch": "2.13.0"}, "git": {"commit": "0123456789abcdef", "dirty": True}}
)


class Results:
    """Writer of a results folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.plans: list[Path] = []
        self.datasets: list[Path] = []
        self.references: list[Path] = []

    def run(
        self,
        plan: str,
        name: str,
        study: str = "forecast",
        epochs: int = 5,
        speed: float = 20.0,
        triplet: tuple[float, float, float] | None = (200.0, 25.0, 22.0),
        final: float = 0.8,
        **settings: Any,
    ) -> Path:
        """Write a run's folder; `final` is the run's last error relative to the best baseline without learning."""
        folder = self.root / "plans" / plan / name
        folder.mkdir(parents=True, exist_ok=True)
        known = STUDIES[study]
        chosen = {
            "study": study,
            "seed": 0,
            "batch_size": 16,
            **known.settings,
            "loader": {"kind": "torch", "workers": 0},
            "precision": "fp32",
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(chosen | settings, sort_keys=False))
        device = Device(kind="cpu", name="Example CPU", threads=2)
        lines = []
        for epoch in range(1, epochs + 1):
            shrink = final + (1.4 - final) * (math.exp(-0.6 * epoch) - math.exp(-0.6 * epochs))
            lines.append(
                Epoch(
                    epoch=epoch,
                    step=8 * epoch,
                    samples=128 * epoch,
                    learning_rate=1e-3 * (1 + math.cos(math.pi * epoch / epochs)) / 2,
                    train_loss=0.31 * shrink,
                    valid_loss=0.30 * shrink + 0.01,
                    epoch_seconds=128 / speed,
                    samples_per_second=speed * (0.5 if epoch == 1 else 1 + 0.01 * epoch**2),
                    valid_seconds=1.5,
                    metrics=known.values(shrink),
                )
            )
        if epochs:
            (folder / "metrics.jsonl").write_text(epoch_lines(lines))
            png(folder / "prediction.png")
            Provenance(
                command=f"python -m dlscale train --config results/plans/{plan}/{name}/config.yaml",
                started="2024-05-01T10:00:00+00:00",
                finished="2024-05-01T10:02:05+00:00",
                host="node-1",
                device=device,
                seed=0,
                parameters=1_234_567,
                loss=known.loss,
                metrics=known.described,
            ).write(folder / "provenance.json")
            (folder / "telemetry").mkdir(exist_ok=True)
            ENVIRONMENT.write(folder / "telemetry/train.json")
        if triplet:
            modes = {
                mode: Trials(
                    trial_throughput=[0.98 * mean, mean, 1.02 * mean],
                    trial_time=[1.0, 1.0, 1.0],
                    avg_iter_throughput=[0.98 * mean, mean, 1.02 * mean],
                    mean=mean,
                    std=mean / 50,
                )
                for mode, mean in zip(("io", "synthetic", "full"), triplet, strict=True)
            }
            Throughput(batch_size=16, device=device, peak_memory_bytes=1_500_000_000, **modes).write(
                folder / "throughput.json"
            )
        return folder

    def plan(
        self,
        name: str,
        runs: dict[str, str],
        study: str = "forecast",
        title: str | None = None,
        kind: PlanKind = "ladder",
        measure: tuple[str, ...] = ("train", "throughput"),
        use: dict[str, tuple[str, str]] | None = None,
        repeats: dict[str, list[str]] | None = None,
    ) -> Path:
        """Write a plan of `runs` (name → label); `use` maps a reused run to its owner, (plan, run)."""
        owners = {run: (use or {}).get(run, (name, run)) for run in runs}
        known = STUDIES.get(study)
        record = PlanRecord(
            plan=name,
            title=title or name,
            study=study,
            study_title=known.title if known else None,
            kind=kind,
            measure=list(measure),
            runs=[
                RunReference(
                    **{"name": run, "label": label, "plan": owners[run][0], "run": owners[run][1]},
                    **{"measure": measure, "repeats": (repeats or {}).get(run, [])},
                )
                for run, label in runs.items()
            ],
            published=known.published if known else [],
        )
        path = self.root / "plans" / name / "plan.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(record.model_dump(mode="json"), sort_keys=False, allow_unicode=True))
        self.plans.append(path)
        return path

    def dataset(self, name: str) -> Path:
        """Write a dataset's manifest and preview."""
        folder = self.root / "data" / name
        png(folder / "preview.png", 300, 100)
        sizes = {"train": [(1460, 48_000_000), (1464, 48_000_000)], "valid": [(100, 3_300_000)]}
        DATASETS[name].model_copy(
            update={
                "splits": {
                    split: [
                        File(path=f"{split}/{index}.h5", rows=rows, bytes=bytes_, digest="0")
                        for index, (rows, bytes_) in enumerate(files)
                    ]
                    for split, files in sizes.items()
                },
                "provenance": {"settings": {"kind": DATASETS[name].kind, "source": {"kind": "simulated"}}},
            }
        ).write(folder / "manifest.json")
        self.datasets.append(folder)
        return folder

    def collect(self, plan: Path) -> list[dict[str, str]]:
        out = plan.parent / "summary.csv"
        collect.main(argparse.Namespace(plan=str(plan), out=str(out), page=None))
        with out.open(newline="") as file:
            return list(csv.DictReader(file))

    def report(self, title: str = "Demo report") -> str:
        out = self.root / "report" / "index.html"
        report.main(
            argparse.Namespace(
                title=title,
                plans=self.plans,
                datasets=self.datasets,
                references=self.references,
                call="snakemake --configfile 'my plans.yaml'",
                out=str(out),
            )
        )
        return out.read_text()


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "results")


@pytest.fixture
def ladder(results: Results) -> Results:
    return with_ladder(results)


def with_ladder(results: Results) -> Results:
    """Return results with a ladder of three rungs, all their measurements, and their dataset."""
    results.run("ladder", "baseline", speed=18.0, triplet=(30.0, 120.0, 24.0), final=0.9)
    results.run(
        "ladder",
        "workers",
        speed=50.0,
        triplet=(200.0, 120.0, 110.0),
        final=0.7,
        loader={"kind": "torch", "workers": 4},
    )
    results.run(
        "ladder",
        "bf16",
        speed=60.0,
        triplet=(205.0, 240.0, 180.0),
        final=0.75,
        loader={"kind": "torch", "workers": 4},
        precision="bf16",
    )
    results.plan("ladder", {"baseline": "baseline", "workers": "4 workers", "bf16": "bf16"}, title="The ladder")
    results.dataset("demo_states")
    return results


def test_runs_left_out_are_listed_once_with_the_reason(ladder: Results) -> None:
    path = ladder.plans[0]
    lacking = {"compile": "a C++ compiler", "d4": "4 GPUs (it has 2)", "d4_large": "4 GPUs (it has 2)"}
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "left_out": lacking}))
    text = Page(ladder.report()).text
    assert "3 runs, 3 more left out" in text and text.count("a C++ compiler") == 1
    assert "4 GPUs (it has 2): d4, d4_large." in text


def test_the_card_warns_of_a_neighbour(results: Results) -> None:
    """The plan's card warns of other programs, which used 1.2 and 0.9 of the two cores while two runs were measured."""
    for name, others in (("a", 12.0), ("b", 9.0), ("quiet", 0.2)):
        folder = results.run("p", name, precision=name)
        measured = Throughput.read(folder / "throughput.json")
        used = Usage(seconds=10.0, cores=2, cpu_seconds=5.0, cores_cpu_seconds=5.0 + others)
        modes = {
            mode: getattr(measured, mode).model_copy(update={"usage": used}) for mode in ("io", "synthetic", "full")
        }
        measured.model_copy(update=modes).write(folder / "throughput.json")
    plan = read_plan(results.plan("p", {"a": "a", "b": "b", "quiet": "quiet"}))
    found = disturbance(plan.runs)
    files = [str(run.folder / "throughput.json") for run in plan.runs[:2]]
    again = shlex.join(["snakemake", f"plan_{plan.name}", "--forcerun", *files])
    assert found and found.tag == "busy machine" and found.advice.endswith(f": {again}")
    assert "45\u00a0% to 60\u00a0% of the cores" in found.summary and "runs a, b" in found.summary
    assert disturbance(plan.runs[2:]) is None
    page = Page(results.report()).text
    assert "Other programs used 45 % to 60 % of the cores while runs a, b" in page
    assert sections.line(plan).endswith("; busy machine: speeds are probably too low")


def test_a_busy_machine_has_no_speed_up_in_the_headline(results: Results) -> None:
    """Plan `busy` has no speed-up, because another program used 60 % of the cores while run b was measured."""
    for plan, others in (("quiet", 0.0), ("busy", 12.0)):
        for name, triplet in (("a", (200.0, 60.0, 50.0)), ("b", (900.0, 220.0, 200.0))):
            folder = results.run(plan, name, precision=name, triplet=triplet)
            measured = Throughput.read(folder / "throughput.json")
            used = Usage(
                seconds=10.0, cores=2, cpu_seconds=5.0, cores_cpu_seconds=5.0 + (others if name == "b" else 0.0)
            )
            full = measured.full and measured.full.model_copy(update={"usage": used})
            measured.model_copy(update={"full": full}).write(folder / "throughput.json")
    quiet, busy = (
        read_plan(results.plan(plan, {"a": "a", "b": "b"}, measure=("throughput",))) for plan in ("quiet", "busy")
    )
    assert re.match(r"quiet: 200 samples/s with “b”, 4.00× .* as fast as “a”$", sections.line(quiet))
    assert sections.line(busy) == (
        "busy: fastest run not known; highest rate 200 samples/s, “b”; busy machine: speeds are probably too low"
    )
    page = Page(results.report()).text
    assert "The fastest run is not known, because other programs" in page and page.count("run b over a") == 1
    assert page.count("highest rate, b") == 1 and page.count("not known: other programs disturbed") >= 2


@pytest.mark.slow
def test_a_training_has_neighbours_too(results: Results) -> None:
    """On a busy machine, the card reports other programs, or jobs of the same call, that used many of the cores."""
    for name, used, others, call in (
        ("busy", 0.97, 0.5, None),
        ("mixed", 0.97, 0.5, 0.2),
        ("own", 0.97, 0.5, 0.45),
        ("beside", 0.6, 0.5, None),
        ("quiet", 0.97, 0.01, 0.0),
    ):
        folder = results.run("p", name, precision=name, triplet=None)
        rows = [telemetry.Sample(1.7e9 + n, 1.0, 4, cpu=used, cpu_others=others, cpu_call=call) for n in range(20)]
        (folder / "telemetry").mkdir(exist_ok=True)
        (folder / "telemetry/train.csv").write_text(telemetry.header(0) + "".join(map(telemetry.line, rows)))
    names = ("busy", "mixed", "own", "beside", "quiet")
    plan = read_plan(results.plan("p", {name: name for name in names}, measure=("train",)))
    found = disturbance(plan.runs)
    assert found and found.tag == "busy machine" and "idle machine" in found.advice
    assert "30\u00a0% to 50\u00a0% of the cores" in found.summary and "runs busy, mixed" in found.summary
    own = disturbance(plan.runs[2:])
    assert own and own.tag == "own jobs ran alongside" and "add `throughput`" in own.advice
    assert "same Snakemake call used 50\u00a0% of the cores" in own.summary and "run own" in own.summary
    assert disturbance(plan.runs[3:]) is None
    assert ">own jobs ran alongside<" not in results.report() and ">busy machine<" in results.report()


def test_a_jobs_efficiency_is_the_trainings_in_whatever_order_stages_are_named(results: Results) -> None:
    folder = results.run("p", "a")
    (folder / "telemetry").mkdir(exist_ok=True)
    for name in ("train", "throughput"):
        rows = [telemetry.Sample(1.7e9 + n, 1.0, 4, cpu_run=0.5) for n in range(3)]
        (folder / f"telemetry/{name}.csv").write_text(telemetry.header(0) + "".join(map(telemetry.line, rows)))
    (run,) = read_plan(results.plan("p", {"a": "a"}, measure=("throughput", "train"))).runs
    used = profiles.job(run)
    assert used and used.stage == "train"


# ---- collect -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_trainings_with_other_seeds_are_one_run(results: Results) -> None:
    """Tables have the seeds' mean and standard deviation, charts a band; speeds are those of the first seed."""
    finals = {"a": 0.8, "a-seed1": 0.7, "a-seed2": 0.6, "b": 0.9, "b-seed1": 0.9}
    for seed, (name, final) in enumerate(finals.items()):
        triplet = None if "-" in name else (200.0, 25.0, 22.0)
        results.run("p", name, final=final, triplet=triplet, epochs=4 if name == "a-seed2" else 5, seed=seed)
    path = results.plan("p", {"a": "A", "b": "B"}, repeats={"a": ["a-seed1", "a-seed2"], "b": ["b-seed1"]})
    plan = read_plan(path)
    a, b = results.collect(path)
    losses = [0.30 * final + 0.01 for final in (0.8, 0.7, 0.6)]
    assert (a["seeds"], b["seeds"]) == ("3", "2")
    assert float(a["valid_loss"]) == pytest.approx(statistics.mean(losses))
    assert float(a["valid_loss_std"]) == pytest.approx(statistics.stdev(losses)) and float(b["valid_loss_std"]) == 0
    metric = next(name for name in plan.runs[0].epochs[-1].metrics)
    assert float(a[f"{metric}_std"]) > 0 and a["full_samples_per_second"] == "22.0"
    rows = curves.curve(plan.runs[0], "", lambda epoch: epoch.valid_loss)
    assert len(rows) == 4 and all(row["low"] < row["value"] < row["high"] for row in rows), (
        "the band must end with the shortest training"
    )
    shown = Page(results.report()).text
    assert (
        f"standard deviation {text.number(statistics.stdev(losses), 2)}" in shown
        and "after 5 epochs, means of 3 trainings" in shown
    )
    assert plan.best and plan.score(plan.runs[0])[0] == pytest.approx(statistics.mean(losses))
    assert "; skill 0.30" in shown, "the table by channel must contain means, too"
    again = plan.runs[0].repeats[0]
    (results.root / "plans/p/a-seed1/metrics.jsonl").write_text(
        epoch_lines([*again[:-1], again[-1].model_copy(update={"valid_loss": math.nan, "metrics": {}})])
    )
    a, b = results.collect(path)
    assert (a["valid_loss"], a["valid_loss_std"]) == ("nan", "") and float(b["valid_loss_std"]) == 0, (
        "the loss of run 'a' must be nan, because one of its repetitions diverged"
    )


def test_text_in_a_table_is_not_read_as_a_formula(results: Results, tmp_path: Path) -> None:
    """Text and column names are escaped; numbers are unchanged."""
    labels = {"a": '=HYPERLINK("x")', "b": "@SUM(1)", "c": "\tx", "d": "-1", "e": "- 1", "f": "plain"}
    for name in labels:
        results.run("p", name)
    plan = results.plan("p", labels)
    expected = ['\'=HYPERLINK("x")', "'@SUM(1)", "'\tx", "-1", "'- 1", "plain"]
    rows = results.collect(plan)
    assert [row["label"] for row in rows] == expected and rows[0]["full_samples_per_second"] == "22.0"
    points = [{"run": label, "x": 1.5, "value": -2.5} for label in labels.values()]
    figures.lines("chart", "about", points, {"x": "=x"}, {"value": "y"}, by="run").write(tmp_path, [*labels.values()])
    written = [*csv.DictReader((tmp_path / "chart.csv").open(newline=""))]
    assert [each["run"] for each in written] == expected
    assert (written[0]["'=x"], written[0]["y"]) == ("1.5", "-2.5")


def test_summary_has_the_runs_in_order_and_their_numbers(ladder: Results) -> None:
    rows = ladder.collect(ladder.plans[0])
    assert [row["run"] for row in rows] == ["baseline", "workers", "bf16"]
    row = rows[1]
    assert {
        key: row[key]
        for key in ("label", "plan", "study", "dataset", "source", "parameters", "epochs", "steps", "samples")
    } == {
        "label": "4 workers",
        "plan": "ladder",
        "study": "forecast",
        "dataset": "demo_states",
        "source": "ladder/workers",
        "parameters": "1234567",
        "epochs": "5",
        "steps": "40",
        "samples": "640",
    }
    # Values of the last of five epochs, in which each error is exactly 0.7 times the error of persistence.
    expected = {
        **{"train_loss": 0.31 * 0.7, "valid_loss": 0.30 * 0.7 + 0.01, "rmse/t2m": 0.7 * 2.67, "skill/u10": 0.3},
        # Epochs 2 to 5 run at 50 × (1.04, 1.09, 1.16, 1.25) samples/s. The first epoch has half the speed and does not
        # count.
        "train_samples_per_second": 50 * (1.09 + 1.16) / 2,
        **{"io_samples_per_second": 200.0, "synthetic_samples_per_second": 120.0, "full_samples_per_second": 110.0},
        "full_samples_per_second_std": 110 / 50,
    }
    assert {key: float(row[key]) for key in expected} == pytest.approx(expected)
    assert [float(row["speed_up"]) for row in rows] == pytest.approx([1.0, 110 / 24, 180 / 24])
    # All published figures come from the source with the most runs, so their ratios are comparable.
    keys = ("samples_per_second", "as", "hardware", "source")
    assert [[row[f"published_{key}"] for key in keys] for row in rows] == [
        ["8.8", "baseline", "A100 40 GB", "S2"],
        ["", "", "", ""],
        ["64.0", "fast", "A100 40 GB", "S2"],
    ]
    assert [row["published_speed_up"] for row in rows] == ["1.0", "", str(64.0 / 8.8)]


def test_published_figures_are_shown_with_kind_unit_and_device() -> None:
    figures = [
        Published(label="baseline", samples_per_second=8.8, std=0.25, kind="IO", source="S1", runs=["p.a"], **A100),
        Published(label="4 GPUs", samples_per_second=2202, gpus=4, batch_size=1024, source="S1", like=["p.b"], **A100),
        Published(label="one GPU", samples_per_second=64, source="S1", **A100),
        Published(label="baseline", metric="valid_loss", by_epoch=[0.419114, 0.35], source="S1", runs=["p.a"], **A100),
        Published(label="baseline", metric="validation_time", by_epoch=[5.778, 5.089], unit="s", source="S1", **A100),
        Published(label="large", metric="memory", value=41.2, unit="GB", source="S1", **A100),
        Published(label="to the end", metric="time", value=22, unit="h", source="S1", **A100),
        Published(label="job", metric="memory efficiency", value=16.43, unit="%", source="S1"),
        Published(label="u10", metric="rmse_normalised/u10", value=0.13, source="S1"),
    ]
    assert [*zip(*list(published.columns(figures).values())[1:6], strict=True)] == [
        ("throughput, loading", "8.8 (standard deviation 0.25) samples/s", "A100 40 GB", "–", "p.a"),
        ("throughput, training", "2,202 samples/s", "4 × A100 40 GB", "1,024", "like p.b"),
        ("throughput, training", "64 samples/s", "A100 40 GB", "–", "–"),
        ("validation loss", "0.419114, 0.35 after epochs 1 to 2", "A100 40 GB", "–", "p.a"),
        ("time of a validation", "5.778, 5.089 s after epochs 1 to 2", "A100 40 GB", "–", "–"),
        ("memory of a GPU", "41.2 GB", "A100 40 GB", "–", "–"),
        ("time", "22 h", "A100 40 GB", "–", "–"),
        ("memory efficiency", "16.43 %", "–", "–", "–"),
        ("rmse_normalised/u10", "0.13", "–", "–", "–"),
    ]
    assert published.quoted(published.series(figures, "p", ["b"]), "b") == (
        "2,202 samples/s on 4 × A100 40 GB (4 GPUs; S1)"
    )


def test_a_published_loss_is_shown_below_the_loss_of_the_run(ladder: Results) -> None:
    plan = read_plan(ladder.plans[0])
    loss = Published(label="p", metric="valid_loss", by_epoch=[0.4, 0.347524], source="S1", runs=["ladder.baseline"])
    other = Published(label="p", metric="valid_loss", value=0.3, source="S1", like=["ladder.bf16"])
    table = sections.runs_table(replace(plan, record=plan.record.model_copy(update={"published": [loss, other]})))
    column = [name for name, _ in table.columns].index("validation loss")
    assert [row[column].note for row in table.rows] == ["published: 0.347524, S1", "", ""]


def test_the_page_counts_left_out_steps(ladder: Results) -> None:
    """The note counts the left-out steps of all epochs and seeds."""
    plan = read_plan(ladder.plans[0])
    first, second, *rest = plan.runs
    skipping = [epoch.model_copy(update={"skipped": 2}) for epoch in first.epochs[:2]]
    runs = [replace(first, epochs=[*skipping, *first.epochs[2:]], repeats=[skipping[:1]]), second, *rest]
    table = sections.runs_table(replace(plan, runs=runs))
    column = [name for name, _ in table.columns].index("epochs")
    noted, *others = [row[column].note for row in table.rows]
    assert "left out 6 steps" in noted and not any(others)


def test_times_are_of_one_loader(results: Results) -> None:
    """After a resume with another loader, only the new loader's speed counts, and the total time is left out."""
    folder = results.run("p", "a", epochs=5, speed=10.0, triplet=None)
    results.run("p", "b", epochs=5, speed=10.0, triplet=None)
    made = [{"loader": "torch"}, {"loader": "torch"}, None, {"loader": "direct"}, {"loader": "direct"}]
    epochs = read_epochs(folder / "metrics.jsonl")
    lines = [epoch.model_copy(update={"made_with": own}) for epoch, own in zip(epochs, made, strict=True)]
    (folder / "metrics.jsonl").write_text(epoch_lines(lines))
    rows = results.collect(results.plan("p", {"a": "a", "b": "b"}, measure=("train",)))
    # Only the last epoch of run `a` counts, because the first epoch with a loader is a warm-up. `b` has the median of
    # four epochs.
    speeds = [10 * (1 + 0.01 * epoch**2) for epoch in range(2, 6)]
    assert [float(row["train_samples_per_second"]) for row in rows] == pytest.approx(
        [speeds[3], (speeds[1] + speeds[2]) / 2]
    )
    assert results.report().count(text.duration(64)) == 1, "only run b may show a training time"


def test_only_results_of_the_plans_stages_are_read(results: Results) -> None:
    (results.run("p", "a") / "throughput.json").write_text("torn {")
    assert results.collect(results.plan("p", {"a": "a"}, measure=("train",)))[0]["io_samples_per_second"] == ""


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", None),
        ("throughput.json", None),
        ("metrics.jsonl", b""),
        ("metrics.jsonl", b"\xff\xfe"),
        ("throughput.json", b'{"IO": {"mean": 1.0'),
        ("throughput.json", b"[]"),
        ("throughput.json", b'{"IO": {"std": 1.0}}'),
        ("provenance.json", b"{"),
        ("provenance.json", b'{"started": "yesterday"}'),
        ("telemetry/train.json", b"a pipe"),
        ("prediction.png", b"\x89PNG\r\n\x1a\n half a picture"),
        ("../plan.yaml", b"plan: x\n"),
        ("../plan.yaml", b"plan: ladder\nstudy: s\nmeasure: [train]\nruns: [{name: a, plan: ../.., run: a}]\n"),
        ("../../../data/demo_states/preview.png", b""),
        ("../../../data/demo_states/manifest.json", b"{}"),
    ],
)
def test_damage_is_one_message_with_the_file_and_nothing_is_written(
    ladder: Results, name: str, content: bytes | None
) -> None:
    path = (ladder.root / "plans" / "ladder" / "workers" / name).resolve()
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    if content == b"a pipe":
        os.mkfifo(path)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=re.escape(path.name)):
        ladder.report()
    assert not list(ladder.root.rglob("*.part*")) and not (ladder.root / "report" / "index.html").exists()


def test_tables_and_page_need_no_torch() -> None:
    code = "import sys, dlscale.report.collect, dlscale.report.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ---- bottlenecks and number formats ----------------------------------------------------------------


def triplet(io: float, synthetic: float, full: float) -> Throughput:
    return Throughput.model_validate(
        {
            key: {"mean": mean, "trial_time": [1.0] * 3}
            for key, mean in zip(("IO", "SYNTHETIC", "FULL"), (io, synthetic, full), strict=True)
        }
    )


@pytest.mark.parametrize(
    ("rates", "what", "why"),
    [
        (
            (84.5, 481.6, 83.2),
            "data loading",
            "98\u00a0% of loading alone, the slower of the two. A faster loader would help.",
        ),
        ((5000.0, 40.0, 39.0), "computation", "98\u00a0% of"),
        ((100.0, 95.0, 90.0), "loading and computing", "95\u00a0% of"),
        ((100.0, 100.0, 50.0), "missing overlap", "take turns instead of overlapping"),  # taking turns: 50/s
        ((1000.0, 200.0, 120.0), "computation", "one after the other would be: both may compete for"),  # turns: 167/s
        ((100.0, 50.0, 38.0), "computation", "only partly"),
        ((1000.0, 200.0, 214.0), "computation", "214 samples/s, as fast as computing alone, within noise"),
    ],
)
def test_the_limit_of_a_run(rates: tuple[float, float, float], what: str, why: str) -> None:
    found = bound(triplet(*rates))
    assert found and found.what == what and why in found.why


@pytest.mark.parametrize(
    ("full", "std", "count", "beyond"),
    [
        ((242.0, 3.5), 12.0, 3, True),  # the noise is 31 samples/s: 4.30 standard errors of 7.2
        ((172.0, 3.5), 12.0, 3, False),
        ((172.0, 3.5), 2.0, 3, True),  # the noise is 10 samples/s, a tenth of the rate is 14
        ((155.0, 0.1), 0.1, 3, False),  # 8 % too high: 10 % counts as noise
        ((242.0, 3.5), 12.0, 2, False),  # two trials are too few for a judgement
        ((242.0, 0.0), 0.0, 1, False),
    ],
)
def test_impossible_rates_are_noise_or_a_disturbed_machine(
    full: tuple[float, float], std: float, count: int, beyond: bool
) -> None:
    rates = {"IO": (1000.0, 1.0), "SYNTHETIC": (143.0, std), "FULL": full}
    found = bound(
        Throughput.model_validate(
            {key: {"mean": mean, "std": std, "trial_time": [1.0] * count} for key, (mean, std) in rates.items()}
        )
    )
    assert found and (found.what == "not known") is beyond
    assert (
        f"Training reaches {full[0]:.0f} samples/s, as fast as computing alone, within noise. A" in found.why
    ) is not beyond
    said = (
        f"{full[0]:.0f} samples/s, which exceeds computing alone by more than noise. Training cannot be faster than "
        "the slower of"
    )
    assert (said in found.why) is beyond and ("all three rates are unreliable. Measure again" in found.why) is beyond


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "–"),
        (0, "0"),
        (math.nan, "NaN"),
        (1, "1.00"),
        (83.24, "83.2"),
        (99.96, "100"),
        (999.6, "1,000"),
        (1234.5, "1,234"),
        (116_977_029, "116,977,029"),
        (0.00484, "0.00484"),
        (-2.5, "−2.50"),
        (1.234e-7, "1.23×10⁻⁷"),
        (9.999e-6, "1.00×10⁻⁵"),
    ],
)
def test_numbers_are_short_and_right(value: float | None, expected: str) -> None:
    assert text.number(value) == expected


def test_units_times_and_sizes() -> None:
    assert [text.unit(of) for of in ("K", "1", None, "m s**-1", "kg m^2", "m2 s-2", "log10(K)", "Mpc/h")] == [
        *("K", "", "", "m s⁻¹", "kg m²", "m² s⁻²", "log10(K)", "Mpc/h")
    ]
    assert [text.duration(s) for s in (12.34, 59.99, 125, 3725)] == [
        "12.3\u00a0s",
        "60.0\u00a0s",
        "2\u00a0min 5\u00a0s",
        "1\u00a0h 2\u00a0min",
    ]
    assert [text.size(b, " ") for b in (512, 1_500_000, 999_499_999, 999_600_000)] == [
        *("512 B", "1.50 MB", "999 MB", "1.00 GB")
    ]
    assert [text.percent(share) for share in (0, 0.0012, -0.0012, 0.0049, 0.006, 0.934)] == [
        f"{said}\u00a0%" for said in ("0", "0.1", "−0.1", "0.5", "1", "93")
    ]
    assert [joules(used) for used in (None, 100.0, 7200.0, 7.2e6)] == ["–", "100 J", "2.00 Wh", "2.00 kWh"]
    assert [text.size(b) for b in (None, 2.5e12, 3e15)] == ["–", "2.50\u00a0TB", "3,000\u00a0TB"]


# ---- the page ------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Parser of a page for the tests; it collects text, attributes and tables, and checks the nesting of elements."""

    VOID = frozenset({"meta", "link", "img", "br", "wbr", "hr", "input", "col"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.open: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.feed(html)
        self.close()
        assert not self.open, f"elements that were never closed: {self.open}"
        self.tables = [table for table in self.tables if len(table) > 1]  # leave out the tables that the script fills

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, key, value or "") for key, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, key, value or "") for key, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> within {self.open}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.words.append(data)
            if {"th", "td"} & set(self.open):
                self.tables[-1][-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return results with all features: two studies, a reused run, hostile labels, plans with a single measurement."""
    results = with_ladder(Results(tmp_path_factory.mktemp("full") / "results"))
    results.run("gas", "base", study="gas", triplet=(900.0, 14.0, 13.6), final=0.6)
    results.run("gas", "once", study="gas", triplet=(900.0, 15.0, 14.9), final=0.9, epochs=1)
    results.plan("gas", {"base": HOSTILE, "once": "$one_epoch$ 漢字"}, study="gas", title=HOSTILE, kind="set")
    results.run("speed", "only", epochs=0)
    results.plan(
        "speed", {"only": "only", "again": "again"}, measure=("throughput",), use={"again": ("ladder", "bf16")}
    )
    results.run("learn", "only", triplet=None, epochs=1)
    results.plan("learn", {"only": "only"}, measure=("train",))
    results.dataset("demo_volumes")
    return results


@pytest.fixture(scope="module")
def html(full: Results) -> str:
    """Return the page of the results with all features."""
    return full.report(title=HOSTILE)


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


@pytest.mark.parametrize(("key", "value"), [("batch_size", [8]), ("geometry", {"nodes": "two"}), ("precision", 16)])
def test_damaged_settings_of_a_run_are_one_message(ladder: Results, key: str, value: object) -> None:
    file = next(ladder.plans[0].parent.glob("workers/config.yaml"))
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), key: value}))
    with pytest.raises(UserError, match=rf"workers/config.yaml: {key}.*: got .*damaged"):
        read_plan(ladder.plans[0])


def test_the_first_view_has_the_main_results(ladder: Results) -> None:
    page = Page(ladder.report())
    for answer in (
        "bf16 7.50×± 0.64 loading and computing 30\u00a0% less errorthan persistence",  # the row of the first table
        "“bf16”: 7.50× ± 0.64 as fast as “baseline”. The limit is loading and computing. Try next:",
        "7.50× ± 0.64 Speed-up of run bf16 over baseline. The speed of bf16, measured separately, is 180 samples/s "
        "(loading and",
        "loading and computing Loading alone reaches 205 samples/s, computing alone 240.",  # the fastest run's limit
        "1.40 m s⁻¹ u10 RMSE 30\u00a0% less error than persistence (2.00 m s⁻¹), run workers · 4 workers",  # 0.7 x 2.00
        "published for the full-size model and data: 8.8 samples/s on A100 40 GB (baseline; S2)",
        "published for the full-size model and data: 64 samples/s on A100 40 GB (fast, 7.27× baseline; S2)",
        "Example CPU, 2 threads",
    ):
        assert " ".join(answer.split()) in page.text, answer
    assert page.text.count("published for the full-size model") == 2, (
        "expected one figure for the first run and one for the fastest run"
    )
    assert sections.line(read_plan(ladder.plans[0])).replace("\u00a0", " ") == (
        "ladder: 180 samples/s with “bf16”, 7.50× ± 0.64 as fast as “baseline”; best run “workers · 4 workers”: "
        "30 % less error than persistence"
    )


def test_a_published_figure_of_another_size_is_only_in_the_table(ladder: Results) -> None:
    path = ladder.plans[0]
    record = yaml.safe_load(path.read_text())
    for figure in record["published"]:
        figure["like"], figure["runs"] = figure["runs"], []
    path.write_text(yaml.safe_dump(record))
    shown = Page(ladder.report()).text
    assert "published for the full-size model" not in shown and "64.07.27×, fast, A100 40 GB, S2" in shown


def test_bars_equal_the_printed_ratios(ladder: Results) -> None:
    """The bars have the lengths of the printed ratios; the rates may have been measured at different times."""
    plan = read_plan(ladder.plans[0])
    shown = sections.speed(plan)
    ratios = [1.0, 110 / 24, 180 / 24]
    assert [bar["share"] for bar in shown["bars"]] == pytest.approx([ratio / 7.5 for ratio in ratios])
    html = ladder.report()
    assert f"width:{100 * ratios[1] / 7.5:.1f}%" in html and "speed 110 samples/s" in Page(html).text


def test_a_software_difference_to_the_first_run_is_reported(results: Results) -> None:
    """A software difference is reported once for all runs. Other commits are ignored: relevant changes rerun runs."""
    for name, driver in {"a": "570.1", "b": "580.2", "c": "570.1", "d": "580.2"}.items():
        file = results.run("p", name) / "telemetry/throughput.json"
        file.parent.mkdir(exist_ok=True)
        update = {"versions": {**BEFORE.versions, "driver": driver}, "git": {"commit": name, "dirty": False}}
        BEFORE.model_copy(update=update).write(file)
    plan = read_plan(results.plan("p", {name: name for name in "abcd"}))
    assert len(found := sections.environments(plan)) == 1 and found[0].endswith(": driver 570.1 → 580.2.")
    assert "run “b”, “d” " in found[0]


@pytest.mark.slow
def test_results_worse_than_the_baseline_are_red_and_to_the_left(results: Results) -> None:
    for name, final in (("good", 0.75), ("bad", 1.5)):
        results.run("p", name, final=final, triplet=None)
        results.plan("p", {name: name}, measure=("train",))
        html = results.report()
        assert ('class="fill worse" style="width:25.0%"' in html) is (name == "bad")
        assert ('class="fill skill" style="width:12.5%"' in html) is (name == "good")
        assert ("50 % more error" in Page(html).text) is (name == "bad")


def test_the_suggestion_is_a_block_to_copy(ladder: Results, tmp_path: Path) -> None:
    """The suggestion is a valid plan in YAML with two runs; the second run applies the suggested change."""
    call = "snakemake --configfile 'my plans.yaml'"
    plan = read_plan(ladder.plans[0])
    (block,) = re.findall(r'<div class="copy"><pre tabindex="0">(.*?)</pre>', ladder.report(), re.S)
    block = unescape(block)
    run = plan.runs[2]
    assert block == sections.next_plan(plan, run, judge_run(run).rung, call)
    head, *content, end, command = block.splitlines()
    assert (head, end) == ("cat > next.yaml <<'END'", "END")
    assert command == f"{call} next.yaml -- plan_ladder_next"
    added = yaml.safe_load("\n".join(content))["plans"]["ladder_next"]
    assert added["from"] == "ladder.bf16" and added["runs"] == {
        "before": {"use": "ladder.bf16"},
        "next": {"compile": {"mode": "default"}},
    }
    files = [tmp_path / "mine.yaml", tmp_path / "next.yaml"]
    files[0].write_text("plans: {ladder: {study: cosmo_unet, runs: {bf16: {precision: bf16}}}}")
    files[1].write_text("\n".join(content).replace("study: forecast", "study: cosmo_unet"))
    known = load_files(ROOT / "config.yaml", *files).plans["ladder_next"]
    assert known["next"].run.precision == "bf16" and known["next"].run.compile.mode == "default"


def test_a_live_page_shows_available_results(ladder: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    """The live page exists once there is a dataset, and redirects to the complete page at the end."""
    monkeypatch.setattr(report, "MIN_REWRITE_SECONDS", 0.0)
    ladder.run("q", "one")
    ladder.plan("q", {"one": "one"})
    ladder.dataset("demo_volumes")
    half = ladder.root / "data/half"  # this dataset has a manifest, but no preview yet
    shutil.copytree(ladder.datasets[-1], half)
    (half / "preview.png").unlink()
    out, live = ladder.root / "report" / "index.html", ladder.root / "report" / "index.live.html"
    options = {
        "title": "Demo",
        "plans": [str(plan) for plan in ladder.plans],
        "datasets": [str(ladder.datasets[-1]), str(ladder.root / "data/to_come"), str(half)],
        "references": [],
        "call": "snakemake",
        "out": str(out),
    }
    page = ["--page", json.dumps(options), "--log", ladder.root / "log"]
    report.write_live(page[1])
    shown = Page(live.read_text()).text
    for words in ("No plan is finished yet.", "Still to come: ladder, q.", "demo_volumes", "This page reloads"):
        assert words in shown
    for number, plan in enumerate(ladder.plans):
        assert stage("collect", "--plan", plan, "--out", plan.parent / "summary.csv", *page) == 0
        assert ("Still to come: q." in Page(live.read_text()).text) == (number == 0)
    assert 'http-equiv="refresh" content="5"' in live.read_text(), (
        "the live page must reload until the complete page exists"
    )
    assert not out.exists(), "only another rule may write the complete page"
    before = live.read_bytes()
    monkeypatch.setattr(report, "MIN_REWRITE_SECONDS", 60.0)
    (ladder.root / "plans/q/summary.csv").unlink()
    report.write_live(page[1])
    assert live.read_bytes() == before, "a live page is written at most once per minute"
    monkeypatch.setattr(report, "MIN_REWRITE_SECONDS", 0.0)
    (ladder.root / "plans/q/summary.csv").touch()
    (ladder.root / "plans/q/one/throughput.json").unlink()
    report.write_live(page[1])
    assert live.read_bytes() == before, "an incomplete plan must not change the page"
    report.main(argparse.Namespace(**options | {"plans": options["plans"][:1], "datasets": options["datasets"][:1]}))
    assert 'url=index.html"' in live.read_text() and "refresh" not in out.read_text()


def test_the_table_has_every_run_with_units(ladder: Results) -> None:
    page = Page(ladder.report())
    (table,) = [table for table in page.tables if "what it changes" in table[1]]
    rows = [dict(zip(table[1], row, strict=True)) for row in table[2:]]
    expected = {
        "run": ["baseline", "workers4 workers", "bf16"],
        "what it changes": ["–", "loader.workers: 4", "precision: bf16"],
        "training": ["24.0standard deviation 0.48", "110standard deviation 2.2", "180standard deviation 3.6"],
        "speed-up": ["1.00×", "4.58×± 0.39", "7.50×± 0.64"],
        "over the rung before": ["–", "4.58×± 0.39", "1.64×± 0.14"],
    }
    assert {key: [row[key] for row in rows] for key in expected} == expected
    assert rows[0]["peak memory"] == "1.50\u00a0GB"
    (channels,) = [
        table for table in page.tables if table[0][:1] == ["run"] and "t2m K" in table[0] and "baseline" in table[1][0]
    ]
    assert channels[0][1] == "u10 m s⁻¹"
    assert [channels[number][1:] for number in (1, 3)] == [["2.00", "2.67"], ["1.40skill 0.30", "1.87skill 0.30"]]

    ladder.collect(ladder.plans[0])
    (link,) = [value for _, key, value in page.attributes if key == "href" and value.startswith("data:text/csv")]
    assert base64.b64decode(link.split("base64,")[1]) == (ladder.plans[0].parent / "summary.csv").read_bytes(), (
        "the download must be summary.csv"
    )


def test_the_page_needs_nothing_but_itself(html: str, page: Page) -> None:
    for tag, key, value in page.attributes:
        if key in ("src", "href", "action", "data", "poster", "srcset", "xlink:href"):
            assert re.match(r"#|data:|\.\./|figures/", value), (tag, key, value)
    library = max(re.findall(r"<script>(.*?)</script>", html, re.S), key=len)
    assert "vegaEmbed" in library and not re.search(r"url\((?!#)|@import|https?://", html.replace(library, ""))
    assert ("meta", "content", "default-src 'none'") in [(t, k, v[:18]) for t, k, v in page.attributes]
    scripts = re.findall(r"<script>(.*?)</script>", html, re.S)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert f"script-src 'sha256-{digests[0]}' 'sha256-{digests[1]}';" in html


def test_links_reach_their_anchors_and_names_are_unique(page: Page) -> None:
    names = [value for _, key, value in page.attributes if key == "id"]
    assert len(names) == len(set(names))
    targets = {value[1:] for _, key, value in page.attributes if key == "href" and value.startswith("#")}
    targets |= {
        match for _, key, value in page.attributes if key == "clip-path" for match in re.findall(r"#([^)]+)", value)
    }
    targets |= {value for _, key, value in page.attributes if key == "aria-labelledby"}
    assert targets <= set(names)
    assert {"plan.ladder", "study.forecast", "dataset.demo_states", "run.gas.once"} <= targets


def test_user_texts_are_escaped(html: str, page: Page) -> None:
    assert html.count("</script") == html.count("<script") and "49" not in re.findall(r"<title>(.*?)</title>", html)[0]
    assert page.text.count("<script>alert(1)</script>") > 5
    specs = re.findall(r'<script type="application/json">(.*?)</script>', html)
    assert all(json.loads(spec)["layer"] for spec in specs)


def test_pictures_have_descriptions_and_figures_follow_the_theme(html: str, page: Page) -> None:
    assert all(value for tag, key, value in page.attributes if tag == "img" and key in ("alt", "width", "height"))
    html = html[: html.rindex("<script>")]  # without the chart library
    assert html.count("<img ") == 11 == html.count(" alt=") == html.count('loading="lazy"')
    assert html.count("<table") == html.count("<caption")
    assert len(re.findall(r"<figure[^>]*>", html)) == html.count("<figcaption>")
    assert 'lang="en"' in html and 'name="viewport"' in html
    specs = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', html)
    assert len(specs) > 9 and not re.search(r'"(#[0-9a-f]|rgb)', "".join(specs)), (
        "a fixed colour would not follow the theme"
    )


def test_colours_have_enough_contrast_in_both_themes() -> None:
    """WCAG 2 requires a contrast of 4.5 for text and of 3 for lines and bars."""
    style = (Path(report.__file__).parent / "templates/style.css").read_text()
    themes = re.findall(r"--(\w+): light-dark\(#(\w+), #(\w+)\)", style)

    def luminance(colour: str) -> float:
        parts = (int(colour[place : place + 2], 16) / 255 for place in (0, 2, 4))
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for theme in (1, 2):
        shown = {colour[0]: luminance(colour[theme]) for colour in themes}
        grounds = [shown.pop(name) for name in ("back", "card", "soft")]
        assert len(shown) == 16 and shown.pop("grid")
        for name, own in shown.items():
            least = 4.5 if name in ("ink", "muted", "link", "worse") else 3
            for ground in grounds:
                bright, dark = max(own, ground), min(own, ground)
                assert (bright + 0.05) / (dark + 0.05) >= least, (theme, name)


@pytest.mark.slow
def test_a_page_of_a_hundred_runs_is_small(results: Results) -> None:
    """The page first shows eight of the hundred runs; the user can select more runs."""
    names = {f"r{number}": f"rate {number}" for number in range(100)}
    for number, name in enumerate(names):
        results.run("p", name, epochs=50, final=0.5 + number / 300, precision=name)
    results.plan("p", names, kind="set")
    html = results.report()
    assert len(html.encode()) < 10e6
    assert html.count('type="checkbox"') == 100 and html.count(" checked autocomplete") == 8
    svg = (results.root / "report/figures/p-loss.svg").read_text()
    assert "r6 · rate 6" in svg and "r99" not in svg


@pytest.mark.slow
def test_the_same_results_give_the_same_bytes(full: Results, html: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    import matplotlib

    with matplotlib.rc_context({"xtick.direction": "in", "lines.markeredgewidth": 9, "savefig.dpi": 7}):
        assert full.report(title=HOSTILE) == html


def test_a_study_with_a_metric_to_maximise(results: Results) -> None:
    """The best run has the highest accuracy, whatever its loss. Accuracy is not compared with a baseline."""
    results.run("p", "a", study="digits", final=0.5)
    folder = results.run("p", "b", study="digits", final=0.2)
    epochs = read_epochs(folder / "metrics.jsonl")
    worse = (epoch.model_copy(update={"valid_loss": 10 * epoch.valid_loss}) for epoch in epochs)
    (folder / "metrics.jsonl").write_text(epoch_lines(worse))
    plan = results.plan("p", {"a": "few epochs", "b": "more epochs"}, study="digits", kind="set")
    results.dataset("digits")
    assert [row["accuracy"] for row in results.collect(plan)] == ["0.95", "0.98"]
    page = Page(results.report())
    assert "0.980 accuracy Higher is better, run b · more epochs. Validation loss 0.700, training" in page.text
    (table,) = [table for table in page.tables if "batch size" in table[1]]
    assert [row[table[1].index("accuracy (higher is better)")] for row in table[2:]] == ["0.950", "0.980"]
    assert "b · more epochs, the run with the best accuracy: one validation sample" in page.text
    assert not [word for word in ("baseline", "skill", "Errors by channel", "loss loss") if word in page.text]
    assert "label, one value per row." in page.text


def test_weaker_baselines_are_listed_below_the_strongest(results: Results) -> None:
    """Each weaker baseline is a row in the metric's table, without a separate table."""
    folder = results.run("p", "a")
    provenance = Provenance.read(folder / "provenance.json")
    rivals = [
        *of_channels(WINDS, "day_rmse", "RMSE of yesterday", rival="yesterday's weather"),
        *of_channels(WINDS, "lazy_rmse", "RMSE of persistence", rival="persistence"),
    ]
    metrics = [
        metric.model_copy(update={"answer": "the strongest naive answer"}) if metric.answer else metric
        for metric in provenance.metrics
    ]
    provenance.model_copy(update={"metrics": [*metrics, *rivals]}).write(folder / "provenance.json")
    more = '"day_rmse/u10":4.5,"day_rmse/t2m":5.5,"lazy_rmse/u10":2.0,"lazy_rmse/t2m":2.67,'
    lines = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(lines.replace('"rmse/u10":', more + '"rmse/u10":'))
    results.plan("p", {"a": "a"}, measure=("train",))
    page = Page(results.report())
    (table,) = [table for table in page.tables if any(row[0].startswith("baseline: ") for row in table)]
    assert [row[:3] for row in table[1:4]] == [
        ["the best baseline without learning", "2.00", "2.67"],
        ["baseline: yesterday's weather", "4.50", "5.50"],
        ["baseline: persistence", "2.00", "2.67"],
    ]
    assert "error than the best baseline without learning (2.00 m s⁻¹)" in page.text
    assert "a prediction without training: yesterday's weather; persistence" in page.text


def test_a_baseline_of_a_metric_is_not_listed_twice(results: Results) -> None:
    """A baseline's metric that another metric names in `naive`, and that also has a `rival`, is listed once."""
    folder = results.run("p", "a")
    provenance = Provenance.read(folder / "provenance.json")
    named = {metric.naive for metric in provenance.metrics if metric.naive}
    metrics = [
        metric.model_copy(update={"rival": "yesterday"} if metric.name in named else {})
        for metric in provenance.metrics
    ]
    provenance.model_copy(update={"metrics": metrics}).write(folder / "provenance.json")
    results.plan("p", {"a": "a"}, measure=("train",))
    (table,) = [table for table in Page(results.report()).tables if "baseline: persistence" in str(table)]
    assert "yesterday" not in str(table) and [row[0] for row in table[1:]] == ["baseline: persistence", "a"]


def test_a_label_that_begins_with_the_name_is_not_repeated(results: Results) -> None:
    """A run of another plan has the label `NAME (= PLAN.RUN)`."""
    for name in ("a", "b", "c"):
        results.run("p", name)
    labels = {"a": "a", "b": "b (= ladder.baseline)", "c": "more epochs"}
    called = [run.called for run in read_plan(results.plan("p", labels)).runs]
    assert called == ["a", "b (= ladder.baseline)", "c · more epochs"]


def test_the_long_title_of_a_short_axis_has_several_lines() -> None:
    row = {"run": "a", "what": "", "epoch": 0, "value": 1.0}
    for title, wrapped in (
        ("damping mean absolute error (kg s⁻¹)", ["damping mean absolute", "error (kg s⁻¹)"]),
        ("learning rate", ["learning rate"]),
    ):
        spec = figures.lines("n", "about", [row], {"epoch": "epoch"}, {"value": title}).spec
        assert spec["layer"][0]["encoding"]["y"]["title"] == wrapped
        assert title in figures.lines("n", "about", [row], {"epoch": "epoch"}, {"value": title}).titles.values()


def test_a_tag_has_no_line_through_its_text() -> None:
    """The line that marks zero in bars for both directions belongs to bars only, not to tags of the class `both`."""
    style = (ROOT / "workflow_scripts/dlscale/report/templates/style.css").read_text()
    rules = [line for line in style.splitlines() if ".both" in line.partition("{")[0]]
    assert len(rules) == 3 and all(line.startswith(".track.both") for line in rules)


def test_a_diverged_run_does_not_hide_baselines(results: Results) -> None:
    """A diverged run without metrics, or with NaN as a metric, does not hide the baselines without learning."""
    for name in ("a", "lost"):
        folder = results.run("p", name, triplet=None)
    epochs = read_epochs(folder / "metrics.jsonl")

    def end_with(**values: Any) -> None:
        last = epochs[-1].model_copy(update={"valid_loss": math.nan, **values})
        (folder / "metrics.jsonl").write_text(epoch_lines([*epochs[:-1], last]))

    end_with(metrics={})
    results.plan("p", {"a": "a", "lost": "lost"}, measure=("train",))
    (table,) = [
        table for table in Page(results.report()).tables if any(row[0].startswith("baseline: ") for row in table)
    ]
    assert table[1] == ["baseline: persistence", "2.00", "2.67"]
    end_with(metrics={**epochs[-1].metrics, "rmse/u10": math.nan})
    file = results.plan("p", {"lost": "lost"}, measure=("train",))
    alone = read_plan(file)
    assert alone.best is None and sections.quality(alone) is None, "a diverged run must not be the best run"
    lost = dict.fromkeys(("train_loss", "valid_loss", "learning_rate"), math.nan)
    (folder / "metrics.jsonl").write_text(epoch_lines(each.model_copy(update=lost) for each in epochs))
    training = curves.training(read_plan(file))
    assert training and [chart.name for chart in training.charts] == ["p-metric"], (
        "charts without finite values must be left out"
    )


def test_a_ladder_is_a_waterfall(results: Results) -> None:
    """Each bar begins at the end of the previous bar. The third rung is within noise, the fourth is slower."""
    rates = {"a": (30.0, 120.0, 20.0), "b": (500.0, 120.0, 80.0), "c": (500.0, 120.0, 81.0), "d": (500.0, 90.0, 60.0)}
    for name, each in rates.items():
        results.run("p", name, triplet=each, epochs=0, precision=name)
    path = results.plan("p", {name: name for name in rates}, measure=("throughput",))
    rows = sections.waterfall(read_plan(path), sections.Page()).charts[0].rows
    assert [(row["from"], row["to"]) for row in rows] == [(0, 1), (1, 4), (4, 4.05), (4.05, 3)]
    assert [row["step"] for row in rows] == ["first", "faster", "within noise", "slower"]
    assert [row["was"] for row in rows] == ["–", "data loading", "computation", "computation"]
    assert rows[1]["said"].startswith("4.00× ± ") and rows[1]["said"].endswith("; limit before: data loading")
    alone = read_plan(results.plan("p", {"a": "a"}, measure=("throughput",)))
    assert sections.waterfall(alone, sections.Page()) is None


def test_charts_are_also_written_as_files(ladder: Results) -> None:
    """Each chart is written as SVG and PDF with the library of the page, and its values are written as CSV."""
    html, folder = ladder.report(), ladder.root / "report/figures"
    specs = [json.loads(found) for found in re.findall(r'<script type="application/json">(.*?)</script>', html)]
    names = sorted(re.findall(r'href="figures/([^"]*)"', html))
    assert len(names) == 3 * len(specs) > 9 and sorted(file.name for file in folder.iterdir()) == names
    svg = (folder / "ladder-throughput.svg").read_text()
    assert "workers · 4 workers" in svg and "#00785a" in svg and "var(" not in svg
    drawn = re.findall(r'aria-roledescription="bar"[^>]*d="M[\d.]+,[\d.]+h(-?[\d.]+)', svg)
    bars = [float(width) for width in drawn]
    means = [30, 120, 24, 200, 120, 110, 205, 240, 180]
    assert [bar / max(bars) for bar in bars] == pytest.approx([mean / 240 for mean in means], abs=1e-3)
    assert (folder / "ladder-loss.pdf").read_bytes().startswith(b"%PDF")
    rows = [*csv.DictReader((folder / "ladder-throughput.csv").open())]
    assert [(row["mode"], float(row["to"])) for row in rows] == [
        *zip(["loading", "computing", "training"] * 3, means, strict=True)
    ]
    ends = [(0.98 * mean, 1.02 * mean) for mean in means]  # one standard deviation, mean / 50, to each side
    assert [(float(row["low"]), float(row["high"])) for row in rows] == [pytest.approx(each) for each in ends]
    columns = next(csv.reader((folder / "ladder-loss.csv").open()))
    assert "time, validation included (s)" in columns, "columns must have units"
    assert 'href="figures/' not in report.page("Demo", [read_plan(ladder.plans[0])], [], live=True), (
        "a live page must not link to figure files"
    )


# ---- profiles, telemetry ----------------------------------------------------------------


def profiled(folder: Path, name: str, seconds: float, files: dict[str, str]) -> None:
    """Write a profile with a successful and a failed profiler into a run's folder."""
    ranges = {
        "step": RangeTime(seconds=1.2 * seconds),
        "data": RangeTime(seconds=0.3 * seconds),
        "copy": RangeTime(seconds=0.1 * seconds),
        "forward": RangeTime(seconds=0.3 * seconds),
        "backward": RangeTime(seconds=0.4 * seconds),
        "optimizer": RangeTime(seconds=0.1 * seconds),
    }
    rows = [TopEntry(tool="torch", kind="operator", name=name, calls=2, seconds=0.5 * seconds, std=1e-4, share=0.4)]
    (folder / "profile").mkdir()
    Profile(
        device=Device(kind="cpu", name="Example CPU"),
        seconds_per_step=[seconds] * 3,
        tools=[
            ProfiledTool(
                name="torch",
                steps=3,
                seconds_per_step=1.2 * seconds,
                overhead=Overhead(ratio=1.2, noise=0.05),
                ranges=ranges,
                files=files,
            ),
            ProfiledTool(name="nsys", problem="nsys: not found"),
        ],
        top=rows,
        work=[
            OperatorWork(operator="mm", module="a.<b> (Linear)", calls=2, seconds=seconds / 2, flops=4e9, bytes=1e8),
            OperatorWork(operator="mm", module="c (Linear)", calls=1, seconds=seconds / 4, flops=2e9, bytes=5e7),
            OperatorWork(operator="gelu", module="a.<b> (Linear)", calls=1, seconds=seconds / 8, flops=0, bytes=4e8),
        ],
        memory=Memory(predicted=MemoryUse(parameters=10**6, gradients=10**6, optimizer=2 * 10**6, activations=10**7)),
    ).write(folder / "profile/profile.json")
    with (folder / "profile/profile_summary.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(TopEntry.model_fields))
        writer.writeheader()
        writer.writerows(row.model_dump() for row in rows)


@pytest.fixture
def explained(results: Results) -> Results:
    """Return results with a ladder of two measured and profiled runs; the second run has telemetry."""
    for name, seconds, rates in (("first", 0.1, (200.0, 100.0, 66.0)), ("second", 0.02, (2000.0, 500.0, 490.0))):
        folder = results.run("ladder", name, triplet=rates)
        with_peaks(folder, 2e12, 2e11)
        profiled(folder, "aten::<b>mm", seconds, {"trace <1>": "torch.rank0.json.gz"})
    samples = [telemetry.Sample(1.7e9 + second, 1.0, 4, cpu_run=0.25, rss_bytes=second * 2**30) for second in (1, 2, 3)]
    (folder / "telemetry").mkdir(exist_ok=True)
    (folder / "telemetry/train.csv").write_text(telemetry.header(0) + "".join(map(telemetry.line, samples)))
    results.plan("ladder", {"first": "first", "second": "second"}, measure=("train", "throughput", "profile"))
    return results


def test_a_step_is_drawn_part_by_part(explained: Results) -> None:
    """Part `data` excludes the copy inside it; `other` is the rest; a line marks the step time without a profiler."""
    plan = read_plan(explained.root / "plans/ladder/plan.yaml")
    profile = plan.runs[0].profile
    expected = {"data": 0.02, "copy": 0.01, "forward": 0.03, "backward": 0.04, "optimizer": 0.01, "other": 0.01}
    assert profiles.of_tool(profile.tools[0]) == pytest.approx(expected)
    # FULL reaches 66 and 490 samples/s, with 16 samples per step.
    first, second = (profiles.step(run) for run in plan.runs)
    assert first and second and (first.full, second.full) == (pytest.approx(16 / 66), pytest.approx(16 / 490))
    page = Page(explained.report()).text
    assert "time of a training step without a profiler." in page and "a run without a profile" not in page
    section = profile_section.section(plan, sections.Page())
    chart = section.charts[0]
    said = [row["said"] for row in chart.rows if "said" in row]
    assert said == ["242 ms", "32.7 ms"] and "time of a step (ms)" in chart.text
    parts = [(row["part"], row["from"], row["to"]) for row in chart.rows if row["run"] == "first"]
    assert parts[:2] == [("waiting for data", 0.0, 20.0), ("copy to the device", 20.0, 30.0)]
    assert [row["full"] for row in chart.rows][-1] == pytest.approx(1e3 * 16 / 490, rel=1e-5)


def test_operators_and_modules_are_below_the_roof(explained: Results) -> None:
    """The roof (2 TFLOP/s, 200 GB/s) bends at 10 FLOP/byte. An elementwise operator counts one FLOP per number."""
    plan = read_plan(explained.root / "plans/ladder/plan.yaml")
    operators, modules = profile_section.rooflines(plan)
    rows = [row for row in operators.rows if row["run"] == "second"]
    points = {row["name"]: [row[key] for key in ("share", "calls", "intensity", "rate", "reached")] for row in rows[:2]}
    # 6 GFLOP in 15 ms at 40 FLOP/byte; 0.1 GFLOP in 2.5 ms at 0.25 FLOP/byte, for which the roof is 50 GFLOP/s.
    assert points == {
        "mm": pytest.approx([100 * 6 / 7, 3, 40, 400, 20], rel=1e-5),
        "gelu": pytest.approx([100 / 7, 1, 0.25, 40, 80], rel=1e-5),
    }
    corners = [(row["intensity"], row["rate"]) for row in rows if row.get("roof")]
    assert corners == [(0.125, 25.0), (10.0, 2000.0), (80.0, 2000.0)]
    assert [row["name"] for row in modules.rows if "name" in row] == ["a.<b> (Linear)", "c (Linear)"] * 2
    # at the peaks: 3 ms for 6 GFLOP, 2 ms for 0.4 GB
    assert "a step would take 5.00 instead of 87.5 ms (first); 5.00 instead of 17.5 ms (second)." in operators.about
    plan.runs[1] = replace(plan.runs[1], throughput=None)
    assert {row["run"] for row in profile_section.rooflines(plan)[0].rows} == {"first"}


def on_device(idle: dict[str, float], **work: float) -> ProfiledTool:
    """Return a profile of 100 ms steps in which the host requests data for 80 ms.

    `work` is the device's time in each range, seconds.
    """
    ranges = {name: RangeTime(seconds=0.001, device_seconds=seconds) for name, seconds in work.items()}
    ranges["data"] = RangeTime(seconds=0.08, device_seconds=0.0)
    activity = Activity(device_busy=1 - sum(idle.values()) / 0.1, idle_seconds=idle)
    return ProfiledTool(name="torch", seconds_per_step=0.1, ranges=ranges, activity=activity)


def test_a_step_on_a_device_consists_of_work_and_idle_time() -> None:
    """Work of 90 ms fills the busy time; overlapping work of 120 ms is scaled to the 80 ms without idle time."""
    parts = profiles.of_tool(on_device({"data": 0.006, "step": 0.004}, step=0.09, forward=0.03, backward=0.06))
    assert parts == pytest.approx({"data": 0.006, "forward": 0.03, "backward": 0.06, "other": 0.004})
    work = {"step": 0.12, "copy": 0.03, "forward": 0.036, "backward": 0.048}
    parts = profiles.of_tool(on_device({"data": 0.015, "copy": 0.005}, **work))
    assert parts == pytest.approx({"data": 0.02, "copy": 0.02, "forward": 0.024, "backward": 0.032, "other": 0.004})


def test_files_of_a_profile_are_linked_and_problems_shown(explained: Results) -> None:
    html = explained.report()
    page = Page(html)
    assert "../plans/ladder/first/profile/torch.rank0.json.gz" in html and "trace &lt;1&gt;" in html
    assert "nsys: not found" in page.text and "profiled steps take 20 % longer (± 5 %)" in page.text
    assert "aten::<b>mm" in page.text  # escaped as text
    row = next(row for table in page.tables for row in table if row[0] == "aten::<b>mm")
    assert row == ["aten::<b>mm", "50.0standard deviation 0.10", "40\u00a0%", "2", "operator"]


def test_one_profile_among_many_runs_is_shown(results: Results) -> None:
    """Only the slowest of ten runs has a profile, and the page shows this profile."""
    names = {f"run{number}": f"run{number}" for number in range(10)}
    for number, name in enumerate(names):
        folder = results.run("p", name, speed=20.0 - number, triplet=None)
    profiled(folder, "mm", 0.1, {})
    plan = read_plan(results.plan("p", names, measure=("train",)))
    plan.runs[-1] = replace(plan.runs[-1], profile=Profile.read(folder / "profile/profile.json"))
    shown = profile_section.section(plan, sections.Page())
    assert shown and [each.title.text for each in shown.folds] == ["run9"] and shown.charts[0].rows[0]["of"] == "torch"


def with_peaks(folder: Path, flops: float, copies: float, **more: Any) -> None:
    """Set a run's measured peaks and other values of its throughput record."""
    measured = Throughput.read(folder / "throughput.json")
    work = SampleWork(forward_flops=1e9, backward_flops=2e9, bytes=3e8, source="formula")
    peaks = Peaks(dtype=more.pop("dtype", "fp32"), flops=flops, bytes_per_second=copies, operator_seconds=1e-6)
    measured.model_copy(update={"work": work, "peaks": peaks, **more}).write(folder / "throughput.json")


def test_a_device_has_one_peak_in_a_plan(results: Results) -> None:
    """If runs measured very different peaks of one device, tables, text and chart all use the greatest peak."""
    runs = {"a": 22.0, "b": 44.0, "half": 60.0, "other": 30.0}
    folders = {name: results.run("p", name, triplet=(500.0, 1.1 * full, full)) for name, full in runs.items()}
    with_peaks(folders["a"], 81e9, 9.7e9)
    with_peaks(folders["b"], 174e9, 4.1e9)
    with_peaks(folders["half"], 343e9, 27.2e9, dtype="bf16")
    with_peaks(folders["other"], 500e9, 99e9, device=Device(kind="cpu", name="Other CPU", threads=2))
    plan = read_plan(results.plan("p", {name: name for name in runs}))
    expected = {"a": (174e9, 27.2e9), "b": (174e9, 27.2e9), "half": (343e9, 27.2e9), "other": (500e9, 99e9)}
    for run, row in zip(plan.runs, results.collect(results.plans[0]), strict=True):
        peaks = run.throughput and run.throughput.peaks
        assert peaks and (peaks.flops, peaks.bytes_per_second) == expected[run.name], run.name
        assert float(row["mfu"]) == pytest.approx(runs[run.name] * 3e9 / expected[run.name][0])
        assert float(row["mbu"]) == pytest.approx(runs[run.name] * 3e8 / expected[run.name][1])
        assert read_run(folders[run.name]).throughput == run.throughput, (
            "a run that is read separately must have the same peaks"
        )
    assert f"{text.number(174)} GFLOP/s" in judge_run(plan.runs[0]).limit


def test_ranks_share_the_memory_of_a_processor_not_of_gpus(results: Results) -> None:
    for kind, expected in (("cpu", [100e9, 50e9]), ("cuda", [100e9, 100e9])):
        for name, nranks, copies in (("one", 1, 100e9), ("two", 2, 50e9)):
            with_peaks(
                results.run("p", name), 1e12, copies, nranks=nranks, device=Device(kind=kind, name="D", threads=2)
            )
        plan = read_plan(results.plan("p", {"one": "one", "two": "two"}))
        assert [run.throughput.peaks.bytes_per_second for run in plan.runs] == expected  # type: ignore[union-attr]


@pytest.mark.parametrize(("seconds", "unit"), [(60.0, "s"), (1200.0, "min")])
def test_reading_is_drawn_over_a_runs_time(seconds: float, unit: str) -> None:
    """The chart shows bandwidth in MB/s and reads in thousands per second, as storage papers do."""
    each, rates = seconds / 4, {"read_bytes_per_second": 2e9, "reads_per_second": 2500.0}
    series = profiles.of_node([telemetry.Sample(number * each, each, 4, **rates) for number in range(1, 5)])
    assert series[0] == {"time": each, "read_bytes_per_second": 2000, "reads_per_second": 2.5}
    assert figures.time_unit(max(row["time"] for row in series))[1] == unit


def test_curves_are_where_the_numbers_are(results: Results) -> None:
    """Curves include the time of validation: an epoch takes 4 s and its validation 1.5 s."""
    results.run("p", "a", triplet=None, epochs=6, final=0.5, speed=32.0)
    plan = read_plan(results.plan("p", {"a": "a"}, measure=("train",)))
    section, (run,) = curves.training(plan), plan.runs
    loss = section.charts[0]
    for what, key in (("validation", "valid_loss"), ("training", "train_loss")):
        rows = [row for row in loss.rows if row["what"] == what]
        assert [row["value"] for row in rows] == pytest.approx([getattr(each, key) for each in run.epochs], rel=1e-5)
        for over, step in (("epoch", 1), ("step", 8), ("samples", 128), ("time", 5.5)):
            assert [row[over] for row in rows] == pytest.approx([step * (n + 1) for n in range(6)])
    assert [*loss.x] == ["epoch", "step", "samples", "time"] and loss.x["time"] == "time, validation included (s)"
    assert loss.runs == ["a"] and loss.scale == "linear"


def test_a_nan_loss_does_not_affect_the_axis() -> None:
    rows = [{"run": "a", "x": 1, "y": math.nan}, *({"run": "b", "x": x, "y": y} for x, y in ((1, 100.0), (2, 1.0)))]
    chart = figures.lines("x", "", rows, {"x": "x"}, {"y": "y"})
    assert chart.scale == "log" and "y" not in chart.rows[0] and "NaN" not in chart.text


def test_a_published_metric_is_followed(results: Results) -> None:
    """The chart of the published metric also shows the published value."""
    for name in ("a", "b"):
        results.run("p", name, triplet=None, epochs=6)
    plan = read_plan(results.plan("p", {"a": "a", "b": "b"}, measure=("train",)))
    metric, section = curves.followed(plan), curves.training(plan)
    assert metric and metric.name == "rmse_normalised/u10", (
        "the chart must show the published metric instead of the first metric, rmse/u10"
    )
    chart = section.charts[1]
    assert chart.spec["layer"][1]["data"]["values"] == [{"level": 0.13, "words": "published: 0.13"}]
    expected = [epoch.metrics[metric.name] for run in plan.runs for epoch in run.epochs]
    assert [row["value"] for row in chart.rows] == pytest.approx(expected, rel=1e-5)


def test_datasets_are_described(page: Page) -> None:
    for fact in ("a state every 6 h", "latitude 87° to −87°", "99.3 MB", "64 × 64 × 64 points"):
        assert fact in page.text.replace("\u00a0", " "), fact
    physical, model = (next(t for t in page.tables if name in (row[0] for row in t)) for name in ("t2m", "density"))
    assert physical[2] == ["t2m", "K", "(x − 281.3) / 8", "281.3", "8.000", "240.0", "310.0"]
    assert model[1] == ["density", "1", "ln x / 14", "−0.01000", "0.1000"], (
        "a dataset without extremes must not have columns for extremes"
    )
    assert re.findall(r"training part, in (physical|model) units", page.text) == ["physical", "model"]
    parts = next(table for table in page.tables if table[0] == ["part", "files", "times", "size"])
    assert parts[1:] == [["train", "2", "2,924", "96.0\u00a0MB"], ["valid", "1", "100", "3.30\u00a0MB"]]


def test_provenance_is_shown_and_axes_are_labelled(page: Page) -> None:
    for fact in (
        *("epoch", "time, validation included (s)", "optimiser steps", "training samples"),
        "python -m dlscale train --config results/plans/ladder/bf16/config.yaml",
        "git commit0123456789abcdef with local changes",
        "finished2024-05-01T10:02:05+00:00",
        "softwaretorch 2.13.0, Python 3.12.1",
        "devicekind: cpu name: Example CPU threads: 2",
        "loader: kind: torch workers: 4 precision: bf16",
    ):
        assert fact in page.text.replace("\u00a0", " "), fact
    assert "None" not in page.text


# ---- in a browser --------------------------------------------------------------------------------

chromium = shutil.which("chromium")


def browsed(html: str, folder: Path, width: int, probe: str) -> dict[str, Any]:
    """Run a script in a page and return the object `found` that the script posts.

    The page is in a frame, because a headless window has a minimum width.
    """
    if not chromium:
        pytest.skip("chromium is not on PATH")
    digest = base64.b64encode(hashlib.sha256(probe.encode()).digest()).decode()
    told = html.replace("script-src ", f"script-src 'sha256-{digest}' ")
    (folder / "page.html").write_text(told.replace("<body>", f"<body><script>{probe}</script>", 1))
    frame = folder / "frame.html"
    frame.write_text(
        "<body><script>onmessage = (event) => { document.body.append(event.data); }</script>"
        f'<iframe src="page.html" style="border:0; width:{width}px; height:1000px"></iframe>'
    )
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += [
        "--virtual-time-budget=600000",
        "--window-size=1500,1100",
        f"--user-data-dir={folder / 'profile'}",
        "--dump-dom",
    ]
    dom = subprocess.run(
        [str(chromium), *flags, "--hide-scrollbars", frame.as_uri()],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    ).stdout
    return json.loads(unescape(dom[dom.index('{"found"') : dom.rindex("}") + 1]))["found"]


@pytest.mark.parametrize("width", [pytest.param(390, marks=pytest.mark.slow), 1400])
def test_a_browser_shows_it(html: str, tmp_path: Path, width: int) -> None:
    """The page loads no file and logs no error, first unchanged, then with all folds open and one run hidden."""
    probe = """const said = [];
    for (const kind of ["error", "unhandledrejection", "securitypolicyviolation"])
      addEventListener(kind, (event) => said.push(kind + ": " + (event.message || event.reason || event.blockedURI)));
    const wait = async (done) => { while (!done()) await new Promise(requestAnimationFrame); };
    const every = (what) => [...document.querySelectorAll(what)];
    addEventListener("load", async () => {
      const root = document.documentElement, found = {screens: root.scrollHeight / 900};
      found.words = document.body.innerText.split(/\\s+/).length;
      for (const fold of every("details")) fold.open = true;
      for (const figure of every(".chart")) {
        figure.scrollIntoView({behavior: "instant", block: "center"});
        await wait(() => figure.view);
        parent.postMessage(".", "*"); // without a change to draw, a headless browser makes no more frames
      }
      found.overflow = root.scrollWidth - root.clientWidth;
      found.plots = every(".drawn svg").map((svg) => svg.getBoundingClientRect().height);
      found.buttons = every("th button").length;
      found.values = every(".values tbody tr").length;
      found.columns = every(".values th").map((head) => head.textContent);
      const plan = document.getElementById("plan.ladder"), choice = plan.querySelector("select[name=x]");
      const text = () => choice.closest("figure").querySelector(".drawn").textContent;
      found.before = text();
      plan.querySelector(".runs input[value^=workers]").click();
      await wait(() => !text().includes("workers"));
      choice.value = "samples";
      choice.dispatchEvent(new Event("change", {bubbles: true}));
      await wait(() => text().includes("training samples"));
      const rows = (what) => [...plan.querySelectorAll(what + " tbody tr")].filter((row) => row.offsetHeight);
      found.changed = rows(".compare").map((row) => row.cells[0].textContent);
      const field = plan.querySelector("input[type=search]"), runs = "table:has(> thead [scope=colgroup])";
      field.value = "BF16";
      field.dispatchEvent(new Event("input"));
      found.kept = rows(runs).map((row) => row.querySelector("a").textContent);
      const cells = () => every("[id='plan.ladder'] " + runs + " tbody td").filter((cell) => cell.offsetWidth).length;
      found.cells = [cells(), (plan.querySelector(".choices input[type=checkbox]").click(), cells())];
      found.asked = performance.getEntriesByType("resource").map((each) => each.name);
      parent.postMessage(JSON.stringify({found: {...found, said}}), "*");
    });"""
    found = browsed(html, tmp_path, width, probe)
    assert found["said"] == [] and found["asked"] == [], found
    assert found["screens"] <= 6 and 100 < found["words"] <= 3000, "the page is too long with all folds closed"
    assert found["overflow"] <= 0 and len(found["plots"]) > 9 and min(found["plots"]) > 80
    assert found["buttons"] > 10 and found["values"] > 100, "the page's own script did not run"
    assert "time, validation included (s)" in found["columns"]
    assert "workers · 4 workers" in found["before"]
    assert {"loader.workers", "precision", "Throughput (samples/s): training"} <= set(found["changed"]), (
        "the changes from the first to the last run are missing"
    )
    assert "Run: batch size" not in found["changed"] and found["kept"] == ["bf16"]
    assert found["cells"][1] < found["cells"][0], "hiding a group of columns must remove cells"


@pytest.mark.slow
@pytest.mark.parametrize("width", [420, 800, 1000, 1300])
def test_the_table_of_plans_fits_the_window(ladder: Results, tmp_path: Path, width: int) -> None:
    """The table fits windows of 420 to 1300 pixels; at 800, its last column was once cut off."""
    ladder.run("other", "one")
    ladder.plan("other", {"one": "one"})
    probe = """addEventListener("load", () => {
      const table = document.querySelector(".plans"), room = table.closest(".scroll");
      parent.postMessage(JSON.stringify({found: {beyond: room.scrollWidth - room.clientWidth}}), "*");
    });"""
    assert browsed(ladder.report(), tmp_path, width, probe)["beyond"] <= 0


# ---- visible marks -------------------------------------------------------------------------------------


def test_every_bar_is_visible() -> None:
    """The axis is logarithmic if the greatest rate exceeds 50 times the smallest, as 2,700,000 and 700 samples/s."""
    for rates, scale in (((2.7e6, 700.0), "log"), ((8000.0, 400.0), None)):
        rows = [
            {"run": "a", "mode": mode, "from": 0.0, "to": rate, "low": 0.9 * rate, "high": 1.1 * rate}
            for mode, rate in zip(("IO", "FULL"), rates, strict=True)
        ]
        chart = figures.bars(
            "n", "about", rows, "samples/s", colours={"IO": "red", "FULL": "blue"}, by="mode", shown={}
        )
        axis = chart.spec["layer"][0]["layer"][0]["encoding"]["x"]
        assert axis["scale"].get("type") == scale and ("logarithmic" in axis["title"]) == (scale == "log")
        start, end = axis["scale"]["domain"]
        assert end > 1.1 * max(rates)
        least = min(rates)
        length = math.log(least / start) / math.log(end / start) if scale else least / end
        assert length > 0.03, "the smallest bar is too short to see"
        assert all(row["from"] == (175.0 if scale else 0.0) for row in chart.rows)


def test_equal_curves_and_points_at_the_frame_are_visible() -> None:
    rows = [{"run": run, "x": x, "y": 1.0} for run in ("a", "b", "c") for x in (1, 2)]
    chart = figures.lines("n", "about", rows, {"x": "epoch"}, {"y": "loss"})
    main = chart.spec["layer"][0]
    widths = main["layer"][0]["encoding"]["strokeWidth"]["scale"]["range"]
    assert widths == sorted(widths, reverse=True) and len({*widths}) == 3, (
        "each line must be thinner than the line before it"
    )
    assert all(main["encoding"][axis]["scale"]["padding"] > 0 for axis in "xy")
    assert figures.CONFIG["axisY"]["titleLimit"] == {"expr": "height"}


def test_a_damaged_picture_is_one_message(results: Results) -> None:
    """The picture's first and last bytes are intact."""
    imsave(path := results.run("p", "r") / "prediction.png", np.zeros((60, 60), np.uint8))
    content = path.read_bytes()
    path.write_bytes(content[:40] + bytes(len(content) - 52) + content[-12:])
    with pytest.raises(UserError, match=r"prediction\.png: cannot be read"):
        sections.thumbnail(read_plan(results.plan("p", {"r": "r"})))


def test_a_thumbnail_has_the_complete_width(results: Results) -> None:
    """A wide figure keeps its right edge; a tall figure keeps its top."""
    for name, size, expected in (("wide", (30, 600), (14, 280)), ("tall", (600, 280), (120, 280))):
        pixels = np.zeros(size, np.uint8)
        pixels[: size[0] // 3, -size[1] // 10 :] = 255
        imsave(results.run("p", name) / "prediction.png", pixels, cmap="gray")
        small = sections.thumbnail(read_plan(results.plan("p", {name: name})))
        with Image.open(BytesIO(base64.b64decode(small or ""))) as image:
            found = np.asarray(image.convert("L"))
        assert found.shape == expected and found[:4, -20:].min() > 200 and found[:, :240].max() < 50, name


def test_the_figure_of_vectors_has_complete_texts() -> None:
    """No text of the figure for studies without a figure is cut at the figure's edge."""
    canvas = FigureCanvasAgg(figure := draw_values(np.full(2, 0.5869), np.full(2, -1234.5)))
    canvas.draw()
    (axis,) = figure.axes
    titles = axis.get_legend().get_texts()
    assert [each.get_text() for each in titles] == ["target", "prediction"]
    for each in (*titles, axis.xaxis.label, axis.yaxis.label):
        box = each.get_window_extent()
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, each


def test_paper_and_windows_of_middle_width_have_rules() -> None:
    """On paper, controls and tables of values are hidden and tables are complete. Three answers fill two columns."""
    style = (Path(report.__file__).parent / "templates/style.css").read_text()
    _, _, paper = style.partition("@media print {")
    hidden = re.search(r"^  (.*) { display: none; }$", paper, re.MULTILINE)
    assert hidden and {"nav", ".button", ".choices", ".runs", ".values"} <= {*hidden[1].split(", ")}
    assert "  .scroll, .provenance, pre { overflow: visible; max-height: none; }\n" in paper
    _, _, middle = style.partition("@container (min-width: 32rem) and (max-width: 50rem) {")
    assert middle.splitlines()[1:3] == [
        "  .answers { grid-template-columns: 1fr 1fr; }",
        "  .answers > div:last-child:nth-child(odd) { grid-column: 1 / -1; }",
    ]


def test_a_tuned_plan_shows_the_winner(results: Results) -> None:
    """The page shows the tuned settings (two workers, 1.5 times as fast) or, if the gain may be noise, the old ones."""
    results.run("p", "a", triplet=None, epochs=0)
    plan = read_plan(results.plan("p", {"a": "a"}, measure=()))
    tried = [Tried(changes={}, rates=[[100.0]]), Tried(changes={"loader.workers": 2}, rates=[[150.0]])]
    for low, settings, speed in ((1.4, "loader.workers: 2", 150.0), (0.9, "the run's original settings", 100.0)):
        duel = Duel(challenger=1, rates=[(150.0, 100.0)] * 2, ratio=1.5, low=low, high=1.6)
        run = replace(plan.runs[0], records={"tune": Tuning(candidates=tried, duel=duel)})
        found = tuned_winner(replace(plan, runs=[run]))
        assert found and found["settings"] == settings and found["speed"] == pytest.approx(speed)
        assert (found["gain"] and found["gain"]["ratio"]) == (1.5 if low > 1 else None)
