"""Compare the speed, loss and settings of two results, or two profiles (`dlscale compare`).

The arguments of `compare BEFORE AFTER` are two plans, two runs (`PLAN.RUN`), or two folders of results, plans or runs
(`./NAME` if a plan has the same name). With `--gate` the exit status is 1 if a run became slower by more than the
noise. The arguments of `compare --profiles BEFORE AFTER` are two runs with profiles, or two reports of Nsight Systems
(of any program).
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlscale.config.places import results_of, run_folder
from dlscale.core import registry, text
from dlscale.core.errors import UserError, unknown
from dlscale.core.files import no_pipe, open_regular
from dlscale.core.noise import pooled, standard_errors
from dlscale.core.paths import Results
from dlscale.core.settings import read_yaml
from dlscale.extensions.compare.terminal import show
from dlscale.measure.profilers import Profile, TopEntry
from dlscale.measure.records import SAMPLE_RATE, STEP_RATE
from dlscale.report.figures import Cell, Table, cell, table
from dlscale.report.speedup import MIN_PAIRED_LOG_DIFFERENCE, SpeedUp, SpeedUps, measured_apart, paired_ratio
from dlscale.results import RECORDS, RunResult, changes, environment_changes, read_plan, read_run

if TYPE_CHECKING:
    import pandas as pd

    from dlscale.config.resolve import Configuration

#: Kinds of rows for which the spread over steps is unknown.
UNKNOWN_SPREAD = ("line", "function", "worker")


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Print the comparison of `args.results`; return the exit status."""
    if args.gate and args.profiles:
        raise UserError("compare: --gate compares speeds, not profiles; leave out --gate or --profiles")
    return (of_profiles if args.profiles else of_results)(args, configuration)


# ---- results -----------------------------------------------------------------------------------------


def of_results(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Print the comparison of the runs that both results have; return the exit status.

    The exit status is 1 if `args.gate` is set and a run became slower by more than the noise; otherwise 0.
    """
    before, after = (finished(name, configuration) for name in args.results)
    named_runs = [is_run(name, results_of(configuration)) for name in args.results]
    if all(named_runs):
        ((one, first), (other, second)) = (*before.items(), *after.items())
        key = one if one == other else f"{one} -> {other}"
        before, after = {key: first}, {key: second}
    plans = [{key.partition(".")[0] for key in each} for each in (before, after)]
    if before.keys().isdisjoint(after) and len(plans[0]) == len(plans[1]) == 1:
        before, after = ({key.partition(".")[2]: run for key, run in each.items()} for each in (before, after))
    if not (both := [key for key in before if key in after]):
        raise UserError(
            f"{' and '.join(args.results)}: these results have no run in common. Name results with equal names of runs"
        )
    apart = {(before[key].study, after[key].study) for key in both if before[key].study != after[key].study}
    if apart and not args.force:
        raise other_studies(args.results, *apart.pop())
    # Each run is compared twice: its speed, and its speed-up over its plan's first run. A run of several plans counts
    # once. More comparisons need wider intervals, because otherwise some runs would seem slower by chance.
    looks = 2 * len({before[key].folder for key in both}) if args.gate else 1
    found = [change(key, before[key], after[key], looks) for key in both]
    sides = ((args.results[0], before, after), (args.results[1], after, before))
    lone = {name: [key for key in one if key not in other] for name, one, other in sides if not any(named_runs)}
    slower = [each["run"] for each in found if each["slower"]]
    if args.gate and not any(each["held"] for each in found):
        names = " and ".join(args.results)
        raise UserError(
            f"{names}: --gate cannot compare any run. Expected a run that was timed at least twice in both results, "
            "with the same work on the same device, while no other program was running"
        )
    if args.json:
        print(json.dumps({"runs": found, "alone": lone}, indent=2))
    else:
        _print(found, lone)
        if args.gate:
            print(f"slower beyond noise: {', '.join(slower) or 'none'}")
    return 1 if args.gate and slower else 0


def _print(found: list[dict[str, Any]], lone: dict[str, list[str]]) -> None:
    columns = [
        ("", "run", [cell(each["run"]) for each in found]),
        *(
            ("", f"speed {when} ({unit}/s)", [cell(each[f"{unit}_per_second"][side]) for each in found])
            for unit in ("samples", "steps")
            for side, when in enumerate(("before", "after"))
            if any(each[f"{unit}_per_second"] != [None, None] for each in found)
        ),
        ("", "speed-up", [cell(each["speed"] and each["speed"]["words"]) for each in found]),
        (
            "",
            "speed-up relative to the first run",
            [cell(each["over_first"] and each["over_first"]["words"]) for each in found],
        ),
        ("", "different devices", [cell(each["devices"] and f"{each['devices']}: not compared") for each in found]),
        ("", "validation loss", [_pair(each["valid_loss"], text.number) for each in found]),
        ("", "settings", [cell("; ".join(each["settings"][:4]) + " …" * bool(each["settings"][4:])) for each in found]),
        ("", "busy machine, before and after", [_pair(each["busy"], str) for each in found]),
    ]
    show(table(columns))
    apart = dict[str, list[str]]()
    for each in found:
        if each["environment"]:
            apart.setdefault(", ".join(each["environment"]), []).append(each["run"])
    for words, runs in apart.items():
        print(f"machines or software differ{_of(runs, found)}: {words}")
    for name, runs in lone.items():
        if runs:
            print(f"runs only in {name}: {', '.join(runs)}")


def _of(runs: list[str], found: list[dict[str, Any]]) -> str:
    return "" if len(runs) == len(found) else f" ({', '.join(runs)})"


def change(key: str, before: RunResult, after: RunResult, looks: int = 1) -> dict[str, Any]:
    """Return the changes of a run, as JSON values, with intervals for `looks` comparisons."""
    names = [run.device.name for run in (before, after)]
    elsewhere = all(names) and names[0] != names[1]
    over = SpeedUps([before, after]).over if before.folder.parent == after.folder.parent else measured_apart
    speeds = {
        "speed": None if elsewhere else over(after, before, looks=looks),
        "over_first": None if elsewhere else relative_to_first(after, before, looks),
    }
    # Only a comparison of equal work with a finite interval can show a slower run; a single trial has no interval.
    held = [each for each in speeds.values() if each and before.compute == after.compute and math.isfinite(each.error)]
    losses = [run.mean.valid_loss if run.epochs else math.nan for run in (before, after)]
    differ = changes(before.settings, after.settings)
    shown = {name: [text.NONE if value is None else str(value) for value in pair] for name, pair in differ.items()}
    return {
        "run": key,
        "samples_per_second": [run.speed if run.unit == SAMPLE_RATE else None for run in (before, after)],
        "steps_per_second": [run.speed if run.unit == STEP_RATE else None for run in (before, after)],
        **{name: found and _plain(found) for name, found in speeds.items()},
        "held": bool(held),
        "slower": any(found.high < 1 for found in held),
        "valid_loss": [loss if math.isfinite(loss) else None for loss in losses],
        "settings": [f"{name} {old} -> {new}" for name, (old, new) in shown.items()],
        "environment": environment_changes(before, after),
        "devices": f"{names[0]} and {names[1]}" if elsewhere else None,
        "busy": [
            f"{'other programs' if run.foreign_load else 'own jobs'} used {text.percent(run.foreign_cpu_fraction)} of "
            "the cores"
            if run.foreign_cpu_fraction
            else None
            for run in (before, after)
        ],
    }


def _plain(found: SpeedUp) -> dict[str, Any]:
    ratio = None if found.unknown else found.ratio
    ends = [found.low, found.high] if math.isfinite(found.error) else None
    return {"ratio": ratio, "interval": ends, "noise": found.noise, "words": found.words}


def _pair(values: list[Any], shown: Callable[[Any], str]) -> Cell:
    words = [text.NONE if value is None else shown(value) for value in values]
    return Cell() if values == [None, None] else cell(" -> ".join(words))


def other_studies(names: Sequence[str], *studies: str) -> UserError:
    """Return the error for runs of different studies."""
    return UserError(
        f"{' and '.join(names)}: the studies differ ({' and '.join(studies)}), so speed and loss are not comparable. "
        "Name runs of the same study, or add --force"
    )


def is_run(name: str, results: Path) -> bool:
    """Return whether `name` names a run or a run's folder, and not a plan or a folder of results."""
    path = Path(name)
    if _plan_files(name, results) or (path / "plans").is_dir():
        return False
    return bool(re.fullmatch(r"[\w-]+\.[\w-]+", name)) or (path / "config.yaml").is_file()


def _plan_files(name: str, results: Path) -> list[Path]:
    """Return the `plan.yaml` of the plan `name`, of the plan in the folder `name`, or of all plans in a results folder.

    A plan's name has precedence over a folder.
    """
    plan = Path(Results(results).plan(name))
    path = plan.parent if "/" not in name and plan.exists() else Path(name)
    return [path / "plan.yaml"] if (path / "plan.yaml").exists() else sorted(path.glob("plans/[!.]*/plan.yaml"))


def finished(name: str, configuration: Configuration | None) -> dict[str, RunResult]:
    """Return finished runs by `PLAN.RUN`. `name` is a run, a plan, a folder of a run or plan, or a results folder.

    Raise `UserError` if no run is finished.
    """
    results, lacking = results_of(configuration), list[str]()
    if is_run(name, results):
        run = read_run(folder := run_folder(name, configuration))
        if not any(records.exists() for records in (folder / file for file in RECORDS.values())):
            raise UserError(f"{name}: no stage of the run is finished. Measure the run first")
        return {name if "/" not in name else run.owner.replace("/", "."): run}
    if not (plans := _plan_files(name, results)):
        known = [file.parent.name for file in results.glob("plans/[!.]*/plan.yaml")]
        raise UserError(
            f"{name}: expected a run (PLAN.RUN), a plan, or the folder of a run, plan or results; "
            f"{unknown('plan', name, known)}"
        )
    found = {f"{file.parent.name}.{run.name}": run for file in plans for run in read_plan(file, lacking=lacking).runs}
    if not found:
        raise UserError(f"{name}: no run is finished; {lacking[0]}")
    for each in lacking:
        print(f"left out: {each}", file=sys.stderr)
    return found


# ---- profiles ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """Contents of a profile that are compared."""

    rows: list[TopEntry]
    steps: dict[str, int]  #: Number of profiled steps, by profiler.
    batch: float | None = None  #: Samples per step of a process; None if unknown.
    study: str | None = None  #: Study of the run; None for a report of another program.


def of_profiles(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Print the changes from the first profile to the second."""
    before, after = (_profile(name, configuration) for name in args.results)
    if None not in (before.study, after.study) and before.study != after.study and not args.force:
        raise other_studies(args.results, str(before.study), str(after.study))
    used, now = ({row.tool for row in summary.rows} for summary in (before, after))
    if not used & now:
        said = f"{', '.join(sorted(used))} and {', '.join(sorted(now))}"
        raise UserError(f"the profiles have no profiler in common ({said}). Profile both runs with the same profilers")
    changed, per = extremes(compare(before, after)), unit(before, after)
    if args.json:
        rows = json.loads(changed.to_json(orient="records"))
        print(json.dumps({"per": per, "batches": [before.batch, after.batch], "faster and slower": rows}, indent=2))
        return 0
    if per == "sample":
        print(f"samples per step of a process: {before.batch:g} before, {after.batch:g} after. Times are per sample")
    show(_table(changed, per))
    return 0


def _profile(name: str, configuration: Configuration | None) -> Summary:
    path = Path(name)
    if path.suffix not in (".sqlite", ".nsys-rep", ".qdrep"):
        folder = run_folder(name, configuration)
        study = read_yaml(folder / "config.yaml", linked=False).get("study")
        return replace(read(folder / "profile"), study=study)
    if not path.is_file():
        raise UserError(f"{name}: no such file")
    reader = registry.table("PROFILERS").get("nsys")
    if not reader:
        raise UserError(f"{name}: the extension `nsys`, which reads reports of Nsight Systems, is missing")
    tool, rows = registry.load(reader).of_report(path)
    return Summary(rows, {tool.name: tool.steps})


def read(folder: Path) -> Summary:
    """Read a run's profile from its folder `profile`."""
    record = Profile.read(folder / "profile.json")
    return Summary(
        read_rows(folder / "profile_summary.csv"),
        {tool.name: tool.steps for tool in record.tools},
        record.batch_size / record.nranks if record.batch_size else None,
    )


def read_rows(file: Path) -> list[TopEntry]:
    """Read the rows of a `profile_summary.csv`; raise `UserError` if the file is missing, damaged or empty."""
    try:
        with open(no_pipe(file), newline="", encoding="utf-8", opener=open_regular) as lines:
            each = enumerate(map(unescape_formulas, csv.DictReader(lines)), 1)
            rows = [TopEntry.checked(row, f"{file}: row {number}") for number, row in each]
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; run the profile stage first") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{file}: not the summary of a profile ({error}); run the profile stage again") from None
    if not rows:
        raise UserError(f"{file}: no rows; run the profile stage again")
    return rows


def unit(before: Summary, after: Summary) -> str:
    """Return the unit for comparing two profiles: `sample` if both batches are known and differ, otherwise `step`."""
    return "step" if None in (before.batch, after.batch) or before.batch == after.batch else "sample"


def compare(before: Summary, after: Summary) -> pd.DataFrame:
    """Return the changes of all rows of two profiles.

    Columns: tool, kind, name, before, after, noise, difference, certain, calls_before, calls_after, per. Times are in
    seconds per step or sample (column `per`), calls are per step; times and calls are means over ranks. If a profile
    lacks a row, the time of the row is 0. Only profilers that both profiles have are compared.

    The noise is the half-width of the 95 % interval of the difference. For means over n1 and n2 steps with standard
    deviations s1 and s2, the noise is sqrt(s1^2 / n1 + s2^2 / n2), times Student's t for the smaller of n1 and n2. The
    noise is infinite if a profile has a single step, and for rows of the kinds `UNKNOWN_SPREAD`.
    """
    per, both = unit(before, after), {"before": before, "after": after}
    parts = [_means(summary, per).add_suffix(f"_{when}") for when, summary in both.items()]
    joined = parts[0].join(parts[1], how="outer").fillna(0.0).reset_index()
    tools = set.intersection(*({row.tool for row in summary.rows} for summary in both.values()))
    joined = joined[joined.tool.isin(tools)].rename(columns={f"mean_{when}": when for when in both})
    fewest = {tool: min(summary.steps.get(tool, 1) for summary in both.values()) for tool in tools}
    known = {tool: standard_errors(steps) for tool, steps in fewest.items()}
    joined["reach"] = joined.tool.map(known).where(~joined.kind.isin(UNKNOWN_SPREAD), math.inf)
    joined["difference"] = joined.after - joined.before
    joined["noise"] = ((joined.error_before**2 + joined.error_after**2) ** 0.5 * joined.reach).fillna(math.inf)
    joined["certain"] = joined.difference.abs() > joined.noise
    columns = ["before", "after", "noise", "difference", "certain", "calls_before", "calls_after"]
    return joined[["tool", "kind", "name", *columns]].assign(per=per)


def _means(summary: Summary, per: str) -> pd.DataFrame:
    """Return each row's mean time over ranks, its standard error (s per step or sample) and calls per step.

    If a rank lacks the row, the rank's time is 0.
    """
    import pandas as pd

    rows = pd.DataFrame([{**row.model_dump(), "square": row.std**2} for row in summary.rows])
    found = rows.groupby(["tool", "kind", "name"]).agg({"seconds": "sum", "square": "sum", "calls": "sum"})
    tools = found.index.get_level_values("tool")
    ranks = tools.map(rows.groupby("tool")["rank"].nunique().to_dict()).to_numpy()
    steps = tools.map({tool: max(summary.steps.get(tool, 1), 1) for tool in set(tools)}).to_numpy()
    scale = 1 / (summary.batch or 1) / ranks if per == "sample" else 1 / ranks
    error = scale * (found.square / steps) ** 0.5
    return pd.DataFrame({"mean": scale * found.seconds, "error": error, "calls": found.calls / ranks})


def extremes(changes: pd.DataFrame, count: int = 10) -> pd.DataFrame:
    """Return the rows whose time decreased most, then the rows whose time increased most."""
    import pandas as pd

    faster = changes[changes.difference < 0].nsmallest(count, "difference")
    return pd.concat([faster, changes[changes.difference > 0].nlargest(count, "difference")])


def _table(changes: pd.DataFrame, per: str) -> Table:
    rows: list[Any] = list(changes.itertuples())
    columns = [
        ("", "name", [cell(name) for name in short_names([row.name for row in rows])]),
        ("", "change (ms)", [_ms(row.difference, row.noise) for row in rows]),
        ("", f"before (ms per {per})", [_ms(row.before) for row in rows]),
        ("", f"now (ms per {per})", [_ms(row.after) for row in rows]),
        ("", "calls per step", [_calls(row.calls_before, row.calls_after) for row in rows]),
        ("", "kind", [cell(f"{row.kind}, {row.tool}") for row in rows]),
        ("", "certain", [cell("yes" if row.certain else "within noise") for row in rows]),
    ]
    return table(columns, "faster and slower")


#: Maximum length of a name in the table; C++ names of kernels have hundreds of characters.
NAME_LENGTH = 60


def short_names(names: Sequence[str]) -> list[str]:
    """Shorten names to at most `NAME_LENGTH` characters; equal short names get a number."""
    half = (NAME_LENGTH - 1) // 2
    found, whole = list[str](), dict[str, list[str]]()
    for name in (name.removeprefix("void ") for name in names):
        short = name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 1 - half]}…{name[-half:]}"
        alike = whole.setdefault(short, [])
        alike += [name] * (name not in alike)
        number = alike.index(name) + 1
        found.append(short if number == 1 else f"{short} ({number})")
    return found


def _calls(before: float, after: float) -> Cell:
    """Return the calls before and after, or a single number if both are equal.

    The cell is empty if the profiler does not count calls.
    """
    if not before and not after:
        return Cell()
    words = [f"{round(calls, 2):,.12g}" for calls in (before, after)]
    return cell(words[0] if words[0] == words[1] else f"{words[0]} -> {words[1]}")


def _ms(seconds: float, noise: float = 0.0) -> Cell:
    spread = f"± {text.number(1e3 * noise, 2)}" if math.isfinite(noise) else "noise unknown"
    return cell(1e3 * seconds, note=spread * bool(noise))


def relative_to_first(run: RunResult, other: RunResult, looks: int = 1) -> SpeedUp | None:
    """Return the ratio of two runs' speed-ups over the first runs of their plans; None if it is unknown.

    The ratio is unknown if a run has no paired timing, if the first runs do different work, or if one of the two runs
    does the work of a first run.
    """
    own, its = (each.throughput.beside if each.throughput else None for each in (run, other))
    if not (own and its and own.compute == its.compute) or own.compute in (run.compute, other.compute):
        return None
    return paired_ratio(own, its, pooled([own.ratios, its.ratios]), MIN_PAIRED_LOG_DIFFERENCE, looks)


def unescape_formulas(row: dict[str, Any]) -> dict[str, Any]:
    """Undo `escape_formula` in a row."""
    return {
        key: each[1:] if isinstance(each, str) and each.startswith("'") and text.FORMULA.match(each) else each
        for key, each in row.items()
    }
