"""Which of a run's processes this one is, by what started it; known before PyTorch is imported."""

from __future__ import annotations

import os
from typing import NamedTuple

#: Variables that name rank, size and local rank: torchrun's, then Slurm's of an `srun` step.
VARIABLES = (("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"))


class Ranks(NamedTuple):
    """The place of this process among those that were started together."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  #: Rank on the node.


def ranks() -> Ranks:
    """Return what the environment says; a process that nothing is said of is alone."""
    for names in VARIABLES:
        values = [os.environ.get(name, "") for name in names]
        if all(value.isdecimal() for value in values):
            return Ranks(*map(int, values))
    return Ranks()
