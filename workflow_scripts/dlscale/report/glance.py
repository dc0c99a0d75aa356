"""The page's cards: how fast a plan's runs are, what bounds them, how good they are."""

from __future__ import annotations

import math
import statistics
from typing import Any

from dlscale.core.records import MODES
from dlscale.report import published
from dlscale.report.diagnosis import bound
from dlscale.report.results import PlanResult, RunResult, by_settings, first_and_least, slowness
from dlscale.report.verdict import of

View = dict[str, Any]

#: How many runs, or metrics, a card shows.
BARS = 6


def speed(plan: PlanResult) -> View | None:
    """Return the fastest run, and bars of the first and the fastest ones; None if none was measured.

    Of a plan of larger batches the seeds of a training are one, at their mean speed.
    """
    found = [run for run in plan.runs if run.speed and run.averages] or [run for run in plan.runs if run.speed]
    if not found:
        return None
    alike = by_settings(found) if plan.record.kind == "convergence" else [(run.label, [run]) for run in found]
    groups = {runs[0]: (label, statistics.fmean(run.speed or 0.0 for run in runs)) for label, runs in alike}
    measured = list(groups)
    fastest = min(measured, key=lambda run: -groups[run][1])
    label, greatest = groups[fastest]
    first, slow = groups.get(plan.runs[0], (plan.runs[0].label, plan.runs[0].speed))

    def speed_up(run: RunResult) -> float | None:
        return groups[run][1] / slow if slow else None

    full = "throughput" in plan.record.measure
    figures = published.series(plan.record.published, plan.name, [run.name for run in plan.runs])
    return {
        "what": "FULL: loading and computing together" if full else "Training, median over epochs",
        "fastest": label,
        "seeds": any(len(runs) > 1 for _, runs in alike),
        "speed": greatest,
        "speed_up": speed_up(fastest) if fastest is not plan.runs[0] else None,
        "first": first,
        "bars": [
            {
                "label": groups[run][0],
                "id": plan.anchor(run),
                "speed": groups[run][1],
                "share": groups[run][1] / greatest,
                "speed_up": speed_up(run),
                "fastest": run is fastest,
                "published": published.beside(figures, run.name),
            }
            for run in first_and_least(measured, BARS, lambda run: -groups[run][1])
        ],
        "of": len(measured),
    }


def fastest_bound(plan: PlanResult) -> View | None:
    """Return what bounds the fastest run; None if that was not measured."""
    run = min([run for run in plan.runs if run.averages] or plan.runs, key=slowness)
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
