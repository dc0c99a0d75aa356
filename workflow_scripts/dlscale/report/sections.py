"""A plan's section of the page: curves, throughput, tables, predictions, provenance."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import yaml

from dlscale.core import text
from dlscale.report import figures, glance, published
from dlscale.report.collect import summary_csv
from dlscale.report.diagnosis import bound, disturbance, gain
from dlscale.report.drawing import MARKERS, picture
from dlscale.report.glance import View
from dlscale.report.results import PlanResult, RunResult, first_and_least, slowness
from dlscale.report.tables import channel_tables, runs_table

#: What keeps a report of hundreds of runs readable: how many of them each part shows.
LINES = len(MARKERS)
BARS = 8
CHANNEL_ROWS = 40


def plan_view(plan: PlanResult, datasets: Sequence[str], plans: set[str], pictures: int) -> View:
    """Return what the page, which has these datasets and plans, shows of a plan: at most so many `pictures`."""
    used = dict.fromkeys(str(run.settings.get("dataset")) for run in plan.runs)
    return {
        "name": plan.name,
        "title": plan.title,
        "study": plan.record.study,
        "kind": plan.record.kind,
        "runs": len(plan.runs),
        "left_out": plan.record.left_out,
        "disturbance": disturbance(plan.runs),
        "datasets": [{"name": name, "linked": name in datasets} for name in used],
        "devices": devices(plan.runs),
        "speed": glance.speed(plan),
        "bound": glance.fastest_bound(plan),
        "quality": glance.quality(plan),
        "loss": plan.loss,
        "published": published.summary(plan.record.published),
        "curves": _curves(plan),
        "throughput": _throughput(plan),
        "table": runs_table(plan),
        "csv": base64.b64encode(summary_csv(plan).encode()).decode(),
        "channels": channel_tables(plan, _least_loss(plan, CHANNEL_ROWS)),
        "predictions": _predictions(plan, pictures),
        "provenance": [_provenance(plan, run, plans) for run in plan.runs],
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
    title, unit = plan.loss.title, plan.loss.unit
    label = f"{title}{' loss' * ('loss' not in title)}{f' ({unit})' * bool(unit)}"
    small = []
    if lead := plan.lead:
        if any(plan.skill(run.epochs[-1]) is not None for run in runs):
            drawing = figures.skill(f"{plan.name}-skill", runs, plan.skill)
            small.append((drawing, "Skill on the validation data; 1 is perfect."))
        elif not lead.channel:
            unit = text.unit(lead.unit)
            axis = f"{lead.title}{f' ({unit})' * bool(unit)}"
            drawing = figures.by_epoch(f"{plan.name}-lead", runs, lambda epoch: epoch.metrics.get(lead.name), axis)
            capital = lead.title[:1].upper() + lead.title[1:]
            small.append((drawing, f"{capital} on the validation data; {lead.better} is better."))
    small.append((figures.learning_rate(f"{plan.name}-rate", runs), "Learning rate at the end of each epoch."))
    return {
        "large": [
            (figures.loss(f"{plan.name}-epoch", runs, "epoch", label), "Loss over epochs: what each pass teaches."),
            (figures.loss(f"{plan.name}-time", runs, "time", label), "Loss over training time: what waiting buys."),
        ],
        "small": small,
        "legend": [(run.label, style, MARKERS[style][1]) for style, run in enumerate(runs)],
        "of": len(plan.trained),
    }


def _throughput(plan: PlanResult) -> View | None:
    measured = [run for run in plan.runs if run.throughput]
    if not measured:
        return None
    shown = first_and_least(measured, BARS, slowness)
    rungs = plan.runs if plan.record.kind == "ladder" else []
    gains = {run: gain(before, run) for before, run in itertools.pairwise(rungs)}
    return {
        "svg": figures.throughput(f"{plan.name}-throughput", shown),
        "bounds": [
            {"run": run.label, "id": plan.anchor(run), "gain": gains.get(run), "bound": bound(run.throughput)}
            for run in shown
        ],
        "of": len(measured),
    }


def _predictions(plan: PlanResult, limit: int) -> View | None:
    """Return the figures of prediction against truth, that of the best run first."""
    drawn = [(run, run.prediction) for run in plan.trained if run.prediction]
    if not drawn:
        return None
    drawn.sort(key=lambda pair: pair[0] is not plan.best)
    pictures = [{"label": run.label, "best": run is plan.best, **picture(path)} for run, path in drawn[:limit]]
    best = f"the best {plan.judge.title}" if plan.judge else "the least validation loss"
    return {"pictures": pictures, "of": len(drawn), "best": best}


def _provenance(plan: PlanResult, run: RunResult, plans: set[str]) -> View:
    """Return what a run was made with: whatever its stages recorded, the best known first."""
    record = run.provenance
    facts = record.model_dump(exclude={"command", "loss", "metrics"}, exclude_unset=True) if record else {}
    git, packages = facts.pop("git", None) or {}, facts.pop("packages", None) or {}
    started, finished = facts.pop("started", None), facts.pop("finished", None)
    rows = {
        "git commit": f"{git.get('commit')}{' with local changes' * bool(git.get('dirty'))}" if git else None,
        "started": started,
        "finished": f"{finished}, after {_elapsed(started, finished)}" if started and finished else finished,
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items() if version),
        "device": _plain(run.device.model_dump(exclude_defaults=True)),
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
    }


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
