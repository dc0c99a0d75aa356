"""Rendezvous of a run's ranks, and the end of runs that lost a rank."""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import logging
import os
import re
import signal
import socket
from collections.abc import Iterator
from typing import Any

import psutil
import torch
import torch.distributed as dist

from dlscale.config.run import Geometry
from dlscale.config.site import Limits
from dlscale.core.errors import PeerLost, Stopped, UserError, brief
from dlscale.core.machine import HOST_SUFFIX, processor
from dlscale.core.process import LOST, MEET, end, ranks
from dlscale.parallel.network import check_network, nccl_log, read_network
from dlscale.parallel.records import Device
from dlscale.parallel.watchdog import Watchdog, is_gone
from dlscale.parallel.world import Mesh, World

#: Timeout of an exchange between ranks: longer than loading data or compiling takes.
TIMEOUT = dt.timedelta(minutes=30)


@contextlib.contextmanager
def join(geometry: Geometry, device: str) -> Iterator[World]:
    """Join the other ranks of the run for the duration of this context.

    `device` is `cpu`, `cuda` or `auto` (CUDA if PyTorch sees a device).
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "--device cuda: PyTorch sees no CUDA device here. Use a machine with a GPU, or --device cpu (in the "
            "workflow: site.gpu: false). `dlscale doctor` looks for the reason"
        )
    kind = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    limits = Limits.from_environment()
    if geometry.world_size == 1:
        with contextlib.closing(Watchdog(limits=limits)):
            yield World(device=torch.device(kind))
        return
    rank, size, local_rank = ranks()
    own = _device(geometry, kind, rank, size, local_rank)
    patience = dt.timedelta(seconds=limits.between) if limits else TIMEOUT
    # PyTorch waits in C++, where Python's handler does not run. Let Ctrl-C end the process, unless Ctrl-C is ignored.
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.SIG_DFL)
    store, names = _meet(geometry, rank, patience), {each: f"started/{each}" for each in range(size)}
    # Each process reports its start. A process that hangs earlier has no heartbeat, and PyTorch would wait for half an
    # hour without naming the process.
    store.set(names[rank], "")
    try:
        store.wait([*names.values()], patience)
    except RuntimeError as error:
        raise PeerLost(
            f"process {', '.join(str(each) for each, name in names.items() if not store.check([name]))} of {size} did "
            f"not join in {patience.total_seconds():g} s{' (site.watchdog.between)' if limits else ''}: it "
            "hangs, was stopped, or is slow to start. This process also ends"
        ) from error
    signal.signal(signal.SIGINT, on_interrupt)
    with nccl_log() if kind == "cuda" and geometry.nodes > 1 else contextlib.nullcontext() as log:
        dist.init_process_group(
            "nccl" if kind == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=TIMEOUT,
            device_id=own if kind == "cuda" else None,  # so that NCCL connects here, not in the first exchange
        )
        network = read_network(log.read_text(errors="replace")) if log else None
    failed = False
    try:
        with contextlib.closing(Watchdog(rank, size, geometry.gpus_per_node, limits)) as watchdog:
            try:
                # NCCL exchanges only tensors on GPUs: values on the host need a gloo group.
                control = dist.new_group(backend="gloo", timeout=TIMEOUT) if kind == "cuda" else None
                check_network(network, logged=log is not None)
                mesh = Mesh(geometry, kind) if geometry.model_size > 1 else None
                yield World(rank, size, local_rank, own, control, mesh, network)
                # On several nodes, rank 0 hosts the store, which other ranks still use, so rank 0 must leave last.
                dist.barrier(group=control)
            except (Exception, SystemExit) as error:
                # The launcher sends SIGTERM to the remaining ranks: ignore this signal until the cause is reported.
                cause = error.__context__ if isinstance(error, SystemExit) else error
                if isinstance(cause, Exception) and not isinstance(cause, UserError | Stopped) and is_gone(cause):
                    logging.info("an exchange failed: %s", brief(cause))
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    lost = f"{watchdog.describe_lost_rank(cause)}. This process also ends"
                    if kind == "cuda":  # kernels that wait for other ranks would never end
                        end(lost, LOST)
                    raise PeerLost(lost) from cause
                if isinstance(error, Exception):
                    watchdog.report_failure(error)
                    failed = True
                raise
    finally:
        if not (failed and kind == "cuda"):  # NCCL would wait for exchanges that the other ranks no longer begin
            dist.destroy_process_group()


def _device(geometry: Geometry, kind: str, rank: int, size: int, local_rank: int) -> torch.device:
    """Return this process's device.

    Raise `UserError` if processes or visible GPUs do not match the geometry.
    """
    per_node = geometry.gpus_per_node
    if size != geometry.world_size:
        raise UserError(
            f"geometry: this run needs {geometry.world_size} processes ({geometry.nodes} nodes x {per_node}), but "
            f"{size} were started. Start them with torchrun --nnodes={geometry.nodes} --nproc-per-node="
            f"{per_node}, srun --nodes={geometry.nodes} --ntasks-per-node={per_node} or mpirun -n {geometry.world_size}"
        )
    if local_rank != rank % per_node:
        raise UserError(
            f"geometry.gpus_per_node: process {rank} is number {local_rank} on its node, expected {rank % per_node}: "
            f"the {per_node} processes of a node need consecutive ranks. Start them with "
            f"mpirun --map-by ppr:{per_node}:node or srun --distribution=block"
        )
    if kind != "cuda":
        return torch.device(kind)
    # Slurm and some MPI launchers may show a task only its own GPU, or all GPUs of the node.
    visible = torch.cuda.device_count()
    if visible < per_node and not (visible == 1 and "RANK" not in os.environ):
        raise UserError(
            f"geometry.gpus_per_node: this run needs {per_node} GPUs per node, but PyTorch sees {visible} here. "
            "Request more GPUs, or lower this key"
        )
    own = torch.device("cuda", local_rank % visible)
    torch.cuda.set_device(own)
    return own


def _meet(geometry: Geometry, rank: int, patience: dt.timedelta) -> Any:
    """Return the key-value store through which the ranks meet within the time `patience`.

    If a user started torchrun, torchrun's process hosts the store. Otherwise, on one node, the store is a file, or rank
    0 listens at a port of the loopback interface. On several nodes, rank 0 listens only at MASTER_ADDR, because PyTorch
    would listen at all addresses.
    """
    stores: Any = dist  # PyTorch defines the stores at run time only
    if geometry.nodes == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if MEET in os.environ:
        return stores.FileStore(os.environ[MEET], geometry.world_size)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # set by torchrun
        return next(stores.rendezvous("env://", rank, geometry.world_size, timeout=patience))[0]
    _rendezvous(geometry)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if geometry.nodes > 1 and "GLOO_SOCKET_IFNAME" not in os.environ and (interface := _interface_to(address)):
        # By default, Gloo uses the address of this node's host name, which may be in another network.
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    if rank == 0 and geometry.nodes > 1:
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "its default interface")
        logging.info("ranks meet at %s:%d; gloo uses %s", address, port, interface)
    try:
        return stores.TCPStore(
            *(address, port, geometry.world_size, rank == 0, patience),
            master_listen_fd=_listen(address, port) if rank == 0 else None,
        )
    except dist.DistError as error:
        raise PeerLost(
            f"not all of the run's {geometry.world_size} processes connected to {address}:{port} ({brief(error)}). "
            "Start the same command on all nodes, and check that they can reach the first node. This process ends"
        ) from error


def _listen(address: str, port: int) -> int:
    """Return the descriptor of a socket that listens only at this address."""
    where = f"site.rendezvous (MASTER_ADDR, MASTER_PORT): {address}:{port}"
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        if ipaddress.ip_address(place[0]).is_loopback and address not in (place[0], "localhost"):
            raise UserError(
                f"{where}: {address} is {place[0]} on this node: other nodes cannot reach this loopback address. "
                "Use this node's address in the network"
            )
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        raise UserError(
            f"{where}: process 0 cannot listen there ({error.strerror}); expected an address of the first node and a "
            "free port. If this is not the first node, set its number: NODE_RANK=1 on the second node, and so on"
        ) from None
    return listener.detach()


def _interface_to(address: str) -> str | None:
    """Return the network interface through which this node reaches an address; None if the interface is unknown."""
    with contextlib.suppress(OSError):
        family, _, _, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends no data, but selects the local address
            mine = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if any(each.family == family and each.address.partition("%")[0] == mine for each in addresses):
                return name
    return None


def _rendezvous(geometry: Geometry) -> None:
    """Set MASTER_ADDR and MASTER_PORT if the launcher did not set them.

    On several nodes, the address is the first node of Slurm's list. On one node, the address is always 127.0.0.1, even
    if the launcher set another address. The port depends on the numbers of the Slurm job and step, or else of the
    parent process.
    """
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    if geometry.nodes > 1 and nodes:
        os.environ.setdefault("MASTER_ADDR", first_host(nodes) + os.environ.get(HOST_SUFFIX, ""))
    # Jobs that share a node, and steps of one job, need different ports.
    job, step = (os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    known = job.isdecimal() and (step or "0").isdecimal()
    # Without a Slurm job, each node would choose a different port.
    if geometry.nodes > 1 and (
        missing := [n for n in ("MASTER_ADDR", *["MASTER_PORT"] * (not known)) if n not in os.environ]
    ):
        raise UserError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set: on several nodes, all "
            "processes need the name of the first node and, without a Slurm job, a port that is free on the first "
            "node (mpirun -x MASTER_ADDR=NAME -x MASTER_PORT=PORT, or env MASTER_ADDR=NAME MASTER_PORT=PORT before the "
            "command)"
        )
    if geometry.nodes == 1:
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ.setdefault(
        "MASTER_PORT", str(20000 + (int(job) + 97 * int(step or 0) if known else os.getppid()) % 20000)
    )


def first_host(nodes: str) -> str:
    """Return the first host of a list in Slurm's notation: `nid001` for `nid[001-004,007],login1`."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    if match is None:
        raise UserError(f"Slurm's list of nodes, {nodes!r}, names no host. Set MASTER_ADDR to the first node's name")
    return "".join(part or "" for part in match.groups())


def describe_device(world: World) -> Device:
    """Return the record of a process's device."""
    device = world.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    return Device(kind=device.type, name=name, threads=torch.get_num_threads(), network=world.network)
