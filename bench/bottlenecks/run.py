"""Check that the verdict names planted bottlenecks, and finds no bottleneck in clean runs.

`python bench/bottlenecks/run.py [--clean N] [--json FILE] [CASE ...]` measures real runs of the study in plant.py. As
in the workflow, each stage runs in its own process. The script prints planted causes and found causes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "workflow_scripts")]

from dlscale.config import resolve  # noqa: E402
from dlscale.core import registry  # noqa: E402
from dlscale.measure.profilers import Profile  # noqa: E402
from dlscale.measure.records import Throughput  # noqa: E402
from dlscale.report.evidence import Evidence  # noqa: E402
from dlscale.report.verdict import Verdict, verdict  # noqa: E402

STUDY = Path(__file__).with_name("plant.py")


@dataclass(frozen=True)
class Case:
    """Changed settings of a run, and the cause that they plant; a clean run has no cause."""

    cause: str | None
    changes: dict[str, Any] = field(default_factory=dict)
    profiled: bool = False
    ranks: int = 1
    neighbours: int = 0  #: Number of other programs; each keeps one core busy.


CASES = {
    "slow disk": Case("storage", {"samples": {"wait": 4e-3}, "model": {"size": 512}, "batch_size": 64}),
    "one worker": Case("workers", {"samples": {"work": 4e-3}, "model": {"size": 512}, "batch_size": 64}),
    "loader's work": Case(
        "loader", {"samples": {"work": 8e-3}, "loader": {"workers": 2}, "model": {"size": 512}, "batch_size": 64}
    ),
    "no worker": Case("overlap", {"samples": {"work": 3e-4}, "loader": {"workers": 0}, "batch_size": 64}),
    "tiny kernels": Case("launches", {"model": {"kind": "tiny", "depth": 200, "size": 16}, "batch_size": 8}),
    "host sync": Case("sync", {"model": {"item": True}}, profiled=True),
    "memory-bound": Case("memory", {"model": {"kind": "wide", "depth": 8}, "batch_size": 16}),
    "straggler": Case("straggler", {"model": {"slow_rank": 1}}, ranks=2),
    "communication": Case(
        "communication", {"model": {"kind": "heavy", "size": 4096, "depth": 2}, "batch_size": 16}, ranks=2
    ),
    "busy neighbour": Case("neighbour", neighbours=2),
}
#: Settings of clean runs, in which the verdict must find no bottleneck.
CLEAN: tuple[dict[str, Any], ...] = (
    {},
    {"model": {"size": 768}},
    {"model": {"depth": 8}},
    {"loader": {"workers": 2}},
    {"batch_size": 512},
)


def measure(case: Case, folder: Path, data: Path) -> Verdict:
    """Measure the run of a case; return its verdict."""
    settings = resolve.merge({"geometry": {"gpus_per_node": case.ranks}}, case.changes)
    raw: dict[str, Any] = {
        "studies": {"plant": str(STUDY)},
        "targets": ["p"],
        "plans": {"p": {"study": "plant", "settings": settings, "runs": {"r": {}}}},
    }
    run = resolve.load(raw).plans["p"]["r"].run
    stages = {"throughput": folder / "throughput.json", **({"profile": folder / "profile"} if case.profiled else {})}
    with busy(case.neighbours):
        for stage, out in stages.items():
            words = ["--config", json.dumps(run.slice(stage)), "--manifest", str(data / "manifest.json")]
            call(stage, *words, "--out", str(out), "--log", str(folder / f"{stage}.log"), ranks=case.ranks)
    return verdict(
        Evidence(
            run.model_dump(mode="json"),
            Throughput.read(folder / "throughput.json"),
            Profile.read(folder / "profile/profile.json") if case.profiled else None,
        )
    )


def call(stage: str, *words: str, ranks: int = 1) -> None:
    """Run a stage in `ranks` processes."""
    start = ["-m", "dlscale"]
    if ranks > 1:
        start = ["-m", "dlscale.launch.ranks", f"--nproc-per-node={ranks}", "-m", "dlscale"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "workflow_scripts")}
    study = [f"--study=plant={STUDY}"]
    done = subprocess.run([sys.executable, *start, *study, stage, *words], env=environment, check=False)
    if done.returncode:
        raise SystemExit(
            f"{stage} failed ({done.returncode}); see the messages above, or a log in the folder of {words[-1]}"
        )


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep `count` cores busy."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def dataset(folder: Path) -> Path:
    """Make the dataset with the workflow's stages; return its folder."""
    config = json.dumps({"kind": "plant"})
    for split in ("train", "valid"):
        piece, out = folder / f"{split}.piece.h5", folder / split / "rows.h5"
        call("preprocess", "--config", config, "--part", f"{split}/rows", "--out", str(piece))
        call("assemble", "--config", config, "--pieces", str(piece), "--out", str(out))
    paths = ["--manifest", str(folder / "manifest.json"), "--stats", str(folder / "stats")]
    call("describe", "--config", config, *paths)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"cases to run: {', '.join(CASES)} (default: all)")
    parser.add_argument("--clean", type=int, default=20, metavar="N", help="number of clean runs (default: 20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the results (default: none)")
    args = parser.parse_args()
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"unknown case: {', '.join(sorted(unknown))}")
    registry.add("plant", STUDY)
    todo = [(name, CASES[name]) for name in args.cases or CASES]
    todo += [(f"clean {number + 1}", Case(None, CLEAN[number % len(CLEAN)])) for number in range(args.clean)]
    rows, right, alarms = [], 0, 0
    with tempfile.TemporaryDirectory(prefix="dlscale-bottlenecks-") as place:
        data = dataset(Path(place, "data"))
        for number, (name, case) in enumerate(todo):
            folder, start = Path(place, str(number)), time.perf_counter()
            folder.mkdir()
            found = measure(case, folder, data)
            causes = [finding.cause for finding in found.findings]
            right += case.cause is not None and causes[:1] == [case.cause]
            alarms += case.cause is None and bool(causes)
            row = {"case": name, "planted": case.cause, "found": causes, "seconds": time.perf_counter() - start}
            rows.append({**row, "why": [finding.why for finding in found.findings], "limit": found.limit})
            print(
                f"{name:16} {case.cause or '-':14} -> {', '.join(causes) or '-'}   ({row['seconds']:.0f} s)", flush=True
            )
            for finding in found.findings:
                print(f"{'':34} {'' if finding.share is None else percent(finding.share)} {finding.why}")
    planted = sum(case.cause is not None for _, case in todo)
    print(f"\n{right} of {planted} bottlenecks named, {alarms} false alarms in {len(todo) - planted} clean runs")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


def percent(share: float) -> str:
    return f"{share:4.0%}"


if __name__ == "__main__":
    main()
