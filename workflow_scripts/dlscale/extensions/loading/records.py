"""Records of a program's loaders: `loading.json`."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from dlscale.core.record import Measured, Record

#: Number of events, samples or bytes.
Count = Annotated[int, Field(ge=0, le=2**63)]


class Fetch(Record):
    """Sums of the batches that a process fetched, without its first batch; times in seconds."""

    seed: int | None = None  #: Seed of the iterator for which a worker fetches; None in the training process.
    first: Measured = 0.0  #: Duration of the first batch.
    batches: Count = 0
    seconds: Measured = 0.0
    cpu: Measured = 0.0  #: Processor time.
    parts: dict[
        str, Measured
    ] = {}  #: Time in `read` (HDF5, Zarr), `decode`, `transform` and `collate`, without overlap.
    transforms: list[str] = []  #: Names of the dataset's transforms.


class Loader(Record):
    """Sums of a loader in one training process; times in seconds."""

    dataset: str
    made: str = ""  #: Line of the program that made the loader, as `FILE:LINE`; empty if unknown.
    order: int = 0  #: Number of the dataset among datasets of loaders with these settings and line.
    length: Count | None = None
    workers: Count
    batch_size: Count | None = None
    pin_memory: bool
    prefetch: Count | None = None
    persistent: bool = False
    seeds: list[int] = []  #: Seeds of the loader's iterators.
    batches: Count  #: Batches after the first one of each epoch.
    waited: Measured  #: Wait for the batches in `batches`.
    firsts: Count  #: Number of epochs.
    first_waited: Measured  #: Wait for the first batches of all epochs.
    between: list[Measured] = []  #: Latest times from a batch to the request of the next batch.
    requests: Count = 0  #: Number of requests with a known number of ready batches.
    ready: Count = 0  #: Sum of the ready batches.
    empty: Count = 0  #: Number of requests without a ready batch.
    sized: Count = 0  #: Number of batches whose bytes are known.
    bytes: Count = 0  #: Bytes of these batches' tensors in main memory, if the model is on another device.
    pinned: Count = 0  #: Part of `bytes` in pinned memory.
    fetch: Fetch = Fetch()  #: Batches fetched in the training process; `read_loading` adds the workers' batches.


class Array(Record):
    """Reads of an HDF5 dataset or a Zarr array by all processes; bytes count without compression."""

    kind: str
    name: str
    file: str  #: Path of the first file.
    files: Count = 1
    dtype: str
    itemsize: Count
    chunks: list[Count] | None = None
    compression: str = ""
    cache: Count = 0  #: Bytes of HDF5's chunk cache.
    stored: Measured = 1.0  #: Stored bytes per byte of the values.
    regions: dict[str, Count] = {}  #: Number of requests by shape of the requested region.
    opens: Count = 0  #: Number of times that an HDF5 dataset was opened and read; number of requests for Zarr.
    requests: Count = 0
    seconds: Measured = 0.0
    requested: Count = 0  #: Bytes of the requests of a known region.
    touched: Count = 0  #: Bytes of the chunks that these requests touch.
    measured_used: Count = 0  #: Bytes of the requests whose reads were measured.
    measured_read: Count = 0  #: Stored bytes that read calls returned in these requests.
    stripes: str = ""  #: Striping of the first file on Lustre.

    @property
    def ratio(self) -> float | None:
        """Bytes read per byte used; None if unknown, or if the bytes come from memory."""
        if self.measured_used and self.measured_read:
            return self.measured_read / max(self.stored, 1e-6) / self.measured_used
        return self.touched / self.requested if self.kind == "Zarr" and self.requested and self.touched else None

    @property
    def region(self) -> str:
        """Most frequent shape of a request; empty if unknown."""
        return max(self.regions, key=lambda region: self.regions[region], default="")


class ProcessFile(Record):
    """File that `dlscale.extensions.loading.inside` writes in one process."""

    host: str
    pid: int
    parent: int
    device: str = ""
    cores: int = 1
    stopped: str = ""
    worker: Fetch | None = None
    loaders: list[Loader] = []
    arrays: list[Array] = []


class Advice(Record):
    """Most expensive problem of a loader, and its remedy."""

    cause: str  #: Key of the cause.
    what: str  #: Name of the cause.
    why: str
    todo: str
    share: float = Field(ge=0, le=1)  #: Fraction of the training's time that the problem costs.

    @property
    def sentence(self) -> str:
        """The advice in one sentence."""
        parts = re.split(r"(?<=[.]) (?=[A-Z0-9])", f"{self.why} {self.todo}")
        small = [text if text[1:2].isupper() else text[:1].lower() + text[1:] for text in parts]
        return f"{self.what}: {'; '.join(text.rstrip('.') for text in small)}."


class Loading(Record):
    """`loading.json`: loaders of a program, and the arrays that they read."""

    device: str = ""  #: Type of the device with the model's weights; empty if unknown.
    cores: int = 1  #: Number of CPUs that a training process may use; minimum over the processes.
    processes: int = 0  #: Number of training processes with a loader on a node; maximum over the nodes.
    loaders: list[Loader] = []
    arrays: list[Array] = []
    stopped: str = ""  #: Reason why the watch of a process stopped.
    advice: Advice | None = None
