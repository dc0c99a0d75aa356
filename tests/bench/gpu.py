"""All that needs a GPU, checks and timings, in one command of at most eight minutes on an H200 or A100.

    make bench-gpu
    python tests/bench/gpu.py [--device cuda|cpu] [--quick] [--limit SECONDS] [--json FILE]
                              [--only TEXT ...] [--skip TEXT ...] [--list]

It makes its data itself, and beside the package it needs torch, h5py, numpy, pandas and pydantic only (DALI and Numba
for DALI's rows). The exit status is 1 where a check fails; a target that is not reached is said, and no failure.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "workflow_scripts")]
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line sets it, before anything loads OpenMP

import torch  # noqa: E402

from dlscale.core.provenance import git_state, now  # noqa: E402
from tests.bench import gpu_checks, gpu_timings  # noqa: E402
from tests.bench.tasks import Bench, chosen, closing_words, perform_all  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: does the program work at all?")
    parser.add_argument("--quick", action="store_true", help="small sizes and few steps; no figure means anything")
    parser.add_argument("--limit", type=float, default=480, metavar="SECONDS", help="what takes longer is left out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE, too, as they come")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="rows with one of these in their name")
    parser.add_argument("--skip", nargs="+", default=[], metavar="TEXT", help="and with none of these")
    parser.add_argument("--list", action="store_true", help="print the rows, with the seconds that each may take")
    args = parser.parse_args()
    if not args.list and args.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch sees no CUDA device here; --device cpu --quick tries the program itself")
    logging.disable(logging.INFO)  # the stages' own
    device = torch.device(args.device)

    def clean() -> None:
        # Compiled code is kept by function: too many versions of one, and PyTorch stops to compile it.
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)

    with tempfile.TemporaryDirectory(prefix="dlscale-bench-", ignore_cleanup_errors=True) as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/compiled"  # empty: the first compilation is a cold one
        bench = Bench(device, args.quick, Path(folder))
        first, last = gpu_checks.tasks(bench)
        tasks = chosen([*gpu_timings.facts(bench), *first, *gpu_timings.tasks(bench), *last], args.only, args.skip)
        if args.list:
            print("\n".join(f"{task.seconds:5.0f} s  {task.label}" for task in tasks))
            return 0
        if not tasks:
            parser.error("no row is called so; --list shows them")
        heading = {"time": now(), "git": git_state(), "device": args.device, "quick": args.quick, "limit": args.limit}
        results = perform_all(tasks, args.limit, heading, args.json, clean)
    print(closing_words(results))
    if args.json:
        print(f"written: {args.json}")
    return int(any(result.status == "FAILED" for result in results))


if __name__ == "__main__":
    sys.exit(main())
