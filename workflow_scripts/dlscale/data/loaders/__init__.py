"""Loaders: their settings, and one module `KIND_loader` each, with the same `build`, over the one sample stream."""

from __future__ import annotations

import signal
from typing import Annotated, Literal

from pydantic import Field

from dlscale.core.schema import Few, Strict, Workers


class _Reading(Strict):
    staging: Literal["none", "memory", "local"] = Field(
        "none",
        description="Where each node first copies the data, once for all of its processes. memory: into its memory; "
        "local: onto its own disk, which the site names (local_disk); none: data are read where they lie.",
    )


class TorchLoader(_Reading):
    """PyTorch's DataLoader: worker processes, the published baseline."""

    kind: Literal["torch"]
    workers: Workers = Field(2, description="Loader processes; 0 loads in the training process.")
    prefetch: Few = Field(2, description="Batches that each worker keeps ready.")
    pin_memory: bool = Field(True, description="Page-locked host memory for copies to a GPU; no effect on a CPU.")


class DirectLoader(_Reading):
    """Threads that read mapped files into reused buffers; a GPU turns and decodes what they read."""

    kind: Literal["direct"]
    workers: Workers = Field(2, description="Threads; 0 loads in the thread of the model.")
    prefetch: Few = Field(2, description="Batches that the loader keeps ready.")
    resident: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Hold all data on the device, and read them once. auto: on a GPU, if they take at most 40 % of "
        "its memory, less what the process holds already; the log says which.",
    )


class DaliLoader(_Reading):
    """NVIDIA DALI, with its own operators (`pip install dlscale[dali]`)."""

    kind: Literal["dali"]
    reader: Literal["h5py", "numpy"] = Field(
        "h5py",
        description="What reads samples on grids. h5py: processes, the files; numpy: DALI's own threads, boxes of "
        "`.npy` twins of volumes, which are made once if they are not there (docs/ladder.md).",
    )
    workers: Annotated[Workers, Field(ge=1)] = Field(
        2, description="Threads of the pipeline; with `reader: h5py` also the number of processes that read."
    )
    prefetch: Few = Field(2, description="Batches that the loader keeps ready.")


class SyntheticLoader(Strict):
    """One batch of random numbers on the device, again and again: no data at all."""

    kind: Literal["synthetic"]


#: All loaders' settings; the configuration's key `loader` is one of them.
LOADERS = (TorchLoader, DirectLoader, DaliLoader, SyntheticLoader)


def outlive_signals(worker: int = 0) -> None:
    """Live on where all processes of a job are signalled: the training, which ends its workers, has yet to save."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
