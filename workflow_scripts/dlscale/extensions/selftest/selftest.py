"""Self-test of a run's processes: check the values that they exchange, and measure their links.

Values: each collective operation runs over all processes and over each group of the mesh, on small integers, so
that results are exact. A wrong result ends the run on all processes, with a message that names the processes at fault.

Speed: a message of n bytes takes alpha + n beta seconds (Hockney 1994, doi:10.1016/S0167-8191(06)80021-9). Pairs of
processes send a small and a large message to and fro, in O(log n) rounds. All pairs of a round send at the same time,
as in a collective operation.
"""

from __future__ import annotations

import logging
import socket
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from dlscale.core import ranges
from dlscale.core.errors import PeerLost
from dlscale.parallel.records import LinkLevel, Links
from dlscale.parallel.world import AXES, World, synchronize

#: Numbers per tensor in a small and in a large (4 MiB) collective operation: libraries use different algorithms for
#: small and large tensors.
FEW, MANY = 5, 2**20


#: Maximum number of processes per node, or of nodes, for which all pairs are measured. For larger numbers, only pairs
#: at distances 1, 2, 4, … are measured.
ALL = 8

SMALL = 8  #: Bytes of the small message, whose time is only latency.
LARGE = {"cpu": 2**22, "cuda": 2**24}  #: Bytes of the large message, by kind of device.
TRIPS = {"cpu": 1, "cuda": 5}  #: Round trips per time measurement, by kind of device.
SAMPLES = 9  #: Number of time measurements; their median counts.

SHOWN = 8  #: Maximum number of processes that a message names.

#: Collective operations by their names since PyTorch 2.13, or by their older names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Link(NamedTuple):
    """Pair of ranks (lower rank first), and the times of messages between them."""

    ranks: tuple[int, int]
    alpha: float  #: latency, s
    beta: float  #: time per byte, s


class BadResult(NamedTuple):
    """Wrong result of a collective operation on one rank."""

    what: str  #: Operation, size of the tensor and group, in words.
    ranks: tuple[int, ...]  #: Ranks that took part in the operation.
    senders: tuple[int, ...]  #: Ranks that sent a wrong part; empty for sums.
    example: str  #: First wrong number, and the expected number, in words.


class Group(NamedTuple):
    """Group of ranks that exchange values."""

    name: str
    handle: Any  #: PyTorch's process group; None for the default group.
    ranks: tuple[int, ...]


def self_test(world: World, wanted: bool = True) -> Links | None:
    """Test the exchanges of all processes, and return the measured links.

    Return None if the run has one process, or if `wanted` is false on any process.

    Raises
    ------
    PeerLost
        If any process received a wrong number. Every process raises this error.
    """
    if world.size == 1:
        return None
    if not all(world.gather(wanted)):
        return None
    with ranges.part(ranges.REHEARSAL, ranges.REHEARSAL):
        links = _tested(world, world.gather(socket.gethostname().split(".")[0]))
    if world.device.type == "cuda":  # the memory of the test must not count in the run's measurement
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(world.device)
    return links


def _tested(world: World, hosts: list[str]) -> Links:
    start = time.perf_counter()
    reports = world.gather([wrong for group in groups(world) for wrong in collected(world, group)])
    if any(reports):
        world.barrier()  # rank 0 may host the store, so rank 0 must not end before all ranks have the reports
        raise PeerLost(verdict(hosts, reports))
    links = measure(world, schedule(world.size, per_node(hosts)))
    record = Links(
        backend=dist.get_backend(),
        processes=world.size,
        nodes=len({*hosts}),
        levels=levels(links, hosts),
        seconds=time.perf_counter() - start,
    )
    if world.main:
        text = "self-test: %d processes exchange correct values; %s (%.1f s)"
        logging.info(text, world.size, record.line(), record.seconds)
    return record


def per_node(hosts: Sequence[str]) -> int:
    """Return the number of consecutive ranks per node.

    If nodes have different numbers of ranks, or ranks that are not consecutive, all ranks count as one node.
    """
    counts = Counter(hosts)
    first = counts[hosts[0]]
    regular = all(host == hosts[rank - rank % first] for rank, host in enumerate(hosts))
    return first if regular and set(counts.values()) == {first} else len(hosts)


# ---- values ----------------------------------------------------------------------------------------


def groups(world: World) -> list[Group]:
    """Return the groups of this rank: all ranks, its group along each mesh axis, and the ranks with the same weights.

    Axes of size 1 are left out. The last group is left out if it equals an axis's group.
    """
    handles: dict[str, Any] = {"all processes": None}
    if world.mesh:
        handles |= {f"each group of {axis}": world.mesh.group(axis) for axis in AXES if world.mesh.size(axis) > 1}
        if world.mesh.size("dp") > 1 and world.mesh.size("cp") > 1:
            handles["each group that has the same weights"] = world.replicas
    return [
        Group(name, handle, tuple(dist.get_process_group_ranks(handle) if handle else range(world.size)))
        for name, handle in handles.items()
    ]


def moved(rank: Any, count: int, device: torch.device) -> torch.Tensor:
    """Return numbers [count], float32, that encode sender and position.

    For ranks [R, 1], the result has the shape [R, count]. The numbers are exact for up to 65,536 ranks.
    """
    return (256 * rank + torch.arange(count, device=device) % 251).float()


def summands(ranks: Sequence[int], count: int, device: torch.device) -> torch.Tensor:
    """Return the sum [count], float32, of these ranks' test numbers; exact for up to 90,000 ranks."""
    constant, slope = sum(rank % 61 for rank in ranks), sum(rank % 5 for rank in ranks)
    return (constant + torch.arange(count, device=device) % 31 * slope).float()


def operations(
    world: World, group: Group, count: int
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, tuple[int, ...]]]:
    """Yield name, result, expected result and senders of each operation.

    Senders are the ranks that sent the rows of the result; empty for sums.
    """
    device, ranks, at = world.device, group.ranks, group.ranks.index(world.rank)
    part = max(1, count // len(ranks)) if count > FEW else count
    own, total = (summands(some, part * len(ranks), device) for some in ([world.rank], ranks))
    got = own.clone()
    dist.all_reduce(got, group=group.handle)
    yield "all_reduce", got, total, ()
    got = torch.empty(part, device=device)
    reduce_scatter(got, own, group=group.handle)
    yield "reduce_scatter", got, total[at * part : (at + 1) * part], ()
    right = moved(torch.tensor(ranks, device=device)[:, None], part, device)
    got = torch.full_like(right, -1.0)
    all_gather(got.view(-1), moved(world.rank, part, device), group=group.handle)
    yield "all_gather", got, right, ranks
    got = right[:1].clone() if at == 0 else torch.full_like(right[:1], -1.0)
    dist.broadcast(got, group=group.handle, group_src=0)
    yield "broadcast", got, right[:1], ranks[:1]


def collected(world: World, group: Group) -> list[BadResult]:
    """Run each collective operation over a group, with small and large tensors; return the wrong results."""
    wrong = []
    for count in (FEW, MANY):
        ranges.advance(ranges.REHEARSAL)
        for name, got, right, senders in operations(world, group, count):
            if torch.equal(got, right):
                continue
            rows = (got != right).any(dim=1).nonzero().flatten().tolist() if senders else []
            at = int((got != right).flatten().nonzero()[0])
            example = f"number {at} is {float(got.flatten()[at]):g}, expected {float(right.flatten()[at]):g}"
            what = f"{name} of {count:,} numbers over {group.name}"
            wrong.append(BadResult(what, group.ranks, tuple(senders[row] for row in rows), example))
    return wrong


def verdict(hosts: Sequence[str], reports: Sequence[Sequence[BadResult]]) -> str:
    """Return the message that names the processes with wrong values, from the reports of all ranks."""
    seen, first = next((rank, report[0]) for rank, report in enumerate(reports) if report)
    culprits = suspect_ranks(reports)
    bad = sorted({hosts[rank] for rank in culprits})
    return (
        f"the self-test of collective operations found wrong values: {named(culprits, hosts)} took part in "
        f"most of them. First: {first.what}, in which {first.example}, on {named([seen], hosts)}. Memory, device or "
        f"network is at fault: exclude {', '.join(bad)} (Slurm: --exclude={','.join(bad)}) and start again. `parallel: "
        "{selftest: false}` would skip the test and compute with wrong values"
    )


def suspect_ranks(reports: Sequence[Sequence[BadResult]]) -> list[int]:
    """Return the ranks that took part in the largest number of wrong messages, or else of wrong sums.

    A rank that received a wrong sum counts twice, because other ranks may have received the right sum of the same
    numbers.
    """
    every = [(rank, wrong) for rank, report in enumerate(reports) for wrong in report]
    messages = {(sender, rank) for rank, wrong in every for sender in wrong.senders}
    sums = {(rank, *wrong.ranks) for rank, wrong in every}
    counts = Counter[int]()
    for ranks in messages or sums:
        counts.update(ranks)
    return sorted(rank for rank, count in counts.items() if count == max(counts.values()))


def named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return processes and their hosts as text for a message."""
    return ", ".join(f"process {rank} on {hosts[rank]}" for rank in ranks[:SHOWN]) + ", …" * (len(ranks) > SHOWN)


# ---- links -----------------------------------------------------------------------------------------


def schedule(size: int, per_node: int) -> list[list[tuple[int, int]]]:
    """Return the rounds of the measurement, each a list of rank pairs (lower rank first).

    Rounds within nodes precede rounds between nodes. Each node has `per_node` consecutive ranks. Between nodes, each
    rank is paired with the rank at the same position of the other node. 4,096 ranks on nodes with four ranks each need
    13 rounds of 0.1 s.
    """
    nodes, step = size // per_node, per_node
    within = [[(n * step + a, n * step + b) for n in range(nodes) for a, b in each] for each in _couples(per_node)]
    between = [[(a * step + i, b * step + i) for a, b in each for i in range(step)] for each in _couples(nodes)]
    return [*within, *between]


def _couples(count: int) -> list[list[tuple[int, int]]]:
    """Pair `count` ranks or nodes in rounds: in a round, the numbers of each pair differ in the same bits."""
    bits = max(count - 1, 0).bit_length()
    distances = range(1, 2**bits) if count <= ALL else [2**bit for bit in range(bits)]
    return [[(n, n ^ distance) for n in range(count) if n < n ^ distance < count] for distance in distances]


def exchange(way: Any, tensor: torch.Tensor, peer: int) -> None:
    """Send or receive a tensor; `way` is `isend` or `irecv`.

    On a GPU, the stream waits for the exchange, but the host does not wait.
    """
    # In a batch, NCCL uses the group's connections. A single `isend` would open a new connection, and print a warning.
    for work in dist.batch_isend_irecv([dist.P2POp(way, tensor, peer)]):
        work.wait()


def measure(world: World, rounds: Sequence[Sequence[tuple[int, int]]]) -> list[Link]:
    """Measure the link of each pair, round by round, and return all links on every rank."""
    own = []
    for couples in rounds:
        ranges.advance(ranges.REHEARSAL)
        world.barrier()  # the pairs of a round measure at the same time
        peer = next((a + b - world.rank for a, b in couples if world.rank in (a, b)), None)
        if peer is not None:
            link = _measure(world, peer)
            if world.rank < peer:
                own.append(link)
    return [link for each in world.gather(own) for link in each]


def _measure(world: World, peer: int) -> Link:
    """Measure the link to another rank; the caller keeps only the measurement of the lower rank."""
    device, trips = world.device, TRIPS[world.device.type]
    ways = (dist.isend, dist.irecv) if world.rank < peer else (dist.irecv, dist.isend)

    def one_way(bytes_: int) -> list[float]:
        message, times = torch.zeros(bytes_, dtype=torch.uint8, device=device), list[float]()
        for _ in range(1 + SAMPLES):  # the first measurement opens connections and allocates buffers
            synchronize(device)
            start = time.perf_counter()
            for way in ways * trips:
                exchange(way, message, peer)
            synchronize(device)
            times.append((time.perf_counter() - start) / trips / 2)
        return times[1:]

    small, large = one_way(SMALL), statistics.median(one_way(LARGE[device.type]))
    # On a busy host, small messages wait until the peer wakes up. The latency within a large message is
    # therefore estimated by the fastest small message, not by the median.
    beta = max(large - min(small), 1e-3 * large) / LARGE[device.type]
    return Link((min(world.rank, peer), max(world.rank, peer)), statistics.median(small), beta)


def levels(links: Iterable[Link], hosts: Sequence[str]) -> list[LinkLevel]:
    """Return latency and bandwidth within nodes and between nodes."""
    within: list[Link] = []
    between: list[Link] = []
    for link in links:
        a, b = link.ranks
        (within if hosts[a] == hosts[b] else between).append(link)
    counts = Counter(hosts)
    found = []
    if within:
        found.append(_level("node", max(counts.values()), within))
    if between:
        found.append(_level("network", len(counts), between))
    return found


def _level(name: Literal["node", "network"], size: int, links: Sequence[Link]) -> LinkLevel:
    return LinkLevel(
        name=name,
        size=size,
        links=len(links),
        alpha=statistics.median(link.alpha for link in links),
        beta=statistics.median(link.beta for link in links),
    )
