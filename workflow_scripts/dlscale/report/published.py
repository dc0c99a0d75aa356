"""Published figures of a study, each with the hardware that it was measured on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dlscale.core.records import Published
from dlscale.core.text import number, unit


def speeds_of(figures: Iterable[Published], plan: str, run: str) -> list[Published]:
    """Return the FULL throughputs that were published for what a run does at full size."""
    return [figure for figure in figures if figure.speed and f"{plan}.{run}" in figure.runs]


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
    return f"{_digits(figure.speed)} samples/s on {figure.hardware} ({figure.label}{compared}; {figure.source})"


def summary(figures: Sequence[Published]) -> list[str]:
    """Return the published figures of a study in short: the range of throughputs on each hardware, and the others."""
    by_hardware: dict[str, list[float]] = {}
    for figure in figures:
        if figure.speed:
            by_hardware.setdefault(figure.hardware, []).append(figure.speed)
    ranges = {hardware: dict.fromkeys(map(_digits, (min(all_), max(all_)))) for hardware, all_ in by_hardware.items()}
    return [
        *(f"{' to '.join(range_)} samples/s on {hardware}" for hardware, range_ in ranges.items()),
        *(f"{figure.label} {shown(figure)} ({figure.source})" for figure in figures if not figure.samples_per_second),
    ]


def what(figure: Published) -> str:
    """Return what was measured."""
    return f"throughput, {figure.kind}" if figure.samples_per_second else figure.metric


def shown(figure: Published) -> str:
    """Return a figure with its unit, and with as many digits as were published."""
    if figure.samples_per_second:
        return f"{_digits(figure.samples_per_second)} samples/s"
    return f"{_digits(figure.value)} {unit(figure.unit)}".strip()


def _digits(value: float | None) -> str:
    return number(None) if value is None else f"{value:,.15g}"
