"""Records of a run's devices, of the links between them, and of the memory of a step."""

from __future__ import annotations

from typing import Literal

from dlscale.core.record import Measured, Record
from dlscale.core.text import number


class Device(Record):
    """Device of a stage, `cpu` or `cuda`, and CPU threads of a process."""

    kind: str = ""
    name: str = ""
    threads: int | None = None


class LinkLevel(Record):
    """Links of one kind between devices: a message of n bytes takes alpha + n beta seconds (Hockney 1994)."""

    name: Literal["node", "switch", "network"]  #: Level that both ends have in common.
    size: int  #: Units joined: devices of a node, nodes in all.
    links: int  #: Couples of processes that measured.
    alpha: Measured  #: Median latency, s: half of a small message's round trip.
    beta: Measured  #: Median seconds a byte, one way, while others of the level talk, too.


class Links(Record):
    """Measurements of the self-test of a run's processes."""

    backend: str  #: nccl or gloo.
    processes: int
    nodes: int
    seconds: float  #: Duration of the test.
    levels: list[LinkLevel]  #: The nearest first.

    def line(self) -> str:
        """Return the levels in a line."""
        return "; ".join(
            f"{level.name}: {number(1e6 * level.alpha)} µs"
            + (f", {number(1e-9 / level.beta)} GB/s" if level.beta else "")
            for level in self.levels
        )


class MemoryUse(Record):
    """Bytes on one device, by what they hold."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int  #: Saved by autograd between forward and backward pass, the batch included.
    peak: int | None = None  #: Greatest at one time, with the operators' own memory.

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations


class Memory(Record):
    """Memory of one device, bytes: predicted before a step, and measured at each of its stages."""

    predicted: MemoryUse
    #: In use at the ends of `set-up`, `forward`, `backward`, `step`: of the device, or of the process on a CPU.
    measured: dict[str, int] = {}
    peak: int | None = None  #: Greatest in use.
    device: int | None = None  #: Capacity of the device.
