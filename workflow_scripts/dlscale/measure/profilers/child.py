"""A process of its own for profilers that look at whole processes: `python -m dlscale.measure.profilers.child`.

It makes the steps of a run that the stage's settings name, in a world of its own with the children of other ranks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from dlscale.config.run import load_run
from dlscale.core import registry
from dlscale.core.errors import UserError
from dlscale.core.machine import let_threads_wait
from dlscale.core.ranges import marking
from dlscale.launch.contain import hold_on
from dlscale.measure.profilers.nvtx_ranges import averaged, marker, recorded
from dlscale.measure.window import Window
from dlscale.parallel.rendezvous import join
from dlscale.train.build import open_session

#: What begins the line that says why it failed: a profiler may say more after it.
FAILED = "profiled process: "


@dataclass(frozen=True)
class Asked:
    """What a child is to do; its only word on the command line, as JSON."""

    config: str  #: The run's settings, or their file.
    manifest: str
    device: str
    threads: int | None
    studies: list[tuple[str, str]]  #: From outside: names and files.
    times: str | None  #: File for the seconds of the steps: before, recorded, after; None of one that is not recorded.


def main() -> int:
    """Return the process's exit status: 0, 2 after a user's mistake, 1 after any other failure."""
    let_threads_wait()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    hold_on()  # the stage holds the other end of standard input
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        profiled(Asked(**json.loads(sys.argv[1])))
    except Exception as error:
        if not isinstance(error, UserError):
            traceback.print_exc()
        print(
            f"\n{FAILED}{'' if isinstance(error, UserError) else f'{type(error).__name__}: '}{error}", file=sys.stderr
        )
        return 2 if isinstance(error, UserError) else 1
    return 0


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
            with contextlib.ExitStack() as stack:
                if asked.times:
                    stack.enter_context(marking(marker()))
                    stack.enter_context(recorded(world.device))
                times.append(window.run())
            times.append(window.run())
            if asked.times:
                Path(asked.times).write_text(json.dumps(times))


if __name__ == "__main__":
    sys.exit(main())
