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

#: Metrics that measure an error, with the same error of a naive answer, and what that answer is.
NAIVE = {"rmse": ("persistence_rmse", "persistence"), "l1": ("l1_of_mean", "the mean")}
#: What a metric is called, and what it means.
METRICS = {
    "rmse": ("RMSE", "root-mean-square error over all validation samples and points, in physical units"),
    "rmse_normalised": (
        "RMSE, normalised",
        "of fields divided by their standard deviation, averaged over samples: the published form",
    ),
    "acc": ("ACC", "anomaly correlation coefficient against the training climatology; 1 is perfect"),
    "mae": ("MAE", "mean absolute error over all validation samples and points, in physical units"),
    "l1": ("L1", "mean absolute error in model units (transformed fields)"),
    "persistence_rmse": ("RMSE of persistence", "of answering that nothing changes"),
    "l1_of_mean": ("L1 of the mean", "of always answering the mean of the training data"),
}
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
        "what": "FULL" if "throughput" in plan.measure else "training",
        "fastest": fastest.label,
        "speed": greatest,
        "speed_up": plan.speed_up(fastest) if fastest is not plan.runs[0] else None,
        "first": plan.runs[0].label,
        "bars": bars,
        "of": len(known),
    }


@dataclass(frozen=True)
class Bound:
    """What holds FULL back: `what` in two words, `key` for its colour, `why` in a sentence."""

    what: str
    key: str
    why: str


def bound(throughput: Throughput | None) -> Bound | None:
    """Read a throughput triplet; None unless all three are there.

    FULL cannot be faster than the slower of loading alone (IO) and computing alone (SYNTHETIC). What
    it reaches of that says how well the two overlap.
    """
    means = [trials.mean for mode in MODES if throughput and (trials := throughput.mode(mode))]
    if len(means) < len(MODES) or not all(means):
        return None
    io, synthetic, full = means
    if io < 0.8 * synthetic:
        what, key = "data loading", "io"
        why = f"The loader alone delivers {number(io)} samples/s; the model alone could take {number(synthetic)}."
    elif synthetic < 0.8 * io:
        what, key = "computation", "synthetic"
        why = f"The model alone takes {number(synthetic)} samples/s; the loader alone could deliver {number(io)}."
    else:
        what, key = "both alike", "both"
        why = f"Loading alone ({number(io)} samples/s) and computing alone ({number(synthetic)}) take about as long."
    share = full / min(io, synthetic)
    why += f" FULL reaches {percent(share)} of the slower one"
    if share < 0.8:
        # One after the other takes 1/io + 1/synthetic a sample: nothing overlaps.
        serial = 1 / (1 / io + 1 / synthetic)
        why += ": loading and computing hardly overlap" if full < 1.1 * serial else ": they overlap only in part"
        why += ", or compete for the same cores."
    else:
        why += ": the other hides behind it."
    return Bound(what, key, why)


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
        text = "Skill on the validation data: 0 is no better than the naive answer."
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


# ---- tables --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A table's cell: its text, what it sorts by, a second line, a link."""

    text: str
    key: float | str = ""
    note: str = ""
    link: str = ""


def _cell(value: float | None, text: Callable[[Any], str] = number, note: str = "") -> Cell:
    if value is None or not math.isfinite(value):
        return Cell(NONE if value is None else text(value))
    return Cell(text(value), value, note)


def _table(plan: PlanResult) -> View:
    """Return the table of all runs: columns that no run fills are left out."""
    scalars = dict.fromkeys(name for run in plan.runs if run.last for name in run.last.metrics if "/" not in name)
    groups: dict[str, dict[str, list[Cell]]] = {
        "Run": {
            "run": [Cell(run.label, index, link=_id(plan, run)) for index, run in enumerate(plan.runs)],
            "what it changes": [Cell(text, text) for text in _changes(plan)],
            "batch size": [_cell(run.settings.get("batch_size"), count) for run in plan.runs],
            "parameters": [_cell(run.provenance.get("parameters"), count) for run in plan.runs],
        },
        "Training": {
            "epochs": [_cell(run.last.epoch if run.last else None, count) for run in plan.runs],
            "samples": [_cell(run.last.samples if run.last else None, count) for run in plan.runs],
            "time": [_cell(run.training_seconds if run.last else None, duration) for run in plan.runs],
            "training loss": [_cell(run.last.train_loss if run.last else None) for run in plan.runs],
            "validation loss": [_cell(run.last.valid_loss if run.last else None) for run in plan.runs],
            "best validation loss": [_cell(run.best_valid_loss) for run in plan.runs],
            "mean skill": [_cell(run.last.skill if run.last else None) for run in plan.runs],
        }
        | {
            METRICS.get(name, (name,))[0]: [
                _cell(run.last.metrics.get(name) if run.last else None) for run in plan.runs
            ]
            for name in scalars
            if name != "skill"
        },
        "Throughput (samples/s)": {
            "training": [_cell(run.training_speed) for run in plan.runs],
            **{mode: [_trials(run, mode) for run in plan.runs] for mode in MODES},
        },
        "Reading": {
            "speed-up": [_cell(plan.speed_up(run), lambda value: f"{number(value)}×") for run in plan.runs],
            "bound by": [Cell(b.what, b.what) if (b := bound(run.throughput)) else Cell(NONE) for run in plan.runs],
            "peak memory": [
                _cell(run.throughput.peak_memory_bytes if run.throughput else None, size) for run in plan.runs
            ],
        },
    }
    filled = {
        group: {
            column: cells for column, cells in columns.items() if any(cell.text not in (NONE, "") for cell in cells)
        }
        for group, columns in groups.items()
    }
    filled = {group: columns for group, columns in filled.items() if columns}
    columns = [cells for each in filled.values() for cells in each.values()]
    return {
        "groups": [(group, len(each)) for group, each in filled.items()],
        "columns": [column for each in filled.values() for column in each],
        "rows": list(zip(*columns, strict=True)),
    }


def _trials(run: RunResult, mode: str) -> Cell:
    trials = run.throughput.mode(mode) if run.throughput else None
    return _cell(trials.mean, note=f"± {number(trials.std, 2)}") if trials else Cell(NONE)


def _changes(plan: PlanResult) -> list[str]:
    """Return in what settings each run differs: in a ladder from the run before, else from the first."""
    flat = [_flat(run.settings) for run in plan.runs]
    texts = ["–"]
    for index in range(1, len(flat)):
        reference = flat[index - 1 if plan.kind == "ladder" else 0]
        changed = [f"{key}: {value}" for key, value in flat[index].items() if reference.get(key) != value]
        texts.append(", ".join(changed[:4]) + (" …" if len(changed) > 4 else ""))
    return texts if any(texts[1:]) else [""] * len(flat)


def _flat(settings: Raw, prefix: str = "") -> Raw:
    """Return nested settings as one mapping with dotted keys, the label left out."""
    found: Raw = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        elif prefix or key != "label":
            found[f"{prefix}{key}"] = value
    return found


def _channels(trained: list[RunResult]) -> list[View]:
    """Return a table for each kind of metric that is given by channel: runs down, channels across."""
    names = dict.fromkeys(name for run in trained if run.last for name in run.last.metrics if "/" in name)
    kinds = dict.fromkeys(name.split("/")[0] for name in names)
    naive = {baseline for baseline, _ in NAIVE.values()}
    shown = _some(trained, CHANNEL_ROWS, _final_loss)
    units: dict[str, str] = {}
    for run in trained:
        units |= run.provenance.get("metric_units") or {}
    tables = []
    for kind in kinds:
        if kind in naive | {"skill"}:
            continue
        channels = [name.split("/", 1)[1] for name in names if name.split("/")[0] == kind]
        title, meaning = METRICS.get(kind, (kind, ""))
        baseline, answer = NAIVE.get(kind, ("", ""))
        rows = [
            (run.label, [_channel_cell(run.last.metrics, kind, channel, baseline) for channel in channels])
            for run in shown
            if run.last
        ]
        naive_row = [_same(shown, f"{baseline}/{channel}") for channel in channels]
        tables.append(
            {
                "title": title,
                "meaning": meaning,
                "channels": [(channel, unit(units.get(f"{kind}/{channel}"))) for channel in channels],
                "rows": rows,
                "naive": [_cell(value) for value in naive_row]
                if any(value is not None for value in naive_row)
                else None,
                "answer": answer,
                "of": len(trained),
            }
        )
    return tables


def _channel_cell(metrics: dict[str, float], kind: str, channel: str, naive: str) -> Cell:
    value, baseline = metrics.get(f"{kind}/{channel}"), metrics.get(f"{naive}/{channel}")
    return _cell(value, note=f"skill {number(1 - value / baseline, 2)}" if baseline and value is not None else "")


def _same(runs: Sequence[RunResult], name: str) -> float | None:
    """Return a metric if it is the same for all runs, as a naive answer's is on the same data."""
    values = [run.last.metrics.get(name) for run in runs if run.last]
    first = values[0]
    return (
        first
        if first is not None and all(v is not None and math.isclose(v, first, rel_tol=1e-4) for v in values)
        else None
    )


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


def _published(entry: Raw) -> View:
    speed = entry.get("samples_per_second")
    return {
        "label": entry.get("label", ""),
        "what": f"throughput, {entry.get('kind', 'FULL')}" if speed is not None else entry.get("metric", ""),
        "value": f"{speed:g} samples/s"
        if speed is not None
        else f"{entry.get('value'):g} {unit(entry.get('unit'))}".strip(),
        "hardware": entry.get("hardware", NONE),
        "source": entry.get("source", NONE),
    }


def _published_speeds(study: str, run: str | None = None) -> list[str]:
    """Return the range of published FULL throughputs for each piece of hardware, of one run or of all."""
    by_hardware: dict[str, list[float]] = {}
    for entry in shipped_studies().get(study, {}).get("published") or []:
        speed = entry.get("samples_per_second")
        if speed is not None and entry.get("kind", "FULL") == "FULL" and run in (None, entry.get("run")):
            by_hardware.setdefault(str(entry.get("hardware", "hardware not stated")), []).append(float(speed))
    ranges = {
        hardware: dict.fromkeys(number(speed) for speed in (min(s), max(s))) for hardware, s in by_hardware.items()
    }
    return [f"{' to '.join(speeds)} samples/s on {hardware}" for hardware, speeds in ranges.items()]


def _published_for(study: str, run: str) -> str:
    return "; ".join(_published_speeds(study, run))


def _published_summary(study: str) -> list[str]:
    """Return the published figures of a study in short: throughput by hardware, and accuracies."""
    entries = shipped_studies().get(study, {}).get("published") or []
    values = [_published(entry) for entry in entries if entry.get("value") is not None]
    return _published_speeds(study) + [f"{value['label']} {value['value']} ({value['source']})" for value in values]


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
