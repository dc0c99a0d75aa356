"""Check that a report distinguishes a slow-down from noise: `make bench-noise`, or `python -m bench.noise [--tries N]`.

Each try measures three runs of the study in bottlenecks/plant.py, as the workflow does. The report must find the run
`copy` equal to `first` within noise, and the run `slow` slower. `copy` does the same work as `first` under other
settings, so dlscale does not recognise it as a copy. `slow` has five per cent more layers. If paired timing lasts
ten seconds or more, `first` is also timed alternately with a copy of itself. During half of the tries, other programs
keep all cores busy.

The benchmark also checks `dlscale compare --gate` on consecutive tries. Compared with the earlier `copy`, the later
`copy` must pass and the later `slow` must fail.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.bottlenecks import run as stages
from dlscale.config import resolve
from dlscale.core import registry
from dlscale.core.files import write_json
from dlscale.core.text import NONE
from dlscale.extensions.compare import compare
from dlscale.report import sections
from dlscale.report.speedup import SpeedUp, SpeedUps
from dlscale.results import PlanResult, read_plan

DEPTH = 40
RUNS: dict[str, dict[str, Any]] = {
    "first": {},
    "copy": {"model": {"slow_rank": 7}},  # no effect with a single process
    "slow": {"model": {"depth": round(1.05 * DEPTH)}},
}
SETTINGS: dict[str, Any] = {
    "model": {"depth": DEPTH, "size": 512},
    "batch_size": 64,
    "loader": {"workers": 0},
    "throughput": {"warmup": 1, "trials": 3, "batches": 8, "seconds": 0.2},
}


@dataclass(frozen=True)
class Try:
    """Result of one try: logarithms of speed ratios to the first run, with half-widths of their 95 % intervals."""

    load: int  #: Number of other programs.
    floor: float  #: Log ratio below which speeds count as equal.
    copy: tuple[float, float]
    slow: tuple[float, float]
    rounds: tuple[int, ...]  #: Rounds of paired timing, one number per run.
    headline: str  #: Run that the report on `first` and `copy` calls the fastest.
    seconds: float

    @property
    def equal(self) -> bool:
        return SpeedUp(*self.copy).noise and self.headline == "first"

    @property
    def found(self) -> bool:
        return not SpeedUp(*self.slow).noise and self.slow[0] < 0

    def line(self) -> str:
        """Return the try as a row."""
        copy, slow = SpeedUp(*self.copy), SpeedUp(*self.slow)
        rounds = "/".join(map(str, self.rounds))
        return (
            f"{self.load:4d}  {100 * self.floor:5.1f} %  {copy.ratio:.3f} ± {copy.error:.3f} "
            f"{'equal' if self.equal else 'WRONG':7}  {slow.ratio:.3f} ± {slow.error:.3f} "
            f"{'found' if self.found else 'MISSED':7}  {rounds:>12} rounds, {self.seconds:.0f} s"
        )


def measure(folder: Path, data: Path, load: int, settings: dict[str, Any], threads: int) -> tuple[Try, PlanResult]:
    """Measure the three runs while `load` other programs keep cores busy."""
    start = time.monotonic()
    raw = {
        "studies": {"plant": str(stages.STUDY)},
        "targets": ["p"],
        "plans": {"p": {"study": "plant", "settings": settings, "runs": RUNS}},
    }
    runs = {name: resolved.run for name, resolved in resolve.load(raw).plans["p"].items()}
    first = json.dumps(runs["first"].slice("throughput"))
    with stages.busy(load):
        for name, run in runs.items():
            own = folder / "plans/p" / name
            own.mkdir(parents=True)
            write_json(own / "config.yaml", run.model_dump(mode="json"))
            words = ["--config", json.dumps(run.slice("throughput")), "--manifest", str(data / "manifest.json")]
            words += ["--threads", str(threads), "--log", str(own / "log")]
            words += ["--beside", first] if name != "first" or run.throughput.beside >= 10 else []
            stages.call("throughput", *words, "--out", str(own / "throughput.json"))
    every, pair = plan(folder, *runs), plan(folder, "first", "copy")
    speeds = SpeedUps(every.runs)
    over = [found for run in every.runs[1:] if (found := speeds.over(run, every.runs[0]))]
    view = sections.speed(pair)
    made = Try(
        load,
        speeds.floor,
        (over[0].log, over[0].error),
        (over[1].log, over[1].error),
        tuple(
            sum(map(len, run.throughput.beside.openings))
            for run in every.runs
            if run.throughput and run.throughput.beside
        ),
        view["fastest"] if view else NONE,
        time.monotonic() - start,
    )
    return made, every


def gated(plans: list[PlanResult]) -> list[tuple[bool, bool]]:
    """Return whether `dlscale compare --gate` calls `copy` and `slow` slower, for each try after the first."""
    runs = [{run.name: run for run in each.runs} for each in plans]
    found = []
    for before, after in itertools.pairwise(runs):
        record = after["slow"].throughput
        assert record
        # record the work of `copy` for `slow`, because the gate compares only runs of equal work
        same = record.model_copy(update={"compute": before["copy"].compute})
        pairs = after["copy"], replace(after["slow"], throughput=same)
        found.append(tuple(compare.change("p.copy", before["copy"], each, looks=2)["slower"] for each in pairs))
    return found


def plan(folder: Path, *runs: str) -> PlanResult:
    """Write a plan of the named runs, and read its results."""
    path = folder / "plans/p/plan.yaml"
    known = [{"name": name, "label": name, "plan": "p", "run": name, "measure": ["throughput"]} for name in runs]
    record = {"plan": "p", "title": "p", "study": "plant", "kind": "set", "measure": ["throughput"], "runs": known}
    write_json(path, record)
    return read_plan(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tries",
        type=int,
        default=20,
        metavar="N",
        help="number of tries, half of them with other programs running (default: 20)",
    )
    parser.add_argument(
        "--load",
        type=int,
        default=os.cpu_count(),
        metavar="N",
        help="number of other programs that each keep a CPU busy (default: one per logical CPU)",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=os.cpu_count(),
        metavar="N",
        help="threads of a run (default: one per logical CPU)",
    )
    parser.add_argument("--set", default="{}", metavar="JSON", help="settings that override the settings of all runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the results (default: none)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # exit normally, to end busy programs
    registry.add("plant", stages.STUDY)
    found, plans = list[Try](), list[PlanResult]()
    settings = resolve.merge(resolve.merge({}, SETTINGS), json.loads(args.set))
    print("load   floor    copy                   slow")
    with tempfile.TemporaryDirectory(prefix="dlscale-noise-") as place:
        data = stages.dataset(Path(place, "data"))
        for number in range(args.tries):
            load = args.load if number % 2 else 0
            one, every = measure(Path(place, str(number)), data, load, settings, args.threads)
            found.append(one)
            plans.append(every)
            print(one.line(), flush=True)
        gates = gated(plans)
    for load in sorted({each.load for each in found}):
        own = [each for each in found if each.load == load]
        equal, slower = sum(each.equal for each in own), sum(each.found for each in own)
        print(
            f"with {load} other programs: copy found equal in {equal} of {len(own)} tries, "
            f"slow-down found in {slower} of {len(own)}"
        )
    equal, slower = sum(each.equal for each in found), sum(each.found for each in found)
    print(f"in all: copy found equal in {equal} of {len(found)} tries, slow-down found in {slower} of {len(found)}")
    passed, failed = sum(not copy for copy, _ in gates), sum(slow for _, slow in gates)
    print(f"gate: passed {passed} of {len(gates)} equal runs, failed {failed} of {len(gates)} slower runs")
    if args.json:
        write_json(args.json, [asdict(each) for each in found])


if __name__ == "__main__":
    main()
