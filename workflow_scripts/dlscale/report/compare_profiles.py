"""Two profiles side by side: what got faster, what slower, and what of that is more than noise.

`dlscale compare-profiles BEFORE AFTER` prints it; the page has it beside each profile.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlscale.config.places import folder
from dlscale.core.errors import UserError
from dlscale.core.files import no_pipe
from dlscale.core.noise import standard_errors
from dlscale.core.text import shorten
from dlscale.measure.profilers.records import Profile, TopEntry

if TYPE_CHECKING:
    from dlscale.config.resolve import Configuration

#: A row by profiler, kind and name.
Key = tuple[str, str, str]


@dataclass(frozen=True)
class Change:
    """What became of one row of the summary, in seconds; None where a profiler may have left the row out."""

    tool: str
    kind: str
    name: str
    before: float | None
    after: float | None
    noise: float  #: Half of the 95 % interval of the difference; infinite where nothing is known of the spread.
    per: str = "step"  #: What the seconds are of: a `step`; a `sample` where the batches differ.

    @property
    def difference(self) -> float | None:
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def certain(self) -> bool:
        """Whether it is more than the spread of the steps explains."""
        return self.difference is not None and abs(self.difference) > self.noise


@dataclass(frozen=True)
class Summary:
    """A profile as it is compared."""

    rows: list[TopEntry]
    steps: dict[str, int]  #: That each profiler saw.
    complete: frozenset[str] = frozenset()  #: The profilers that leave no row out.
    batch: float | None = None  #: Samples a step of one process.


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Print what changed from the profile of the first of `args.runs` to that of the second; return the exit status."""
    before, after = (read(name if Path(name).exists() else folder(name, configuration)) for name in args.runs)
    used, now = ({row.tool for row in summary.rows} for summary in (before, after))
    if not used & now:
        said = f"{', '.join(sorted(used))} and {', '.join(sorted(now))}"
        raise UserError(f"the profiles have no profiler in common ({said}); profile both with the same tools")
    changes = compare(before, after)
    per, (faster, slower), lone = unit(before, after), extremes(changes), unmatched(changes)
    if args.json:
        lists = {"faster": faster, "slower": slower, "unknown": lone}
        plain = {title: [_plain(each) for each in of] for title, of in lists.items()}
        print(json.dumps({"per": per, "batches": [before.batch, after.batch], **plain}, indent=2))
        return 0
    if per == "sample":
        print(f"a process has batches of {before.batch:g} before and {after.batch:g} after: all times are per sample")
    for title, found in (("faster", faster), ("slower", slower)):
        print(f"{title}, ms a {per}: change, noise, before -> after")
        print("\n".join(map(_line, found)) or "  nothing")
    if lone:
        print(f"in one of the two alone, ms a {per}: the other may have left the row out")
        print("\n".join(map(_line, lone)))
    return 0


def read(path: str | Path) -> Summary:
    """Read the profile of a run: the run's folder, its folder `profile`, or a file in that."""
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    if not (folder / "profile.json").is_file() and (folder / "profile").is_dir():
        folder /= "profile"
    record = Profile.read(folder / "profile.json")
    return Summary(
        read_rows(folder / "profile_summary.csv"),
        {tool.name: tool.steps for tool in record.tools},
        frozenset(tool.name for tool in record.tools if tool.complete),
        record.batch_size / record.nranks if record.batch_size else None,
    )


def read_rows(file: Path) -> list[TopEntry]:
    """Read a `profile_summary.csv`."""
    no_pipe(file)
    try:
        with file.open(newline="", encoding="utf-8") as lines:
            rows = [
                TopEntry.checked(row, f"{file}: row {number}") for number, row in enumerate(csv.DictReader(lines), 1)
            ]
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; run the profile stage first") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{file}: no summary of a profile ({error}); run the profile stage again") from None
    if not rows:
        raise UserError(f"{file}: holds no row; run the profile stage again")
    return rows


def unit(before: Summary, after: Summary) -> str:
    """Return what two profiles are compared by: a `step`, or a `sample` where a step has other ones."""
    return "step" if None in (before.batch, after.batch) or before.batch == after.batch else "sample"


def compare(before: Summary, after: Summary) -> list[Change]:
    """Return what became of each row that either has, by profiler, kind and name; of several ranks, their mean.

    The noise is that of a difference of means over n steps of standard deviation s each: sqrt(s1^2 / n1 + s2^2 / n2)
    times Student's t of the fewer steps, so that of one step it is unknown. What drifts from one profile to the other,
    as a machine's clock, is not in it. Only profilers that both have are compared; lines, of which no spread is known,
    are never certain.
    """
    per, both = unit(before, after), (before, after)
    means = [_means(summary) for summary in both]
    scales = [1 / (summary.batch or 1) if per == "sample" else 1.0 for summary in both]
    tools = set.intersection(*({tool for tool, _, _ in of} for of in means))
    changes = []
    for key in dict.fromkeys([*means[0], *means[1]]):
        tool, kind, _ = key
        if tool not in tools:
            continue
        absent = [(0.0 if tool in summary.complete else None, 0.0) for summary in both]
        (a, error_a), (b, error_b) = (
            (None if mean is None else scale * mean, scale * error)
            for scale, (mean, error) in zip(scales, map(dict.get, means, (key, key), absent), strict=True)
        )
        noise = _reach(kind, min(summary.steps.get(tool, 1) for summary in both)) * math.hypot(error_a, error_b)
        noise = math.inf if math.isnan(noise) or a is None or b is None else noise
        changes.append(Change(*key, a, b, noise, per))
    return changes


def extremes(changes: Iterable[Change], count: int = 10) -> tuple[list[Change], list[Change]]:
    """Return what got faster the most, and what slower the most, the greatest difference first."""
    known = [(change.difference, change) for change in changes if change.difference is not None]
    ordered = sorted(known, key=lambda pair: pair[0])
    faster = [change for difference, change in ordered if difference < 0][:count]
    slower = [change for difference, change in reversed(ordered) if difference > 0][:count]
    return faster, slower


def unmatched(changes: Iterable[Change], count: int = 10) -> list[Change]:
    """Return the rows that only one profile has while the other may have left them out, the longest first."""
    lone = [change for change in changes if change.difference is None]
    return sorted(lone, key=lambda change: -(change.before or change.after or 0.0))[:count]


def _reach(kind: str, steps: int) -> float:
    """Return how many standard errors the noise is; of samples of stacks they are known without steps to compare."""
    if kind == "line":
        return math.inf
    return standard_errors(math.inf if kind == "function" else steps)


def _means(summary: Summary) -> dict[Key, tuple[float | None, float]]:
    """Return seconds a step, mean over the ranks, and their standard error; None where a rank may have left it out."""
    ranks: dict[str, set[int]] = {}
    by_key: dict[Key, list[TopEntry]] = {}
    for row in summary.rows:
        ranks.setdefault(row.tool, set()).add(row.rank)
        by_key.setdefault((row.tool, row.kind, row.name), []).append(row)
    found = dict[Key, tuple[float | None, float]]()
    for key, rows in by_key.items():
        tool, count = key[0], len(ranks[key[0]])
        if tool not in summary.complete and len({row.rank for row in rows}) < count:
            found[key] = None, 0.0
            continue
        # Of a profiler that leaves nothing out, a rank without the row took no time for it.
        mean = sum(row.seconds for row in rows) / count
        steps = max(summary.steps.get(tool, 1), 1)
        error = math.sqrt(sum(row.std**2 for row in rows) / steps) / count
        found[key] = mean, error
    return found


def _plain(change: Change) -> dict[str, Any]:
    noise = change.noise if math.isfinite(change.noise) else None
    return {**asdict(change), "noise": noise, "difference": change.difference, "certain": change.certain}


def _line(change: Change) -> str:
    noise = f"±{1e3 * change.noise:9.3f}" if math.isfinite(change.noise) else f"{'unknown':>10}"
    within = "" if change.certain or math.isinf(change.noise) else " (within the noise)"
    difference = f"{'?':>10}" if change.difference is None else f"{1e3 * change.difference:+10.3f}"
    before, after = ("?" if each is None else f"{1e3 * each:.3f}" for each in (change.before, change.after))
    plain = "".join(letter if letter.isprintable() else "?" for letter in change.name)  # a terminal obeys others
    name = f"{change.tool} {change.kind}: {shorten(plain, 80)}"
    return f"{difference} {noise}  {before:>9} -> {after:<9} {name}{within}"
