"""Check by hashes that ranks with copies of the same weights have equal bits."""

from __future__ import annotations

import hashlib

import torch

from dlscale.core.errors import UserError
from dlscale.parallel.shards import Shard
from dlscale.parallel.world import World
from dlscale.train.step import Step


def check_replicas(step: Step, world: World, epoch: int) -> None:
    """Raise `UserError` if ranks have different bits for the same part of a parameter; call on all ranks.

    Buffers are not compared, because the statistics of batch normalisation may differ between ranks.
    """
    shards = {name: shard for name, shard in step.weights.shards().items() if name in step.weights.named}
    own = {(name, shard.offsets): _digest(shard) for name, shard in shards.items() if shard.tensor.numel()}
    every = world.gather(own)
    for name, offsets in dict.fromkeys(part for each in every for part in each):
        groups: dict[bytes, list[str]] = {}
        for rank, each in enumerate(every):
            if (name, offsets) in each:
                groups.setdefault(each[name, offsets], []).append(str(rank))
        if len(groups) > 1:
            different = " | ".join(", ".join(ranks) for ranks in groups.values())
            raise UserError(
                f"epoch {epoch}: parameter {name} differs between the ranks {different} (training.check_replicas), "
                "which must hold equal weights. Look for code that changes weights outside of the optimiser, and for "
                "faulty devices"
            )


def _digest(shard: Shard) -> bytes:
    return hashlib.sha256(shard.copy("cpu").tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).digest()
