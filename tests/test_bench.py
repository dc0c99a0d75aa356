"""The benchmarks run, and count right; how fast anything is, is no test."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from dlscale.models.unet3d import UNet3D
from dlscale.models.vit import ViT
from tests.bench import training
from tests.bench.cases import Case
from tests.bench.compute import counted_flops, unet_flops, vit_flops
from tests.bench.gpu_checks import UNET, Errors, rung_equals_plain
from tests.bench.measure import Row, figures, in_turns, summary, table
from tests.bench.tasks import Bench, Skip, Task, closing_words, perform_all
from tests.conftest import ROOT
from tests.waiting import PATIENCE


def dali() -> bool:
    """Whether DALI is installed: it has rows of its own."""
    try:
        import nvidia.dali  # noqa: F401
    except ImportError:
        return False
    return True


@pytest.mark.slow
def test_benchmarks_run(tmp_path: Path) -> None:
    """All but those of the workflow, whose commands the workflow's own tests run."""
    groups = ["crops", "pairs", "steps", "full", "rungs", "models", "preprocess"]
    command = [sys.executable, str(ROOT / "tests/bench/run.py"), "--quick", "--json", str(tmp_path / "out.json")]
    done = subprocess.run([*command, *groups], cwd=tmp_path, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "out.json").read_text())
    assert results["quick"] is True
    assert {"time", "cores", "load", "device", "git", "packages"} == set(results["machine"])
    more = 3 * dali()  # its own operators, and the Numba one against the floor and against the published form
    compiles = "left out: ViT, compile" not in done.stdout
    # Published with 0, 1, 2 workers; reads; each layout against the floor, one of them against the best; each cold.
    crops, pairs = 3 + 1 + 3 + 1 + more + 3, 3 + 1 + 2 + 1 + more + 2
    # Of each of two models: the loop without hooks, the trainer, the published step.
    assert len(results["rows"]) == crops + pairs + 6 + 2 + (8 + compiles) + 2 + 2
    keys = {"name", "unit", "values", "value", "reference", "references", "reference_value", "ratio", "counted"}
    for row in results["rows"]:
        assert set(row) == keys | {"target"}
        assert row["value"] > 0 and row["reference_value"] > 0
        assert row["name"] in done.stdout and row["reference"] in done.stdout
    targets = sum(row["target"] is not None for row in results["rows"])
    assert f"\n{targets} targets: " in done.stdout
    counted = {row["name"]: row["counted"] for row in results["rows"]}
    crop, pair = 64**3 * 9, 2 * 20 * 360 * 720
    assert counted["64^3 crops, torch loader, published layout, 0 workers"]["bytes delivered"] == 4 * crop
    assert counted["64^3 crops, direct, fp16 channels last"]["stored"] == 2 * crop
    assert counted["ERA5 pairs, torch loader, published layout, 0 workers"]["stored"] == 4 * pair
    assert counted["ERA5 pairs, direct, fp16"]["stored"] == 2 * pair
    assert counted["FULL, ViT 96×192, direct"]["stored bytes/sample"] == 2 * 2 * 20 * 96 * 192
    assert counted["preprocess, downsample 2"]["bytes read"] > 128**3 * 9 * 4
    assert list(tmp_path.iterdir()) == [tmp_path / "out.json"]


@pytest.mark.slow
def test_the_benchmarks_of_a_gpu_run_on_a_processor(tmp_path: Path) -> None:
    """All checks that a processor can make hold; what needs CUDA says so."""
    out = tmp_path / "out.json"
    command = [sys.executable, str(ROOT / "tests/bench/gpu.py"), "--device", "cpu", "--quick", "--json", str(out)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["finished"] is True and found["quick"] is True and found["device"] == "cpu"
    results = {f"{result['group']}: {result['name']}": result for result in found["results"]}
    assert len(results) == len(found["results"]) == len(done.stdout.splitlines()) - 2
    for name, result in results.items():
        assert name in done.stdout
        assert set(result) == {"group", "name", "status", "seconds", "values", "targets", "why", "trace"}
        assert bool(result["values"]) == (result["status"] == "ok") == (not result["why"])
        if result["status"] == "skipped":
            assert result["why"] == "needs CUDA" or "cannot compute" in result["why"]
    for name in ("check: samples, resident", "check: bf16", "ViT-384: fused", "U-Net 64³: fp16", "crops: streamed"):
        assert results[name]["status"] == "ok"
    for name in ("check: CUDA graph, Adam", "check: no step waits", "ViT-384: compile", "ViT-1024: all", "pairs: dali"):
        assert results[name]["why"] == "needs CUDA"
    assert results["U-Net 64³: fused"]["values"]["FULL resident"] > 0
    assert list(tmp_path.iterdir()) == [out]


def test_tasks_stand_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that fails, one that cannot be done here and one without time lose no other; what is done is on disk."""
    seen = []

    def do(values: dict[str, float]) -> Callable[[], dict[str, float]]:
        def call() -> dict[str, float]:
            seen.append(json.loads((tmp_path / "out.json").read_text()))
            return values

        return call

    def fail() -> dict[str, float]:
        raise ZeroDivisionError("never\nmind")

    def skip() -> dict[str, float]:
        raise Skip("needs luck")

    given = [
        Task("a", "plain", 1, do({"x": 1.0})),
        Task("a", "fails", 1, fail),
        Task("a", "skips", 1, skip),
        Task("b", "long", 1000, do({"x": 1.0})),
        Task("b", "reached", 1, do({"x": 2.0, "y": 0.0}), {"x": 2.0}),
        Task("b", "short", 1, do({"x": 1.9}), {"x": 2.0}),
        Task("b", "unknown here", 1, do({"y": 1.9}), {"x": 2.0}),
    ]
    cleaned: list[int] = []
    results = perform_all(given, 100, {"quick": False}, tmp_path / "out.json", lambda: cleaned.append(1))
    assert [result.status for result in results] == ["ok", "FAILED", "skipped", "skipped", "pass", "SHORT", "ok"]
    assert [result.why for result in results][1:3] == ["ZeroDivisionError: never mind", "needs luck"]
    assert results[3].why == "it takes some 1000 s, and 100 s are left"
    assert "ZeroDivisionError" in results[1].trace
    assert [len(state["results"]) for state in seen] == [0, 4, 5, 6]
    assert not any(state["finished"] for state in seen)
    assert json.loads((tmp_path / "out.json").read_text())["finished"] and len(cleaned) == 7
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7 and lines[5].startswith("SHORT   b: short") and lines[5].endswith("x 1.9, [x ≥ 2]")
    assert closing_words(results) == "7 rows, 2 ok, 1 pass, 1 SHORT (b: short), 1 FAILED (a: fails), 2 skipped"


def test_a_check_fails_where_it_should() -> None:
    """A rung that is not the plain step, an error that is not a number."""
    errors = Errors()
    errors.hold("x", 0.1, 0.2)
    errors.hold("x", 0.05, 0.2)
    assert errors == {"x": 0.1}
    for error in (0.3, math.nan):
        with pytest.raises(AssertionError, match="x is off by"):
            errors.hold("x", error, 0.2)
    bench = Bench(torch.device("cpu"), True, Path())
    wrong: Any = {"model": {"init_std": 0.1}}
    with pytest.raises(AssertionError, match=r"cosmo_unet, batch of 6, .* is off by"):
        rung_equals_plain(bench, (wrong, (1e-5, 1e-4), (UNET,)))


@pytest.mark.parametrize("case", [training.UNET, training.VIT], ids=str)
def test_the_published_form_is_the_same_training(case: Case) -> None:
    """Three models from the same weights: predictions, losses and, after some steps, weights."""
    x, y = case.batch(torch.device("cpu"))
    theirs, published_step = training.published_loop(case)
    bare, bare_step = training.bare_loop(case)
    step = case.step(torch.device("cpu"))
    assert torch.allclose(theirs(x), step.predict(x), atol=1e-6) and torch.allclose(bare(x), step.predict(x))
    for _ in range(3):
        step.set_learning_rate(1e-4)
        assert float(published_step(x, y)) == pytest.approx(float(step(x, y)), rel=1e-5)
    for a, b in zip(theirs.parameters(), step.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=2e-5)
    first = float(bare_step(x, y))
    assert float(bare_step(x, y)) < first


def test_unknown_group_names_the_known(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tests/bench/run.py"), "nonsense"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
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
    assert row.verdict == "" and row.reached


def test_targets_are_ratios_and_are_summed_up() -> None:
    def row(name: str, value: float, target: float | None) -> Row:
        return Row(name, "MB/s", [value], "floor", [2.0], {}, target)

    rows = [row("plain", 1, None), row("even", 2, 1.0), row("less", 1.9, 1.0), row("more", 3, 1.6)]
    assert [each.verdict for each in rows] == ["", "pass (≥ 1)", "SHORT (≥ 1)", "SHORT (≥ 1.6)"]
    assert table(rows[2:3]).splitlines()[1].endswith("0.950  SHORT (≥ 1)")
    assert summary(rows) == "3 targets: 1 pass, 2 short: less; more"
    assert summary(rows[:2]) == "1 targets: 1 pass, 0 short"


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
    assert Case("era5_vit", {}, (360, 720), 1).flops() == pytest.approx(1.447e12, rel=1e-3)
    assert Case("era5_vit", {"embed_dim": 1024}, (360, 720), 1).flops() == pytest.approx(6.15e12, rel=1e-3)


def test_flops_of_the_unet() -> None:
    """The formula against PyTorch's counter, with and without padded channels, and against the published figure."""
    unet = UNet3D(4, 5, (8, 12, 16))
    x = torch.randn(2, 4, 16, 16, 32, requires_grad=True)
    assert 2 * unet_flops(unet, (16, 16, 32)) == counted_flops(unet, x)
    assert unet_flops(UNet3D(4, 5, (8, 12, 16), pad_channels=8), (16, 16, 32)) == unet_flops(unet, (16, 16, 32))
    assert Case("cosmo_unet", {}, (64, 64, 64), 1).flops() == pytest.approx(81.5e9, rel=1e-3)
