"""`dlscale explain`: print what limits the speed of runs."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from dlscale.config.places import run_folder
from dlscale.core import registry
from dlscale.core.errors import UserError
from dlscale.report.verdict import Verdict, format_findings, judge_run
from dlscale.results import UNKNOWN, read_run

if TYPE_CHECKING:
    from dlscale.config.resolve import Configuration


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Print the verdicts on `args.runs` (PLAN.RUN, or folders of runs); return the exit status."""
    found, hangs = dict[str, Verdict](), dict[str, str]()
    hang_of = registry.provided("hang_of", lambda folder: "")
    for name in args.runs:
        run = read_run(run_folder(name, configuration))
        hangs[name] = hang_of(run.folder)
        if hangs[name] and not (run.throughput or run.profile):
            found[name] = Verdict(None, [], "", "")
            continue
        if not (run.throughput or run.profile):
            raise UserError(
                f"{run.folder}: this run has neither a throughput nor a profile yet. Add `throughput` or `profile` to "
                "its plan's `measure`, and run the plan"
            )
        found[name] = judge_run(run)
    if args.json:
        print(json.dumps({name: {**asdict(each), "hang": hangs[name]} for name, each in found.items()}, indent=2))
    else:
        print("\n\n".join("\n".join(lines(name, each, hangs[name])) for name, each in found.items()))
    return 0


def lines(name: str, found: Verdict, hang: str = "") -> list[str]:
    """Format a verdict as lines of text; `hang` is the hang or lost process that ended the run, or an empty text."""
    said = ""
    if found.bound:
        said = ": its limit is not known" if found.bound.what == UNKNOWN else f": bound by {found.bound.what}"
    ended = [f"  ended: {hang}"] if hang else []
    return [f"{name}{said}", *ended, *(format_findings(found) if found.todo else [])]
