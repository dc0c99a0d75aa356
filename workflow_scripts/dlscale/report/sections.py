"""Build a plan's part of the page: its summary (card) and sections.

Each function in `SECTIONS` makes one section, or returns None if the plan has no data for this section.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from dlscale.config.records import SweepRecord
from dlscale.core import registry, text
from dlscale.core.environment import Environment
from dlscale.core.errors import UserError
from dlscale.core.files import open_regular, reading
from dlscale.core.metrics import Metric
from dlscale.core.settings import flat, nested
from dlscale.core.stages import RUN_STAGES
from dlscale.measure.records import MODE_NAMES, MODES, SAMPLE_RATE, STEP_RATE
from dlscale.report import curves, published, scaling
from dlscale.report.collect import Row, rows_of, summary_csv
from dlscale.report.evidence import bound
from dlscale.report.figures import (
    COLOURS,
    MODE_COLOURS,
    MUTED,
    WORSE,
    Cell,
    Chart,
    Section,
    Table,
    View,
    bars,
    cell,
    heading,
    joules,
    some,
    table,
)
from dlscale.report.speedup import Group, SpeedUp, SpeedUps
from dlscale.report.verdict import disturbance, judge_run
from dlscale.results import (
    UNKNOWN,
    PlanResult,
    Reached,
    RunResult,
    environment_changes,
    first_and_least,
    reached,
    slowness,
    without_seed,
)

#: Maximum number of bars for runs, and of bars for metrics, in a plan's card.
CARD = 6

#: Maximum number of runs that the charts of a plan show at first.
DRAWN = 8

#: Maximum width and height of a plan's picture in the table of all plans, pixels; the page shows half this size.
THUMBNAIL = (280, 120)

#: Maximum number of trials in the table of a sweep.
TRIALS = 40

#: Maximum number of runs in a table of errors by channel.
CHANNEL_ROWS = 40


@dataclass(frozen=True)
class Page:
    """Settings of a page: its folder, its plans and datasets, and options."""

    folder: Path = Path()  #: Folder of the page, to which links to files are relative.
    plans: frozenset[str] = frozenset()
    datasets: frozenset[str] = frozenset()
    pictures: int = 3  #: Maximum number of prediction figures per plan.
    references: Sequence[Path] = ()  #: `reference.json` of each imported log.
    call: str = "snakemake"  #: Shell command that starts the workflow.


def plan_view(plan: PlanResult, page: Page) -> View:
    """Return the variables of a plan for the template."""
    used = dict.fromkeys(str(run.settings["dataset"]) for run in plan.runs if "dataset" in run.settings)
    sections = [section for make in _sections() if (section := make(plan, page))]
    names = list(dict.fromkeys(run for section in sections for chart in section.charts for run in chart.runs))
    least = first_and_least(plan.runs, DRAWN, lambda run: (run.final_loss, slowness(run)))
    # Charts of a convergence plan name groups of runs; if no run has such a name, show the first groups.
    first = {run.called for run in least} & set(names) or set(names[:DRAWN])
    lacking: dict[str, list[str]] = {}
    for run, what in plan.record.left_out.items():
        lacking.setdefault(what, []).append(run)
    view = {
        "name": plan.name,
        "title": plan.title,
        "study": plan.record.study,
        "kind": plan.record.kind,
        "runs": len(plan.runs),
        "left_out": lacking,
        "omitted": len(plan.record.left_out),
        "disturbance": disturbance(plan.runs, page.call),
        "environments": environments(plan),
        "outside": any(run.throughput and run.throughput.outside for run in plan.runs),
        "datasets": [{"name": name, "linked": name in page.datasets} for name in used],
        "devices": devices(plan.runs),
        "speed": speed(plan),
        "bound": fastest_bound(plan, page.call),
        "quality": quality(plan),
        "targets": targets(plan),
        "scales": scaling.glance(plan),
        **added(plan),
        "swept": sweep_view(plan),
        "loss": plan.loss,
        "picture": thumbnail(plan),
        "sections": sections,
        "chosen": {name: name in first for name in names},
    }
    return view | {"lead": lead(view)}


def added(plan: PlanResult) -> View:
    """Return the extensions' additions to a card: verdicts on tuned runs, and the first tuned run's best settings."""
    view: View = {"tuned": [], "winner": None}
    for name in registry.table("CARDS").values():
        view |= registry.named(name)(plan)
    return view


def lead(card: View) -> str:
    """Return the first lines of a plan's card: speed-up, limit of the speed, next remedy."""
    said, found, bound = list[str](), card["speed"], card["bound"]
    if swept := card["swept"]:
        said.append(f"“{swept['best']}” is the best of {swept['of']} trials.")
    elif found and found["efficiency"]:
        known = found["efficiency"]
        said.append(f"Efficiency on {known['place']}: {known['ratio']} {known['interval_text']}".strip() + ".")
    elif found and not found["known"]:
        said.append("The fastest run is not known, because other programs or jobs disturbed the measurement.")
    elif found and found["gain"]:
        said.append(f"{found['quoted']}: {found['gain'].words} as fast as “{found['first']}”.")
    elif found and found["of"] > 1:
        said.append(f"No run trains significantly faster than “{found['first']}”.")
    elif found:
        said.append(f"{found['quoted']}: {text.number(found['speed'])} {found['unit']}.")
    if bound and bound["bound"]:
        said.append(f"The limit is {bound['bound'].what}.")
    if bound and bound["todo"]:
        said.append(f"Try next: {re.split(r'(?<=[.;]) ', bound['todo'])[0].rstrip('.;')}.")
    return " ".join(said)


def devices(runs: Iterable[RunResult]) -> list[str]:
    """Return the devices that runs were measured on, each once; CPUs with their numbers of threads."""
    found = dict[str, set[int]]()
    for device in (run.device for run in runs if run.device.name):
        found.setdefault(device.name, set()).update({device.threads or 0} if device.kind == "cpu" else ())
    threads = {name: " or ".join(map(str, sorted(numbers - {0}))) for name, numbers in found.items()}
    return [name + f", {own} thread{'s' * (own != '1')}" * bool(own) for name, own in threads.items()]


def environments(plan: PlanResult) -> list[str]:
    """Return a line for each way in which runs differ from the first run in machine or software."""
    found = dict[str, list[str]]()
    for run in plan.runs[1:]:
        # Ignore the commit: if code that affects a run changes, the run is repeated.
        apart = [each for each in environment_changes(plan.runs[0], run) if not each.startswith("commit ")]
        if apart:
            found.setdefault(", ".join(apart), []).append(run.label)
    return [
        f"Unlike run “{plan.runs[0].label}”, run “{'”, “'.join(runs)}” had another machine or other software: {words}."
        for words, runs in found.items()
    ]


# ---- the card ----------------------------------------------------------------------------------------


def line(plan: PlanResult) -> str:
    """Summarise a plan in one line for the terminal: fastest run, best run, tuning, sweep, and disturbances."""
    several = len(plan.runs) > 1
    said = [f"{each['run']}: " * several + each["verdict"].rstrip(".") for each in added(plan)["tuned"]]
    if found := sweep_view(plan):
        said.append(f"best of {found['of']} trials: {found['best']}, {found['metric']} {found['score']}")
    if found := speed(plan):
        told = f"{text.number(found['speed'])} {found['unit']}"
        if found["efficiency"]:
            told = f"{text.number(found['efficiency']['speed'])} {found['unit']}, {scaling.glance(plan)}"
        elif not found["known"]:
            told = f"fastest run {UNKNOWN}; highest rate {told}, {found['quoted']}"
        elif found["gain"]:
            told += f" with {found['quoted']}, {found['gain'].words} as fast as “{found['first']}”"
        elif several and not found["alone"]:
            told += f" with {found['quoted']}, no significant speed-up of other runs"
        said.append(told)
    if found := quality(plan):
        lead = found["lead"]
        if lead and lead["skill"] is not None:
            more = "less" if lead["skill"] >= 0 else "more"
            told = f"{text.percent(abs(lead['skill']))} {more} error than {lead['answer']}"
        elif lead:
            told = f"{lead['metric'].full_title} {text.number(lead['value'])} {text.unit(lead['metric'].unit)}".strip()
        else:
            told = f"validation loss {text.number(found['last'].valid_loss)}"
        if not plan.record.sweep:
            said.append(f"best run “{found['run']}”: {told}" if several else told)
    if busy := disturbance(plan.runs):
        said.append(f"{busy.tag}: speeds are probably too low")
    return f"{plan.name}: {'; '.join(said) or 'nothing was measured'}"


def _fastest(plan: PlanResult) -> tuple[Group, list[Group], list[Group], bool] | None:
    """Return the fastest group of runs, groups equally fast within noise, all groups, and whether the fastest is known.

    Return None without speeds.
    """
    measured = [run for run in plan.runs if run.speed and run.averages] or [run for run in plan.runs if run.speed]
    speeds = SpeedUps(plan.runs)
    groups = [group for group in speeds.groups if group.runs[0] in measured]
    if not groups:
        return None
    # If other programs disturbed separate measurements, the first group is the group with the highest rate.
    known = not any(group.gain.disturbed for group in groups if group.gain)
    best, like = speeds.fastest(groups) if known else (max(groups, key=lambda group: group.speed), [])
    return best, like, groups, known


def speed(plan: PlanResult) -> View | None:
    """Return the fastest run, and bars for the first run and the fastest runs; None if no speed was measured.

    The first run is the fastest unless another run is significantly faster. Runs that do the same work count as one
    run with their mean speed.
    """
    if (found := _fastest(plan)) is None:
        return None
    (fastest, like, groups, known), first = found, SpeedUps(plan.runs).first
    rates = [run.speed or 0.0 for run in fastest.runs]
    figures = published.series(plan.record.published, plan.name, [run.name for run in plan.runs])
    # Figures published for another size, such as a demo's full-size model, appear only in the table of all runs.
    figures = {run: figure for run, figure in figures.items() if f"{plan.name}.{run}" in figure.runs}
    # Prefer ratios from paired timing: quotients of the separately measured speeds may contradict these ratios.
    base = first.speed or fastest.speed
    ratios = {id(group): group.gain.ratio if group.gain else group.speed / base for group in groups}
    greatest = max(ratios.values())
    # Always show the run that is fastest by paired timing, even if its separately measured speed is lower.
    shown = first_and_least(groups, CARD, lambda group: -math.inf if group is fastest else -group.speed)
    return {
        "full": bool(fastest.runs[0].throughput),
        "unit": first.unit,
        "what": "loading and computing together" if fastest.runs[0].throughput else "median over epochs",
        "fastest": _label(fastest),
        "quoted": f"“{_label(fastest, '” and “')}”",
        "alone": len(groups) == 1,
        "speed": fastest.speed,
        "range": (min(rates), max(rates)) if len(rates) > 1 else None,
        "turns": any(group.gain and run.throughput and run.throughput.beside for group in groups for run in group.runs),
        "gain": fastest.gain,
        "known": known,
        "efficiency": _efficiency(plan),
        "like": [_label(group) for group in like],
        "first": next((_label(group) for group in groups if first in group.runs), first.called),
        "bars": [
            {
                "label": _label(group),
                "id": plan.anchor(group.runs[0]),
                "speed": group.speed,
                "share": 0.0 if group.gain and group.gain.unknown else ratios[id(group)] / greatest,
                "ratio": ratios[id(group)],
                "gain": group.gain,
                "fastest": group is fastest and known,
                "published": published.quoted(figures, group.runs[0].name),
            }
            for group in shown
        ],
        "of": len(groups),
    }


def _efficiency(plan: PlanResult) -> View | None:
    """Return the weak-scaling efficiency on the most devices; None for other plans or if unknown."""
    found = scaling.headline(plan) if plan.record.kind == "weak_scaling" else None
    if found is None:
        return None
    own = {key: getattr(found, key) for key in ("ratio", "interval_text", "place", "is_known")}
    return {**own, "run": found.point.run.called, "speed": found.point.run.speed}


def _label(group: Group, joint: str = " and ") -> str:
    if len(group.runs) == 1:
        return group.runs[0].called
    labels = list(dict.fromkeys(map(without_seed, group.runs)))
    return joint.join(labels) if len(labels) <= 2 else f"{labels[0]} and {len(labels) - 1} equal runs"


def fastest_bound(plan: PlanResult, call: str) -> View | None:
    """Return the limit of the fastest run (in scaling: on the most devices) for the card; None if unknown."""
    if (found := _fastest(plan)) is None:
        return None
    scaled = scaling.headline(plan)
    run = scaled.point.run if scaled else min(found[0].runs, key=slowness)
    judged, program = judge_run(run), run.throughput is not None and run.throughput.outside is not None
    if judged.bound is None and not program:
        return None
    if scaled and judged.bound and (lost := scaled.communication):
        why = (
            f"Without averaging gradients, a step of the same run is {text.percent(lost.value)} {lost.interval_text} "
            "shorter."
        )
        judged = replace(judged, bound=replace(judged.bound, what="communication", key="both", why=why))
    means = {mode: trials.mean for mode in MODES if (trials := run.trials(mode))}
    # The longest bar is clipped at four times the second longest bar, so that all bars stay visible.
    second, first = sorted([0.0, *means.values()])[-2:]
    longest = min(first, 4 * second) or first
    return {
        "bound": judged.bound,
        "unit": run.unit,
        "findings": [each for each in judged.findings if each.share is not None or each.cause == "neighbour"],
        "todo": judged.todo,
        "command": judged.rung and next_plan(plan, run, judged.rung, call),
        "run": run.called,
        "bars": [(mode, mean, mean / longest) for mode, mean in means.items()],
    }


def next_plan(plan: PlanResult, run: RunResult, rung: str, call: str) -> str:
    """Return shell lines that time a run with and without the settings `rung` (YAML)."""
    own, name = f"{plan.name}.{run.name}", f"{plan.name}_next"
    runs = {"before": {"use": own}, "next": yaml.safe_load(rung)}
    added = {"study": plan.record.study, "from": own, "measure": ["throughput"], "runs": runs}
    content = yaml.safe_dump({"plans": {name: added}}, sort_keys=False)
    flag = "" if "--configfile" in call else " --configfile"
    return f"cat > next.yaml <<'END'\n{content}END\n{call}{flag} next.yaml -- plan_{name}"


def quality(plan: PlanResult) -> View | None:
    """Return the losses, the leading metric and the skill scores of the best run; None without a best run."""
    if plan.best is None:
        return None
    last, lead = plan.best.mean, None
    scores = [
        {"metric": metric, "value": last.metrics[metric.name], "skill": skill}
        for metric in plan.described.values()
        if (skill := metric.skill(last.metrics)) is not None and math.isfinite(skill)
    ]
    if plan.lead and plan.lead.name in last.metrics:
        skill = plan.lead.skill(last.metrics)
        lead = {
            "metric": plan.lead,
            "value": last.metrics[plan.lead.name],
            "naive": last.metrics.get(plan.lead.naive or ""),
            "skill": skill if skill is not None and math.isfinite(skill) else None,
            "answer": plan.lead.answer,
        }
    return {
        "run": plan.best.called,
        "last": last,
        "seeds": 1 + len(plan.best.repeats),
        "lead": lead,
        "scores": scores[:CARD],
        "of": len(scores),
    }


def targets(plan: PlanResult) -> list[View]:
    """Return for each target the run that reached it first, and the runs that missed it."""
    by_aim: dict[str, list[tuple[RunResult, Reached]]] = {}
    for run in plan.runs:
        if found := reached(run):
            by_aim.setdefault(found.aim, []).append((run, found))
    views = []
    for aim, all_ in by_aim.items():
        there = [(run, found) for run, found in all_ if found.epoch]
        missed = [(run.called, found.nearest) for run, found in all_ if not found.epoch]
        first = min(there, key=lambda pair: math.inf if pair[1].seconds is None else pair[1].seconds, default=None)
        # Without the `RunResult`, because a process pool pickles the views.
        winner = first and ({"label": first[0].called, "hours": first[0].hours}, first[1])
        views.append({"aim": aim, "of": len(all_), "reached": len(there), "missed": missed, "first": winner})
    return views


# ---- tables ------------------------------------------------------------------------------------------

#: Function that makes a cell from a run and its row of `summary.csv`.
Make = Callable[[RunResult, Row], Cell]


def all_runs(plan: PlanResult, page: Page) -> Section:
    """Return the table of all runs, and its CSV file."""
    csv = base64.b64encode(summary_csv(plan).encode()).decode()
    runs = {run.name: run.called for run in plan.runs}
    settings = json.dumps(differing(plan), ensure_ascii=False).replace("<", "\\u003c")
    own = {"plan": plan.name, "csv": csv, "runs": runs, "settings": settings}
    return Section("All runs", tables=[runs_table(plan)], form="runs", own=own)


def differing(plan: PlanResult) -> dict[str, dict[str, str]]:
    """Return the values of the settings in which any two runs differ: run → key → value."""
    every = {run.name: {key: str(value) for key, value in flat(run.settings).items()} for run in plan.runs}
    keys = list(dict.fromkeys(key for settings in every.values() for key in settings if key != "label"))
    keys = [key for key in keys if len({settings.get(key) for settings in every.values()}) > 1]
    return {run: {key: settings.get(key, text.NONE) for key in keys} for run, settings in every.items()}


def runs_table(plan: PlanResult) -> Table:
    """Return the table of all runs, without empty columns."""
    ladder, order = plan.record.kind == "ladder", {run: index for index, run in enumerate(plan.runs)}
    speeds, before = SpeedUps(plan.runs), dict(zip(plan.runs[1:], plan.runs, strict=False))

    def column(name: str, shown: Callable[[Any], str] = text.number, note: Callable[..., str] = _spread) -> Make:
        return lambda run, row: cell(row.get(name), shown, note(run, row, name))

    def known(run: RunResult, row: Row, name: str) -> str:
        notes = [_spread(run, row, name)]
        for figure in published.values(plan.record.published, plan.name, run.name, name)[-1:]:
            value = figure.by_epoch[-1] if figure.by_epoch else figure.value
            notes.append(f"published: {published.digits(value)}, {figure.source}")
        return "; ".join(filter(None, notes))

    scalars = [metric for metric in plan.metrics.values() if not metric.channel and not metric.derived]
    epochs = "epochs" + " (external programs: validations)" * any(run.program for run in plan.runs)
    columns: list[tuple[str, str, Make]] = [
        ("Run", "run", lambda run, row: heading(plan, run, order[run])),
        ("Run", "what it changes", lambda run, row: cell(plan.changed(run))),
        ("Run", "batch size", lambda run, row: cell(run.batch_size, text.count)),
        ("Throughput (samples/s)", "median over epochs", column("train_samples_per_second")),
        *(("Throughput (samples/s)", mode, column(f"{mode.lower()}_samples_per_second")) for mode in MODES),
        ("Throughput (steps/s)", "whole program", column("train_steps_per_second")),
        ("Throughput (steps/s)", "FULL", column("full_steps_per_second")),
        ("Verdict", "speed-up", lambda run, row: _gain(speeds.over(run, speeds.first))),
        (
            "Verdict",
            "over the rung before",
            lambda run, row: _gain(speeds.over(run, before[run]) if ladder and run in before else None),
        ),
        ("Verdict", "MFU", column("mfu", text.percent)),
        ("Verdict", "MBU", column("mbu", text.percent, _of_bytes)),
        ("Verdict", "published, full-size model", column("published_samples_per_second", note=_of_published)),
        ("Verdict", "bound by", lambda run, row: cell(each.what if (each := bound(run.throughput)) else None)),
        (
            "Verdict",
            "peak memory",
            lambda run, row: cell(run.throughput and run.throughput.peak_memory_bytes, text.size),
        ),
        ("Training", "parameters", column("parameters", text.count)),
        ("Training", epochs, column("epochs", text.count, _skipped_steps)),
        ("Training", "samples", column("samples", text.count)),
        ("Training", "time", lambda run, row: cell(run.last and run.training_seconds, text.duration)),
        ("Training", "goodput", lambda run, row: _goodput(run)),
        ("Training", "energy", column("energy_joules", joules, _per_sample)),
        ("Training", "training loss", column("train_loss", note=known)),
        ("Training", "validation loss", column("valid_loss", note=known)),
        ("Training", "best validation loss", column("best_valid_loss")),
        ("Training", "best epoch", column("best_epoch", text.count, _of_best)),
        *(
            ("Training", each.title + " (higher is better)" * (each.better == "higher"), column(each.name))
            for each in scalars
        ),
        ("Target", "epochs to it", _reached),
        ("Target", "samples", column("target_samples", text.count)),
        ("Target", "time", column("target_seconds", text.duration)),
        ("Target", plan.runs[0].hours, column("target_gpu_hours")),
        ("Target", "energy", column("target_energy_joules", joules)),
    ]
    rows: list[tuple[RunResult, Row]] = list(zip(plan.runs, rows_of(plan), strict=True))
    return table(
        [(group, heading, [make(run, row) for run, row in rows]) for group, heading, make in columns],
        "Losses and metrics are from the last epoch. Times exclude validation, except the time to the target. ± is a "
        "95 % interval. Standard deviations are over trials or seeds. Click a heading to sort.",
        f"All runs of {plan.title}",
    )


def _spread(run: RunResult, row: Row, name: str) -> str:
    spread = row.get(f"{name}_std")
    return "" if spread is None else f"standard deviation {text.number(spread, 2)}"


def _skipped_steps(run: RunResult, row: Row, name: str) -> str:
    return (
        f"left out {text.many(steps, 'step')} whose loss or gradient was not finite"
        if (steps := sum(epoch.skipped for epochs in (run.epochs, *run.repeats) for epoch in epochs))
        else ""
    )


def _goodput(run: RunResult) -> Cell:
    if not (found := run.goodput):
        return Cell()
    rest = f"validation {text.percent(found.validation)}, starting, saving, waiting {text.percent(found.rest)}"
    return cell(found.training, text.percent, rest)


def _per_sample(run: RunResult, row: Row, name: str) -> str:
    each = run.energy_per_sample
    return f"{joules(each)} per sample" if each else ""


def _gain(found: SpeedUp | None) -> Cell:
    return (
        Cell(UNKNOWN, note=found.unknown)
        if found and found.unknown
        else cell(found and found.ratio, _times, found.interval_text if found and found.error else "")
    )


def _times(ratio: float) -> str:
    return f"{text.number(ratio)}×"


def _of_bytes(run: RunResult, row: Row, name: str) -> str:
    return "from the bytes of the uncompiled step" if run.throughput and run.throughput.compile is not None else ""


def _of_published(run: RunResult, row: Row, name: str) -> str:
    faster = row["published_speed_up"]
    times = "" if faster in (None, 1) else f"{_times(faster)}, "
    return times + ", ".join(str(row[f"published_{key}"]) for key in ("as", "hardware", "source"))


def _of_best(run: RunResult, row: Row, name: str) -> str:
    return f"{row['best_metric']} {text.number(row['best_value'])}"


def _reached(run: RunResult, row: Row) -> Cell:
    return (
        Cell("not reached", note=row["target"])
        if row["target_reached"] == "no"
        else cell(row["target_epoch"], text.count, str(row["target"]))
    )


def channels(plan: PlanResult, page: Page) -> Section | None:
    """Return one table of errors for each kind of metric with channels, with baselines and skills."""
    naive = {metric.naive for metric in plan.metrics.values()}
    kinds: dict[str, list[Metric]] = {}
    rivals: dict[str, list[Metric]] = {}
    for metric in plan.metrics.values():
        if metric.channel and metric.rival and metric.name not in naive:
            rivals.setdefault(metric.rival, []).append(metric)
        elif metric.channel and metric.name not in naive and not metric.derived:
            kinds.setdefault(metric.kind, []).append(metric)
    shown = first_and_least(plan.trained, CHANNEL_ROWS, lambda run: run.final_loss)
    tables = [_channel_table(plan, shown, metrics, rivals) for metrics in kinds.values()]
    return Section("Errors by channel", tables=tables) if tables else None


def _channel_table(
    plan: PlanResult, shown: Sequence[RunResult], metrics: Sequence[Metric], rivals: dict[str, list[Metric]]
) -> Table:
    first, last = metrics[0], [run.mean.metrics for run in shown]
    answers = [(first.answer if rivals else f"baseline: {first.answer}", [metric.naive for metric in metrics])]
    answers += [(f"baseline: {name}", [metric.name for metric in each]) for name, each in rivals.items()]
    finished = [each for each in last if each] or last  # diverged runs have no metrics
    naive = {name: _shared(finished, keys) for name, keys in answers}
    if all(value is None for value in naive[answers[0][0]]):
        naive = {}
    labels = [*map(cell, naive), *(Cell(run.called, n) for n, run in enumerate(shown))]
    rows = dict(zip(plan.runs, rows_of(plan), strict=True)) if plan.repeats else {}
    columns = [("", "run", labels)]
    for place, metric in enumerate(metrics):
        skills = [metric.skill(values) for values in last]
        spreads = [_spread(run, rows.get(run, {}), metric.name) for run in shown]
        known = ["" if skill is None else f"skill {text.number(skill, 2)}" for skill in skills]
        notes = ["; ".join(filter(None, pair)) for pair in zip(spreads, known, strict=True)]
        errors = [cell(values.get(metric.name), note=note) for values, note in zip(last, notes, strict=True)]
        heading = f"{metric.channel} {text.unit(metric.unit)}".strip()
        columns.append(("", heading, [cell(answer[place]) for answer in naive.values()] + errors))
    rest = "the first run and the runs with the lowest validation loss. The CSV file has all runs."
    skill = f" Skill is 1 − error / error of {first.answer}." if first.naive and first.better == "lower" else ""
    return table(
        columns,
        f"{first.title} on the validation data after the last epoch{', means over the seeds' * plan.repeats}.{skill}",
        f"{first.title} by channel, {plan.title}",
        sortable=False,
        note="".join(some(len(shown), len(plan.trained), "runs", rest)),
        title=first.title,
        meaning=first.meaning,
    )


def _shared(last: Sequence[dict[str, float]], names: Sequence[str | None]) -> list[float | None]:
    """Return for each metric the value that is equal in all runs, as for a baseline; None if the values differ."""
    columns = [[values.get(name or "") for values in last] for name in names]
    return [
        column[0]
        if all(value is not None and math.isclose(value, column[0] or 0.0, rel_tol=1e-4) for value in column)
        else None
        for column in columns
    ]


# ---- the ladder --------------------------------------------------------------------------------------

#: Effect of a rung → colour of its bar.
STEPS = {"first": COLOURS[0], "faster": MODE_COLOURS["FULL"], "within noise": MUTED, "slower": WORSE}


def waterfall(plan: PlanResult, page: Page) -> Section | None:
    """Return the chart of each rung's speed-up, with the limit of the rung before; None for other plans or one rung."""
    speeds = SpeedUps(plan.runs)
    runs = speeds.runs if plan.record.kind == "ladder" else []
    if len(runs) < 2:
        return None
    rows, reached = list[View](), 1.0
    for run, before in zip(runs, [None, *runs], strict=False):
        over, gain = speeds.over(run, speeds.first), speeds.over(run, before) if before else None
        if over is None:
            continue
        step = "first" if gain is None else "within noise" if gain.noise else "faster" if gain.log > 0 else "slower"
        was = bound(before.throughput) if before and not before.foreign_load else None
        label = "" if gain is None else gain.words + (f"; limit before: {was.what}" if was else "")
        begin = reached if before else 0.0
        rows.append({"run": run.called, "step": step, "from": begin, "to": over.ratio, "said": label})
        rows[-1] |= {"end": max(begin, over.ratio), "ratio": over.words, "was": was.what if was else text.NONE}
        reached = over.ratio
    words = (
        "Speed of each rung, relative to the first run. Each bar starts at the speed of the rung before it. The "
        "label of a bar gives the speed-up over the rung before, and what limited that rung."
    )
    shown = {"ratio": "over the first run", "said": "over the rung before", "was": "limit of the rung before"}
    more: View = {"colours": STEPS, "by": "step", "stacked": True, "shown": shown, "facts": plan.facts, "room": 1.8}
    return Section("The ladder", charts=[bars(f"{plan.name}-ladder", words, rows, "speed over the first run", **more)])


# ---- throughput --------------------------------------------------------------------------------------


def throughput(plan: PlanResult, page: Page) -> Section | None:
    """Return the rates and verdicts of all runs that were timed; None if no run was timed."""
    measured = [run for run in plan.runs if run.throughput]
    if not measured:
        return None
    return Section(
        "Throughput",
        charts=[
            rates(plan, runs, unit)
            for unit in (SAMPLE_RATE, STEP_RATE)
            if (runs := [run for run in measured if run.unit == unit])
        ],
        form="throughput",
        own=[
            {
                "run": run.called,
                "id": plan.anchor(run),
                "verdict": judge_run(run),
                "modes": run.throughput is not None and run.throughput.outside is None,
            }
            for run in measured
        ],
    )


def rates(plan: PlanResult, runs: Sequence[RunResult], unit: str = SAMPLE_RATE) -> Chart:
    """Return the rates of loading, computing and training as bars, with their standard deviations over the trials."""
    rows = [
        {"run": run.called, "mode": MODE_NAMES[mode], "from": 0.0, "to": trials.mean, "end": trials.mean + trials.std}
        | {"low": trials.mean - trials.std, "high": trials.mean + trials.std, "said": text.number(trials.mean)}
        | {
            "value": text.number(trials.mean)
            + f" (standard deviation {text.number(trials.std, 2)})" * (len(trials.trial_time) > 1),
            "trials": len(trials.trial_time),
        }
        for run in runs
        for mode in MODES
        if (trials := run.trials(mode))
    ]
    what = "Samples" if unit == SAMPLE_RATE else "Steps"
    words = (
        f"{what} per second of each run: {', '.join(dict.fromkeys(str(row['mode']) for row in rows))}. Bars are "
        "means over the trials; thin lines show one standard deviation to each side."
    )
    shown = {"value": unit, "trials": "trials"}
    colours = {MODE_NAMES[mode]: colour for mode, colour in MODE_COLOURS.items()}
    more: View = {"colours": colours, "by": "mode", "shown": shown, "facts": plan.facts}
    name = f"{plan.name}-throughput" + "-steps" * (unit == STEP_RATE)
    return bars(name, words, rows, f"throughput ({unit})", **more)


# ---- sweeps and tunings ------------------------------------------------------------------------------


def sweep_view(plan: PlanResult) -> View | None:
    """Return the best trial of a sweep; None for other plans or without a finite score."""
    if plan.record.sweep is None or plan.best is None:
        return None
    score, better = plan.score(plan.best)
    return {
        "metric": sweep_metric(plan),
        "better": better,
        "best": plan.best.called,
        "score": text.number(score),
        "of": len(plan.trained),
        "method": _method(plan.record.sweep),
        "id": plan.anchor(plan.best),
        "from": f"{plan.name}.{plan.best.name}",
        "settings": yaml.safe_dump(nested(plan.record.sweep.trials[plan.best.name]), sort_keys=False),
    }


def sweep(plan: PlanResult, page: Page) -> Section | None:
    """Return the trials of a sweep, best first, and the best settings; None for other plans or without scores."""
    if (found := sweep_view(plan)) is None or plan.record.sweep is None:
        return None
    ranked, values = plan.ranked, plan.record.sweep.trials
    keys, shown = list(dict.fromkeys(key for each in values.values() for key in each)), ranked[:TRIALS]
    scores = [plan.score(run)[0] for run in shown]
    columns = [
        ("", "trial", [heading(plan, run, rank) for rank, run in enumerate(shown)]),
        *(("", key, [_setting(values[run.name].get(key)) for run in shown]) for key in keys),
        ("", "epochs", [cell(run.epochs[-1].epoch, text.count) for run in shown]),
        ("", sweep_metric(plan), [cell(score) if math.isfinite(score) else Cell("diverged") for score in scores]),
    ]
    caption = "Trials, the best first; diverged trials come last."
    note = "".join(some(len(shown), len(ranked), "trials", "the best trials. The CSV file has all trials."))
    trials = table(columns, caption, f"Trials of {plan.title}", note=note)
    return Section("Sweep", tables=[trials], form="sweep", own=found)


def sweep_metric(plan: PlanResult) -> str:
    """Return the display name of a sweep's metric."""
    assert plan.record.sweep is not None
    name = plan.record.sweep.metric
    known = {"valid_loss": "validation loss", "samples_per_second": "samples/s"}
    if name in known:
        return known[name]
    metric = (plan.metrics or plan.described)[name]
    return f"{metric.channel} {metric.title}".strip()


def _method(record: SweepRecord) -> str:
    if record.method != "halving":
        return {"grid": "all combinations", "random": "drawn at random"}[record.method]
    rungs = [f"{trials} for {until} epoch{'s' * (until != 1)}" for until, trials in record.rungs]
    return f"successive halving: {', '.join(rungs)}; the best trials of each rung continue"


def _setting(value: Any) -> Cell:
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return Cell(f"{value:.12g}", value) if numeric else cell(str(value))


# ---- predictions, provenance -------------------------------------------------------------------------


def predictions(plan: PlanResult, page: Page) -> Section | None:
    """Return the figures of prediction and truth, the best run's first; None without figures."""
    drawn = [(run, run.prediction) for run in plan.trained if run.prediction]
    if not drawn:
        return None
    drawn.sort(key=lambda pair: pair[0] is not plan.best)
    judge = sweep_metric(plan) if plan.record.sweep else plan.judge and plan.judge.title
    best = f", the run with {f'the best {judge}' if judge else 'the lowest validation loss'}" * (len(plan.runs) > 1)
    shown = [
        {"label": run.called, "best": best * (run is plan.best), **picture(p)} for run, p in drawn[: page.pictures]
    ]
    rest = "for the other runs, see prediction.png in their folders."
    notes = some(len(shown), len(drawn), "figures", rest)
    return Section("Predictions", form="predictions", own=shown, notes=notes)


def thumbnail(plan: PlanResult) -> str | None:
    """Return the top of the best run's prediction figure (or else another run's), as a small JPEG in base 64."""
    from PIL import Image

    run = next((run for run in (plan.best, *plan.trained) if run and run.prediction), None)
    if run is None or run.prediction is None:
        return None
    content, small = picture(run.prediction)["data"], io.BytesIO()
    with reading(run.prediction), Image.open(io.BytesIO(base64.b64decode(content))) as image:
        top = image.convert("RGB").crop(
            (0, 0, image.width, min(image.height, int(THUMBNAIL[1] / THUMBNAIL[0] * image.width)))
        )
    top.thumbnail(THUMBNAIL)
    top.save(small, "JPEG", quality=80)
    return base64.b64encode(small.getvalue()).decode()


def picture(path: Path) -> View:
    """Return a PNG file's `width` and `height` in pixels and its content, `data`, in base 64."""
    with open(path, "rb", opener=open_regular) as file:
        content = file.read()
    if content[:8] != b"\x89PNG\r\n\x1a\n" or content[-8:-4] != b"IEND":
        raise UserError(f"{path}: the PNG file is incomplete. Delete the file and run its stage again")
    width, height = struct.unpack(">II", content[16:24])
    return {"width": width, "height": height, "data": base64.b64encode(content).decode()}


def provenance(plan: PlanResult, page: Page) -> Section:
    """Return the provenance of each run: command, code, packages, device, settings."""
    return Section("Provenance", form="provenance", own=[_made(plan, run, page) for run in plan.runs])


def _made(plan: PlanResult, run: RunResult, page: Page) -> View:
    record = run.provenance
    facts = record.model_dump(exclude={"command", "loss", "metrics", "links"}, exclude_unset=True) if record else {}
    traces = [file for tool in (run.profile.tools if run.profile else []) for file in tool.files.items()]
    links = next((each.links for each in (run.throughput, record) if each and each.links), None)
    rows = {
        **(_met(run.environment) if run.environment else {}),
        **{key.replace("_", " "): value for key, value in facts.items()},
        "device": run.device.model_dump(exclude_defaults=True),
        "links": links.line() if links else None,
    }
    files = {f"log of {stage}": run.folder.parents[2] / f"logs/{stage}/{run.owner}.log" for stage in RUN_STAGES}
    files |= {"configuration": run.folder / "config.yaml", "epochs": run.folder / "metrics.jsonl"}
    files |= {title: run.folder / "profile" / name for title, name in traces}
    owner, _, name = run.owner.partition("/")
    # The page has no runs named after the folders of later rungs (`RUN-rungN`), so these folders get no link.
    shown = owner in page.plans and (owner != plan.name or any(each.name == name for each in plan.runs))
    return {
        "id": plan.anchor(run),
        "label": run.called,
        "owner": run.owner if run.owner != f"{plan.name}/{run.name}" else None,
        "owner_id": f"run.{owner}.{name}" if shown else None,
        "command": record.command if record else None,
        "facts": [(key, _plain(value)) for key, value in rows.items() if value not in (None, "", {}, [])],
        "settings": yaml.safe_dump(run.settings, sort_keys=False, allow_unicode=True),
        "files": [
            (title, Path(os.path.relpath(file, page.folder)).as_posix())
            for title, file in files.items()
            if file.exists()
        ],
    }


def _met(environment: Environment) -> dict[str, Any]:
    versions = {**environment.versions, "Python": environment.python}
    facts = environment.model_dump(include={"kernel", "processor", "gpus", "image", "variables"})
    return {"git commit": environment.commit(), "software": ", ".join(map(" ".join, versions.items())), **facts}


def _plain(value: Any) -> str:
    plain = isinstance(value, dict | list)
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True).rstrip() if plain else str(value)


#: Sections of a plan, in the order of the page. Sections of extensions precede `all_runs`.
SECTIONS: tuple[Callable[[PlanResult, Page], Section | None], ...] = (
    sweep,
    waterfall,
    lambda plan, page: scaling.section(plan),
    lambda plan, page: scaling.convergence(plan),
    lambda plan, page: scaling.parallelism(plan),
    lambda plan, page: curves.training(plan),
    throughput,
    all_runs,
    channels,
    predictions,
    provenance,
)


def _sections() -> Iterator[Callable[[PlanResult, Page], Section | None]]:
    for make in SECTIONS:
        if make is all_runs:
            yield from map(registry.named, registry.table("SECTIONS").values())
        yield make
