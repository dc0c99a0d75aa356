"""Whether the machine was quiet while a plan's runs were measured."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dlscale.config.compute import compute_settings
from dlscale.core.telemetry import Sample
from dlscale.core.text import number, percent
from dlscale.measure.records import Throughput
from dlscale.report import verdict
from dlscale.report.diagnosis import UNKNOWN, bound
from dlscale.report.results import RunResult

#: Share of a machine's cores from which on there are few left for others.
FULL = 0.8


def disturbance(runs: Sequence[RunResult], call: str = "snakemake") -> str | None:
    """Return a warning if other programs were seen at work, or if speeds contradict each other; else None.

    It ends with the command that measures again: `call`, words of a shell that call the workflow, and what to make.
    """
    seen = list(filter(None, (next(_contradictions(runs), None), _neighbours(runs))))
    if not seen:
        return None
    said = " ".join(what for what, _ in seen)
    runs = [run for _, which in seen for run in which if run.throughput]
    files = dict.fromkeys(str(run.folder / "throughput.json") for run in runs)
    again = f": {call} --force {shlex.join(files)}" if files else "."
    return (
        f"The machine was not quiet. {said} Times and rates of these runs mean little, and speed-ups what their "
        f"intervals say: measure again with nothing else running{again}"
    )


def disturbed(runs: Mapping[str, RunResult]) -> dict[Path, str]:
    """Return what speaks against a quiet machine, of runs by `PLAN.RUN`: by the folder of each that it concerns."""
    plans: dict[str, list[RunResult]] = {}
    for name, run in runs.items():
        plans.setdefault(name.rpartition(".")[0], []).append(run)
    found = {run.folder: said for plan in plans.values() for said, which in _contradictions(plan) for run in which}
    crowds = {run.folder: crowd(run.throughput, run.telemetry.get("train", [])) for run in runs.values()}
    return {folder: said.removesuffix(".") for folder, said in [*found.items(), *crowds.items()] if said}


def crowd(throughput: Throughput | None, training: Sequence[Sequence[Sample]]) -> str:
    """Return in words how much others did while a run was timed or trained; nothing if it was little."""
    share = _crowd(throughput, training)
    return f"other programs kept {percent(share)} of the cores busy" if share else ""


def _crowd(throughput: Throughput | None, training: Sequence[Sequence[Sample]]) -> float:
    """Return the greatest share of the cores that others kept busy while a run was timed: trained, if nothing else."""
    return verdict.others_share(throughput) if throughput else _beside_training(training)


def _neighbours(runs: Sequence[RunResult]) -> tuple[str, list[RunResult]] | None:
    """Say in which runs the verdict names a neighbour, or a training had one that alone tells how fast its run is."""
    shares = {run.label: share for run in runs if (share := _crowd(run.throughput, run.telemetry.get("train", [])))}
    if not shares:
        return None
    least, most = percent(min(shares.values())), percent(max(shares.values()))
    of = f"{least} of the cores" if least == most else f"{least} to {most} of the cores"
    many = "all" if len(shares) == len(runs) else f"{len(shares)} of"
    which = "; ".join(shares) if len(shares) <= 3 else f"{many} {len(runs)} runs"
    said = f"Other programs kept {of} busy while {which} {'was' if len(shares) == 1 else 'were'} measured."
    return said, [run for run in runs if verdict.others_share(run.throughput)]


def _beside_training(nodes: Sequence[Sequence[Sample]]) -> float:
    """Return the greatest share of a node's cores that others kept busy; 0 if it is little, or cores were left."""
    shares = []
    for samples in nodes:
        known = [(s.seconds, s.cpu, s.cpu_others) for s in samples if s.cpu is not None and s.cpu_others is not None]
        seconds = sum(each for each, _, _ in known)
        if seconds >= verdict.LEAST_SECONDS:
            used, others = (sum(each[0] * each[column] for each in known) / seconds for column in (1, 2))
            shares.append(others if others >= verdict.LEAST and used >= FULL else 0.0)
    return max(shares, default=0.0)


def _contradictions(runs: Sequence[RunResult]) -> Iterator[tuple[str, list[RunResult]]]:
    """Find the same computation at two speeds, and FULL that is faster than its parts."""
    alike: dict[str, list[tuple[float, RunResult]]] = {}
    for run in runs:
        if trials := run.trials("SYNTHETIC"):
            step = {**compute_settings(run.settings), "loader": None}  # how data come is nothing to it
            alike.setdefault(json.dumps(step, sort_keys=True), []).append((trials.mean, run))
    for speeds in alike.values():
        (least, slow), (most, quick) = (pick(speeds, key=lambda each: each[0]) for pick in (min, max))
        if most > 1.25 * least:
            said = (
                f"SYNTHETIC is the same computation in {slow.label} and in {quick.label}, and yet {number(least)} and "
                f"{number(most)} samples/s were measured."
            )
            yield said, [slow, quick]
    for run in runs:
        if (found := bound(run.throughput)) and found.what == UNKNOWN:
            yield f"FULL of {run.label} was faster than loading or computing alone, which cannot be.", [run]
