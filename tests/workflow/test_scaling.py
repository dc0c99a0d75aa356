"""Weak scaling over one and two processes by the real Snakemake."""

from __future__ import annotations

from typing import Any

import pytest

from dlscale.report.results import read_plan
from dlscale.report.speedup import series
from tests.workflow.conftest import Tree

#: Of the tiny digits, a few batches.
PLAN: dict[str, Any] = {
    "study": "mnist_cnn",
    "kind": "weak_scaling",
    "settings": {
        "dataset": "mnist_cnn",
        "model": {"widths": [4, 8], "hidden": 16},
        "loader": {"workers": 0},
        "precision": "fp32",
        "threads": 1,
        "throughput": {"warmup": 1, "trials": 2, "batches": 3, "seconds": 0, "beside": 0},
    },
    "scaling": {"devices": [1, 2], "batch_sizes": [8]},
}
RUNS = {"b8_ddp_1": (1, 8, True), "b8_ddp_2": (2, 16, True), "b8_no_sync_2": (2, 16, False)}


@pytest.mark.slow
def test_weak_scaling(clone: Tree) -> None:
    clone.config["plans"]["weak"] = PLAN
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
    assert "<h3>Scaling</h3>" in html and "of the ideal on 2 devices" in html
