"""Judge a run: what limits its speed, and whether other programs disturbed the measurement."""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dlscale.core.telemetry import summary
from dlscale.core.text import number, percent
from dlscale.report.causes import findings
from dlscale.report.evidence import DIRECT, Bound, Evidence, Finding, bound
from dlscale.results import MIN_FRACTION, UNKNOWN, RunResult


@dataclass(frozen=True)
class Disturbance:
    """Load from other programs or jobs while runs of a plan were measured."""

    tag: str  #: Name, in a few words.
    summary: str  #: Clause that names the other programs, their fraction of the cores, and the disturbed runs.
    advice: str  #: Consequence and remedy, in sentences.

    @property
    def text(self) -> str:
        return f"{self.summary[0].upper()}{self.summary[1:]}. {self.advice}"


def disturbance(runs: Sequence[RunResult], call: str = "snakemake") -> Disturbance | None:
    """Describe the load that disturbed runs; None on a quiet machine.

    If other programs disturbed throughput measurements of a study, the advice ends with a command that repeats these
    measurements; this command begins with `call`.
    """
    busy = {run: run.foreign_cpu_fraction for run in runs if run.foreign_cpu_fraction}
    foreign = {run: run.foreign_load for run in runs if run.foreign_load}
    if not busy:
        return None
    if not foreign:
        return Disturbance(
            "own jobs ran alongside",
            _load(busy, len(runs), "other jobs of the same Snakemake call", "trained"),
            "Runs with the setting `threads` train at the same time, so their speeds are lower than on an idle "
            "machine. To measure speed, add `throughput` to the plan's `measure`, because the stage `throughput` runs "
            "alone.",
        )
    files = [str(run.folder / "throughput.json") for run in foreign if run.throughput and not run.throughput.outside]
    return Disturbance(
        "busy machine",
        _load(foreign, len(runs), "other programs", "was measured" if len(foreign) == 1 else "were measured"),
        "These rates are probably too low; speed-ups with ± remain valid. Measure again on an idle machine"
        + (f": {call} plan_{runs[0].folder.parent.name} --forcerun {shlex.join(files)}" if files else "."),
    )


def _load(runs: Mapping[RunResult, float], of: int, programs: str, did: str) -> str:
    ends = dict.fromkeys(map(percent, (min(runs.values()), max(runs.values()))))
    which = f"run{'s' * (len(runs) > 1)} {', '.join(run.name for run in runs)}"
    known = which if len(runs) <= 3 else f"{len(runs)} of {of} runs"
    return f"{programs} used {' to '.join(ends)} of the cores while {known} {did}"


@dataclass(frozen=True)
class Verdict:
    """Limit of a run's speed, causes that slow the run, and the next remedies."""

    bound: Bound | None  #: Limit of the training speed; None if the limit was not measured.
    findings: list[Finding]  #: Causes, sorted as in `verdict`: disturbances first, then by cost.
    limit: str  #: Distance of the training speed from the device's limit, in words; empty if not measured.
    todo: str  #: Remedies: for other programs and a leak, if any; then for the most expensive cause, or for the limit.
    rung: str = ""  #: Settings of the last remedy in `todo`, as YAML; empty if this remedy is not a setting.


def judge_run(run: RunResult) -> Verdict:
    """Judge a run of a plan by its records.

    The telemetry comes from the run's first node during the throughput stage, or else during training.
    """
    watched = [summary(nodes[0]) for stage in ("throughput", "train") if (nodes := run.telemetry.get(stage))]
    return verdict(Evidence(run.settings, run.throughput, run.profile, next(iter(watched), None), run.folder))


def verdict(evidence: Evidence) -> Verdict:
    """Judge a run by its measurements."""
    every = list(findings(evidence))
    found = [finding for finding in every if finding.share is None or finding.share >= MIN_FRACTION]
    if any(finding.cause == "straggler" for finding in every):  # waiting for a slow rank looks like communication
        found = [finding for finding in found if finding.cause != "communication"]
    # Other programs come first, because they make all other findings uncertain. A leak, which may end the run, TCP and
    # swapping follow, because they may cause the slow exchanges and slow loading of other findings. Findings without a
    # cost are last.
    first = {"neighbour": 0, "leak": 1, "network": 2, "swapping": 3}
    found.sort(key=lambda finding: (first.get(finding.cause, len(first)), -(finding.share or 0.0)))
    bounding = bound(evidence.throughput)
    if bounding and bounding.what == UNKNOWN:  # findings based on these rates are unreliable
        found = [finding for finding in found if finding.cause in ("neighbour", "throttled")]
        return Verdict(bounding, found, "", "Measure again on an idle machine, because these rates are unreliable.")
    # The remedies for other programs and for a leak are added before the next remedy and do not replace it.
    before = [finding.todo for finding in found if finding.cause in ("neighbour", "leak")]
    costs = [finding for finding in found if finding.share is not None]
    if costs:
        todo, rung = costs[0].todo, costs[0].rung
    else:
        todo, rung = _next(evidence, bounding)
        before = before or [finding.todo for finding in found[:1]]
    return Verdict(bounding, found, limit(evidence), " Then: ".join(filter(None, [" ".join(before), todo])), rung)


def limit(evidence: Evidence) -> str:
    """Describe how far a run is from its device's limit; empty if the limit was not measured."""
    measured = evidence.throughput
    if not (measured and measured.work and measured.peaks and (mfu := measured.mfu("FULL")) is not None):
        return ""
    arithmetic = measured.peaks.flops / measured.work.flops if measured.work.flops else math.inf
    # The bytes are known only for a step that is not compiled.
    moved = measured.work.bytes if not evidence.compiled else None
    memory_ = measured.peaks.bytes_per_second / moved if moved else math.inf
    roof, kind = min((arithmetic, "arithmetic"), (memory_, "memory bandwidth"))
    if not math.isfinite(roof):
        return ""
    many_ = f" on {measured.nranks} devices" if measured.nranks > 1 else ""
    return (
        f"Training reaches {percent(mfu)} of the {number(measured.peaks.flops * measured.nranks / 1e9)} GFLOP/s that "
        f"matrix products in {measured.peaks.dtype} reach{many_}. If {kind} were the only limit, this model would "
        f"reach {number(roof * measured.nranks)} samples/s."
    )


def _next(evidence: Evidence, bounding: Bound | None) -> tuple[str, str]:
    if evidence.outside:
        profile = "`dlscale measure --profile -- COMMAND` shows where the program's time goes."
        return "Look at the slowest entries of the program's profile." if evidence.profile else profile, ""
    if bounding is None:
        return "To see the run's limit, add `throughput` to the plan's `measure`.", ""
    if bounding.key == "io":
        faster = evidence.faster_loader
        return faster or "The fastest loader is in use. Store fewer bytes, or use more nodes.", DIRECT if faster else ""
    if not (rungs := evidence.rungs):
        return "No further setting is suggested. Try a larger batch, or more devices.", ""
    first, *later = [f"`{rung}`" for rung in rungs]
    return first + f"; after that {', '.join(later)}" * bool(later) + ".", rungs[0]


def format_findings(found: Verdict) -> list[str]:
    """Format the reason, the findings and the next step as lines of text."""
    text = _wrapped(found.bound.why) if found.bound else []
    for finding in found.findings:
        costs = "" if finding.share is None else f": about {percent(finding.share)} of the time lost"
        text += ["", f"  {finding.what}{costs}", *_wrapped(finding.why)]
    text += ["", *_wrapped(found.limit)] if found.limit else []
    return [*text, "", *_wrapped(f"Try next: {found.todo}")]


def _wrapped(text: str) -> list[str]:
    # Paths stay in one piece.
    return textwrap.wrap(
        text, 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )
