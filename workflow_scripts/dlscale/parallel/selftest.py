"""The self-test of several processes, before a run begins: what they exchange must be right, and how fast is it?

Values: each pair of the schedule of links exchanges a known pattern, then each collective operation is done over all
processes and over each group of the mesh, with few numbers and with many, for which libraries use other algorithms. All
results are exact: small whole numbers, which differ by rank and element. A wrong one ends the run, on all processes
alike, with the name of whoever is to blame.

Speed: the links' latency and bandwidth (`dlscale.parallel.links`), and two sums over all processes. Slow nodes,
processes and links are told in the log. No random number is drawn, and nothing of the run depends on what is found.
"""

from __future__ import annotations

import itertools
import json
import logging
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dlscale.core import ranges
from dlscale.core.errors import PeerLost
from dlscale.parallel import links
from dlscale.parallel.links import Place, named
from dlscale.parallel.mesh import AXES
from dlscale.parallel.records import AllReduce, Links
from dlscale.parallel.rendezvous import TIMEOUT
from dlscale.parallel.watchdog import connect, prefixed
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
    check: str  #: Its key in `CHECKS`; empty for a pair's messages.
    ranks: tuple[int, ...]  #: That took part.
    senders: tuple[int, ...]  #: Whose part is wrong; none where all parts were added up.
    example: str  #: The first wrong number.

    @classmethod
    def of(cls, values: Sequence[Any]) -> Wrong:
        """Return what JSON made a list of."""
        what, check, ranks, senders, example = values
        return cls(what, check, tuple(ranks), tuple(senders), example)


@dataclass(frozen=True)
class Group:
    """Ranks that do something together, as one of them sees them."""

    name: str
    handle: Any  #: Process group; None: the default one.
    ranks: tuple[int, ...]
    place: int  #: Of this rank among them.
    device: torch.device

    @property
    def own(self) -> int:
        """The rank itself."""
        return self.ranks[self.place]

    def column(self, numbers: Sequence[int]) -> torch.Tensor:
        """Return numbers one below the other."""
        return torch.tensor(numbers, device=self.device)[:, None]

    def numbers(self, count: int) -> torch.Tensor:
        """Return 0, 1, …"""
        return torch.arange(count, device=self.device)

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
    told = Told(world)
    if any(reports := [list(map(Wrong.of, report)) for report in told.all(wrong)]):
        message = verdict(world, places, reports, told)
        told.all([])  # the first rank may hold the store, and goes when the others have read it
        raise PeerLost(message)
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
        logging.info(
            "self-test: %d processes exchange right values; %s (%.1f s)",
            world.size,
            record.model_copy(update={"slow": []}).line(),
            record.seconds,
        )
        for text in record.slow:
            logging.warning("self-test: %s", text)
    return record


def per_node(places: Sequence[Place]) -> int:
    """Return how many consecutive ranks each node has; where that differs, all count as one node."""
    first = next((rank for rank, place in enumerate(places) if place.host != places[0].host), len(places))
    parts = [places[at : at + first] for at in range(0, len(places), first)]
    regular = all(len(part) == first and len({place.host for place in part}) == 1 for part in parts)
    return first if regular else len(places)


def summed_in(world: World, bytes_: int) -> AllReduce:
    """Time the sum of so many bytes over all processes."""
    ranges.advance(ranges.REHEARSAL)
    values = torch.zeros(bytes_ // 4, device=world.device)

    def seconds() -> float:
        synchronize(world.device)
        start = time.perf_counter()
        dist.all_reduce(values)
        synchronize(world.device)
        return time.perf_counter() - start

    seconds()
    (longest,) = world.max(seconds())
    samples = [seconds() for _ in range(links.samples(longest))]
    return AllReduce(bytes=bytes_, seconds=world.max(statistics.median(samples))[0])


# ---- values: couples -----------------------------------------------------------------------------------


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
                both = (min(world.rank, peer), max(world.rank, peer))
                wrong.append(Wrong(f"a message of {count:,} numbers", "", both, (peer,), example))
    return wrong


def differ(got: torch.Tensor, expected: torch.Tensor) -> str:
    """Return the first number that is wrong, in words; nothing if none is."""
    if torch.equal(got, expected):
        return ""
    at = int((got != expected).flatten().nonzero()[0])
    return f"number {at} is {float(got.flatten()[at]):g}, expected {float(expected.flatten()[at]):g}"


# ---- values: collective operations -------------------------------------------------------------------


def summands(group: Group, ranks: Sequence[int], count: int) -> torch.Tensor:
    """Return the sum of what these ranks add, float32; exact for up to 90,000 of them."""
    constant, slope = sum(rank % 61 for rank in ranks), sum(rank % 5 for rank in ranks)
    return (constant + group.numbers(count) % 31 * slope).float()


#: What was got, and what it must be; by rows, one for each sender, if parts of all were put together.
Result = tuple[torch.Tensor, torch.Tensor]


def _sum(group: Group, count: int) -> Result:
    got = summands(group, [group.own], count)
    dist.all_reduce(got, group=group.handle)
    return got, summands(group, group.ranks, count)


def _max(group: Group, count: int) -> Result:
    others = len(group.ranks)
    got = ((group.numbers(count) + group.place) % others).float()  # of each number another one has the greatest
    dist.all_reduce(got, dist.ReduceOp.MAX, group=group.handle)
    return got, torch.full_like(got, others - 1)


def _reduce_scatter(group: Group, count: int) -> Result:
    part = group.part(count)
    got = torch.empty(part, device=group.device)
    total = part * len(group.ranks)
    reduce_scatter(got, summands(group, [group.own], total), group=group.handle)
    return got, summands(group, group.ranks, total)[group.place * part : (group.place + 1) * part]


def _all_gather(group: Group, count: int) -> Result:
    part = group.part(count)
    got = torch.full((len(group.ranks) * part,), -1.0, device=group.device)
    all_gather(got, moved(group.own, part, group.device), group=group.handle)
    return got.view(-1, part), moved(group.column(group.ranks), part, group.device)


def _all_to_all(group: Group, count: int) -> Result:
    part = group.part(count)
    given = moved(group.own, part, group.device, group.column(range(len(group.ranks))))
    got = torch.full_like(given, -1.0)
    dist.all_to_all_single(got, given, group=group.handle)
    return got, moved(group.column(group.ranks), part, group.device, group.place)


def _broadcast(group: Group, count: int, root: int) -> Result:
    sender = group.ranks[root]
    got = moved(sender, count, group.device) if sender == group.own else torch.full((count,), -1.0, device=group.device)
    dist.broadcast(got, group=group.handle, group_src=root)
    return got, moved(sender, count, group.device)


#: By name: the operation, and the place of the one sender (None: all of them; sums have none that could be told).
CHECKS: dict[str, Callable[[Group, int], Result]] = {
    "all_reduce (sum)": _sum,
    "all_reduce (max)": _max,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "broadcast of the first": lambda group, count: _broadcast(group, count, 0),
    "broadcast of the last": lambda group, count: _broadcast(group, count, len(group.ranks) - 1),
}


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
    for name, check in CHECKS.items():
        if name == "all_to_all" and len(group.ranks) > EACH_TO_EACH:
            continue
        for count in (FEW, MANY):
            ranges.advance(ranges.REHEARSAL)
            got, expected = check(group, count)
            if not (example := differ(got, expected)):
                continue
            senders: tuple[int, ...] = ()
            if name.startswith("broadcast"):
                senders = (group.ranks[0 if name.endswith("first") else -1],)
            elif got.dim() > 1:
                rows = (got != expected).any(dim=1).nonzero().flatten().tolist()
                senders = tuple(group.ranks[row] for row in rows)
            what = f"{name} of {count:,} numbers over {group.name}"
            wrong.append(Wrong(what, name, group.ranks, senders, example))
    return wrong


# ---- whose fault -------------------------------------------------------------------------------------


_turns = itertools.count()


class Told:
    """What each rank has found, told through the store where they met: what they exchange otherwise may be wrong."""

    def __init__(self, world: World) -> None:
        self.world, self.store = world, connect("self-test")

    def all(self, found: Sequence[Any]) -> list[list[Any]]:
        """Return what every rank found, by rank, as JSON has it; all call this, as often as each other."""
        size, store = self.world.size, prefixed(self.store, str(next(_turns)))
        store.set(f"found/{self.world.rank}", json.dumps(found))
        store.add("some", len(found))
        if store.add("told", 1) == size:
            store.set("all", "")
        store.wait(["all"], TIMEOUT)
        if not store.add("some", 0):
            return [[]] * size
        return [json.loads(text) for text in store.multi_get([f"found/{rank}" for rank in range(size)])]


def verdict(world: World, places: Sequence[Place], reports: Sequence[Sequence[Wrong]], told: Told) -> str:
    """Return who sends or gets wrong values, from what each rank saw; all ranks ask together."""
    seen, first = next((rank, report[0]) for rank, report in enumerate(reports) if report)
    culprits, words = at_fault(reports)
    if not culprits:
        culprits = halved(world, next(wrong for report in reports for wrong in report), told)
        words = "sums are wrong with {}" + " together, and not with some of them alone" * (len(culprits) > 1)
    hosts = sorted({places[rank].host for rank in culprits})
    names = ", ".join(named(rank, places) for rank in culprits[:SHOWN]) + ", …" * (len(culprits) > SHOWN)
    return (
        f"the self-test of collective operations got wrong values: {words.format(names)}. First seen: {first.what}, "
        f"where {first.example}, by {named(seen, places)}. Memory, device or network is at fault: leave "
        f"{', '.join(hosts)} out (under Slurm: --exclude={','.join(hosts)}) and start again. `parallel: {{selftest: "
        "false}` would leave the test out, and compute with wrong values"
    )


def at_fault(reports: Sequence[Sequence[Wrong]]) -> tuple[list[int], str]:
    """Return the ranks that explain what each rank saw, and in words what they do; none if only all sums are wrong.

    What two ranks sent each other comes first: in collective operations a third one may have passed it on.
    """
    every = [(rank, wrong) for rank, report in enumerate(reports) for wrong in report]
    for seen in ([(rank, wrong) for rank, wrong in every if not wrong.check], every):
        if arrived := {(sender, rank) for rank, wrong in seen for sender in wrong.senders}:
            return _fewest(arrived)
    saw: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank, wrong in every:
        saw.setdefault((wrong.what, wrong.ranks), []).append(rank)
    few = [own for (_, ranks), own in saw.items() if 2 * len(own) <= len(ranks)]
    return (few[0], "the sums that {} got are wrong, those of the others right") if few else ([], "")


def _fewest(arrived: set[tuple[int, int]]) -> tuple[list[int], str]:
    """Return ranks of which each wrong message, from one rank to another, has one at its ends: by turns the likeliest.

    That is who has most of the messages that are left, or else sent most.
    """
    left, found, sent = set(arrived), list[int](), list[bool]()
    while left:
        ends = Counter(rank for message in left for rank in set(message))
        senders = Counter(sender for sender, _ in left)
        worst = max(ends, key=lambda rank: (ends[rank], senders[rank], -rank))
        found.append(worst)
        sent.append(2 * senders[worst] >= ends[worst])
        left = {message for message in left if worst not in message}
    others = {rank for message in arrived for rank in message} - set(found)
    what = "what {} sent is wrong" if all(sent) else "what {} got is wrong" if not any(sent) else "between {}"
    return sorted(found), f"{what}, seen with {len(others)} other process" + "es" * (len(others) != 1)


def halved(world: World, wrong: Wrong, told: Told) -> list[int]:
    """Return the fewest ranks that get wrong sums among themselves, by halves of those who did; all ranks call this."""
    suspects = list(wrong.ranks)
    while len(suspects) > 1:
        faulty = []
        for half in suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]:
            ranges.advance(ranges.REHEARSAL)
            handle, examples = dist.new_group(half), list[str]()
            if world.rank in half:
                group = Group("half", handle, tuple(half), half.index(world.rank), world.device)
                examples = [differ(*CHECKS[wrong.check](group, count)) for count in (FEW, MANY)]
            if any(told.all([example for example in examples if example])):
                faulty.append(half)
        if len(faulty) != 1:
            break
        suspects = faulty[0]
    return suspects
