"""The page's cards: how fast a plan's runs are, what bounds them, how good they are."""

from __future__ import annotations

import math
from typing import Any

from dlscale.measure.records import MODES
from dlscale.report import published
from dlscale.report.diagnosis import bound
from dlscale.report.results import PlanResult, first_and_least, slowness, without_seed
from dlscale.report.speedup import Group, SpeedUps
from dlscale.report.verdict import of

View = dict[str, Any]

#: How many runs, or metrics, a card shows.
BARS = 6


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
            # The fastest in turns may have been the slowest by itself.
            for group in first_and_least(groups, BARS, lambda group: -math.inf if group is fastest else -group.speed)
        ],
        "of": len(groups),
    }


def _label(group: Group) -> str:
    """Return what runs that do the same work are called together."""
    labels = list(dict.fromkeys(without_seed(run) for run in group.runs))
    several = len(group.runs) > 1
    called = labels if several else [group.runs[0].label]
    return ", ".join(called) if len(called) <= 2 else f"{called[0]} and {len(called) - 1} like it"


def fastest_bound(plan: PlanResult) -> View | None:
    """Return what bounds the run that `speed` calls the fastest; None if that was not measured."""
    if (found := _fastest(plan)) is None:
        return None
    run = min(found[0].runs, key=slowness)
    verdict = bound(run.throughput)
    if not verdict:
        return None
    means = {mode: trials.mean for mode in MODES if (trials := run.trials(mode))}
    greatest = max(means.values())
    judged = of(run)
    return {
        "bound": verdict,
        "finding": next(iter(judged.findings), None),
        "todo": judged.todo,
        "run": run.label,
        "bars": [(mode, mean, mean / greatest) for mode, mean in means.items()],
    }


def quality(plan: PlanResult) -> View | None:
    """Return the losses of the best run, its leading metric, and each error beside that of the naive answer."""
    if plan.best is None:
        return None
    last = plan.best.epochs[-1]
    scores = []
    for metric in plan.described.values():
        skill = metric.skill(last.metrics)
        if skill is not None and math.isfinite(skill):
            scores.append({"metric": metric, "value": last.metrics[metric.name], "skill": skill})
    lead = None
    if plan.lead and plan.lead.name in last.metrics:
        naive = last.metrics.get(plan.lead.naive or "")
        lead = {"metric": plan.lead, "value": last.metrics[plan.lead.name], "naive": naive}
        lead["skill"] = plan.lead.skill(last.metrics)
        lead["answer"] = plan.answer(plan.lead, last.metrics)
    return {"run": plan.best.label, "last": last, "lead": lead, "scores": scores[:BARS], "of": len(scores)}
