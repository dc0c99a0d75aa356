"""A process of its own for nsys, which looks at whole processes: `python -m dlscale.measure.profilers.child`.

It makes the steps of a run in a world of its own with the children of other ranks. Ranges of a step are NVTX ranges.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nvtx
import torch

from dlscale.config.run import load_run
from dlscale.core import registry
from dlscale.core.machine import let_threads_wait
from dlscale.core.ranges import marking
from dlscale.launch.contain import hold_on
from dlscale.measure.window import Window
from dlscale.parallel.rendezvous import join
from dlscale.parallel.strategy import CommHook
from dlscale.train.build import open_session

#: Range within which nsys records a run that has no CUDA.
CAPTURE = "dlscale capture"


@dataclass(frozen=True)
class Asked:
    """Task of a child, as JSON on its command line."""

    config: str  #: The run's settings, or their file.
    manifest: str
    device: str
    threads: int | None
    studies: list[tuple[str, str]]  #: From outside: names and files.
    times: str | None  #: File for the seconds of the steps: before, recorded, after; None of one that is not recorded.


def main() -> None:
    """Make the steps that the only word on the command line asks for."""
    let_threads_wait()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    hold_on()  # the stage holds the other end of standard input
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    profiled(Asked(**json.loads(sys.argv[1])))


def profiled(asked: Asked) -> None:
    """Warm up, then make plain steps, those that are recorded, and plain ones again."""
    for study in asked.studies:
        registry.add(*study)
    run = load_run(asked.config, "profile")
    with join(run.processes, asked.device) as world:
        session = open_session(run, asked.manifest, world, asked.threads)
        if asked.times and not run.cuda_graph:  # a graph would replay the sum of gradients, but not the range
            session.step.strategy.around_averaging(averaged)
        with contextlib.closing(Window(run.profile, session)) as window:
            window.run(run.profile.skip)
            times = [window.run()]
            world.barrier()  # all have come so far
            with recorded(world.device) if asked.times else contextlib.nullcontext():
                times.append(window.run())
            times.append(window.run())
            if asked.times:
                Path(asked.times).write_text(json.dumps(times))


@contextlib.contextmanager
def recorded(device: torch.device) -> Iterator[None]:
    """Have nsys, which waits for it, record this context (`nsys.recording`)."""
    with marking(nvtx.annotate), contextlib.ExitStack() as stack:
        if device.type == "cuda":
            torch.cuda.profiler.start()
            stack.callback(torch.cuda.profiler.stop)
        else:
            stack.enter_context(nvtx.annotate(CAPTURE))
        yield


def averaged(hook: CommHook) -> CommHook:
    """Return `hook`, which averages a bucket of gradients, in a range `comm`.

    The range lasts from the launch until the sum is there; with NCCL until the device has been told to make it.
    """

    def within(group: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        opened = nvtx.start_range("comm")  # it may end in another thread

        def ended(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            nvtx.end_range(opened)
            return done.value()

        # What DDP waits for is this future, after the range's end: a mere callback would wait for Python's lock until
        # the thread that makes the steps, which then goes on, gives it away.
        return hook(group, bucket).then(ended)

    return within


if __name__ == "__main__":
    main()
