"""Ranks (processes) of a run: this process's rank, exchanges between ranks, and the mesh of ranks.

A run on one device has a world of one rank, whose methods do not exchange anything. The axes of the mesh are dp
(samples), cp (tokens) and tp (weights of layers, and tokens).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dlscale.config.run import Geometry

CPU = torch.device("cpu")
AXES = ("dp", "cp", "tp")
Value = TypeVar("Value")

#: Description of the process groups of background threads, whose exchanges do not count as progress of steps.
BACKGROUND = "background"


@dataclass(frozen=True)
class World:
    """Ranks of a run, as this process sees them: one per device, or one for all GPUs with `parallel.kind: dp`."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  #: rank on the node
    device: torch.device = CPU  #: device of this process
    control: Any = None  #: process group that exchanges values on the host; None: the default group
    mesh: Mesh | None = None  #: mesh of all ranks if ranks share a model; None: every rank has a complete model
    network: str | None = None  #: network that NCCL uses between nodes; None: unknown, or another backend

    @property
    def main(self) -> bool:
        """Whether this rank is rank 0, which writes the results."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Data-parallel rank (mesh axis dp); equal for all ranks of a tp x cp group, which load the same samples."""
        return self.mesh.rank("dp") if self.mesh else self.rank

    @property
    def data_size(self) -> int:
        """Number of ranks that load different samples."""
        return self.mesh.size("dp") if self.mesh else self.size

    @property
    def replicas(self) -> Any:
        """Process group of the ranks that hold the same weights; None: the default group."""
        return self.mesh.replicas if self.mesh else None

    @property
    def lead(self) -> bool:
        """Whether this rank is the first in its group of ranks that share a model."""
        return self.mesh is None or self.mesh.rank("cp") == self.mesh.rank("tp") == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks with different samples, in place; every rank gets the same result.

        Ranks that share a model use the sum of their first rank, because their sums may round differently.
        """
        if self.data_size > 1:
            dist.all_reduce(values, group=self.mesh.group("dp") if self.mesh else None)
        for axis in ("cp", "tp"):
            if self.mesh and self.mesh.size(axis) > 1:
                dist.broadcast(values, group=self.mesh.group(axis), group_src=0)
        return values

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Broadcast tensors in place, from the first of the ranks with the same weights.

        The host does not wait for the devices.
        """
        if self.size > 1 and (self.mesh is None or self.mesh.size("dp") * self.mesh.size("cp") > 1):
            for tensor in tensors:
                dist.broadcast(tensor, group=self.replicas, group_src=0)

    def max(self, *values: float) -> list[float]:
        """Return the maximum of each number over all ranks; the host does not wait for the devices."""
        greatest = torch.tensor(values, dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(greatest, dist.ReduceOp.MAX, group=self.control)
        return [float(value) for value in greatest]

    def gather(self, value: Value) -> list[Value]:
        """Gather the values of all ranks on every rank, in the order of ranks."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.control)
        return values

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            dist.barrier(group=self.control)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- the mesh --------------------------------------------------------------------------------------


def arrangement(geometry: Geometry) -> torch.Tensor:
    """Return the rank at each position of the mesh, int64 [dp, cp, tp]."""
    slowest_first = geometry.order.split("-")[::-1]
    ranks = torch.arange(geometry.world_size).reshape([getattr(geometry, axis) for axis in slowest_first])
    return ranks.permute([slowest_first.index(axis) for axis in AXES])


class Mesh:
    """Mesh of all ranks, as this rank sees it.

    All ranks must construct the mesh at the same time, after `torch.distributed` was initialised.

    Attributes
    ----------
    devices
        PyTorch's mesh, with dimensions dp, cp, tp.
    ranks
        Rank numbers, int64 [tp, dp x cp]. The ranks of a row hold the same weights, and their numbers ascend, as in
        PyTorch's process groups.
    replicas
        Process group of this rank's row of `ranks`.
    model
        One-dimensional mesh of the ranks that share a model, ascending; None if each rank has a complete model.
    places
        Position in `model` for each pair of positions along cp and tp, as a list in which tp varies fastest.
    """

    def __init__(self, geometry: Geometry, kind: str) -> None:
        places = arrangement(geometry)
        self.kind, self.devices = kind, DeviceMesh(kind, places, mesh_dim_names=AXES)
        self.ranks = places.permute(2, 0, 1).flatten(1).sort().values
        self.replicas: dist.ProcessGroup = DeviceMesh(kind, self.ranks, mesh_dim_names=("tp", "same")).get_group("same")
        shared = places.flatten(1)  # [dp, cp x tp]
        several = [axis for axis in ("cp", "tp") if self.size(axis) > 1]
        self.model: DeviceMesh | None = self.devices[several[0]] if several else None
        if len(several) > 1:  # one collective over both axes; `DeviceMesh[several]` would need two collectives
            self.model = DeviceMesh(kind, shared.sort().values, mesh_dim_names=("dp", "model"))["model"]
        self.places: list[int] = shared[0].argsort().argsort().tolist()  # equal in all groups that share a model

    def rank(self, axis: str) -> int:
        return self.devices.get_local_rank(axis)

    def size(self, axis: str) -> int:
        return self.devices.size(AXES.index(axis))

    def group(self, axis: str) -> Any:
        return self.devices.get_group(axis)

    def along(self, axis: str) -> DeviceMesh | None:
        """Return the mesh of an axis; None if the axis has one rank."""
        return self.devices[axis] if self.size(axis) > 1 else None


class Pretended:
    """Stand-in for the first rank's mesh, without other ranks, to predict memory.

    An exchange in this mesh returns a tensor of the right shape, but does not transfer data.
    """

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self.model = PretendedAxes(geometry.cp * geometry.tp)
        self.places = [*range(geometry.cp * geometry.tp)]

    def rank(self, axis: str) -> int:
        return 0

    def size(self, axis: str) -> int:
        size: int = getattr(self._geometry, axis)
        return size

    def along(self, axis: str) -> PretendedAxes | None:
        return PretendedAxes(self.size(axis)) if self.size(axis) > 1 else None


@dataclass(frozen=True)
class PretendedAxes:
    """Stand-in for a `DeviceMesh` along one or two axes."""

    ranks: int

    def size(self) -> int:
        return self.ranks

    def get_local_rank(self) -> int:
        return 0

    def get_group(self) -> None:
        return None
