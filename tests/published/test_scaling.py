"""SC22's plotting script of weak scaling, as restated in `tests/published/scaling.py`, reads dlscale's records."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from dlscale.measure.records import Throughput, Trials
from tests.published.scaling import lines, plot, read_rates


def document(*rates: float) -> str:
    labelled = zip(("IO", "SYNTHETIC", "FULL"), rates, strict=True)
    return json.dumps({label: {"trial_throughput": [rate, 0.0]} for label, rate in labelled})


def test_the_published_script_reads_our_record(tmp_path: Path) -> None:
    def trials(rate: float) -> Trials:
        return Trials(trial_throughput=[rate, 2 * rate], trial_time=[1.0, 0.5], mean=1.5 * rate)

    path = tmp_path / "throughput.json"
    path.write_text(Throughput(io=trials(30.0), synthetic=trials(20.0), full=trials(10.0)).text() + "\n")
    assert read_rates(path) == (30.0, 20.0, 10.0)
    axes = Figure().subplots()
    plot({1: read_rates(path)}, axes)
    assert [list(np.asarray(line.get_ydata())) for line in axes.lines] == 2 * [[10.0], [20.0], [30.0]]


def test_the_ideal_speed_is_a_multiple_of_the_first() -> None:
    drawn = lines({1: (3.0, 2.0, 1.0), 2: (5.0, 4.0, 1.5), 32: (9.0, 60.0, 25.0)})
    assert drawn["FULL"] == [1.0, 1.5, 25.0] and drawn["FULL ideal"] == [1.0, 2.0, 32.0]
    assert drawn["SYNTHETIC ideal"] == [2.0, 4.0, 64.0] and drawn["IO ideal"] == [3.0, 6.0, 96.0]
    with pytest.raises(AssertionError, match="one node"):
        lines({2: (1.0, 1.0, 1.0)})
