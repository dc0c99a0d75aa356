"""Network between nodes: its name is read from NCCL's log, and TCP is refused on a site with a faster network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dlscale.config import resolve as config
from dlscale.config.run import Geometry
from dlscale.core.errors import UserError
from dlscale.core.machine import FABRIC
from dlscale.core.settings import read_yaml
from dlscale.launch.launcher import ContainerMounts, check, launch
from dlscale.parallel.network import VARIABLES, check_network, nccl_log, read_network
from tests.conftest import ROOT
from tests.test_launcher import site

#: Lines as NCCL prints them (2.12 with a plug-in, 2.30 without), by the network that they name.
LOGS = {
    "AWS Libfabric: efa": "n1:21:21 [0] NCCL INFO NET/OFI Selected Provider is efa (found 1 nics)\n"
    "n1:21:21 [0] NCCL INFO Using network AWS Libfabric\nNCCL version 2.12.7+cuda11.4\n",
    "AWS Libfabric: tcp": "n1:7:7 [0] NCCL INFO NET/OFI Selected provider is tcp, fabric is 10.0.0.0/8 (found 2 nics)\n"
    "n1:7:7 [0] NCCL INFO Using network AWS Libfabric\n",
    "Socket": "n1:7:7 [0] NCCL INFO NET/IB : No device found.\n"
    "n1:7:7 [0] NCCL INFO Assigned NET plugin Socket to comm\n"
    "n1:7:7 [0] NCCL INFO Using network Socket\nn1:7:7 [0] NCCL INFO [Rank 0] ncclCommInitRank comm 0x55 rank 0\n",
    "IB": "n1:7:19 [3] NCCL INFO Using network IB\n"
    "n1:7:19 [3] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0\n",
}


@pytest.mark.parametrize("name", LOGS)
def test_the_log_names_the_network(name: str) -> None:
    assert read_network(LOGS[name]) == name
    assert read_network("n1:7:7 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>") is None


def test_nccl_writes_a_log_unless_the_user_sets_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # pytest then restores the variable after the test
        monkeypatch.delenv(name)
    with nccl_log() as log:
        assert log and (os.environ["NCCL_DEBUG"], os.environ["NCCL_DEBUG_SUBSYS"]) == ("INFO", "INIT,NET")
        Path(os.environ["NCCL_DEBUG_FILE"]).write_text(LOGS["Socket"])
        assert read_network(log.read_text()) == "Socket"
    assert not VARIABLES & set(os.environ), "a child process must not write to the same log"
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    with nccl_log() as log:
        assert log is None and os.environ["NCCL_DEBUG"] == "WARN"


def test_tcp_is_refused_if_the_site_has_a_faster_network(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(FABRIC, raising=False)
    check_network("Socket")  # the site declares no network
    monkeypatch.setenv(FABRIC, "slingshot")
    check_network("AWS Libfabric: cxi")
    check_network(None, logged=False)  # the user set up the log, or NCCL is not used
    assert not caplog.records
    check_network(None)
    assert "does not name the network" in caplog.text
    for tcp in ("Socket", "AWS Libfabric: tcp", "AWS Libfabric: tcp;ofi_rxm", "AWS Libfabric: sockets"):
        with pytest.raises(UserError, match=r"site\.fabric: .* slingshot, but NCCL .* TCP .*fabric: ethernet"):
            check_network(tcp)


@pytest.mark.parametrize("engine", ["none", "shifter", "apptainer", "enroot"])
def test_ranks_on_several_nodes_know_the_sites_network(engine: str, tmp_path: Path) -> None:
    place = ContainerMounts(str(tmp_path), str(ROOT / "workflow_scripts"), 1000, 1000)
    found = {
        (fabric, nodes): f"{FABRIC}={fabric}"
        in launch(
            site(engine=engine, image="x.sif", starter="srun", fabric=fabric),
            place,
            Geometry(nodes=nodes, gpus_per_node=4),
        )
        for fabric in ("slingshot", "infiniband", "ethernet")
        for nodes in (1, 2)
    }
    assert [key for key, passed in found.items() if passed] == [("slingshot", 2), ("infiniband", 2)]


def test_podman_hpc_on_several_nodes_of_perlmutter_is_refused() -> None:
    shipped = ROOT / "profiles/perlmutter"
    podman = site(**{**read_yaml(shipped / "site.yaml"), **read_yaml(shipped / "podman.yaml")["site"]})
    check(podman, Geometry(nodes=1, gpus_per_node=4))
    with pytest.raises(UserError, match=r"geometry\.nodes: 2 nodes: .*Slingshot.*shifter or none"):
        check(podman, Geometry(nodes=2, gpus_per_node=4))
    native = site(**config.merge(read_yaml(shipped / "site.yaml"), read_yaml(shipped / "native.yaml")["site"]))
    check(native, Geometry(nodes=2, gpus_per_node=4))
    assert native.environment["FI_PROVIDER"] == "cxi"  # libfabric must not fall back to TCP
