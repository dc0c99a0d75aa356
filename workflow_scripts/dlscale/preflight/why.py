"""`dlscale why`, and the end of each dry run: settings, sources, image or files that changed, of which runs.

Snakemake tells that a job's parameters are others, and shows both as a whole; their changes are lines here.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlscale.config.resolve import Configuration
from dlscale.core.files import write_json
from dlscale.core.settings import flat
from dlscale.core.stages import RUN_STAGES, STAGES
from dlscale.core.text import many, shorten
from dlscale.preflight.run import ask, typed_target
from dlscale.preflight.status import last_word

#: Settings of a line, and modules: more are counted.
MOST = 4
#: Digests of modules by name, which a digest of sources stands for; None if nobody remembers.
Sources = Callable[[str], Mapping[str, str] | None]


@dataclass(frozen=True)
class Waiting:
    """A job that would run, with Snakemake's reasons."""

    rule: str
    wildcards: Mapping[str, str]
    missing: Sequence[str] = ()  #: Outputs that are not there, folders with a slash at their end.
    known: bool = False  #: Whether it ran before.
    failed: bool = False  #: Whether its last try ended without its result, which Snakemake then removes.
    before: Sequence[str] = ()  #: Representations of recorded parameters that it has no more.
    now: Sequence[str] = ()  #: Those that it had not.
    newer: Sequence[str] = ()  #: Inputs that changed since.
    inputs: bool = False  #: Whether it reads other files than before.
    follows: bool = False  #: Whether inputs are made in the same call.
    forced: bool = False
    interrupted: bool = False  #: Whether an earlier try was cut short.
    command: bool = False  #: Whether the rule's own command changed.


def stage_of(rule: str) -> str:
    """Return the stage of a rule: that of `report_plan` is `report`."""
    return "acquire" if rule == "fetch" else rule.partition("_")[0]


def _order(rule: str) -> int:
    return [*STAGES, stage_of(rule)].index(stage_of(rule))


def _in_order(rules: Iterable[str]) -> list[str]:
    return sorted(rules, key=lambda rule: (_order(rule), rule))


def found(jobs: Iterable[Waiting], sources: Sources) -> list[str]:
    """Return a line for each reason, with the jobs of a plan that have it, then what follows and what is replaced."""
    jobs, told, follow = list(jobs), dict[tuple[str, str], dict[str, set[str]]](), Counter[str]()
    for job in jobs:
        if not (reason := explained(job, sources)):
            follow[job.rule] += 1
            continue
        group, name = place(job.rule, job.wildcards)
        told.setdefault((group, reason), {}).setdefault(name, set()).add(job.rule)
    alike = dict[tuple[str, str, frozenset[str]], list[str]]()  # runs with the same stages share a line
    for (group, reason), stages in told.items():
        for name, its in stages.items():
            alike.setdefault((group, reason, frozenset(its)), []).append(name)
    reasons = []
    for (group, reason, rules), names in alike.items():
        # The rule that writes a plan's runs goes without saying where others use them.
        in_order = _in_order(rule for rule in rules if stage_of(rule) != "configure") or _in_order(rules)
        several = len(names) > 1 and group.endswith(".")
        text = f"{{{_some(sorted(names))}}}" if several else _some(sorted(names))
        line = f"{group}{text} ({', '.join(in_order)}): {reason}"
        reasons.append((_order(in_order[0]), group, sorted(names), line))
    further = [f"{rule} {follow[rule]}" if follow[rule] > 1 else rule for rule in _in_order(follow)]
    text = f"and what follows from that: {', '.join(further)}" if further else ""
    return [line for line in [*(line for *_, line in sorted(reasons)), text, replaced(jobs)] if line]


def replaced(jobs: Iterable[Waiting]) -> str:
    """Return a line on runs whose results are replaced by those of other settings or inputs; else an empty text."""
    names, rules, data = set(), set(), False
    for job in jobs:
        before, now = _stage(job.before), _stage(job.now)
        others = bool(_settings(before.get("settings"), now.get("settings")))
        # New sources, or another image, make all inputs again, too: that is no change of what was asked for.
        read = not (before or now) and (job.follows or bool(job.newer))
        if job.rule in RUN_STAGES and job.known and not job.missing and (others or read):
            names.add("{plan}.{run}".format_map(job.wildcards))
            rules.add(job.rule)
            data |= read
    if not names:
        return ""
    runs = f"{_some(sorted(names))} ({', '.join(_in_order(rules))})"
    own = "a run of its own, on a dataset of its own" if data else "a run of its own"
    return f"replaces the results of {runs}; to keep them: {own} (from: {min(names)})"


def lost(
    results: str, runs: Iterable[str], datasets: Iterable[str], making: Collection[str], given: Sequence[str] = ()
) -> list[str]:
    """Return a line for each run (`PLAN/RUN`) and dataset that lost files which no job would make.

    `making`: files that jobs would make; `given`: words of a call that name its site and configuration.
    """
    places = [(f"plans/{run}", run.replace("/", "."), "metrics.jsonl", ["model.pt", "tensorboard/"]) for run in runs]
    places += [(f"data/{name}", f"data {name}", "manifest.json", ["stats/"]) for name in datasets]
    lines = []
    for where, what, first, kept in places:
        folder = f"{results}/{where}"
        # An empty folder is none.
        gone = [name for name in kept if not any(Path(folder).glob(f"{name}*" if name.endswith("/") else name))]
        if gone and Path(folder, first).exists() and f"{folder}/{first}" not in making:
            call = shlex.join(["snakemake", *given, "--force", f"{folder}/{first}"])
            lines.append(f"{what}: {_gone(gone)}, and nothing asked for needs that; to make it again: {call}")
    return lines


def _gone(names: Sequence[str]) -> str:
    return f"{_some(names)} {'is' if len(names) == 1 else 'are'} gone"


def explained(job: Waiting, sources: Sources) -> str:
    """Return the reason of a job; an empty text if it follows from others."""
    reasons = ["interrupted" if job.interrupted else "asked for by force"] if job.forced or job.interrupted else []
    if job.missing and not job.interrupted:
        names = list(dict.fromkeys(f"{Path(path).name}{'/' * path.endswith('/')}" for path in job.missing))
        reasons.append("its last try failed" if job.failed else _gone(names) if job.known else "never made")
    reasons += changes(_stage(job.before), _stage(job.now), sources)
    if job.newer and job.known:  # to what was never made all inputs are new
        reasons.append(f"changed: {_some(job.newer)}")
    if job.inputs and not reasons:
        reasons.append("it reads other files than before")
    if job.command:
        reasons.append("the rule's command changed")
    return "; ".join(reasons)


def changes(before: Mapping[str, Any], now: Mapping[str, Any], sources: Sources) -> list[str]:
    """Return what differs between a job's parameters before and now."""
    own = _settings(before.get("settings"), now.get("settings"))
    changed = [*own[:MOST], *([f"{many(len(own) - MOST, 'more setting')}"] if len(own) > MOST else [])]
    if before.get("sources") != now.get("sources"):
        one, other = (sources(each.get("sources", "")) for each in (before, now))
        names = sorted({name for name, _ in {*(one or {}).items()} ^ {*(other or {}).items()}})
        changed.append(f"{_some(names) if one and other else 'sources'} changed")
    first = _settings(before.get("beside"), now.get("beside"))
    changed += [f"of the plan's first run: {text}" for text in first if text not in own]
    around = [(key, before.get(key), now.get(key)) for key in ("image", "packages")]
    return changed + [f"{key} {_value(one)} → {_value(other)}" for key, one, other in around if one != other]


def _settings(before: Any, now: Any) -> list[str]:
    """Return the settings that differ, each with both values; they may be JSON."""
    old, new = (flat(json.loads(each) if isinstance(each, str) else each or {}) for each in (before, now))
    told = []
    for key in dict.fromkeys([*old, *new]):
        if (key in old, old.get(key)) != (key in new, new.get(key)):
            one, other = _value(old.get(key)), _value(new.get(key))
            # What differs may be beyond what is shown of a long value.
            told.append(f"{key} changed" if one == other else f"{key} {one} → {other}")
    return told


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST]) + (f" and {len(names) - MOST} more" if len(names) > MOST else "")


def _value(value: Any) -> str:
    if value is None:
        return "none"
    return shorten(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), 60)


def _stage(texts: Iterable[str]) -> dict[str, Any]:
    """Return the dict `stage` among recorded parameters."""
    for text in texts:
        with contextlib.suppress(ValueError, SyntaxError):
            value = ast.literal_eval(text)
            if isinstance(value, dict):
                return value
    return {}


def place(rule: str, known: Mapping[str, str]) -> tuple[str, str]:
    """Return group and name of a job, from its rule and its wildcards."""
    if "run" in known:
        return f"{known['plan']}.", known["run"]
    for key, group in (("plan", "plan "), ("dataset", "data ")):
        if key in known:
            return group, known[key]
    return "", rule


def failed(rule: str, wildcards: Mapping[str, str], log: str, since: float) -> str:
    """Return a line on a job that failed in a call that began at `since` (s since 1970-01-01 UTC)."""
    name = "".join(place(rule, wildcards))
    stage, file = stage_of(rule), Path(log)
    name += f" ({stage})" if name != rule else ""
    if not (file.exists() and file.stat().st_mtime >= since):  # what is there is of an earlier call
        return f"FAILED {name}: it never began; why is said above"
    word = last_word(file, stage) or "it ended without a word, as what is killed does, by hand or for want of memory"
    return f"FAILED {name}: {word}; log: {log}"


# ---- what digests stand for --------------------------------------------------------------------------


def remember(tables: Mapping[str, Mapping[str, str]], folder: Path) -> None:
    """Write the modules that digests of sources stand for, a file each."""
    for digest, table in tables.items():
        if not (path := folder / f"{digest}.json").exists():
            write_json(path, table)


def remembered(folder: Path, tables: Mapping[str, Mapping[str, str]], digest: str) -> Mapping[str, str] | None:
    """Return the modules of a digest, from `tables` or the files of `remember`."""
    with contextlib.suppress(OSError, ValueError):
        return tables.get(digest) or json.loads((folder / f"{digest}.json").read_text(encoding="utf-8"))
    return None


# ---- the question ------------------------------------------------------------------------------------


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Print why Snakemake would run what it would for `args.targets`; return its exit status."""
    names = [typed_target(word, configuration).name for word in args.targets] if configuration else args.targets
    status, said, found = ask(names, args)
    if status:
        print(said, file=sys.stderr)
    elif args.json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        rest = "." if found["lost"] else ": all is there, and as it was asked for."
        print("\n".join([*(found["reasons"] or [f"Nothing would run{rest}"]), *found["lost"]]))
    return int(status)
