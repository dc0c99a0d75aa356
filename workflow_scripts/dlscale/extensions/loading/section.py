"""Section of the page: loaders of a measured program, and the arrays that they read."""

from __future__ import annotations

from dlscale.extensions.loading.records import Loading
from dlscale.extensions.loading.report import NAME, table
from dlscale.report.figures import Fold, Item, Link, Section
from dlscale.report.sections import Page
from dlscale.results import PlanResult


def section(plan: PlanResult, page: Page) -> Section | None:
    """Return the table and the advice of each run that was measured with `--loader`; None without such runs."""
    folds = list[Fold]()
    for run in plan.runs:
        if (file := run.folder / NAME).is_file():
            loading = Loading.read(file)
            items = [Item(name.strip(), text) for name, text in table(loading)]
            advice = [loading.advice.sentence] if loading.advice else []
            folds.append(Fold(Link(run.called, f"#{plan.anchor(run)}"), "", advice, items=items, open=True))
    return Section("Loaders", folds=folds) if folds else None
