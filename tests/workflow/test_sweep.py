"""A sweep by the real Snakemake: rungs are decided on the way, trials that exist are not trained again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.workflow.conftest import Tree

PLAN: dict[str, Any] = {
    "study": "mnist_cnn",
    "kind": "sweep",
    "settings": {
        "dataset": "mnist_cnn",
        "model": {"widths": [4, 8], "hidden": 16},
        "loader": {"workers": 0},
        "batch_size": 8,
        "precision": "fp32",
        "training": {"epochs": 2},
    },
    "sweep": {"method": "halving", "over": {"optimizer.lr": [0.5, 1e30]}, "reduction_factor": 2},
}


def call(tree: Tree, dry: bool = False) -> list[str]:
    """Run the sweep, or say what would run."""
    if dry:
        return tree.planned(targets=["plan_swept"]).names
    outcome = tree.snakemake("--cores", "2", "--", "plan_swept")
    assert outcome.status == 0, outcome.output[-5000:]
    return outcome.names


@pytest.mark.slow
def test_halving(clone: Tree) -> None:
    """Two trials, of which one diverges and the other one trains on; then a third comes, which is better than none."""
    clone.config["plans"]["swept"] = json.loads(json.dumps(PLAN))
    clone.write()
    first = ["train swept lr-0p5-rung0", "train swept lr-1e30-rung0", "promote swept 1", "configure_plan swept"]
    shown = ["collect swept", "report_plan swept"]
    assert call(clone, dry=True) == sorted([*first, *shown])
    second = ["train swept lr-0p5-rung1"]
    assert call(clone) == sorted([*first, *second, *shown])
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
