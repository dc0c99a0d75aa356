"""Steps of a run for a profiler to look at: those that training makes, on what the run's loader delivers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator

import torch

from dlscale.config.run import Profile as Settings
from dlscale.data.loaders.base import Loader
from dlscale.parallel.world import synchronize
from dlscale.train.build import Session
from dlscale.train.loop import Batch, Hook, run_steps


class Window:
    """An unbroken stream of steps, from the epoch that the settings name; `warm_up` makes the first ones.

    Close it at the end: it holds the loader.
    """

    def __init__(self, settings: Settings, session: Session) -> None:
        self.settings, self.session, self.number = settings, session, 0
        self._loader = session.loader("train")
        self._batches = weighted(self._loader, session, settings.epoch - 1)

    def batch(self) -> Batch:
        """Return the next batch, of which no step is made: input and target."""
        x, y, _ = next(self._batches)
        return x, y

    def warm_up(self) -> None:
        """Make the steps that the settings skip."""
        self.run(self.settings.skip)

    def run(self, steps: int | None = None) -> list[float]:
        """Make so many steps (default: those of the settings); return the seconds of each.

        The host does not wait for the device until the end of all. On a GPU a step's time is therefore the device's:
        from the end of the step before to its own.
        """
        clock = _device_clock if self.session.world.device.type == "cuda" else _host_clock
        tick, seconds = clock()
        tick()
        timed = Hook(after_step=lambda number, batch, loss: tick())
        count = self.settings.steps if steps is None else steps
        run_steps(self.session.step, self._batches, range(self.number, self.number + count), [timed])
        self.number += count
        synchronize(self.session.world.device)
        return seconds()

    def close(self) -> None:
        """Stop the loader."""
        self._batches.close()
        self._loader.close()


def _host_clock() -> tuple[Callable[[], None], Callable[[], list[float]]]:
    """Return what notes a time, and what returns the seconds between those noted."""
    times: list[float] = []

    def tick() -> None:
        times.append(time.perf_counter())

    return tick, lambda: [b - a for a, b in itertools.pairwise(times)]


def _device_clock() -> tuple[Callable[[], None], Callable[[], list[float]]]:
    """As `_host_clock`, of when the GPU comes to what the host gave it; to be asked when it has done all."""
    events: list[torch.cuda.Event] = []

    def tick() -> None:
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()

    return tick, lambda: [1e-3 * a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def weighted(loader: Loader, session: Session, epoch: int) -> Generator[Batch]:
    """Yield what the step takes, from an epoch (from 0) on, endlessly: input, target, weight of this rank's loss."""
    share = session.share()
    for number in itertools.count(epoch):
        for step, (x, y) in enumerate(loader.epoch(number)):
            yield x, y, share.weight(step, loader.samples)
