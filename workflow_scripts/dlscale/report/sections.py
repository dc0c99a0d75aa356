"""What the page shows of a plan: its card, and its sections, each by a function that returns None if it is hidden."""

from __future__ import annotations

import base64
import itertools
import math
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dlscale.core import text
from dlscale.core.errors import UserError
from dlscale.core.metrics import Metric
from dlscale.core.stages import RUN_STAGES
from dlscale.measure.records import MODES
from dlscale.report import curves, glance, machine, profiles, published, questions, scaling, trials
from dlscale.report.blocks import Cell, Entry, Section, Table, View, cell, entry, joules, some, table
from dlscale.report.collect import Row, rows_of, summary_csv
from dlscale.report.curves import LINES, Reference
from dlscale.report.diagnosis import bound, disturbance, gain
from dlscale.report.figures import MODE_COLOURS, MUTED, Bar, Line, bars, lines, run_line
from dlscale.report.results import PlanResult, RunResult, changes, first_and_least, roofs, slowness
from dlscale.report.speedup import SpeedUps
from dlscale.report.verdict import of

#: How many runs each part of the page shows: a report of hundreds stays readable.
BARS = 8
CHANNEL_ROWS = 40


@dataclass(frozen=True)
class Page:
    """The page that plans are shown in."""

    folder: Path = Path()  #: That links to files lead from.
    plans: frozenset[str] = frozenset()
    datasets: frozenset[str] = frozenset()
    pictures: int = 3  #: Predictions of a plan, at most.
    references: Sequence[Reference] = ()
    call: str = "snakemake"  #: Words of a shell that call the workflow.


def plan_view(plan: PlanResult, page: Page) -> View:
    """Return what the page shows of a plan."""
    used = dict.fromkeys(str(run.settings.get("dataset")) for run in plan.runs)
    lacking: dict[str, list[str]] = {}
    for run, what in plan.record.left_out.items():
        lacking.setdefault(what, []).append(run)
    return {
        "name": plan.name,
        "title": plan.title,
        "study": plan.record.study,
        "kind": plan.record.kind,
        "runs": len(plan.runs),
        "left_out": lacking,
        "omitted": len(plan.record.left_out),
        "disturbance": disturbance(plan.runs, page.call),
        "datasets": [{"name": name, "linked": name in page.datasets} for name in used],
        "devices": devices(plan.runs),
        "speed": glance.speed(plan),
        "bound": glance.fastest_bound(plan),
        "quality": glance.quality(plan),
        "targets": glance.targets(plan),
        "scales": scaling.glance(plan),
        "tuned": trials.verdicts(plan),
        "swept": trials.best(plan),
        "loss": plan.loss,
        "published": published.summary(plan.record.published, plan.described),
        "sections": [section for make in SECTIONS if (section := make(plan, page))],
    }


def devices(runs: Iterable[RunResult]) -> list[str]:
    """Return what the runs were measured on, each once."""
    names = []
    for device in (run.device for run in runs if run.device.name):
        threads = device.threads if device.kind == "cpu" else None
        names.append(f"{device.name}, {text.many(threads, 'thread')}" if threads else device.name)
    return list(dict.fromkeys(names))


def _least_loss(plan: PlanResult, limit: int) -> list[RunResult]:
    return first_and_least(plan.trained, limit, lambda run: run.final_loss)


# ---- throughput --------------------------------------------------------------------------------------


def throughput(plan: PlanResult, page: Page) -> Section | None:
    """Return the rates of each run, the roofline, and what bounds each."""
    measured = [run for run in plan.runs if run.throughput]
    if not measured:
        return None
    shown, speeds = first_and_least(measured, BARS, slowness), SpeedUps(plan.runs)
    rungs = plan.runs if plan.record.kind == "ladder" else []
    gains = {run: gain(before, run, speeds.over(run, before)) for before, run in itertools.pairwise(rungs)}
    words = "Samples per second of each run: mean over the trials, whiskers one standard deviation."
    points, roof = _roofline(plan, measured)
    verdicts = [
        {"run": each.label, "id": plan.anchor(each), "gain": gains.get(each), "bound": bound(each.throughput)}
        | {"verdict": of(each)}
        for each in shown
    ]
    rest = "the first and the fastest. The table has all."
    return Section(
        "Throughput",
        legend=points,
        plots=[(rates(f"{plan.name}-throughput", shown), words), *roof],
        notes=some(len(shown), len(measured), "runs", rest),
        form="throughput",
        own=verdicts,
        few=True,
    )


def rates(name: str, runs: Sequence[RunResult]) -> str:
    """Draw IO, SYNTHETIC and FULL of each run as bars, with the standard deviation over the trials."""
    groups = []
    for run in runs:
        known = [(mode, each) for mode in MODES if (each := run.trials(mode))]
        drawn = [Bar([(t.mean, MODE_COLOURS[mode])], text.number(t.mean), mode, t.std) for mode, t in known]
        groups.append((run.label, drawn))
    return bars(name, groups, "throughput (samples/s)")


def _roofline(plan: PlanResult, measured: Sequence[RunResult]) -> tuple[list[Entry], list[tuple[str, str]]]:
    """Return the runs under their devices' roofs (Williams et al. 2009, doi:10.1145/1498765.1498785), and its legend.

    Nothing where FLOPs or peaks are not known.
    """
    drawn = [
        (run, each)
        for run in measured
        if (each := run.throughput) and each.work and each.work.bytes and each.peaks and each.synthetic
    ][:LINES]
    if not drawn:
        return [], []
    points, legend = [], []
    for style, (run, each) in enumerate(drawn):
        assert each.work and each.work.bytes and each.synthetic
        intensity, reached = each.work.flops / each.work.bytes, each.synthetic.mean * each.work.flops / each.nranks
        # What a compiler spares of the bytes nobody counts.
        compiled = each.compile is not None
        points.append(run_line(style, [(intensity, reached / 1e9)], dashes="none", size=8.0, hollow=compiled))
        legend.append(entry(style, run.label, "bytes of a step that is not compiled" * compiled))
    found = roofs(each for _, each in drawn)
    bends = [roof.flops / roof.bytes_per_second for roof in found]
    places = [*bends, *(place for line in points for place, _ in line.points)]
    least, most = min(places) / 4, max(places) * 8
    for number_, (roof, bend) in enumerate(zip(found, bends, strict=True)):
        edge = [(least, roof.bytes_per_second * least), (bend, roof.flops), (most, roof.flops)]
        dashes = curves.DASHES[number_ % len(curves.DASHES)] if len(found) > 1 else ""
        points.append(Line([(x, y / 1e9) for x, y in edge], MUTED, dashes=dashes, width=1.4))
        name = f"{roof.dtype}, {', '.join(_of(roof.device, roof.nranks))}"
        limit = f"{text.number(roof.flops / 1e9)} GFLOP/s, copy: {text.number(roof.bytes_per_second / 1e9)} GB/s"
        legend.append(Entry(f"{name}: {limit}", MUTED, dashes=dashes))
    axes = "FLOPs a byte that the operators read or write", "GFLOP/s of a device"
    drawing = lines(f"{plan.name}-roofline", points, *axes, x="log", y="log", height=3.0)
    words = (
        "Roofline: what a device reaches when it computes alone, under the most that a matrix product and a copy "
        "reached there in any run of the plan. To the left of the bend memory bounds it, to the right arithmetic."
    )
    if any(line.hollow for line in points):
        words += (
            " A hollow point is of a compiled run, but its bytes are those of a step that is not compiled: it lies "
            "further to the right, nobody knows how far."
        )
    return legend, [(drawing, words)]


def _of(device: Any, ranks: int) -> list[str]:
    threads = [text.many(device.threads, "thread")] if device.kind == "cpu" and device.threads else []
    return [device.name or device.kind, *threads, *([text.many(ranks, "rank")] if ranks > 1 else [])]


# ---- tables ------------------------------------------------------------------------------------------

#: Makes a cell from a run and its row of `summary.csv`.
Make = Callable[[RunResult, Row], Cell]


def all_runs(plan: PlanResult, page: Page) -> Section:
    """Return the table of all runs, and its CSV file."""
    csv = base64.b64encode(summary_csv(plan).encode()).decode()
    return Section("All runs", tables=[runs_table(plan)], form="download", own={"plan": plan.name, "csv": csv})


def runs_table(plan: PlanResult) -> Table:
    """Return the table of all runs; columns that no run fills are left out."""
    ladder, order = plan.record.kind == "ladder", {run: index for index, run in enumerate(plan.runs)}
    speeds, before = SpeedUps(plan.runs), dict(zip(plan.runs[1:], plan.runs, strict=False))

    def changed(run: RunResult, row: Row) -> Cell:
        """Name what it changes: in a ladder from the run before, else from the first."""
        other = before.get(run, run) if ladder else plan.runs[0]
        named = [f"{key}: {new}" for key, (_, new) in changes(other.settings, run.settings).items() if new is not None]
        return cell(", ".join(named[:4]) + " …" * (len(named) > 4))

    def column(name: str, shown: Callable[[Any], str] = text.number, note: Callable[..., str] = _spread) -> Make:
        return lambda run, row: cell(row.get(name), shown, note(run, row, name))

    def over(other: Callable[[RunResult], RunResult | None]) -> Make:
        def make(run: RunResult, row: Row) -> Cell:
            found = speeds.over(run, against) if (against := other(run)) else None
            return cell(found and found.ratio, _times, found.around if found and found.error else "")

        return make

    def known(run: RunResult, row: Row, name: str) -> str:
        figure = published.final(plan.record.published, plan.name, run.name, name)
        said = f"published: {published.last(figure)}, {figure.source}" if figure else ""
        return "; ".join(filter(None, [_spread(run, row, name), said]))

    scalars = [metric for metric in plan.metrics.values() if not metric.channel and not metric.derived]
    columns: list[tuple[str, str, Make]] = [
        ("Run", "run", lambda run, row: Cell(run.label, order[run], link=plan.anchor(run))),
        ("Run", "what it changes", changed),
        ("Run", "batch size", lambda run, row: cell(run.settings.get("batch_size"), text.count)),
        ("Throughput (samples/s)", "training", column("train_samples_per_second")),
        *(("Throughput (samples/s)", mode, column(f"{mode.lower()}_samples_per_second")) for mode in MODES),
        ("Verdict", "speed-up", over(lambda run: plan.runs[0])),
        ("Verdict", "over the rung before", over(lambda run: before.get(run) if ladder else None)),
        ("Verdict", "MFU", column("mfu", text.percent)),
        ("Verdict", "MBU", column("mbu", text.percent, _of_bytes)),
        ("Verdict", "published, full size", column("published_samples_per_second", note=_of_published)),
        ("Verdict", "bound by", lambda run, row: cell(each.what if (each := bound(run.throughput)) else None)),
        (
            "Verdict",
            "peak memory",
            lambda run, row: cell(run.throughput and run.throughput.peak_memory_bytes, text.size),
        ),
        ("Training", "parameters", column("parameters", text.count)),
        ("Training", "epochs", column("epochs", text.count)),
        ("Training", "samples", column("samples", text.count)),
        ("Training", "time", lambda run, row: cell(run.last and run.training_seconds, text.duration)),
        ("Training", "training loss", column("train_loss", note=known)),
        ("Training", "validation loss", column("valid_loss", note=known)),
        ("Training", "best validation loss", column("best_valid_loss")),
        ("Training", "best epoch", column("best_epoch", text.count, lambda run, row, name: _of_best(row))),
        *(
            ("Training", each.title + " (higher is better)" * (each.better == "higher"), column(each.name))
            for each in scalars
        ),
        ("Training", "mean skill", lambda run, row: cell(plan.skill(run.last) if run.last else None)),
        ("Target", "epochs to it", _reached),
        ("Target", "samples", column("target_samples", text.count)),
        ("Target", "time", column("target_seconds", text.duration)),
        ("Target", plan.runs[0].hours, column("target_gpu_hours")),
        ("Target", "energy", column("target_energy_joules", joules)),
    ]
    rows: list[tuple[RunResult, Row]] = list(zip(plan.runs, rows_of(plan), strict=True))
    return table(
        [(group, heading, [make(run, row) for run, row in rows]) for group, heading, make in columns],
        "Losses and metrics are those of the last epoch. Times leave validation out, but for that to the target. ± is "
        "one standard deviation over the trials. Click a heading to sort.",
        f"All runs of {plan.title}",
    )


def _spread(run: RunResult, row: Row, name: str) -> str:
    spread = row.get(f"{name}_std")
    return "" if spread is None else f"± {text.number(spread, 2)}"


def _times(ratio: float) -> str:
    return f"{text.number(ratio)}×"


def _of_bytes(run: RunResult, row: Row, name: str) -> str:
    return "bytes of a step that is not compiled" if run.throughput and run.throughput.compile is not None else ""


def _of_published(run: RunResult, row: Row, name: str) -> str:
    faster = row["published_speed_up"]
    words = [str(row[f"published_{key}"]) for key in ("as", "hardware", "source")]
    return ", ".join([*([_times(faster)] if faster not in (None, 1) else []), *words])


def _of_best(row: Row) -> str:
    return f"{row['best_metric']} {text.number(row['best_value'])}"


def _reached(run: RunResult, row: Row) -> Cell:
    if row["target_reached"] == "no":
        return Cell("not reached", note=row["target"])
    return cell(row["target_epoch"], text.count, str(row["target"]))


def channels(plan: PlanResult, page: Page) -> Section | None:
    """Return a table for each kind of metric that is given by channel; naive answers and skills beside the errors."""
    naive = {metric.naive for metric in plan.metrics.values()}
    kinds: dict[str, list[Metric]] = {}
    rivals: dict[str, list[Metric]] = {}
    for metric in plan.metrics.values():
        if metric.channel and metric.rival:
            rivals.setdefault(metric.rival, []).append(metric)
        elif metric.channel and metric.name not in naive and not metric.derived:
            kinds.setdefault(metric.kind, []).append(metric)
    shown = _least_loss(plan, CHANNEL_ROWS)
    tables = [_channel_table(plan, shown, metrics, rivals) for metrics in kinds.values()]
    return Section("Errors by channel", tables=tables) if tables else None


def _channel_table(
    plan: PlanResult, shown: Sequence[RunResult], metrics: Sequence[Metric], rivals: dict[str, list[Metric]]
) -> Table:
    first, last = metrics[0], [run.epochs[-1].metrics for run in shown]
    answers = [_shared(last, [metric.naive for metric in metrics])]
    names = [first.answer if rivals else f"naive answer: {first.answer}"]
    if any(value is not None for value in answers[0]):
        answers += [_shared(last, [metric.name for metric in each]) for each in rivals.values()]
        names += [f"naive answer: {called}" for called in rivals]
    else:
        answers, names = [], []
    labels = [cell(name, note="") for name in names] + [Cell(run.label, n) for n, run in enumerate(shown)]
    columns = [("", "run", labels)]
    for place, metric in enumerate(metrics):
        skills = [metric.skill(values) for values in last]
        notes = ["" if skill is None else f"skill {text.number(skill, 2)}" for skill in skills]
        errors = [cell(values.get(metric.name), note=note) for values, note in zip(last, notes, strict=True)]
        heading = f"{metric.channel} {text.unit(metric.unit)}".strip()
        columns.append(("", heading, [cell(answer[place]) for answer in answers] + errors))
    rest = "the first, and those with the least validation loss. The CSV file has all."
    skill = f" Skill is 1 − error / error of {first.answer}." if first.naive and first.better == "lower" else ""
    return table(
        columns,
        f"{first.title} on the validation data after the last epoch.{skill}",
        f"{first.title} by channel, {plan.title}",
        sortable=False,
        note="".join(some(len(shown), len(plan.trained), "runs", rest)),
        title=first.title,
        meaning=first.meaning,
    )


def _shared(last: Sequence[dict[str, float]], names: Sequence[str | None]) -> list[float | None]:
    """Return the value of each metric that all runs share, as a naive answer's error on the same data is; else None."""
    columns = [[values.get(name or "") for values in last] for name in names]
    return [
        column[0]
        if all(value is not None and math.isclose(value, column[0] or 0.0, rel_tol=1e-4) for value in column)
        else None
        for column in columns
    ]


# ---- predictions, provenance -------------------------------------------------------------------------


def predictions(plan: PlanResult, page: Page) -> Section | None:
    """Return the figures of prediction against truth, that of the best run first."""
    drawn = [(run, run.prediction) for run in plan.trained if run.prediction]
    if not drawn:
        return None
    drawn.sort(key=lambda pair: pair[0] is not plan.best)
    judge = trials.title(plan) if plan.record.sweep else plan.judge and plan.judge.title
    best = f", the run with {f'the best {judge}' if judge else 'the least validation loss'}" * (len(plan.runs) > 1)
    shown = [{"label": run.label, "best": best * (run is plan.best), **picture(p)} for run, p in drawn[: page.pictures]]
    rest = "the others are prediction.png in their runs' folders."
    notes = some(len(shown), len(drawn), "figures", rest)
    return Section("Predictions", form="predictions", own=shown, notes=notes)


def picture(path: Path) -> View:
    """Return a PNG file's `width` and `height` in pixels and its content, `data`, in base 64.

    A `UserError` is raised for a file that is missing, or not a whole PNG file.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; run the stage that writes it first") from None
    if content[:8] != b"\x89PNG\r\n\x1a\n" or content[-8:-4] != b"IEND":
        raise UserError(f"{path}: not a whole PNG file; delete it and run its stage again")
    width, height = struct.unpack(">II", content[16:24])
    return {"width": width, "height": height, "data": base64.b64encode(content).decode()}


def provenance(plan: PlanResult, page: Page) -> Section:
    """Return what each run was made with."""
    return Section("Provenance", form="provenance", own=[_made(plan, run, page) for run in plan.runs])


def _made(plan: PlanResult, run: RunResult, page: Page) -> View:
    record = run.provenance
    facts = record.model_dump(exclude={"command", "loss", "metrics", "links"}, exclude_unset=True) if record else {}
    git, packages = facts.pop("git", None) or {}, facts.pop("packages", None) or {}
    links = next((each.links for each in (run.throughput, record) if each and each.links), None)
    rows = {
        "git commit": git and f"{git.get('commit')}{' with local changes' * bool(git.get('dirty'))}",
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items() if version),
        **{key.replace("_", " "): value for key, value in facts.items()},
        "device": run.device.model_dump(exclude_defaults=True),
        "links": links.line() if links else None,
    }
    logs = {stage: run.folder.parents[2] / f"logs/{stage}/{run.owner}.log" for stage in RUN_STAGES}
    return {
        "id": plan.anchor(run),
        "label": run.label,
        "owner": run.owner if run.owner != f"{plan.name}/{run.name}" else None,
        "owner_id": f"run.{run.owner.replace('/', '.')}" if run.owner.split("/")[0] in page.plans else None,
        "command": record.command if record else None,
        "facts": [(key, _plain(value)) for key, value in rows.items() if value not in (None, "", {}, [])],
        "settings": yaml.safe_dump(run.settings, sort_keys=False, allow_unicode=True),
        "logs": [
            (stage, Path(os.path.relpath(log, page.folder)).as_posix()) for stage, log in logs.items() if log.exists()
        ],
    }


def _plain(value: Any) -> str:
    plain = isinstance(value, dict | list)
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True).rstrip() if plain else str(value)


#: The sections of a plan, in the page's order.
SECTIONS: tuple[Callable[[PlanResult, Page], Section | None], ...] = (
    lambda plan, page: trials.sweep(plan),
    lambda plan, page: scaling.section(plan),
    lambda plan, page: questions.convergence(plan),
    lambda plan, page: questions.parallelism(plan),
    lambda plan, page: curves.training(plan),
    lambda plan, page: curves.beside(plan, page.references),
    throughput,
    lambda plan, page: profiles.section(plan, page.folder),
    lambda plan, page: trials.tunings(plan),
    lambda plan, page: machine.efficiency(plan),
    lambda plan, page: machine.watched(plan),
    all_runs,
    channels,
    predictions,
    provenance,
)
