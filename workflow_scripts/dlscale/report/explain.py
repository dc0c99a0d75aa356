"""`dlscale explain RUN`: the verdict on a run, in a terminal."""

from __future__ import annotations

import argparse
import json
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from dlscale.config.places import folder
from dlscale.core.errors import UserError
from dlscale.core.settings import read_yaml
from dlscale.core.telemetry import read_nodes
from dlscale.core.text import percent
from dlscale.measure.profilers.records import Profile
from dlscale.report.diagnosis import UNKNOWN
from dlscale.report.results import read_throughput
from dlscale.report.verdict import Evidence, Verdict, verdict, watched

if TYPE_CHECKING:
    from dlscale.config.resolve import Configuration


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Print what holds the runs `args.runs` (PLAN.RUN, or their folders) back; return the exit status."""
    found = {name: verdict(evidence(folder(name, configuration))) for name in args.runs}
    if args.json:
        print(json.dumps({name: asdict(each) for name, each in found.items()}, indent=2))
    else:
        print("\n\n".join("\n".join(lines(name, each)) for name, each in found.items()))
    return 0


def evidence(path: Path) -> Evidence:
    """Return what there is of a run in its folder."""
    throughput, profile = path / "throughput.json", path / "profile/profile.json"
    if not (throughput.exists() or profile.exists()):
        raise UserError(
            f"{path}: neither throughput nor a profile was measured yet; run its plan, which needs `throughput` or "
            "`profile` in its `measure`"
        )
    return Evidence(
        read_yaml(path / "config.yaml"),
        read_throughput(path),
        Profile.read(profile) if profile.exists() else None,
        watched({stage: read_nodes(path / f"telemetry/{stage}.csv") for stage in ("throughput", "train")}),
    )


def lines(name: str, found: Verdict) -> list[str]:
    """Return a verdict as lines of text."""
    text = [name]
    if found.bound:
        unknown = found.bound.what == UNKNOWN
        text = [f"{name}: what bounds it is not known" if unknown else f"{name}: bound by {found.bound.what}"]
        text += _wrapped(found.bound.why)
    for finding in found.findings:
        costs = "" if finding.share is None else f", about {percent(finding.share)} of the time"
        text += ["", f"  {finding.what}{costs}", *_wrapped(finding.why)]
    if found.limit:
        text += ["", *_wrapped(found.limit)]
    return [*text, "", *_wrapped(f"Try next: {found.todo}")]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent="  ", subsequent_indent="  ")
