"""`snakemake --profile perlmutter` on a real Slurm: resource requests, and jobs that fail or are interrupted."""

from __future__ import annotations

import copy
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dlscale.report.speedup import series
from dlscale.results import read_plan
from tests.cluster.cluster import Cluster
from tests.cluster.flow import CONFIG, Flow, repository
from tests.conftest import records
from tests.waiting import PATIENCE

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


@pytest.fixture(scope="session")  # once per pytest-xdist worker, because any worker may run any test
def prepared(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Flow:
    """Return a folder that already contains the data, made on this machine."""
    flow = Flow(repository(tmp_path_factory.mktemp("flow") / "w"), cluster, copy.deepcopy(CONFIG))
    assert flow.run("results/data/years/manifest.json", profile=None) == 0, flow.output[-5000:]
    return flow


@pytest.fixture
def make(cluster: Cluster, prepared: Flow, tmp_path: Path) -> Iterator[Callable[..., Flow]]:
    """Return a function that copies the prepared folder and changes its configuration."""

    def made(**changes: Any) -> Flow:
        path = tmp_path / "w"
        shutil.copytree(prepared.path, path, symlinks=True)
        config = copy.deepcopy(CONFIG)
        for key, value in changes.items():
            here = config
            *parents, last = key.split("__")
            for parent in parents:
                here = here[parent]
            here[last] = value
        return Flow(path, cluster, config)

    yield made
    cluster.cancel_all()


def long(seconds: float, prepared: Flow) -> dict[str, Any]:
    """Return settings of a training that takes about `seconds`; a short training measures this machine's speed."""
    global _RATE
    if _RATE is None:
        assert prepared.run("results/plans/shapes/one/metrics.jsonl", profile=None) == 0, prepared.output[-5000:]
        (record,) = records(prepared.path / "results/plans/shapes/one")
        _RATE = 1 / max(record["epoch_seconds"] / record["step"], 1e-3)
    return {"training": {"steps": max(50, int(seconds * _RATE)), "checkpoint_epochs": 100_000}}


_RATE: float | None = None


# ---- requests -----------------------------------------------------------------------------


def test_shapes(make: Callable[..., Flow]) -> None:
    """Jobs request the GPUs of their runs: one GPU of a shared node, or one, two or four on each of two nodes.

    All runs train like a run on one process, and the call writes the report.
    """
    flow = make()
    assert flow.run() == 0, flow.output[-8000:]
    rows = {
        row[0].removeprefix("rule_").replace("_wildcards_", " "): row[1:-1]
        for row in flow.jobs("comment:100", "qos", "numnodes", "tres-per-node:30", "feature", "account", "state")
    }
    shapes = {
        "one": ["shared", "1", "gres:gpu:1"],
        "pair": ["regular", "2", "gres:gpu:1"],
        "eight": ["regular", "2", "gres:gpu:4"],
        "mesh": ["regular", "2", "gres:gpu:2"],
    }
    assert rows == {
        f"{stage} shapes_{run}": [*asked, "gpu&hbm40g", "m0000_g", "COMPLETED"]
        for stage in ("train", "throughput")
        for run, asked in shapes.items()
    }
    assert "2 nodes x 4 GPUs = 8 ranks (dp 8)" not in flow.output, "this line is only for dry runs"
    assert (flow.path / "results/report/shapes.html").exists()
    found = flow.provenance("shapes/eight")
    assert found["processes"] == 8 and found["slurm"]["SLURM_JOB_NODELIST"].startswith("nid[")
    a, *others = (records(flow.path / "results/plans/shapes" / run)[-1] for run in ("one", "pair", "eight", "mesh"))
    for b in others:
        assert a["valid_loss"] == pytest.approx(b["valid_loss"], rel=1e-4), "several processes must train like one"
    assert flow.run() == 0 and "Nothing to be done" in flow.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"site__scheduler": {"queues": {"regular": {"qos": "nosuch"}}}},
            "FAIL  account: m0000_g may not use QOS nosuch",
        ),
        ({"site__scheduler": {"gpu_nodes": {"constraint": "gpux"}}}, "FAIL  GPU nodes: "),
    ],
    ids=["QOS", "constraint"],
)
def test_an_impossible_request_gives_one_message(
    make: Callable[..., Flow], change: dict[str, Any], message: str
) -> None:
    """An impossible request gives one message, and no job is submitted."""
    flow = make(**change)
    assert flow.run() != 0
    assert flow.output.count(message) == 1, flow.output[-3000:]
    assert "nothing was started" in flow.output and "Traceback" not in flow.output
    assert not flow.jobs("jobid")


def test_a_submission_that_slurm_refuses(make: Callable[..., Flow]) -> None:
    """If the site's submit filter refuses a job, the call shows the filter's message."""
    flow = make(site__scheduler={"gpu_nodes": {"account_suffix": ""}})
    assert flow.run("--retries=0", "results/plans/shapes/one/metrics.jsonl") != 0
    assert "does not match any supported policy" in flow.output and "Traceback" not in flow.output


# ---- failed and interrupted jobs -------------------------------------------------------------------


@pytest.mark.slow
def test_the_time_limit(make: Callable[..., Flow], prepared: Flow) -> None:
    """A training saves at Slurm's warning and continues; it saves and ends at the limit; the next job resumes."""
    flow = make(targets=["long"], plans__long__settings=long(3600, prepared))
    # Slurm's warning may come half a minute too early; with a limit of one minute, it could precede the training.
    with flow.running("--set-resources", "train:runtime=2", "--retries=4") as process:
        # the second job appends to the log of the first job
        flow.until("the second job", lambda: "resumed after epoch" in flow.log(), process, seconds=3 * PATIENCE)
        os.killpg(process.pid, signal.SIGINT)  # other tests show that a resumed job ends
        assert process.wait(PATIENCE) != 0
    before, _, after = flow.log().partition("asked to end: saved after step ")
    assert "asked to save: saved after step" in before and " epoch 1 of " in before
    assert re.search(rf"resumed after epoch \d+, step {after.split()[0]}\b", after), (
        "the job must resume from the end of the previous job"
    )
    assert len(flow.jobs("state")) == 2


@pytest.mark.slow
def test_a_failed_node(make: Callable[..., Flow], prepared: Flow, cluster: Cluster) -> None:
    """After a node failure, the job resumes on another node from the last checkpoint."""
    settings = long(40, prepared)
    settings["training"]["checkpoint_epochs"] = 50
    flow = make(targets=["long"], plans__long__settings=settings)
    with flow.running("--retries=2") as process:
        flow.until("a checkpoint", flow.checkpoints, process)
        (node,) = {row[0] for row in flow.jobs("nodelist") if row[0].startswith("nid")}
        try:
            cluster.fail_node(node)
            assert process.wait(PATIENCE) == 0, flow.output[-8000:]
        finally:
            cluster.start_node(node)
    assert sorted(row[0] for row in flow.jobs("state")) == ["COMPLETED", "NODE_FAIL"]
    assert flow.provenance("long/run")["slurm"]["SLURM_JOB_NODELIST"] != node
    assert flow.provenance("long/run")["resumed_from_step"] > 0


@pytest.mark.slow
def test_preemption(make: Callable[..., Flow], prepared: Flow, cluster: Cluster) -> None:
    """If a job of a higher QOS takes the node, the preempted run saves, waits and resumes."""
    flow = make(targets=["long"], plans__long__settings=long(40, prepared))
    flow.config["site"]["scheduler"]["run_queues"] = ["preempt"]
    with flow.running("--retries=2", "-p") as process:
        flow.until("training", lambda: "epoch 3 of" in flow.log(), process)
        other = cluster.submit(
            "sleep 5", "--qos=premium", "--constraint=gpu", "--nodes=4", "--account=m0000_g", "--time=1", cwd=flow.path
        )
        assert process.wait(PATIENCE) == 0, flow.output[-8000:]
    assert cluster.state(other) == "COMPLETED"
    assert flow.provenance("long/run")["resumed_from_step"] > 0
    assert "asked to end: saved after step" in flow.output


@pytest.mark.slow
def test_a_preempted_program_that_ignores_TERM(make: Callable[..., Flow], cluster: Cluster) -> None:
    """If a preempted program ignores SIGTERM, Slurm does not requeue its job; Snakemake submits the job again."""
    marker = "began"
    script = f"touch {marker}; trap '' TERM; for i in $(seq 600); do sleep 1; done"
    program = {"command": ["bash", "-c", script], "folder": "."}
    flow = make(targets=["long"], plans__long__settings={"program": program, "throughput": {"batches": 10}})
    flow.config["site"]["scheduler"]["run_queues"] = ["preempt"]

    def states() -> list[str]:
        return sorted(row[0] for row in flow.jobs("state", "comment:100") if "program" in row[1])

    with flow.running("--retries=2") as process:
        flow.until("the program", (flow.path / marker).exists, process)
        cluster.submit(
            "sleep 5", "--qos=premium", "--constraint=gpu", "--nodes=4", "--account=m0000_g", "--time=1", cwd=flow.path
        )
        flow.until("a second job", lambda: len(states()) == 2, process, seconds=2 * PATIENCE)
        assert "PREEMPTED" in states() and "and does not requeue it" in flow.output, flow.output[-8000:]


@pytest.mark.slow
def test_an_outage_of_slurm(make: Callable[..., Flow], prepared: Flow, cluster: Cluster) -> None:
    """If a job ends while Slurm's controller is down for two minutes, its result counts, and the job runs only once."""
    flow = make(targets=["long"], plans__long__settings=long(60, prepared))
    with flow.running("--retries=0") as process:
        flow.until("training", lambda: "epoch 3 of" in flow.log(), process)
        try:
            cluster.stop_controller()
            time.sleep(120)
            assert process.poll() is None, flow.output[-8000:]
        finally:
            cluster.start_controller()
        assert process.wait(2 * PATIENCE) == 0, flow.output[-8000:]
    assert [row[0] for row in flow.jobs("state")] == ["COMPLETED"]
    assert flow.provenance("long/run")["resumed_from_step"] is None


@pytest.mark.slow
def test_ctrl_c_in_an_outage(make: Callable[..., Flow], prepared: Flow, cluster: Cluster) -> None:
    """Ctrl-C in an outage ends the call without a traceback; its job continues, and the next call waits for the job."""
    flow = make(targets=["long"], plans__long__settings=long(60, prepared))
    with flow.running("--retries=0") as process:
        flow.until("training", lambda: "epoch 3 of" in flow.log(), process)
        try:
            cluster.stop_controller()
            time.sleep(10)
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(2 * PATIENCE) != 0
        finally:
            cluster.start_controller()
    assert "Traceback" not in flow.output, flow.output[-8000:]
    assert flow.run("--unlock") == 0, flow.output
    assert flow.run("--retries=0") == 0, flow.output[-8000:]
    assert [row[0] for row in flow.jobs("state")] == ["COMPLETED"]


@pytest.mark.slow
def test_a_job_that_slurm_has_forgotten(
    make: Callable[..., Flow], prepared: Flow, cluster: Cluster, tmp_path: Path
) -> None:
    """A job that Slurm no longer lists counts as failed after a while; the next call continues the training."""
    flow = make(targets=["long"], plans__long__settings=long(90, prepared))
    folder, forgotten = tmp_path / "bin", tmp_path / "forgotten"
    folder.mkdir()
    for name in ("squeue", "sacct"):
        (folder / name).write_text(f'#!/bin/sh\n[ -e {forgotten} ] || exec {shutil.which(name)} "$@"\n')
        (folder / name).chmod(0o755)
    flow.environment["PATH"] = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    # The first call waits for 40 seconds instead of 15 minutes.
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'snakemake' in sys.orig_argv:\n"
        "    import snakemake_executor_plugin_dlscale\n"
        "    snakemake_executor_plugin_dlscale.FORGOTTEN_SECONDS = 40\n"
    )
    flow.environment["PYTHONPATH"] = f"{folder}:{flow.path / 'workflow_scripts'}"
    with flow.running("--retries=0") as process:
        flow.until("training", lambda: "epoch 3 of" in flow.log(), process)
        forgotten.touch()
        assert process.wait(2 * PATIENCE) != 0
    assert re.search(r"Slurm has not listed job \d+ for", flow.output), flow.output[-8000:]
    # Snakemake has removed the outputs of the forgotten job, which still ran; the next job resumes from a checkpoint.
    forgotten.unlink()
    assert flow.run("--retries=0") == 0, flow.output[-8000:]
    assert sorted(row[0] for row in flow.jobs("state")) == ["COMPLETED", "FAILED"]
    assert flow.provenance("long/run")["resumed_from_step"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("known", [False, True], ids=["refused", "known to the site"])
def test_a_limit_on_submitted_jobs(make: Callable[..., Flow], prepared: Flow, cluster: Cluster, known: bool) -> None:
    """A refused submission is repeated. If the site's `max_jobs` equals Slurm's limit, Slurm refuses no submission."""
    flow = make(targets=["long"], plans__long__settings=long(15, prepared))
    flow.config["plans"]["long"]["runs"] = {"run": {}, "other": {"seed": 7}}
    if known:
        flow.config["site"]["scheduler"]["queues"] = {"shared": {"max_jobs": 1}}
    cluster.limit_jobs("shared", 1)
    try:
        assert flow.run("--retries=0") == 0, flow.output[-8000:]
    finally:
        cluster.limit_jobs("shared", -1)
    assert [row[0] for row in flow.jobs("state")] == ["COMPLETED", "COMPLETED"]
    assert ("or does not answer (QOSGrpSubmit" in flow.output) is not known, flow.output[-8000:]


@pytest.mark.slow
def test_a_submission_that_slurm_accepts_without_an_answer(
    make: Callable[..., Flow], cluster: Cluster, tmp_path: Path
) -> None:
    """If sbatch times out after Slurm accepted the job, the call waits for this job, and submits no other job."""
    flow = make()
    sbatch = tmp_path / "bin/sbatch"
    sbatch.parent.mkdir()
    failure = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    sbatch.write_text(f"#!/bin/sh\n{shutil.which('sbatch')} \"$@\" && echo '{failure}' >&2\nexit 1\n")
    sbatch.chmod(0o755)
    flow.environment["PATH"] = f"{sbatch.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    assert flow.run("--retries=0", "--force", "results/plans/shapes/one/metrics.jsonl") == 0, flow.output[-8000:]
    assert [row[0] for row in flow.jobs("state")] == ["COMPLETED"]
    assert ": not resubmitted." in flow.output, flow.output[-8000:]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["TERM", "KILL"])
def test_a_restarted_controller_runs_no_job_twice(
    make: Callable[..., Flow], prepared: Flow, how: signal.Signals
) -> None:
    """If Snakemake is stopped and started again, no job runs twice and no result is lost."""
    # After KILL, two more calls start before the job ends, each within some 30 s on a busy machine.
    flow = make(targets=["long"], plans__long__settings=long(25 if how == signal.SIGTERM else 120, prepared))
    with flow.running("--retries=0") as process:
        flow.until("training", lambda: "epoch 3 of" in flow.log(), process)
        os.kill(process.pid, how)
        process.wait(PATIENCE)
    if how == signal.SIGKILL:
        assert flow.run("--unlock") == 0, flow.output
    assert flow.run("--retries=0") == 0, flow.output[-8000:]
    if how == signal.SIGKILL:
        assert "Waiting for jobs of an earlier call" in flow.output
    assert [(row[0], row[1].split("_")[1]) for row in flow.jobs("state", "comment:100")] == [("COMPLETED", "train")]
    assert flow.provenance("long/run")["resumed_from_step"] is None


@pytest.mark.slow
def test_a_second_writer_is_refused(make: Callable[..., Flow], prepared: Flow, cluster: Cluster) -> None:
    """A second training of the same run is refused, even on another node. The message names the lock's owner."""
    flow = make(targets=["long"], plans__long__settings=long(25, prepared))
    with flow.running("--retries=0", "-p") as process:
        flow.until("training", lambda: "epoch 3 of" in flow.log(), process)
        second = flow.path / "second"
        command = next(
            line.partition("Shell command: ")[2]
            for line in flow.output.splitlines()
            if "dlscale train" in line and "Shell command" in line
        ).replace("results/logs/train/long/run.log", str(second))
        script = f"export PYTHONPATH={flow.path}/workflow_scripts PATH={Path(sys.executable).parent}:$PATH\n"
        job = cluster.submit(
            script + command, "--constraint=gpu&hbm80g", "--account=m0000_g", "--time=2", cwd=flow.path
        )
        cluster.wait(job, "FAILED")
        assert "in use by process" in second.read_text() and "Slurm job" in second.read_text()
        assert process.wait(PATIENCE) == 0, flow.output[-8000:]
    assert flow.provenance("long/run")["resumed_from_step"] is None


# ---- many small jobs -------------------------------------------------------------------------------


@pytest.mark.slow
def test_small_runs_share_a_job(make: Callable[..., Flow]) -> None:
    """Each piece of a dataset is a job, and two measurements share one job."""
    flow = make(plans__shapes__runs={"one": {}, "two": {"seed": 1}}, plans__shapes__measure=["throughput"])
    flow.config["datasets"]["years"] = {**flow.config["datasets"]["years"], "pieces": 3}
    shutil.rmtree(flow.path / "results")
    grouped = [
        *("--groups", "throughput=measure", "--group-components", "measure=2"),
        *("--set-resource-scopes", "cpus_per_task=local", "nodes=local"),
        *("--resources", "cpus_per_task=32", "nodes=1"),
    ]
    assert flow.run(*grouped) == 0, flow.output[-8000:]
    names = [row[0] for row in flow.jobs("comment:100", "state")]
    assert len([name for name in names if name.startswith("rule_preprocess")]) == 6, names
    assert len([name for name in names if "measure" in name or "throughput" in name]) == 1, names
    for run in ("one", "two"):
        assert (flow.path / f"results/plans/shapes/{run}/throughput.json").exists()


@pytest.mark.slow
def test_a_sweep_submits_only_promoted_trials(make: Callable[..., Flow]) -> None:
    """Rungs are decided during the call: a trial is submitted for the next rung only if it is promoted."""
    flow = make(targets=["swept"])
    flow.config["plans"]["swept"] = {
        "study": "era5_vit",
        "kind": "sweep",
        "from": "shapes.one",
        "settings": {"training": {"epochs": 2}},
        "sweep": {"method": "halving", "over": {"optimizer.lr": [1e-3, 1e30]}, "reduction_factor": 2},
    }
    assert flow.run() == 0, flow.output[-8000:]
    trained = sorted(row[0].partition("swept_")[2] for row in flow.jobs("comment:100", "state"))
    assert trained == ["lr-0p001-rung0", "lr-0p001-rung1", "lr-1e30-rung0"]
    assert flow.provenance("swept/lr-0p001-rung1")["resumed_from_step"] > 0
    assert flow.run() == 0 and "Nothing to be done" in flow.output


@pytest.mark.slow
def test_weak_scaling_over_the_nodes(make: Callable[..., Flow]) -> None:
    """Runs with and without gradient averaging request the nodes that they fill; the page shows their efficiency."""
    flow = make(targets=["weak"])
    flow.config["plans"]["weak"] = {
        "study": "era5_vit",
        "kind": "weak_scaling",
        "from": "shapes.one",
        "settings": {"threads": 1},
        "scaling": {"devices": [1, 2, 4], "per_node": 2, "batch_sizes": [2]},
    }
    assert flow.run() == 0, flow.output[-8000:]
    asked = {row[0].partition("weak_")[2]: tuple(row[1:3]) for row in flow.jobs("comment:100", "numnodes", "state")}
    nodes = {"b2_ddp_1": "1", "b2_ddp_2": "1", "b2_ddp_4": "2", "b2_no_sync_2": "1", "b2_no_sync_4": "2"}
    assert asked == {run: (count, "COMPLETED") for run, count in nodes.items()}
    (found,) = series(read_plan(flow.path / "results/plans/weak/plan.yaml"))
    assert (found.batch, [point.devices for point in found.points]) == (2, [1, 2, 4])
    assert [point.twin is not None for point in found.points] == [False, True, True]
    assert [point.run.throughput and point.run.throughput.batch_size for point in found.points] == [2, 4, 8]
    assert re.search(r"efficiency [^.<]*on 4 devices", (flow.path / "results/report/weak.html").read_text())
    assert flow.run() == 0 and "Nothing to be done" in flow.output


def test_a_path_that_would_run_in_a_shell_is_refused(make: Callable[..., Flow]) -> None:
    """A path with shell syntax is refused, because the executor puts a job's command between double quotes."""
    flow = make(results="my $(touch pwned)")
    assert flow.run() != 0
    assert "Slurm jobs cannot be submitted from a path with '$'" in flow.output and "Traceback" not in flow.output
    assert not flow.jobs("jobid") and not list(flow.path.rglob("pwned"))
