"""Checks and timings that need a GPU, one row each, the most valuable first.

    make bench-gpu                     # ARGS="--only U-Net", ARGS="--continue"
    python3 bench/gpu.py --json FILE [--continue] [--seconds SECONDS] [--only TEXT ...] [--skip TEXT ...]
                               [--list] [--markdown FILE] [--wheels FOLDER] [--device cuda|cpu] [--quick]

The program also runs without a network. It needs torch, numpy and the wheels that `make bench-gpu-wheels` collects for
`--wheels`. A row whose package is missing (numba, DALI, tensorboard, ...) is skipped and names the package. A call
starts only rows that fit into `--seconds`, and lists the rest; the next call with `--continue` measures the rest. Each
finished row is written to FILE at once, with the GPU's clocks, power and temperature during the row.

The exit status is 1 if a check fails. A missed target is only reported.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import logging
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "workflow_scripts")]

from dlscale.core.machine import let_threads_wait  # noqa: E402

let_threads_wait()  # before any import loads OpenMP

import torch  # noqa: E402

from bench.clocks import Sampler  # noqa: E402
from bench.tasks import (  # noqa: E402
    Bench,
    Skip,
    Task,
    Values,
    chosen,
    closing_words,
    markdown,
    perform_all,
    read,
)

#: Modules of this folder and their functions that return tasks, the most valuable first: first what docs/benchmarks.md
#: only expects, or what never ran. Three calls of eight minutes (1,440 s) must suffice for all rows.
ORDER = (
    ("gpu_timings", "compiled"),
    ("gpu_machine", "tasks"),
    ("gpu_timings", "wide"),
    ("gpu_explain", "units_and_memory"),
    ("gpu_checks", "quick"),
    ("gpu_whole", "tasks"),
    ("gpu_timings", "vit"),
    ("gpu_timings", "unet"),
    ("gpu_kernels", "profiles"),
    ("gpu_explain", "tasks"),
    ("gpu_checks", "ahead"),
    ("gpu_kernels", "attentions"),
    ("gpu_kernels", "decoders"),
    ("gpu_timings", "sweeps"),
    ("gpu_timings", "loaders"),
    ("gpu_checks", "slow"),
    ("gpu_whole", "last"),
)
#: Time after `--seconds` at which the program prints a traceback and exits, because a row hangs.
GRACE_SECONDS = 30


def all_tasks(bench: Bench) -> list[Task]:
    """Return the tasks of all modules; a missing package gives a skipped row that names the package."""
    tasks = list[Task]()

    def missing(package: str | None) -> Values:
        raise Skip(f"package {package} is missing: collect it with make bench-gpu-wheels, then set --wheels")

    for name, function in ORDER:
        try:
            tasks += getattr(importlib.import_module(f"bench.{name}"), function)(bench)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] in ("dlscale", "tests"):
                raise
            tasks.append(Task(name, function, 0, partial(missing, error.name)))
    return [replace(task, seconds=1) for task in tasks] if bench.quick else tasks


def heading(args: argparse.Namespace) -> Values:
    """Return the facts that identify a benchmark run: time, commit, device, card and PyTorch's version."""

    def git(*words: str) -> str:
        try:
            return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=20).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return ""

    changed = bool(git("status", "--porcelain", "--untracked-files=no"))
    found: Values = {"time": time.strftime("%Y-%m-%d %H:%M:%S%z"), "commit": git("rev-parse", "HEAD") or "unknown"}
    found |= {"changed": changed, "device": args.device, "quick": args.quick, "torch": torch.__version__}
    return found | ({"card": torch.cuda.get_device_name()} if args.device == "cuda" and not args.list else {})


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"), help="device; cpu is only for trying out (default: cuda)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes and few steps, to try the program; figures mean nothing"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=480,
        help="time limit of the call; rows that do not fit are not run (default: 480)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="file for the results, updated after each row (default: none)"
    )
    parser.add_argument(
        "--continue", action="store_true", dest="go_on", help="keep the results in FILE, and run only the other rows"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="file for the results as tables (default: none)")
    parser.add_argument(
        "--wheels", type=Path, metavar="FOLDER", help="folder of wheels, for packages that are not installed"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="TEXT", help="rows with one of the texts in their names (default: all)"
    )
    parser.add_argument(
        "--skip",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="rows to leave out, by texts in their names (default: none)",
    )
    parser.add_argument("--list", action="store_true", help="print the rows' names, and the seconds that each may take")
    return parser


def main() -> int:
    parser = options()
    args = parser.parse_args()
    if not args.list and args.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA device; to try the program on a CPU, use --device cpu --quick")
    if args.go_on and not args.json:
        parser.error("--continue needs the file of earlier results: add --json FILE")
    if args.wheels and not (wheels := sorted(args.wheels.glob("*.whl"))):
        parser.error(f"--wheels: no *.whl in {args.wheels}; collect them with make bench-gpu-wheels")
    logging.disable(logging.INFO)  # hide the log lines of the stages
    device = torch.device(args.device)

    def clean() -> None:
        # forget the compiled versions of earlier rows, because PyTorch compiles only a few versions of a function
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory("", "dlscale-bench-", None, True)))
        # an empty cache, so that the first compilation finds no compiled code
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/compiled"
        if args.wheels:
            for wheel in wheels:
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(folder / "packages")
            sys.path.insert(0, str(folder / "packages"))
        # stages run in other processes, which must find the same packages
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        bench = Bench(device, args.quick, folder)
        tasks = chosen(all_tasks(bench), args.only, args.skip)
        if args.list:
            print("\n".join(f"{task.seconds:5.0f} s  {task.label}" for task in tasks))
            return 0
        if not tasks:
            parser.error("--only and --skip leave no row; --list prints the names of all rows")
        sampler = None
        if device.type == "cuda":
            sampler = Sampler(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
            stack.callback(sampler.close)
        earlier = read(args.json) if args.go_on and args.json.exists() else []
        faulthandler.dump_traceback_later(args.seconds + GRACE_SECONDS, exit=True)
        about = heading(args)
        results = perform_all(tasks, args.seconds, about, args.json, clean, earlier, sampler, bench.found)
        faulthandler.cancel_dump_traceback_later()
    print(closing_words(results))
    if args.markdown:
        args.markdown.write_text(markdown(results, about))
    for path in filter(None, (args.json, args.markdown)):
        print(f"written: {path}")
    return int(any(result.status == "FAILED" for result in results))


if __name__ == "__main__":
    sys.exit(main())
