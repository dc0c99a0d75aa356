"""Tables of the report: all runs of a plan, and metrics by channel."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dlscale.core.metrics import Metric
from dlscale.core.settings import flat
from dlscale.core.text import NONE, count, duration, number, percent, size, unit
from dlscale.measure.records import MODES
from dlscale.report import published, target
from dlscale.report.collect import Row, summary
from dlscale.report.diagnosis import bound
from dlscale.report.results import PlanResult, RunResult
from dlscale.report.speedup import SpeedUp, SpeedUps


@dataclass(frozen=True)
class Cell:
    """A table's cell."""

    text: str = NONE
    key: float | str = ""  #: What it sorts by.
    note: str = ""  #: A second line.
    link: str = ""  #: The anchor that it links to.

    @property
    def words(self) -> bool:
        """Whether it holds words, which stand to the left."""
        return isinstance(self.key, str) and self.key != ""


@dataclass(frozen=True)
class RunsTable:
    """Columns in groups, and rows of cells; the first cell of a row is its heading."""

    groups: list[tuple[str, int]]
    columns: list[tuple[str, bool]]
    rows: list[tuple[Cell, ...]]


@dataclass(frozen=True)
class ChannelTable:
    """One kind of metric: runs down, channels across."""

    #: Of the first channel; all of a kind have the same title, meaning, direction and naive answer.
    metric: Metric
    channels: list[tuple[str, str]]  #: Names and units.
    naive: list[Cell] | None  #: The error of the naive answer by channel, where all runs share it.
    rivals: list[tuple[str, list[Cell]]]  #: Those of each of several naive answers, of which it is the least.
    rows: list[tuple[str, list[Cell]]]
    of: int  #: Runs in all; `rows` may hold fewer.


#: Makes a cell from a run and its row of `summary.csv`.
Make = Callable[[RunResult, Row], Cell]


def runs_table(plan: PlanResult) -> RunsTable:
    """Return the table of all runs; columns that no run fills are left out."""
    order = {run: index for index, run in enumerate(plan.runs)}
    changes = _changes(plan)
    speeds, before = SpeedUps(plan.runs), dict(zip(plan.runs[1:], plan.runs, strict=False))

    def over_before(run: RunResult) -> SpeedUp | None:
        return speeds.over(run, before[run]) if run in before else None

    scalars = [metric for metric in plan.metrics.values() if not metric.channel and not metric.derived]
    columns: list[tuple[str, str, Make]] = [
        ("Run", "run", lambda run, row: Cell(run.label, order[run], link=plan.anchor(run))),
        ("Run", "what it changes", lambda run, row: Cell(changes[order[run]] or NONE, changes[order[run]])),
        ("Run", "batch size", lambda run, row: _cell(run.settings.get("batch_size"), count)),
        ("Throughput (samples/s)", "training", _column("train_samples_per_second")),
        *(("Throughput (samples/s)", mode, _column(f"{mode.lower()}_samples_per_second")) for mode in MODES),
        ("Verdict", "speed-up", _speed_up(speeds.over_first)),
        *([("Verdict", "over the rung before", _speed_up(over_before))] if plan.record.kind == "ladder" else []),
        ("Verdict", "MFU", _column("mfu", percent)),
        ("Verdict", "MBU", _mbu),
        ("Verdict", "published, full size", _published),
        ("Verdict", "bound by", _bound),
        ("Verdict", "peak memory", lambda run, row: _cell(run.throughput and run.throughput.peak_memory_bytes, size)),
        ("Training", "parameters", _column("parameters", count)),
        ("Training", "epochs", _column("epochs", count)),
        ("Training", "samples", _column("samples", count)),
        ("Training", "time", lambda run, row: _cell(run.last and run.training_seconds, duration)),
        ("Training", "training loss", _loss(plan, "train_loss")),
        ("Training", "validation loss", _loss(plan, "valid_loss")),
        ("Training", "best validation loss", _column("best_valid_loss")),
        ("Training", "best epoch", _best),
        *(("Training", _heading(metric), _column(metric.name)) for metric in scalars),
        ("Training", "mean skill", lambda run, row: _cell(plan.skill(run.last) if run.last else None)),
        ("Target", "epochs to it", _target),
        ("Target", "samples", _column("target_samples", count)),
        ("Target", "time", _column("target_seconds", duration)),
        ("Target", next(iter(dict.fromkeys(map(target.hours_of, plan.runs)))), _column("target_gpu_hours")),
        ("Target", "energy", _column("target_energy_joules", target.joules)),
    ]
    rows = list(zip(plan.runs, summary(plan), strict=True))
    return table([(group, heading, [make(run, row) for run, row in rows]) for group, heading, make in columns])


def table(columns: Sequence[tuple[str, str, Sequence[Cell]]]) -> RunsTable:
    """Return a table of columns, each with its group, heading and cells; those that no row fills are left out."""
    filled = [column for column in columns if any(cell.text != NONE for cell in column[2])]
    return RunsTable(
        list(Counter(group for group, _, _ in filled).items()),
        [(heading, any(cell.words for cell in cells)) for _, heading, cells in filled],
        list(zip(*(cells for _, _, cells in filled), strict=True)),
    )


def channel_tables(plan: PlanResult, shown: Sequence[RunResult]) -> list[ChannelTable]:
    """Return a table, of the runs `shown`, for each kind of metric that is given by channel.

    A naive answer's error, and a skill, stand beside the error of the run.
    """
    naive = {metric.naive for metric in plan.metrics.values()}
    kinds: dict[str, list[Metric]] = {}
    rivals: dict[str, list[Metric]] = {}
    for metric in plan.metrics.values():
        if metric.channel and metric.rival:
            rivals.setdefault(metric.rival, []).append(metric)
        elif metric.channel and metric.name not in naive and not metric.derived:
            kinds.setdefault(metric.kind, []).append(metric)
    last = [(run.label, run.epochs[-1].metrics) for run in shown]
    tables = []
    for metrics in kinds.values():
        channels = [(metric.channel, unit(metric.unit)) for metric in metrics]
        answers = _shared(last, [metric.naive for metric in metrics])
        shared = answers if any(cell.text != NONE for cell in answers) else None
        each = [(called, _shared(last, [metric.name for metric in of])) for called, of in rivals.items() if shared]
        rows = [(label, [_error(metric, values) for metric in metrics]) for label, values in last]
        tables.append(ChannelTable(metrics[0], channels, shared, each, rows, len(plan.trained)))
    return tables


def _cell(value: Any, text: Callable[[Any], str] = number, note: str = "") -> Cell:
    if value is None:
        return Cell()
    return Cell(text(value), value, note) if math.isfinite(value) else Cell(number(value))


def _column(name: str, text: Callable[[Any], str] = number) -> Make:
    """Return what makes the cells of a column of `summary.csv`."""

    def make(run: RunResult, row: Row) -> Cell:
        spread: Any = row.get(f"{name}_std")
        return _cell(row.get(name), text, "" if spread is None else f"± {number(spread, 2)}")

    return make


def _loss(plan: PlanResult, name: str) -> Make:
    """Return what makes the cells of a loss, with the last one that was published for the run below it."""

    def make(run: RunResult, row: Row) -> Cell:
        cell, figure = _column(name)(run, row), published.final(plan.record.published, plan.name, run.name, name)
        if cell.text == NONE or figure is None:
            return cell
        said = f"published: {published.last(figure)}, {figure.source}"
        return replace(cell, note=f"{cell.note}; {said}" if cell.note else said)

    return make


def _heading(metric: Metric) -> str:
    return metric.title + " (higher is better)" * (metric.better == "higher")


def _speed_up(over: Callable[[RunResult], SpeedUp | None]) -> Make:
    def make(run: RunResult, row: Row) -> Cell:
        found = over(run)
        return _cell(found and found.ratio, _times, found.around if found and found.error else "")

    return make


def _times(ratio: float) -> str:
    return f"{number(ratio)}×"


def _published(run: RunResult, row: Row) -> Cell:
    """Samples/s that were published, at full size, for what a run does; below, what that was."""
    times = row["published_speed_up"]
    faster = [_times(times)] if isinstance(times, float) and times != 1 else []
    words = [str(row[f"published_{key}"]) for key in ("as", "hardware", "source")]
    return _cell(row["published_samples_per_second"], note=", ".join([*faster, *words]))


def _best(run: RunResult, row: Row) -> Cell:
    return _cell(row["best_epoch"], count, f"{row['best_metric']} {number(row['best_value'])}")  # type: ignore[arg-type]


def _target(run: RunResult, row: Row) -> Cell:
    if row["target_reached"] == "no":
        return Cell("not reached", note=str(row["target"]))
    return _cell(row["target_epoch"], count, str(row["target"]))


def _mbu(run: RunResult, row: Row) -> Cell:
    compiled = run.throughput and run.throughput.compile is not None
    value: Any = row["mbu"]
    return _cell(value, percent, "bytes of a step that is not compiled" if compiled and value is not None else "")


def _bound(run: RunResult, row: Row) -> Cell:
    verdict = bound(run.throughput)
    return Cell(verdict.what, verdict.what) if verdict else Cell()


def _error(metric: Metric, values: dict[str, float]) -> Cell:
    skill = metric.skill(values)
    return _cell(values.get(metric.name), note="" if skill is None else f"skill {number(skill, 2)}")


def _shared(last: Sequence[tuple[str, dict[str, float]]], names: Sequence[str | None]) -> list[Cell]:
    """Return the value of each metric that all runs share."""
    return [_cell(_same([values.get(name or "") for _, values in last])) for name in names]


def _same(values: Sequence[float | None]) -> float | None:
    """Return the value that all share, as a naive answer's error on the same data is; None if they differ."""
    known = [value for value in values if value is not None]
    same = len(known) == len(values) and all(math.isclose(value, known[0], rel_tol=1e-4) for value in known)
    return known[0] if same else None


def _changes(plan: PlanResult) -> list[str]:
    """Return what each run changes, the label apart: in a ladder from the run before, else from the first."""
    settings = [flat({**run.settings, "label": None}) for run in plan.runs]
    texts = [""]
    for index in range(1, len(settings)):
        reference = settings[index - 1 if plan.record.kind == "ladder" else 0]
        changed = [f"{key}: {value}" for key, value in settings[index].items() if reference.get(key) != value]
        texts.append(", ".join(changed[:4]) + (" …" if len(changed) > 4 else ""))
    return texts
