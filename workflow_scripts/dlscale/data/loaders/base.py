"""Interface of all loaders, and functions that open a run's samples and loader."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import default_collate

from dlscale.core import registry
from dlscale.core.errors import UserError
from dlscale.data.samples import GridSamples, Samples, tree_map

if TYPE_CHECKING:
    from dlscale.config.run import RunCore
    from dlscale.data.manifest import Manifest

#: Inputs and targets of B samples: trees of tensors [B, ...], with the structure of `input_spec` and `target_spec`.
Batch = tuple[Any, Any]


def read_batch(samples: Samples, epoch: int, indices: range) -> Batch:
    """Read samples one by one, and make a batch of them; without `indices`, the tensors have no rows."""
    read = list[Batch]()
    for index in indices or range(1):
        x, y = samples.read(epoch, index)
        read.append((tree_map(_tensor, x), tree_map(_tensor, y)))
    batch = (samples.collate or stack)(read)
    return batch if indices else first_samples(batch, 0)


def _tensor(values: Any) -> torch.Tensor:
    # A label may be a plain number. `from_numpy` takes a third of the time of `as_tensor`.
    return torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.as_tensor(values)


def first_samples(batch: Batch, number: int) -> Batch:
    """Return the first samples of a batch, in the same memory."""
    return tree_map(lambda values: values[:number], batch[0]), tree_map(lambda values: values[:number], batch[1])


def stack(read: list[Any]) -> Batch:
    """Stack the tensors of samples of equal shapes."""
    return tree_map(_stack_leaves, *(x for x, _ in read)), tree_map(_stack_leaves, *(y for _, y in read))


def _stack_leaves(*values: torch.Tensor) -> Any:
    try:
        return default_collate(list(values))  # in a worker, PyTorch writes into shared memory
    except RuntimeError:
        if len(shapes := {each.shape: None for each in values}) == 1:
            raise
        first, second, *_ = map(list, shapes)
        raise UserError(
            f"samples have arrays of different shapes, such as {first} and {second}, which cannot be stacked; define "
            "`collate` in the study, to pad them (docs/from_notebook.md)"
        ) from None


@dataclass(frozen=True)
class Share:
    """The part of each global batch that one data-parallel rank delivers.

    Global step s takes samples [s B, (s + 1) B) of the epoch. These samples are divided into R contiguous ranges, whose
    sizes are as equal as possible, and rank r takes the r-th range. Processes that share a model replica have the same
    data-parallel rank.
    """

    batch_size: int  #: samples of a global batch, B
    rank: int = 0  #: data-parallel rank, r
    size: int = 1  #: number of data-parallel ranks, R

    def steps(self, samples: int) -> int:
        """Return the number of global steps in an epoch of `samples` samples, including a smaller last step."""
        return -(-samples // self.batch_size)

    def count(self, step: int, samples: int) -> int:
        """Return the number of samples of all ranks in global step `step`."""
        return min(self.batch_size, samples - step * self.batch_size)

    def indices(self, step: int, samples: int) -> range:
        """Return the numbers, within the epoch, of this rank's samples in global step `step`."""
        first, count = step * self.batch_size, self.count(step, samples)
        return range(first + count * self.rank // self.size, first + count * (self.rank + 1) // self.size)

    def weight(self, step: int, samples: int) -> float:
        """Return the weight of this rank's mean loss in step `step`.

        The mean of the weighted losses over ranks equals the mean over samples.
        """
        return len(self.indices(step, samples)) * self.size / self.count(step, samples)


class Loader(ABC):
    """Loader of the batches of one split."""

    samples: int  #: samples in an epoch, over all ranks

    def __init__(self, samples: Samples, share: Share, device: torch.device) -> None:
        self.samples = samples.size
        self._share, self._device = share, device
        # A weak reference: if the caller drops an epoch's generator, the epoch ends and its last batch is freed.
        self._open: Callable[[], Generator[Batch] | None] = lambda: None

    def __len__(self) -> int:
        return self._share.steps(self.samples)

    def epoch(self, epoch: int, start: int = 0) -> Generator[Batch]:
        """Yield batches (x, y) of an epoch from global step `start` on, on the loader's device.

        Structure, shapes and types are those of `input_spec` and `target_spec`, unless the study has its own `collate`.
        A rank's part of a small last batch may be empty.
        The next batch may reuse the memory of the previous batch. A new epoch ends the previous epoch. On a GPU, work
        on the current stream may use a batch at once.
        """
        self._end()
        batches = self._batches(epoch, start)
        self._open = weakref.ref(batches)
        return batches

    @abstractmethod
    def _batches(self, epoch: int, start: int) -> Generator[Batch]:
        """Yield the batches of `epoch`; closing the generator discards prefetched batches."""

    def close(self) -> None:
        """Stop workers and close files."""
        self._end()

    def _end(self) -> None:
        if (batches := self._open()) is not None:
            batches.close()


def on_grids(samples: Samples, loader: str) -> GridSamples:
    """Return `samples` if they are on grids; else raise a `UserError` that names the loader."""
    if not isinstance(samples, GridSamples):
        raise UserError(
            f"loader.kind: {loader} reads only arrays on grids, but these samples are {type(samples).__name__}; "
            "set loader.kind to torch"
        )
    return samples


def open_samples(run: RunCore, manifest: Manifest, split: str) -> Samples:
    """Open the samples of a split, by the function of the study's kind of dataset."""
    study = registry.study(run.study)
    module = registry.module_of(study.dataset, "samples")
    assert module is not None  # kinds without a module `samples` use the module of `Rows`
    samples: Samples = registry.load(module).open_samples(manifest, split, run.samples, run.seed)
    samples.collate = study.collate
    return samples


def open_loader(run: RunCore, samples: Samples, share: Share, device: torch.device) -> Loader:
    """Return the run's loader of these samples."""
    build: Callable[..., Loader] = registry.load(registry.loader(run.loader.kind)).build
    if samples.collate and run.loader.kind not in ("torch", "synthetic"):
        raise UserError(
            f"loader.kind: {run.loader.kind} stacks arrays, but study {run.study} makes batches by its own `collate`; "
            "set loader.kind to torch"
        )
    open_computed: Callable[..., Loader] | None = getattr(samples, "open_computed_loader", None)
    if samples.collate or open_computed is None or run.loader.kind == "synthetic":
        return build(samples, run.loader, share, device)
    return open_computed(lambda inner: build(inner, run.loader, share, device), share, device)
