"""Stages in real containers, as tasks of real Slurm jobs."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlscale.core.environment import Environment
from tests.cluster.cluster import Cluster
from tests.cluster.flow import CONFIG, Flow, repository
from tests.conftest import records
from tests.container.conftest import Engine, container_engine, cpu_image  # noqa: F401 - fixtures
from tests.waiting import PATIENCE, until

pytestmark = [
    *(pytest.mark.cluster, pytest.mark.container, pytest.mark.slow),
    *(pytest.mark.timeout(1800), pytest.mark.xdist_group("machine")),
]


@pytest.fixture
def flow(cluster: Cluster, container_engine: Engine, cpu_image: str, tmp_path: Path) -> Iterator[Flow]:  # noqa: F811
    """Yield a folder whose stages run in containers."""
    config = copy.deepcopy(CONFIG)
    config["site"] |= {"engine": "podman", "image": cpu_image, "modules": []}
    mine = {key: value for key, value in container_engine.environment.items() if key.startswith("CONTAINERS_")}
    yield Flow(repository(tmp_path / "w"), cluster, config, mine)
    cluster.cancel_all()


def running(engine: Engine) -> list[str]:
    return engine("ps", "--all", "--filter=name=^dlscale-", "--format={{.Names}}").split()


def test_a_plan_in_containers(flow: Flow, container_engine: Engine) -> None:  # noqa: F811
    """In containers, a plan runs from data to report; eight tasks on two nodes train like one process."""
    assert flow.run(timeout=900) == 0, flow.output[-8000:]
    assert (flow.path / "results/report/shapes.html").exists()
    met = Environment.read(flow.path / "results/plans/shapes/eight/telemetry/train.json")
    assert flow.provenance("shapes/eight")["processes"] == 8
    assert met.image and met.image["name"].startswith("localhost/dlscale")
    a, *others = (records(flow.path / "results/plans/shapes" / run)[-1] for run in ("one", "eight", "mesh"))
    for b in others:
        assert a["valid_loss"] == pytest.approx(b["valid_loss"], rel=1e-4), "eight processes must train like one"
    assert running(container_engine) == []


@pytest.mark.parametrize("how", ["scancel", "the controller's Ctrl-C"])
def test_nothing_is_left_running(flow: Flow, container_engine: Engine, cluster: Cluster, how: str) -> None:  # noqa: F811
    flow.config["targets"] = ["long"]
    flow.config["plans"]["long"]["settings"]["training"]["steps"] = 1_000_000
    with flow.running("--retries=0") as process:
        flow.until("training", lambda: "epoch 3 of" in flow.log(), process)
        assert len(running(container_engine)) == 1
        if how == "scancel":
            (job,) = [row[0] for row in flow.jobs("jobid", "comment:100") if row[1].startswith("rule_train")]
            cluster.run("scancel", job)
        else:
            os.killpg(process.pid, signal.SIGINT)
        # Slurm, podman and the container each pass the signal on, which may take minutes on a busy machine.
        until(
            "the container's end",
            lambda: not running(container_engine),
            said=lambda: container_engine("ps", "--all") + flow.output[-5000:],
            seconds=2 * PATIENCE,
        )
        assert process.wait(PATIENCE) != 0
    assert flow.checkpoints(), "finished work must be saved"
