"""The benchmarks of dlscale itself: `make bench`, or `python bench/run.py [--quick] [--json FILE] [GROUP ...]`.

Each row is compared with a reference: most references are measured in turns with the row, others are fixed limits.
Compare ratios, not values, between machines and days. Some rows have a target ratio; a missed target is not a failure.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "workflow_scripts")]

from dlscale.core.machine import let_threads_wait  # noqa: E402

let_threads_wait()  # before any import loads OpenMP

import torch  # noqa: E402

from bench import (  # noqa: E402
    archives,
    compute,
    digits,
    images,
    loading,
    outside,
    packed,
    preprocessing,
    profilers,
    ranks,
    rungs,
    training,
    watching,
    workflow,
)
from bench.measure import Options, Row, summary, table  # noqa: E402
from dlscale.core.environment import environment  # noqa: E402
from dlscale.parallel.rendezvous import describe_device  # noqa: E402
from dlscale.parallel.world import World  # noqa: E402

GROUPS = {
    "crops": loading.crops,
    "pairs": loading.pairs,
    "archives": archives.archives,
    "images": images.images,
    "packs": packed.packs,
    "steps": training.steps,
    "guards": training.guards,
    "full": training.full,
    "rungs": rungs.rungs,
    "models": compute.models,
    "digits": digits.digits,
    "ranks": ranks.ranks,
    "watching": watching.watching,
    "outside": outside.outside,
    "profilers": profilers.profilers,
    "preprocess": lambda options: preprocessing.volumes(options) + preprocessing.states(options),
    "edit": workflow.edit_loop,
}


def machine() -> dict[str, Any]:
    """Return facts about the machine and its software."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "device": describe_device(World()).model_dump(),
        **environment().model_dump(mode="json"),
    }


def main() -> None:
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # exit normally, so that temporary data are removed
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "groups", nargs="*", metavar="GROUP", help=f"groups to measure: {', '.join(GROUPS)} (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes and two repetitions, to try the program")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the results (default: none)")
    args = parser.parse_args()
    if unknown := set(args.groups) - set(GROUPS):
        parser.error(f"unknown group: {', '.join(sorted(unknown))}; choose from: {', '.join(GROUPS)}")
    logging.disable(logging.INFO)  # hide the log lines of the stages
    facts = machine()
    print(f"{facts['device']['name']}, {facts['cores']} CPUs, load {facts['load']:.1f}; PyTorch {torch.__version__}")
    if facts["load"] > 0.5 * facts["cores"]:
        print("Other processes are running: values are too low, and ratios are less certain.")
    rows: list[Row] = []
    for group in args.groups or GROUPS:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="dlscale-bench-") as folder:
            found = GROUPS[group](Options(args.quick, Path(folder), repetitions=2 if args.quick else 5))
        print(f"\n{group} ({time.perf_counter() - start:.0f} s)\n{table(found)}", flush=True)
        rows += found
    print(f"\n{summary(rows)}")
    if args.json:
        results = {"machine": facts, "quick": args.quick, "rows": [row.to_json() for row in rows]}
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
