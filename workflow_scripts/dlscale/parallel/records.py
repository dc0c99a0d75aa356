"""Records of a run's devices, of the links between them, and of the memory of a step."""

from __future__ import annotations

from typing import Literal

from dlscale.core.record import Measured, Record
from dlscale.core.text import number


class Device(Record):
    """Device of a process: its kind (`cpu` or `cuda`), its name, the CPU threads, and the network."""

    kind: str = ""
    name: str = ""
    threads: int | None = None
    network: str | None = None  #: Network that NCCL uses between nodes, such as Socket (TCP); None if unknown.


class LinkLevel(Record):
    """Links between devices on one level of the machine.

    A message of n bytes takes alpha + n beta seconds (Hockney 1994).
    """

    name: Literal["node", "switch", "network"]  #: Smallest unit of the machine that contains both ends of a link.
    size: int  #: Number of connected units: processes of a node for level `node`, nodes for level `network`.
    links: int  #: Number of pairs of processes whose link was measured.
    alpha: Measured  #: Median latency, s: half the round-trip time of a small message.
    beta: Measured  #: Median one-way time per byte, s/byte, while other pairs of the level also send.


class Links(Record):
    """Measurements from the self-test of a run's processes."""

    backend: str  #: nccl or gloo.
    processes: int
    nodes: int
    seconds: float  #: Duration of the self-test.
    levels: list[LinkLevel]  #: Levels with measured links, the level with the nearest devices first.

    def line(self) -> str:
        """Return latency and bandwidth of all levels in one line."""
        return "; ".join(
            f"{level.name}: {number(1e6 * level.alpha)} µs"
            + (f", {number(1e-9 / level.beta)} GB/s" if level.beta else "")
            for level in self.levels
        )


class MemoryUse(Record):
    """Bytes on one device, by use."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int  #: Tensors that autograd saves for the backward pass, including the batch.
    peak: int | None = None  #: Peak, including temporary memory of operators.

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations


class Memory(Record):
    """Memory of one device, bytes: predicted before a step, and measured during the step."""

    predicted: MemoryUse
    #: Memory in use at the end of each phase: `set-up`, `forward`, `backward` and `step`. On a GPU, tensors count; on a
    #: CPU, all memory of the process counts.
    measured: dict[str, int] = {}
    peak: int | None = None  #: Peak of the memory in use.
    device: int | None = None  #: Capacity of the device.
