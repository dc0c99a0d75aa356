"""Start the ranks of a run: `python -P -m dlscale.launch.ranks --nproc-per-node=4 -m dlscale train ...`.

The options have the same names as options of PyTorch's torchrun, and need an `=`. The ranks of a run on one node meet
in a private temporary folder, so that no port is opened. The ranks of a run on several nodes meet at `--rdzv-endpoint`.
Without options, the arguments are a command that starts the ranks, such as mpirun.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from types import FrameType

from dlscale.core import machine
from dlscale.core.process import MEET, ranks
from dlscale.launch.contain import FORWARDED, GRACE


def main(words: Sequence[str]) -> int:
    """Run this node's ranks to their end, and return the exit status of the first rank that failed, else 0.

    A signal counts as 128 plus its number, as in shells. After a failure, the other ranks get SIGTERM, and SIGKILL 30 s
    later. The node's number is `NODE_RANK`, or else the rank that srun or mpirun gave this process.
    """
    parser = argparse.ArgumentParser(prog="dlscale.launch.ranks")
    parser.add_argument("--nproc-per-node", type=int, default=1)
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--rdzv-endpoint", metavar="HOST:PORT")
    given = list(itertools.takewhile(lambda word: word.startswith("--"), words))
    python = words[len(given) :]  # no `--` precedes these words, because podman-hpc would drop it
    if not given:
        return become(python)
    args = parser.parse_args(given)
    each = args.nproc_per_node
    first = each * int(os.environ.get("NODE_RANK") or ranks().rank) if args.nnodes > 1 else 0
    said = {"WORLD_SIZE": args.nnodes * each, "LOCAL_WORLD_SIZE": each}
    processes, begin = list[subprocess.Popen[bytes]](), functools.partial(_begin, os.getpid())

    def send(number: int, frame: FrameType | None = None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    for number in FORWARDED:
        signal.signal(number, send)
    signal.pthread_sigmask(
        signal.SIG_BLOCK, FORWARDED
    )  # a signal waits until all ranks exist, so that each rank gets it
    with tempfile.TemporaryDirectory(prefix="dlscale-") as folder:  # its mode is 0700
        if args.nnodes > 1:
            host, _, port = args.rdzv_endpoint.rpartition(":")
            said |= {"MASTER_ADDR": host.strip("[]"), "MASTER_PORT": port}
        else:
            said |= {MEET: f"{folder}/meet"}
        for local in range(each):
            own = {**said, "RANK": first + local, "LOCAL_RANK": local}
            environment = {"OMP_NUM_THREADS": "1", **os.environ, **{name: str(value) for name, value in own.items()}}
            command = [sys.executable, *python]
            processes.append(subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=begin))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        return _wait(processes, send)


def _begin(parent: int) -> None:
    """Unblock signals, and let the kernel send SIGTERM to this process when its parent is killed."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    machine.with_parent(parent, signal.SIGTERM)


def _wait(processes: Sequence[subprocess.Popen[bytes]], send: Callable[[int], None]) -> int:
    status, end = 0, float("inf")
    while True:
        running = [process for process in processes if process.poll() is None]
        failed = [process.returncode for process in processes if process.returncode]
        if failed and not status:
            status, end = failed[0] if failed[0] > 0 else 128 - failed[0], time.monotonic() + GRACE
            send(signal.SIGTERM)
        if not running:
            return status
        for process in running if time.monotonic() > end else ():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the rank, and all processes that it started
        time.sleep(0.1)


def become(words: Sequence[str]) -> int:
    """Replace this process by a command that starts ranks, such as mpirun; return 127 if the command does not exist.

    In the arguments MASTER_ADDR=… and MASTER_PORT=…, `{host}` becomes the name of this node, which has rank 0, and
    `{port}` becomes a port that differs between runs on this machine.
    """
    host, port = socket.gethostname(), str(20000 + os.getpid() % 20000)
    if not shutil.which(words[0]):
        print(
            f"{words[0]}: no such command; load a module with MPI, or name another command in site.start",
            file=sys.stderr,
        )
        return 127
    met = [
        word.replace("{host}", host).replace("{port}", port) if word.startswith("MASTER_") else word for word in words
    ]
    os.execvp(words[0], met)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
