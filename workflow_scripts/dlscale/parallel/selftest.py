"""Self-test of several processes before a run: are the values that they exchange right, and how fast are their links?

Values: each collective operation, over all processes and over each group of the mesh, on small whole numbers whose
results are exact. A wrong one ends the run on all processes and names those at fault.

Speed: a message of n bytes takes alpha + n beta seconds (Hockney 1994, doi:10.1016/S0167-8191(06)80021-9). Couples of
processes send a small and a large message to and fro, in O(log n) rounds in which all measure at once, as in a
collective operation.
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

#: Numbers of a collective operation: few, and many (4 MiB), for which libraries use other algorithms.
FEW, MANY = 5, 2**20


#: Number of processes of a node, or nodes, up to which each measures with each other; of more, at distances 1, 2, 4, …
ALL = 8

SMALL = 8  #: Bytes of the message whose time is all latency.
LARGE = {"cpu": 2**22, "cuda": 2**24}  #: Bytes of a large one.
TRIPS = {"cpu": 1, "cuda": 5}  #: Round trips between two looks at the clock.
SAMPLES = 9  #: Size of the samples whose median counts.

SHOWN = 8  #: Processes that a message names.

#: As PyTorch calls them since 2.13, or before.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Link(NamedTuple):
    """A pair of ranks, the lower first, and the time of its messages."""

    ranks: tuple[int, int]
    alpha: float  #: s
    beta: float  #: s a byte


class Wrong(NamedTuple):
    """A wrong result, as one rank saw it."""

    what: str  #: Operation.
    ranks: tuple[int, ...]  #: Ranks that took part.
    senders: tuple[int, ...]  #: Ranks whose part is wrong; empty of sums.
    example: str  #: First wrong number.


class Group(NamedTuple):
    """Ranks that exchange together."""

    name: str
    handle: Any  #: Process group; None: the default one.
    ranks: tuple[int, ...]


def self_test(world: World, wanted: bool = True) -> Links | None:
    """Test the exchanges of all processes; return what is recorded, None if there is nothing to test.

    Raises
    ------
    PeerLost
        On every process, if any of them got a wrong number.
    """
    if world.size == 1:
        return None
    if not all(world.gather(wanted)):
        return None
    with ranges.part(ranges.REHEARSAL, ranges.REHEARSAL):
        links = _tested(world, world.gather(socket.gethostname().split(".")[0]))
    if world.device.type == "cuda":  # the run's own memory is measured without this
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(world.device)
    return links


def _tested(world: World, hosts: list[str]) -> Links:
    start = time.perf_counter()
    reports = world.gather([wrong for group in groups(world) for wrong in collected(world, group)])
    if any(reports):
        world.barrier()  # the first rank may hold the store
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
        text = "self-test: %d processes exchange right values; %s (%.1f s)"
        logging.info(text, world.size, record.line(), record.seconds)
    return record


def per_node(hosts: Sequence[str]) -> int:
    """Return the number of consecutive ranks of each node; where it differs, all count as one node."""
    counts = Counter(hosts)
    first = counts[hosts[0]]
    regular = all(host == hosts[rank - rank % first] for rank, host in enumerate(hosts))
    return first if regular and set(counts.values()) == {first} else len(hosts)


# ---- values ----------------------------------------------------------------------------------------


def groups(world: World) -> list[Group]:
    """Return the groups of this rank: all, those along the axes of the mesh, and that which averages gradients."""
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
    """Return numbers [count] that tell sender and place, float32, exact for 65,536 ranks; of ranks [R, 1] rows."""
    return (256 * rank + torch.arange(count, device=device) % 251).float()


def summands(ranks: Sequence[int], count: int, device: torch.device) -> torch.Tensor:
    """Return the sum [count] of the numbers that these ranks add, float32; exact for up to 90,000 of them."""
    constant, slope = sum(rank % 61 for rank in ranks), sum(rank % 5 for rank in ranks)
    return (constant + torch.arange(count, device=device) % 31 * slope).float()


def operations(
    world: World, group: Group, count: int
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, tuple[int, ...]]]:
    """Yield each operation's name, its result, the right one, and the senders of the result's rows; of sums none."""
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


def collected(world: World, group: Group) -> list[Wrong]:
    """Do each collective operation over a group, with few numbers and many; return the wrong results."""
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
            wrong.append(Wrong(what, group.ranks, tuple(senders[row] for row in rows), example))
    return wrong


def verdict(hosts: Sequence[str], reports: Sequence[Sequence[Wrong]]) -> str:
    """Return who sends or gets wrong values, from what each rank saw."""
    seen, first = next((rank, report[0]) for rank, report in enumerate(reports) if report)
    culprits = at_fault(reports)
    bad = sorted({hosts[rank] for rank in culprits})
    return (
        f"the self-test of collective operations got wrong values: {named(culprits, hosts)} took part in "
        f"most. First seen: {first.what}, where {first.example}, by {named([seen], hosts)}. Memory, device or network "
        f"is at fault: leave {', '.join(bad)} out (under Slurm: --exclude={','.join(bad)}) and start again. `parallel: "
        "{selftest: false}` would leave the test out, and compute with wrong values"
    )


def at_fault(reports: Sequence[Sequence[Wrong]]) -> list[int]:
    """Return the ranks most often at the ends of wrong messages, or else in wrong sums.

    Who got a wrong sum counts twice in it: others that add the same numbers may have got the right one.
    """
    every = [(rank, wrong) for rank, report in enumerate(reports) for wrong in report]
    messages = {(sender, rank) for rank, wrong in every for sender in wrong.senders}
    sums = {(rank, *wrong.ranks) for rank, wrong in every}
    counts = Counter[int]()
    for ranks in messages or sums:
        counts.update(ranks)
    return sorted(rank for rank, count in counts.items() if count == max(counts.values()))


def named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return the names of ranks in messages."""
    return ", ".join(f"process {rank} on {hosts[rank]}" for rank in ranks[:SHOWN]) + ", …" * (len(ranks) > SHOWN)


# ---- links -----------------------------------------------------------------------------------------


def schedule(size: int, per_node: int) -> list[list[tuple[int, int]]]:
    """Return the rounds of couples of ranks, the lower first: within the nodes, then between them.

    Each node has `per_node` consecutive ranks; between nodes, each has its counterpart. 4,096 ranks on nodes of four
    have 13 rounds, in 0.1 s each.
    """
    nodes, step = size // per_node, per_node
    within = [[(n * step + a, n * step + b) for n in range(nodes) for a, b in each] for each in _couples(per_node)]
    between = [[(a * step + i, b * step + i) for a, b in each for i in range(step)] for each in _couples(nodes)]
    return [*within, *between]


def _couples(count: int) -> list[list[tuple[int, int]]]:
    """Return the rounds of couples of so many units, whose numbers differ in the same bits in each round."""
    bits = max(count - 1, 0).bit_length()
    distances = range(1, 2**bits) if count <= ALL else [2**bit for bit in range(bits)]
    return [[(n, n ^ distance) for n in range(count) if n < n ^ distance < count] for distance in distances]


def exchange(way: Any, tensor: torch.Tensor, peer: int) -> None:
    """Send or receive a tensor (`way`: isend or irecv); of a device, its stream waits for that, and not the host."""
    # As a batch: NCCL then uses the connections of all ranks, and warns of nothing.
    for work in dist.batch_isend_irecv([dist.P2POp(way, tensor, peer)]):
        work.wait()


def measure(world: World, rounds: Sequence[Sequence[tuple[int, int]]]) -> list[Link]:
    """Return all links, measured in these rounds, on every rank."""
    own = []
    for couples in rounds:
        ranges.advance(ranges.REHEARSAL)
        world.barrier()  # the couples of a round measure at the same time
        peer = next((a + b - world.rank for a, b in couples if world.rank in (a, b)), None)
        if peer is not None:
            link = _measure(world, peer)
            if world.rank < peer:
                own.append(link)
    return [link for each in world.gather(own) for link in each]


def _measure(world: World, peer: int) -> Link:
    """Measure the link to another rank; of the two, the lower one's times count."""
    device, trips = world.device, TRIPS[world.device.type]
    ways = (dist.isend, dist.irecv) if world.rank < peer else (dist.irecv, dist.isend)

    def one_way(bytes_: int) -> list[float]:
        message, times = torch.zeros(bytes_, dtype=torch.uint8, device=device), list[float]()
        for _ in range(1 + SAMPLES):  # the first opens connections, and makes buffers
            synchronize(device)
            start = time.perf_counter()
            for way in ways * trips:
                exchange(way, message, peer)
            synchronize(device)
            times.append((time.perf_counter() - start) / trips / 2)
        return times[1:]

    small, large = one_way(SMALL), statistics.median(one_way(LARGE[device.type]))
    # On a busy host small messages wait for who is to wake up: the least of them is what a large one has, too.
    beta = max(large - min(small), 1e-3 * large) / LARGE[device.type]
    return Link((min(world.rank, peer), max(world.rank, peer)), statistics.median(small), beta)


def levels(links: Iterable[Link], hosts: Sequence[str]) -> list[LinkLevel]:
    """Return latency and bandwidth within nodes and between them."""
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
