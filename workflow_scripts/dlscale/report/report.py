"""Write the page with all measurements, as one file (stage `report`).

Styles, script, figures and tables are embedded, because the page's content security policy forbids loading files.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import json
import logging
import multiprocessing
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from dlscale.core import registry, text
from dlscale.core.errors import UserError
from dlscale.core.files import write_text
from dlscale.core.settings import read_settings
from dlscale.data.manifest import FieldInfo, Manifest, Transform
from dlscale.measure.records import MODE_NAMES
from dlscale.report import published
from dlscale.report.figures import CONFIG, Table, View, cell, joules, library, table
from dlscale.report.sections import Page, devices, picture, plan_view
from dlscale.results import PlanResult, read_plan

#: Maximum number of prediction figures on the page, and per plan; every plan may show one.
PREDICTIONS, PREDICTIONS_OF_A_PLAN = 12, 3

#: Minimum time between two writes of a live page, seconds.
MIN_REWRITE_SECONDS = 60.0


def main(args: argparse.Namespace) -> None:
    """Write `args.out` (HTML) from plans (`plan.yaml` files), datasets (folders) and references (imported logs)."""
    _write(args, exported=True)
    live = live_page(args.out)
    if live.exists():  # forward a browser from the live page to the finished page
        write_text(live, f'<meta http-equiv="refresh" content="0; url={quote(Path(args.out).name)}">\n')


def live_page(page: str | Path) -> Path:
    """Return the path of the live page of `page`, which shows finished plans while jobs run.

    The live page is not a rule's output, so Snakemake ignores it.
    """
    return Path(page).with_suffix(".live.html")


def write_live(options: str) -> None:
    """Write the live page of the finished plans and datasets; `options` are the options of stage `report`, as JSON.

    Do nothing if the live page was written less than `MIN_REWRITE_SECONDS` ago. Errors are logged.
    """
    given, _ = read_settings(options)
    live = live_page(given["out"])
    with contextlib.suppress(FileNotFoundError):
        if 0 <= time.time() - live.stat().st_mtime < MIN_REWRITE_SECONDS:
            return
    done = {path: Path(path).with_name("summary.csv").exists() for path in given["plans"]}
    given["plans"] = [path for path in done if done[path]]
    to_come = [Path(path).parent.name for path in done if not done[path]]
    needed = ("manifest.json", "preview.png")
    given["datasets"] = [path for path in given["datasets"] if all(Path(path, name).exists() for name in needed)]
    try:
        _write(argparse.Namespace(**given | {"out": live}), live=True, to_come=to_come)
    except UserError as error:  # a record may be incomplete while another job writes it
        logging.info("the live page is not written: %s", error)
    except Exception:  # a job must not fail because of the live page
        logging.exception("the live page is not written")


def _write(args: argparse.Namespace, **more: Any) -> None:
    plans = [read_plan(path) for path in dict.fromkeys(args.plans)]
    folders = [Path(folder) for folder in dict.fromkeys(args.datasets)]
    references = [Path(path) for path in dict.fromkeys(args.references)]
    write_text(args.out, page(args.title, plans, folders, Path(args.out).parent, references, args.call, **more))


def page(
    title: str,
    plans: Sequence[PlanResult],
    folders: Sequence[Path],
    place: Path = Path(),
    references: Sequence[Path] = (),
    call: str = "snakemake",
    to_come: Sequence[str] = (),
    live: bool = False,
    exported: bool = False,
) -> str:
    """Return the page as HTML, with links relative to the folder `place`.

    `call` is the command that starts the workflow. Browsers reload a `live` page every five seconds. The page lists the
    unfinished plans `to_come`. With `exported`, charts are also written into the subfolder `figures`.
    """
    import jinja2
    from markupsafe import Markup, escape

    files = resources.files("dlscale.report") / "templates"
    names = ("report.html.j2", "style.css", "script.js")
    template, style, script = ((files / name).read_text(encoding="utf-8") for name in names)
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        key: getattr(text, key) for key in ("number", "count", "unit", "size", "percent", "duration")
    }
    environment.filters["joules"] = joules
    environment.filters["code"] = lambda words: Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(words))))
    named = {folder.absolute().name: folder for folder in folders}  # a linked folder is shown under the link's name
    pictures = max(1, min(PREDICTIONS_OF_A_PLAN, PREDICTIONS // max(1, len(plans))))
    guides = Path("docs")  # relative to the folder in which the workflow was started
    docs = Path(os.path.relpath(guides, place)).as_posix() if (guides / "measuring.md").exists() else ""
    shown = Page(place, frozenset(plan.name for plan in plans), frozenset(named), pictures, references, call)
    views = _views(plans, shown)
    charts = [(chart, view["chosen"]) for view in views for section in view["sections"] for chart in section.charts]
    scripts = [script, *([library()] if charts else [])]
    for chart, chosen in charts if exported else ():
        chart.write(place / "figures", [run for run in chosen if chosen[run]])
    return environment.from_string(template).render(
        title=title,
        modes=MODE_NAMES,
        docs=docs,
        to_come=to_come,
        live=live,
        style=Markup(style),
        script=Markup(script),
        library=Markup(scripts[1] if charts else ""),
        hashes=[base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in scripts],
        config=Markup(json.dumps(CONFIG, separators=(",", ":"))),
        safe=Markup,
        exported=exported,
        plans=views,
        datasets=[dataset(folder, name) for name, folder in named.items()],
        studies=[_study(name, plans) for name in dict.fromkeys(plan.record.study for plan in plans)],
        runs=sum(len(plan.runs) for plan in plans),
        devices=devices(run for plan in plans for run in plan.runs),
        answers=list(dict.fromkeys(answer for plan in plans for answer in plan.answers)),
    )


def _views(plans: Sequence[PlanResult], shown: Page) -> list[View]:
    view = partial(plan_view, page=shown)
    for module in registry.page_modules():  # once, before the processes are forked
        registry.load(module)
    if len(plans) < 2:
        return [view(plan) for plan in plans]
    workers = min(len(plans), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        return list(pool.map(view, plans))


def _study(name: str, plans: Sequence[PlanResult]) -> View:
    of_it = [plan for plan in plans if plan.record.study == name]
    record = of_it[0].record
    columns = [("", heading, list(map(cell, cells))) for heading, cells in published.columns(record.published).items()]
    shown: View = {"about": f"Published figures of {name}", "title": "Published figures", "style": "known"}
    known = table(columns, "Published figures.", meaning=str(len(record.published)), sortable=False, **shown)
    return {
        "name": name,
        "title": record.study_title or name,
        "plans": [{"name": plan.name, "title": plan.title} for plan in of_it],
        "published": known if record.published else None,
    }


# ---- datasets ----------------------------------------------------------------------------------------


def dataset(folder: Path, name: str) -> View:
    """Return the template's variables for the dataset in `folder`, from `manifest.json` and `preview.png`."""
    manifest = Manifest.read(folder / "manifest.json")
    settings = manifest.provenance.get("settings") or {}
    splits = {split: files for split, files in manifest.splits.items() if files}
    sizes = [sum(file.bytes for file in files) for files in splits.values()]
    parts = [
        ("", "part", [cell(split) for split in splits]),
        ("", "files", [cell(len(files), text.count) for files in splits.values()]),
        ("", manifest.rows, [cell(sum(file.rows for file in files), text.count) for files in splits.values()]),
        ("", "size", [cell(bytes_, text.size) for bytes_ in sizes]),
    ]
    of_parts = table(
        parts,
        "Parts of the dataset. Each sample is in one part only.",
        f"Parts of {name}",
        sortable=False,
        style="small",
    )
    return {
        "name": name,
        "kind": manifest.kind,
        "source": (settings.get("source") or {}).get("kind"),
        "facts": [*manifest.facts, text.size(sum(sizes))],
        "preview": picture(folder / "preview.png"),
        "tables": [
            *(_field(name, key, info) for key, info in manifest.fields.items()),
            *([of_parts] if splits else []),
        ],
        "settings": yaml.safe_dump(settings, sort_keys=False, allow_unicode=True) if settings else None,
    }


def _field(name: str, field: str, info: FieldInfo) -> Table:
    grid = f"{' × '.join(map(str, info.grid))} points" if info.grid else "one value per row"
    formulas = [_formula(each) for each in info.transforms]
    columns = [
        ("", "channel", [cell(channel) for channel in info.channels]),
        ("", "physical unit", [cell(text.unit(of) or "1") for of in info.units]),
        ("", "model sees", [cell(formula) for formula in formulas]),
    ]
    known = {"mean": info.mean, "standard deviation": info.std, "minimum": info.minimum, "maximum": info.maximum}
    columns += [
        ("", heading, [cell(value, partial(text.number, digits=4)) for value in values or []])
        for heading, values in known.items()
    ]
    units = f", in {'physical' if info.stored == 'physical' else 'model'} units" if {*formulas} != {"x"} else ""
    caption = f"{field}, {grid}. Statistics are of the training part{units}."
    return table(columns, caption, f"Channels of {field}, {name}", sortable=False)


def _formula(transform: Transform) -> str:
    x = "ln x" if transform.kind == "log" else "x"
    if transform.offset:
        x = f"({x} {'−' if transform.offset > 0 else '+'} {abs(transform.offset):.4g})"
    return x if transform.scale == 1 else f"{x} / {transform.scale:.4g}"
