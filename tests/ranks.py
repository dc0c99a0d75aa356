"""Processes of a test, quickly begun: forks of one that has imported what they need, and computed nothing.

A process that starts Python and imports PyTorch takes seconds. What starts the processes of a run has tests of its own.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

multiprocessing.set_forkserver_preload(["dlscale.train.train", "dlscale.measure.throughput", "tests.test_mesh"])


def spawn(work: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> None:
    """Run `work(rank, *arguments)` in so many processes, and raise what one of them raised."""
    mp.start_processes(_begin, (work, arguments, dict(os.environ)), nprocs=ranks, start_method="forkserver")


def _begin(rank: int, work: Callable[..., None], arguments: tuple[Any, ...], environment: dict[str, str]) -> None:
    os.environ.clear()  # the first test's
    os.environ.update(environment)
    work(rank, *arguments)
