"""Stage `report`: one page, in one file, that shows everything that was measured.

The page needs nothing else: styles, script, figures and tables are inside, and its content security
policy forbids it to load anything. The same results give the same bytes.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import itertools
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

from dlscale.core import text
from dlscale.core.files import write_text
from dlscale.report import datasets, published
from dlscale.report.glance import View
from dlscale.report.references import Reference, read_references
from dlscale.report.results import PlanResult, read_plan
from dlscale.report.sections import devices, plan_view

#: How many predictions the page shows, and how many of a plan.
PREDICTIONS, PREDICTIONS_OF_A_PLAN = 12, 3


def main(args: argparse.Namespace) -> None:
    """Write `args.out` (HTML) from plans (`plan.yaml` files), datasets (folders) and references, in their order."""
    plans = [read_plan(path) for path in dict.fromkeys(args.plans)]
    folders = [Path(folder) for folder in dict.fromkeys(args.datasets)]
    references = read_references(dict.fromkeys(args.references))
    place = Path(args.out).parent
    write_text(args.out, page(args.title, plans, folders, place, references, args.call, args.to_come))


def page(
    title: str,
    plans: Sequence[PlanResult],
    folders: Sequence[Path],
    place: Path = Path(),
    references: Sequence[Reference] = (),
    call: str = "snakemake",
    to_come: Sequence[str] = (),
) -> str:
    """Return the report as HTML, to be written into the folder `place`; `call` are words that call the workflow.

    Where plans are still `to_come`, it names them, and browsers load it again every few seconds.
    """
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
        to_come=to_come,
        style=Markup(style),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        svg=Markup,  # what `figures` draws is safe: matplotlib escapes the labels
        plans=_views(plans, names, {plan.name for plan in plans}, pictures, place, references, call),
        datasets=[datasets.view(folder, name) for folder, name in zip(folders, names, strict=True)],
        studies=[_study(name, plans) for name in dict.fromkeys(plan.record.study for plan in plans)],
        runs=sum(len(plan.runs) for plan in plans),
        devices=devices(run for plan in plans for run in plan.runs),
        answers=list(dict.fromkeys(answer for plan in plans for answer in plan.answers)),
    )


def _views(plans: Sequence[PlanResult], *words: Any) -> list[View]:
    """Return what the page shows of each plan; drawing takes most of the time, in which all cores share."""
    if len(plans) < 2:
        return [plan_view(plan, *words) for plan in plans]
    workers = min(len(plans), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        return list(pool.map(plan_view, plans, *map(itertools.repeat, words)))


def _template(name: str) -> str:
    return (resources.files("dlscale.report") / "templates" / name).read_text(encoding="utf-8")


def _study(name: str, plans: Sequence[PlanResult]) -> View:
    """Return a study's title and published figures, which each of its plans has."""
    of_it = [plan for plan in plans if plan.record.study == name]
    record = of_it[0].record
    return {
        "name": name,
        "title": record.study_title or name,
        "plans": [{"name": plan.name, "title": plan.title} for plan in of_it],
        "published": [published.row(figure) for figure in record.published],
    }
