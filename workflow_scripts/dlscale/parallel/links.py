"""The links between the processes of a run: couples in rounds, their latency and bandwidth, and which are slow.

A message of n bytes takes alpha + n beta seconds (Hockney 1994, doi:10.1016/S0167-8191(06)80021-9). Two processes send
a small and a large message to and fro, in rounds in which each process has one partner at most. All measure at once, as
devices talk in a collective operation. There are O(log n) rounds for n processes.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from dlscale.core import ranges
from dlscale.parallel.records import LinkLevel
from dlscale.parallel.world import World, synchronize

#: Up to so many processes of a node, or nodes, each measures with each other; of more, at distances 1, 2, 4, …
ALL = 8

SMALL = 8  #: Bytes of the message whose time is all latency.
LARGE = {"cpu": 2**22, "cuda": 2**24}  #: Bytes of a large one.
TRIPS = {"cpu": 1, "cuda": 5}  #: To and fro, between two looks at the clock: a device is not waited for in between.
SAMPLES = 9  #: Of a median.

#: A link is slow that takes so many times the median of its level,
SLOW = {"latency": 3.0, "time a byte": 1.6}
DEVIATIONS = 6.0  #: and is so many standard deviations (by the median absolute deviation) beyond it,
ENOUGH = 3  #: if its level has so many links.
SHOWN = 4  #: Processes and links that a message names.
SHARE = 8  #: Single links are told if no more than one in so many is slow: else the level is like that.

Name = Literal["node", "switch", "network"]
NAMES: tuple[Name, ...] = ("node", "switch", "network")


class Place(NamedTuple):
    """Where a process is: its host, and the switches above it, if Slurm knows them."""

    host: str
    switch: str = ""


class Link(NamedTuple):
    """A pair of ranks, the lower first, and what its messages take."""

    ranks: tuple[int, int]
    alpha: float  #: s
    beta: float  #: s a byte


def place() -> Place:
    """Return where this process is. Slurm's topology plugin names a node as `SWITCH.SWITCH.NODE`."""
    switch = os.environ.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0]
    return Place(socket.gethostname().split(".")[0], switch)


def distances(count: int) -> list[int]:
    """Return the bits in which the numbers of two units, of so many, differ in each of their rounds."""
    bits = max(count - 1, 0).bit_length()
    return list(range(1, 2**bits)) if count <= ALL else [2**bit for bit in range(bits)]


def schedule(size: int, per_node: int) -> list[list[tuple[int, int]]]:
    """Return the rounds of couples of ranks, the lower first: within the nodes, then between them.

    Between nodes each process measures with the one that has its place on the other node. Each node has `per_node`
    consecutive ranks. Of 4,096 processes on nodes of four there are 13 rounds, in 0.1 s each.
    """
    nodes = size // per_node
    within = [
        [(rank, rank ^ bits) for rank in range(per_node) if rank < rank ^ bits < per_node]
        for bits in distances(per_node)
    ]
    between = [[(n, n ^ bits) for n in range(nodes) if n < n ^ bits < nodes] for bits in distances(nodes)]
    return [
        *([(n * per_node + a, n * per_node + b) for n in range(nodes) for a, b in couples] for couples in within),
        *([(a * per_node + i, b * per_node + i) for a, b in couples for i in range(per_node)] for couples in between),
    ]


def partners(world: World, rounds: Iterable[Sequence[tuple[int, int]]]) -> list[int | None]:
    """Return with whom this rank is paired in each round."""
    return [next((a + b - world.rank for a, b in couples if world.rank in (a, b)), None) for couples in rounds]


# ---- messages ----------------------------------------------------------------------------------------


def send(tensor: torch.Tensor, peer: int) -> None:
    """Send a tensor; of a device, its stream waits for that, and not the host."""
    _exchange(dist.isend, tensor, peer)


def receive(tensor: torch.Tensor, peer: int) -> None:
    """Receive a tensor in place; of a device, its stream waits for that, and not the host."""
    _exchange(dist.irecv, tensor, peer)


def _exchange(way: Any, tensor: torch.Tensor, peer: int) -> None:
    # As a batch: NCCL then uses the connections of all ranks, and warns of nothing.
    for work in dist.batch_isend_irecv([dist.P2POp(way, tensor, peer)]):
        work.wait()


def measure(world: World, rounds: Sequence[Sequence[tuple[int, int]]]) -> list[Link]:
    """Return all links, measured in these rounds; every rank returns the same."""
    own = []
    for peer in partners(world, rounds):
        ranges.advance(ranges.REHEARSAL)
        world.barrier()  # the couples of a round measure at the same time
        if peer is not None:
            link = _measure(world, peer)
            if world.rank < peer:
                own.append(link)
    return [link for each in world.gather(own) for link in each]


def _measure(world: World, peer: int) -> Link:
    """Measure with another rank; of the two, the lower one's times count."""
    device, trips = world.device, TRIPS[world.device.type]
    ways = (send, receive) if world.rank < peer else (receive, send)

    def one_way(bytes_: int) -> list[float]:
        message, times = torch.zeros(bytes_, dtype=torch.uint8, device=device), list[float]()
        for _ in range(1 + SAMPLES):  # the first opens connections, and makes buffers
            synchronize(device)
            start = time.perf_counter()
            for way in ways * trips:
                way(message, peer)
            synchronize(device)
            times.append((time.perf_counter() - start) / trips / 2)
        return times[1:]

    small, large = one_way(SMALL), statistics.median(one_way(LARGE[device.type]))
    # On a busy host it is small messages that wait, for who is to wake up: their least is what a large one has, too.
    beta = max(large - min(small), 1e-3 * large) / LARGE[device.type]
    return Link((min(world.rank, peer), max(world.rank, peer)), statistics.median(small), beta)


def faster(first: Iterable[Link], second: Iterable[Link]) -> list[Link]:
    """Return of two measurements of the same links the better of each."""
    return [Link(a.ranks, min(a.alpha, b.alpha), min(a.beta, b.beta)) for a, b in zip(first, second, strict=True)]


# ---- judgement ---------------------------------------------------------------------------------------


def level_of(link: Link, places: Sequence[Place]) -> Name:
    """Return the level that both ends of a link have in common."""
    a, b = (places[rank] for rank in link.ranks)
    if a.host == b.host:
        return "node"
    return "switch" if a.switch and a.switch == b.switch else "network"


def levels(links: Sequence[Link], places: Sequence[Place]) -> list[LinkLevel]:
    """Return latency and bandwidth of each level, the nearest first."""
    hosts = {each.host: each.switch for each in places}
    joined = {
        "node": max(Counter(each.host for each in places).values()),
        "switch": max(Counter(switch for switch in hosts.values() if switch).values(), default=0),
        "network": len({switch or host for host, switch in hosts.items()}),  # nodes without a switch count themselves
    }
    found = []
    for name in NAMES:
        if own := [link for link in links if level_of(link, places) == name]:
            worst = max(own, key=lambda link: link.alpha + LARGE["cpu"] * link.beta)
            found.append(
                LinkLevel(
                    name=name,
                    size=joined[name],
                    links=len(own),
                    alpha=statistics.median(link.alpha for link in own),
                    beta=statistics.median(link.beta for link in own),
                    worst=worst.ranks,
                    worst_alpha=worst.alpha,
                    worst_beta=worst.beta,
                )
            )
    return found


def slow(links: Sequence[Link], places: Sequence[Place], wired: bool = True) -> list[str]:
    """Return in words which processes and links are much slower than others of their level.

    A process is to blame if all its links of a level are slow; what is left are single links.

    Parameters
    ----------
    wired
        Whether links within a node are wires, as between GPUs. Between processes of a CPU each is the same memory, and
        one that is slow by itself says no more than that a process waited for its core.
    """
    found = []
    for name in NAMES:
        level = [link for link in links if level_of(link, places) == name]
        if len(level) >= ENOUGH:
            times = {
                "latency": {link: link.alpha for link in level},
                "time a byte": {link: link.beta for link in level},
            }
            for what, values in times.items():
                found += _told(level, _late(values, SLOW[what]), places, what, wired or name != "node")
    return found


def _late(values: dict[Link, float], factor: float) -> dict[Link, float]:
    """Return how many times the median of its level each slow link takes."""
    median = statistics.median_low(values.values())
    spread = 1.4826 * statistics.median_low(abs(value - median) for value in values.values())
    limit = max(factor * median, median + DEVIATIONS * spread)
    return {link: value / median for link, value in values.items() if value > limit}


def _told(level: Sequence[Link], late: dict[Link, float], places: Sequence[Place], what: str, wires: bool) -> list[str]:
    """Return in words which processes of a level, and which single links, are slow."""
    all_, slow_ = (Counter(rank for link in some for rank in link.ranks) for some in (level, late))
    blamed = [rank for rank, count in slow_.items() if 1 < count == all_[rank]]
    found = []
    if blamed:
        ratio = statistics.median(ratio for link, ratio in late.items() if {*link.ranks} & {*blamed})
        who = ", ".join(named(rank, places) for rank in blamed[:SHOWN]) + ", …" * (len(blamed) > SHOWN)
        found.append(f"{who}: links with {ratio:.1f} times the {what} of the median of their level")
    single = sorted((link for link in late if not {*link.ranks} & {*blamed}), key=lambda link: -late[link])
    if wires and len(single) <= max(1, len(level) // SHARE):
        for link in single[:SHOWN]:
            ends = " and ".join(named(rank, places) for rank in link.ranks)
            found.append(f"the link between {ends}: {late[link]:.1f} times the {what} of the median of its level")
    return found


def named(rank: int, places: Sequence[Place]) -> str:
    """Return the name of a rank in messages."""
    return f"process {rank} on {places[rank].host}"
