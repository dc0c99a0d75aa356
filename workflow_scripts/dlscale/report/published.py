"""Published figures of a study, each with the hardware that it was measured on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dlscale.config import resolve as config
from dlscale.core.settings import Raw
from dlscale.report.text import NONE, number, unit


@dataclass(frozen=True)
class Speed:
    """A published FULL throughput: samples/s, what of, on which hardware, and where it stands."""

    samples_per_second: float
    label: str
    hardware: str
    source: str


def shipped(study: str) -> Raw:
    """Return what a study ships; nothing for one that is not there."""
    return config.shipped_studies().get(study, {})


def entries(study: str) -> list[dict[str, str]]:
    """Return all published figures of a study as text: `label`, `what`, `value`, `hardware`, `source`."""
    return [_entry(raw) for raw in _raw(study)]


def speeds(study: str) -> list[str]:
    """Return the range of published FULL throughputs on each piece of hardware."""
    by_hardware: dict[str, list[float]] = {}
    for raw in _raw(study):
        if _is_speed(raw):
            by_hardware.setdefault(raw.get("hardware", NONE), []).append(raw["samples_per_second"])
    ranges = {hardware: dict.fromkeys(map(_digits, (min(all_), max(all_)))) for hardware, all_ in by_hardware.items()}
    return [f"{' to '.join(range_)} samples/s on {hardware}" for hardware, range_ in ranges.items()]


def series(study: str, plan: str, runs: Iterable[str]) -> dict[str, Speed]:
    """Return the published FULL throughputs of a plan's runs by name, all of one source and hardware.

    Ratios of figures from different sources mean nothing; so of all sources the one that knows most of the runs is
    taken, the latest of several.
    """
    by_source: dict[tuple[str, str], dict[str, Speed]] = {}
    names = {f"{plan}.{run}": run for run in runs}
    for raw in filter(_is_speed, _raw(study)):
        source, hardware = raw.get("source", NONE), raw.get("hardware", NONE)
        for run in (names[name] for name in raw.get("runs") or [] if name in names):
            by_source.setdefault((source, hardware), {})[run] = Speed(
                raw["samples_per_second"], raw.get("label", NONE), hardware, source
            )
    known = max(by_source.items(), key=lambda item: (len(item[1]), item[0]), default=(None, {}))[1]
    return {run: known[run] for run in names.values() if run in known}


def ratio(known: dict[str, Speed], run: str) -> float | None:
    """Return how much faster than the first run with a figure this one was, as published."""
    first = next(iter(known.values()), None)
    return known[run].samples_per_second / first.samples_per_second if first and run in known else None


def beside(known: dict[str, Speed], run: str) -> str:
    """Return the published figure of a run in a line; nothing if there is none."""
    if run not in known:
        return ""
    figure, times = known[run], ratio(known, run)
    compared = f", {number(times)}× {next(iter(known.values())).label}" if times and times != 1 else ""
    rate = f"{_digits(figure.samples_per_second)} samples/s on {figure.hardware}"
    return f"{rate} ({figure.label}{compared}; {figure.source})"


def summary(study: str) -> list[str]:
    """Return the published figures of a study in short: throughput by hardware, and accuracies."""
    accuracies = [_entry(raw) for raw in _raw(study) if "samples_per_second" not in raw]
    return speeds(study) + [f"{entry['label']} {entry['value']} ({entry['source']})" for entry in accuracies]


def _raw(study: str) -> Iterable[Raw]:
    return shipped(study).get("published") or []


def _is_speed(raw: Raw) -> bool:
    return "samples_per_second" in raw and raw.get("kind", "FULL") == "FULL"


def _entry(raw: Raw) -> dict[str, str]:
    if "samples_per_second" in raw:
        what, value = f"throughput, {raw.get('kind', 'FULL')}", f"{_digits(raw['samples_per_second'])} samples/s"
    else:
        what, value = raw.get("metric", ""), f"{_digits(raw.get('value'))} {unit(raw.get('unit'))}".strip()
    rest = {key: raw.get(key, NONE) for key in ("label", "hardware", "source")}
    return {"what": what, "value": value, **rest}


def _digits(value: float | None) -> str:
    """Return a number with as many digits as were published."""
    return NONE if value is None else f"{value:,.15g}"
