"""Tables of the report: all runs of a plan, and errors by channel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dlscale.core.settings import Raw
from dlscale.report import published
from dlscale.report.diagnosis import bound
from dlscale.report.results import MODES, Epoch, PlanResult, RunResult
from dlscale.report.text import NONE, count, duration, number, size, unit

#: Metrics that measure an error, with the same error of a naive answer, and what that answer is.
NAIVE = {
    "rmse": ("persistence_rmse", "persistence"),
    "l1": ("l1_of_mean", "the training mean"),
    "mae": ("mae_of_mean", "the training mean"),
}
#: What a metric is called, and what it means.
METRICS = {
    "rmse": ("RMSE", "root-mean-square error over all validation samples and points, in physical units"),
    "rmse_normalised": ("RMSE, normalised", "of standardised fields, averaged over samples: the published form"),
    "acc": ("ACC", "anomaly correlation coefficient against the training climatology; 1 is perfect"),
    "mae": ("MAE", "mean absolute error over all validation samples and points, in physical units"),
    "mae_of_mean": ("MAE of the mean", "of always answering the mean of the training data"),
    "l1": ("L1", "mean absolute error in model units"),
    "l1_of_mean": ("L1 of the mean", "of always answering the mean of the training data"),
}


@dataclass(frozen=True)
class Cell:
    """A table's cell: its text, what it sorts by, a second line, the anchor that it links to."""

    text: str
    key: float | str = ""
    note: str = ""
    link: str = ""

    @property
    def words(self) -> bool:
        """Whether it holds words, which stand to the left."""
        return isinstance(self.key, str) and self.key != ""


@dataclass(frozen=True)
class Table:
    """Columns in groups, and rows of cells; the first cell of a row is its heading."""

    groups: list[tuple[str, int]]
    columns: list[tuple[str, bool]]
    rows: list[tuple[Cell, ...]]


@dataclass(frozen=True)
class ChannelTable:
    """One kind of metric: runs down, channels across.

    Attributes
    ----------
    channels
        Names and units.
    naive
        The error of the naive answer by channel, where all runs share it; `answer` says what it is.
    of
        Runs in all; `rows` may hold fewer.
    """

    title: str
    meaning: str
    channels: list[tuple[str, str]]
    answer: str
    naive: list[Cell] | None
    rows: list[tuple[str, list[Cell]]]
    of: int


def anchor(plan: PlanResult, run: RunResult) -> str:
    """Return the identifier of a run in the page; names have no dots, so it is unique."""
    return f"run.{plan.name}.{run.name}"


def runs_table(plan: PlanResult) -> Table:
    """Return the table of all runs; columns that no run fills are left out."""
    order = {run: index for index, run in enumerate(plan.runs)}
    changes = _changes(plan)
    scalars = dict.fromkeys(name for run in plan.runs if run.last for name in run.last.metrics if "/" not in name)
    columns: list[tuple[str, str, Callable[[RunResult], Cell]]] = [
        ("Run", "run", lambda run: Cell(run.label, order[run], link=anchor(plan, run))),
        ("Run", "what it changes", lambda run: Cell(changes[order[run]] or NONE, changes[order[run]])),
        ("Run", "batch size", lambda run: _cell(run.settings.get("batch_size"), count)),
        ("Throughput (samples/s)", "training", lambda run: _cell(run.training_speed)),
        *(("Throughput (samples/s)", mode, _trials(mode)) for mode in MODES),
        ("Verdict", "speed-up", lambda run: _cell(plan.speed_up(run), lambda ratio: f"{number(ratio)}×")),
        ("Verdict", "published, full size", _published(plan)),
        ("Verdict", "bound by", _bound),
        (
            "Verdict",
            "peak memory",
            lambda run: _cell(run.throughput.peak_memory_bytes if run.throughput else None, size),
        ),
        ("Training", "parameters", lambda run: _cell(run.provenance.get("parameters"), count)),
        ("Training", "epochs", _last(lambda epoch: epoch.epoch, count)),
        ("Training", "samples", _last(lambda epoch: epoch.samples, count)),
        ("Training", "time", lambda run: _cell(run.training_seconds if run.last else None, duration)),
        ("Training", "training loss", _last(lambda epoch: epoch.train_loss)),
        ("Training", "validation loss", _last(lambda epoch: epoch.valid_loss)),
        ("Training", "best validation loss", lambda run: _cell(run.best_valid_loss)),
        *(("Training", METRICS.get(name, (name,))[0], _metric(name)) for name in scalars if name != "skill"),
        ("Training", "mean skill", _last(lambda epoch: epoch.skill)),
    ]
    found = [(group, name, [make(run) for run in plan.runs]) for group, name, make in columns]
    found = [(group, name, cells) for group, name, cells in found if any(cell.text != NONE for cell in cells)]
    widths: dict[str, int] = {}
    for group, _, _ in found:
        widths[group] = widths.get(group, 0) + 1
    return Table(
        list(widths.items()),
        [(name, any(cell.words for cell in cells)) for _, name, cells in found],
        list(zip(*(cells for _, _, cells in found), strict=True)),
    )


def channel_tables(trained: Sequence[RunResult], shown: Sequence[RunResult]) -> list[ChannelTable]:
    """Return a table for each kind of metric that is given by channel.

    Parameters
    ----------
    trained
        All runs with epochs.
    shown
        Those of them that get a row.
    """
    names = dict.fromkeys(name for run in trained if run.last for name in run.last.metrics if "/" in name)
    kinds = dict.fromkeys(name.split("/")[0] for name in names)
    units = {name: of for run in trained for name, of in (run.provenance.get("metric_units") or {}).items()}
    last = [(run.label, run.last.metrics) for run in shown if run.last]
    tables = []
    for kind in kinds:
        if kind == "skill" or kind in (baseline for baseline, _ in NAIVE.values()):
            continue  # they stand beside their error
        channels = [name.split("/", 1)[1] for name in names if name.split("/")[0] == kind]
        title, meaning = METRICS.get(kind, (kind, ""))
        baseline, answer = NAIVE.get(kind, ("", ""))
        naive = [_cell(_same([metrics.get(f"{baseline}/{channel}") for _, metrics in last])) for channel in channels]
        tables.append(
            ChannelTable(
                title,
                meaning,
                [(channel, unit(units.get(f"{kind}/{channel}"))) for channel in channels],
                answer,
                naive if any(cell.text != NONE for cell in naive) else None,
                [
                    (label, [_error(metrics, kind, channel, baseline) for channel in channels])
                    for label, metrics in last
                ],
                len(trained),
            )
        )
    return tables


def _cell(value: float | None, text: Callable[[Any], str] = number, note: str = "") -> Cell:
    if value is None:
        return Cell(NONE)
    return Cell(text(value), value, note) if math.isfinite(value) else Cell(number(value))


def _last(get: Callable[[Epoch], float | None], text: Callable[[Any], str] = number) -> Callable[[RunResult], Cell]:
    return lambda run: _cell(get(run.last), text) if run.last else Cell(NONE)


def _metric(name: str) -> Callable[[RunResult], Cell]:
    return _last(lambda epoch: epoch.metrics.get(name))


def _trials(mode: str) -> Callable[[RunResult], Cell]:
    def make(run: RunResult) -> Cell:
        trials = run.throughput.mode(mode) if run.throughput else None
        return _cell(trials.mean, note=f"± {number(trials.std, 2)}") if trials else Cell(NONE)

    return make


def _published(plan: PlanResult) -> Callable[[RunResult], Cell]:
    """Samples/s that were published, at full size, for what a run does; below, what that was."""
    known = published.series(plan.study, plan.name, [run.name for run in plan.runs])

    def make(run: RunResult) -> Cell:
        if run.name not in known:
            return Cell(NONE)
        figure, times = known[run.name], published.ratio(known, run.name)
        faster = f"{number(times)}×, " if times and times != 1 else ""
        return _cell(figure.samples_per_second, note=f"{faster}{figure.label}, {figure.hardware}, {figure.source}")

    return make


def _bound(run: RunResult) -> Cell:
    found = bound(run.throughput)
    return Cell(found.what, found.what) if found else Cell(NONE)


def _error(metrics: dict[str, float], kind: str, channel: str, naive: str) -> Cell:
    value, baseline = metrics.get(f"{kind}/{channel}"), metrics.get(f"{naive}/{channel}")
    return _cell(value, note=f"skill {number(1 - value / baseline, 2)}" if baseline and value is not None else "")


def _same(values: Sequence[float | None]) -> float | None:
    """Return the value that all share, as a naive answer's error on the same data is; None if they differ."""
    first = values[0]
    return (
        first
        if all(v is not None and first is not None and math.isclose(v, first, rel_tol=1e-4) for v in values)
        else None
    )


def _changes(plan: PlanResult) -> list[str]:
    """Return in what settings each run differs: in a ladder from the run before, else from the first."""
    flat = [_flat(run.settings) for run in plan.runs]
    texts = [""]
    for index in range(1, len(flat)):
        reference = flat[index - 1 if plan.kind == "ladder" else 0]
        changed = [f"{key}: {value}" for key, value in flat[index].items() if reference.get(key) != value]
        texts.append(", ".join(changed[:4]) + (" …" if len(changed) > 4 else ""))
    return texts


def _flat(settings: Raw, prefix: str = "") -> Raw:
    """Return nested settings as one mapping with dotted keys, the label left out."""
    found: Raw = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        elif prefix or key != "label":
            found[f"{prefix}{key}"] = value
    return found
