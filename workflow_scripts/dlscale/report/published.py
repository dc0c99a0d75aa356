"""Published figures of a study, each with the hardware that it was measured on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dlscale.report.text import NONE, unit
from dlscale.runtime import config
from dlscale.runtime.settings import Raw


@dataclass(frozen=True)
class Speed:
    """A published FULL throughput: samples/s, the hardware, and where it stands."""

    samples_per_second: float
    hardware: str
    source: str


def shipped(study: str) -> Raw:
    """Return what a study ships; nothing for one that is not there."""
    return config.shipped_studies().get(study, {})


def entries(study: str) -> list[dict[str, str]]:
    """Return all published figures of a study as text: `label`, `what`, `value`, `hardware`, `source`."""
    return [_entry(raw) for raw in _raw(study)]


def speeds(study: str, run: str | None = None) -> list[str]:
    """Return the range of published FULL throughputs on each piece of hardware, of one run or of all."""
    by_hardware: dict[str, list[float]] = {}
    for raw in _raw(study):
        if _is_speed(raw) and (run is None or run in _runs(raw)):
            by_hardware.setdefault(raw.get("hardware", NONE), []).append(raw["samples_per_second"])
    ranges = {hardware: dict.fromkeys(map(_digits, (min(all_), max(all_)))) for hardware, all_ in by_hardware.items()}
    return [f"{' to '.join(range_)} samples/s on {hardware}" for hardware, range_ in ranges.items()]


def speed(study: str, run: str) -> Speed | None:
    """Return the published FULL throughput of the run of this name, the latest if there are several."""
    found = [raw for raw in _raw(study) if _is_speed(raw) and run in _runs(raw)]
    if not found:
        return None
    latest = max(found, key=lambda raw: str(raw.get("source", "")))
    return Speed(latest["samples_per_second"], latest.get("hardware", NONE), latest.get("source", NONE))


def speed_up(of_run: Speed | None, first: Speed | None) -> float | None:
    """Return the ratio of two published throughputs, if both were measured on the same hardware."""
    if of_run is None or first is None or of_run.hardware != first.hardware:
        return None
    return of_run.samples_per_second / first.samples_per_second


def summary(study: str) -> list[str]:
    """Return the published figures of a study in short: throughput by hardware, and accuracies."""
    accuracies = [_entry(raw) for raw in _raw(study) if "samples_per_second" not in raw]
    return speeds(study) + [f"{entry['label']} {entry['value']} ({entry['source']})" for entry in accuracies]


def _raw(study: str) -> Iterable[Raw]:
    return shipped(study).get("published") or []


def _is_speed(raw: Raw) -> bool:
    return "samples_per_second" in raw and raw.get("kind", "FULL") == "FULL"


def _runs(raw: Raw) -> list[str]:
    """Names of the runs that the figure is of, in whatever plan."""
    return list(raw.get("runs") or [])


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
