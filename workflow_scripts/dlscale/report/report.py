"""Stage `report`: one page, in one file, that shows everything that was measured.

The page needs nothing else: styles, script, figures and tables' data are inside, and its content
security policy forbids it to load anything. The same results give the same bytes.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from dlscale.data.manifest import FieldInfo, Manifest
from dlscale.data.transforms import Transform
from dlscale.report import figures
from dlscale.report.collect import summary_csv
from dlscale.report.figures import Line
from dlscale.report.results import MODES, Epoch, PlanResult, RunResult, Throughput, read_plan
from dlscale.report.text import NONE, count, duration, number, percent, quantity, size, unit
from dlscale.runtime.config import shipped_studies
from dlscale.runtime.errors import UserError
from dlscale.runtime.files import write_text
from dlscale.runtime.settings import Raw

View = dict[str, Any]

#: What keeps a report of hundreds of runs readable: how many of them each part shows.
CARD_RUNS = 6
LINES = len(figures.MARKERS)
BARS = 8
CHANNEL_ROWS = 40
PREDICTIONS, PREDICTIONS_OF_A_PLAN = 12, 3

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
    datasets = [Path(folder) for folder in dict.fromkeys(args.datasets)]
    write_text(args.out, page(args.title, plans, datasets))


def page(title: str, plans: Sequence[PlanResult], datasets: Sequence[Path]) -> str:
    """Return the report as HTML."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("dlscale.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number,
        "count": count,
        "unit": unit,
        "duration": duration,
        "size": size,
        "percent": percent,
    }
    environment.filters["svg"] = Markup  # what `figures` returns is safe: matplotlib escapes the labels
    script, style = (environment.loader.get_source(environment, name)[0] for name in ("script.js", "style.css"))  # type: ignore[union-attr]
    names = [folder.resolve().name for folder in datasets]
    pictures = max(1, min(PREDICTIONS_OF_A_PLAN, PREDICTIONS // max(1, len(plans))))
    return environment.get_template("report.html.j2").render(
        title=title,
        style=Markup(style),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        plans=[_plan(plan, names, {p.name for p in plans}, pictures) for plan in plans],
        datasets=[_dataset(folder, name) for folder, name in zip(datasets, names, strict=True)],
        studies=[_study(name, plans) for name in dict.fromkeys(plan.study for plan in plans)],
        runs=sum(len(plan.runs) for plan in plans),
        devices=_devices(run for plan in plans for run in plan.runs),
        lines=LINES,
    )


# ---- plans ---------------------------------------------------------------------------------------


def _plan(plan: PlanResult, datasets: Sequence[str], plans: set[str], pictures: int) -> View:
    trained = [run for run in plan.runs if run.epochs]
    measured = [run for run in plan.runs if run.throughput]
    used = list(dict.fromkeys(str(run.settings.get("dataset")) for run in plan.runs))
    best = min(trained, key=_final_loss) if trained else None
    lines = [Line(run, style) for style, run in enumerate(_some(trained, LINES, _final_loss))]
    return {
        "name": plan.name,
        "title": plan.title,
        "study": plan.study,
        "kind": plan.kind,
        "runs": len(plan.runs),
        "datasets": [{"name": name, "linked": name in datasets} for name in used],
        "devices": _devices(plan.runs),
        "speed": _speed(plan),
        "bound": _fastest_bound(plan),
        "quality": _quality(best) if best else None,
        "published": _published_summary(plan.study),
        "curves": _curves(plan, lines, len(trained)),
        "throughput": _throughput(plan, measured),
        "table": _table(plan),
        "csv": base64.b64encode(summary_csv(plan).encode()).decode(),
        "channels": _channels(trained),
        "predictions": _predictions(trained, best, pictures),
        "provenance": [_provenance(plan, run, plans) for run in plan.runs],
    }


def _some(runs: Sequence[RunResult], limit: int, rank: Callable[[RunResult], float]) -> list[RunResult]:
    """Return at most `limit` runs in the plan's order: the first, and those that `rank` puts in front."""
    ranked = sorted(range(1, len(runs)), key=lambda index: (rank(runs[index]), index))[: limit - 1]
    return [runs[index] for index in sorted([*ranked, 0])] if runs else []


def _final_loss(run: RunResult) -> float:
    """Rank by the last validation loss, the least first; what is not a number comes last."""
    loss = run.last.valid_loss if run.last else math.nan
    return loss if math.isfinite(loss) else math.inf


def _slowness(run: RunResult) -> float:
    return -(run.speed or 0.0)


def _devices(runs: Iterable[RunResult]) -> list[str]:
    """Return what the runs were measured on, each once."""
    found = []
    for run in runs:
        if name := run.device.get("name"):
            threads = run.device.get("threads") if run.device.get("kind") == "cpu" else None
            found.append(f"{name}, {threads} thread{'s' if threads != 1 else ''}" if threads else str(name))
    return list(dict.fromkeys(found))


def _speed(plan: PlanResult) -> View | None:
    """How fast: the fastest run, and bars of the first and the fastest ones."""
    known = [run for run in plan.runs if run.speed]
    if not known:
        return None
    fastest = min(known, key=_slowness)
    greatest = fastest.speed or 1.0
    bars = [
        {
            "label": run.label,
            "id": _id(plan, run),
            "speed": run.speed,
            "share": (run.speed or 0.0) / greatest,
            "speed_up": plan.speed_up(run),
            "fastest": run is fastest,
            "published": _published_for(plan.study, run.name),
        }
        for run in _some(known, CARD_RUNS, _slowness)
    ]
    return {
        "what": "FULL: loading and computing together"
        if "throughput" in plan.measure
        else "Training, median over epochs",
        "fastest": fastest.label,
        "speed": greatest,
        "speed_up": plan.speed_up(fastest) if fastest is not plan.runs[0] else None,
        "first": plan.runs[0].label,
        "bars": bars,
        "of": len(known),
    }


def _fastest_bound(plan: PlanResult) -> View | None:
    known = [(run, found) for run in plan.runs if (found := bound(run.throughput))]
    if not known:
        return None
    run, found = min(known, key=lambda pair: _slowness(pair[0]))
    assert run.throughput
    means = {mode: trials.mean for mode in MODES if (trials := run.throughput.mode(mode))}
    return {
        "bound": found,
        "run": run.label,
        "bars": [(mode, mean, mean / max(means.values())) for mode, mean in means.items()],
    }


def _quality(run: RunResult) -> View:
    """How good: the loss, and each error beside that of the naive answer."""
    last = run.last
    assert last
    scores = _scores(last, run)
    # Kelvin speaks to everyone, so a temperature leads where there is one.
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
        "skill": last.skill,
    }


def _scores(epoch: Epoch, run: RunResult) -> list[View]:
    """Return the errors of an epoch that have a naive counterpart."""
    units = run.provenance.get("metric_units") or {}
    found = []
    for name, value in epoch.metrics.items():
        kind, slash, channel = name.partition("/")
        naive, answer = NAIVE.get(kind, ("", ""))
        baseline = epoch.metrics.get(naive + slash + channel)
        if baseline:
            score = {"kind": METRICS[kind][0], "channel": channel, "value": value, "unit": units.get(name, "")}
            found.append(score | {"baseline": baseline, "answer": answer, "skill": 1 - value / baseline})
    return found


def _loss(runs: Sequence[RunResult]) -> tuple[str, str]:
    """Return the name of the runs' loss and its unit."""
    kinds = {str((run.settings.get("loss") or {}).get("kind")) for run in runs}
    return LOSSES.get(kind := kinds.pop(), (kind, "")) if len(kinds) == 1 else ("of several kinds", "")


def _curves(plan: PlanResult, lines: list[Line], trained: int) -> View | None:
    if not lines:
        return None
    name, of = _loss([line.run for line in lines])
    loss = f"{name} loss" + (f" ({of})" if of else "")
    panels = [
        {
            "svg": figures.loss(f"{plan.name}-epoch", lines, "epoch", loss),
            "text": "Loss over epochs: what each pass over the data teaches.",
        },
        {
            "svg": figures.loss(f"{plan.name}-time", lines, "time", loss),
            "text": "Loss over training time: what the waiting buys.",
        },
    ]
    small = []
    if any(line.run.last and line.run.last.skill is not None for line in lines):
        text = "Skill on the validation data: 1 is perfect, 0 no better than the naive answer."
        small.append({"svg": figures.skill(f"{plan.name}-skill", lines), "text": text})
    text = "Learning rate at the end of each epoch."
    small.append({"svg": figures.learning_rate(f"{plan.name}-rate", lines), "text": text})
    legend = [
        {"label": line.run.label, "style": line.style, "marker": figures.MARKERS[line.style][1]} for line in lines
    ]
    return {"panels": panels, "small": small, "legend": legend, "of": trained}


def _throughput(plan: PlanResult, measured: list[RunResult]) -> View | None:
    if not measured:
        return None
    shown = _some(measured, BARS, _slowness)
    return {
        "svg": figures.throughput(f"{plan.name}-throughput", shown),
        "bounds": [{"run": run.label, "id": _id(plan, run), "bound": bound(run.throughput)} for run in shown],
        "of": len(measured),
    }


def _id(plan: PlanResult, run: RunResult) -> str:
    return f"run.{plan.name}.{run.name}"  # no name has a dot


# ---- pictures, provenance ------------------------------------------------------------------------


def _predictions(trained: list[RunResult], best: RunResult | None, limit: int) -> View | None:
    drawn = [run for run in trained if run.prediction]
    if not drawn:
        return None
    shown = ([best] if best in drawn else []) + [run for run in drawn if run is not best]
    pictures = [
        {"label": run.label, "best": run is best, **_png(run.prediction)} for run in shown[:limit] if run.prediction
    ]
    return {"pictures": pictures, "of": len(drawn)}


def _png(path: Path) -> View:
    """Return a PNG file's width, height (pixels) and content in base 64."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; run the stage that writes it first") from None
    if content[:8] != b"\x89PNG\r\n\x1a\n" or content[-8:-4] != b"IEND":
        raise UserError(f"{path}: not a whole PNG file; delete it and run its stage again")
    width, height = struct.unpack(">II", content[16:24])
    return {"width": width, "height": height, "data": base64.b64encode(content).decode()}


def _provenance(plan: PlanResult, run: RunResult, plans: set[str]) -> View:
    facts = dict(run.provenance)
    command = facts.pop("command", None)
    git = facts.pop("git", None) or {}
    started, finished = facts.pop("started", None), facts.pop("finished", None)
    packages = facts.pop("packages", None) or {}
    facts.pop("metric_units", None)
    device = run.device
    facts.pop("device", None)
    rows = {
        "git commit": f"{git['commit']}{' (with local changes)' if git.get('dirty') else ''}"
        if git.get("commit")
        else None,
        "started": started,
        "finished": f"{finished} (after {duration(_elapsed(started, finished))})" if started and finished else finished,
        "device": ", ".join(f"{key}: {value}" for key, value in device.items()),
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items() if version),
    }
    rows |= {key.replace("_", " "): _plain(value) for key, value in facts.items()}
    owner = run.owner.split("/")[0]
    return {
        "id": _id(plan, run),
        "label": run.label,
        "name": run.name,
        "owner": run.owner if owner != plan.name else None,
        "owner_id": "run." + run.owner.replace("/", ".") if owner in plans else None,
        "command": command,
        "facts": [(key, value) for key, value in rows.items() if value not in (None, "")],
        "settings": _yaml(run.settings),
    }


def _plain(value: Any) -> str | None:
    if value is None or value == {} or value == []:
        return None
    return _yaml(value).rstrip() if isinstance(value, dict | list) else str(value)


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)


def _elapsed(started: str, finished: str) -> float | None:
    try:
        return (datetime.fromisoformat(finished) - datetime.fromisoformat(started)).total_seconds()
    except (TypeError, ValueError):
        return None


# ---- studies and datasets ------------------------------------------------------------------------


def _study(name: str, plans: Sequence[PlanResult]) -> View:
    shipped = shipped_studies().get(name, {})
    return {
        "name": name,
        "title": shipped.get("title") or name,
        "plans": [{"name": plan.name, "title": plan.title} for plan in plans if plan.study == name],
        "published": [_published(entry) for entry in shipped.get("published") or []],
    }


def _dataset(folder: Path, name: str) -> View:
    manifest = Manifest.read(folder / "manifest.json")
    settings = manifest.provenance.get("settings") or {}
    rows = {"era5": "times", "cosmo": "planes"}.get(manifest.kind, "rows")
    return {
        "name": name,
        "kind": manifest.kind,
        "source": str((settings.get("source") or {}).get("kind", "")),
        "preview": _png(folder / "preview.png"),
        "facts": _dataset_facts(manifest),
        "fields": [_field(key, info) for key, info in manifest.fields.items()],
        "rows": rows,
        "splits": [
            (split, len(files), sum(file.rows for file in files), sum(file.bytes for file in files))
            for split, files in manifest.splits.items()
            if files
        ],
        "settings": _yaml(settings) if settings else "",
    }


def _dataset_facts(manifest: Manifest) -> list[tuple[str, str]]:
    facts = []
    if manifest.step_hours:
        facts.append(("stored time step", quantity(manifest.step_hours, "h")))
    for name in ("latitude", "longitude"):
        if values := getattr(manifest, name):
            facts.append((name, f"{values[0]:g}° to {values[-1]:g}°".replace("-", "−")))
    files = [file for each in manifest.splits.values() for file in each]
    facts.append(
        ("size", f"{size(sum(file.bytes for file in files))} in {len(files)} file{'s' if len(files) != 1 else ''}")
    )
    return facts


def _field(name: str, info: FieldInfo) -> View:
    def column(values: list[float]) -> list[float | None]:
        return [*values] or [None] * len(info.channels)  # the published layout has no extremes

    columns = [column(getattr(info, key)) for key in ("mean", "std", "minimum", "maximum")]
    return {
        "name": name,
        "grid": " × ".join(str(edge) for edge in info.grid),
        "physical": info.stored == "physical",
        "rows": [
            (channel, unit(of) or "1", _transform(transform), *statistics)
            for channel, of, transform, *statistics in zip(
                info.channels, info.units, info.transforms, *columns, strict=True
            )
        ],
    }


def _transform(transform: Transform) -> str:
    """Return the formula from physical to model units."""
    x = "ln x" if transform.kind == "log" else "x"
    if transform.offset:
        x = f"({x} {'−' if transform.offset > 0 else '+'} {number(abs(transform.offset))})"
    return x if transform.scale == 1 else f"{x} / {number(transform.scale)}"
