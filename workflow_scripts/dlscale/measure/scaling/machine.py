"""Time of collectives on the levels of a machine's topology.

A message of n bytes takes alpha + n beta seconds (Hockney 1994, doi:10.1016/S0167-8191(06)80021-9). Collectives follow
as in Thakur, Rabenseifner and Gropp 2005 (doi:10.1177/1094342005051521): reduce-scatter in a node, all-reduce between
nodes, all-gather in a node, on all levels at once, so that the slowest counts, as in AMD's Primus and in ASTRA-sim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from dlscale.core.errors import UserError, unknown
from dlscale.core.schema import Strict
from dlscale.core.settings import read_yaml, validate
from dlscale.parallel.records import LinkLevel, Links

#: Units of a level that joins as many as there are.
ANY = 2**31


@dataclass(frozen=True)
class Level:
    """Links of one kind: between the devices of a node, the nodes of a group of switches, these groups."""

    name: str
    size: int  #: Units that it joins: devices of a node, nodes of a group. The last level may join any number.
    latency: float  #: alpha, seconds a message.
    #: beta of one device while all send: of a network 1 / (bandwidth of a node / devices of a node).
    seconds_per_byte: float


@dataclass(frozen=True)
class Machine:
    """Levels of topology, the nearest first; the last one joins as many units as are asked for."""

    levels: tuple[Level, ...]

    @property
    def per_node(self) -> int:
        """Devices of a node."""
        return self.levels[0].size

    def used(self, per_node: int | None = None, near: float = 1.0, far: float = 1.0) -> Machine:
        """Return the machine with so many devices of a node in use (None: all), each with its own links.

        `near` and `far` are factors of the time a byte within a node and between nodes.
        """
        first, *others = self.levels
        levels = [replace(first, size=per_node or first.size, seconds_per_byte=first.seconds_per_byte * near)]
        levels += [replace(each, seconds_per_byte=each.seconds_per_byte * far) for each in others]
        return Machine(tuple(levels))

    def measured(self, links: Links) -> Machine:
        """Return the machine with the levels that a run's self-test measured."""
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
        """Return a group's number of units on each level; their product is at least `ranks`.

        `stride` is the distance of its ranks: 1 of devices that share a model, of copies a copy's number of devices.
        """
        found, reach = list[int](), 1
        for level in self.levels[:-1]:
            reach *= level.size
            done = math.prod(found)
            found.append(max(1, min(reach // (stride * done), math.ceil(ranks / done))))
        return [*found, math.ceil(ranks / math.prod(found))]

    def all_reduce(self, size: float, ranks: int, stride: int = 1) -> float:
        """Return the seconds in which `ranks` devices sum `size` bytes.

        By rings, 2 (n - 1) (alpha + size / n beta) on each level; at the top by a double binary tree where that is
        faster (Sanders, Speck and Traeff 2009, doi:10.1016/j.parco.2009.09.001): 2 ceil(log2 n) alpha + 2 size beta.
        """
        return self._time(size, ranks, stride, sweeps=2)

    def all_gather(self, size: float, ranks: int, stride: int = 1) -> float:
        """Return the seconds in which `ranks` devices gather `size` bytes; a reduce-scatter takes as long.

        By rings: (n - 1) (alpha + size / n beta) on each level.
        """
        return self._time(size, ranks, stride, sweeps=1)

    def _time(self, size: float, ranks: int, stride: int, sweeps: int) -> float:
        if ranks <= 1 or size <= 0:
            return 0.0
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
    """A level in a file."""

    name: str
    size: PositiveInt = Field(ANY, description="Units of the level before that it joins; of the last one any number.")
    latency: NonNegativeFloat = Field(description="Seconds a message.")
    bandwidth: PositiveFloat = Field(
        description="Bytes/s that a device sends while all of them do: what nccl-tests calls the bus's bandwidth."
    )
    efficiency: float = Field(1.0, gt=0, le=1, description="What is reached of it; 1 of what was measured.")


class MachineSettings(Strict):
    """A machine in `machines.yaml`, or in a file of one's own."""

    source: str = Field(description="Where the figures are from.")
    devices: list[str] = Field([], description="Parts of the names of devices that are taken to be in such a machine.")
    levels: list[LevelSettings] = Field(min_length=1, description="The nearest first.")

    @property
    def machine(self) -> Machine:
        return Machine(
            tuple(
                Level(each.name, each.size, each.latency, 1 / (each.bandwidth * each.efficiency))
                for each in self.levels
            )
        )


def shipped() -> dict[str, MachineSettings]:
    """Return the machines of `machines.yaml` by name."""
    path = Path(__file__).with_name("machines.yaml")
    return validate(dict[str, MachineSettings], read_yaml(path), str(path))


def named(name: str) -> MachineSettings:
    """Return a shipped machine, or that of a YAML file."""
    if name.endswith((".yaml", ".yml")):
        return validate(MachineSettings, read_yaml(name), name)
    machines = shipped()
    if name not in machines:
        raise UserError(f"--machine: {unknown('machine', name, machines)}; or give a YAML file with its levels")
    return machines[name]


def for_device(device: str) -> str:
    """Return the name of the first shipped machine that has such devices."""
    return next(name for name, each in shipped().items() if any(part in device for part in each.devices))
