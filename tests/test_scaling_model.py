"""The model of `dlscale predict`, compared with simulated messages, gradient buckets and random device speeds."""

from __future__ import annotations

import heapq
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from scipy.optimize import minimize_scalar
from torch.distributed import _compute_bucket_assignment_by_size

from dlscale.config.compute import compute_digest
from dlscale.config.records import Published
from dlscale.config.resolve import study_files
from dlscale.config.run import DDP, Parallel, load_run
from dlscale.core import registry
from dlscale.core.errors import UserError
from dlscale.data.manifest import Manifest
from dlscale.extensions.cosmo_unet.model import UNet3D
from dlscale.extensions.era5_vit.model import ViT
from dlscale.extensions.predict import analytic, model, predict
from dlscale.extensions.predict import fit as fitting
from dlscale.extensions.predict.fit import BAND, MISFIT, PRIORS, Point, fit
from dlscale.extensions.predict.model import (
    Costs,
    Job,
    Level,
    Machine,
    Measure,
    Memory,
    Mode,
    Tokens,
    Workload,
    buckets,
    expected_maximum,
    for_device,
    last_sent,
    named,
    rate,
    shipped,
    step,
)
from dlscale.extensions.predict.series import series_of
from dlscale.measure.records import Throughput, Trials
from dlscale.parallel.model import named as named_modules
from dlscale.parallel.records import Device, LinkLevel, Links
from dlscale.train.provenance import Provenance
from tests.conftest import ROOT, TINY, make_run, stage
from tests.exchanged import formula

NODE = Level("node", 4, 3e-6, 1 / 200e9)
NETWORK = Level("network", 2**31, 15e-6, 1 / 20e9)
CLUSTER = Machine((NODE, NETWORK))
COSTS = Costs(
    **{"fixed": 5e-3, "sample": 1e-3, "load": 6e-4, "blend": 2.0, "start": 0.1, "spread": 0.02, "host": 0.02},
    **{"near": 1.0, "far": 1.0, "slowdown": 0.2, "split": 0.1},
)
UNET = Workload(468e6, (0.25,) * 4, memory=Memory(4e9, 50e6))
VIT = Workload(632e6, buckets(model.evenly(632e6)), Tokens(4050, 1024, 12), memory=Memory(6e9, 2e9))


# ---- collectives, message by message ----------------------------------------------------------------------


def ring(ranks: int, size: float, latency: float, beta: float, sweeps: int) -> float:
    """Return the seconds to send pieces round a ring; each rank waits for its neighbour's piece between messages."""
    done = [0.0] * ranks
    for _ in range(sweeps * (ranks - 1)):
        done = [max(done[rank], done[rank - 1]) + latency + size / ranks * beta for rank in range(ranks)]
    return max(done)


def double_tree(ranks: int, pieces: int) -> int:
    """Count the time slots in which two trees reduce and broadcast one half of a message each.

    In a slot, a rank sends at most one piece and receives at most one piece. Rank 0 is the root of the first tree.
    Ranks with children in the first tree have no children in the second tree.
    """
    first = {rank: (rank ^ low) | low << 1 for rank in range(1, ranks) if (low := rank & -rank)}
    first = {rank: up if up < ranks else rank ^ (rank & -rank) for rank, up in first.items()}
    trees = [first, {(rank + 1) % ranks: (up + 1) % ranks for rank, up in first.items()}]
    below = [{rank: [child for child, up in tree.items() if up == rank] for rank in range(ranks)} for tree in trees]
    missing = {
        (tree, rank, p): len(below[tree][rank]) for tree in (0, 1) for rank in range(ranks) for p in range(pieces)
    }
    waiting = [(True, p, tree, rank, trees[tree][rank]) for (tree, rank, p), count in missing.items() if not count]
    slots = 0
    while waiting:
        sending, receiving, left, made = set[int](), set[int](), [], []
        for message in sorted(waiting):  # broadcasts before reductions, each in the order of pieces
            up, piece, tree, source, target = message
            if source in sending or target in receiving:
                left.append(message)
                continue
            sending.add(source)
            receiving.add(target)
            missing[tree, target, piece] -= up
            if not up or (missing[tree, target, piece] == 0 and target not in trees[tree]):
                made += [(False, piece, tree, target, child) for child in below[tree][target]]
            elif missing[tree, target, piece] == 0:
                made.append((True, piece, tree, target, trees[tree][target]))
        waiting, slots = left + made, slots + 1
    return slots


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_the_time_of_a_ring_equals_simulated_messages(ranks: int) -> None:
    """The model's ring takes as long as simulated messages, here so large that a ring is faster than a tree."""
    machine = Machine((Level("links", 2**31, 1e-6, 1e-9),))
    assert machine.all_reduce(1e9, ranks) == pytest.approx(ring(ranks, 1e9, 1e-6, 1e-9, sweeps=2))
    assert machine.all_gather(1e9, ranks) == pytest.approx(ring(ranks, 1e9, 1e-6, 1e-9, sweeps=1))


@pytest.mark.parametrize("ranks", [4, 8, 16, 64])
def test_the_time_of_a_tree_equals_simulated_messages(ranks: int) -> None:
    """The model's tree takes as long as simulated messages, here so small that a tree is faster than a ring."""
    latencies = Machine((Level("links", 2**31, 1e-5, 1e-15),)).all_reduce(1.0, ranks)
    tree = 2 * (ranks.bit_length() - 1)  # up and down the tree; the number of ranks is a power of two
    assert latencies == pytest.approx(tree * 1e-5) and latencies <= ring(ranks, 1.0, 1e-5, 1e-15, sweeps=2)
    # Each rank sends and receives every byte twice. Messages in greedy order may need 4/3 of this time.
    pieces = 100
    assert 2 * (2 * pieces) <= double_tree(ranks, pieces) <= 1.35 * 2 * (2 * pieces)


@pytest.mark.parametrize("bandwidth", [20e9, 400e9])
def test_levels_work_at_once(bandwidth: float) -> None:
    """Pieces of an all-reduce are pipelined: while some pieces use the network, other pieces use the node's links."""
    nodes, size, count = 8, 1e9, 400
    network = replace(NETWORK, seconds_per_byte=1 / bandwidth)
    inside = size / count * 3 / 4 * NODE.seconds_per_byte
    between = 2 * (nodes - 1) / nodes * size / count / 4 * network.seconds_per_byte
    node_free = network_free = 0.0
    back: list[float] = []
    for _ in range(count):
        while back and back[0] <= node_free:  # pieces from the network have priority
            node_free = max(node_free, heapq.heappop(back)) + inside
        node_free += inside
        network_free = max(network_free, node_free) + between
        heapq.heappush(back, network_free)
    for arrived in sorted(back):
        node_free = max(node_free, arrived) + inside
    bare = Machine((replace(NODE, latency=0), replace(network, latency=0))).all_reduce(size, 4 * nodes)
    assert bare == pytest.approx(node_free, rel=0.02)
    # The upper bound is a ring of nodes; a tree has lower latency but sends more bytes.
    latencies = 2 * 3 * NODE.latency + 2 * (nodes - 1) * NETWORK.latency
    assert bare < Machine((NODE, network)).all_reduce(size, 4 * nodes) <= bare + latencies * 1.0001


@pytest.mark.parametrize(
    "ranks, stride, expected",
    [
        (3, 1, [3, 1, 1]),
        (64, 1, [4, 8, 2]),
        (16, 4, [1, 8, 2]),
        (8, 2, [2, 4, 1]),
        (4, 32, [1, 1, 4]),
        (1, 1, [1, 1, 1]),
    ],
)
def test_members_of_groups(ranks: int, stride: int, expected: list[int]) -> None:
    """Group sizes equal a count over all ranks, with nodes of 4 devices and groups of 8 nodes."""
    machine = Machine((NODE, replace(NETWORK, size=8), NETWORK))
    own = [stride * rank for rank in range(ranks)]
    nodes, groups = {rank // 4 for rank in own}, {rank // 32 for rank in own}
    truth = [len(own) // len(nodes), len(nodes) // len(groups), len(groups)]
    assert machine.members(ranks, stride) == truth == expected


# ---- overlap, order statistics ---------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), min_size=1, max_size=12))
def test_buckets_on_a_clock(found: list[tuple[int, int]]) -> None:
    """`last_sent` equals a simulation by ticks, which sends ready buckets in order, one at a time."""
    ready, left = sorted(at for at, _ in found), [cost for _, cost in found]
    now, place = 0, 0
    while place < len(left):
        if left[place] == 0 and ready[place] <= now:
            place += 1
            continue
        left[place] -= ready[place] <= now
        now += 1
    costs = [cost for _, cost in found]
    assert last_sent(ready, costs) == pytest.approx(max(now, *ready) if not any(costs) else now)


@pytest.mark.slow
@pytest.mark.parametrize("bucket_mb, published", [(25, 8), (100, 5)])
def test_buckets_are_pytorchs(bucket_mb: int, published: int) -> None:
    """Buckets of the published U-Net equal PyTorch's; their number is within 1 of that in SC22's profile."""
    with torch.device("meta"):
        unet = UNet3D(4, 5)
    tensors = list(reversed(list(unet.parameters())))
    limits = [2**20, bucket_mb * 2**20]
    theirs, _ = _compute_bucket_assignment_by_size([torch.empty_like(p, device="cpu") for p in tensors], limits)
    total = 4.0 * sum(p.numel() for p in tensors)
    expected = [sum(4.0 * tensors[index].numel() for index in bucket) / total for bucket in theirs]
    ours = buckets([4.0 * p.numel() for p in tensors], limits[1])
    assert list(ours) == pytest.approx(expected) and abs(len(ours) - published) <= 1


def test_the_expected_slowest_of_many_devices() -> None:
    draws = np.random.default_rng(0)
    assert expected_maximum(1) == pytest.approx(0, abs=1e-6)
    assert expected_maximum(2) == pytest.approx(1 / math.sqrt(math.pi), abs=1e-6)
    for count, trials in ((4, 40000), (64, 10000), (1000, 2000), (100_000, 60)):
        most = [draws.standard_normal(count).max() for _ in range(trials)]
        assert expected_maximum(count) == pytest.approx(np.mean(most), abs=5 * np.std(most) / math.sqrt(trials))


# ---- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [{"tp": 2}, {"cp": 4}])
def test_all_devices_wait_for_the_slowest(shared: dict[str, int]) -> None:
    """All devices wait for the slowest of the eight devices, even if several devices share a model."""
    found = step(CLUSTER, Workload(400e6, (1.0,)), COSTS, Job(8, 10, **shared))
    assert found.waiting == pytest.approx(found.compute * 0.02 * 1.4236, rel=1e-4)


def test_a_step_by_hand() -> None:
    """Step time by hand: one bucket on two nodes of four. No part of its all-reduce overlaps with computing."""
    found = step(CLUSTER, Workload(400e6, (1.0,)), COSTS, Job(8, 10))
    compute = 5e-3 + 10e-3
    sent = max(2 * 3 / 4 * 400e6 / 200e9, 2 * 1 / 2 * 100e6 / 20e9) + 6 * 3e-6 + 2 * 15e-6
    assert (found.compute, found.exposed) == (pytest.approx(compute), pytest.approx(sent))
    assert found.slowed == pytest.approx(0, abs=1e-12)
    assert found.waiting == pytest.approx(compute * 0.02 * 1.4236, rel=1e-4)
    load = 10 * 6e-4 * (1 + 3 * 0.02)
    assert found.seconds == pytest.approx((load**3 + found.without_loading**3) ** (1 / 3))


def test_modes_by_hand() -> None:
    job, one = Job(8, 10), Job(1, 10)
    assert rate(CLUSTER, UNET, COSTS, one, Measure("IO")) == pytest.approx(1 / 6e-4)
    assert rate(CLUSTER, UNET, COSTS, job, Measure("ALONE")) == pytest.approx(80 / 15e-3)
    full = model.seconds(CLUSTER, UNET, COSTS, job)
    work = replace(UNET, workers=5)
    first = 5 * (0.1 + 10 * 6e-4 * 1.06)
    epoch = model.seconds(CLUSTER, work, COSTS, job, Measure("EPOCH", 8000))
    assert epoch == pytest.approx(first + 100 * full)
    valid = model.seconds(CLUSTER, work, COSTS, job, Measure("VALIDATION", 800))
    assert valid == pytest.approx(first + 10 * ((10 * 6e-4 * 1.06) ** 3 + (10e-3 / 3) ** 3) ** (1 / 3))
    assert model.seconds(CLUSTER, work, COSTS, job, Measure("BOTH", 8000, 800)) == pytest.approx(epoch + valid)
    assert rate(CLUSTER, replace(UNET, storage=1000), COSTS, job) < 1000 < rate(CLUSTER, UNET, COSTS, job)


def test_devices_that_share_a_model() -> None:
    """Tensor-parallel devices inside a node exchange the tokens of each block in four all-reduces."""
    job = Job(16, 8, tp=4)
    found, gradients = (step(CLUSTER, work, COSTS, job) for work in (VIT, replace(VIT, tokens=None)))
    alone = 12 * 4 * CLUSTER.all_reduce(8 * 4050 * 1024 * 2, 4)
    assert found.exposed - gradients.exposed == pytest.approx(alone)
    assert found.compute == pytest.approx(5e-3 + 8 * 1e-3 * 1.1**2 / 4)
    # All devices wait for the slowest of all 16 devices, not for the slowest of the 4 copies.
    assert found.waiting == pytest.approx(found.compute * 0.02 * expected_maximum(16))
    assert expected_maximum(16) > 1.5 * expected_maximum(4)
    # The run without gradient averaging omits the exchanges between copies, but not the exchanges within a model.
    assert model.seconds(CLUSTER, VIT, COSTS, job, Measure("ALONE")) == pytest.approx(found.compute + alone)
    assert model.seconds(CLUSTER, VIT, COSTS, Job(16, 8), Measure("ALONE")) == pytest.approx(13e-3)
    assert model.memory(VIT, job) == pytest.approx(6e9 / 4 + 8 * 2e9 / 4)
    assert model.memory(replace(VIT, gathered=(0, 0)), Job(16, 8, cp=4)) == pytest.approx(6e9 / 16 + 8 * 2e9 / 4)
    assert model.memory(replace(VIT, memory=None), job) is None


def test_fsdp_against_a_clock() -> None:
    """FSDP by hand: weights of a block are gathered, and its gradients reduced, while other blocks are computed."""
    work, job = replace(UNET, buckets=(0.25,) * 4, gathered=(468e6, 468e6)), Job(8, 64)
    each, compute = CLUSTER.all_gather(468e6 / 4, 8), 5e-3 + 64e-3
    gathered = computed = 0.0
    for _ in range(4):
        gathered += each
        computed = max(computed, gathered) + compute / 3 / 4
    backward = sent = 0.0
    for _ in range(4):
        backward += compute * 2 / 3 / 4
        sent = max(sent, backward) + 2 * each
    found = step(CLUSTER, work, COSTS, job)
    assert found.exposed == pytest.approx(computed - compute / 3 + sent - compute * 2 / 3)
    # Three exchanges have the weights' size: two all-gathers and a reduce-scatter. Their hidden part slows computing.
    assert found.slowed == pytest.approx(COSTS.slowdown * (3 * 4 * each - found.exposed)) and found.slowed > 0
    # Weights that are kept after the forward pass are not gathered again. Each of the three exchanges may have its own
    # number format.
    kept = step(CLUSTER, replace(work, gathered=(234e6, 0)), COSTS, job)
    half, bare = (Machine(tuple(replace(each, latency=0) for each in CLUSTER.levels)) for _ in "12")
    one = half.all_gather(468e6, 8)
    free = [step(bare, replace(work, gathered=(share * 468e6, 0)), COSTS, job) for share in (0, 0.5)]
    sums = [each.exposed + each.slowed / COSTS.slowdown for each in free]
    assert sums == pytest.approx([one, 1.5 * one]) and kept.seconds < found.seconds


VARIED = st.fixed_dictionaries({field.name: st.floats(0.3, 3.0) for field in fields(Costs)})


@settings(deadline=None)
@given(
    VARIED, st.sampled_from([UNET, VIT, replace(UNET, gathered=(468e6, 234e6))]), st.integers(1, 12), st.integers(1, 64)
)
def test_predictions_are_monotonic(factors: dict[str, float], work: Workload, doublings: int, batch: int) -> None:
    """The speed per device never rises with the number of devices, costs or bytes, and never falls with the batch."""
    costs = replace(COSTS, **{name: getattr(COSTS, name) * factor for name, factor in factors.items()})
    job = Job(2**doublings, batch)
    own, more = (rate(CLUSTER, work, costs, replace(job, devices=n * job.devices)) for n in (1, 2))
    assert more / 2 <= own * (1 + 1e-9)
    for name in ("fixed", "sample", "load", "spread", "host", "near", "far", "slowdown"):
        assert rate(CLUSTER, work, replace(costs, **{name: 1.5 * getattr(costs, name)}), job) <= own * (1 + 1e-9), name
    assert rate(CLUSTER, work, costs, replace(job, batch=2 * batch)) >= own * (1 - 1e-9)
    assert rate(CLUSTER, replace(work, gradients=2 * work.gradients), costs, job) <= own * (1 + 1e-9)


# ---- fits ------------------------------------------------------------------------------------------------------------


def points(
    costs: Costs, noise: Callable[[], float] = lambda: 1.0, most: int = 8, batches: tuple[int, ...] = (16, 64)
) -> Iterator[Point]:
    """Yield simulated measurements on 1, 2, 4, … devices, up to `most`."""
    modes: tuple[Mode, ...] = ("IO", "SYNTHETIC", "FULL")
    for devices, batch, mode in itertools.product((1, 2, 4, 8), batches, modes):
        job, of = Job(devices, batch), Measure(mode)
        if devices <= most:
            yield Point(job, rate(CLUSTER, UNET, costs, job, of) * noise(), of)


def test_a_fit_recovers_the_true_costs() -> None:
    """The fit finds the costs that the measurements can distinguish, and predicts many devices from a few."""
    truth = replace(COSTS, fixed=12e-3, sample=1.4e-3, load=1.1e-3, far=3.0, host=0.06)
    found = fit(CLUSTER, UNET, list(points(truth)))
    for name, within in {"fixed": 0.1, "sample": 0.02, "load": 0.02, "host": 0.15}.items():
        assert getattr(found.costs, name) == pytest.approx(getattr(truth, name), rel=within), name
    assert found.costs.far > 1.8
    for job in (Job(64, 64), Job(256, 64), Job(256, 128)):
        assert found.rate(job).value == pytest.approx(rate(CLUSTER, UNET, truth, job), rel=0.05)


@pytest.mark.slow
def test_the_band_is_that_of_all_worlds_that_fit() -> None:
    """A prediction's band equals the posterior, computed from random costs weighted by likelihood and priors."""
    seen = [Point(Job(1, 64), 900.0, Measure("SYNTHETIC")), Point(Job(8, 64), 6000.0, Measure("SYNTHETIC"))]
    unit, job = {"fixed": 64 / 900, "sample": 1 / 900, "load": 1 / 900}, Job(64, 32)
    fitted = fit(CLUSTER, UNET, seen)
    centre = np.log([getattr(fitted.costs, name) for name in PRIORS])
    middles = np.log([unit.get(name, 1.0) * prior.middle for name, prior in PRIORS.items()])
    factors = np.log([prior.factor for prior in PRIORS.values()])
    draws = np.random.default_rng(4).multivariate_normal(centre, 2 * fitted.covariance, 20_000)
    moved = draws - centre
    wide = np.einsum("ni,ij,nj->n", moved, np.linalg.inv(2 * fitted.covariance), moved)
    worlds = [Costs(*np.exp(each).tolist()) for each in draws]
    errors = [[math.log(rate(CLUSTER, UNET, each, p.job, p.of) / p.rate) / p.noise for each in worlds] for p in seen]
    likely = -sum(np.square(each) for each in errors) - (((draws - middles) / factors) ** 2).sum(axis=1)
    weights = np.exp((likely + wide) / 2 - ((likely + wide) / 2).max())
    found = np.array([rate(CLUSTER, UNET, each, job) for each in worlds])
    order = np.argsort(found)
    low, middle, high = found[order][np.searchsorted(np.cumsum(weights[order]) / weights.sum(), (0.05, 0.5, 0.95))]
    ours = fitted.predict(lambda costs: rate(CLUSTER, UNET, costs, job))
    assert [ours.low, ours.value, ours.high] == pytest.approx([low, middle, high], rel=0.1)


@pytest.mark.slow
def test_the_band_grows_with_the_distance() -> None:
    found = fit(CLUSTER, VIT, list(points(COSTS)))
    assert found.doublings(Job(8, 64)) == 0 and found.doublings(Job(64, 64, tp=4)) == 5
    job = Job(128, 64)
    bare, own = found.rate(job, misfit=0), found.rate(job)
    assert math.log(own.high / own.value) ** 2 - math.log(bare.high / bare.value) ** 2 == pytest.approx(
        4 * (1.645 * MISFIT) ** 2
    )


def test_a_prediction_without_a_throughput_is_refused() -> None:
    with pytest.raises(UserError, match="a throughput is missing"):
        fit(CLUSTER, UNET, [Point(Job(1, 8), 100.0, Measure("IO"))])


# ---- published figures -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checks() -> list[fitting.Check]:
    return [
        check
        for file in study_files().values()
        for name, series in series_of(file).items()
        for check in fitting.check(name, series, file.published)
    ]


def tripled(figure: Published) -> Published:
    values = {key: getattr(figure, key) for key in ("samples_per_second", "value")}
    return figure.model_copy(update={key: 3 * value for key, value in values.items() if value})


@pytest.mark.slow
@pytest.mark.parametrize("study", ["cosmo_unet", "era5_vit", "imagenet_resnet50"])
def test_predicted_figures_do_not_influence_the_fit(study: str) -> None:
    file = study_files()[study]
    for name, series in series_of(file).items():
        changed = [tripled(figure) if figure.gpus > series.fit else figure for figure in file.published]
        ours, theirs = (fitting.check(name, series, figures) for figures in (file.published, changed))
        assert [each.ours for each in ours] == [each.ours for each in theirs] and ours
        assert [each.published for each in ours] != [each.published for each in theirs]


def test_the_model_beats_amdahls_law(checks: list[fitting.Check]) -> None:
    ours, amdahl = np.median([np.abs(each.errors) for each in checks if each.amdahl is not None], axis=0)
    assert ours <= 0.10 and ours < amdahl


def test_the_misfit_is_that_of_the_series(checks: list[fitting.Check]) -> None:
    """MISFIT, the model's error for one doubling of devices, is the most likely value for all published series."""

    def unlikely(misfit: float) -> float:
        total = 0.0
        for each in checks:
            ours = each.ours.widened(misfit * math.sqrt(each.doublings))
            deviation = math.log(ours.high / ours.low) / 2 / BAND
            total += math.log(deviation) + (math.log(ours.value / each.published) / deviation) ** 2 / 2
        return total

    assert minimize_scalar(unlikely, bounds=(0, 1), method="bounded").x == pytest.approx(MISFIT, abs=0.004)


def test_amdahls_law() -> None:
    assert fitting.amdahl({n: 1 / (0.1 + 0.9 / n) for n in (1, 2, 8)}, 64) == pytest.approx(1 / (0.1 + 0.9 / 64))
    assert fitting.amdahl({4: 80.0}, 16) == 320
    assert fitting.amdahl({1: 10.0, 2: 25.0}, 4) == pytest.approx(45, rel=0.15)  # the serial part must not be negative


def test_the_docs_have_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/planning.md has the printed texts, and the numbers within 5 % or 2.5, as processors round differently."""
    assert stage("predict", "--validate") == 0
    printed = capsys.readouterr().out.strip().splitlines()
    page = (ROOT / "docs/planning.md").read_text().splitlines()
    shown = page[page.index(printed[0]) :][: len(printed)]
    numbers = re.compile(r"[+−]?[\d,]*\.?\d+")
    again = "copy the output of `dlscale predict --validate` into docs/planning.md"
    assert [numbers.sub("N", line) for line in shown] == [numbers.sub("N", line) for line in printed], again
    for ours, theirs in zip(shown, printed, strict=True):
        found, expected = (
            [float(text.replace(",", "").replace("−", "-")) for text in numbers.findall(each)]
            for each in (ours, theirs)
        )
        assert found == pytest.approx(expected, rel=0.05, abs=2.5), again


def test_priors_and_machines_have_sources() -> None:
    assert set(PRIORS) == {field.name for field in fields(Costs)}
    assert all(prior.source and prior.factor > 1 for prior in PRIORS.values())
    assert all(each.source and each.machine.levels for each in shipped().values())
    found = {
        "CPU": "processes",
        "NVIDIA A100-SXM4-40GB": "perlmutter",
        "Tesla V100-SXM2-32GB": "hal",
        "RTX A6000": None,
    }
    assert {device: for_device(device) for device in found} == found


# ---- dlscale predict ------------------------------------------------------------------------------------------


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cosmo_data: Path, era5_data: Path) -> Path:
    """Return results with measured runs: a U-Net and a ViT, each on one device and on two devices."""
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "results"
    (root / "data").mkdir(parents=True)
    for study, data in (("cosmo_unet", cosmo_data), ("era5_vit", era5_data)):
        for name, devices in (("one", 1), ("two", 2)):
            folder = root / "plans" / study / name
            folder.mkdir(parents=True)
            own = {"batch_size": 4 * devices, "geometry": {"gpus_per_node": devices}}
            make_run(folder, study, TINY[study]["run"] | own, TINY[study]["dataset"])
            raw = yaml.safe_load((folder / "config.yaml").read_text()) | {"dataset": study}
            (folder / "config.yaml").write_text(yaml.safe_dump(raw))
            rates = {"IO": 300 * devices, "SYNTHETIC": 100 * devices**0.9, "FULL": 90 * devices**0.9}
            modes: Any = {mode: Trials(mean=mean) for mode, mean in rates.items()}
            Throughput(nranks=devices, compute=compute_digest(raw), **modes).write(folder / "throughput.json")
        (root / "data" / study).symlink_to(data)
    return root


def planned(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    return json.loads("\n".join(told(capsys, *arguments, "--json")))


def test_a_plan(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "cosmo_unet.one", "cosmo_unet.two", "--devices", 1, 2, 4, 64)
    rates = [row["samples_per_second"] for row in found]
    assert rates[:2] == pytest.approx([90, 168], rel=0.05) and rates == sorted(rates)
    assert all(row["low"] < row["samples_per_second"] < row["high"] for row in found)
    assert found[-1]["efficiency"] < found[0]["efficiency"] == pytest.approx(1)
    assert [row["nodes"] for row in found] == [1, 1, 2, 32] and found[0]["memory"] > 0
    assert all(row["node_hours"] == pytest.approx(row["nodes"] * row["seconds"] / 3600) for row in found)
    priced = ["--price", 2, "--target-samples", 3600000]
    assert stage("predict", results / "plans/cosmo_unet/one", "--devices", 1, 8, *priced) == 0
    text = capsys.readouterr().out
    assert "Fastest: 8 devices" in text and "at 2 per node-hour" in text and "Cheapest: " in text


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    """Return the lines that `dlscale predict` prints."""
    assert stage("predict", *arguments) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_measured_speeds_are_listed_next_to_predictions(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = ["cosmo_unet.one", "cosmo_unet.two", "--devices", 1, 2, 4]
    assert [row["measured"] for row in planned(capsys, *both)] == [90, pytest.approx(90 * 2**0.9), None]
    assert "6 measurements on up to 2 devices" in told(capsys, *both)[0]


def test_a_batch_larger_than_the_data_is_refused(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A batch larger than the dataset is reported and not recommended."""
    training = predict.read([results / "plans/cosmo_unet/one"], None, math.inf).epoch[0]
    assert training is not None and training < 64 * 4
    lines = told(capsys, "cosmo_unet.one", "--devices", 1, 64)
    assert any(line.startswith("64 devices: a step has more samples than the ") for line in lines)
    assert any(line.startswith("Fastest: 1 device,") for line in lines)
    other = told(capsys, "cosmo_unet.one", "--devices", 1, 64, "--target-samples", 3600000)
    assert any(line.startswith("Fastest: 64 devices,") for line in other)


def test_an_hour_of_a_node_and_a_gigabyte(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Node-hours count complete nodes; `--memory` is in GB (10^9 bytes)."""
    asked = ["cosmo_unet.one", "--devices", 8, "--target-samples", 3600000]
    ((row,), (alone,)) = (planned(capsys, *asked, "--per-node", n) for n in (8, 1))
    assert (row["nodes"], alone["nodes"]) == (1, 8)
    assert row["seconds"] == pytest.approx(3600000 / row["samples_per_second"])
    assert alone["node_hours"] == pytest.approx(8 * 3600000 / alone["samples_per_second"] / 3600)
    fits = row["memory"] / 1e9
    assert planned(capsys, *asked, "--memory", 1.01 * fits)
    assert stage("predict", *asked, "--memory", 0.99 * fits) == 2


def test_the_first_epoch_is_left_out(results: Path, tmp_path: Path) -> None:
    """The fit omits the first epoch (a warm-up), epochs trained by other code, and validations of diverged epochs."""
    folder = results / "plans/cosmo_unet/one"
    lines: list[dict[str, Any]] = [
        {"epoch": n, "step": n, "samples": 8 * n, "learning_rate": 0.1, "train_loss": 1.0, "valid_loss": 1.0}
        | {"epoch_seconds": 1.0, "wait_seconds": 0.0, "valid_seconds": 0.1, "samples_per_second": rate}
        | {"made_with": {"commit": None}}
        for n, rate in ((1, 1.0), (2, 80.0), (3, 90.0), (4, 100.0))
    ]

    def rates(mode: Mode) -> list[float]:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return [point.rate for point in predict.read([folder], None, math.inf).fit.points if point.of.mode == mode]

    assert rates("EPOCH") == [90]
    # Epochs from before a resume with other code are left out.
    for line in lines[:2]:
        line["made_with"] = {"commit": "another"}
    assert rates("EPOCH") == [100] and rates("VALIDATION")
    # A diverged epoch is not validated, so its `valid_seconds` must be ignored.
    lines[3] |= {"train_loss": None, "valid_loss": None, "valid_seconds": 1e-6}
    assert not rates("VALIDATION")
    # Without measured throughput, the device's name comes from the training's record.
    (folder / "throughput.json").unlink()
    Provenance(device=Device(kind="cuda", name="NVIDIA A100-SXM4-40GB")).write(folder / "provenance.json")
    study = predict.read([folder], None, math.inf)
    assert (study.device, study.machine) == ("NVIDIA A100-SXM4-40GB", "perlmutter")


def test_a_model_that_context_alone_divides(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = registry.study("era5_vit")
    whole = study.sharding
    without: Any = {"columns": (), "rows": (), "gather": ()}
    monkeypatch.setattr(type(study), "sharding", lambda self, model: replace(whole(model), **without))
    assert predict.workload(load_run(results / "plans/era5_vit/one/config.yaml", "train"), results).tokens is None


@pytest.mark.slow
def test_a_plan_with_links_that_were_measured(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Predictions use the links that the largest run measured, unless the user names a machine."""
    path = results / "plans/cosmo_unet/two/throughput.json"
    here: Any = {"links": 1}
    both = ["cosmo_unet.one", "cosmo_unet.two", "--devices", 64]
    (unknown,) = planned(capsys, *both)
    found = {}
    for beta in (1e-11, 1e-6):
        level = LinkLevel(name="network", size=2, alpha=2e-3, beta=beta, **here)
        Throughput.read(path).model_copy(
            update={"links": Links(backend="gloo", processes=2, nodes=2, seconds=1, levels=[level])}
        ).write(path)
        (found[beta],) = planned(capsys, *both)
    assert found[1e-6]["samples_per_second"] < 0.6 * unknown["samples_per_second"]
    assert found[1e-6]["parts"]["exposed"] > 2 * found[1e-11]["parts"]["exposed"]
    assert planned(capsys, *both, "--machine", "processes") == [unknown]
    assert stage("predict", *both) == 0
    assert "Links, measured by 2 processes: network: 2,000 µs" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel, gathers, again, width",
    [
        ({"kind": "ddp"}, 0, 0, 4),
        ({"kind": "ddp", "compression": "bf16"}, 0, 0, 2),
        ({"kind": "ddp", "sync": False}, 0, 0, 4),
        ({"kind": "dp"}, 0, 0, 4),
        ({"kind": "fsdp"}, 4, True, 4),
        ({"kind": "fsdp", "reshard": False, "param_dtype": "bf16"}, 2, False, 4),
        ({"kind": "fsdp", "reduce_dtype": "bf16", "shard": 2}, 4, True, 2),
    ],
)
def test_the_predicted_bytes_of_a_run_equal_the_formula(
    results: Path, parallel: dict[str, Any], gathers: int, again: bool, width: int
) -> None:
    """The bytes equal a formula of the model's parameters, which test_mesh.py compares with real exchanges."""
    run: Any = load_run(results / "plans/era5_vit/two/config.yaml", "train")
    run = run.model_copy(update={"parallel": TypeAdapter(Parallel).validate_python(parallel)})
    work = predict.workload(run, results)
    study, manifest = registry.study("era5_vit"), Manifest.read(results / "data/era5_vit/manifest.json")
    with torch.device("meta"):
        vit = study.model(run, manifest)
    sharing = study.sharding(vit)
    fill = 2 if gathers else 1  # rows are padded so that two devices can divide them

    def numbers(parameters: Iterable[torch.nn.Parameter]) -> int:
        return sum(-(-p.shape[0] // fill) * fill * math.prod(p.shape[1:]) for p in parameters)

    every = numbers(vit.parameters())
    units = sum(numbers(unit.parameters()) for unit in named_modules(vit, sharing.units).values())
    assert 0 < units < every and sum(work.buckets) == pytest.approx(1)
    assert work.gradients == width * every
    assert work.gathered == ((gathers * every, gathers * units * again) if gathers else None)
    if parallel["kind"] != "dp" and run.averages:
        sent = formula(run, vit, sharing, run.local_batch_size, 4)
        assert sent.get("reduce_scatter", sent.get("all_reduce")) == work.gradients
        assert sent.get("all_gather", 0) == sum(work.gathered or ())


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_the_predicted_bytes_of_devices_that_share_a_model(results: Path, axis: str, again: bool) -> None:
    """Except for the last layer's outputs, bytes equal a formula, which test_mesh.py compares with real exchanges."""
    run: Any = load_run(results / "plans/era5_vit/two/config.yaml", "train")
    run = run.model_copy(
        update={"geometry": type(run.geometry)(gpus_per_node=2, **{axis: 2}), "activation_checkpointing": again}
    )
    work = predict.workload(run, results)
    study, manifest = registry.study("era5_vit"), Manifest.read(results / "data/era5_vit/manifest.json")
    with torch.device("meta"):
        vit = study.model(run, manifest)
    sharing = study.sharding(vit)
    samples, last = 4, vit.get_submodule(sharing.last)
    sent = formula(run.model_copy(update={"parallel": DDP(sync=False)}), vit, sharing, samples, 4)
    total = sent["all_gather"] + sent["reduce_scatter"] - 4 * samples * sharing.tokens * last.out_features
    # Each of the two ranks sends half of the gathered or reduced data.
    links = Machine((Level("links", 2**31, 0.0, 1.0),))
    found = step(links, work, COSTS, Job(2, samples, **{axis: 2}))
    gradients = step(links, replace(work, tokens=None), COSTS, Job(2, samples, **{axis: 2}))
    assert 2 * (found.exposed - gradients.exposed) == pytest.approx(total)


def test_runs_that_are_fitted_together_are_alike(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs with different settings are refused for a common fit, and so is a run without averaging of gradients."""
    config, record = (results / "plans/cosmo_unet/two" / name for name in ("config.yaml", "throughput.json"))
    settings, throughput = yaml.safe_load(config.read_text()), Throughput.read(record)
    both = ["predict", "cosmo_unet.one", "cosmo_unet.two", "--devices", 2]
    own = settings["parallel"]

    def told(parallel: dict[str, Any], expected: str) -> None:
        config.write_text(yaml.safe_dump(settings | {"parallel": parallel}))
        assert stage(*both) == 2
        error = capsys.readouterr().err
        assert f"cosmo_unet/two: {expected} is " in error and " in results/plans/cosmo_unet/one " in error
        assert len(error.strip().splitlines()) == 1

    told({"kind": "fsdp"}, "parallel.kind")
    told(own | {"compression": "bf16"}, "parallel.compression")
    config.write_text(yaml.safe_dump(settings))
    for path, threads in ((record, 1), (results / "plans/cosmo_unet/one/throughput.json", 2)):
        Throughput.read(path).model_copy(
            update={"device": Device(kind="cpu", name="a processor", threads=threads)}
        ).write(path)
    assert stage(*both) == 2
    error = capsys.readouterr().err
    assert "cosmo_unet/two: threads is 1, but 2 in " in error
    throughput.write(record)
    config.write_text(yaml.safe_dump(settings | {"batch_size": 2 * settings["batch_size"]}))
    assert stage(*both) == 2 and "measured with other settings than in the config.yaml" in capsys.readouterr().err
    config.write_text(yaml.safe_dump(settings | {"parallel": own | {"sync": False}}))
    assert stage(*both) == 2 and "parallel.sync is false" in capsys.readouterr().err
    config.write_text(yaml.safe_dump(settings | {"geometry": settings["geometry"] | {"order": "dp-tp-cp"}}))
    assert stage(*both) == 2 and "geometry.order: got dp-tp-cp; only tp-cp-dp" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, expected",
    [
        ([], "RUN: expected either measured runs"),
        (["cosmo_unet.three"], "cosmo_unet.three: no such run; expected PLAN.RUN"),
        (["cosmo_unet.one", "era5_vit.one"], "model.kind is "),
        (["cosmo_unet.one", "--machine", "perlmuter"], "did you mean 'perlmutter'"),
        *(
            (
                ["cosmo_unet.one", "--machine", name],
                f"--machine {name}: has {device}, but the runs were measured on CPU",
            )
            for name, device in (("perlmutter", "A100"), ("summit", "V100"), ("dgx_h100", "H100, H200"))
        ),
        (["cosmo_unet.one", "--machine", "mine.yaml"], "mine.yaml: levels.0.latency"),
        (["cosmo_unet.one", "--machine", "none.yaml"], "none.yaml: no such file"),
        (["cosmo_unet.one", "--devices", "0"], "--devices: got 0; expected more than 0"),
        (["cosmo_unet.one", "--devices", "4", "1" + 400 * "0"], "--devices: got 1000000000000000000…; expected"),
        (["cosmo_unet.one", "--storage", "nan"], "--storage: got nan; expected more than 0, at most 1e+15"),
        (["cosmo_unet.one", "--price", "nan"], "--price: got nan"),
        (["cosmo_unet.one", "--memory", "nan"], "--memory: got nan"),
        (["cosmo_unet.one", "--memory", "inf"], "--memory: got inf"),
        (["cosmo_unet.one", "--target-samples", "0"], "--target-samples: got 0"),
        (["cosmo_unet.one", "--devices", "5"], "5 devices: not a multiple of the 2 devices per node"),
        (["cosmo_unet.one", "--devices", "4", "--tp", "2"], "supports neither tp nor cp"),
        (["era5_vit.one", "--devices", "4", "--cp", "3"], "4 devices: not a multiple of tp x cp = 3"),
        (
            ["cosmo_unet.one", "--devices", "64", "--batch-size", "8"],
            "less than one sample per step for each of the 64",
        ),
        (["cosmo_unet.one", "--memory", "0.000001"], "all configurations are left out: "),
    ],
)
def test_mistakes_are_one_message(
    results: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    Path("mine.yaml").write_text("source: mine\nlevels: [{name: node, latency: -1, bandwidth: 1.0e9}]\n")
    assert stage("predict", *arguments) == 2
    error = capsys.readouterr().err
    assert expected in error and len(error.strip().splitlines()) == 1 and "Traceback" not in error


def test_an_unmeasured_run_is_refused(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (results / "plans/cosmo_unet/one/throughput.json").unlink()
    assert stage("predict", "cosmo_unet.one") == 2
    assert "no measured throughput and no training" in capsys.readouterr().err


def test_a_user_defined_machine(tmp_path: Path) -> None:
    """A machine file has, by level of links, the latency in s and the bandwidth of a device in bytes/s."""
    node = {"name": "node", "size": 8, "latency": 4e-6, "bandwidth": 2e11}
    levels = [node, {"name": "network", "latency": 2e-5, "bandwidth": 1e10}]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"source": "measured", "levels": levels}))
    machine = named(str(tmp_path / "mine.yaml")).machine
    assert machine.per_node == 8 and machine.levels[1].seconds_per_byte == pytest.approx(1e-10)


def test_runs_of_the_vit_are_ranked_without_a_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    """The shipped description of the ViT has the study's sizes; docs/dl_at_scale_vit.md quotes its errors."""
    file = ROOT / "docs/examples/era5_vit_opt.yaml"
    described = analytic.read(file)
    vit = registry.study("era5_vit")
    with torch.device("meta"):
        network = ViT((360, 720), (8, 8), 20, 20)
    assert described.parameters == sum(p.numel() for p in network.parameters())
    tokens, width, depth = described.tokens
    assert (tokens, depth) == (network.grid[0] * network.grid[1], len(network.blocks))
    kind = SimpleNamespace(grid=(360, 720), channels=["any"] * 20)
    run = SimpleNamespace(
        model=SimpleNamespace(patch_size=(8, 8), embed_dim=width, depth=depth, static=[], residual=False),
        samples=SimpleNamespace(channels=lambda states: states),
    )
    forward = vit.flops(run, SimpleNamespace(fields={"fields": kind}))
    assert described.flops["bf16"] == pytest.approx(3 * forward, rel=1e-3)
    devices = [1, 2, 4, 8, 16, 32, 64, 128]
    assert stage("predict", "--model", file, "--json", "--devices", *devices) == 0
    rates = {row["devices"]: row["samples_per_second"] for row in json.loads(capsys.readouterr().out)}
    assert [*rates] == devices and sorted(rates.values()) == [*rates.values()]
    published = {4: 202.0, 64: 2544.7}
    page = " ".join((ROOT / "docs/dl_at_scale_vit.md").read_text().split())
    found = [f"{rates[count] / rate:.1f}" for count, rate in published.items()]
    assert f"{found[0]} (four GPUs) and {found[1]} times (64)" in page
