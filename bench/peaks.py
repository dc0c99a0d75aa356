"""Spread of the measured peaks of a CPU: `python -m bench.peaks [PROCESSES [NEIGHBOURS]]`.

PROCESSES new processes measure the peaks one after the other. Meanwhile NEIGHBOURS other processes keep cores busy.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

#: Program that keeps a core busy until its parent process ends.
BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**6))"
PRECISIONS = ("fp32", "bf16")
ONE = f"""
import time, torch
from dlscale.measure.roofline import measure_peaks, operator_seconds
operator_seconds(torch.device("cpu"))  # imports much of PyTorch, as a stage has done before
rates = []
for precision in {PRECISIONS}:
    begin = time.perf_counter()
    found = measure_peaks(precision, torch.device("cpu"))
    rates += [found.flops / 1e9, found.bytes_per_second / 1e9, time.perf_counter() - begin]
print(*rates)
"""
COLUMNS = [f"{precision} {what}" for precision in PRECISIONS for what in ("GFLOP/s", "copy GB/s", "seconds")]


def main(processes: int = 10, neighbours: int = 0) -> None:
    """Print the peaks of each process, then the spread of each column: minimum and maximum relative to the median."""
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(neighbours)]
    try:
        rows = []
        print(", ".join(COLUMNS))
        for _ in range(processes):
            done = subprocess.run([sys.executable, "-c", ONE], capture_output=True, text=True, check=True)
            rows.append([float(word) for word in done.stdout.split()])
            print(", ".join(f"{rate:.3g}" for rate in rows[-1]), flush=True)
    finally:
        for other in others:
            other.kill()
            other.wait()
    for name, column in zip(COLUMNS, zip(*rows, strict=True), strict=True):
        middle = statistics.median(column)
        print(f"{name}: {middle:.3g} ({min(column) / middle - 1:+.0%} to {max(column) / middle - 1:+.0%})")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
