"""Shards of tensors, with offsets in the full tensor, because a resumed run may shard the tensor differently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Placed

from dlscale.parallel.world import World


@dataclass(frozen=True)
class Cut:
    """Cut of a tensor of full shape `shape` along `dim`: a mesh's devices have the parts that `torch.chunk` returns."""

    mesh: DeviceMesh
    dim: int
    shape: torch.Size

    @property
    def offset(self) -> int:
        each = -(-self.shape[self.dim] // self.mesh.size())
        return min(each * self.mesh.get_local_rank(), self.shape[self.dim])

    def part(self, full: torch.Tensor) -> torch.Tensor:
        """Return this device's part of the full tensor."""
        each = -(-self.shape[self.dim] // self.mesh.size())
        return full.narrow(self.dim, self.offset, min(each, self.shape[self.dim] - self.offset))


@dataclass(frozen=True)
class Shard:
    """Shard of a tensor on one device, or the full tensor.

    `torch.distributed.checkpoint` calls the methods `__create_write_items__`, `__create_chunk_list__` and
    `__get_tensor_shard__`.
    """

    tensor: torch.Tensor
    cuts: tuple[Cut, ...] = ()  #: cuts that make the shard from the full tensor, in order

    @property
    def shape(self) -> torch.Size:
        """Shape of the full tensor."""
        return self.cuts[0].shape if self.cuts else self.tensor.shape

    @property
    def offsets(self) -> torch.Size:
        offsets = [0] * len(self.shape)
        for cut in self.cuts:
            offsets[cut.dim] += cut.offset
        return torch.Size(offsets)

    def gathered(self) -> torch.Tensor:
        """Gather the full tensor on the device that computes with the shard; all devices must call this method."""
        tensor = self.tensor
        for cut in reversed(self.cuts):
            kind = cut.mesh.device_type
            local = tensor.to(kind).contiguous()
            stride = torch.empty(cut.shape, device="meta").stride()
            parts = DTensor.from_local(local, cut.mesh, [Placed(cut.dim)], shape=cut.shape, stride=stride)
            tensor = parts.redistribute(placements=[Replicate()]).to_local()
        return tensor

    def slice_like(self, full: torch.Tensor) -> torch.Tensor:
        """Return the same shard of `full`, another full tensor."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.tensor.shape, strict=True)):
            full = full.narrow(dim, offset, size)
        return full

    def copy(self, device: str) -> Shard:
        """Return a copy on `device` in separate, contiguous memory, which safetensors requires."""
        copied = self.tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)
        return replace(self, tensor=copied)

    def empty(self) -> Shard:
        """Return a shard of the same shape on the host, with uninitialised values."""
        return replace(self, tensor=torch.empty_like(self.tensor, device="cpu"))

    def __create_write_items__(self, name: str, shard: Any) -> list[WriteItem]:
        if not self.tensor.numel():
            return []
        chunk = ChunkStorageMetadata(self.offsets, self.tensor.shape)
        properties = TensorProperties.create_from_tensor(self.tensor)
        return [
            WriteItem(
                index=MetadataIndex(name, self.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(self.offsets, self.tensor.shape)] if self.tensor.numel() else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.tensor


def own_shards(shards: Mapping[str, Shard], world: World, first: Container[str] = ()) -> dict[str, Shard]:
    """Return the shards that this device writes, so that all devices together write each part of a tensor once.

    Devices that hold the same parts write about equal amounts. Parts of the tensors named in `first` are written by the
    first device that holds them.
    """
    ranks = world.mesh.ranks if world.mesh else torch.arange(world.size)[None]
    # position of this rank along tp, and among the ranks with this position along tp
    across, along = (int(place) for place in (ranks == world.rank).nonzero()[0])
    holders: dict[str, tuple[int, int]] = {}
    total, before = Counter[int](), Counter[int]()
    for name, shard in shards.items():
        sizes = {cut.mesh.mesh_dim_names: cut.mesh.size() for cut in shard.cuts}
        sharing = sizes.get(("shard",), 1)
        copy, copies = along // sharing, ranks.shape[1] // sharing
        alike = (copy, copies) if ("tp",) in sizes else (across * copies + copy, len(ranks) * copies)
        holders[name] = alike
        total[alike[1]] += shard.shape.numel()
    own: dict[str, Shard] = {}
    for name, shard in shards.items():
        place, count = holders[name]
        if place == (0 if name in first else before[count] * count // max(total[count], 1)):
            own[name] = shard
        before[count] += shard.shape.numel()
    return own


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this device's part of a tensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def cut(parameter: torch.Tensor) -> tuple[Cut, ...]:
    """Return FSDP's cut of a parameter, along its first dimension; empty if FSDP does not shard the parameter."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    return (Cut(mesh["shard"] if mesh.ndim > 1 else mesh, 0, parameter.shape),)
