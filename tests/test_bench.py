"""The benchmarks run, and count right; how fast anything is, is no test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from dlscale.models.vit import ViT
from tests.bench.compute import counted_flops, vit_flops
from tests.bench.measure import Row, figures, in_turns, table
from tests.conftest import ROOT


def test_benchmarks_run(tmp_path: Path) -> None:
    """All but those of the workflow, whose commands the workflow's own tests run."""
    groups = ["crops", "pairs", "steps", "models", "preprocess"]
    command = [sys.executable, str(ROOT / "tests/bench/run.py"), "--quick", "--json", str(tmp_path / "out.json")]
    done = subprocess.run([*command, *groups], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "out.json").read_text())
    assert results["quick"] is True
    assert {"time", "cores", "load", "device", "git", "packages"} == set(results["machine"])
    assert len(results["rows"]) == 6 + 3 + 2 + 2 + 2
    for row in results["rows"]:
        keys = ["name", "unit", "values", "value", "reference", "references", "reference_value", "ratio", "counted"]
        assert sorted(row) == sorted(keys)
        assert row["value"] > 0 and row["reference_value"] > 0
        assert row["name"] in done.stdout and row["reference"] in done.stdout
    counted = {row["name"]: row["counted"] for row in results["rows"]}
    assert counted["64^3 crops, contiguous fp32, workers: 0"]["bytes/sample"] == 64**3 * 9 * 4
    assert counted["ERA5 pairs, contiguous fp32, workers: 0"]["bytes/sample"] == 2 * 20 * 360 * 720 * 4
    assert counted["preprocess, downsample 2"]["bytes read"] > 128**3 * 9 * 4
    assert list(tmp_path.iterdir()) == [tmp_path / "out.json"]


def test_unknown_group_names_the_known(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tests/bench/run.py"), "nonsense"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "no such group: nonsense; there are: crops, pairs" in done.stderr


def test_contestants_take_turns() -> None:
    calls = []

    def contestant(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    found = in_turns(2, {name: lambda name=name: contestant(name) for name in "ab"})  # type: ignore[misc]
    assert calls == ["a", "b"] * 3  # the first of each is a warm-up
    assert found == {"a": [3.0, 5.0], "b": [4.0, 6.0]}


def test_ratio_is_that_of_neighbours() -> None:
    """A machine that slows to a tenth meanwhile changes both medians, and no ratio."""
    row = Row("name", "MB/s", [100.0, 10.0, 1.0], "floor", [200.0, 20.0, 4.0], {"bytes": 2e6})
    assert row.ratio == 0.5
    assert row.to_json()["value"] == 10 and row.to_json()["reference_value"] == 20
    heading, line = table([row]).splitlines()
    assert line.startswith("name  10 MB/s") and heading.index("ratio") == line.index("0.500")


@pytest.mark.parametrize(
    ("value", "text"), [(0.1234, "0.123"), (12.34, "12.3"), (1234.5, "1234"), (9.44e6, "9.44e+06")]
)
def test_figures(value: float, text: str) -> None:
    assert figures(value) == text


def test_flops_of_the_vit() -> None:
    """The formula against PyTorch's counter where that sees the attention, and against the published figure."""
    vit = ViT((24, 48), (4, 4), 5, 5, embed_dim=48, depth=2, heads=2)
    with sdpa_kernel(SDPBackend.MATH):
        counted = counted_flops(vit, torch.randn(2, 5, 24, 48, requires_grad=True))
    assert vit_flops(vit, 5, 2) == pytest.approx(counted, rel=0.02)
    with torch.device("meta"):
        published = ViT((360, 720), (8, 8), 20, 20)
    assert vit_flops(published, 20, 1) == pytest.approx(1.447e12, rel=1e-3)
