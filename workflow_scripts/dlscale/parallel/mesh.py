"""The axes along which ranks share a run's work: dp (samples), cp (tokens), tp (weights of layers, and tokens)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dlscale.config.run import Geometry

AXES = ("dp", "cp", "tp")


def arrangement(geometry: Geometry) -> torch.Tensor:
    """Return the rank at each place of the mesh, int64 [dp, cp, tp]."""
    slowest_first = geometry.order.split("-")[::-1]
    ranks = torch.arange(geometry.world_size).reshape([getattr(geometry, axis) for axis in slowest_first])
    return ranks.permute([slowest_first.index(axis) for axis in AXES])


def replicas(geometry: Geometry) -> torch.Tensor:
    """Return the ranks that hold the same weights, for each place along tp: int64 [tp, dp x cp], neighbours together.

    Whatever the order of axes, ranks rise along a row: PyTorch's process groups are in this order, too.
    """
    return arrangement(geometry).permute(2, 0, 1).flatten(1).sort().values


class Mesh:
    """The mesh as this rank sees it; all ranks make it together, after `torch.distributed` has begun.

    Attributes
    ----------
    devices
        PyTorch's mesh, with dimensions dp, cp, tp.
    replicas
        Process group of this rank and of all that hold the same weights: those of dp x cp.
    ranks
        The ranks of `replicas`, for each place along tp, as the function of this name returns them.
    """

    def __init__(self, geometry: Geometry, kind: str) -> None:
        self.kind, self.devices = kind, DeviceMesh(kind, arrangement(geometry), mesh_dim_names=AXES)
        self.ranks = replicas(geometry)
        self.replicas: dist.ProcessGroup = DeviceMesh(kind, self.ranks, mesh_dim_names=("tp", "same")).get_group("same")

    def rank(self, axis: str) -> int:
        """Return this rank's place along an axis."""
        return self.devices.get_local_rank(axis)

    def size(self, axis: str) -> int:
        """Return how many share the work of an axis."""
        return self.devices.size(AXES.index(axis))

    def group(self, axis: str) -> Any:
        """Return the process group of the ranks along an axis, at this rank's place on the others."""
        return self.devices.get_group(axis)

    def along(self, *axes: str) -> DeviceMesh | None:
        """Return the mesh of those of these axes along which there are several ranks; None if there are none."""
        several = tuple(axis for axis in AXES if axis in axes and self.size(axis) > 1)
        return self.devices[several] if several else None


class Pretended:
    """A mesh as its first rank would see it, without the others: for who asks how much memory is needed.

    It has what `Mesh` has for a model that is shared (`size`, `rank`, `along`); what is exchanged has shapes alone.
    """

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry

    def rank(self, axis: str) -> int:
        return 0

    def size(self, axis: str) -> int:
        size: int = getattr(self._geometry, axis)
        return size

    def along(self, *axes: str) -> PretendedAxes | None:
        size = math.prod(self.size(axis) for axis in axes)
        return PretendedAxes(size) if size > 1 else None


@dataclass(frozen=True)
class PretendedAxes:
    """Some axes of such a mesh, as `DeviceMesh` has them."""

    ranks: int

    def size(self) -> int:
        return self.ranks

    def get_local_rank(self) -> int:
        return 0

    def get_group(self) -> None:
        return None
