"""The ranks (processes) of a run: which of them this one is, and what they exchange.

A run on one device is a world of one rank, in which everything below costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dlscale.parallel.mesh import Mesh

CPU = torch.device("cpu")
Value = TypeVar("Value")

#: Description of a group in which a thread of a rank exchanges beside its steps: how far it is says nothing of them.
BESIDE = "beside"


@dataclass(frozen=True)
class World:
    """The ranks of a run, one for each device, as one of them, this process, sees them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  #: rank on the node
    device: torch.device = CPU  #: what this process computes on
    control: Any = None  #: process group that exchanges values on the host; None: the default group does
    mesh: Mesh | None = None  #: who shares a model with whom; None: every rank has its own copy

    @property
    def main(self) -> bool:
        """Whether this is the rank that writes."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Rank among those that load different samples; ranks that share a model have the same."""
        return self.mesh.rank("dp") if self.mesh else self.rank

    @property
    def data_size(self) -> int:
        """Number of ranks that load different samples."""
        return self.mesh.size("dp") if self.mesh else self.size

    @property
    def replicas(self) -> Any:
        """Process group of the ranks that hold the same weights; None: the default group is."""
        return self.mesh.replicas if self.mesh else None

    @property
    def lead(self) -> bool:
        """Whether this is the first of the ranks that share a model."""
        return self.mesh is None or self.mesh.rank("cp") == self.mesh.rank("tp") == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Add up a tensor over all ranks of different samples, in place; every rank gets the same result.

        The sums of those who share a model differ in no more than rounding; the first one's is that of all, or they
        would decide differently.
        """
        if self.data_size > 1:
            dist.all_reduce(values, group=self.mesh.group("dp") if self.mesh else None)
        for axis in ("cp", "tp"):
            if self.mesh and self.mesh.size(axis) > 1:
                dist.broadcast(values, group=self.mesh.group(axis), group_src=0)
        return values

    def share(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give ranks of the same weights the values that the first of them has, in place; no device waits."""
        if self.size > 1 and (self.mesh is None or self.mesh.size("dp") * self.mesh.size("cp") > 1):
            for tensor in tensors:
                dist.broadcast(tensor, group=self.replicas, group_src=0)

    def max(self, *values: float) -> list[float]:
        """Return for each number the greatest of all ranks' numbers; no device waits."""
        greatest = torch.tensor(values, dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(greatest, dist.ReduceOp.MAX, group=self.control)
        return [float(value) for value in greatest]

    def gather(self, value: Value) -> list[Value]:
        """Return every rank's value, by rank."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.control)
        return values

    def barrier(self) -> None:
        """Return when every rank has come here."""
        if self.size > 1:
            dist.barrier(group=self.control)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
