"""`dlscale history`: measurements of several results folders in their order, each over the one before."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from dlscale.cli import main
from tests.test_compare import Machine, machine, rows
from tests.test_environment import BEFORE

__all__ = ["machine"]  # a fixture

DAYS = ("2026-03-01", "2026-05-01", "2026-07-01")


def measured(machine: Machine, speeds: tuple[float, ...]) -> list[str]:
    """Measure plan `p` once a day of `DAYS`, the last time with another driver; return the folders, the last first."""
    folders = []
    for day, speed in zip(DAYS, speeds, strict=True):
        folder = machine.measure(day, {"first": speed, "fast": 1.5 * speed}, spread=0)
        driver = {"driver": "580.2"} if day == DAYS[-1] else {}
        for run in ("first", "fast"):
            (folder / f"plans/p/{run}/telemetry").mkdir(exist_ok=True)
            update = {"time": f"{day}T12:00:00+00:00", "versions": BEFORE.versions | driver}
            BEFORE.model_copy(update=update).write(folder / f"plans/p/{run}/telemetry/throughput.json")
        folders.append(str(folder))
    return folders[::-1]


def test_each_is_held_against_the_one_before(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    folders = measured(machine, (100.0, 101.0, 150.0))
    shutil.copytree(folders[0], "copy")  # counts once
    assert main(["history", *folders, "copy", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first = [each for each in found if each["run"] == "p.first"]
    assert [each["run"] for each in found] == ["p.fast"] * 3 + ["p.first"] * 3
    assert [each["time"][:10] for each in first] == list(DAYS)
    assert [each["samples_per_second"] for each in first] == pytest.approx([100, 101, 150])
    assert [each["ratio"] for each in first] == [None, pytest.approx(1.01), pytest.approx(150 / 101)]
    assert first[0]["over_before"] is None and "within noise" in first[1]["over_before"]
    assert "noise" not in first[2]["over_before"] and first[2]["differs"] == "driver 570.1 → 580.2"
    assert main(["history", *folders]) == 0 and "NaN" not in capsys.readouterr().out


def test_it_begins_with_a_day_and_is_drawn(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    folders = measured(machine, (100.0, 101.0, 150.0))
    assert main(["history", *folders, "--since", "2026-04-15", "--out", "history.png"]) == 0
    said = capsys.readouterr().out
    assert said.count("p.first") == 2 and "2026-05-01 12:00" in said and DAYS[0] not in said
    assert "p.fast" in rows(said) and Image.open(Path("history.png")).size == (900, 500)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--since", "yesterday"], "--since: yesterday: expected a day, as 2026-11-26"),
        (["--since", "2027-01-01"], "history: nothing was timed since 2027-01-01"),
    ],
)
def test_what_is_wrong_is_one_message(
    machine: Machine, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    folders = measured(machine, (100.0, 101.0, 150.0))
    assert main(["history", *folders, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
