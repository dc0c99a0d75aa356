"""Which of a run's processes this one is, by what started it; known before PyTorch is imported."""

from __future__ import annotations

import os
from typing import NamedTuple

#: Variables that name rank, size and local rank, by what started the process. Slurm's come last: within its jobs
#: mpirun starts one process a node by srun, and that one starts the ranks.
VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),  # torchrun
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # mpirun of Open MPI, jsrun
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),  # mpirun_rsh of MVAPICH2
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # mpiexec (Hydra) of MPICH, Intel MPI
    ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK"),  # mpiexec of Cray's PALS
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),  # srun
)


#: Variable that names a file, in a folder of one user alone, by which the ranks of a node meet.
MEET = "DLSCALE_MEET"


class Ranks(NamedTuple):
    """The place of this process among those that were started together."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  #: Rank on the node.


def ranks() -> Ranks:
    """Return the place by the environment; a process of which it says nothing is alone."""
    for names in VARIABLES:
        values = [os.environ.get(name, "") for name in names]
        if all(value.isdecimal() for value in values):
            return Ranks(*map(int, values))
    return Ranks()
