"""Start a process a device: `python -P -m dlscale.launch.torchrun --nproc-per-node=4 -m dlscale train ...`.

Three words, each with `=`, are those of PyTorch's torchrun, whose place it takes without its ports: the processes of
one node meet in a folder that is their user's alone, and those of several at `--rdzv-endpoint`, where the first of them
listens.

Where one fails, the others are asked to end, and ended 30 s later. Why it failed it has said itself, and which one was
killed the others say.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from types import FrameType

from dlscale.core import machine
from dlscale.core.process import MEET, ranks

#: Seconds between asking the others to end and ending them.
GRACE = 30

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(words: Sequence[str]) -> int:
    """Run all to their end; the exit status is that of the one that failed first, of one that was killed as shells say.

    `NODE_RANK` says which of several nodes this is, else what started a process on each does; else it is the first.
    """
    parser = argparse.ArgumentParser(prog="dlscale.launch.torchrun")
    parser.add_argument("--nproc-per-node", type=int, default=1)
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--rdzv-endpoint", metavar="HOST:PORT")
    given = list(itertools.takewhile(lambda word: word.startswith("--"), words))
    python = words[len(given) :]  # no `--` before them: podman-hpc leaves that word out of what it passes on
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
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until all are there to hear it
    with tempfile.TemporaryDirectory(prefix="dlscale-") as folder:  # of mode 0700
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
    """Hear signals, and be asked to end when this one's parent is killed."""
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
        if time.monotonic() > end:
            for process in running:  # and what it started
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
