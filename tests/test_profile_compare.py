"""Two profiles side by side: what changed, and what of it is more than noise."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from dlscale.core.records import Profile, ProfiledTool, TopEntry
from dlscale.measure.profilers.compare import Summary, compare, extremes
from tests.conftest import stage


def row(
    name: str, seconds: float, std: float = 0.0, tool: str = "torch", rank: int = 0, kind: str = "operator"
) -> TopEntry:
    return TopEntry(tool=tool, rank=rank, kind=kind, name=name, calls=1, seconds=seconds, std=std)  # type: ignore[arg-type]


def summary(*rows: TopEntry, steps: int = 4) -> Summary:
    return Summary(list(rows), dict.fromkeys({one.tool for one in rows}, steps))


def test_changes_are_by_profiler_kind_and_name() -> None:
    before = summary(row("mm", 5), row("mm", 7, kind="kernel"), row("gone", 2), row("a.py:1: x", 1, tool="stacks"))
    after = summary(row("mm", 4), row("mm", 7, kind="kernel"), row("new", 3))
    found = {(one.kind, one.name): (one.before, one.after) for one in compare(before, after)}
    assert found == {
        ("operator", "mm"): (5, 4),
        ("kernel", "mm"): (7, 7),
        ("operator", "gone"): (2, 0),
        ("operator", "new"): (0, 3),
    }, "and nothing of a profiler that only one has"


def test_noise_is_that_of_two_means() -> None:
    """sqrt(3^2 / 9 + 4^2 / 4) = sqrt(5), twice."""
    (one,) = compare(summary(row("mm", 10, 3), steps=9), summary(row("mm", 14, 4), steps=4))
    assert one.noise == pytest.approx(2 * 5**0.5) and not one.certain
    (one,) = compare(summary(row("mm", 10, 3), steps=9), summary(row("mm", 15, 4), steps=4))
    assert one.certain
    (one,) = compare(summary(row("x", 1, kind="line")), summary(row("x", 9, kind="line")))
    assert math.isinf(one.noise) and not one.certain


def test_noise_is_seldom_called_a_change() -> None:
    """Profiles of the same program: about one difference in twenty exceeds two standard errors."""
    draw, steps = random.Random(1), 100

    def profile() -> Summary:
        rows = []
        for name in range(400):
            times = [draw.gauss(5, 1) for _ in range(steps)]
            mean = sum(times) / steps
            rows.append(row(str(name), mean, (sum((t - mean) ** 2 for t in times) / (steps - 1)) ** 0.5))
        return summary(*rows, steps=steps)

    changes = compare(profile(), profile())
    assert 0.02 < sum(one.certain for one in changes) / len(changes) < 0.08


def test_ranks_are_averaged() -> None:
    """A rank without a row took no time for it."""
    before = summary(row("mm", 4), row("mm", 6, rank=1), row("only", 2, rank=1))
    found = {one.name: one.before for one in compare(before, before)}
    assert found == {"mm": 5, "only": 1}


def test_extremes_are_ordered() -> None:
    before = summary(*(row(str(n), 10) for n in range(6)))
    after = summary(*(row(str(n), 10 + change) for n, change in enumerate((-1, -5, 0, 2, -3, 7))))
    faster, slower = extremes(compare(before, after), 2)
    assert [one.difference for one in faster] == [-5, -3] and [one.difference for one in slower] == [7, 2]


def write(folder: Path, seconds: float) -> Path:
    Profile(tools=[ProfiledTool(name="torch", steps=4)]).write(folder / "profile/profile.json")
    one = row("aten::mm", seconds, 1e-4)
    names, values = zip(*one.model_dump().items(), strict=True)
    (folder / "profile/profile_summary.csv").write_text(f"{','.join(names)}\n{','.join(map(str, values))}\n")
    return folder


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run's folder, its folder `profile`, or a file there are the same."""
    a, b = write(tmp_path / "a", 4e-3), write(tmp_path / "b", 3e-3)
    for one, other in ((a, b / "profile"), (a / "profile/profile.json", b)):
        assert stage("compare-profiles", one, other) == 0
        faster, slower = capsys.readouterr().out.split("slower")
        assert "-1.000 ±    0.141      4.000 -> 3.000     torch operator: aten::mm\n" in faster
        assert slower.endswith("nothing\n")
    assert stage("compare-profiles", b, a, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["faster"] == []
    assert (found["slower"][0]["name"], found["slower"][0]["certain"]) == ("aten::mm", True)
    assert stage("compare-profiles", a, tmp_path / "c") == 2
    assert "no such run; expected PLAN.RUN, or a run's folder" in capsys.readouterr().err
