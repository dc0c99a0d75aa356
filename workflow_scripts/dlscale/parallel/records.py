"""Records of the devices of a run, and of the links between them."""

from __future__ import annotations

from typing import Literal

from dlscale.core.record import Measured, Record
from dlscale.core.text import number, size


class Device(Record):
    """Device of a stage: `cpu` or `cuda`, its name, CPU threads of a process."""

    kind: str = ""
    name: str = ""
    threads: int | None = None


class LinkLevel(Record):
    """Links of one kind between devices: a message of n bytes takes alpha + n beta seconds (Hockney 1994)."""

    name: Literal["node", "switch", "network"]  #: In common of both ends.
    size: int  #: Units that it joins: devices of a node, nodes below a switch, nodes or switches in all.
    links: int  #: That were measured: couples of processes.
    alpha: Measured  #: Median latency, s: half of a small message's way there and back.
    beta: Measured  #: Median of the seconds a byte takes, one way, while others of the level talk, too.
    worst: tuple[int, int]  #: The ranks of the link that is slowest for a large message,
    worst_alpha: float  #: with its latency, s,
    worst_beta: float  #: and its seconds a byte.


class AllReduce(Record):
    """A sum of as many bytes over all processes."""

    bytes: int
    seconds: float  #: Median, of the slowest process.


class Links(Record):
    """Measurements of the self-test of a run's processes."""

    backend: str  #: Of the exchanges: nccl, gloo.
    processes: int
    nodes: int
    seconds: float  #: That the test took.
    levels: list[LinkLevel]  #: The nearest first.
    all_reduce: list[AllReduce]  #: A small one and one like gradients.
    slow: list[str] = []  #: Nodes, processes and links that are much slower than others of their level, in words.

    def line(self) -> str:
        """Return the levels in a line."""
        found = [
            f"{level.name}: {number(1e6 * level.alpha)} µs"
            + (f", {number(1e-9 / level.beta)} GB/s" if level.beta else "")
            for level in self.levels
        ]
        found += [
            f"all_reduce of {size(sum_.bytes, ' ')}: {number(1e3 * sum_.seconds)} ms" for sum_ in self.all_reduce[-1:]
        ]
        return "; ".join([*found, *self.slow])
