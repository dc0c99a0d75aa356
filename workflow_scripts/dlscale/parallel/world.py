"""The ranks (processes) of a run: which of them this one is, and what they exchange.

A run on one device is a world of one rank, in which everything below costs nothing.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import logging
import os
import platform
import re
import signal
import socket
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dlscale.config.parallel import Limits
from dlscale.config.run import Geometry
from dlscale.core import ending
from dlscale.core.errors import PeerLost, Stopped, UserError, brief
from dlscale.core.machine import driver, too_old
from dlscale.core.ranks import MEET, ranks
from dlscale.core.records import Device
from dlscale.parallel.mesh import Mesh
from dlscale.parallel.watchdog import Watchdog, is_gone

CPU = torch.device("cpu")
Value = TypeVar("Value")

#: How long a rank waits for another before it gives up: longer than loading data or compiling takes.
TIMEOUT = dt.timedelta(minutes=30)


@dataclass(frozen=True)
class World:
    """The ranks of a run, one for each device, as one of them, this process, sees them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  #: rank on the node
    device: torch.device = CPU  #: what this process computes on
    control: Any = None  #: process group that exchanges values on the host; None: the default group does
    mesh: Mesh | None = None  #: who shares a model with whom; None: every rank has its own copy

    @property
    def main(self) -> bool:
        """Whether this is the rank that writes."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Rank among those that load different samples; ranks that share a model have the same."""
        return self.mesh.rank("dp") if self.mesh else self.rank

    @property
    def data_size(self) -> int:
        """Number of ranks that load different samples."""
        return self.mesh.size("dp") if self.mesh else self.size

    @property
    def replicas(self) -> Any:
        """Process group of the ranks that hold the same weights; None: the default group is."""
        return self.mesh.replicas if self.mesh else None

    @property
    def lead(self) -> bool:
        """Whether this is the first of the ranks that share a model."""
        return self.mesh is None or self.mesh.rank("cp") == self.mesh.rank("tp") == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Add up a tensor over all ranks of different samples, in place; every rank gets the same result.

        The sums of those who share a model differ in no more than rounding; the first one's is that of all, or they
        would decide differently.
        """
        if self.data_size > 1:
            dist.all_reduce(values, group=self.mesh.group("dp") if self.mesh else None)
        for axis in ("cp", "tp"):
            if self.mesh and self.mesh.size(axis) > 1:
                dist.broadcast(values, group=self.mesh.group(axis), group_src=0)
        return values

    def share(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give ranks of the same weights the values that the first of them has, in place; no device waits."""
        if self.size > 1 and (self.mesh is None or self.mesh.size("dp") * self.mesh.size("cp") > 1):
            for tensor in tensors:
                dist.broadcast(tensor, group=self.replicas, group_src=0)

    def max(self, *values: float) -> list[float]:
        """Return for each number the greatest of all ranks' numbers; no device waits."""
        greatest = torch.tensor(values, dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(greatest, dist.ReduceOp.MAX, group=self.control)
        return [float(value) for value in greatest]

    def gather(self, value: Value) -> list[Value]:
        """Return every rank's value, by rank."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.control)
        return values

    def barrier(self) -> None:
        """Return when every rank has come here."""
        if self.size > 1:
            dist.barrier(group=self.control)


@contextlib.contextmanager
def join(geometry: Geometry, device: str) -> Iterator[World]:
    """Join the other ranks of the run, as many as `geometry` asks for, and leave them at the end.

    `device` is `cpu`, `cuda`, or `auto`: CUDA where there is one. What cannot be had is a `UserError`.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device cuda: PyTorch sees no CUDA device here: {_why_no_cuda()}")
    kind = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if geometry.world_size == 1:
        yield World(device=torch.device(kind))
        return
    rank, size, local_rank = ranks()
    if size != geometry.world_size:
        raise UserError(
            f"geometry: this run asks for {geometry.world_size} processes ({geometry.nodes} nodes x "
            f"{geometry.gpus_per_node}), and {size} were started; start it with torchrun --nproc-per-node="
            f"{geometry.gpus_per_node}, srun --ntasks={geometry.world_size} or mpirun -n {geometry.world_size}, as the "
            "workflow does"
        )
    if local_rank != rank % geometry.gpus_per_node:
        raise UserError(
            f"geometry.gpus_per_node: process {rank} is number {local_rank} on its node, expected "
            f"{rank % geometry.gpus_per_node}: each node's {geometry.gpus_per_node} processes have consecutive ranks; "
            f"have them started so (mpirun --map-by ppr:{geometry.gpus_per_node}:node, srun --distribution=block)"
        )
    own = torch.device(kind)
    if kind == "cuda":
        # Slurm, like some launchers of MPI, may show a task its own GPU alone, or all of the node's.
        visible = torch.cuda.device_count()
        if visible < geometry.gpus_per_node and not (visible == 1 and "RANK" not in os.environ):
            raise UserError(
                f"geometry.gpus_per_node: this run asks for {geometry.gpus_per_node} GPUs a node, and PyTorch sees "
                f"{visible} here; ask for as many, or lower it"
            )
        own = torch.device("cuda", local_rank % visible)
        torch.cuda.set_device(own)
    limits = Limits.told()
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        store=_meet(geometry, rank),
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
        device_id=own if kind == "cuda" else None,
    )
    failed = False
    try:
        with contextlib.closing(Watchdog(rank, size, geometry.gpus_per_node, limits)) as watchdog:
            try:
                # NCCL only exchanges tensors on a device.
                control = dist.new_group(backend="gloo", timeout=TIMEOUT) if kind == "cuda" else None
                mesh = Mesh(geometry, kind) if geometry.model_size > 1 else None
                yield World(rank, size, local_rank, own, control, mesh)
                # On several nodes rank 0 holds the store through which all exchange: it leaves last.
                dist.barrier(group=control)
            except (Exception, SystemExit) as error:
                # Who started them asks the others to end, but not before they have said why.
                cause = error.__context__ if isinstance(error, SystemExit) else error
                if isinstance(cause, Exception) and not isinstance(cause, UserError | Stopped) and is_gone(cause):
                    logging.info("an exchange failed: %s", brief(cause))
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    lost = f"{watchdog.culprit(cause)}. This process ends with it"
                    if kind == "cuda":  # what waits on a device for the others would wait on
                        ending.end(lost, ending.LOST)
                    raise PeerLost(lost) from cause
                if isinstance(error, Exception):
                    watchdog.tell(error)
                    failed = True
                raise
    finally:
        if not (failed and kind == "cuda"):  # NCCL would wait for what the others do not do any more
            dist.destroy_process_group()


def _why_no_cuda() -> str:
    """Return why PyTorch sees no CUDA device, and what to do."""
    cuda, version = torch.version.cuda, driver()
    if cuda is None:
        return f"PyTorch {torch.__version__} computes on processors only; install one for CUDA, or use --device cpu"
    if version is None:
        return "there is no NVIDIA driver; use a machine with a GPU, or --device cpu (site.gpu: false in the workflow)"
    if old := too_old(version, cuda):
        return f"{old}; take a newer driver, CUDA's compat libraries (LD_LIBRARY_PATH), or PyTorch for an older CUDA"
    return f"the driver is {version}, for CUDA {cuda}; ask for a GPU, or see whether CUDA_VISIBLE_DEVICES hides it"


def _meet(geometry: Geometry, rank: int) -> Any:
    """Return the store through which the ranks meet, which nobody reaches by another network than theirs.

    On one node that is a file, or a port of the machine itself; on several the first rank listens at the one address
    that MASTER_ADDR stands for. PyTorch's own listens at all.
    """
    stores: Any = dist  # which names them at run time only
    if geometry.nodes == 1:
        loopback = "lo" if sys.platform == "linux" else "lo0"
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    if MEET in os.environ:
        return stores.FileStore(os.environ[MEET], geometry.world_size)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # PyTorch's torchrun, by hand: the store is in its process
        return next(stores.rendezvous("env://", rank, geometry.world_size, timeout=TIMEOUT))[0]
    _rendezvous(geometry)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    mine = _listen(address, port) if rank == 0 else None
    return stores.TCPStore(address, port, geometry.world_size, mine is not None, TIMEOUT, master_listen_fd=mine)


def _listen(address: str, port: int) -> int:
    """Return a socket that listens at this address alone."""
    where = f"site.rendezvous (MASTER_ADDR, MASTER_PORT): {address}:{port}"
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        if ipaddress.ip_address(place[0]).is_loopback and address not in (place[0], "localhost"):
            raise UserError(f"{where}: {address} is {place[0]} on this node, which no other reaches; give its address")
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        raise UserError(
            f"{where}: process 0 cannot listen there ({error.strerror}); expected an address of its node, the first, "
            "and a free port; on the second node the command needs NODE_RANK=1, on the third NODE_RANK=2"
        ) from None
    return listener.detach()


def _rendezvous(geometry: Geometry) -> None:
    """Set where the ranks meet, if whoever started them did not: on the first node of Slurm's list."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    if geometry.nodes > 1 and nodes:
        os.environ.setdefault("MASTER_ADDR", first_host(nodes))
    if geometry.nodes > 1 and "MASTER_ADDR" not in os.environ:
        raise UserError(
            "MASTER_ADDR is not set: with several nodes, give all processes the name of the first node "
            "(mpirun -x MASTER_ADDR=NAME, or env MASTER_ADDR=NAME before the command)"
        )
    if geometry.nodes == 1:
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    # Jobs that share a node, and steps of one job, need different ports.
    job, step = (os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    number = int(job) + 97 * int(step or 0) if job.isdecimal() and (step or "0").isdecimal() else os.getppid()
    os.environ.setdefault("MASTER_PORT", str(20000 + number % 20000))


def first_host(nodes: str) -> str:
    """Return the first host of a list in Slurm's notation: `nid001` of `nid[001-004,007],login1`."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    if match is None:
        raise UserError(f"SLURM_STEP_NODELIST: {nodes!r} names no host; set MASTER_ADDR to the first node's name")
    return "".join(part or "" for part in match.groups())


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe_device(device: torch.device) -> Device:
    """Return what a process computes on, for the record."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    with contextlib.suppress(OSError, StopIteration):
        if device.type != "cuda":
            lines = Path("/proc/cpuinfo").read_text().splitlines()
            name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return Device(kind=device.type, name=name or platform.machine(), threads=torch.get_num_threads())
