"""`dlscale import-profile RUN`: read what nsys recorded where it could make no report, as in a slim image."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from dlscale.config.places import folder
from dlscale.core import board
from dlscale.core.errors import UserError
from dlscale.core.files import whole
from dlscale.measure.profile import first_rows, scalars, write_table
from dlscale.measure.profilers import nsys
from dlscale.measure.profilers.records import Profile
from dlscale.report.compare_profiles import read_rows

if TYPE_CHECKING:
    from dlscale.config.resolve import Configuration


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Complete the profiles of the runs `args.runs`; return the exit status."""
    for name in args.runs:
        run = folder(name, configuration)
        reports = import_profile(run)
        said = {"run": name, "reports": reports}
        print(json.dumps(said) if args.json else f"{name}: {', '.join(reports)}; the next `snakemake` shows it")
    return 0


def import_profile(run: Path) -> list[str]:
    """Complete a run's folder `profile`, whole or not at all, by what nsys recorded; return its reports' names."""
    profile = run / "profile"
    record = Profile.read(profile / "profile.json")
    former = next((tool for tool in record.tools if tool.name == "nsys"), None)
    if former is None or not former.problem:
        raise UserError(f"{run}: nothing is left over to import; nsys did not profile it, or all its reports were read")
    with whole(profile) as new:
        shutil.copytree(profile, new, ignore=shutil.ignore_patterns("*.qdstrm"))
        found, rows = nsys.import_left_over(profile, new)
        found = found.model_copy(update={"overhead": former.overhead})
        rows += [row for row in read_rows(profile / "profile_summary.csv") if row.tool != "nsys"]
        order = [tool.name for tool in record.tools]
        rows.sort(key=lambda row: order.index(row.tool))
        record = record.model_copy(
            update={
                "tools": [found if tool is former else tool for tool in record.tools],
                "top": first_rows(rows, min(row.rank for row in rows)),
            }
        )
        record.write(new / "profile.json")
        write_table(new / "profile_summary.csv", rows)
    board.write(run / "tensorboard" / "profile", scalars(record))
    return sorted(found.files.values())
