"""Where results are: the folder of a run that a user names."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dlscale.core.errors import UserError, cut, of_another, unknown

if TYPE_CHECKING:
    from dlscale.config.resolve import Configuration


def results_of(configuration: Configuration | None) -> Path:
    """Return the folder of results."""
    return Path(configuration.workflow.results if configuration else "results")


def check_plans(names: Sequence[str], configuration: Configuration | None) -> list[str]:
    """Return plans that are named, or else the targets; an unknown one is a `UserError`."""
    if configuration is None:
        raise UserError("config.yaml: no such file here; name one with --configfile")
    for name in names:
        if name not in configuration.plans:
            other = of_another(results_of(configuration) / "plans" / name / "plan.yaml")
            raise UserError(unknown("plan", name, configuration.plans) + other)
    return list(names) or configuration.workflow.targets


def folder(name: str, configuration: Configuration | None) -> Path:
    """Return the folder of a run that is named PLAN.RUN, or by its folder."""
    results, plans = results_of(configuration), configuration.plans if configuration else {}
    plan, dot, run = name.partition(".")
    named = bool(dot) and "/" not in name
    known_run = plans.get(plan, {}).get(run)
    owner = (known_run.plan, known_run.name) if known_run else (plan, run)  # another plan may have its results
    path = results.joinpath("plans", *owner) if named else Path(name)
    if (path / "config.yaml").is_file():
        return path
    if named and known_run:
        raise UserError(f"{name} has no results yet: snakemake plan_{owner[0]}")
    made = [each.parent.name for each in results.glob(f"plans/{glob.escape(name)}/*/config.yaml")]
    if "/" not in name and (runs := list(plans.get(name, {})) or sorted(made)):
        raise UserError(f"{name}: a plan; name one of its runs: {cut(', '.join(f'{name}.{run}' for run in runs), 500)}")
    known = sorted(f"{each.parent.parent.name}.{each.parent.name}" for each in results.glob("plans/*/*/config.yaml"))
    there = f"; there are: {', '.join(known)}" if known else f"; {results} holds no run yet: snakemake makes them"
    raise UserError(f"{name}: no such run; expected PLAN.RUN, or a run's folder{there}")
