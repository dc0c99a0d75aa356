"""Checks of the diagnosis on a GPU: peaks, profiles, verdicts, memory and telemetry."""

from __future__ import annotations

import os
import pickle
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from bench import loading
from bench.cases import Case, sizes
from bench.gpu_kernels import BEST, MAX_ROWS, _short, host_and_device, kind_of
from bench.gpu_machine import COPY, PRODUCT, is_h200
from bench.gpu_timings import WORKERS, Data, data
from bench.tasks import Bench, Skip, Task, Values
from bench.watching import watched_and_alone
from dlscale.config.run import Run, run_class
from dlscale.core import registry
from dlscale.core import telemetry as record
from dlscale.data.store import Field
from dlscale.extensions.health import gpm
from dlscale.extensions.health.training import HealthRecorder
from dlscale.extensions.memory import prediction
from dlscale.extensions.profile.profile import measure as profiled
from dlscale.measure import throughput
from dlscale.measure.profilers import Activity, RangeTime, TopEntry
from dlscale.measure.roofline import measure_peaks
from dlscale.parallel.records import Memory
from dlscale.parallel.world import World
from dlscale.report.evidence import Evidence
from dlscale.report.verdict import verdict
from dlscale.train.build import open_session
from dlscale.train.memory import FakeStep
from dlscale.train.precision import set_matmul_precision
from tests.raw_files import manifest_of

ROOT = Path(__file__).resolve().parents[1]

# --- peaks -------------------------------------------------------------------------------------------------------

#: Upper bounds for an H200 from the data sheet: dense matrix products, TFLOP/s; then memory, TB/s.
DATASHEET = {"fp32": 67, "tf32": 495, "bf16": 989, "fp16": 989}
DATASHEET_TB = 4.8


def peaks(bench: Bench, precision: str) -> Values:
    """Measure the peaks that MFU and rooflines use; for bf16, also return ratios to the rates of `gpu_machine`."""
    set_matmul_precision(precision)
    found = measure_peaks(precision, bench.device)
    rates: Values = {"TFLOP/s": found.flops / 1e12, "TB/s": found.bytes_per_second / 1e12}
    rates["µs to call an operator"] = 1e6 * (found.operator_seconds or 0)
    limits = {"TFLOP/s": DATASHEET[precision], "TB/s": DATASHEET_TB}
    if is_h200(bench) and any(rates[name] > limit for name, limit in limits.items()):
        raise AssertionError(f"measured peaks {rates} exceed the data sheet's {limits}")
    if precision == "bf16" and PRODUCT in bench.found:
        rates["product / machine's"] = rates["TFLOP/s"] / bench.found[PRODUCT]["TFLOP/s"]
        rates["copy / machine's"] = rates["TB/s"] / bench.found[COPY]["TB/s"]
    return rates


# --- runs, explained ---------------------------------------------------------------------------------------------

#: Activity that tables leave out, because rows of kind `gap` have the same times.
IDLE = {"idle_seconds"}
STREAMED = {"loader": {"kind": "direct", "workers": WORKERS, "resident": "never"}}


def explained(bench: Bench, run: Run, manifest: Path) -> tuple[Evidence, list[TopEntry], Values]:
    """Profile a run, then measure its throughput, as the stages do.

    Return the evidence for a verdict, the profile's longest entries, and host and device times. Profile and throughput
    use one session, so the model is compiled once; other rows measure compile times.
    """
    folder = Path(tempfile.mkdtemp(dir=bench.folder))
    world, found = World(device=bench.device), {}
    if "nsys" in run.profile.tools:
        from dlscale.extensions.nsys import nsys

        words = run.model_dump_json(), str(manifest), world, None, bench.device.type, folder
        found["nsys"] = nsys.profile_apart(*words)
    session = open_session(run, manifest, world)
    seen, rows = profiled(run.profile, session, folder, found)
    with patch.object(throughput, "compilation", lambda *words: {}):
        rates = throughput.measure(run.throughput, session)
    batch = _batch(session)
    times = host_and_device(bench, partial(session.step, *batch), 2 if bench.quick else 10)
    return Evidence(run.model_dump(mode="json"), rates, seen), rows, times


def _batch(session: Any) -> tuple[torch.Tensor, torch.Tensor]:
    loader = session.loader("train")
    try:
        x, y = next(loader.epoch(0))
        return x.clone(), y.clone()
    finally:
        loader.close()


def of_study(bench: Bench, source: Data, over: dict[str, Any], tool: str = "torch") -> Values:
    """Profile and judge a run of a study at full size."""
    if tool == "nsys" and not shutil.which(os.environ.get("NSYS") or "nsys"):
        raise Skip("nsys is missing: set NSYS to its path")
    trials = {"warmup": 1, "trials": 2, "batches": 2 if bench.quick else 15}
    window = {"tools": [tool], "skip": 8, "steps": 3 if bench.quick else 10}
    run = source.case.run(**{"throughput": trials, "profile": window, **over})
    return values_of(*explained(bench, run, source.manifest()))


def values_of(evidence: Evidence, rows: list[TopEntry], times: Values) -> Values:
    """Return a run's figures, then its tables, with the verdict last."""
    rates, seen = evidence.throughput, evidence.profile
    assert rates and seen and rates.work and rates.peaks and rates.work.bytes
    activity, judged = evidence.activity, verdict(evidence)
    found: Values = {mode: evidence.rate(mode) for mode in ("IO", "SYNTHETIC", "FULL")}
    for mode in ("SYNTHETIC", "FULL"):
        found |= {f"MFU {mode}": rates.mfu(mode), f"MBU {mode}": rates.mbu(mode)}
    step = evidence.step_seconds or 0.0
    arithmetic, moving = rates.peaks.flops / rates.work.flops, rates.peaks.bytes_per_second / rates.work.bytes
    found |= {
        "GFLOP/sample": rates.work.flops / 1e9,
        "MB/sample": rates.work.bytes / 1e6,
        "FLOP/byte": rates.work.flops / rates.work.bytes,
        "ridge FLOP/byte": rates.peaks.flops / rates.peaks.bytes_per_second,
        "peak TFLOP/s": rates.peaks.flops / 1e12,
        "peak TB/s": rates.peaks.bytes_per_second / 1e12,
        "roof samples/s": min(arithmetic, moving),
        "ms/step": 1e3 * step,
        **times,
    }
    for tool in seen.tools:
        if tool.problem:
            raise AssertionError(f"{tool.name}: {tool.problem}")
        found[f"{tool.name} ms/step"] = 1e3 * (tool.seconds_per_step or 0.0)
        found |= {f"{tool.name} ranges": _ranges(tool.ranges), f"{tool.name} activity": _activity(tool.activity)}
    found["device busy"] = activity.device_busy if activity.device_busy is not None else ""
    found["bound by"] = judged.bound.what if judged.bound else ""
    found["causes"] = ", ".join(each.cause for each in judged.findings) or "none"
    found |= {
        "kinds": _kinds(rows),
        "kernels": _table(rows, ("kernel", "operator")),
        "rest": _table(rows, ("copy", "gap")),
    }
    if seen.memory:
        found["peak memory, measured / predicted"] = (seen.memory.peak or 0) / (seen.memory.predicted.peak or 1)
        found["memory"] = _memory(seen.memory)
    lines: list[tuple[str, float | str | None, str]] = [(each.what, each.share, each.why) for each in judged.findings]
    lines += [("bound by", "", judged.bound.why)] if judged.bound else []
    lines += [("limit", "", judged.limit), ("try next", "", judged.todo)]
    found["verdict"] = [{"verdict": what, "share": share, "why": why} for what, share, why in lines]
    return found


def _ranges(ranges: dict[str, RangeTime]) -> list[Values]:
    return [
        {
            "range": name,
            "host ms/step": 1e3 * time.seconds,
            "± ms": 1e3 * time.std,
            "device ms/step": "" if time.device_seconds is None else 1e3 * time.device_seconds,
        }
        for name, time in ranges.items()
    ]


def _activity(activity: Activity) -> list[Values]:
    return [
        {"a step": name, "is": value} for name, value in activity.model_dump(exclude_none=True, exclude=IDLE).items()
    ]


def _kinds(rows: list[TopEntry]) -> list[Values]:
    """Return the time of the kernels by kind; on a CPU, the time of the operators."""
    kind = "kernel" if any(row.kind == "kernel" for row in rows) else "operator"
    times = defaultdict[str, float](float)
    for row in rows:
        if row.kind == kind:
            times[kind_of(row.name)] += row.seconds
    total = sum(times.values()) or 1.0
    ordered = sorted(times.items(), key=lambda item: -item[1])
    return [{"kind": name, "ms/step": 1e3 * seconds, "%": 100 * seconds / total} for name, seconds in ordered]


def _table(rows: Iterable[TopEntry], kinds: tuple[str, ...]) -> list[Values]:
    chosen = sorted((row for row in rows if row.kind in kinds), key=lambda row: -row.seconds)[:MAX_ROWS]
    return [
        {
            "kind": row.kind,
            "name": _short(row.name),
            "ms/step": 1e3 * row.seconds,
            "± ms": 1e3 * row.std,
            "calls/step": row.calls,
            "% of step": 100 * row.share,
            "note": row.note,
        }
        for row in chosen
    ]


def _memory(found: Memory) -> list[Values]:
    used, measured = found.predicted, found.measured
    fixed = used.parameters + used.optimizer
    rows = [
        ("set-up", used.parameters, measured.get("set-up")),  # without optimiser state, which exists only after a step
        ("forward", used.parameters + used.activations, measured.get("forward")),
        ("backward", used.parameters + used.gradients, measured.get("backward")),
        ("step", fixed + used.gradients, measured.get("step")),
        ("peak", used.peak, found.peak),
    ]
    return [
        {"after": stage, "predicted GB": (predicted or 0) / 1e9, "measured GB": (real or 0) / 1e9}
        for stage, predicted, real in rows
    ]


# --- memory ------------------------------------------------------------------------------------------------------


def predicted(bench: Bench, case: Case, over: dict[str, Any]) -> Values:
    """Compare the predicted memory of a step with the allocator's peak.

    The values must agree within 10 % or 32 MiB. They cannot agree exactly: libraries also allocate workspaces.
    """
    bench.need_cuda()
    run = case.run(**over)
    fake = FakeStep(run, partial(case.network, run), case.loss(), bench.device)
    x, y = (torch.empty(case.batch_size, *shape, device="meta") for shape in case.shapes)
    used = prediction.of_step(fake, x, y)
    step, batch = case.step(bench.device, **over), case.batch(bench.device)
    step(*batch)
    torch.cuda.reset_peak_memory_stats(bench.device)
    step(*batch)
    found = {name: bytes_ / 1e9 for name, bytes_ in used.model_dump().items()}
    real = torch.cuda.max_memory_allocated(bench.device)
    assert used.peak
    off = real / used.peak
    if not (0.9 <= off <= 1.1 or abs(real - used.peak) < 2**25):
        raise AssertionError(f"peak {real / 1e9:.3f} GB is {off:.3f} x the prediction, expected 0.9 to 1.1: {found}")
    return {**found, "measured peak": real / 1e9, "measured / predicted": off}


def snapshot(bench: Bench) -> Values:
    """Write a snapshot of the allocator, as after an out-of-memory error; its blocks must add up to the used memory."""
    bench.need_cuda()
    recorder = SimpleNamespace(_folder=bench.folder, _world=World(device=bench.device))
    held = [torch.empty(size, dtype=torch.uint8, device=bench.device) for size in (2**9, 2**20, 2**28)]
    used, written = torch.cuda.memory_allocated(bench.device), HealthRecorder.write_snapshot(recorder)  # type: ignore[arg-type]
    state = pickle.loads(Path(written).read_bytes())
    active = sum(
        block["size"]
        for segment in state["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    )
    if active != used:
        raise AssertionError(f"the snapshot has {active} bytes in use, the allocator {used}; expected equal numbers")
    return {"tensors": len(held), "segments": len(state["segments"]), "MB in use": active / 1e6}


# --- planted bottlenecks -----------------------------------------------------------------------------------------

STUDY = Path(__file__).with_name("bottlenecks") / "plant.py"
#: Clean run of the study in `bench/bottlenecks`. Its speed is limited by the GPU's large matrix products.
PLANT: dict[str, Any] = {
    "study": "plant",
    "dataset": "plant",
    "precision": "fp32",
    "batch_size": 2048,
    "model": {"kind": "dense", "depth": 16, "size": 4096},
    "loss": {"kind": "square"},
    "samples": {"kind": "rows"},
    "loader": {"kind": "torch", "workers": WORKERS},
    "optimizer": {"kind": "sgd", "lr": 1e-6, "momentum": 0.9},
    "training": {"epochs": 1},
    "throughput": {"warmup": 1, "trials": 3, "batches": 8, "seconds": 0},
    "profile": {"skip": 3, "steps": 6},
}
#: Settings of a quick run (bench.quick), which only checks that the benchmark works.
SMALL: dict[str, Any] = {"batch_size": 16, "throughput": {"warmup": 1, "trials": 2, "batches": 2, "seconds": 0}}


@dataclass(frozen=True)
class Planted:
    """Settings of a run of the study `plant`, and the cause that they plant; a clean run has no cause."""

    cause: str | None
    over: dict[str, Any] = field(default_factory=dict)
    width: int = 1024  #: Numbers in each row of the data.


PLANTS = {
    "clean": Planted(None),
    "tiny kernels": Planted("launches", {"batch_size": 8, "model": {"kind": "tiny", "depth": 200, "size": 16}}),
    "host sync": Planted("sync", {"batch_size": 256, "model": {"depth": 64, "size": 2048, "item": True}}),
    "pageable copies": Planted(
        "copies", {"batch_size": 512, "model": {"size": 2048}, "loader": {"pin_memory": False}}, width=2**16
    ),
    "one slow worker": Planted(
        "workers",
        {"batch_size": 64, "samples": {"work": 4e-3}, "loader": {"workers": 1}, "model": {"depth": 4, "size": 1024}},
    ),
    "memory-bound": Planted("memory", {"batch_size": 256, "model": {"kind": "wide", "depth": 4, "size": 1024}}),
}


def plant(bench: Bench, planted: Planted) -> Values:
    """Judge a run with a planted bottleneck; on a GPU, return whether the verdict names the bottleneck.

    A clean run passes if the verdict finds no cause. Additional causes of a planted run are listed, but do not count.
    """
    registry.add("plant", STUDY)
    raw = dict(PLANT)
    for over in (planted.over, SMALL if bench.quick else {}):
        raw |= {key: {**raw[key], **value} if isinstance(value, dict) else value for key, value in over.items()}
    if bench.quick:
        raw["model"] |= {"depth": 2, "size": min(raw["model"]["size"], 64)}
        raw["loader"] |= {"workers": 1}
    run = run_class("plant").model_validate(raw)
    evidence, _, times = explained(bench, run, rows_on_disk(bench, 64 if bench.quick else 4096, planted.width))
    found = verdict(evidence)
    causes = [each.cause for each in found.findings]
    values: Values = {"planted": planted.cause or "nothing", "found": ", ".join(causes) or "nothing"}
    if bench.cuda:
        values["named"] = int(planted.cause in causes if planted.cause else not causes)
    values |= {mode: evidence.rate(mode) for mode in ("IO", "SYNTHETIC", "FULL")} | times
    values |= evidence.activity.model_dump(exclude_none=True, exclude=IDLE)
    values["why"] = [{"cause": each.cause, "share": each.share, "why": each.why} for each in found.findings]
    return values


def rows_on_disk(bench: Bench, rows: int, width: int) -> Path:
    """Return the manifest of random rows, listed 64 times for long epochs."""
    folder = bench.folder / f"rows-{width}"
    manifest = folder / "manifest.json"
    if not manifest.exists():
        folder.mkdir()
        shapes = {"x": (rows, width), "y": (rows,)}
        fields = [Field(name, (name,), ("1",), shape, None) for name, shape in shapes.items()]
        loading.write(folder / "rows.h5", fields)
        splits = {"train": [("rows.h5", rows)] * 64}
        manifest_of(folder, "plant", fields, splits, mean=[0.0], std=[1.0]).write(manifest)
    return manifest


# --- telemetry ---------------------------------------------------------------------------------------------------


def telemetry(bench: Bench, case: Case) -> Values:
    """Compare a training's speed with telemetry running and stopped; on a GPU, compare joules with watts × time."""
    import pynvml  # noqa: F401 - telemetry of a GPU needs it

    step, file = case.step(bench.device, **BEST[case.study]), bench.folder / "seen.csv"
    action = partial(step, *case.delivered(step))
    seconds = bench.seconds(action, 2 if bench.quick else 10)
    count = max(1, round((0.2 if bench.quick else 1.5) / seconds))

    def steps() -> float:
        return case.batch_size / bench.seconds_of(action, count)

    turns = 2 if bench.quick else 6
    found, cost = watched_and_alone(steps, turns, file, gpus=int(bench.cuda))
    ratios = [a / b for a, b in zip(found["watched"], found["alone"], strict=True)]
    rows = record.read(file)
    values: Values = {
        "samples/s, watched": statistics.median(found["watched"]),
        "samples/s, alone": statistics.median(found["alone"]),
        "watched / alone": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        **cost,
        "telemetry samples": len(rows),
    }
    return values | (_of_gpu(bench, rows) if bench.cuda else {})


def _of_gpu(bench: Bench, rows: list[record.Sample]) -> Values:
    """Return telemetry's means for the GPU; raise if energy counter and power × time differ by 30 %."""
    summary = record.summary(rows)
    used = record.energy([rows])
    powers = [[replace(row, gpus=tuple(replace(gpu, joules=None) for gpu in row.gpus)) for row in rows]]
    by_power = record.energy(powers)
    if not used or not by_power or not 0.7 < used / by_power < 1.3:
        raise AssertionError(f"{used} J by the counter, {by_power} J by power x time; expected a ratio of 0.7 to 1.3")
    means = {name: summary.means.get(f"gpu0_{name}", "") for name in ("utilization", "watts", "sm_mhz", "celsius")}
    throttled = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in summary.throttle_reasons.items())
    return {**means, "J": used, "J / (W × s)": used / by_power, "throttled": throttled or "no"}


def units(bench: Bench) -> Values:
    """Return the activity of the GPU's units (GPM counters) during large matrix products, which use tensor cores."""
    bench.need_cuda()
    import pynvml

    pynvml.nvmlInit()
    activity = gpm.Activity(pynvml, pynvml.nvmlDeviceGetHandleByIndex(0))
    a, b = (torch.randn(8192, 8192, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    bench.seconds_of(partial(torch.mm, a, b), 500)
    if found := activity():
        return {**found}
    raise Skip("the card or its driver has no GPM counters, which Hopper and newer cards have")


# --- the tests that need a GPU ---------------------------------------------------------------------------------

TESTS = ("test_telemetry", "test_memory", "test_rungs", "test_loaders")


def marked(bench: Bench) -> Values:
    """Run the tests marked `gpu`; skip them if pytest or their imports are missing."""
    import pytest  # noqa: F401

    files = [str(ROOT / f"tests/{name}.py") for name in TESTS]
    words = ["-q", "-c", os.devnull, "--rootdir", str(ROOT), "--import-mode=importlib", "-p", "no:cacheprovider"]
    words += ["-W", "ignore::pytest.PytestUnknownMarkWarning", "-m", "gpu"]
    command = [sys.executable, "-m", "pytest", *words, *files]
    done = subprocess.run(command, cwd=bench.folder, capture_output=True, text=True, timeout=120)
    lines = done.stdout.strip().splitlines()
    if missing := [line.split()[-1] for line in lines if "ModuleNotFoundError" in line]:
        raise Skip(f"packages that the tests need are missing: {', '.join(dict.fromkeys(missing))}")
    if done.returncode:
        raise AssertionError(" ".join([*lines[-12:], done.stderr[-300:]]))
    return {"tests": lines[-1]}


# --- all -------------------------------------------------------------------------------------------------------


def units_and_memory(bench: Bench) -> list[Task]:
    """Return the checks of peaks, GPM counters and the allocator's snapshot, which take seconds."""
    targets = (
        {"TFLOP/s": 700.0, "TB/s": 4.0, "product / machine's": 0.9, "copy / machine's": 0.9} if is_h200(bench) else {}
    )
    found = [
        Task("peaks", name, 3, partial(peaks, bench, name), targets if name == "bf16" else {}) for name in DATASHEET
    ]
    return [
        *found,
        Task("GPM counters", "bf16 matrix product", 3, partial(units, bench), {"tensor_active": 0.5}),
        Task("memory", "snapshot", 5, partial(snapshot, bench)),
    ]


def tasks(bench: Bench) -> list[Task]:
    """Return the checks of the diagnosis, the most valuable first."""
    unet, vit, _ = sizes(bench.quick)
    boxes, years = data(bench)
    studies = (("U-Net 64³", boxes), ("ViT-384", years))
    found = [
        Task(f"explain {label}", "eager", 30, partial(of_study, bench, source, {**BEST[source.case.study], **STREAMED}))
        for label, source in studies
    ]
    found += [
        Task("planted", name, 20 if planted.width > 1024 else 12, partial(plant, bench, planted), {"named": 1.0})
        for name, planted in PLANTS.items()
    ]
    free = {"watched / alone": 0.99} if bench.cuda else {}
    found += [Task("telemetry", "U-Net 64³", 30, partial(telemetry, bench, unet), free)]
    bf16: dict[str, Any] = {"precision": "bf16", "optimizer": {"fused": True}}
    found += [
        Task("memory", f"{label}, bf16", 60 if case is unet else 8, partial(predicted, bench, case, bf16))
        for label, case in (("U-Net 64³", unet), ("ViT-384", vit))
    ]
    checkpointed = {**bf16, "activation_checkpointing": True}
    found += [Task("memory", "ViT-384, checkpointing", 8, partial(predicted, bench, vit, checkpointed))]
    nsys = partial(of_study, bench, boxes, {**BEST["cosmo_unet"], **STREAMED}, "nsys")
    found += [Task("explain U-Net 64³", "eager, nsys", 60, nsys)]
    return [*found, Task("tests", "marked gpu", 60, partial(marked, bench))]
