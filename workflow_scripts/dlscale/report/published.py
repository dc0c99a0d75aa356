"""Select and format the figures that tutorials published, each with its hardware."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dlscale.config.records import PUBLISHED_KINDS, Published
from dlscale.core.text import NONE, count, number, unit
from dlscale.measure.records import MODE_NAMES


def speeds_of(figures: Iterable[Published], plan: str, run: str) -> list[Published]:
    """Return the training rates (FULL) published for a run or its kind of step (`Published.like`)."""
    return [figure for figure in figures if figure.speed_of(f"{plan}.{run}")]


def values(figures: Iterable[Published], plan: str, run: str, metric: str | None) -> list[Published]:
    """Return the figures that were published for `metric` of a run; empty if `metric` is None."""
    return [figure for figure in figures if figure.metric == metric and f"{plan}.{run}" in figure.runs]


def series(figures: Sequence[Published], plan: str, runs: Iterable[str]) -> dict[str, Published]:
    """Return the published training rates (FULL) of a plan's runs: name of a run → figure.

    All figures have the same source and hardware, because ratios between different sources or hardware mean nothing.
    Of all pairs (source, hardware), the pair with figures for the most runs is chosen.
    """
    by_source: dict[tuple[str, str], dict[str, Published]] = {}
    for run in runs:
        for figure in speeds_of(figures, plan, run):
            by_source.setdefault((figure.source, figure.hardware), {})[run] = figure
    return max(by_source.items(), key=lambda item: (len(item[1]), item[0]), default=(None, {}))[1]


def ratio(known: dict[str, Published], run: str) -> float | None:
    """Return a run's published speed-up over the first run with a figure; None without a figure of the run."""
    first = next(iter(known.values()), None)
    return known[run].speed / first.speed if first and run in known else None


def quoted(known: dict[str, Published], run: str) -> str:
    """Return the published figure of a run as one line; empty without a figure."""
    if run not in known:
        return ""
    figure, times = known[run], ratio(known, run)
    compared = f", {number(times)}× {next(iter(known.values())).label}" if times and times != 1 else ""
    return f"{digits(figure.speed)} samples/s on {figure.devices} ({figure.label}{compared}; {figure.source})"


def what(figure: Published) -> str:
    """Return the name of the published quantity."""
    return (
        f"throughput, {MODE_NAMES.get(figure.kind, figure.kind)}"
        if figure.samples_per_second
        else PUBLISHED_KINDS.get(figure.metric, figure.metric)
    )


def shown(figure: Published) -> str:
    """Return a published figure as text, with its unit and all published digits."""
    if figure.samples_per_second:
        spread = "" if figure.std is None else f" (standard deviation {digits(figure.std)})"
        return f"{digits(figure.samples_per_second)}{spread} samples/s"
    if figure.by_epoch:
        epochs = f"after epochs 1 to {len(figure.by_epoch)}" if len(figure.by_epoch) > 1 else "after epoch 1"
        return " ".join(filter(None, [", ".join(map(digits, figure.by_epoch)), unit(figure.unit), epochs]))
    return f"{digits(figure.value)} {unit(figure.unit)}".strip()


def columns(figures: Sequence[Published]) -> dict[str, list[str]]:
    """Return the columns of the table of all figures: heading → cells."""
    return {
        "configuration": [figure.label for figure in figures],
        "measured": [what(figure) for figure in figures],
        "value": [shown(figure) for figure in figures],
        "hardware": [figure.devices for figure in figures],
        "batch size": [count(figure.batch_size) for figure in figures],
        "run": [", ".join([*figure.runs, *(f"like {run}" for run in figure.like)]) or NONE for figure in figures],
        "source": [figure.source for figure in figures],
    }


def digits(value: float | None) -> str:
    """Format a number with all published digits."""
    return number(None) if value is None else f"{value:,.15g}"
