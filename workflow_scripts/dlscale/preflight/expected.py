"""How long jobs take on this machine, as far as one knows before: for bars, time left, and the end of a dry run.

Of a run's stage what its measured rate says, of any job what it took the last time, else what such a job of the demo
took on two cores. What a job of a site costs, and its time limit, is `dlscale.preflight.cost`'s to say.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dlscale.preflight import cost

#: Seconds from a job's start to its first step: interpreter and libraries.
START_UP = 5.0
#: Seconds that a job of the demo takes, by stage: means of a demo of six minutes, on two cores of a shared AMD EPYC.
#: `tune`, which it lacks, is a judgement.
TYPICAL = {"train": 16.0, "throughput": 13.0, "profile": 8.0, "tune": 60.0, "report": 8.0}
#: The same of all others, most of it the start.
OTHERS = 1.2


def seconds(stage: str, work: cost.Work | None, results: Path, benchmark: Path | None = None) -> float:
    """Return how long a job takes.

    `work`: what it is of a run; `benchmark`: of any other where Snakemake writes what it took.
    """
    if work:
        benchmark = results / "benchmarks" / stage / work.plan / f"{work.run_name}.tsv"
        known = cost.estimate(work, results, start_up=START_UP)
        if known.basis == "measured" and known.seconds:
            return known.seconds
    return (took(benchmark) if benchmark else None) or TYPICAL.get(stage, OTHERS)


def took(benchmark: Path) -> float | None:
    """Return how long a job took, s, as Snakemake wrote it; None where it did not, or not yet all of it."""
    if not benchmark.is_file():
        return None
    try:
        return float(benchmark.read_text().splitlines()[1].split("\t")[0])
    except (OSError, IndexError, ValueError):
        return None


def in_all(jobs: Iterable[tuple[float, float]]) -> float:
    """Return how long jobs take together, s, from the seconds of each and its share of the machine.

    They wait for one another where the machine has no room for them; the longest of them bounds the end.
    """
    jobs = list(jobs)
    return max([sum(seconds * share for seconds, share in jobs), *(seconds for seconds, _ in jobs)], default=0.0)


def share(threads: int | None, cores: int) -> float:
    """Return the share of a machine that a job with so many threads takes: all of it where it does not say."""
    return min(threads or cores, cores) / cores
