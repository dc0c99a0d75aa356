"""A process of its own for profilers that look at whole processes: `python -m dlscale.measure.profilers.child`.

It makes the steps of a run that the stage's settings name, in a world of its own with the children of other ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import signal
import sys
import traceback
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


def main() -> int:
    """Return the process's exit status: 0, 2 after a user's mistake, 1 after any other failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="the run's settings, or their file")
    parser.add_argument("--manifest", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--study", action="append", default=[], metavar="NAME=PATH", help="studies from outside")
    parser.add_argument("--nvtx", action="store_true", help="mark NVTX ranges, and have nsys record")
    parser.add_argument("--times", metavar="FILE", help="write the seconds of the steps: before, recorded, after")
    args = parser.parse_args()
    let_threads_wait()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    hold_on()  # the stage holds the other end of standard input
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        for study in args.study:
            registry.add(*study.split("=", 1))
        profiled(args)
    except UserError as error:
        print(f"\n{FAILED}{error}", file=sys.stderr)
        return 2
    except Exception as error:
        traceback.print_exc()
        print(f"\n{FAILED}{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def profiled(args: argparse.Namespace) -> None:
    """Warm up, then make plain steps, those that are recorded, and plain ones again."""
    run = load_run(args.config, "profile")
    with join(run.processes, args.device) as world:
        session = open_session(run, args.manifest, world, args.threads)
        if args.nvtx and not run.cuda_graph:  # a graph would replay the sum of gradients, but not the range
            session.step.strategy.around_averaging(averaged)
        with contextlib.closing(Window(run.profile, session)) as window:
            window.warm_up()
            times = [window.run()]
            world.barrier()  # all have come so far
            with contextlib.ExitStack() as stack:
                if args.nvtx:
                    stack.enter_context(marking(marker()))
                    stack.enter_context(recorded(world.device))
                times.append(window.run())
            times.append(window.run())
            if args.times:
                Path(args.times).write_text(json.dumps(times))


if __name__ == "__main__":
    sys.exit(main())
