"""Where results are: the folder of a run that a user names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dlscale.core.errors import UserError

if TYPE_CHECKING:
    from dlscale.config.resolve import Configuration


def results_of(configuration: Configuration | None) -> Path:
    """Return the folder of results."""
    return Path(configuration.workflow.results if configuration else "results")


def folder(name: str, results: Path) -> Path:
    """Return the folder of a run that is named PLAN.RUN, or by its folder."""
    plan, dot, run = name.partition(".")
    path = results / "plans" / plan / run if dot and "/" not in name else Path(name)
    if (path / "config.yaml").is_file():
        return path
    known = sorted(f"{each.parent.parent.name}.{each.parent.name}" for each in results.glob("plans/*/*/config.yaml"))
    there = f"; there are: {', '.join(known)}" if known else f"; {results} holds no run yet: snakemake makes them"
    raise UserError(f"{name}: no such run; expected PLAN.RUN, or a run's folder{there}")
