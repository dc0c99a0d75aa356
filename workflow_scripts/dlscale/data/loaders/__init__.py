"""Loaders: their settings, and a module `KIND_loader` each with the same `build`, over the one sample stream.

Extensions add further ones.
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
        description="Where each node first copies the data, once for all of its processes. memory: into its memory; "
        "local: onto its own disk, which the site names (local_disk); none: data are read where they lie.",
    )


class TorchLoader(Reading):
    """PyTorch's DataLoader: worker processes, the published baseline."""

    kind: Literal["torch"]
    workers: Workers = Field(2, description="Loader processes; 0 loads in the training process.")
    prefetch: Few = Field(2, description="Batches that each worker keeps ready.")
    pin_memory: bool = Field(True, description="Page-locked host memory for copies to a GPU; no effect on a CPU.")


class DirectLoader(Reading):
    """Threads that read mapped files into reused buffers; a GPU turns and decodes what they read."""

    kind: Literal["direct"]
    workers: Workers = Field(2, description="Threads; 0 loads in the thread of the model.")
    prefetch: Few = Field(2, description="Batches that the loader keeps ready.")
    resident: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Hold all data on the device, and read them once. auto: on a GPU, if they take at most 40 % of "
        "its memory, less what the process holds already; the log says which.",
    )


class SyntheticLoader(Strict):
    """One batch of random numbers on the device, again and again: no data at all."""

    kind: Literal["synthetic"]


#: All loaders' settings; the configuration's key `loader` is one of them.
LOADERS = (TorchLoader, DirectLoader, *registry.loader_settings(), SyntheticLoader)


def outlive_signals(worker: int = 0) -> None:
    """Live on where all processes of a job are signalled: the training, which ends its workers, has yet to save."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
