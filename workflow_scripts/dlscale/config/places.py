"""Stage `configure`, and functions that find plans and runs by name.

The stage writes the list of a plan's runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dlscale.core.errors import UserError, of_another, unknown
from dlscale.core.paths import Results
from dlscale.core.settings import read_settings, write_yaml

if TYPE_CHECKING:
    from dlscale.config.resolve import Configuration


#: Name of the plan that `dlscale measure` makes; plans in a configuration must have other names.
MEASURED = "measured"


def main(args: argparse.Namespace) -> None:
    """Write `args.settings` (JSON) as YAML to `args.out`."""
    write_yaml(args.out, read_settings(args.settings, "--settings")[0])


def results_of(configuration: Configuration | None) -> Path:
    """Return the results folder; `results` without a configuration."""
    return Path(configuration.workflow.results if configuration else "results")


def check_plans(names: Sequence[str], configuration: Configuration | None) -> list[str]:
    """Return the plans `names`, or the targets of the configuration if `names` is empty.

    Raise a `UserError` for an unknown plan or a missing configuration.
    """
    if configuration is None:
        raise UserError("config.yaml: no such file in this folder; name a configuration file with --configfile")
    for name in names:
        if name not in configuration.plans:
            other = of_another(Path(Results(results_of(configuration)).plan(name)))
            raise UserError(unknown("plan", name, configuration.plans) + other)
    return list(names) or configuration.workflow.targets


def run_folder(name: str, configuration: Configuration | None) -> Path:
    """Return the folder of a run; `name` is PLAN.RUN or the path of the folder."""
    results = results_of(configuration)
    plan, _, run = name.partition(".")
    known = configuration.plans.get(plan, {}) if configuration else {}
    owner = (
        (known[run].plan, known[run].name) if run in known else (plan, run)
    )  # the results may be in another plan's folder
    path = Path(name) if "/" in name or not run else Path(Results(results).run("", *owner))
    if (path / "config.yaml").is_file():
        return path
    if run in known:
        raise UserError(f"{name} has no results yet; start it with snakemake plan_{owner[0]}")
    made = sorted(".".join(each.parts[-3:-1]) for each in results.glob("plans/[!.]*/[!.]*/config.yaml"))
    there = f"there are: {', '.join(made)}" if made else f"{results} has no runs yet: start them with snakemake"
    raise UserError(f"{name}: no such run; expected PLAN.RUN, or a run's folder; {there}")
