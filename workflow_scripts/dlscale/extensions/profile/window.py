"""Unbroken stream of training steps that are profiled."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

from dlscale.config.run import Profile as Settings
from dlscale.parallel.world import synchronize
from dlscale.train.build import Session
from dlscale.train.loop import Batch, Hook, run_steps


class Window:
    """Unbroken stream of training steps from epoch `settings.epoch` on. `close` closes the stream and its loader."""

    def __init__(self, settings: Settings, session: Session) -> None:
        self.settings, self.session, self.number = settings, session, 0
        self._loader = session.loader("train")
        self._batches = session.training_batches(self._loader, settings.epoch - 1)

    def batch(self) -> Batch:
        """Take the next batch out of the stream; return its input and target."""
        x, y, _ = next(self._batches)
        return x, y

    def run(self, steps: int | None = None) -> list[float]:
        """Make `steps` steps (default: `settings.steps`); return the seconds of each step.

        The host waits for the device only after the last step. On a GPU, a step's time begins when the previous step
        ends.
        """
        device, ticks = self.session.world.device, list[Any]()
        cuda = device.type == "cuda"

        def tick() -> None:
            if cuda:  # the event is timed when the GPU reaches it
                ticks.append(torch.cuda.Event(enable_timing=True))
                ticks[-1].record()
            else:
                ticks.append(time.perf_counter())

        tick()
        timed = Hook(after_step=lambda number, batch, loss: tick())
        count = self.settings.steps if steps is None else steps
        run_steps(self.session.step, self._batches, range(self.number, self.number + count), [timed])
        self.number += count
        synchronize(device)
        return [1e-3 * a.elapsed_time(b) if cuda else b - a for a, b in itertools.pairwise(ticks)]

    def close(self) -> None:
        self._batches.close()
        self._loader.close()
