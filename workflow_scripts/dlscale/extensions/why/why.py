"""Reasons why jobs would run, for `dlscale why` and the end of a dry run: changed settings, sources, images, files.

Snakemake reports only that a job's parameters changed, and prints all of them. This module prints the differences.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dlscale.config.resolve import Configuration
from dlscale.core.fingerprint import SOURCES, TABLES
from dlscale.core.settings import flat
from dlscale.core.stages import RUN_STAGES, STAGES, job_name, stage_of
from dlscale.core.text import LISTED, are_gone, listed, many, shorten
from dlscale.preflight.run import Waiting, dry_run, typed_target

#: Function: digest of all sources → (module name → digest of the module); None for an unknown digest.
Sources = Callable[[str], Mapping[str, str] | None]


def _order(rule: str) -> int:
    return [*STAGES, stage_of(rule)].index(stage_of(rule))


def _in_order(rules: Iterable[str]) -> list[str]:
    return sorted(rules, key=lambda rule: (_order(rule), rule))


def read_table(digest: str) -> dict[str, str] | None:
    """Return the source files in a fingerprint of this or an earlier call, with digests; None if unknown."""
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        known = TABLES.get(digest) or json.loads((SOURCES / f"{digest}.json").read_text(encoding="utf-8"))
        return {name: str(content) for name, content in known.items()}
    return None


def format_reasons(jobs: Iterable[Waiting], sources: Sources = read_table) -> list[str]:
    """Return a line for each reason with its jobs, a line on dependent jobs, and a line on replaced results."""
    jobs, told, follow = list(jobs), dict[tuple[str, str], dict[str, set[str]]](), Counter[str]()
    for job in jobs:
        if not (reason := explain_job(job, sources)):
            follow[job.rule] += 1
            continue
        group, name = job_name(job.rule, job.wildcards)
        told.setdefault((group, reason), {}).setdefault(name, set()).add(job.rule)
    alike = dict[tuple[str, str, frozenset[str]], list[str]]()  # runs with the same reason and stages share a line
    for (group, reason), stages in told.items():
        for name, its in stages.items():
            alike.setdefault((group, reason, frozenset(its)), []).append(name)
    reasons = []
    for (group, reason, rules), names in alike.items():
        # Omit the rule that writes a plan's list of runs if other rules have the same reason.
        in_order = _in_order(rule for rule in rules if stage_of(rule) != "configure") or _in_order(rules)
        several = len(names) > 1 and group.endswith(".")
        text = f"{{{listed(sorted(names))}}}" if several else listed(sorted(names))
        line = f"{group}{text} ({', '.join(in_order)}): {reason}"
        reasons.append((_order(in_order[0]), group, sorted(names), line))
    further = [f"{rule} ({follow[rule]} jobs)" if follow[rule] > 1 else rule for rule in _in_order(follow)]
    text = f"and jobs that depend on these: {', '.join(further)}" if further else ""
    return [line for line in [*(line for *_, line in sorted(reasons)), text, replaced(jobs)] if line]


def replaced(jobs: Iterable[Waiting]) -> str:
    """Return a line on the results that jobs with new settings or inputs will replace; empty without such jobs."""
    names, rules, data = set(), set(), False
    for job in jobs:
        before, now = _stage(job.before), _stage(job.now)
        others = bool(_settings(before.get("settings"), now.get("settings")))
        # New inputs do not count if sources or image changed: settings and data of the run are then the same.
        read = not (before or now) and (job.follows or bool(job.newer))
        if job.rule in RUN_STAGES and job.known and not job.missing and (others or read):
            names.add("{plan}.{run}".format_map(job.wildcards))
            rules.add(job.rule)
            data |= read
    if not names:
        return ""
    runs = f"{listed(sorted(names))} ({', '.join(_in_order(rules))})"
    own = "give the changed dataset a new name, and use it in a new run" if data else "define a new run"
    return f"replaces the results of {runs}; to keep them, {own} (`from: {min(names)}`)"


def explain_job(job: Waiting, sources: Sources) -> str:
    """Return a job's reasons; empty if it runs only because of other jobs."""
    reasons = ["interrupted" if job.interrupted else "forced"] if job.forced or job.interrupted else []
    if job.missing and not job.interrupted:
        names = list(dict.fromkeys(f"{Path(path).name}{'/' * path.endswith('/')}" for path in job.missing))
        reasons.append(
            f"the last attempt failed at {job.failed}" if job.failed else are_gone(names) if job.known else "never made"
        )
    reasons += changes(_stage(job.before), _stage(job.now), sources)
    # Skip first runs, whose inputs are all new, and jobs that wait for a failed job: their new inputs are results of
    # the failed call.
    if job.newer and job.known and not job.follows:
        reasons.append(f"changed: {listed(job.newer)}")
    if job.inputs and not reasons:
        reasons.append("its list of input files changed")
    if job.command:
        reasons.append("the rule's command changed")
    return "; ".join(reasons)


def changes(before: Mapping[str, Any], now: Mapping[str, Any], sources: Sources) -> list[str]:
    """Return a text for each difference between a job's parameters before and now."""
    own = _settings(before.get("settings"), now.get("settings"))
    changed = [*own[:LISTED], *([f"{many(len(own) - LISTED, 'more setting')}"] if len(own) > LISTED else [])]
    if before.get("sources") != now.get("sources"):
        one, other = (sources(each.get("sources", "")) for each in (before, now))
        names = sorted({name for name, _ in {*(one or {}).items()} ^ {*(other or {}).items()}})
        changed.append(f"{listed(names) if one and other else 'sources'} changed")
    first = _settings(before.get("beside"), now.get("beside"))
    changed += [f"in the plan's first run: {text}" for text in first if text not in own]
    around = [(key, before.get(key), now.get(key)) for key in ("image", "packages")]
    return changed + [f"{key} {_value(one)} → {_value(other)}" for key, one, other in around if one != other]


def _settings(before: Any, now: Any) -> list[str]:
    """Return the settings that differ, each with both values; `before` and `now` may be JSON."""
    old, new = (flat(json.loads(each) if isinstance(each, str) else each or {}) for each in (before, now))
    told = []
    for key in dict.fromkeys([*old, *new]):
        if (key in old, old.get(key)) != (key in new, new.get(key)):
            one, other = _value(old.get(key)), _value(new.get(key))
            # The difference may be in a part of a long value that is not shown.
            told.append(f"{key} changed" if one == other else f"{key} {one} → {other}")
    return told


def _value(value: Any) -> str:
    if value is None:
        return "none"
    return shorten(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), 60)


def _stage(texts: Iterable[str]) -> dict[str, Any]:
    """Return the first dict among recorded parameters: a stage's settings, sources and image."""
    for text in texts:
        with contextlib.suppress(ValueError, SyntaxError):
            value = ast.literal_eval(text)
            if isinstance(value, dict):
                return value
    return {}


# ---- the command -------------------------------------------------------------------------------------


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Print the jobs that Snakemake would run for `args.targets`, with reasons; return Snakemake's exit status."""
    names = [typed_target(word, configuration).name for word in args.targets] if configuration else args.targets
    status, said, found = dry_run(names, args)
    if status:
        print(said, file=sys.stderr)
    elif args.json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        rest = "." if found["lost"] else ": all results are up to date."
        print("\n".join([*(found["reasons"] or [f"Nothing would run{rest}"]), *found["lost"]]))
    return int(status)
