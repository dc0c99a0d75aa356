"""Stage `report`: one page, in one file, that shows everything that was measured.

The page needs nothing else: styles, script, figures and tables are inside, and its content security
policy forbids it to load anything. The same results give the same bytes.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from dlscale.core.files import write_text
from dlscale.report import datasets, figures, published, text
from dlscale.report.collect import summary_csv
from dlscale.report.diagnosis import bound, disturbance
from dlscale.report.figures import Line
from dlscale.report.results import MODES, PlanResult, RunResult, read_plan
from dlscale.report.tables import METRICS, NAIVE, anchor, channel_tables, runs_table

View = dict[str, Any]

#: What keeps a report of hundreds of runs readable: how many of them each part shows.
CARD_RUNS = 6
LINES = len(figures.MARKERS)
BARS = 8
CHANNEL_ROWS = 40
PREDICTIONS, PREDICTIONS_OF_A_PLAN = 12, 3

#: What a loss is called, and its unit.
LOSSES = {"l1": ("L1", "model units"), "relative_l2": ("relative L2", "no unit")}


def main(args: argparse.Namespace) -> None:
    """Write `args.out` (HTML) from the plans of `args.plans` and the dataset folders of `args.datasets`.

    Parameters
    ----------
    args
        `title` of the page; `plans`: paths of `plan.yaml` files; `datasets`: folders with
        `manifest.json` and `preview.png`; `out`. The page keeps their order.

    Raises
    ------
    UserError
        A result is missing or torn; the message names the file.
    """
    plans = [read_plan(path) for path in dict.fromkeys(args.plans)]
    write_text(args.out, page(args.title, plans, [Path(folder) for folder in dict.fromkeys(args.datasets)]))


def page(title: str, plans: Sequence[PlanResult], folders: Sequence[Path]) -> str:
    """Return the report as HTML."""
    import jinja2
    from markupsafe import Markup

    template, style, script = (_template(name) for name in ("report.html.j2", "style.css", "script.js"))
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {key: getattr(text, key) for key in ("number", "count", "unit", "size", "percent")}
    names = [folder.resolve().name for folder in folders]
    pictures = max(1, min(PREDICTIONS_OF_A_PLAN, PREDICTIONS // max(1, len(plans))))
    return environment.from_string(template).render(
        title=title,
        style=Markup(style),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        svg=Markup,  # what `figures` draws is safe: matplotlib escapes the labels
        plans=[_plan(plan, names, {p.name for p in plans}, pictures) for plan in plans],
        datasets=[datasets.view(folder, name) for folder, name in zip(folders, names, strict=True)],
        studies=[_study(name, plans) for name in dict.fromkeys(plan.study for plan in plans)],
        runs=sum(len(plan.runs) for plan in plans),
        devices=_devices(run for plan in plans for run in plan.runs),
    )


def _template(name: str) -> str:
    return (resources.files("dlscale.report") / "templates" / name).read_text(encoding="utf-8")


def _plan(plan: PlanResult, known: Sequence[str], plans: set[str], pictures: int) -> View:
    """Return what the page shows of a plan.

    Parameters
    ----------
    known
        Names of the datasets that the page has.
    plans
        Names of the plans that it has.
    pictures
        At most this many predictions.
    """
    trained = [run for run in plan.runs if run.epochs]
    used = dict.fromkeys(str(run.settings.get("dataset")) for run in plan.runs)
    best = min(trained, key=_final_loss) if trained else None
    return {
        "name": plan.name,
        "title": plan.title,
        "study": plan.study,
        "kind": plan.kind,
        "runs": len(plan.runs),
        "left_out": plan.left_out,
        "disturbance": disturbance(plan.runs),
        "datasets": [{"name": name, "linked": name in known} for name in used],
        "devices": _devices(plan.runs),
        "speed": _speed(plan),
        "bound": _fastest_bound(plan),
        "quality": _quality(best) if best else None,
        "published": published.summary(plan.study),
        "curves": _curves(plan, trained),
        "throughput": _throughput(plan),
        "table": runs_table(plan),
        "csv": base64.b64encode(summary_csv(plan).encode()).decode(),
        "channels": channel_tables(trained, _some(trained, CHANNEL_ROWS, _final_loss)),
        "predictions": _predictions(trained, best, pictures),
        "provenance": [_provenance(plan, run, plans) for run in plan.runs],
    }


def _study(name: str, plans: Sequence[PlanResult]) -> View:
    return {
        "name": name,
        "title": published.shipped(name).get("title") or name,
        "plans": [{"name": plan.name, "title": plan.title} for plan in plans if plan.study == name],
        "published": published.entries(name),
    }


def _some(runs: Sequence[RunResult], limit: int, rank: Callable[[RunResult], float]) -> list[RunResult]:
    """Return at most `limit` runs in the plan's order: the first, and those of the least `rank`."""
    ranked = sorted(range(1, len(runs)), key=lambda index: (rank(runs[index]), index))[: limit - 1]
    return [runs[index] for index in sorted([*ranked, 0])] if runs else []


def _final_loss(run: RunResult) -> float:
    """Rank by the last validation loss; what is not a number comes last."""
    loss = run.last.valid_loss if run.last else math.nan
    return loss if math.isfinite(loss) else math.inf


def _slowness(run: RunResult) -> float:
    return -(run.speed or 0.0)


def _devices(runs: Iterable[RunResult]) -> list[str]:
    """Return what the runs were measured on, each once."""
    found: dict[str, None] = {}
    for run in runs:
        device = run.device
        threads = device.get("threads") if device.get("kind") == "cpu" else None
        if device.get("name"):
            found[f"{device['name']}, {threads} thread{'s' * (threads != 1)}" if threads else str(device["name"])] = (
                None
            )
    return list(found)


# ---- at a glance ---------------------------------------------------------------------------------


def _speed(plan: PlanResult) -> View | None:
    """How fast: the fastest run, and bars of the first and the fastest ones."""
    known = [run for run in plan.runs if run.speed]
    if not known:
        return None
    fastest = min(known, key=_slowness)
    greatest = fastest.speed or 1.0
    full = "throughput" in plan.measure
    figures_ = published.series(plan.study, plan.name, [run.name for run in plan.runs])
    return {
        "what": "FULL: loading and computing together" if full else "Training, median over epochs",
        "fastest": fastest.label,
        "speed": greatest,
        "speed_up": plan.speed_up(fastest) if fastest is not plan.runs[0] else None,
        "first": plan.runs[0].label,
        "bars": [
            {
                "label": run.label,
                "id": anchor(plan, run),
                "speed": run.speed,
                "share": (run.speed or 0.0) / greatest,
                "speed_up": plan.speed_up(run),
                "fastest": run is fastest,
                "published": published.beside(figures_, run.name),
            }
            for run in _some(known, CARD_RUNS, _slowness)
        ],
        "of": len(known),
    }


def _fastest_bound(plan: PlanResult) -> View | None:
    """What bounds the fastest run."""
    run = min(plan.runs, key=_slowness)
    found = bound(run.throughput)
    if not found or not run.throughput:
        return None
    means = {mode: trials.mean for mode in MODES if (trials := run.throughput.mode(mode))}
    greatest = max(means.values())
    return {"bound": found, "run": run.label, "bars": [(mode, mean, mean / greatest) for mode, mean in means.items()]}


def _quality(run: RunResult) -> View:
    """How good: the loss, and each error beside that of the naive answer."""
    last = run.epochs[-1]
    scores = _scores(run)
    # Everybody knows what a kelvin is, so a temperature leads where there is one.
    lead = next((score for score in scores if score["unit"] == "K"), scores[0] if scores else None)
    return {
        "run": run.label,
        "epochs": last.epoch,
        "valid_loss": last.valid_loss,
        "train_loss": last.train_loss,
        "loss": _loss([run])[0],
        "lead": lead,
        "scores": scores[:CARD_RUNS],
        "of": len(scores),
    }


def _scores(run: RunResult) -> list[View]:
    """Return the errors of the last epoch that have a naive counterpart."""
    metrics, units = run.epochs[-1].metrics, run.provenance.get("metric_units") or {}
    found = []
    for name, value in metrics.items():
        kind, slash, channel = name.partition("/")
        naive, answer = NAIVE.get(kind, ("", ""))
        baseline = metrics.get(naive + slash + channel)
        if baseline and math.isfinite(value / baseline):
            score = {"kind": METRICS[kind][0], "channel": channel, "value": value, "unit": units.get(name)}
            found.append(score | {"baseline": baseline, "answer": answer, "skill": 1 - value / baseline})
    return found


def _loss(runs: Sequence[RunResult]) -> tuple[str, str]:
    """Return the name of the runs' loss and its unit."""
    kinds = {str((run.settings.get("loss") or {}).get("kind")) for run in runs}
    return LOSSES.get(kind := kinds.pop(), (kind, "")) if len(kinds) == 1 else ("of several kinds", "")


# ---- a plan's section ----------------------------------------------------------------------------


def _curves(plan: PlanResult, trained: list[RunResult]) -> View | None:
    lines = [Line(run, style) for style, run in enumerate(_some(trained, LINES, _final_loss))]
    if not lines:
        return None
    name, of = _loss([line.run for line in lines])
    label = f"{name} loss ({of})" if of else f"{name} loss"
    skilful = any(line.run.epochs[-1].skill is not None for line in lines)
    return {
        "large": [
            (figures.loss(f"{plan.name}-epoch", lines, "epoch", label), "Loss over epochs: what each pass teaches."),
            (figures.loss(f"{plan.name}-time", lines, "time", label), "Loss over training time: what waiting buys."),
        ],
        "small": [
            *([(figures.skill(f"{plan.name}-skill", lines), "Skill on the validation data; 1 is perfect.")] * skilful),
            (figures.learning_rate(f"{plan.name}-rate", lines), "Learning rate at the end of each epoch."),
        ],
        "legend": [(line.run.label, line.style, figures.MARKERS[line.style][1]) for line in lines],
        "of": len(trained),
    }


def _throughput(plan: PlanResult) -> View | None:
    measured = [run for run in plan.runs if run.throughput]
    if not measured:
        return None
    shown = _some(measured, BARS, _slowness)
    return {
        "svg": figures.throughput(f"{plan.name}-throughput", shown),
        "bounds": [{"run": run.label, "id": anchor(plan, run), "bound": bound(run.throughput)} for run in shown],
        "of": len(measured),
    }


def _predictions(trained: list[RunResult], best: RunResult | None, limit: int) -> View | None:
    """The figures of prediction against truth, that of the best run first."""
    drawn = [(run, run.prediction) for run in trained if run.prediction]
    if not drawn:
        return None
    drawn.sort(key=lambda pair: pair[0] is not best)
    pictures = [{"label": run.label, "best": run is best, **figures.picture(path)} for run, path in drawn[:limit]]
    return {"pictures": pictures, "of": len(drawn)}


def _provenance(plan: PlanResult, run: RunResult, plans: set[str]) -> View:
    """What a run was made with: whatever its stages recorded, the best known first."""
    facts = {key: value for key, value in run.provenance.items() if key not in ("metric_units", "command")}
    git, packages = facts.pop("git", None) or {}, facts.pop("packages", None) or {}
    started, finished = facts.pop("started", None), facts.pop("finished", None)
    rows = {
        "git commit": f"{git.get('commit')}{' with local changes' * bool(git.get('dirty'))}" if git else None,
        "started": started,
        "finished": f"{finished}, after {_elapsed(started, finished)}" if started and finished else finished,
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items() if version),
        "device": _plain(run.device),
    }
    rows |= {key.replace("_", " "): _plain(value) for key, value in facts.items() if key != "device"}
    elsewhere = run.owner != f"{plan.name}/{run.name}"
    return {
        "id": anchor(plan, run),
        "label": run.label,
        "owner": run.owner if elsewhere else None,
        "owner_id": f"run.{run.owner.replace('/', '.')}" if run.owner.split("/")[0] in plans else None,
        "command": run.provenance.get("command"),
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
