"""Published figures of a study, each with the hardware that it was measured on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dlscale.config.records import PUBLISHED_KINDS, Published
from dlscale.core.metrics import Metric
from dlscale.core.text import NONE, count, number, unit


def speeds_of(figures: Iterable[Published], plan: str, run: str) -> list[Published]:
    """Return the FULL throughputs that were published for what a run does, or for the step that it takes."""
    return [figure for figure in figures if figure.speed_of(f"{plan}.{run}")]


def memories(figures: Iterable[Published], plan: str, run: str) -> list[Published]:
    """Return the memory that was published for what a run does."""
    return [figure for figure in figures if figure.metric == "memory" and f"{plan}.{run}" in figure.runs]


def series(figures: Sequence[Published], plan: str, runs: Iterable[str]) -> dict[str, Published]:
    """Return the published FULL throughputs of a plan's runs by name, all of one source and hardware.

    Ratios of figures from different sources mean nothing; so of all sources the one that knows most of the runs is
    taken, the latest of several.
    """
    by_source: dict[tuple[str, str], dict[str, Published]] = {}
    for run in runs:
        for figure in speeds_of(figures, plan, run):
            by_source.setdefault((figure.source, figure.hardware), {})[run] = figure
    return max(by_source.items(), key=lambda item: (len(item[1]), item[0]), default=(None, {}))[1]


def ratio(known: dict[str, Published], run: str) -> float | None:
    """Return how much faster than the first run with a figure this one was, as published."""
    first = next(iter(known.values()), None)
    return known[run].speed / first.speed if first and run in known else None


def beside(known: dict[str, Published], run: str) -> str:
    """Return the published figure of a run in a line; nothing if there is none."""
    if run not in known:
        return ""
    figure, times = known[run], ratio(known, run)
    compared = f", {number(times)}× {next(iter(known.values())).label}" if times and times != 1 else ""
    return f"{_digits(figure.speed)} samples/s on {figure.devices} ({figure.label}{compared}; {figure.source})"


#: How many figures beside throughputs a summary tells.
QUALITIES = 2


def summary(figures: Sequence[Published], metrics: Mapping[str, Metric]) -> list[str]:
    """Return the published figures of a study in short: the range of throughputs on each hardware, some qualities.

    Of throughputs those on the fewest devices; of qualities, which are figures of `metrics`, the first.
    """
    fewest = min((figure.gpus for figure in figures if figure.speed), default=1)
    by_hardware: dict[str, list[float]] = {}
    for figure in figures:
        if figure.speed and figure.gpus == fewest:
            by_hardware.setdefault(figure.devices, []).append(figure.speed)
    ranges = {hardware: dict.fromkeys(map(_digits, (min(all_), max(all_)))) for hardware, all_ in by_hardware.items()}
    return [
        *(f"{' to '.join(range_)} samples/s on {hardware}" for hardware, range_ in ranges.items()),
        *[
            f"{metrics[each.metric].full_title} {shown(each)} ({each.label}; {each.source})"
            for each in figures
            if each.metric in metrics
        ][:QUALITIES],
    ]


def final(figures: Iterable[Published], plan: str, run: str, metric: str) -> Published | None:
    """Return the figure of a run that tells the value which `metric` had at its end; the last of several."""
    known = [figure for figure in figures if figure.metric == metric and f"{plan}.{run}" in figure.runs]
    return known[-1] if known else None


def last(figure: Published) -> str:
    """Return the value of a figure, of several epochs the last, with as many digits as were published."""
    return _digits(figure.by_epoch[-1] if figure.by_epoch else figure.value)


def what(figure: Published) -> str:
    """Return what was measured."""
    if figure.samples_per_second:
        return f"throughput, {figure.kind}"
    return PUBLISHED_KINDS.get(figure.metric, figure.metric)


def shown(figure: Published) -> str:
    """Return a figure with its unit, and with as many digits as were published."""
    if figure.samples_per_second:
        spread = "" if figure.std is None else f" ± {_digits(figure.std)}"
        return f"{_digits(figure.samples_per_second)}{spread} samples/s"
    if figure.by_epoch:
        epochs = f"after epochs 1 to {len(figure.by_epoch)}" if len(figure.by_epoch) > 1 else "after epoch 1"
        return f"{', '.join(map(_digits, figure.by_epoch))} {epochs}"
    return f"{_digits(figure.value)} {unit(figure.unit)}".strip()


#: Headings of the table of all figures.
COLUMNS = ("configuration", "measured", "value", "hardware", "batch size", "run", "source")


def row(figure: Published) -> tuple[str, ...]:
    """Return the cells of a figure in the table of all, by `COLUMNS`."""
    batch = NONE if figure.batch_size is None else count(figure.batch_size)
    runs = ", ".join([*figure.runs, *(f"like {run}" for run in figure.like)]) or NONE
    return figure.label, what(figure), shown(figure), figure.devices, batch, runs, figure.source


def _digits(value: float | None) -> str:
    return number(None) if value is None else f"{value:,.15g}"
