"""The published plotting script of the weak scaling, as `tests/published/scaling.py` has it."""

from __future__ import annotations

import json
from pathlib import Path

from dlscale.measure.records import Throughput, Trials
from tests.published.scaling import read_rates


def document(*rates: float) -> str:
    labelled = zip(("IO", "SYNTHETIC", "FULL"), rates, strict=True)
    return json.dumps({label: {"trial_throughput": [rate, 0.0]} for label, rate in labelled})


def test_it_takes_our_record_as_it_is(tmp_path: Path) -> None:
    def trials(rate: float) -> Trials:
        return Trials(trial_throughput=[rate, 2 * rate], trial_time=[1.0, 0.5], mean=1.5 * rate)

    path = tmp_path / "throughput.json"
    path.write_text(Throughput(io=trials(30.0), synthetic=trials(20.0), full=trials(10.0)).text() + "\n")
    assert read_rates(path) == (30.0, 20.0, 10.0)
