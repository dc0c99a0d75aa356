"""The self-test of several processes, before a run begins: are the values right that they exchange, and how fast is it?

Values: couples exchange a known pattern, then each collective operation is done over all processes and over each group
of the mesh, with few numbers and with many, for which libraries use other algorithms. All are small whole numbers that
differ by rank and element, so that results are exact. A wrong one ends the run on all processes, with the names of
those at fault.

Speed: latency and bandwidth of links (`dlscale.parallel.links`), and two sums over all processes. Slow ones are told in
the log. No random number is drawn, and nothing of the run depends on what is found.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dlscale.core import ranges
from dlscale.core.errors import PeerLost
from dlscale.parallel import links
from dlscale.parallel.links import Place, named
from dlscale.parallel.mesh import AXES
from dlscale.parallel.records import AllReduce, Links
from dlscale.parallel.world import World, synchronize

#: Numbers of a collective operation, over all processes where each has a part: few, and many (4 MiB).
FEW, MANY = 5, 2**20

#: Larger groups do not send from each to each: that would open connections that no run uses.
EACH_TO_EACH = 64

#: Bytes of the sums that are timed: a number, and gradients (a bucket of PyTorch's; less on a CPU).
SUMS = {"cpu": (8, 2**22), "cuda": (8, 25 * 2**20)}

SHOWN = 8  #: Ranks that a message names.

#: As PyTorch calls them since 2.13, or before.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Wrong(NamedTuple):
    """A result that is wrong, as one rank saw it."""

    what: str  #: The operation.
    ranks: tuple[int, ...]  #: That took part.
    senders: tuple[int, ...]  #: Ranks whose part is wrong; none where all parts were added up.
    example: str  #: The first wrong number.
    pair: bool = False  #: Whether it is a message between two.


class Group(NamedTuple):
    """Ranks that do something together, as one of them sees them."""

    name: str
    handle: Any  #: Process group; None: the default one.
    ranks: tuple[int, ...]
    place: int  #: Of this rank among them.
    device: torch.device

    def part(self, count: int) -> int:
        """Return how many numbers each has where `count` are shared."""
        return max(1, count // len(self.ranks)) if count > FEW else count


def self_test(world: World, wanted: bool = True) -> Links | None:
    """Test what the processes exchange; return what the first one records, None if there is nothing to test.

    Raises
    ------
    PeerLost
        On every process, if any of them got a wrong number.
    """
    if world.size == 1:
        return None
    found = world.gather((links.place(), wanted))
    if not all(each for _, each in found):
        return None
    with ranges.part(ranges.REHEARSAL, ranges.REHEARSAL):
        links_found = _tested(world, [place for place, _ in found])
    if world.device.type == "cuda":  # what the run takes is measured without this
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(world.device)
    return links_found


def _tested(world: World, places: list[Place]) -> Links:
    start = time.perf_counter()
    rounds = links.schedule(world.size, per_node(places))
    wrong = exchanged(world, rounds)
    for group in groups(world):
        wrong += collected(group)
    if any(reports := world.gather(wrong)):
        world.barrier()  # the first rank may hold the store
        raise PeerLost(verdict(places, reports))
    measured, wired = links.measure(world, rounds), world.device.type == "cuda"
    if links.slow(measured, places, wired):  # a moment in which others were at work passes
        measured = links.faster(measured, links.measure(world, rounds))
    record = Links(
        backend=dist.get_backend(),
        processes=world.size,
        nodes=len({place.host for place in places}),
        levels=links.levels(measured, places),
        all_reduce=[summed_in(world, count) for count in SUMS[world.device.type]],
        slow=links.slow(measured, places, wired),
        seconds=time.perf_counter() - start,
    )
    if world.main:
        line = record.model_copy(update={"slow": []}).line()
        logging.info("self-test: %d processes exchange right values; %s (%.1f s)", world.size, line, record.seconds)
        for text in record.slow:
            logging.warning("self-test: %s", text)
    return record


def per_node(places: Sequence[Place]) -> int:
    """Return how many consecutive ranks each node has; where that differs, all count as one node."""
    counts = Counter(place.host for place in places)
    first = counts[places[0].host]
    regular = all(place.host == places[rank - rank % first].host for rank, place in enumerate(places))
    return first if regular and set(counts.values()) == {first} else len(places)


def summed_in(world: World, bytes_: int) -> AllReduce:
    """Time the sum of so many bytes over all processes."""
    ranges.advance(ranges.REHEARSAL)
    values, times = torch.zeros(bytes_ // 4, device=world.device), list[float]()
    for _ in range(1 + links.SAMPLES):  # the first makes buffers
        synchronize(world.device)
        start = time.perf_counter()
        dist.all_reduce(values)
        synchronize(world.device)
        times.append(time.perf_counter() - start)
    return AllReduce(bytes=bytes_, seconds=world.max(statistics.median(times[1:]))[0])


# ---- values --------------------------------------------------------------------------------------------


def moved(rank: Any, count: int, device: torch.device, shift: Any = 0) -> torch.Tensor:
    """Return numbers that only this rank sends, float32; whole and exact for up to 65,536 ranks.

    Of several ranks or shifts, given as a column, there are as many rows.
    """
    return (256 * rank + (torch.arange(count, device=device) + shift) % 251).float()


def exchanged(world: World, rounds: Sequence[Sequence[tuple[int, int]]]) -> list[Wrong]:
    """Have the couples of each round exchange their numbers, few and many; return what arrives wrong."""
    wrong = []
    for peer in links.partners(world, rounds):
        for count in (FEW, MANY):
            ranges.advance(ranges.REHEARSAL)
            if peer is None:
                continue
            own, other = moved(world.rank, count, world.device), torch.full((count,), -1.0, device=world.device)
            ways = [(links.send, own), (links.receive, other)]
            for way, tensor in ways if world.rank < peer else reversed(ways):
                way(tensor, peer)
            if example := differ(other, moved(peer, count, world.device)):
                wrong.append(Wrong(f"a message of {count:,} numbers", (world.rank, peer), (peer,), example, True))
    return wrong


def differ(got: torch.Tensor, expected: torch.Tensor) -> str:
    """Return the first wrong number in words, or an empty string."""
    if torch.equal(got, expected):
        return ""
    at = int((got != expected).flatten().nonzero()[0])
    return f"number {at} is {float(got.flatten()[at]):g}, expected {float(expected.flatten()[at]):g}"


def summands(group: Group, ranks: Sequence[int], count: int) -> torch.Tensor:
    """Return the sum of what these ranks add, float32; exact for up to 90,000 of them."""
    constant, slope = sum(rank % 61 for rank in ranks), sum(rank % 5 for rank in ranks)
    return (constant + torch.arange(count, device=group.device) % 31 * slope).float()


#: Numbers that were got, and the right ones; by rows, one for each sender, if parts of all were put together.
Result = tuple[torch.Tensor, torch.Tensor]


def _sum(group: Group, count: int) -> Result:
    got = summands(group, [group.ranks[group.place]], count)
    dist.all_reduce(got, group=group.handle)
    return got, summands(group, group.ranks, count)


def _max(group: Group, count: int) -> Result:
    others = len(group.ranks)
    got = ((torch.arange(count, device=group.device) + group.place) % others).float()  # each has the greatest of some
    dist.all_reduce(got, dist.ReduceOp.MAX, group=group.handle)
    return got, torch.full_like(got, others - 1)


def _reduce_scatter(group: Group, count: int) -> Result:
    part = group.part(count)
    got, total = torch.empty(part, device=group.device), part * len(group.ranks)
    reduce_scatter(got, summands(group, [group.ranks[group.place]], total), group=group.handle)
    return got, summands(group, group.ranks, total)[group.place * part : (group.place + 1) * part]


def _all_gather(group: Group, count: int) -> Result:
    part, ranks = group.part(count), torch.tensor(group.ranks, device=group.device)
    got = torch.full((len(ranks) * part,), -1.0, device=group.device)
    all_gather(got, moved(group.ranks[group.place], part, group.device), group=group.handle)
    return got.view(-1, part), moved(ranks[:, None], part, group.device)


def _all_to_all(group: Group, count: int) -> Result:
    part, ranks = group.part(count), torch.tensor(group.ranks, device=group.device)
    places = torch.arange(len(ranks), device=group.device)[:, None]
    given = moved(group.ranks[group.place], part, group.device, places)
    got = torch.full_like(given, -1.0)
    dist.all_to_all_single(got, given, group=group.handle)
    return got, moved(ranks[:, None], part, group.device, group.place)


def _broadcast(group: Group, count: int, root: int) -> Result:
    right = moved(group.ranks[root], count, group.device)
    got = right.clone() if root == group.place else torch.full((count,), -1.0, device=group.device)
    dist.broadcast(got, group=group.handle, group_src=root)
    return got[None], right[None]


def operations(group: Group) -> dict[str, tuple[Callable[[Group, int], Result], Sequence[int]]]:
    """Return the operations by name, each with the senders of its rows; sums have none that could be told."""
    last = len(group.ranks) - 1
    found: dict[str, tuple[Callable[[Group, int], Result], Sequence[int]]] = {
        "all_reduce (sum)": (_sum, ()),
        "all_reduce (max)": (_max, ()),
        "reduce_scatter": (_reduce_scatter, ()),
        "all_gather": (_all_gather, group.ranks),
        "broadcast of the first": (lambda group, count: _broadcast(group, count, 0), group.ranks[:1]),
        "broadcast of the last": (lambda group, count: _broadcast(group, count, last), group.ranks[-1:]),
    }
    return found | ({"all_to_all": (_all_to_all, group.ranks)} if last < EACH_TO_EACH else {})


def groups(world: World) -> list[Group]:
    """Return the groups that this rank is in: all, those along the axes of the mesh, those that average gradients."""
    handles: dict[str, Any] = {"all processes": None}
    if world.mesh:
        handles |= {f"each group of {axis}": world.mesh.group(axis) for axis in AXES if world.mesh.size(axis) > 1}
        if world.mesh.size("dp") > 1 and world.mesh.size("cp") > 1:
            handles["each group that has the same weights"] = world.replicas
    found = []
    for name, handle in handles.items():
        ranks = tuple(dist.get_process_group_ranks(handle)) if handle else tuple(range(world.size))
        found.append(Group(name, handle, ranks, ranks.index(world.rank), world.device))
    return found


def collected(group: Group) -> list[Wrong]:
    """Do each collective operation over a group, with few numbers and many; return what is wrong."""
    wrong = []
    for name, (operation, senders) in operations(group).items():
        for count in (FEW, MANY):
            ranges.advance(ranges.REHEARSAL)
            got, expected = operation(group, count)
            if example := differ(got, expected):
                rows = (got != expected).any(dim=1).nonzero().flatten().tolist() if senders else []
                what = f"{name} of {count:,} numbers over {group.name}"
                wrong.append(Wrong(what, group.ranks, tuple(senders[row] for row in rows), example))
    return wrong


# ---- whose fault -------------------------------------------------------------------------------------


def verdict(places: Sequence[Place], reports: Sequence[Sequence[Wrong]]) -> str:
    """Return who sends or gets wrong values, from what each rank saw."""
    seen, first = next((rank, report[0]) for rank, report in enumerate(reports) if report)
    culprits, words = at_fault(reports)
    hosts = sorted({places[rank].host for rank in culprits})
    names = ", ".join(named(rank, places) for rank in culprits[:SHOWN]) + ", …" * (len(culprits) > SHOWN)
    return (
        f"the self-test of collective operations got wrong values: {words.format(names)}. First seen: {first.what}, "
        f"where {first.example}, by {named(seen, places)}. Memory, device or network is at fault: leave "
        f"{', '.join(hosts)} out (under Slurm: --exclude={','.join(hosts)}) and start again. `parallel: {{selftest: "
        "false}` would leave the test out, and compute with wrong values"
    )


def at_fault(reports: Sequence[Sequence[Wrong]]) -> tuple[list[int], str]:
    """Return the ranks most often at the ends of wrong messages, or in groups whose sums are wrong, and that in words.

    What two ranks sent each other comes first: in collective operations a third one may have passed it on.
    """
    every = [(rank, wrong) for rank, report in enumerate(reports) for wrong in report]
    direct = [(rank, wrong) for rank, wrong in every if wrong.pair]
    messages = {(sender, rank) for rank, wrong in direct or every for sender in wrong.senders}
    if messages:
        ends = Counter(rank for message in messages for rank in {*message})
        most = [rank for rank, count in ends.items() if count == max(ends.values())]
        return sorted(most), f"{{}} at an end of {max(ends.values())} of {len(messages)} wrong messages"
    saw: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank, wrong in every:
        saw.setdefault((wrong.what, wrong.ranks), []).append(rank)
    if few := [own for (_, ranks), own in saw.items() if 2 * len(own) <= len(ranks)]:
        return few[0], "the sums that {} got are wrong, those of the others right"
    within = Counter(rank for ranks in {ranks for _, ranks in saw} for rank in ranks)
    most = [rank for rank, count in within.items() if count == max(within.values())]
    return sorted(most), "sums are wrong with {}" + " together, one of which adds wrong numbers" * (len(most) > 1)
