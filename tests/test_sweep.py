"""Sweeps: their trials, the promotions of successive halving, diverged trials, and resuming."""

from __future__ import annotations

import itertools
import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from dlscale.config import resolve
from dlscale.config.blocks import Sweep
from dlscale.config.records import Rung
from dlscale.config.resolve import ResolvedRun
from dlscale.core.errors import UserError
from dlscale.preflight import cost
from dlscale.report import sections
from dlscale.report.collect import rows_of
from dlscale.report.report import page
from dlscale.results import read_plan
from tests.conftest import TINY, make_run, records, stage, timeless, train

DIGITS = TINY["mnist_cnn"]


def load(sweep: Any, **more: Any) -> dict[str, ResolvedRun]:
    """Return the runs of a sweep of `mnist_cnn`."""
    return resolve.load(
        {"targets": ["swept"], "plans": {"swept": {"study": "mnist_cnn", "kind": "sweep", "sweep": sweep, **more}}}
    ).plans["swept"]


def test_a_grid_tries_all_combinations() -> None:
    over = {"optimizer.lr": [0.003, "1e-2", 1], "batch_size": [32, 64], "loader": [{"kind": "torch", "workers": 0}]}
    runs = load({"over": over})
    found = {(each.run.optimizer.lr, each.run.batch_size, each.run.loader.workers) for each in runs.values()}
    assert found == set(itertools.product((0.003, 0.01, 1.0), (32, 64), (0,)))
    assert len(runs) == 6 and "lr-0p003_batch_size-32_loader-torch-workers-0" in runs
    assert (
        runs["lr-0p01_batch_size-64_loader-torch-workers-0"].run.label
        == "lr 0.01, batch_size 64, loader torch workers 0"
    )
    assert {each.run.training.on_divergence for each in runs.values()} == {"stop"}


def test_names_are_legal_short_and_different() -> None:
    values = [1e-5, 1e16, -0.5, True, None, "a b/c", [8, 16], "x" * 80, "x" * 79 + "y"]
    names = list(Sweep(over={"model.a": values, "loss.a": [1, 2]}).runs)
    assert len(set(names)) == 18 and all(len(name) <= 52 for name in names)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_") for name in names)
    assert names[0] == "model-a-1e-5_loss-a-1" and names[2] == "model-a-1e16_loss-a-1"


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ({"over": {key: list(range(1, 101)) for key in ("seed", "batch_size", "model.a", "loss.b")}}, "100000000"),
        ({"method": "random", "trials": 10**7, "over": {"seed": {"integers": [0, 10**12]}}}, "10000000"),
        ({"method": "halving", "over": {"seed": list(range(10_001))}}, "10001"),
        # Two equal values, with more combinations than can be compared.
        ({"method": "random", "trials": 9, "over": {"d": [1, 1.0], **{k: list(range(999)) for k in "ab"}}}, "d-1"),
    ],
)
def test_too_many_trials_are_refused_at_once(sweep: Any, message: str) -> None:
    begun = time.perf_counter()
    with pytest.raises(UserError, match=f"{message} (trials; expected at most 10000|is listed twice)"):
        load(sweep)
    assert time.perf_counter() - begun < 10


@pytest.mark.parametrize("seed", [0, 1, 17])
def test_few_draws_cover_their_ranges(seed: int) -> None:
    over = {key: {"integers": [0, 2**20 - 1]} for key in ("seed", "batch_size")}  # integers are not rounded

    def drawn(count: int) -> list[dict[str, int]]:
        return list(Sweep(method="random", over=over, trials=count, seed=seed).runs.values())

    for key in over:
        for count in (2, 4, 8, 16):
            assert sorted(trial[key] * count // 2**20 for trial in drawn(count)) == list(range(count)), (
                "each part of the range must have one value"
            )
    together = {tuple(value // 2**19 for value in trial.values()) for trial in drawn(64)}
    assert len(together) == 4, "draws of two settings must be independent"
    assert drawn(16) == drawn(16) and drawn(64)[:16] == drawn(16)


def test_draws_are_spread_as_the_range_says() -> None:
    """By chance, draws exceed this limit on the Kolmogorov-Smirnov distance to the distribution once in 1,000 tests."""
    over = {
        "a": {"log_uniform": [1e-4, 1e-1]},
        "b": {"uniform": [-2, 3]},
        "c": {"integers": [1, 4]},
        "d": ["x", "y", "z"],
    }
    trials = list(Sweep(method="random", over=over, trials=1000).runs.values())
    a, b = (np.sort([trial[key] for trial in trials]) for key in "ab")
    for share in (np.log10(a / 1e-4) / 3, (b + 2) / 5):
        assert share.min() >= 0 and share.max() <= 1
        assert np.abs(share - (np.arange(1000) + 0.5) / 1000).max() < 1.95 / math.sqrt(1000)
    for key, count in (("c", 4), ("d", 3)):
        _, counts = np.unique([trial[key] for trial in trials], return_counts=True)
        assert len(counts) == count and np.abs(counts - 1000 / count).max() < 4 * math.sqrt(1000 / count)
    assert all(value == float(f"{value:.3g}") for value in a)


@pytest.mark.parametrize(
    ("trials", "epochs", "factor", "expected"),
    [
        (9, 9, 3, [(1, 9), (3, 3), (9, 1)]),
        (27, 81, 3, [(3, 27), (9, 9), (27, 3), (81, 1)]),  # the number of trials limits the number of rungs
        (16, 4, 2, [(1, 16), (2, 8), (4, 4)]),  # the number of epochs limits the number of rungs
        (9, 14, 3, [(2, 9), (5, 3), (14, 1)]),
        (2, 10, 3, [(10, 2)]),
        (5, 1, 3, [(1, 5)]),
    ],
)
def test_rungs(trials: int, epochs: int, factor: int, expected: list[tuple[int, int]]) -> None:
    sweep = Sweep(method="halving", over={"seed": list(range(trials))}, reduction_factor=factor)
    assert sweep.rungs(trials, epochs) == expected


def test_rungs_are_runs_that_stop() -> None:
    runs = load({"method": "halving", "over": {"optimizer.lr": [0.1, 1.0, 10.0]}}, settings={"training": {"epochs": 6}})
    assert list(runs) == [f"lr-{lr}-rung{rung}" for rung in (0, 1) for lr in ("0p1", "1", "10")]
    assert [(each.trial, each.run.training.stop_after, each.rung_size) for each in runs.values()] == [
        *(("lr-0p1", 2, 3), ("lr-1", 2, 3), ("lr-10", 2, 3)),
        *(("lr-0p1", 6, 1), ("lr-1", 6, 1), ("lr-10", 6, 1)),
    ]
    assert {each.run.training.epochs for each in runs.values()} == {6}


def test_trials_that_need_too_many_gpus_make_no_rungs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    sweep = {"method": "halving", "over": {"seed": [1, 2]}}
    settings = {"training": {"epochs": 4}, "geometry": {"gpus_per_node": 2}}
    swept = {"study": "mnist_cnn", "kind": "sweep", "settings": settings, "sweep": sweep}
    found = resolve.load(
        {"targets": ["other"], "plans": {"swept": swept, "other": {"study": "mnist_cnn", "runs": {"a": {}}}}}
    )
    assert found.plans["swept"] == {} and list(found.skipped_runs["swept"]) == ["seed-1", "seed-2"]


def test_cost_counts_each_rung_with_the_trials_that_it_will_have(tmp_path: Path) -> None:
    plan = {
        "study": "mnist_cnn",
        "kind": "sweep",
        "settings": {"training": {"epochs": 9}},
        "sweep": {"method": "halving", "over": {"seed": list(range(9))}},
    }
    known = resolve.load({"targets": ["swept"], "plans": {"swept": plan}, "results": str(tmp_path)})
    works = [work for work in cost.works(known) if work.run]
    epochs = [work.run.training.stop_after for work in works if work.run]
    assert epochs == [1] * 9 + [2] * 3 + [6], "a rung must count only the epochs after the previous rung"
    for name in ("seed-5-rung0", "seed-5-rung1"):
        (tmp_path / "plans/swept" / name).mkdir(parents=True)
        (tmp_path / "plans/swept" / name / "provenance.json").touch()
    left = [work.run_name for work in cost.works(known) if work.run]
    assert len(left) == 8 + 2 + 1 and "seed-5-rung1" not in left


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        (None, "sweeps?.*needs the key sweep"),
        ({"over": {}}, "over"),
        ({"over": {"optimizer.lr": []}}, "optimizer.lr: no values"),
        ({"over": {"optimizer.lr": [1, 1.0]}}, "lr-1 is listed twice"),
        (
            {"over": {"optimizer.lr": {"uniform": [0.1, 1]}}},
            "over: a range .*; set trials with method random or halving",
        ),
        ({"over": {"optimizer.lr": {"uniform": [1, 0.1]}}}, "first end must be less"),
        ({"over": {"optimizer.lr": {"unifrom": [0.1, 1]}}}, "did you mean 'uniform'"),
        ({"over": {"seed": [1]}, "trials": 1}, "method grid tries all"),
        ({"method": "random", "over": {"seed": [1, 2]}}, "trials: method random needs the number of trials"),
        ({"method": "random", "over": {"seed": [1, 2]}, "trials": 3}, "3 is more than the number of combinations, 2;"),
        (
            {"method": "random", "over": {"seed": {"integers": [1, 2]}}, "trials": 3},
            "3 is more than the number of combinations, 2;",
        ),
        (
            {"method": "random", "over": {"dropout": {"uniform": [0.1, 0.101]}}, "trials": 9},
            "trials: 9 is more than the number of different trials that over gives, 2;",
        ),
        ({"over": {"optimizer": [{}], "optimizer.lr": [1]}}, "optimizer: this section contains optimizer.lr"),
        ({"over": {"optimizer.lrr": [1]}}, r"plans\.swept\.sweep\.over\.optimizer: unknown key 'lrr'"),
        ({"over": {"optimizer.lr": [-1.0]}}, r"plans\.swept\.sweep\.over\.optimizer\.lr: got -1.0"),
        ({"methd": "grid", "over": {"seed": [1]}}, "did you mean 'method'"),
        ({"method": "halving", "over": {"training.epochs": [1, 2]}}, "the same value for all trials"),
    ],
)
def test_mistakes_are_one_message(sweep: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(sweep)


@pytest.mark.slow
def test_impossible_sweeps_are_refused() -> None:
    over = {"over": {"seed": [1, 2]}}
    for more, message in (
        ({"runs": {"a": {}}}, "runs: a sweep generates its runs; remove the key runs"),
        ({"kind": "set"}, "sweep: a plan of kind set .*; write kind: sweep"),
        ({"measure": ["throughput"]}, "measure: a sweep ranks trained trials, so it needs the stage train; add train"),
        (
            {"sweep": {"method": "halving", **over}, "measure": ["train", "throughput"]},
            "measure: successive halving only has the stage train, .* in a separate plan",
        ),
    ):
        with pytest.raises(UserError, match=message):
            load(**{"sweep": over, **more})
    plans = {
        "swept": {"study": "mnist_cnn", "kind": "sweep", "sweep": {"method": "halving", **over}},
        "best": {"study": "mnist_cnn", "runs": {"again": {"use": "swept.seed-1"}}},
    }
    with pytest.raises(UserError, match="use the key 'from' instead"):
        resolve.load({"targets": ["best"], "plans": plans})
    plans["best"] = {"study": "mnist_cnn", "from": "swept.seed-2", "runs": {"again": {}}}
    assert resolve.load({"targets": ["best"], "plans": plans}).plans["best"]["again"].run.seed == 2


# ---- a training in several rungs ----------------------------------------------------------------------


@pytest.fixture
def digits(tiny_data: Callable[[str], Path]) -> Path:
    return tiny_data("mnist_cnn") / "manifest.json"


def make(folder: Path, **training: Any) -> Path:
    """Write the settings of a tiny training to a folder; return the folder."""
    run = {**DIGITS["run"], "training": {"epochs": 4, **training}, "schedule": {"kind": "cosine"}}
    make_run(folder, "mnist_cnn", run, DIGITS["dataset"])
    return folder


def done(folder: Path, manifest: Path, checkpoints: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Train with a common checkpoint folder; return the records of epochs without times, and the weights."""
    assert train(folder, manifest, "--checkpoints", checkpoints) == 0
    return timeless(folder), torch.load(folder / "model.pt", weights_only=True)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_rungs_end_bitwise_equal_to_one_training(
    tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """A trial that trains in three rungs equals a single training; a repeated rung ignores later checkpoints.

    In fp16, all six steps of the first epoch overflow, with the loss scales 2**126, 2**107, … 2**31.
    """
    monkeypatch.setattr(torch.amp.GradScaler.__init__, "__defaults__", ("cuda", 2.0**126, 2.0, 2.0**-19, 2000, True))
    over = {"precision": precision, "optimizer": {"kind": "adamw", "lr": 0.01, "weight_decay": 0.1}}
    monkeypatch.setitem(DIGITS, "run", DIGITS["run"] | over)
    epochs, weights = done(make(tmp_path / "whole", checkpoint_epochs=4), digits, tmp_path / "a")
    parts = [make(tmp_path / f"rung{until}", stop_after=until) for until in (1, 2, 4)]
    found = [done(part, digits, tmp_path / "b") for part in parts]
    assert [part[0] for part in found] == [epochs[:1], epochs[:2], epochs]
    assert all(torch.equal(found[-1][1][key], weights[key]) for key in weights)
    assert json.loads((parts[1] / "provenance.json").read_text())["resumed_from_step"] == 6
    later = {path.name for path in (tmp_path / "b").glob("*/step-*")}
    again = done(parts[0], digits, tmp_path / "b")
    assert later < {path.name for path in (tmp_path / "b").glob("*/step-*")}, "later checkpoints must be kept"
    assert again[0] == epochs[:1] and all(torch.equal(again[1][key], found[0][1][key]) for key in weights)


@pytest.mark.parametrize("study", [pytest.param(s, marks=[] if s == "mnist_cnn" else pytest.mark.slow) for s in TINY])
def test_a_diverged_training_fails_or_stops(
    tmp_path: Path, tiny_data: Callable[[str], Path], study: str, capsys: Any
) -> None:
    """A diverged training fails, or stops with `on_divergence: stop`, in every study; figure and logs accept NaN."""
    settings = {**TINY[study]["run"], "training": {"epochs": 3}, "optimizer": {"kind": "sgd", "lr": 1e30}}
    manifest = tiny_data(study) / "manifest.json"
    make_run(tmp_path / "fails", study, settings, TINY[study]["dataset"])
    assert train(tmp_path / "fails", manifest) == 2
    assert " is NaN or infinite" in capsys.readouterr().err
    settings["training"]["on_divergence"] = "stop"
    make_run(tmp_path / "stops", study, settings, TINY[study]["dataset"])
    assert train(tmp_path / "stops", manifest) == 0
    last = records(tmp_path / "stops")[-1]
    assert last["epoch"] < 3 and None in (last["train_loss"], last["valid_loss"])


# ---- promoted trials, and the page ---------------------------------------------------------------------


@pytest.fixture
def swept(tmp_path: Path, digits: Path) -> Path:
    """Train the first rung of four trials, of which one diverges; return the path of the plan."""
    rates = {"lr-0p001": 0.001, "lr-1": 1.0, "lr-1e30": 1e30, "lr-0p3": 0.3}
    folder = tmp_path / "plans/swept"
    for name, lr in rates.items():
        settings = {"training": {"epochs": 4, "stop_after": 2, "on_divergence": "stop"}, "optimizer": {"lr": lr}}
        make_run(folder / f"{name}-rung0", "mnist_cnn", {**DIGITS["run"], **settings}, DIGITS["dataset"])
        assert train(folder / f"{name}-rung0", digits, "--checkpoints", tmp_path / name) == 0
    plan = {
        "plan": "swept",
        "study": "mnist_cnn",
        "kind": "sweep",
        "measure": ["train"],
        "runs": [
            {"name": name, "label": name, "plan": "swept", "run": f"{name}-rung0", "measure": ["train"]}
            for name in rates
        ],
        "sweep": {
            "method": "halving",
            "metric": "valid_loss",
            "trials": {name: {"optimizer.lr": lr} for name, lr in rates.items()},
            "rungs": [[2, 4], [4, 2]],
        },
    }
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan))
    return folder / "plan.yaml"


def test_the_best_trials_continue_and_the_page_shows_all(
    swept: Path, tmp_path: Path, digits: Path, tiny_data: Any
) -> None:
    folder = swept.parent
    out = folder / "rung1.json"
    assert stage("promote", "--plan", swept, "--rung", 1, "--out", out) == 0
    chosen = Rung.read(out)
    losses = {
        file.parent.name.removesuffix("-rung0"): json.loads(file.read_text().splitlines()[-1])["valid_loss"]
        for file in folder.glob("*/metrics.jsonl")
    }
    order = sorted((name for name in losses if losses[name] is not None), key=lambda name: losses[name])
    assert list(chosen.scores) == [*order, "lr-1e30"] and chosen.trials == order[:2]
    assert math.isnan(chosen.scores["lr-1e30"])
    for name in chosen.trials:
        settings = yaml.safe_load((folder / f"{name}-rung0/config.yaml").read_text())
        settings["training"]["stop_after"] = 4
        (folder / f"{name}-rung1").mkdir()
        (folder / f"{name}-rung1/config.yaml").write_text(yaml.safe_dump(settings))
        assert train(folder / f"{name}-rung1", digits, "--checkpoints", tmp_path / name) == 0
    plan = read_plan(swept)
    assert {run.name: len(run.epochs) for run in plan.runs if run.name in chosen.trials} == dict.fromkeys(
        chosen.trials, 4
    )
    assert plan.best and plan.best.name in chosen.trials and plan.ranked[-1].name == "lr-1e30"
    assert [row["optimizer.lr"] for row in rows_of(plan)] == [0.001, 1.0, 1e30, 0.3]
    text = page("Sweep", [plan], [tiny_data("mnist_cnn")], tmp_path)
    assert sections.line(plan).startswith(f"swept: best of 4 trials: {plan.best.name}, "), "a sweep looks for the best"
    assert 0 < text.index("<h4>Which is best?</h4>") < text.index("<h4>How fast?</h4>")
    assert (
        "from: swept." + plan.best.name in text and f"optimizer:\n  lr: {plan.best.settings['optimizer']['lr']}" in text
    )
    assert "successive halving: 4 for 2 epochs, 2 for 4 epochs" in text and "diverged" in text
    assert set(re.findall(r'href="#(run[^"]*)"', text)) <= set(re.findall(r' id="(run[^"]*)"', text))


def _set_epochs(folder: Path, *epochs: dict[str, Any]) -> None:
    """Replace the epochs of a run, as if the run had trained for these epochs alone."""
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in epochs))
    known = json.loads((folder / "provenance.json").read_text())
    (folder / "provenance.json").write_text(json.dumps({**known, "epochs": len(epochs)}))


def test_a_trial_that_ends_early_at_a_target_is_ranked(swept: Path) -> None:
    """A trial that ends a rung early, at its target, is ranked like trials with all epochs of the rung."""
    folder = swept.parent / "lr-0p3-rung0"
    first, second = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    _set_epochs(folder, {**first, "valid_loss": 1e-3})
    assert read_plan(swept, rung=0).ranked[0].name == "lr-0p3" and second["epoch"] == 2
    swept.write_text(swept.read_text().replace("metric: valid_loss", "metric: accuracy"))
    for file in swept.parent.glob("*/metrics.jsonl"):
        _set_epochs(file.parent, {**first, "train_loss": None, "valid_loss": None, "metrics": {}})
    plan = read_plan(swept, rung=0)
    assert all(math.isnan(plan.score(run)[0]) for run in plan.ranked) and len(plan.ranked) == 4, (
        "the plan must be readable if all trials diverged"
    )
    assert plan.best is None
    assert stage("promote", "--plan", swept, "--rung", 1, "--out", swept.parent / "rung1.json") == 0
    assert Rung.read(swept.parent / "rung1.json").trials == [] and len(read_plan(swept).runs) == 4, (
        "no diverged trial may be promoted"
    )
    assert sections.sweep_metric(plan) == plan.described["accuracy"].title
    swept.write_text(swept.read_text().replace("metric: accuracy", "metric: acuracy"))
    with pytest.raises(UserError, match="did you mean 'accuracy'"):
        assert not read_plan(swept, rung=0).ranked
