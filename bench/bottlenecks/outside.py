"""Check that `dlscale measure` names the bottleneck of an external program.

`python bench/bottlenecks/outside.py [--json FILE] [CASE ...]` runs program.py with `dlscale measure`. A case plants one
bottleneck; clean cases plant none. The script prints planted causes and found causes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "workflow_scripts")]

from bench.bottlenecks.run import busy, percent  # noqa: E402
from dlscale.extensions.programs.measure import PLAN  # noqa: E402
from dlscale.report.verdict import Verdict, judge_run  # noqa: E402
from dlscale.results import read_run  # noqa: E402

PROGRAM = Path(__file__).with_name("program.py")

#: Bytes in the case "little memory": size of the table that the samples read, and limit on the program's memory.
TABLE, MEMORY = 2**30, 700 * 2**20


@dataclass(frozen=True)
class Case:
    """Arguments of program.py, and causes, at least one of which the verdict must name. A clean case has no causes."""

    causes: tuple[str, ...]
    words: tuple[str, ...] = ()
    ranks: int = 1
    neighbours: int = 0  #: Number of other programs; each keeps one core busy.
    limited: bool = False  #: Whether the program may use only `MEMORY` bytes.
    environment: tuple[tuple[str, str], ...] = ()


LOADER = ("workers", "loader")
CASES = {
    "decoding, in the process": Case(LOADER, ("--decode=1e-3",)),
    "decoding, in a worker": Case(LOADER, ("--decode=2e-3", "--workers=1")),
    "a slow disk": Case(("storage",), ("--read=2e-3", "--workers=1")),
    "a small batch": Case(("launches",), ("--batch=1", "--size=16", "--depth=8")),
    "a wait in each step": Case(("idle",), ("--nap=0.1",)),
    "much validation": Case(("besides",), ("--validation=60",)),
    "too many threads": Case(("threads",), ("--threads=24",)),
    "a rank that computes more": Case(("straggler",), ("--slow=computing",), ranks=2),
    "a rank that loads more": Case(("straggler",), ("--slow=loading",), ranks=2),
    "a busy neighbour": Case(("neighbour",), neighbours=2),
    "little memory": Case(("swapping",), ("--seconds=12",), limited=True),
    "none": Case(()),
    "none, with workers": Case((), ("--workers=1", "--decode=1e-5")),
    "none, with two threads": Case((), ("--threads=2", "--size=1536")),
    "none, in two processes": Case((), ranks=2),
    "none, reads after each layer": Case((), ("--item",)),
}


def measure(case: Case, folder: Path) -> tuple[Verdict, str]:
    """Run a case; return its verdict and the printed text."""
    words = [sys.executable]
    if case.ranks > 1:
        words += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}"]
    words += [str(PROGRAM), *case.words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "workflow_scripts"), "OMP_NUM_THREADS": "1"}
    with busy(case.neighbours), limited(folder if case.limited else None) as (before, after):
        command = [sys.executable, "-m", "dlscale", "measure", "--name", "case", "--", *before, *words, *after]
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment | dict(case.environment),
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed ({done.returncode}):\n{done.stdout}\n{done.stderr}")
    return judge_run(read_run(folder / "results/plans" / PLAN / "case")), done.stdout + done.stderr


@contextmanager
def limited(folder: Path | None) -> Iterator[tuple[list[str], list[str]]]:
    """Yield words to put before and after a command so that it swaps (needs root); two empty lists without a folder."""
    if folder is None:
        yield [], []
        return
    place = Path("/sys/fs/cgroup/memory")
    limit = "memory.limit_in_bytes" if place.exists() else "memory.max"
    group = (place if place.exists() else place.parent) / f"dlscale-{os.getpid()}"
    swap = folder / "swap"
    with swap.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 2 * TABLE)
    swap.chmod(0o600)
    subprocess.run(["mkswap", str(swap)], check=True, capture_output=True)
    subprocess.run(["swapon", str(swap)], check=True)
    try:
        group.mkdir()
        (group / limit).write_text(str(MEMORY))
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"], [f"--table={TABLE}"]
    finally:
        # disable the swap file before its folder is removed, because a swap file in use cannot be removed
        subprocess.run(["swapoff", str(swap)], check=True)
        group.rmdir()


def can_limit() -> bool:
    """Return whether this process may limit memory and enable swap."""
    return (
        os.geteuid() == 0
        and shutil.which("swapon") is not None
        and any(
            os.access(place, os.W_OK) for place in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup/cgroup.subtree_control")
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"cases to run: {', '.join(CASES)} (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the results (default: none)")
    args = parser.parse_args()
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"unknown case: {', '.join(sorted(unknown))}")
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # exit normally, so that temporary files are removed
    rows = []
    for name in args.cases or CASES:
        case = CASES[name]
        if case.limited and not can_limit():
            print(f"{name:28} skipped: limiting memory needs root, swapon and a writable cgroup")
            continue
        with tempfile.TemporaryDirectory(prefix="dlscale-outside-") as place:
            found, output = measure(case, Path(place))
        causes = [finding.cause for finding in found.findings]
        row = {"case": name, "planted": case.causes, "found": causes, "bound": found.bound and found.bound.what}
        rows.append({**row, "right": bool({*case.causes} & {*causes}) if case.causes else not causes, "output": output})
        print(f"{name:28} {'/'.join(case.causes) or '-':16} -> {', '.join(causes) or '-'}", flush=True)
        for finding in found.findings:
            print(f"{'':34} {'' if finding.share is None else percent(finding.share)} {finding.why}")
    planted = [row for row in rows if row["planted"]]
    right, alarms = (
        sum(bool(row["right"]) for row in planted),
        sum(not row["right"] for row in rows if not row["planted"]),
    )
    print(
        f"\n{right} of {len(planted)} bottlenecks named, {alarms} false alarms in {len(rows) - len(planted)} clean runs"
    )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
