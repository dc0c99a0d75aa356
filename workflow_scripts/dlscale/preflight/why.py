"""Why jobs would run, in words: which settings, sources, image or files changed, of which runs.

Snakemake tells that a job's parameters are others, and shows both as a whole. They are one dict (rules/common.smk):
settings, the digest of the sources, image and packages. What changed in it is said here, a line for each reason.

`dlscale why TARGET …` is a dry run of Snakemake that says nothing else; each dry run ends with these lines.
"""

from __future__ import annotations

import argparse
import ast
import json
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlscale.core.files import write_json
from dlscale.core.settings import flat
from dlscale.core.stages import RUN_STAGES, STAGES
from dlscale.core.text import many
from dlscale.preflight import dryrun, run
from dlscale.preflight.status import last_word

if TYPE_CHECKING:
    from dlscale.config.resolve import Configuration

#: Settings of a line, and modules: more are counted.
MOST = 4


@dataclass(frozen=True)
class Waiting:
    """A job that would run, and what Snakemake says about it.

    Attributes
    ----------
    rule, wildcards
        What it is.
    missing
        Its outputs that are not there, folders with a slash at their end; `known`: whether it ran before.
    before, now
        Parameters as they were recorded, and as they are: representations of Python values that only one of them has.
    newer
        Inputs that changed since; `inputs`: whether it reads other files than before; `follows`: whether some of them
        are made before it, in the same call.
    forced, interrupted, command
        Whether it was asked for by force; whether an earlier try of it was cut short; whether the rule's own command
        changed.
    """

    rule: str
    wildcards: Mapping[str, str]
    missing: Sequence[str] = ()
    known: bool = False
    before: Sequence[str] = ()
    now: Sequence[str] = ()
    newer: Sequence[str] = ()
    inputs: bool = False
    follows: bool = False
    forced: bool = False
    interrupted: bool = False
    command: bool = False


#: Rules as a study goes through them.
_ORDER = tuple(STAGES)


def stage_of(rule: str) -> str:
    """Return the stage that a rule's command runs: that of `report_plan` is `report`."""
    return "acquire" if rule == "fetch" else rule.partition("_")[0]


def _place_in_order(rule: str) -> int:
    """Return where a rule stands in the workflow; whatever is no stage at the end."""
    return _ORDER.index(stage) if (stage := stage_of(rule)) in _ORDER else len(_ORDER)


@dataclass
class Line:
    """Runs of a plan, or whatever else would be made, that have a reason in common."""

    group: str  #: `PLAN.`, `plan `, `data `, or nothing.
    reason: str
    names: list[str] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        names = _some(self.names)
        several = len(self.names) > 1 and self.group.endswith(".")
        return f"{self.group}{f'{{{names}}}' if several else names} ({', '.join(self.rules)}): {self.reason}"


@dataclass
class Reasons:
    """Why jobs would run, by rule how many do because others do, what is gone and would not be made again, and which
    results others take the place of.
    """

    reasons: list[Line] = field(default_factory=list)
    follow: dict[str, int] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    replaced: str = ""

    def lines(self) -> list[str]:
        """Return a line for each reason, one for all that follows, and one for each that lost files."""
        follow = sorted(self.follow.items(), key=lambda each: (_place_in_order(each[0]), each))
        further = ", ".join(f"{rule} {count}" if count > 1 else rule for rule, count in follow)
        return [
            *map(str, self.reasons),
            *([f"and what follows from that: {further}"] if further else []),
            *self.lost,
            *filter(None, [self.replaced]),
        ]


def found(jobs: Iterable[Waiting], sources: Callable[[str], Mapping[str, str] | None]) -> Reasons:
    """Return why jobs would run.

    Parameters
    ----------
    sources
        Returns the modules and their digests that a digest of sources stands for; None if nobody remembers.
    """
    jobs, told = list(jobs), dict[tuple[str, str], Line]()
    follow: dict[str, int] = {}
    for job in jobs:
        if not (reason := explained(job, sources)):
            follow[job.rule] = follow.get(job.rule, 0) + 1
            continue
        group, name = place(job.rule, job.wildcards)
        line = told.setdefault((group, reason), Line(group, reason))
        for each, names in ((name, line.names), (job.rule, line.rules)):
            if each not in names:
                names.append(each)
    for line in told.values():  # what writes settings anew goes without saying where others use them
        line.rules = [rule for rule in line.rules if not rule.startswith("configure_")] or line.rules
        line.rules.sort(key=lambda rule: (_place_in_order(rule), rule))
        line.names.sort()
    lines = sorted(told.values(), key=lambda line: (_place_in_order(line.rules[0]), line.group, line.names))
    return Reasons(lines, follow, replaced=replaced(jobs))


def replaced(jobs: Iterable[Waiting]) -> str:
    """Return a line on runs that have results, and get those of other settings or inputs in their place; else nothing.

    New sources, or another image, make all of the inputs again, too: that is no change of what was asked for.
    """
    names, rules, inputs = set(), set(), False
    for job in jobs:
        others = [_of(before) != _of(now) for before, now in _beside(job.before, job.now)]
        read = not others and (job.follows or bool(job.newer))
        if job.rule in RUN_STAGES and job.known and not job.missing and (any(others) or read):
            names.add("{plan}.{run}".format_map(job.wildcards))
            rules.add(job.rule)
            inputs |= read
    if not names:
        return ""
    runs = f"{_some(sorted(names))} ({', '.join(sorted(rules, key=_place_in_order))})"
    own = "a dataset of its own, and a run that uses it" if inputs else "a run of its own"
    return f"replaces the results of {runs}; to keep them: {own} (from: {min(names)})"


def _of(stage: Any) -> Any:
    """Return the settings in a job's parameters."""
    return _keys(stage.get("settings")) if isinstance(stage, dict) else stage


def lost(
    results: str, runs: Iterable[str], datasets: Iterable[str], making: Collection[str], given: Sequence[str] = ()
) -> list[str]:
    """Return a line for each run (`PLAN/RUN`) and dataset that lost what no job would make: nothing asked for needs it.

    Parameters
    ----------
    making
        The files that jobs would make.
    given
        Words of a call that say which configuration it has.
    """
    places = [(f"plans/{run}", run.replace("/", "."), "metrics.jsonl", ["model.pt", "tensorboard/"]) for run in runs]
    places += [(f"data/{name}", f"data {name}", "manifest.json", ["stats/"]) for name in datasets]
    lines = []
    for place, what, first, kept in places:
        folder = f"{results}/{place}"
        gone = [name for name in kept if not _there(Path(folder, name))]
        if gone and Path(folder, first).exists() and f"{folder}/{first}" not in making:
            call = shlex.join(["snakemake", *given, "--force", f"{folder}/{first}"])
            lines.append(f"{what}: {_gone(gone)}, and nothing asked for needs that; to make it again: {call}")
    return lines


def _there(path: Path) -> bool:
    """Whether a file, or a folder with anything in it, is there."""
    return any(path.iterdir()) if path.is_dir() else path.exists()


def _gone(names: Sequence[str]) -> str:
    return f"{_some(names)} {'is' if len(names) == 1 else 'are'} gone"


def explained(job: Waiting, sources: Callable[[str], Mapping[str, str] | None]) -> str:
    """Return why a job would run; an empty text if it does because others do."""
    reasons = ["interrupted" if job.interrupted else "asked for by force"] if job.forced or job.interrupted else []
    if job.missing and not job.interrupted:
        names = list(dict.fromkeys(f"{Path(path).name}{'/' * path.endswith('/')}" for path in job.missing))
        reasons.append(_gone(names) if job.known else "never made")
    for before, now in _beside(job.before, job.now):
        reasons += changes(before, now, sources)
    if job.newer and job.known:  # to what was never made all inputs are new
        reasons.append(f"changed: {_some(job.newer)}")
    if job.inputs and not reasons:
        reasons.append("it reads other files than before")
    if job.command:
        reasons.append("the rule's command changed")
    return "; ".join(reasons)


def changes(before: Any, now: Any, sources: Callable[[str], Mapping[str, str] | None]) -> list[str]:
    """Return what differs between a job's parameters before and now."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return [f"{_value(before)} → {_value(now)}"]
    found = _settings(before.get("settings"), now.get("settings"))
    if before.get("sources") != now.get("sources"):
        found.append(_modules(*(sources(each.get("sources", "")) for each in (before, now))))
    own = _settings(before.get("settings"), now.get("settings"), most=None)
    for text in _settings(before.get("beside"), now.get("beside")):
        if text not in own:  # what both runs have in common is told once
            found.append(f"of the plan's first run: {text}")
    for key in ("image", "packages"):
        one, other = before.get(key), now.get(key)
        if one != other:
            found.append(f"{key} {_value(one)} → {_value(other)}")
    return found


def _settings(before: Any, now: Any, most: int | None = MOST) -> list[str]:
    old, new = (_keys(each) for each in (before, now))
    keys = [key for key in dict.fromkeys([*old, *new]) if old.get(key, _ABSENT) != new.get(key, _ABSENT)]
    both = [(key, _value(old.get(key, _ABSENT)), _value(new.get(key, _ABSENT))) for key in keys[:most]]
    # What differs may be beyond what is shown of a long value.
    told = [f"{key} changed" if one == other else f"{key} {one} → {other}" for key, one, other in both]
    return [*told, *([f"{many(len(keys) - most, 'more setting')}"] if most and len(keys) > most else [])]


_ABSENT = object()


def _keys(settings: Any) -> dict[str, Any]:
    """Return settings by dotted key; they may be JSON."""
    if isinstance(settings, str):
        try:
            settings = json.loads(settings)
        except ValueError:
            return {"settings": settings}
    return flat(settings) if isinstance(settings, dict) else {} if settings is None else {"settings": settings}


def _modules(before: Mapping[str, str] | None, now: Mapping[str, str] | None) -> str:
    if before is None or now is None:
        return "sources changed"
    changed = [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]
    return f"{_some(sorted(changed))} changed"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST]) + (f" and {len(names) - MOST} more" if len(names) > MOST else "")


def _value(value: Any) -> str:
    if value is _ABSENT or value is None:
        return "none"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:59] + "…"


def _beside(before: Sequence[str], now: Sequence[str]) -> list[tuple[Any, Any]]:
    """Return recorded parameters beside those that took their places: a rule has one, `stage`, that counts."""
    old, new = ([_read(text) for text in sorted(texts, key=len)] for texts in (before, now))
    length = max(len(old), len(new))
    return list(zip([*old, *[None] * (length - len(old))], [*new, *[None] * (length - len(new))], strict=True))


def _read(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def place(rule: str, known: Mapping[str, str]) -> tuple[str, str]:
    """Return what a job belongs to, and the name under which a line has it, from its rule and its wildcards."""
    if "run" in known:
        return f"{known['plan']}.", known["run"]
    if "plan" in known:
        return "plan ", known["plan"]
    if "dataset" in known:
        return "data ", known["dataset"]
    return "", rule


# ---- what failed -------------------------------------------------------------------------------------


def failed(rule: str, wildcards: Mapping[str, str], log: str, since: float) -> str:
    """Return a line on a job that failed in a call which began at `since` (seconds since 1970-01-01 UTC)."""
    name = "".join(place(rule, wildcards))
    stage, file = stage_of(rule), Path(log)
    name += f" ({stage})" if name != rule else ""
    if not (file.exists() and file.stat().st_mtime >= since):  # what is there is of an earlier call
        return f"FAILED {name}: it never began; why is said above"
    word = last_word(file, stage) or "it ended without a word, as what is killed does, by hand or for want of memory"
    return f"FAILED {name}: {word}; log: {log}"


# ---- what digests stand for --------------------------------------------------------------------------


def remember(tables: Mapping[str, Mapping[str, str]], folder: Path) -> None:
    """Write which modules the digests of sources stand for, a file each, where they are not known yet."""
    for digest, table in tables.items():
        if not (path := folder / f"{digest}.json").exists():
            write_json(path, table)


def remembered(folder: Path, tables: Mapping[str, Mapping[str, str]]) -> Callable[[str], Mapping[str, str] | None]:
    """Return a function from a digest to its modules: of `tables`, or of what `remember` wrote; None if neither has."""

    def look(digest: str) -> Mapping[str, str] | None:
        if digest in tables:
            return tables[digest]
        try:
            table = json.loads((folder / f"{digest}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return table if isinstance(table, dict) else None

    return look


# ---- the question ------------------------------------------------------------------------------------


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Have Snakemake look what it would run for `args.targets`, and say why; return its exit status."""
    targets = [run.target(word, configuration) for word in args.targets] if configuration else args.targets
    answer = dryrun.ask(targets, args)
    if answer.status:
        print(answer.said, file=sys.stderr)
        return answer.status
    raw = answer.reasons
    if args.json:
        print(json.dumps(raw, indent=2, ensure_ascii=False))
    else:
        reasons = Reasons([Line(**line) for line in raw["reasons"]], raw["follow"], raw["lost"], raw["replaced"])
        rest = "." if reasons.lost else ": all is there, and as it was asked for."
        nothing = [] if reasons.reasons else [f"Nothing would run{rest}"]
        print("\n".join([*nothing, *reasons.lines()]))
    return 0


def show(reasons: Reasons) -> None:
    """Print why jobs of a dry run would run."""
    if lines := reasons.lines():
        print("", "Why:", *(f"  {line}" for line in lines), sep="\n", file=sys.stderr)
