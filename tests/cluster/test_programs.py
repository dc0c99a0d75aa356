"""External programs on a real Slurm: as srun's tasks, with and without containers, preempted and timed out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.flow import Flow, repository
from tests.container.conftest import Engine, container_engine, cpu_image  # noqa: F401 - fixtures
from tests.programs import settings, write_program
from tests.waiting import PATIENCE

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800), pytest.mark.slow]
SITE: dict[str, Any] = {"engine": "none", "gpu": False, "scheduler": {"warning_seconds": 30}}


@pytest.fixture
def make(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., Flow]]:
    """Write a small training program; yield a function that makes a folder with a plan of this program."""
    path, theirs = repository(tmp_path / "w"), write_program(tmp_path / "theirs")

    def made(plan: dict[str, Any], *more: str, environment: dict[str, str] | None = None, **program: Any) -> Flow:
        common = {"study": "program", "settings": settings(theirs, *more, **program)}
        config = {"targets": ["plan"], "plans": {"plan": {**common, **plan}}, "site": SITE}
        return Flow(path, cluster, config, environment or {})

    yield made
    cluster.cancel_all()


def found(flow: Flow, run: str, file: str = "program.json") -> dict[str, Any]:
    return json.loads((flow.path / "results/plans/plan" / run / file).read_text())


def test_a_plan(make: Callable[..., Flow]) -> None:
    """A plan of a program works with one process, tasks on one and two nodes, and a program that calls srun itself."""
    runs: dict[str, Any] = {
        "one": {},
        "two": {"geometry": {"gpus_per_node": 2}},
        "apart": {"geometry": {"nodes": 2}},
        "itself": {
            "geometry": {"nodes": 2},
            "program": {
                "start": "itself",
                "command": ["srun", "--nodes={nodes}", "--ntasks-per-node=1", "python3", "train.py"],
            },
        },
    }
    flow = make({"runs": runs}, resume=[], log=None, losses={})
    runs["itself"]["program"]["command"] += ["--out", "{out}", "--epochs", "{epochs}", "--batch-size", "{batch_size}"]
    assert flow.run() == 0, flow.output[-8000:]
    assert (flow.path / "results/report/plan.html").exists()
    for run, ranks in {"one": 1, "two": 2, "apart": 2, "itself": 2}.items():
        for file in ("program.json", "throughput.json"):
            record = found(flow, run, file)
            assert record["outside"]["way"] == "seen", (run, file)
            assert len(record["FULL"]["rank_throughput"]) == record["nranks"] == ranks, (run, file)
    log = (flow.path / "results/logs/program/plan/apart.log").read_text()
    assert "rank 0 of 2 met at nid" in log and "rank 1 of 2 met at nid" in log
    assert flow.run() == 0 and "Nothing to be done" in flow.output


def test_the_exit_status_of_a_program_is_reported(make: Callable[..., Flow]) -> None:
    flow = make({"runs": {"two": {"geometry": {"nodes": 2}}}}, command=["sh", "-c", "exit 3"], resume=[], losses={})
    assert flow.run("--retries=0", "results/plans/plan/two/program.json") != 0
    # If one task ends before the other, srun ends the other with SIGTERM, and srun's status is 143.
    status = r"3 after|143 after [^,]*, perhaps because another of its processes failed first"
    assert re.search(rf"FAILED plan\.two \(program\): the program ended with status ({status})", flow.output)
    assert "Exited with exit code 3" in Path(flow.path, "results/logs/program/plan/two.log").read_text()
    assert not (flow.path / "results/plans/plan/two/program.json").exists()


@pytest.mark.parametrize("how", ["preempted", "at its time limit"])
def test_a_retry_resumes_from_the_programs_checkpoint(make: Callable[..., Flow], cluster: Cluster, how: str) -> None:
    """On two nodes, a retry resumes from the program's checkpoint, and the result covers all attempts."""
    plan = {"measure": ["train"], "runs": {"two": {"geometry": {"nodes": 2}}}}
    # With steps of 4.5 s, the training takes 162 s, but the time limit is two minutes.
    seconds, retries = (1.0, "--retries=2") if how == "preempted" else (4.5, "--retries=4")
    flow = make(plan, f"--seconds={seconds}")
    if how == "preempted":
        flow.config["site"] = {**SITE, "scheduler": {"run_queues": ["preempt"]}}
    limit = ["--set-resources", "program:runtime=2"] if how != "preempted" else []
    with flow.running("results/plans/plan/two/program.json", *limit, retries) as process:
        saved = flow.path / "results/plans/plan/two/out/saved"
        flow.until("a checkpoint", saved.exists, process)
        if how == "preempted":
            words = ["--qos=premium", "--constraint=gpu", "--nodes=4", "--account=m0000_g", "--time=1"]
            cluster.submit("sleep 5", *words, cwd=flow.path)
        assert process.wait(PATIENCE) == 0, flow.output[-8000:]
    record = found(flow, "two")
    assert len(record["FULL"]["rank_throughput"]) == 2
    lines = (flow.path / "results/plans/plan/two/program.jsonl").read_text().splitlines()
    epochs = [json.loads(line) for line in lines]
    assert [each["valid_loss"] for each in epochs] == [1.0, 1 / 2, 1 / 3]
    log = (flow.path / "results/logs/program/plan/two.log").read_text()
    assert "goes on after epoch 0\n" in log and re.search("goes on after epoch [12]\n", log), (
        "the log must contain all attempts"
    )


@pytest.mark.container
@pytest.mark.xdist_group("machine")
def test_in_containers(
    make: Callable[..., Flow],
    container_engine: Engine,  # noqa: F811
    cpu_image: str,  # noqa: F811
) -> None:
    """The program's tasks run in containers with only Python; paired timing and tuning run in the stages' image."""
    theirs, mine = "localhost/ci-base:bookworm", container_engine.environment
    flow = make({}, environment={key: mine[key] for key in mine if key.startswith("CONTAINERS_")}, image=theirs)
    flow.config["site"] = {**SITE, "engine": "podman", "image": cpu_image, "modules": []}
    plan = flow.config["plans"]["plan"]
    del plan["settings"]["batch_size"]
    plan |= {"kind": "weak_scaling", "scaling": {"devices": [1, 2], "per_node": 1, "batch_sizes": [8]}}
    plan["measure"] = ["throughput", "train"]
    long = settings(Path(plan["settings"]["program"]["folder"]), "--seconds=0.005") | {"training": {"epochs": 500}}
    turns = {"settings": long, "runs": {"own": {}, "large": {"batch_size": 16}}, "measure": ["throughput"]}
    long["throughput"] = {**long["throughput"], "beside": 8}
    tuned = {"settings": long, "runs": {"own": {"tune": {"batch_size": [8, 16], "seconds": 20}}}}
    flow.config["plans"] |= {
        "rungs": {"study": "program", "kind": "ladder", **turns},
        "tuned": {"study": "program", "kind": "tune", **tuned},
    }
    flow.config["targets"] = ["plan", "rungs", "tuned"]
    assert flow.run(timeout=1500) == 0, flow.output[-8000:]
    for run, ranks in {"b8_program_1": 1, "b8_program_2": 2}.items():
        for file in ("program.json", "throughput.json"):
            record = found(flow, run, file)
            assert record["outside"]["way"] == "seen", (run, file)
            assert len(record["FULL"]["rank_throughput"]) == record["nranks"] == ranks, (run, file)
    plans = flow.path / "results/plans"
    rounds = json.loads((plans / "rungs/large/throughput.json").read_text())["beside"]["openings"]
    ratios = [own / first for each in rounds for own, first in each]
    assert sum(ratios) / len(ratios) == pytest.approx(2, rel=0.3)
    assert json.loads((plans / "tuned/own/tune.json").read_text())["duel"]["ratio"] == pytest.approx(2, rel=0.3)
    assert container_engine("ps", "--all", "--filter=name=^dlscale-", "--format={{.Names}}") == ""
