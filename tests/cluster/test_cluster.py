"""The cluster is what it claims to be: else the tests on it would show nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlscale.config.run import Geometry
from dlscale.config.site import Site
from dlscale.launch.launcher import PYTHON, Place, launch
from tests.cluster import cluster as slurm
from tests.cluster.cluster import CPU_NODES, GPU_NODES, NODES, QOS, REFUSAL, Cluster, ClusterError
from tests.conftest import ROOT
from tests.waiting import PATIENCE, until

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("machine")]

GPU = ["--account=m0000_g", "--constraint=gpu"]
CPU = ["--account=m0000", "--constraint=cpu"]

#: Writes when it was alive, and when it was told to end, which it does not.
STEP = """
import signal, sys, time
log = open(sys.argv[1], "a", buffering=1)
signal.signal(signal.SIGTERM, lambda *_: print("TERM", time.time(), file=log))
while True:
    print("alive", time.time(), file=log)
    time.sleep(0.2)
"""


@pytest.fixture(autouse=True)
def idle(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.cancel_all()


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    return sorted(done.stdout.splitlines())


def wait_for_text(path: Path, word: str) -> None:
    until(f"{word} in {path}", lambda: path.exists() and word in path.read_text())


def test_nodes_have_names_and_addresses_of_their_own(cluster: Cluster) -> None:
    seen = lines(cluster.run("srun", *GPU, "--nodes=4", "bash", "-c", "echo $(hostname) $(hostname -i)"))
    assert seen == [f"{name} {cluster.subnet}.{10 + i}" for i, name in enumerate(GPU_NODES)]
    assert lines(cluster.run("srun", *CPU, "hostname")) == CPU_NODES


def test_nodes_reach_each_other_and_the_login_node_and_nothing_else(cluster: Cluster) -> None:
    script = "getent hosts nid002 && ip route"
    seen = cluster.run("srun", *GPU, "--nodelist=nid001", "bash", "-c", script).stdout
    assert f"{cluster.subnet}.11" in seen
    assert "default" not in seen


def test_constraints_choose_the_nodes(cluster: Cluster) -> None:
    for constraint, names in [("gpu&hbm40g", ["nid001", "nid002"]), ("gpu&hbm80g", ["nid003", "nid004"])]:
        command = ["srun", "--account=m0000_g", f"--constraint={constraint}", "--nodes=2", "hostname"]
        assert lines(cluster.run(*command)) == names
    with pytest.raises(ClusterError, match="Requested node configuration is not available"):
        cluster.run("srun", *CPU, "--gpus-per-node=1", "true")


def test_qos_and_accounts(cluster: Cluster) -> None:
    seen = cluster.run("sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=name,preempt,gracetime").stdout
    qos = {name: more for name, *more in (line.split("|") for line in seen.splitlines())}
    assert set(qos) - {"normal"} == set(QOS)
    assert {name for name in qos if qos[name][0] == "preempt"} == {"regular", "debug", "premium", "interactive"}
    assert qos["preempt"][1] == "00:00:10"
    seen = cluster.run("sacctmgr", "--noheader", "--parsable2", "show", "associations", "user=root", "format=account")
    assert {"m0000", "m0000_g"} <= set(lines(seen))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], REFUSAL),
        (["--account=m0000_g"], REFUSAL),
        (["--account=m0000", "--constraint=gpu"], REFUSAL),
        (["--account=m1234", "--constraint=cpu"], "Invalid account"),
        ([*GPU, "--qos=nonsense"], "Invalid qos"),
        ([*GPU, "--qos=shared", "--gpus-per-node=3"], "QOSMaxGRESPerJob"),
        ([*GPU, "--qos=shared", "--gres=gpu:1", "--nodes=2"], "QOSMaxNodePerJobLimit"),
        ([*GPU, "--qos=debug", "--time=31"], "QOSMaxWallDurationPerJobLimit"),
        ([*GPU, "--gpus-per-node=5"], "Requested node configuration is not available"),
    ],
)
def test_refusals(cluster: Cluster, options: list[str], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        cluster.submit("true", *options)


def test_shared_jobs_share_a_node_and_others_have_it_alone(cluster: Cluster) -> None:
    """Also: each sees its own cards, and all tasks of a job see all of its cards."""
    show = 'echo "$SLURM_JOB_PARTITION $CUDA_VISIBLE_DEVICES $SLURM_CPUS_ON_NODE"; sleep 60'
    where = "--nodelist=nid001"
    options = [*GPU, where, "--qos=shared", "--gpus-per-node=2", "--cpus-per-task=64"]
    jobs = [cluster.submit(show, *options) for _ in range(2)]
    whole = cluster.submit("true", *GPU, where, "--gpus-per-node=1")
    for job, cards in zip(jobs, ["0,1", "2,3"], strict=True):
        wait_for_text(cluster.folder / f"slurm-{job}.out", f"gpu_shared {cards} 64")
    assert cluster.state(whole) == "PENDING"
    command = ["srun", *GPU, "--nodelist=nid002", "--ntasks-per-node=4", "--cpus-per-task=32", "--gpus-per-node=4"]
    seen = lines(cluster.run(*command, "bash", "-c", "echo $SLURM_LOCALID $CUDA_VISIBLE_DEVICES $SLURM_CPUS_ON_NODE"))
    assert seen == [f"{rank} 0,1,2,3 128" for rank in range(4)]


def test_tasks_take_the_gpus_in_the_sites_order(cluster: Cluster) -> None:
    """Slurm takes the words, and what it says of GPUs itself has no part in it."""
    scheduler = {"cpu_nodes": {"cpus": 256}, "gpu_nodes": {"cpus": 128, "gpus": 4}}
    site = Site.model_validate({"starter": "srun", "gpu": True, "scheduler": scheduler, "gpu_order": [3, 2, 1, 0]})
    place = Place(str(cluster.folder), str(cluster.folder), uid=0, gid=0)
    srun, *rest = launch(site, place, Geometry(gpus_per_node=4))[: -len(PYTHON)]
    shown = cluster.run(srun, *GPU, *rest, "bash", "-c", "echo $SLURM_LOCALID $CUDA_VISIBLE_DEVICES")
    assert lines(shown) == [f"{rank} 3,2,1,0" for rank in range(4)]


def test_a_finished_job_is_remembered_and_accounted_for(cluster: Cluster) -> None:
    job = cluster.submit("exit 3", *CPU, "--qos=shared")
    cluster.wait(job, "FAILED")
    command = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}", "--format=state,exitcode"]
    until("the accounting to know it", lambda: lines(cluster.run(*command)) == ["FAILED|3:0"])


@pytest.mark.slow
def test_preemption_terminates_before_it_kills(cluster: Cluster, tmp_path: Path) -> None:
    """The step hears TERM at once, again after the grace time of 10 s, and KILL after `KillWait`, 10 s more."""
    step, options = tmp_path / "step.py", [*GPU, "--qos=preempt"]
    step.write_text(STEP)
    # one that Slurm starts again, and one that asked it not to
    again = cluster.submit(f"srun {sys.executable} {step} {tmp_path}/again", *options, "--nodelist=nid001")
    ended = cluster.submit(
        f"srun {sys.executable} {step} {tmp_path}/ended", *options, "--nodelist=nid002", "--no-requeue"
    )
    for name in ["again", "ended"]:
        wait_for_text(tmp_path / name, "alive")
    other = cluster.submit("sleep 600", *GPU, "--nodelist=nid001,nid002")
    cluster.wait(other, "RUNNING")
    for name in ["again", "ended"]:
        seen = [line.split() for line in (tmp_path / name).read_text().splitlines()]
        told = [float(when) for what, when in seen if what == "TERM"]
        assert told[-1] - told[0] >= 9
        assert max(float(when) for _, when in seen) - told[-1] >= 8
    assert cluster.state(ended) == "PREEMPTED"
    cluster.wait(again, "PENDING")


@pytest.mark.slow
def test_a_failed_node_fails_its_job_and_comes_back(cluster: Cluster) -> None:
    job = cluster.submit("srun sleep 100", *GPU, "--nodelist=nid003", "--no-requeue")
    cluster.wait(job, "RUNNING")
    cluster.fail_node("nid003")
    assert "nid003" not in cluster.processes()
    cluster.wait(job, "NODE_FAIL")
    cluster.start_node("nid003")
    assert lines(cluster.run("srun", *GPU, "--nodelist=nid003", "hostname")) == ["nid003"]


@pytest.mark.slow
def test_two_clusters_and_a_crash(cluster: Cluster) -> None:
    """What a killed process leaves running is ended before the next cluster starts, and the other one is left alone."""
    code = (
        "import json, os\n"
        "from tests.cluster.cluster import Cluster\n"
        "cluster = Cluster.claim(os.getpid())\n"
        "cluster.start()\n"
        'job = cluster.submit("sleep 1000", "--account=m0000", "--constraint=cpu")\n'
        'cluster.wait(job, "RUNNING")\n'
        "print(json.dumps([cluster.id, str(cluster.folder), cluster.processes()]), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == -signal.SIGKILL, done.stderr
    name, folder, processes = json.loads(done.stdout)
    assert name != cluster.id
    assert len(processes) == 4 + len(NODES)
    assert all(slurm.started(pid) for pid in processes.values())
    slurm.sweep()
    assert not any(slurm.started(pid) for pid in processes.values())
    devices = cluster.run("ip", "-brief", "link").stdout + cluster.run("ip", "netns").stdout
    assert name not in devices
    assert cluster.id in devices
    assert [path.name for path in Path(folder).iterdir() if path.is_dir()] == ["log"]
    assert cluster.ready()


def test_starting_again_changes_nothing(cluster: Cluster) -> None:
    before = cluster.processes()
    cluster.start()
    assert cluster.processes() == before


def test_a_recycled_id_is_never_killed() -> None:
    """What is on record as started at another time is another's process."""
    another = Cluster.claim(os.getpid())
    bystander = subprocess.Popen(["sleep", "100"])
    try:
        start = slurm.started(bystander.pid)
        assert start
        another._write({"slurmctld": (bystander.pid, start - 1)})
        another.stop()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
