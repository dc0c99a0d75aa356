"""Answers at a glance: how fast a plan's runs are, what bounds them, how good they are; in cards, and in a line."""

from __future__ import annotations

import math

from dlscale.core.text import count, duration, number, percent, unit
from dlscale.measure.records import MODES
from dlscale.report import published
from dlscale.report.blocks import View, joules
from dlscale.report.diagnosis import bound
from dlscale.report.results import PlanResult, Reached, RunResult, first_and_least, reached, slowness, without_seed
from dlscale.report.speedup import Group, SpeedUps
from dlscale.report.verdict import of

#: How many runs, or metrics, a card shows.
BARS = 6


def line(plan: PlanResult) -> str:
    """Return a plan's fastest run, and how good its best one is: the end of a call says it."""
    said, several = [], len(plan.runs) > 1
    if found := speed(plan):
        told = f"{number(found['speed'])} samples/s"
        if found["gain"]:
            told = f"{found['fastest']} is fastest, {found['gain'].words} as fast as {found['first']}, {told}"
        said.append(
            told if found["gain"] or found["alone"] or not several else f"{told}, no run is faster beyond noise"
        )
    if found := quality(plan):
        lead = found["lead"]
        if lead and lead["skill"] is not None:
            more = "less" if lead["skill"] >= 0 else "more"
            told = f"{percent(abs(lead['skill']))} {more} error than {lead['answer']}"
        elif lead:
            told = f"{lead['metric'].full_title} {number(lead['value'])} {unit(lead['metric'].unit)}".strip()
        else:
            told = f"validation loss {number(found['last'].valid_loss)}"
        said.append(f"{told} ({found['run']})" if several else told)
    return f"{plan.name}: {'; '.join(said) or 'nothing was measured'}"


def _fastest(plan: PlanResult) -> tuple[Group, list[Group], list[Group]] | None:
    """Return the fastest of a plan's groups of runs, those that noise does not tell from it, and all; None if none."""
    measured = [run for run in plan.runs if run.speed and run.averages] or [run for run in plan.runs if run.speed]
    speeds = SpeedUps(plan.runs)
    groups = [group for group in speeds.groups if group.runs[0] in measured]
    return (*speeds.fastest(groups), groups) if groups else None


def speed(plan: PlanResult) -> View | None:
    """Return the fastest run, and bars of the first and the fastest ones; None if none was measured.

    Runs that do the same work are one, at their mean speed. What is said to be the fastest is so beyond noise.
    """
    if (found := _fastest(plan)) is None:
        return None
    fastest, like, groups = found
    rates = [run.speed or 0.0 for run in fastest.runs]
    full = "throughput" in plan.record.measure
    figures = published.series(plan.record.published, plan.name, [run.name for run in plan.runs])
    greatest = max(group.speed for group in groups)
    # The fastest in turns may have been the slowest by itself.
    shown = first_and_least(groups, BARS, lambda group: -math.inf if group is fastest else -group.speed)
    return {
        "what": "FULL: loading and computing together" if full else "Training, median over epochs",
        "fastest": _label(fastest),
        "alone": len(groups) == 1,
        "pooled": any(len(group.runs) > 1 for group in groups),
        "speed": fastest.speed,
        "range": (min(rates), max(rates)) if len(rates) > 1 else None,
        "turns": any(group.gain and run.throughput and run.throughput.beside for group in groups for run in group.runs),
        "gain": fastest.gain,
        "like": [_label(group) for group in like],
        "first": next((_label(group) for group in groups if plan.runs[0] in group.runs), plan.runs[0].label),
        "bars": [
            {
                "label": _label(group),
                "id": plan.anchor(group.runs[0]),
                "speed": group.speed,
                "share": group.speed / greatest,
                "gain": group.gain,
                "fastest": group is fastest,
                "published": published.beside(figures, group.runs[0].name),
            }
            for group in shown
        ],
        "of": len(groups),
    }


def _label(group: Group) -> str:
    if len(group.runs) == 1:
        return group.runs[0].label
    labels = list(dict.fromkeys(map(without_seed, group.runs)))
    return ", ".join(labels) if len(labels) <= 2 else f"{labels[0]} and {len(labels) - 1} like it"


def fastest_bound(plan: PlanResult) -> View | None:
    """Return what bounds the run that `speed` calls the fastest; None if that was not measured."""
    if (found := _fastest(plan)) is None:
        return None
    run = min(found[0].runs, key=slowness)
    if (bounding := bound(run.throughput)) is None:
        return None
    means, judged = {mode: trials.mean for mode in MODES if (trials := run.trials(mode))}, of(run)
    return {
        "bound": bounding,
        "finding": next(iter(judged.findings), None),
        "todo": judged.todo,
        "run": run.label,
        "bars": [(mode, mean, mean / max(means.values())) for mode, mean in means.items()],
    }


def quality(plan: PlanResult) -> View | None:
    """Return the losses of the best run, its leading metric, and each error beside that of the naive answer."""
    if plan.best is None:
        return None
    last, lead = plan.best.epochs[-1], None
    skills = [(metric, metric.skill(last.metrics)) for metric in plan.described.values()]
    scores = [
        {"metric": metric, "value": last.metrics[metric.name], "skill": skill}
        for metric, skill in skills
        if skill is not None and math.isfinite(skill)
    ]
    if plan.lead and plan.lead.name in last.metrics:
        lead = {
            "metric": plan.lead,
            "value": last.metrics[plan.lead.name],
            "naive": last.metrics.get(plan.lead.naive or ""),
            "skill": plan.lead.skill(last.metrics),
            "answer": plan.answer(plan.lead, last.metrics),
        }
    return {"run": plan.best.label, "last": last, "lead": lead, "scores": scores[:BARS], "of": len(scores)}


def targets(plan: PlanResult) -> list[View]:
    """Return for each target of the plan's runs, in words, who reached it first and who for the least."""
    by_aim: dict[str, list[tuple[RunResult, Reached]]] = {}
    for run in plan.runs:
        if found := reached(run):
            by_aim.setdefault(found.aim, []).append((run, found))
    views = []
    for aim, all_ in by_aim.items():
        there = [(run, found) for run, found in all_ if found.epoch]
        missed = [(run.label, number(found.nearest)) for run, found in all_ if not found.epoch]
        least = {
            who: min(known, key=lambda pair: getattr(pair[1], key), default=None)
            for who, key in (("first", "seconds"), ("cheapest", "gpu_hours"), ("thriftiest", "joules"))
            for known in ([pair for pair in there if getattr(pair[1], key) is not None],)
        }
        least["first"] = least["first"] or next(iter(there), None)
        took = {who: pair and _took(*pair) for who, pair in least.items()}
        views.append({"aim": aim, "of": len(all_), "reached": len(there), "missed": missed, **took})
    return views


def _took(run: RunResult, found: Reached) -> View:
    assert found.epoch is not None  # it is of those that are there
    return {
        "run": run.label,
        "epochs": found.epoch.epoch,
        "samples": count(found.epoch.samples),
        "time": None if found.seconds is None else duration(found.seconds),
        "hours": None if found.gpu_hours is None else f"{number(found.gpu_hours)} {run.hours}",
        "energy": None if found.joules is None else joules(found.joules),
    }
