"""`dlscale compare-profiles BEFORE AFTER`: what got faster and what slower, in a terminal."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlscale.core.text import shorten
from dlscale.measure.profilers.compare import Change, compare, extremes, read
from dlscale.report.explain import folder, results_of

if TYPE_CHECKING:
    from dlscale.config.resolve import Configuration


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Print what changed from the profile of the first of `args.runs` to that of the second; return the exit status."""
    results = results_of(configuration)
    before, after = (read(name if Path(name).exists() else folder(name, results)) for name in args.runs)
    faster, slower = extremes(compare(before, after))
    if args.json:
        found = {"faster": [_plain(each) for each in faster], "slower": [_plain(each) for each in slower]}
        print(json.dumps(found, indent=2))
        return 0
    for title, changes in (("faster", faster), ("slower", slower)):
        print(f"{title}, ms a step: change, noise, before -> after")
        print("\n".join(map(_line, changes)) or "  nothing")
    return 0


def _plain(change: Change) -> dict[str, Any]:
    noise = change.noise if math.isfinite(change.noise) else None
    return {**asdict(change), "noise": noise, "difference": change.difference, "certain": change.certain}


def _line(change: Change) -> str:
    noise = f"±{1e3 * change.noise:9.3f}" if math.isfinite(change.noise) else f"{'unknown':>10}"
    within = "" if change.certain or math.isinf(change.noise) else " (within the noise)"
    times = f"{1e3 * change.difference:+10.3f} {noise}  {1e3 * change.before:9.3f} -> {1e3 * change.after:<9.3f}"
    return f"{times} {change.tool} {change.kind}: {shorten(change.name, 80)}{within}"
