"""The SC22 tutorial's plotting script of weak scaling, restated operation by operation.

`plot_weak_scale.py` reads one file of the tool benchy per number of nodes, `weak_scale_N.json`. The script draws the
measured rates, and multiples of the rate on one node.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Keys in the order in which the script reads the rates.
LABELS = ("IO", "SYNTHETIC", "FULL")

Rates = tuple[float, float, float]


def read_rates(path: Path) -> Rates:
    """Return samples/s of loading, computing and both, from the first trial of each.

    Each line is a JSON document. Reading ends at the first blank line, and the last document counts.
    """
    rates: list[float] | None = None
    with path.open() as file:
        while line := file.readline().strip():
            document = json.loads(line)
            rates = [document[label]["trial_throughput"][0] for label in LABELS]
    assert rates is not None, "the script fails here: the file has no document"
    io, synthetic, full = rates
    return io, synthetic, full


def lines(measured: Mapping[int, Rates]) -> dict[str, list[float]]:
    """Return the lines of the figure by label: measured rates, and (`ideal`) multiples of the rate on one node."""
    (base, first), *_ = measured.items()
    assert base == 1, "the script needs the rate on one node as its unit"
    drawn = {label: [rates[column] for rates in measured.values()] for column, label in enumerate(LABELS)}
    ideal = {f"{label} ideal": [first[column] * count for count in measured] for column, label in enumerate(LABELS)}
    return drawn | ideal


def plot(measured: Mapping[int, Rates], axes: Any) -> None:
    """Draw the lines: FULL green, SYNTHETIC orange, IO blue; measured solid, ideal dashed."""
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
