"""Advice where memory is not enough: an allocation that fails ends as one message, with settings that would fit."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from pydantic import ValidationError

from dlscale.config.run import RunCore
from dlscale.core import registry
from dlscale.core.errors import UserError, brief
from dlscale.core.text import size
from dlscale.data import loaders
from dlscale.data.manifest import Manifest
from dlscale.parallel.world import World
from dlscale.train.build import build_step, open_session
from dlscale.train.footprint import predict
from dlscale.train.memory import available, total
from dlscale.train.step import Step

#: By device: the share that a predicted step may take of what is free, and the bytes that are left to others first.
#: Workspaces of libraries, threads and unused blocks are not predicted; those of a processor (oneDNN, malloc) were seen
#: to be up to 0.6 of what is predicted.
SHARE = {"cpu": 0.6, "cuda": 0.9}
RESERVE = {"cpu": 300_000_000, "cuda": 0}

#: Parts of a stage, by the function that is at work; the first that is found counts.
PLACES = {
    torch.Tensor.backward: "the backward pass",
    Step._backward: "the forward pass",
    Step._train_eagerly: "the update",
    Step.predict: "a prediction",
    build_step: "the set-up",
    open_session: "the set-up",
}

#: Where the code lies that loads data: ours and PyTorch's.
LOADING = tuple(str(Path(module.__file__).parent) for module in (loaders, torch.utils.data) if module.__file__)

#: Words of libraries that have no exception of their own for too little memory.
_TEXTS = (
    r"out of memory"  # CUDA's errors, and NCCL's, which quote them
    r"|_ALLOC_FAILED|_ALLOCATION_FAILED"  # statuses of cuBLAS, cuDNN, cuFFT, cuSOLVER, cuSPARSE
    r"|can't allocate memory|std::bad_alloc"  # of a CPU
)

#: Words of PyTorch's DataLoader where a process of it was killed; other signals it names.
_KILLED = r"DataLoader worker \(pid.*\) (is killed by signal: Killed|exited unexpectedly(?! with))"


@contextlib.contextmanager
def explained(run: RunCore, manifest: str | Path, world: World) -> Iterator[None]:
    """Turn an allocation that fails within this context, which the set-up belongs to, into a `UserError`.

    Where a system promises more memory than it has, as Linux does, it may instead end the process without a word.
    """
    free = available(world.device)
    try:
        yield
    except Exception as error:
        if any(re.search(_KILLED, str(each)) for each in chain(error)):
            raise UserError(
                "a process of the loader was killed, as systems do where memory is short: use fewer `loader.workers`, "
                "a smaller `loader.prefetch` or batch_size, or ask for more memory (--mem of a Slurm job)"
            ) from None
        if isinstance(error, UserError) or not is_exhaustion(error):
            raise
        text = message(error, run, Path(manifest), world, free)
        raise UserError(text) from None


def is_exhaustion(error: BaseException) -> bool:
    """Whether an exception says that there is not enough memory."""
    return any(map(_says, chain(error)))


def _says(error: BaseException) -> bool:
    return (
        isinstance(error, torch.OutOfMemoryError | MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or re.search(_TEXTS, str(error)) is not None
    )


def chain(error: BaseException) -> list[BaseException]:
    """Return an exception and those that it was raised from, or while they were handled.

    Compilers wrap what went wrong, and what cleans up after it, such as the end of a graph's recording, may fail, too.
    """
    found: list[BaseException] = []
    more: BaseException | None = error
    while more and more not in found:
        found.append(more)
        more = more.__cause__ or (None if more.__suppress_context__ else more.__context__)
    return found


def message(error: BaseException, run: RunCore, manifest: Path, world: World, free: int) -> str:
    """Return where memory was asked for, how much is there, and which settings would fit.

    `free` are the bytes that this process could take on its device when it began.
    """
    where, cause = place(error), next(filter(_says, chain(error)))
    said = brief(cause) or type(cause).__name__
    # What the failed step still holds is not wanted any more.
    for each in chain(error):
        traceback.clear_frames(each.__traceback__)
    gc.collect()
    device = f"the {'GPU' if world.device.type == 'cuda' else 'machine'} has {size(total(world.device))}"
    rank = f" (rank {world.rank} of {world.size})" if world.size > 1 else ""
    text = f"out of memory in {where}{rank}: {said}; {device}, and {size(free)} were free for this process"
    try:
        data = Manifest.read(manifest)
        needed = predict(run, data, world.device).peak or 0
        # It failed, so that no more than what it needs was there, however much seemed to be.
        kind = world.device.type
        fitting = alternatives(run, data, world, SHARE[kind] * min(free - RESERVE[kind], needed))
    except Exception as failure:  # a model may do what fake tensors cannot follow
        logging.info("memory cannot be predicted: %s: %s", type(failure).__name__, brief(failure))
        return f"{text}; try a smaller batch_size, or accumulation_steps"
    each_ = " on each device" if world.size > 1 else ""
    text += f"; a step of {run.batch_size} samples is predicted to take {size(needed)}{each_}"
    if not fitting:
        return f"{text}; no smaller batch fits either: choose a smaller model, or a device with more memory"
    return f"{text}; predicted to fit: " + ", or ".join(f"{shown(over)} ({size(bytes_)})" for over, bytes_ in fitting)


def alternatives(run: RunCore, manifest: Manifest, world: World, limit: float) -> list[tuple[dict[str, Any], int]]:
    """Return settings under which a step is predicted to take at most `limit` bytes, and what it takes.

    The cheapest come first: the parts of a batch cost little; to compute activations again costs up to a third of a
    step; a smaller batch is another training.
    """
    halvings = range(1, run.local_batch_size.bit_length())
    parts = [{"accumulation_steps": 2**n * run.accumulation_steps} for n in halvings]
    again = [{"activation_checkpointing": True, **more} for more in ({}, *parts)]
    if "activation_checkpointing" not in registry.study(run.study).supports or run.activation_checkpointing:
        again = []
    batches = [{"batch_size": (run.local_batch_size >> n) * run.geometry.dp} for n in halvings]
    found = []
    for candidates in (parts, again, batches):
        for over in candidates:
            with contextlib.suppress(ValidationError):  # they do not go together with the run's other settings
                other = type(run).model_validate({**run.model_dump(mode="json"), **over})
                bytes_ = predict(other, manifest, world.device).peak or 0
                if bytes_ <= limit:
                    found.append((over, bytes_))
                    break
    return found


def shown(over: dict[str, Any]) -> str:
    """Return settings as one writes them."""
    return ", ".join(f"{key}: {str(value).lower()}" for key, value in over.items())


def place(error: BaseException) -> str:
    """Return the part of a stage in which an exception was raised, by its traceback."""
    codes = [frame.f_code for each in chain(error) for frame, _ in traceback.walk_tb(each.__traceback__)]
    names = {_name(code) for code in codes}
    if found := [place for function, place in PLACES.items() if _name(function.__code__) in names]:
        return found[0]
    loading = any(code.co_filename.startswith(LOADING) for code in codes)
    return "the loading of data" if loading else "what surrounds the steps"


def _name(code: CodeType) -> tuple[str, str]:
    """Return file and name of a function's code, of which a profiler may have made a copy."""
    return code.co_filename, code.co_qualname
