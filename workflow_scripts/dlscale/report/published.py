"""Published figures of a study, each with the hardware that it was measured on."""

from __future__ import annotations

from collections.abc import Iterable

from dlscale.report.text import NONE, unit
from dlscale.runtime import config
from dlscale.runtime.settings import Raw


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
        if "samples_per_second" in raw and raw.get("kind", "FULL") == "FULL" and run in (None, raw.get("run")):
            by_hardware.setdefault(raw.get("hardware", NONE), []).append(raw["samples_per_second"])
    ranges = {hardware: dict.fromkeys(map(_digits, (min(all_), max(all_)))) for hardware, all_ in by_hardware.items()}
    return [f"{' to '.join(range_)} samples/s on {hardware}" for hardware, range_ in ranges.items()]


def summary(study: str) -> list[str]:
    """Return the published figures of a study in short: throughput by hardware, and accuracies."""
    accuracies = [_entry(raw) for raw in _raw(study) if "samples_per_second" not in raw]
    return speeds(study) + [f"{entry['label']} {entry['value']} ({entry['source']})" for entry in accuracies]


def _raw(study: str) -> Iterable[Raw]:
    return shipped(study).get("published") or []


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
