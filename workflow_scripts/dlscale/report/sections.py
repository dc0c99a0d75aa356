"""A plan's section of the page: curves, throughput, tables, predictions, provenance."""

from __future__ import annotations

import base64
import itertools
import math
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import yaml

from dlscale.core import text
from dlscale.core.metrics import Epoch, Metric
from dlscale.core.stages import RUN_STAGES
from dlscale.core.telemetry import Sample, begin
from dlscale.measure.profilers.records import Profile
from dlscale.parallel.records import Links
from dlscale.report import (
    compare_profiles,
    convergence,
    efficiency,
    figures,
    glance,
    parallelism,
    parts,
    peaks,
    published,
    scaling,
    sweep,
    target,
    verdict,
)
from dlscale.report import references as beside
from dlscale.report.collect import summary_csv
from dlscale.report.diagnosis import bound
from dlscale.report.disturbance import disturbance
from dlscale.report.drawing import MARKERS, picture
from dlscale.report.glance import View
from dlscale.report.references import Reference
from dlscale.report.results import PlanResult, RunResult, first_and_least, slowness
from dlscale.report.rungs import gain
from dlscale.report.series import KINDS
from dlscale.report.speedup import SpeedUps
from dlscale.report.tables import channel_tables, runs_table
from dlscale.report.tuning import tunings

#: What keeps a report of hundreds of runs readable: how many of them each part shows.
LINES = len(MARKERS)
BARS = 8
CHANNEL_ROWS = 40
TOP = 10

#: What the page shows of the question that a kind of plan asks.
QUESTIONS: dict[str, Callable[[PlanResult], View | None]] = {
    **dict.fromkeys(KINDS, scaling.view),
    "convergence": convergence.view,
    "parallelism": parallelism.view,
}


def plan_view(
    plan: PlanResult,
    datasets: Sequence[str],
    plans: set[str],
    pictures: int,
    page: Path,
    references: Sequence[Reference] = (),
    call: str = "snakemake",
) -> View:
    """Return what the page, which has these datasets and plans, shows of a plan: at most so many `pictures`.

    `page` is the page's folder: links to traces lead from there. `call` are words that call the workflow.
    """
    used = dict.fromkeys(str(run.settings.get("dataset")) for run in plan.runs)
    return {
        "name": plan.name,
        "title": plan.title,
        "study": plan.record.study,
        "kind": plan.record.kind,
        "runs": len(plan.runs),
        "left_out": _left_out(plan),
        "omitted": len(plan.record.left_out),
        "disturbance": disturbance(plan.runs, call),
        "datasets": [{"name": name, "linked": name in datasets} for name in used],
        "devices": devices(plan.runs),
        "speed": glance.speed(plan),
        "bound": glance.fastest_bound(plan),
        "quality": glance.quality(plan),
        "targets": target.glance(plan),
        "scales": scaling.glance(plan),
        "loss": plan.loss,
        "published": published.summary(plan.record.published, plan.described),
        "curves": _curves(plan),
        "references": beside.view(plan, _least_loss(plan, LINES), _followed(plan), references),
        "throughput": _throughput(plan),
        "profiles": _profiles(plan, page),
        "watched": _watched(plan),
        "efficiency": efficiency.view(plan),
        "tunings": tunings(plan),
        "sweep": sweep.view(plan),
        "question": QUESTIONS[plan.record.kind](plan) if plan.record.kind in QUESTIONS else None,
        "table": runs_table(plan),
        "csv": base64.b64encode(summary_csv(plan).encode()).decode(),
        "channels": channel_tables(plan, _least_loss(plan, CHANNEL_ROWS)),
        "predictions": _predictions(plan, pictures),
        "provenance": [_provenance(plan, run, plans, page) for run in plan.runs],
    }


def devices(runs: Iterable[RunResult]) -> list[str]:
    """Return what the runs were measured on, each once."""
    names = []
    for device in (run.device for run in runs if run.device.name):
        threads = device.threads if device.kind == "cpu" else None
        names.append(f"{device.name}, {text.many(threads, 'thread')}" if threads else device.name)
    return list(dict.fromkeys(names))


def _least_loss(plan: PlanResult, limit: int) -> list[RunResult]:
    return first_and_least(plan.trained, limit, lambda run: run.final_loss)


def _curves(plan: PlanResult) -> View | None:
    runs = _least_loss(plan, LINES)
    if not runs:
        return None
    label = plan.loss.label
    small = []
    if any(plan.skill(run.epochs[-1]) is not None for run in runs):
        drawing = figures.skill(f"{plan.name}-skill", runs, plan.skill)
        small.append((drawing, "Skill on the validation data; 1 is perfect."))
    small.append((figures.learning_rate(f"{plan.name}-rate", runs), "Learning rate at the end of each epoch."))
    return {
        "large": [
            (figures.loss(f"{plan.name}-epoch", runs, "epoch", label), "Loss over epochs: what each pass teaches."),
            (figures.loss(f"{plan.name}-time", runs, "time", label), "Loss over training time: what waiting buys."),
        ],
        "small": small,
        "metric": _metric_curves(plan, runs),
        "legend": [(run.label, style, MARKERS[style][1]) for style, run in enumerate(runs)],
        "of": len(plan.trained),
        "seeds": plan.repeats,
    }


def _followed(plan: PlanResult) -> Metric | None:
    """Return the metric that is drawn: one that was published, else the leading one; None if it is the loss itself."""
    wanted = [figure.metric for figure in plan.record.published if figure.metric in plan.metrics]
    metric = plan.metrics[wanted[0]] if wanted else plan.lead
    if metric is None or not plan.trained:
        return None
    values = [(e.metrics.get(metric.name, math.nan), e.valid_loss) for run in plan.trained for e in run.epochs]
    return None if all(math.isclose(*both, rel_tol=1e-5) for both in values) else metric


def _metric_curves(plan: PlanResult, runs: Sequence[RunResult]) -> list[tuple[str, str]]:
    """Return the figures of that metric over steps, epochs and time, beside the values published of the plan's runs."""
    metric = _followed(plan)
    if metric is None:
        return []
    mine = {f"{plan.name}.{run.name}" for run in plan.runs}
    levels = {
        figure.value: f"published: {published.shown(figure)}"
        for figure in plan.record.published
        if figure.metric == metric.name and figure.value is not None and mine.intersection(figure.runs)
    }
    texts: dict[Literal["step", "epoch", "time"], str] = {
        "epoch": f"{metric.full_title} on the validation data; {metric.better} is better.",
        "step": "The same over optimiser steps.",
        "time": "The same over training time.",
    }

    def value(epoch: Epoch) -> float | None:
        return epoch.metrics.get(metric.name)

    return [
        (figures.metric(f"{plan.name}-metric-{over}", runs, value, over, metric.label, list(levels.items())), said)
        for over, said in texts.items()
    ]


def _left_out(plan: PlanResult) -> list[tuple[str, list[str]]]:
    """Return what the machine lacks, each with the runs that need it."""
    found: dict[str, list[str]] = {}
    for run, lacking in plan.record.left_out.items():
        found.setdefault(lacking, []).append(run)
    return list(found.items())


def _throughput(plan: PlanResult) -> View | None:
    measured = [run for run in plan.runs if run.throughput]
    if not measured:
        return None
    shown = first_and_least(measured, BARS, slowness)
    rungs = plan.runs if plan.record.kind == "ladder" else []
    speeds = SpeedUps(plan.runs)
    gains = {run: gain(before, run, speeds.over(run, before)) for before, run in itertools.pairwise(rungs)}
    return {
        "svg": figures.throughput(f"{plan.name}-throughput", shown),
        "roofline": _roofline(plan, measured),
        "bounds": [
            {
                "run": run.label,
                "id": plan.anchor(run),
                "gain": gains.get(run),
                "bound": bound(run.throughput),
                "verdict": verdict.of(run),
            }
            for run in shown
        ],
        "of": len(measured),
    }


def _roofline(plan: PlanResult, measured: Sequence[RunResult]) -> View | None:
    """Return the runs under their devices' roofs; None if FLOPs or peaks are not known."""
    points: list[figures.Point] = []
    drawn = []
    for run in measured:
        found = run.throughput
        if found and found.work and found.work.bytes and found.peaks and found.synthetic and len(points) < LINES:
            reached = found.synthetic.mean * found.work.flops / found.nranks
            # What a compiler spares of the bytes nobody counts.
            points.append((run.label, found.work.flops / found.work.bytes, reached, found.compile is not None))
            drawn.append(found)
    if not points:
        return None
    roofs = peaks.roofs(drawn)
    return {
        "svg": figures.roofline(f"{plan.name}-roofline", points, _roofs(roofs)),
        "legend": [(label, style, MARKERS[style][1], compiled) for style, (label, _, _, compiled) in enumerate(points)],
        "compiled": any(compiled for _, _, _, compiled in points),
    }


def _roofs(roofs: Sequence[peaks.Roof]) -> list[tuple[str, float, float]]:
    """Return each roof with a name; of the device it says what tells it from the others."""
    devices = {(roof.device, roof.nranks) for roof in roofs}
    names = {device.name for device, _ in devices}
    threads = {device.threads for device, _ in devices}
    ranks = {nranks for _, nranks in devices}

    def name(roof: peaks.Roof) -> str:
        words = [roof.dtype]
        if len(names) > 1:
            words.append(roof.device.name)
        if len(threads) > 1 and roof.device.threads:
            words.append(text.many(roof.device.threads, "thread"))
        if len(ranks) > 1:
            words.append(text.many(roof.nranks, "rank"))
        return ", ".join(words)

    return [(name(roof), roof.flops, roof.bytes_per_second) for roof in roofs]


def _profiles(plan: PlanResult, page: Path) -> View | None:
    """Return where the time of a step goes, run by run, and what the profilers left; None if nothing tells."""
    profiled = [(run, run.profile) for run in plan.runs if run.profile]
    bars = [bar for run in first_and_least(plan.runs, BARS, slowness) if (bar := parts.bar(run))]
    if not bars:
        return None
    # Steps of different batches are no before and after: then all bars are those of a sample.
    sample = len({bar.samples for bar in bars}) > 1 and all(bar.samples for bar in bars)
    return {
        "svg": figures.timeline(f"{plan.name}-timeline", bars, sample),
        "about": _about(sample, bars),
        "parts": [
            (part, PART_NAMES[part]) for part in figures.PARTS if any(bar.parts.get(part, 0.0) > 0 for bar in bars)
        ],
        "runs": [
            _profile(plan, run, profile, page, before)
            for before, (run, profile) in zip([None, *(run for run, _ in profiled)], profiled, strict=False)
        ],
    }


def _about(sample: bool, bars: Sequence[figures.Bar]) -> str:
    """Say what the bars of the timeline are."""
    said = [f"A step{' over the samples of its batch' * sample}, part by part, while the profiler named was at work."]
    if any(bar.full for bar in bars):
        said.append("The upright line and the number are FULL: other steps, at another moment, with no profiler.")
    else:
        said.append("The number is such a step; without a profiler it may be shorter.")
    if any("unexplained" in bar.parts for bar in bars):
        said.append(
            "Of a run that was not profiled the bar is FULL, too: computing takes SYNTHETIC's time, waiting for data "
            "at most IO's, and nothing shows where the rest goes."
        )
    return " ".join(said)


#: What the parts of a step's time are called.
PART_NAMES = {
    "data": "waiting for data",
    "copy": "copy to the device",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimiser",
    "compute": "computing",
    "other": "the rest",
    "unexplained": "not explained",
}


def _profile(plan: PlanResult, run: RunResult, profile: Profile, page: Path, before: RunResult | None) -> View:
    """Return a run's profile, and what changed since the one `before` it."""
    folder = Path(os.path.relpath(run.folder / "profile", page))
    tools = []
    for tool in profile.tools:
        files = [(title, (folder / name).as_posix()) for title, name in tool.files.items()]
        tools.append({"tool": tool, "files": files})
    top = [entry for entry in profile.top if entry.kind in ("kernel", "operator")][:TOP] or profile.top[:TOP]
    return {
        "id": plan.anchor(run),
        "label": run.label,
        "tools": tools,
        "top": top,
        "memory": profile.memory,
        "exchanged": _exchanged(profile),
        "cpu": profile.device.kind == "cpu",
        "summary": (folder / "profile_summary.csv").as_posix(),
        "before": before.label if before else None,
        "changes": _changes(before, run) if before else [],
    }


def _exchanged(profile: Profile) -> list[str]:
    """Say what a rank exchanges in a step, kind by kind, beside what the formula says."""
    if not (found := profile.exchanged):
        return []
    counted, expected = ({kind: text.size(n) for kind, n in each.items()} for each in (found.counted, found.formula))
    return [
        f"{kind.replace('_', '-')} {counted.get(kind, 'none')} (by formula {expected.get(kind, 'none')})"
        for kind in sorted({**counted, **expected})
    ]


def _changes(before: RunResult, run: RunResult) -> list[compare_profiles.Change]:
    """Return what got faster and slower between two profiles and is more than their noise, the greatest first."""
    one, other = (compare_profiles.read(each.folder) for each in (before, run))
    changes = [change for change in compare_profiles.compare(one, other) if change.certain]
    first = next(iter(changes)).tool if changes else ""  # two profilers would tell the same twice
    changes = [change for change in changes if change.tool == first]
    faster, slower = compare_profiles.extremes(changes, TOP // 2)
    return [*faster, *slower]


def _watched(plan: PlanResult) -> View | None:
    """Return what the machine did while runs trained (or were measured, if they were not); None if nobody watched."""
    watched = []
    for run in first_and_least([run for run in plan.runs if any(run.telemetry.values())], BARS, slowness):
        stage = next(stage for stage, nodes in run.telemetry.items() if nodes)
        samples = run.telemetry[stage][0]
        if series := _series(samples):
            name = f"{plan.name}-{run.name}-watched"
            watched.append({"label": run.label, "stage": stage, "svg": figures.strips(name, series)})
    return {"runs": watched} if watched else None


def _series(samples: Sequence[Sample]) -> list[figures.Strip]:
    """Return the strips of a node: what is known, in units that read well."""
    if not samples:
        return []
    start, cores, gib = begin(samples), samples[0].cores, 2**30
    wanted: list[tuple[str, Callable[[Sample], float | None], float | None]] = [
        ("processors: the run (cores)", lambda s: None if s.cpu_run is None else s.cpu_run * s.cores, cores),
        ("processors: others (cores)", lambda s: None if s.cpu_others is None else s.cpu_others * s.cores, cores),
        ("memory of the run (GiB)", lambda s: None if s.rss_bytes is None else s.rss_bytes / gib, None),
        ("reading, system calls (MB/s)", lambda s: _scaled(s.read_bytes_per_second, 1e-6), None),
        ("reading, system calls (thousand/s)", lambda s: _scaled(s.reads_per_second, 1e-3), None),
        ("reading, from disks (MB/s)", lambda s: _scaled(s.disk_read_bytes_per_second, 1e-6), None),
        ("GPUs, mean (% of time with a kernel)", lambda s: _scaled(_gpu(s, "utilization"), 100), 100),
        ("GPUs, sum (W)", lambda s: _scaled(_gpu(s, "watts"), len(s.gpus)), None),
        ("GPUs, mean memory (GiB)", lambda s: _scaled(_gpu(s, "memory_bytes"), 1 / gib), None),
    ]
    strips: list[figures.Strip] = []
    for label, value, top in wanted:
        points = [(sample.time - start, y) for sample in samples if (y := value(sample)) is not None]
        if points and (top or any(y > 0 for _, y in points)):
            strips.append((label, [x for x, _ in points], [y for _, y in points], top))
    return strips


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _gpu(sample: Sample, column: str) -> float | None:
    values = [getattr(gpu, column) for gpu in sample.gpus if getattr(gpu, column) is not None]
    return statistics.fmean(values) if values else None


def _predictions(plan: PlanResult, limit: int) -> View | None:
    """Return the figures of prediction against truth, that of the best run first."""
    drawn = [(run, run.prediction) for run in plan.trained if run.prediction]
    if not drawn:
        return None
    drawn.sort(key=lambda pair: pair[0] is not plan.best)
    pictures = [{"label": run.label, "best": run is plan.best, **picture(path)} for run, path in drawn[:limit]]
    judge = sweep.title(plan) if plan.record.sweep else plan.judge and plan.judge.title
    best = f"the best {judge}" if judge else "the least validation loss"
    return {"pictures": pictures, "of": len(drawn), "best": best}


def _provenance(plan: PlanResult, run: RunResult, plans: set[str], page: Path) -> View:
    """Return what a run was made with: whatever its stages recorded, the best known first."""
    record = run.provenance
    facts = record.model_dump(exclude={"command", "loss", "metrics"}, exclude_unset=True) if record else {}
    git, packages = facts.pop("git", None) or {}, facts.pop("packages", None) or {}
    started, finished = facts.pop("started", None), facts.pop("finished", None)
    facts.pop("links", None)
    rows = {
        "git commit": f"{git.get('commit')}{' with local changes' * bool(git.get('dirty'))}" if git else None,
        "started": started,
        "finished": f"{finished}, after {_elapsed(started, finished)}" if started and finished else finished,
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items() if version),
        "device": _plain(run.device.model_dump(exclude_defaults=True)),
        "links": links.line() if (links := _links(run)) else None,
    }
    rows |= {key.replace("_", " "): _plain(value) for key, value in facts.items() if key != "device"}
    elsewhere = run.owner != f"{plan.name}/{run.name}"
    return {
        "id": plan.anchor(run),
        "label": run.label,
        "owner": run.owner if elsewhere else None,
        "owner_id": f"run.{run.owner.replace('/', '.')}" if run.owner.split("/")[0] in plans else None,
        "command": record.command if record else None,
        "facts": [(key, value) for key, value in rows.items() if value],
        "settings": _yaml(run.settings),
        "logs": [
            (stage, Path(os.path.relpath(log, page)).as_posix())
            for stage in RUN_STAGES
            if (log := run.folder.parents[2] / f"logs/{stage}/{run.owner}.log").exists()
        ],
    }


def _links(run: RunResult) -> Links | None:
    """Return what the processes of a run measured of the links between them, first those of the throughput stage."""
    found = [record.links for record in (run.throughput, run.provenance) if record and record.links]
    return found[0] if found else None


def _plain(value: Any) -> str:
    if value is None or value in ({}, []):
        return ""
    return _yaml(value).rstrip() if isinstance(value, dict | list) else str(value)


def _yaml(value: Any) -> str:
    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True))


def _elapsed(started: str, finished: str) -> str:
    try:
        return text.duration((datetime.fromisoformat(finished) - datetime.fromisoformat(started)).total_seconds())
    except (TypeError, ValueError):
        return text.NONE
