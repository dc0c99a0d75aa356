"""Scaling model: predict the duration of a step, an epoch and a training on any number of devices, and the memory.

The model computes these quantities from `Costs`. A message of n bytes takes alpha + n beta seconds (Hockney 1994,
doi:10.1016/S0167-8191(06)80021-9). Collectives follow Thakur, Rabenseifner and Gropp 2005
(doi:10.1177/1094342005051521): reduce-scatter in a node, all-reduce between nodes, all-gather in a node. All levels
transfer data at the same time, so the slowest level determines the time, as in AMD's Primus and in ASTRA-sim.

A step takes the time of the slowest device, plus the communication that the computing does not hide. Loading overlaps
with computing and communication; a step takes at least as long as the loading of its samples.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from scipy.special import log_ndtr

from dlscale.core.errors import UserError, unknown
from dlscale.core.schema import Strict
from dlscale.core.settings import read_yaml, validate
from dlscale.parallel.records import LinkLevel, Links

#: Value of `Level.size` if the number of units is unlimited.
ANY = 2**31


@dataclass(frozen=True)
class Level:
    """Links of the same kind: between devices of a node, between nodes of a switch group, or between groups."""

    name: str
    size: int  #: Number of units that the level joins, such as devices of a node; `ANY` if the number is unlimited.
    latency: float  #: alpha, seconds per message.
    #: beta: seconds per byte that a device sends while all devices send. In a network, where the devices of a node
    #: share the node's bandwidth, beta is (devices per node) / (bandwidth of the node).
    seconds_per_byte: float


@dataclass(frozen=True)
class Machine:
    """Levels of a machine's topology, beginning with the nearest; the last level joins any number of units."""

    levels: tuple[Level, ...]

    @property
    def per_node(self) -> int:
        """Number of devices per node."""
        return self.levels[0].size

    def used(self, per_node: int | None = None, near: float = 1.0, far: float = 1.0) -> Machine:
        """Return the machine for a job that uses only `per_node` devices of each node (None: all devices).

        A device's bandwidth does not depend on `per_node`. The time per byte is multiplied by `near` within a node, and
        by `far` between nodes.
        """
        first, *others = self.levels
        levels = [replace(first, size=per_node or first.size, seconds_per_byte=first.seconds_per_byte * near)]
        levels += [replace(each, seconds_per_byte=each.seconds_per_byte * far) for each in others]
        return Machine(tuple(levels))

    def measured(self, links: Links) -> Machine:
        """Return the machine with the latencies and bandwidths that a run's self-test measured.

        Levels that were not measured are unchanged.
        """
        found: dict[str, LinkLevel] = {level.name: level for level in links.levels}
        return Machine(
            tuple(
                replace(level, latency=own.alpha, seconds_per_byte=own.beta)
                if (own := found.get(level.name))
                else level
                for level in self.levels
            )
        )

    def members(self, ranks: int, stride: int = 1) -> list[int]:
        """Return the number of units that a group of `ranks` devices has on each level.

        The product of the numbers is at least `ranks`. `stride` is the distance between two devices of the group: 1 for
        tensor-parallel devices; otherwise the number of tensor-parallel devices.
        """
        found, reach = list[int](), 1
        for level in self.levels[:-1]:
            reach *= level.size
            done = math.prod(found)
            found.append(max(1, min(reach // (stride * done), math.ceil(ranks / done))))
        return [*found, math.ceil(ranks / math.prod(found))]

    def all_reduce(self, size: float, ranks: int, stride: int = 1) -> float:
        """Return the seconds in which `ranks` devices sum `size` bytes.

        Among the n units of a level (`Level` defines alpha and beta), a ring takes 2 (n - 1) (alpha + beta size / n).
        On the highest level a double binary tree (Sanders, Speck and Traeff 2009, doi:10.1016/j.parco.2009.09.001)
        replaces the ring if the tree is faster; a tree takes 2 ceil(log2 n) alpha + 2 beta size.
        """
        return self._time(size, ranks, stride, sweeps=2)

    def all_gather(self, size: float, ranks: int, stride: int = 1) -> float:
        """Return the seconds in which `ranks` devices gather `size` bytes; a reduce-scatter takes the same time.

        Among the n units of a level, a ring takes (n - 1) (alpha + beta size / n).
        """
        return self._time(size, ranks, stride, sweeps=1)

    def _time(self, size: float, ranks: int, stride: int, sweeps: int) -> float:
        if ranks <= 1 or size <= 0:
            return 0.0
        # The latencies of levels add. Transfers overlap, so only the slowest level's transfer counts. Above a level of
        # n units, a device has 1 / n of the bytes.
        members = self.members(ranks, stride)
        top = max((place for place, count in enumerate(members) if count > 1), default=0)
        latency = slowest = 0.0
        for level, count in zip(self.levels[:top], members, strict=False):
            latency += sweeps * (count - 1) * level.latency
            slowest = max(slowest, sweeps * (count - 1) / count * size * level.seconds_per_byte)
            size /= count
        level, count = self.levels[top], members[top]
        around = sweeps * (count - 1) / count * size * level.seconds_per_byte
        ring = latency + sweeps * (count - 1) * level.latency + max(slowest, around)
        if sweeps == 1 or count == 1:
            return ring
        deep = 2 * math.ceil(math.log2(count)) * level.latency
        return min(ring, latency + deep + max(slowest, 2 * size * level.seconds_per_byte))


class LevelSettings(Strict):
    """Settings of a level of a machine, in a YAML file."""

    name: str
    size: PositiveInt = Field(
        ANY, description="Number of devices, or of groups of the previous level, that this level joins (default: any)."
    )
    latency: NonNegativeFloat = Field(description="Latency, seconds per message.")
    bandwidth: PositiveFloat = Field(
        description="Bandwidth, bytes/s that a device sends while all devices send (bus bandwidth of nccl-tests)."
    )
    efficiency: float = Field(
        1.0, gt=0, le=1, description="Fraction of the bandwidth that is reached; 1 for a measured bandwidth."
    )


class MachineSettings(Strict):
    """Settings of a machine, in `machines.yaml` or in another YAML file."""

    source: str = Field(description="Source of the figures.")
    devices: list[str] = Field(
        [], description="Parts of device names; a device whose name has such a part is assumed to be in this machine."
    )
    reached: float = Field(
        0.79, gt=0, le=1, description="Fraction of the data sheet's FLOP/s that trainings of large models reach."
    )
    levels: list[LevelSettings] = Field(min_length=1, description="Levels, beginning with the nearest level.")

    def has(self, device: str) -> bool:
        """Return whether a device with this name is assumed to be in this machine."""
        return any(part in device for part in self.devices)

    @property
    def machine(self) -> Machine:
        return Machine(
            tuple(
                Level(each.name, each.size, each.latency, 1 / (each.bandwidth * each.efficiency))
                for each in self.levels
            )
        )


def shipped() -> dict[str, MachineSettings]:
    """Return the machines in `machines.yaml`, by name."""
    path = Path(__file__).with_name("machines.yaml")
    return validate(dict[str, MachineSettings], read_yaml(path), str(path))


def named(name: str) -> MachineSettings:
    """Return the shipped machine with this name, or read the machine from the YAML file `name`."""
    if name.endswith((".yaml", ".yml")):
        return validate(MachineSettings, read_yaml(name), name)
    machines = shipped()
    if name not in machines:
        raise UserError(
            f"--machine: {unknown('machine', name, machines)}; or give a YAML file with the machine's levels of links"
        )
    return machines[name]


def for_device(device: str) -> str | None:
    """Return the name of the first shipped machine that has the device; None if there is no such machine."""
    return next((name for name, each in shipped().items() if each.has(device)), None)


# ---- workloads and devices -----------------------------------------------------------------------------

#: Fraction of a step's computing time that the forward pass takes. The backward pass takes twice as long as the forward
#: pass (Kaplan et al. 2020, arXiv:2001.08361, section 2.1).
FORWARD = 1 / 3
#: Measured quantity. IO (loading), SYNTHETIC (computing) and FULL (training) are the modes of
#: `dlscale.measure.records.MODES`. ALONE is SYNTHETIC without averaging gradients over the copies of the model. EPOCH
#: is an epoch of training, including the wait for the first batch. VALIDATION is a validation. BOTH is an epoch,
#: followed by a validation.
Mode = Literal["IO", "SYNTHETIC", "ALONE", "FULL", "EPOCH", "VALIDATION", "BOTH"]


@dataclass(frozen=True)
class Costs:
    """Costs that a fit finds; all costs are positive."""

    fixed: float  #: Fixed computing time of a device, seconds per step: kernel launches, optimiser step.
    sample: float  #: Computing time of a device in addition to `fixed`, seconds per sample.
    load: float  #: Loading time of a device, seconds per sample.
    blend: float  #: Overlap of loading and computing: step^p = loading^p + computing^p with p = 1 + blend.
    start: float  #: Start time of a loader's worker, seconds; workers start one after the other.
    spread: float  #: Relative standard deviation of the step times of the devices.
    #: Relative slowdown of loading for each further device of a node, since the loaders share the node's processors. If
    #: the devices are processes on these processors, computing slows down as well.
    host: float
    near: float  #: Time per byte within a node, as a multiple of the machine's time per byte.
    far: float  #: Time per byte between nodes, as a multiple of the machine's time per byte.
    slowdown: float  #: Seconds that computing loses per second of simultaneous communication.
    split: float  #: Relative increase of the computing time per doubling of the devices that share a model.


@dataclass(frozen=True)
class Tokens:
    """Tokens and blocks of a model that devices can share."""

    count: int  #: Tokens per sample.
    width: int
    depth: int  #: Number of blocks.
    bytes: int = 2  #: Bytes per element that devices exchange.
    again: bool = False  #: Whether the backward pass repeats the forward pass of the blocks (activation checkpointing).


@dataclass(frozen=True)
class Memory:
    """Memory of a device with a complete model, bytes."""

    state: float  #: Weights, gradients and optimiser state.
    activations: float  #: Activations per sample.


@dataclass(frozen=True)
class Workload:
    """Properties of a training that do not depend on the machine."""

    gradients: float  #: Bytes of gradients that are averaged in a step.
    buckets: tuple[float, ...]  #: Fraction of the gradients in each bucket, in the order in which buckets are ready.
    tokens: Tokens | None = None  #: None if devices cannot share the model.
    processes: bool = False  #: Whether devices are processes on a node's processors.
    #: Bytes of weights that FSDP gathers before the forward pass, and before the backward pass. None if each device has
    #: all weights.
    gathered: tuple[float, float] | None = None
    workers: int = (
        1  #: Workers of a device's loader, each of which makes batches; threads that make a batch together count as 1.
    )
    loaded: float | None = None  #: Samples/s that a device's loader has delivered to another model; None if unknown.
    storage: float = math.inf  #: Samples/s that the storage serves to all devices together.
    memory: Memory | None = None


def buckets(tensors: Sequence[float], cap: float = 25 * 2**20, first: float = 2**20) -> tuple[float, ...]:
    """Return the fraction of the gradients in each bucket of DistributedDataParallel.

    `tensors` are the bytes of gradients, in the order in which gradients are ready. A bucket is full when its tensors
    have at least `first` bytes (first bucket) or `cap` bytes (later buckets); see compute_bucket_assignment_by_size in
    torch/csrc/distributed/c10d/reducer.cpp.
    """
    parts, filling, limit = list[float](), 0.0, first
    for size in tensors:
        filling += size
        if filling >= limit:
            parts.append(filling)
            filling, limit = 0.0, cap
    total = sum(tensors)
    return tuple(part / total for part in [*parts, *([filling] if filling else [])])


def evenly(size: float) -> list[float]:
    """Split `size` bytes of gradients into equal parts of about a mebibyte, for a model with unknown tensors."""
    count = max(1, round(size / 2**20))
    return [size / count] * count


@dataclass(frozen=True)
class Job:
    """Devices of a training, and samples per step."""

    devices: int
    batch: float  #: Samples per step of each device, or of each group of devices that share a model.
    tp: int = 1  #: Number of tensor-parallel devices.
    cp: int = 1  #: Number of context-parallel devices.
    per_node: int | None = None  #: Number of devices used per node; None if all are used.

    @property
    def shared(self) -> int:
        """Number of devices that share a copy of the model."""
        return self.tp * self.cp

    @property
    def dp(self) -> int:
        """Number of groups of devices, each of which gets different samples."""
        return self.devices // self.shared

    @property
    def samples(self) -> float:
        """Samples per step over all devices."""
        return self.batch * self.dp


@dataclass(frozen=True)
class Measure:
    """Measured quantity."""

    mode: Mode = "FULL"
    samples: float = 0.0  #: Samples of an epoch or a validation.
    validated: float = 0.0  #: Samples of the validation, if `mode` is BOTH.


STEPS = Measure()


@dataclass(frozen=True)
class StepTimes:
    """Durations of the parts of a step, seconds."""

    compute: float  #: Computing of an average device.
    waiting: float  #: Waiting for the slowest device.
    slowed: float  #: Time that computing loses by simultaneous communication.
    exposed: float  #: Communication that computing does not hide.
    loading: float  #: Loading that computing does not hide.

    @property
    def seconds(self) -> float:
        return self.compute + self.waiting + self.slowed + self.exposed + self.loading

    @property
    def without_loading(self) -> float:
        return self.seconds - self.loading


@functools.cache
def expected_maximum(count: int) -> float:
    """Return the expected maximum of `count` standard normal numbers, which is the integral of x d(Phi(x)^count).

    Source: David and Nagaraja 2003, Order Statistics, section 3.1. The result is accurate to 1e-6 for counts up to 1e9.
    """
    x = np.linspace(-9, 9, 18001)
    return float(np.trapezoid(np.heaviside(x, 0.5) - np.exp(count * log_ndtr(x)), x))


def last_sent(ready: Iterable[float], costs: Iterable[float]) -> float:
    """Return the time at which the last bucket has been sent.

    Sending a bucket begins when the bucket is ready and the previous bucket has been sent.
    """
    now = 0.0
    for begin, cost in zip(ready, costs, strict=True):
        now = max(now, begin) + cost
    return now


def step(machine: Machine, work: Workload, costs: Costs, job: Job) -> StepTimes:
    """Return the durations of the parts of a step."""
    compute, links = _compute(machine, work, costs, job), machine.used(job.per_node, costs.near, costs.far)
    exposed, hidden = _gradients(links, work, job, compute)
    exposed += _model(links, work, job)
    waiting = compute * costs.spread * expected_maximum(job.devices)
    slowed = costs.slowdown * hidden
    alone = compute + waiting + slowed + exposed
    load = _load(machine, work, costs, job)
    return StepTimes(compute, waiting, slowed, exposed, _blended(alone, load, costs.blend) - alone)


def _compute(machine: Machine, work: Workload, costs: Costs, job: Job) -> float:
    own = costs.fixed + job.batch * costs.sample * (1 + costs.split) ** math.log2(job.shared) / job.shared
    return own * (_slowdown_in_node(machine, costs, job) if work.processes else 1.0)


def _slowdown_in_node(machine: Machine, costs: Costs, job: Job) -> float:
    return 1 + costs.host * (min(job.devices, job.per_node or machine.per_node) - 1)


def _load(machine: Machine, work: Workload, costs: Costs, job: Job) -> float:
    return max(job.batch * costs.load * _slowdown_in_node(machine, costs, job), job.samples / work.storage)


def _start(machine: Machine, work: Workload, costs: Costs, job: Job) -> float:
    """Return the seconds until the first batch: workers start one by one, and one worker makes the batch."""
    return work.workers * (costs.start + _load(machine, work, costs, job))


def _blended(first: float, second: float, blend: float) -> float:
    """Return the duration of two overlapping parts.

    The duration is the sum of both parts for a blend of 0, and approaches the longer part for a large blend.
    """
    most, power = max(first, second), 1 + blend
    return most * ((first / most) ** power + (second / most) ** power) ** (1 / power)


def _gradients(machine: Machine, work: Workload, job: Job, compute: float) -> tuple[float, float]:
    """Return the exposed and the hidden seconds of communication between the copies of a model.

    A fraction of the gradients' bytes is assumed to be ready after the same fraction of the backward pass.
    With FSDP the weights of a unit are gathered before the unit's forward pass, and again before its backward pass
    unless the weights were kept. The unit's gradients are reduced after its backward pass.
    """
    ranks, stride, size = job.dp * job.cp, job.tp, work.gradients / job.tp
    if ranks == 1:
        return 0.0, 0.0
    ends = np.cumsum(work.buckets)
    if work.gathered is None:
        sent = [machine.all_reduce(share * size, ranks, stride) for share in work.buckets]
        exposed = _exposed((1 - FORWARD) * compute, ends, sent)
        return exposed, sum(sent) - exposed
    forward, again, reduced = (  # a reduce-scatter takes as long as an all-gather
        [machine.all_gather(share * bytes_ / job.tp, ranks, stride) for share in work.buckets]
        for bytes_ in (*work.gathered, work.gradients)
    )
    # Backwards in time, the gather before a unit's forward pass is like a bucket sent after its backward pass.
    exposed = _exposed(FORWARD * compute, ends, forward)
    exposed += _exposed((1 - FORWARD) * compute, ends, [sum(both) for both in zip(again, reduced, strict=True)])
    return exposed, sum(forward) + sum(again) + sum(reduced) - exposed


def _exposed(seconds: float, ends: np.ndarray, sent: Sequence[float]) -> float:
    return last_sent((seconds * end for end in ends), sent) - seconds


def _model(machine: Machine, work: Workload, job: Job) -> float:
    """Return the seconds of communication between devices that share a model.

    Computing does not hide this communication. Tensor-parallel devices sum the tokens four times per block
    (Shoeybi et al. 2019, arXiv:1909.08053, figure 3); sequence parallelism takes the same time. Context-parallel
    devices gather keys and values, and reduce the gradients of keys and values. With activation checkpointing the
    inputs of a block are gathered again.
    """
    if work.tokens is None or job.shared == 1:
        return 0.0
    tokens = work.tokens
    size = job.batch * tokens.count * tokens.width * tokens.bytes
    tensor = 4 * machine.all_reduce(size / job.cp, job.tp)
    tensor += 3 * tokens.again * machine.all_gather(size / job.cp, job.tp)
    context = (2 + tokens.again) * machine.all_gather(2 * size / job.tp, job.cp, job.tp)
    return tokens.depth * (tensor + context)


def seconds(machine: Machine, work: Workload, costs: Costs, job: Job, of: Measure = STEPS) -> float:
    """Return the seconds of the measured quantity `of`: a step in a mode, an epoch, a validation, or the last two."""
    if of.mode == "IO":
        return _load(machine, work, costs, job)
    if of.mode == "ALONE":
        return _compute(machine, work, costs, job) + _model(
            machine.used(job.per_node, costs.near, costs.far), work, job
        )
    if of.mode == "VALIDATION":
        forward = FORWARD * _compute(machine, work, replace(costs, fixed=0.0), job)
        each = _blended(forward, _load(machine, work, costs, job), costs.blend)
        return _start(machine, work, costs, job) + of.samples / job.samples * each
    whole = step(machine, work, costs, job)
    if of.mode in ("EPOCH", "BOTH"):
        epoch = _start(machine, work, costs, job) + of.samples / job.samples * whole.seconds
        validation = Measure("VALIDATION", of.validated)
        return epoch if of.mode == "EPOCH" else epoch + seconds(machine, work, costs, job, validation)
    return whole.seconds if of.mode == "FULL" else whole.without_loading


def rate(machine: Machine, work: Workload, costs: Costs, job: Job, of: Measure = STEPS) -> float:
    """Return the samples/s over all devices; the rate of an epoch or a validation counts the samples in `of`."""
    done = of.samples if of.mode in ("EPOCH", "VALIDATION", "BOTH") else job.samples
    return done / seconds(machine, work, costs, job, of)


def memory(work: Workload, job: Job) -> float | None:
    """Return the bytes that a device needs; None if unknown.

    Memory for gathered weights and for libraries is not included. Weights, gradients and optimiser state are sharded
    over tensor-parallel devices, with FSDP over all devices. Activations are split over the devices that share a model.
    """
    if work.memory is None:
        return None
    shared = job.tp * (job.dp * job.cp if work.gathered else 1)
    return work.memory.state / shared + job.batch * work.memory.activations / job.shared
