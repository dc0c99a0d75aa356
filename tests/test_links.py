"""Self-test of several processes: correct values pass, wrong values end all processes, and links are measured."""

from __future__ import annotations

import contextlib
import faulthandler
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlscale.config.run import Geometry
from dlscale.core import ranges
from dlscale.core.errors import PeerLost
from dlscale.core.process import LOST
from dlscale.extensions.selftest import selftest
from dlscale.extensions.selftest.selftest import BadResult, Link, self_test, suspect_ranks
from dlscale.parallel.records import Links
from dlscale.parallel.rendezvous import join
from dlscale.parallel.world import Mesh, World
from dlscale.train.provenance import Provenance
from tests.conftest import ROOT
from tests.ranks import spawn
from tests.test_ddp import as_rank
from tests.test_parallel import configure, train_by
from tests.test_starters import environment, free_port
from tests.waiting import PATIENCE

# ---- pairs of ranks that measure a link -----------------------------------------------------------


NODES, PER_NODE = (*range(1, 20), 63, 64, 65, 1000, 1024), (1, 2, 3, 4, 5, 6, 8, 12, 128, 4096)


@pytest.mark.parametrize(
    ("size", "per_node"), [(n * each, each) for n in NODES for each in PER_NODE if 1 < n * each <= 4096]
)
def test_a_schedule_pairs_all_ranks_in_few_rounds(size: int, per_node: int) -> None:
    rounds = selftest.schedule(size, per_node)
    everybody, pairs = set[int](), list[tuple[int, int]]()
    for each in rounds:
        ranks = [rank for pair in each for rank in pair]
        assert each and len(set(ranks)) == len(ranks), "a rank must be in one pair per round at most"
        assert all(0 <= a < b < size for a, b in each)
        # The pairs of a round are all within nodes, or all between nodes.
        assert len({a // per_node == b // per_node for a, b in each}) == 1
        everybody |= set(ranks)
        pairs += each
    assert everybody == set(range(size))
    assert len(set(pairs)) == len(pairs), "no pair may measure twice"
    assert len(rounds) <= max(7, (per_node - 1).bit_length()) + max(7, (size // per_node - 1).bit_length())
    if size <= selftest.ALL and per_node in (1, size):
        assert len(pairs) == size * (size - 1) // 2, "few ranks, on one node or one per node, must measure each pair"


def test_nodes_are_seen_by_their_hosts() -> None:
    per_node = selftest.per_node
    assert [per_node(hosts) for hosts in ("a", "aaaa", "aabb", "abcd", "aaabbb")] == [1, 4, 2, 1, 3]
    assert [per_node(hosts) for hosts in ("aabbb", "aab", "abab", "aabbaa")] == [5, 3, 4, 6], (
        "ranks must count as one node if hosts have unequal numbers of ranks, or ranks that are not consecutive"
    )


# ---- the faulty process -----------------------------------------------------------------------------


def test_links_are_grouped_by_the_shared_level() -> None:
    hosts = [f"nid{rank // 2}" for rank in range(16)]
    links = [
        *(Link((0, 1), 3e-6, 3e-12), Link((2, 3), 3e-6, 3e-12)),
        *(Link((0, 2), 1e-5, 1e-11), Link((1, 3), 2e-5, 2e-11), Link((0, 4), 4e-5, 4e-11)),
    ]
    node, network = selftest.levels(links, hosts)
    assert (node.name, node.size, node.links, node.alpha, node.beta) == ("node", 2, 2, 3e-6, 3e-12)
    assert (network.name, network.size, network.links, network.alpha) == ("network", 8, 3, 2e-5), (
        "the level's latency must be the median of its links"
    )


def wrong(what: str, *senders: int, ranks: tuple[int, ...] = (0, 1, 2, 3)) -> BadResult:
    return BadResult(what, ranks, senders, "number 0 is 1, expected 2")


def test_faulty_ranks_are_found() -> None:
    sends = [[wrong("all_gather", 2)], [wrong("all_gather", 2)], [], [wrong("all_gather", 2)]]
    assert suspect_ranks(sends) == [2], "the sender must be suspected"
    assert suspect_ranks([[], [], [wrong("all_gather", 0, 1, 3)], []]) == [2], "the receiver must be suspected"
    assert suspect_ranks([[], [wrong("broadcast", 0)]]) == [0, 1], "one of the two is faulty, but it is unknown which"
    sums = wrong("all_reduce")
    assert suspect_ranks([[], [sums], [], []]) == [1], "the sums of all other ranks are right"
    assert suspect_ranks([[sums], [sums], [sums], [sums]]) == [0, 1, 2, 3], (
        "it is unknown which part of the sum is wrong"
    )
    dp, tp = wrong("all_reduce", ranks=(1, 3)), wrong("all_reduce", ranks=(2, 3))
    assert suspect_ranks([[], [dp], [tp], [dp, tp]]) == [3], "the rank that both groups contain must be suspected"


# ---- processes -------------------------------------------------------------------------------------


def corrupted(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in which one number is wrong."""
    other = tensor.clone()
    other.view(-1)[-1] += 64
    return other


@contextlib.contextmanager
def patched(name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a function of `torch.distributed` in this process; in the self-test, if that imports the function."""
    module = selftest if hasattr(selftest, name) else dist
    original = getattr(module, name)
    setattr(module, name, make(original))
    try:
        yield
    finally:
        setattr(module, name, original)


def gathers_wrong(original: Any) -> Any:
    return lambda output, own, **options: original(output, corrupted(own), **options)


def adds_wrong(original: Any, only_in_groups: bool = False) -> Any:
    def reduce(tensor: torch.Tensor, *arguments: Any, group: Any = None, **options: Any) -> Any:
        if tensor.dtype == torch.float32 and (group is not None or not only_in_groups):
            tensor.copy_(corrupted(tensor))
        return original(tensor, *arguments, group=group, **options)

    return reduce


@dataclass(frozen=True)
class Case:
    """A fault, and the finding that the self-test must report."""

    ranks: int
    culprit: int = -1
    function: str = "all_reduce"  #: Function of `torch.distributed` that the faulty process replaces.
    make: Any = None  #: Function that makes the replacement from the original.
    per_node: int = 2  #: Processes of each simulated node.
    geometry: dict[str, int] = field(default_factory=dict)
    said: str = ""


CASES = {
    "right, of two": Case(2),
    "gathers, of two": Case(2, 1, "all_gather", gathers_wrong, said=": process 1 on nid0 took part in most"),
    "right": Case(4, per_node=1),
    "gathers": Case(4, 1, "all_gather", gathers_wrong, said=": process 1 on nid0 took part in most"),
    "adds": Case(4, 2, "all_reduce", adds_wrong, said=": process 0 on nid0, process 1 on nid0, "),
    "adds in groups": Case(
        *(4, 3, "all_reduce", partial(adds_wrong, only_in_groups=True), 4, {"tp": 2}),
        said=": process 3 on nid0 took part in most",
    ),
}


def _test(rank: int, ranks: int, port: int, folder: str) -> None:
    as_rank(rank, port, ranks)
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    with join(Geometry(gpus_per_node=ranks), "cpu") as joined:
        for name, case in CASES.items():
            if case.ranks != ranks:
                continue
            host = f"nid{rank // case.per_node}"
            socket.gethostname = lambda host=host: host  # type: ignore[misc]
            mesh = Mesh(Geometry(gpus_per_node=ranks, **case.geometry), "cpu") if case.geometry else None
            torch.save(seen_by(replace(joined, mesh=mesh), case), Path(folder, f"{name}.{rank}.pt"))


def seen_by(world: World, case: Case) -> dict[str, Any]:
    random_state, steps, start = torch.get_rng_state(), ranges._marked, time.perf_counter()
    seen: dict[str, Any] = {}
    with patched(case.function, case.make) if world.rank == case.culprit else contextlib.nullcontext():
        try:
            found = self_test(world)
            assert found is not None and ranges.entered and ranges.at == ""
            seen |= {"links": found.model_dump(), "text": found.line()}
        except PeerLost as lost:
            seen["lost"] = str(lost)
    assert ranges._marked == steps, "the self-test must not count as a step"
    assert torch.equal(random_state, torch.get_rng_state()), "the self-test must not draw random numbers"
    return seen | {"seconds": time.perf_counter() - start}


@pytest.fixture(scope="module")
def tested(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """Return a function that maps a case's name to the findings of all processes.

    Cases with the same number of processes share the same processes.
    """
    folders: dict[int, Path] = {}

    def of(name: str) -> list[dict[str, Any]]:
        ranks = CASES[name].ranks
        if ranks not in folders:
            folders[ranks] = tmp_path_factory.mktemp(f"ranks{ranks}")
            spawn(_test, (ranks, free_port(), str(folders[ranks])), ranks)
        return [torch.load(folders[ranks] / f"{name}.{rank}.pt") for rank in range(ranks)]

    return of


Tested = Callable[[str], list[dict[str, Any]]]


@pytest.mark.slow
def test_two_correct_processes_pass(tested: Tested) -> None:
    one, other = tested("right, of two")
    assert "lost" not in one and "lost" not in other and one["links"]["levels"] == other["links"]["levels"]
    found = Links(**one["links"])
    assert (found.backend, found.processes, found.nodes) == ("gloo", 2, 1)
    (level,) = found.levels
    assert (level.name, level.size, level.links) == ("node", 2, 1)
    assert 1e-7 < level.alpha < 0.1 and 1e-12 < level.beta < 1e-6
    assert found.seconds <= one["seconds"]
    assert one["text"].startswith("node: ") and " µs, " in one["text"]


@pytest.mark.parallel
def test_four_processes_on_pretended_nodes(tested: Tested) -> None:
    found = Links(**tested("right")[0]["links"])
    assert [(level.name, level.size, level.links) for level in found.levels] == [("network", 4, 6)]
    assert found.nodes == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.parallel] * (case.ranks > 2)) for name, case in CASES.items() if case.said],
)
def test_all_processes_name_the_faulty_rank(tested: Tested, name: str) -> None:
    case = CASES[name]
    messages = {each.get("lost") for each in tested(name)}
    assert len(messages) == 1, "all processes must report the same message"
    (message,) = messages
    assert message is not None and case.said in message, message
    assert f"nid{case.culprit // case.per_node}" in message.split(": exclude ")[1].split(" (Slurm: --exclude=")[0]
    assert "expected" in message and "selftest: false" in message
    if case.geometry:
        assert "over each group of dp" in message, "the message must name the first of the two axes"


def test_one_process_has_nothing_to_test() -> None:
    assert self_test(World()) is None


def test_links_by_a_clock_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured link has the latency and the time per byte of a simulated link.

    On the simulated link, a message of n bytes takes alpha + n beta, in both directions.
    """
    alpha, beta, now = 3e-5, 2e-10, 0.0

    def message(way: Any, tensor: torch.Tensor, peer: int) -> None:
        nonlocal now
        now += alpha + tensor.nbytes * beta if peer == 1 else 0.0

    monkeypatch.setattr(selftest, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(selftest, "exchange", message)
    link = selftest._measure(World(size=2), 1)
    assert link.ranks == (0, 1)
    assert link.alpha == pytest.approx(alpha + selftest.SMALL * beta) and link.beta == pytest.approx(beta, rel=1e-3)


# ---- stages ----------------------------------------------------------------------------------------

#: Script that replaces `dlscale`. The second rank sends wrong numbers, or hangs before its first exchange.
FAULTY = """
import os, sys, time
from dlscale import cli
from dlscale.extensions.selftest import selftest
from dlscale.parallel import watchdog

if os.environ["RANK"] == "1":
    if os.environ["FAULT"] == "hangs":
        selftest.moved = lambda *arguments: time.sleep(3600)
    else:
        original = selftest.all_gather
        selftest.all_gather = lambda output, own, **options: original(output, own + 1, **options)
watchdog.REHEARSAL = 6.0
sys.exit(cli.main(sys.argv[1:]))
"""


def train_faulty(folder: Path, data: Path, fault: str, ranks: int) -> list[tuple[int, str]]:
    """Train the run in `folder` in separate processes; return (exit status, standard error) of each process."""
    (folder / "program.py").write_text(FAULTY)
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks), "FAULT": fault}
    arguments = [
        *("train", "--config", folder / "config.yaml", "--manifest", data / "manifest.json"),
        *("--checkpoints", folder / "checkpoints", "--out", folder, "--threads", ranks, "--device", "cpu"),
        *("--log", folder / "train.log"),
    ]
    processes = [
        subprocess.Popen(
            [sys.executable, str(folder / "program.py"), *map(str, arguments)],
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **meet),
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    said = [process.communicate(timeout=PATIENCE)[1] for process in processes]
    return list(zip([process.returncode for process in processes], said, strict=True))


@pytest.mark.slow
def test_a_training_with_a_wrong_process_ends_before_it_begins(tmp_path: Path, era5_data: Path) -> None:
    folder = configure(tmp_path, "era5_vit", 2)
    ended = train_faulty(folder, era5_data, "adds", 2)
    assert [status for status, _ in ended] == [LOST, LOST], ended
    for _, said in ended:
        assert said.count("\n") == 1 and "process 1 on" in said and "took part in most" in said, said
    logs = "".join(path.read_text() for path in folder.glob("*.log"))
    assert "Traceback" not in logs and not (folder / "metrics.jsonl").exists()


@pytest.mark.parallel
def test_a_process_that_hangs_in_the_self_test_is_named(tmp_path: Path, era5_data: Path) -> None:
    """Only the process that hangs is named, because the processes that wait for it have begun one more exchange."""
    folder = configure(tmp_path, "era5_vit", 4)
    ended = train_faulty(folder, era5_data, "hangs", 4)
    assert all(status == LOST for status, _ in ended), ended
    log = (folder / "train.log").read_text()
    told = r"have waited for 6 s( in all_gather #\d+ at selftest.py:\d+)? for process 1 on \S+ \(self-test"
    assert re.search(told, log), log
    assert not any(f"process {rank} on" in log for rank in (0, 2, 3)), log


@pytest.mark.slow
def test_the_self_test_is_recorded_and_does_not_change_the_training(tmp_path: Path, era5_data: Path) -> None:
    """The self-test is recorded, and the trained weights are bitwise equal with and without the self-test."""
    for name, parallel in (("tested", {}), ("untested", {"selftest": False})):
        train_by(2, configure(tmp_path / name, "era5_vit", 2, parallel=parallel), era5_data)
    one, other = (Provenance.read(tmp_path / name / "provenance.json") for name in ("tested", "untested"))
    assert one.links is not None and one.links.processes == 2 and other.links is None
    assert one.fingerprint == other.fingerprint, "each training must accept the other's checkpoints"
    assert (tmp_path / "tested/model.pt").read_bytes() == (tmp_path / "untested/model.pt").read_bytes()
    assert "self-test: 2 processes" in (tmp_path / "tested/train.log").read_text()
