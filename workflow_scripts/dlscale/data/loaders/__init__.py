"""Settings of the loaders; each loader has a module `KIND_loader` with a function `build`.

All loaders except `synthetic` deliver the same samples. Extensions add further loaders.
"""

from __future__ import annotations

import signal
from typing import Literal

from pydantic import Field

from dlscale.core import registry
from dlscale.core.schema import Few, Strict, Workers


class Reading(Strict):
    """Common settings of all loaders that read data."""

    staging: Literal["none", "memory", "local"] = Field(
        "none",
        description="Copy of the data that each node makes at the start, for all its processes. none: no copy. memory: "
        "in the node's memory. local: on the node's own disk (local_disk of the site).",
    )


class TorchLoader(Reading):
    """PyTorch's DataLoader with worker processes, as in NERSC's tutorials."""

    kind: Literal["torch"]
    workers: Workers = Field(
        2, description="Loader processes per training process; 0: the training process loads the data."
    )
    prefetch: Few = Field(2, description="Batches that each worker keeps ready.")
    pin_memory: bool = Field(True, description="Use page-locked host memory for copies to a GPU; no effect on a CPU.")


class DirectLoader(Reading):
    """Threads that read mapped files into reused buffers; with a GPU, the GPU decodes the values."""

    kind: Literal["direct"]
    workers: Workers = Field(2, description="Threads per training process; 0: the training thread loads the data.")
    prefetch: Few = Field(2, description="Batches that the loader keeps ready.")
    resident: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether to keep all data on the device, so that they are read only once. auto: on a GPU, if the "
        "data take at most 40 % of the device memory not reserved by this process; the log shows the choice.",
    )


class SyntheticLoader(Strict):
    """One batch of random numbers on the device, delivered again and again.

    If the study has its own `collate`, the batch is the first batch of the data instead. No other data are read.
    """

    kind: Literal["synthetic"]


#: Classes of settings, one per loader; a run's key `loader` is an object of one of these classes.
LOADERS = (TorchLoader, DirectLoader, *registry.loader_settings(), SyntheticLoader)


def outlive_signals(worker: int = 0) -> None:
    """Ignore signals in a worker process, because the training ends its workers after it has saved.

    Slurm, for example, may signal all processes of a job at once.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
