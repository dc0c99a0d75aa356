"""Reasons why jobs would run, in words; `tests/workflow/test_why.py` tests them with the real workflow."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dlscale.extensions.why.why import explain_job, format_reasons, replaced
from dlscale.preflight.run import Waiting
from dlscale.rules.calls import missing_results

TABLES = {
    "1": {"extensions/era5_vit/model.py": "a", "core/files.py": "b"},
    "2": {"extensions/era5_vit/model.py": "c", "core/files.py": "b"},
}


def job(before: Any = None, now: Any = None, rule: str = "train", **more: Any) -> Waiting:
    """Return a job with changed parameters, as Snakemake records them."""
    recorded = {"before": [repr(before)], "now": [repr(now)]} if before is not None else {}
    return Waiting(**{"rule": rule, "wildcards": {"plan": "p", "run": "r"}, "known": True, **recorded, **more})


def stage(settings: Any = None, sources: str = "1", **more: str) -> dict[str, Any]:
    return {"sources": sources, "settings": json.dumps(settings or {}), **more}


@pytest.mark.parametrize(
    ("waiting", "reason"),
    [
        (job(), ""),
        (job(known=False, missing=["results/metrics.jsonl", "results/model.pt"]), "never made"),
        (job(missing=["results/model.pt"]), "model.pt is gone"),
        (job(missing=["results/model.pt"], failed="2026-11-30 00:45"), "the last attempt failed at 2026-11-30 00:45"),
        (job(missing=["results/d/stats/"]), "stats/ is gone"),
        (job(missing=["results/metrics.jsonl", "results/model.pt"]), "metrics.jsonl, model.pt are gone"),
        (job(forced=True), "forced"),
        (job(interrupted=True, known=False, missing=["results/model.pt"]), "interrupted"),
        (job(known=False, missing=["results/model.pt"], newer=["data/a.h5"]), "never made"),
        (job(stage({"a": f"{'x' * 80}y"}), stage({"a": f"{'x' * 80}z"})), "a changed"),
        (job(newer=["data/b.h5", "data/a.h5"]), "changed: data/b.h5, data/a.h5"),
        (job(newer=["throughput.json"], follows=True), ""),
        (job(inputs=True), "its list of input files changed"),
        (job(command=True), "the rule's command changed"),
        (job(stage({"training": {"epochs": 2}}), stage({"training": {"epochs": 50}})), "training.epochs 2 → 50"),
        (job(stage({"a": 1}), stage({"b": [1, None]})), "a 1 → none; b none → [1, null]"),
        (job(stage({"a": "x" * 80}), stage({"a": "y"})), f"a {'x' * 59}… → y"),
        (
            job(stage(dict.fromkeys("abcdef", 1)), stage(dict.fromkeys("abcdef", 2))),
            "a 1 → 2; b 1 → 2; c 1 → 2; d 1 → 2; 2 more settings",
        ),
        (job(stage(), stage(sources="2")), "extensions/era5_vit/model.py changed"),
        (job(stage(sources="0"), stage(sources="2")), "sources changed"),
        (job(stage(image="gpu-0.1.0"), stage(image="gpu-0.2.0")), "image gpu-0.1.0 → gpu-0.2.0"),
        (job(stage(), stage(packages="/software")), "packages none → /software"),
        (
            job({**stage(), "settings": '{"a": 1}'}, {**stage(sources="2"), "settings": '{"a": 2}'}, command=True),
            "a 1 → 2; extensions/era5_vit/model.py changed; the rule's command changed",
        ),
        (
            job(stage({"a": 1}, beside='{"a": 1, "b": 1}'), stage({"a": 2}, beside='{"a": 2, "b": 2}')),
            "a 1 → 2; in the plan's first run: b 1 → 2",
        ),
    ],
)
def test_reasons(waiting: Waiting, reason: str) -> None:
    assert explain_job(waiting, TABLES.get) == reason


def test_a_line_for_each_reason() -> None:
    """Runs with the same stages and reason share a line, which names four runs and counts the rest."""
    longer = {"before": [repr(stage({"epochs": 2}))], "now": [repr(stage({"epochs": 3}))], "known": True}
    jobs = [
        Waiting("train", {"plan": "p", "run": "a"}, **longer),
        Waiting("throughput", {"plan": "p", "run": "a"}, **longer),
        Waiting("train", {"plan": "p", "run": "b"}, **longer),
        Waiting("train", {"plan": "q", "run": "a"}, **longer),
        Waiting("preprocess", {"dataset": "d", "split": "train", "part": "x", "piece": "0"}, missing=["x"]),
        Waiting("configure_plan", {"plan": "q"}, **longer),
        Waiting("collect", {"plan": "p"}, known=True),
        Waiting("report_plan", {"plan": "p"}, known=True),
        Waiting("report_plan", {"plan": "q"}, known=True),
        Waiting("report", {}, missing=["index.html"]),
    ]
    in_order = [
        "plan q (configure_plan): epochs 2 → 3",
        "data d (preprocess): never made",
        "p.a (train, throughput): epochs 2 → 3",
        "p.b (train): epochs 2 → 3",
        "q.a (train): epochs 2 → 3",
        "report (report): never made",
        "and jobs that depend on these: collect, report_plan (2 jobs)",
        "replaces the results of p.a, p.b, q.a (train, throughput); to keep them, define a new run (`from: p.a`)",
    ]
    assert format_reasons(jobs, TABLES.get) == in_order
    assert format_reasons(reversed(jobs), TABLES.get) == in_order, "the order of Snakemake's jobs must not matter"
    many = [Waiting("train", {"plan": "p", "run": f"r{number}"}) for number in range(6)]
    assert format_reasons([Waiting("train", each.wildcards, missing=["x"]) for each in many], TABLES.get) == [
        "p.{r0, r1, r2, r3 and 2 more} (train): never made"
    ]


def test_deleted_results_that_no_job_needs_are_reported(tmp_path: Path) -> None:
    """Deleted results are listed with the command that restores them, unless a job does, or they never existed."""
    for file in ("plans/p/a/metrics.jsonl", "plans/p/a/tensorboard/events", "data/d/manifest.json"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    results, asked = str(tmp_path), (["p/a", "p/never"], ["d", "never"])
    run, data = f"{results}/plans/p/a", f"{results}/data/d/manifest.json"
    stats = f"data d: stats/ is gone, and no job would restore this; to do so: snakemake --force {data}"
    again = f"no job would restore this; to do so: snakemake --force {run}/metrics.jsonl"
    assert missing_results(results, *asked, []) == [f"p.a: model.pt is gone, and {again}", stats]
    shutil.rmtree(f"{run}/tensorboard")
    assert missing_results(results, *asked, [data]) == [f"p.a: model.pt, tensorboard/ are gone, and {again}"]
    (tmp_path / "data/d/stats").mkdir()
    assert len(missing_results(results, *asked, [f"{run}/metrics.jsonl"])) == 1, "an empty folder must count as missing"
    (tmp_path / "data/d/stats/means.npy").touch()
    assert missing_results(results, *asked, [f"{run}/metrics.jsonl"]) == []
    (line, *_) = missing_results(results, *asked, [], ["--configfile", "mine.yaml"])
    assert line.endswith(f"snakemake --configfile mine.yaml --force {run}/metrics.jsonl"), (
        "the command must contain the file of the plan"
    )


def test_runs_with_replaced_results_are_named() -> None:
    """The last line names the runs whose results would be replaced by results of other settings."""
    one, other = stage({"lr": 1}), stage({"lr": 2})
    line = "replaces the results of p.r (train); to keep them, define a new run (`from: p.r`)"
    assert format_reasons([job(one, other)], TABLES.get) == ["p.r (train): lr 1 → 2", line]
    several = [job(one, other), job(one, other, "throughput", wildcards={"plan": "p", "run": "a"})]
    assert replaced(several).startswith("replaces the results of p.a, p.r (train, throughput); ")
    unharmed = [
        job(one, other, missing=["model.pt"]),
        job(known=False, missing=["model.pt"]),
        job(one, stage({"lr": 1}, sources="2")),
        job(one, stage({"lr": 1}, sources="2"), follows=True),
        job(follows=True, missing=["model.pt"]),
        job(follows=True, known=False),
        job(follows=True, rule="collect"),
    ]
    assert replaced(unharmed) == ""
    # The run is on another dataset, which this call makes or an earlier call made.
    for of_other_data in (job(follows=True), job(newer=["data/manifest.json"])):
        assert format_reasons([of_other_data], TABLES.get)[-1] == line.replace(
            "define a new run", "give the changed dataset a new name, and use it in a new run"
        )
