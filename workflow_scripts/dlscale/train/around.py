"""Context manager of the stages of a run: connect and test the ranks, and verify the data.

If memory runs out in this context, the error message suggests settings that need less memory.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import logging
import platform
import re
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from dlscale.config.run import RunCore
from dlscale.core import registry
from dlscale.core.errors import UserError, brief
from dlscale.core.text import size
from dlscale.data import loaders, staging
from dlscale.data.manifest import Manifest
from dlscale.parallel.records import Links
from dlscale.parallel.rendezvous import join
from dlscale.parallel.world import World
from dlscale.train.memory import available, total

#: Type of device → limit of a step's predicted memory, as a fraction of (free memory - `RESERVE`). The rest is for
#: workspaces, threads and unused blocks, which are not predicted: on a CPU, up to 0.6 times the prediction.
SHARE = {"cpu": 0.6, "cuda": 0.9}
#: Type of device → memory that a step must leave free, bytes.
RESERVE = {"cpu": 300_000_000, "cuda": 0}

#: Name of a function → part of a stage, for messages. Of the functions in a traceback, the first in this table counts.
PLACES = {
    "Tensor.backward": "the backward pass",
    "Step._backward": "the forward pass",
    "Step._train_eagerly": "the update",
    "Step.predict": "a prediction",
    "build_step": "the set-up",
    "open_session": "the set-up",
}

#: Folders of the code that loads data, in dlscale and in PyTorch.
LOADING = tuple(str(Path(module.__file__).parent) for module in (loaders, torch.utils.data) if module.__file__)

#: Parts of error messages about too little memory, from libraries without an exception type for this error: CUDA, NCCL,
#: cuBLAS, cuDNN and other libraries, and allocators of CPU memory.
_TEXTS = r"out of memory|_ALLOC_FAILED|_ALLOCATION_FAILED|can't allocate memory|std::bad_alloc"

#: Error messages of PyTorch's DataLoader after one of its worker processes was killed.
_KILLED = r"DataLoader worker \(pid.*\) (is killed by signal: Killed|exited unexpectedly(?! with))"


@contextlib.contextmanager
def run_context(
    run: RunCore, manifest: str | Path, device: str, splits: Sequence[str] = ("train", "valid")
) -> Iterator[tuple[World, Links | None]]:
    """Connect the ranks of a run, verify the files of its `splits`, and yield the ranks and the links, if measured.

    A failed allocation or a killed loader worker within this context becomes a `UserError`.
    """
    with join(run.processes, device) as world, translate_memory_errors(run, manifest, world):
        self_test = registry.provided("self_test", None)
        links = self_test(world, run.selftest) if self_test else None
        verify(Manifest.read(manifest), splits, world)
        yield world, links


def verify(manifest: Manifest, splits: Sequence[str], world: World) -> None:
    """Raise a `UserError` if data files are damaged; each rank verifies some of the files not verified yet.

    If each node has its own copy of the data, the ranks of a node verify the node's copy.
    """
    manifest.check_files()
    places = world.gather(platform.node() if staging.is_copy(manifest) else "")
    peers = [rank for rank, place in enumerate(places) if place == places[world.rank]]
    files = world.gather(staging.unverified(manifest, splits))[peers[0]]
    messages = world.gather(staging.damaged(manifest, files[peers.index(world.rank) :: len(peers)]))
    if any(messages):
        raise UserError("; ".join(itertools.chain(*messages)))
    if world.rank == peers[0]:
        staging.remember(manifest, files)


# ---- too little memory -----------------------------------------------------------------------------


@contextlib.contextmanager
def translate_memory_errors(run: RunCore, manifest: str | Path, world: World) -> Iterator[None]:
    """Turn a failed allocation, or a killed loader worker, within this context into a `UserError`."""
    free = available(world.device)
    try:
        yield
    except Exception as error:
        if any(re.search(_KILLED, str(each)) for each in chain(error)):
            raise UserError(
                "a worker process of the loader was killed, probably because memory ran out. Lower loader.workers, "
                "loader.prefetch or batch_size, or request more memory (geometry.memory_mb, or --mem of a Slurm job)"
            ) from None
        if isinstance(error, UserError) or not is_exhaustion(error):
            raise
        text = message(error, run, Path(manifest), world, free)
        raise UserError(text) from None


def is_exhaustion(error: BaseException) -> bool:
    """Return whether an exception or one of its causes (`chain`) reports too little memory."""
    return any(map(_says, chain(error)))


def _says(error: BaseException) -> bool:
    return (
        isinstance(error, torch.OutOfMemoryError | MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or re.search(_TEXTS, str(error)) is not None
    )


def chain(error: BaseException) -> list[BaseException]:
    """Return an exception and its causes: exceptions named by `raise … from`, or handled when it was raised."""
    found: list[BaseException] = []
    more: BaseException | None = error
    while more and more not in found:
        found.append(more)
        more = more.__cause__ or (None if more.__suppress_context__ else more.__context__)
    return found


def message(error: BaseException, run: RunCore, manifest: Path, world: World, free: int) -> str:
    """Return a message: where memory ran out, how much the device has, and which settings need less.

    `free` is the memory that this process could allocate on its device at the start, bytes.
    """
    kind, where = world.device.type, registry.provided("place_of_exhaustion", place)(error)
    reason = brief(cause := next(filter(_says, chain(error)))) or type(cause).__name__
    for each in chain(error):  # frees memory that the failed step still holds
        traceback.clear_frames(each.__traceback__)
    gc.collect()
    rank = f" (rank {world.rank} of {world.size})" if world.size > 1 else ""
    text = (
        f"out of memory in {where}{rank}: {reason}; the {'GPU' if kind == 'cuda' else 'machine'} has "
        f"{size(total(world.device))}, and {size(free)} were free for this process"
    )
    advise = registry.provided("memory_advice", None)
    try:
        limit, data = SHARE[kind] * (free - RESERVE[kind]), Manifest.read(manifest)
        advice = advise and advise(run, data, world, limit, SHARE[kind])
    except Exception as failure:  # fake tensors do not support every model
        logging.info("memory cannot be predicted: %s: %s", type(failure).__name__, brief(failure))
        advice = None
    return text + (advice or ". Try a smaller batch_size, or more accumulation_steps")


def place(error: BaseException) -> str:
    """Return the part of a stage in which an exception was raised."""
    codes = [frame.f_code for each in chain(error) for frame, _ in traceback.walk_tb(each.__traceback__)]
    names, loading = {code.co_qualname for code in codes}, any(code.co_filename.startswith(LOADING) for code in codes)
    found = (place for function, place in PLACES.items() if function in names)
    return next(found, "the loading of data" if loading else "code outside of the steps")
