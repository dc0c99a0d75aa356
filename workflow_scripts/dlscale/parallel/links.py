"""The links between the processes of a run: who measures with whom, how, and which links, processes, nodes are slow.

A message of n bytes takes alpha + n beta seconds (Hockney 1994, doi:10.1016/S0167-8191(06)80021-9). Two processes send
a small and a large message to and fro, in rounds in which each process has one partner at most. All measure at once, as
devices talk in a collective operation. There are O(log n) rounds for n processes.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections import Counter, defaultdict
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
PROBE = 2**18  #: Bytes of the one that tells how long a large one will take.
LARGE = {"cpu": 2**22, "cuda": 2**25}  #: Bytes of a large one, if it takes no longer than it may.
TRIPS = {"cpu": 1, "cuda": 10}  #: To and fro, between two looks at the clock: a device is not waited for in between.
SECONDS = 0.1  #: That a pair measures, about: half of it small messages, half of it large ones. A round takes as long.
SAMPLES = (3, 25)  #: Of a median: at least, and at most.

#: A link is slow that takes so many times the median of its level,
SLOW = {"latency": 3.0, "time a byte": 1.6}
DEVIATIONS = 6.0  #: and is so many standard deviations (by the median absolute deviation) beyond it,
ENOUGH = 3  #: if its level has so many links.
SHOWN = 4  #: Single slow links that are told, if no more than one in `SHARE` is slow: else the level is like that.
SHARE = 8

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
    """Measure with another rank; what the lower one of the two finds counts, which also says how often."""
    device, leads = world.device, world.rank < peer
    small, probe = (torch.zeros(count, dtype=torch.uint8, device=device) for count in (SMALL, PROBE))
    ways = (send, receive) if leads else (receive, send)

    def one_way(message: torch.Tensor, trips: int = 1) -> float:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(trips):
            for way in ways:
                way(message, peer)
        synchronize(device)
        return (time.perf_counter() - start) / trips / 2

    trips, most = TRIPS[device.type], LARGE[device.type]
    one_way(small), one_way(probe)  # connections open, buffers are made
    latency, longer = one_way(small, trips), one_way(probe, trips)
    rate = max(longer - latency, 1e-12) / PROBE
    bytes_ = int(min(most, max(PROBE, SECONDS / 2 / SAMPLES[0] / (2 * trips * rate))))
    agreed = torch.tensor([samples(2 * trips * latency), bytes_, samples(2 * trips * bytes_ * rate)], device=device)
    (send if leads else receive)(agreed, peer)
    count, bytes_, large_count = agreed.tolist()
    large = torch.zeros(bytes_, dtype=torch.uint8, device=device)
    times = [one_way(small, trips) for _ in range(count)]
    one_way(large)
    whole = statistics.median(one_way(large, trips) for _ in range(large_count))
    # On a busy host it is small messages that wait, for who is to wake up: their least is what a large one has, too.
    beta = max(whole - min(times), 1e-3 * whole) / bytes_
    return Link((min(world.rank, peer), max(world.rank, peer)), statistics.median(times), beta)


def samples(seconds: float) -> int:
    """Return how many times to measure what takes so long."""
    least, most = SAMPLES
    return int(min(max(SECONDS / 2 / max(seconds, 1e-9), least), most))


def faster(first: Iterable[Link], second: Iterable[Link]) -> list[Link]:
    """Return of two measurements of the same links the better of each."""
    return [Link(a.ranks, min(a.alpha, b.alpha), min(a.beta, b.beta)) for a, b in zip(first, second, strict=True)]


# ---- judgement ---------------------------------------------------------------------------------------


def level_of(link: Link, places: Sequence[Place]) -> Name:
    """Return what both ends of a link have in common."""
    a, b = (places[rank] for rank in link.ranks)
    if a.host == b.host:
        return "node"
    return "switch" if a.switch and a.switch == b.switch else "network"


def levels(links: Sequence[Link], places: Sequence[Place]) -> list[LinkLevel]:
    """Return what the links of each level are like, the nearest level first."""
    found = []
    hosts, processes = {each.host: each.switch for each in places}, Counter(each.host for each in places)
    for name in NAMES:
        own = [link for link in links if level_of(link, places) == name]
        if not own:
            continue
        if name == "node":
            size = max(processes.values())
        elif name == "switch":
            size = max(Counter(switch for switch in hosts.values() if switch).values())
        else:  # nodes without a switch count for themselves
            size = len({switch or host for host, switch in hosts.items()})
        worst = max(own, key=lambda link: link.alpha + LARGE["cpu"] * link.beta)
        found.append(
            LinkLevel(
                name=name,
                size=size,
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
    """Return in words which nodes, processes and links are much slower than others of their level.

    A node is to blame if all its links to other nodes are slow, or all those between its own processes; a process if
    all its links are; what is left are single links.

    Parameters
    ----------
    wired
        Whether links within a node are wires, as between GPUs. Between processes of a CPU each is the same memory, and
        one that is slow by itself says no more than that a process waited for its core.
    """
    found = []
    for what, values in (
        ("latency", {link: link.alpha for link in links}),
        ("time a byte", {link: link.beta for link in links}),
    ):
        ratios = dict[Link, float]()
        for name in NAMES:
            ratios |= _ratios({link: v for link, v in values.items() if level_of(link, places) == name}, SLOW[what])
        bad, explained = {link for link, ratio in ratios.items() if ratio > 1}, set[Link]()
        for title, own in _suspects(ratios, places) if bad else ():
            if len(own) > 1 and own <= bad and not own <= explained:
                explained |= own
                found.append(f"{title} {_times(statistics.median(ratios[link] for link in own), what)}")
        single = {link for link in bad - explained if wired or level_of(link, places) != "node"}
        rest = sorted(single, key=lambda link: -ratios[link])
        if len(rest) <= max(1, len(ratios) // SHARE):
            for link in rest[:SHOWN]:
                ends = " and ".join(named(rank, places) for rank in link.ranks)
                found.append(f"the link between {ends} {_times(ratios[link], what, 'has')}")
    return found


def _ratios(values: dict[Link, float], factor: float) -> dict[Link, float]:
    """Return how many times the median each link of a level takes, 1 if that is not slow; none if they are too few."""
    median = statistics.median_low(values.values()) if len(values) >= ENOUGH else 0.0
    if median <= 0:
        return {}
    spread = 1.4826 * statistics.median_low(abs(value - median) for value in values.values())
    limit = max(factor * median, median + DEVIATIONS * spread)
    return {link: value / median if value > limit else 1.0 for link, value in values.items()}


def _suspects(links: Iterable[Link], places: Sequence[Place]) -> list[tuple[str, set[Link]]]:
    """Return who may be to blame, and for which links: nodes, then processes."""
    between, within, own = (defaultdict[Any, set[Link]](set) for _ in range(3))
    for link in links:
        hosts = {places[rank].host for rank in link.ranks}
        for host in hosts:
            (within if len(hosts) == 1 else between)[host].add(link)
        for rank in link.ranks:
            own[rank].add(link)
    return [
        *((f"node {host}: its links to other nodes", found) for host, found in between.items()),
        *((f"node {host}: the links within it", found) for host, found in within.items()),
        *((f"{named(rank, places)}: its links", found) for rank, found in own.items()),
    ]


def _times(ratio: float, what: str, has: str = "have") -> str:
    return f"{has} {ratio:.1f} times the {what} of the median of {'their' if has == 'have' else 'its'} level"


def named(rank: int, places: Sequence[Place]) -> str:
    """Return what messages call a rank."""
    return f"process {rank} on {places[rank].host}"
