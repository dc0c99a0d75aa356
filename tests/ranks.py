"""Fast start of a test's processes: forks of a process that has imported modules but has not computed anything.

A new Python process takes seconds to import PyTorch. Other tests cover the launchers that start a run's processes.
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
    """Run `work(rank, *arguments)` in `ranks` processes; raise the error of a failed process."""
    mp.start_processes(_begin, (work, arguments, dict(os.environ)), nprocs=ranks, start_method="forkserver")


def _begin(rank: int, work: Callable[..., None], arguments: tuple[Any, ...], environment: dict[str, str]) -> None:
    os.environ.clear()  # drop the environment of the fork server, which an earlier test may have started
    os.environ.update(environment)
    work(rank, *arguments)


@contextlib.contextmanager
def fake_group(ranks: int) -> Iterator[None]:
    """Make this process the first rank of a group whose other ranks do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
