"""Sweeps, scaling and the plan that tuning writes, with the real Snakemake: existing results are kept."""

from __future__ import annotations

import json
import os
import re
import shlex
from typing import Any

import pytest
import yaml

from dlscale.extensions.tune import tune
from dlscale.extensions.tune.records import Duel, Tuning
from dlscale.report.speedup import series
from dlscale.results import read_plan
from tests.workflow.conftest import Outcome, Tree

#: Settings of a run on a few batches of tiny digits.
SETTINGS: dict[str, Any] = {
    "dataset": "mnist_cnn",
    "model": {"widths": [4, 8], "hidden": 16},
    "loader": {"workers": 0},
    "precision": "fp32",
}
SWEPT: dict[str, Any] = {
    "study": "mnist_cnn",
    "kind": "sweep",
    "settings": {**SETTINGS, "batch_size": 8, "training": {"epochs": 2}},
    "sweep": {"method": "halving", "over": {"optimizer.lr": [0.5, 1e30]}, "reduction_factor": 2},
}


def call(tree: Tree, dry: bool = False) -> list[str]:
    """Run the sweep; return the jobs that ran, or with `dry` the jobs that would run."""
    if dry:
        return tree.planned(targets=["plan_swept"]).names
    outcome = tree.snakemake("--cores", "2", "--", "plan_swept")
    assert outcome.status == 0, outcome.output[-5000:]
    return outcome.names


@pytest.mark.slow
def test_halving(clone: Tree) -> None:
    """One of two trials diverges, and the other trial is promoted. A new trial or metric repeats no training."""
    clone.config["plans"]["swept"] = json.loads(json.dumps(SWEPT))
    clone.write()
    first = ["train swept lr-0p5-rung0", "train swept lr-1e30-rung0", "promote swept 1", "configure_plan swept"]
    shown = ["collect swept", "report_plan swept"]
    assert call(clone, dry=True) == sorted([*first, *shown])
    assert call(clone) == sorted([*first, "train swept lr-0p5-rung1", *shown])
    assert call(clone, dry=True) == []
    folder = clone.results / "plans/swept"
    assert json.loads((folder / "rung1.json").read_text())["trials"] == ["lr-0p5"]
    assert json.loads((folder / "lr-0p5-rung1/provenance.json").read_text())["resumed_from_step"] == 6
    assert len((folder / "lr-0p5-rung1/metrics.jsonl").read_text().splitlines()) == 2
    assert "successive halving" in (folder / "report.html").read_text()

    clone.config["plans"]["swept"]["sweep"]["over"]["optimizer.lr"] = [0.5, 1e30, 0.1]
    clone.write()
    new = ["train swept lr-0p1-rung0", "promote swept 1", "configure_plan swept"]
    assert call(clone, dry=True) == sorted([*new, *shown])

    clone.config["plans"]["swept"]["sweep"]["over"]["optimizer.lr"] = [0.5, 1e30]
    clone.config["plans"]["swept"]["sweep"]["metric"] = "accuracy"
    clone.write()
    assert call(clone, dry=True) == sorted(["promote swept 1", "configure_plan swept", *shown])


# ---- weak scaling over one and two processes -----------------------------------------------------------


WEAK: dict[str, Any] = {
    "study": "mnist_cnn",
    "kind": "weak_scaling",
    "settings": {
        **SETTINGS,
        "threads": 1,
        "throughput": {"warmup": 1, "trials": 2, "batches": 3, "seconds": 0, "beside": 0},
    },
    "scaling": {"devices": [1, 2], "batch_sizes": [8]},
}
RUNS = {"b8_ddp_1": (1, 8, True), "b8_ddp_2": (2, 16, True), "b8_no_sync_2": (2, 16, False)}


@pytest.mark.slow
def test_weak_scaling(clone: Tree) -> None:
    clone.config["plans"]["weak"] = WEAK
    clone.write()
    jobs = ["configure_plan weak", *(f"throughput weak {run}" for run in RUNS), "collect weak", "report_plan weak"]
    outcome = clone.snakemake("--cores", "2", "--", "plan_weak")
    assert outcome.status == 0, outcome.output[-5000:]
    assert outcome.names == sorted(jobs)
    assert clone.planned(targets=["plan_weak"]).names == []

    folder = clone.results / "plans/weak"
    plan = read_plan(folder / "plan.yaml")
    (found,) = series(plan)
    assert (found.batch, [point.devices for point in found.points]) == (8, [1, 2])
    for run in plan.runs:
        record = run.throughput
        assert record and (record.nranks, record.batch_size, run.averages) == RUNS[run.name]
        assert record.predicted and record.predicted.peak and record.predicted.peak < (record.peak_memory_bytes or 0)
        assert (record.alone is None) == (run.name != "b8_ddp_2")
    assert all(found.points[1].communication(mode) for mode in ("IO", "SYNTHETIC", "FULL"))
    html = (folder / "report.html").read_text()
    assert "<h3>Scaling</h3>" in html and re.search(r"efficiency[^<]* on 2 devices", html)


# ---- the plan that tuning writes, run with the command that its file and the page show --------------------


NEW = "tuned_mine_tuned"
#: Jobs that the plan in tuned.yaml needs: a new timing of the untuned run, and all jobs of the tuned run.
JOBS = [
    f"collect {NEW}",
    f"configure_plan {NEW}",
    f"report_plan {NEW}",
    "throughput tuned mine",
    f"throughput {NEW} tuned",
    f"train {NEW} tuned",
]


@pytest.mark.slow
def test_the_printed_command_trains_the_winner(finished: tuple[Tree, Outcome], clone: Tree) -> None:
    """A dry run of the printed command lists the winner's jobs, although the folder's name needs quotes.

    Only `tuned.yaml` contains the plan.
    """
    (job,) = [job for job in finished[1].jobs if job.rule == "tune"]
    words = shlex.split(job.command)
    given = {flag: words[words.index(flag) + 1] for flag in ("--call", "--run", "--out")}
    assert given["--call"] == "snakemake --configfile tiny.yaml"
    # A real gain would depend on the machine, so the test simulates the gain.
    folder = clone.results / "plans/tuned/mine"
    found = Tuning.read(folder / "tune.json")
    assert found.run == given["--run"] == "tuned.mine"
    duel = Duel(challenger=1, rates=[(2.0, 1.0)] * 3, ratio=2.0, low=1.9, high=2.1)
    file = f"{given['--out']}/tuned.yaml"
    command = f"{given['--call']} {shlex.quote(file)} -- plan_{NEW}"
    found = found.model_copy(update={"duel": duel, "command": command})
    time = (folder / "tuned.yaml").stat().st_mtime_ns
    (folder / "tuned.yaml").write_text(tune.tuned(found, "cosmo_unet"))
    os.utime(folder / "tuned.yaml", ns=(time, time))
    assert found.plan == NEW and f"#   {command}\n" in (folder / "tuned.yaml").read_text()
    assert list(yaml.safe_load((folder / "tuned.yaml").read_text())["plans"]) == [NEW]

    clone.log.unlink(missing_ok=True)
    done = clone.shell(command.replace("snakemake ", "snakemake -np --logger jobs ", 1))
    assert done.returncode == 0, done.stdout + done.stderr
    assert Outcome(0, done.stdout, clone.jobs()).names == JOBS

    # If tuned.yaml is only added to the configuration, no job runs, because its plan is not a target.
    assert clone.planned("--configfile", "tiny.yaml", file).names == []
