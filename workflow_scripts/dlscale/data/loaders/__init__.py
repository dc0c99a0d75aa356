"""Settings of the loaders; each loader has a module `KIND_loader` with a function `build`.

All loaders deliver the same sample stream. Extensions add further loaders.
"""

from __future__ import annotations

import signal
from typing import Literal

from pydantic import Field

from dlscale.core import registry
from dlscale.core.schema import Few, Strict, Workers


class Reading(Strict):
    """Settings of all loaders that read data."""

    staging: Literal["none", "memory", "local"] = Field(
        "none",
        description="Copy of the data that each node makes first, once for all of its processes. memory: in its "
        "memory; local: on its own disk (local_disk of the site); none: no copy.",
    )


class TorchLoader(Reading):
    """PyTorch's DataLoader: worker processes, the published baseline."""

    kind: Literal["torch"]
    workers: Workers = Field(2, description="Loader processes; 0 loads in the training process.")
    prefetch: Few = Field(2, description="Batches that each worker keeps ready.")
    pin_memory: bool = Field(True, description="Page-locked host memory for copies to a GPU; no effect on a CPU.")


class DirectLoader(Reading):
    """Threads that read mapped files into reused buffers; a GPU transforms and decodes the values."""

    kind: Literal["direct"]
    workers: Workers = Field(2, description="Threads; 0 loads in the thread of the model.")
    prefetch: Few = Field(2, description="Batches that the loader keeps ready.")
    resident: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Keep all data on the device, and read them once. auto: on a GPU, if they take at most 40 % of "
        "the device memory that the process does not use yet; the log shows the choice.",
    )


class SyntheticLoader(Strict):
    """One batch of random numbers on the device, delivered again and again; no data are read."""

    kind: Literal["synthetic"]


#: Classes of the loaders' settings; the configuration's key `loader` is one of them.
LOADERS = (TorchLoader, DirectLoader, *registry.loader_settings(), SyntheticLoader)


def outlive_signals(worker: int = 0) -> None:
    """Ignore signals in a worker: the training, which ends its workers itself, still has to save.

    Slurm, for one, may signal all processes of a job.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
