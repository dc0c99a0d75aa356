"""Processes of a test, quickly begun: forks of one that has imported what they need, and computed nothing.

A process that starts Python and imports PyTorch takes seconds. What starts the processes of a run has tests of its own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp
from torch.testing._internal.distributed.fake_pg import FakeStore

multiprocessing.set_forkserver_preload(["dlscale.train.train", "dlscale.measure.throughput", "tests.test_mesh"])


def spawn(work: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> None:
    """Run `work(rank, *arguments)` in so many processes, and raise what one of them raised."""
    mp.start_processes(_begin, (work, arguments, dict(os.environ)), nprocs=ranks, start_method="forkserver")


def _begin(rank: int, work: Callable[..., None], arguments: tuple[Any, ...], environment: dict[str, str]) -> None:
    os.environ.clear()  # the first test's
    os.environ.update(environment)
    work(rank, *arguments)


@contextlib.contextmanager
def fake_group(ranks: int) -> Iterator[None]:
    """Have this process be the first of so many, of which the others are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
