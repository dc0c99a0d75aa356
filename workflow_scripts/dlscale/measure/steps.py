"""Timing of training steps, and batches for measurements."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterator

import torch

from dlscale.data.loaders.base import Loader
from dlscale.data.samples import samples_in
from dlscale.parallel.world import synchronize
from dlscale.train.build import Session
from dlscale.train.loop import Batch, Hook, run_steps


def timed_steps(
    consume: Callable[..., object], batches: Iterator[Batch], steps: int, device: torch.device
) -> tuple[int, float]:
    """Make `steps` steps; return their number of samples, and the seconds until the device has finished them."""
    counts = list[int]()
    count = Hook(after_step=lambda number, batch, result: counts.append(samples_in(batch[0])))
    start = time.perf_counter()
    run_steps(consume, batches, range(steps), [count])
    synchronize(device)
    seconds = time.perf_counter() - start
    return sum(counts), seconds


def training_batches(session: Session, loader: Loader, first_epoch: int) -> Generator[Batch]:
    """Yield training batches of all epochs from `first_epoch` on: (input, target, weight of this rank's loss)."""
    share = session.share()
    for epoch in itertools.count(first_epoch):
        for number, (x, y) in enumerate(loader.epoch(epoch)):
            yield x, y, share.weight(number, loader.samples)
