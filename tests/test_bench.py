"""The benchmarks run and count correctly. Their speed is not tested."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from zarr.core.buffer import Buffer, default_buffer_prototype
from zarr.storage import LocalStore

from bench import archives, packed, published, training
from bench.cases import Case
from bench.gpu_checks import UNET, Errors, rung_equals_plain
from bench.loading import cold
from bench.measure import Options, Row, in_turns, table
from bench.tasks import Bench, Skip, Task, closing_words, perform_all, read
from dlscale.train.step import set_learning_rate
from tests.conftest import ROOT
from tests.waiting import PATIENCE


@pytest.mark.slow
@pytest.mark.long
def test_benchmarks_run(tmp_path: Path) -> None:
    """All benchmarks run, except the benchmarks of the workflow, whose code other tests cover."""
    groups = [
        *("crops", "pairs", "archives", "images", "packs", "steps", "guards", "full", "rungs", "models"),
        *("digits", "ranks", "watching", "outside", "profilers", "preprocess"),
    ]
    command = [sys.executable, str(ROOT / "bench/run.py"), "--quick", "--json", str(tmp_path / "out.json")]
    done = subprocess.run([*command, *groups], cwd=tmp_path, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "out.json").read_text())
    assert results["quick"] is True
    assert {"cores", "load", "device", "git", "packages", "versions"} <= set(results["machine"])
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
    assert counted["training, ViT 96×192, direct"]["stored bytes/sample"] == 2 * 2 * 20 * 96 * 192
    assert counted["preprocess, downsample 2"]["bytes read"] > 128**3 * 9 * 4
    assert list(tmp_path.iterdir()) == [tmp_path / "out.json"]


def test_the_archive_has_the_values_of_the_published_layout(tmp_path: Path) -> None:
    paths, numbers = archives.write(tmp_path, 2), (np.float32(0.1), np.float32(1.5))
    ours = archives.Archive(paths["archive"], *numbers, 1)[0]
    theirs = published.Pairs(paths["published"], *numbers, 1)[0]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)) and not torch.equal(*ours)


def test_the_reader_on_a_gpu_reads_the_archives_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stand-ins of kvikio and nvCOMP read and decompress on the CPU. Without a package, the reader is left out."""
    zstd = importlib.import_module("numcodecs").Zstd()

    class Store(LocalStore):
        async def get(self, key: str, *_: Any) -> Buffer | None:
            return await super().get(key, default_buffer_prototype())

    class Codec:
        def __init__(self, **settings: str) -> None:
            assert settings == {"algorithm": "Zstd", "bitstream_kind": "raw"}

        def decode(self, chunks: list[Any]) -> list[Any]:
            return [np.frombuffer(zstd.decode(chunk), np.int8).copy() for chunk in chunks]

    stand_ins: dict[str, dict[str, Any]] = {
        "cupy": {},
        "kvikio": {},
        "kvikio.zarr": {"GDSStore": Store},
        "nvidia": {},
        "nvidia.nvcomp": {"Codec": Codec, "BitstreamKind": SimpleNamespace(RAW="raw"), "as_arrays": list},
    }
    for name, content in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))
    archive = archives.write(tmp_path, 3)["archive"]
    states = archives.gpu_reader(archive, tmp_path / "zstd.zarr", "cpu")
    assert torch.equal(states([2, 0]), torch.as_tensor(np.stack([archives.state(2), archives.state(0)])))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setitem(sys.modules, "nvidia.nvcomp", None)
    assert archives.gpu_rate(archive, tmp_path / "none.zarr", (), 1) == {}
    printed = capsys.readouterr().out
    assert printed.startswith("skipped: Zarr v3 with Zstd, decompressed on a GPU: ") and "nvidia.nvcomp" in printed


@pytest.mark.slow
def test_packs_are_compared_with_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "WORKERS", (0,))
    rows = packed.packs(Options(quick=True, folder=tmp_path, repetitions=1))
    compared = {(row.name, row.reference): [*row.values, *row.references] for row in rows}
    assert {("packs, torch", "decoding"), ("packs, direct", "torch")} <= set(compared)
    assert all(rate > 0 for rates in compared.values() for rate in rates)


@pytest.mark.slow
@pytest.mark.long
def test_the_benchmark_of_noise_runs(tmp_path: Path) -> None:
    """The benchmark of noise reports each number with its interval.

    Two tries with three small runs each are too short for a meaningful result.
    """
    small = {"model": {"depth": 4, "size": 64}, "throughput": {"trials": 2, "seconds": 0, "beside": 0.4, "error": 0.5}}
    words = ["--tries", "2", "--load", "0", "--threads", "1", "--set", json.dumps(small)]
    words += ["--json", str(tmp_path / "out.json")]
    command = [sys.executable, "-m", "bench.noise", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    found, _ = json.loads((tmp_path / "out.json").read_text())
    assert len(found["rounds"]) == 2 and min(found["rounds"]) >= 4 and found["load"] == 0
    assert all(math.isfinite(log) and error >= 0.015 for log, error in (found["copy"], found["slow"]))
    assert found["headline"] in ("first", "copy")
    assert re.search(
        r"^in all: copy found equal in \d of 2 tries, slow-down found in \d of 2$", done.stdout, re.MULTILINE
    )
    assert re.search(r"^gate: passed \d of 1 equal runs, failed \d of 1 slower runs$", done.stdout, re.MULTILINE)


@pytest.mark.long
def test_the_benchmarks_of_a_gpu_run_on_a_processor(tmp_path: Path) -> None:
    """All checks that work on a CPU pass; checks that need CUDA are skipped with this reason."""
    out, page = tmp_path / "out.json", tmp_path / "out.md"
    done = gpu("--seconds", "1000", "--json", str(out), "--markdown", str(page), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["finished"] is True and found["quick"] is True and found["device"] == "cpu"
    results = {f"{result['group']}: {result['name']}": result for result in found["results"]}
    assert len(results) == len(found["results"])
    for name, result in results.items():
        assert name in done.stdout
        keys = {"group", "name", "status", "seconds", "values", "targets", "why", "trace", "gpu"}
        assert set(result) == keys
        assert bool(result["values"]) == (result["status"] == "ok") == (not result["why"])
        if result["status"] == "skipped":
            known = (
                "needs CUDA",
                "cannot compute",
                "no such kernel",
                "only interpreted on a CPU",
                "nsys is missing",
            )
            assert any(reason in result["why"] for reason in known)
    for name in (
        *("check: samples, resident", "check: samples ahead, streamed", "check: bf16", "ViT-384: bf16"),
        *("U-Net 64³: bf16", "crops: streamed", "one rank, gloo: compile, bf16", "profile ViT-384: eager"),
        *("attention: flash", "decode: crops, operations, int32"),
        *("end to end: train, resume, throughput", "batch U-Net 64³: 4", "peaks: bf16", "explain ViT-384: eager"),
        *("explain U-Net 64³: eager", "planted: clean", "planted: pageable copies", "telemetry: U-Net 64³"),
    ):
        assert results[name]["status"] == "ok", results[name]
    for name in (
        *("check: CUDA graph, Adam", "check: no step waits", "ViT-384: compile", "ViT-1024: fp8", "crops: dali"),
        *("decode: pairs, operations, int64", "U-Net 64³: CUDA graph", "one rank, gloo: CUDA graph"),
        *("memory: snapshot", "memory: ViT-384, bf16", "GPM counters: bf16 matrix product"),
    ):
        assert results[name]["why"] == "needs CUDA"
    assert results["U-Net 64³: channels last"]["values"]["FULL resident"] > 0
    assert results["U-Net 64³: channels last"]["values"]["× rung before"] > 0
    whole = results["end to end: train, resume, throughput"]["values"]
    assert whole["last loss"] < whole["first loss"] and whole["resumed from step"] > 0 and whole["FULL"] > 0
    profile = results["profile U-Net 64³: eager"]["values"]
    assert 0 <= profile["idle %"] < 100 and profile["host ms"] > 0
    assert any("conv" in each["kernel"].lower() for each in profile["kernels"]), (
        "a convolution must be among the longest kernels"
    )
    run = results["explain U-Net 64³: eager"]["values"]
    assert 0 < run["MFU FULL"] < 1
    assert run["torch ranges"][0]["range"] == "step"
    assert {row["verdict"] for row in run["verdict"]} >= {"bound by", "limit", "try next"}
    assert [row["after"] for row in run["memory"]] == ["set-up", "forward", "backward", "step", "peak"]
    # In a short run on a CPU, loading can seem slower than training, and then the verdict names no cause.
    assert results["planted: host sync"]["values"]["items"] >= 1
    headings = [line for line in page.read_text().splitlines() if line.startswith("### ")]
    assert headings == [f"### {group}" for group in dict.fromkeys(result["group"] for result in found["results"])]
    assert sorted(tmp_path.iterdir()) == [out, page]


def test_the_benchmarks_of_a_gpu_fit_into_three_calls(tmp_path: Path) -> None:
    """The list begins with the compiled U-Net, and its seconds are at most those of three calls of eight minutes."""
    command = [sys.executable, str(ROOT / "bench/gpu.py"), "--list"]
    listed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=True)
    found = {row: float(seconds) for seconds, row in (line.split(" s  ") for line in listed.stdout.splitlines())}
    assert next(iter(found)) == "U-Net 64³: compile" and sum(found.values()) <= 3 * 480
    assert {"ViT-1024: fp8", "memory: snapshot", "GPM counters: bf16 matrix product"} < set(found)


def gpu(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the GPU benchmarks on a CPU."""
    command = [sys.executable, str(ROOT / "bench/gpu.py"), "--device", "cpu", "--quick", *words]
    known = {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=4 * PATIENCE, env=known)


def test_a_failed_task_loses_no_other_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If a task fails, is skipped or has no time left, no other result is lost; finished results are on disk."""
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
    assert [result.status for result in results] == ["ok", "FAILED", "skipped", "not run", "pass", "SHORT", "ok"]
    assert [result.why for result in results][1:3] == ["ZeroDivisionError: never mind", "needs luck"]
    assert "1000 s" in results[3].why and "100 s" in results[3].why
    assert "ZeroDivisionError" in results[1].trace
    assert [len(state["results"]) for state in seen] == [0, 4, 5, 6]
    assert not any(state["finished"] for state in seen)
    assert [state["doing"] for state in seen] == ["a: plain", "b: reached", "b: short", "b: unknown here"]
    assert json.loads((tmp_path / "out.json").read_text())["finished"] and len(cleaned) == 7
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7 and lines[5].startswith("SHORT   b: short") and lines[5].endswith("x 1.9, [x ≥ 2]")
    assert (
        closing_words(results)
        == "7 rows, 2 ok, 1 pass, 1 SHORT (b: short), 1 FAILED (a: fails), 1 skipped, 1 not run (b: long)"
    )
    again = read(tmp_path / "out.json")
    assert again == [result for result in results if result.status != "not run"]
    found: dict[str, Any] = {}
    more = perform_all(given[3:6], 2000, {}, None, lambda: None, again, found=found)
    assert [(r.label, r.status) for r in more][:3] == [("b: long", "ok"), ("b: reached", "pass"), ("b: short", "SHORT")]
    assert len(more) == 7 and found["b: reached"] == {"x": 2.0, "y": 0.0}, "earlier rows must be kept"


def test_each_check_detects_an_error() -> None:
    """A check fails if a rung differs from the plain step, or if an error is NaN."""
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
    """The tutorials' loop has dlscale's predictions, losses and weights; the bare loop has dlscale's predictions."""
    x, y = case.batch(torch.device("cpu"))
    theirs, published_step = training.published_loop(case)
    bare, bare_step = training.bare_loop(case)
    step = case.step(torch.device("cpu"))
    assert torch.allclose(theirs(x), step.predict(x), atol=1e-6) and torch.allclose(bare(x), step.predict(x))
    for _ in range(3):
        set_learning_rate(step.optimizer, 1e-4)
        assert float(published_step(x, y)) == pytest.approx(float(step(x, y)), rel=1e-5)
    for a, b in zip(theirs.parameters(), step.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=2e-5)
    first = float(bare_step(x, y))
    assert float(bare_step(x, y)) < first


def test_every_benchmark_imports_the_code_that_it_measures() -> None:
    """GPU benchmarks run rarely, so this test finds imports of names that dlscale no longer has."""
    for file in sorted((ROOT / "bench").glob("*.py")):
        importlib.import_module(f"bench.{file.stem}")


def test_contestants_take_turns() -> None:
    calls = []

    def contestant(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    found = in_turns(2, {name: lambda name=name: contestant(name) for name in "ab"})  # type: ignore[misc]
    assert calls == ["a", "b"] * 3  # the first call of each contestant is a warm-up
    assert found == {"a": [3.0, 5.0], "b": [4.0, 6.0]}


def test_ratios_compare_neighbouring_turns() -> None:
    """If a machine slows down tenfold, both medians change, but the ratio of neighbouring values does not."""
    row = Row("name", "MB/s", [100.0, 10.0, 1.0], "floor", [200.0, 20.0, 4.0], {"bytes": 2e6})
    assert row.ratio == 0.5
    assert row.to_json()["value"] == 10 and row.to_json()["reference_value"] == 20
    heading, line = table([row]).splitlines()
    assert line.startswith("name  10 MB/s") and heading.index("ratio") == line.index("0.500")
    assert row.verdict == "" and row.reached


def test_a_cold_row_that_reads_nothing_is_an_error(tmp_path: Path) -> None:
    """A timing of cold reads fails while the file is mapped, because a mapped file stays in the page cache."""
    path = tmp_path / "file"
    path.write_bytes(bytes(2**22))
    if subprocess.run(["stat", "-f", "-c", "%T", path], capture_output=True, text=True).stdout.strip() == "tmpfs":
        pytest.skip("a file system in memory reads nothing from a disk")

    class Whole:
        def epoch(self, number: int) -> list[tuple[bytes, None]]:
            return [(path.read_bytes()[:4], None)]

        def close(self) -> None:
            pass

    read: list[float] = []
    measure = cold(path, Whole, read)  # type: ignore[arg-type]
    mapped = np.memmap(path, np.uint8, "r")
    assert mapped.sum() == 0, "all pages must be in the page cache"
    with pytest.raises(RuntimeError, match="from the disk: the file is still mapped"):
        measure()
    del mapped
    assert measure() > 0 and read == [2**22 / 4]
