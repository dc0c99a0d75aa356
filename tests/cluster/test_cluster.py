"""The local cluster enforces Perlmutter's rules, on which the other cluster tests rely."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dlscale.config.run import Geometry
from dlscale.config.site import Site
from dlscale.launch.launcher import PYTHON, ContainerMounts, launch
from tests.cluster.cluster import REFUSAL, Cluster, ClusterError

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("machine")]

GPU = ["--account=m0000_g", "--constraint=gpu"]


@pytest.fixture(autouse=True)
def idle(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.cancel_all()


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


def test_tasks_take_the_gpus_in_the_sites_order(cluster: Cluster) -> None:
    """`site.gpu_order` determines the order of GPUs in each task; Slurm's own order has no effect."""
    scheduler = {"cpu_nodes": {"cpus": 256}, "gpu_nodes": {"cpus": 128, "gpus": 4}}
    site = Site.model_validate({"starter": "srun", "gpu": True, "scheduler": scheduler, "gpu_order": [3, 2, 1, 0]})
    place = ContainerMounts(str(cluster.folder), str(cluster.folder), uid=0, gid=0)
    srun, *rest = launch(site, place, Geometry(gpus_per_node=4))[: -len(PYTHON)]
    shown = cluster.run(srun, *GPU, *rest, "bash", "-c", "echo $SLURM_LOCALID $CUDA_VISIBLE_DEVICES")
    assert sorted(shown.stdout.splitlines()) == [f"{rank} 3,2,1,0" for rank in range(4)]
