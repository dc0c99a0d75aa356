"""Profiles of a run whose two processes are tasks of a Slurm job, each in a container, by the real nsys."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from dlscale.core import telemetry
from dlscale.measure.profilers import Profile
from dlscale.report.compare import read_rows
from tests.cluster.flow import Flow
from tests.cluster.test_containers import flow as flow  # a fixture
from tests.cluster.test_containers import running
from tests.container.conftest import Engine, container_engine, cpu_image  # noqa: F401 - fixtures
from tests.test_nsys import totals

pytestmark = [
    *(pytest.mark.cluster, pytest.mark.container, pytest.mark.slow),
    *(pytest.mark.timeout(1800), pytest.mark.xdist_group("machine")),
]

STEPS = 4
RANGES = {"step", "data", "copy", "forward", "backward", "optimizer", "comm"}
FOLDER = "results/plans/profiled/two"


@pytest.fixture
def profiled(flow: Flow, real_nsys: Path) -> Flow:
    """A plan that profiles two processes of a node; nsys, which the image lacks, is mounted in it."""
    root = real_nsys.parents[2]  # of usr/bin/nsys
    inside = Path("/nsys", real_nsys.relative_to(root))
    flow.config["site"] |= {"mounts": {str(root): "/nsys"}, "environment": {"NSYS": str(inside)}}
    flow.config["targets"] = ["profiled"]
    flow.config["plans"]["profiled"] = {
        "study": "era5_vit",
        "measure": ["profile"],
        "from": "shapes.one",
        "settings": {
            "geometry": {"gpus_per_node": 2},
            "profile": {"tools": ["nsys", "torch"], "ranks": [0, 1], "skip": 2, "steps": STEPS},
        },
        "runs": {"two": {}},
    }
    return flow


def processes(flow: Flow) -> list[str]:
    """The command lines of all that runs in this folder, in containers or not."""
    lines = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if (process / "cwd").samefile(flow.path):
                lines.append((process / "cmdline").read_text(errors="replace").replace("\0", " "))
    return lines


def test_two_tasks_in_containers(
    profiled: Flow,
    container_engine: Engine,  # noqa: F811
    real_nsys: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both are profiled by both tools, and telemetry goes on beside them; nothing is left running."""
    assert profiled.run(timeout=1200) == 0, profiled.output[-8000:]
    (asked,) = [
        row[1:-1]
        for row in profiled.jobs("comment:100", "qos", "numnodes", "tres-per-node:30", "state")
        if row[0].startswith("rule_profile")
    ]
    assert asked == ["shared", "1", "gres:gpu:2", "COMPLETED"]
    assert running(container_engine) == [] and processes(profiled) == []

    folder = profiled.path / FOLDER / "profile"
    found = Profile.read(folder / "profile.json")
    by_nsys, by_torch = found.tools
    assert found.nranks == 2 and (by_nsys.name, by_torch.name) == ("nsys", "torch")
    rows = read_rows(folder / "profile_summary.csv")
    if by_nsys.problem:  # a slim image lacks what makes reports
        assert "nsys.rank0.qdstrm is kept" in by_nsys.problem, by_nsys
        assert {"nsys.rank0.qdstrm", "nsys.rank1.qdstrm"} == set(by_nsys.files.values())
        return
    assert by_nsys.problem is None and by_nsys.steps == STEPS and by_nsys.ranges.keys() == RANGES
    assert by_nsys.activity.comm_seconds == pytest.approx(by_nsys.ranges["comm"].seconds)
    assert sorted(by_nsys.files.values()) == ["nsys.rank0.nsys-rep", "nsys.rank1.nsys-rep"]
    for rank in (0, 1):
        mine = {row.name: row for row in rows if (row.tool, row.kind, row.rank) == ("nsys", "range", rank)}
        said = totals(real_nsys, folder / f"nsys.rank{rank}.nsys-rep")
        assert {name: round(row.calls * STEPS) for name, row in mine.items()} == {
            name: count for name, (count, _) in said.items() if name in RANGES
        }
        assert said["step"][0] == STEPS

    assert by_torch.problem is None and by_torch.steps == STEPS
    assert {f"torch.rank{rank}.json.gz" for rank in (0, 1)} == set(by_torch.files.values())

    samples = telemetry.read(profiled.path / FOLDER / "telemetry/profile.csv")
    assert len(samples) >= 3 and max(sample.rss_bytes or 0 for sample in samples) > 100e6
    assert (profiled.path / "results/report/profiled.html").exists()
