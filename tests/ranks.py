"""Processes of a test, quickly begun: forks of one that has imported what they need, and computed nothing.

A process that starts Python and imports PyTorch takes seconds. What starts the processes of a run has tests of its own.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

multiprocessing.set_forkserver_preload(["dlscale.train.train", "dlscale.measure.throughput", "tests.test_mesh"])


def spawn(work: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> None:
    """Run `work(rank, *arguments)` in so many processes, and raise what one of them raised.

    They have the environment that there was when the first of a test session began.
    """
    mp.start_processes(work, arguments, nprocs=ranks, start_method="forkserver")
