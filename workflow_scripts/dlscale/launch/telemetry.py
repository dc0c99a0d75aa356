"""The process that samples a node beside a stage; the stage's own process imports none of it."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from dlscale.core import board, telemetry
from dlscale.core.errors import UserError
from dlscale.core.files import explained

SAMPLER = "dlscale.measure.telemetry"
PATIENCE = 5.0  #: Seconds that a stage waits at its end for the last row.


@contextlib.contextmanager
def beside(path: Path, root: int, ranks: int, gpus: int) -> Iterator[None]:
    """Have rows written to a new file `path` while this context, and this process, last.

    Parameters
    ----------
    root
        Process that with its descendants is the run on this node: this one, or its parent if that started several.
    ranks
        Number of the run's processes on this node.
    gpus
        Number of its GPUs; 0 on a CPU.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # one that lives on, of a stage that was killed, has the old file
        file = open(path, "ab", buffering=0)  # noqa: SIM115 - as standard output
    except OSError as error:
        raise explained(error, path) from error
    words = map(str, (root, ranks, gpus))
    # In a group of its own: Ctrl-C on the terminal would end it with a traceback before it has learnt to ignore that.
    with file:
        sampler = subprocess.Popen(
            [sys.executable, "-m", SAMPLER, *words], stdin=subprocess.PIPE, stdout=file, process_group=0
        )
    assert sampler.stdin is not None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            sampler.stdin.write(b"\n")  # processes that were forked meanwhile may keep the pipe open
            sampler.stdin.close()
        try:
            sampler.wait(PATIENCE)
        except subprocess.TimeoutExpired:  # such as where a driver does not answer
            sampler.kill()
            sampler.wait()


def show(file: Path) -> None:
    """Have TensorBoard show the means, energy and throttled time of telemetry in its run's folder."""
    if file.parent.name != "telemetry" or not file.exists():
        return
    try:
        found = telemetry.summary(telemetry.read(file))
    except UserError as error:  # what was measured is there all the same
        logging.warning("%s", error)
        return
    others = {"seconds": found.seconds, "joules": found.joules, "throttled_seconds": found.throttled_seconds}
    scalars = {f"telemetry/{name}": value for name, value in (*found.means.items(), *others.items())}
    board.write(file.parents[1] / "tensorboard" / "telemetry" / file.stem, scalars)
