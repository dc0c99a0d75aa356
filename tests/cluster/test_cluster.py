"""The cluster is what it claims to be: else the tests on it would show nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlscale.config.run import Geometry
from dlscale.config.site import Site
from dlscale.launch.launcher import PYTHON, Place, launch
from tests.cluster.cluster import CPU_NODES, GPU_NODES, REFUSAL, Cluster, ClusterError
from tests.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("machine")]

GPU = ["--account=m0000_g", "--constraint=gpu"]
CPU = ["--account=m0000", "--constraint=cpu"]


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
