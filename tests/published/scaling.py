"""The published plotting script of the weak scaling, written down operation by operation in our own words.

`plot_weak_scale.py` of the SC22 tutorial reads one file of benchy's for each number of nodes, `weak_scale_N.json`, and
draws what was measured beside what one node's figure would be as many times.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: What it reads, in its order.
LABELS = ("IO", "SYNTHETIC", "FULL")

Rates = tuple[float, float, float]


def read_rates(path: Path) -> Rates:
    """Return samples/s of loading, computing and both: of each the first trial.

    A line is a JSON document; reading ends with the first line that is empty but for blanks, and of several lines the
    last one counts.
    """
    rates: list[float] | None = None
    with path.open() as file:
        while line := file.readline().strip():
            document = json.loads(line)
            rates = [document[label]["trial_throughput"][0] for label in LABELS]
    assert rates is not None, "the script would end here: it has nothing to return"
    io, synthetic, full = rates
    return io, synthetic, full


def lines(measured: Mapping[int, Rates]) -> dict[str, list[float]]:
    """Return what it draws over the numbers of nodes: what was measured, and the ideal, multiples of the first."""
    (base, first), *_ = measured.items()
    assert base == 1, "the script takes one node for its unit"
    drawn = {label: [rates[column] for rates in measured.values()] for column, label in enumerate(LABELS)}
    ideal = {f"{label} ideal": [first[column] * count for count in measured] for column, label in enumerate(LABELS)}
    return drawn | ideal


def plot(measured: Mapping[int, Rates], axes: Any) -> None:
    """Draw them: FULL green, SYNTHETIC orange, IO blue; solid what was measured, dashed what is ideal."""
    colours = {"FULL": "g", "SYNTHETIC": "darkorange", "IO": "darkblue"}
    names = {"FULL": "real data", "SYNTHETIC": "synthetic data", "IO": "data only"}
    drawn = lines(measured)
    for suffix, style in (("", "-o"), (" ideal", "--o")):
        for label in ("FULL", "SYNTHETIC", "IO"):
            values = drawn[f"{label}{suffix}"]
            axes.plot(list(measured), values, style, color=colours[label], label=f"{names[label]}{suffix}")
    axes.set_ylabel("Avg. Throughput (img/sec)")
    axes.set_xlabel("Nodes")
    axes.legend()
    axes.grid()
